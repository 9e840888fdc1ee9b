//! Streams whose programs are executed by kernels of the application.
#![allow(unsafe_code)] // implements an unsafe trait

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdeviceptr;

use super::call_queue::{CallData, DriverCall};
use super::context::CudaContext;
use super::deferred_free::free_after_wait;
use super::handle::CudaStreamHandle;
use super::kernel_words::TRIGGER_WORDS;
use super::memory::DeviceBuffer;
use super::stream_words::STATUS_WORK;
use super::trigger::Trigger;
use crate::stream::{Event, Executor, StreamFailure, StreamTurns, Submission, forbid_on};
use crate::{Error, Result, StateKind};

/// The bit of the turn word by which kernels execute nothing but counts: `include/doorbell/trigger.h`.
const TURN_STOPPED: u64 = 1 << 63;

/// An in-order queue whose programs are executed by kernels of the application: a kernel that has produced data rings the NIC itself, and waits
/// itself for data that it receives.
///
/// Operations are queued on it as on any stream ([`stream_post`](crate::stream_post), the `stream_queue_*` calls and waits of an
/// [`Endpoint`](crate::Endpoint), [`stream_wait_value32`](crate::stream_wait_value32), events). [`TriggerStream::take`] returns the queued work as a
/// [`Trigger`], a value of 512 bytes that the application passes to its kernel, which executes it with `doorbell_device_trigger`, `_warp` or
/// `_block` of `include/doorbell/device.cuh`. The application launches the kernel on any stream of the same context.
///
/// - Triggers of a stream are executed once each, in the order in which they were taken, by kernels of the context's device. The device functions
///   check both: they wait, within the kernel's bound, for the previous trigger, and return an error for a trigger that was executed before.
/// - A wait in a kernel ends at the kernel's own bound, at the operation's deadline as on other streams, at an abort, and when this process has not
///   polled the stream for a minute. A code tells the kernel the reason. After a wait that the *kernel* gave up, later operations are not
///   executed and end as [`Status::Discarded`](crate::Status::Discarded), and the stream has failed: every later call reports it, and
///   every later trigger returns an error.
/// - A deadline counts from the moment at which the kernel begins to execute the trigger.
/// - **Every trigger that was taken must be executed**, or discarded by [`TriggerStream::discard_taken`]. Until then its operations are in flight:
///   their endpoints cannot be [reset](crate::Endpoint::reset), and later operations of these endpoints on other streams wait.
/// - When the last handle is dropped, triggers that were taken can still be executed, and keep what they need. Other queued work is discarded.
/// - On the `sync` path no kernel rings: the call that posts an operation waits for the triggers that were taken, and then carries it out.
/// - A kernel cannot flush writes of NICs. So a GPU that does not see them in order ([`WritesOrdering::None`](super::WritesOrdering)) refuses waits on this
///   stream ([`Error::State`]).
///
/// Clones are handles of the same stream, usable from any thread.
#[derive(Clone)]
pub struct TriggerStream {
    inner: Arc<TriggerStreamInner>,
}

struct TriggerStreamInner {
    handle: CudaStreamHandle,
    /// The turn word, in device memory, where a GPU has atomic operations. Queued work keeps it, for triggers that are executed after the last handle
    /// was dropped.
    turn: Arc<DeviceBuffer>,
}

impl Drop for TriggerStreamInner {
    fn drop(&mut self) {
        let state = self.handle.state();
        let queue = state.queue.lock();
        state.cut.store(queue.triggered, Ordering::Release);
        if queue.triggered < queue.issued {
            state.end_here("its handles were dropped before a trigger was taken");
        }
    }
}

impl TriggerStream {
    /// A stream for kernels of that context.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if the watching thread cannot be started.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<TriggerStream> {
        let handle = CudaStreamHandle::new(context, name.into())?;
        let turn = Arc::new(context.alloc(8)?);
        turn.copy_from_host(0, &0_u64.to_ne_bytes())?;
        let mut queue = handle.state().queue.lock();
        queue.for_kernels = true;
        // The codes of triggers depend on the status.
        queue.is_watched = true;
        queue.kept = Some(Arc::clone(&turn));
        drop(queue);
        Ok(TriggerStream {
            inner: Arc::new(TriggerStreamInner { handle, turn }),
        })
    }

    /// Takes the work that was queued since the last call, for a kernel to execute; None if there is none. A trigger has room for 60 words, and a send
    /// with its wait takes about 40. If the work needs more, this returns the first part: call it until it returns None, and execute the triggers in
    /// that order, by one kernel or several.
    ///
    /// # Errors
    /// [`Error::Asynchronous`] if the stream has failed for good. Other failures are reported by calls that queue.
    pub fn take(&self) -> Result<Option<Trigger>> {
        let state = self.inner.handle.state();
        let mut queue = state.queue.lock();
        // Under the lock, so that nothing is taken after the stream was discarded. After other failures what was queued is executed.
        if state.fault.is_final() {
            state.check()?;
        }
        if queue.calls.is_empty() {
            queue.end_call();
        }
        if queue.calls.is_empty() {
            return Ok(None);
        }
        let DriverCall { what, issued } = queue.calls.remove(0);
        let CallData::Kernel(range) = what else {
            return Err(Error::state(
                StateKind::WrongKind,
                "take a trigger",
                "a trigger stream cannot execute this work",
            ));
        };
        let words = queue.batch.words(range);
        let mut trigger = Trigger {
            control: state.count.words.control_at(),
            turn: self.inner.turn.ptr(),
            number: queue.triggers,
            word_count: words.len().min(TRIGGER_WORDS) as u32,
            failures: state.count.words.failures(),
            words: [0; TRIGGER_WORDS],
        };
        for (to, word) in trigger.words.iter_mut().zip(words) {
            *to = *word;
        }
        queue.triggers += 1;
        queue.triggered = issued;
        if queue.calls.is_empty() && queue.current().is_none() {
            queue.clear();
        }
        Ok(Some(trigger))
    }

    /// Ends every wait of the triggers that were taken, now and when a kernel reaches it, and the kernel gets an error code. Work that was not taken
    /// is discarded when the last of these triggers is executed. Every later call reports the abort.
    pub fn abort(&self) {
        let state = self.inner.handle.state();
        let queue = state.queue.lock();
        state.end_here("it was aborted");
        state.count.words.note(STATUS_WORK);
        state.cut.fetch_min(queue.triggered, Ordering::AcqRel);
        drop(queue);
        // Before waits end, so that no kernel transmits what is behind one.
        state.fail_pending("it was aborted".into());
        state.aborted.store(true, Ordering::Release);
        state.ensure_watched();
    }

    /// Discards all work that is not executed, taken or not: it ends as [`Status::Discarded`](crate::Status::Discarded). The stream accepts
    /// nothing after that. A trigger that is executed nevertheless returns an error while the stream has a handle.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device's memory cannot be written. Nothing is discarded then.
    ///
    /// # Safety
    /// No kernel executes a trigger of this stream now or later: triggers name memory that this call releases.
    pub unsafe fn discard_taken(&self) -> Result<()> {
        let state = self.inner.handle.state();
        let queue = state.queue.lock();
        let turn = queue.triggers << 1 | TURN_STOPPED;
        self.inner.turn.copy_from_host(0, &turn.to_ne_bytes())?;
        state.end_here("triggers that were taken were given up");
        // Work that another thread is about to queue is discarded, too.
        state.cut.fetch_min(queue.triggered, Ordering::AcqRel);
        state.count.words.note(STATUS_WORK);
        drop(queue);
        drop(state.settle());
        state.discard();
        state.settle_for_good();
        Ok(())
    }

    /// The address on the device of the 32-bit status word: see [`CudaStream::status_word`](super::CudaStream::status_word). The code of a trigger tells
    /// of failures since it was taken.
    #[must_use]
    pub fn status_word(&self) -> CUdeviceptr {
        self.inner.handle.state().count.words.status_at()
    }

    /// The value of the [`TriggerStream::status_word`].
    #[must_use]
    pub fn status(&self) -> i32 {
        let words = &self.inner.handle.state().count.words;
        words.status().load(Ordering::Acquire)
    }

    /// Sets the [`TriggerStream::status_word`] to 0, so that it takes the next failure.
    pub fn clear_status(&self) {
        let words = &self.inner.handle.state().count.words;
        words.status().store(0, Ordering::SeqCst);
    }

    /// Whether the stream goes on behind work that failed: see [`CudaStream::continue_on_error`](super::CudaStream::continue_on_error).
    pub fn continue_on_error(&self, continues: bool) {
        let state = self.inner.handle.state();
        state.fault.set_continues(continues);
    }

    /// The context whose kernels execute its triggers.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.inner.handle.state().context
    }
}

impl fmt::Debug for TriggerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TriggerStream")
            .field("name", &self.inner.handle.state().name)
            .finish_non_exhaustive()
    }
}

impl crate::stream::SealedExecutor for TriggerStream {}

// SAFETY: kernels execute a trigger once and in order, which the turn word ensures; `settle` and `discard` take each program out
// of `pending` before its owner is told, so it is told once; nothing else is ever in a trigger.
unsafe impl Executor for TriggerStream {
    fn id(&self) -> u64 {
        self.inner.handle.state().id
    }

    fn name(&self) -> &str {
        &self.inner.handle.state().name
    }

    fn executes_on_host(&self) -> bool {
        false
    }

    fn turns(&self) -> Option<StreamTurns> {
        Some(self.inner.handle.state().turns())
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.inner.handle.state().submit(batch)
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.inner.handle.state().submit_one(submission)
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.inner.handle.state().record(event)
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.inner.handle.state().wait_event(event)
    }

    fn take_fault(&self) -> Option<Error> {
        self.inner.handle.state().take_fault()
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.inner.handle.state().fault.fail(failure)
    }

    /// True when kernels have executed all queued work.
    fn query(&self) -> Result<bool> {
        let state = self.inner.handle.state();
        state.check()?;
        state.turn();
        // The driver reports a destroyed context.
        state.is_idle()?;
        drop(state.settle());
        state.check()?;
        let idle = !state.has_work();
        if idle {
            state.settle_for_good();
        }
        Ok(idle)
    }

    /// Waits until kernels have executed all triggers that were taken. [`Error::State`] if queued work was not taken.
    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let state = self.inner.handle.state();
        forbid_on(state.id, "stream synchronize")?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if state.ended.load(Ordering::Acquire) {
            state.settle_for_good();
            return state.check();
        }
        let queue = state.queue.lock();
        let (target, is_taken) = (queue.issued, queue.issued == queue.triggered);
        drop(queue);
        if !is_taken {
            state.check()?;
            return Err(Error::state(
                StateKind::Deadlock,
                "stream synchronize",
                "the trigger of the queued operations was not taken; call TriggerStream::take",
            ));
        }
        if !state.wait_until(target, deadline) {
            return Err(Error::Timeout {
                operation: "stream synchronize",
                timeout: timeout.unwrap_or(Duration::MAX),
            });
        }
        state.settle_for_good();
        free_after_wait();
        state.check()
    }
}
