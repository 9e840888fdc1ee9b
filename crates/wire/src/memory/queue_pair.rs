//! The memory of a queue pair, as a provider library would lay it out: rings, doorbell records, completion queues, UAR page.
#![allow(unsafe_code)] // addresses that two threads use

use crate::memory::{PAGE_BYTES, Pages};
use crate::{Error, Result};

/// Offsets of the two doorbell registers of a UAR page, each the start of a 256-byte BlueFlame buffer (mlx5 PRM; the
/// offsets are `MLX5_BF_OFFSET` and the alternate buffer in rdma-core's provider).
const UAR_REGISTERS: [usize; 2] = [0x800, 0x900];

/// Sizes of a queue pair; all counts are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairSizes {
    /// Protection domain.
    pub pd: u32,
    /// 64-byte blocks of the send ring, 1 to 32768.
    pub send_wqebbs: u32,
    /// Receives, 1 to 32768.
    pub recv_wqes: u32,
    /// Bytes of a receive WQE, 16 to 1024.
    pub recv_stride_bytes: u32,
    /// Entries of the send completion queue, 1 to 65536.
    pub send_cqes: u32,
    /// Entries of the receive completion queue, 1 to 65536.
    pub recv_cqes: u32,
}

impl QueuePairSizes {
    fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min, max| {
            if u64::from(value) < min || u64::from(value) > max {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min,
                    max,
                });
            }
            if !value.is_power_of_two() {
                return Err(Error::Alignment {
                    argument,
                    value: value.into(),
                    align: u64::from(value.next_power_of_two()),
                });
            }
            Ok(())
        };
        range("send_wqebbs", self.send_wqebbs, 1, 32768)?;
        range("recv_wqes", self.recv_wqes, 1, 32768)?;
        range("recv_stride_bytes", self.recv_stride_bytes, 16, 1024)?;
        range("send_cqes", self.send_cqes, 1, 65536)?;
        range("recv_cqes", self.recv_cqes, 1, 65536)
    }
}

/// Where the parts of a queue pair lie; valid while its pages live.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairMemory {
    /// Send ring.
    pub send_ring: *mut u8,
    /// Receive ring.
    pub recv_ring: *mut u8,
    /// Doorbell record: `[0]` receive, `[1]` send.
    pub record: *mut u32,
    /// The UAR's two BlueFlame buffers of 256 bytes; the first 8 bytes of each are the doorbell register.
    pub uar: [*mut u8; 2],
    /// Ring of the send completion queue.
    pub send_cq: *mut u8,
    /// Ring of the receive completion queue.
    pub recv_cq: *mut u8,
    /// Consumer record of the send completion queue.
    pub send_cq_record: *mut u32,
    /// Consumer record of the receive completion queue.
    pub recv_cq_record: *mut u32,
    /// One word an entry, for the driver's own use.
    pub send_marks: *mut u32,
    /// One word an entry, for the driver's own use.
    pub recv_marks: *mut u32,
}

// SAFETY: addresses only; who uses them where is for the unsafe code that does.
unsafe impl Send for QueuePairMemory {}
// SAFETY: as above.
unsafe impl Sync for QueuePairMemory {}

impl QueuePairMemory {
    /// Fresh memory for the parts of a queue pair of these sizes, which is in the pages.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] naming the size; [`Error::System`] if there is not so much.
    pub fn new(config: &QueuePairSizes) -> Result<(Pages, QueuePairMemory)> {
        config.check()?;
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(64);
            start
        };
        // As in mlx5: the receive ring first, the send ring behind it.
        let recv_ring = place((config.recv_wqes * config.recv_stride_bytes) as usize);
        let send_ring = place(config.send_wqebbs as usize * 64);
        let send_cq = place(config.send_cqes as usize * 64);
        let recv_cq = place(config.recv_cqes as usize * 64);
        let send_marks = place(config.send_cqes as usize * 4);
        let recv_marks = place(config.recv_cqes as usize * 4);
        // Each record on a cache line of its own: the device reads them while the driver writes its neighbours.
        let record = place(8);
        let send_cq_record = place(8);
        let recv_cq_record = place(8);
        let uar = end.next_multiple_of(PAGE_BYTES);
        let pages = Pages::new(uar + PAGE_BYTES)?;
        let memory = QueuePairMemory {
            send_ring: pages.at(send_ring),
            recv_ring: pages.at(recv_ring),
            record: pages.at(record).cast(),
            uar: UAR_REGISTERS.map(|register| pages.at(uar + register)),
            send_cq: pages.at(send_cq),
            recv_cq: pages.at(recv_cq),
            send_cq_record: pages.at(send_cq_record).cast(),
            recv_cq_record: pages.at(recv_cq_record).cast(),
            send_marks: pages.at(send_marks).cast(),
            recv_marks: pages.at(recv_marks).cast(),
        };
        Ok((pages, memory))
    }
}
