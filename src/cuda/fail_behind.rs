//! Work that is queued behind a failure on a stream that cannot skip it: the work's endpoints are given up before the stream goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::host_functions::{Boundary, FunctionPlace};
use super::pending::{PendingEntry, defer_drops};
use super::pending_queue::Arrived;
use super::state::StreamState;
use super::stream_progress::CountedStream;
use super::stream_words::{STATUS_STREAM, STATUS_WORK};
use super::watch::drop_stream;
use crate::Error;
use crate::proxy::drop_elsewhere;
use crate::stream::{Dependent, StreamFailure, StreamPosition, after_stopping, stopping, visit};

impl CountedStream for StreamState {
    fn settle_now(self: Arc<Self>) {
        defer_drops(self.settle());
        drop_stream(self);
    }

    fn fail_queued_after(self: Arc<Self>, owner: usize, generation: u32) {
        let done = self.count.read();
        let pending = self.pending.lock();
        let forgiven = self.forgiven.load(Ordering::Acquire);
        let first_behind = |entry: u64| {
            (pending.entries.iter())
                .filter(|pending| pending.done > entry)
                .find_map(|pending| {
                    Some((pending.done, pending.failure_in((owner, generation), done)?))
                })
        };
        // What was queued before a fault was taken ends at that place. So a wait of after it has work of its own behind it.
        let (earliest, later) = (first_behind(0), first_behind(forgiven));
        drop(pending);
        if let Some((entry, failure)) = earliest.filter(|(entry, _)| *entry <= forgiven) {
            self.fail_from(entry, failure);
            self.decide_later(entry);
        }
        if let Some((entry, failure)) = later {
            self.fail_from(entry, failure);
            self.decide_later(entry);
        }
        drop_stream(self);
    }

    fn awaited_mark(self: Arc<Self>, position: u64) -> Option<StreamPosition> {
        let mark = self.first_awaited_mark(position);
        drop_stream(self);
        mark
    }
}

impl Dependent for StreamState {
    fn stop_from(self: Arc<Self>, entry: u64, failure: StreamFailure) {
        // A stream that has passed it has given its wait up.
        if self.count.read() < entry {
            self.fail_from(entry, failure);
        }
        drop_stream(self);
    }
}

impl StreamState {
    /// The wait of the entry has failed once everything behind it is given up and the devices have confirmed that. Not before: a GPU that comes to the wait and
    /// finds its completion passes it, and what is behind it would be transmitted behind a wait that has failed.
    fn decide_later(&self, entry: u64) {
        let stream = self.weak.clone();
        after_stopping(move || {
            if let Some(stream) = stream.upgrade() {
                stream.decide(entry);
                drop_stream(stream);
            }
        });
    }

    fn decide(&self, entry: u64) {
        // The stream counts before it comes to what is behind the wait. If it goes on behind failures, nothing was given up.
        if self.count.read() >= entry || self.fault.continues() {
            return;
        }
        let pending = self.pending.lock();
        let of_entry = (pending.entries.iter()).filter(|pending| pending.done == entry);
        of_entry.for_each(PendingEntry::stopped_behind);
    }

    /// The entry ends without success. Before the stream may pass it, everything behind it is given up, unless the stream is to go on. What was queued
    /// after the stream's fault was taken is behind no failure of before.
    pub(super) fn fail_from(&self, entry: u64, failure: StreamFailure) {
        if self.fault.continues() {
            return;
        }
        let mut pending = self.pending.lock();
        let forgiven = self.forgiven.load(Ordering::Acquire);
        let mut last = forgiven;
        if entry > forgiven {
            // Under the lock, so that a fault is taken before this or after it. A thread that takes it after this has not queued more work yet.
            self.stopped_from.fetch_min(entry, Ordering::AcqRel);
            self.functions.lock().give_up(entry, false);
            self.poison_known(&mut pending, entry, &failure);
            self.fault.fail(failure.clone());
            self.count.words.note(STATUS_WORK);
            pending.receive();
            last = pending.last().map_or(entry, |last| last.max(entry));
        } else if self.count.read() < forgiven {
            // No fault any more, but kernels behind it are still to see it.
            self.functions.lock().give_up(entry, true);
            self.count.words.note(STATUS_WORK);
        }
        drop(pending);
        self.fail_behind(entry, (entry, last), failure);
    }

    /// Before the fault: a thread that takes it finds the records behind the failure failed.
    fn poison_known(&self, pending: &mut Arrived, first: u64, failure: &StreamFailure) {
        pending.receive();
        if let Some(last) = pending.last().filter(|last| *last >= first) {
            self.progress.poison_all((first, last), failure.clone());
        }
    }

    /// The host function that the stream is executing has failed; it has no entry among the pending ones. Everything behind it is given up before this
    /// returns, unless the stream is to go on. What was queued after a fault was taken is not behind a function of before.
    pub(super) fn fail_now(&self, function: FunctionPlace, failure: StreamFailure) {
        let mut pending = self.pending.lock();
        let count = self.count.read();
        let is_forgiven = {
            let mut functions = self.functions.lock();
            let is_forgiven = functions.is_forgiven(function);
            if !self.fault.continues() {
                functions.give_up(0, is_forgiven);
            }
            is_forgiven
        };
        if is_forgiven {
            let last = self.forgiven.load(Ordering::Acquire);
            if count < last && !self.fault.continues() {
                self.count.words.note(STATUS_WORK);
                drop(pending);
                self.fail_behind(count, (count + 1, last), failure);
            }
            return;
        }
        self.count.words.note(STATUS_STREAM);
        if self.fault.continues() {
            self.fault.pass(failure);
            return;
        }
        self.stopped_from.fetch_min(count + 1, Ordering::AcqRel);
        self.poison_known(&mut pending, count + 1, &failure);
        self.fault.stick(failure.clone());
        pending.receive();
        let last = pending.last().unwrap_or(count);
        drop(pending);
        self.fail_behind(count, (count + 1, last), failure);
    }

    /// Ends the stream for good: nothing behind what it has executed will be. Records that it has passed are good.
    pub(super) fn end_here(&self, failure: impl Into<StreamFailure>) {
        self.end_from(self.count.read() + 1, failure);
    }

    /// The same, with the number of the first program that was not executed.
    pub(super) fn end_from(&self, from: u64, failure: impl Into<StreamFailure>) {
        self.stopped_from.fetch_min(from, Ordering::AcqRel);
        self.fault.end(failure);
    }

    /// Gives up all that the stream has not executed. Records that it has passed are good.
    pub(super) fn fail_pending(&self, failure: StreamFailure) {
        let count = self.count.read();
        let last = self.pending.lock().last().unwrap_or(count);
        self.count.words.note(STATUS_WORK);
        self.fail_behind(count, (count + 1, last), failure);
    }

    /// Gives up what is behind the entry, up to the last: its owners, the records from `first` on, and what other streams have behind waits for
    /// them.
    fn fail_behind(&self, entry: u64, (first, last): (u64, u64), failure: StreamFailure) {
        stopping(|| {
            if !visit(self.id, (entry, last)) {
                return;
            }
            let owner_reader = self.owner_readers.enter();
            let pending = self.pending.lock();
            let owners: Vec<_> = (pending.entries.iter())
                .filter(|pending| pending.done > entry && pending.done <= last)
                .filter_map(|pending| pending.owner().cloned())
                // As long as an entry is pending, its owner's generation stays.
                .map(|owner| (owner.generation(), owner))
                .collect();
            drop(pending);
            if last >= first {
                self.progress.poison_all((first, last), failure);
            }
            for (generation, owner) in owners {
                owner.give_up(generation);
                if let Some(last) = owner.into_deferred_drop() {
                    // The work has finished meanwhile. Dropping the owner may block in a destructor of the application's.
                    drop_elsewhere(last);
                }
            }
            drop(owner_reader);
            self.progress.fail_dependents(first);
        });
    }

    /// Failures of operations that are queued now no longer count as a fault of the stream.
    pub(super) fn forgive_aborted(&self) {
        self.forgive(&self.pending.lock(), Boundary::Aborted);
    }

    fn forgive(&self, pending: &Arrived, because: Boundary) {
        let last = pending.last().unwrap_or_else(|| self.count.read());
        self.forgiven.fetch_max(last, Ordering::AcqRel);
        let mut functions = self.functions.lock();
        // Under the lock, which a function takes after it was counted: it keeps its place.
        let has_functions = self.count.functions.load(Ordering::Acquire) > 0;
        functions.begin_period(because, !has_functions);
        drop(functions);
        if !self.fault.is_final() {
            self.stopped_from.store(u64::MAX, Ordering::Release);
        }
    }

    /// Takes the fault, if there is one. What was queued before stays given up.
    pub(super) fn take_fault(&self) -> Option<Error> {
        defer_drops(self.settle());
        // Not `check`, which reports a passing failure, and so would lose it.
        self.note_replay_fault();
        self.clear_replay_fault();
        let pending = self.pending.lock();
        if self.fault.is_sticky() {
            self.forgive(&pending, Boundary::Taken);
        }
        let failure = self.fault.take(|_| {})?;
        drop(pending);
        Some(failure.report(&self.name))
    }
}
