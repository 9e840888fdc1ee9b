//! Messages: queues of them, and their tickets.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use doorbell::{
    AbortHandle, Access, Error, Executor, MessageAddress, MessageQueue, MessageTicket, PendingSend,
    PostedSend, ProtectionDomain, StateKind,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::timeout;
use crate::detached::{Detached, Room, call, lock, queue, wait};
use crate::error::{is_gone, work_exception};
use crate::memory::{ArrayMemory, MemoryUse, slices};
use crate::stream::PyStream;
use crate::ticket::ticket_methods;

/// The queue, until a communicator or a matcher takes it.
pub type PySharedQueue = Arc<Mutex<Option<MessageQueue>>>;

/// One end of a connection for messages.
#[pyclass(frozen, module = "doorbell", name = "MessageQueue")]
pub struct PyMessageQueue {
    /// Locked only without the interpreter's lock.
    inner: Detached<PySharedQueue>,
    abort: Detached<AbortHandle>,
    domain: Detached<ProtectionDomain>,
    room: Room,
}

/// Of memory that is sent: longer messages are read.
const SENT: Access = Access::REMOTE_READ;

fn is_taken() -> Error {
    Error::state(
        StateKind::Taken,
        "use of the message queue",
        "a communicator or a matcher has it",
    )
}

pub fn taken(queue: &mut Option<MessageQueue>) -> doorbell::Result<&mut MessageQueue> {
    queue.as_mut().ok_or_else(is_taken)
}

/// The order in which a call locks several queues, so that no two calls wait for each other: that of their addresses.
fn lock_order(shared: &[&PySharedQueue]) -> PyResult<Vec<usize>> {
    let mut order: Vec<usize> = (0..shared.len()).collect();
    order.sort_by_key(|at| shared.get(*at).map(|queue| Arc::as_ptr(queue).addr()));
    let is_twice = |pair: &[usize]| matches!(pair, [a, b] if shared.get(*a).zip(shared.get(*b)).is_some_and(|(a, b)| Arc::ptr_eq(a, b)));
    if order.windows(2).any(is_twice) {
        return Err(PyValueError::new_err("a queue is there twice"));
    }
    Ok(order)
}

/// Makes something of queues, which it takes. `check` looks at them before: if it fails, or if a queue was taken before, all of them stay where they are.
pub fn make_of_queues<T: Send>(
    py: Python<'_>,
    queues: &[Option<Bound<'_, PyMessageQueue>>],
    check: impl FnOnce(&mut [Option<&mut MessageQueue>]) -> doorbell::Result<()> + Send,
    make: impl FnOnce(Vec<Option<MessageQueue>>) -> doorbell::Result<T> + Send,
) -> PyResult<T> {
    let given = queues.iter().enumerate();
    let given = given.filter_map(|(place, queue)| Some((place, queue.as_ref()?.get())));
    let (places, given): (Vec<usize>, Vec<&PyMessageQueue>) = given.unzip();
    let shared = given.into_iter().map(PyMessageQueue::shared);
    let shared = shared.collect::<PyResult<Vec<_>>>()?;
    let order = lock_order(&shared)?;
    let count = queues.len();
    call(py, || {
        let locked = |at: &usize| Some((*places.get(*at)?, lock(shared.get(*at)?)));
        let mut guards: Vec<_> = order.iter().filter_map(locked).collect();
        let mut looked_at: Vec<Option<&mut MessageQueue>> = (0..count).map(|_| None).collect();
        for (place, queue) in &mut guards {
            if let Some(entry) = looked_at.get_mut(*place) {
                *entry = Some(taken(queue)?);
            }
        }
        check(&mut looked_at)?;
        let mut all: Vec<Option<MessageQueue>> = (0..count).map(|_| None).collect();
        for (place, queue) in &mut guards {
            if let Some(entry) = all.get_mut(*place) {
                *entry = queue.take();
            }
        }
        drop(guards);
        make(all)
    })
}

impl PyMessageQueue {
    pub fn new(queue: MessageQueue, room: Room) -> PyMessageQueue {
        PyMessageQueue {
            room,
            abort: Detached::new(queue.abort_handle()),
            domain: Detached::new(queue.domain().clone()),
            inner: Detached::new(Arc::new(Mutex::new(Some(queue)))),
        }
    }

    pub fn shared(&self) -> PyResult<&PySharedQueue> {
        self.inner.get().ok_or_else(is_gone)
    }

    pub fn domain(&self) -> PyResult<&ProtectionDomain> {
        self.domain.get().ok_or_else(is_gone)
    }

    /// Calls the library without the interpreter's lock, and with the queue's.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut MessageQueue) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let queue = self.shared()?;
        call(py, || function(taken(&mut lock(queue))?))
    }

    pub fn room(&self) -> Room {
        self.room
    }

    /// Queues something on a stream.
    fn queue<T: Send>(
        &self,
        stream: &Bound<'_, PyStream>,
        function: impl Fn(&mut MessageQueue, &dyn Executor) -> doorbell::Result<T> + Sync,
    ) -> PyResult<T> {
        let (shared, executor) = (self.shared()?, stream.get().executor()?);
        queue(stream.py(), self.room, Some(executor), || {
            function(taken(&mut lock(shared))?, executor)
        })
    }

    /// Waits without holding the queue's lock all the time.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        seconds: Option<f64>,
        function: impl Fn(&mut MessageQueue, Option<Duration>) -> doorbell::Result<T> + Sync,
    ) -> PyResult<T> {
        let queue = self.shared()?;
        wait(py, timeout(seconds)?, |slice| {
            function(taken(&mut lock(queue))?, slice)
        })
    }

    fn sent(&self, memory: &Bound<'_, PyAny>, used: MemoryUse) -> PyResult<Vec<ArrayMemory>> {
        ArrayMemory::several(self.domain()?, memory, SENT, used)
    }

    fn received(&self, memory: &Bound<'_, PyAny>, used: MemoryUse) -> PyResult<Vec<ArrayMemory>> {
        ArrayMemory::several(self.domain()?, memory, Access::LOCAL_WRITE, used)
    }
}

#[pymethods]
impl PyMessageQueue {
    /// What the peer needs to connect to this queue.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let address = self.with(py, |queue| Ok(queue.address().to_bytes()))?;
        Ok(PyBytes::new(py, &address))
    }

    /// The component that rings the doorbells: "direct", "proxy" or "sync".
    #[getter]
    fn control(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |queue| Ok(queue.path().control.to_string()))
    }

    /// The failure of the connection, which stays.
    #[getter]
    fn failure<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let failure = self.with(py, |queue| Ok(queue.failure()))?;
        failure
            .map(|failure| work_exception(py, &failure))
            .transpose()
    }

    /// Connects to the peer's queue. Both sides do so.
    fn connect(&self, py: Python<'_>, peer: &[u8]) -> PyResult<()> {
        self.with(py, |queue| {
            queue.connect(&MessageAddress::from_bytes(peer)?)
        })
    }

    /// Queues a message on a stream, and a wait until its memory may be used again.
    fn send(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<PyMessageTicket> {
        let memory = self.sent(memory, MemoryUse::OnStream)?;
        let ticket = self.queue(stream, |queue, executor| {
            queue.send(executor, &slices(&memory)?)
        })?;
        Ok(PyMessageTicket::new(ticket))
    }

    /// Queues a message on a stream, and no wait: so both sides can send before they receive.
    fn start_send(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<PyPendingSend> {
        let memory = self.sent(memory, MemoryUse::OnStream)?;
        let pending = self.queue(stream, |queue, executor| {
            queue.start_send(executor, &slices(&memory)?)
        })?;
        Ok(PyPendingSend::of(pending))
    }

    /// Queues the wait for a message that `start_send` has sent.
    fn wait_send(
        &self,
        stream: &Bound<'_, PyStream>,
        pending: &Bound<'_, PyPendingSend>,
    ) -> PyResult<PyMessageTicket> {
        let pending = pending.get().inner()?;
        let ticket = self.queue(stream, |queue, executor| {
            queue.wait_send(executor, taken_pending(pending)?)
        })?;
        Ok(PyMessageTicket::new(ticket))
    }

    /// Queues a receive on a stream: what is queued behind it comes after the next message.
    fn recv(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<PyMessageTicket> {
        let memory = self.received(memory, MemoryUse::OnStream)?;
        let ticket = self.queue(stream, |queue, executor| {
            queue.recv(executor, &slices(&memory)?)
        })?;
        Ok(PyMessageTicket::new(ticket))
    }

    /// Sends a message from this thread, and waits until its memory may be used again.
    #[pyo3(signature = (memory, timeout = None))]
    fn send_now(&self, memory: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<()> {
        let begin = Instant::now();
        let posted = self.start_send_now(memory, timeout)?;
        let left = timeout.map(|seconds| (seconds - begin.elapsed().as_secs_f64()).max(0.0));
        self.wait_posted(memory.py(), &posted, left)
    }

    /// Sends a message from this thread, and does not wait until its memory may be used again. Waits for a slot of the peer.
    #[pyo3(signature = (memory, timeout = None))]
    fn start_send_now(
        &self,
        memory: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<PyPostedSend> {
        let py = memory.py();
        let memory = self.sent(memory, MemoryUse::Now)?;
        let posted = self.wait(py, timeout, |queue, slice| {
            queue.start_send_now(&slices(&memory)?, slice)
        })?;
        Ok(PyPostedSend::of(posted, memory))
    }

    /// Waits until the memory of a message that `start_send_now` has sent may be used again.
    #[pyo3(signature = (posted, timeout = None))]
    fn wait_send_now(
        &self,
        posted: &Bound<'_, PyPostedSend>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.wait_posted(posted.py(), posted.get(), timeout)
    }

    /// Receives the next message in this thread, and returns its length in bytes.
    #[pyo3(signature = (memory, timeout = None))]
    fn recv_now(&self, memory: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<u64> {
        let py = memory.py();
        let memory = self.received(memory, MemoryUse::Now)?;
        self.wait(py, timeout, |queue, slice| {
            queue.recv_now(&slices(&memory)?, slice)
        })
    }

    /// Receives the next message of whichever queue has one, and returns the index of the queue and the length in bytes.
    #[staticmethod]
    #[pyo3(signature = (queues, memory, timeout = None))]
    fn recv_any_now(
        queues: Vec<Bound<'_, PyMessageQueue>>,
        memory: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<(usize, u64)> {
        let py = memory.py();
        let Some(first) = queues.first() else {
            return Err(PyValueError::new_err("there are no queues"));
        };
        let memory = first.get().received(memory, MemoryUse::Now)?;
        let shared = queues.iter().map(|queue| queue.get().shared());
        let shared = shared.collect::<PyResult<Vec<&PySharedQueue>>>()?;
        let order = lock_order(&shared)?;
        wait(py, self::timeout(timeout)?, |slice| {
            let mut guards: Vec<(usize, MutexGuard<'_, Option<MessageQueue>>)> = order
                .iter()
                .filter_map(|at| Some((*at, lock(shared.get(*at)?))))
                .collect();
            guards.sort_by_key(|(at, _)| *at);
            let queues = guards.iter_mut().map(|(_, queue)| taken(queue));
            let mut queues = queues.collect::<doorbell::Result<Vec<_>>>()?;
            MessageQueue::recv_any_now(&mut queues, &slices(&memory)?, slice)
        })
    }

    /// Waits until the peer has received all messages of this side.
    #[pyo3(signature = (timeout = None))]
    fn finish(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout, MessageQueue::finish)
    }

    /// Ends the connection and releases every wait. Another thread may be waiting for it.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let abort = self.abort.get().ok_or_else(is_gone)?;
        py.detach(|| abort.abort());
        Ok(())
    }
}

impl PyMessageQueue {
    fn wait_posted(
        &self,
        py: Python<'_>,
        posted: &PyPostedSend,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let posted = posted.inner()?;
        self.wait(py, timeout, |queue, slice| {
            queue.wait_send_now(posted, slice)
        })
    }
}

/// A message on a stream whose wait is not queued yet.
#[pyclass(frozen, module = "doorbell", name = "PendingSend")]
pub struct PyPendingSend(Detached<Mutex<Option<PendingSend>>>);

impl PyPendingSend {
    pub fn of(pending: PendingSend) -> PyPendingSend {
        PyPendingSend(Detached::new(Mutex::new(Some(pending))))
    }

    pub fn inner(&self) -> PyResult<&Mutex<Option<PendingSend>>> {
        self.0.get().ok_or_else(is_gone)
    }
}

pub fn taken_pending(pending: &Mutex<Option<PendingSend>>) -> doorbell::Result<PendingSend> {
    lock(pending).take().ok_or_else(|| {
        let reason = "the wait for this message was queued before";
        Error::state(StateKind::Taken, "wait_send", reason)
    })
}

/// A message from a thread that nobody has waited for yet. It keeps the memory.
#[pyclass(frozen, module = "doorbell", name = "PostedSend")]
pub struct PyPostedSend {
    posted: Detached<PostedSend>,
    _memory: Detached<Vec<ArrayMemory>>,
}

impl PyPostedSend {
    pub fn of(posted: PostedSend, memory: Vec<ArrayMemory>) -> PyPostedSend {
        PyPostedSend {
            posted: Detached::new(posted),
            _memory: Detached::new(memory),
        }
    }

    pub fn inner(&self) -> PyResult<&PostedSend> {
        self.posted.get().ok_or_else(is_gone)
    }
}

/// A handle of one message on a stream.
#[pyclass(frozen, module = "doorbell", name = "MessageTicket")]
pub struct PyMessageTicket(Detached<MessageTicket>);

impl PyMessageTicket {
    pub fn new(ticket: MessageTicket) -> PyMessageTicket {
        PyMessageTicket(Detached::new(ticket))
    }

    pub fn inner(&self) -> PyResult<&MessageTicket> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyMessageTicket {
    /// The length of the message, once it is sent or received.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let ticket = self.inner()?;
        Ok(py.detach(|| ticket.check()).unwrap_or(None))
    }
}

ticket_methods!(PyMessageTicket, MessageTicket);
