//! Messages from the calling thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::header::{MessageHeader, MessagePlace};
use super::receive::{Taker, check_fits};
use super::{MessageAddress, MessageQueue};
use crate::endpoint::{QueueKind, Ticket, Work, poll_until};
use crate::region::{RemoteSlice, Slice};
use crate::{Error, Result, StateKind};

/// The number of the next message that is received from any queue.
static SERVED: AtomicU64 = AtomicU64::new(1);

/// Of so many looks for a message in vain one also looks whether the connections are well.
const IDLE_LOOKS_PER_CHECK: u32 = 64;

/// The end of a call.
#[derive(Clone, Copy)]
struct CallTime {
    end: Option<Instant>,
    timeout: Option<Duration>,
}

impl CallTime {
    fn new(timeout: Option<Duration>) -> CallTime {
        CallTime {
            end: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            timeout,
        }
    }

    fn left(&self) -> Option<Duration> {
        self.end
            .map(|end| end.saturating_duration_since(Instant::now()))
    }

    /// Names the whole call in place of the part of it that took too long.
    fn name(&self, error: Error, operation: &'static str) -> Error {
        match error {
            Error::Timeout { .. } => Error::Timeout {
                operation,
                timeout: self.timeout.unwrap_or_default(),
            },
            error => error,
        }
    }
}

/// A message that a thread has sent with [`MessageQueue::start_send_now`], for [`MessageQueue::wait_send_now`]. The memory of the message must not be changed
/// before that wait is over. If this is dropped, [`MessageQueue::finish`] says when that is. The queue keeps the memory of a message that the peer is to read.
#[derive(Debug)]
#[must_use = "the memory of a message must not be changed before `wait_send_now`"]
pub struct PostedSend {
    /// By which a matcher finds the queue.
    pub(super) queue: u64,
    ticket: Ticket,
    number: u32,
    /// The peer is to read it.
    is_read: bool,
}

impl MessageQueue {
    /// Sends a message from this thread, and waits until its memory may be used again, for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`]; [`Error::State`] if streams have messages of this queue that they have not executed, which this one would overtake;
    /// [`Error::Timeout`]. After a timeout the message may have been sent. Its memory must not be changed until
    /// [`MessageQueue::finish`], or a later message that is not eager, is done.
    pub fn send_now(&mut self, slices: &[Slice<'_>], timeout: Option<Duration>) -> Result<()> {
        let limit = CallTime::new(timeout);
        self.send_until(slices, limit)
            .map_err(|error| self.error_of(error, limit, "the send of a message"))
    }

    /// Sends a message from this thread, as [`MessageQueue::send_now`], and does not wait until its memory may be used again: so that a thread can send
    /// before it receives, whatever the length. Waits for at most `timeout` for a slot of the peer.
    ///
    /// # Errors
    /// As [`MessageQueue::send_now`]. After [`Error::Timeout`] nothing was sent, and the call can be repeated.
    pub fn start_send_now(
        &mut self,
        slices: &[Slice<'_>],
        timeout: Option<Duration>,
    ) -> Result<PostedSend> {
        let limit = CallTime::new(timeout);
        self.start_until(slices, limit)
            .map_err(|error| self.error_of(error, limit, "the send of a message"))
    }

    /// Waits in this thread until the memory of a message may be used again, for at most `timeout`; `None` waits for ever. Messages can be waited for in any
    /// order, and again.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a message of another queue; [`Error::Work`] if the queue has failed; [`Error::Timeout`], after which the call can be repeated.
    pub fn wait_send_now(&self, sent: &PostedSend, timeout: Option<Duration>) -> Result<()> {
        if !self.endpoint.has_ticket(&sent.ticket) {
            return Err(Error::Foreign {
                argument: "sent",
                found: "another message queue".into(),
                expected: "the queue that has sent the message".into(),
            });
        }
        let limit = CallTime::new(timeout);
        self.await_sent(sent, limit)
            .map_err(|error| self.error_of(error, limit, "the send of a message"))
    }

    /// Whether the memory of a message may be used again. Makes progress on a device that needs it.
    ///
    /// # Errors
    /// As [`MessageQueue::wait_send_now`], but without a timeout.
    pub fn is_sent(&self, sent: &PostedSend) -> Result<bool> {
        match self.wait_send_now(sent, Some(Duration::ZERO)) {
            Ok(()) => Ok(true),
            Err(Error::Timeout { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Receives the next message in this thread, and returns its length in bytes. Waits for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::recv`], on whatever path; [`Error::Truncated`]; [`Error::Malformed`]; [`Error::State`] as [`MessageQueue::send_now`];
    /// [`Error::Timeout`] if no message came, after which the queue is as it was; [`Error::Work`] with [`MessageQueue::failure`] if the queue has failed. If a message that has come cannot be taken within
    /// [`EndpointConfig::wait_timeout`](crate::EndpointConfig::wait_timeout), the queue fails: [`Error::Work`].
    pub fn recv_now(&mut self, slices: &[Slice<'_>], timeout: Option<Duration>) -> Result<u64> {
        let limit = CallTime::new(timeout);
        self.receive_until(slices, limit)
            .map_err(|error| self.error_of(error, limit, "the receive of a message"))
    }

    /// Receives the next message of whichever queue has one, in this thread: from any peer, or of any tag. Returns the index of the queue and the length in bytes. Queues that have
    /// messages take turns. Waits for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::recv_now`]. A queue that has failed ends the call with its error, though others may have messages: [`MessageQueue::failure`] tells which one, and the call
    /// can be repeated without it. The memory is of all their protection domains, so of one. [`Error::Truncated`] and [`Error::Malformed`] do not say of which queue the message was. [`Error::Range`] without a queue.
    pub fn recv_any_now(
        queues: &mut [&mut MessageQueue],
        slices: &[Slice<'_>],
        timeout: Option<Duration>,
    ) -> Result<(usize, u64)> {
        let limit = CallTime::new(timeout);
        let received = MessageQueue::receive_any_until(queues, slices, limit);
        received.map_err(|error| limit.name(error, "the receive of a message"))
    }

    /// Waits in this thread until the peer has received all messages of this side, and has all credits for those that this side has received. Call it before
    /// the queue is dropped, and agree with the peer after it, as by `Group::barrier`: a drop ends the connection, and what the peer still waits for fails.
    ///
    /// # Errors
    /// [`Error::State`] if the queue is not connected; [`Error::Work`] if it has failed; [`Error::Timeout`], also if a stream does not come to what it was
    /// given.
    pub fn finish(&mut self, timeout: Option<Duration>) -> Result<()> {
        let limit = CallTime::new(timeout);
        self.finish_until(limit)
            .map_err(|error| self.error_of(error, limit, "the end of a message queue"))
    }

    /// Waits in this thread until streams have executed all operations of the queue.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed; [`Error::Timeout`].
    pub(crate) fn await_streams(&mut self, timeout: Option<Duration>) -> Result<()> {
        let limit = CallTime::new(timeout);
        let device = self.endpoint.domain().device().clone();
        for endpoint in [&mut self.endpoint, &mut self.returns] {
            let look = || match endpoint.check_post(QueueKind::Send) {
                Ok(()) => Ok(Some(())),
                Err(Error::State {
                    kind: StateKind::OutOfOrder,
                    ..
                }) => Ok(None),
                Err(error) => Err(error),
            };
            let operation = "the wait for streams";
            poll_until(operation, limit.left(), || device.progress(), look)?;
        }
        Ok(())
    }

    /// The error of a whole call.
    fn error_of(&self, error: Error, limit: CallTime, operation: &'static str) -> Error {
        self.cause_of(limit.name(error, operation))
    }

    /// The failure of the queue in place of a completion in error. That may be one of many that the failure has flushed.
    pub(super) fn cause_of(&self, error: Error) -> Error {
        match error {
            Error::Work(found) => Error::Work(self.failure().unwrap_or(found)),
            error => error,
        }
    }

    fn finish_until(&mut self, limit: CallTime) -> Result<()> {
        let peer = self.peer()?;
        self.await_streams(limit.left())?;
        for slot in 1..=peer.slots {
            self.await_received(self.sent.wrapping_sub(slot), &peer, limit)?;
        }
        self.release_read(&peer)?;
        self.collect_sends(limit)?;
        self.collect_credits(limit)?;
        // Behind all credits.
        self.returns.post_send(&Work::nop())?;
        self.uncollected += 1;
        self.unsignaled = 0;
        self.collect_credits(limit)
    }

    fn send_until(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<()> {
        let sent = self.start_until(slices, limit)?;
        self.await_sent(&sent, limit)
    }

    fn start_until(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<PostedSend> {
        let peer = self.peer()?;
        self.returns.check_alive()?;
        self.endpoint.check_post(QueueKind::Send)?;
        self.await_received(self.slot_before(&peer), &peer, limit)?;
        self.make_room(limit)?;
        self.release_read(&peer)?;
        let number = self.sent;
        let message = self
            .memory
            .make_message(number, self.tag, slices, &peer, &self.endpoint)?;
        let work = Work::send(&message.slices).wr_id(number.into());
        let ticket = self.endpoint.post_send(&work)?;
        let read = message.read.cloned();
        let is_read = read.is_some();
        self.note_message(read, false);
        self.unwaited += 1;
        Ok(PostedSend {
            queue: self.endpoint.id(),
            ticket,
            number,
            is_read,
        })
    }

    fn await_sent(&self, sent: &PostedSend, limit: CallTime) -> Result<()> {
        if !sent.ticket.has_succeeded() {
            sent.ticket.wait(limit.left())?;
        }
        if sent.is_read {
            self.await_received(sent.number, &self.peer()?, limit)?;
        }
        Ok(())
    }

    fn receive_until(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<u64> {
        self.prepare_to_receive(slices, limit)?;
        // Credits that the peer does not take say that it is gone.
        self.endpoint
            .wait_cq_beside(QueueKind::Recv, limit.left(), Some(&self.returns))?;
        self.receive_arrived(slices)
    }

    fn receive_any_until(
        queues: &mut [&mut MessageQueue],
        slices: &[Slice<'_>],
        limit: CallTime,
    ) -> Result<(usize, u64)> {
        if queues.is_empty() {
            return Err(Error::Range {
                argument: "queues.len()",
                value: 0,
                min: 1,
                max: u64::MAX,
            });
        }
        // The one that has waited longest comes first.
        let mut order: Vec<usize> = (0..queues.len()).collect();
        order.sort_by_key(|at| queues.get(*at).map(|queue| queue.served));
        let mut idle = 0_u32;
        let look = || {
            for at in &order {
                let Some(queue) = queues.get_mut(*at) else {
                    continue;
                };
                // One that is not ready, for want of a completion of its own credits, holds up no other.
                match queue.prepare_to_receive(slices, CallTime::new(Some(Duration::ZERO))) {
                    Err(Error::Timeout { .. }) => continue,
                    prepared => prepared.map_err(|error| queue.cause_of(error))?,
                }
                let polled = queue.endpoint.poll_cq(QueueKind::Recv);
                if polled.map_err(|error| queue.cause_of(error))?.is_some() {
                    queue.served = SERVED.fetch_add(1, Ordering::Relaxed);
                    let received = queue.receive_arrived(slices);
                    let len = received.map_err(|error| queue.cause_of(error))?;
                    return Ok(Some((*at, len)));
                }
            }
            // With the first one, because a program may call this again and again without a timeout.
            if idle.is_multiple_of(IDLE_LOOKS_PER_CHECK) {
                for queue in queues.iter() {
                    queue.returns.look_whether_alive()?;
                }
            }
            idle = idle.wrapping_add(1);
            Ok(None)
        };
        // Each look lets the devices work.
        poll_until("the wait for a message", limit.left(), || false, look)
    }

    /// All that can be late, full or refused before the next message is taken.
    fn prepare_to_receive(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<()> {
        self.peer()?;
        self.check_target(slices, Taker::Thread)?;
        self.endpoint.check_post(QueueKind::Recv)?;
        self.returns.check_post(QueueKind::Send)?;
        // Before the message is taken: nothing that could be late or full comes behind it.
        self.collect_credits(limit)?;
        if self.returns.has_room_now(QueueKind::Send, 2)? {
            return Ok(());
        }
        self.returns.wait_room(QueueKind::Send, 2, limit.left())
    }

    /// Takes the next message, whose completion was taken, and gives its credit.
    fn receive_arrived(&mut self, slices: &[Slice<'_>]) -> Result<u64> {
        let peer = self.peer()?;
        let taken = match self.take(slices) {
            Err(error @ (Error::Truncated { .. } | Error::Malformed { .. })) => Err(error),
            Err(error) => return Err(self.break_off(error)),
            taken => taken,
        };
        if let Err(error) = self.give_credit(&peer) {
            return Err(self.break_off(error));
        }
        taken
    }

    /// Ends the connection, because a message was taken and its receive cannot be ended. The device does not access its memory any more when this returns.
    fn break_off(&self, error: Error) -> Error {
        self.abort_handle().abort();
        self.returns.await_stop();
        self.endpoint.await_stop();
        match error {
            Error::Timeout { .. } | Error::QueueFull { .. } => {
                self.returns.failure().map_or(error, Error::Work)
            }
            error => error,
        }
    }

    /// Copies the message out of its slot, or reads it. Returns its length.
    fn take(&mut self, slices: &[Slice<'_>]) -> Result<u64> {
        let slot = self.memory.slot(self.received);
        let MessageHeader {
            len_bytes, place, ..
        } = slot.header()?;
        check_fits(len_bytes, slices.iter().copied())?;
        match (place, slices) {
            (MessagePlace::Sender { addr, rkey }, [slice]) => {
                let into = [slice.region.slice(slice.offset, len_bytes)?];
                let from = RemoteSlice::new(addr, rkey, len_bytes);
                self.returns.post_send(&Work::read(&into, from))?;
                self.returns.wait_cq(QueueKind::Send, self.timeout())?;
            }
            _ => slot.copy(len_bytes, slices.iter().copied())?,
        }
        Ok(len_bytes)
    }

    /// Posts the slot of the message that was received again, and tells the peer.
    fn give_credit(&mut self, peer: &MessageAddress) -> Result<()> {
        let number = self.received;
        let slot = self.memory.slot_slice(number)?;
        self.endpoint.post_recv(number.into(), &[slot])?;
        let is_signaled = self.is_credit_signaled();
        let mut bytes = [0; 4];
        let credit = self.credit(number, peer, is_signaled, &mut bytes)?;
        self.returns.post_send(&credit)?;
        self.received = number.wrapping_add(1);
        self.note_credit(is_signaled);
        Ok(())
    }

    /// Waits until the peer has received the message with that number.
    fn await_received(&self, number: u32, peer: &MessageAddress, limit: CallTime) -> Result<()> {
        // Mostly so: then no clock is read.
        if self.has_received(number, peer)? {
            return Ok(());
        }
        let look = || {
            if self.has_received(number, peer)? {
                return Ok(Some(()));
            }
            self.failure()
                .map_or(Ok(None), |failure| Err(Error::Work(failure)))
        };
        poll_until(
            "the wait for the peer",
            limit.left(),
            || self.endpoint.progress(),
            look,
        )
    }

    /// Takes the completions of messages that nothing waits for, as far as they are there. Waits for those of half of the queue if it may be full.
    fn make_room(&mut self, limit: CallTime) -> Result<()> {
        while self.unwaited > 0 && self.endpoint.poll_cq(QueueKind::Send)?.is_some() {
            self.unwaited -= 1;
        }
        if self.unwaited < self.config.ahead {
            return Ok(());
        }
        while self.unwaited > self.config.ahead / 2 {
            self.endpoint.wait_cq(QueueKind::Send, limit.left())?;
            self.unwaited -= 1;
        }
        Ok(())
    }

    /// Takes the completions of messages that nothing waits for.
    fn collect_sends(&mut self, limit: CallTime) -> Result<()> {
        while self.unwaited > 0 {
            self.endpoint.wait_cq(QueueKind::Send, limit.left())?;
            self.unwaited -= 1;
        }
        Ok(())
    }

    /// The same of credits.
    fn collect_credits(&mut self, limit: CallTime) -> Result<()> {
        while self.uncollected > 0 {
            self.returns.wait_cq(QueueKind::Send, limit.left())?;
            self.uncollected -= 1;
        }
        Ok(())
    }
}
