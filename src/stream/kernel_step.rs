//! What kernels of this library do on a stream of a GPU, where a stream of the host calls its owner.

use std::ptr::NonNull;

use super::Attachments;

/// What is done before the ops of a program.
#[derive(Debug, Clone)]
pub enum KernelStep<'a> {
    /// A message is taken out of its slot, by the kernel that then executes the ops.
    Take(MessageTake<'a>),
    /// Memory is copied and reduced, one after the other, by calls of their own.
    Memory(Vec<MemoryWork<'a>>),
}

/// Work on memory.
#[derive(Debug, Clone)]
pub enum MemoryWork<'a> {
    /// By a copy of the driver's; between memories of the host by a kernel.
    Copy {
        /// Where to.
        into: KernelMemory<'a>,
        /// Where from.
        from: KernelMemory<'a>,
        /// Length.
        len_bytes: u64,
    },
    /// By a kernel: the fields of `struct dbl_reduce` in `cuda/reduce.h`, with memory in the place of addresses.
    Reduce {
        /// Where to.
        into: KernelMemory<'a>,
        /// The first operand.
        first: KernelMemory<'a>,
        /// The second operand, if there is one.
        second: Option<KernelMemory<'a>>,
        /// Length of each.
        len_bytes: u64,
        /// `enum dbl_data_type`.
        data: u32,
        /// `enum dbl_reduce_op`.
        op: u32,
        /// The divisor.
        count: u32,
    },
}

/// Memory that a kernel uses, and the place in it.
#[derive(Debug, Clone, Copy)]
pub struct KernelMemory<'a> {
    /// Where mappings of host memory for a GPU are kept; `None` for memory of another device. If it is of a known context, `start` is its address there.
    pub attachments: Option<&'a Attachments>,
    /// The first byte.
    pub start: NonNull<u8>,
    /// The key of its context, if it is memory of a GPU and that is known.
    pub context: Option<u64>,
    /// Length of the whole memory in bytes.
    pub len_bytes: usize,
    /// Of the place, in bytes.
    pub offset: u64,
}

/// The fields of `struct dbl_take` in `include/doorbell/detail/take.h`, with memory in the place of addresses.
#[derive(Debug, Clone)]
pub struct MessageTake<'a> {
    /// The header, in front of an eager message.
    pub slot: KernelMemory<'a>,
    /// A `struct dbl_taken`.
    pub result: KernelMemory<'a>,
    /// The work request that becomes a read.
    pub read: Option<ReadPlace<'a>>,
    /// Running number of the message that is expected.
    pub number: u32,
    /// The longest message in a slot.
    pub eager_bytes: u32,
    /// Where the message goes, with lengths in bytes.
    pub slices: Vec<(KernelMemory<'a>, u32)>,
}

/// A work request in a send ring.
#[derive(Debug, Clone, Copy)]
pub struct ReadPlace<'a> {
    /// Its WQEBB.
    pub wqe: KernelMemory<'a>,
    /// Its running count.
    pub index: u32,
    /// The queue pair.
    pub qpn: u32,
}
