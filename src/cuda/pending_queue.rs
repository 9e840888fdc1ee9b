//! The queue of a stream's pending work, between the thread that queues and those that look.

use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use super::pending::PendingEntry;
use crate::stream::Lock;

/// Capacity of the channel, in entries: about what a thread queues in one tick of the watching thread.
const ARRIVALS: usize = 256;

/// The pending work of a stream, in order.
///
/// The thread that queues holds the lock of the stream's queue over the driver call, which may block; those that look must not wait for it, and take
/// another lock. Entries go from the one to the others through a channel that takes neither.
pub(super) struct PendingQueue {
    arrivals: SyncSender<PendingEntry>,
    /// How many entries were sent. SeqCst, as [`PollMembership`](crate::proxy::PollMembership) wants it: the thread that stops looking reads this after
    /// it has said so, and the thread that queues writes it before it asks.
    sent: AtomicU64,
    waiting: Lock<Arrived>,
}

/// The entries that have arrived.
pub(super) struct Arrived {
    arrivals: Receiver<PendingEntry>,
    received: u64,
    pub(super) entries: VecDeque<PendingEntry>,
}

impl Arrived {
    /// Takes in what was entered meanwhile. Called after a failure was noted: either the thread that entered work sees the failure, or the entry is
    /// seen here.
    pub(super) fn receive(&mut self) {
        fence(Ordering::SeqCst);
        for entry in self.arrivals.try_iter() {
            self.received += 1;
            self.entries.push_back(entry);
        }
    }

    /// How many calls of the driver the entries are, or more: each counts as one at least, since those of events have a call that is not counted with them.
    pub(super) fn calls(&self) -> usize {
        self.entries.iter().map(|entry| entry.calls.max(1)).sum()
    }

    /// The number of the last entry.
    pub(super) fn last(&self) -> Option<u64> {
        self.entries.back().map(|last| last.done)
    }
}

impl PendingQueue {
    pub(super) fn new() -> PendingQueue {
        let (sender, receiver) = sync_channel(ARRIVALS);
        PendingQueue {
            arrivals: sender,
            sent: AtomicU64::new(0),
            waiting: Lock::new(Arrived {
                arrivals: receiver,
                received: 0,
                entries: VecDeque::new(),
            }),
        }
    }

    /// Adds what the stream is about to be given, which leaves `entering` empty. The caller holds the lock of the stream's queue. It takes no other one
    /// unless [`ARRIVALS`] entries have come since anybody looked.
    ///
    /// A thread that notes a failure of the stream and then looks here sees the entries, or the caller sees the failure after this.
    pub(super) fn enter(&self, entering: &mut Vec<PendingEntry>) {
        let mut sent = 0;
        for entry in entering.drain(..) {
            match self.arrivals.try_send(entry) {
                Ok(()) => sent += 1,
                Err(TrySendError::Full(entry) | TrySendError::Disconnected(entry)) => {
                    self.lock().entries.push_back(entry);
                }
            }
        }
        self.sent.fetch_add(sent, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Takes the entries behind the count `given` back: the stream was not given them. The caller has held the lock of the stream's queue since it
    /// entered them.
    pub(super) fn take_back(&self, given: u64, entering: &mut Vec<PendingEntry>) {
        let entries = &mut self.lock().entries;
        let first = entries.partition_point(|entry| entry.done <= given);
        entering.extend(entries.drain(first..));
    }

    /// All that has arrived, for those that look. Entries behind the count that the stream was given may be taken back.
    pub(super) fn lock(&self) -> MutexGuard<'_, Arrived> {
        let mut waiting = self.waiting.lock();
        waiting.receive();
        waiting
    }

    pub(super) fn is_empty(&self) -> bool {
        let waiting = self.lock();
        waiting.entries.is_empty() && waiting.received == self.sent.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::pending::PendingWork;

    fn entries(numbers: std::ops::Range<u64>) -> Vec<PendingEntry> {
        let entry = |done| PendingEntry {
            after: 0,
            done,
            calls: 0,
            what: PendingWork::Count,
        };
        numbers.map(entry).collect()
    }

    #[test]
    fn entries_stay_in_order_also_when_more_come_than_the_channel_has_room_for() {
        let queue = PendingQueue::new();
        assert!(queue.is_empty());
        let most = 2 * ARRIVALS as u64 + 10;
        queue.enter(&mut entries(0..3));
        assert_eq!(queue.waiting.lock().entries.len(), 0, "nobody has looked");
        queue.enter(&mut entries(3..most));
        assert!(!queue.is_empty());
        queue.enter(&mut entries(most..most + 1));
        let found: Vec<u64> = (queue.lock().entries.drain(..))
            .map(|entry| entry.done)
            .collect();
        assert!(found.iter().copied().eq(0..=most), "{found:?}");
        assert!(queue.is_empty());
    }

    #[test]
    fn calls_are_those_of_the_entries_that_are_left() {
        let queue = PendingQueue::new();
        let mut entering = entries(0..4);
        (entering[1].calls, entering[3].calls) = (2, 300);
        queue.enter(&mut entering);
        assert_eq!(queue.lock().calls(), 304);
        queue.lock().entries.truncate(3);
        assert_eq!(queue.lock().calls(), 4);
    }

    #[test]
    fn what_is_taken_back_is_what_the_stream_was_not_given() {
        let queue = PendingQueue::new();
        queue.enter(&mut entries(0..3));
        let mut refused = Vec::new();
        queue.take_back(2, &mut refused);
        assert!(refused.is_empty());
        queue.enter(&mut entries(3..6));
        queue.take_back(3, &mut refused);
        let numbers = |entries: Vec<PendingEntry>| -> Vec<u64> {
            entries.into_iter().map(|entry| entry.done).collect()
        };
        assert_eq!(numbers(refused), [4, 5]);
        assert_eq!(
            numbers(queue.lock().entries.drain(..).collect()),
            [0, 1, 2, 3]
        );
        assert!(queue.is_empty());
    }

    #[test]
    fn entries_of_another_thread_are_seen_once_it_has_entered_them() {
        let queue = PendingQueue::new();
        std::thread::scope(|scope| {
            let entering =
                scope.spawn(|| (0..10_000).for_each(|at| queue.enter(&mut entries(at..at + 1))));
            let mut next = 0;
            while next < 10_000 {
                assert!(!(entering.is_finished() && queue.is_empty()), "{next}");
                for entry in queue.lock().entries.drain(..) {
                    assert_eq!(entry.done, next);
                    next += 1;
                }
            }
        });
        assert!(queue.is_empty());
    }
}
