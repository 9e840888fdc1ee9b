//! What a matcher does with a queue: it takes messages as they arrive, and gives their credits in any order. No receive of the queue itself is made then.

use std::time::Duration;

use super::MessageQueue;
use super::header::{MessageHeader, MessagePlace};
use super::{PendingSend, PostedSend};
use crate::endpoint::{Operation, QueueKind, Work};
use crate::mlx5::Opcode;
use crate::region::{RemoteSlice, Slice};
use crate::{Error, Result, StateKind};

/// A message that has arrived, and is in the slot of the queue's next message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArrivedMessage {
    /// Its running number, for its credit.
    pub(crate) number: u32,
    pub(crate) tag: u32,
    pub(crate) len_bytes: u64,
    pub(crate) place: MessagePlace,
}

/// What was completed on the queue's second endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReturnKind {
    /// The oldest read that had no completion yet.
    Read,
    Credit,
    /// The oldest flush that had none.
    Flush,
}

impl PendingSend {
    /// [`MessageQueue::number_of_queue`] of the queue that has sent it.
    pub(crate) fn queue(&self) -> u64 {
        self.wait.endpoint_id()
    }
}

impl PostedSend {
    /// [`MessageQueue::number_of_queue`] of the queue that has sent it.
    pub(crate) fn queue(&self) -> u64 {
        self.queue
    }
}

impl MessageQueue {
    /// A number of its own in this process.
    pub(crate) fn number_of_queue(&self) -> u64 {
        self.endpoint.id()
    }

    /// Fails unless a matcher can have the queue: it is connected, and no stream is to receive from it.
    ///
    /// # Errors
    /// [`Error::State`]; [`Error::Work`] if it has failed.
    pub(crate) fn check_matchable(&mut self) -> Result<()> {
        self.peer()?;
        self.endpoint.check_post(QueueKind::Recv)?;
        self.returns.check_post(QueueKind::Send)
    }

    /// From here on no call waits for room in a queue of the two endpoints.
    pub(crate) fn refuse_when_full(&mut self) {
        self.endpoint.set_room_timeout(None);
        self.returns.set_room_timeout(None);
    }

    /// The tag of the messages that are sent from here on.
    pub(crate) fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
    }

    /// Whether the peer has given the credit that the next message needs.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed.
    pub(crate) fn has_credit(&self) -> Result<bool> {
        self.check_alive()?;
        let peer = self.peer()?;
        self.has_received(self.slot_before(&peer), &peer)
    }

    /// Whether the peer has read a message that it is to read. True of others.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed.
    pub(crate) fn has_been_read(&self, pending: &PendingSend) -> Result<bool> {
        self.check_alive()?;
        if pending.held.is_none() {
            return Ok(true);
        }
        self.has_received(pending.number, &self.peer()?)
    }

    /// # Errors
    /// [`Error::Work`] if one of the endpoints has failed.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.endpoint.check_alive()?;
        self.returns.check_alive()
    }

    /// Whether the device of both endpoints, which have failed, has stopped.
    pub(crate) fn has_stopped(&self) -> bool {
        // Both, so that both make progress.
        let [messages, returns] = [&self.endpoint, &self.returns].map(|it| it.has_stopped());
        messages && returns
    }

    /// Waits until the device of both endpoints, which have failed, has stopped.
    pub(crate) fn await_stop(&self) {
        self.returns.await_stop();
        self.endpoint.await_stop();
    }

    /// The next message that has arrived, if there is one. It stays in its slot until [`MessageQueue::repost_slot`].
    ///
    /// # Errors
    /// [`Error::Malformed`] for other bytes than those of a message, and [`Error::Work`] if the queue has failed and all that arrived before was taken.
    pub(crate) fn poll_arrival(&mut self) -> Result<Option<ArrivedMessage>> {
        if self.endpoint.poll_cq(QueueKind::Recv)?.is_none() {
            return Ok(None);
        }
        let MessageHeader {
            number,
            tag,
            len_bytes,
            place,
        } = self.memory.slot(self.received).header()?;
        Ok(Some(ArrivedMessage {
            number,
            tag,
            len_bytes,
            place,
        }))
    }

    /// Copies the message that is in the slot of the next one, of that length, into slices with room for it.
    ///
    /// # Errors
    /// Those of the memory.
    pub(crate) fn copy_arrived<'a>(
        &self,
        len_bytes: u64,
        to: impl Iterator<Item = Slice<'a>>,
    ) -> Result<()> {
        self.memory.slot(self.received).copy(len_bytes, to)
    }

    /// Posts the slot of the next message again, whose message was taken out of it. Slots are posted in the order of the messages, so that a number names its slot.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed.
    pub(crate) fn repost_slot(&mut self) -> Result<()> {
        let number = self.received;
        self.skip_slot();
        let slot = self.memory.slot_slice(number)?;
        self.endpoint.post_recv(number.into(), &[slot]).map(|_| ())
    }

    /// The message of the next slot was taken out, and no other one comes: the queue has failed.
    pub(crate) fn skip_slot(&mut self) {
        self.received = self.received.wrapping_add(1);
    }

    /// Gives the credit of the message with that number, whose slot was posted again. Credits may be given in any order: each slot has a word.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Work`] if the queue has failed.
    pub(crate) fn give_credit_of(&mut self, number: u32) -> Result<()> {
        let peer = self.peer()?;
        let is_signaled = self.is_credit_signaled();
        let mut bytes = [0; 4];
        let credit = self.credit(number, &peer, is_signaled, &mut bytes)?;
        self.returns.post_send(&credit)?;
        self.note_credit(is_signaled);
        Ok(())
    }

    /// Reads memory of the peer, or of this process by a loopback, into a slice.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Work`] if the queue has failed.
    pub(crate) fn read_into(&mut self, slice: Slice<'_>, addr: u64, rkey: u32) -> Result<()> {
        let from = RemoteSlice::new(addr, rkey, slice.len_bytes.into());
        self.returns.post_send(&Work::read(&[slice], from))?;
        // It is signaled, and its completion frees the places of the credits before it.
        self.unsignaled = 0;
        Ok(())
    }

    /// Has a completion behind all credits so far.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Work`] if the queue has failed.
    pub(crate) fn post_flush(&mut self) -> Result<()> {
        self.returns.post_send(&Work::nop())?;
        self.unsignaled = 0;
        Ok(())
    }

    /// The next completion of a read, a credit or a flush.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed. Completions of before the failure are returned first.
    pub(crate) fn poll_return(&mut self) -> Result<Option<ReturnKind>> {
        let Some(completion) = self.returns.poll_cq(QueueKind::Send)? else {
            return Ok(None);
        };
        let kind = match completion.operation {
            Operation::Post(Opcode::RdmaRead) => ReturnKind::Read,
            Operation::Post(Opcode::Nop) => ReturnKind::Flush,
            _ => ReturnKind::Credit,
        };
        if kind == ReturnKind::Credit {
            self.uncollected = self.uncollected.saturating_sub(1);
        }
        Ok(Some(kind))
    }

    /// Whether the streams have executed all sends, the peer has received all messages, and all completions of sends are taken.
    ///
    /// # Errors
    /// [`Error::Work`] if the queue has failed.
    pub(crate) fn has_sent_all(&mut self) -> Result<bool> {
        match self.endpoint.check_post(QueueKind::Send) {
            Ok(()) => {}
            Err(Error::State {
                kind: StateKind::OutOfOrder,
                ..
            }) => return Ok(false),
            Err(error) => return Err(error),
        }
        let peer = self.peer()?;
        for slot in 1..=peer.slots {
            if !self.has_received(self.sent.wrapping_sub(slot), &peer)? {
                self.check_alive()?;
                return Ok(false);
            }
        }
        self.release_read(&peer)?;
        while self.unwaited > 0 {
            let polled = self.endpoint.poll_cq(QueueKind::Send);
            if polled.map_err(|error| self.cause_of(error))?.is_none() {
                return Ok(false);
            }
            self.unwaited -= 1;
        }
        Ok(true)
    }

    /// How long a call waits for room in a queue, as it was configured.
    pub(crate) fn room_timeout(&self) -> Option<Duration> {
        self.config.endpoint.room_timeout
    }
}
