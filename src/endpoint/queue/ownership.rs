//! A queue that is owned by kernels, as reaper, poster and watchdog see it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::{Cursor, QueueState};
use crate::endpoint::QueueKind;
use crate::endpoint::device_queue_state::DeviceQueueState;
use crate::mlx5::Cqe;
use crate::{Error, Result, StateKind};

/// Which side owns the queue.
#[derive(Debug, Default)]
pub(super) enum Ownership {
    /// The endpoint owns it.
    #[default]
    Host,
    /// Kernels own it.
    Device(Arc<DeviceQueueState>),
    /// Kernels owned it, and its counts no longer match the endpoint's.
    Over(Arc<DeviceQueueState>),
}

impl Ownership {
    fn state(&self) -> Option<&Arc<DeviceQueueState>> {
        match self {
            Ownership::Host => None,
            Ownership::Device(state) | Ownership::Over(state) => Some(state),
        }
    }
}

impl QueueState {
    fn ownership(&self) -> MutexGuard<'_, Ownership> {
        self.ownership
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The running index of the next completion.
    ///
    /// # Errors
    /// [`Error::State`] if kernels own the queue already, or anything is under way in it: a work request, a completion that was not collected, or a wait.
    pub(in crate::endpoint) fn completion_to_hand_over(&self) -> Result<u32> {
        let operation = match self.kind {
            QueueKind::Send => "hand the send queue to kernels",
            QueueKind::Recv => "hand the receive queue to kernels",
        };
        self.check_host_owned(operation)?;
        let cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = if self.outstanding.in_flight() != 0 {
            format!(
                "{} work requests are prepared or in flight",
                self.outstanding.in_flight()
            )
        } else if cursor.seen != cursor.freed {
            format!(
                "{} completions are not collected",
                cursor.seen.wrapping_sub(cursor.freed)
            )
        } else if self.taken.load(Ordering::Relaxed) != cursor.freed {
            // Of a work request that was taken back. Nothing would end the wait: completions are the kernels'.
            "a wait is there for the completion of the next work request".into()
        } else {
            return Ok(cursor.freed);
        };
        Err(Error::state(StateKind::WorkPending, operation, reason))
    }

    /// Gives the queue to kernels. They read its completions; if the host counts these, the host reports the count to them.
    pub(in crate::endpoint) fn hand_over(&self, state: &Arc<DeviceQueueState>) {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        *self.ownership() = Ownership::Device(Arc::clone(state));
        self.is_device_owned.store(true, Ordering::Release);
        self.room.store(0, Ordering::Relaxed);
        if !state.host_rings() {
            // Marks the completion queue as full, so that the host does not read it.
            cursor.seen = cursor.freed.wrapping_add(self.cq.cqe_count());
            self.taken.store(cursor.freed, Ordering::Release);
        }
    }

    /// The kernels are done with the queue.
    pub(in crate::endpoint) fn end_device_ownership(&self) {
        let mut ownership = self.ownership();
        if let Ownership::Device(state) = std::mem::take(&mut *ownership) {
            *ownership = Ownership::Over(state);
        }
    }

    /// Whether kernels own it, or did. A reset returns it to the endpoint.
    #[inline]
    pub(in crate::endpoint) fn is_device_owned(&self) -> bool {
        self.is_device_owned.load(Ordering::Acquire)
    }

    /// Fails if kernels own the queue, or did.
    pub(in crate::endpoint) fn check_host_owned(&self, operation: &'static str) -> Result<()> {
        let name = self.kind.name();
        let reason = match &*self.ownership() {
            Ownership::Host => return Ok(()),
            Ownership::Device(_) => format!("its {name} queue is owned by kernels"),
            Ownership::Over(_) => format!("its {name} queue was owned by kernels: reset it first"),
        };
        Err(Error::state(StateKind::KernelsOwnQueue, operation, reason))
    }

    /// Fails while kernels own the queue, because it must not change meanwhile.
    pub(in crate::endpoint) fn check_ownership_over(&self, operation: &'static str) -> Result<()> {
        match &*self.ownership() {
            Ownership::Host | Ownership::Over(_) => Ok(()),
            Ownership::Device(_) => Err(Error::state(
                StateKind::KernelsOwnQueue,
                operation,
                format!(
                    "its {} queue is owned by kernels: drop the device queue first",
                    self.kind.name()
                ),
            )),
        }
    }

    /// Returns the queue to the endpoint, in its initial state.
    pub(super) fn clear_ownership(&self) {
        let over = std::mem::take(&mut *self.ownership());
        self.is_device_owned.store(false, Ordering::Release);
        // Not under the lock, for with it regions may go.
        drop(over);
    }

    /// The work requests that kernels have submitted from the count `from` on, for the host to ring: their end, and the doorbell.
    pub(in crate::endpoint) fn submitted(&self, from: u32) -> Option<(u32, u64)> {
        match &*self.ownership() {
            Ownership::Device(state) => state.submitted(from),
            Ownership::Host | Ownership::Over(_) => None,
        }
    }

    /// A completion of a work request that is not outstanding. If kernels own the queue, it belongs to one of theirs.
    #[cold]
    pub(super) fn count_for_kernels(&self, index: u32, cqe: &Cqe) {
        if let Some(state) = self.ownership().state() {
            let next = index.wrapping_add(1);
            // No other code collects it.
            self.taken.store(next, Ordering::Release);
            // Before the kernels see that their slot is free: the request that they put there may complete, and need the place, before this
            // round ends.
            self.cq.set_consumer_index(next);
            if !cqe.opcode.is_error() {
                state.complete(cqe.wqe_counter);
            }
        }
    }

    /// Moves the cursor to where the kernels, which read completions themselves, have come, by the consumer index that was given to the device.
    pub(super) fn catch_up(&self, cursor: &mut Cursor) {
        if self
            .ownership()
            .state()
            .is_some_and(|state| !state.host_rings())
        {
            cursor.freed = self.cq.consumer_index();
            // The rest is not collected: only a reset gives those places back to the device.
            self.taken.store(cursor.freed, Ordering::Release);
            cursor.seen = cursor.freed.wrapping_add(self.cq.cqe_count());
        }
    }

    /// The code of an operation in a graph of the application that was not executed, and its time limit.
    pub(in crate::endpoint) fn replay_failure(&self) -> Option<(i32, u64)> {
        if !self.is_device_owned() {
            return None;
        }
        self.ownership().state()?.replay_failure()
    }

    /// The first completion in error of those that kernels have not read, or have left in the queue. If the host counts, the reaper finds it.
    pub(in crate::endpoint) fn unread_error_cqe(&self) -> Option<Cqe> {
        if !self.is_device_owned()
            || self
                .ownership()
                .state()
                .is_none_or(|state| state.host_rings())
        {
            return None;
        }
        let first = self.cq.consumer_index();
        (0..self.cq.cqe_count())
            .map_while(|ahead| self.cq.cqe(first.wrapping_add(ahead)))
            .find(|cqe| cqe.opcode.is_error())
    }
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use super::*;
    use crate::{Control, Device, Endpoint, EndpointConfig, Executor, HostStream, QueueKind, Work};

    /// Its work request was taken back, so only the endpoint's end ends the wait.
    #[test]
    fn queue_with_a_wait_is_not_handed_to_kernels() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let config = EndpointConfig::default().control(Some(Control::Proxy));
        let mut a = Endpoint::new(&domain, &config).unwrap();
        a.connect(&a.address()).unwrap();
        let stream = HostStream::new("waits").unwrap();
        let prepared = a.prepare_send(&Work::nop()).unwrap();
        a.stream_wait_cq_for(&stream, QueueKind::Send, None)
            .unwrap();
        a.rollback(prepared);
        let refused = a.take_send_queue(true).err();
        let kind = StateKind::WorkPending;
        assert!(
            matches!(refused, Some(Error::State { kind: found, .. }) if found == kind),
            "{refused:?}"
        );
        a.abort();
        let end = stream.synchronize(Some(std::time::Duration::from_secs(60)));
        assert!(matches!(end, Err(Error::Asynchronous { .. })), "{end:?}");
    }

    /// A completion queue with a place for each slot is full when all slots are in use: kernels may use the slot again when the device may use the
    /// place.
    #[test]
    fn a_slot_is_announced_to_kernels_when_its_completion_is_given_back() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let config = EndpointConfig::default().control(Some(Control::Proxy));
        let mut a = Endpoint::new(&domain, &config).unwrap();
        let mut b = Endpoint::new(&domain, &config).unwrap();
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        let mut lent = a.take_send_queue(true).unwrap();
        lent.begin().unwrap();
        let queue = &a.shared.queues[0];
        let mut cqe = Cqe::parse(&[0; 64]);
        for index in 0..3 {
            cqe.wqe_counter = index as u16;
            queue.count_for_kernels(index, &cqe);
            assert_eq!(queue.cq.consumer_index(), index + 1);
            assert_eq!(lent.state().control().completed(), index + 1);
        }
    }
}
