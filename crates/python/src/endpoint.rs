//! Endpoints, and what the calling thread posts to them.

use std::sync::{Arc, Mutex};

use doorbell::{AbortHandle, Address, Endpoint, Executor, QueueKind, Ticket, Work};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::timeout;
use crate::detached::{Detached, Room, call, lock, queue, wait};
use crate::error::{is_gone, work_exception};
use crate::parts::{RegionParts, RemotePart};
use crate::ticket::{PyCompletion, PyTicket};

/// One end of a connection.
#[pyclass(frozen, module = "doorbell", name = "Endpoint")]
pub struct PyEndpoint {
    /// Locked only without the interpreter's lock.
    inner: Detached<Arc<Mutex<Endpoint>>>,
    abort: Detached<AbortHandle>,
    room: Room,
}

/// The options of a work request.
#[derive(Clone, Copy)]
pub struct Options {
    pub wr_id: u64,
    pub immediate: Option<u32>,
    pub signaled: bool,
}

impl Options {
    pub fn without_immediate(wr_id: u64, signaled: bool) -> Options {
        Options {
            wr_id,
            immediate: None,
            signaled,
        }
    }

    pub fn of<'a>(self, work: Work<'a>) -> Work<'a> {
        let work = work.wr_id(self.wr_id).signaled(self.signaled);
        match self.immediate {
            Some(immediate) => work.imm(immediate),
            None => work,
        }
    }
}

/// A work request without its slices.
#[derive(Clone, Copy)]
pub enum WorkKind {
    Send,
    Write(doorbell::RemoteSlice),
    Read(doorbell::RemoteSlice),
    /// With the number that is added.
    FetchAdd(doorbell::RemoteSlice, u64),
    /// With the number that is compared, and the one that is stored.
    CompareSwap(doorbell::RemoteSlice, u64, u64),
}

impl WorkKind {
    pub fn work<'a>(self, slices: &'a [doorbell::Slice<'a>]) -> Work<'a> {
        match self {
            WorkKind::Send => Work::send(slices),
            WorkKind::Write(remote) => Work::write(slices, remote),
            WorkKind::Read(remote) => Work::read(slices, remote),
            WorkKind::FetchAdd(remote, add) => Work::fetch_add(slices, remote, add),
            WorkKind::CompareSwap(remote, compare, swap) => {
                Work::compare_swap(slices, remote, compare, swap)
            }
        }
    }
}

impl PyEndpoint {
    pub fn new(endpoint: Endpoint, room: Room) -> PyEndpoint {
        PyEndpoint {
            room,
            abort: Detached::new(endpoint.abort_handle()),
            inner: Detached::new(Arc::new(Mutex::new(endpoint))),
        }
    }

    pub fn shared(&self) -> PyResult<&Arc<Mutex<Endpoint>>> {
        self.inner.get().ok_or_else(is_gone)
    }

    /// Calls the library without the interpreter's lock, and with the endpoint's.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut Endpoint) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let endpoint = self.shared()?;
        call(py, || function(&mut lock(endpoint)))
    }

    pub fn abort_handle(&self) -> PyResult<&AbortHandle> {
        self.abort.get().ok_or_else(is_gone)
    }

    /// Queues an operation on a stream.
    pub fn queue<T: Send>(
        &self,
        py: Python<'_>,
        stream: &dyn Executor,
        function: impl Fn(&mut Endpoint) -> doorbell::Result<T> + Sync,
    ) -> PyResult<T> {
        let endpoint = self.shared()?;
        queue(py, self.room, Some(stream), || {
            function(&mut lock(endpoint))
        })
    }

    /// Posts an operation.
    fn post<T: Send>(
        &self,
        py: Python<'_>,
        function: impl Fn(&mut Endpoint) -> doorbell::Result<T> + Sync,
    ) -> PyResult<T> {
        let endpoint = self.shared()?;
        queue(py, self.room, None, || function(&mut lock(endpoint)))
    }

    fn look<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&Endpoint) -> T + Send,
    ) -> PyResult<T> {
        self.with(py, |endpoint| Ok(function(endpoint)))
    }

    /// Waits without holding the endpoint's lock all the time.
    fn wait(
        &self,
        py: Python<'_>,
        kind: QueueKind,
        seconds: Option<f64>,
    ) -> PyResult<PyCompletion> {
        let endpoint = self.shared()?;
        let completion = wait(py, timeout(seconds)?, |slice| {
            lock(endpoint).wait_cq(kind, slice)
        });
        completion.map(PyCompletion)
    }

    fn poll(&self, py: Python<'_>, kind: QueueKind) -> PyResult<Option<PyCompletion>> {
        let completion = self.with(py, |endpoint| endpoint.poll_cq(kind))?;
        Ok(completion.map(PyCompletion))
    }

    fn room(&self, py: Python<'_>, kind: QueueKind) -> PyResult<u32> {
        self.with(py, |endpoint| Ok(endpoint.room(kind)))
    }
}

fn post(
    endpoint: &Bound<'_, PyEndpoint>,
    slices: &RegionParts,
    work_kind: WorkKind,
    options: Options,
) -> PyResult<PyTicket> {
    let ticket: Ticket = endpoint.get().post(endpoint.py(), |inner| {
        slices.with(|slices| inner.post_send(&options.of(work_kind.work(slices))))
    })?;
    Ok(PyTicket::new(ticket, Some(endpoint.as_any())))
}

#[pymethods]
impl PyEndpoint {
    /// What the peer needs to connect to this endpoint. A reset changes it.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let address = self.look(py, |endpoint| endpoint.address().to_bytes())?;
        Ok(PyBytes::new(py, &address))
    }

    /// The number of the queue pair.
    #[getter]
    fn qpn(&self, py: Python<'_>) -> PyResult<u32> {
        self.look(py, Endpoint::qpn)
    }

    /// Whether the endpoint is connected with a peer.
    #[getter]
    fn connected(&self, py: Python<'_>) -> PyResult<bool> {
        self.look(py, Endpoint::is_connected)
    }

    /// The component that rings the doorbells: "direct", "proxy" or "sync".
    #[getter]
    fn control(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |endpoint| endpoint.path().control.to_string())
    }

    /// Why, and why none of the better ones.
    #[getter]
    fn control_reason(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |endpoint| {
            let path = endpoint.path();
            let better = path
                .better
                .iter()
                .map(|(control, reason)| format!("; not {control}: {reason}"));
            format!("{}{}", path.reason, better.collect::<String>())
        })
    }

    /// The first failure since the last reset.
    #[getter]
    fn failure<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let failure = self.look(py, Endpoint::failure)?;
        failure
            .map(|failure| work_exception(py, &failure))
            .transpose()
    }

    /// Connects to the peer's endpoint. Both sides do so.
    fn connect(&self, py: Python<'_>, peer: &[u8]) -> PyResult<()> {
        self.with(py, |endpoint| endpoint.connect(&Address::from_bytes(peer)?))
    }

    /// Fails the endpoint and releases every wait. Another thread may be waiting for it.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let abort = self.abort_handle()?;
        py.detach(|| abort.abort());
        Ok(())
    }

    /// Returns to the initial state, with a new address.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Endpoint::reset)
    }

    /// Free places in the send queue.
    fn send_room(&self, py: Python<'_>) -> PyResult<u32> {
        self.room(py, QueueKind::Send)
    }

    /// Free places in the receive queue.
    fn recv_room(&self, py: Python<'_>) -> PyResult<u32> {
        self.room(py, QueueKind::Recv)
    }

    /// Posts a send to the peer's next receive.
    #[pyo3(signature = (slices, *, wr_id = 0, immediate = None, signaled = true))]
    fn post_send(
        slf: &Bound<'_, Self>,
        slices: RegionParts,
        wr_id: u64,
        immediate: Option<u32>,
        signaled: bool,
    ) -> PyResult<PyTicket> {
        post(
            slf,
            &slices,
            WorkKind::Send,
            Options {
                wr_id,
                immediate,
                signaled,
            },
        )
    }

    /// Posts a receive, which the peer's next send fills.
    #[pyo3(signature = (slices, *, wr_id = 0))]
    fn post_recv(slf: &Bound<'_, Self>, slices: RegionParts, wr_id: u64) -> PyResult<PyTicket> {
        let ticket = slf.get().post(slf.py(), |inner| {
            slices.with(|slices| inner.post_recv(wr_id, slices))
        })?;
        Ok(PyTicket::new(ticket, Some(slf.as_any())))
    }

    /// Posts a write to memory of the peer. With immediate data, it uses one of the peer's receives.
    #[pyo3(signature = (slices, remote, *, wr_id = 0, immediate = None, signaled = true))]
    fn post_write(
        slf: &Bound<'_, Self>,
        slices: RegionParts,
        remote: RemotePart,
        wr_id: u64,
        immediate: Option<u32>,
        signaled: bool,
    ) -> PyResult<PyTicket> {
        post(
            slf,
            &slices,
            WorkKind::Write(remote.0),
            Options {
                wr_id,
                immediate,
                signaled,
            },
        )
    }

    /// Posts a read from memory of the peer.
    #[pyo3(signature = (slices, remote, *, wr_id = 0, signaled = true))]
    fn post_read(
        slf: &Bound<'_, Self>,
        slices: RegionParts,
        remote: RemotePart,
        wr_id: u64,
        signaled: bool,
    ) -> PyResult<PyTicket> {
        let immediate = None;
        post(
            slf,
            &slices,
            WorkKind::Read(remote.0),
            Options {
                wr_id,
                immediate,
                signaled,
            },
        )
    }

    /// Adds to 8 bytes of the peer, and has their old value in `result`.
    #[pyo3(signature = (result, remote, add, *, wr_id = 0, signaled = true))]
    fn post_fetch_add(
        slf: &Bound<'_, Self>,
        result: RegionParts,
        remote: RemotePart,
        add: u64,
        wr_id: u64,
        signaled: bool,
    ) -> PyResult<PyTicket> {
        let options = Options::without_immediate(wr_id, signaled);
        post(slf, &result, WorkKind::FetchAdd(remote.0, add), options)
    }

    /// Replaces 8 bytes of the peer if they equal `compare`, and has their old value in `result`.
    #[pyo3(signature = (result, remote, compare, swap, *, wr_id = 0, signaled = true))]
    fn post_compare_swap(
        slf: &Bound<'_, Self>,
        result: RegionParts,
        remote: RemotePart,
        compare: u64,
        swap: u64,
        wr_id: u64,
        signaled: bool,
    ) -> PyResult<PyTicket> {
        let options = Options::without_immediate(wr_id, signaled);
        let work_kind = WorkKind::CompareSwap(remote.0, compare, swap);
        post(slf, &result, work_kind, options)
    }

    /// The next completion of the send queue, if it is there.
    fn poll_send(&self, py: Python<'_>) -> PyResult<Option<PyCompletion>> {
        self.poll(py, QueueKind::Send)
    }

    /// The next completion of the receive queue, if it is there.
    fn poll_recv(&self, py: Python<'_>) -> PyResult<Option<PyCompletion>> {
        self.poll(py, QueueKind::Recv)
    }

    /// Waits for the next completion of the send queue.
    #[pyo3(signature = (timeout = None))]
    fn wait_send(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PyCompletion> {
        self.wait(py, QueueKind::Send, timeout)
    }

    /// Waits for the next completion of the receive queue.
    #[pyo3(signature = (timeout = None))]
    fn wait_recv(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PyCompletion> {
        self.wait(py, QueueKind::Recv, timeout)
    }
}
