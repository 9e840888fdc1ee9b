//! How the owners of queued programs learn how far a CUDA stream has come, and how waits are ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLockReadGuard};

use super::pending::{PendingEntry, Reports, defer_drops, settle};
use super::state::StreamState;
use super::stream_words::{STATUS_WORK, Stop};
use crate::proxy::drop_elsewhere;
use crate::stream::{DeferredDrop, Owner};

impl StreamState {
    /// Tells owners and events how far the stream has come. Returns what is to be dropped, by the caller or another thread. Handles that are not the
    /// owner's last are dropped under the lock, so that a thread that finds all work settled also finds those handles gone.
    pub(super) fn settle(&self) -> Vec<DeferredDrop> {
        let mut pending = self.pending.lock();
        // Failures are published under the lock and before the owners are told: a thread that finds all work settled also finds the failures.
        let words = &self.count.words;
        // The count is read before the stop word, which a kernel writes before it counts past it.
        let done = self.count.read();
        match words.stop() {
            None => {}
            Some(_) if self.fault.is_final() => {}
            Some(Stop::Abandoned { .. }) => self
                .fault
                .end("a kernel waited, and this process did not look at the stream for a minute"),
            Some(Stop::Malformed { .. }) => {
                self.fault.end("a kernel cannot read a program");
            }
            Some(Stop::TimedOut { .. }) => self
                .fault
                .end("a kernel has given up a wait, and with it what came behind"),
        }
        let aborted = self.aborted.load(Ordering::Acquire);
        let reports = Reports {
            fault: &self.fault,
            progress: &self.progress,
            name: &self.name,
        };
        settle(&mut pending.entries, done, words, aborted, &reports)
    }

    /// Ends all pending work as discarded: the stream will not execute it.
    pub(super) fn discard(&self) {
        let failure = self.fault.sticky().unwrap_or_else(|| "it has ended".into());
        let reason = failure.report(&self.name);
        // Owners are told under the lock, as in `settle`: a thread that finds nothing pending knows that all were told.
        let mut pending = self.pending.lock();
        let dropped: Vec<PendingEntry> = pending.entries.drain(..).collect();
        // The reason is published before the end, for those that wait for the count.
        dropped.iter().for_each(|pending| pending.discard(&reason));
        self.count.over.store(true, Ordering::Release);
        if let Some(last) = dropped.last() {
            // Streams of other contexts may wait for this stream's count.
            let words = &self.count.words;
            words.done().store(last.done as u32, Ordering::Release);
        }
        dropped.iter().for_each(PendingEntry::wake);
        let dropped = dropped
            .into_iter()
            .filter_map(PendingEntry::into_deferred_drop)
            .collect();
        drop(pending);
        self.gates.lock().clear();
        // Not under a lock: this may drop the last handle of an owner.
        defer_drops(dropped);
    }

    /// [`StreamState::settle`], and [`StreamState::discard`] if the stream has ended. A call that reports the end of a stream does this first.
    pub(super) fn settle_to_the_end(&self) -> Vec<DeferredDrop> {
        let over = self.settle();
        let cut = self.cut.load(Ordering::Acquire);
        let is_cut = || {
            self.pending
                .lock()
                .entries
                .front()
                .is_some_and(|next| next.done > cut)
        };
        if self.ended.load(Ordering::Acquire) || is_cut() {
            self.discard();
        }
        over
    }

    /// [`StreamState::settle_to_the_end`], for calls that then report that work is done: the application may free the owners' memory next. No thread
    /// still has a handle of a finished owner when this returns, unless that is the last one.
    pub(super) fn settle_for_good(&self) {
        drop(self.settle_to_the_end());
        // Threads that come after this take handles only of owners that are pending.
        drop(self.visiting.write());
    }

    /// Opens the gates whose marks, of streams of the host, are reached.
    pub(super) fn open_gates(&self) {
        let mut gates = self.gates.lock();
        while let Some((gate, _)) = gates.front().filter(|(_, mark)| mark.is_reached()) {
            // Release: orders the other stream's work before the gate.
            self.count.words.gate().store(*gate, Ordering::Release);
            gates.pop_front();
        }
    }

    /// Tells the owners of all pending work that the application has given it up.
    pub(super) fn give_up(&self) {
        let visiting = self.visit();
        // Owners are called without the lock, which the watching thread needs to end waits.
        let pending: Vec<_> = self
            .pending
            .lock()
            .entries
            .iter_mut()
            .filter_map(PendingEntry::give_up)
            .collect();
        for owner in pending {
            owner.give_up();
            if let Some(last) = owner.into_deferred_drop() {
                // The work has finished meanwhile. Dropping the owner unregisters its memory, which may block.
                drop_elsewhere(last);
            }
        }
        drop(visiting);
        // After the owners: waits of theirs may come behind the gates.
        self.give_up_gates();
        self.ensure_watched();
    }

    /// Opens all gates, though their marks are not reached.
    fn give_up_gates(&self) {
        let mut gates = self.gates.lock();
        if let Some((last, _)) = gates.back() {
            let words = &self.count.words;
            words.note(STATUS_WORK);
            // Release: the status comes before the gate.
            words.gate().store(*last, Ordering::Release);
        }
        gates.clear();
    }

    /// One turn of a thread that waits for the stream. Returns whether an owner made progress.
    pub(super) fn turn(&self) -> bool {
        self.open_gates();
        drop(self.settle());
        let _visiting = self.visit();
        // The stream may wait for a software NIC, which progresses in the threads that wait.
        let mut owners: [Option<Arc<dyn Owner>>; 8] = Default::default();
        // Owners progress without the lock, which the watching thread needs to end waits: a NIC may have to copy.
        for (place, pending) in owners.iter_mut().zip(self.pending.lock().entries.iter()) {
            *place = pending.owner().cloned();
        }
        let mut moved = false;
        for owner in owners.into_iter().flatten() {
            moved = moved || owner.progress();
            if let Some(last) = owner.into_deferred_drop() {
                // As in `give_up`.
                drop_elsewhere(last);
            }
        }
        moved
    }

    fn visit(&self) -> RwLockReadGuard<'_, ()> {
        self.visiting.read().unwrap_or_else(PoisonError::into_inner)
    }
}
