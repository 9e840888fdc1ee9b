//! Streams whose programs are executed by kernels of the application.
#![allow(unsafe_code)] // implements an unsafe trait

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdeviceptr;

use super::call_queue::{CallData, DriverCall};
use super::context::CudaContext;
use super::handle::StreamHandle;
use super::kernel_words::TRIGGER_WORDS;
use super::memory::DeviceBuffer;
use super::stream_words::STATUS_WORK;
use super::trigger::Trigger;
use crate::stream::{Event, Executor, Submission, forbid_on};
use crate::{Error, Result};

/// The word by which triggers take turns says that nothing but counts is executed, as `include/doorbell/trigger.h` has it.
const TURN_STOPPED: u64 = 1 << 63;

/// An in-order queue whose programs are executed by kernels of the application: a kernel that has produced its data rings the NIC itself, and
/// waits for what it is to receive, without going back to a stream.
///
/// Operations are queued on it as on any stream ([`stream_post`](crate::stream_post), the `stream_queue_*` calls and waits of an
/// [`Endpoint`](crate::Endpoint), [`stream_wait_value32`](crate::stream_wait_value32), events). [`KernelStream::take`] gives what was queued as a
/// [`Trigger`], a value of 512 bytes that the application passes to its kernel, which executes it with `doorbell_trigger_thread`, `_warp` or
/// `_block` of `include/doorbell/device.cuh`. The kernel is launched on any stream of the same context, by whatever means.
///
/// - Triggers of a stream are executed in the order in which they were taken, each once, by kernels of the context's device. The kernel checks
///   both: it waits, within its bound, for the trigger before, and is told when it executes one twice.
/// - A wait in a kernel is bounded by the kernel, by the deadline of the operation as on other streams, by an abort, and by a lease: if this
///   process has not looked at the stream for a minute. The kernel finds the reason as a code; what is behind a wait that the *kernel* gave up is
///   not executed, its operations end as [`Outcome::Discarded`](crate::stream::Outcome::Discarded), and the stream is over: every later call
///   reports it, and every later trigger returns an error.
/// - A deadline counts from when the kernel has begun to execute the trigger.
/// - **Every trigger that was taken is to be executed**, or given up by [`KernelStream::discard_taken`]. Until then its operations are in
///   flight, with all that they keep: endpoints cannot be [reset](crate::Endpoint::reset), and what is behind them on other streams waits for its
///   turn.
/// - When the last handle is dropped, what was taken can still be executed, and keeps what it needs; what was not taken is discarded.
/// - On the `sync` path no kernel rings: an operation is carried out in the call that posts it, once the triggers that were taken are executed.
/// - What a NIC writes to the memory of a GPU is visible behind a wait of a kernel where the device orders such writes
///   ([`WritesOrdering`](super::WritesOrdering)); a kernel has no means to flush them.
///
/// It is a handle; clones are handles of the same stream, usable from any thread.
#[derive(Clone)]
pub struct KernelStream {
    inner: Arc<KernelStreamInner>,
}

struct KernelStreamInner {
    handle: StreamHandle,
    /// One word, in the device's own memory: a GPU has atomic operations there, and it is near. Kept by whatever is queued: a trigger that is
    /// executed after the last handle was dropped needs it.
    turn: Arc<DeviceBuffer>,
}

impl Drop for KernelStreamInner {
    fn drop(&mut self) {
        let state = self.handle.state();
        let queue = state.queue.lock();
        state.cut.store(queue.triggered, Ordering::Release);
        if queue.triggered < queue.issued {
            state
                .fault
                .stick("its handles were dropped before a trigger was taken".into());
        }
    }
}

impl KernelStream {
    /// A stream for kernels of that context.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if there is no thread to be had.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<KernelStream> {
        let handle = StreamHandle::new(context, name.into())?;
        let turn = Arc::new(context.alloc(8)?);
        turn.copy_from_host(0, &0_u64.to_ne_bytes())?;
        let mut queue = handle.state().queue.lock();
        queue.for_kernels = true;
        // Their codes tell kernels of failures.
        queue.is_watched = true;
        queue.kept = Some(Arc::clone(&turn));
        drop(queue);
        Ok(KernelStream {
            inner: Arc::new(KernelStreamInner { handle, turn }),
        })
    }

    /// What was queued since the last one was taken, for a kernel to execute; None if nothing was. If that is more than a trigger has room for
    /// (60 words; a send and its wait take about 40), it is the first part, and later calls have the others: take until there is nothing,
    /// and have all of them executed in that order, by one kernel or by several.
    ///
    /// # Errors
    /// [`Error::Asynchronous`] if the stream is over. Of a passing failure a call reports that queues.
    pub fn take(&self) -> Result<Option<Trigger>> {
        let state = self.inner.handle.state();
        let mut queue = state.queue.lock();
        // Under the lock: what is taken after the stream was given up would be executed behind its end.
        if state.fault.is_sticky() {
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
            return Err(Error::State {
                operation: "take a trigger",
                reason: "what is queued is not for kernels".into(),
            });
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

    /// Ends every wait of the triggers that were taken, those that kernels come to later as well: the kernel is told that it failed. What was
    /// not taken is discarded when the last one that was taken is executed. Every later call reports it.
    pub fn abort(&self) {
        let state = self.inner.handle.state();
        let queue = state.queue.lock();
        state.fault.stick("it was aborted".into());
        state.count.words.note(STATUS_WORK);
        state.cut.fetch_min(queue.triggered, Ordering::AcqRel);
        state.aborted.store(true, Ordering::Release);
        drop(queue);
        state.ensure_watched();
    }

    /// Gives up what no kernel will execute: all that was taken and has not been executed, and all that was not taken, ends as
    /// [`Outcome::Discarded`](crate::stream::Outcome::Discarded). The stream is over; a trigger that is executed nevertheless, while a handle of the
    /// stream is left, is told so.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device's memory cannot be written. Nothing was given up then.
    ///
    /// # Safety
    /// No kernel executes a trigger of this stream at this moment, and none will later: what is in the triggers names memory that is let go.
    pub unsafe fn discard_taken(&self) -> Result<()> {
        let state = self.inner.handle.state();
        let queue = state.queue.lock();
        let turn = queue.triggers << 1 | TURN_STOPPED;
        self.inner.turn.copy_from_host(0, &turn.to_ne_bytes())?;
        state.fault.stick("what was taken was given up".into());
        // Of what another thread is about to queue.
        state.cut.fetch_min(queue.triggered, Ordering::AcqRel);
        state.count.words.note(STATUS_WORK);
        drop(queue);
        drop(state.settle());
        state.discard();
        state.settle_for_good();
        Ok(())
    }

    /// The address on the device of a 32-bit word that says whether something has failed, as
    /// [`CudaStream::status_word`](super::CudaStream::status_word) has it. The codes of triggers say the same of the time since each was taken.
    #[must_use]
    pub fn status_word(&self) -> CUdeviceptr {
        self.inner.handle.state().count.words.status_at()
    }

    /// What is in [`KernelStream::status_word`].
    #[must_use]
    pub fn status(&self) -> i32 {
        let words = &self.inner.handle.state().count.words;
        words.status().load(Ordering::Acquire)
    }

    /// Takes note of later failures again, after one was noted.
    pub fn clear_status(&self) {
        let words = &self.inner.handle.state().count.words;
        words.status().store(0, Ordering::SeqCst);
    }

    /// The context whose kernels execute its triggers.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.inner.handle.state().context
    }
}

impl fmt::Debug for KernelStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelStream")
            .field("name", &self.inner.handle.state().name)
            .finish_non_exhaustive()
    }
}

// SAFETY: kernels execute a trigger once and in order, as the turn in the device's memory has it; `settle` and `discard` take each program out
// of `pending` before its owner is told, so it is told once; nothing else is ever in a trigger.
unsafe impl Executor for KernelStream {
    fn id(&self) -> u64 {
        self.inner.handle.state().id
    }

    fn name(&self) -> &str {
        &self.inner.handle.state().name
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

    /// True when everything that was queued was executed by kernels.
    fn query(&self) -> Result<bool> {
        let state = self.inner.handle.state();
        state.check()?;
        state.turn();
        // The driver knows of a context that is no more.
        state.is_idle()?;
        drop(state.settle());
        state.check()?;
        let idle = !state.has_work();
        if idle {
            state.settle_for_good();
        }
        Ok(idle)
    }

    /// Waits until kernels have executed everything that was taken. [`Error::State`] while something is queued that was not taken.
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
            return Err(Error::State {
                operation: "stream synchronize",
                reason: "nobody has taken the trigger of what is queued: KernelStream::take".into(),
            });
        }
        if !state.wait_until(target, deadline) {
            return Err(Error::Timeout {
                operation: "stream synchronize",
                timeout: timeout.unwrap_or(Duration::MAX),
            });
        }
        state.settle_for_good();
        state.check()
    }
}
