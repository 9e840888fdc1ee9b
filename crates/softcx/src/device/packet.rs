//! Packets of the software fabric: the header, its bytes on a lane, and the payload.
//!
//! The transports are InfiniBand's (IBTA volume 1, chapter 9), with their header fields gathered into one fixed header of
//! 64 bytes instead of the LRH and the BTH with its extensions: LRH (source, service level), BTH (opcode, destination QP, PSN),
//! DETH (queue key, source QP), RETH (address, key, length), AtomicETH, AETH (ACK and NAK codes), ImmDt, IETH. A datagram's GRH
//! stands in fields that it has no other use for. All multi-byte fields are little-endian.

use crate::{Error, Result};
use doorbell_wire::mlx5::Datagram;

/// Bytes of a header on a lane.
pub const HEADER_BYTES: usize = 64;
/// The largest payload of one packet, the largest MTU of InfiniBand and RoCE.
pub const MAX_PAYLOAD_BYTES: usize = 4096;

/// The kind of a packet: a request or a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PacketKind {
    /// Payload for the next posted receive.
    Send = 1,
    /// Payload for an address.
    Write = 2,
    /// Asks for `total_bytes` from an address.
    ReadRequest = 3,
    /// Compare and swap of 8 bytes.
    CompareSwap = 4,
    /// Fetch and add of 8 bytes.
    FetchAdd = 5,
    /// Acknowledgement or its negation, see [`AckCode`].
    Ack = 6,
    /// Payload that answers a read.
    ReadResponse = 7,
    /// The value before an atomic, in `operand`.
    AtomicResponse = 8,
}

impl PacketKind {
    fn parse(byte: u8) -> Option<PacketKind> {
        Some(match byte {
            1 => PacketKind::Send,
            2 => PacketKind::Write,
            3 => PacketKind::ReadRequest,
            4 => PacketKind::CompareSwap,
            5 => PacketKind::FetchAdd,
            6 => PacketKind::Ack,
            7 => PacketKind::ReadResponse,
            8 => PacketKind::AtomicResponse,
            _ => return None,
        })
    }

    /// Whether the packet goes from requester to responder.
    pub fn is_request(self) -> bool {
        (self as u8) < PacketKind::Ack as u8
    }
}

/// The transport that a packet is of: the high bits of a BTH opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Service {
    /// Reliable connection.
    Reliable = 0,
    /// Unreliable connection.
    Unreliable = 1,
    /// Unreliable datagram: a send of one packet, with a queue key and, if flagged, the fields of a GRH.
    Datagram = 2,
}

impl Service {
    fn parse(byte: u8) -> Option<Service> {
        Some(match byte {
            0 => Service::Reliable,
            1 => Service::Unreliable,
            2 => Service::Datagram,
            _ => return None,
        })
    }
}

/// The code of an acknowledgement (AETH syndrome, IBTA 9.7.5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckCode {
    /// Everything up to and with the PSN has arrived.
    Ack,
    /// No receive is posted: try again after the time of this 5-bit code (IBTA table 45).
    ReceiverNotReady(u8),
    /// The PSN was expected and something later came.
    SequenceError,
    /// The request makes no sense here.
    InvalidRequest,
    /// Key, range or permission is wrong.
    AccessError,
    /// The responder could not finish the request.
    OperationalError,
}

impl AckCode {
    pub(crate) fn byte(self) -> u8 {
        match self {
            AckCode::Ack => 0x1f,
            AckCode::ReceiverNotReady(timer) => 0x20 | (timer & 0x1f),
            AckCode::SequenceError => 0x60,
            AckCode::InvalidRequest => 0x61,
            AckCode::AccessError => 0x62,
            AckCode::OperationalError => 0x63,
        }
    }

    pub(crate) fn parse(byte: u8) -> Option<AckCode> {
        Some(match byte {
            // The five bits count receives that are posted, of responders that tell; 0x1f is "not told".
            0x00..=0x1f => AckCode::Ack,
            0x20..=0x3f => AckCode::ReceiverNotReady(byte & 0x1f),
            0x60 => AckCode::SequenceError,
            0x61 => AckCode::InvalidRequest,
            0x62 => AckCode::AccessError,
            0x63 => AckCode::OperationalError,
            _ => return None,
        })
    }
}

/// The time that an RNR timer code stands for, in nanoseconds (IBTA table 45: from 10 us at code 1 to 655.36 ms at code 0).
pub fn rnr_delay_ns(code: u8) -> u64 {
    const HUNDREDTHS_MS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    HUNDREDTHS_MS[usize::from(code & 0x1f)] * 10_000
}

/// Flags of a header.
pub mod flag {
    /// First packet of its message.
    pub const FIRST: u8 = 1;
    /// Last packet of its message.
    pub const LAST: u8 = 2;
    /// `imm` is valid.
    pub const IMMEDIATE: u8 = 4;
    /// The receiver's completion is a solicited one.
    pub const SOLICITED: u8 = 8;
    /// `imm` is the key of a memory window to be closed.
    pub const INVALIDATE: u8 = 16;
    /// A datagram has a GRH.
    pub const GRH: u8 = 32;
    /// The requester asks for an acknowledgement.
    pub const WANTS_ACK: u8 = 64;
    pub(super) const KNOWN: u8 =
        FIRST | LAST | IMMEDIATE | SOLICITED | INVALIDATE | GRH | WANTS_ACK;
}

/// A packet's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: PacketKind,
    /// [`flag`]s.
    pub flags: u8,
    /// Meaning of an [`PacketKind::Ack`]; [`AckCode::Ack`] elsewhere.
    pub code: AckCode,
    /// The queue pair that it is for, 24 bits.
    pub dst_qpn: u32,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
    /// The connection that it belongs to: packets of an earlier connection of the same queue pair are dropped.
    pub connection: u32,
    /// Payload bytes in this packet, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: u16,
    /// Immediate data, as the application gave it; in responses the message sequence number ([`Header::msn`]).
    pub imm: u32,
    /// Key of the remote memory (first packet of a write, reads, atomics).
    pub rkey: u32,
    /// Bytes of the whole message (first packet of a write, reads).
    pub total_bytes: u32,
    /// Address in the remote memory (first packet of a write, reads, atomics).
    pub addr: u64,
    /// Value to swap in or add; the old value in a response.
    pub operand: u64,
    /// Value to compare with.
    pub compare: u64,
    /// The transport.
    pub service: Service,
    /// The node that it comes from; 0 from a device on no fabric.
    pub source_lid: u16,
    /// The queue pair that it comes from, 24 bits.
    pub source_qpn: u32,
    /// Service level, 4 bits.
    pub sl: u8,
    /// The number of PSNs that the packet uses, 1 to 16. It is 1, or one for each MTU of the payload between devices without a trace and without
    /// faults.
    pub psns: u8,
    /// Queue key of a datagram.
    pub qkey: u32,
}

impl Header {
    /// A header with nothing but its addressing.
    pub fn new(kind: PacketKind, dst_qpn: u32, psn: u32, connection: u32) -> Header {
        Header {
            kind,
            flags: 0,
            code: AckCode::Ack,
            dst_qpn,
            psn,
            connection,
            payload_bytes: 0,
            imm: 0,
            rkey: 0,
            total_bytes: 0,
            addr: 0,
            operand: 0,
            compare: 0,
            service: Service::Reliable,
            source_lid: 0,
            source_qpn: 0,
            sl: 0,
            psns: 1,
            qkey: 0,
        }
    }

    /// Whether all bits of `mask` are set.
    pub fn has(&self, mask: u8) -> bool {
        self.flags & mask == mask
    }

    /// Puts the fields of a datagram's GRH where other packets have operands and an address.
    pub(crate) fn set_grh(&mut self, to: &Datagram) {
        self.flags |= flag::GRH;
        self.addr = u64::from(to.traffic_class) << 40
            | u64::from(to.hop_limit) << 32
            | u64::from(to.flow_label);
        let gid = u128::from_be_bytes(to.gid);
        self.operand = (gid >> 64) as u64;
        self.compare = gid as u64;
    }

    /// The GID that a datagram with a GRH is for.
    pub(crate) fn grh_gid(&self) -> [u8; 16] {
        (u128::from(self.operand) << 64 | u128::from(self.compare)).to_be_bytes()
    }

    /// Of a response: how many messages the responder has completed, 24 bits.
    pub fn msn(&self) -> u32 {
        self.imm & 0xff_ffff
    }

    pub(crate) fn set_msn(&mut self, msn: u32) {
        self.imm = msn & 0xff_ffff;
    }

    /// What goes out, or comes in, instead of a response whose bytes are no longer registered when the packet leaves.
    pub(crate) fn refused(&self) -> Header {
        Header {
            kind: PacketKind::Ack,
            code: AckCode::AccessError,
            payload_bytes: 0,
            ..*self
        }
    }

    /// The header's bytes on a lane.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0u8; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.flags;
        bytes[2] = self.code.byte();
        bytes[3] = self.service as u8;
        bytes[4..8].copy_from_slice(&self.dst_qpn.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.psn.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.connection.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[18..20].copy_from_slice(&self.source_lid.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.imm.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.total_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.addr.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.operand.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.compare.to_le_bytes());
        let level = self.sl & 0xf | self.psns.wrapping_sub(1) << 4;
        let source = u32::from(level) << 24 | self.source_qpn;
        bytes[56..60].copy_from_slice(&source.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.qkey.to_le_bytes());
        bytes
    }

    /// Reads a header that another process wrote.
    ///
    /// # Errors
    /// [`Error::Malformed`] for an unknown kind, code, transport or flag, numbers of more bits than they may have, or a payload
    /// longer than [`MAX_PAYLOAD_BYTES`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header> {
        let bad = |reason: &str| Error::Malformed {
            what: "packet",
            reason: reason.into(),
        };
        let word = |at: usize| {
            bytes[at..]
                .first_chunk::<4>()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        let long = |at: usize| {
            bytes[at..]
                .first_chunk::<8>()
                .map_or(0, |b| u64::from_le_bytes(*b))
        };
        let header = Header {
            kind: PacketKind::parse(bytes[0]).ok_or_else(|| bad("unknown kind"))?,
            flags: bytes[1],
            code: AckCode::parse(bytes[2])
                .filter(|code| code.byte() == bytes[2])
                .ok_or_else(|| bad("unknown acknowledgement code"))?,
            dst_qpn: word(4),
            psn: word(8),
            connection: word(12),
            payload_bytes: u16::from_le_bytes([bytes[16], bytes[17]]),
            imm: word(20),
            rkey: word(24),
            total_bytes: word(28),
            addr: long(32),
            operand: long(40),
            compare: long(48),
            service: Service::parse(bytes[3]).ok_or_else(|| bad("unknown transport"))?,
            source_lid: u16::from_le_bytes([bytes[18], bytes[19]]),
            source_qpn: word(56) & 0xff_ffff,
            sl: bytes[59] & 0xf,
            psns: (bytes[59] >> 4) + 1,
            qkey: word(60),
        };
        if header.flags & !flag::KNOWN != 0 {
            return Err(bad("unknown flag"));
        }
        if header.dst_qpn >> 24 != 0 || header.psn >> 24 != 0 {
            return Err(bad("a number of more than 24 bits"));
        }
        if usize::from(header.payload_bytes) > MAX_PAYLOAD_BYTES {
            return Err(bad("payload longer than the largest MTU"));
        }
        Ok(header)
    }
}

/// A span of registered memory, named by key as in a WQE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyedSpan {
    /// The local key.
    pub lkey: u32,
    /// Length in bytes.
    pub len_bytes: u32,
    /// First address.
    pub addr: u64,
}

/// Payload bytes that a packet carries by value without an allocation.
pub const INLINE_BYTES: usize = 64;

/// What a packet carries on the way inside one device.
///
/// `Memory` names the sender's registered memory instead of holding its bytes: they are read when the packet is delivered,
/// with the keys checked again, as a card's DMA engine reads them when the packet leaves. The sender may not touch them
/// before its completion, so the difference cannot be seen, and a 64 KiB transfer is one copy instead of two.
#[derive(Debug, Clone)]
pub enum PacketPayload {
    /// Nothing.
    Empty,
    /// Up to [`INLINE_BYTES`] bytes by value; the header has the count.
    Inline([u8; INLINE_BYTES]),
    /// One or two spans of the sender's memory, in its protection domain.
    Memory {
        /// The sender's protection domain.
        pd: u32,
        /// The spans; the second may be empty.
        spans: [KeyedSpan; 2],
    },
    /// Bytes by value.
    Heap(Box<[u8]>),
}

/// A packet on its way.
#[derive(Debug, Clone)]
pub struct Packet {
    /// The header.
    pub header: Header,
    /// The payload.
    pub payload: PacketPayload,
}

/// `a - b` of 24-bit sequence numbers, as a signed distance.
pub fn psn_distance(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

/// `psn + n`, in 24 bits.
pub fn psn_add(psn: u32, n: u32) -> u32 {
    psn.wrapping_add(n) & 0xff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_bytes_of_a_first_write_packet() {
        let header = Header {
            flags: flag::FIRST,
            payload_bytes: 0x1000,
            rkey: 0x0102_0304,
            total_bytes: 0x0001_0000,
            addr: 0x1122_3344_5566_7788,
            source_lid: 5,
            source_qpn: 0x0a_0b0c,
            sl: 3,
            qkey: 0x8070_6050,
            service: Service::Unreliable,
            ..Header::new(PacketKind::Write, 0x00ab_cdef, 0x0012_3456, 0xdead_beef)
        };
        let mut want = [0u8; HEADER_BYTES];
        want[..18].copy_from_slice(&[
            2, 1, 0x1f, 1, 0xef, 0xcd, 0xab, 0, 0x56, 0x34, 0x12, 0, 0xef, 0xbe, 0xad, 0xde, 0,
            0x10,
        ]);
        want[18] = 5;
        want[56..].copy_from_slice(&[0xc, 0xb, 0xa, 3, 0x50, 0x60, 0x70, 0x80]);
        want[24..40].copy_from_slice(&[
            4, 3, 2, 1, 0, 0, 1, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
        ]);
        assert_eq!(header.encode(), want);
        assert_eq!(Header::parse(&want), Ok(header));
    }

    #[test]
    fn sequence_numbers_wrap_at_24_bits() {
        assert_eq!(psn_distance(0, 0xff_ffff), 1);
        assert_eq!(psn_distance(0xff_ffff, 0), -1);
        assert_eq!(psn_distance(0x80_0000, 0), -0x80_0000);
        assert_eq!(psn_add(0xff_ffff, 2), 1);
    }

    #[test]
    fn rnr_codes_stand_for_the_times_of_the_specification() {
        assert_eq!(rnr_delay_ns(0), 655_360_000);
        assert_eq!(rnr_delay_ns(1), 10_000);
        assert_eq!(rnr_delay_ns(12), 640_000);
        assert_eq!(rnr_delay_ns(31), 491_520_000);
    }

    proptest! {
        #[test]
        fn encoded_header_parses_to_the_same_header(bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES)) {
            let mut bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            bytes[0] %= 10;
            bytes[1] &= 0x7f;
            bytes[3] %= 4;
            bytes[7] = 0;
            bytes[11] = 0;
            bytes[59] &= 0x1f;
            bytes[17] %= 0x12;
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
