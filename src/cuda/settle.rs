//! How the owners of queued programs learn how far a CUDA stream has come, and how waits are ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::pending::{Next, Passed, PendingEntry, Reports, defer_drops, settle};
use super::state::{HostEventWait, StreamState};
use super::stream_words::{STATUS_WORK, Stop};
use super::watch::drop_stream;
use crate::proxy::{Workers, drop_elsewhere};
use crate::stream::{
    DeferredDrop, Owner, StreamFailure, StreamPosition, StreamTurn, StreamTurns,
    look_at_own_streams, streams_without_thread,
};

/// The threads that give up what is behind a wait. A device that hangs blocks one of them, as long as a device may take to stop.
static STOPS: Workers = Workers::new("doorbell-behind", 64);

impl StreamTurn for StreamState {
    fn turn(&self) -> bool {
        StreamState::turn(self)
    }
}

impl StreamState {
    pub(super) fn turns(&self) -> StreamTurns {
        let stream: Weak<StreamState> = self.weak.clone();
        StreamTurns::of(stream)
    }

    /// Tells owners and events how far the stream has come. Returns what is to be dropped, by the caller or another thread. Handles that are not the
    /// owner's last are dropped under the lock, so that a thread that finds all work settled also finds those handles gone.
    pub(super) fn settle(&self) -> Vec<DeferredDrop> {
        let mut over = Passed::default();
        loop {
            match self.settle_some(&mut over) {
                None => return over.wake(),
                Some(Next::Settle(mark)) => {
                    mark.progress.settle(mark.position);
                    // Only now: another thread would take the work before it for done.
                    if let Some(front) = self.pending.lock().entries.front_mut() {
                        front.set_settled(&mark);
                    }
                }
                Some(Next::GiveUpBehind(entry, failure)) => self.end_wait(entry, failure),
            }
        }
    }

    /// Has everything behind a wait given up, and then the wait ended. A device that does not answer blocks neither this thread nor the waits of other
    /// streams.
    fn end_wait(&self, entry: u64, failure: StreamFailure) {
        /// Also where an owner panics.
        struct LetEnd(Option<Arc<StreamState>>, u64);

        impl Drop for LetEnd {
            fn drop(&mut self) {
                if let Some(stream) = self.0.take() {
                    stream.let_end(self.1);
                    defer_drops(stream.settle());
                    drop_stream(stream);
                }
            }
        }

        let Some(stream) = self.weak.upgrade() else {
            self.fail_from(entry, failure);
            return self.let_end(entry);
        };
        STOPS.run(Box::new(move || {
            let let_end = LetEnd(Some(stream), entry);
            if let Some(stream) = &let_end.0 {
                stream.fail_from(entry, failure);
            }
        }));
    }

    /// Everything behind the entry was given up.
    fn let_end(&self, entry: u64) {
        if self.count.read() >= entry {
            // The stream has passed the wait by itself, and may have transmitted what is behind it: the wait has not failed.
            return;
        }
        let mut pending = self.pending.lock();
        let entries = pending.entries.iter_mut();
        entries
            .filter(|pending| pending.done == entry)
            .for_each(PendingEntry::let_end);
    }

    /// A part of [`StreamState::settle`]. Returns what has to happen, without the lock, before the next one.
    fn settle_some(&self, over: &mut Passed) -> Option<Next> {
        let mut pending = self.pending.lock();
        // Failures are published under the lock and before the owners are told: a thread that finds all work settled also finds the failures.
        let words = &self.count.words;
        // The count is read before the stop word, which a kernel writes before it counts past it.
        let done = self.count.read();
        match words.stop() {
            None => {}
            Some(_) if self.fault.is_final() => {}
            Some(Stop::Abandoned { from }) => self.end_from(
                from,
                "a kernel gave up a wait because this process did not poll the stream for a minute",
            ),
            Some(Stop::Malformed { from }) => {
                self.end_from(from, "a kernel found an invalid program");
            }
            Some(Stop::TimedOut { from }) => self.end_from(
                from,
                "a kernel gave up a wait; the operations behind it were not executed",
            ),
        }
        let aborted = self.aborted.load(Ordering::Acquire);
        let reports = Reports {
            fault: &self.fault,
            progress: &self.progress,
            name: &self.name,
            forgiven: self.forgiven.load(Ordering::Acquire),
            stopped_from: &self.stopped_from,
        };
        let given = self.count.given.load(Ordering::Acquire);
        let counts = (done, given);
        settle(&mut pending.entries, counts, words, aborted, &reports, over)
    }

    /// Ends all pending work as discarded: the stream will not execute it.
    pub(super) fn discard(&self) {
        let failure = self.fault.sticky().unwrap_or_else(|| "it has ended".into());
        let reason = failure.report(&self.name);
        // This includes the driver call in progress.
        let given = self.count.given.load(Ordering::Acquire);
        let is_given = |entry: &PendingEntry| entry.done <= given;
        // A GPU may have executed what the driver was given. Triggers count what they execute.
        let has_ended = self.ended.load(Ordering::Acquire);
        if !has_ended {
            // Before the owners are given up: they do not know how far the stream has come.
            (self.pending.lock().entries.iter())
                .filter(|entry| is_given(entry))
                .for_each(PendingEntry::announce_discard);
        }
        self.fail_pending(failure);
        // Owners are told under the lock, as in `settle`: a thread that finds nothing pending knows that all were told.
        let mut pending = self.pending.lock();
        let last = pending.entries.partition_point(is_given);
        let mut dropped: Vec<PendingEntry> = pending.entries.drain(..last).collect();
        // The reason is published before the end, for those that wait for the count.
        let done = self.count.read();
        dropped.iter_mut().for_each(|pending| {
            let was_at_it = has_ended && pending.after <= done;
            pending.discard(&reason, was_at_it);
        });
        self.count.over.store(true, Ordering::Release);
        if let Some(last) = dropped.last() {
            // Streams of other contexts may wait for this stream's count.
            let words = &self.count.words;
            words.done().store(last.done as u32, Ordering::Release);
        }
        dropped.iter().for_each(PendingEntry::wake);
        let mut over = Passed::default();
        dropped.into_iter().for_each(|entry| over.add(entry));
        drop(pending);
        self.host_event_waits.lock().clear();
        // Not under a lock: this may drop the last handle of an owner.
        defer_drops(over.wake());
    }

    /// [`StreamState::settle`], and [`StreamState::discard`] if the stream has ended. A call that reports the end of a stream does this first.
    pub(super) fn settle_to_the_end(&self) -> Vec<DeferredDrop> {
        let over = self.settle();
        if self.is_at_its_end() {
            self.discard();
        }
        over
    }

    /// [`StreamState::settle_to_the_end`] by the watching thread. Another thread discards what the stream does not execute, because that waits for the devices.
    pub(super) fn settle_in_look(&self) -> Vec<DeferredDrop> {
        /// Also where an owner panics.
        struct Discarding(Option<Arc<StreamState>>);

        impl Drop for Discarding {
            fn drop(&mut self) {
                if let Some(stream) = self.0.take() {
                    stream.is_discarding.store(false, Ordering::Release);
                    drop_stream(stream);
                }
            }
        }

        let over = self.settle();
        let is_left = || !self.count.over.load(Ordering::Acquire) || self.has_work();
        if self.is_at_its_end()
            && is_left()
            && let Some(stream) = self.weak.upgrade()
        {
            let is_discarding = stream.is_discarding.swap(true, Ordering::AcqRel);
            if is_discarding {
                drop_stream(stream);
            } else {
                let discarding = Discarding(Some(stream));
                STOPS.run(Box::new(move || {
                    if let Some(stream) = &discarding.0 {
                        stream.discard();
                    }
                }));
            }
        }
        over
    }

    /// Whether the stream has ended before its pending work.
    fn is_at_its_end(&self) -> bool {
        let cut = self.cut.load(Ordering::Acquire);
        let is_cut = || {
            self.pending
                .lock()
                .entries
                .front()
                .is_some_and(|next| next.done > cut)
        };
        self.ended.load(Ordering::Acquire) || is_cut()
    }

    /// [`StreamState::settle_to_the_end`], for calls that then report that work is done: the application may free the owners' memory next. No thread
    /// still has a handle of a finished owner when this returns, unless that is the last one.
    pub(super) fn settle_for_good(&self) {
        drop(self.settle_to_the_end());
        // Threads that come after this take handles only of owners that are pending.
        self.owner_readers.await_inside();
    }

    /// Opens the gates whose marks, of streams of the host, are reached. One whose mark has failed opens later, when another thread has given up everything behind
    /// it; the gates behind it stay closed until then.
    pub(super) fn release_host_event_waits(&self) {
        let mut host_event_waits = self.host_event_waits.lock();
        while let Some(gate) = host_event_waits
            .front_mut()
            .filter(|gate| gate.mark.is_reached() && !gate.is_failing)
        {
            if let Some(failure) = gate.mark.failure()
                && !self.fault.continues()
            {
                gate.is_failing = true;
                let (number, done) = (gate.number, gate.done);
                drop(host_event_waits);
                return self.end_host_event_wait(number, done, failure);
            }
            let number = gate.number;
            host_event_waits.pop_front();
            self.open_gate(number);
        }
    }

    /// Lets the stream pass that gate and those before it.
    fn open_gate(&self, number: u32) {
        // Release: orders the other stream's work, and the status, before the gate.
        self.count.words.gate().store(number, Ordering::Release);
    }

    /// Has everything behind a gate given up, and then opens it. As in [`StreamState::end_wait`], a device that does not answer blocks neither this thread nor a lock.
    fn end_host_event_wait(&self, number: u32, done: u64, failure: StreamFailure) {
        /// Also where an owner panics.
        struct OpenGate(Option<Arc<StreamState>>, u32);

        impl Drop for OpenGate {
            fn drop(&mut self) {
                if let Some(stream) = self.0.take() {
                    stream.open_failed_gate(self.1);
                    defer_drops(stream.settle());
                    drop_stream(stream);
                }
            }
        }

        let Some(stream) = self.weak.upgrade() else {
            self.fail_from(done, failure);
            return self.open_failed_gate(number);
        };
        STOPS.run(Box::new(move || {
            let open_gate = OpenGate(Some(stream), number);
            if let Some(stream) = &open_gate.0 {
                // Not if the driver has refused the wait meanwhile, or the stream was aborted: the count may be that of other work.
                if stream.is_gate_failing(number) {
                    stream.fail_from(done, failure);
                }
            }
        }));
    }

    fn is_gate_failing(&self, number: u32) -> bool {
        let host_event_waits = self.host_event_waits.lock();
        (host_event_waits.front()).is_some_and(|gate| gate.is_failing && gate.number == number)
    }

    /// Everything behind the gate was given up. Goes on with the gates behind it.
    fn open_failed_gate(&self, number: u32) {
        let mut host_event_waits = self.host_event_waits.lock();
        // Otherwise an abort has opened it, or the stream has no such wait any more.
        let is_it = |gate: &HostEventWait| gate.is_failing && gate.number == number;
        if host_event_waits.front().is_some_and(is_it) {
            host_event_waits.pop_front();
            self.open_gate(number);
        }
        drop(host_event_waits);
        self.release_host_event_waits();
    }

    /// Gives up the pending work, by the application's wish: that is no fault. A panic of the function that runs meanwhile is one.
    pub(super) fn abort(&self) {
        self.functions.lock().give_up(0, false);
        self.forgive_aborted();
        self.fail_pending("it was aborted".into());
        self.count
            .words
            .replay_aborts()
            .fetch_add(1, Ordering::Release);
        // After the owners: waits of theirs may come behind these.
        let mut pending = self.pending.lock();
        pending
            .entries
            .iter_mut()
            .for_each(PendingEntry::give_up_event);
        let last = pending.last();
        drop(pending);
        if let Some(last) = last {
            self.abandon_host_event_waits(last);
        }
        self.ensure_watched();
    }

    /// Opens the gates of the entries up to the last one that was given up, though their marks are not reached. A wait that is being queued meanwhile has
    /// a gate before it has an entry.
    fn abandon_host_event_waits(&self, last: u64) {
        let mut host_event_waits = self.host_event_waits.lock();
        let given_up = host_event_waits.partition_point(|gate| gate.done <= last);
        if let Some(HostEventWait { number, .. }) = host_event_waits.drain(..given_up).next_back() {
            let words = &self.count.words;
            words.note(STATUS_WORK);
            self.open_gate(number);
        }
    }

    /// The first mark that an entry up to that count waits for and that is not reached.
    pub(super) fn first_awaited_mark(&self, last: u64) -> Option<StreamPosition> {
        let pending = self.pending.lock();
        let entries = pending
            .entries
            .iter()
            .take_while(|entry| entry.done <= last);
        entries
            .filter_map(PendingEntry::awaited_mark)
            .find(|mark| !mark.is_reached())
            .cloned()
    }

    /// Executes what the stream waits for on streams without a thread. These are executed by the threads that wait for their work, and a thread that waits for
    /// this stream does. No lock is held meanwhile: closures of the application run in here. True: something has changed.
    fn look_at_awaited_streams(&self) -> bool {
        if !streams_without_thread() {
            return false;
        }
        let mark = self.first_awaited_mark(u64::MAX);
        // A look at the mark leaves the streams to the thread that has queued work on them, which this thread may be.
        mark.is_some_and(|mark| mark.look() | look_at_own_streams())
    }

    /// One turn of a thread that waits for the stream. Returns whether an owner, or a stream without a thread that this one waits for, made progress.
    pub(super) fn turn(&self) -> bool {
        let looked = self.look_at_awaited_streams();
        self.release_host_event_waits();
        drop(self.settle());
        let _owner_reader = self.owner_readers.enter();
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
        moved || looked
    }
}
