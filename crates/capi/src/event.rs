//! Events.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;

use crate::argument::{descriptor, out, out_handle, timeout};
use crate::boundary::{call, guard};
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use doorbell_rs::Event;

/// Threads that wait for the event sleep instead of
/// spinning.
pub const DOORBELL_EVENT_BLOCKING: u32 = 1;
/// The event takes no time.
pub const DOORBELL_EVENT_NO_TIMING: u32 = 2;

/// A mark that a stream passes.
pub struct doorbell_event {
    pub(super) inner: Event,
}

impl CObject for doorbell_event {
    const NAME: &'static str = "doorbell_event";
}

/// Makes an event.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_create(
    flags: u32,
    event: *mut *mut doorbell_event,
) -> c_int {
    call!(place = out_handle(event), || {
        if flags & !(DOORBELL_EVENT_BLOCKING | DOORBELL_EVENT_NO_TIMING) != 0 {
            let reason = format!("{flags:#x} has flags that do not exist");
            return Err(Failure::argument("flags", reason));
        }
        let mut inner = if flags & DOORBELL_EVENT_BLOCKING == 0 {
            Event::new()
        } else {
            Event::blocking()
        };
        if flags & DOORBELL_EVENT_NO_TIMING != 0 {
            inner = inner.without_timing();
        }
        Ok(place.set(doorbell_event { inner }))
    })
}

/// Destroys the handle of an event.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_destroy(event: *mut doorbell_event) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(event, "event") }.map(|()| 0))
}

/// Whether the work that an event stands for is done.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_query(event: *const doorbell_event) -> c_int {
    call!(event = get(event), || { Ok(event.inner.query()?.into()) })
}

/// Waits for the work that an event stands for.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_synchronize(
    event: *const doorbell_event,
    timeout_ms: i64,
) -> c_int {
    call!(event = get(event), || {
        event.inner.synchronize(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Notifies a descriptor when the work that an event stands for is done.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_notify(
    event: *const doorbell_event,
    eventfd: c_int,
) -> c_int {
    call!(event = get(event), || {
        // SAFETY: the caller does not close it within this call.
        let eventfd = unsafe { descriptor(eventfd, "eventfd") }?;
        event.inner.notify(eventfd)?;
        Ok(0)
    })
}

/// The time between two events.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_event_elapsed_ns(
    start: *const doorbell_event,
    end: *const doorbell_event,
    elapsed_ns: *mut u64,
) -> c_int {
    call!(
        place = out(elapsed_ns),
        start = get(start),
        end = get(end),
        || {
            let elapsed = start.inner.elapsed(&end.inner)?;
            place.write(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
            Ok(0)
        }
    )
}
