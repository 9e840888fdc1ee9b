//! What the queues of clients need of their memory.

use crate::device::client::{CqParts, Errno, QpParts, SrqParts};
use crate::device::space::Space;

/// Most entries of a completion queue: the driver counts them in 24 bits, and laps must differ.
const MAX_CQES: u32 = 1 << 22;
/// Most blocks of a send ring, and entries of a receive ring: they are counted in 16 bits.
const MAX_WQES: u32 = 1 << 15;
/// Bytes of a receive WQE.
const STRIDES: std::ops::RangeInclusive<u32> = 16..=1024;
/// A range of a client's memory that a queue needs. All of it is looked at before anything is made of it: in this process an
/// address is a pointer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    pub(crate) addr: u64,
    pub(crate) len_bytes: u64,
    pub(crate) align: u64,
    pub(crate) writable: bool,
}

impl Need {
    /// # Errors
    /// EINVAL if it is not aligned, EFAULT if it is not mapped.
    pub(crate) fn check(&self, space: Space) -> Result<(), Errno> {
        if !self.addr.is_multiple_of(self.align) {
            return Err(libc::EINVAL);
        }
        space
            .check(self.addr, self.len_bytes, self.writable)
            .map_err(|_| libc::EFAULT)
    }
}

fn is_size(size: u32, max: u32) -> bool {
    size.is_power_of_two() && size <= max
}

impl CqParts {
    /// What must be there of a ring.
    pub(crate) fn ring_need(ring: u64, cqes: u32, cqe_bytes: u32) -> Result<Need, Errno> {
        if !is_size(cqes, MAX_CQES) || !matches!(cqe_bytes, 64 | 128) {
            return Err(libc::EINVAL);
        }
        Ok(Need {
            addr: ring,
            len_bytes: u64::from(cqes) * u64::from(cqe_bytes),
            align: 64,
            writable: true,
        })
    }

    pub(crate) fn record_need(&self) -> Need {
        Need {
            addr: self.record,
            len_bytes: 8,
            align: 8,
            writable: true,
        }
    }
}

impl SrqParts {
    pub(crate) fn needs(&self) -> Result<[Need; 2], Errno> {
        // A next segment, and a data segment at least.
        let stride = STRIDES.contains(&self.stride_bytes) && self.stride_bytes >= 32;
        if !is_size(self.wqes, MAX_WQES) || !self.stride_bytes.is_power_of_two() || !stride {
            return Err(libc::EINVAL);
        }
        let ring = Need {
            addr: self.ring,
            len_bytes: u64::from(self.wqes) * u64::from(self.stride_bytes),
            align: 16,
            writable: false,
        };
        Ok([ring, record_need(self.record, 4)])
    }
}

impl QpParts {
    pub(crate) fn needs(&self) -> Result<[Need; 3], Errno> {
        let size = |size, max| size == 0 || is_size(size, max);
        let stride =
            STRIDES.contains(&self.recv_stride_bytes) && self.recv_stride_bytes.is_power_of_two();
        if !size(self.send_wqebbs, MAX_WQES)
            || !size(self.recv_wqes, MAX_WQES)
            || (self.recv_wqes > 0 && (!stride || self.srq.is_some()))
        {
            return Err(libc::EINVAL);
        }
        let ring = |addr, len_bytes, align| Need {
            addr,
            len_bytes,
            align: if len_bytes == 0 { 1 } else { align },
            writable: false,
        };
        let recv_bytes = u64::from(self.recv_wqes) * u64::from(self.recv_stride_bytes);
        Ok([
            ring(self.send_ring, u64::from(self.send_wqebbs) * 64, 64),
            ring(self.recv_ring, recv_bytes, 16),
            record_need(self.record, 8),
        ])
    }
}

fn record_need(addr: u64, len_bytes: u64) -> Need {
    Need {
        addr,
        len_bytes,
        align: 4,
        writable: false,
    }
}
