//! Posting and polling in the calling thread.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers

use std::ffi::c_int;

use crate::argument::{DOORBELL_DEFAULT_TIMEOUT, out, queue_kind_of, timeout};
use crate::boundary::{call, guard};
use crate::endpoint::doorbell_endpoint;
use crate::handle::get;
use crate::ticket::{doorbell_ticket, ticket_place};
use crate::work::{doorbell_completion, doorbell_slice, doorbell_work, with_slices, with_work};

/// Posts a work request now.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_post_send(
    endpoint: *mut doorbell_endpoint,
    work: *const doorbell_work,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and work requests.
        unsafe {
            let place = ticket_place(ticket);
            let endpoint = get(endpoint, "endpoint")?;
            with_work(
                work,
                |work| Ok(place.set(endpoint.lock()?.post_send(work)?)),
            )
        }
    })
}

/// Posts a receive now.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_post_recv(
    endpoint: *mut doorbell_endpoint,
    wr_id: u64,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let place = ticket_place(ticket);
            let endpoint = get(endpoint, "endpoint")?;
            with_slices(slices, slice_count, |slices| {
                Ok(place.set(endpoint.lock()?.post_recv(wr_id, slices)?))
            })
        }
    })
}

/// Takes the next completion, if it is there.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_poll_cq(
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    completion: *mut doorbell_completion,
) -> c_int {
    call!(place = out(completion), endpoint = get(endpoint), || {
        match endpoint.lock()?.poll_cq(queue_kind_of(queue_kind)?)? {
            Some(completion) => {
                place.write(completion.into());
                Ok(1)
            }
            None => Ok(0),
        }
    })
}

/// Waits for the next completion.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_wait_cq(
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    timeout_ms: i64,
    completion: *mut doorbell_completion,
) -> c_int {
    call!(place = out(completion), endpoint = get(endpoint), || {
        let mut endpoint = endpoint.lock()?;
        let timeout = match timeout_ms {
            DOORBELL_DEFAULT_TIMEOUT => endpoint.config().wait_timeout,
            _ => timeout(timeout_ms)?,
        };
        place.write(
            endpoint
                .wait_cq(queue_kind_of(queue_kind)?, timeout)?
                .into(),
        );
        Ok(0)
    })
}
