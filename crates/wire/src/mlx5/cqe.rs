//! Completion queue entries, parsed and encoded.

use super::{Opcode, Syndrome};
use crate::verbs::WcStatus;

/// Size of a CQE in bytes (mlx5dv.h, `struct mlx5_cqe64`).
pub const CQE_BYTES: usize = 64;

/// What a CQE reports (mlx5dv.h, `MLX5_CQE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CqeOpcode {
    /// A send request is done.
    Req,
    /// A receive was consumed by a write with immediate data.
    RespWriteImm,
    /// A receive was consumed by a send.
    RespSend,
    /// A receive was consumed by a send with immediate data.
    RespSendImm,
    /// A receive was consumed by a send that invalidates a key.
    RespSendInv,
    /// A send request failed.
    ReqErr,
    /// A receive failed.
    RespErr,
    /// No device writes it: an error that a stream may pass, see [`CqRing::release_waiter`](super::CqRing::release_waiter).
    ReleasedErr,
    /// No CQE at all: the mark of fresh memory.
    Invalid,
    /// One that the library has no use for, 0 to 15.
    Other(u8),
}

impl CqeOpcode {
    /// The opcode of that number; only the low 4 bits count.
    pub const fn from_raw(raw: u8) -> Self {
        match raw & 0xf {
            0 => Self::Req,
            1 => Self::RespWriteImm,
            2 => Self::RespSend,
            3 => Self::RespSendImm,
            4 => Self::RespSendInv,
            7 => Self::ReleasedErr,
            13 => Self::ReqErr,
            14 => Self::RespErr,
            15 => Self::Invalid,
            other => Self::Other(other),
        }
    }

    /// The number, 0 to 15.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::RespWriteImm => 1,
            Self::RespSend => 2,
            Self::RespSendImm => 3,
            Self::RespSendInv => 4,
            Self::ReleasedErr => 7,
            Self::ReqErr => 13,
            Self::RespErr => 14,
            Self::Invalid => 15,
            Self::Other(raw) => raw & 0xf,
        }
    }

    /// Whether it reports a failure.
    pub const fn is_error(self) -> bool {
        matches!(self, Self::ReqErr | Self::RespErr | Self::ReleasedErr)
    }

    /// Whether it belongs to a receive.
    pub const fn is_receive(self) -> bool {
        matches!(
            self,
            Self::RespWriteImm
                | Self::RespSend
                | Self::RespSendImm
                | Self::RespSendInv
                | Self::RespErr
        )
    }
}

/// A completion (mlx5dv.h, `struct mlx5_cqe64` and `struct mlx5_err_cqe`), in host byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// What it reports.
    pub opcode: CqeOpcode,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The index of the WQE, modulo 2^16: of its first WQEBB for a send, of the WQE for a receive.
    pub wqe_counter: u16,
    /// Bytes received or read. For other requests a device may write anything here; see [`Cqe::transferred`].
    pub byte_count: u32,
    /// Immediate data in host order; or the key that was closed.
    pub imm: u32,
    /// The queue pair that it came from, 24 bits.
    pub source_qpn: u32,
    /// The LID that it came from.
    pub source_lid: u16,
    /// Service level, 4 bits; on Ethernet the kind of IP header in 2 bits (2: IPv4).
    pub sl: u8,
    /// Whether, and how, it had a GRH, 2 bits.
    pub grh: u8,
    /// Shared receive queue or user index, 32 bits.
    pub srqn_uidx: u32,
    /// For an error: why, see [`Syndrome`]. Else 0.
    pub syndrome: u8,
    /// For an error: the device's own code. Else 0.
    pub vendor_syndrome: u8,
    /// For no error: the device's clock, in its ticks. Else 0.
    pub timestamp: u64,
    /// For a send: the opcode of its WQE.
    pub send_opcode: u8,
    /// A checksum, if the queue pair has them on.
    pub signature: u8,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
    /// The owner bit.
    pub owner: bool,
}

impl Cqe {
    /// The bytes that a receive, a read or an atomic has brought. `None` for other requests and for errors, of which libmlx5 does not use the count
    /// either (rdma-core, providers/mlx5/cq.c, `handle_good_req`).
    #[inline]
    pub const fn transferred(&self) -> Option<u32> {
        const READ: u8 = Opcode::RdmaRead as u8;
        const COMPARE_SWAP: u8 = Opcode::AtomicCs as u8;
        const FETCH_ADD: u8 = Opcode::AtomicFa as u8;
        match (self.opcode, self.send_opcode) {
            (CqeOpcode::Req, READ) => Some(self.byte_count),
            (CqeOpcode::Req, COMPARE_SWAP | FETCH_ADD) => Some(8),
            (opcode, _) if opcode.is_receive() && !opcode.is_error() => Some(self.byte_count),
            _ => None,
        }
    }
}

impl Default for Cqe {
    /// A successful send completion of queue pair 0.
    fn default() -> Self {
        Self {
            opcode: CqeOpcode::Req,
            qpn: 0,
            wqe_counter: 0,
            byte_count: 0,
            imm: 0,
            source_qpn: 0,
            source_lid: 0,
            sl: 0,
            grh: 0,
            srqn_uidx: 0,
            syndrome: 0,
            vendor_syndrome: 0,
            timestamp: 0,
            send_opcode: 0,
            signature: 0,
            solicited: false,
            owner: false,
        }
    }
}

impl Cqe {
    /// Reads the fields. All bytes mean something: whether the CQE is valid at all is for the owner bit and the opcode to say.
    pub fn parse(bytes: &[u8; CQE_BYTES]) -> Self {
        let op_own = bytes[63];
        let opcode = CqeOpcode::from_raw(op_own >> 4);
        let error = opcode.is_error();
        let timestamp = u64::from_be_bytes(std::array::from_fn(|i| bytes[48 + i]));
        // An error CQE has no source.
        let source = if error {
            [0; 6]
        } else {
            std::array::from_fn(|i| bytes[22 + i])
        };
        Self {
            opcode,
            qpn: u32::from_be_bytes([0, bytes[57], bytes[58], bytes[59]]),
            wqe_counter: u16::from_be_bytes([bytes[60], bytes[61]]),
            byte_count: u32::from_be_bytes([bytes[44], bytes[45], bytes[46], bytes[47]]),
            imm: u32::from_be_bytes([bytes[36], bytes[37], bytes[38], bytes[39]]),
            source_qpn: u32::from_be_bytes([0, source[3], source[4], source[5]]),
            source_lid: u16::from_be_bytes([source[0], source[1]]),
            sl: source[2] & 0xf,
            grh: source[2] >> 4 & 3,
            srqn_uidx: u32::from_be_bytes([bytes[32], bytes[33], bytes[34], bytes[35]]),
            vendor_syndrome: if error { bytes[54] } else { 0 },
            syndrome: if error { bytes[55] } else { 0 },
            timestamp: if error { 0 } else { timestamp },
            send_opcode: bytes[56],
            signature: bytes[62],
            solicited: op_own & 2 != 0,
            owner: op_own & 1 != 0,
        }
    }

    /// The bytes, with `owner` as the owner bit. Fields that the kind of CQE does not have are not written.
    pub fn encode(&self, owner: bool) -> [u8; CQE_BYTES] {
        let mut bytes = [0; CQE_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(32, &self.srqn_uidx.to_be_bytes());
        if self.opcode.is_error() {
            put(54, &[self.vendor_syndrome, self.syndrome]);
        } else {
            let source = u32::from(self.grh & 3) << 28
                | u32::from(self.sl & 0xf) << 24
                | self.source_qpn & 0xff_ffff;
            put(22, &self.source_lid.to_be_bytes());
            put(24, &source.to_be_bytes());
            put(36, &self.imm.to_be_bytes());
            put(44, &self.byte_count.to_be_bytes());
            put(48, &self.timestamp.to_be_bytes());
        }
        put(
            56,
            &(u32::from(self.send_opcode) << 24 | self.qpn & 0xff_ffff).to_be_bytes(),
        );
        put(60, &self.wqe_counter.to_be_bytes());
        put(
            62,
            &[
                self.signature,
                self.opcode.raw() << 4 | u8::from(self.solicited) << 1 | u8::from(owner),
            ],
        );
        bytes
    }

    /// The status as verbs gives it.
    pub fn status(&self) -> WcStatus {
        if self.opcode.is_error() {
            Syndrome::from_raw(self.syndrome).map_or(WcStatus::GeneralErr, Syndrome::status)
        } else {
            WcStatus::Success
        }
    }
}
