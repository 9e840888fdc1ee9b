//! Graphs of the library, over CUDA's.
#![allow(unsafe_code)] // a builder stays in its thread, which the compiler does not see

use std::cell::{RefCell, RefMut};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use doorbell::{
    Access, Communicator, Endpoint, GraphBuilder, GraphExec, GraphMember, MessageQueue, QueueKind,
    StateKind,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{Comparison, deadline, timeout};
use crate::collective::{PyCollective, PyCollectiveTicket, PyCommunicator};
use crate::detached::{Detached, call, lock};
use crate::endpoint::{Options, PyEndpoint, WorkKind};
use crate::error::{is_gone, state_exception};
use crate::memory::{ArrayMemory, MemoryUse, slices};
use crate::message::{PyMessageQueue, PyMessageTicket, PySharedQueue, taken};
use crate::operations::{TakesOperations, operation_methods};
use crate::parts::{RegionParts, RemotePart};
use crate::region::PyRegion;
use crate::stream::{PyCudaStream, PyStream};
use crate::ticket::PyTicket;

/// What the operations of a graph belong to: each launch needs it.
#[derive(Default)]
struct RecordedMembers {
    endpoints: Vec<Arc<Mutex<Endpoint>>>,
    queues: Vec<PySharedQueue>,
    communicators: Vec<Arc<Mutex<Communicator>>>,
}

/// Adds one that is not there, in the order of the addresses: all graphs lock in the same order.
fn add<T>(members: &mut Vec<Arc<T>>, member: &Arc<T>) {
    let address = |it: &Arc<T>| Arc::as_ptr(it).addr();
    if let Err(at) = members.binary_search_by_key(&address(member), address) {
        members.insert(at, Arc::clone(member));
    }
}

impl RecordedMembers {
    /// Calls with all of them.
    fn with<T>(
        &self,
        function: impl FnOnce(&mut [&mut dyn GraphMember]) -> doorbell::Result<T>,
    ) -> doorbell::Result<T> {
        let mut endpoints: Vec<_> = self.endpoints.iter().map(|it| lock(it)).collect();
        let mut queues: Vec<_> = self.queues.iter().map(|it| lock(it)).collect();
        let mut communicators: Vec<_> = self.communicators.iter().map(|it| lock(it)).collect();
        let mut all: Vec<&mut dyn GraphMember> = Vec::new();
        for endpoint in &mut endpoints {
            all.push(&mut **endpoint);
        }
        for queue in &mut queues {
            all.push(taken(queue)?);
        }
        for communicator in &mut communicators {
            all.push(&mut **communicator);
        }
        function(&mut all)
    }
}

struct Recorder {
    builder: GraphBuilder,
    members: RecordedMembers,
}

/// Records operations of a graph. The driver captures for one thread, so it stays in the thread that has made it.
#[pyclass(frozen, module = "doorbell", name = "GraphBuilder")]
pub struct PyGraphBuilder {
    thread: ThreadId,
    /// Used by that thread only.
    recorder: SameThread<RefCell<Option<Recorder>>>,
}

/// What only one thread uses: that of a builder, or the one that releases the interpreter's lock and calls a closure.
struct SameThread<T>(T);

// SAFETY: `PyGraphBuilder` looks at the thread before each use, and `Python::detach` calls its closure in the calling thread.
unsafe impl<T> Send for SameThread<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SameThread<T> {}

impl<T> SameThread<T> {
    fn into_inner(self) -> T {
        self.0
    }
}

impl Drop for PyGraphBuilder {
    fn drop(&mut self) {
        let is_own = self.thread == thread::current().id();
        let recorder = self.recorder.0.get_mut();
        // It may have the last handle of an endpoint.
        let last = SameThread(recorder.take());
        let _ = Python::try_attach(|py| {
            py.detach(move || match last.into_inner() {
                Some(Recorder { builder, members }) if !is_own => {
                    // The driver ends a capture for its thread only.
                    std::mem::forget(builder);
                    drop(members);
                }
                last => drop(last),
            });
        });
    }
}

fn is_instantiated(py: Python<'_>) -> PyErr {
    let reason = "the graph is instantiated";
    state_exception(py, StateKind::Taken, "use of the graph builder", reason)
}

impl PyGraphBuilder {
    /// The recorder, in its thread.
    fn recorder(&self, py: Python<'_>) -> PyResult<RefMut<'_, Option<Recorder>>> {
        if self.thread == thread::current().id() {
            return Ok(self.recorder.0.borrow_mut());
        }
        let reason = "it stays in the thread that has made it, for which the driver captures";
        let operation = "use of the graph builder";
        Err(state_exception(py, StateKind::WrongKind, operation, reason))
    }

    fn record(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut Recorder) -> doorbell::Result<()> + Send,
    ) -> PyResult<()> {
        let mut recorder = self.recorder(py)?;
        let recorder = recorder.as_mut().ok_or_else(|| is_instantiated(py))?;
        let recorder = SameThread(recorder);
        call(py, move || function(recorder.into_inner()))
    }

    fn of_endpoint(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        function: impl FnOnce(&mut GraphBuilder, &mut Endpoint) -> doorbell::Result<()> + Send,
    ) -> PyResult<()> {
        let shared = endpoint.get().shared()?;
        self.record(endpoint.py(), |recorder| {
            function(&mut recorder.builder, &mut lock(shared))?;
            add(&mut recorder.members.endpoints, shared);
            Ok(())
        })
    }

    fn of_queue(
        &self,
        queue: &Bound<'_, PyMessageQueue>,
        function: impl FnOnce(&mut GraphBuilder, &mut MessageQueue) -> doorbell::Result<()> + Send,
    ) -> PyResult<()> {
        let shared = queue.get().shared()?;
        self.record(queue.py(), |recorder| {
            function(&mut recorder.builder, taken(&mut lock(shared))?)?;
            add(&mut recorder.members.queues, shared);
            Ok(())
        })
    }
}

impl TakesOperations for PyGraphBuilder {
    type Taken = ();

    fn take_work(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        work_kind: WorkKind,
        options: Options,
    ) -> PyResult<()> {
        self.of_endpoint(endpoint, |builder, endpoint| {
            slices.with(|slices| builder.send(endpoint, &options.of(work_kind.work(slices))))
        })
    }

    fn take_recv(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        wr_id: u64,
    ) -> PyResult<()> {
        self.of_endpoint(endpoint, |builder, endpoint| {
            slices.with(|slices| builder.recv(endpoint, wr_id, slices))
        })
    }

    fn take_wait(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        kind: QueueKind,
        seconds: Option<f64>,
    ) -> PyResult<()> {
        let deadline = deadline(seconds)?;
        self.of_endpoint(endpoint, |builder, endpoint| match deadline {
            Some(deadline) => builder.wait_cq_for(endpoint, kind, deadline),
            None => builder.wait_cq(endpoint, kind),
        })
    }
}

operation_methods!(PyGraphBuilder, (): send, recv, write, read, fetch_add, compare_swap);

#[pymethods]
impl PyGraphBuilder {
    /// Begins to capture a stream: everything that is queued on it from now on is in the graph.
    #[staticmethod]
    fn capture(stream: &Bound<'_, PyCudaStream>) -> PyResult<PyGraphBuilder> {
        let inner = stream.as_super().get().cuda()?;
        let builder = call(stream.py(), || GraphBuilder::capture(inner).map(SameThread))?;
        let recorder = Recorder {
            builder: builder.into_inner(),
            members: RecordedMembers::default(),
        };
        Ok(PyGraphBuilder {
            thread: thread::current().id(),
            recorder: SameThread(RefCell::new(Some(recorder))),
        })
    }

    /// The value is the same with each launch.
    fn write_value(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u32,
    ) -> PyResult<()> {
        let region = region.get().inner()?;
        self.record(py, |recorder| {
            recorder.builder.write_value32(region, offset, value)
        })
    }

    /// The value is the same with each launch.
    #[pyo3(signature = (region, offset, value, timeout = None, *, condition = ">="))]
    fn wait_value(
        &self,
        py: Python<'_>,
        region: &Bound<'_, PyRegion>,
        offset: u64,
        value: u32,
        timeout: Option<f64>,
        condition: &str,
    ) -> PyResult<()> {
        let region = region.get().inner()?;
        let condition = Comparison::of_name(condition)?.of32(value);
        let deadline = self::timeout(timeout)?;
        self.record(py, |recorder| {
            let builder = &mut recorder.builder;
            builder.wait_value32(region, offset, condition, deadline)
        })
    }

    /// Adds a message, and a wait until its memory may be used again.
    fn send_message(
        &self,
        queue: &Bound<'_, PyMessageQueue>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = of_message(queue, memory)?;
        self.of_queue(queue, |builder, queue| {
            builder.send_message(queue, &slices(&memory)?)
        })
    }

    /// Adds a message, and no wait.
    fn start_message(
        &self,
        queue: &Bound<'_, PyMessageQueue>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = of_message(queue, memory)?;
        self.of_queue(queue, |builder, queue| {
            builder.start_message(queue, &slices(&memory)?)
        })
    }

    /// Adds the waits for all messages of the queue that were started and have none.
    fn wait_messages(&self, queue: &Bound<'_, PyMessageQueue>) -> PyResult<()> {
        self.of_queue(queue, GraphBuilder::wait_messages)
    }

    /// Adds a receive of a message into memory.
    fn recv_message(
        &self,
        queue: &Bound<'_, PyMessageQueue>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = ArrayMemory::several(
            queue.get().domain()?,
            memory,
            Access::LOCAL_WRITE,
            MemoryUse::OnStream,
        )?;
        self.of_queue(queue, |builder, queue| {
            builder.recv_message(queue, &slices(&memory)?)
        })
    }

    /// Adds the launch of a collective operation.
    fn collective(
        &self,
        communicator: &Bound<'_, PyCommunicator>,
        collective: &Bound<'_, PyCollective>,
    ) -> PyResult<()> {
        let shared = communicator.get().shared()?;
        let collective = collective.get().shared()?;
        self.record(communicator.py(), |recorder| {
            let mut communicator = lock(shared);
            let collective = lock(collective).clone();
            recorder
                .builder
                .collective(&mut communicator, &collective)?;
            add(&mut recorder.members.communicators, shared);
            Ok(())
        })
    }

    /// Ends the recording. The graph is armed for its first launch.
    fn instantiate(&self, py: Python<'_>) -> PyResult<PyGraphExec> {
        let recorder = self.recorder(py)?.take();
        let recorder = SameThread(recorder.ok_or_else(|| is_instantiated(py))?);
        let launched = call(py, move || {
            let Recorder { builder, members } = recorder.into_inner();
            let exec = builder.instantiate()?;
            Ok(Launcher { exec, members })
        })?;
        Ok(PyGraphExec(Detached::new(Mutex::new(launched))))
    }
}

struct Launcher {
    exec: GraphExec,
    members: RecordedMembers,
}

/// A graph that can be launched any number of times. It keeps what was recorded.
#[pyclass(frozen, module = "doorbell", name = "GraphExec")]
pub struct PyGraphExec(Detached<Mutex<Launcher>>);

impl PyGraphExec {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut GraphExec, &RecordedMembers) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let launcher = self.0.get().ok_or_else(is_gone)?;
        call(py, || {
            let mut launcher = lock(launcher);
            let Launcher { exec, members } = &mut *launcher;
            function(exec, members)
        })
    }
}

fn cuda<'a>(stream: &'a Bound<'_, PyStream>) -> PyResult<&'a doorbell::CudaStream> {
    let found = stream.get().cuda();
    found.map_err(|_| PyTypeError::new_err("a graph is launched on a `CudaStream`"))
}

#[pymethods]
impl PyGraphExec {
    /// Prepares the operations of the next launch, unless they are prepared, and launches it.
    fn launch(&self, stream: &Bound<'_, PyStream>) -> PyResult<()> {
        let cuda = cuda(stream)?;
        self.with(stream.py(), |exec, members| {
            members.with(|members| exec.launch(cuda, members))
        })
    }

    /// Prepares the operations of the next launch.
    fn arm(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |exec, members| {
            members.with(|members| exec.arm(members))
        })
    }

    /// Takes the preparation of the next launch back, so that other work can be posted before it.
    fn disarm(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |exec, members| {
            members.with(|members| exec.disarm(members))
        })
    }

    /// Launches what is armed, once.
    fn launch_armed(&self, stream: &Bound<'_, PyStream>) -> PyResult<()> {
        let cuda = cuda(stream)?;
        self.with(stream.py(), |exec, _members| exec.launch_armed(cuda))
    }

    /// Whether the next launch is prepared.
    #[getter]
    fn armed(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |exec, _members| Ok(exec.is_armed()))
    }

    /// The tickets of the last launch, one for each operation of an endpoint or on a word.
    #[getter]
    fn tickets(&self, py: Python<'_>) -> PyResult<Vec<PyTicket>> {
        let tickets = self.with(py, |exec, _members| Ok(exec.tickets().to_vec()))?;
        let all = tickets.into_iter();
        Ok(all.map(|ticket| PyTicket::new(ticket, None)).collect())
    }

    /// The same of its messages.
    #[getter]
    fn message_tickets(&self, py: Python<'_>) -> PyResult<Vec<PyMessageTicket>> {
        let tickets = self.with(py, |exec, _members| Ok(exec.message_tickets().to_vec()))?;
        Ok(tickets.into_iter().map(PyMessageTicket::new).collect())
    }

    /// The same of its collective operations.
    #[getter]
    fn collective_tickets(&self, py: Python<'_>) -> PyResult<Vec<PyCollectiveTicket>> {
        let tickets = self.with(py, |exec, _members| Ok(exec.collective_tickets().to_vec()))?;
        Ok(tickets.into_iter().map(PyCollectiveTicket::new).collect())
    }
}

/// Memory that a message is sent from.
fn of_message(
    queue: &Bound<'_, PyMessageQueue>,
    memory: &Bound<'_, PyAny>,
) -> PyResult<Vec<ArrayMemory>> {
    ArrayMemory::several(
        queue.get().domain()?,
        memory,
        Access::REMOTE_READ,
        MemoryUse::OnStream,
    )
}
