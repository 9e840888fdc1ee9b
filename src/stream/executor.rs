//! The trait of everything that executes programs in order.
#![allow(unsafe_code)] // declares an unsafe trait; there is no unsafe block in here

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use super::ReplayStream;
use super::turns::StreamTurns;
use super::{Event, Owner, StreamFailure};
use crate::bytecode::Program;
use crate::{Error, Result};

/// A program on its way to an executor.
#[derive(Clone)]
pub struct Submission {
    /// What to execute.
    pub program: Program,
    /// The owner of the memory that it accesses; kept alive until the program is finished.
    pub owner: Arc<dyn Owner>,
    /// Handed back to the owner in its calls; means nothing to the executor.
    pub cookie: u64,
}

impl Submission {
    /// Fails unless the program addresses the targets of its owner.
    pub(crate) fn check(&self) -> Result<()> {
        check(&self.program, &*self.owner)
    }
}

/// Fails unless the program addresses the targets of that owner.
#[inline]
pub(super) fn check(program: &Program, owner: &dyn Owner) -> Result<()> {
    let (found, expected) = (program.targets_id(), owner.targets().id());
    if found == expected {
        return Ok(());
    }
    Err(foreign(found, expected))
}

#[cold]
fn foreign(found: u64, expected: u64) -> Error {
    Error::Foreign {
        argument: "program",
        found: format!("target table {found}"),
        expected: format!("target table {expected}"),
    }
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission")
            .field("units", &self.program.units().len())
            .field("targets", &self.program.targets_id())
            .field("cookie", &self.cookie)
            .finish_non_exhaustive()
    }
}

/// Seals [`Executor`] by convention: it is hidden from the documentation and comes without a promise of stability. Outside the library, only the
/// tests, benchmarks and fuzz targets of this workspace implement it.
#[doc(hidden)]
pub trait SealedExecutor {}

/// A stream: executes what is submitted, in order, some time later.
///
/// All calls but [`Executor::synchronize`] return before the work is done. They wait only while the stream's queue is full.
///
/// # Errors
/// Work fails after the call that queued it has returned. As with CUDA streams, the failure is the result of a later call, any call
/// of this trait: [`Error::Asynchronous`], with the first cause. A call that reports one queues nothing.
///
/// A failure is a fault of the stream: a kernel failed or panicked, a wait ended without success, or an event that was waited for stands for work that
/// failed. What is queued behind it is not executed, its tickets say [`Status::Discarded`](crate::Status::Discarded), and every later call
/// reports the fault until [`Executor::take_fault`]. A CUDA stream cannot skip kernels that are queued: they can test the stream's status word.
///
/// The streams of this library implement it: [`HostStream`](crate::HostStream), and with the feature `cuda` `CudaStream` and `TriggerStream`. Programs
/// must not implement it. The compiler does not enforce that: the trait is sealed by convention, by a supertrait that is hidden from this
/// documentation and may change in any release. Only the library, and the tests, benchmarks and fuzz targets
/// in its repository, implement the supertrait.
///
/// # Safety
/// A program may access the memory of its operation only during its one execution, in the order of submission. An implementation executes each program that
/// it accepted at most once, in the order of submission, calls `Owner::finished` exactly once for each, and executes nothing that was
/// not submitted to it.
pub unsafe trait Executor: SealedExecutor + Send + Sync {
    /// A number of its own in this process.
    fn id(&self) -> u64;

    /// The name, for messages.
    fn name(&self) -> &str;

    /// Queues all of `batch`, in order and with nothing between, and leaves it empty; or queues nothing and leaves it as it is.
    ///
    /// # Errors
    /// [`Error::Range`] when the batch is longer than the queue, [`Error::Foreign`] when a program addresses another table than
    /// its owner's, [`Error::State`] when the queue is full and only the caller could empty it, [`Error::Asynchronous`].
    #[doc(hidden)]
    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()>;

    /// Queues one program. Allocates nothing unless it fails.
    ///
    /// # Errors
    /// As [`Executor::submit`]; the submission comes back with the error.
    // The pair is large, but a box for it would have to be made on the path that must not allocate, or unpacked by every caller.
    #[doc(hidden)]
    #[allow(clippy::result_large_err)]
    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)>;

    /// Queues one program of which the executor copies what is in use: [`Executor::submit_one`] for callers that reuse one program buffer,
    /// and need not get the program back.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    #[doc(hidden)]
    fn submit_program(&self, program: &Program, owner: Arc<dyn Owner>, cookie: u64) -> Result<()> {
        let program = *program;
        self.submit_one(Submission {
            program,
            owner,
            cookie,
        })
        .map_err(|(_, error)| error)
    }

    /// Whether a thread of this process executes the programs, so that what an [`Owner`] does in [`Owner::started`] comes in its turn. Otherwise kernels do what
    /// [`Owner::kernel_step`] says.
    #[doc(hidden)]
    fn executes_on_host(&self) -> bool;

    /// Whether it can copy and reduce memory between programs ([`KernelStep::Memory`](super::KernelStep)).
    #[doc(hidden)]
    fn works_on_memory(&self) -> bool {
        self.executes_on_host()
    }

    /// Whether it can take a message out of its slot ([`KernelStep::Take`](super::KernelStep)).
    #[doc(hidden)]
    fn takes_messages(&self) -> bool {
        true
    }

    /// Whether so many entries, or half of the queue if that is less, can be queued now without a wait for room. A stream that does not know says yes. A CUDA stream
    /// counts the calls of this library, whatever `entries` is: the driver takes about 1,000, the application's own work among them.
    ///
    /// # Errors
    /// [`Error::State`] when only the caller could make room.
    fn has_room(&self, entries: usize) -> Result<bool> {
        let _ = entries;
        Ok(true)
    }

    /// What a thread does that waits for work of the stream: it looks how far the stream is, which otherwise happens once in a millisecond. None: a thread of the stream
    /// tells at once.
    #[doc(hidden)]
    fn turns(&self) -> Option<StreamTurns> {
        None
    }

    /// Whether the threads that wait for its work execute it. They also ring where a proxy does for other streams.
    #[doc(hidden)]
    fn is_executed_by_looks(&self) -> bool {
        false
    }

    /// What adds operations to graphs that the application captures and launches by itself. None: the stream cannot be captured.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    fn replays(&self) -> Option<&dyn ReplayStream> {
        None
    }

    /// Makes `event` stand for the work queued so far. It no longer stands for earlier work; waits that have begun are not affected.
    ///
    /// # Errors
    /// [`Error::State`] and [`Error::Asynchronous`], as [`Executor::submit`].
    fn record(&self, event: &Event) -> Result<()>;

    /// Makes work that is queued later wait for the work that `event` stands for at this moment. Does nothing if the event was
    /// never recorded.
    ///
    /// # Errors
    /// [`Error::State`] and [`Error::Asynchronous`], as [`Executor::submit`].
    fn wait_event(&self, event: &Event) -> Result<()>;

    /// Clears the fault of the stream, if there is one, and returns it. The stream can be used again; work that was queued before this call is
    /// discarded. The fault of a CUDA stream whose context is lost cannot be cleared: each call returns it.
    fn take_fault(&self) -> Option<Error>;

    /// Work of the stream that was executed elsewhere has failed. Returns whether the work behind it is to be executed.
    #[doc(hidden)]
    fn fail(&self, failure: StreamFailure) -> bool;

    /// True when all work queued so far is done.
    ///
    /// # Errors
    /// [`Error::Asynchronous`].
    fn query(&self) -> Result<bool>;

    /// Waits until all work that is queued now is done.
    ///
    /// # Errors
    /// [`Error::Timeout`] when that takes longer than `timeout`; the stream goes on. [`Error::State`] when called by work of this
    /// stream, which would wait for itself. [`Error::Asynchronous`], after the work is done.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()>;
}
