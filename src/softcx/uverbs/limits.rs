//! What the device has, as it is told and as it is checked.

/// WQEBBs of a send queue, and entries of a receive queue.
pub(super) const QP_WQES: u32 = 1 << 15;
/// Entries of a shared receive queue; one is never used.
pub(super) const SRQ_WQES: u32 = 1 << 15;
/// Entries of a completion queue.
pub(super) const CQES: u32 = 1 << 22;
/// Bytes of the longest send request and of the longest receive.
pub(super) const SEND_WQE_BYTES: u16 = 1024;
pub(super) const RECV_WQE_BYTES: u16 = 512;
pub(super) const SEND_SGE: u32 = 30;
pub(super) const SRQ_SGE: u32 = 31;
/// Objects.
pub(super) const QPS: u32 = 1 << 13;
pub(super) const CQS: u32 = 1 << 13;
pub(super) const SRQS: u32 = 1 << 13;
pub(super) const MRS: u32 = 1 << 15;
pub(super) const MWS: u32 = 1 << 15;
pub(super) const PDS: u32 = 1 << 15;
pub(super) const AHS: u32 = 1 << 15;
pub(super) const CHANNELS: usize = 1024;
pub(super) const ASYNC_CHANNELS: usize = 16;
/// Reads and atomics of a queue pair on their way, in each direction.
pub(super) const RD_ATOMIC: u8 = 16;
pub(super) const MESSAGE_BYTES: u32 = 1 << 30;
pub(super) const COMPLETION_VECTORS: u32 = 1;
pub(super) const PKEYS: u16 = 1;
