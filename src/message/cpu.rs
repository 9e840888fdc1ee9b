//! Messages from the calling thread.

use std::time::{Duration, Instant};

use super::header::{MessageHeader, MessagePlace};
use super::receive::check_fits;
use super::{MessageAddress, MessageQueue};
use crate::endpoint::{QueueKind, Work, poll_until};
use crate::region::{RemoteSlice, Slice};
use crate::{Error, Result, StateKind};

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

impl MessageQueue {
    /// Sends a message from this thread, and waits until its memory may be used again, for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`]; [`Error::State`] if streams have messages of this queue that they have not executed, which this one would overtake;
    /// [`Error::Timeout`]. After a timeout the message may have been sent, and its memory must not be changed until a later send is done.
    pub fn send_now(&mut self, slices: &[Slice<'_>], timeout: Option<Duration>) -> Result<()> {
        let limit = CallTime::new(timeout);
        self.send_until(slices, limit)
            .map_err(|error| limit.name(error, "the send of a message"))
    }

    /// Receives the next message in this thread, and returns its length in bytes. Waits for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::recv`], on whatever path; [`Error::Truncated`]; [`Error::Malformed`]; [`Error::State`] as [`MessageQueue::send_now`];
    /// [`Error::Timeout`] if no message came, after which the queue is as it was. If a message that is being read does not come to its end in
    /// [`EndpointConfig::wait_timeout`](crate::EndpointConfig::wait_timeout), the queue fails.
    pub fn recv_now(&mut self, slices: &[Slice<'_>], timeout: Option<Duration>) -> Result<u64> {
        let limit = CallTime::new(timeout);
        self.receive_until(slices, limit)
            .map_err(|error| limit.name(error, "the receive of a message"))
    }

    /// Waits in this thread until the peer has received all messages of this side, and has all credits for those that this side has received. Call it before
    /// the queue is dropped, and agree with the peer after it, as by `Group::barrier`: a drop ends the connection, and what the peer still waits for fails.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed; [`Error::Timeout`], also if a stream does not come to what it was given.
    pub fn finish(&mut self, timeout: Option<Duration>) -> Result<()> {
        let limit = CallTime::new(timeout);
        self.finish_until(limit)
            .map_err(|error| limit.name(error, "the end of a message queue"))
    }

    fn finish_until(&mut self, limit: CallTime) -> Result<()> {
        let peer = self.peer()?;
        let device = self.endpoint.domain().device().clone();
        let endpoint = &mut self.endpoint;
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
        for slot in 1..=peer.slots {
            self.await_received(self.sent.wrapping_sub(slot), &peer, limit)?;
        }
        self.collect_now(limit)?;
        // Behind all credits.
        self.endpoint.post_send(&Work::nop())?;
        self.uncollected += 1;
        self.unsignaled = 0;
        self.collect_now(limit)
    }

    fn send_until(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<()> {
        let peer = self.peer()?;
        self.endpoint.check_post(QueueKind::Send)?;
        self.await_received(self.slot_before(&peer), &peer, limit)?;
        self.collect_now(limit)?;
        let number = self.sent;
        let message = self
            .memory
            .make_message(number, slices, &peer, &self.endpoint)?;
        let work = Work::send(&message.slices).wr_id(number.into());
        self.endpoint.post_send(&work)?;
        let is_read = message.read.is_some();
        self.sent = number.wrapping_add(1);
        self.uncollected += 1;
        self.collect_now(limit)?;
        if is_read {
            self.await_received(number, &peer, limit)?;
        }
        Ok(())
    }

    fn receive_until(&mut self, slices: &[Slice<'_>], limit: CallTime) -> Result<u64> {
        let peer = self.peer()?;
        self.check_target(slices)?;
        self.endpoint.check_post(QueueKind::Recv)?;
        self.endpoint.check_post(QueueKind::Send)?;
        self.endpoint.wait_cq(QueueKind::Recv, limit.left())?;
        let taken = self.take(slices);
        if let Err(Error::Work(_) | Error::Timeout { .. }) = taken {
            // The device may still write to the memory.
            self.endpoint.abort();
            return taken;
        }
        let given = self.give_credit(&peer);
        taken.and_then(|len_bytes| given.map(|()| len_bytes))
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
                let limit = CallTime::new(self.timeout());
                self.collect_now(limit)?;
                let into = [slice.region.slice(slice.offset, len_bytes)?];
                let from = RemoteSlice::new(addr, rkey, len_bytes);
                self.endpoint.post_send(&Work::read(&into, from))?;
                self.endpoint.wait_cq(QueueKind::Send, limit.left())?;
            }
            _ => slot.copy(len_bytes, slices.iter().copied())?,
        }
        Ok(len_bytes)
    }

    /// Posts the slot of the message that was received again, and tells the peer.
    fn give_credit(&mut self, peer: &MessageAddress) -> Result<()> {
        if self.is_credit_signaled() {
            self.collect_now(CallTime::new(self.timeout()))?;
        }
        let number = self.received;
        let slot = self.memory.slot_slice(number)?;
        self.endpoint.post_recv(number.into(), &[slot])?;
        let is_signaled = self.is_credit_signaled();
        let mut bytes = [0; 4];
        let credit = self.credit(number, peer, &mut bytes)?;
        self.endpoint.post_send(&credit)?;
        self.received = number.wrapping_add(1);
        self.note_credit(is_signaled);
        Ok(())
    }

    /// Waits until the peer has received the message with that number.
    fn await_received(&self, number: u32, peer: &MessageAddress, limit: CallTime) -> Result<()> {
        let device = self.endpoint.domain().device();
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
            || device.progress(),
            look,
        )
    }

    /// Takes the completions that nothing waits for.
    fn collect_now(&mut self, limit: CallTime) -> Result<()> {
        while self.uncollected > 0 {
            self.endpoint.wait_cq(QueueKind::Send, limit.left())?;
            self.uncollected -= 1;
        }
        Ok(())
    }
}
