//! What the thread of the matcher does at the queue of a peer: messages out of their slots, completions, and the failure of the connection.

use std::sync::Arc;

use super::Source;
use super::copier::CopyJob;
use super::engine::{MatchEngine, failed_peer};
use super::peer::{PeerHealth, PeerRead, StoredAt, StoredMessage, try_lock};
use crate::message::{MessagePlace, MessageQueue, ReturnKind};
use crate::region::Slice;
use crate::{Error, Result};

impl MatchEngine {
    /// Looks at the queue of a peer.
    pub(super) fn serve_peer(&mut self, peer: usize) -> bool {
        let shared = Arc::clone(&self.peers[peer].queue);
        let Some(mut queue) = try_lock(&shared) else {
            // The thread that has it is not to be waited for long.
            return true;
        };
        let queue = &mut *queue;
        if self.peers[peer].has_failed_outward() {
            self.peers[peer].stop(queue);
        }
        let mut worked = self.take_returns(peer, queue);
        worked |= self.take_arrivals(peer, queue);
        if self.peers[peer].health == PeerHealth::Alive {
            let receives = &self.receives;
            let target =
                |receive: u64, len_bytes: u64, post: &mut dyn FnMut(Slice<'_>) -> Result<()>| {
                    let part = (receives.get(&receive)).and_then(|open| open.posted.target.first());
                    match part {
                        Some(part) => post(part.region.slice(part.offset, len_bytes)?),
                        None => Ok(()),
                    }
                };
            worked |= self.peers[peer].post(queue, target);
        }
        if self.peers[peer].health == PeerHealth::Stopping && queue.has_stopped() {
            worked = true;
            self.settle_failure(peer, queue);
        }
        let state = &mut self.peers[peer];
        if !state.is_settled && state.over().is_some() {
            state.is_settled = true;
            self.fail_receives(peer);
            worked = true;
        }
        worked
    }

    /// Takes the completions of reads, credits and flushes.
    fn take_returns(&mut self, peer: usize, queue: &mut MessageQueue) -> bool {
        let mut worked = false;
        loop {
            let state = &mut self.peers[peer];
            match queue.poll_return() {
                Ok(None) => return worked,
                Ok(Some(ReturnKind::Credit)) => {}
                Ok(Some(ReturnKind::Flush)) => {
                    if let Some(reply) = state.flushes.pop_front() {
                        let _ = reply.set(Ok(()));
                    }
                }
                Ok(Some(ReturnKind::Read)) => {
                    if let Some(PeerRead { receive, message }) = state.reads.pop_front() {
                        state.credit(message.number);
                        self.finish(receive, None, &message, Ok(()));
                    }
                }
                Err(_) => {
                    state.stop(queue);
                    return worked;
                }
            }
            worked = true;
        }
    }

    /// Takes messages out of their slots, in order, until one cannot be.
    fn take_arrivals(&mut self, peer: usize, queue: &mut MessageQueue) -> bool {
        let mut worked = false;
        loop {
            if self.peers[peer].head.is_some() {
                if !self.take_head(peer, queue) {
                    if self.peers[peer].health == PeerHealth::Alive && queue.failure().is_some() {
                        self.peers[peer].stop(queue);
                    }
                    return worked;
                }
                worked = true;
            }
            if self.peers[peer].is_drained {
                return worked;
            }
            match queue.poll_arrival() {
                Ok(None) => return worked,
                Ok(Some(arrival)) => {
                    let id = self.next_message;
                    self.next_message += 1;
                    let message = StoredMessage::new(peer, arrival);
                    let is_lost = matches!(arrival.place, MessagePlace::Sender { .. })
                        && self.peers[peer].health != PeerHealth::Alive;
                    if is_lost {
                        // Nobody can read it any more.
                        self.peers[peer].free_slot(queue);
                        continue;
                    }
                    self.messages.insert(id, message);
                    self.peers[peer].head = Some(id);
                    if let Some(receive) = self.table.arrive(id, peer, message.tag) {
                        self.pair(receive, id);
                    }
                }
                Err(error) => {
                    // Bytes that are no message are of a peer that cannot be trusted any more. What comes behind them is not looked at.
                    self.peers[peer].is_drained |=
                        matches!(error, Error::Work(_) | Error::Malformed { .. });
                    self.peers[peer].stop(queue);
                    return true;
                }
            }
        }
    }

    /// Takes the first message out of its slot: into the memory of its receive, if that is ready, or else into a block. Returns whether it could.
    fn take_head(&mut self, peer: usize, queue: &mut MessageQueue) -> bool {
        let Some((id, message)) = self.peers[peer].head.and_then(|id| {
            let message = self.messages.get(&id)?;
            Some((id, *message))
        }) else {
            self.peers[peer].head = None;
            return true;
        };
        let is_here = !self.table.has_message(id);
        let receive = is_here.then(|| self.receive_of(id)).flatten();
        let state = &mut self.peers[peer];
        let ready = receive.and_then(|receive| {
            let open = self.receives.get_mut(&receive)?;
            open.is_ready().then_some((receive, open))
        });
        let Some((receive, open)) = ready else {
            let Some(at) = state.stash(queue, &message) else {
                return false;
            };
            if let Some(message) = self.messages.get_mut(&id) {
                message.at = at;
            }
            return true;
        };
        let fits = message.len_bytes <= open.posted.capacity;
        match message.at {
            StoredAt::Slot(MessagePlace::Sender { addr, rkey }) if fits => {
                state.free_slot(queue);
                open.is_moving = true;
                let at = StoredAt::Sender { addr, rkey };
                let message = StoredMessage { at, ..message };
                state.to_read.push_back(PeerRead { receive, message });
                self.messages.remove(&id);
            }
            StoredAt::Slot(MessagePlace::Slot) if fits && !open.is_host() => {
                let Some(block) = state.pool.take_passage() else {
                    return false;
                };
                state.copy_to_block(queue, &message, block);
                open.is_moving = true;
                self.copier.push(CopyJob {
                    receive,
                    message,
                    block,
                });
                self.messages.remove(&id);
            }
            _ => {
                let mut copied = Ok(());
                if fits {
                    copied = queue.copy_arrived(message.len_bytes, open.slices());
                }
                state.free_slot(queue);
                state.credit(message.number);
                self.finish(receive, Some(id), &message, copied);
            }
        }
        true
    }

    /// The receive that has the message.
    fn receive_of(&self, message: u64) -> Option<u64> {
        let has = |receive: &&u64| {
            let open = self.receives.get(receive);
            open.is_some_and(|open| open.message == Some(message) && !open.is_moving)
        };
        // The newest are last.
        self.matched.iter().rev().find(has).copied()
    }

    /// The device of a connection that has failed has stopped: nothing is written any more for what was under way.
    fn settle_failure(&mut self, peer: usize, queue: &mut MessageQueue) {
        // What was complete before.
        self.take_returns(peer, queue);
        let Some(failure) = queue.failure() else {
            return;
        };
        let state = &mut self.peers[peer];
        state.health = PeerHealth::Failed(failure);
        state.pool.admit_slots();
        let error = failed_peer(peer, failure);
        let reads: Vec<PeerRead> = state
            .reads
            .drain(..)
            .chain(state.to_read.drain(..))
            .collect();
        for reply in state.to_flush.drain(..).chain(state.flushes.drain(..)) {
            let _ = reply.set(Err(error.clone()));
        }
        state.credits.clear();
        for read in reads {
            self.end(read.receive, Err(error.clone()));
        }
        // Messages that only the sender has are gone.
        let is_lost = |message: &StoredMessage| match message.at {
            StoredAt::Sender { .. } | StoredAt::Slot(MessagePlace::Sender { .. }) => {
                message.peer == peer
            }
            _ => false,
        };
        let all = self.messages.iter();
        let lost: Vec<u64> = all
            .filter(|(_, message)| is_lost(message))
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            if !self.table.forget(id)
                && let Some(receive) = self.receive_of(id)
            {
                self.end(receive, Err(error.clone()));
            }
            let state = &mut self.peers[peer];
            match self.messages.remove(&id) {
                Some(message) if matches!(message.at, StoredAt::Sender { .. }) => {
                    state.pool.leave();
                }
                // It was in the first slot; what arrived behind it is in the next ones.
                Some(_) => state.free_slot(queue),
                None => {}
            }
        }
    }

    /// Fails the receives without a message that wait for a peer that has failed.
    fn fail_receives(&mut self, peer: usize) {
        for receive in self.table.receives(|source| source != Source::Any) {
            let source = self.receives.get(&receive).map(|open| open.source);
            if source == Some(Source::Peer(peer)) {
                self.fail_open(receive);
            }
        }
        for receive in self.table.receives(|source| source == Source::Any) {
            self.fail_open(receive);
        }
    }

    fn fail_open(&mut self, receive: u64) {
        let source = self.receives.get(&receive).map(|open| open.source);
        if let Some(error) = source.and_then(|source| self.failure_for(source)) {
            self.table.cancel(receive);
            self.end(receive, Err(error));
        }
    }
}
