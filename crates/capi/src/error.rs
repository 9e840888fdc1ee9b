//! What this thread's last error was about, and the names of codes.
#![allow(unsafe_code)] // exports functions to C, and writes through its pointers

use std::ffi::{c_char, c_int};

use crate::argument::out;
use crate::boundary::call;
use crate::last_error;
use doorbell_rs::{Cause, WorkError};

/// No operation failed.
#[allow(dead_code)] // the cause of a failure that is all zeros
pub const DOORBELL_CAUSE_NONE: u32 = 0;
/// The device completed a work request in error.
pub const DOORBELL_CAUSE_COMPLETION: u32 = 1;
/// A wait on a stream took longer than its deadline.
pub const DOORBELL_CAUSE_DEADLINE: u32 = 2;
/// The queue pair went to its error state by itself.
pub const DOORBELL_CAUSE_QUEUE_PAIR: u32 = 3;
/// A completion queue overran.
pub const DOORBELL_CAUSE_OVERRUN: u32 = 4;
/// A stream failed or was aborted before it executed the operation.
pub const DOORBELL_CAUSE_DISCARDED: u32 = 5;
/// The application called abort.
pub const DOORBELL_CAUSE_ABORTED: u32 = 6;
/// Something wrote over a trigger word.
pub const DOORBELL_CAUSE_TRIGGER: u32 = 7;
/// The application destroyed the endpoint.
pub const DOORBELL_CAUSE_DROPPED: u32 = 8;
/// A rank of the group has ended or failed.
pub const DOORBELL_CAUSE_RANK: u32 = 9;
/// The value that ended a wait may be one that ended the wait of another stream.
pub const DOORBELL_CAUSE_SUBSTITUTE: u32 = 10;

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
    pub rank: u32,
    pub reserved_word: u32,
    pub reserved: [u64; 2],
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
            Cause::Dropped => DOORBELL_CAUSE_DROPPED,
            Cause::Rank(rank) => {
                failure.rank = rank;
                DOORBELL_CAUSE_RANK
            }
            Cause::Substitute => DOORBELL_CAUSE_SUBSTITUTE,
            other => unreachable!("{other:?} is no value of this version"),
        };
        failure
    }
}

/// The text of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_last_error() -> *const c_char {
    last_error::text()
}

/// This thread's last failure, if it was one of work.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_last_failure(failure: *mut doorbell_failure) -> c_int {
    call!(failure = out(failure), || {
        let work = last_error::work();
        if let Some(work) = work {
            failure.write(work.into());
        }
        Ok(work.is_some().into())
    })
}

/// The name of a code.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_error_name(code: c_int) -> *const c_char {
    crate::code::name(code).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{DOORBELL_EINVAL, DOORBELL_EWORK};
    use crate::failure::Failure;
    use crate::last_error::remember;
    use crate::last_error::tests::last_error;
    use doorbell_rs::Error;
    use std::time::Duration;

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
        let cause = Cause::Deadline(Duration::from_millis(250));
        let error = WorkError::new(0x12, Some(7), cause);
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
