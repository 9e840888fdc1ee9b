//! Limits of the device: the values that it reports and that commands are checked against.

use crate::device::MAX_MESSAGE_BYTES;

/// WQEBBs of a send queue, and entries of a receive queue.
pub(in crate::doors) const QP_WQES: u32 = 1 << 15;
/// Entries of a shared receive queue; one is never used.
pub(in crate::doors) const SRQ_WQES: u32 = 1 << 15;
/// Entries of a completion queue.
pub(in crate::doors) const CQES: u32 = 1 << 22;
/// Bytes of the longest send request and of the longest receive.
pub(in crate::doors) const SEND_WQE_BYTES: u16 = 1024;
pub(in crate::doors) const RECV_WQE_BYTES: u16 = 512;
pub(in crate::doors) const SEND_SGE: u32 = 30;
pub(in crate::doors) const SRQ_SGE: u32 = 31;
/// Objects of one context.
pub(in crate::doors) const QPS: u32 = 1 << 13;
pub(in crate::doors) const CQS: u32 = 1 << 13;
pub(in crate::doors) const SRQS: u32 = 1 << 13;
pub(in crate::doors) const MRS: u32 = 1 << 15;
pub(in crate::doors) const MWS: u32 = 1 << 15;
pub(in crate::doors) const PDS: u32 = 1 << 15;
pub(in crate::doors) const AHS: u32 = 1 << 15;
pub(in crate::doors) const UARS: u32 = 2048;
/// Memberships in multicast groups.
pub(in crate::doors) const MULTICAST: u32 = 1 << 13;
pub(in crate::doors) const CHANNELS: usize = 1024;
pub(in crate::doors) const ASYNC_CHANNELS: usize = 16;
/// Reads and atomics of a queue pair on their way, in each direction.
pub(in crate::doors) const RD_ATOMIC: u8 = 16;
pub(in crate::doors) const MESSAGE_BYTES: u32 = MAX_MESSAGE_BYTES as u32;
pub(in crate::doors) const COMPLETION_VECTORS: u32 = 1;
pub(in crate::doors) const PKEYS: u16 = 1;
