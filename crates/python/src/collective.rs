//! Collective operations, and their tickets.

use std::sync::{Arc, Mutex};

use doorbell::{
    AbortHandle, Access, Collective, CollectiveTicket, Communicator, MessageQueue,
    ProtectionDomain, Reduction, Slice,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{NamedAlgorithm, NamedOp, NamedType, timeout};
use crate::detached::{Detached, Room, call, lock, queue, wait, wait_whole};
use crate::device::PyDomain;
use crate::error::{is_gone, work_exception};
use crate::memory::{ArrayMemory, MemoryUse};
use crate::message::{PyMessageQueue, make_of_queues};
use crate::stream::PyStream;
use crate::ticket::ticket_methods;

/// Ranks that carry out collective operations on streams.
#[pyclass(frozen, module = "doorbell", name = "Communicator")]
pub struct PyCommunicator {
    /// Locked only without the interpreter's lock.
    inner: Detached<Arc<Mutex<Communicator>>>,
    aborts: Detached<Vec<AbortHandle>>,
    domain: Detached<ProtectionDomain>,
    rank: u32,
    size: u32,
    /// The longest of its queues.
    room: Room,
}

/// Two lists of messages: a rank, and memory.
type ListedMemory<'py> = Vec<(u32, Bound<'py, PyAny>)>;

impl PyCommunicator {
    pub fn of(communicator: Communicator, room: Room) -> PyCommunicator {
        PyCommunicator {
            room,
            rank: communicator.rank(),
            size: communicator.size(),
            aborts: Detached::new(communicator.abort_handles()),
            domain: Detached::new(communicator.domain().clone()),
            inner: Detached::new(Arc::new(Mutex::new(communicator))),
        }
    }

    pub fn shared(&self) -> PyResult<&Arc<Mutex<Communicator>>> {
        self.inner.get().ok_or_else(is_gone)
    }

    fn protection_domain(&self) -> PyResult<&ProtectionDomain> {
        self.domain.get().ok_or_else(is_gone)
    }

    /// Calls the library without the interpreter's lock, and with the communicator's.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut Communicator) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let communicator = self.shared()?;
        call(py, || function(&mut lock(communicator)))
    }

    fn prepare(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&Communicator) -> doorbell::Result<Collective> + Send,
    ) -> PyResult<PyCollective> {
        let collective = self.with(py, |communicator| function(communicator))?;
        Ok(PyCollective(Detached::new(Mutex::new(collective))))
    }

    /// Memory that is sent: longer messages are read.
    fn sent(&self, memory: &Bound<'_, PyAny>) -> PyResult<ArrayMemory> {
        ArrayMemory::of(
            self.protection_domain()?,
            memory,
            Access::REMOTE_READ,
            MemoryUse::OnStream,
        )
    }

    /// Memory that is received into, and sent: matched messages are written by peers.
    fn received(&self, memory: &Bound<'_, PyAny>) -> PyResult<ArrayMemory> {
        let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        ArrayMemory::of(
            self.protection_domain()?,
            memory,
            rights,
            MemoryUse::OnStream,
        )
    }

    /// The lengths of the ranks' blocks in bytes: of counts of items, or of equal parts of all items.
    fn block_lens(&self, counts: Option<Vec<u64>>, all: &ArrayMemory) -> PyResult<Vec<u64>> {
        if let Some(counts) = counts {
            let lens = counts.into_iter().map(|count| all.items.len_bytes(count));
            return Ok(lens.collect());
        }
        let (len_bytes, size) = (all.len_bytes(), u64::from(self.size));
        let align = all.items.bytes.saturating_mul(size).max(1);
        if !len_bytes.is_multiple_of(align) {
            return Err(PyValueError::new_err(format!(
                "{} items are no equal parts of {size} ranks; name their lengths by `counts`",
                len_bytes / all.items.bytes.max(1)
            )));
        }
        Ok(vec![len_bytes / size; self.size as usize])
    }

    /// The same of blocks that are as long as this rank's.
    fn equal_lens(&self, counts: Option<Vec<u64>>, own: &ArrayMemory) -> Vec<u64> {
        match counts {
            Some(counts) => counts
                .into_iter()
                .map(|count| own.items.len_bytes(count))
                .collect(),
            None => vec![own.len_bytes(); self.size as usize],
        }
    }
}

/// The slice of memory that only the root has.
fn maybe(memory: &Option<ArrayMemory>) -> doorbell::Result<Option<Slice<'_>>> {
    memory.as_ref().map(ArrayMemory::slice).transpose()
}

fn algorithm(named: Option<NamedAlgorithm>) -> Option<doorbell::Algorithm> {
    named.map(|named| named.0)
}

fn reduction(
    memory: &ArrayMemory,
    op: Option<NamedOp>,
    dtype: Option<NamedType>,
) -> PyResult<Reduction> {
    let element = memory.element(dtype.map(|named| named.0))?;
    let op = op.map_or(doorbell::ReduceOp::Sum, |named| named.0);
    Ok(Reduction::new(element, op))
}

#[pymethods]
impl PyCommunicator {
    /// Makes a communicator of as many ranks as there are queues. It takes them: one to each other rank, connected with that rank's queue, and None for this rank. If it fails, it takes none.
    #[new]
    fn new(
        py: Python<'_>,
        rank: u32,
        queues: Vec<Option<Bound<'_, PyMessageQueue>>>,
    ) -> PyResult<PyCommunicator> {
        let rooms = queues.iter().flatten().map(|queue| queue.get().room());
        let room = rooms.fold(Room::NONE, Room::longer);
        let check = |queues: &mut [Option<&mut MessageQueue>]| {
            let queues: Vec<Option<&MessageQueue>> = queues.iter().map(Option::as_deref).collect();
            Communicator::check_queues(rank, &queues)
        };
        let made = make_of_queues(py, &queues, check, |queues| Communicator::new(rank, queues))?;
        Ok(PyCommunicator::of(made, room))
    }

    /// A communicator of one rank.
    #[staticmethod]
    fn alone(domain: &Bound<'_, PyDomain>) -> PyResult<PyCommunicator> {
        let domain = domain.get().inner()?;
        let alone = Communicator::alone(domain);
        Ok(PyCommunicator::of(alone, Room::NONE))
    }

    /// The rank of this process.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    /// The domain in which memory for its operations is registered.
    #[getter]
    fn domain(&self) -> PyResult<PyDomain> {
        Ok(PyDomain::new(self.protection_domain()?.clone()))
    }

    /// The component that rings the doorbells: "direct", "proxy" or "sync". None for a single rank.
    #[getter]
    fn control(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |communicator| {
            let path = communicator.path();
            Ok(path.map(|path| path.control.to_string()))
        })
    }

    /// A rank to which the connection has failed, and why.
    #[getter]
    fn failure<'py>(&self, py: Python<'py>) -> PyResult<Option<(u32, Bound<'py, PyAny>)>> {
        let failure = self.with(py, |communicator| Ok(communicator.failure()))?;
        failure
            .map(|(rank, failure)| Ok((rank, work_exception(py, &failure)?)))
            .transpose()
    }

    /// Prepares a barrier: it is over on a rank when all ranks have launched it.
    #[pyo3(signature = (*, algorithm = None))]
    fn barrier(&self, py: Python<'_>, algorithm: Option<NamedAlgorithm>) -> PyResult<PyCollective> {
        let algorithm = self::algorithm(algorithm);
        self.prepare(py, |it| it.barrier(algorithm))
    }

    /// Prepares the copy of the buffer of `root` into the buffers of all other ranks.
    #[pyo3(signature = (buffer, root = 0, *, algorithm = None))]
    fn broadcast(
        &self,
        buffer: &Bound<'_, PyAny>,
        root: u32,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let (py, buffer) = (buffer.py(), self.received(buffer)?);
        let algorithm = self::algorithm(algorithm);
        self.prepare(py, |it| it.broadcast(&buffer.slice()?, root, algorithm))
    }

    /// Prepares the copy of the inputs of all ranks into the output of `root`, in the order of the ranks.
    #[pyo3(signature = (input, output = None, root = 0, *, counts = None, algorithm = None))]
    fn gather(
        &self,
        input: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        root: u32,
        counts: Option<Vec<u64>>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let (py, input) = (input.py(), self.sent(input)?);
        let output = output.map(|output| self.received(output)).transpose()?;
        let (lens, algorithm) = (self.equal_lens(counts, &input), self::algorithm(algorithm));
        self.prepare(py, |it| {
            let output = maybe(&output)?;
            it.gather(&input.slice()?, output.as_ref(), &lens, root, algorithm)
        })
    }

    /// Prepares the copy of the blocks of `root`'s input into the outputs of the ranks, in their order.
    #[pyo3(signature = (output, input = None, root = 0, *, counts = None, algorithm = None))]
    fn scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: Option<&Bound<'_, PyAny>>,
        root: u32,
        counts: Option<Vec<u64>>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let (py, output) = (output.py(), self.received(output)?);
        let input = input.map(|input| self.sent(input)).transpose()?;
        let (lens, algorithm) = (self.equal_lens(counts, &output), self::algorithm(algorithm));
        self.prepare(py, |it| {
            let input = maybe(&input)?;
            it.scatter(input.as_ref(), &output.slice()?, &lens, root, algorithm)
        })
    }

    /// Without an input this rank's block is in its place in the output.
    #[pyo3(signature = (output, input = None, *, counts = None, algorithm = None))]
    fn all_gather(
        &self,
        output: &Bound<'_, PyAny>,
        input: Option<&Bound<'_, PyAny>>,
        counts: Option<Vec<u64>>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let (py, output) = (output.py(), self.received(output)?);
        let input = input.map(|input| self.sent(input)).transpose()?;
        let (lens, algorithm) = (
            self.block_lens(counts, &output)?,
            self::algorithm(algorithm),
        );
        self.prepare(py, |it| {
            let input = maybe(&input)?;
            it.all_gather(input.as_ref(), &output.slice()?, &lens, algorithm)
        })
    }

    /// With counts, `sends` and `receives` are the items of the blocks for and from each rank.
    #[pyo3(signature = (input, output, *, sends = None, receives = None, algorithm = None))]
    fn all_to_all(
        &self,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        sends: Option<Vec<u64>>,
        receives: Option<Vec<u64>>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let py = input.py();
        let (input, output) = (self.sent(input)?, self.received(output)?);
        if sends.is_none() && receives.is_none() {
            let algorithm = self::algorithm(algorithm);
            return self.prepare(py, |it| {
                it.all_to_all(&input.slice()?, &output.slice()?, algorithm)
            });
        }
        if algorithm.is_some_and(|named| named.0 != doorbell::Algorithm::Pairwise) {
            return Err(PyValueError::new_err(
                "blocks of several lengths are exchanged by \"pairwise\"",
            ));
        }
        let (sends, receives) = (
            self.block_lens(sends, &input)?,
            self.block_lens(receives, &output)?,
        );
        self.prepare(py, |it| {
            it.all_to_all_v(&input.slice()?, &output.slice()?, &sends, &receives)
        })
    }

    /// A list of sends and receives of this rank, each a rank and memory.
    fn exchange(
        &self,
        py: Python<'_>,
        sends: ListedMemory<'_>,
        receives: ListedMemory<'_>,
    ) -> PyResult<PyCollective> {
        let sends = sends
            .iter()
            .map(|(rank, memory)| Ok((*rank, self.sent(memory)?)));
        let sends = sends.collect::<PyResult<Vec<_>>>()?;
        let receives = receives
            .iter()
            .map(|(rank, memory)| Ok((*rank, self.received(memory)?)));
        let receives = receives.collect::<PyResult<Vec<_>>>()?;
        self.prepare(py, |it| it.exchange(&listed(&sends)?, &listed(&receives)?))
    }

    /// Prepares the reduction of the inputs of all ranks into the output of `root`.
    #[pyo3(signature = (input, output = None, op = None, root = 0, *, dtype = None, algorithm = None))]
    fn reduce(
        &self,
        input: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        op: Option<NamedOp>,
        root: u32,
        dtype: Option<NamedType>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let (py, input) = (input.py(), self.sent(input)?);
        let output = output.map(|output| self.received(output)).transpose()?;
        let reduction = self::reduction(&input, op, dtype)?;
        let algorithm = self::algorithm(algorithm);
        self.prepare(py, |it| {
            let output = maybe(&output)?;
            it.reduce(&input.slice()?, output.as_ref(), reduction, root, algorithm)
        })
    }

    /// Prepares the reduction of the inputs of all ranks, of which each rank gets its block.
    #[pyo3(signature = (input, output, op = None, *, counts = None, dtype = None, algorithm = None))]
    fn reduce_scatter(
        &self,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        op: Option<NamedOp>,
        counts: Option<Vec<u64>>,
        dtype: Option<NamedType>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let py = input.py();
        let (input, output) = (self.sent(input)?, self.received(output)?);
        let reduction = self::reduction(&input, op, dtype)?;
        let (lens, algorithm) = (self.block_lens(counts, &input)?, self::algorithm(algorithm));
        self.prepare(py, |it| {
            it.reduce_scatter(
                &input.slice()?,
                &output.slice()?,
                &lens,
                reduction,
                algorithm,
            )
        })
    }

    /// Without an output the input becomes the result, in place.
    #[pyo3(signature = (input, output = None, op = None, *, dtype = None, algorithm = None))]
    fn all_reduce(
        &self,
        input: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        op: Option<NamedOp>,
        dtype: Option<NamedType>,
        algorithm: Option<NamedAlgorithm>,
    ) -> PyResult<PyCollective> {
        let py = input.py();
        let (input, output) = match output {
            Some(output) => (self.sent(input)?, Some(self.received(output)?)),
            None => (self.received(input)?, None),
        };
        let reduction = self::reduction(&input, op, dtype)?;
        let algorithm = self::algorithm(algorithm);
        self.prepare(py, |it| {
            let output = output.as_ref().unwrap_or(&input);
            it.all_reduce(&input.slice()?, &output.slice()?, reduction, algorithm)
        })
    }

    /// Queues an operation on a stream. All ranks launch the same operations in the same order.
    fn launch(
        &self,
        stream: &Bound<'_, PyStream>,
        collective: &Bound<'_, PyCollective>,
    ) -> PyResult<PyCollectiveTicket> {
        let executor = stream.get().executor()?;
        let collective = collective.get().shared()?;
        let communicator = self.shared()?;
        let ticket = queue(stream.py(), self.room, Some(executor), || {
            let mut communicator = lock(communicator);
            let collective = lock(collective).clone();
            communicator.launch(executor, &collective)
        })?;
        Ok(PyCollectiveTicket(Detached::new(ticket)))
    }

    /// Matches the messages of an operation once for all its launches: they are written straight into place. All ranks call it. A signal aborts the communicator.
    #[pyo3(signature = (collective, timeout = None))]
    fn match_ahead(
        &self,
        collective: &Bound<'_, PyCollective>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = self::timeout(timeout)?;
        let py = collective.py();
        let (communicator, collective) = (self.shared()?, collective.get().shared()?);
        let aborts = self.aborts.get().ok_or_else(is_gone)?;
        wait_whole(
            py,
            || lock(communicator).match_ahead(&mut lock(collective), timeout),
            || aborts.iter().for_each(AbortHandle::abort),
        )
    }

    /// Waits until the peers have everything that this rank has sent.
    #[pyo3(signature = (timeout = None))]
    fn finish(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let communicator = self.shared()?;
        wait(py, self::timeout(timeout)?, |slice| {
            lock(communicator).finish(slice)
        })
    }

    /// Ends all connections and releases every wait. Another thread may be waiting for them.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let aborts = self.aborts.get().ok_or_else(is_gone)?;
        py.detach(|| aborts.iter().for_each(AbortHandle::abort));
        Ok(())
    }
}

fn listed(list: &[(u32, ArrayMemory)]) -> doorbell::Result<Vec<(u32, Slice<'_>)>> {
    let slices = list
        .iter()
        .map(|(rank, memory)| Ok((*rank, memory.slice()?)));
    slices.collect()
}

/// A collective operation that is prepared, with its memory.
#[pyclass(frozen, module = "doorbell", name = "Collective")]
pub struct PyCollective(Detached<Mutex<Collective>>);

impl PyCollective {
    pub fn shared(&self) -> PyResult<&Mutex<Collective>> {
        self.0.get().ok_or_else(is_gone)
    }

    fn look<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&Collective) -> T + Send,
    ) -> PyResult<T> {
        let collective = self.shared()?;
        Ok(py.detach(|| function(&lock(collective))))
    }
}

#[pymethods]
impl PyCollective {
    /// The name of its algorithm.
    #[getter]
    fn algorithm(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |it| it.algorithm().to_string())
    }

    /// Messages that this rank sends at each launch.
    #[getter]
    fn messages(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, Collective::messages)
    }

    /// Bytes of these messages.
    #[getter]
    fn sent_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, Collective::sent_bytes)
    }

    /// Whether its messages are written straight into place.
    #[getter]
    fn matched(&self, py: Python<'_>) -> PyResult<bool> {
        self.look(py, Collective::is_matched)
    }

    /// Whether a stream can carry it out.
    fn runs_on(&self, stream: &Bound<'_, PyStream>) -> PyResult<bool> {
        let executor = stream.get().executor()?;
        self.look(stream.py(), |it| it.runs_on(executor))
    }
}

/// A handle of one launch of a collective operation.
#[pyclass(frozen, module = "doorbell", name = "CollectiveTicket")]
pub struct PyCollectiveTicket(Detached<CollectiveTicket>);

impl PyCollectiveTicket {
    #[cfg(feature = "cuda")]
    pub fn new(ticket: CollectiveTicket) -> PyCollectiveTicket {
        PyCollectiveTicket(Detached::new(ticket))
    }

    pub fn inner(&self) -> PyResult<&CollectiveTicket> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyCollectiveTicket {
    /// The peer of the first message that has failed.
    #[getter]
    fn failed_peer(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let ticket = self.inner()?;
        Ok(py.detach(|| ticket.failed_peer()))
    }
}

ticket_methods!(PyCollectiveTicket, CollectiveTicket);
