//! Words of memory as signals.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers

use std::ffi::c_int;

use crate::argument::{choice, timeout};
use crate::boundary::{call, guard};
use crate::failure::Failure;
use crate::handle::get;
use crate::region::doorbell_region;
use crate::stream::doorbell_stream;
use crate::ticket::{doorbell_ticket, ticket_place};
use doorbell_rs::{Condition, Condition64};

/// The word minus the value is not negative, as a signed 32-bit number.
pub const DOORBELL_WAIT_GEQ: u32 = 0;
/// The word has a bit of the value.
pub const DOORBELL_WAIT_AND: u32 = 1;
/// The word lacks a bit that the value lacks.
pub const DOORBELL_WAIT_NOR: u32 = 2;

/// The word is the value.
pub const DOORBELL_WAIT_EQ: u32 = 3;

pub(super) fn condition(condition: u32, value: u32) -> Result<Condition, Failure> {
    match condition {
        DOORBELL_WAIT_GEQ => Ok(Condition::GreaterOrEqual(value)),
        DOORBELL_WAIT_AND => Ok(Condition::And(value)),
        DOORBELL_WAIT_NOR => Ok(Condition::Nor(value)),
        DOORBELL_WAIT_EQ => Ok(Condition::Equal(value)),
        _ => Err(choice("condition", condition, DOORBELL_WAIT_EQ)),
    }
}

fn condition64(condition: u32, value: u64) -> Result<Condition64, Failure> {
    match condition {
        DOORBELL_WAIT_GEQ => Ok(Condition64::GreaterOrEqual(value)),
        DOORBELL_WAIT_AND => Ok(Condition64::And(value)),
        DOORBELL_WAIT_NOR => Ok(Condition64::Nor(value)),
        DOORBELL_WAIT_EQ => Ok(Condition64::Equal(value)),
        _ => Err(choice("condition", condition, DOORBELL_WAIT_EQ)),
    }
}

/// Lets what is queued later wait for a word.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_value32(
    stream: *mut doorbell_stream,
    region: *const doorbell_region,
    offset: u64,
    wait_condition: u32,
    value: u32,
    timeout_ms: i64,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, region) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(region, "region")?)
        };
        Ok(place.set(doorbell_rs::stream_wait_value32(
            stream.executor(),
            &region.inner,
            offset,
            condition(wait_condition, value)?,
            timeout(timeout_ms)?,
        )?))
    })
}

/// Stores a word, after what was queued before.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_write_value32(
    stream: *mut doorbell_stream,
    region: *const doorbell_region,
    offset: u64,
    value: u32,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, region) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(region, "region")?)
        };
        let executor = stream.executor();
        let ticket = doorbell_rs::stream_write_value32(executor, &region.inner, offset, value)?;
        Ok(place.set(ticket))
    })
}

/// Waits for a word in the calling thread.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_wait_value32(
    region: *const doorbell_region,
    offset: u64,
    wait_condition: u32,
    value: u32,
    timeout_ms: i64,
) -> c_int {
    call!(region = get(region), || {
        let condition = condition(wait_condition, value)?;
        doorbell_rs::wait_value32(&region.inner, offset, condition, timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Lets what is queued later wait for a word of 64 bits.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_value64(
    stream: *mut doorbell_stream,
    region: *const doorbell_region,
    offset: u64,
    wait_condition: u32,
    value: u64,
    timeout_ms: i64,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, region) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(region, "region")?)
        };
        Ok(place.set(doorbell_rs::stream_wait_value64(
            stream.executor(),
            &region.inner,
            offset,
            condition64(wait_condition, value)?,
            timeout(timeout_ms)?,
        )?))
    })
}

/// Lets what is queued later wait for a count, which is more with each launch of a captured graph.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_count64(
    stream: *mut doorbell_stream,
    region: *const doorbell_region,
    offset: u64,
    first: u64,
    step: u64,
    timeout_ms: i64,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, region) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(region, "region")?)
        };
        Ok(place.set(doorbell_rs::stream_wait_count64(
            stream.executor(),
            &region.inner,
            offset,
            (first, step),
            timeout(timeout_ms)?,
        )?))
    })
}

/// Stores a word of 64 bits, after what was queued before.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_write_value64(
    stream: *mut doorbell_stream,
    region: *const doorbell_region,
    offset: u64,
    value: u64,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, region) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(region, "region")?)
        };
        let executor = stream.executor();
        let ticket = doorbell_rs::stream_write_value64(executor, &region.inner, offset, value)?;
        Ok(place.set(ticket))
    })
}

/// Waits for a word of 64 bits in the calling thread.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_wait_value64(
    region: *const doorbell_region,
    offset: u64,
    wait_condition: u32,
    value: u64,
    timeout_ms: i64,
) -> c_int {
    call!(region = get(region), || {
        let condition = condition64(wait_condition, value)?;
        doorbell_rs::wait_value64(&region.inner, offset, condition, timeout(timeout_ms)?)?;
        Ok(0)
    })
}
