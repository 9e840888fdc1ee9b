//! A send queue as kernels see it.
#![allow(unsafe_code)] // says that it may be a parameter of kernels

use super::OwnedSendQueue;
use crate::Result;

/// `struct doorbell_queue_view` of `include/doorbell/queue.h`: plain values, to be passed to kernels as they are. Valid as long as the
/// [`DeviceQueue`](crate::DeviceQueue).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct QueueView {
    pub(crate) state: u64,
    control: u64,
    pub(crate) marks: u64,
    doorbells: u64,
    ring: u64,
    record: u64,
    uar: [u64; 2],
    completions: u64,
    cq_record: u64,
    slot_mask: u32,
    cqe_mask: u32,
    capacity: u32,
    qpn: u32,
    sink: u64,
    sink_lkey: u32,
    /// 0: any number of threads. Kernels say otherwise.
    mode: u32,
}

const _: () = assert!(size_of::<QueueView>() == 112);

/// Its words.
#[cfg(feature = "cuda")]
pub(super) const VIEW_WORDS: usize = 14;

// SAFETY: plain values without padding.
#[cfg(feature = "cuda")]
unsafe impl cudarc::driver::DeviceRepr for QueueView {}

impl QueueView {
    /// It as the bytes of a kernel's parameter, or of what kernels find in memory.
    pub fn to_bytes(&self) -> [u8; 112] {
        // SAFETY: repr(C), integers of that size together, without padding.
        unsafe { std::mem::transmute(*self) }
    }

    /// As words, to be a parameter of the library's own kernels.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(&self) -> [u64; 14] {
        // SAFETY: repr(C), integers of that size together, without padding.
        unsafe { std::mem::transmute(*self) }
    }

    /// The numbers, without addresses.
    pub(crate) fn new(queue: &OwnedSendQueue) -> QueueView {
        let (slots, capacity) = queue.state().slots();
        QueueView {
            slot_mask: slots - 1,
            cqe_mask: queue.memory().sizes.cqes[0] - 1,
            capacity,
            qpn: queue.qpn(),
            ..QueueView::default()
        }
    }

    /// Where the device writes what additions found that nothing wants to know: 8 bytes.
    pub(crate) fn set_sink(&mut self, address: u64, lkey: u32) {
        self.sink = address;
        self.sink_lkey = lkey;
    }

    /// Fills in where the parts are that lie in this process's memory, as `reach` gives their addresses and lengths another form.
    pub(crate) fn reach(
        &mut self,
        queue: &OwnedSendQueue,
        mut reach: impl FnMut(usize, usize) -> Result<u64>,
    ) -> Result<()> {
        let line = queue.state();
        let memory = queue.memory();
        self.control = reach(std::ptr::from_ref(line.control()).addr(), 4096)?;
        if let Some(flags) = line.flags() {
            let [marks, doorbells] = flags.memory();
            self.marks = reach(marks.0, marks.1)?;
            self.doorbells = reach(doorbells.0, doorbells.1)?;
        }
        self.ring = reach(
            memory.send_ring.addr(),
            memory.sizes.send_wqebbs as usize * 64,
        )?;
        if line.host_rings() {
            return Ok(());
        }
        // The record's second word is the send queue's.
        self.record = reach(memory.record.addr(), 8)? + 4;
        for (place, uar) in self.uar.iter_mut().zip(memory.uar) {
            *place = reach(uar.addr(), 8)?;
        }
        self.completions = reach(memory.cqs[0].addr(), memory.sizes.cqes[0] as usize * 64)?;
        self.cq_record = reach(memory.cq_records[0].addr(), 4)?;
        Ok(())
    }
}
