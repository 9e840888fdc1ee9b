//! Ranks that carry out collective operations.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::algorithms::{self, Algorithm, Ranks};
use super::costs::CollectiveCosts;
use super::local::{Memories, Memory};
use super::matched::Matched;
use super::reduction::{ReduceOp, Reduction};
use super::schedule::{Blocks, MemoryStep, Operand, OperandSpan, Schedule, Transfer};
use super::target::OnStream;
use super::ticket::CollectiveTicket;
use crate::endpoint::{AbortHandle, PathReport};
use crate::message::MessageQueue;
use crate::region::{Access, ProtectionDomain, Region, Slice};
use crate::stream::Executor;
use crate::{Cause, Error, Result, StateKind, WorkError};

/// Longer gathers and scatters are `linear` unless an algorithm is named: in a tree data is sent again at each level, through memory of the library.
const TREE_BYTES_MAX: u64 = 64 << 10;

/// The algorithms of a gather and of a scatter.
const TO_OR_FROM_ROOT: [Algorithm; 3] =
    [Algorithm::Linear, Algorithm::Binomial, Algorithm::Knomial];

const ALL_REDUCE: &str = "all-reduce";

/// The longest message, in bytes: what the ports of a ConnectX take (`max_msg_sz`).
const MESSAGE_MAX: u64 = 1 << 30;

/// The access that messages need of memory: longer ones are read.
const SENT: Access = Access::REMOTE_READ;

/// The same of memory that they are received into.
fn received() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ
}

/// The access of the library's own memory, which peers also write.
pub(super) fn between() -> Access {
    received() | Access::REMOTE_WRITE
}

/// Of how many ranks the times are predicted for the choice of an algorithm.
const RANKS_PREDICTED: u32 = 16;

/// Ranks that carry out collective operations on streams, each by a message queue to each other rank.
///
/// An operation is prepared once, as by [`Communicator::all_reduce`], and launched any number of times ([`Communicator::launch`]). All ranks launch the same operations
/// in the same order, each on whatever stream. Nothing is exchanged when an operation is prepared, so all ranks must give it lengths that agree, and the same
/// root, reduction and algorithm.
///
/// Input and output of an operation must not overlap, but those of an all-reduce may be the same memory. The thread of a host stream copies and reduces memory of the
/// host. On a CUDA stream the driver copies, and a kernel of this library reduces, memory of the host and of the GPU.
///
/// If a rank fails or comes too late, the waits of its peers end at their deadline ([`EndpointConfig::wait_timeout`](crate::EndpointConfig)), or with the group, and their
/// streams have a fault. [`Communicator::failure`] names the rank.
///
/// ```
/// use doorbell::{Access, Communicator, DataType, Device, HostStream, MessageConfig, MessageQueue, ReduceOp, Reduction, Region};
/// use std::time::Duration;
///
/// // Two ranks in one process; `Group::communicator` makes them for a group of processes.
/// let domain = Device::open("softcx")?.protection_domain();
/// let mut queues = [(); 2].map(|()| MessageQueue::new(&domain, &MessageConfig::default()).unwrap());
/// let addresses = queues.each_ref().map(MessageQueue::address);
/// queues[0].connect(&addresses[1])?;
/// queues[1].connect(&addresses[0])?;
/// let [a, b] = queues;
/// let mut ranks = [Communicator::new(0, vec![None, Some(a)])?, Communicator::new(1, vec![Some(b), None])?];
/// let sum = Reduction::new(DataType::F32, ReduceOp::Sum);
/// let (mut tickets, mut regions) = (Vec::new(), Vec::new());
/// for (number, rank) in ranks.iter_mut().enumerate() {
///     let stream = HostStream::new(format!("rank{number}"))?;
///     let region = Region::alloc(&domain, 8, Access::ALL)?;
///     region.write_values(0, &[number as f32 + 1.0, 10.0])?;
///     // In place: input and output are the same memory.
///     let reduce = rank.all_reduce(&region.slice(0, 8)?, &region.slice(0, 8)?, sum, None)?;
///     tickets.push(rank.launch(&stream, &reduce)?);
///     regions.push(region);
/// }
/// for (ticket, region) in tickets.iter().zip(&regions) {
///     ticket.wait(Some(Duration::from_secs(5)))?;
///     let mut sums = [0.0_f32; 2];
///     region.read_values(0, &mut sums)?;
///     assert_eq!(sums, [3.0, 20.0]);
/// }
/// # Ok::<(), doorbell::Error>(())
/// ```
pub struct Communicator {
    /// Of its own in this process.
    pub(super) id: u64,
    pub(super) ranks: Ranks,
    /// By rank; none for this one.
    pub(super) queues: Vec<Option<MessageQueue>>,
    pub(super) domain: ProtectionDomain,
    costs: CollectiveCosts,
}

/// A collective operation that is prepared: what this rank sends, receives and computes, on which memory. It keeps the memory registered. Its launches use the
/// same memory, so those on several streams need an order among them.
#[derive(Clone)]
pub struct Collective {
    communicator: u64,
    pub(super) name: &'static str,
    algorithm: Algorithm,
    pub(super) schedule: Schedule,
    pub(super) memories: Memories,
    pub(super) reduction: Option<Reduction>,
    predicted_ns: f64,
    pub(super) matched: Option<Arc<Matched>>,
}

/// What is asked for, before its memory is known.
struct Wanted {
    name: &'static str,
    algorithm: Algorithm,
    schedule: Schedule,
    reduction: Option<Reduction>,
    /// Of the slowest rank.
    predicted_ns: Option<f64>,
}

impl Collective {
    /// The algorithm that it is carried out by.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Messages that this rank sends at each launch.
    pub fn messages(&self) -> u64 {
        self.schedule.messages()
    }

    /// Whether its messages are written straight into place ([`Communicator::match_ahead`]).
    pub fn is_matched(&self) -> bool {
        self.matched.is_some()
    }

    /// Bytes of these messages together.
    pub fn sent_bytes(&self) -> u64 {
        self.schedule.bytes()
    }

    /// Whether a stream can carry it out. A stream of the host works on memory of the host only, but messages that are matched may come into memory of a GPU. Stream memory operations and
    /// kernels of the application cannot copy or reduce, so a CUDA stream needs kernels of this library for that, and for messages that are not matched; a `TriggerStream` cannot copy or reduce.
    pub fn runs_on(&self, stream: &dyn Executor) -> bool {
        self.check_stream(stream).is_ok()
    }

    fn check_stream(&self, stream: &dyn Executor) -> Result<()> {
        if stream.executes_on_host() {
            let is_received_by_thread = self.matched.is_none();
            let operands = self.schedule.operands(is_received_by_thread);
            return self.memories.check_host(operands);
        }
        let refused = |reason| Err(Error::state(StateKind::Unsupported, self.name, reason));
        if self.schedule.has_local_steps() && !stream.works_on_memory() {
            return refused(
                "it has copies or reductions, which this stream cannot carry out: it has no kernels of this library",
            );
        }
        let is_taken = self.matched.is_none() && self.schedule.has_receives();
        if is_taken && !stream.takes_messages() {
            return refused(
                "a kernel of this library takes its messages out of their slots, and this stream has none; `Communicator::match_ahead` makes it do without",
            );
        }
        Ok(())
    }

    /// How long the slowest rank takes by the costs of the communicator ([`CollectiveCosts`]), in nanoseconds; of an all-to-all with blocks of several lengths, this rank.
    pub fn predicted_ns(&self) -> f64 {
        self.predicted_ns
    }
}

impl fmt::Debug for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collective")
            .field("name", &self.name)
            .field("algorithm", &self.algorithm)
            .field("rounds", &self.schedule.rounds.len())
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// A communicator of as many ranks as there are queues, of which this is `rank`. `queues` has a queue for each other rank, connected with the queue that the other
    /// rank has for this one, and none for this rank. All are of one protection domain.
    ///
    /// # Errors
    /// [`Error::Range`] for the rank; [`Error::State`] if a queue is missing or too many; [`Error::Foreign`] for queues of several domains. The queues are then
    /// dropped; [`Communicator::check_queues`] fails in the same cases, and leaves them.
    pub fn new(rank: u32, queues: Vec<Option<MessageQueue>>) -> Result<Communicator> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let given: Vec<Option<&MessageQueue>> = queues.iter().map(Option::as_ref).collect();
        let domain = Self::domain_of(rank, &given)?;
        Ok(Communicator {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            ranks: Ranks {
                rank,
                count: queues.len() as u32,
            },
            queues,
            domain,
            costs: CollectiveCosts::default(),
        })
    }

    /// Fails if [`Communicator::new`] would fail with these queues, which stay the caller's.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn check_queues(rank: u32, queues: &[Option<&MessageQueue>]) -> Result<()> {
        Self::domain_of(rank, queues).map(drop)
    }

    /// The domain of the queues, if a communicator can be made of them.
    fn domain_of(rank: u32, queues: &[Option<&MessageQueue>]) -> Result<ProtectionDomain> {
        let count = queues.len() as u32;
        if rank >= count {
            return Err(Error::Range {
                argument: "rank",
                value: rank.into(),
                min: 0,
                max: u64::from(count.max(1)) - 1,
            });
        }
        let is_wrong = |(peer, queue): &(usize, &Option<&MessageQueue>)| {
            queue.is_some() == (*peer == rank as usize)
        };
        if let Some((peer, _)) = queues.iter().enumerate().find(is_wrong) {
            let reason = match peer == rank as usize {
                true => format!("rank {peer} is this one, and has a queue"),
                false => format!("rank {peer} has no queue"),
            };
            return Err(Error::state(
                StateKind::WrongKind,
                "make a communicator",
                reason,
            ));
        }
        let Some(domain) = queues
            .iter()
            .flatten()
            .map(|queue| queue.domain().clone())
            .next()
        else {
            return Err(Error::state(
                StateKind::WrongKind,
                "make a communicator",
                "a single rank has no queues; give its domain to `Communicator::alone`",
            ));
        };
        for queue in queues.iter().flatten() {
            domain.check_same(queue.domain(), "queues")?;
        }
        Ok(domain)
    }

    /// A communicator of one rank.
    pub fn alone(domain: &ProtectionDomain) -> Communicator {
        Communicator {
            id: 0,
            ranks: Ranks { rank: 0, count: 1 },
            queues: vec![None],
            domain: domain.clone(),
            costs: CollectiveCosts::default(),
        }
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.ranks.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.ranks.count
    }

    /// The protection domain, in which the memory of operations is to be registered.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Which component rings the NIC for its queues, and why no better one; `None` for a single rank.
    pub fn path(&self) -> Option<PathReport> {
        let queue = self.queues.iter().flatten().next();
        queue.map(MessageQueue::path)
    }

    /// Has algorithms chosen by other costs. All ranks must set the same.
    pub fn set_costs(&mut self, costs: CollectiveCosts) {
        self.costs = costs;
    }

    /// A rank to which the connection has failed, and why. A connection whose operations were discarded because another one had failed comes last.
    pub fn failure(&self) -> Option<(u32, WorkError)> {
        let failures = (0..).zip(&self.queues).filter_map(|(rank, queue)| {
            let failure = queue.as_ref()?.failure()?;
            Some((rank, failure))
        });
        failures.min_by_key(|(_, failure)| failure.cause == Cause::Discarded)
    }

    /// Ends all connections: waits on streams end, and streams that are in one have a fault.
    pub fn abort(&self) {
        self.abort_handles().iter().for_each(AbortHandle::abort);
    }

    /// Handles that other threads can end the connections with.
    pub fn abort_handles(&self) -> Vec<AbortHandle> {
        let queues = self.queues.iter().flatten();
        queues.map(MessageQueue::abort_handle).collect()
    }

    /// Waits in this thread until the peers have everything that this rank has sent; see [`MessageQueue::finish`]. Call it before the communicator is dropped.
    ///
    /// # Errors
    /// As [`MessageQueue::finish`].
    pub fn finish(&mut self, timeout: Option<Duration>) -> Result<()> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        for queue in self.queues.iter_mut().flatten() {
            queue.finish(end.map(|end| end.saturating_duration_since(Instant::now())))?;
        }
        Ok(())
    }

    /// Prepares a barrier: no stream passes its launch before all ranks have come to theirs.
    ///
    /// # Errors
    /// [`Error::State`] for an algorithm other than [`Algorithm::Dissemination`].
    pub fn barrier(&self, algorithm: Option<Algorithm>) -> Result<Collective> {
        let name = "barrier";
        let wanted = self.choose(
            name,
            algorithm,
            None,
            &[Algorithm::Dissemination],
            None,
            |_, ranks| algorithms::barrier(ranks),
        )?;
        self.prepared(wanted, None, None)
    }

    /// Prepares a broadcast of `buffer` of the rank `root` into that of all others.
    ///
    /// # Errors
    /// [`Error::Range`] for the root. [`Error::State`] for an algorithm that does not apply, for a region that is deregistered, and for one that lacks the access that messages need.
    /// [`Error::Foreign`] for a region of another protection domain. Those of [`Region::alloc`], for the memory of the library.
    pub fn broadcast(
        &self,
        buffer: &Slice<'_>,
        root: u32,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        self.check_rank("root", root)?;
        let bytes = u64::from(buffer.len_bytes);
        let all = [
            Algorithm::Binomial,
            Algorithm::Knomial,
            Algorithm::ScatterGather,
        ];
        let make = |algorithm, ranks| match algorithm {
            Algorithm::ScatterGather => algorithms::broadcast_scatter_gather(ranks, root, bytes),
            tree => algorithms::broadcast_tree(tree, ranks, root, bytes),
        };
        let wanted = self.choose("broadcast", algorithm, None, &all, Some(root), make)?;
        self.prepared(wanted, None, Some(buffer))
    }

    /// Prepares a gather: the inputs of all ranks go into `output` of the rank `root`, one behind the other, in the order of the ranks. The inputs are of the lengths
    /// `lens` in bytes. `output` is that long on the root; other ranks give none.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`], and [`Error::Range`] for lengths that do not agree.
    pub fn gather(
        &self,
        input: &Slice<'_>,
        output: Option<&Slice<'_>>,
        lens: &[u64],
        root: u32,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        self.check_rank("root", root)?;
        let blocks = self.blocks(lens)?;
        check_len(
            "input.len_bytes()",
            input,
            blocks.span(Operand::Input, self.rank()).len,
        )?;
        self.check_root_memory("output", output, root, blocks.bytes())?;
        let algorithm = algorithm.or_else(|| linear_if_long(&blocks));
        let make = |algorithm, ranks: Ranks| match algorithm {
            Algorithm::Linear => algorithms::gather_linear(ranks, root, &blocks),
            tree => algorithms::gather_tree(tree, ranks, root, &blocks),
        };
        let wanted = self.choose(
            "gather",
            algorithm,
            None,
            &TO_OR_FROM_ROOT,
            Some(root),
            make,
        )?;
        self.prepared(wanted, Some(input), output)
    }

    /// Prepares a scatter: each rank receives its block of `input` of the rank `root` into `output`. The blocks are of the lengths `lens` in bytes, in the order of the
    /// ranks. Ranks that are not the root give no input.
    ///
    /// # Errors
    /// As [`Communicator::gather`].
    pub fn scatter(
        &self,
        input: Option<&Slice<'_>>,
        output: &Slice<'_>,
        lens: &[u64],
        root: u32,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        self.check_rank("root", root)?;
        let blocks = self.blocks(lens)?;
        check_len(
            "output.len_bytes()",
            output,
            blocks.span(Operand::Output, self.rank()).len,
        )?;
        self.check_root_memory("input", input, root, blocks.bytes())?;
        let algorithm = algorithm.or_else(|| linear_if_long(&blocks));
        let make = |algorithm, ranks: Ranks| match algorithm {
            Algorithm::Linear => algorithms::scatter_linear(ranks, root, &blocks),
            tree => algorithms::scatter_tree(tree, ranks, root, &blocks),
        };
        let wanted = self.choose(
            "scatter",
            algorithm,
            None,
            &TO_OR_FROM_ROOT,
            Some(root),
            make,
        )?;
        self.prepared(wanted, input, Some(output))
    }

    /// Prepares an all-gather: the inputs of all ranks go into the output of each, one behind the other, in the order of the ranks. The inputs are of the lengths `lens` in
    /// bytes. Without an input the operation is in place: the input is this rank's block of the output.
    ///
    /// # Errors
    /// As [`Communicator::gather`].
    pub fn all_gather(
        &self,
        input: Option<&Slice<'_>>,
        output: &Slice<'_>,
        lens: &[u64],
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        let blocks = self.blocks(lens)?;
        check_len("output.len_bytes()", output, blocks.bytes())?;
        let own = blocks.span(Operand::Output, self.rank());
        let mut all = vec![Algorithm::Ring, Algorithm::Bruck];
        all.extend(self.if_power_of_two(Algorithm::RecursiveDoubling));
        let make = |algorithm, ranks| match algorithm {
            Algorithm::Ring => algorithms::all_gather_ring(ranks, &blocks),
            Algorithm::Bruck => algorithms::all_gather_bruck(ranks, &blocks),
            _ => algorithms::all_gather_recursive_doubling(ranks, &blocks),
        };
        let mut wanted = self.choose("all-gather", algorithm, None, &all, None, make)?;
        if let Some(input) = input {
            check_len("input.len_bytes()", input, own.len)?;
            let mut schedule = Schedule::default();
            schedule.copy(OperandSpan::new(Operand::Input, 0, own.len), own);
            let scratch_bytes = wanted.schedule.scratch_bytes;
            schedule.rounds.append(&mut wanted.schedule.rounds);
            wanted.schedule = Schedule {
                scratch_bytes,
                ..schedule
            };
        }
        self.prepared(wanted, input, Some(output))
    }

    /// Prepares an all-to-all: each rank sends a block of its input to each rank, and receives one from each into its output, in the order of the ranks. All blocks are of one
    /// length, a part of `input` and of `output` for each rank.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; [`Error::Range`] for lengths that do not agree; [`Error::Alignment`] for a length that is no multiple of the number of ranks.
    pub fn all_to_all(
        &self,
        input: &Slice<'_>,
        output: &Slice<'_>,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        let (bytes, count) = (u64::from(input.len_bytes), u64::from(self.size()));
        check_len("output.len_bytes()", output, bytes)?;
        if !bytes.is_multiple_of(count) {
            return Err(Error::Alignment {
                argument: "input.len_bytes()",
                value: bytes,
                align: count,
            });
        }
        let block = bytes / count;
        let blocks = Blocks::of((0..count).map(|_| block));
        let make = |algorithm, ranks| match algorithm {
            Algorithm::Pairwise => algorithms::all_to_all_pairwise(ranks, &blocks, &blocks),
            _ => algorithms::all_to_all_bruck(ranks, block),
        };
        let all = [Algorithm::Pairwise, Algorithm::Bruck];
        let wanted = self.choose("all-to-all", algorithm, None, &all, None, make)?;
        self.prepared(wanted, Some(input), Some(output))
    }

    /// As [`Communicator::all_to_all`], with blocks of the lengths `sends` and `receives` in bytes, also for this rank itself. No rank knows the lengths of all, so the algorithm is
    /// [`Algorithm::Pairwise`].
    ///
    /// # Errors
    /// As [`Communicator::all_to_all`].
    pub fn all_to_all_v(
        &self,
        input: &Slice<'_>,
        output: &Slice<'_>,
        sends: &[u64],
        receives: &[u64],
    ) -> Result<Collective> {
        let [from, into] = [self.blocks(sends)?, self.blocks(receives)?];
        check_len("input.len_bytes()", input, from.bytes())?;
        check_len("output.len_bytes()", output, into.bytes())?;
        let own = from.span(Operand::Input, self.rank()).len;
        let other = into.span(Operand::Output, self.rank()).len;
        if own != other {
            return Err(range("receives[rank]", other, own, own));
        }
        // Not by the costs, which look at all ranks.
        let wanted = Wanted {
            name: "all-to-all",
            algorithm: Algorithm::Pairwise,
            schedule: algorithms::all_to_all_pairwise(self.ranks, &from, &into),
            reduction: None,
            predicted_ns: None,
        };
        self.prepared(wanted, Some(input), Some(output))
    }

    /// Prepares a list of messages: each of `sends` goes to a rank, and each of `receives` comes from one. Ranks give lists of their own. The messages from one rank to another are received in
    /// the order in which they are sent, by slices as long as theirs; a rank may name itself. No order of the lists makes ranks wait for each other. A launch with more messages between two
    /// ranks than their queue has room for ([`MessageConfig::ahead`](crate::MessageConfig::ahead)) waits in the calling thread until the stream has made room.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; [`Error::Range`] for a rank, and if the messages of this rank to itself are not as many or as long as those from itself; [`Error::State`] if a slice
    /// that is received into overlaps another one.
    pub fn exchange(
        &self,
        sends: &[(u32, Slice<'_>)],
        receives: &[(u32, Slice<'_>)],
    ) -> Result<Collective> {
        const NAME: &str = "exchange";
        let own = |list: &[(u32, Slice<'_>)]| -> Vec<u64> {
            let own = list.iter().filter(|(peer, _)| *peer == self.rank());
            own.map(|(_, slice)| slice.len_bytes.into()).collect()
        };
        for (argument, list, needed) in [("sends", sends, SENT), ("receives", receives, received())]
        {
            for (peer, slice) in list {
                self.check_rank(argument, *peer)?;
                self.check_memory(NAME, slice, needed)?;
            }
        }
        let (sent, received) = (own(sends), own(receives));
        if sent.len() != received.len() {
            let (sent, received) = (sent.len() as u64, received.len() as u64);
            return Err(range("receives from itself", received, sent, sent));
        }
        if let Some((sent, received)) = (sent.iter().zip(&received)).find(|(a, b)| a != b) {
            return Err(range("receives from itself", *received, *sent, *sent));
        }
        check_listed(NAME, sends, receives)?;
        let listed = |first: usize, list: &[(u32, Slice<'_>)]| -> Vec<Transfer> {
            let numbered = list.iter().zip(first..);
            let transfer = |((peer, slice), at): (&(u32, Slice<'_>), usize)| {
                let place = Operand::Listed(at as u32);
                let span = OperandSpan::new(place, 0, slice.len_bytes.into());
                Transfer { peer: *peer, span }
            };
            numbered.map(transfer).collect()
        };
        let [sent, received] = [listed(0, sends), listed(sends.len(), receives)];
        let wanted = Wanted {
            name: NAME,
            algorithm: Algorithm::Linear,
            schedule: algorithms::exchange(self.ranks, &sent, &received),
            reduction: None,
            predicted_ns: None,
        };
        let mut collective = self.prepared(wanted, None, None)?;
        let all = sends.iter().chain(receives);
        collective.memories.listed = all.map(|(_, slice)| Memory::of(slice)).collect();
        Ok(collective)
    }

    /// Prepares a reduction of the inputs of all ranks into `output` of the rank `root`. It is as long as the input; other ranks give none.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce(
        &self,
        input: &Slice<'_>,
        output: Option<&Slice<'_>>,
        reduction: Reduction,
        root: u32,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        self.check_rank("root", root)?;
        let bytes = elements(input, reduction)?;
        self.check_root_memory("output", output, root, bytes)?;
        let all = [Algorithm::Binomial, Algorithm::Knomial];
        let make = |tree, ranks| algorithms::reduce_tree(tree, ranks, root, bytes);
        let mut wanted =
            self.choose("reduce", algorithm, Some(reduction), &all, Some(root), make)?;
        if self.rank() == root {
            wanted.divide(OperandSpan::new(Operand::Output, 0, bytes));
        }
        self.prepared(wanted, Some(input), output)
    }

    /// Prepares a reduction of the inputs of all ranks, of which each rank has a block in its output. The blocks are of the lengths `lens` in bytes, in the order of the ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], and [`Error::Range`] for lengths that do not agree.
    pub fn reduce_scatter(
        &self,
        input: &Slice<'_>,
        output: &Slice<'_>,
        lens: &[u64],
        reduction: Reduction,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        elements(input, reduction)?;
        let blocks = self.blocks(lens)?;
        for len in lens {
            whole("lens", *len, reduction)?;
        }
        check_len("input.len_bytes()", input, blocks.bytes())?;
        check_len(
            "output.len_bytes()",
            output,
            blocks.span(Operand::Input, self.rank()).len,
        )?;
        let result = OperandSpan::new(Operand::Output, 0, output.len_bytes.into());
        let mut all = vec![Algorithm::Ring];
        all.extend(self.if_power_of_two(Algorithm::RecursiveHalving));
        let name = "reduce-scatter";
        let make = |algorithm, ranks: Ranks| {
            let own = blocks.span(Operand::Output, ranks.rank).len;
            let result = OperandSpan::new(Operand::Output, 0, own);
            match algorithm {
                Algorithm::Ring => algorithms::reduce_scatter_ring(ranks, &blocks, result),
                _ => algorithms::reduce_scatter_recursive_halving(ranks, &blocks, result),
            }
        };
        let mut wanted = self.choose(name, algorithm, Some(reduction), &all, None, make)?;
        wanted.divide(result);
        self.prepared(wanted, Some(input), Some(output))
    }

    /// Prepares a reduction of the inputs of all ranks into the output of each. Input and output are of one length, and may be the same memory.
    ///
    /// Every rank has the same bits. The order in which elements are reduced depends on the algorithm and the number of ranks, and on nothing else.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; [`Error::Range`] for lengths that do not agree; [`Error::Alignment`] for a length that is not of whole elements.
    pub fn all_reduce(
        &self,
        input: &Slice<'_>,
        output: &Slice<'_>,
        reduction: Reduction,
        algorithm: Option<Algorithm>,
    ) -> Result<Collective> {
        let bytes = elements(input, reduction)?;
        check_len("output.len_bytes()", output, bytes)?;
        let blocks = Blocks::even(bytes, reduction.data.bytes(), self.size());
        let whole = OperandSpan::new(Operand::Output, 0, bytes);
        let divides = reduction.op == ReduceOp::Average;
        let all = [
            Algorithm::Ring,
            Algorithm::RecursiveDoubling,
            Algorithm::RecursiveHalving,
            Algorithm::ParameterServer,
        ];
        let name = ALL_REDUCE;
        let make = |algorithm, ranks: Ranks| {
            let own = blocks.span(Operand::Output, ranks.rank);
            let then_gather = |mut schedule: Schedule, gather: Schedule| {
                if divides {
                    schedule.then(MemoryStep::Divide { span: own });
                }
                schedule.append(gather);
                schedule
            };
            match algorithm {
                Algorithm::Ring => then_gather(
                    algorithms::reduce_scatter_ring(ranks, &blocks, own),
                    algorithms::all_gather_ring(ranks, &blocks),
                ),
                Algorithm::RecursiveHalving => algorithms::all_reduce_recursive_halving(
                    ranks,
                    bytes,
                    reduction.data.bytes(),
                    divides,
                ),
                Algorithm::ParameterServer => {
                    algorithms::all_reduce_parameter_server(ranks, bytes, divides)
                }
                _ => algorithms::all_reduce_recursive_doubling(ranks, bytes),
            }
        };
        let mut wanted = self.choose(name, algorithm, Some(reduction), &all, None, make)?;
        if wanted.algorithm == Algorithm::RecursiveDoubling {
            wanted.divide(whole);
        }
        self.prepared(wanted, Some(input), Some(output))
    }

    /// Queues an operation on a stream. A CUDA stream may still work on the memory of one that has failed, until it is synchronized.
    ///
    /// If a message queue is full when a part of the operation is queued already, this waits in the calling thread until the stream has made room, for at most
    /// [`EndpointConfig::wait_timeout`](crate::EndpointConfig::wait_timeout).
    ///
    /// # Errors
    /// [`Error::Foreign`] for an operation of another communicator; [`Error::State`] for one that the stream cannot carry out ([`Collective::runs_on`]); those of
    /// [`MessageQueue::start_send`] and [`MessageQueue::recv`]. If a part of the operation was queued before, the peers could not end theirs: the communicator is
    /// aborted then.
    pub fn launch(
        &mut self,
        stream: &dyn Executor,
        collective: &Collective,
    ) -> Result<CollectiveTicket> {
        self.check_launch(stream, collective)?;
        let mut parts = Vec::new();
        let queued = self.give_rounds(&mut OnStream(stream), collective, &mut parts);
        match queued {
            Ok(()) => Ok(CollectiveTicket { parts }),
            Err((error, has_begun)) => {
                if has_begun {
                    self.abort();
                    // Memory that was said to be ready has no ticket: no peer writes it when this returns.
                    self.queues
                        .iter()
                        .flatten()
                        .for_each(MessageQueue::await_stop);
                }
                Err(error)
            }
        }
    }

    /// Fails for an operation that cannot be launched.
    pub(super) fn check_launch(
        &self,
        stream: &dyn Executor,
        collective: &Collective,
    ) -> Result<()> {
        self.check_own(collective)?;
        collective.check_stream(stream)
    }

    /// Fails for an operation of another communicator, and if a connection has failed.
    pub(super) fn check_own(&self, collective: &Collective) -> Result<()> {
        // Those of one rank have no peers that they could miss.
        if collective.communicator != self.id {
            return Err(Error::Foreign {
                argument: "collective",
                found: "an operation of another communicator".into(),
                expected: "one that was prepared by this communicator".into(),
            });
        }
        match self.failure() {
            Some((_, failure)) => Err(Error::Work(failure)),
            None => Ok(()),
        }
    }

    fn check_rank(&self, argument: &'static str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(range(argument, rank.into(), 0, u64::from(self.size()) - 1))
    }

    /// The memory that only the root has.
    fn check_root_memory(
        &self,
        argument: &'static str,
        memory: Option<&Slice<'_>>,
        root: u32,
        bytes: u64,
    ) -> Result<()> {
        match (memory, self.rank() == root) {
            (Some(memory), true) => check_len(argument, memory, bytes),
            (None, false) => Ok(()),
            (memory, _) => {
                let reason = match memory {
                    None => format!("rank {root} is the root, and needs it"),
                    Some(_) => format!("rank {root} is the root, and this is another one"),
                };
                Err(Error::state(StateKind::WrongKind, argument, reason))
            }
        }
    }

    fn blocks(&self, lens: &[u64]) -> Result<Blocks> {
        let count = u64::from(self.size());
        if lens.len() as u64 != count {
            return Err(range("lens.len()", lens.len() as u64, count, count));
        }
        let total = lens
            .iter()
            .try_fold(0_u64, |sum, len| sum.checked_add(*len));
        if total.is_none() {
            return Err(range("the sum of lens", u64::MAX, 0, u64::MAX));
        }
        Ok(Blocks::of(lens.iter().copied()))
    }

    fn if_power_of_two(&self, algorithm: Algorithm) -> Option<Algorithm> {
        self.ranks.is_power_of_two().then_some(algorithm)
    }

    /// The schedule of that algorithm, or of the one of `all` with the least predicted time. Every rank must choose the same, so this looks at the slowest rank and not at this one.
    fn choose(
        &self,
        name: &'static str,
        forced: Option<Algorithm>,
        reduction: Option<Reduction>,
        all: &[Algorithm],
        root: Option<u32>,
        make: impl Fn(Algorithm, Ranks) -> Schedule,
    ) -> Result<Wanted> {
        if let Some(forced) = forced.filter(|forced| !all.contains(forced)) {
            let names: Vec<&str> = all.iter().map(|it| it.name()).collect();
            let reason = format!(
                "`{forced}` is no algorithm for it and {} ranks; there are: {}",
                self.size(),
                names.join(", ")
            );
            return Err(Error::state(StateKind::Unsupported, name, reason));
        }
        // The costs count what a rank does, not how deep a tree is, by which a k-nomial one could be the better.
        let candidates = all.iter().filter(|it| match forced {
            Some(forced) => forced == **it,
            None => **it != Algorithm::Knomial,
        });
        let predicted = candidates.map(|algorithm| {
            let of_rank = |rank| {
                let count = self.ranks.count;
                self.costs
                    .predicted_ns(&make(*algorithm, Ranks { rank, count }))
            };
            let ranks = self.some_ranks().chain(root);
            let slowest = ranks.map(of_rank).fold(0.0, f64::max);
            (slowest, *algorithm)
        });
        let best = predicted.min_by(|a, b| a.0.total_cmp(&b.0));
        let (predicted_ns, algorithm) = best.ok_or_else(|| {
            Error::state(StateKind::Unsupported, name, "there is no algorithm for it")
        })?;
        Ok(Wanted {
            name,
            algorithm,
            schedule: make(algorithm, self.ranks),
            reduction,
            predicted_ns: Some(predicted_ns),
        })
    }

    /// The ranks whose times are predicted, beside the root: all, or of many those at the ends and in the middle.
    fn some_ranks(&self) -> impl Iterator<Item = u32> {
        let count = self.size();
        let step = (count / RANKS_PREDICTED).max(1);
        (0..count).filter(move |rank| rank % step == 0 || *rank == 1 || rank + 1 == count)
    }

    fn prepared(
        &self,
        wanted: Wanted,
        input: Option<&Slice<'_>>,
        output: Option<&Slice<'_>>,
    ) -> Result<Collective> {
        let Wanted {
            name,
            algorithm,
            schedule,
            reduction,
            predicted_ns,
        } = wanted;
        if let (Some(input), Some(output)) = (input, output) {
            check_apart(name, input, output)?;
        }
        for (slice, needed) in [(input, SENT), (output, received())] {
            slice.map_or(Ok(()), |slice| self.check_memory(name, slice, needed))?;
        }
        let schedule = schedule.with_messages_of(MESSAGE_MAX);
        let scratch = match schedule.scratch_bytes {
            0 => None,
            bytes => {
                let region = self.scratch(bytes, between(), output.or(input))?;
                Some(Memory {
                    region,
                    offset: 0,
                    len: bytes,
                })
            }
        };
        Ok(Collective {
            communicator: self.id,
            name,
            algorithm,
            predicted_ns: predicted_ns.unwrap_or_else(|| self.costs.predicted_ns(&schedule)),
            schedule,
            memories: Memories {
                input: input.map(Memory::of),
                output: output.map(Memory::of),
                scratch,
                listed: Vec::new(),
            },
            reduction,
            matched: None,
        })
    }

    /// An operation of this rank alone.
    pub(super) fn prepared_alone(
        &self,
        name: &'static str,
        algorithm: Algorithm,
        schedule: Schedule,
        reduction: Reduction,
        (input, output): (&Slice<'_>, &Slice<'_>),
    ) -> Result<Collective> {
        let wanted = Wanted {
            name,
            algorithm,
            schedule,
            reduction: Some(reduction),
            predicted_ns: None,
        };
        self.prepared(wanted, Some(input), Some(output))
    }

    fn check_memory(&self, name: &'static str, slice: &Slice<'_>, needed: Access) -> Result<()> {
        self.domain.check_same(slice.region.domain(), "memory")?;
        if slice.region.is_registered() && slice.region.access().contains(needed) {
            return Ok(());
        }
        let reason = format!("its memory is deregistered, or does not have {needed:?}");
        Err(Error::state(StateKind::NoAccess, name, reason))
    }
}

impl Communicator {
    /// Memory for what is between input and output: of the GPU if theirs is.
    pub(super) fn scratch(
        &self,
        bytes: u64,
        access: Access,
        beside: Option<&Slice<'_>>,
    ) -> Result<Region> {
        #[cfg(feature = "cuda")]
        if let Some(context) = beside.and_then(|slice| slice.region.cuda_context()) {
            return Region::register_device(&self.domain, &context.alloc(bytes)?, access);
        }
        let _ = beside;
        Region::alloc(&self.domain, bytes, access)
    }
}

impl Wanted {
    /// Ends an average.
    fn divide(&mut self, span: OperandSpan) {
        if self.reduction.is_some_and(|it| it.op == ReduceOp::Average) {
            self.schedule.then(MemoryStep::Divide { span });
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

fn range(argument: &'static str, value: u64, min: u64, max: u64) -> Error {
    Error::Range {
        argument,
        value,
        min,
        max,
    }
}

/// Fails for memory that overlaps. That of an all-reduce may be the same.
fn check_apart(name: &'static str, input: &Slice<'_>, output: &Slice<'_>) -> Result<()> {
    let [from, to] = [ends(input), ends(output)];
    let overlaps = from.0.max(to.0) < from.1.min(to.1);
    if overlaps && !(name == ALL_REDUCE && from == to) {
        let reason = "input and output overlap";
        return Err(Error::state(StateKind::WrongKind, name, reason));
    }
    Ok(())
}

/// Where a slice begins and ends.
fn ends(slice: &Slice<'_>) -> (u64, u64) {
    let start = slice.region.remote().addr + slice.offset;
    (start, start + u64::from(slice.len_bytes))
}

/// Fails for memory of a list that is received into and overlaps other memory of it.
fn check_listed(
    name: &'static str,
    sends: &[(u32, Slice<'_>)],
    receives: &[(u32, Slice<'_>)],
) -> Result<()> {
    let of = |list: &[(u32, Slice<'_>)], is_received: bool| -> Vec<(u64, u64, bool)> {
        let spans = list.iter().map(|(_, slice)| ends(slice));
        let spans = spans.filter(|(start, end)| start < end);
        spans
            .map(|(start, end)| (start, end, is_received))
            .collect()
    };
    let mut all = [of(sends, false), of(receives, true)].concat();
    all.sort_unstable();
    // The ends of what begins before, of any memory and of what is received into.
    let (mut of_any, mut of_received) = (0, 0);
    for (start, end, is_received) in all {
        if start < if is_received { of_any } else { of_received } {
            let reason = "a slice that is received into overlaps another one";
            return Err(Error::state(StateKind::WrongKind, name, reason));
        }
        of_any = of_any.max(end);
        if is_received {
            of_received = of_received.max(end);
        }
    }
    Ok(())
}

fn linear_if_long(blocks: &Blocks) -> Option<Algorithm> {
    (blocks.bytes() > TREE_BYTES_MAX).then_some(Algorithm::Linear)
}

fn check_len(argument: &'static str, slice: &Slice<'_>, bytes: u64) -> Result<()> {
    match u64::from(slice.len_bytes) == bytes {
        true => Ok(()),
        false => Err(range(argument, slice.len_bytes.into(), bytes, bytes)),
    }
}

fn whole(argument: &'static str, value: u64, reduction: Reduction) -> Result<()> {
    let align = reduction.data.bytes();
    match value.is_multiple_of(align) {
        true => Ok(()),
        false => Err(Error::Alignment {
            argument,
            value,
            align,
        }),
    }
}

/// The length of whole elements.
fn elements(input: &Slice<'_>, reduction: Reduction) -> Result<u64> {
    let bytes = u64::from(input.len_bytes);
    whole("input.len_bytes()", bytes, reduction).map(|()| bytes)
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use super::*;
    use crate::{DataType, Device};

    /// Otherwise they would wait for messages that nobody sends.
    #[test]
    fn every_rank_chooses_the_same_algorithm() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let [region, other] =
            [(); 2].map(|()| Region::alloc(&domain, 1 << 20, Access::ALL).unwrap());
        let mut chosen = std::collections::BTreeSet::new();
        for count in 2..=9_u32 {
            let of_rank = |rank| Communicator {
                id: 0,
                ranks: Ranks { rank, count },
                queues: (0..count).map(|_| None).collect(),
                domain: domain.clone(),
                costs: CollectiveCosts::default(),
            };
            for share in [0, 8, 1 << 10, 1 << 13, 100_000] {
                let bytes = share / 8 * 8;
                let whole = region.slice(0, bytes).unwrap();
                // Blocks that differ from rank to rank.
                let lens = Blocks::even(bytes, 8, count);
                let mut lens: Vec<u64> = (0..count)
                    .map(|rank| lens.span(Operand::Input, rank).len)
                    .collect();
                let moved = lens[0];
                lens[0] -= moved;
                lens[count as usize - 1] += moved;
                let [equal, into] =
                    [&region, &other].map(|it| it.slice(0, share * u64::from(count)).unwrap());
                let sum = Reduction::new(DataType::I64, ReduceOp::Average);
                let of_root = |rank: u32| (rank == count - 1).then_some(&whole);
                let algorithms = |rank: u32| {
                    let ranks = of_rank(rank);
                    let own = other.slice(0, lens[rank as usize]).unwrap();
                    [
                        ranks.broadcast(&whole, count - 1, None).unwrap(),
                        ranks.all_gather(None, &whole, &lens, None).unwrap(),
                        ranks.all_to_all(&equal, &into, None).unwrap(),
                        ranks
                            .reduce_scatter(&whole, &own, &lens, sum, None)
                            .unwrap(),
                        ranks.all_reduce(&whole, &whole, sum, None).unwrap(),
                        ranks
                            .gather(&own, of_root(rank), &lens, count - 1, None)
                            .unwrap(),
                        ranks
                            .scatter(of_root(rank), &own, &lens, count - 1, None)
                            .unwrap(),
                    ]
                    .map(|it| (it.name, it.algorithm()))
                };
                let first = algorithms(0);
                chosen.extend(first.map(|(name, algorithm)| (name, algorithm.name())));
                for rank in 1..count {
                    assert_eq!(algorithms(rank), first, "{rank} of {count}, {bytes} bytes");
                }
            }
        }
        // Of many ranks the root is one of those that are looked at.
        let of_root = |root: u32| {
            let ranks = Communicator {
                id: 0,
                ranks: Ranks { rank: 3, count: 64 },
                queues: (0..64).map(|_| None).collect(),
                domain: domain.clone(),
                costs: CollectiveCosts::default(),
            };
            let whole = region.slice(0, 1 << 20).unwrap();
            let tree = ranks.broadcast(&whole, root, Some(Algorithm::Binomial));
            let chosen = ranks.broadcast(&whole, root, None).unwrap().algorithm();
            (tree.unwrap().predicted_ns(), chosen)
        };
        assert_eq!(of_root(0), of_root(2));
        // Short and long data have different ones.
        let of = |name| chosen.iter().filter(|it| it.0 == name).count();
        assert!(
            ["broadcast", "all-to-all", "all-reduce", "gather", "scatter"]
                .into_iter()
                .all(|name| of(name) > 1),
            "{chosen:?}"
        );
    }
}
