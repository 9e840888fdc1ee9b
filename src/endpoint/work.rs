//! Work requests as applications state them.

use crate::endpoint::AddressHandle;
use crate::mlx5::{FenceMode, Opcode};
use crate::region::{RemoteSlice, Slice};

/// What a work request carries.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data<'a> {
    Slices(&'a [Slice<'a>]),
    Inline(&'a [u8]),
}

/// Where a send of a UD endpoint goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Receiver<'a> {
    pub(super) handle: &'a AddressHandle,
    pub(super) qpn: u32,
    pub(super) qkey: u32,
}

/// Of a request that reaches no memory of the peer's.
const NO_REMOTE: RemoteSlice = RemoteSlice::at(0, 0);

/// A work request for the send queue. Each operation has a constructor with its required arguments; setters add the optional ones.
/// Unless said otherwise it is signaled, which is what a wait on the stream needs.
///
/// ```
/// use doorbell::{Access, Device, Region, Work};
///
/// let domain = Device::open("softcx")?.protection_domain();
/// let region = Region::alloc(&domain, 4096, Access::ALL)?;
/// let slices = [region.slice(0, 64)?];
/// let work = Work::send(&slices).wr_id(7).signaled(false);
/// # Ok::<(), doorbell::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Work<'a> {
    pub(super) opcode: Opcode,
    pub(super) data: Data<'a>,
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    pub(super) fence: FenceMode,
    pub(super) imm: u32,
    /// Immediate data were given to an operation that carries none.
    pub(super) imm_unused: bool,
    pub(super) remote: RemoteSlice,
    pub(super) operand: u64,
    pub(super) compare: u64,
    /// Of a send of a UD endpoint.
    pub(super) receiver: Option<Receiver<'a>>,
}

impl<'a> Work<'a> {
    const fn new(opcode: Opcode, data: Data<'a>, remote: RemoteSlice) -> Work<'a> {
        Work {
            opcode,
            data,
            wr_id: 0,
            signaled: true,
            solicited: false,
            fence: FenceMode::None,
            imm: 0,
            imm_unused: false,
            remote,
            operand: 0,
            compare: 0,
            receiver: None,
        }
    }

    /// Sends the slices, one after the other, to the peer's next receive.
    pub const fn send(slices: &'a [Slice<'a>]) -> Work<'a> {
        Work::new(Opcode::Send, Data::Slices(slices), NO_REMOTE)
    }

    /// Sends bytes that are copied now, into the work request itself.
    pub const fn send_inline(bytes: &'a [u8]) -> Work<'a> {
        Work::new(Opcode::Send, Data::Inline(bytes), NO_REMOTE)
    }

    /// Writes the slices, one after the other, to `remote`.
    pub const fn write(slices: &'a [Slice<'a>], remote: RemoteSlice) -> Work<'a> {
        Work::new(Opcode::RdmaWrite, Data::Slices(slices), remote)
    }

    /// Writes bytes that are copied now, into the work request itself.
    pub const fn write_inline(bytes: &'a [u8], remote: RemoteSlice) -> Work<'a> {
        Work::new(Opcode::RdmaWrite, Data::Inline(bytes), remote)
    }

    /// Reads from `remote` as much as the slices hold, and fills them in turn.
    pub const fn read(slices: &'a [Slice<'a>], remote: RemoteSlice) -> Work<'a> {
        Work::new(Opcode::RdmaRead, Data::Slices(slices), remote)
    }

    /// Replaces the 8 bytes at `remote` by `swap` if they equal `compare`. The old value goes to the one slice,
    /// of 8 bytes. Values are in host byte order; the address is a multiple of 8.
    pub const fn compare_swap(
        result: &'a [Slice<'a>],
        remote: RemoteSlice,
        compare: u64,
        swap: u64,
    ) -> Work<'a> {
        let mut work = Work::new(Opcode::AtomicCs, Data::Slices(result), remote);
        work.compare = compare;
        work.operand = swap;
        work
    }

    /// Adds `add` to the 8 bytes at `remote`. The old value goes to the one slice, of 8 bytes. Values are in host byte
    /// order; the address is a multiple of 8.
    pub const fn fetch_add(result: &'a [Slice<'a>], remote: RemoteSlice, add: u64) -> Work<'a> {
        let mut work = Work::new(Opcode::AtomicFa, Data::Slices(result), remote);
        work.operand = add;
        work
    }

    /// A NOP: it completes in order and transfers nothing.
    pub const fn nop() -> Work<'a> {
        Work::new(Opcode::Nop, Data::Slices(&[]), NO_REMOTE)
    }

    /// Where a send of a UD endpoint goes: the port, the number of the queue pair there ([`Endpoint::qpn`](crate::Endpoint::qpn),
    /// [`Address::qpn`](crate::Address::qpn)), and its queue key. A datagram with another key than its receiver's is dropped. If the highest bit of `qkey` is set, the
    /// datagram has the queue key of the endpoint that sends it. Each send of a UD endpoint needs this, and no other work request may have it.
    pub const fn to(mut self, handle: &'a AddressHandle, qpn: u32, qkey: u32) -> Work<'a> {
        self.receiver = Some(Receiver { handle, qpn, qkey });
        self
    }

    /// A number of the application's, which comes back with the completion. 0 if not set.
    pub const fn wr_id(mut self, wr_id: u64) -> Work<'a> {
        self.wr_id = wr_id;
        self
    }

    /// Whether success makes a completion. Failure always does. An unsignaled request is known to be done when a later,
    /// signaled one is.
    pub const fn signaled(mut self, signaled: bool) -> Work<'a> {
        self.signaled = signaled;
        self
    }

    /// Immediate data for the peer's completion; makes a send with immediate of a send, and a write with immediate, which
    /// takes one of the peer's receives, of a write. A post refuses it with any other operation.
    pub const fn imm(mut self, imm: u32) -> Work<'a> {
        self.imm = imm;
        self.opcode = match self.opcode {
            Opcode::Send => Opcode::SendImm,
            Opcode::RdmaWrite => Opcode::RdmaWriteImm,
            other => {
                self.imm_unused = !matches!(other, Opcode::SendImm | Opcode::RdmaWriteImm);
                other
            }
        };
        self
    }

    /// Whether the peer's completion is a solicited one. For sends and writes with immediate data: nothing else makes a completion at the peer.
    pub const fn solicited(mut self, solicited: bool) -> Work<'a> {
        self.solicited = solicited;
        self
    }

    /// Whether the device waits for earlier reads and atomics of this endpoint before it begins.
    pub const fn fence(mut self, fence: bool) -> Work<'a> {
        if !matches!(self.fence, FenceMode::All) {
            self.fence = if fence {
                FenceMode::Reads
            } else {
                FenceMode::None
            };
        }
        self
    }

    /// Whether the peer sees this after all that earlier requests of this endpoint wrote. A write that signals an earlier write by plain
    /// memory needs it: a network with adaptive routing, or a ConnectX-8, may place the bytes of two writes in any order. Sends, immediate
    /// data and atomics come in order without it. The device waits for earlier requests, so it costs a round trip if any is under way.
    pub const fn ordered(mut self, ordered: bool) -> Work<'a> {
        self.fence = match (ordered, self.fence) {
            (true, _) => FenceMode::All,
            (false, FenceMode::All) => FenceMode::None,
            (false, other) => other,
        };
        self
    }
}
