//! Shared receive queues.

use super::{Call, limits};
use crate::soft::client::{Errno, SrqParts};
use crate::softcx::abi::*;
use crate::softcx::context::Context;
use crate::softcx::events::Subject;
use crate::softcx::objects::{Object, Srq};

/// Bytes of a next segment and of a data segment, and of the shortest entry.
const SEGMENT_BYTES: u32 = 16;
const LEAST_STRIDE_BYTES: u32 = 32;
/// `ib_srq_attr_mask`.
const MAX_WR: u32 = 1;
const LIMIT: u32 = 1 << 1;

pub(super) fn create(call: &mut Call<'_>) -> Result<(), Errno> {
    let request: CreateSrq = call.request()?;
    make(
        call,
        CreateXsrq {
            user_handle: request.user_handle,
            pd_handle: request.pd_handle,
            max_wr: request.max_wr,
            max_sge: request.max_sge,
            srq_limit: request.srq_limit,
            ..CreateXsrq::default()
        },
    )
}

/// The same with a type, of which only the basic one is emulated: no XRC, no tag matching.
pub(super) fn create_extended(call: &mut Call<'_>) -> Result<(), Errno> {
    let request: CreateXsrq = call.request()?;
    match request.srq_type {
        0 => make(call, request),
        1 | 2 => Err(libc::EOPNOTSUPP),
        _ => Err(libc::EINVAL),
    }
}

fn make(call: &mut Call<'_>, request: CreateXsrq) -> Result<(), Errno> {
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
    let srqn = call.context.client.create_srq(SrqParts {
        pd,
        ring: driver.buf_addr,
        wqes,
        stride_bytes,
        record: driver.db_addr,
        limit: request.srq_limit,
    })?;
    call.context
        .events
        .name(Subject::Srq(srqn), request.user_handle);
    let srq = Srq {
        srqn,
        wqes,
        max_sge: request.max_sge,
    };
    let srq_handle = call.insert(Object::Srq(srq))?;
    call.respond(CreateSrqResp {
        srq_handle,
        max_wr: wqes - 1,
        max_sge: request.max_sge,
        srqn,
    });
    call.driver_respond(Mlx5CreateSrqResp { srqn, reserved: 0 });
    Ok(())
}

pub(super) fn modify(call: &mut Call<'_>) -> Result<(), Errno> {
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

pub(super) fn query(call: &mut Call<'_>) -> Result<(), Errno> {
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

pub(super) fn destroy(call: &mut Call<'_>) -> Result<(), Errno> {
    let request: DestroySrq = call.request()?;
    let srq = call.tables.objects.srq(request.srq_handle)?;
    let events_reported = remove(call.context, srq.srqn)?;
    call.tables.objects.remove(request.srq_handle);
    call.respond(DestroySrqResp { events_reported });
    Ok(())
}

/// How many of its events the process has read.
pub(super) fn remove(context: &Context, srqn: u32) -> Result<u32, Errno> {
    context.client.destroy_srq(srqn)?;
    Ok(context.events.forget(Subject::Srq(srqn)))
}
