//! What the thread of the matcher knows of a peer: its queue, and what is under way there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::inbox::MatchReply;
use super::pool::{PoolBlock, UnexpectedPool};
use crate::message::{ArrivedMessage, MessagePlace, MessageQueue};
use crate::region::Slice;
use crate::{Error, Result, WorkError};

/// A queue, locked by the thread that matches only while it looks at it, and by threads that send.
pub(super) type SharedQueue = Arc<Mutex<MessageQueue>>;

/// The queue, if no other thread uses it now.
pub(super) fn try_lock(queue: &SharedQueue) -> Option<MutexGuard<'_, MessageQueue>> {
    match queue.try_lock() {
        Ok(queue) => Some(queue),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(super) fn lock(queue: &SharedQueue) -> MutexGuard<'_, MessageQueue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A message that is here, or that its sender keeps for a receive, and whose receive has not begun to store it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredMessage {
    pub(super) peer: usize,
    pub(super) tag: u32,
    pub(super) len_bytes: u64,
    /// Its running number in its queue, for its credit.
    pub(super) number: u32,
    pub(super) at: StoredAt,
}

/// Where the bytes of a message are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoredAt {
    /// Nobody has taken it out of its slot.
    Slot(MessagePlace),
    Block(PoolBlock),
    Sender {
        addr: u64,
        rkey: u32,
    },
}

impl StoredMessage {
    pub(super) fn new(peer: usize, arrival: ArrivedMessage) -> StoredMessage {
        StoredMessage {
            peer,
            tag: arrival.tag,
            len_bytes: arrival.len_bytes,
            number: arrival.number,
            at: StoredAt::Slot(arrival.place),
        }
    }
}

/// A read of a message of the peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerRead {
    pub(super) receive: u64,
    pub(super) message: StoredMessage,
}

/// What has become of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerHealth {
    Alive,
    /// It has failed, and its device has not stopped: it may still write into the memory of receives.
    Stopping,
    Failed(WorkError),
}

/// A peer.
pub(super) struct MatchPeer {
    pub(super) queue: SharedQueue,
    /// Of messages to oneself: the queue that sends them.
    outward: Option<SharedQueue>,
    pub(super) pool: UnexpectedPool,
    /// The message in the slot of the next one, if nobody could take it out. No further message is looked at then.
    pub(super) head: Option<u64>,
    /// Reads that were posted, in order, and that are to be posted.
    pub(super) reads: VecDeque<PeerRead>,
    pub(super) to_read: VecDeque<PeerRead>,
    /// Credits that are to be given.
    pub(super) credits: VecDeque<u32>,
    pub(super) to_flush: Vec<MatchReply<Result<()>>>,
    pub(super) flushes: VecDeque<MatchReply<Result<()>>>,
    pub(super) health: PeerHealth,
    /// Everything that had arrived before the failure was looked at, and what it has completed.
    pub(super) is_drained: bool,
    pub(super) is_settled: bool,
    /// Receives from any peer go on without it.
    pub(super) is_excluded: bool,
}

impl MatchPeer {
    pub(super) fn new(
        queue: SharedQueue,
        pool: UnexpectedPool,
        outward: Option<SharedQueue>,
    ) -> MatchPeer {
        MatchPeer {
            queue,
            outward,
            pool,
            head: None,
            reads: VecDeque::new(),
            to_read: VecDeque::new(),
            credits: VecDeque::new(),
            to_flush: Vec::new(),
            flushes: VecDeque::new(),
            health: PeerHealth::Alive,
            is_drained: false,
            is_settled: false,
            is_excluded: false,
        }
    }

    /// Whether the queue that sends messages to oneself has failed. The other end need not notice.
    pub(super) fn has_failed_outward(&self) -> bool {
        let outward = self.outward.as_ref().and_then(try_lock);
        outward.is_some_and(|queue| queue.check_alive().is_err())
    }

    /// The failure of a peer of which no further message comes.
    pub(super) fn over(&self) -> Option<WorkError> {
        match self.health {
            PeerHealth::Failed(failure) if self.is_drained && self.head.is_none() => Some(failure),
            _ => None,
        }
    }

    /// The connection has failed.
    pub(super) fn stop(&mut self, queue: &MessageQueue) {
        if self.health == PeerHealth::Alive {
            // Both of its endpoints.
            queue.abort_handle().abort();
            self.health = PeerHealth::Stopping;
        }
    }

    /// Posts the slot of the first message again, which was taken out.
    pub(super) fn free_slot(&mut self, queue: &mut MessageQueue) {
        self.head = None;
        if self.health != PeerHealth::Alive {
            queue.skip_slot();
        } else if queue.repost_slot().is_err() {
            self.stop(queue);
        }
    }

    /// Has the credit of a message given.
    pub(super) fn credit(&mut self, number: u32) {
        if self.health == PeerHealth::Alive {
            self.credits.push_back(number);
        }
    }

    /// Takes the first message out of its slot, because no receive is ready for it. Returns its new place, if there is one.
    pub(super) fn stash(
        &mut self,
        queue: &mut MessageQueue,
        message: &StoredMessage,
    ) -> Option<StoredAt> {
        match message.at {
            StoredAt::Slot(MessagePlace::Slot) => {
                let block = self.pool.take()?;
                self.copy_to_block(queue, message, block);
                Some(StoredAt::Block(block))
            }
            StoredAt::Slot(MessagePlace::Sender { addr, rkey }) => {
                if !self.pool.enter() {
                    return None;
                }
                self.free_slot(queue);
                Some(StoredAt::Sender { addr, rkey })
            }
            other => Some(other),
        }
    }

    /// Copies the first message into a block, and gives its credit.
    pub(super) fn copy_to_block(
        &mut self,
        queue: &mut MessageQueue,
        message: &StoredMessage,
        block: PoolBlock,
    ) {
        let len_bytes = message.len_bytes;
        let into = self.pool.slice(block, len_bytes);
        // Within both: the length of an eager message was checked.
        let _ = into.and_then(|into| queue.copy_arrived(len_bytes, std::iter::once(into)));
        self.free_slot(queue);
        self.credit(message.number);
    }

    /// Posts what is to be read and given. Returns whether anything was posted.
    pub(super) fn post(
        &mut self,
        queue: &mut MessageQueue,
        target: impl Fn(u64, u64, &mut dyn FnMut(Slice<'_>) -> Result<()>) -> Result<()>,
    ) -> bool {
        let posted = self.post_some(queue, target);
        match posted {
            // Later.
            Err(Error::QueueFull { .. }) => false,
            Err(_) => {
                self.stop(queue);
                true
            }
            Ok(any) => any,
        }
    }

    fn post_some(
        &mut self,
        queue: &mut MessageQueue,
        target: impl Fn(u64, u64, &mut dyn FnMut(Slice<'_>) -> Result<()>) -> Result<()>,
    ) -> Result<bool> {
        let mut any = false;
        while let Some(read) = self.to_read.front().copied() {
            let PeerRead { receive, message } = read;
            if let StoredAt::Sender { addr, rkey } = message.at {
                target(receive, message.len_bytes, &mut |slice| {
                    queue.read_into(slice, addr, rkey)
                })?;
            }
            self.to_read.pop_front();
            self.reads.push_back(read);
            any = true;
        }
        while let Some(number) = self.credits.front() {
            queue.give_credit_of(*number)?;
            self.credits.pop_front();
            any = true;
        }
        while let Some(reply) = self.to_flush.pop() {
            if let Err(error) = queue.post_flush() {
                self.to_flush.push(reply);
                return Err(error);
            }
            self.flushes.push_back(reply);
            any = true;
        }
        Ok(any)
    }
}
