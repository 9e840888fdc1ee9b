//! The words that kernels and this process share for a send queue that kernels own. On the proxy path this process rings and counts.
//!
//! `include/doorbell/queue.h` is the kernels' side, and has the protocol.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::Result;
use crate::nic::{PageBox, PageSlice};
use crate::region::Region;
use crate::stream::FailureListener;

/// DOORBELL_ERANGE of the C interface: a table of pages names a page that there is not.
pub(super) const STATUS_RANGE: i32 = -10;
/// DOORBELL_EASYNC of the C interface: an earlier operation of the stream has failed.
pub(super) const STATUS_STREAM: i32 = -18;
/// DOORBELL_EWORK of the C interface.
pub(super) const STATUS_WORK: i32 = -19;

/// `struct dbl_queue_control` of `include/doorbell/queue.h`.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct DeviceQueueControl {
    host: HostWords,
    replay: ReplayFailureWords,
}

/// What this process writes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct HostWords {
    status: AtomicI32,
    completed: AtomicU32,
}

/// What operations in graphs of the application write: the code of one that was not executed, and its time limit.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct ReplayFailureWords {
    code: AtomicI32,
    timeout_ns: AtomicU64,
}

impl DeviceQueueControl {
    #[cfg(all(test, feature = "softcx", not(loom)))]
    pub(super) fn completed(&self) -> u32 {
        self.host.completed.load(Ordering::Acquire)
    }
}

/// What kernels write with the work requests, one for each slot.
#[derive(Debug)]
pub(crate) struct SubmissionFlags {
    marks: PageSlice<AtomicU32>,
    doorbells: PageSlice<AtomicU64>,
}

impl SubmissionFlags {
    /// # Errors
    /// [`Error::System`](crate::Error::System): no memory.
    pub(super) fn new(slots: u32, first: u32) -> Result<SubmissionFlags> {
        let flags = SubmissionFlags {
            marks: PageSlice::new(slots as usize, |_| AtomicU32::new(0))?,
            doorbells: PageSlice::new(slots as usize, |_| AtomicU64::new(0))?,
        };
        for slot in 0..slots {
            let at = first.wrapping_add(slot);
            flags
                .mark(at, slots)
                .store(fresh_mark(at, slots), Ordering::Relaxed);
        }
        Ok(flags)
    }

    fn mark(&self, at: u32, slots: u32) -> &AtomicU32 {
        &self.marks[(at & (slots - 1)) as usize]
    }

    fn doorbell(&self, at: u32, slots: u32) -> &AtomicU64 {
        &self.doorbells[(at & (slots - 1)) as usize]
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

/// The marks of a queue's slots before the first is submitted, by their place in the ring.
#[cfg(feature = "cuda")]
pub(crate) fn fresh_marks(first: u32, slots: u32) -> Vec<u32> {
    let mut marks = vec![0; slots as usize];
    for ahead in 0..slots {
        let at = first.wrapping_add(ahead);
        marks[(at & (slots - 1)) as usize] = fresh_mark(at, slots);
    }
    marks
}

/// The initial words of `struct dbl_queue_state` for a queue with these running counts.
pub(crate) fn state_words(slot: u32, completion: u32) -> [u32; 128] {
    let mut words = [0; 128];
    // reserved, rung, completed, cq_index
    for (at, value) in [(0, slot), (33, slot), (64, slot), (97, completion)] {
        words[at] = value;
    }
    words
}

/// What kernels and this process share of a device-owned queue.
#[derive(Debug)]
pub(crate) struct DeviceQueueState {
    /// On a page of its own, for GPUs to map.
    control: PageBox<DeviceQueueControl>,
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
    /// `slots`, a power of two, and how many of them may be in flight; the running counts of slots and of completions that the queue begins with.
    pub(super) fn new(
        (slots, capacity): (u32, u32),
        (first, first_completion): (u32, u32),
        rings: bool,
        flags: Option<SubmissionFlags>,
    ) -> Result<DeviceQueueState> {
        let control = PageBox::new(DeviceQueueControl::default)?;
        control.host.completed.store(first, Ordering::Relaxed);
        Ok(DeviceQueueState {
            control,
            flags,
            slots,
            capacity,
            first,
            first_completion,
            rings,
            held: Mutex::default(),
        })
    }

    /// Holds a region until nothing that kernels have submitted can be in flight any more.
    pub(super) fn hold(&self, region: &Region) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.iter().any(|held| held.is(region)) {
            held.push(region.clone());
        }
    }

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

    /// The code of an operation in a graph of the application that was not executed, and its time limit.
    pub(super) fn replay_failure(&self) -> Option<(i32, u64)> {
        let failed = &self.control.replay;
        match failed.code.load(Ordering::Acquire) {
            0 => None,
            code => Some((code, failed.timeout_ns.load(Ordering::Relaxed))),
        }
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
        let completed = self.control.host.completed.load(Ordering::Relaxed);
        let slots = u32::from(wqe_counter.wrapping_sub(completed as u16)) + 1;
        // One that says more is not of this queue's.
        if slots <= self.capacity {
            // Release: what the device wrote before the completion.
            let completed = completed.wrapping_add(slots);
            self.control
                .host
                .completed
                .store(completed, Ordering::Release);
        }
    }
}

impl FailureListener for DeviceQueueState {
    fn owner_failed(&self) {
        let _ = self.control.host.status.compare_exchange(
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
        held.drain(..).for_each(Region::drop_deferred);
    }
}
