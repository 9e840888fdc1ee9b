//! What is queued behind a failure on a stream that cannot skip it: its endpoints are given up before the stream goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::count::CountedStream;
use super::pending::defer_drops;
use super::state::StreamState;
use super::stream_words::{STATUS_STREAM, STATUS_WORK};
use crate::proxy::drop_elsewhere;
use crate::stream::{Follows, StreamFailure, stopping};

impl CountedStream for StreamState {
    fn settle_now(self: Arc<Self>) {
        defer_drops(self.settle());
        let_go(self);
    }

    fn stop_behind(self: Arc<Self>, owner: usize) {
        let done = self.count.read();
        let found = (self.pending.lock().entries.iter())
            .find_map(|entry| Some((entry.done, entry.failure_in(owner, done)?)));
        if let Some((entry, failure)) = found {
            self.fail_from(entry, failure);
        }
        let_go(self);
    }
}

/// Drops a handle of a stream. If it was the last, another thread destroys the stream, which may block until the GPU is done.
fn let_go(stream: Arc<StreamState>) {
    if let Some(last) = Arc::into_inner(stream) {
        drop_elsewhere(Box::new(last));
    }
}

impl Follows for StreamState {
    fn stop_from(self: Arc<Self>, entry: u64, failure: StreamFailure) {
        // A stream that has passed it has given its wait up.
        if self.count.read() < entry {
            self.fail_from(entry, failure);
        }
        let_go(self);
    }
}

/// While it lives, everything behind that entry is being given up. Also where an owner panics, it ends.
struct StoppingFrom<'a> {
    place: &'a AtomicU64,
    before: u64,
}

impl StoppingFrom<'_> {
    fn enter(place: &AtomicU64, entry: u64) -> StoppingFrom<'_> {
        let before = place.swap(entry, Ordering::Relaxed);
        StoppingFrom { place, before }
    }
}

impl Drop for StoppingFrom<'_> {
    fn drop(&mut self) {
        self.place.store(self.before, Ordering::Relaxed);
    }
}

impl StreamState {
    /// The entry ends without success. Before the stream may pass it, everything behind it is given up, unless the stream is to go on.
    pub(super) fn fail_from(&self, entry: u64, failure: StreamFailure) {
        if self.fault.continues() {
            return;
        }
        if entry > self.forgiven.load(Ordering::Acquire) {
            self.stopped_from.fetch_min(entry, Ordering::AcqRel);
            self.fault.fail(failure.clone());
        }
        self.give_up_behind(entry, entry, failure);
    }

    /// The host function that the stream is executing has failed; it has no entry among the pending ones. Everything behind it is given up before this
    /// returns, unless the stream is to go on.
    pub(super) fn fail_now(&self, failure: StreamFailure) {
        self.count.words.note(STATUS_STREAM);
        if self.fault.continues() {
            self.fault.pass(failure);
            return;
        }
        let behind = self.count.read() + 1;
        self.stopped_from.fetch_min(behind, Ordering::AcqRel);
        self.fault.stick(failure.clone());
        self.give_up_rest(failure);
    }

    /// Gives up all that the stream has not executed. Records that it has passed are good.
    pub(super) fn give_up_rest(&self, failure: StreamFailure) {
        let count = self.count.read();
        self.give_up_behind(count, count + 1, failure);
    }

    /// Gives up all that is behind the entry: its owners, the records from `first` on, and what other streams have behind waits for them.
    fn give_up_behind(&self, entry: u64, first: u64, failure: StreamFailure) {
        stopping(|| {
            let before = self.stopping_from.load(Ordering::Relaxed);
            if before <= entry {
                // In progress: an owner that is given up has waits on this stream.
                return;
            }
            let _stopping = StoppingFrom::enter(&self.stopping_from, entry);
            let visiting = (before == u64::MAX).then(|| self.visit());
            let pending = self.pending.lock();
            let last = pending.entries.back().map_or(entry, |last| last.done);
            let owners: Vec<_> = (pending.entries.iter())
                .filter(|pending| pending.done > entry)
                .filter_map(|pending| pending.owner().cloned())
                .collect();
            drop(pending);
            self.count.words.note(STATUS_WORK);
            if last >= first {
                self.progress.poison_all((first, last), failure);
            }
            for owner in owners {
                owner.give_up();
                if let Some(last) = owner.into_deferred_drop() {
                    // The work has finished meanwhile. Dropping the owner unregisters its memory, which may block.
                    drop_elsewhere(last);
                }
            }
            drop(visiting);
            self.progress.stop_followers(first);
        });
    }

    /// Failures of what is queued now are no fault of the stream any more.
    pub(super) fn forgive(&self) {
        let pending = self.pending.lock();
        let last = pending.entries.back().map(|last| last.done);
        let last = last.unwrap_or_else(|| self.count.read());
        self.forgiven.fetch_max(last, Ordering::AcqRel);
        self.stopped_from.store(u64::MAX, Ordering::Release);
    }
}
