//! Host functions that a CUDA stream calls (`cuLaunchHostFunc`).
#![allow(unsafe_code)] // gives the driver a function to call, and data

use std::cell::Cell;
use std::ffi::c_void;

use cudarc::driver::sys::{self, CUstream};

use super::driver::check;
use crate::Error;

pub(super) type HostFunction = Box<dyn FnOnce() + Send>;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside of a host function of this library's. It must not call the driver then.
pub(super) fn in_host_function() -> bool {
    INSIDE.get()
}

/// Has the stream call `function` in its turn, from a thread of the driver. The stream's context is current. `function` must not panic.
///
/// # Errors
/// [`Error::Cuda`], and the function, which was not called.
///
/// # Safety
/// `stream` is a stream that lives.
pub(super) unsafe fn launch(
    stream: CUstream,
    function: HostFunction,
) -> std::result::Result<(), (Error, HostFunction)> {
    let data = Box::into_raw(Box::new(function));
    // SAFETY: the driver calls `call` once, with `data`, which then belongs to that call.
    let launched = check("cuLaunchHostFunc", unsafe {
        sys::cuLaunchHostFunc(stream, Some(call), data.cast())
    });
    // SAFETY: made above, and not given away.
    launched.map_err(|error| (error, *unsafe { Box::from_raw(data) }))
}

unsafe extern "C" fn call(data: *mut c_void) {
    // SAFETY: `launch` gave it, and the driver calls once.
    let function = unsafe { Box::from_raw(data.cast::<HostFunction>()) };
    INSIDE.set(true);
    function();
    INSIDE.set(false);
}
