//! Work queue entries, parsed: the reader that the software NIC and the disassembler use. It shares nothing with the emitter but the
//! format, and takes any bytes whatever.

use super::{DataSegment, Datagram, FenceMode, Opcode, WindowUpdate};
use crate::{Error, Result};

/// A basic block of the send ring, in bytes (mlx5dv.h, `MLX5_SEND_WQE_BB`).
pub const WQEBB_BYTES: usize = 64;
/// A segment of a WQE, in bytes: the unit of `ds`.
const SEGMENT_BYTES: usize = 16;
/// mlx5dv.h, `MLX5_INLINE_SEG`.
const INLINE: u32 = 0x8000_0000;
/// mlx5dv.h, `MLX5_INVALID_LKEY`: ends a receive list.
const INVALID_LKEY: u32 = 0x100;

pub(super) fn be32(bytes: &[u8; 16], at: usize) -> u32 {
    (u128::from_be_bytes(*bytes) >> (96 - 8 * at)) as u32
}

pub(super) fn be64(bytes: &[u8; 16], at: usize) -> u64 {
    (u128::from_be_bytes(*bytes) >> (64 - 8 * at)) as u64
}

/// The control segment (mlx5dv.h, `struct mlx5_wqe_ctrl_seg`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlSegment {
    /// The opcode's modifier.
    pub opmod: u8,
    /// The WQEBB count at the WQE's start, modulo 2^16.
    pub index: u16,
    /// The opcode as it stands there.
    pub opcode_raw: u8,
    /// The opcode, if the library knows it.
    pub opcode: Option<Opcode>,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// Length of the WQE in 16-byte segments, this one included. 0 to 63.
    pub ds: u8,
    /// Whether a CQE is asked for (`MLX5_WQE_CTRL_CQ_UPDATE`).
    pub signaled: bool,
    /// Whether the remote CQE is solicited (`MLX5_WQE_CTRL_SOLICITED`).
    pub solicited: bool,
    /// Whether to wait for earlier reads and atomics (`MLX5_WQE_CTRL_FENCE`).
    pub fence: bool,
    /// Whether to go behind all that earlier requests do (`MLX5_FENCE_MODE_STRONG_ORDERING`).
    pub ordered: bool,
    /// The byte with these flags, as it stands there.
    pub fm_ce_se: u8,
    /// Immediate data in host order.
    pub imm: u32,
}

impl ControlSegment {
    fn parse(bytes: &[u8; 16]) -> Self {
        let doorbell = Doorbell::of(be32(bytes, 0), be32(bytes, 4));
        let fm_ce_se = bytes[11];
        Self {
            opmod: bytes[0],
            index: doorbell.index,
            opcode_raw: doorbell.opcode,
            opcode: Opcode::from_raw(doorbell.opcode),
            qpn: doorbell.qpn,
            ds: doorbell.ds,
            // The CQ-update field has two bits; 2 asks for a CQE, 3 for a CQE and an event.
            signaled: fm_ce_se & 0x0c >= 0x08,
            solicited: fm_ce_se & 0x02 != 0,
            fence: fm_ce_se & 0xe0 == FenceMode::Reads as u8,
            ordered: fm_ce_se & 0xe0 == FenceMode::All as u8,
            fm_ce_se,
            imm: be32(bytes, 12),
        }
    }

    /// WQEBBs that the WQE takes: `ds / 4`, rounded up.
    pub const fn wqebbs(&self) -> u32 {
        (self.ds as u32).div_ceil((WQEBB_BYTES / SEGMENT_BYTES) as u32)
    }
}

/// The 64 bits that are stored to the UAR: the first half of a control segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doorbell {
    /// The WQEBB count at the start of the last WQE, modulo 2^16.
    pub index: u16,
    /// Its opcode.
    pub opcode: u8,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// Its length in 16-byte segments.
    pub ds: u8,
}

impl Doorbell {
    /// Reads the doorbell from the 64 bits as a native load gives them.
    pub fn parse(loaded: u64) -> Self {
        let both = u64::from_be_bytes(loaded.to_ne_bytes());
        Self::of((both >> 32) as u32, both as u32)
    }

    fn of(opmod_index_opcode: u32, qpn_ds: u32) -> Self {
        Self {
            index: (opmod_index_opcode >> 8) as u16,
            opcode: opmod_index_opcode as u8,
            qpn: qpn_ds >> 8,
            ds: qpn_ds as u8 & 0x3f,
        }
    }
}

/// Remote memory (mlx5dv.h, `struct mlx5_wqe_raddr_seg`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSegment {
    /// The address.
    pub addr: u64,
    /// The key of the region.
    pub rkey: u32,
}

/// The operands of an atomic (mlx5dv.h, `struct mlx5_wqe_atomic_seg`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteAtomic {
    /// The new value, or what is added.
    pub swap_or_add: u64,
    /// What is compared with.
    pub compare: u64,
}

/// A piece of a WQE's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Local memory.
    Memory(DataSegment),
    /// Bytes in the WQE itself.
    Inline(&'a [u8]),
}

impl Segment<'_> {
    /// Its length in bytes.
    pub fn len_bytes(&self) -> u32 {
        match self {
            Self::Memory(memory) => memory.len_bytes,
            Self::Inline(bytes) => bytes.len() as u32,
        }
    }
}

/// A send WQE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wqe<'a> {
    /// The control segment.
    pub ctrl: ControlSegment,
    /// The remote memory, for the opcodes that have it.
    pub remote: Option<RemoteSegment>,
    /// The operands, for the atomics.
    pub atomic: Option<RemoteAtomic>,
    /// The segments of its address, for a WQE that was read as one of a datagram queue pair.
    address: Option<&'a [[u8; SEGMENT_BYTES]; 3]>,
    /// Those of an update of a memory window, checked.
    update: Option<&'a [[u8; SEGMENT_BYTES]]>,
    /// The segments behind control, remote and atomic, checked.
    payload: &'a [[u8; SEGMENT_BYTES]],
    payload_offset: usize,
    total_len: u64,
}

impl<'a> Wqe<'a> {
    /// Reads the control segment alone, which has the length of the WQE.
    pub fn ctrl(bytes: &[u8; 16]) -> ControlSegment {
        ControlSegment::parse(bytes)
    }

    /// Reads a WQE that lies in one piece. What follows its last segment is not looked at.
    ///
    /// An opcode that the library does not know gives a WQE of its control segment alone.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the bytes are fewer than the WQE says it has, or it lacks a segment that its opcode needs, or an inline
    /// segment is longer than what is left.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        Self::parse_of(bytes, false)
    }

    /// As [`Wqe::parse`], for a WQE of a datagram queue pair: an address stands behind its control segment, and nothing in the WQE
    /// itself says so.
    ///
    /// # Errors
    /// As [`Wqe::parse`], or if the address is missing.
    pub fn parse_datagram(bytes: &'a [u8]) -> Result<Self> {
        Self::parse_of(bytes, true)
    }

    #[inline]
    fn parse_of(bytes: &'a [u8], is_datagram: bool) -> Result<Self> {
        let (segments, _) = bytes.as_chunks::<SEGMENT_BYTES>();
        let Some(control) = segments.first().map(ControlSegment::parse) else {
            return Err(malformed(format!(
                "{} bytes hold no control segment",
                bytes.len()
            )));
        };
        let ds = usize::from(control.ds);
        if ds == 0 {
            return Err(malformed("a length of 0 segments".to_owned()));
        }
        let Some(mut rest) = segments.get(1..ds) else {
            return Err(malformed(format!(
                "{ds} segments announced, {} there",
                segments.len()
            )));
        };
        let mut wqe = Self {
            ctrl: control,
            remote: None,
            atomic: None,
            address: None,
            update: None,
            payload: &[],
            payload_offset: 0,
            total_len: 0,
        };
        if control.opcode_raw == WindowUpdate::OPCODE {
            wqe.update = Some(rest);
            return match wqe.window() {
                Some(_) => Ok(wqe),
                None => Err(malformed("UMR without its segments".to_owned())),
            };
        }
        let Some(opcode) = control.opcode.filter(|opcode| *opcode != Opcode::Nop) else {
            return Ok(wqe);
        };
        if is_datagram {
            let Some((address, behind)) = rest.split_first_chunk::<3>() else {
                return Err(malformed(format!("{} without an address", opcode.name())));
            };
            wqe.address = Some(address);
            rest = behind;
        }
        let mut next = |what: &str| match rest.split_first() {
            Some((first, behind)) => {
                rest = behind;
                Ok(first)
            }
            None => Err(malformed(format!("{} without {what}", opcode.name()))),
        };
        if opcode.has_remote() {
            let segment = next("a remote address")?;
            wqe.remote = Some(RemoteSegment {
                addr: be64(segment, 0),
                rkey: be32(segment, 8),
            });
        }
        if opcode.is_atomic() {
            let segment = next("operands")?;
            wqe.atomic = Some(RemoteAtomic {
                swap_or_add: be64(segment, 0),
                compare: be64(segment, 8),
            });
        }
        wqe.payload = rest;
        wqe.payload_offset = (ds - rest.len()) * SEGMENT_BYTES;
        while let Some((segment, behind)) = split(rest) {
            let Some(segment) = segment else {
                let left = rest.as_flattened().len() - 4;
                return Err(malformed(format!(
                    "inline data longer than the {left} bytes left in the WQE"
                )));
            };
            wqe.total_len += u64::from(segment.len_bytes());
            rest = behind;
        }
        Ok(wqe)
    }

    /// Where it goes, for a WQE that was read as one of a datagram queue pair.
    pub fn datagram(&self) -> Option<Datagram> {
        self.address.map(Datagram::parse)
    }

    /// What it does to a memory window, for UMR.
    pub fn window(&self) -> Option<WindowUpdate> {
        WindowUpdate::parse(self.ctrl.imm, self.update?)
    }

    /// The payload in order.
    pub fn segments(&self) -> PayloadSegments<'a> {
        PayloadSegments {
            rest: self.payload,
            offset: self.payload_offset,
        }
    }

    /// The length of the whole payload in bytes.
    pub fn total_len(&self) -> u64 {
        self.total_len
    }
}

/// The payload of a WQE. See [`Wqe::segments`].
#[derive(Debug, Clone)]
pub struct PayloadSegments<'a> {
    rest: &'a [[u8; SEGMENT_BYTES]],
    offset: usize,
}

impl PayloadSegments<'_> {
    /// Where the next segment starts in the WQE, in bytes.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }
}

impl<'a> Iterator for PayloadSegments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        let (segment, behind) = split(self.rest)?;
        self.offset += (self.rest.len() - behind.len()) * SEGMENT_BYTES;
        self.rest = behind;
        segment
    }
}

/// What [`split`] gives: a segment, or none where the bytes end before it does; and what lies behind.
type Split<'a> = (Option<Segment<'a>>, &'a [[u8; SEGMENT_BYTES]]);

/// Takes one segment off the front. None at the end.
fn split(rest: &[[u8; SEGMENT_BYTES]]) -> Option<Split<'_>> {
    let (first, behind) = rest.split_first()?;
    let word = be32(first, 0);
    if word & INLINE == 0 {
        return Some((Some(Segment::Memory(data_segment(first))), behind));
    }
    let len_bytes = (word & !INLINE) as usize;
    let taken = (4 + len_bytes).div_ceil(SEGMENT_BYTES);
    let bytes = rest.as_flattened().get(4..4 + len_bytes);
    Some((bytes.map(Segment::Inline), rest.get(taken..).unwrap_or(&[])))
}

fn data_segment(bytes: &[u8; SEGMENT_BYTES]) -> DataSegment {
    DataSegment {
        len_bytes: be32(bytes, 0),
        lkey: be32(bytes, 4),
        addr: be64(bytes, 8),
    }
}

#[cold]
fn malformed(reason: String) -> Error {
    Error::Malformed {
        what: "send WQE",
        reason,
    }
}

/// Reads the pieces of a receive WQE, up to the invalid key that ends a short list, or to the end of `bytes`.
pub fn parse_recv(bytes: &[u8]) -> impl Iterator<Item = DataSegment> + '_ {
    let (segments, _) = bytes.as_chunks::<SEGMENT_BYTES>();
    segments
        .iter()
        .map(data_segment)
        .take_while(|segment| segment.lkey != INVALID_LKEY)
}
