//! Requests of verbs, made of WQEs; and CQEs, made of completions of verbs.

use rdma_sys::{ibv_send_flags, ibv_wc_flags, ibv_wc_opcode, ibv_wr_opcode};

use super::provider::{PolledCompletion, Send, Sge};
use super::staging::Staging;
use super::work::WorkId;
use crate::mlx5::{
    Cqe, CqeOpcode, Opcode, RELEASED_VENDOR_SYNDROME, Segment, Syndrome, Wqe, parse_recv,
};
use doorbell_wire::verbs::WcStatus;

pub(super) const FENCE: u32 = ibv_send_flags::IBV_SEND_FENCE.0;
pub(super) const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(super) const SOLICITED: u32 = ibv_send_flags::IBV_SEND_SOLICITED.0;
pub(super) const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;

/// The opcode of verbs; a NOP has none.
fn verbs_opcode(opcode: Opcode) -> Option<u32> {
    Some(match opcode {
        Opcode::RdmaWrite => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Opcode::RdmaWriteImm => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::Send => ibv_wr_opcode::IBV_WR_SEND,
        Opcode::SendImm => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
        Opcode::RdmaRead => ibv_wr_opcode::IBV_WR_RDMA_READ,
        Opcode::AtomicCs => ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP,
        Opcode::AtomicFa => ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
        // The first has no opcode in verbs; the second would close windows, which no endpoint has.
        Opcode::Nop | Opcode::SendInval => return None,
        _ => return None,
    })
}

/// The request that a WQE asks for, with its pieces behind those in `sges`; inline bytes go to the slot of its position. `None` if a
/// device of plain verbs cannot carry out the request; `sges` is unchanged then.
pub(super) fn send_request(
    wqe: &Wqe<'_>,
    id: WorkId,
    max_sges: u32,
    staging: &mut Staging,
    sges: &mut Vec<Sge>,
) -> Option<Send> {
    let first = sges.len();
    let request = translate(wqe, id, staging, sges);
    let count = sges.len() - first;
    match request {
        Some(request) if count <= max_sges as usize => Some(Send {
            first_sge: first as u32,
            sges: count as u32,
            ..request
        }),
        _ => {
            sges.truncate(first);
            None
        }
    }
}

fn translate(
    wqe: &Wqe<'_>,
    id: WorkId,
    staging: &mut Staging,
    sges: &mut Vec<Sge>,
) -> Option<Send> {
    let opcode = wqe.ctrl.opcode?;
    let mut staged_bytes = 0;
    let mut needs_key = false;
    let first = sges.len();
    // A slot's key is needed where the provider does not take the bytes itself, or not next to memory.
    let has_memory = wqe
        .segments()
        .any(|segment| matches!(segment, Segment::Memory(_)));
    let takes_inline =
        !has_memory && !opcode.is_fetch() && wqe.total_len() <= staging.inline_bytes.into();
    for segment in wqe.segments() {
        match segment {
            _ if segment.len_bytes() == 0 => {}
            // More than any request may have; the list must not grow.
            _ if sges.len() == sges.capacity() => return None,
            Segment::Memory(memory) => sges.push(Sge {
                addr: memory.addr,
                len_bytes: memory.len_bytes,
                lkey: memory.lkey,
            }),
            Segment::Inline(bytes) => {
                let staged = staging.put(id.position, staged_bytes, bytes)?;
                needs_key |= staged.lkey.is_none();
                staged_bytes += bytes.len();
                sges.push(Sge {
                    addr: staged.addr,
                    len_bytes: bytes.len() as u32,
                    lkey: staged.lkey.unwrap_or(0),
                });
            }
        }
    }
    if staged_bytes > 0 && (opcode.is_fetch() || needs_key && !takes_inline) {
        return None;
    }
    if opcode.is_atomic() && (sges.len() - first != 1 || wqe.total_len() != 8) {
        return None;
    }
    let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
    let (compare_add, swap) = match (opcode, wqe.atomic) {
        (Opcode::AtomicCs, Some(atomic)) => (atomic.compare, atomic.swap_or_add),
        (_, Some(atomic)) => (atomic.swap_or_add, 0),
        (_, None) => (0, 0),
    };
    Some(Send {
        wr_id: id.to_wr_id(),
        remote_addr: wqe.remote.map_or(0, |remote| remote.addr),
        compare_add,
        swap,
        rkey: wqe.remote.map_or(0, |remote| remote.rkey),
        imm: if opcode.has_imm() {
            wqe.ctrl.imm.to_be()
        } else {
            0
        },
        opcode: verbs_opcode(opcode)?,
        flags: flag(wqe.ctrl.signaled, SIGNALED)
            | flag(wqe.ctrl.solicited, SOLICITED)
            | flag(wqe.ctrl.fence, FENCE)
            | flag(staged_bytes > 0 && takes_inline, INLINE),
        first_sge: 0,
        sges: 0,
        ..Send::default()
    })
}

/// The pieces of a receive, put behind those in `sges`: their number.
pub(super) fn recv_sges(wqe: &[u8], sges: &mut Vec<Sge>) -> u32 {
    let first = sges.len();
    let room = sges.capacity() - first;
    let pieces = parse_recv(wqe).filter(|piece| piece.len_bytes > 0);
    sges.extend(pieces.take(room).map(|piece| Sge {
        addr: piece.addr,
        len_bytes: piece.len_bytes,
        lkey: piece.lkey,
    }));
    (sges.len() - first) as u32
}

/// Why a work request failed, as an error CQE says it; 0 where mlx5 has no word for it, which reads as a general error.
pub(super) fn syndrome(status: u32) -> u8 {
    Syndrome::ALL
        .into_iter()
        .find(|syndrome| syndrome.status() as u32 == status)
        .map_or(0, |syndrome| syndrome as u8)
}

/// Whether a completion is one of success.
pub(super) fn is_success(found: &PolledCompletion) -> bool {
    found.status == WcStatus::Success as u32
}

/// The device's own code, as far as a CQE holds it. One value means that no device wrote the CQE.
pub(super) fn vendor_syndrome(found: &PolledCompletion) -> u8 {
    match found.vendor_err as u8 {
        RELEASED_VENDOR_SYNDROME => 0,
        code => code,
    }
}

/// The CQE of a receive, but for its place.
pub(super) fn recv_cqe(found: &PolledCompletion) -> Cqe {
    if !is_success(found) {
        return Cqe {
            opcode: CqeOpcode::RespErr,
            syndrome: syndrome(found.status),
            vendor_syndrome: vendor_syndrome(found),
            ..Cqe::default()
        };
    }
    let with_imm = found.flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
    let opcode = if found.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM {
        CqeOpcode::RespWriteImm
    } else if with_imm {
        CqeOpcode::RespSendImm
    } else {
        CqeOpcode::RespSend
    };
    Cqe {
        opcode,
        byte_count: found.byte_len,
        imm: if with_imm { u32::from_be(found.imm) } else { 0 },
        source_qpn: found.source_qpn,
        source_lid: found.source_lid as u16,
        grh: u8::from(found.flags & ibv_wc_flags::IBV_WC_GRH.0 != 0),
        ..Cqe::default()
    }
}
