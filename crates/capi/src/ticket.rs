//! Tickets: what became of a queued operation.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;
use std::mem::MaybeUninit;

use crate::argument::{descriptor, out, out_optional, timeout};
use crate::boundary::{call, guard};
use crate::error::doorbell_failure;
use crate::handle::{CObject, create, destroy, get};
use doorbell_rs::{Status, Ticket};

/// Prepared, and not yet given to a stream.
pub const DOORBELL_STATUS_PREPARED: c_int = 0;
/// In a stream's queue.
pub const DOORBELL_STATUS_QUEUED: c_int = 1;
/// The stream has executed the doorbell, or waits now.
pub const DOORBELL_STATUS_RUNG: c_int = 2;
/// Done.
pub const DOORBELL_STATUS_COMPLETE: c_int = 3;
/// Failed.
pub const DOORBELL_STATUS_FAILED: c_int = 4;
/// Dropped before a stream had it.
pub const DOORBELL_STATUS_CANCELLED: c_int = 5;
/// Its doorbell was rung, and no completion tells whether it was carried out.
pub const DOORBELL_STATUS_UNKNOWN: c_int = 6;
/// Its stream had failed, and its doorbell is never rung.
pub const DOORBELL_STATUS_DISCARDED: c_int = 7;

/// A handle of one queued operation.
pub struct doorbell_ticket {
    inner: Ticket,
}

impl doorbell_ticket {
    pub(super) fn new(inner: Ticket) -> doorbell_ticket {
        doorbell_ticket { inner }
    }
}

impl CObject for doorbell_ticket {
    const NAME: &'static str = "doorbell_ticket";
}

/// What is known of an operation that is complete.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_details {
    pub len_bytes: u32,
    pub imm: u32,
    pub has_imm: u32,
    pub is_write: u32,
}

/// A place for a ticket, if the caller wants one: null until there is one.
///
/// # Safety
/// The pointer is null, or aligned and good for a write until the place is gone.
#[inline]
pub(super) unsafe fn ticket_place<'a>(place: *mut *mut doorbell_ticket) -> TicketOut<'a> {
    // SAFETY: the caller's promise.
    let mut place = unsafe { out_optional(place) };
    if let Some(place) = &mut place {
        place.write(std::ptr::null_mut());
    }
    TicketOut(place)
}

/// See [`ticket_place`].
pub(super) struct TicketOut<'a>(Option<&'a mut MaybeUninit<*mut doorbell_ticket>>);

impl TicketOut<'_> {
    /// Gives the ticket away, or drops it; the code of success.
    #[inline]
    pub(super) fn set(self, inner: Ticket) -> c_int {
        if let Some(place) = self.0 {
            place.write(create(doorbell_ticket { inner }));
        }
        0
    }
}

/// The state of an operation.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_status(
    ticket: *const doorbell_ticket,
    failure: *mut doorbell_failure,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, ticket) = unsafe { (out_optional(failure), get(ticket, "ticket")?) };
        Ok(report_status(ticket.inner.status(), place))
    })
}

/// The state of an operation, as far as it is known without a wait.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_status_now(
    ticket: *const doorbell_ticket,
    failure: *mut doorbell_failure,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, ticket) = unsafe { (out_optional(failure), get(ticket, "ticket")?) };
        Ok(report_status(ticket.inner.status_now(), place))
    })
}

fn report_status(status: Status, place: Option<&mut MaybeUninit<doorbell_failure>>) -> c_int {
    match status {
        Status::Prepared => DOORBELL_STATUS_PREPARED,
        Status::Queued => DOORBELL_STATUS_QUEUED,
        Status::Rung => DOORBELL_STATUS_RUNG,
        Status::Complete => DOORBELL_STATUS_COMPLETE,
        Status::Cancelled => DOORBELL_STATUS_CANCELLED,
        Status::Discarded => DOORBELL_STATUS_DISCARDED,
        Status::Failed(failure) | Status::Unknown(failure) => {
            if let Some(place) = place {
                place.write(failure.into());
            }
            match status {
                Status::Unknown(_) => DOORBELL_STATUS_UNKNOWN,
                _ => DOORBELL_STATUS_FAILED,
            }
        }
        other => unreachable!("{other:?} is no value of this version"),
    }
}

/// Waits until an operation is complete.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_wait(
    ticket: *const doorbell_ticket,
    timeout_ms: i64,
) -> c_int {
    call!(ticket = get(ticket), || {
        ticket.inner.wait(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Notifies a descriptor when an operation is over.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_notify(
    ticket: *const doorbell_ticket,
    eventfd: c_int,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller does not close it within this call.
        let eventfd = unsafe { descriptor(eventfd, "eventfd") }?;
        ticket.inner.notify(eventfd)?;
        Ok(0)
    })
}

/// What a complete receive, read or atomic has brought.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_details(
    ticket: *const doorbell_ticket,
    details: *mut doorbell_details,
) -> c_int {
    call!(place = out(details), ticket = get(ticket), || {
        let Some(details) = ticket.inner.transfer_details() else {
            return Ok(0);
        };
        place.write(doorbell_details {
            len_bytes: details.len_bytes,
            imm: details.imm.unwrap_or(0),
            has_imm: details.imm.is_some().into(),
            is_write: details.is_write.into(),
        });
        Ok(1)
    })
}

/// How many launches have executed an operation of a captured graph.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_launches(
    ticket: *const doorbell_ticket,
    launches: *mut u64,
) -> c_int {
    call!(place = out(launches), ticket = get(ticket), || {
        #[cfg(feature = "cuda")]
        if let Some(launches) = ticket.inner.launches() {
            place.write(launches);
            return Ok(1);
        }
        let _ = (place, ticket);
        Ok(0)
    })
}

/// Destroys a ticket.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_ticket_destroy(ticket: *mut doorbell_ticket) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(ticket, "ticket") }.map(|()| 0))
}
