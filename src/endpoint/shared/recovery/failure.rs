//! Records the failure of an endpoint, and tells the threads that wait for it.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::endpoint::clock::now_ns;
use crate::endpoint::shared::{Cookie, EndpointShared};
use crate::{Cause, Error, Result, WorkError};

impl EndpointShared {
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
    pub(in crate::endpoint) fn if_alive(&self, epoch: u32, what: impl FnOnce()) -> bool {
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
    pub(in crate::endpoint::shared) fn unless_failed(&self, what: impl FnOnce()) {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none_or(|failure| failure.cause == Cause::Discarded) {
            what();
        }
    }

    /// The stream that had this send or receive has not executed its doorbell.
    pub(in crate::endpoint::shared) fn mark_discarded(&self, cookie: Cookie) {
        let queue = self.queue(cookie.kind);
        self.unless_failed(|| {
            // A request that counted as rung when the device was stopped was reported as rung, though the stream had only begun it.
            let rung = queue.rung_in_all().unwrap_or(self.rung(cookie.kind));
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
        self.fail_if(wr_id, cause, || self.epoch.load(Ordering::Relaxed) == epoch);
    }

    /// Records a failure if `decide` says so. Returns whether it did. A thread that sees what `decide` has changed finds the failure.
    pub(in crate::endpoint::shared) fn fail_if(
        &self,
        wr_id: Option<u64>,
        cause: Cause,
        decide: impl FnOnce() -> bool,
    ) -> bool {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if !decide() {
            return false;
        }
        if failure.is_none() {
            self.failed_ns.store(now_ns(), Ordering::Relaxed);
            *failure = Some(WorkError::new(self.qp.qpn(), wr_id, cause));
        }
        // Before any thread that could release a wait learns of the failure.
        self.attachments.failure_notifier().notify();
        // SeqCst, for the watchdog that is about to stop watching.
        self.has_failed.store(true, Ordering::SeqCst);
        drop(failure);
        self.activate();
        true
    }

    /// Records the failure that a flush of that generation reports. The caller has reaped fully.
    pub(in crate::endpoint::shared) fn record_flush_failure(&self, epoch: u32) {
        self.check_kernel_completions(epoch);
        self.fail_in(epoch, None, Cause::QueuePair);
    }

    /// The failure that a completion in error reports. The caller has reaped fully. If the completion was a flush, the thread that found it
    /// may not have recorded the failure yet.
    #[cold]
    pub(in crate::endpoint) fn flush_failure(&self, epoch: u32) -> WorkError {
        self.record_flush_failure(epoch);
        let unknown = WorkError::new(self.qp.qpn(), None, Cause::QueuePair);
        self.failure().unwrap_or(unknown)
    }

    /// Why a wait on a stream ended without success.
    #[cold]
    pub(in crate::endpoint::shared) fn wait_failure(&self) -> WorkError {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.reap_fully();
        self.failure().unwrap_or_else(|| self.flush_failure(epoch))
    }
}
