//! The state of a matcher, which only its thread has.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copier::{CopyJob, NicCopier};
use super::inbox::{MatchInbox, MatchReply, MatchRequest};
use super::peer::{MatchPeer, PeerHealth, PeerRead, StoredAt, StoredMessage, lock};
use super::state::{PostedReceive, RECEIVE, ReceiveState, TargetPart, discarded};
use super::table::MatchTable;
use super::{Envelope, Source, TagSelector};
use crate::message::{MessageQueue, copy_out};
use crate::proxy::drop_elsewhere;
use crate::region::{Region, RegionKind, Slice};
use crate::{Error, Result, StateKind, WorkError};

/// Streams that are asked in a round whether they have come to a receive for which there is no message: only its deadline depends on that.
const STREAMS_A_ROUND: usize = 64;

/// A receive that is not over.
pub(super) struct OpenReceive {
    pub(super) source: Source,
    pub(super) posted: PostedReceive,
    /// Its stream has come to it.
    is_reached: bool,
    /// Of one without a message.
    deadline: Option<Instant>,
    /// The message that it has, until that is being stored.
    pub(super) message: Option<u64>,
    /// The message is being stored. Nothing takes it back.
    pub(super) is_moving: bool,
}

impl OpenReceive {
    pub(super) fn slices(&self) -> impl Iterator<Item = Slice<'_>> + Clone {
        self.posted.target.iter().map(TargetPart::slice)
    }

    pub(super) fn is_host(&self) -> bool {
        let is_host = |part: &TargetPart| part.region.kind() == RegionKind::Host;
        self.posted.target.iter().all(is_host)
    }

    /// Whether its memory may be written. A stream that was given up may come past it, so the order of the two looks counts.
    pub(super) fn is_ready(&mut self) -> bool {
        if !self.is_reached {
            self.is_reached = self.posted.place.as_ref().is_none_or(|it| it.is_reached());
        }
        self.is_reached && !self.posted.state.is_given_up()
    }
}

fn envelope(message: &StoredMessage) -> Envelope {
    Envelope {
        peer: message.peer,
        tag: message.tag,
        len_bytes: message.len_bytes,
    }
}

/// The error of a receive that waits for a peer that has failed.
pub(super) fn failed_peer(peer: usize, failure: WorkError) -> Error {
    Error::Peer {
        peer: peer as u32,
        failure,
    }
}

/// The state of a matcher.
pub(super) struct MatchEngine {
    inbox: Arc<MatchInbox>,
    requests: Vec<MatchRequest>,
    probes: Vec<(Source, TagSelector, MatchReply<Option<Envelope>>)>,
    pub(super) table: MatchTable,
    /// The numbers of the next receive and the next message.
    next_receive: u64,
    pub(super) next_message: u64,
    pub(super) receives: HashMap<u64, OpenReceive>,
    pub(super) messages: HashMap<u64, StoredMessage>,
    pub(super) peers: Vec<MatchPeer>,
    pub(super) copier: NicCopier,
    /// Receives with a message that is not being stored.
    pub(super) matched: Vec<u64>,
    /// Receives on streams, of which it is not known that their stream has come to them.
    unreached: VecDeque<u64>,
    deadlines: BTreeSet<(Instant, u64)>,
    wait_timeout: Option<Duration>,
}

impl MatchEngine {
    pub(super) fn new(
        inbox: Arc<MatchInbox>,
        peers: Vec<MatchPeer>,
        copies: [MessageQueue; 2],
        wait_timeout: Option<Duration>,
    ) -> MatchEngine {
        MatchEngine {
            inbox,
            requests: Vec::new(),
            probes: Vec::new(),
            table: MatchTable::default(),
            next_receive: 0,
            next_message: 0,
            receives: HashMap::new(),
            messages: HashMap::new(),
            peers,
            copier: NicCopier::new(copies),
            matched: Vec::new(),
            unreached: VecDeque::new(),
            deadlines: BTreeSet::new(),
            wait_timeout,
        }
    }

    /// Does what can be done without waiting. Returns whether that was anything.
    pub(super) fn serve(&mut self) -> bool {
        let mut worked = self.take_requests();
        worked |= self.look_at_streams();
        for peer in 0..self.peers.len() {
            worked |= self.serve_peer(peer);
        }
        worked |= self.serve_copier();
        // Behind the looks at the queues.
        for (source, tag, reply) in std::mem::take(&mut self.probes) {
            let found = self.table.probe(source, tag);
            let message = found.and_then(|message| self.messages.get(&message));
            let _ = reply.set(message.map(envelope));
        }
        worked
    }

    fn take_requests(&mut self) -> bool {
        let mut requests = std::mem::take(&mut self.requests);
        self.inbox.take(&mut requests);
        let any = !requests.is_empty();
        for request in requests.drain(..) {
            match request {
                MatchRequest::Post(posted) => self.post(posted),
                MatchRequest::Discard(state) => self.discard(&state),
                MatchRequest::Cancel(state, reply) => {
                    let is_cancelled = self.cancel(&state);
                    let _ = reply.set(is_cancelled);
                }
                MatchRequest::Probe(source, tag, reply) => self.probes.push((source, tag, reply)),
                MatchRequest::Flush(peer, reply) => match self.peers[peer].health {
                    PeerHealth::Failed(failure) => _ = reply.set(Err(failed_peer(peer, failure))),
                    _ => self.peers[peer].to_flush.push(reply),
                },
                MatchRequest::Exclude(peer) => self.peers[peer].is_excluded = true,
                MatchRequest::IsExcluded(peer, reply) => {
                    let _ = reply.set(self.peers[peer].is_excluded);
                }
            }
        }
        self.requests = requests;
        any
    }

    fn post(&mut self, posted: PostedReceive) {
        let number = self.next_receive;
        self.next_receive += 1;
        posted.state.set_number(number);
        let (source, tag) = (posted.source, posted.tag);
        let is_given_up = posted.state.is_given_up();
        let receive = OpenReceive {
            source,
            posted,
            is_reached: false,
            deadline: None,
            message: None,
            is_moving: false,
        };
        self.receives.insert(number, receive);
        if is_given_up {
            return self.end(number, Err(discarded()));
        }
        match self.table.post(number, source, tag) {
            Some(message) => self.pair(number, message),
            None => match self.failure_for(source) {
                Some(error) => {
                    self.table.cancel(number);
                    self.end(number, Err(error));
                }
                None => self.unreached.push_back(number),
            },
        }
    }

    /// Why no message comes for such a receive, which none fits that is here.
    pub(super) fn failure_for(&self, source: Source) -> Option<Error> {
        match source {
            Source::Peer(peer) => self.peers[peer].over().map(|it| failed_peer(peer, it)),
            Source::Any => {
                let all = self.peers.iter().enumerate();
                let over = || {
                    all.clone()
                        .filter_map(|(at, peer)| Some((at, peer.over()?)))
                };
                let first = over().find(|(at, _)| !self.peers[*at].is_excluded);
                // Nobody is left who could send.
                let last = || (over().count() == self.peers.len()).then(|| over().next_back())?;
                first
                    .or_else(last)
                    .map(|(at, failure)| failed_peer(at, failure))
            }
        }
    }

    /// A receive has a message.
    pub(super) fn pair(&mut self, receive: u64, message: u64) {
        if let Some(open) = self.receives.get_mut(&receive) {
            open.message = Some(message);
            if let Some(deadline) = open.deadline.take() {
                self.deadlines.remove(&(deadline, receive));
            }
            self.matched.push(receive);
            self.try_start(receive);
        }
    }

    /// Ends a receive. Its message, if it had one, is the caller's matter.
    pub(super) fn end(&mut self, receive: u64, outcome: Result<Envelope>) {
        let Some(open) = self.receives.remove(&receive) else {
            return;
        };
        if let Some(deadline) = open.deadline {
            self.deadlines.remove(&(deadline, receive));
        }
        let PostedReceive {
            target,
            place,
            state,
            ..
        } = open.posted;
        // Before the application learns of the end: it may rely on its own handle being the last one then.
        let regions = target.into_iter().map(|part| part.region);
        let last = regions.filter_map(Region::into_deferred_drop);
        last.for_each(drop_elsewhere);
        let is_done = outcome.is_ok();
        state.end(outcome);
        if let Some(place) = place.filter(|_| is_done) {
            place.set_done();
        }
    }

    fn cancel(&mut self, state: &ReceiveState) -> bool {
        let Some(number) = state.number() else {
            return false;
        };
        let is_cancelled = self.table.cancel(number);
        if is_cancelled {
            let error = Error::state(
                StateKind::Cancelled,
                RECEIVE,
                "it was cancelled before a message came for it",
            );
            self.end(number, Err(error));
        }
        is_cancelled
    }

    /// The stream of a receive does not come to its end. A message that is not being stored is for others.
    fn discard(&mut self, state: &ReceiveState) {
        // One that was not posted yet finds this out when it is.
        let Some(number) = state.number() else { return };
        let Some(open) = self.receives.get(&number).filter(|it| !it.is_moving) else {
            return;
        };
        match open.message {
            None => _ = self.table.cancel(number),
            Some(message) => self.put_back(message),
        }
        self.end(number, Err(discarded()));
    }

    /// Gives a message to another receive, or back to the table.
    fn put_back(&mut self, message: u64) {
        let Some(StoredMessage { peer, tag, .. }) = self.messages.get(&message).copied() else {
            return;
        };
        if let Some(receive) = self.table.withdraw(message, peer, tag) {
            self.pair(receive, message);
        }
    }

    /// Looks whether streams have come to their receives, and whether receives are late.
    fn look_at_streams(&mut self) -> bool {
        let mut worked = false;
        for receive in std::mem::take(&mut self.matched) {
            let Some(open) = self.receives.get(&receive).filter(|it| !it.is_moving) else {
                continue;
            };
            let state = Arc::clone(&open.posted.state);
            self.matched.push(receive);
            if state.is_given_up() {
                self.discard(&state);
                worked = true;
            } else {
                worked |= self.try_start(receive);
            }
        }
        let mut now = None;
        for _ in 0..STREAMS_A_ROUND.min(self.unreached.len()) {
            let Some(receive) = self.unreached.pop_front() else {
                break;
            };
            let Some(open) = (self.receives.get_mut(&receive)).filter(|it| it.message.is_none())
            else {
                continue;
            };
            if !open.is_ready() {
                // One that was given up is discarded by its request.
                self.unreached.push_back(receive);
            } else if open.posted.place.is_some()
                && let Some(timeout) = self.wait_timeout
            {
                let now = *now.get_or_insert_with(Instant::now);
                open.deadline = now.checked_add(timeout);
                let late = open.deadline.map(|deadline| (deadline, receive));
                self.deadlines.extend(late);
            }
        }
        if self.deadlines.is_empty() {
            return worked;
        }
        let now = now.unwrap_or_else(Instant::now);
        while let Some((deadline, receive)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.deadlines.pop_first();
            self.table.cancel(receive);
            let error = Error::Timeout {
                operation: "the wait of a receive for a message",
                timeout: self.wait_timeout.unwrap_or_default(),
            };
            self.end(receive, Err(error));
            worked = true;
        }
        worked
    }

    /// Begins to store the message of a receive whose stream has come to it, unless the message is still in its slot. Returns whether it did.
    fn try_start(&mut self, receive: u64) -> bool {
        let Some(open) = self.receives.get_mut(&receive) else {
            return false;
        };
        if !open.is_ready() {
            return false;
        }
        let Some((id, message)) = open.message.and_then(|message| {
            let stored = self.messages.get(&message)?;
            Some((message, *stored))
        }) else {
            return false;
        };
        let peer = &mut self.peers[message.peer];
        let fits = message.len_bytes <= open.posted.capacity;
        match message.at {
            // When the queue is looked at.
            StoredAt::Slot(_) => return false,
            StoredAt::Block(block) if fits && !open.is_host() => {
                open.is_moving = true;
                self.copier.push(CopyJob {
                    receive,
                    message,
                    block,
                });
                self.messages.remove(&id);
                return true;
            }
            StoredAt::Block(block) => {
                let mut copied = Ok(());
                if fits {
                    let from = peer.pool.offset(block);
                    copied = copy_out(&peer.pool.region, from, message.len_bytes, open.slices());
                }
                peer.pool.give_back(block);
                self.finish(receive, Some(id), &message, copied);
            }
            StoredAt::Sender { .. } => {
                peer.pool.leave();
                if fits {
                    open.is_moving = true;
                    peer.to_read.push_back(PeerRead { receive, message });
                    self.messages.remove(&id);
                    return true;
                }
                peer.credit(message.number);
                self.finish(receive, Some(id), &message, Ok(()));
            }
        }
        true
    }

    /// Ends a receive that has consumed its message, as whose memory is long enough or not.
    pub(super) fn finish(
        &mut self,
        receive: u64,
        id: Option<u64>,
        message: &StoredMessage,
        stored: Result<()>,
    ) {
        if let Some(id) = id {
            self.messages.remove(&id);
        }
        let limit_bytes = (self.receives.get(&receive)).map_or(0, |open| open.posted.capacity);
        let outcome = if message.len_bytes > limit_bytes {
            Err(Error::Truncated {
                len_bytes: message.len_bytes,
                limit_bytes,
            })
        } else {
            stored.map(|()| envelope(message))
        };
        self.end(receive, outcome);
    }

    /// Has the NIC copy messages into memory that the CPU cannot access.
    fn serve_copier(&mut self) -> bool {
        let receives = &self.receives;
        let target = |receive: u64| {
            let open = receives.get(&receive);
            open.map_or(&[][..], |open| &open.posted.target)
        };
        let peers = &self.peers;
        let source = |job: &CopyJob| {
            let pool = &peers[job.message.peer].pool;
            let remote = pool.region.remote();
            (remote.addr + pool.offset(job.block), remote.rkey)
        };
        let (mut worked, over) = self.copier.serve(target, source);
        for (job, failure) in over {
            worked = true;
            let pool = &mut self.peers[job.message.peer].pool;
            pool.give_back(job.block);
            let copied = failure.map_or(Ok(()), |failure| Err(Error::Work(failure)));
            self.finish(job.receive, None, &job.message, copied);
        }
        worked
    }

    /// Ends everything: the matcher is dropped.
    pub(super) fn close(&mut self) {
        let error = Error::state(StateKind::Discarded, RECEIVE, "the matcher was dropped");
        for peer in &mut self.peers {
            if !peer.reads.is_empty() {
                // The device may be about to store what it has read.
                let queue = Arc::clone(&peer.queue);
                let queue = lock(&queue);
                peer.stop(&queue);
                queue.await_stop();
            }
        }
        self.copier.close();
        for request in self.requests.drain(..).chain(self.inbox.close()) {
            if let MatchRequest::Post(posted) = request {
                posted.state.end(Err(error.clone()));
            }
        }
        let open: Vec<u64> = self.receives.keys().copied().collect();
        for receive in open {
            self.end(receive, Err(error.clone()));
        }
    }
}
