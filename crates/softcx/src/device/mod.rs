//! The software ConnectX: a NIC that consumes the same rings, doorbell records and UAR registers as a card would.
//!
//! [`Device`] owns an engine thread. Threads that poll for a completion also do the device's work ([`Device::progress`]). On a machine with few
//! cores this keeps spinning threads from starving the engine.
//!
//! Layers, from the memory inwards: `dma` (every access to shared memory), `space`, `foreign` and `copies` (whose memory it is,
//! what reaches another device's, and bytes from one to the other), `gather` and `keys` (what a WQE's segments name, and whether they may), `qp` with `requester` and
//! `responder` (the transports), `wire`, `inbox` and `udp` (packets on their way: in one device, between processes, and between hosts), `roce` (their
//! bytes on an Ethernet),
//! `core` (one turn of work, without clock or thread), and `engine` (the thread).

pub(crate) mod capability;
mod capture;
pub(crate) mod client;
pub(crate) mod commands;
mod congestion;
mod copies;
mod core;
mod cq;
mod cursor;
mod datagram_paths;
mod dma;
mod engine;
pub(crate) mod fabric;
mod faults;
pub(crate) mod file_mapping;
mod foreign;
mod gather;
mod handle;
mod inbox;
mod keys;
pub(crate) mod management;
mod mapping;
mod options;
mod pace;
mod packet;
mod pinned;
mod port_id;
mod proc_mem;
mod qp;
mod queue_pair;
mod requester;
mod responder;
pub(crate) mod roce;
pub(crate) mod space;
mod srq;
#[cfg(all(test, not(loom)))]
mod tests;
mod trace;
mod transitions;
mod udp;
mod wake_word;
mod wire;

pub use commands::{CommandKind, CommandKinds};
pub use dma::Pages;
pub use doorbell_wire::memory::{QueuePairMemory, QueuePairSizes};
pub use faults::{FAULT, Faults};
pub use foreign::{Foreign, ForeignRegion, Move};
pub use handle::Device;
pub(crate) use inbox::{file_error, random};
pub use keys::Access;
pub use options::{DeviceOptions, Function, LinkLayer, WIRE, WireKind};
pub use packet::{AckCode, HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, PacketKind, Service, flag};
pub use port_id::PortId;
pub use qp::{Attributes, Counters, QpStatus, State};
pub use queue_pair::{QueuePair, RemoteQueuePair};
pub use requester::MAX_MESSAGE_BYTES;
pub use roce::{BadFrame, RoceFrame};
pub use space::{AccessFault, Span};
pub(crate) use udp::UdpInterface;
