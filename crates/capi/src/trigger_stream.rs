//! Streams that kernels of the application execute.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};

use crate::argument::{out, out_handle, text};
use crate::boundary::{call, guard};
use crate::failure::Failure;
use crate::handle::get;
use crate::stream::doorbell_stream;
#[cfg(feature = "cuda")]
use doorbell_rs::{CudaContext, TriggerStream};
use doorbell_rs::{Error, StateKind};

/// 64-bit words of a trigger.
pub const DOORBELL_TRIGGER_WORDS: usize = 60;

/// What kernels execute.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_trigger {
    pub control: u64,
    pub turn: u64,
    pub number: u64,
    pub word_count: u32,
    pub failures: u32,
    pub words: [u64; DOORBELL_TRIGGER_WORDS],
}

impl doorbell_trigger {
    /// One that there was nothing for.
    const EMPTY: doorbell_trigger = doorbell_trigger {
        control: 0,
        turn: 0,
        number: 0,
        word_count: 0,
        failures: 0,
        words: [0; DOORBELL_TRIGGER_WORDS],
    };
}

/// Makes a trigger stream.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_create_trigger(
    name: *const c_char,
    stream: *mut *mut doorbell_stream,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about texts and places for handles.
        let (place, name) = unsafe {
            let place = out_handle(stream, "stream")?;
            let name = if name.is_null() {
                "trigger"
            } else {
                text(name, "name")?
            };
            (place, name)
        };
        Ok(place.set(make(name)?))
    })
}

/// Takes what was queued.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_take_trigger(
    stream: *mut doorbell_stream,
    trigger: *mut doorbell_trigger,
) -> c_int {
    call!(place = out(trigger), stream = get(stream), || {
        let taken = take(stream)?;
        let is_taken = taken.is_some();
        place.write(taken.unwrap_or(doorbell_trigger::EMPTY));
        Ok(is_taken.into())
    })
}

/// Gives up what no kernel will execute.
///
/// # Safety
/// As the header says of handles, and of the triggers that were taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_discard_triggers(stream: *mut doorbell_stream) -> c_int {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe { discard(get(stream, "stream")?) }?;
        Ok(0)
    })
}

#[cold]
fn no_trigger_stream() -> Failure {
    Failure::Library(Error::state(
        StateKind::WrongKind,
        "triggers of a stream",
        "it is not a trigger stream; doorbell_stream_create_trigger creates one",
    ))
}

#[cfg(feature = "cuda")]
fn make(name: &str) -> Result<doorbell_stream, Failure> {
    let context = CudaContext::current()?;
    Ok(doorbell_stream::Trigger(TriggerStream::new(
        &context, name,
    )?))
}

#[cfg(feature = "cuda")]
fn take(stream: &doorbell_stream) -> Result<Option<doorbell_trigger>, Failure> {
    let doorbell_stream::Trigger(kernels) = stream else {
        return Err(no_trigger_stream());
    };
    Ok(kernels.take()?.map(|trigger| {
        // SAFETY: both are repr(C) with the same fields, integers: the drift test and `trigger.rs` hold both to the header.
        unsafe { std::mem::transmute::<[u8; 512], doorbell_trigger>(trigger.to_bytes()) }
    }))
}

/// # Safety
/// As [`TriggerStream::discard_taken`].
#[cfg(feature = "cuda")]
unsafe fn discard(stream: &doorbell_stream) -> Result<(), Failure> {
    let doorbell_stream::Trigger(kernels) = stream else {
        return Err(no_trigger_stream());
    };
    // SAFETY: the caller's promise.
    Ok(unsafe { kernels.discard_taken() }?)
}

#[cfg(not(feature = "cuda"))]
fn make(_: &str) -> Result<doorbell_stream, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

#[cfg(not(feature = "cuda"))]
fn take(_: &doorbell_stream) -> Result<Option<doorbell_trigger>, Failure> {
    Err(no_trigger_stream())
}

#[cfg(not(feature = "cuda"))]
unsafe fn discard(_: &doorbell_stream) -> Result<(), Failure> {
    Err(no_trigger_stream())
}
