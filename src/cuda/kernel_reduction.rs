//! What the kernel of a reduction is launched with.

use cudarc::driver::sys::CUdeviceptr;

/// Threads of a block of the reduction.
pub(super) const REDUCE_THREADS: u32 = 256;
/// What a thread works on at a time: DBL_REDUCE_BYTES of `cuda/reduce.h`.
const PIECE_BYTES: u64 = 16;
/// The blocks for a long reduction: enough for the bandwidth of the host's memory, few beside the kernels of an application.
const BLOCKS_MAX: u64 = 32;

/// DBL_U8 and DBL_COPY of `cuda/reduce.h`.
pub(super) const COPY: (u32, u32) = (6, 4);

/// `struct dbl_reduce` of `cuda/reduce.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelReduction {
    pub(super) into: CUdeviceptr,
    pub(super) first: CUdeviceptr,
    pub(super) second: CUdeviceptr,
    pub(super) len_bytes: u64,
    pub(super) data: u32,
    pub(super) op: u32,
    pub(super) count: u32,
    pub(super) reserved: u32,
}

const _: () = assert!(size_of::<KernelReduction>() == 48);

impl KernelReduction {
    /// The blocks that it is launched with.
    pub(super) fn blocks(&self) -> u32 {
        let block_bytes = PIECE_BYTES * u64::from(REDUCE_THREADS);
        self.len_bytes.div_ceil(block_bytes).clamp(1, BLOCKS_MAX) as u32
    }
}
