//! One end of a connection for messages.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use super::armed::ArmedGuard;
use super::batch::OperationBatch;
use super::config::SLOTS_MAX;
use super::memory::{MessageMemory, TargetLimits, check_slice, check_slices, check_target};
use super::receive::{Receive, ReceiveOutcome, Taker, capacity};
use super::{MessageAddress, MessageConfig, MessageTicket};
use crate::endpoint::{
    AbortHandle, Control, Endpoint, PathReport, Prepared, QueueKind, Ticket, Work, poll_until,
    stream_post_among,
};
use crate::region::{Access, ProtectionDomain, Region, RemoteSlice, Slice};
use crate::stream::{Executor, Submission};
use crate::{Error, Result, StateKind, WorkError};

/// Within this time a stream of a GPU is looked at.
const LOOKED_AT: Duration = Duration::from_millis(20);

/// Length of the words that the peer writes: for credits one for each slot that it may have, and behind them as many by which memory is ready.
const CREDITS_BYTES: u64 = 2 * READY_AT;
const READY_AT: u64 = CREDIT_BYTES * SLOTS_MAX as u64;
const CREDIT_BYTES: u64 = 4;

/// One end of a connection for messages: both sides send, and receive in the order in which the other one has sent.
///
/// `send` and `recv` are queued on streams, and executed there in their turn: [`MessageQueue::send`] waits on the stream until its memory may be used again,
/// [`MessageQueue::recv`] until the message is in its memory. [`MessageQueue::start_send`] does not wait, so that two sides can send to each other before
/// they receive. `send_now` and `recv_now` do the same from the calling thread.
///
/// The k-th receive takes the k-th message. A message may be shorter than the memory of its receive. If it is longer, nothing is stored: the receive fails
/// with [`Error::Truncated`](crate::Error::Truncated), and its stream has a fault; the send completes.
///
/// A message of at most [`MessageConfig::eager_bytes`] of the receiving side is *eager*: it goes into a slot there, whether a receive is queued or not, and the
/// receiving stream copies it. A longer message is read by the receiving side, straight into place; its send is done after that, so the send waits for the
/// receive. It is one slice, of memory with [`Access::REMOTE_READ`], and it is received into one slice. A sender that has used all slots waits, on its stream, until
/// the receiver has emptied one.
///
/// A wait that misses its deadline, or that its stream discards, fails the queue. The peer may still receive what was sent, with whatever is in the memory by then, until
/// this queue is dropped or aborted (`MessageQueue::abort_handle`).
///
/// Sends and receives can be queued on every stream, receives on one of a GPU if this library has kernels for it. A kernel takes the message out of its slot there, into
/// memory of the host or of the GPU (`Region::register_device`). After a receive that has failed, the memory must not be used before the stream is synchronized: a kernel may be at it.
///
/// ```
/// use doorbell::{Access, Device, HostStream, MessageConfig, MessageQueue, Region};
/// use std::time::Duration;
///
/// let domain = Device::open("softcx")?.protection_domain();
/// let mut a = MessageQueue::new(&domain, &MessageConfig::default())?;
/// let mut b = MessageQueue::new(&domain, &MessageConfig::default())?;
/// a.connect(&b.address())?;
/// b.connect(&a.address())?;
/// let region = Region::alloc(&domain, 128, Access::ALL)?;
/// region.fill(0, 64, 42)?;
/// let (sender, receiver) = (HostStream::new("sender")?, HostStream::new("receiver")?);
/// a.send(&sender, &[region.slice(0, 10)?])?;
/// let received = b.recv(&receiver, &[region.slice(64, 64)?])?;
/// assert_eq!(received.wait(Some(Duration::from_secs(5)))?, 10);
/// assert!(region.is_filled_with(64, 10, 42)? && region.is_filled_with(74, 54, 0)?);
/// # Ok::<(), doorbell::Error>(())
/// ```
pub struct MessageQueue {
    /// Before the endpoints.
    #[cfg(feature = "cuda")]
    pub(super) armed: ArmedGuard,
    /// Sends messages, and receives into the slots.
    pub(super) endpoint: Endpoint,
    /// Reads messages that are not eager, and writes credits. In one queue with the sends, a send would stand behind a receive that waits for its answer.
    pub(super) returns: Endpoint,
    pub(super) config: MessageConfig,
    /// For each slot of the peer a word, into which it writes one more than the number of the message that it has received out of it. So no two writes to
    /// a word are under way at the same time: writes may be placed in any order. Behind them the words by which memory of the peer is ready.
    credits: Region,
    pub(super) memory: MessageMemory,
    peer: Option<MessageAddress>,
    /// Of the messages that are sent from here on.
    pub(super) tag: u32,
    pub(super) sent: u32,
    pub(super) received: u32,
    /// Of these the ones that the peer's memory, or this side's, had to be ready for. Their own count, so that each word of readiness is written again before the
    /// count has gone round.
    pub(super) placed_sent: u32,
    pub(super) placed_received: u32,
    /// Credits without a completion since the last with one.
    pub(super) unsignaled: u32,
    /// Completions of credits that are to come and that neither a stream nor this thread waits for.
    pub(super) uncollected: u32,
    /// The same of messages: of calls that timed out.
    pub(super) unwaited: u32,
    /// The memory of messages that the peer has not read yet.
    unread: VecDeque<(u32, Region)>,
    /// When a call that receives from any queue last took a message of this one, by a number that grows.
    pub(super) served: u64,
    /// The receives by kernels that may still be under way. Their results have places, which are used again.
    by_kernels: VecDeque<(u32, Arc<ReceiveOutcome>)>,
}

/// A message to send.
#[derive(Clone, Copy)]
pub(crate) enum Outgoing<'a> {
    /// Into a slot of the peer, with a header.
    Slot(&'a [Slice<'a>]),
    /// Into memory of the peer that both sides have agreed on, and that is as long. The slices are one, or none for a message without bytes.
    Place(&'a [Slice<'a>], RemoteSlice),
}

impl Outgoing<'_> {
    /// Whether memory of the peer must be ready for it.
    pub(super) fn is_placed(&self) -> bool {
        matches!(self, Outgoing::Place([_, ..], _))
    }
}

/// The word by which the memory of a message that is written into place is ready, by the number of such messages before, and its value from then on.
fn ready_of(number: u32) -> (u64, u32) {
    let word = u64::from(number & (SLOTS_MAX - 1));
    (READY_AT + CREDIT_BYTES * word, number.wrapping_add(1))
}

/// Whether operations are prepared for one execution, or again and again for a graph, which needs as many each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeats {
    /// Without the waits that are over already, and with as few completions as there may be.
    Never,
    /// With all waits, and a completion of each credit. What nobody has waited for is waited for before.
    #[cfg(feature = "cuda")]
    Always,
}

/// A message that a stream sends, and no stream waits for yet: give it to [`MessageQueue::wait_send`]. The memory of the message must not be changed before
/// that wait is over. If this is dropped, [`MessageQueue::finish`] says when that is. The queue keeps the memory of a message that the peer is to read.
#[derive(Debug)]
#[must_use = "the memory of a message must not be changed before `wait_send`"]
pub struct PendingSend {
    pub(super) wait: Prepared,
    pub(super) parts: Vec<Ticket>,
    pub(super) number: u32,
    pub(super) len_bytes: u64,
    /// The memory that the peer reads, of a message that is not eager.
    pub(super) held: Option<Region>,
}

impl MessageQueue {
    /// Makes a queue, with its slots and an endpoint.
    ///
    /// # Errors
    /// [`Error::Range`] for the configuration; those of [`Endpoint::new`] and [`Region::alloc`].
    pub fn new(domain: &ProtectionDomain, config: &MessageConfig) -> Result<MessageQueue> {
        config.check()?;
        let mut config = *config;
        let returns = Endpoint::new(domain, &config.of_returns())?;
        config.endpoint = config.of_messages();
        config.slots = config.slot_count();
        let endpoint = Endpoint::new(domain, &config.endpoint)?;
        let credits = Region::alloc(
            domain,
            CREDITS_BYTES,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        )?;
        let mut queue = MessageQueue {
            #[cfg(feature = "cuda")]
            armed: ArmedGuard::new(endpoint.abort_handle().and(returns.abort_handle())),
            endpoint,
            returns,
            config,
            credits,
            memory: MessageMemory::new(domain, &config)?,
            peer: None,
            tag: 0,
            sent: 0,
            received: 0,
            placed_sent: 0,
            placed_received: 0,
            unsignaled: 0,
            uncollected: 0,
            unwaited: 0,
            unread: VecDeque::new(),
            served: 0,
            by_kernels: VecDeque::new(),
        };
        for number in 0..config.slots {
            let slot = queue.memory.slot_slice(number)?;
            queue.endpoint.post_recv(number.into(), &[slot])?;
        }
        Ok(queue)
    }

    /// What the peer needs for [`MessageQueue::connect`].
    pub fn address(&self) -> MessageAddress {
        MessageAddress {
            messages: self.endpoint.address(),
            returns: self.returns.address(),
            credits: self.credits.remote(),
            slots: self.config.slots,
            eager_bytes: self.config.eager_bytes,
        }
    }

    /// Connects with the queue at an address, whose side does the same with the address of this one.
    ///
    /// # Errors
    /// As [`Endpoint::connect`]; [`Error::OutOfBounds`] if the address names less memory than the words that this side writes.
    pub fn connect(&mut self, peer: &MessageAddress) -> Result<()> {
        // Before anything is changed: a region for fewer words would be found only by the receive that has none.
        peer.credits.slice(0, CREDITS_BYTES)?;
        self.endpoint.connect(&peer.messages)?;
        self.returns.connect(&peer.returns)?;
        self.peer = Some(*peer);
        Ok(())
    }

    /// Queues a message on a stream, and a wait until its memory may be used again. The slices are sent one after the other.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`].
    pub fn send(&mut self, stream: &dyn Executor, slices: &[Slice<'_>]) -> Result<MessageTicket> {
        let mut batch = OperationBatch::default();
        let made = self.make_send(Outgoing::Slot(slices), Repeats::Never, &mut batch);
        let mut pending = self.or_roll_back(&mut batch, made)?;
        // The wait is prepared last, so it goes last.
        let wait = pending.wait;
        batch.prepared.push(wait);
        let ended = self.make_end(pending.number, pending.held.clone());
        let ended = ended.map(|end| end.map(|(end, ticket)| (batch.push(end), ticket).1));
        let end = self.or_roll_back(&mut batch, ended)?;
        let posted = stream_post_among(
            stream,
            &mut batch.prepared,
            std::mem::take(&mut batch.others),
        );
        let tickets = self.or_roll_back(&mut batch, posted)?;
        self.note_sent(pending.held, false);
        pending.parts.extend(tickets);
        pending.parts.extend(end);
        Ok(MessageTicket::of_send(
            pending.parts,
            pending.len_bytes,
            stream.turns(),
        ))
    }

    /// Queues a message on a stream, as [`MessageQueue::send`], but no wait. So both sides can send before they receive, whatever the length.
    ///
    /// # Errors
    /// [`Error::State`] if the queue is not connected, for a region that is deregistered, or for a message that is not eager if its region has no
    /// [`Access::REMOTE_READ`]; [`Error::Foreign`] for a region of another protection domain; [`Error::Range`] for too many slices, of which a message that is not
    /// eager takes one, for more bytes than the port has in a message, and for a stream whose queue is too short for the operations together. [`Error::QueueFull`], and with
    /// [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout) [`Error::Timeout`], if [`MessageConfig::ahead`] messages are not done;
    /// [`Error::Work`] if the queue has failed; and what the stream refuses. Nothing has changed then.
    pub fn start_send(
        &mut self,
        stream: &dyn Executor,
        slices: &[Slice<'_>],
    ) -> Result<PendingSend> {
        self.start(stream, Outgoing::Slot(slices))
    }

    /// [`MessageQueue::start_send`], also of a message that is written into place.
    pub(crate) fn start(
        &mut self,
        stream: &dyn Executor,
        message: Outgoing<'_>,
    ) -> Result<PendingSend> {
        let mut batch = OperationBatch::default();
        let made = self.make_send(message, Repeats::Never, &mut batch);
        let mut pending = self.or_roll_back(&mut batch, made)?;
        let others = std::mem::take(&mut batch.others);
        match stream_post_among(stream, &mut batch.prepared, others) {
            Ok(tickets) => {
                self.note_sent(pending.held.clone(), message.is_placed());
                pending.parts.extend(tickets);
                Ok(pending)
            }
            Err(error) => {
                self.endpoint.rollback(pending.wait);
                self.roll_back(&mut batch);
                Err(error)
            }
        }
    }

    /// Queues the wait for a message that was sent before, on the same stream or another one.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a message of another queue; [`Error::Work`] if the queue has failed; what the stream refuses. The wait can then not be queued
    /// again. The message is sent all the same; [`MessageQueue::finish`] waits for it.
    pub fn wait_send(
        &mut self,
        stream: &dyn Executor,
        pending: PendingSend,
    ) -> Result<MessageTicket> {
        if !self.endpoint.has_prepared(&pending.wait) {
            return Err(Error::Foreign {
                argument: "pending",
                found: "another message queue".into(),
                expected: "the queue that has sent the message".into(),
            });
        }
        let PendingSend {
            wait,
            mut parts,
            number,
            len_bytes,
            held,
        } = pending;
        let end = self.make_end(number, held)?;
        let mut batch = OperationBatch::default();
        batch.prepared.push(wait);
        let end = end.map(|(end, ticket)| (batch.push(end), ticket).1);
        parts.extend(stream_post_among(
            stream,
            &mut batch.prepared,
            batch.others,
        )?);
        parts.extend(end);
        Ok(MessageTicket::of_send(parts, len_bytes, stream.turns()))
    }

    /// Queues a receive on a stream: the stream waits for the next message, and stores it into the slices, one after the other. Memory behind the end of the
    /// message stays as it is.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`]; [`Error::State`] for memory without [`Access::LOCAL_WRITE`], for memory that the CPU cannot access, unless the stream is one of a GPU and
    /// the path is not [`Control::Sync`], for a GPU for which this library has no kernel, and there for memory of another device whose address is not known; [`Error::Foreign`] for memory of another CUDA context; [`Error::Range`] for several
    /// slices with more bytes than [`MessageConfig::eager_bytes`].
    pub fn recv(&mut self, stream: &dyn Executor, slices: &[Slice<'_>]) -> Result<MessageTicket> {
        let by_kernel = !stream.executes_on_host() && self.endpoint.path().control != Control::Sync;
        let taker = if by_kernel {
            Taker::Kernel
        } else {
            Taker::Thread
        };
        self.receive(stream, slices, taker)
    }

    /// [`MessageQueue::recv`], also of a message that the peer writes into place.
    pub(crate) fn receive(
        &mut self,
        stream: &dyn Executor,
        slices: &[Slice<'_>],
        taker: Taker,
    ) -> Result<MessageTicket> {
        if taker == Taker::Kernel {
            self.make_result_free(stream)?;
        }
        let mut batch = OperationBatch::default();
        let made = self.make_receive(slices, taker, Repeats::Never, &mut batch);
        let (receive, waits) = self.or_roll_back(&mut batch, made)?;
        let posted = stream_post_among(
            stream,
            &mut batch.prepared,
            std::mem::take(&mut batch.others),
        );
        let tickets = self.or_roll_back(&mut batch, posted)?;
        let (is_signaled, is_read) = (self.is_credit_signaled(), waits.len() > 1);
        if is_signaled || is_read {
            self.uncollected = 0;
        }
        self.note_received(&receive);
        self.note_credit(is_signaled);
        let of_wait = |(index, ticket)| waits.contains(&index).then_some(ticket);
        let parts = tickets
            .into_iter()
            .enumerate()
            .filter_map(of_wait)
            .collect();
        Ok(MessageTicket::of_receive(
            parts,
            receive.outcome(),
            stream.turns(),
        ))
    }

    /// Whether the connection has failed, and why. It stays so: make a new queue.
    pub fn failure(&self) -> Option<WorkError> {
        self.endpoint.failure().or_else(|| self.returns.failure())
    }

    /// A handle that other threads can abort the connection with.
    pub fn abort_handle(&self) -> AbortHandle {
        let of_returns = self.returns.abort_handle();
        self.endpoint.abort_handle().and(of_returns)
    }

    /// The protection domain, in which the memory of messages is to be registered.
    pub fn domain(&self) -> &ProtectionDomain {
        self.endpoint.domain()
    }

    /// Which component rings the NIC, and why no better one.
    pub fn path(&self) -> PathReport {
        self.endpoint.path()
    }

    /// The configuration, as it was completed.
    pub fn config(&self) -> &MessageConfig {
        &self.config
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.config.endpoint.wait_timeout
    }

    pub(super) fn peer(&self) -> Result<MessageAddress> {
        self.peer.ok_or_else(|| {
            Error::state(
                StateKind::NotConnected,
                "message",
                "the queue is not connected; call `connect` with the address of the peer first",
            )
        })
    }

    /// The word by which the peer tells that it has received a message, and its value from then on.
    fn credit_of(number: u32, peer: &MessageAddress) -> (u64, u32) {
        let word = u64::from(number & (peer.slots - 1));
        (CREDIT_BYTES * word, number.wrapping_add(1))
    }

    /// Whether the peer has received the message with that number. True of numbers before the first message.
    pub(super) fn has_received(&self, number: u32, peer: &MessageAddress) -> Result<bool> {
        let (offset, value) = MessageQueue::credit_of(number, peer);
        let found = self.credits.load_u32(offset)?;
        Ok(found.wrapping_sub(value).cast_signed() >= 0)
    }

    /// The message out of whose slot the peer takes the next one.
    pub(super) fn slot_before(&self, peer: &MessageAddress) -> u32 {
        self.sent.wrapping_sub(peer.slots)
    }

    /// The wait of a stream until the peer has received the message with that number.
    fn peer_wait(
        &self,
        number: u32,
        peer: &MessageAddress,
        held: Option<Region>,
    ) -> Result<(Submission, Ticket)> {
        let (offset, value) = MessageQueue::credit_of(number, peer);
        let word = (&self.credits, offset);
        self.endpoint
            .peer_value_wait(word, value, self.timeout(), held)
    }

    /// The credit for a message that was received.
    pub(super) fn credit<'a>(
        &self,
        number: u32,
        peer: &MessageAddress,
        is_signaled: bool,
        bytes: &'a mut [u8; 4],
    ) -> Result<Work<'a>> {
        *bytes = number.wrapping_add(1).to_le_bytes();
        let word = u64::from(number & (self.config.slots - 1));
        let remote = peer.credits.slice(CREDIT_BYTES * word, CREDIT_BYTES)?;
        Ok(Work::write_inline(bytes, remote)
            .wr_id(number.into())
            .signaled(is_signaled))
    }

    /// The wait of a stream until the memory of the next message that is written into place is ready. None if it is not needed.
    fn ready_wait(&self, repeats: Repeats) -> Result<Option<(Submission, Ticket)>> {
        let (offset, value) = ready_of(self.placed_sent);
        let found = self.credits.load_u32(offset)?;
        if repeats == Repeats::Never && found.wrapping_sub(value).cast_signed() >= 0 {
            return Ok(None);
        }
        let word = (&self.credits, offset);
        let wait = self
            .endpoint
            .peer_value_wait(word, value, self.timeout(), None);
        wait.map(Some)
    }

    /// How many messages before its own a receive may be told to be ready. Their requests are unsignaled, so their places come back only with a later credit.
    pub(crate) fn ready_limit(&self) -> u32 {
        self.config.credits_per_signal()
    }

    /// Makes what tells the peer that the memory of a message is ready: of the one that comes behind so many others that are written into place and not received yet.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_send`].
    pub(crate) fn prepare_ready(&mut self, ahead: u32) -> Result<Prepared> {
        let peer = self.peer()?;
        self.endpoint.check_alive()?;
        let (offset, value) = ready_of(self.placed_received.wrapping_add(ahead));
        let bytes = value.to_le_bytes();
        let remote = peer.credits.slice(offset, CREDIT_BYTES)?;
        let work = Work::write_inline(&bytes, remote).signaled(false);
        self.returns.prepare_send(&work)
    }

    /// Queues what [`MessageQueue::prepare_ready`] has made.
    ///
    /// # Errors
    /// What the stream refuses. Nothing has changed then.
    pub(crate) fn post_ready(&mut self, stream: &dyn Executor, ready: Prepared) -> Result<()> {
        let mut batch = OperationBatch::default();
        batch.prepared.push(ready);
        let posted = stream_post_among(stream, &mut batch.prepared, Vec::new());
        self.or_roll_back(&mut batch, posted).map(|_| ())
    }

    pub(super) fn make_send(
        &mut self,
        message: Outgoing<'_>,
        repeats: Repeats,
        batch: &mut OperationBatch,
    ) -> Result<PendingSend> {
        let peer = self.peer()?;
        self.returns.check_alive()?;
        self.release_read(&peer)?;
        let mut parts = Vec::with_capacity(4);
        let before = self.slot_before(&peer);
        if repeats != Repeats::Never || !self.has_received(before, &peer)? {
            let (wait, ticket) = self.peer_wait(before, &peer, None)?;
            batch.push(wait);
            parts.push(ticket);
        }
        if message.is_placed()
            && let Some((wait, ticket)) = self.ready_wait(repeats)?
        {
            batch.push(wait);
            parts.push(ticket);
        }
        let number = self.sent;
        let timeout = self.timeout();
        // None in a graph.
        for _ in 0..self.unwaited {
            let wait = self
                .endpoint
                .prepare_wait_cq_for(QueueKind::Send, timeout)?;
            batch.prepared.push(wait);
        }
        let (held, len_bytes) = match message {
            Outgoing::Slot(slices) => {
                let message =
                    self.memory
                        .make_message(number, self.tag, slices, &peer, &self.endpoint)?;
                let work = Work::send(&message.slices).wr_id(number.into());
                batch.prepared.push(self.endpoint.prepare_send(&work)?);
                (message.read.cloned(), message.len_bytes)
            }
            Outgoing::Place(slices, into) => {
                let work = match slices {
                    [] => Work::send(&[]),
                    slices => Work::write(slices, into),
                };
                let work = work.imm(number).wr_id(number.into());
                batch.prepared.push(self.endpoint.prepare_send(&work)?);
                (None, capacity(slices.iter().copied()))
            }
        };
        let wait = self
            .endpoint
            .prepare_wait_cq_for(QueueKind::Send, timeout)?;
        Ok(PendingSend {
            wait,
            parts,
            number,
            len_bytes,
            held,
        })
    }

    /// The wait until the peer has read the message with that number, if it is to read it.
    pub(super) fn make_end(
        &self,
        number: u32,
        held: Option<Region>,
    ) -> Result<Option<(Submission, Ticket)>> {
        let Some(held) = held else {
            return Ok(None);
        };
        let peer = self.peer()?;
        self.peer_wait(number, &peer, Some(held)).map(Some)
    }

    /// Sees to it that the place for the result of the next receive is not in use, as long as [`EndpointConfig::room_timeout`](crate::EndpointConfig) says.
    /// A stream may have executed the receive before in it, and not have been looked at since.
    pub(super) fn make_result_free(&mut self, stream: &dyn Executor) -> Result<()> {
        let depth = self.config.result_count();
        let (received, by_kernels) = (self.received, &mut self.by_kernels);
        let mut is_free = || {
            while by_kernels.front().is_some_and(|it| it.1.has_ended()) {
                by_kernels.pop_front();
            }
            let oldest = by_kernels.front().map(|it| it.0);
            oldest.is_none_or(|oldest| received.wrapping_sub(oldest) < depth)
        };
        if is_free() {
            return Ok(());
        }
        let patience = self.config.endpoint.room_timeout;
        let look = || {
            // A stream that is being captured cannot be asked.
            match stream.turns() {
                Some(turns) => drop(turns.take()),
                None => drop(stream.query()?),
            }
            Ok(is_free().then_some(()))
        };
        // The receive may have been given to another stream, which this process looks at once in a millisecond.
        let freed = poll_until(
            "the wait for room in the queue",
            Some(patience.unwrap_or(LOOKED_AT)),
            || false,
            look,
        );
        freed.map_err(|error| match error {
            Error::Timeout { .. } if patience.is_none() => Error::QueueFull {
                queue: "receive result",
                depth,
            },
            error => error,
        })
    }

    /// The operations of a receive, and which of them are waits.
    pub(super) fn make_receive(
        &mut self,
        slices: &[Slice<'_>],
        taker: Taker,
        repeats: Repeats,
        batch: &mut OperationBatch,
    ) -> Result<(Arc<Receive>, Vec<usize>)> {
        let peer = self.peer()?;
        self.returns.check_alive()?;
        let capacity = self.check_target(slices, taker)?;
        let (number, timeout) = (self.received, self.timeout());
        let mut waits = vec![0];
        let arrival = self
            .endpoint
            .prepare_wait_cq_for(QueueKind::Recv, timeout)?;
        batch.prepared.push(arrival);
        let is_eager = capacity <= u64::from(self.memory.eager_bytes);
        let (read, late) = match slices {
            [slice] if !is_eager && taker != Taker::Peer => {
                let (read, late) = self.returns.prepare_late_read(slice, number.into())?;
                (Some(read), Some(late))
            }
            _ => (None, None),
        };
        let slot = self.memory.slot(number);
        let receive = Receive::new(slot, slices, late, &self.credits, taker)?;
        if taker != Taker::Peer {
            batch.push(receive.take_step());
        }
        let is_signaled = repeats != Repeats::Never || self.is_credit_signaled();
        // Before a read waits for its own completion, and before there is one credit more to be collected. None in a graph.
        if read.is_some() || is_signaled {
            self.collect(batch)?;
        }
        if let Some(read) = read {
            batch.prepared.push(read);
            waits.push(batch.prepared.len());
            let wait = self.returns.prepare_wait_cq_for(QueueKind::Send, timeout)?;
            batch.prepared.push(wait);
        }
        // The slot is posted for the message that comes into it next, before the credit that allows the peer to send that.
        let slot = self.memory.slot_slice(number)?;
        batch
            .prepared
            .push(self.endpoint.prepare_recv(number.into(), &[slot])?);
        let mut bytes = [0; 4];
        let credit = self.credit(number, &peer, is_signaled, &mut bytes)?;
        batch.prepared.push(self.returns.prepare_send(&credit)?);
        batch.push(receive.end_step()?);
        Ok((receive, waits))
    }

    /// Fails for slices that no message can be received into, by that taker. Returns their length together.
    pub(super) fn check_target(&self, slices: &[Slice<'_>], taker: Taker) -> Result<u64> {
        if taker == Taker::Peer {
            check_slices(slices, 1)?;
            for (at, slice) in slices.iter().enumerate() {
                check_slice(slice, at, self.endpoint.domain(), Access::REMOTE_WRITE)?;
            }
            return Ok(capacity(slices.iter().copied()));
        }
        let limits = TargetLimits {
            max_slices: self.config.max_slices,
            eager_bytes: self.memory.eager_bytes,
        };
        let capacity = check_target(slices, self.endpoint.domain(), limits)?;
        if taker == Taker::Thread {
            slices
                .iter()
                .try_for_each(|slice| slice.region.check_host())?;
        }
        Ok(capacity)
    }

    /// Waits for the completions of credits that no one waits for, so that the next completion is that of the next operation.
    pub(super) fn collect(&mut self, batch: &mut OperationBatch) -> Result<()> {
        for _ in 0..self.uncollected {
            let timeout = self.timeout();
            let wait = self.returns.prepare_wait_cq_for(QueueKind::Send, timeout)?;
            batch.prepared.push(wait);
        }
        Ok(())
    }

    /// Whether the next credit is signaled.
    pub(super) fn is_credit_signaled(&self) -> bool {
        self.unsignaled + 1 >= self.config.credits_per_signal()
    }

    /// A message was given to a stream, behind waits for what no one waited for.
    fn note_sent(&mut self, held: Option<Region>, is_placed: bool) {
        self.unwaited = 0;
        self.note_message(held, is_placed);
    }

    /// A message was sent, whose memory the peer is to read, or which is written into place.
    pub(super) fn note_message(&mut self, read: Option<Region>, is_placed: bool) {
        self.unread.extend(read.map(|region| (self.sent, region)));
        self.sent = self.sent.wrapping_add(1);
        self.placed_sent = self.placed_sent.wrapping_add(is_placed.into());
    }

    /// Releases the memory of messages that the peer has read.
    pub(super) fn release_read(&mut self, peer: &MessageAddress) -> Result<()> {
        while let Some((number, _)) = self.unread.front()
            && self.has_received(*number, peer)?
        {
            self.unread.pop_front();
        }
        Ok(())
    }

    /// A receive was given to a stream, or recorded.
    pub(super) fn note_received(&mut self, receive: &Receive) {
        match receive.taker() {
            Taker::Kernel => (self.by_kernels).push_back((self.received, receive.outcome())),
            Taker::Peer if !receive.is_empty() => {
                self.placed_received = self.placed_received.wrapping_add(1);
            }
            Taker::Peer | Taker::Thread => {}
        }
        self.received = self.received.wrapping_add(1);
    }

    /// So many messages that were prepared are not sent.
    #[cfg(feature = "cuda")]
    pub(super) fn forget_sent(&mut self, count: u32) {
        self.sent = self.sent.wrapping_sub(count);
        let is_later = |it: &(u32, Region)| it.0.wrapping_sub(self.sent) < count;
        while self.unread.back().is_some_and(is_later) {
            self.unread.pop_back();
        }
    }

    /// The same of receives, by kernels.
    #[cfg(feature = "cuda")]
    pub(super) fn forget_received(&mut self, count: u32) {
        self.received = self.received.wrapping_sub(count);
        let is_later = |it: &(u32, Arc<ReceiveOutcome>)| it.0.wrapping_sub(self.received) < count;
        while self.by_kernels.back().is_some_and(is_later) {
            self.by_kernels.pop_back();
        }
    }

    pub(super) fn note_credit(&mut self, is_signaled: bool) {
        if is_signaled {
            self.unsignaled = 0;
            self.uncollected += 1;
        } else {
            self.unsignaled += 1;
        }
    }

    /// Passes a result on. If it is an error, what the batch has is taken back first.
    pub(super) fn or_roll_back<T>(
        &mut self,
        batch: &mut OperationBatch,
        result: Result<T>,
    ) -> Result<T> {
        if result.is_err() {
            self.roll_back(batch);
        }
        result
    }

    pub(super) fn roll_back(&mut self, batch: &mut OperationBatch) {
        // The newest first, so that none leaves a trace.
        while let Some(prepared) = batch.prepared.pop() {
            let endpoint = match self.returns.has_prepared(&prepared) {
                true => &mut self.returns,
                false => &mut self.endpoint,
            };
            endpoint.rollback(prepared);
        }
    }
}

impl fmt::Debug for MessageQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageQueue")
            .field("sent", &self.sent)
            .field("received", &self.received)
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}
