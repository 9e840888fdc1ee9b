//! What the watchdog looks for at an endpoint: completions, failures that the device reports, and deadlines.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{EndpointShared, end_elsewhere};
use crate::Cause;
use crate::WcStatus;
use crate::endpoint::QueueKind;
use crate::endpoint::clock::now_ns;
use crate::endpoint::device_queue_state::{STATUS_RANGE, STATUS_STREAM, STATUS_WORK};
use crate::endpoint::queue::{ErrorCompletion, QueueState};
use crate::endpoint::watchdog::Watched;
use crate::nic::State;
use crate::proxy::PollResult;
use crate::stream::look_at_stream;

/// How long the watchdog keeps watching an endpoint that has nothing under way, so that an endpoint in use is not
/// registered and unregistered for every operation.
const LINGER_NS: u64 = 100_000_000;

impl EndpointShared {
    /// Processes new completions of both queues. Returns whether there were any. Skips a queue whose completions another thread is processing.
    #[inline]
    pub(in crate::endpoint) fn reap(&self) -> bool {
        self.reap_by(QueueState::reap)
    }

    /// [`EndpointShared::reap`] that waits for the other thread: completions that were there before the call are processed after it.
    pub(in crate::endpoint) fn reap_fully(&self) {
        self.reap_by(QueueState::reap_fully);
    }

    /// [`EndpointShared::reap_fully`] of a device that cannot be stopped: no completion is processed after this.
    pub(super) fn reap_for_the_last_time(&self) {
        self.reap_by(QueueState::reap_for_the_last_time);
    }

    #[inline]
    fn reap_by(&self, reap: impl Fn(&QueueState, &dyn Fn(ErrorCompletion)) -> bool) -> bool {
        let [send, recv] = &self.queues;
        let flushed = std::cell::Cell::new(None);
        let failed = |found: ErrorCompletion| {
            // Otherwise a ticket could report `Complete` in between.
            debug_assert!(
                send.has_error() || recv.has_error(),
                "a completion in error is reported before it is noted"
            );
            // The generation of the completion: a queue does not start over while one is processed.
            let epoch = self.epoch.load(Ordering::Acquire);
            // A flush means that something else has failed. The completion that reports it may be in the other queue.
            if found.flushed {
                flushed.set(Some(epoch));
                // Already here, and not only with the failure: streams may wait until this is counted.
                self.attachments.failure_notifier().notify();
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
            self.record_flush_failure(epoch);
        }
        new
    }

    /// [`EndpointShared::reap`], and a check of the state and events that the device reports for the queue pair itself.
    pub(in crate::endpoint) fn look_for_failure(&self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.qp.poll_async_events();
        self.reap();
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        self.check_kernel_completions(epoch);
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        if self.qp.overrun() {
            self.fail_in(epoch, None, Cause::Overrun);
        } else if self.qp.state() == State::Error {
            // If a completion reports the cause, it was written before the state was set.
            self.reap_fully();
            self.check_kernel_completions(epoch);
            self.fail_in(epoch, None, Cause::QueuePair);
        }
    }

    /// Records the failure of a completion in error that kernels have left, or have not read, in a queue that they own.
    pub(super) fn check_kernel_completions(&self, epoch: u32) {
        let mut flushed = None;
        for queue in &self.queues {
            let Some(cqe) = queue.unread_error_cqe() else {
                continue;
            };
            let cause = Cause::Completion {
                status: cqe.status(),
                syndrome: cqe.syndrome,
                vendor_syndrome: cqe.vendor_syndrome,
            };
            let wr_id = Some(cqe.wqe_counter.into());
            if cqe.status() == WcStatus::WrFlushErr {
                // The other queue may have the cause.
                flushed = Some((wr_id, cause));
            } else {
                return self.fail_in(epoch, wr_id, cause);
            }
        }
        if let Some((wr_id, cause)) = flushed {
            return self.fail_in(epoch, wr_id, cause);
        }
        let overdue = self.queue(QueueKind::Send).replay_failure();
        if let Some((code, timeout_ns)) = overdue {
            let cause = match code {
                // The completion in error, or what else has failed the endpoint, is the cause.
                STATUS_WORK => return,
                STATUS_RANGE | STATUS_STREAM => Cause::Discarded,
                _ => Cause::Deadline(Duration::from_nanos(timeout_ns)),
            };
            self.fail_in(epoch, None, cause);
        }
    }

    /// Makes the watchdog watch this endpoint, if it does not yet.
    #[inline]
    pub(in crate::endpoint) fn activate(&self) {
        self.watch();
        self.register_with_proxy();
    }

    /// [`EndpointShared::activate`] for work on a stream. With the number of one that is executed by the threads that wait for it: these do what the proxy does.
    #[inline]
    pub(in crate::endpoint) fn activate_for(&self, looked_stream: Option<u64>) {
        self.watch();
        match looked_stream {
            Some(stream) => self.looked_stream.store(stream, Ordering::Relaxed),
            None => self.register_with_proxy(),
        }
    }

    /// For a thread that waits for work of the endpoint, and looks at its own streams: executes the stream without a thread that has the work. True: something has changed.
    pub(in crate::endpoint) fn look_at_stream(&self) -> bool {
        look_at_stream(self.looked_stream.load(Ordering::Relaxed))
    }

    /// Whether requests that were rung for are still to be posted, by a thread that looks at the queue pair.
    #[inline]
    pub(super) fn holds_work(&self) -> bool {
        !self.has_failed.load(Ordering::SeqCst) && self.qp.holds_work()
    }

    #[inline]
    pub(super) fn watch(&self) {
        if self.watched.join() {
            self.last_active_ns.store(now_ns(), Ordering::Relaxed);
            self.watchdog.register(self.weak.clone());
        }
    }

    /// Fails the endpoint if a deadline has passed, with the number of the oldest work request in its queue.
    fn fail_overdue(&self, now_ns: u64) {
        for queue in &self.queues {
            // Also one that a proxy has not rung yet: a proxy that is late is a reason why it is not done.
            let oldest = || queue.oldest_request(self.rung(queue.kind));
            // Asked for when the failure is recorded, so that no thread cancels the request in between.
            let is_cancelled = |named: Option<(u32, u64)>| {
                named.is_some_and(|(count, _)| queue.is_cancelled(count))
            };
            let cause = |timeout_ns| Cause::Deadline(Duration::from_nanos(timeout_ns));
            for index in queue.under_way() {
                let record = queue.record(index);
                // A wait whose completion is there is over, though its stream has not seen it yet.
                if !queue.is_waiting(index) || queue.has_come(index) {
                    continue;
                }
                let started = record.wait_started_ns.load(Ordering::Relaxed);
                let timeout = record.wait_timeout_ns.load(Ordering::Relaxed);
                // The wait itself is decided by its stream, which may just pass it, or when the device has stopped.
                if started == 0 || now_ns.saturating_sub(started) <= timeout {
                    continue;
                }
                let named = oldest();
                let wr_id = named.map(|(_, wr_id)| wr_id);
                if self.fail_if(wr_id, cause(timeout), || {
                    !is_cancelled(named) && queue.is_waiting(index) && !queue.has_come(index)
                }) {
                    return;
                }
            }
            let timeout = queue.turn_timeout_ns;
            let since = queue.turn_waits.since_ns();
            if since.is_some_and(|since| now_ns.saturating_sub(since) > timeout) {
                let named = oldest();
                let wr_id = named.map(|(_, wr_id)| wr_id);
                if self.fail_if(wr_id, cause(timeout), || !is_cancelled(named)) {
                    return;
                }
            }
        }
    }
}

impl Watched for EndpointShared {
    fn drop_reference(self: Arc<Self>) {
        end_elsewhere(self);
    }

    fn look(&self) -> PollResult {
        let now = now_ns();
        let Some(_generation) = self.try_hold_generation() else {
            // A reset is waiting for the device, or another thread looks already. Do not wait: other endpoints have deadlines.
            return PollResult::Waiting;
        };
        self.look_for_failure();
        if !self.has_failed.load(Ordering::Acquire) {
            self.fail_overdue(now);
        }
        if !self.has_failed.load(Ordering::Acquire)
            && self.is_dropped.load(Ordering::Acquire)
            && !self.on_streams.any()
        {
            self.fail(None, Cause::Dropped);
        }
        if self.has_failed.load(Ordering::Acquire) && !self.shut_down() {
            return PollResult::Waiting;
        }
        // Requests that wait for others are posted by a look of this thread, if no other thread looks.
        if self.on_streams.any() || self.holds_work() {
            self.last_active_ns.store(now, Ordering::Relaxed);
            return PollResult::Resting;
        }
        if now.saturating_sub(self.last_active_ns.load(Ordering::Relaxed)) < LINGER_NS {
            return PollResult::Resting;
        }
        self.watched.leave(|| {
            let has_failed = self.has_failed.load(Ordering::SeqCst);
            let is_to_stop = has_failed && !self.is_shut_down.load(Ordering::Relaxed);
            let is_to_fail = !has_failed && self.is_dropped.load(Ordering::Acquire);
            is_to_stop || is_to_fail || self.on_streams.any() || self.holds_work()
        })
    }
}
