//! Calls of verbs: their errors, each with the name of the call.

use std::ffi::c_int;
use std::ptr::NonNull;

use crate::{Error, Result};

pub(super) fn failed(call: &'static str, errno: i32) -> Error {
    Error::System {
        operation: call,
        errno,
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// A call that gives an object, or null and errno.
pub(super) fn object<T>(call: &'static str, of: impl FnOnce() -> *mut T) -> Result<NonNull<T>> {
    #[cfg(test)]
    injection::pass(call)?;
    let made = NonNull::new(of()).ok_or_else(|| failed(call, last_errno()))?;
    #[cfg(test)]
    injection::made();
    Ok(made)
}

/// A call that destroys an object of [`object`], in a drop: its failure cannot be returned there, and means a wrong order of drops.
pub(super) fn release(call: &'static str, of: impl FnOnce() -> c_int) {
    let result = of();
    // Where a device has refused to deregister memory, the domain of the memory stays, too.
    debug_assert!(result == 0 || call == "ibv_dealloc_pd", "{call}: {result}");
    #[cfg(test)]
    injection::released();
}

/// The same for memory, which a device may refuse to give up.
pub(super) fn deregister(of: impl FnOnce() -> c_int) -> Result<()> {
    let call = "ibv_dereg_mr";
    #[cfg(test)]
    injection::pass_deregistration(call)?;
    answer(call, of())?;
    #[cfg(test)]
    injection::released();
    Ok(())
}

/// A call that gives 0 or an errno; some of them give -1 and errno instead.
pub(super) fn status(call: &'static str, of: impl FnOnce() -> c_int) -> Result<()> {
    #[cfg(test)]
    injection::pass(call)?;
    answer(call, of())
}

fn answer(call: &'static str, result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        errno if errno > 0 => Err(failed(call, errno)),
        _ => Err(failed(call, last_errno())),
    }
}

/// Failures at the caller's choice.
#[cfg(test)]
pub(super) mod injection {
    use std::cell::Cell;

    use crate::Result;

    /// What an injected failure says; no call here gives it by itself.
    pub(in crate::verbs) const ERRNO: i32 = libc::ENOTBLK;

    thread_local! {
        static CALLS_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
        static ALIVE: Cell<i32> = const { Cell::new(0) };
        static DEREGISTRATIONS_FAIL: Cell<u32> = const { Cell::new(0) };
    }

    /// Has the device refuse this thread's next deregistrations, as many as that.
    pub(in crate::verbs) fn fail_deregistrations(count: u32) {
        DEREGISTRATIONS_FAIL.set(count);
    }

    pub(super) fn pass_deregistration(call: &'static str) -> Result<()> {
        match DEREGISTRATIONS_FAIL.get() {
            0 => Ok(()),
            left => {
                DEREGISTRATIONS_FAIL.set(left - 1);
                Err(super::failed(call, ERRNO))
            }
        }
    }

    /// Objects that this thread made and did not destroy.
    pub(in crate::verbs) fn alive() -> i32 {
        ALIVE.get()
    }

    pub(super) fn made() {
        ALIVE.set(ALIVE.get() + 1);
    }

    pub(super) fn released() {
        ALIVE.set(ALIVE.get() - 1);
    }

    /// Has this thread's call after the next `calls` fail, and all behind it succeed.
    /// Whether the failure asked for before never came.
    pub(in crate::verbs) fn fail_after(calls: Option<u32>) -> bool {
        CALLS_LEFT.replace(calls).is_some()
    }

    pub(super) fn pass(call: &'static str) -> Result<()> {
        match CALLS_LEFT.get() {
            Some(0) => {
                CALLS_LEFT.set(None);
                Err(super::failed(call, ERRNO))
            }
            left => {
                CALLS_LEFT.set(left.map(|left| left - 1));
                Ok(())
            }
        }
    }
}
