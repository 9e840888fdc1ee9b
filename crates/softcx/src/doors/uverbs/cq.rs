//! Completion queues.

use std::sync::Arc;

use super::arguments::{AttributeKind, AttributeSpec};
use super::{DRIVER_IN, DRIVER_OUT, UverbsCall, async_event, completion_channel, uar};
use crate::device::client::{CqParts, Errno, EventSink};
use crate::doors::abi::*;
use crate::doors::event_pipe::EventPipe;
use crate::doors::events::{Completions, EventSubject};
use crate::doors::limits;
use crate::doors::objects::{CqObject, Object};

/// `uverbs_attrs_create_cq_cmd_attr_ids`.
const HANDLE: u16 = 0;
const CQE: u16 = 1;
const USER_HANDLE: u16 = 2;
const COMP_CHANNEL: u16 = 3;
const COMP_VECTOR: u16 = 4;
const FLAGS: u16 = 5;
const RESP_CQE: u16 = 6;
const EVENT_FD: u16 = 7;
/// `ib_uverbs_ex_create_cq_flags`.
const TIMESTAMPS: u32 = 1;
const IGNORE_OVERRUN: u32 = 1 << 1;
/// `MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD` and `_UAR_PAGE_INDEX`.
const PADDING: u16 = 1;
const UAR_PAGE_INDEX: u16 = 1 << 1;
/// `IB_CQ_MODERATE`.
const MODERATE: u32 = 1;
/// `MLX5_MAX_CQ_PERIOD`.
const MAX_PERIOD_US: u16 = (1 << 12) - 1;

pub(super) fn create(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: CreateCq = call.request()?;
    let response = make(
        call,
        ExCreateCq {
            user_handle: request.user_handle,
            cqe: request.cqe,
            comp_vector: request.comp_vector,
            comp_channel: request.comp_channel,
            ..ExCreateCq::default()
        },
        None,
    )?;
    call.respond(response);
    Ok(())
}

pub(super) fn create_extended(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ExCreateCq = call.extended_request()?;
    if request.comp_mask != 0 || request.reserved != 0 {
        return Err(libc::EINVAL);
    }
    let base = make(call, request, None)?;
    let response = ExCreateCqResp {
        base,
        comp_mask: 0,
        response_length: call.response_length::<ExCreateCqResp>(),
    };
    call.respond(response);
    Ok(())
}

pub(super) const CREATE_ATTRIBUTES: &[AttributeSpec] = &[
    (HANDLE, AttributeKind::New, true),
    (CQE, AttributeKind::In(4, 4), true),
    (USER_HANDLE, AttributeKind::In(8, 8), true),
    (COMP_CHANNEL, AttributeKind::Handle, false),
    (COMP_VECTOR, AttributeKind::In(4, 4), true),
    (FLAGS, AttributeKind::In(4, 8), false),
    (RESP_CQE, AttributeKind::Out(4), true),
    (EVENT_FD, AttributeKind::Handle, false),
    DRIVER_IN,
    DRIVER_OUT,
];

/// The method, which also names the channel of the queue's asynchronous events.
pub(super) fn create_method(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    call.opened()?;
    let comp_channel = if call.arguments.has(COMP_CHANNEL) {
        let number = call.arguments.descriptor(COMP_CHANNEL)?;
        if number < 0 {
            return Err(libc::EBADF);
        }
        number
    } else {
        -1
    };
    let request = ExCreateCq {
        user_handle: call.arguments.long(USER_HANDLE),
        cqe: call.arguments.word(CQE)?,
        comp_vector: call.arguments.word(COMP_VECTOR)?,
        comp_channel,
        flags: call.arguments.flags(FLAGS)?,
        ..ExCreateCq::default()
    };
    let events = async_event::find(call, EVENT_FD)?;
    let response = make(call, request, events)?;
    call.arguments
        .answer_handle(HANDLE, u64::from(response.cq_handle));
    call.arguments.answer(RESP_CQE, &response.cqe.to_ne_bytes());
    call.arguments.mark_valid(DRIVER_OUT.0);
    Ok(())
}

fn make(
    call: &mut UverbsCall<'_>,
    request: ExCreateCq,
    events: Option<Arc<EventPipe>>,
) -> Result<CreateCqResp, Errno> {
    let driver: Mlx5CreateCq = call.driver_request()?;
    if request.comp_vector >= limits::COMPLETION_VECTORS {
        return Err(libc::EINVAL);
    }
    if request.flags & !(TIMESTAMPS | IGNORE_OVERRUN) != 0 || driver.cqe_comp_en != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let padding = driver.flags & PADDING;
    if padding != 0 && driver.cqe_size != 128 {
        return Err(libc::EOPNOTSUPP);
    }
    if driver.flags & !PADDING != UAR_PAGE_INDEX || driver.reserved0 != 0 || driver.reserved1 != 0 {
        return Err(libc::EINVAL);
    }
    let cqes = entries(request.cqe, u32::from(!matches!(driver.cqe_size, 64 | 128)))?;
    let completions = match request.comp_channel {
        ..0 => None,
        number => {
            let channel = completion_channel::find(call, number)?;
            Some(Arc::new(Completions::new(channel, request.user_handle)))
        }
    };
    let sink = completions.clone().map(|it| it as Arc<dyn EventSink>);
    let cqn = call.client().create_cq(CqParts {
        ring: driver.buf_addr,
        cqes,
        cqe_bytes: driver.cqe_size,
        record: driver.db_addr,
        uar: uar::find(call, u32::from(driver.uar_page_index))?,
        events: sink,
        padded: padding != 0,
        ignore_overrun: request.flags & IGNORE_OVERRUN != 0,
    })?;
    call.context
        .events
        .name(EventSubject::Cq(cqn), request.user_handle, events);
    let cq = CqObject {
        cqn,
        cqes,
        completions,
    };
    let cq_handle = call.insert(Object::Cq(cq))?;
    call.driver_respond(Mlx5CreateCqResp { cqn, reserved: 0 });
    Ok(CreateCqResp {
        cq_handle,
        cqe: cqes - 1,
    })
}

/// Entries of a queue for so many completions: one more, and a power of two. EINVAL beyond the limit, or if something else is `wrong`.
fn entries(cqe: u32, wrong: u32) -> Result<u32, Errno> {
    if wrong != 0 || cqe == 0 || cqe >= limits::CQES {
        return Err(libc::EINVAL);
    }
    Ok((cqe + 1).next_power_of_two())
}

pub(super) fn resize(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ResizeCq = call.request()?;
    let driver: Mlx5ResizeCq = call.driver_request()?;
    let cq = call.tables.objects.cq(request.cq_handle)?;
    let odd = u32::from(driver.reserved0) | driver.reserved1;
    let odd = odd | u32::from(!matches!(driver.cqe_size, 64 | 128));
    let cqes = entries(request.cqe, odd)?;
    if cqes != cq.cqes {
        let cqe_bytes = u32::from(driver.cqe_size);
        call.client()
            .resize_cq(cq.cqn, driver.buf_addr, cqes, cqe_bytes)?;
        if let Some(Object::Cq(cq)) = call.tables.objects.get_mut(request.cq_handle) {
            cq.cqes = cqes;
        }
    }
    call.respond(ResizeCqResp {
        cqe: cqes - 1,
        reserved: 0,
    });
    Ok(())
}

pub(super) fn modify(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: ExModifyCq = call.extended_request()?;
    if request.attr_mask == 0 || request.reserved != 0 {
        return Err(libc::EINVAL);
    }
    if request.attr_mask & !MODERATE != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let cq = call.tables.objects.cq(request.cq_handle)?;
    let attributes = request.attr;
    if attributes.cq_period > MAX_PERIOD_US {
        return Err(libc::EINVAL);
    }
    call.context
        .client
        .modify_cq(cq.cqn, attributes.cq_count, attributes.cq_period)
}

pub(super) fn destroy(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let request: DestroyCq = call.request()?;
    let cq = call.tables.objects.cq(request.cq_handle)?;
    let (comp_events_reported, async_events_reported) = call.context.destroy_cq(&cq)?;
    call.tables.objects.remove(request.cq_handle);
    call.respond(DestroyCqResp {
        comp_events_reported,
        async_events_reported,
    });
    Ok(())
}
