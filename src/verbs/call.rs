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

/// A call that destroys an object of [`object`], in a drop: its failure cannot be returned there. It means a wrong order of drops or a failure of the device;
/// then this returns false.
pub(super) fn release(call: &'static str, of: impl FnOnce() -> c_int) -> bool {
    let result = of();
    // A device may refuse to deregister memory, and the domain of the memory then stays, too.
    let may_fail = matches!(call, "ibv_dereg_mr" | "ibv_dealloc_pd");
    debug_assert!(result == 0 || may_fail, "{call}: {result}");
    #[cfg(test)]
    injection::released();
    #[cfg(test)]
    if injection::release_fails() {
        return false;
    }
    result == 0
}

/// A call that gives 0 or an errno; some of them give -1 and errno instead.
pub(super) fn status(call: &'static str, of: impl FnOnce() -> c_int) -> Result<()> {
    #[cfg(test)]
    injection::pass(call)?;
    match of() {
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
        static RELEASE_FAILS: Cell<bool> = const { Cell::new(false) };
    }

    /// Has this thread's next call that destroys an object count as failed.
    pub(in crate::verbs) fn fail_release() {
        RELEASE_FAILS.set(true);
    }

    pub(super) fn release_fails() -> bool {
        RELEASE_FAILS.replace(false)
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
