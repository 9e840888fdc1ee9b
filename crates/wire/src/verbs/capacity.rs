//! What a queue pair can hold, and what it can do.

/// The service of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Transport {
    /// A reliable connection (RC): one peer, messages of any length, RDMA.
    #[default]
    Rc,
    /// Unreliable datagrams (UD): each send names its receiver, and has at most one packet. A datagram arrives once, or is lost.
    Ud,
}

/// What a queue pair has to hold, as `ibv_qp_cap` says it to verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// The service.
    pub transport: Transport,
    /// Sends in flight.
    pub send_depth: u32,
    /// Receives in flight.
    pub recv_depth: u32,
    /// Pieces of memory of a work request.
    pub segments: u32,
    /// Bytes that a send carries in itself.
    pub inline_bytes: u32,
}

/// What not every device can do, or not as much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Compare-and-swap, and fetch-and-add.
    pub atomics: bool,
    /// RDMA reads.
    pub reads: bool,
    /// The longest message, in bytes (`max_msg_sz` of the port).
    pub message_bytes: u32,
}
