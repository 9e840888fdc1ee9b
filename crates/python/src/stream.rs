//! Streams: what they execute is queued, and none of these calls waits for it but those that say so.
#![allow(unsafe_code)] // takes streams of other libraries by their handles

use std::panic::resume_unwind;
use std::time::Duration;

use doorbell::{
    Endpoint, Event, Executor, HostStream, QueueKind, Region, RegionSpan, RemoteSlice, Slice,
    Ticket, stream_wait_count64, stream_wait_value32, stream_wait_value64, stream_write_value32,
    stream_write_value64,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{Comparison, deadline, timeout};
use crate::detached::{Detached, Room, await_room, call, queue, wait};
use crate::endpoint::{Options, PyEndpoint, WorkKind};
#[cfg(not(feature = "cuda"))]
use crate::error::state_exception;
use crate::error::{is_gone, to_exception};
use crate::exit;
use crate::operations::{TakesOperations, operation_methods};
use crate::parts::{RegionParts, RemotePart};
use crate::region::PyRegion;
use crate::ticket::{PyTicket, awaited, notify};
#[cfg(not(feature = "cuda"))]
use doorbell::StateKind;

/// The stream of the library.
enum AnyStream {
    Host(HostStream),
    #[cfg(feature = "cuda")]
    Cuda(doorbell::CudaStream),
}

impl AnyStream {
    fn executor(&self) -> &dyn Executor {
        match self {
            AnyStream::Host(stream) => stream,
            #[cfg(feature = "cuda")]
            AnyStream::Cuda(stream) => stream,
        }
    }

    fn launch(&self, function: impl FnOnce() + Send + 'static) -> doorbell::Result<()> {
        match self {
            AnyStream::Host(stream) => stream.launch(function),
            #[cfg(feature = "cuda")]
            AnyStream::Cuda(stream) => stream.launch_host(function),
        }
    }
}

/// A stream of any kind.
#[pyclass(frozen, subclass, module = "doorbell", name = "Stream")]
pub struct PyStream(Detached<AnyStream>);

impl PyStream {
    fn inner(&self) -> PyResult<&AnyStream> {
        self.0.get().ok_or_else(is_gone)
    }

    pub fn executor(&self) -> PyResult<&dyn Executor> {
        Ok(self.inner()?.executor())
    }

    /// The stream of CUDA.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> PyResult<&doorbell::CudaStream> {
        match self.inner()? {
            AnyStream::Cuda(stream) => Ok(stream),
            AnyStream::Host(_) => Err(PyTypeError::new_err("a `CudaStream` is needed")),
        }
    }

    /// Queues with the endpoint's lock, once the stream has room.
    fn queue(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        function: impl Fn(&mut Endpoint, &dyn Executor) -> doorbell::Result<Ticket> + Sync,
    ) -> PyResult<PyTicket> {
        let executor = self.executor()?;
        let ticket = endpoint
            .get()
            .queue(endpoint.py(), executor, |inner| function(inner, executor))?;
        Ok(PyTicket::new(ticket, Some(endpoint.as_any())))
    }

    /// Queues something that is of no endpoint, once the stream has room.
    fn queue_value(
        &self,
        py: Python<'_>,
        function: impl Fn(&dyn Executor) -> doorbell::Result<Ticket> + Sync,
    ) -> PyResult<PyTicket> {
        let executor = self.executor()?;
        let ticket = queue(py, Room::NONE, Some(executor), || function(executor))?;
        Ok(PyTicket::new(ticket, None))
    }
}

impl TakesOperations for PyStream {
    type Taken = PyTicket;

    fn take_work(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        work_kind: WorkKind,
        options: Options,
    ) -> PyResult<PyTicket> {
        self.queue(endpoint, |inner, executor| {
            slices.with(|slices| {
                inner.stream_queue_send(executor, &options.of(work_kind.work(slices)))
            })
        })
    }

    fn take_recv(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        wr_id: u64,
    ) -> PyResult<PyTicket> {
        self.queue(endpoint, |inner, executor| {
            slices.with(|slices| inner.stream_queue_recv(executor, wr_id, slices))
        })
    }

    fn take_wait(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        kind: QueueKind,
        seconds: Option<f64>,
    ) -> PyResult<PyTicket> {
        let deadline = deadline(seconds)?;
        self.queue(endpoint, |inner, executor| match deadline {
            Some(deadline) => inner.stream_wait_cq_for(executor, kind, deadline),
            None => inner.stream_wait_cq(executor, kind),
        })
    }
}

operation_methods!(PyStream, PyTicket: queue_send, queue_recv, queue_write, queue_read, queue_fetch_add, queue_compare_swap);

/// Pages for the peer, as those of the library.
struct PushedPages<'a> {
    page_bytes: u32,
    local: RegionSpan<'a>,
    remote: RemoteSlice,
    table: Slice<'a>,
    count: (&'a Region, u64),
    signal: RemoteSlice,
}

impl PushedPages<'_> {
    #[cfg(feature = "cuda")]
    fn queue(self, endpoint: &mut Endpoint, stream: &dyn Executor) -> doorbell::Result<Ticket> {
        let push = doorbell::PagePush {
            page_bytes: self.page_bytes,
            local: self.local,
            remote: self.remote,
            table: self.table,
            count: self.count,
            signal: self.signal,
        };
        endpoint.stream_push_pages(stream, &push)
    }

    #[cfg(not(feature = "cuda"))]
    fn queue(self, _endpoint: &mut Endpoint, _stream: &dyn Executor) -> doorbell::Result<Ticket> {
        let _ = (
            self.page_bytes,
            self.local,
            self.remote,
            self.table,
            self.count,
            self.signal,
        );
        let reason = "this package was built without the feature `cuda`";
        Err(doorbell::Error::state(
            StateKind::Unsupported,
            "push pages",
            reason,
        ))
    }
}

/// Calls a function of a stream. Its exception is the stream's fault, as a panic is: what is queued behind it is not executed.
fn call_function(function: Py<PyAny>) {
    let failure = exit::attach(|py| {
        let result = function.call0(py);
        drop(function);
        result.err().map(|error| error.to_string())
    });
    match failure {
        Some(None) => {}
        Some(Some(text)) => resume_unwind(Box::new(text)),
        None => resume_unwind(Box::new("the Python interpreter has ended".to_owned())),
    }
}

#[pymethods]
impl PyStream {
    /// The name of the stream, which errors have.
    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.inner()?.executor().name())
    }

    /// Has a kernel of a CUDA stream write the pages that a table in memory names to the peer, and then a signal.
    #[pyo3(signature = (endpoint, page_bytes, local, remote, table, count, signal))]
    #[expect(clippy::too_many_arguments, reason = "an operation has them")]
    fn push_pages(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        page_bytes: u32,
        local: RegionParts,
        remote: RemotePart,
        table: RegionParts,
        count: (Bound<'_, PyRegion>, u64),
        signal: RemotePart,
    ) -> PyResult<PyTicket> {
        let (count_region, count_offset) = (count.0.get().inner()?, count.1);
        self.queue(endpoint, |inner, executor| {
            let push = PushedPages {
                page_bytes,
                local: local.one_span("local")?,
                remote: remote.0,
                table: table.one("table")?,
                count: (count_region, count_offset),
                signal: signal.0,
            };
            push.queue(inner, executor)
        })
    }

    /// Stores a 32-bit number into a region.
    fn write_value(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u32,
    ) -> PyResult<PyTicket> {
        let region = region.get().inner()?;
        self.queue_value(py, |stream| {
            stream_write_value32(stream, region, offset, value)
        })
    }

    /// The same of a 64-bit number.
    fn write_value64(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u64,
    ) -> PyResult<PyTicket> {
        let region = region.get().inner()?;
        self.queue_value(py, |stream| {
            stream_write_value64(stream, region, offset, value)
        })
    }

    /// The same of a 64-bit number.
    #[pyo3(signature = (region, offset, value, timeout = None, *, condition = ">="))]
    fn wait_value64(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u64,
        timeout: Option<f64>,
        condition: &str,
    ) -> PyResult<PyTicket> {
        let region = region.get().inner()?;
        let (deadline, condition) = (
            self::timeout(timeout)?,
            Comparison::of_name(condition)?.of64(value),
        );
        self.queue_value(py, |stream| {
            stream_wait_value64(stream, region, offset, condition, deadline)
        })
    }

    /// Makes work that is queued later wait until a 64-bit count has reached `first`, and `step` more with each further launch of a captured graph.
    #[pyo3(signature = (region, offset, first, step, timeout = None))]
    fn wait_count64(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        first: u64,
        step: u64,
        timeout: Option<f64>,
    ) -> PyResult<PyTicket> {
        let region = region.get().inner()?;
        let deadline = self::timeout(timeout)?;
        self.queue_value(py, |stream| {
            stream_wait_count64(stream, region, offset, (first, step), deadline)
        })
    }

    /// Makes work that is queued later wait until a 32-bit number in a region is not below `value`, or another condition holds.
    #[pyo3(signature = (region, offset, value, timeout = None, *, condition = ">="))]
    fn wait_value(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u32,
        timeout: Option<f64>,
        condition: &str,
    ) -> PyResult<PyTicket> {
        let region = region.get().inner()?;
        let (deadline, condition) = (
            self::timeout(timeout)?,
            Comparison::of_name(condition)?.of32(value),
        );
        self.queue_value(py, |stream| {
            stream_wait_value32(stream, region, offset, condition, deadline)
        })
    }

    /// Calls a function in the stream's turn, from another thread. Its exception is a fault of the stream.
    fn launch(&self, function: &Bound<'_, PyAny>) -> PyResult<()> {
        if !function.is_callable() {
            return Err(PyTypeError::new_err("the function cannot be called"));
        }
        let stream = self.inner()?;
        let kept = function.clone().unbind();
        await_room(function.py(), stream.executor())?;
        call(function.py(), || stream.launch(move || call_function(kept)))
    }

    /// An event that stands for the work that is queued so far.
    fn record(&self, py: Python<'_>) -> PyResult<PyEvent> {
        let stream = self.inner()?;
        let event = Event::blocking();
        await_room(py, stream.executor())?;
        call(py, || stream.executor().record(&event))?;
        Ok(PyEvent(Detached::new(event)))
    }

    /// Makes work that is queued later wait for an event: of this package, or of CUDA, as `torch.cuda.Event` has it.
    fn wait_event(&self, event: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, stream) = (event.py(), self.inner()?);
        if let Ok(event) = event.cast::<PyEvent>() {
            let event = event.get().inner()?;
            await_room(py, stream.executor())?;
            return call(py, || stream.executor().wait_event(event));
        }
        let handle = event_handle_of(event)?;
        await_room(py, stream.executor())?;
        wait_cuda_event(stream, event, handle)
    }

    /// Whether all work that is queued so far is done.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let stream = self.inner()?;
        call(py, || stream.executor().query())
    }

    /// Waits until all work that is queued now is done.
    #[pyo3(signature = (timeout = None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let stream = self.inner()?;
        wait(py, self::timeout(timeout)?, |slice| {
            stream.executor().synchronize(slice)
        })
    }

    /// Discards what is queued, and breaks the wait that the stream is in.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.inner()?;
        py.detach(|| match stream {
            AnyStream::Host(stream) => stream.abort(),
            #[cfg(feature = "cuda")]
            AnyStream::Cuda(stream) => stream.abort(),
        });
        Ok(())
    }

    /// Clears the fault of the stream and returns it.
    fn take_fault(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let stream = self.inner()?;
        let fault = py.detach(|| stream.executor().take_fault());
        Ok(fault.map(|fault| to_exception(py, fault)))
    }
}

/// A stream that a thread of the host executes.
#[pyclass(frozen, extends = PyStream, module = "doorbell", name = "HostStream")]
pub struct PyHostStream;

#[pymethods]
impl PyHostStream {
    #[new]
    #[pyo3(signature = (name = "python"))]
    fn new(py: Python<'_>, name: &str) -> PyResult<PyClassInitializer<PyHostStream>> {
        let stream = call(py, || HostStream::new(name))?;
        let base = PyStream(Detached::new(AnyStream::Host(stream)));
        Ok(PyClassInitializer::from(base).add_subclass(PyHostStream))
    }
}

/// A stream of CUDA that the application has created. It keeps the object that has it, also after its own end until the work is done.
#[pyclass(frozen, extends = PyStream, module = "doorbell", name = "CudaStream")]
pub struct PyCudaStream {
    handle: usize,
}

/// The `cudaStream_t` of an object.
fn handle_of(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    // torch; cuda.core; cupy.
    if let Some(handle) = object.getattr_opt("cuda_stream")? {
        return handle.extract();
    }
    if let Some(protocol) = object.getattr_opt("__cuda_stream__")? {
        let (_version, handle): (u32, usize) = protocol.call0()?.extract()?;
        return Ok(handle);
    }
    if let Some(handle) = object.getattr_opt("ptr")? {
        return handle.extract();
    }
    object.extract().map_err(|_| {
        PyTypeError::new_err(
            "a CUDA stream has `cuda_stream`, `__cuda_stream__` or `ptr`, or is a number",
        )
    })
}

#[pymethods]
impl PyCudaStream {
    #[new]
    #[pyo3(signature = (stream, name = "python"))]
    fn new(stream: &Bound<'_, PyAny>, name: &str) -> PyResult<PyClassInitializer<PyCudaStream>> {
        let handle = handle_of(stream)?;
        let inner = open(stream, handle, name)?;
        let class = PyCudaStream { handle };
        let base = PyStream(Detached::new(inner));
        Ok(PyClassInitializer::from(base).add_subclass(class))
    }

    /// The `cudaStream_t`, as a number.
    #[getter]
    fn handle(&self) -> usize {
        self.handle
    }
}

#[cfg(feature = "cuda")]
fn open(object: &Bound<'_, PyAny>, handle: usize, name: &str) -> PyResult<AnyStream> {
    use doorbell::{CudaContext, CudaStream};

    // The library drops it without the interpreter's lock. pyo3 then gives up the reference when a thread next takes the lock for this package.
    let owner = object.clone().unbind();
    let stream = call(object.py(), move || {
        let raw = std::ptr::with_exposed_provenance_mut(handle);
        // SAFETY: a stream that the caller names, and which `owner` has; docs/python.md has one that is a number stay until its work is done.
        let context = unsafe { CudaContext::of_stream(raw) }?;
        // SAFETY: as above.
        unsafe { CudaStream::from_owner(&context, raw, name, Box::new(owner)) }
    })?;
    Ok(AnyStream::Cuda(stream))
}

#[cfg(not(feature = "cuda"))]
fn open(object: &Bound<'_, PyAny>, _handle: usize, _name: &str) -> PyResult<AnyStream> {
    Err(state_exception(
        object.py(),
        StateKind::Unsupported,
        "CudaStream",
        "this package was built without the feature `cuda`",
    ))
}

/// The `cudaEvent_t` of an object.
fn event_handle_of(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    // torch; cupy.
    for name in ["cuda_event", "ptr"] {
        if let Some(handle) = object.getattr_opt(name)? {
            return handle.extract();
        }
    }
    object.extract().map_err(|_| {
        PyTypeError::new_err(
            "an event is one of this package, has `cuda_event` or `ptr`, or is a number",
        )
    })
}

#[cfg(feature = "cuda")]
fn wait_cuda_event(stream: &AnyStream, event: &Bound<'_, PyAny>, handle: usize) -> PyResult<()> {
    use doorbell::{CudaContext, Error};

    let py = event.py();
    // torch creates an event with its first record, and waits for none that was never recorded.
    if handle == 0 && event.hasattr("cuda_event")? {
        return call(py, || stream.executor().wait_event(&Event::new()));
    }
    let raw = || std::ptr::with_exposed_provenance_mut(handle);
    match stream {
        AnyStream::Host(stream) => {
            // Of torch, whose thread may have made no context current yet.
            let device: Option<u32> = match event.getattr_opt("device")? {
                Some(device) => device
                    .getattr_opt("index")?
                    .and_then(|index| index.extract().ok()),
                None => None,
            };
            let kept = event.clone().unbind();
            call(py, move || {
                let context = match (CudaContext::current(), device) {
                    (Err(Error::State { .. }), Some(device)) => CudaContext::primary(device)?,
                    (context, _) => context?,
                };
                // SAFETY: an event that the caller names, and which `kept` has; docs/python.md has one that is a number stay until the wait is over.
                unsafe { stream.wait_cuda_event(&context, raw(), kept) }
            })
        }
        // SAFETY: an event that the caller names, whose object is there during the call.
        AnyStream::Cuda(stream) => call(py, || unsafe { stream.wait_cuda_event(raw()) }),
    }
}

#[cfg(not(feature = "cuda"))]
fn wait_cuda_event(_: &AnyStream, event: &Bound<'_, PyAny>, _: usize) -> PyResult<()> {
    Err(state_exception(
        event.py(),
        StateKind::Unsupported,
        "wait_event",
        "this package was built without the feature `cuda`",
    ))
}

/// A mark in the work of a stream.
#[pyclass(frozen, module = "doorbell", name = "Event")]
pub struct PyEvent(Detached<Event>);

impl PyEvent {
    pub fn inner(&self) -> PyResult<&Event> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyEvent {
    /// Whether the stream has passed it.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let event = self.inner()?;
        call(py, || event.query())
    }

    /// Waits until the stream has passed it.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let event = self.inner()?;
        wait(py, self::timeout(timeout)?, |slice: Option<Duration>| {
            event.synchronize(slice)
        })
    }

    /// Adds 1 to an eventfd when the stream has passed it.
    fn notify(&self, py: Python<'_>, descriptor: i32) -> PyResult<()> {
        let event = self.inner()?;
        notify(py, descriptor, |descriptor| event.notify(descriptor))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        awaited(slf)
    }
}
