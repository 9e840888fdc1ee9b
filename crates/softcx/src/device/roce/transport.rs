//! The headers of the transport, from BTH to the payload, and the CRC behind it.

use std::ops::Range;

use super::check::{effect_of_bytes, explaining_bytes, invariant_crc};
use super::frame::{IDENTIFICATION_AT, IPV4_HEADERS_BYTES, MAX_PSEUDO_BYTES, UdpFlow};
use super::opcode::{CONGESTION_NOTICE, OpcodeMeaning};
use crate::device::packet::{AckCode, Header, MAX_PAYLOAD_BYTES, flag};

const BASE_BYTES: usize = 12;
/// The longest headers: BTH and AtomicETH.
pub(crate) const MAX_HEADER_BYTES: usize = BASE_BYTES + 28;
/// The CRC and the longest padding before it.
const TRAILER_BYTES: usize = 4 + 3;
/// The longest frame above UDP.
pub(crate) const MAX_FRAME_BYTES: usize = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES + TRAILER_BYTES;
const CRC_BYTES: usize = 4;
/// Bytes of a congestion notification behind its BTH, all of them reserved.
const NOTICE_BYTES: usize = 16;

const SOLICITED: u8 = 0x80;
/// "Migrated": the path is the primary one.
const MIGRATED: u8 = 0x40;
const BACKWARD_CONGESTION: u8 = 0x40;
const WANTS_ACK: u8 = 0x80;
/// The default partition, with full membership.
const PARTITION: u16 = 0xffff;

/// Why bytes are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadFrame {
    /// Shorter than the headers that its opcode needs.
    Short,
    /// The opcode is not one of RC, UC and UD, or not one that the service has.
    Opcode,
    /// The version of the transport header is not 0.
    Version,
    /// Another partition.
    Partition,
    /// More payload than the largest MTU, or a payload with an opcode that carries no data.
    Payload,
    /// A code of an acknowledgement that does not exist.
    Code,
    /// The invariant CRC is another.
    Crc,
}

/// What a frame is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoceFrame {
    /// A packet, and where in the frame its payload is. `connection`, `source_lid` and, but for datagrams, `source_qpn` do not travel.
    Packet(Header, Range<usize>),
    /// A congestion notification for a queue pair.
    CongestionNotice(u32),
}

impl RoceFrame {
    /// Reads a frame above UDP, without its invariant CRC, which needs the addresses.
    ///
    /// # Errors
    /// [`BadFrame`], but not [`BadFrame::Crc`].
    pub fn parse(bytes: &[u8]) -> Result<RoceFrame, BadFrame> {
        let end = bytes.len().checked_sub(CRC_BYTES).ok_or(BadFrame::Short)?;
        let base = bytes[..end].first_chunk().ok_or(BadFrame::Short)?;
        let &[opcode, flags, p0, p1, _, q0, q1, q2, ack, s0, s1, s2] = base;
        if flags & 0xf != 0 {
            return Err(BadFrame::Version);
        }
        // The upper bit tells full from limited members.
        if u16::from_be_bytes([p0, p1]) & 0x7fff != PARTITION & 0x7fff {
            return Err(BadFrame::Partition);
        }
        let dst_qpn = u32::from_be_bytes([0, q0, q1, q2]);
        if opcode == CONGESTION_NOTICE {
            return Ok(RoceFrame::CongestionNotice(dst_qpn));
        }
        let meaning = OpcodeMeaning::parse(opcode).ok_or(BadFrame::Opcode)?;
        let padding = usize::from(flags >> 4 & 3);
        let start = meaning.header_bytes();
        let end = end.checked_sub(padding).ok_or(BadFrame::Short)?;
        let payload_bytes = end.checked_sub(start).ok_or(BadFrame::Short)?;
        let fits = payload_bytes <= MAX_PAYLOAD_BYTES && bytes.len().is_multiple_of(4);
        if !fits || (payload_bytes + padding > 0 && !meaning.has_payload()) {
            return Err(BadFrame::Payload);
        }
        let mut header = Header::new(
            meaning.kind,
            dst_qpn,
            u32::from_be_bytes([0, s0, s1, s2]),
            0,
        );
        header.service = meaning.service;
        header.flags = meaning.flags;
        if flags & SOLICITED != 0 {
            header.flags |= flag::SOLICITED;
        }
        if ack & WANTS_ACK != 0 {
            header.flags |= flag::WANTS_ACK;
        }
        header.payload_bytes = payload_bytes as u16;
        read_extensions(&mut header, meaning, &bytes[BASE_BYTES..start])?;
        Ok(RoceFrame::Packet(header, start..end))
    }
}

/// Takes fields off the front of headers whose length was looked at.
struct HeaderFields<'a>(&'a [u8]);

impl HeaderFields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk() else {
            return [0; N];
        };
        self.0 = rest;
        *field
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn long(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

fn read_extensions(
    header: &mut Header,
    meaning: OpcodeMeaning,
    bytes: &[u8],
) -> Result<(), BadFrame> {
    let mut fields = HeaderFields(bytes);
    if meaning.has_datagram_header() {
        header.qkey = fields.word();
        header.source_qpn = fields.word() & 0xff_ffff;
        // Every packet of RoCE v2 has an IP header, which stands for the GRH.
        header.flags |= flag::GRH;
        header.total_bytes = header.payload_bytes.into();
    }
    if meaning.has_remote() {
        header.addr = fields.long();
        header.rkey = fields.word();
        header.total_bytes = fields.word();
    }
    if meaning.is_atomic_request() {
        header.addr = fields.long();
        header.rkey = fields.word();
        header.operand = fields.long();
        header.compare = fields.long();
        header.total_bytes = 8;
    }
    if meaning.has_ack_header() {
        let [code, m0, m1, m2] = fields.take();
        header.code = AckCode::parse(code).ok_or(BadFrame::Code)?;
        header.set_msn(u32::from_be_bytes([0, m0, m1, m2]));
    }
    if meaning.has_old_value() {
        header.operand = fields.long();
    }
    if meaning.has_word() {
        header.imm = fields.word();
    }
    Ok(())
}

/// Puts a packet's headers at the start of a frame, whose payload follows. Returns their length; `None` if the service has no such packet.
pub(crate) fn write_headers(header: &Header, into: &mut [u8; MAX_HEADER_BYTES]) -> Option<usize> {
    let opcode = OpcodeMeaning::opcode_of(header)?;
    let meaning = OpcodeMeaning::parse(opcode)?;
    let padding = padding_of(header.payload_bytes.into()) as u8;
    let solicited = if header.has(flag::SOLICITED) {
        SOLICITED
    } else {
        0
    };
    let wants_ack = if header.has(flag::WANTS_ACK) {
        WANTS_ACK
    } else {
        0
    };
    let mut at = 0;
    let mut put = |field: &[u8]| {
        into[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    put(&[opcode, solicited | MIGRATED | padding << 4]);
    put(&PARTITION.to_be_bytes());
    put(&(header.dst_qpn & 0xff_ffff).to_be_bytes());
    put(&(u32::from(wants_ack) << 24 | header.psn & 0xff_ffff).to_be_bytes());
    if meaning.has_datagram_header() {
        put(&header.qkey.to_be_bytes());
        put(&header.source_qpn.to_be_bytes());
    }
    if meaning.has_remote() {
        put(&header.addr.to_be_bytes());
        put(&header.rkey.to_be_bytes());
        put(&header.total_bytes.to_be_bytes());
    }
    if meaning.is_atomic_request() {
        put(&header.addr.to_be_bytes());
        put(&header.rkey.to_be_bytes());
        put(&header.operand.to_be_bytes());
        put(&header.compare.to_be_bytes());
    }
    if meaning.has_ack_header() {
        let code = u32::from(header.code.byte());
        put(&(code << 24 | header.msn()).to_be_bytes());
    }
    if meaning.has_old_value() {
        put(&header.operand.to_be_bytes());
    }
    if meaning.has_word() {
        put(&header.imm.to_be_bytes());
    }
    Some(at)
}

fn padding_of(payload_bytes: usize) -> usize {
    payload_bytes.wrapping_neg() & 3
}

/// Pads the payload and puts the CRC behind it. `unpadded` is the length up to the end of the payload. Returns the frame's length.
pub(crate) fn seal_frame(flow: &UdpFlow, frame: &mut [u8], unpadded: usize) -> usize {
    let end = unpadded.next_multiple_of(4);
    frame[unpadded..end].fill(0);
    let crc = crc_of(flow, &frame[..end]);
    frame[end..end + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
    end + CRC_BYTES
}

/// Changes the CRC of a sealed frame: that of the IPv4 header's identification `from` becomes that of `to`.
pub(crate) fn renumber_frame(frame: &mut [u8], from: u16, to: u16) {
    let body_bytes = frame.len().saturating_sub(CRC_BYTES);
    if let Some(crc) = frame.last_chunk_mut() {
        let effect = effect_of_bytes((from ^ to).to_be_bytes(), bytes_behind(body_bytes));
        *crc = (u32::from_le_bytes(*crc) ^ effect).to_le_bytes();
    }
}

/// The bytes from the identification of the IPv4 header to the end of a frame without its CRC.
fn bytes_behind(body_bytes: usize) -> usize {
    IPV4_HEADERS_BYTES - IDENTIFICATION_AT + body_bytes
}

/// The CRC of a frame without its CRC.
fn crc_of(flow: &UdpFlow, frame: &[u8]) -> u32 {
    let mut pseudo = [0; MAX_PSEUDO_BYTES + BASE_BYTES];
    let at = pseudo.first_chunk_mut().map_or(0, |headers| {
        flow.pseudo_header(frame.len() + CRC_BYTES, headers)
    });
    let end = at + BASE_BYTES;
    pseudo[at..end].copy_from_slice(&frame[..BASE_BYTES]);
    // The bits of congestion, and reserved ones.
    pseudo[at + 4] = 0xff;
    invariant_crc(&pseudo[..end], &frame[BASE_BYTES..])
}

/// Reads a frame that came over UDP and checks its CRC. Returns it with the identification of the IPv4 header for which the CRC is right.
///
/// A socket does not tell the identification, which the CRC covers. Frames of this device have the one of `flow`. The kernel's
/// SoftRoCE counts it up; a difference that a change of this field explains is no error.
pub(crate) fn read_frame(flow: &UdpFlow, bytes: &[u8]) -> Result<(RoceFrame, u16), BadFrame> {
    let frame = RoceFrame::parse(bytes)?;
    let Some((body, crc)) = bytes.split_last_chunk() else {
        return Err(BadFrame::Short);
    };
    let difference = crc_of(flow, body) ^ u32::from_le_bytes(*crc);
    let changed = match difference {
        0 => [0; 2],
        _ if !flow.is_ipv4() => return Err(BadFrame::Crc),
        _ => explaining_bytes(difference, bytes_behind(body.len())).ok_or(BadFrame::Crc)?,
    };
    Ok((frame, flow.identification ^ u16::from_be_bytes(changed)))
}

/// The partition key of a frame, which is longer than its base header.
pub(crate) fn partition_of(frame: &[u8]) -> u16 {
    match frame {
        &[_, _, high, low, ..] => u16::from_be_bytes([high, low]),
        _ => PARTITION,
    }
}

/// A notice of congestion that is to be sent to a queue pair of another host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CongestionNotice {
    /// The address of its host, as a GID.
    pub(crate) to: [u8; 16],
    pub(crate) qpn: u32,
    /// The partition key of the packet that came through congestion.
    pub(crate) partition: u16,
}

/// A congestion notification for a queue pair, without padding and CRC (annex A17.9.3). `partition` is that of the packet which was marked. The bit
/// "migrated" is not set.
pub(crate) fn notice_bytes(dst_qpn: u32, partition: u16) -> [u8; BASE_BYTES + NOTICE_BYTES] {
    let mut bytes = [0; BASE_BYTES + NOTICE_BYTES];
    bytes[0] = CONGESTION_NOTICE;
    bytes[2..4].copy_from_slice(&partition.to_be_bytes());
    bytes[4..8].copy_from_slice(&dst_qpn.to_be_bytes());
    bytes[4] = BACKWARD_CONGESTION;
    bytes
}
