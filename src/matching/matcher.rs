//! A matcher, as applications use it.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::core::MatcherCore;
use super::engine::MatchEngine;
use super::inbox::{MatchInbox, MatchReply, MatchRequest};
use super::peer::{MatchPeer, SharedQueue, lock};
use super::pool::UnexpectedPool;
use super::state::{PostedReceive, ReceiveState, TargetPart};
use super::stream_receive::StreamReceive;
use super::thread::{MatchServed, matcher_thread};
use super::ticket::WAIT;
use super::words::{WordPlace, WordPlaces};
use super::{Envelope, MatchTicket, MatcherConfig, Source, TagSelector};
use crate::endpoint::{Control, poll_until};
use crate::message::{MessageConfig, MessageQueue, TargetLimits, check_target};
use crate::region::{ProtectionDomain, Slice};
use crate::stream::{Executor, StreamTurns};
use crate::{Error, Result, StateKind, WorkError};

/// What a call waits at most for the thread, which answers at once unless it gets no processor.
const ANSWER: Option<Duration> = Some(Duration::from_secs(60));

/// A peer, as threads that send see it.
pub(super) struct SendingPeer {
    pub(super) queue: SharedQueue,
    /// By which messages that were sent name the queue.
    pub(super) number: u64,
    pub(super) is_sync: bool,
    pub(super) room_timeout: Option<Duration>,
    pub(super) wait_timeout: Option<Duration>,
}

impl SendingPeer {
    fn new(mut queue: MessageQueue) -> SendingPeer {
        queue.refuse_when_full();
        SendingPeer {
            number: queue.number_of_queue(),
            is_sync: queue.path().control == Control::Sync,
            room_timeout: queue.room_timeout(),
            wait_timeout: queue.timeout(),
            queue: Arc::new(Mutex::new(queue)),
        }
    }
}

/// Messages with tags, received from any peer or a named one, with any tag or a named one.
///
/// A matcher has a connected [`MessageQueue`] to each peer, and may have itself as a peer. Its calls take `&self`: any threads may make them.
///
/// A receive says from whom ([`Source`]) and which tags ([`TagSelector`]) it takes. Receives are posted in the order of the calls. A message goes to the earliest receive
/// that matches it and has none. If no receive matches, it waits, and the next receive that matches takes the earliest message that waits. So of two messages of one peer that both
/// match two receives, the first one goes to the earlier receive. Messages of different peers have no order.
///
/// Sends are those of the queues, and need no thread of the library where the queue does not. A thread of the library matches and receives. The program of a receive tells it that the stream
/// is there, and waits until it has stored the message. The memory of a receive is not changed before its stream has come to it, or, of [`Matcher::recv_now`], before the call.
/// The CPU copies eager messages, and the NIC those into memory of a GPU; longer messages are read by the NIC. No kernel is involved.
///
/// Messages without a receive are bounded: for each peer by [`MatcherConfig::unexpected`] and its slots. A peer that sends more waits on its stream, and nothing is dropped.
///
/// If the connection with a peer fails, receives that name it fail with [`Error::Peer`], and so do receives from any peer until [`Matcher::exclude`]. Messages that had
/// arrived whole can still be received.
///
/// When the matcher is dropped, receives that are not over fail, and their streams have a fault. Call [`Matcher::finish`] before, and agree with the peers after it: a drop ends the
/// connections.
///
/// ```
/// use doorbell::{Access, Device, HostStream, Matcher, MatcherConfig, MessageConfig, MessageQueue, Region, Source, TagSelector};
/// use std::time::Duration;
///
/// // Two processes in one; `Group::matcher` makes them for a group of processes.
/// let domain = Device::open("softcx")?.protection_domain();
/// let mut queues = [(); 2].map(|()| MessageQueue::new(&domain, &MessageConfig::default()).unwrap());
/// let addresses = queues.each_ref().map(MessageQueue::address);
/// queues[0].connect(&addresses[1])?;
/// queues[1].connect(&addresses[0])?;
/// let [a, b] = queues;
/// let config = MatcherConfig::default();
/// let first = Matcher::new(&domain, vec![None, Some(a)], &config)?;
/// let second = Matcher::new(&domain, vec![Some(b), None], &config)?;
///
/// let region = Region::alloc(&domain, 128, Access::ALL)?;
/// region.fill(0, 64, 42)?;
/// let stream = HostStream::new("receiver")?;
/// let received = second.recv(&stream, Source::Any, TagSelector::any(), &[region.slice(64, 64)?])?;
/// first.send_now(1, 7, &[region.slice(0, 10)?], None)?;
/// let message = received.wait(Some(Duration::from_secs(5)))?;
/// assert_eq!((message.peer, message.tag, message.len_bytes), (0, 7, 10));
/// assert!(region.is_filled_with(64, 10, 42)? && region.is_filled_with(74, 54, 0)?);
/// # Ok::<(), doorbell::Error>(())
/// ```
pub struct Matcher {
    core: Arc<MatcherCore>,
    pub(super) peers: Vec<SendingPeer>,
    domain: ProtectionDomain,
    limits: TargetLimits,
    places: Arc<WordPlaces>,
    config: MatcherConfig,
}

/// The configuration of the queues for copies, over which no message goes.
fn copies_config(config: &MatcherConfig) -> MessageConfig {
    config.messages.slots(1).eager_bytes(0)
}

impl Matcher {
    /// Makes a matcher of connected queues, by the index of the peer. One of them may be `None`: that is this process, to which the matcher makes queues of its own.
    /// No message may have been received from the queues, or be about to be received.
    ///
    /// # Errors
    /// [`Error::Range`] for the configuration, or without a queue; [`Error::State`] for a queue that is not connected, for one of which a stream is to receive, and for `None` twice; [`Error::Foreign`] for a queue of another
    /// protection domain; [`Error::Work`] for a queue that has failed; those of [`MessageQueue::new`]; [`Error::System`] if the thread cannot be started.
    /// The queues are then dropped. [`Matcher::check_queues`] leaves them; what it cannot foresee is that memory, a queue or a thread cannot be had.
    pub fn new(
        domain: &ProtectionDomain,
        queues: Vec<Option<MessageQueue>>,
        config: &MatcherConfig,
    ) -> Result<Matcher> {
        let mut queues = queues;
        let mut given: Vec<Option<&mut MessageQueue>> =
            queues.iter_mut().map(Option::as_mut).collect();
        Self::check_queues(domain, &mut given, config)?;
        let thread = matcher_thread()?;
        let mut limits: Option<TargetLimits> = None;
        let (mut sending, mut receiving) = (Vec::new(), Vec::new());
        for queue in queues {
            // Messages to oneself are sent by one queue and received from another one.
            let (queue, inward) = match queue {
                Some(queue) => (queue, None),
                None => {
                    let [outward, mut inward] = loopback(domain, &config.messages)?;
                    inward.refuse_when_full();
                    (outward, Some(Arc::new(Mutex::new(inward))))
                }
            };
            let of_queue = limits_of(&queue);
            limits = Some(limits.map_or(of_queue, |limits| TargetLimits {
                max_slices: limits.max_slices.min(of_queue.max_slices),
                eager_bytes: limits.eager_bytes.min(of_queue.eager_bytes),
            }));
            let slots = queue.config().slot_count();
            let pool = UnexpectedPool::new(domain, config.unexpected, slots, of_queue.eager_bytes)?;
            let peer = SendingPeer::new(queue);
            let outward = Arc::clone(&peer.queue);
            receiving.push(match inward {
                Some(inward) => MatchPeer::new(inward, pool, Some(outward)),
                None => MatchPeer::new(outward, pool, None),
            });
            sending.push(peer);
        }
        // A pair of its own, for copies: a failure of the messages to oneself ends no copy. No message goes over it.
        let copies = loopback(domain, &copies_config(config))?.map(|mut queue| {
            queue.refuse_when_full();
            queue
        });
        let inbox = Arc::new(MatchInbox::default());
        let timeout = config.messages.endpoint.wait_timeout;
        let engine = MatchEngine::new(Arc::clone(&inbox), receiving, copies, timeout);
        let core = Arc::new(MatcherCore::new(inbox, engine));
        let places = WordPlaces::new(domain, config.receives)?;
        thread.register(Arc::downgrade(&core) as Weak<dyn MatchServed>);
        Ok(Matcher {
            core,
            peers: sending,
            domain: domain.clone(),
            limits: limits.unwrap_or(TargetLimits {
                max_slices: 0,
                eager_bytes: 0,
            }),
            places,
            config: *config,
        })
    }

    /// Fails if [`Matcher::new`] would refuse these queues or the configuration. The queues stay the caller's. What it then may still lack are resources.
    ///
    /// # Errors
    /// As [`Matcher::new`].
    pub fn check_queues(
        domain: &ProtectionDomain,
        queues: &mut [Option<&mut MessageQueue>],
        config: &MatcherConfig,
    ) -> Result<()> {
        config.check()?;
        if queues.is_empty() || u32::try_from(queues.len()).is_err() {
            return Err(Error::Range {
                argument: "queues.len()",
                value: queues.len() as u64,
                min: 1,
                max: u32::MAX.into(),
            });
        }
        let own_count = queues.iter().filter(|queue| queue.is_none()).count();
        if own_count > 1 {
            return Err(Error::state(
                StateKind::WrongKind,
                "make a matcher",
                "more than one of its queues is the one to this process",
            ));
        }
        if own_count > 0 {
            config.messages.check()?;
        }
        copies_config(config).check()?;
        for queue in queues.iter_mut().flatten() {
            domain.check_same(queue.domain(), "queues")?;
            queue.check_matchable()?;
        }
        Ok(())
    }

    /// Queues a receive on a stream. The stream waits for a message that matches, which is stored into the slices, one after the other. Memory behind the end of the
    /// message stays as it is. A receive into several slices is for messages of at most the smallest [`MessageConfig::eager_bytes`](crate::MessageConfig::eager_bytes) of this side's queues.
    ///
    /// The receive fails, and its stream has a fault, as [`MatchTicket::check`] says. What is queued behind it is not executed then. A message that is longer than the memory is
    /// consumed and not stored, and its send completes. A receive that the stream discards before it has come to it leaves its message to
    /// later receives; those that have a message keep it.
    ///
    /// Memory that the CPU cannot access ([`Region::register_device`](crate::Region)) is written by the NIC.
    ///
    /// # Errors
    /// [`Error::Range`] for the peer, too many slices, or several slices with more bytes than are eager; [`Error::State`] for a region that is deregistered or has no
    /// [`Access::LOCAL_WRITE`](crate::Access::LOCAL_WRITE); [`Error::Foreign`] for a region of another protection domain; [`Error::QueueFull`], and with
    /// [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout) [`Error::Timeout`], if [`MatcherConfig::receives`] receives on streams are not over; what the stream refuses. Nothing has changed then.
    pub fn recv(
        &self,
        stream: &dyn Executor,
        from: Source,
        tag: TagSelector,
        slices: &[Slice<'_>],
    ) -> Result<MatchTicket> {
        let capacity = self.check_receive(from, slices)?;
        let place = self.take_place(stream)?;
        let state = Arc::new(ReceiveState::default());
        let receive = StreamReceive {
            place: Arc::clone(&place),
            state: Arc::clone(&state),
            inbox: Arc::downgrade(&self.core.inbox),
        };
        stream
            .submit_one(receive.submission()?)
            .map_err(|(_, error)| error)?;
        self.post(from, tag, slices, (capacity, Some(place), &state));
        Ok(MatchTicket {
            state,
            inbox: Arc::downgrade(&self.core.inbox),
            turns: stream.turns(),
        })
    }

    /// Receives a message that matches in this thread. Waits for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`Matcher::recv`] and [`MatchTicket::check`]; [`Error::Timeout`] if no message came, after which the receive is cancelled.
    pub fn recv_now(
        &self,
        from: Source,
        tag: TagSelector,
        slices: &[Slice<'_>],
        timeout: Option<Duration>,
    ) -> Result<Envelope> {
        let state = self.post_of_thread(from, tag, slices)?;
        let settled = || match state.settled() {
            None => Ok(None),
            Some(outcome) => outcome.clone().map(Some),
        };
        let progress = || self.domain.device().progress();
        match poll_until(WAIT, timeout, progress, settled) {
            // It may have got a message since the last look.
            Err(Error::Timeout { .. }) => {}
            received => return received,
        }
        let cancel = MatchRequest::Cancel(Arc::clone(&state), MatchReply::default());
        self.core.inbox.push(cancel);
        // However long the thread takes: until then, it may store a message. Either the receive is cancelled, or it has a message, which is being stored or is there.
        match poll_until(WAIT, None, progress, settled) {
            Err(Error::State {
                kind: StateKind::Cancelled,
                ..
            }) => Err(Error::Timeout {
                operation: "the receive of a message",
                timeout: timeout.unwrap_or_default(),
            }),
            ended => ended,
        }
    }

    /// Posts a receive from this thread, and does not wait for its message: [`MatchTicket::wait`] does, and [`Matcher::cancel`] takes it back. A receive whose ticket is dropped
    /// goes on, and takes its message.
    ///
    /// # Errors
    /// As [`Matcher::recv`].
    pub fn start_recv_now(
        &self,
        from: Source,
        tag: TagSelector,
        slices: &[Slice<'_>],
    ) -> Result<MatchTicket> {
        Ok(MatchTicket {
            state: self.post_of_thread(from, tag, slices)?,
            inbox: Arc::downgrade(&self.core.inbox),
            turns: None,
        })
    }

    fn post_of_thread(
        &self,
        from: Source,
        tag: TagSelector,
        slices: &[Slice<'_>],
    ) -> Result<Arc<ReceiveState>> {
        let capacity = self.check_receive(from, slices)?;
        let state = Arc::new(ReceiveState::of_thread());
        self.post(from, tag, slices, (capacity, None, &state));
        Ok(state)
    }

    /// What is known of the earliest message that such a receive would take, if there is one. The message stays. Unless another receive takes it, the next such receive gets it.
    ///
    /// # Errors
    /// [`Error::Range`] for the peer.
    pub fn probe_now(&self, from: Source, tag: TagSelector) -> Result<Option<Envelope>> {
        self.check_source(from)?;
        self.ask(|reply| MatchRequest::Probe(from, tag, reply))
    }

    /// Cancels a receive that has no message. Its stream gets a fault when it comes to it, because the message is not there. Returns whether it was cancelled; one that has a
    /// message, or is over, goes on.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a receive of another matcher.
    pub fn cancel(&self, receive: &MatchTicket) -> Result<bool> {
        if !receive.inbox.ptr_eq(&Arc::downgrade(&self.core.inbox)) {
            return Err(Error::Foreign {
                argument: "receive",
                found: "another matcher".into(),
                expected: "the matcher that has made the receive".into(),
            });
        }
        self.ask(|reply| MatchRequest::Cancel(Arc::clone(&receive.state), reply))
    }

    /// Waits in this thread until streams have executed all sends, the peers have received all messages, and have all credits for those that this side has received. A message that
    /// is not eager is received by a receive; others also by the matcher. Call it before the matcher is dropped, and agree with the peers after it, as by `Group::barrier`.
    /// Peers that have failed and were excluded are left out.
    ///
    /// # Errors
    /// [`Error::Peer`] for a peer that has failed; [`Error::Timeout`].
    pub fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        let operation = "the end of a matcher";
        let late = |error| match error {
            Error::Timeout { .. } => Error::Timeout {
                operation,
                timeout: timeout.unwrap_or_default(),
            },
            error => error,
        };
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let left = || deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let progress = || self.domain.device().progress();
        for (at, peer) in self.peers.iter().enumerate() {
            let look = || {
                let has_sent = lock(&peer.queue).has_sent_all();
                has_sent.map(|has_sent| has_sent.then_some(()))
            };
            let sent = poll_until(operation, left(), progress, look);
            let finished = sent.and_then(|()| {
                let reply: MatchReply<Result<()>> = Arc::new(OnceLock::new());
                let request = MatchRequest::Flush(at, Arc::clone(&reply));
                self.core.inbox.push(request);
                let look = || reply.get().cloned().transpose();
                poll_until(operation, left(), progress, look)
            });
            match finished.map_err(late) {
                Err(Error::Work(failure)) if !self.is_excluded(at)? => {
                    let peer = at as u32;
                    return Err(Error::Peer { peer, failure });
                }
                Err(error @ Error::Peer { .. }) if !self.is_excluded(at)? => return Err(error),
                Ok(()) | Err(Error::Work(_) | Error::Peer { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the connection with a peer has failed, and why. `None` also of an index without a peer.
    pub fn failure(&self, peer: usize) -> Option<WorkError> {
        lock(&self.peers.get(peer)?.queue).failure()
    }

    /// Receives from any peer go on without this one, if its connection has failed or fails later. Receives that name it fail.
    ///
    /// # Errors
    /// [`Error::Range`] for the peer.
    pub fn exclude(&self, peer: usize) -> Result<()> {
        self.peer(peer)?;
        self.core.inbox.push(MatchRequest::Exclude(peer));
        Ok(())
    }

    /// The number of peers, this process included if it is one.
    pub fn peer_count(&self) -> usize {
        self.peers.len()
    }

    /// The protection domain, in which the memory of messages is to be registered.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// The configuration.
    pub fn config(&self) -> &MatcherConfig {
        &self.config
    }

    pub(super) fn peer(&self, peer: usize) -> Result<&SendingPeer> {
        self.peers.get(peer).ok_or(Error::Range {
            argument: "peer",
            value: peer as u64,
            min: 0,
            max: self.peers.len() as u64 - 1,
        })
    }

    fn check_source(&self, from: Source) -> Result<()> {
        match from {
            Source::Any => Ok(()),
            Source::Peer(peer) => self.peer(peer).map(drop),
        }
    }

    /// Fails for a receive that cannot be made. Returns the length of its memory.
    fn check_receive(&self, from: Source, slices: &[Slice<'_>]) -> Result<u64> {
        self.check_source(from)?;
        check_target(slices, &self.domain, self.limits)
    }

    /// Words for a receive on a stream.
    fn take_place(&self, stream: &dyn Executor) -> Result<Arc<WordPlace>> {
        if let Some(place) = self.places.take() {
            return Ok(place);
        }
        let room_timeout = self.config.messages.endpoint.room_timeout;
        let turns = stream.turns();
        let turn = || turns.as_ref().is_some_and(StreamTurns::take);
        let look = || Ok(self.places.take());
        let waited = poll_until(
            "the wait for room in a queue",
            Some(room_timeout.unwrap_or_default()),
            turn,
            look,
        );
        waited.map_err(|error| match room_timeout {
            None => Error::QueueFull {
                queue: "matched receive",
                depth: self.places.count(),
            },
            Some(_) => error,
        })
    }

    fn post(
        &self,
        source: Source,
        tag: TagSelector,
        slices: &[Slice<'_>],
        (capacity, place, state): (u64, Option<Arc<WordPlace>>, &Arc<ReceiveState>),
    ) {
        let posted = PostedReceive {
            source,
            tag,
            target: slices.iter().map(TargetPart::of).collect(),
            capacity,
            place,
            state: Arc::clone(state),
        };
        self.core.inbox.push(MatchRequest::Post(posted));
    }

    /// Asks the thread, and waits for its answer.
    fn ask<T: Clone>(&self, request: impl FnOnce(MatchReply<T>) -> MatchRequest) -> Result<T> {
        let reply: MatchReply<T> = Arc::new(OnceLock::new());
        self.core.inbox.push(request(Arc::clone(&reply)));
        let look = || Ok(reply.get().cloned());
        poll_until("the answer of the matcher", ANSWER, || false, look)
    }

    fn is_excluded(&self, peer: usize) -> Result<bool> {
        self.ask(|reply| MatchRequest::IsExcluded(peer, reply))
    }
}

impl Drop for Matcher {
    fn drop(&mut self) {
        // Before the queues go: their ends are this thread's matter, not that of the one that matches.
        self.core.close();
    }
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher")
            .field("peers", &self.peers.len())
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn limits_of(queue: &MessageQueue) -> TargetLimits {
    TargetLimits {
        max_slices: queue.config().max_slices,
        eager_bytes: queue.config().eager_bytes,
    }
}

/// Two queues of this process that are connected with each other.
fn loopback(domain: &ProtectionDomain, config: &MessageConfig) -> Result<[MessageQueue; 2]> {
    let mut outward = MessageQueue::new(domain, config)?;
    let mut inward = MessageQueue::new(domain, config)?;
    outward.connect(&inward.address())?;
    inward.connect(&outward.address())?;
    Ok([outward, inward])
}
