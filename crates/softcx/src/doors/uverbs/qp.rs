//! Queue pairs: making and destroying. Their attributes are in `qp_attributes`.

pub(super) use super::qp_attributes::{modify, modify_extended, query};

use std::sync::Arc;

use super::arguments::{AttributeKind, AttributeSpec};
use super::{DRIVER_IN, DRIVER_OUT, UverbsCall, async_event, uar};
use crate::device::client::{Errno, QpParts, Transport};
use crate::doors::abi::*;
use crate::doors::event_pipe::EventPipe;
use crate::doors::events::EventSubject;
use crate::doors::limits;
use crate::doors::objects::{Object, QpObject};

/// `uverbs_attrs_create_qp_cmd_attr_ids`.
const HANDLE: u16 = 0;
const XRCD: u16 = 1;
const PD: u16 = 2;
const SRQ: u16 = 3;
const SEND_CQ: u16 = 4;
const RECV_CQ: u16 = 5;
const IND_TABLE: u16 = 6;
const USER_HANDLE: u16 = 7;
const CAP: u16 = 8;
const TYPE: u16 = 9;
const FLAGS: u16 = 10;
const SOURCE_QPN: u16 = 11;
const EVENT_FD: u16 = 12;
const RESP_CAP: u16 = 13;
const RESP_QP_NUM: u16 = 14;
/// `IB_UVERBS_QP_CREATE_BLOCK_MULTICAST_LOOPBACK` and `_SQ_SIG_ALL`.
const BLOCK_MULTICAST_LOOPBACK: u32 = 1 << 1;
const SIGNAL_ALL: u32 = 1 << 12;
/// The log of the least bytes of a receive.
const LEAST_RECV_SHIFT: u32 = 4;
/// `MLX5_QP_FLAG_*`. The flag allows the device to put data into CQEs; it does not require it.
const SCATTER_CQE: u32 = 1 << 1;
const ALLOW_SCATTER_CQE: u32 = 1 << 8;
const UAR_PAGE_INDEX: u32 = 1 << 10;
/// `IB_UVERBS_CREATE_QP_MASK_IND_TABLE`.
const INDIRECTION_TABLE: u32 = 1;
/// `MLX5_IB_INVALID_BFREG`: the page was the caller's choice.
const NO_BFREG: u32 = 1 << 31;
/// `ib_qp_type` of what exists, but not here: raw packets, XRC, and driver's own ones such as DC.
const NOT_EMULATED: [u8; 4] = [8, 9, 10, 0xff];

pub(super) fn create(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: CreateQp = call.request()?;
    let response = make(
        call,
        ExCreateQp {
            user_handle: request.user_handle,
            pd_handle: request.pd_handle,
            send_cq_handle: request.send_cq_handle,
            recv_cq_handle: request.recv_cq_handle,
            srq_handle: request.srq_handle,
            max_send_wr: request.max_send_wr,
            max_recv_wr: request.max_recv_wr,
            max_send_sge: request.max_send_sge,
            max_recv_sge: request.max_recv_sge,
            max_inline_data: request.max_inline_data,
            sq_sig_all: request.sq_sig_all,
            qp_type: request.qp_type,
            is_srq: request.is_srq,
            ..ExCreateQp::default()
        },
        None,
    )?;
    call.respond(response);
    Ok(())
}

pub(super) fn create_extended(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ExCreateQp = call.extended_request()?;
    if request.comp_mask & !INDIRECTION_TABLE != 0 || request.reserved != 0 {
        return Err(libc::EINVAL);
    }
    if request.comp_mask != 0 || request.source_qpn != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let base = make(call, request, None)?;
    let response = ExCreateQpResp {
        base,
        comp_mask: 0,
        response_length: call.response_length::<ExCreateQpResp>(),
    };
    call.respond(response);
    Ok(())
}

pub(super) const CREATE_ATTRIBUTES: &[AttributeSpec] = &[
    (HANDLE, AttributeKind::New, true),
    (XRCD, AttributeKind::Handle, false),
    (PD, AttributeKind::Handle, false),
    (SRQ, AttributeKind::Handle, false),
    (SEND_CQ, AttributeKind::Handle, false),
    (RECV_CQ, AttributeKind::Handle, false),
    (IND_TABLE, AttributeKind::Handle, false),
    (USER_HANDLE, AttributeKind::In(8, 8), true),
    (
        CAP,
        AttributeKind::In(QpCap::BYTES as u16, QpCap::BYTES as u16),
        true,
    ),
    (TYPE, AttributeKind::In(8, 8), true),
    (FLAGS, AttributeKind::In(4, 8), false),
    (SOURCE_QPN, AttributeKind::In(4, 4), false),
    (EVENT_FD, AttributeKind::Handle, false),
    (RESP_CAP, AttributeKind::Out(QpCap::BYTES as u16), true),
    (RESP_QP_NUM, AttributeKind::Out(4), true),
    DRIVER_IN,
    DRIVER_OUT,
];

/// The method, which also names the channel of the queue pair's asynchronous events.
pub(super) fn create_method(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    let arguments = &call.arguments;
    let flags = arguments.flags(FLAGS)?;
    let not_emulated = [XRCD, IND_TABLE, SOURCE_QPN];
    if not_emulated.iter().any(|id| arguments.has(*id)) {
        return Err(libc::EOPNOTSUPP);
    }
    let cap = QpCap::read(&arguments.bytes(CAP)?);
    let request = ExCreateQp {
        user_handle: arguments.long(USER_HANDLE),
        pd_handle: arguments.handle(PD)?,
        send_cq_handle: arguments.handle(SEND_CQ)?,
        recv_cq_handle: arguments
            .handle(RECV_CQ)
            .or_else(|_| arguments.handle(SEND_CQ))?,
        srq_handle: arguments.handle(SRQ).unwrap_or(u32::MAX),
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
        sq_sig_all: u8::from(flags & SIGNAL_ALL != 0),
        qp_type: arguments.number(TYPE, 0xff)? as u8,
        is_srq: u8::from(arguments.has(SRQ)),
        create_flags: flags & !SIGNAL_ALL,
        ..ExCreateQp::default()
    };
    let events = async_event::find(call, EVENT_FD)?;
    let response = make(call, request, events)?;
    let cap = QpCap {
        max_send_wr: response.max_send_wr,
        max_recv_wr: response.max_recv_wr,
        max_send_sge: response.max_send_sge,
        max_recv_sge: response.max_recv_sge,
        max_inline_data: response.max_inline_data,
    };
    let arguments = &mut call.arguments;
    arguments.answer_handle(HANDLE, u64::from(response.qp_handle));
    arguments.answer(RESP_CAP, &cap.to_bytes());
    arguments.answer(RESP_QP_NUM, &response.qpn.to_ne_bytes());
    arguments.mark_valid(DRIVER_OUT.0);
    Ok(())
}

fn make(
    call: &mut UverbsCall<'_>,
    request: ExCreateQp,
    events: Option<Arc<EventPipe>>,
) -> Result<CreateQpResp, Errno> {
    let driver: Mlx5CreateQp = call.driver_request()?;
    let transport = match request.qp_type {
        2 => Transport::Rc,
        3 => Transport::Uc,
        4 => Transport::Ud,
        other if NOT_EMULATED.contains(&other) => return Err(libc::EOPNOTSUPP),
        _ => return Err(libc::EINVAL),
    };
    if request.create_flags & !BLOCK_MULTICAST_LOOPBACK != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let flags = driver.flags & !(SCATTER_CQE | ALLOW_SCATTER_CQE);
    if flags & !UAR_PAGE_INDEX != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if flags == 0 {
        return Err(libc::EINVAL);
    }
    let objects = &call.tables.objects;
    let srq = match request.is_srq {
        0 => None,
        _ => Some(objects.srq(request.srq_handle)?.srqn),
    };
    let recv_wqes = if srq.is_some() {
        0
    } else {
        driver.rq_wqe_count
    };
    let send_wqebbs = driver.sq_wqe_count;
    let stride_log = if recv_wqes == 0 {
        LEAST_RECV_SHIFT
    } else {
        driver.rq_wqe_shift
    };
    let is_size = |wqes: u32| wqes == 0 || (wqes.is_power_of_two() && wqes <= limits::QP_WQES);
    let longest = limits::RECV_WQE_BYTES.ilog2();
    if !is_size(send_wqebbs)
        || !is_size(recv_wqes)
        || !(LEAST_RECV_SHIFT..=longest).contains(&stride_log)
        || request.max_send_wr > limits::QP_WQES
        || request.max_recv_wr > limits::QP_WQES
    {
        return Err(libc::EINVAL);
    }
    let recv_stride_bytes = 1 << stride_log;
    let recv_bytes = u64::from(recv_wqes) * u64::from(recv_stride_bytes);
    let send_ring = driver
        .buf_addr
        .checked_add(recv_bytes)
        .ok_or(libc::EFAULT)?;
    let qpn = call.client().create_qp(&QpParts {
        transport,
        pd: objects.pd(request.pd_handle)?,
        send_cq: objects.cq(request.send_cq_handle)?.cqn,
        recv_cq: objects.cq(request.recv_cq_handle)?.cqn,
        srq,
        send_ring,
        send_wqebbs,
        recv_ring: driver.buf_addr,
        recv_wqes,
        recv_stride_bytes,
        record: driver.db_addr,
        uar: uar::find(call, driver.bfreg_index)?,
        user_index: driver.uidx,
        blocks_loopback: request.create_flags & BLOCK_MULTICAST_LOOPBACK != 0,
    })?;
    call.context
        .events
        .name(EventSubject::Qp(qpn), request.user_handle, events);
    let recv_sge = if recv_wqes == 0 {
        0
    } else {
        recv_stride_bytes / 16
    };
    let qp = QpObject {
        qpn,
        recv_wqes,
        recv_sge,
        signal_all: request.sq_sig_all != 0,
    };
    let qp_handle = call.insert(Object::Qp(qp))?;
    call.driver_respond(Mlx5CreateQpResp {
        bfreg_index: NO_BFREG,
        ..Mlx5CreateQpResp::default()
    });
    Ok(CreateQpResp {
        qp_handle,
        qpn,
        max_send_wr: request.max_send_wr,
        max_recv_wr: recv_wqes,
        max_send_sge: request.max_send_sge,
        max_recv_sge: recv_sge,
        max_inline_data: request.max_inline_data,
        reserved: 0,
    })
}

pub(super) fn destroy(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DestroyQp = call.request()?;
    let qp = call.tables.objects.qp(request.qp_handle)?;
    let events_reported = call.context.destroy_qp(qp.qpn)?;
    call.tables.groups.retain(|(qpn, ..)| *qpn != qp.qpn);
    call.tables.objects.remove(request.qp_handle);
    call.respond(DestroyQpResp { events_reported });
    Ok(())
}
