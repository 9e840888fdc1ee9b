//! What a queue pair is created with.

use std::sync::Arc;

use crate::device::client::{EventSink, Transport};
use crate::device::dma::{DmaRing, RecordWord, UarRegister};

/// The memory and the numbers with which a queue pair is created.
#[derive(Debug)]
pub(crate) struct QpSetup {
    pub(crate) qpn: u32,
    pub(crate) transport: Transport,
    pub(crate) pd: u32,
    /// Put into every CQE.
    pub(crate) user_index: u32,
    /// The shared receive queue from which it takes, instead of its own.
    pub(crate) srq: Option<usize>,
    /// Receives the asynchronous events of the queue pair. The owner of an embedded device reads [`QpStatus`](super::QpStatus) instead.
    pub(crate) events: Option<Arc<dyn EventSink>>,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) send_ring: DmaRing,
    pub(crate) send_record: RecordWord,
    pub(crate) recv_ring: DmaRing,
    pub(crate) recv_wqes: u32,
    pub(crate) recv_stride_bytes: u32,
    pub(crate) recv_record: RecordWord,
    /// Its own registers, or none if it is one of many on a page.
    pub(crate) uar: Option<[UarRegister; 2]>,
    /// That page, then.
    pub(crate) page: usize,
    /// Its own multicast does not come back to it.
    pub(crate) blocks_loopback: bool,
}
