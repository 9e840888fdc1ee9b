//! How an operation ended, in this generation of its endpoint or an earlier one.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::EndpointShared;
use crate::endpoint::QueueKind;
use crate::endpoint::outcome::OpStatus;
use crate::endpoint::queue::FinalStatuses;
use crate::{Cause, WorkError};

/// How long after a failure a look at a status waits for the device to stop.
const STATUS_NS: u64 = 500_000_000;

/// How an earlier generation of an endpoint ended, for the tickets of that time.
#[derive(Debug, Clone)]
pub(super) struct GenerationEnd {
    pub(super) epoch: u32,
    /// Of each side: work requests, and waits.
    pub(super) ends: [(FinalStatuses, FinalStatuses); 2],
    pub(super) failure: Option<WorkError>,
}

impl EndpointShared {
    /// The status of an operation of this generation, and, once the device is stopped, the failure that ended the generation. Does not wait for the
    /// device beyond `until_ns`.
    pub(in crate::endpoint) fn status_now(
        &self,
        epoch: u32,
        kind: QueueKind,
        is_wait: bool,
        (count, serial): (u32, u32),
        until_ns: u64,
    ) -> (OpStatus, Option<WorkError>) {
        let queue = self.queue(kind);
        let look = || {
            // The caller may know that it is done, from the stream or the peer, while another thread is about to look.
            self.reap_fully();
            if is_wait {
                return queue.wait_status(count, serial);
            }
            let is_shut_down = self.is_shut_down.load(Ordering::Acquire);
            let rung = self.rung(kind);
            match queue.op_status(count, serial, rung) {
                // A proxy had not rung it when the device was stopped. That is known before the operation is over: until then it stays what it was.
                OpStatus::Queued if !is_shut_down && rung.wrapping_sub(count).cast_signed() > 0 => {
                    OpStatus::Rung
                }
                status => status,
            }
        };
        self.look_for_failure();
        // Before the last look at completions: an operation that was complete at the failure is complete.
        let mut failure = self.failure();
        let mut status = look();
        if failure.is_none() && self.is_shut_down.load(Ordering::Acquire) {
            // It failed meanwhile.
            failure = self.failure();
            status = look();
        }
        let mut has_stopped = true;
        if failure.is_some()
            && matches!(
                status,
                OpStatus::Prepared | OpStatus::Queued | OpStatus::Rung
            )
        {
            let failed_ns = self.failed_ns.load(Ordering::Relaxed);
            self.shut_down_until(failed_ns.saturating_add(STATUS_NS).min(until_ns));
            // Before the look: what the device completes until it stops is complete.
            has_stopped = self.is_shut_down.load(Ordering::Acquire);
            status = look();
        }
        let failure = match status {
            OpStatus::Failed | OpStatus::Unknown => failure
                .or_else(|| self.failure())
                // The thread that reaped a flush may not have recorded the failure yet.
                .or_else(|| queue.has_error().then(|| self.flush_failure(epoch))),
            // Its completion is there, and the stream is about to pass it.
            OpStatus::Queued | OpStatus::Rung if is_wait && queue.has_succeeded(count) => None,
            _ => failure.filter(|_| has_stopped),
        };
        (status, failure)
    }

    /// Whether a work request of this generation has succeeded, by the completions that the library has.
    pub(in crate::endpoint) fn has_succeeded(
        &self,
        epoch: u32,
        kind: QueueKind,
        (count, serial): (u32, u32),
    ) -> bool {
        if !self.is_in(epoch) {
            return false;
        }
        let queue = self.queue(kind);
        let is_done = || queue.op_status(count, serial, self.rung(kind)) == OpStatus::Done;
        if !is_done() {
            self.reap();
        }
        // If a reset came meanwhile, that has seen a mixture.
        is_done() && self.is_in(epoch)
    }

    /// How an operation of an earlier generation ended: with success, or with that generation's failure. Nothing is known of generations
    /// whose statuses are no longer kept.
    pub(in crate::endpoint) fn status_in_generation(
        &self,
        epoch: u32,
        kind: QueueKind,
        is_wait: bool,
        count: u32,
    ) -> (OpStatus, Option<WorkError>) {
        let generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let aborted = WorkError::new(self.qp.qpn(), None, Cause::Aborted);
        let at = generations.partition_point(|past| past.epoch < epoch);
        let Some(past) = generations.get(at).filter(|past| past.epoch == epoch) else {
            return (OpStatus::Unknown, Some(aborted));
        };
        let (requests, waits) = &past.ends[kind as usize];
        let op_status = if is_wait { waits } else { requests }.of(count);
        (op_status, past.failure.or(Some(aborted)))
    }
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use std::sync::PoisonError;

    use crate::{Device, Endpoint, EndpointConfig};

    #[test]
    fn generations_are_kept_while_there_are_tickets() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let mut endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let mut peer = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let mut generation = |posts: bool| {
            endpoint.connect(&peer.address()).unwrap();
            peer.connect(&endpoint.address()).unwrap();
            let ticket = posts.then(|| endpoint.post_recv(1, &[]).unwrap());
            endpoint.reset().unwrap();
            peer.reset().unwrap();
            let generations = endpoint.shared.generations.lock();
            let kept = generations.unwrap_or_else(PoisonError::into_inner).len();
            (ticket, kept)
        };
        // The watchdog may have a handle just then.
        (0..1000).find(|_| generation(false).1 == 0).unwrap();
        let (ticket, first) = generation(true);
        let (_, second) = generation(false);
        assert!(first >= 1 && second == first + 1, "{first}, {second}");
        drop(ticket);
        (0..1000).find(|_| generation(false).1 == 0).unwrap();
    }
}
