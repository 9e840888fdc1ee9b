//! Why a call of the C interface fails.

use std::ffi::c_int;
use std::fmt;

use crate::code;
use doorbell_rs::Error;

/// Why a call of the C interface fails.
#[derive(Debug)]
pub(super) enum Failure {
    /// An argument makes no sense: a null pointer, an unknown flag, text that is not UTF-8.
    Argument {
        argument: &'static str,
        reason: String,
    },
    /// The argument is not a handle, is a handle of another type, or was destroyed.
    Handle {
        argument: &'static str,
        reason: String,
    },
    /// Another thread is using the object.
    Busy { argument: &'static str },
    /// The library panicked, now or in an earlier call that had this object.
    Panic { reason: String },
    /// The library was built without what the call needs.
    #[cfg_attr(all(feature = "cuda", feature = "verbs"), allow(dead_code))]
    // there is nothing that a library with everything lacks
    Feature { feature: &'static str },
    /// What the library says.
    Library(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}

impl Failure {
    #[cold]
    pub(super) fn argument(argument: &'static str, reason: impl Into<String>) -> Failure {
        Failure::Argument {
            argument,
            reason: reason.into(),
        }
    }

    #[cold]
    pub(super) fn null(argument: &'static str) -> Failure {
        Failure::argument(argument, "it is a null pointer")
    }

    /// Whether it is one of the call itself. Calls that take handles whether they succeed or not do not take them then, as the header says of these codes.
    pub(super) fn leaves_handles(&self) -> bool {
        match self {
            Failure::Argument { .. }
            | Failure::Handle { .. }
            | Failure::Busy { .. }
            | Failure::Panic { .. } => true,
            Failure::Feature { .. } | Failure::Library(_) => false,
        }
    }

    /// The code that the call returns.
    pub(super) fn code(&self) -> c_int {
        match self {
            Failure::Argument { .. } => code::DOORBELL_EINVAL,
            Failure::Handle { .. } => code::DOORBELL_EHANDLE,
            Failure::Busy { .. } => code::DOORBELL_EBUSY,
            Failure::Panic { .. } => code::DOORBELL_EPANIC,
            Failure::Feature { .. } => code::DOORBELL_EFEATURE,
            Failure::Library(error) => code::of(error),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Argument { argument, reason } | Failure::Handle { argument, reason } => {
                write!(f, "`{argument}`: {reason}")
            }
            Failure::Busy { argument } => {
                write!(f, "`{argument}` is in use by another thread")
            }
            Failure::Panic { reason } => {
                write!(f, "a bug of the library: it panicked: {reason}")
            }
            Failure::Feature { feature } => {
                write!(f, "this library was built without the feature `{feature}`")
            }
            Failure::Library(error) => error.fmt(f),
        }
    }
}
