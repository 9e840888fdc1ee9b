//! A work request in progress: the request, the number of its packets, and how much is done.

use super::opcode::{
    ATOMIC_CS, ATOMIC_FA, NOP, RDMA_READ, RDMA_WRITE, RDMA_WRITE_IMM, SEND, SEND_IMM, SEND_INVAL,
    UMR,
};
use crate::device::client::Transport;
use crate::device::gather::WqeRequest;
use crate::device::keys::Access;
use crate::device::qp::{DeviceParts, QpSetup};
use doorbell_wire::mlx5::{Syndrome, WindowUpdate};

/// The longest message. IBTA allows 2^31 bytes; ports of cards have `max_msg_sz` 2^30 (`log_max_msg` 30 of the mlx5 driver), and a card
/// fails longer ones.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// The most packets of one message: well within half of the 24-bit sequence space, so that distances keep their sign. It is the length
/// limit at an MTU of 256.
pub(super) const MAX_MESSAGE_PACKETS: u32 = 1 << 22;

/// A work request that was begun and is not complete.
#[derive(Debug)]
pub(super) struct OutstandingMessage {
    /// Running WQEBB count of its WQE.
    pub(super) index: u32,
    pub(super) request: WqeRequest,
    /// First PSN, and how many the message takes: of a read, those of its response.
    pub(super) first_psn: u32,
    pub(super) packets: u32,
    /// Of a read or an atomic: response packets that came.
    pub(super) responses: u32,
    /// What the completion will say, if it is no success.
    pub(super) failed: Option<Syndrome>,
    /// What is to be done to a memory window, until it is done.
    pub(super) window: Option<Box<WindowUpdate>>,
}

impl OutstandingMessage {
    pub(super) fn wants_response(&self) -> bool {
        matches!(self.request.opcode, RDMA_READ | ATOMIC_CS | ATOMIC_FA)
    }

    pub(super) fn answered(&self) -> bool {
        self.responses >= self.packets
    }

    pub(super) fn wqebbs(&self) -> u32 {
        u32::from(self.request.ds).div_ceil(4)
    }
}

/// What can be found wrong before anything is sent.
pub(super) fn check(
    request: &WqeRequest,
    context: &DeviceParts,
    parts: &QpSetup,
) -> Result<(), Syndrome> {
    let opcode = request.opcode;
    let known = match parts.transport {
        Transport::Rc => true,
        Transport::Uc => matches!(
            opcode,
            NOP | UMR | SEND | SEND_IMM | RDMA_WRITE | RDMA_WRITE_IMM
        ),
        Transport::Ud => matches!(opcode, NOP | SEND | SEND_IMM),
    };
    let need = match opcode {
        _ if !known => return Err(Syndrome::LocalQpOp),
        NOP | UMR => return Ok(()),
        SEND | SEND_IMM | SEND_INVAL | RDMA_WRITE | RDMA_WRITE_IMM => Access::LOCAL_READ,
        RDMA_READ | ATOMIC_CS | ATOMIC_FA => Access::LOCAL_WRITE,
        _ => return Err(Syndrome::LocalQpOp),
    };
    let longest = match parts.transport {
        // A datagram is one packet (IBTA 10.7.2.2).
        Transport::Ud => u64::from(context.mtu_bytes()),
        _ => MAX_MESSAGE_BYTES,
    };
    if request.total_bytes > longest {
        return Err(Syndrome::LocalLength);
    }
    if matches!(opcode, ATOMIC_CS | ATOMIC_FA) && request.total_bytes != 8 {
        return Err(Syndrome::LocalLength);
    }
    context
        .gather
        .check(&context.keys, parts.pd, need)
        .map_err(|_| Syndrome::LocalProt)
}
