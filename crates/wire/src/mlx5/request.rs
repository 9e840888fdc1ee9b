//! Work requests: what is to be sent, before it is bytes.

/// The longest piece of memory in a request, in bytes: the highest bit of the length marks inline data (mlx5dv.h, `MLX5_INLINE_SEG`).
pub const SEGMENT_BYTES_MAX: u32 = 0x7fff_ffff;

/// What a work request does (mlx5dv.h, `MLX5_OPCODE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Opcode {
    /// Nothing; takes its place in the ring.
    Nop = 0x00,
    /// Sends, and closes a memory window of the remote side.
    SendInval = 0x01,
    /// Writes to remote memory; the remote side does not notice.
    RdmaWrite = 0x08,
    /// Writes to remote memory and consumes a receive there, with immediate data.
    RdmaWriteImm = 0x09,
    /// Sends to the next receive of the remote side.
    Send = 0x0a,
    /// Sends, with immediate data.
    SendImm = 0x0b,
    /// Reads from remote memory.
    RdmaRead = 0x10,
    /// Compares and swaps 8 remote bytes; the old value comes back.
    AtomicCs = 0x11,
    /// Adds to 8 remote bytes; the old value comes back.
    AtomicFa = 0x12,
}

impl Opcode {
    /// The opcode of that number, if the library knows it.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            0x00 => Self::Nop,
            0x01 => Self::SendInval,
            0x08 => Self::RdmaWrite,
            0x09 => Self::RdmaWriteImm,
            0x0a => Self::Send,
            0x0b => Self::SendImm,
            0x10 => Self::RdmaRead,
            0x11 => Self::AtomicCs,
            0x12 => Self::AtomicFa,
            _ => return None,
        })
    }

    /// The name as in verbs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nop => "NOP",
            Self::SendInval => "SEND_INVAL",
            Self::RdmaWrite => "RDMA_WRITE",
            Self::RdmaWriteImm => "RDMA_WRITE_IMM",
            Self::Send => "SEND",
            Self::SendImm => "SEND_IMM",
            Self::RdmaRead => "RDMA_READ",
            Self::AtomicCs => "ATOMIC_CS",
            Self::AtomicFa => "ATOMIC_FA",
        }
    }

    /// Whether it names remote memory.
    #[inline]
    pub const fn has_remote(self) -> bool {
        matches!(
            self,
            Self::RdmaWrite | Self::RdmaWriteImm | Self::RdmaRead | Self::AtomicCs | Self::AtomicFa
        )
    }

    /// Whether it is one of the two atomics.
    #[inline]
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::AtomicCs | Self::AtomicFa)
    }

    /// Whether it carries immediate data, or the key to close in its place.
    #[inline]
    pub const fn has_imm(self) -> bool {
        matches!(self, Self::RdmaWriteImm | Self::SendImm | Self::SendInval)
    }

    /// Whether its local memory is where data comes to, not from.
    #[inline]
    pub const fn is_fetch(self) -> bool {
        matches!(self, Self::RdmaRead | Self::AtomicCs | Self::AtomicFa)
    }
}

/// A piece of local memory (mlx5dv.h, `struct mlx5_wqe_data_seg`, in host byte order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct DataSegment {
    /// Length in bytes, at most [`SEGMENT_BYTES_MAX`]. Pieces of length 0 are left out of the WQE.
    pub len_bytes: u32,
    /// The local key of the region.
    pub lkey: u32,
    /// The address, as registered.
    pub addr: u64,
}

/// What a request carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Local memory, gathered (or scattered to, for a read) in order.
    Segments(&'a [DataSegment]),
    /// Bytes that are copied into the WQE itself.
    Inline(&'a [u8]),
}

/// What a work request waits for before it begins: the fence mode of its control segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum FenceMode {
    /// Nothing.
    #[default]
    None = 0,
    /// All earlier requests (`MLX5_FENCE_MODE_STRONG_ORDERING`): the remote side sees it after all that they wrote. Without this, a device
    /// may place the bytes of two writes in any order, as with adaptive routing and on ConnectX-8.
    All = 0x60,
    /// Earlier reads and atomics (`MLX5_WQE_CTRL_FENCE`).
    Reads = 0x80,
}

/// A work request for a send queue. One constructor an opcode, with what that opcode cannot do without; the rest by setters.
///
/// ```
/// use doorbell_wire::mlx5::{DataSegment, SendRequest};
///
/// let local = [DataSegment { len_bytes: 64, lkey: 0x1234, addr: 0x7000_0000 }];
/// let request = SendRequest::write(0x9000_0000, 0x5678).segments(&local).signaled(true);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest<'a> {
    /// What to do.
    pub opcode: Opcode,
    /// Whether a CQE is written on success. On failure one is written anyway.
    pub signaled: bool,
    /// Whether the remote side's CQE counts as solicited.
    pub solicited: bool,
    /// What it waits for.
    pub fence: FenceMode,
    /// Immediate data in host order, for the opcodes that have it.
    pub imm: u32,
    /// The remote address, for the opcodes that have one.
    pub remote_addr: u64,
    /// The key of the remote region.
    pub rkey: u32,
    /// The new value of a compare-swap, or what a fetch-add adds.
    pub swap_or_add: u64,
    /// What a compare-swap compares with.
    pub compare: u64,
    /// The data.
    pub payload: Payload<'a>,
}

impl<'a> SendRequest<'a> {
    const fn new(opcode: Opcode, remote_addr: u64, rkey: u32) -> Self {
        Self {
            opcode,
            signaled: false,
            solicited: false,
            fence: FenceMode::None,
            imm: 0,
            remote_addr,
            rkey,
            swap_or_add: 0,
            compare: 0,
            payload: Payload::Segments(&[]),
        }
    }

    /// Does nothing.
    #[inline]
    pub const fn nop() -> Self {
        Self::new(Opcode::Nop, 0, 0)
    }

    /// Sends to the remote side's next receive.
    #[inline]
    pub const fn send() -> Self {
        Self::new(Opcode::Send, 0, 0)
    }

    /// Sends to the remote side's next receive, with immediate data.
    #[inline]
    pub const fn send_imm(imm: u32) -> Self {
        Self::new(Opcode::SendImm, 0, 0).imm(imm)
    }

    /// Sends to the remote side's next receive, and closes its memory window of this key.
    #[inline]
    pub const fn send_inval(rkey: u32) -> Self {
        Self::new(Opcode::SendInval, 0, 0).imm(rkey)
    }

    /// Writes to remote memory.
    #[inline]
    pub const fn write(remote_addr: u64, rkey: u32) -> Self {
        Self::new(Opcode::RdmaWrite, remote_addr, rkey)
    }

    /// Writes to remote memory, with immediate data for a receive.
    #[inline]
    pub const fn write_imm(remote_addr: u64, rkey: u32, imm: u32) -> Self {
        Self::new(Opcode::RdmaWriteImm, remote_addr, rkey).imm(imm)
    }

    /// Reads from remote memory.
    #[inline]
    pub const fn read(remote_addr: u64, rkey: u32) -> Self {
        Self::new(Opcode::RdmaRead, remote_addr, rkey)
    }

    /// Puts `swap` in place of `compare` in 8 remote bytes. Needs one segment of 8 bytes for the old value.
    #[inline]
    pub const fn compare_swap(remote_addr: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        let mut request = Self::new(Opcode::AtomicCs, remote_addr, rkey);
        request.compare = compare;
        request.swap_or_add = swap;
        request
    }

    /// Adds to 8 remote bytes. Needs one segment of 8 bytes for the old value.
    #[inline]
    pub const fn fetch_add(remote_addr: u64, rkey: u32, add: u64) -> Self {
        let mut request = Self::new(Opcode::AtomicFa, remote_addr, rkey);
        request.swap_or_add = add;
        request
    }

    /// Takes the data from, or to, local memory.
    #[inline]
    pub const fn segments(mut self, segments: &'a [DataSegment]) -> Self {
        self.payload = Payload::Segments(segments);
        self
    }

    /// Takes the data from these bytes, now: they may be reused as soon as the request is posted.
    #[inline]
    pub const fn inline(mut self, bytes: &'a [u8]) -> Self {
        self.payload = Payload::Inline(bytes);
        self
    }

    /// Whether success is reported by a CQE.
    #[inline]
    pub const fn signaled(mut self, signaled: bool) -> Self {
        self.signaled = signaled;
        self
    }

    /// Whether the remote CQE is solicited.
    #[inline]
    pub const fn solicited(mut self, solicited: bool) -> Self {
        self.solicited = solicited;
        self
    }

    /// Whether to wait for earlier reads and atomics.
    #[inline]
    pub const fn fence(mut self, fence: bool) -> Self {
        self.fence = match (self.fence, fence) {
            (FenceMode::All, _) => FenceMode::All,
            (_, true) => FenceMode::Reads,
            (_, false) => FenceMode::None,
        };
        self
    }

    /// Whether to wait for all earlier requests: see [`FenceMode::All`], which [`SendRequest::fence`] does not change.
    #[inline]
    pub const fn ordered(mut self, ordered: bool) -> Self {
        self.fence = match (self.fence, ordered) {
            (_, true) => FenceMode::All,
            (FenceMode::All, false) => FenceMode::None,
            (other, false) => other,
        };
        self
    }

    /// Sets the immediate data, which only the opcodes with immediate data send.
    #[inline]
    pub const fn imm(mut self, imm: u32) -> Self {
        self.imm = imm;
        self
    }
}
