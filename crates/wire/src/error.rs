//! The error type of the library, its command, and the software ConnectX.

use std::fmt;
use std::time::Duration;

use crate::status::WcStatus;

/// An error. Each variant names the operation or the rule that failed, with its context.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
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
        /// The values allowed, as text.
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
    #[error(
        "the program is full: it holds {limit} units, and this operation needs {needed} more than are left"
    )]
    ProgramFull {
        /// Units a program holds.
        limit: usize,
        /// Units missing.
        needed: usize,
    },
    /// A program, region or endpoint is used with an object of another device or another owner.
    #[error("`{argument}` belongs to {found}, this call needs one of {expected}")]
    Foreign {
        /// The name of the argument.
        argument: &'static str,
        /// The owner that it has.
        found: String,
        /// The owner that it must have.
        expected: String,
    },
    /// A queue has no room.
    #[error(
        "the {queue} queue is full: {depth} of {depth} entries are in use{}",
        what_frees(queue)
    )]
    QueueFull {
        /// `send`, `receive`, `send completion` or `receive completion`.
        queue: &'static str,
        /// Its depth in work requests or completions.
        depth: u32,
    },
    /// An object no longer exists, or is not in a state that allows the operation.
    #[error("{operation}: {reason}")]
    State {
        /// The condition, for programs.
        kind: StateKind,
        /// What was tried.
        operation: &'static str,
        /// The reason, as text.
        reason: String,
    },
    /// A deadline passed.
    #[error("{operation} did not end within {timeout:?}{}", why_late(operation))]
    Timeout {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        timeout: Duration,
    },
    /// Queued work failed. A later call reports that, as with CUDA streams.
    #[error("work queued earlier on {stream} failed: {reason}")]
    Asynchronous {
        /// The stream's name.
        stream: String,
        /// What failed.
        reason: String,
        /// The failure of the endpoint that the stream waited for, if that was the first cause.
        work: Option<WorkError>,
    },
    /// An operation failed, and with it its endpoint.
    #[error("{0}")]
    Work(WorkError),
    /// The connection with a peer has failed.
    #[error("peer {peer}: {failure}")]
    Peer {
        /// Its index.
        peer: u32,
        /// How the connection failed.
        failure: WorkError,
    },
    /// The operating system refused.
    #[error("{operation}: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call and its object.
        operation: &'static str,
        /// The errno.
        errno: i32,
    },
    /// The operating system refused a call of a socket.
    #[error("{operation} {address}: {}", std::io::Error::from_raw_os_error(*errno))]
    Socket {
        /// The call.
        operation: &'static str,
        /// The address that was given to it.
        address: String,
        /// The errno.
        errno: i32,
    },
    /// The CUDA driver refused.
    #[error("{call}: {name} (CUresult {code})")]
    Cuda {
        /// The driver's function.
        call: &'static str,
        /// What it returned, as in `cuda.h`.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
    /// Bytes from a peer, a device or a file are malformed.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// The format.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A message is longer than the memory that it was to be received into. Nothing of it was stored there. Its sender's operation is complete.
    #[error(
        "a message of {len_bytes} bytes came for a receive of {limit_bytes}: receive into at least as many bytes as the peer sends"
    )]
    Truncated {
        /// Length of the message.
        len_bytes: u64,
        /// Length of the memory.
        limit_bytes: u64,
    },
    /// The peer does not take the connection.
    #[error("{peer} refuses the connection: {reason}")]
    Refused {
        /// The address that was asked.
        peer: String,
        /// The connection manager's reason.
        reason: String,
        /// What the peer gave with its refusal, with zeros behind it.
        private_data: Vec<u8>,
    },
    /// A process of the group has ended, so operations that wait for it cannot complete.
    #[error("rank {rank} of the group: {reason}")]
    Rank {
        /// Its rank.
        rank: u32,
        /// How its end was noticed.
        reason: String,
    },
}

/// What makes room in a queue, if the queue is one of an endpoint.
fn what_frees(queue: &str) -> &'static str {
    match queue {
        "send" => {
            "; an entry is free when the completion of its work request, or of a later signaled one, has arrived"
        }
        "receive" => "; an entry is free when a message has filled its receive",
        "send completion" | "receive completion" => {
            "; an entry is free when a wait on a stream, `poll_cq` or `wait_cq` has taken its completion; sends can be posted unsignaled"
        }
        _ => "",
    }
}

/// What usually keeps a wait of the calling thread from its end, where its name does not say.
fn why_late(operation: &str) -> &'static str {
    match operation {
        "wait_cq" | "the wait for an operation" => {
            "; usual causes: the peer sent nothing, had no receive posted, or has failed, or a stream has not come to the operation"
        }
        "the wait for room in a queue" => {
            "; usual causes: the peer does not answer, or a stream has not come to the operations in the queue"
        }
        "stream synchronize" => {
            "; usual causes: a kernel that runs, or a wait on the stream for an event, a value or a completion that has not come"
        }
        _ => "",
    }
}

fn limits(min: u64, max: u64) -> String {
    if min == max {
        min.to_string()
    } else {
        format!("{min} to {max}")
    }
}

impl Error {
    /// An [`Error::State`].
    #[cold]
    pub fn state(kind: StateKind, operation: &'static str, reason: impl Into<String>) -> Error {
        Error::State {
            kind,
            operation,
            reason: reason.into(),
        }
    }
}

/// `{:?}` is the name of the variant and the message, as `main` shows the error that it returns; `{:#?}` is the structure.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        macro_rules! debug {
            ($($variant:ident { $($field:ident),+ })+) => {
                match self {
                    Error::State { kind, .. } if !f.alternate() => write!(f, "State({kind:?}): {self}"),
                    $(Error::$variant { .. } if !f.alternate() => write!(f, "{}: {self}", stringify!($variant)),
                    Error::$variant { $($field),+ } => {
                        f.debug_struct(stringify!($variant))$(.field(stringify!($field), $field))+.finish()
                    })+
                    Error::Work(error) if f.alternate() => f.debug_tuple("Work").field(error).finish(),
                    Error::Work(error) => write!(f, "Work: {error}"),
                }
            };
        }
        debug! {
            Range { argument, value, min, max }
            Choice { argument, value, allowed }
            Alignment { argument, value, align }
            OutOfBounds { argument, offset, len_bytes, limit_bytes, what }
            ProgramFull { limit, needed }
            Foreign { argument, found, expected }
            QueueFull { queue, depth }
            State { kind, operation, reason }
            Timeout { operation, timeout }
            Asynchronous { stream, reason, work }
            System { operation, errno }
            Socket { operation, address, errno }
            Cuda { call, code, name }
            Malformed { what, reason }
            Truncated { len_bytes, limit_bytes }
            Refused { peer, reason, private_data }
            Rank { rank, reason }
            Peer { peer, failure }
        }
    }
}

/// The condition behind an [`Error::State`], for programs to act on. The error's `reason` is text for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StateKind {
    /// The endpoint is not connected.
    NotConnected,
    /// The endpoint is connected already.
    AlreadyConnected,
    /// No way leads to the peer, or it did not take part in making the connection.
    Unreachable,
    /// The connection or the process of the peer has ended.
    Disconnected,
    /// The device was removed.
    DeviceGone,
    /// The endpoint is being reset.
    Resetting,
    /// The endpoint was reset after the operation was prepared.
    Stale,
    /// The operation was dropped before it was given to a stream.
    Cancelled,
    /// The stream failed or was aborted before it executed the operation.
    Discarded,
    /// Another thread is in a call that one thread at a time may make: it hands work to the same queue, or is in a barrier of the same group.
    Busy,
    /// Operations or events are not in the order that the call needs: others come first.
    OutOfOrder,
    /// No operation is posted that the call could wait for or commit.
    NothingPosted,
    /// Operations of the queue are prepared or in flight, or their completions are not collected.
    WorkPending,
    /// Kernels own the send queue, or owned it and the endpoint was not reset since.
    KernelsOwnQueue,
    /// The queue pair is in a state that the call does not start from.
    QueuePair,
    /// The region is deregistered.
    Deregistered,
    /// The region was registered without the access right that the operation needs.
    NoAccess,
    /// The memory cannot be registered or used in this way, because of what it is or how it is mapped.
    Memory,
    /// The stream is being captured.
    Captured,
    /// The capture of a graph was broken off, or the graph is not the one that was recorded.
    Graph,
    /// The graph is armed, and must not be.
    Armed,
    /// The graph is not armed, and must be.
    NotArmed,
    /// The event was never recorded.
    NotRecorded,
    /// The event has not passed yet.
    NotReady,
    /// The wait would never end: it waits for work that comes after it, or that will not be done.
    Deadlock,
    /// The object is of another kind than the call is for.
    WrongKind,
    /// The device, the driver, the control path, or the combination of them does not support this.
    Unsupported,
    /// There is no such device, port, driver or context on this machine.
    NotFound,
    /// A fixed number of objects, or a fixed space, is used up.
    Exhausted,
    /// The object belongs to the process that this one was forked from.
    Forked,
    /// The environment of the process does not say what is needed, or what it names cannot be trusted.
    Environment,
    /// The store of the group did not accept this process.
    NotAdmitted,
    /// The requested object was taken before.
    Taken,
    /// The driver, the device or the peer violated its interface.
    Unexpected,
}

/// How an endpoint failed: its first error, and the operation that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkError {
    /// The number of the endpoint's queue pair; 0 of a wait for a value, which belongs to no endpoint.
    pub qpn: u32,
    /// The number that the application gave to the work request; for a missed deadline, to the oldest one in the queue that was not done.
    /// `None` if no single work request caused the failure.
    pub wr_id: Option<u64>,
    /// What happened.
    pub cause: Cause,
}

impl WorkError {
    #[doc(hidden)]
    pub fn new(qpn: u32, wr_id: Option<u64>, cause: Cause) -> WorkError {
        WorkError { qpn, wr_id, cause }
    }
}

/// Why an endpoint failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The device completed a work request in error.
    Completion {
        /// As verbs name it.
        status: WcStatus,
        /// The device's own code, as in the CQE.
        syndrome: u8,
        /// The vendor's code, as in the CQE.
        vendor_syndrome: u8,
    },
    /// A wait on a stream took longer than its deadline, and the watchdog released it; or a transfer by a bounce buffer took longer than its timeout.
    Deadline(Duration),
    /// The queue pair went to the error state without a completion that gives the reason, as a responder's does.
    QueuePair,
    /// A completion queue overran: completions are lost.
    Overrun,
    /// A stream failed, or was aborted, before it executed the operation.
    Discarded,
    /// The application called abort or reset, or a transfer by a bounce buffer failed whose peer waits for more.
    Aborted,
    /// The application dropped the endpoint.
    Dropped,
    /// That rank of the group has ended or failed, and the group with it.
    Rank(u32),
    /// A trigger word of the proxy path had a value that no operation stores: something else wrote to it.
    Trigger(u32),
    /// This process has stored a value into a word to end the wait of another CUDA stream for it, and this wait may have ended by that value.
    Substitute,
}

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.qpn {
            // No queue pair has this number: the wait belongs to no endpoint.
            0 => f.write_str("wait for a value")?,
            qpn => write!(f, "endpoint {qpn:#x}")?,
        }
        if let Some(wr_id) = self.wr_id {
            write!(f, ", work request {wr_id}")?;
        }
        match &self.cause {
            Cause::Completion {
                status,
                syndrome,
                vendor_syndrome,
            } => {
                write!(
                    f,
                    ": {status} (syndrome {syndrome:#04x}, vendor {vendor_syndrome:#04x})"
                )?;
                f.write_str(hint(*status))
            }
            Cause::Deadline(timeout) if self.qpn == 0 => {
                write!(f, ": it did not end within {timeout:?} and was released")
            }
            Cause::Deadline(timeout) => write!(
                f,
                ": a wait for a completion did not end within {timeout:?} and was released; usual causes: the peer sent nothing, had no receive posted, or has failed"
            ),
            Cause::QueuePair => f.write_str(
                ": the queue pair is in error; the peer's request was refused, or the peer failed",
            ),
            Cause::Overrun => f.write_str(": a completion queue overran"),
            Cause::Discarded => f.write_str(": a stream failed or was aborted before it executed an operation; if it failed, its fault says why"),
            Cause::Aborted => f.write_str(": aborted"),
            Cause::Dropped => f.write_str(": the endpoint was dropped"),
            Cause::Rank(rank) => write!(f, ": rank {rank} of the group has ended or failed"),
            Cause::Trigger(found) => {
                write!(f, ": something wrote {found:#x} over a trigger word")
            }
            Cause::Substitute => f.write_str(
                ": it is not known whether the value came; the wait of another stream for the same word was given up, by a store to that word",
            ),
        }
    }
}

/// What usually leads to a status, where the status alone says little.
fn hint(status: WcStatus) -> &'static str {
    match status {
        WcStatus::RnrRetryExcErr => {
            ": the peer had no receive posted; post one there before this side sends, or raise `rnr_retry`"
        }
        WcStatus::RemAccessErr => {
            ": the peer's device refused the remote key, the address range, or the access right, and does not tell which; keys end when their region is deregistered"
        }
        WcStatus::RetryExcErr => {
            ": no answer from the peer; usual causes: its endpoint failed or was destroyed, or the network drops packets"
        }
        WcStatus::LocProtErr => {
            ": this side's region refused the local key, the address range, or the access right"
        }
        WcStatus::LocLenErr => ": the message is longer than the receive that it met",
        WcStatus::RemInvReqErr => {
            "; usual causes: the message is longer than the peer's receive, or the peer does not allow this operation"
        }
        _ => "",
    }
}

impl std::error::Error for WorkError {}

/// The library's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_argument_its_limit_and_the_cure() {
        let range = |min, max| Error::Range {
            argument: "depth",
            value: 9,
            min,
            max,
        };
        assert_eq!(range(1, 8).to_string(), "`depth` is 9; it must be 1 to 8");
        assert_eq!(range(8, 8).to_string(), "`depth` is 9; it must be 8");
        let socket = Error::Socket {
            operation: "bind",
            address: "127.0.0.1:80".into(),
            errno: libc::EACCES,
        };
        assert_eq!(
            socket.to_string(),
            "bind 127.0.0.1:80: Permission denied (os error 13)"
        );
        let failed = |status| WorkError {
            qpn: 0x48,
            wr_id: Some(7),
            cause: Cause::Completion {
                status,
                syndrome: 0x16,
                vendor_syndrome: 0,
            },
        };
        let text = failed(WcStatus::RnrRetryExcErr).to_string();
        assert!(
            text.starts_with("endpoint 0x48, work request 7: receiver-not-ready")
                && text.contains("the peer had no receive posted"),
            "{text}"
        );
        let text = failed(WcStatus::RemAccessErr).to_string();
        assert!(text.contains("refused the remote key"), "{text}");
    }

    #[test]
    fn debug_text_is_readable_and_alternate_debug_shows_structure() {
        let range = Error::Range {
            argument: "depth",
            value: 9,
            min: 1,
            max: 8,
        };
        assert_eq!(
            format!("{range:?}"),
            "Range: `depth` is 9; it must be 1 to 8"
        );
        let structure =
            "Range {\n    argument: \"depth\",\n    value: 9,\n    min: 1,\n    max: 8,\n}";
        assert_eq!(format!("{range:#?}"), structure);
        let state = Error::state(StateKind::NotConnected, "post", "no peer");
        assert_eq!(state.to_string(), "post: no peer");
        assert_eq!(format!("{state:?}"), "State(NotConnected): post: no peer");
        let structure = "State {\n    kind: NotConnected,\n    operation: \"post\",\n    reason: \"no peer\",\n}";
        assert_eq!(format!("{state:#?}"), structure);
        let work = Error::Work(WorkError {
            qpn: 0x48,
            wr_id: None,
            cause: Cause::Aborted,
        });
        assert_eq!(format!("{work:?}"), "Work: endpoint 0x48: aborted");
        assert!(format!("{work:#?}").starts_with("Work(\n    WorkError {\n        qpn: 72,"));
    }
}
