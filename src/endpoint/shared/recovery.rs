//! How an endpoint fails: which threads notice, what is done then, and what the watchdog looks for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::owner::Cookie;
use super::standstill::{LOOK, Silence, Stopped};
use super::{Shared, end_elsewhere};
use crate::endpoint::Side;
use crate::endpoint::clock::now_ns;
use crate::endpoint::outcome::OpStatus;
use crate::endpoint::queue::{QueueState, Reaped, Wait};
use crate::endpoint::watchdog::Watched;
use crate::nic::State;
use crate::proxy::{PollResult, drop_elsewhere};
use crate::stream::stopping;
use crate::{Cause, Error, Result, WorkError};

/// How long the watchdog keeps watching an endpoint that has nothing under way, so that an endpoint in use is not
/// registered and unregistered for every operation.
const LINGER_NS: u64 = 100_000_000;

impl Shared {
    /// The failure of this generation, if there is one.
    #[inline]
    pub(in crate::endpoint) fn failure(&self) -> Option<WorkError> {
        if self.has_failed.load(Ordering::Acquire) {
            return *self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    #[inline]
    pub(in crate::endpoint) fn check_alive(&self) -> Result<()> {
        self.failure()
            .map_or(Ok(()), |failure| Err(Error::Work(failure)))
    }

    /// Calls `what` if the generation `epoch` has neither ended nor failed, and returns whether it did. No failure is recorded and no generation
    /// begins meanwhile.
    pub(in crate::endpoint) fn while_alive(&self, epoch: u32, what: impl FnOnce()) -> bool {
        let _generation = self.hold_generation();
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let is_alive = failure.is_none() && self.epoch.load(Ordering::Relaxed) == epoch;
        if is_alive {
            what();
        }
        is_alive
    }

    /// Calls `what`, unless the endpoint has failed for another reason than a discarded operation: then its operations have failed with it, and stay
    /// failed.
    pub(super) fn unless_failed_otherwise(&self, what: impl FnOnce()) {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none_or(|failure| failure.cause == Cause::Discarded) {
            what();
        }
    }

    /// The stream that had this send or receive has not executed its doorbell.
    pub(super) fn mark_discarded(&self, cookie: Cookie) {
        let queue = self.queue(cookie.side);
        self.unless_failed_otherwise(|| {
            // A request that counted as rung when the device was stopped was reported as rung, though the stream had only begun it.
            let rung = queue.rung_in_all().unwrap_or(self.rung(cookie.side));
            if rung.wrapping_sub(cookie.count).cast_signed() <= 0 {
                queue.discard(cookie.count);
            }
        });
    }

    /// Records a failure of the current generation; only the first counts. The watchdog then breaks the endpoint down.
    pub(in crate::endpoint) fn fail(&self, wr_id: Option<u64>, cause: Cause) {
        self.fail_in(self.epoch.load(Ordering::Acquire), wr_id, cause);
    }

    /// Records a failure, unless the generation that it was found in is over.
    pub(in crate::endpoint) fn fail_in(&self, epoch: u32, wr_id: Option<u64>, cause: Cause) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.epoch.load(Ordering::Relaxed) != epoch {
            return;
        }
        if failure.is_none() {
            *failure = Some(WorkError {
                qpn: self.qp.qpn(),
                wr_id,
                cause,
            });
        }
        // Before any thread that could release a wait learns of the failure.
        self.attachments.alarm().sound();
        // SeqCst, for the watchdog that is about to stop watching.
        self.has_failed.store(true, Ordering::SeqCst);
        drop(failure);
        self.activate();
    }

    /// The endpoint was dropped, and tickets or streams still have handles. Nothing is received any more, and every ticket ends.
    pub(super) fn end_endpoint(&self) {
        self.is_dropped.store(true, Ordering::SeqCst);
        if self.on_streams.any() || self.queue(Side::Send).is_device_owned() {
            // The watchdog fails it when the streams are done with it.
            self.activate();
            return;
        }
        self.fail(None, Cause::Dropped);
        self.stop_transmitting();
    }

    /// After a failure, and before any wait of this endpoint ends: moves the queue pair to error, so that doorbells transmit nothing. Streams that cannot
    /// skip what is queued have the endpoints behind these waits given up first, since the flush of the queue pair may end a wait.
    pub(super) fn stop(&self) {
        let is_first = stopping(|| {
            if self.is_stopping.swap(true, Ordering::Relaxed) {
                // A stream of these waits for this endpoint, too. The first call goes on.
                return false;
            }
            let this = std::ptr::from_ref(self).addr();
            let streams = self.attachments.alarm().stop_behind(this);
            if !streams.is_empty() {
                drop_elsewhere(Box::new(streams));
            }
            self.is_stopping.store(false, Ordering::Relaxed);
            true
        });
        if is_first {
            // Other endpoints are stopped while this one waits for the device, unless this one is given up because of another one.
            self.stop_transmitting();
        }
    }

    /// After a failure: ends everything that waits for the endpoint. Goes as far as possible without waiting, and returns whether it is done. The
    /// caller holds the generation, and calls again until it is.
    pub(super) fn break_down(&self) -> bool {
        if !self.broken_down.load(Ordering::Relaxed) {
            match self.stop_device() {
                Stopped::NotYet => return false,
                Stopped::Yes(silence) => self.end_stopped(silence),
                Stopped::GivenUp => self.end_given_up(),
            }
            // From here on the device executes nothing. Streams are released after this, not before: a doorbell behind a wait that was
            // given up must not send what the wait was to protect. (A device that was given up may send it: such work is reported as
            // unknown.)
            self.broken_down.store(true, Ordering::Release);
        }
        let is_counted = self.doorbells().is_some();
        if self.is_given_up() {
            // Only the word that it waits for ends a wait of a GPU.
            let needs_word = !is_counted && !self.attachments.is_empty();
            (self.queues.iter()).for_each(|queue| queue.release_given_up(needs_word));
        } else {
            self.reap();
            (self.queues.iter()).for_each(|queue| queue.release_waiters(is_counted));
        }
        for queue in &self.queues {
            // No stream has to wait for its turn any more.
            self.set_rung(queue.side, queue.queued.load(Ordering::Acquire));
        }
        true
    }

    /// The device is stopped: it will never complete what it has not completed by now.
    fn end_stopped(&self, silence: Silence) {
        if silence.resets_records {
            self.queues.iter().for_each(QueueState::enter_silence);
        }
        for (queue, rung) in self.queues.iter().zip(silence.rung) {
            // Not between a discard's check of this count and the discard.
            let _failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            queue.end_rung(rung);
        }
    }

    /// The device cannot be stopped. Operations that are complete by now are complete. Of the others that streams have, nothing is known,
    /// whether they were rung or not: their doorbells may still be executed.
    fn end_given_up(&self) {
        self.reap_fully();
        for queue in &self.queues {
            let _failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            queue.give_up();
        }
    }

    /// Whether the endpoint was given up in this generation: see [`Stopped::GivenUp`].
    pub(super) fn is_given_up(&self) -> bool {
        self.queues.iter().any(QueueState::is_given_up)
    }

    /// Running count of work requests whose doorbell may have been stored. A program counts its doorbell after it has stored it.
    pub(super) fn may_be_rung(&self, queue: &QueueState) -> u32 {
        let told = self.told(queue.side);
        if self.doorbells().is_some() {
            return told;
        }
        let begun = queue.begun.load(Ordering::Relaxed);
        if begun.wrapping_sub(told).cast_signed() > 0 {
            return begun;
        }
        // It is not known how far a GPU has come in a program.
        let queued = queue.queued.load(Ordering::Acquire);
        if !self.attachments.is_empty() && queued != told {
            return told.wrapping_add(1);
        }
        told
    }

    /// The status of an operation of this generation, and, once the device is stopped, the failure that ended the generation.
    pub(in crate::endpoint) fn status_now(
        &self,
        epoch: u32,
        side: Side,
        is_wait: bool,
        count: u32,
        serial: u32,
    ) -> (OpStatus, Option<WorkError>) {
        let queue = self.queue(side);
        let look = || {
            // The caller may know that it is done, from the stream or the peer, while another thread is about to look.
            self.reap_fully();
            if is_wait {
                queue.wait_status(count, serial)
            } else {
                queue.op_status(count, serial, self.rung(side))
            }
        };
        self.look_for_failure();
        // Before the last look at completions: an operation that was complete at the failure is complete.
        let failure = self.failure();
        let mut status = look();
        if failure.is_some()
            && matches!(
                status,
                OpStatus::Prepared | OpStatus::Queued | OpStatus::Rung
            )
        {
            self.break_down_now();
            status = look();
        }
        let failure = match status {
            OpStatus::Failed | OpStatus::Unknown => failure
                .or_else(|| self.failure())
                // The thread that reaped a flush may not have recorded the failure yet.
                .or_else(|| queue.has_error().then(|| self.failure_of_flush(epoch))),
            // Its completion is there, and the stream is about to pass it.
            OpStatus::Queued | OpStatus::Rung if is_wait && queue.has_succeeded(count) => None,
            _ => failure,
        };
        (status, failure)
    }

    /// [`Shared::break_down`] of an endpoint that has failed, if the watchdog has not done it yet. Waits until it is done, which is bounded.
    #[cold]
    pub(in crate::endpoint) fn break_down_now(&self) {
        while !self.broken_down.load(Ordering::Acquire) {
            let generation = self.hold_generation();
            if !self.has_failed.load(Ordering::Acquire) || self.break_down() {
                return;
            }
            drop(generation);
            std::thread::sleep(LOOK);
        }
    }

    /// Looks for the completions in error of everything that was rung, and returns whether all are there. A device may take some time to write
    /// them. A device that hangs is not waited for long: it is silenced after this, and requests that it did not complete never get a completion.
    pub(super) fn has_flushed(&self) -> bool {
        // Requests that were triggered and not rung are flushed as well, once the device is told of them.
        for queue in &self.queues {
            self.ring_triggered(queue.side);
        }
        self.qp.progress();
        self.reap_fully();
        self.queues.iter().all(|queue| {
            if queue.is_device_owned() {
                // Nothing of it is in the ledger; kernels learn of the failure, not of each request's end.
                return true;
            }
            let left = self.rung(queue.side).wrapping_sub(queue.ledger.done());
            left.cast_signed() <= 0
        })
    }

    /// Processes new completions of both queues. Returns whether there were any. Skips a queue whose completions another thread is processing.
    #[inline]
    pub(in crate::endpoint) fn reap(&self) -> bool {
        self.reap_by(QueueState::reap)
    }

    /// [`Shared::reap`] that waits for the other thread: completions that were there before the call are processed after it.
    pub(in crate::endpoint) fn reap_fully(&self) {
        self.reap_by(QueueState::reap_fully);
    }

    #[inline]
    fn reap_by(&self, reap: impl Fn(&QueueState, &dyn Fn(Reaped)) -> bool) -> bool {
        let [send, recv] = &self.queues;
        let flushed = std::cell::Cell::new(None);
        let failed = |found: Reaped| {
            // Otherwise a ticket could report `Complete` in between.
            debug_assert!(
                send.has_error() || recv.has_error(),
                "a completion in error is told of before it is noted"
            );
            // The generation of the completion: a queue does not start over while one is processed.
            let epoch = self.epoch.load(Ordering::Acquire);
            // A flush means that something else has failed. The completion that reports it may be in the other queue.
            if found.flushed {
                flushed.set(Some(epoch));
                // Already here, and not only with the failure: streams may wait until this is counted.
                self.attachments.alarm().sound();
            } else {
                self.fail_in(epoch, found.wr_id, found.cause);
            }
        };
        let mut new = reap(send, &failed) | reap(recv, &failed);
        if let Some(epoch) = flushed.get()
            && !self.has_failed.load(Ordering::Acquire)
        {
            // Fully: another thread may be about to process just that completion.
            new |= send.reap_fully(&failed) | recv.reap_fully(&failed);
            self.fail_of_flush(epoch);
        }
        new
    }

    /// Records the failure that a flush of that generation reports. The caller has reaped fully.
    fn fail_of_flush(&self, epoch: u32) {
        self.look_before_kernels(epoch);
        self.fail_in(epoch, None, Cause::QueuePair);
    }

    /// The failure that a completion in error reports. The caller has reaped fully. If the completion was a flush, the thread that found it
    /// may not have recorded the failure yet.
    #[cold]
    pub(in crate::endpoint) fn failure_of_flush(&self, epoch: u32) -> WorkError {
        self.fail_of_flush(epoch);
        self.failure().unwrap_or(WorkError {
            qpn: self.qp.qpn(),
            wr_id: None,
            cause: Cause::QueuePair,
        })
    }

    /// Why a wait on a stream ended without success.
    #[cold]
    pub(super) fn failure_of_wait(&self) -> WorkError {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.reap_fully();
        self.failure()
            .unwrap_or_else(|| self.failure_of_flush(epoch))
    }

    /// [`Shared::reap`], and a check of the state and events that the device reports for the queue pair itself.
    pub(in crate::endpoint) fn look_for_failure(&self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.qp.look_for_events();
        self.reap();
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        self.look_before_kernels(epoch);
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        if self.qp.overrun() {
            self.fail_in(epoch, None, Cause::Overrun);
        } else if self.qp.state() == State::Error {
            // If a completion reports the cause, it was written before the state was set.
            self.reap_fully();
            self.look_before_kernels(epoch);
            self.fail_in(epoch, None, Cause::QueuePair);
        }
    }

    /// Records the failure of a completion in error that kernels have left, or have not read, in a queue that they own.
    fn look_before_kernels(&self, epoch: u32) {
        if let Some(cqe) = self.queue(Side::Send).error_before_kernels() {
            let cause = Cause::Completion {
                status: cqe.status(),
                syndrome: cqe.syndrome,
                vendor_syndrome: cqe.vendor_syndrome,
            };
            self.fail_in(epoch, Some(cqe.wqe_counter.into()), cause);
        }
    }

    /// Makes the watchdog watch this endpoint, if it does not yet.
    #[inline]
    pub(in crate::endpoint) fn activate(&self) {
        if self.watched.come() {
            self.last_active_ns.store(now_ns(), Ordering::Relaxed);
            self.watchdog.register(self.weak.clone());
        }
        self.enlist();
    }

    /// The deadline that has passed, if one has, and the number of the oldest work request in its queue.
    fn overdue(&self, now_ns: u64) -> Option<(Duration, Option<u64>)> {
        for queue in &self.queues {
            let overdue = |timeout_ns| {
                let wr_id = queue.oldest_wr_id(self.told(queue.side));
                (Duration::from_nanos(timeout_ns), wr_id)
            };
            for index in queue.under_way() {
                let record = queue.record(index);
                // A wait whose completion is there is over, though its stream has not seen it yet.
                if !queue.is_waiting(index) || queue.cq.cqe(index).is_some() {
                    continue;
                }
                let started = record.wait_started_ns.load(Ordering::Relaxed);
                let timeout = record.wait_timeout_ns.load(Ordering::Relaxed);
                if started != 0
                    && now_ns.saturating_sub(started) > timeout
                    && queue.set_wait(index, Wait::GivenUp)
                {
                    return Some(overdue(timeout));
                }
            }
            let timeout = queue.turn_timeout_ns;
            let since = queue.turn_waits.since_ns();
            if since.is_some_and(|since| now_ns.saturating_sub(since) > timeout) {
                return Some(overdue(timeout));
            }
        }
        None
    }
}

impl Watched for Shared {
    fn let_go(self: Arc<Self>) {
        end_elsewhere(self);
    }

    fn look(&self) -> PollResult {
        let now = now_ns();
        let Some(_generation) = self.try_hold_generation() else {
            // A reset is waiting for the device, or another thread looks already. Do not wait: other endpoints have deadlines.
            return PollResult::Waiting;
        };
        self.look_for_failure();
        if !self.has_failed.load(Ordering::Acquire)
            && let Some((timeout, wr_id)) = self.overdue(now)
        {
            self.fail(wr_id, Cause::Deadline(timeout));
        }
        if !self.has_failed.load(Ordering::Acquire)
            && self.is_dropped.load(Ordering::Acquire)
            && !self.on_streams.any()
        {
            self.fail(None, Cause::Dropped);
        }
        if self.has_failed.load(Ordering::Acquire) && !self.break_down() {
            return PollResult::Waiting;
        }
        // Requests that wait for others are posted by a look of this thread, if no other thread looks.
        let holds_work = || !self.has_failed.load(Ordering::SeqCst) && self.qp.holds_work();
        if self.on_streams.any() || holds_work() {
            self.last_active_ns.store(now, Ordering::Relaxed);
            return PollResult::Resting;
        }
        if now.saturating_sub(self.last_active_ns.load(Ordering::Relaxed)) < LINGER_NS {
            return PollResult::Resting;
        }
        self.watched.leave(|| {
            let failed =
                self.has_failed.load(Ordering::SeqCst) && !self.broken_down.load(Ordering::Relaxed);
            failed || self.on_streams.any() || holds_work()
        })
    }
}
