//! Streams of a GPU.
#![allow(unsafe_code)] // calls the driver, and implements an unsafe trait

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::call_queue::CallQueue;
use super::capture::is_captured;
use super::context::CudaContext;
use super::exec::InstantiatedGraph;
use super::execution::Execution;
use super::handle::StreamHandle;
use super::host_call;
use super::memops::MemOp;
use super::module::KernelModule;
use super::pending::PendingWork;
use super::state::StreamState;
use super::stream_words::STATUS_STREAM;
use super::trigger::Trigger;
use super::watch::release_elsewhere;
use crate::stream::{Event, Executor, Submission, act_as, forbid_on, message};
use crate::{Error, Result};

/// A stream of a GPU: of this library's own, or one that a framework, the runtime API or the application has made.
///
/// It is a handle; clones are handles of the same stream, usable from any thread. Other work may be queued on the same `CUstream` by
/// anybody: programs have their place in its order like kernels.
///
/// - Queueing is one call of the driver for up to 255 memory operations; a send takes two or three. The driver makes the caller wait
///   while its queue is full.
/// - No thread of this process executes anything. One looks every millisecond how far the stream has come, for deadlines and for those
///   who wait for none of its calls; the calls of [`Executor`] look as well.
/// - A wait whose deadline passes, or whose endpoint fails, is ended by a store to the word that it waits for.
/// - Streams of one priority share the device's queues, 8 unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise: a wait may hold up a stream that
///   shares its queue. Streams that wait for each other need queues of their own, or other priorities.
/// - Memory that a GPU has mapped is unregistered when its owner, an endpoint or a region, is dropped; the driver may wait for the GPU then,
///   as it does where memory is freed. A thread that drops one should not be the one that a stream waits for.
/// - When the last handle is dropped, what is queued is still executed, and the stream, if it is this library's own, is destroyed after
///   that. Nobody waits for it.
/// - After an error of the driver that ends a context (an illegal address, a context that is destroyed), programs that the stream has not
///   finished end as [`Outcome::Discarded`](crate::stream::Outcome::Discarded), and every later call reports it.
#[derive(Clone)]
pub struct CudaStream {
    handle: Arc<StreamHandle>,
}

impl CudaStream {
    /// A new stream of that context, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if there is no thread to be had.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<CudaStream> {
        let handle = Arc::new(StreamHandle::new(context, name.into())?);
        Ok(CudaStream { handle })
    }

    /// A stream that somebody else has made: a `CUstream`, which is a `cudaStream_t`. It stays theirs.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if there is no thread to be had.
    ///
    /// # Safety
    /// `raw` is a stream of `context`, and is not destroyed before the last handle is dropped and what was queued is done.
    pub unsafe fn from_raw(
        context: &CudaContext,
        raw: CUstream,
        name: impl Into<String>,
    ) -> Result<CudaStream> {
        let handle = Arc::new(StreamHandle::lent(context, raw, name.into())?);
        Ok(CudaStream { handle })
    }

    /// A stream that somebody else has made and whose object is kept as long.
    pub(super) fn lent(
        context: &CudaContext,
        stream: &Arc<cudarc::driver::CudaStream>,
        name: String,
    ) -> Result<CudaStream> {
        let handle = StreamHandle::lent(context, stream.cu_stream(), name)?;
        let _ = handle.state().lender.set(Arc::clone(stream));
        let handle = Arc::new(handle);
        Ok(CudaStream { handle })
    }

    /// The same stream, whose programs are executed by that from now on, whichever handle they are queued by. So are its own steps: events
    /// that are recorded and waited for.
    ///
    /// # Errors
    /// [`Error::State`] without kernels.
    pub fn with_execution(self, execution: Execution) -> Result<CudaStream> {
        let state = self.state();
        if execution == Execution::Kernel {
            state.context.check_kernels()?;
        }
        state.queue.lock().execution = execution;
        Ok(self)
    }

    /// The address on the device of a 32-bit word that says whether something before has failed, for kernels to read: 0, or a code of the C
    /// interface, -19 (`DOORBELL_EWORK`) if an operation of this stream failed or its wait was ended before its condition held, -18
    /// (`DOORBELL_EASYNC`) if the driver refused queued work, or the stream has failed. The first failure stays until
    /// [`CudaStream::clear_status`]. The word is host memory, registered as long as there is a handle of the stream or work of it.
    ///
    /// The word is written before the wait ends that the failure ends, so a kernel that is queued behind the wait sees it. From the first call
    /// of this method on
    /// - a wait whose deadline passes, or whose endpoint fails or is aborted, ends after the word was written;
    /// - a wait for a completion is executed by a kernel, where there are kernels: if the NIC has written a completion in error, it writes the
    ///   word before what follows. Without kernels, and for waits in a graph, that is known to the processor only, up to some milliseconds
    ///   later. On the proxy path the word is written before the completion is counted.
    ///
    /// It is also written for an endpoint that fails while the stream has not been seen to be done with its operations, which may be a
    /// millisecond after it is. What is queued is not skipped: it is the kernel's to decide what a failure means to it.
    #[must_use]
    pub fn status_word(&self) -> CUdeviceptr {
        let state = self.state();
        let words = &state.count.words;
        let mut queue = state.queue.lock();
        if !std::mem::replace(&mut queue.is_watched, true) {
            // Nobody listened before.
            words.status().store(0, Ordering::SeqCst);
        }
        words.status_at()
    }

    /// What [`CudaStream::status_word`] says.
    #[must_use]
    pub fn status(&self) -> i32 {
        self.state().count.words.status().load(Ordering::Acquire)
    }

    /// Takes note of later failures again, after one was noted.
    pub fn clear_status(&self) {
        let words = &self.state().count.words;
        words.status().store(0, Ordering::SeqCst);
    }

    /// The driver's handle. From the first call of this method on, each operation on a stream of this library's costs a second call of the
    /// driver, which asks whether the stream is under capture: with the handle, anybody may begin one.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.state().expose()
    }

    /// The driver's handle, for calls of this library that neither begin a capture nor have the stream join one.
    pub(super) fn raw_inside(&self) -> CUstream {
        self.state().raw
    }

    /// A graph builder begins to capture the stream, or has ended that. Called within [`CudaStream::alone`].
    pub(super) fn set_captured(&self, is_captured: bool) {
        self.state().set_captured(is_captured);
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.state().context
    }

    /// Queues a function of the host (`cuLaunchHostFunc`), which a thread of the driver calls in its turn. It must not call CUDA, nor wait
    /// for work of a GPU. One that panics makes the stream fail: later calls report it. The stream stays until it has run.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn launch_host(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        let state = self.state();
        state.check()?;
        let Some(stream) = state.weak.upgrade() else {
            return state.check();
        };
        let call = Box::new(move || {
            if let Err(panicked) = catch_unwind(AssertUnwindSafe(|| act_as(stream.id, function))) {
                let reason = format!("panicked: {}", message(panicked));
                stream.count.words.note(STATUS_STREAM);
                stream.fault.stick(reason);
            }
            // Dropping the last handle calls the driver, which a host function must not do.
            release_elsewhere(stream);
        });
        let queue = state.queue.lock();
        let mut driver = state.driver(true)?;
        // A graph would call it once with each launch.
        state.forbid_capture(&mut driver, "launch a function of the host")?;
        // SAFETY: the stream lives as long as its state.
        let launched = unsafe { host_call::launch(state.raw, call) };
        // The closure is dropped after this, and may queue on this stream when it is.
        drop(queue);
        launched.map_err(|(error, _)| error)
    }

    /// Queues a kernel that takes that long, and does nothing: work, for who measures. The GPU's clock steps by up to a microsecond.
    ///
    /// # Errors
    /// [`Error::State`] if this library was built without kernels, and those of [`Executor::submit`].
    pub fn spin(&self, time: Duration) -> Result<()> {
        let ns = ns_of(time);
        self.launch(|module, raw| {
            // SAFETY: its one parameter, a `uint64_t`.
            unsafe { module.spin.launch(raw, [std::ptr::from_ref(&ns).cast()]) }
        })
    }

    /// Queues a kernel of one thread that takes that long and then executes a trigger, with that bound: an application's kernel in small, for
    /// tests and for who measures. The code of the trigger goes to `code` on the device, an `int32_t`, unless that is 0.
    ///
    /// # Errors
    /// As [`CudaStream::spin`].
    ///
    /// # Safety
    /// The trigger is one of a [`KernelStream`](super::KernelStream) of this context that has a handle, or work, until the kernel is done, and
    /// was not given up; `code` is 0 or memory that stays as long.
    pub unsafe fn step(
        &self,
        work: Duration,
        trigger: &Trigger,
        timeout: Duration,
        code: CUdeviceptr,
    ) -> Result<()> {
        let (work_ns, timeout_ns) = (ns_of(work), ns_of(timeout));
        let parameters = [
            std::ptr::from_ref(trigger).cast(),
            std::ptr::from_ref(&work_ns).cast(),
            std::ptr::from_ref(&timeout_ns).cast(),
            std::ptr::from_ref(&code).cast(),
        ];
        // SAFETY: its parameters, a `struct doorbell_trigger`, two `uint64_t` and an address; what they name is by this function's contract.
        self.launch(|module, raw| unsafe { module.step.launch(raw, parameters) })
    }

    /// Queues a kernel that makes a work request: `doorbell_put_step`.
    ///
    /// # Errors
    /// As [`CudaStream::spin`].
    ///
    /// # Safety
    /// `queue` is a `struct doorbell_queue`, and `step` a `struct dbl_step`; what they name stays until the kernel is done.
    pub(crate) unsafe fn put_step(&self, queue: &[u64; 12], step: &[u64; 8]) -> Result<()> {
        let parameters = [
            std::ptr::from_ref(queue).cast(),
            std::ptr::from_ref(step).cast(),
        ];
        // SAFETY: its parameters, by this function's contract.
        self.launch(|module, raw| unsafe { module.put_step.launch(raw, parameters) })
    }

    /// Queues a kernel of the library's.
    fn launch(&self, launch: impl FnOnce(&KernelModule, CUstream) -> Result<()>) -> Result<()> {
        let state = self.state();
        state.check()?;
        let module = state.context.module()?;
        let entered = state.context.enter()?;
        if is_captured(state.raw)? {
            // The graph has a context of its own, and nothing is counted in it.
            return launch(module, state.raw);
        }
        drop(entered);
        state.queue(|state, queue| {
            let _entered = state.context.enter()?;
            launch(module, state.raw)?;
            // Counted, so that the stream has its context, and with it the kernel, until this is done.
            let after = queue.issued;
            state.count_for(queue, after, PendingWork::Count);
            Ok(())
        })
    }

    /// Gives up what is queued at this moment. The GPU executes it all the same, since nothing takes it back; but waits for completions, for
    /// words and for events of a [`HostStream`](crate::HostStream) end at once, and endpoints with operations in it have failed
    /// ([`Cause::Discarded`](crate::Cause::Discarded)). What is queued later is executed.
    ///
    /// A wait for an event of another stream of a GPU ends with [`Execution::Kernel`]. With [`Execution::MemoryOps`] it goes on until that stream
    /// has passed the event: the GPU looks at nothing but that stream's own count, which all who wait for the stream look at. So it is
    /// that stream that is to be aborted, or both.
    pub fn abort(&self) {
        self.state().give_up();
    }

    /// The operations of programs, in `queue`.
    pub(super) fn translate(&self, queue: &mut CallQueue, programs: &[Submission]) -> Result<()> {
        self.state().prepare(queue, programs.iter())
    }

    /// The operation by which the stream counts, alone.
    pub(super) fn count_op(&self) -> Vec<MemOp> {
        let mut queue = CallQueue::for_node();
        self.state().count(&mut queue);
        queue.into_one_call().unwrap_or_default()
    }

    /// Does what no look at the stream may come between.
    pub(super) fn alone(&self, call: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        let state = self.state();
        state.alone(|| call(state.raw))
    }

    /// Launches a graph with other programs than it had: as many, in the order of the nodes.
    ///
    /// # Errors
    /// As [`Executor::submit`]. Nothing was launched then.
    pub(crate) fn launch_graph(
        &self,
        exec: &Arc<InstantiatedGraph>,
        batch: &[Submission],
    ) -> Result<()> {
        self.state().launch(exec, batch)
    }

    /// How many calls of the driver have queued memory operations on it so far (`cuStreamBatchMemOp`), for who measures.
    #[must_use]
    pub fn driver_calls(&self) -> u64 {
        self.state().queue.lock().taken
    }

    fn state(&self) -> &StreamState {
        self.handle.state()
    }
}

fn ns_of(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream")
            .field("name", &self.state().name)
            .field("raw", &self.state().raw)
            .finish_non_exhaustive()
    }
}

// SAFETY: the driver executes a stream's operations once and in order; `settle` and `discard` take each program out of `pending` before
// its owner is told, so it is told once; nothing else is ever queued.
unsafe impl Executor for CudaStream {
    fn id(&self) -> u64 {
        self.state().id
    }

    fn name(&self) -> &str {
        &self.state().name
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.state().submit(batch)
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.state().submit_one(submission)
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.state().record(event)
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.state().wait_event(event)
    }

    fn query(&self) -> Result<bool> {
        let state = self.state();
        state.check()?;
        state.turn();
        let idle = state.is_idle()?;
        if idle {
            state.settle_for_good();
        }
        state.check()?;
        Ok(idle)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let state = self.state();
        forbid_on(state.id, "stream synchronize")?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if state.ended.load(Ordering::Acquire) {
            state.settle_for_good();
            return state.check();
        }
        let mut target = 0;
        state.queue_unchecked(|state, queue| {
            let after = queue.issued;
            state.count_for(queue, after, PendingWork::Count);
            target = queue.issued;
            Ok(())
        })?;
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
