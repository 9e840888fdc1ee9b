//! Gives the rounds of an operation to a stream or a graph.

use super::communicator::{Collective, Communicator};
use super::local::{LocalWork, Memories};
use super::schedule::Transfer;
use super::target::RoundTarget;
use crate::endpoint::poll_until;
use crate::message::{MessageQueue, Outgoing};
use crate::region::Slice;
use crate::{Error, Result, StateKind};

impl Communicator {
    /// Carries the rounds of an operation out. On failure also says whether a part was before.
    pub(super) fn give_rounds<T: RoundTarget>(
        &mut self,
        to: &mut T,
        collective: &Collective,
        parts: &mut Vec<T::Part>,
    ) -> std::result::Result<(), (Error, bool)> {
        let Collective {
            schedule,
            memories,
            reduction,
            matched,
            ..
        } = collective;
        let matched = matched.as_deref();
        let mut has_begun = false;
        for (at, round) in schedule.rounds.iter().enumerate() {
            let ready = matched.map_or(&[][..], |matched| &matched.ready[at]);
            for receive in ready {
                let told = self.with_room(to, receive.peer, has_begun, |to, queue| {
                    to.ready(queue, receive.ahead)
                });
                told.map_err(|error| (error, has_begun))?;
                has_begun = true;
            }
            let mut pending = Vec::with_capacity(round.sends.len());
            for (number, send) in round.sends.iter().enumerate() {
                let into = matched.map(|matched| matched.targets[at][number]);
                let sent = self.with_room(to, send.peer, has_begun, |to, queue| {
                    with_slice(memories, send, |slices| {
                        let message = match into {
                            Some(into) => Outgoing::Place(slices, into),
                            None => Outgoing::Slot(slices),
                        };
                        to.start_send(queue, message)
                    })
                });
                let sent = sent.map_err(|error| (error, has_begun))?;
                has_begun = true;
                pending.push((send.peer, sent));
            }
            for receive in &round.receives {
                let received = self.with_room(to, receive.peer, has_begun, |to, queue| {
                    with_slice(memories, receive, |slices| {
                        to.recv(receive.peer, queue, slices, matched.is_some())
                    })
                });
                parts.push(received.map_err(|error| (error, has_begun))?);
                has_begun = true;
            }
            let mut give = |given: Result<()>| {
                given.map_err(|error| (error, has_begun))?;
                has_begun = true;
                Ok::<(), (Error, bool)>(())
            };
            for (peer, sent) in pending {
                let waited = self
                    .queue(peer)
                    .and_then(|queue| to.wait_send(peer, queue, sent));
                give(waited.map(|part| parts.push(part)))?;
            }
            if !round.then.is_empty() {
                let count = self.ranks.count;
                let by_thread = to.stream().executes_on_host();
                let work = LocalWork::new(&round.then, memories, *reduction, count, by_thread);
                let given = work.and_then(|work| {
                    let end = work.end();
                    to.local(work.submission(), end)
                });
                give(given.map(|part| parts.push(part)))?;
            }
        }
        Ok(())
    }

    /// Calls with the queue to a peer. What has begun goes on when there is room in the queue, if the target's operations make room as they end.
    fn with_room<T: RoundTarget, R>(
        &mut self,
        to: &mut T,
        peer: u32,
        has_begun: bool,
        mut call: impl FnMut(&mut T, &mut MessageQueue) -> Result<R>,
    ) -> Result<R> {
        let queue = self.queue(peer)?;
        if !(has_begun && to.makes_room()) {
            return call(to, queue);
        }
        let (device, timeout) = (queue.domain().device().clone(), queue.timeout());
        let look = || match call(to, queue) {
            // A queue may wait for room itself, and for a shorter time.
            Err(Error::QueueFull { .. } | Error::Timeout { .. }) => Ok(None),
            called => called.map(Some),
        };
        let operation = "the wait for room in a message queue";
        poll_until(operation, timeout, || device.progress(), look)
    }

    fn queue(&mut self, peer: u32) -> Result<&mut MessageQueue> {
        let queue = self.queues.get_mut(peer as usize).and_then(Option::as_mut);
        queue.ok_or_else(|| {
            let reason = format!("rank {peer} has no queue");
            Error::state(StateKind::WrongKind, "a collective operation", reason)
        })
    }
}

/// Calls with the slice of a message; with none if it has no bytes.
fn with_slice<R>(
    memories: &Memories,
    transfer: &Transfer,
    call: impl FnOnce(&[Slice<'_>]) -> Result<R>,
) -> Result<R> {
    if transfer.span.len == 0 {
        return call(&[]);
    }
    call(&[memories.slice(transfer.span)?])
}
