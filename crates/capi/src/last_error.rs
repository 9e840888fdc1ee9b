//! What this thread's last call that failed was about.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use crate::failure::Failure;
use doorbell_rs::{Error, WorkError};

#[derive(Default)]
struct LastError {
    text: CString,
    work: Option<WorkError>,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
}

/// Keeps a failure for [`text`]; gives its code.
#[cold]
pub(super) fn remember(failure: Failure) -> c_int {
    let code = failure.code();
    // A text of the application's may have a zero in it; C would not see what is behind.
    let text = CString::new(failure.to_string().replace('\0', " ")).unwrap_or_default();
    let work = match failure {
        Failure::Library(Error::Work(work) | Error::Peer { failure: work, .. }) => Some(work),
        _ => None,
    };
    // In a thread that ends there is no place left to keep it, and the code has to do.
    let _ = LAST.try_with(|last| *last.borrow_mut() = LastError { text, work });
    code
}

/// The text of the last failure, empty before the first one. Valid until the thread's next failure.
pub(super) fn text() -> *const c_char {
    LAST.try_with(|last| last.borrow().text.as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// The error of the last failure, if it was one of work.
pub(super) fn work() -> Option<WorkError> {
    LAST.try_with(|last| last.borrow().work).ok().flatten()
}

#[cfg(test)]
#[allow(unsafe_code)] // reads a C string
pub(super) mod tests {
    use std::ffi::CStr;

    /// What `doorbell_last_error` says.
    pub(crate) fn last_error() -> String {
        // SAFETY: a C string of this thread, copied before the next call.
        unsafe { CStr::from_ptr(super::text()) }
            .to_str()
            .unwrap()
            .to_owned()
    }
}
