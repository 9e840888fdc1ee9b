//! The device's side of a shared receive queue.

use std::sync::Arc;

use crate::device::client::{DeviceEvent, EventSink};
use crate::device::dma::{DmaRing, RecordWord};
use crate::device::gather::Gather;
use crate::device::space::AccessFault;

/// A shared receive queue. Its entries are a chain: each begins with the index of the one that is to be taken after it
/// (mlx5dv.h, `struct mlx5_wqe_srq_next_seg`), because they come back to the driver in another order than they were taken.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) srqn: u32,
    pub(crate) pd: u32,
    pub(crate) ring: DmaRing,
    pub(crate) wqes: u32,
    pub(crate) stride_bytes: u32,
    pub(crate) record: RecordWord,
    /// Fewer posted receives than this are an event, once; 0 for none.
    pub(crate) limit: u32,
    pub(crate) events: Arc<dyn EventSink>,
    /// Queue pairs that take from it.
    pub(crate) users: u32,
    pub(crate) position: SrqPosition,
}

/// How far the device has read the queue.
#[derive(Debug, Default)]
pub(crate) struct SrqPosition {
    next: u16,
    taken: u16,
    posted: u16,
    broken: bool,
}

impl Srq {
    /// Takes the next posted receive: its index and its room in bytes. Its segments are in the gather afterwards.
    pub(crate) fn take(&mut self, gather: &mut Gather) -> Option<(u16, u64)> {
        if self.position.broken || !self.has_posted() {
            return None;
        }
        let index = self.position.next;
        let Ok((capacity, next)) = self.load(gather, index) else {
            self.position.broken = true;
            return None;
        };
        self.position.next = next;
        self.position.taken = self.position.taken.wrapping_add(1);
        self.check_limit();
        Some((index, capacity))
    }

    /// Reads a taken receive once more: its room in bytes, and the index of the next.
    ///
    /// # Errors
    /// [`AccessFault`] if the ring cannot be read.
    pub(crate) fn load(&self, gather: &mut Gather, index: u16) -> Result<(u64, u16), AccessFault> {
        let slot = (u32::from(index) & self.wqes.wrapping_sub(1)) as usize;
        let offset = slot * self.stride_bytes as usize;
        gather.load_shared_recv(&self.ring, offset, self.stride_bytes)
    }

    /// Whether its memory can no longer be read.
    pub(crate) fn is_broken(&self) -> bool {
        self.position.broken
    }

    /// Sets the limit, and reports at once if it is undercut already.
    pub(crate) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
        self.check_limit();
    }

    fn waiting(&self) -> u32 {
        let waiting = u32::from(self.position.posted.wrapping_sub(self.position.taken));
        // More than the ring holds is garbage.
        if waiting > self.wqes { 0 } else { waiting }
    }

    /// Reads the record only when the posted receives are used up.
    fn has_posted(&mut self) -> bool {
        self.waiting() > 0 || (self.look() && self.waiting() > 0)
    }

    fn look(&mut self) -> bool {
        match self.record.load() {
            Ok(posted) => self.position.posted = posted as u16,
            Err(AccessFault) => self.position.broken = true,
        }
        !self.position.broken
    }

    fn check_limit(&mut self) {
        if self.limit > 0
            && self.waiting() < self.limit
            && self.look()
            && self.waiting() < self.limit
        {
            self.limit = 0;
            self.events
                .event(DeviceEvent::SrqLimitReached { srqn: self.srqn });
        }
    }
}
