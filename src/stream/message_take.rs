//! What a kernel is told to take a message out of its slot.

use std::ptr::NonNull;

use super::Attachments;

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
