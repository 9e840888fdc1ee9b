//! The errors of this crate and of the software ConnectX.

/// What went wrong. A variant is the rule that was broken, with its context.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number is outside its limits.
    #[error("`{argument}` is {value}; it must be {}", limits(*min, *max))]
    Range {
        /// The name of the argument, as in the signature.
        argument: &'static str,
        /// What was given.
        value: u64,
        /// The smallest value allowed.
        min: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// A value is not one of the allowed values.
    #[error("`{argument}` is {value}; it must be {allowed}")]
    Choice {
        /// The name of the argument, as in the signature.
        argument: &'static str,
        /// What was given.
        value: u64,
        /// The values allowed, for people.
        allowed: &'static str,
    },
    /// An address has the wrong alignment.
    #[error("`{argument}` is {value:#x}; it must be a multiple of {align}")]
    Alignment {
        /// The name of the argument.
        argument: &'static str,
        /// What was given.
        value: u64,
        /// The alignment asked for, in bytes.
        align: u64,
    },
    /// A span of bytes leaves the memory that it names.
    #[error("`{argument}`: bytes {offset}..+{len_bytes} leave the {limit_bytes} bytes of {what}")]
    OutOfBounds {
        /// The name of the argument.
        argument: &'static str,
        /// First byte of the span.
        offset: u64,
        /// Length of the span.
        len_bytes: u64,
        /// Length of the memory.
        limit_bytes: u64,
        /// The memory: a region or a target.
        what: &'static str,
    },
    /// A program does not fit into its fixed space.
    #[error("a program holds {limit} units; this op needs {needed} more than are left")]
    ProgramFull {
        /// Units a program holds.
        limit: usize,
        /// Units missing.
        needed: usize,
    },
    /// A program, region or endpoint meets something of another device or another owner.
    #[error("`{argument}` belongs to {found}, this call needs one of {expected}")]
    Foreign {
        /// The name of the argument.
        argument: &'static str,
        /// Whose it is.
        found: String,
        /// Whose it must be.
        expected: String,
    },
    /// A queue has no room.
    #[error("the {queue} queue is full: {depth} of {depth} entries are in use")]
    QueueFull {
        /// `send` or `receive`.
        queue: &'static str,
        /// Its depth in work requests.
        depth: u32,
    },
    /// An object that no longer is, or is not in a state for this.
    #[error("{operation}: {reason}")]
    State {
        /// What was tried.
        operation: &'static str,
        /// Why it cannot be now.
        reason: String,
    },
    /// The operating system refused.
    #[error("{operation}: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call and its object.
        operation: &'static str,
        /// The errno.
        errno: i32,
    },
    /// Bytes from a peer, a device or a file that make no sense.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// The format.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn limits(min: u64, max: u64) -> String {
    if min == max {
        min.to_string()
    } else {
        format!("{min} to {max}")
    }
}
