//! Messages with tags, from any peer.

use std::time::Instant;

use doorbell::{
    Access, Envelope, Executor, MatchTicket, Matcher, MessageQueue, ProtectionDomain, Source,
    TagSelector,
};
use pyo3::prelude::*;

use crate::arguments::{MatcherConfiguration, timeout};
use crate::detached::{Detached, Room, call, queue, wait};
use crate::device::PyDomain;
use crate::error::{class, is_gone, work_exception};
use crate::memory::{ArrayMemory, MemoryUse, slices};
use crate::message::{
    PyMessageQueue, PyMessageTicket, PyPendingSend, PyPostedSend, make_of_queues, taken_pending,
};
use crate::stream::PyStream;
use crate::ticket::{AnyTicket, any_ticket, ticket_methods};

/// Messages with tags, received from any peer or a named one.
#[pyclass(frozen, module = "doorbell", name = "Matcher")]
pub struct PyMatcher {
    inner: Detached<Matcher>,
    domain: Detached<ProtectionDomain>,
    /// Of the queues, by peer.
    sends: Vec<Room>,
    receives: Room,
}

fn source(peer: Option<usize>) -> Source {
    peer.map_or(Source::Any, Source::Peer)
}

fn tags(tag: Option<u32>, ignored: u32) -> TagSelector {
    tag.map_or(TagSelector::any(), |tag| TagSelector::masked(tag, ignored))
}

impl PyMatcher {
    pub fn of(matcher: Matcher, sends: Vec<Room>, receives: Room) -> PyMatcher {
        PyMatcher {
            sends,
            receives,
            domain: Detached::new(matcher.domain().clone()),
            inner: Detached::new(matcher),
        }
    }

    fn inner(&self) -> PyResult<&Matcher> {
        self.inner.get().ok_or_else(is_gone)
    }

    fn room(&self, peer: usize) -> Room {
        self.sends.get(peer).copied().unwrap_or(Room::NONE)
    }

    /// Queues something on a stream.
    fn queue<T: Send>(
        &self,
        stream: &Bound<'_, PyStream>,
        room: Room,
        function: impl Fn(&Matcher, &dyn Executor) -> doorbell::Result<T> + Sync,
    ) -> PyResult<T> {
        let (matcher, executor) = (self.inner()?, stream.get().executor()?);
        queue(stream.py(), room, Some(executor), || {
            function(matcher, executor)
        })
    }

    fn memory(
        &self,
        memory: &Bound<'_, PyAny>,
        rights: Access,
        used: MemoryUse,
    ) -> PyResult<Vec<ArrayMemory>> {
        let domain = self.domain.get().ok_or_else(is_gone)?;
        ArrayMemory::several(domain, memory, rights, used)
    }
}

#[pymethods]
impl PyMatcher {
    /// Makes a matcher of queues, by the index of the peer, which it takes. None is this process itself. If it refuses them, it takes none; if memory, a queue or a thread
    /// of its own cannot be had after that, the queues are closed.
    #[new]
    #[pyo3(signature = (domain, queues, config = None))]
    fn new(
        py: Python<'_>,
        domain: &Bound<'_, PyDomain>,
        queues: Vec<Option<Bound<'_, PyMessageQueue>>>,
        config: Option<MatcherConfiguration>,
    ) -> PyResult<PyMatcher> {
        let mut config = config.unwrap_or_default().0;
        let receives = Room::of(&mut config.messages.endpoint);
        let room_of = |queue: &Option<Bound<'_, PyMessageQueue>>| {
            queue.as_ref().map_or(receives, |queue| queue.get().room())
        };
        let sends = queues.iter().map(room_of).collect();
        let domain = domain.get().inner()?;
        let check = |queues: &mut [Option<&mut MessageQueue>]| {
            Matcher::check_queues(domain, queues, &config)
        };
        let made = make_of_queues(py, &queues, check, |queues| {
            Matcher::new(domain, queues, &config)
        })?;
        Ok(PyMatcher::of(made, sends, receives))
    }

    /// The number of peers, this process included if it is one.
    #[getter]
    fn peer_count(&self) -> PyResult<usize> {
        Ok(self.inner()?.peer_count())
    }

    /// The domain in which memory for its messages is registered.
    #[getter]
    fn domain(&self) -> PyResult<PyDomain> {
        Ok(PyDomain::new(self.inner()?.domain().clone()))
    }

    /// Queues a message on a stream, and a wait until its memory may be used again.
    #[pyo3(signature = (stream, memory, peer, tag = 0))]
    fn send(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
    ) -> PyResult<PyMessageTicket> {
        let memory = self.memory(memory, Access::REMOTE_READ, MemoryUse::OnStream)?;
        let ticket = self.queue(stream, self.room(peer), |matcher, executor| {
            matcher.send(executor, peer, tag, &slices(&memory)?)
        })?;
        Ok(PyMessageTicket::new(ticket))
    }

    /// Queues a message on a stream, and no wait.
    #[pyo3(signature = (stream, memory, peer, tag = 0))]
    fn start_send(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
    ) -> PyResult<PyPendingSend> {
        let memory = self.memory(memory, Access::REMOTE_READ, MemoryUse::OnStream)?;
        let pending = self.queue(stream, self.room(peer), |matcher, executor| {
            matcher.start_send(executor, peer, tag, &slices(&memory)?)
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
        let ticket = self.queue(stream, Room::NONE, |matcher, executor| {
            matcher.wait_send(executor, taken_pending(pending)?)
        })?;
        Ok(PyMessageTicket::new(ticket))
    }

    /// Sends a message from this thread, and waits until its memory may be used again.
    #[pyo3(signature = (memory, peer, tag = 0, timeout = None))]
    fn send_now(
        &self,
        memory: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let begin = Instant::now();
        let posted = self.start_send_now(memory, peer, tag, timeout)?;
        let left = timeout.map(|seconds| (seconds - begin.elapsed().as_secs_f64()).max(0.0));
        self.wait_posted(memory.py(), &posted, left)
    }

    /// Sends a message from this thread, and does not wait until its memory may be used again. Waits for a slot of the peer.
    #[pyo3(signature = (memory, peer, tag = 0, timeout = None))]
    fn start_send_now(
        &self,
        memory: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<PyPostedSend> {
        let py = memory.py();
        let memory = self.memory(memory, Access::REMOTE_READ, MemoryUse::Now)?;
        let matcher = self.inner()?;
        let posted = wait(py, self::timeout(timeout)?, |slice| {
            matcher.start_send_now(peer, tag, &slices(&memory)?, slice)
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

    /// Queues a receive on a stream. `peer` None is any of them, `tag` None every tag, and of a tag the bits of `ignored` are not compared.
    #[pyo3(signature = (stream, memory, peer = None, tag = None, *, ignored = 0))]
    fn recv(
        &self,
        stream: &Bound<'_, PyStream>,
        memory: &Bound<'_, PyAny>,
        peer: Option<usize>,
        tag: Option<u32>,
        ignored: u32,
    ) -> PyResult<PyMatchTicket> {
        let memory = self.memory(memory, Access::LOCAL_WRITE, MemoryUse::OnStream)?;
        let ticket = self.queue(stream, self.receives, |matcher, executor| {
            let slices = slices(&memory)?;
            matcher.recv(executor, source(peer), tags(tag, ignored), &slices)
        })?;
        Ok(PyMatchTicket(Detached::new(ticket)))
    }

    /// Receives a message that matches in this thread.
    #[pyo3(signature = (memory, peer = None, tag = None, timeout = None, *, ignored = 0))]
    fn recv_now(
        &self,
        memory: &Bound<'_, PyAny>,
        peer: Option<usize>,
        tag: Option<u32>,
        timeout: Option<f64>,
        ignored: u32,
    ) -> PyResult<PyEnvelope> {
        let py = memory.py();
        let timeout = self::timeout(timeout)?;
        let memory = self.memory(memory, Access::LOCAL_WRITE, MemoryUse::Now)?;
        let matcher = self.inner()?;
        let ticket = call(py, || {
            let slices = slices(&memory)?;
            matcher.start_recv_now(source(peer), tags(tag, ignored), &slices)
        })?;
        // The last handle may be that of the array.
        let ticket = Detached::new(ticket);
        let receive = ticket.get().ok_or_else(is_gone)?;
        let error = match wait(py, timeout, |slice| AnyTicket::wait(receive, slice)) {
            Ok(envelope) => return Ok(envelope),
            Err(error) => error,
        };
        let is_cancelled = call(py, || matcher.cancel(receive))?;
        let late = class(py, "doorbell._errors", "TimeoutError")?;
        if is_cancelled || !error.is_instance(py, &late) {
            return Err(error);
        }
        // It has a message, which is being stored or is there.
        wait(py, None, |slice| AnyTicket::wait(receive, slice))
    }

    /// What is known of the earliest message that such a receive would take. The message stays.
    #[pyo3(signature = (peer = None, tag = None, *, ignored = 0))]
    fn probe_now(
        &self,
        py: Python<'_>,
        peer: Option<usize>,
        tag: Option<u32>,
        ignored: u32,
    ) -> PyResult<Option<PyEnvelope>> {
        let matcher = self.inner()?;
        let found = call(py, || matcher.probe_now(source(peer), tags(tag, ignored)))?;
        Ok(found.map(PyEnvelope))
    }

    /// Cancels a receive that has no message. Whether it was cancelled.
    fn cancel(&self, ticket: &Bound<'_, PyMatchTicket>) -> PyResult<bool> {
        let (matcher, receive) = (self.inner()?, ticket.get().inner()?);
        call(ticket.py(), || matcher.cancel(receive))
    }

    /// The failure of the connection with a peer.
    fn failure<'py>(&self, py: Python<'py>, peer: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let matcher = self.inner()?;
        let failure = py.detach(|| matcher.failure(peer));
        failure
            .map(|failure| work_exception(py, &failure))
            .transpose()
    }

    /// Receives from any peer go on without this one.
    fn exclude(&self, py: Python<'_>, peer: usize) -> PyResult<()> {
        let matcher = self.inner()?;
        call(py, || matcher.exclude(peer))
    }

    /// Waits until the peers have received all messages of this side.
    #[pyo3(signature = (timeout = None))]
    fn finish(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let matcher = self.inner()?;
        wait(py, self::timeout(timeout)?, |slice| matcher.finish(slice))
    }
}

impl PyMatcher {
    fn wait_posted(
        &self,
        py: Python<'_>,
        posted: &PyPostedSend,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (matcher, posted) = (self.inner()?, posted.inner()?);
        wait(py, self::timeout(timeout)?, |slice| {
            matcher.wait_send_now(posted, slice)
        })
    }
}

/// What is known of a message.
#[pyclass(frozen, module = "doorbell", name = "Envelope")]
pub struct PyEnvelope(Envelope);

#[pymethods]
impl PyEnvelope {
    /// The index of the peer that has sent it.
    #[getter]
    fn peer(&self) -> usize {
        self.0.peer
    }

    /// The tag of the message.
    #[getter]
    fn tag(&self) -> u32 {
        self.0.tag
    }

    /// The length of the message in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len_bytes
    }

    fn __repr__(&self) -> String {
        let Envelope {
            peer,
            tag,
            len_bytes,
        } = self.0;
        format!("<doorbell.Envelope of {len_bytes} bytes from peer {peer} with tag {tag}>")
    }
}

/// A handle of one receive of a matcher on a stream.
#[pyclass(frozen, module = "doorbell", name = "MatchTicket")]
pub struct PyMatchTicket(Detached<MatchTicket>);

impl PyMatchTicket {
    pub fn inner(&self) -> PyResult<&MatchTicket> {
        self.0.get().ok_or_else(is_gone)
    }
}

any_ticket!(MatchTicket: PyEnvelope, PyEnvelope, |ticket| !matches!(ticket.check(), Ok(None)));
ticket_methods!(PyMatchTicket, MatchTicket);
