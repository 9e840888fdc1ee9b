//! How the owners of queued programs learn how far a CUDA stream has come, and how waits are ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLockReadGuard};

use super::pending::{PendingEntry, defer_drops, settle};
use super::state::StreamState;
use super::stream_words::{STATUS_WORK, Stop};
use crate::Error;
use crate::proxy::drop_elsewhere;
use crate::stream::{DeferredDrop, Owner};

impl StreamState {
    /// Tells everyone how far the stream has come. What it returns is dropped in the caller's thread, or by another. Handles of owners that
    /// others have, too, are given up under the lock: who finds everything settled finds them gone.
    pub(super) fn settle(&self) -> Vec<DeferredDrop> {
        let mut pending = self.pending.lock();
        // Under the lock, and before the owners hear of it: who finds everything settled finds what there is to report.
        let words = &self.count.words;
        // The count first: what stopped the stream is seen by who sees a count behind it.
        let done = self.count.read();
        match words.stop() {
            None => {}
            Some(_) if self.fault.is_sticky() => {}
            Some(Stop::Abandoned { .. }) => self.fault.stick(
                "a kernel waited, and this process did not look at the stream for a minute".into(),
            ),
            Some(Stop::Malformed { .. }) => {
                self.fault.stick("a kernel cannot read a program".into())
            }
            Some(Stop::TimedOut { .. }) => self
                .fault
                .stick("a kernel has given up a wait, and with it what came behind".into()),
        }
        let aborted = self.aborted.load(Ordering::Acquire);
        settle(&mut pending.entries, done, words, aborted, |cookie| {
            self.fault.pass(format!(
                "the wait of program {cookie} was released before its condition held"
            ));
        })
    }

    /// Those who are not finished never will be.
    pub(super) fn discard(&self) {
        let reason = Error::Asynchronous {
            stream: self.name.clone(),
            reason: self.fault.sticky_reason().unwrap_or_default(),
        };
        // Told under the lock, as `settle` does: who finds nothing pending finds that everyone was told.
        let mut pending = self.pending.lock();
        let dropped: Vec<PendingEntry> = pending.entries.drain(..).collect();
        // The reason before the end: who sees that nothing more is to come finds why.
        dropped.iter().for_each(|pending| pending.discard(&reason));
        self.count.over.store(true, Ordering::Release);
        if let Some(last) = dropped.last() {
            // Streams of other contexts may wait for the count of this one.
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
        // Not under a lock: an owner may end here.
        defer_drops(dropped);
    }

    /// Tells everyone how far the stream has come, and that this was all, where nothing more is to come. Who reports an end does this first, for it
    /// is the end of everybody's work.
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

    /// [`StreamState::settle_to_the_end`] for who then says that work is done: no thread has a handle left of an owner whose work is, unless it is the last
    /// one. An application may free an owner's memory next.
    pub(super) fn settle_for_good(&self) {
        drop(self.settle_to_the_end());
        // Those who have come since have handles of what is pending.
        drop(self.visiting.write());
    }

    /// Opens the gates of those that wait for other streams of the host.
    pub(super) fn open_gates(&self) {
        let mut gates = self.gates.lock();
        while let Some((gate, _)) = gates.front().filter(|(_, mark)| mark.is_reached()) {
            // Release: what the other stream did comes before.
            self.count.words.gate().store(*gate, Ordering::Release);
            gates.pop_front();
        }
    }

    /// Tells the owners of what is queued that nobody wants it any more.
    pub(super) fn give_up(&self) {
        let visiting = self.visit();
        // Not under the lock, which the thread that ends waits takes.
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
                // It was finished meanwhile, and its memory is unregistered with it.
                drop_elsewhere(last);
            }
        }
        drop(visiting);
        // Behind the owners, whose waits come behind the gates.
        self.give_up_gates();
        self.ensure_watched();
    }

    /// Opens all gates, though nobody has come that they are for.
    fn give_up_gates(&self) {
        let mut gates = self.gates.lock();
        if let Some((last, _)) = gates.back() {
            let words = &self.count.words;
            words.note(STATUS_WORK);
            // Release: what says why comes before.
            words.gate().store(*last, Ordering::Release);
        }
        gates.clear();
    }

    /// One turn of a wait for the stream.
    pub(super) fn turn(&self) -> bool {
        self.open_gates();
        drop(self.settle());
        let _visiting = self.visit();
        // What the stream waits for may be a NIC that lives by those who wait.
        let mut owners: [Option<Arc<dyn Owner>>; 8] = Default::default();
        // Not under the lock, which the thread that ends waits takes: the NIC may have to copy.
        for (place, pending) in owners.iter_mut().zip(self.pending.lock().entries.iter()) {
            *place = pending.owner().cloned();
        }
        let mut moved = false;
        for owner in owners.into_iter().flatten() {
            moved = moved || owner.progress();
            if let Some(last) = owner.into_deferred_drop() {
                // It was finished meanwhile, and its memory is unregistered with it.
                drop_elsewhere(last);
            }
        }
        moved
    }

    fn visit(&self) -> RwLockReadGuard<'_, ()> {
        self.visiting.read().unwrap_or_else(PoisonError::into_inner)
    }
}
