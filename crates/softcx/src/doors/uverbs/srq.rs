//! Shared receive queues.

use std::sync::Arc;

use super::arguments::{AttributeKind, AttributeSpec};
use super::{DRIVER_IN, DRIVER_OUT, UverbsCall, async_event};
use crate::device::client::{Errno, SrqParts};
use crate::doors::abi::*;
use crate::doors::event_pipe::EventPipe;
use crate::doors::events::EventSubject;
use crate::doors::limits;
use crate::doors::objects::{Object, SrqObject};

/// `uverbs_attrs_create_srq_cmd_attr_ids`.
const HANDLE: u16 = 0;
const PD: u16 = 1;
const XRCD: u16 = 2;
const CQ: u16 = 3;
const USER_HANDLE: u16 = 4;
const MAX_WR_IN: u16 = 5;
const MAX_SGE_IN: u16 = 6;
const LIMIT_IN: u16 = 7;
const MAX_NUM_TAGS: u16 = 8;
const TYPE: u16 = 9;
const EVENT_FD: u16 = 10;
const RESP_MAX_WR: u16 = 11;
const RESP_MAX_SGE: u16 = 12;
const RESP_SRQ_NUM: u16 = 13;
/// Bytes of a next segment and of a data segment, and of the shortest entry.
const SEGMENT_BYTES: u32 = 16;
const LEAST_STRIDE_BYTES: u32 = 32;
/// `ib_srq_attr_mask`.
const MAX_WR: u32 = 1;
const LIMIT: u32 = 1 << 1;

pub(super) fn create(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: CreateSrq = call.request()?;
    let response = make(
        call,
        CreateXsrq {
            user_handle: request.user_handle,
            pd_handle: request.pd_handle,
            max_wr: request.max_wr,
            max_sge: request.max_sge,
            srq_limit: request.srq_limit,
            ..CreateXsrq::default()
        },
        None,
    )?;
    call.respond(response);
    Ok(())
}

/// The same with a type, of which only the basic one is emulated: no XRC, no tag matching.
pub(super) fn create_extended(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: CreateXsrq = call.request()?;
    let response = make(call, request, None)?;
    call.respond(response);
    Ok(())
}

pub(super) const CREATE_ATTRIBUTES: &[AttributeSpec] = &[
    (HANDLE, AttributeKind::New, true),
    (PD, AttributeKind::Handle, false),
    (XRCD, AttributeKind::Handle, false),
    (CQ, AttributeKind::Handle, false),
    (USER_HANDLE, AttributeKind::In(8, 8), true),
    (MAX_WR_IN, AttributeKind::In(4, 4), true),
    (MAX_SGE_IN, AttributeKind::In(4, 4), true),
    (LIMIT_IN, AttributeKind::In(4, 4), true),
    (MAX_NUM_TAGS, AttributeKind::In(4, 4), false),
    (TYPE, AttributeKind::In(8, 8), true),
    (EVENT_FD, AttributeKind::Handle, false),
    (RESP_MAX_WR, AttributeKind::Out(4), true),
    (RESP_MAX_SGE, AttributeKind::Out(4), true),
    (RESP_SRQ_NUM, AttributeKind::Out(4), false),
    DRIVER_IN,
    DRIVER_OUT,
];

/// The method, which also names the channel of the queue's asynchronous events.
pub(super) fn create_method(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    let request = CreateXsrq {
        user_handle: call.arguments.long(USER_HANDLE),
        srq_type: call.arguments.number(TYPE, u64::from(u32::MAX))? as u32,
        pd_handle: call.arguments.handle(PD).unwrap_or(u32::MAX),
        max_wr: call.arguments.word(MAX_WR_IN)?,
        max_sge: call.arguments.word(MAX_SGE_IN)?,
        srq_limit: call.arguments.word(LIMIT_IN)?,
        ..CreateXsrq::default()
    };
    let events = async_event::find(call, EVENT_FD)?;
    let response = make(call, request, events)?;
    let arguments = &mut call.arguments;
    arguments.answer_handle(HANDLE, u64::from(response.srq_handle));
    arguments.answer(RESP_MAX_WR, &response.max_wr.to_ne_bytes());
    arguments.answer(RESP_MAX_SGE, &response.max_sge.to_ne_bytes());
    arguments.answer(RESP_SRQ_NUM, &response.srqn.to_ne_bytes());
    arguments.mark_valid(DRIVER_OUT.0);
    Ok(())
}

fn make(
    call: &mut UverbsCall<'_>,
    request: CreateXsrq,
    events: Option<Arc<EventPipe>>,
) -> Result<CreateSrqResp, Errno> {
    match request.srq_type {
        0 => {}
        1 | 2 => return Err(libc::EOPNOTSUPP),
        _ => return Err(libc::EINVAL),
    }
    let driver: Mlx5CreateSrq = call.driver_request()?;
    if request.max_wr >= limits::SRQ_WQES
        || request.max_sge > limits::SRQ_SGE
        || driver.reserved0 != 0
        || driver.reserved1 != 0
    {
        return Err(libc::EINVAL);
    }
    // MLX5_SRQ_FLAG_SIGNATURE
    if driver.flags != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let pd = call.tables.objects.pd(request.pd_handle)?;
    let wqes = (request.max_wr + 1).next_power_of_two();
    let stride_bytes = (SEGMENT_BYTES + request.max_sge * SEGMENT_BYTES)
        .next_power_of_two()
        .max(LEAST_STRIDE_BYTES);
    // The limit is not used, as in `mlx5_ib_create_srq`: only a modify call arms the event.
    let srqn = call.client().create_srq(SrqParts {
        pd,
        ring: driver.buf_addr,
        wqes,
        stride_bytes,
        record: driver.db_addr,
    })?;
    call.context
        .events
        .name(EventSubject::Srq(srqn), request.user_handle, events);
    let srq = SrqObject {
        srqn,
        wqes,
        max_sge: request.max_sge,
    };
    let srq_handle = call.insert(Object::Srq(srq))?;
    call.driver_respond(Mlx5CreateSrqResp { srqn, reserved: 0 });
    Ok(CreateSrqResp {
        srq_handle,
        max_wr: wqes - 1,
        max_sge: request.max_sge,
        srqn,
    })
}

pub(super) fn modify(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ModifySrq = call.request()?;
    let srq = call.tables.objects.srq(request.srq_handle)?;
    if request.attr_mask & !(MAX_WR | LIMIT) != 0 {
        return Err(libc::EINVAL);
    }
    // Nor does a card resize one.
    if request.attr_mask & MAX_WR != 0 {
        return Err(libc::EINVAL);
    }
    if request.attr_mask & LIMIT == 0 {
        return Ok(());
    }
    if request.srq_limit >= srq.wqes {
        return Err(libc::EINVAL);
    }
    let client = &call.context.client;
    client.set_srq_limit(srq.srqn, request.srq_limit)
}

pub(super) fn query(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: QuerySrq = call.request()?;
    let srq = call.tables.objects.srq(request.srq_handle)?;
    let srq_limit = call.context.client.srq_limit(srq.srqn)?;
    call.respond(QuerySrqResp {
        max_wr: srq.wqes - 1,
        max_sge: srq.max_sge,
        srq_limit,
        reserved: 0,
    });
    Ok(())
}

pub(super) fn destroy(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DestroySrq = call.request()?;
    let srq = call.tables.objects.srq(request.srq_handle)?;
    let events_reported = call.context.destroy_srq(srq.srqn)?;
    call.tables.objects.remove(request.srq_handle);
    call.respond(DestroySrqResp { events_reported });
    Ok(())
}
