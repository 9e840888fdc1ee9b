//! Functions of the host that a CUDA stream calls.
#![allow(unsafe_code)] // gives the driver a function to call, and data

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::letting_go::{Dropped, drop_elsewhere};
use super::shared::Shared;
use super::word::STATUS_STREAM;
use crate::stream::{act_as, message};

pub(super) struct HostCall {
    /// Kept until it has run, and with it the context.
    pub(super) stream: Arc<Shared>,
    pub(super) function: Box<dyn FnOnce() + Send>,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside of a function that the driver called for a stream of ours. It must not call the driver then.
pub(super) fn in_host_function() -> bool {
    INSIDE.get()
}

/// Where the driver calls a function of the host.
pub(super) unsafe extern "C" fn call_host(data: *mut c_void) {
    // SAFETY: `launch_host` gave it, and the driver calls once.
    let call = unsafe { Box::from_raw(data.cast::<HostCall>()) };
    let HostCall { stream, function } = *call;
    INSIDE.set(true);
    let called: std::result::Result<(), Box<dyn Any + Send>> =
        catch_unwind(AssertUnwindSafe(|| act_as(stream.id, function)));
    INSIDE.set(false);
    if let Err(panicked) = called {
        let reason = format!("panicked: {}", message(panicked));
        stream.count.words.note(STATUS_STREAM);
        stream.fault.stick(reason);
    }
    // Not here, if it is the last handle: what it would do then calls the driver.
    drop_elsewhere(Dropped::Stream(stream));
}
