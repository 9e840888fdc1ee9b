//! A send queue that is owned by kernels: they write its work requests, and this side of it, where there is one, rings and counts.
//!
//! `include/doorbell/queue.h` is the kernels' side, and has the protocol.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::endpoint::Side;
use crate::endpoint::shared::Shared;
use crate::nic::{QueuePairMemory, Queues};
use crate::region::Region;
use crate::stream::next_id;
use crate::{Error, Result, WorkError};

/// DOORBELL_EWORK of the C interface.
const STATUS_WORK: i32 = -19;

/// `struct dbl_queue_control` of `include/doorbell/queue.h`, on a page of its own, for GPUs to map.
#[derive(Debug, Default)]
#[repr(C, align(4096))]
pub(crate) struct DeviceQueueControl {
    status: AtomicI32,
    pub(super) completed: AtomicU32,
}

/// The slots' marks and doorbells, on pages of their own.
#[derive(Debug)]
#[repr(C, align(4096))]
struct MarkPage([AtomicU32; 1024]);

#[derive(Debug)]
#[repr(C, align(4096))]
struct DoorbellPage([AtomicU64; 512]);

/// What kernels write with the work requests, one for each slot.
#[derive(Debug)]
pub(crate) struct SubmissionFlags {
    marks: Box<[MarkPage]>,
    doorbells: Box<[DoorbellPage]>,
}

impl SubmissionFlags {
    fn new(slots: u32, first: u32) -> SubmissionFlags {
        let pages = |in_page: u32| 0..slots.div_ceil(in_page);
        let flags = SubmissionFlags {
            marks: pages(1024)
                .map(|_| MarkPage([const { AtomicU32::new(0) }; 1024]))
                .collect(),
            doorbells: pages(512)
                .map(|_| DoorbellPage([const { AtomicU64::new(0) }; 512]))
                .collect(),
        };
        for slot in 0..slots {
            let at = first.wrapping_add(slot);
            flags
                .mark(at, slots)
                .store(fresh_mark(at, slots), Ordering::Relaxed);
        }
        flags
    }

    fn mark(&self, at: u32, slots: u32) -> &AtomicU32 {
        let at = (at & (slots - 1)) as usize;
        &self.marks[at / 1024].0[at % 1024]
    }

    fn doorbell(&self, at: u32, slots: u32) -> &AtomicU64 {
        let at = (at & (slots - 1)) as usize;
        &self.doorbells[at / 512].0[at % 512]
    }

    /// Where marks and doorbells lie, and their bytes.
    pub(crate) fn memory(&self) -> [(usize, usize); 2] {
        [
            (self.marks.as_ptr().addr(), size_of_val(&*self.marks)),
            (
                self.doorbells.as_ptr().addr(),
                size_of_val(&*self.doorbells),
            ),
        ]
    }
}

/// What the mark of a slot is before it is submitted with that count: that of the lap before.
pub(crate) fn fresh_mark(at: u32, slots: u32) -> u32 {
    at.wrapping_sub(slots).wrapping_add(1)
}

/// What kernels and this process share of a device-owned queue.
#[derive(Debug)]
pub(crate) struct DeviceQueueState {
    control: Box<DeviceQueueControl>,
    /// In this process's memory where the host rings, or where the kernels are threads of it.
    flags: Option<SubmissionFlags>,
    slots: u32,
    capacity: u32,
    /// The running counts that it begins with.
    first: u32,
    first_completion: u32,
    /// Whether the host rings, and counts completions.
    rings: bool,
    /// What kernels were given the keys of. As long as anything of theirs may be in flight, which is until the queue is the endpoint's again.
    held: Mutex<Vec<Region>>,
}

impl DeviceQueueState {
    pub(crate) fn control(&self) -> &DeviceQueueControl {
        &self.control
    }

    pub(crate) fn flags(&self) -> Option<&SubmissionFlags> {
        self.flags.as_ref()
    }

    /// Slots of the ring, a power of two, and how many may be in flight.
    pub(crate) fn slots(&self) -> (u32, u32) {
        (self.slots, self.capacity)
    }

    /// The running counts that the queue begins with: of slots, and of completions.
    pub(crate) fn first(&self) -> (u32, u32) {
        (self.first, self.first_completion)
    }

    pub(crate) fn host_rings(&self) -> bool {
        self.rings
    }

    /// How far slots are submitted in a row from `from` on, at most as many as can be in flight, and the doorbell of the last one.
    pub(super) fn submitted(&self, from: u32) -> Option<(u32, u64)> {
        let flags = self.flags.as_ref()?;
        let mut upto = from;
        while upto.wrapping_sub(from) < self.capacity {
            // Acquire: the work request and its doorbell were written before the mark.
            let mark = flags.mark(upto, self.slots).load(Ordering::Acquire);
            let next = upto.wrapping_add(1);
            if mark != next {
                break;
            }
            upto = next;
        }
        let last = upto.wrapping_sub(1);
        let doorbell = flags.doorbell(last, self.slots).load(Ordering::Relaxed);
        (upto != from).then_some((upto, doorbell))
    }

    /// Counts a completion, which tells by its 16 bits of all slots up to its own.
    pub(super) fn complete(&self, wqe_counter: u16) {
        let completed = self.control.completed.load(Ordering::Relaxed);
        let slots = u32::from(wqe_counter.wrapping_sub(completed as u16)) + 1;
        // One that says more is not of this queue's.
        if slots <= self.capacity {
            // Release: what the device wrote before the completion.
            let completed = completed.wrapping_add(slots);
            self.control.completed.store(completed, Ordering::Release);
        }
    }

    fn fail(&self) {
        let _ = self.control.status.compare_exchange(
            0,
            STATUS_WORK,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
    }
}

impl Drop for DeviceQueueState {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        // By whatever thread: a proxy's, one that looks after all endpoints, or one that holds an endpoint's locks.
        held.drain(..).for_each(Region::let_go);
    }
}

/// The send queue of an endpoint, to be lent, and then as long as it is lent. The endpoint gets it back by a reset.
#[derive(Debug)]
pub(crate) struct DeviceQueue {
    state: Arc<DeviceQueueState>,
    shared: Arc<Shared>,
    has_begun: bool,
    /// By which the endpoint's alarm knows it.
    id: u64,
}

impl DeviceQueue {
    /// A queue in which nothing is under way, and whose next slot has that running count, to be lent by [`DeviceQueue::begin`]. A `flags` in the process's memory is made where
    /// the host rings, or on request.
    pub(super) fn new(
        shared: &Arc<Shared>,
        first: u32,
        depth: u32,
        with_board: bool,
    ) -> Result<DeviceQueue> {
        let rings = shared.doorbells().is_some();
        let Queues::Mlx5(memory) = shared.qp.queues();
        let slots = memory.sizes.send_wqebbs;
        let capacity = depth.min(slots).min(memory.sizes.cqes[0]);
        let queue = &shared.queues[0];
        let first_completion = queue.completion_to_hand_over()?;
        let state = Arc::new(DeviceQueueState {
            control: Box::default(),
            flags: (rings || with_board).then(|| SubmissionFlags::new(slots, first)),
            slots,
            capacity,
            first,
            first_completion,
            rings,
            held: Mutex::default(),
        });
        state.control.completed.store(first, Ordering::Relaxed);
        Ok(DeviceQueue {
            state,
            shared: Arc::clone(shared),
            has_begun: false,
            id: next_id(),
        })
    }

    /// From here on it is the kernels'. The caller still has the endpoint to itself.
    ///
    /// # Errors
    /// [`Error::State`] while the endpoint is being reset.
    pub(crate) fn begin(&mut self) -> Result<()> {
        let DeviceQueue { state, shared, .. } = self;
        let entered = shared.enter_stream()?;
        let queue = &shared.queues[0];
        if state.rings {
            // From here on the trigger counts slots; before the proxy looks at marks, which it compares with that.
            queue.queued.store(state.first, Ordering::Release);
            shared.set_rung(queue.side, state.first);
        }
        let alarmed = Arc::clone(state);
        shared
            .attachments()
            .alarm()
            .enter(self.id, || Arc::new(move || alarmed.fail()));
        queue.hand_over(state);
        shared.activate();
        entered.stay();
        self.has_begun = true;
        Ok(())
    }

    pub(crate) fn state(&self) -> &DeviceQueueState {
        &self.state
    }

    /// Where the parts of the queue lie.
    pub(crate) fn memory(&self) -> &QueuePairMemory {
        let Queues::Mlx5(memory) = self.shared.qp.queues();
        memory
    }

    pub(crate) fn qpn(&self) -> u32 {
        self.shared.qp.qpn()
    }

    /// The failure of the endpoint, if it has failed. Looks first.
    pub(crate) fn failure(&self) -> Option<WorkError> {
        self.shared.look_for_failure();
        self.shared.failure()
    }

    /// Holds a region until nothing that kernels have submitted can be in flight any more. Fails unless it is memory for this queue.
    pub(crate) fn hold(&self, region: &Region) -> Result<()> {
        self.shared.domain.check_same(region.domain(), "slice")?;
        if !region.is_registered() {
            return Err(Error::State {
                operation: "name memory to a kernel queue",
                reason: "the region is deregistered".into(),
            });
        }
        let mut held = self
            .state
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !held.iter().any(|held| held.is(region)) {
            held.push(region.clone());
        }
        Ok(())
    }
}

impl Drop for DeviceQueue {
    fn drop(&mut self) {
        if !self.has_begun {
            return;
        }
        // What was submitted is under way for who submitted it, whether or not a proxy has come to it.
        self.shared.ring_submitted(Side::Send);
        self.shared.queues[0].end_device_ownership();
        self.shared.attachments().alarm().leave(self.id);
        self.shared.leave_stream();
    }
}
