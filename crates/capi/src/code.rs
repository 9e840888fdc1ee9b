//! Codes of errors.

use std::ffi::c_int;

use doorbell_rs::Error;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)+) => {
        $($(#[$doc])* pub const $name: c_int = $code;)+

        /// The name of a code, as in the header.
        pub(super) fn name(code: c_int) -> &'static std::ffi::CStr {
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
    /// The argument is not a handle, is a handle of another type, or was destroyed.
    DOORBELL_EHANDLE = -2;
    /// Another thread is using the object.
    DOORBELL_EBUSY = -3;
    /// The library panicked.
    DOORBELL_EPANIC = -4;
    /// [`Error::Range`] or [`Error::Choice`].
    DOORBELL_ERANGE = -10;
    /// [`Error::Alignment`].
    DOORBELL_EALIGNMENT = -11;
    /// [`Error::OutOfBounds`] or [`Error::Truncated`].
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
    /// [`Error::Work`] or [`Error::Peer`].
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
pub(super) fn of(error: &Error) -> c_int {
    match error {
        Error::Range { .. } | Error::Choice { .. } => DOORBELL_ERANGE,
        Error::Alignment { .. } => DOORBELL_EALIGNMENT,
        Error::OutOfBounds { .. } | Error::Truncated { .. } => DOORBELL_EBOUNDS,
        Error::ProgramFull { .. } => DOORBELL_EPROGRAM,
        Error::Foreign { .. } => DOORBELL_EFOREIGN,
        Error::QueueFull { .. } => DOORBELL_EFULL,
        Error::State { .. } => DOORBELL_ESTATE,
        Error::Timeout { .. } => DOORBELL_ETIMEOUT,
        Error::Asynchronous { .. } => DOORBELL_EASYNC,
        Error::Work(_) | Error::Peer { .. } => DOORBELL_EWORK,
        Error::System { .. } | Error::Socket { .. } => DOORBELL_ESYSTEM,
        Error::Malformed { .. } => DOORBELL_EMALFORMED,
        Error::Rank { .. } => DOORBELL_ERANK,
        Error::Cuda { .. } => DOORBELL_ECUDA,
        Error::Refused { .. } => DOORBELL_EREFUSED,
        // The two packages have one version: a variant without a code is a bug.
        _ => DOORBELL_EPANIC,
    }
}
