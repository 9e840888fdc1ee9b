//! Codes of errors, and what this thread's last one was about.
#![allow(unsafe_code)] // exports functions to C, and writes through its pointers

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use crate::argument::out;
use crate::boundary::{Failure, guard};
use doorbell_rs::{Cause, Error, WorkError};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)+) => {
        $($(#[$doc])* pub const $name: c_int = $code;)+

        /// The name of a code, as in the header.
        fn name(code: c_int) -> &'static std::ffi::CStr {
            match code {
                $($name => const {
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name without a zero inside"),
                    }
                },)+
                _ => c"unknown",
            }
        }
    };
}

codes! {
    /// No error.
    DOORBELL_OK = 0;
    /// An argument makes no sense.
    DOORBELL_EINVAL = -1;
    /// A handle is none, of another kind, or destroyed.
    DOORBELL_EHANDLE = -2;
    /// Another thread is using the object.
    DOORBELL_EBUSY = -3;
    /// The library panicked.
    DOORBELL_EPANIC = -4;
    /// [`Error::Range`] or [`Error::Choice`].
    DOORBELL_ERANGE = -10;
    /// [`Error::Alignment`].
    DOORBELL_EALIGNMENT = -11;
    /// [`Error::OutOfBounds`].
    DOORBELL_EBOUNDS = -12;
    /// [`Error::ProgramFull`].
    DOORBELL_EPROGRAM = -13;
    /// [`Error::Foreign`].
    DOORBELL_EFOREIGN = -14;
    /// [`Error::QueueFull`].
    DOORBELL_EFULL = -15;
    /// [`Error::State`].
    DOORBELL_ESTATE = -16;
    /// [`Error::Timeout`].
    DOORBELL_ETIMEOUT = -17;
    /// [`Error::Asynchronous`].
    DOORBELL_EASYNC = -18;
    /// [`Error::Work`].
    DOORBELL_EWORK = -19;
    /// [`Error::System`] or [`Error::Socket`].
    DOORBELL_ESYSTEM = -20;
    /// [`Error::Malformed`].
    DOORBELL_EMALFORMED = -21;
    /// [`Error::Rank`].
    DOORBELL_ERANK = -22;
    /// [`Error::Cuda`].
    DOORBELL_ECUDA = -23;
    /// The library was built without what the call needs.
    DOORBELL_EFEATURE = -24;
    /// [`Error::Refused`].
    DOORBELL_EREFUSED = -25;
}

/// The code of an error of the library.
pub(super) fn code(error: &Error) -> c_int {
    match error {
        Error::Range { .. } | Error::Choice { .. } => DOORBELL_ERANGE,
        Error::Alignment { .. } => DOORBELL_EALIGNMENT,
        Error::OutOfBounds { .. } => DOORBELL_EBOUNDS,
        Error::ProgramFull { .. } => DOORBELL_EPROGRAM,
        Error::Foreign { .. } => DOORBELL_EFOREIGN,
        Error::QueueFull { .. } => DOORBELL_EFULL,
        Error::State { .. } => DOORBELL_ESTATE,
        Error::Timeout { .. } => DOORBELL_ETIMEOUT,
        Error::Asynchronous { .. } => DOORBELL_EASYNC,
        Error::Work(_) => DOORBELL_EWORK,
        Error::System { .. } | Error::Socket { .. } => DOORBELL_ESYSTEM,
        Error::Malformed { .. } => DOORBELL_EMALFORMED,
        Error::Rank { .. } => DOORBELL_ERANK,
        Error::Cuda { .. } => DOORBELL_ECUDA,
        Error::Refused { .. } => DOORBELL_EREFUSED,
        // The two packages have one version: a variant without a code is a bug.
        _ => DOORBELL_EPANIC,
    }
}

/// The device completed a work request in error.
pub const DOORBELL_CAUSE_COMPLETION: u32 = 0;
/// A wait on a stream took longer than its deadline.
pub const DOORBELL_CAUSE_DEADLINE: u32 = 1;
/// The queue pair went to its error state by itself.
pub const DOORBELL_CAUSE_QUEUE_PAIR: u32 = 2;
/// A completion queue overran.
pub const DOORBELL_CAUSE_OVERRUN: u32 = 3;
/// A stream failed or was aborted before it executed the operation.
pub const DOORBELL_CAUSE_DISCARDED: u32 = 4;
/// The application called abort.
pub const DOORBELL_CAUSE_ABORTED: u32 = 5;
/// Something wrote over a trigger word.
pub const DOORBELL_CAUSE_TRIGGER: u32 = 6;

/// [`WorkError`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)] // the name is the header's
pub struct doorbell_failure {
    pub wr_id: u64,
    pub has_wr_id: u32,
    pub qpn: u32,
    pub cause: u32,
    pub wc_status: u32,
    pub syndrome: u32,
    pub vendor_syndrome: u32,
    pub timeout_ms: i64,
    pub reserved: [u64; 3],
}

impl From<WorkError> for doorbell_failure {
    fn from(error: WorkError) -> doorbell_failure {
        let mut failure = doorbell_failure {
            wr_id: error.wr_id.unwrap_or(0),
            has_wr_id: error.wr_id.is_some().into(),
            qpn: error.qpn,
            ..doorbell_failure::default()
        };
        failure.cause = match error.cause {
            Cause::Completion {
                status,
                syndrome,
                vendor_syndrome,
            } => {
                failure.wc_status = status as u32;
                failure.syndrome = syndrome.into();
                failure.vendor_syndrome = vendor_syndrome.into();
                DOORBELL_CAUSE_COMPLETION
            }
            Cause::Deadline(timeout) => {
                failure.timeout_ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
                DOORBELL_CAUSE_DEADLINE
            }
            Cause::QueuePair => DOORBELL_CAUSE_QUEUE_PAIR,
            Cause::Overrun => DOORBELL_CAUSE_OVERRUN,
            Cause::Discarded => DOORBELL_CAUSE_DISCARDED,
            Cause::Aborted => DOORBELL_CAUSE_ABORTED,
            Cause::Trigger(_) => DOORBELL_CAUSE_TRIGGER,
            other => unreachable!("{other:?} is no value of this version"),
        };
        failure
    }
}

#[derive(Default)]
struct Last {
    text: CString,
    work: Option<WorkError>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Keeps a failure for [`doorbell_last_error`]; gives its code.
#[cold]
pub(super) fn remember(failure: Failure) -> c_int {
    let code = failure.code();
    // A text of the application's may have a zero in it; C would not see what is behind.
    let text = CString::new(failure.to_string().replace('\0', " ")).unwrap_or_default();
    let work = match failure {
        Failure::Library(Error::Work(work)) => Some(work),
        _ => None,
    };
    // In a thread that ends there is no place left to keep it, and the code has to do.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Last { text, work });
    code
}

/// The text of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().text.as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// This thread's last failure, if it was one of work.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_last_failure(failure: *mut doorbell_failure) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise: null, or room for a failure.
        let failure = unsafe { out(failure, "failure") }?;
        let work = LAST.try_with(|last| last.borrow().work).ok().flatten();
        if let Some(work) = work {
            failure.write(work.into());
        }
        Ok(work.is_some().into())
    })
}

/// The name of a code.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_error_name(code: c_int) -> *const c_char {
    name(code).as_ptr()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::time::Duration;

    /// What [`doorbell_last_error`] says.
    pub(crate) fn last_error() -> String {
        // SAFETY: a C string of this thread, copied before the next call.
        unsafe { CStr::from_ptr(doorbell_last_error()) }
            .to_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn the_last_error_is_this_threads() {
        remember(Failure::argument("here", "with a \0 zero"));
        std::thread::spawn(|| {
            assert_eq!(last_error(), "");
            remember(Failure::null("there"));
            assert_eq!(last_error(), "`there`: it is a null pointer");
        })
        .join()
        .unwrap();
        assert_eq!(last_error(), "`here`: with a   zero");
    }

    #[test]
    fn a_failure_of_work_keeps_its_numbers() {
        let error = WorkError {
            qpn: 0x12,
            wr_id: Some(7),
            cause: Cause::Deadline(Duration::from_millis(250)),
        };
        assert_eq!(remember(Error::Work(error).into()), DOORBELL_EWORK);
        let mut failure = doorbell_failure::default();
        // SAFETY: a place for a failure.
        assert_eq!(unsafe { doorbell_last_failure(&raw mut failure) }, 1);
        let expected = doorbell_failure {
            wr_id: 7,
            has_wr_id: 1,
            qpn: 0x12,
            cause: DOORBELL_CAUSE_DEADLINE,
            timeout_ms: 250,
            ..doorbell_failure::default()
        };
        assert_eq!(failure, expected);
        remember(Failure::null("x"));
        // SAFETY: as above.
        assert_eq!(unsafe { doorbell_last_failure(&raw mut failure) }, 0);
        // SAFETY: null is allowed, and an error.
        let nowhere = unsafe { doorbell_last_failure(std::ptr::null_mut()) };
        assert_eq!(nowhere, DOORBELL_EINVAL);
    }
}
