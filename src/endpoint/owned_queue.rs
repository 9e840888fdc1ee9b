//! A send queue that kernels own: they write its work requests. On the proxy path, the host rings and counts.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Weak;
use std::sync::atomic::Ordering;

use crate::endpoint::QueueKind;
use crate::endpoint::device_queue_state::{DeviceQueueState, SubmissionFlags};
use crate::endpoint::shared::EndpointShared;
use crate::nic::{QueuePairMemory, Queues};
use crate::region::{ProtectionDomain, Region};
use crate::stream::next_id;
use crate::{Error, Result, StateKind, WorkError};

/// The send queue of an endpoint, before kernels own it and as long as they do. The endpoint gets it back by a reset.
#[derive(Debug)]
pub(crate) struct OwnedSendQueue {
    state: Arc<DeviceQueueState>,
    shared: Arc<EndpointShared>,
    has_begun: bool,
    /// The number by which the endpoint's alarm knows the queue.
    id: u64,
}

impl OwnedSendQueue {
    /// A queue in which nothing is under way, and whose next slot has the running count `first`. Kernels own it from [`OwnedSendQueue::begin`] on. A `flags`
    /// in the process's memory is made if the host rings, or on request.
    pub(super) fn new(
        shared: &Arc<EndpointShared>,
        first: u32,
        depth: u32,
        with_flags: bool,
    ) -> Result<OwnedSendQueue> {
        let rings = shared.doorbells().is_some();
        let Queues::Mlx5(memory) = shared.qp.queues();
        let slots = memory.sizes.send_wqebbs;
        let capacity = depth.min(slots).min(memory.sizes.cqes[0]);
        let queue = &shared.queues[0];
        let first_completion = queue.completion_to_hand_over()?;
        let flags = (rings || with_flags).then(|| SubmissionFlags::new(slots, first));
        let flags = flags.transpose()?;
        let state =
            DeviceQueueState::new((slots, capacity), (first, first_completion), rings, flags)?;
        Ok(OwnedSendQueue {
            state: Arc::new(state),
            shared: Arc::clone(shared),
            has_begun: false,
            id: next_id(),
        })
    }

    /// From here on kernels own the queue. No other thread uses the endpoint yet.
    ///
    /// # Errors
    /// [`Error::State`] while the endpoint is being reset.
    pub(crate) fn begin(&mut self) -> Result<()> {
        let OwnedSendQueue { state, shared, .. } = self;
        let entered = shared.enter_stream()?;
        let queue = &shared.queues[0];
        if state.host_rings() {
            // From here on the trigger counts slots; before the proxy looks at marks, which it compares with that.
            queue.queued.store(state.first().0, Ordering::Release);
            shared.set_rung(queue.kind, state.first().0);
        }
        let alarmed = Arc::clone(state);
        shared
            .attachments()
            .failure_notifier()
            .enter(self.id, || alarmed);
        queue.hand_over(state);
        shared.activate();
        entered.stay();
        self.has_begun = true;
        Ok(())
    }

    pub(crate) fn state(&self) -> &DeviceQueueState {
        &self.state
    }

    /// The addresses of the queue's parts.
    pub(crate) fn memory(&self) -> &QueuePairMemory {
        let Queues::Mlx5(memory) = self.shared.qp.queues();
        memory
    }

    /// What keeps the card's registers mapped, if a card has the queue.
    #[cfg(feature = "cuda")]
    pub(crate) fn uar_mapping(&self) -> Option<Weak<dyn Any + Send + Sync>> {
        self.shared.qp.uar_mapping()
    }

    #[cfg(feature = "cuda")]
    pub(super) fn shared(&self) -> &Arc<EndpointShared> {
        &self.shared
    }

    pub(crate) fn qpn(&self) -> u32 {
        self.shared.qp.qpn()
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.shared.domain
    }

    /// Whether the device has atomics.
    pub(crate) fn has_atomics(&self) -> bool {
        self.shared.qp.abilities().atomics
    }

    /// The failure of the endpoint, if it has failed. Checks for new failures first.
    pub(crate) fn failure(&self) -> Option<WorkError> {
        self.shared.look_for_failure();
        self.shared.failure()
    }

    /// Holds a region until nothing that kernels have submitted can be in flight any more. Fails unless it is memory for this queue.
    pub(crate) fn hold(&self, region: &Region) -> Result<()> {
        self.shared.domain.check_same(region.domain(), "slice")?;
        if !region.is_registered() {
            return Err(Error::state(
                StateKind::Deregistered,
                "name memory to a device queue",
                "the region is deregistered",
            ));
        }
        self.state.hold(region);
        Ok(())
    }
}

/// The receive queue of an endpoint, as kernels have it. They post and collect on every control path: a receive has no doorbell but its record.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(super) struct OwnedRecvQueue {
    state: Arc<DeviceQueueState>,
    shared: Arc<EndpointShared>,
    has_begun: bool,
}

#[cfg(feature = "cuda")]
impl OwnedRecvQueue {
    /// A queue in which nothing is under way, and whose next receive has the running count `first`.
    ///
    /// # Errors
    /// [`Error::State`] if there is.
    pub(super) fn new(
        shared: &Arc<EndpointShared>,
        first: u32,
        depth: u32,
    ) -> Result<OwnedRecvQueue> {
        let Queues::Mlx5(memory) = shared.qp.queues();
        let wqes = memory.sizes.recv_wqes;
        let capacity = depth.min(wqes).min(memory.sizes.cqes[1]);
        let first_completion = shared.queues[1].completion_to_hand_over()?;
        let state =
            DeviceQueueState::new((wqes, capacity), (first, first_completion), false, None)?;
        Ok(OwnedRecvQueue {
            state: Arc::new(state),
            shared: Arc::clone(shared),
            has_begun: false,
        })
    }

    /// From here on kernels own it.
    pub(super) fn begin(&mut self) {
        self.shared.queues[1].hand_over(&self.state);
        self.has_begun = true;
    }

    /// The running counts that it begins with: of receives, and of completions.
    pub(super) fn first(&self) -> (u32, u32) {
        self.state.first()
    }

    /// Receives that may be posted and not completed.
    pub(super) fn capacity(&self) -> u32 {
        self.state.slots().1
    }
}

#[cfg(feature = "cuda")]
impl Drop for OwnedRecvQueue {
    fn drop(&mut self) {
        if self.has_begun {
            self.shared.queues[1].end_device_ownership();
        }
    }
}

impl Drop for OwnedSendQueue {
    fn drop(&mut self) {
        if !self.has_begun {
            return;
        }
        // The kernels regard what they submitted as under way. The proxy may not have rung for it yet, so it is rung for here.
        self.shared.ring_submitted(QueueKind::Send);
        self.shared.queues[0].end_device_ownership();
        self.shared.attachments().failure_notifier().leave(self.id);
        self.shared.leave_stream();
    }
}
