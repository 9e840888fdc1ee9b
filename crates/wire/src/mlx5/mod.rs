//! The mlx5 queues over ring memory, and the reader of their formats.
//!
//! Writing and reading are two implementations in two languages: the C of `include/doorbell/detail/wqe.h` emits work queue entries, for the host
//! and for kernels alike, and the Rust of [`Wqe`], [`Cqe`] and [`Doorbell`] parses them, for the software NIC and the
//! disassembler. Each is the other's check, and `tests/mlx5dv.rs` holds both against rdma-core's own header.
//!
//! The queues ([`SendQueue`], [`RecvQueue`], [`CqRing`]) know memory and counters only. Whose memory it is, a card's or the software
//! NIC's, they cannot tell.

mod cq_ring;
mod cqe;
mod datagram;
mod limits;
mod posted;
mod recv_queue;
mod request;
mod send_queue;
mod shim;
mod syndrome;
mod window;
mod wqe_parse;
mod wqe_text;

pub use cq_ring::{CqRing, CqRingConfig, RELEASED_VENDOR_SYNDROME, is_synthetic};
pub use cqe::{CQE_BYTES, Cqe, CqeOpcode};
pub use datagram::{Datagram, DatagramSegment};
pub use posted::{Commit, DoorbellStores, Posted};
pub use recv_queue::{RecvCommit, RecvPosted, RecvQueue, RecvQueueConfig};
pub use request::{DataSegment, FenceMode, Opcode, Payload, SEGMENT_BYTES_MAX, SendRequest};
pub use send_queue::{SendQueue, SendQueueConfig};
#[doc(hidden)]
pub use shim::layout;
pub use syndrome::Syndrome;
pub use window::{WindowOpening, WindowUpdate};
pub use wqe_parse::{
    ControlSegment, Doorbell, PayloadSegments, RemoteAtomic, RemoteSegment, Segment, WQEBB_BYTES,
    Wqe, parse_recv,
};
