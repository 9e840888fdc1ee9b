//! Streams of a GPU.
#![allow(unsafe_code)] // calls the driver, and implements an unsafe trait

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::context::CudaContext;
use super::deferred_free::free_after_wait;
use super::execution::Execution;
use super::handle::CudaStreamHandle;
use super::host_call;
use super::instantiated_graph::InstantiatedGraph;
use super::module::KernelModule;
use super::pending::PendingWork;
use super::queued_kernel::KeptByGraph;
use super::replay::{find_capture, retain};
use super::state::{StreamOwner, StreamState};
use super::trigger::Trigger;
use super::watch::release_elsewhere;
use crate::stream::{
    Event, Executor, ReplayStream, StreamFailure, StreamTurns, Submission, forbid_on, message,
    run_as_stream,
};
use crate::{Error, Result};

/// A stream of a GPU, created by this library or by a framework, the runtime API or the application.
///
/// Clones are handles of the same stream, usable from any thread. Others may queue work on the same `CUstream`; programs are executed in its
/// order, like kernels.
///
/// - Queueing takes one call of the driver for up to 255 memory operations; a send takes four operations on the direct path and two on the
///   proxy path. A thread whose current context is not the stream's needs three more calls, and a stream whose `CUstream` others know needs one more,
///   which asks about a graph capture. The call blocks while the driver's queue is full.
/// - No thread of this process executes programs. One thread polls the progress of each stream with work every millisecond, notifies endpoints and
///   checks deadlines; the calls of [`Executor`] do so, too.
/// - If the deadline of a wait passes, or its endpoint fails, this process ends the wait by a store to the word that it reads. Before that it gives up
///   the endpoints of everything behind the wait, so that nothing of it is transmitted.
/// - Streams share the work queues of their context: 8, unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise (at most 32). While as many streams wait as there are
///   queues, no other stream goes on, whatever its priority. The first deadline of a wait ends that.
/// - Memory that is mapped to a GPU is unregistered after its owner, an endpoint or a region, is dropped and when no stream of this library has work: by
///   that drop, or by the next call of the application that drops something of a GPU or waits for a stream (`synchronize`). If other code has queued GPU work, the driver may
///   block that thread until the work is done, and calls of other threads with it. The library's own threads give nothing back.
/// - When the last handle is dropped, queued work is still executed, and a stream that this library has created is destroyed after that. The drop
///   does not wait for it.
/// - After an error that a context does not recover from (an illegal address, a destroyed context), programs that the GPU may have begun end
///   as [`Status::Unknown`](crate::Status::Unknown), those behind them as [`Status::Discarded`](crate::Status::Discarded), and every later call reports
///   the error.
#[derive(Clone)]
pub struct CudaStream {
    handle: Arc<CudaStreamHandle>,
}

impl CudaStream {
    /// A new stream of that context, which does not synchronize with the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if the watching thread cannot be started.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<CudaStream> {
        let handle = Arc::new(CudaStreamHandle::new(context, name.into())?);
        Ok(CudaStream { handle })
    }

    /// A stream that the application has created, and destroys: a `CUstream`, which is a `cudaStream_t`.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if the watching thread cannot be started.
    ///
    /// # Safety
    /// `raw` is a stream of `context`, and is not destroyed before the last handle is dropped and what was queued is done.
    pub unsafe fn from_raw(
        context: &CudaContext,
        raw: CUstream,
        name: impl Into<String>,
    ) -> Result<CudaStream> {
        Self::borrowed(context, raw, StreamOwner::Application, name.into())
    }

    /// As [`CudaStream::from_raw`], for a stream that dropping `owner` destroys. `owner` is dropped when the last handle is dropped and the work that was
    /// queued by this library is done. A thread of this library may drop it, but none in which the driver must not be called.
    ///
    /// # Errors
    /// As [`CudaStream::from_raw`]. `owner` is then dropped.
    ///
    /// # Safety
    /// `raw` is a stream of `context`, and is valid as long as `owner`.
    pub unsafe fn from_owner(
        context: &CudaContext,
        raw: CUstream,
        name: impl Into<String>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<CudaStream> {
        Self::borrowed(
            context,
            raw,
            StreamOwner::Object { _owner: owner },
            name.into(),
        )
    }

    fn borrowed(
        context: &CudaContext,
        raw: CUstream,
        owner: StreamOwner,
        name: String,
    ) -> Result<CudaStream> {
        let handle = CudaStreamHandle::borrowed(context, raw, owner, name)?;
        let handle = Arc::new(handle);
        Ok(CudaStream { handle })
    }

    /// Sets what executes the programs of this stream from now on, for all its handles, and also its own steps: recording events and waiting for them.
    ///
    /// # Errors
    /// [`Error::State`] if kernels are asked for and cannot be used here.
    pub fn with_execution(self, execution: Execution) -> Result<CudaStream> {
        let state = self.state();
        if execution == Execution::Kernel {
            state.context.check_kernels()?;
        }
        state.queue.lock().execution = execution;
        Ok(self)
    }

    /// The address on the device of a 32-bit status word, from which kernels learn of earlier failures. It is 0 or a code of the C interface:
    /// -19 (`DOORBELL_EWORK`) if an operation of this stream failed or its wait was ended before its condition held, -18 (`DOORBELL_EASYNC`) if the
    /// driver refused queued work or the stream has failed. The first failure stays until [`CudaStream::clear_status`]. The word is host memory,
    /// registered as long as the stream has a handle or work.
    ///
    /// The word is written before a failure ends a wait, so that kernels behind the wait see it. From the first call of this method on:
    /// - If the deadline of a wait passes, or its endpoint fails or is aborted, the word is written before the wait ends.
    /// - If the NIC has written a completion with an error, the stream stops there until this process has written the word.
    ///
    /// The word is also written if an endpoint fails before this process has seen that the stream is done with its operations, which may be a
    /// millisecond after that. Queued work is not skipped: kernels decide what a failure means to them.
    #[must_use]
    pub fn status_word(&self) -> CUdeviceptr {
        let state = self.state();
        let words = &state.count.words;
        let mut queue = state.queue.lock();
        if !std::mem::replace(&mut queue.is_watched, true) {
            // Failures from before the first call do not count.
            words.status().store(0, Ordering::SeqCst);
        }
        words.status_at()
    }

    /// Whether calls go on behind work that failed. Off by default: every call reports the failure until
    /// [`Executor::take_fault`](crate::Executor::take_fault), and nothing behind it is transmitted. On: one call reports it, and what is behind it is
    /// transmitted.
    pub fn continue_on_error(&self, continues: bool) {
        let state = self.state();
        state.fault.set_continues(continues);
        state.count.words.set_replay_goes_on(continues);
    }

    /// The value of the [`CudaStream::status_word`].
    #[must_use]
    pub fn status(&self) -> i32 {
        self.state().count.words.status().load(Ordering::Acquire)
    }

    /// Sets the [`CudaStream::status_word`] to 0, so that it takes the next failure.
    pub fn clear_status(&self) {
        let words = &self.state().count.words;
        words.status().store(0, Ordering::SeqCst);
    }

    /// The driver's handle. After this call, queueing on a stream that this library has created takes one more driver call, which asks about a graph
    /// capture: the caller may begin one with the handle.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.state().expose()
    }

    /// The driver's handle, for calls of this library that neither begin a capture nor make the stream join one.
    pub(super) fn raw_inside(&self) -> CUstream {
        self.state().raw
    }

    /// Notes that a graph builder begins to capture the stream, or has ended that. Called within [`CudaStream::alone`].
    pub(super) fn set_captured(&self, is_captured: bool) -> bool {
        self.state().set_captured(is_captured)
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.state().context
    }

    /// Queues a host function (`cuLaunchHostFunc`), which a thread of the driver calls in stream order. It must not call CUDA, nor wait for work of
    /// a GPU. If it panics, the stream has failed: operations behind it are given up before it returns, and later calls report the failure. Behind a failure
    /// of the stream the closure is dropped without having run. The stream is kept until then.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn launch_host(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        self.try_launch_host(move || {
            function();
            Ok(())
        })
    }

    /// Queues a host function as [`CudaStream::launch_host`] does, one that may fail. Its error is a failure of the stream, as a panic is, and
    /// [`Error::Asynchronous`](crate::Error::Asynchronous) has the error's text and its [`WorkError`](crate::WorkError), if it has one.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn try_launch_host(
        &self,
        function: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let state = self.state();
        state.check()?;
        let Some(stream) = state.weak.upgrade() else {
            return state.check();
        };
        let queue = state.queue.lock();
        let mut driver = state.driver(true)?;
        // Each launch of a graph would call it again.
        state.forbid_capture(&mut driver, "launch a function of the host")?;
        state.function_comes();
        let place = state.functions.lock().place(queue.issued);
        let call = Box::new(move || {
            let is_given_up = stream.functions.lock().is_given_up(place);
            let run = AssertUnwindSafe(|| match is_given_up {
                true => {
                    drop(function);
                    Ok(())
                }
                false => run_as_stream(stream.id, function),
            });
            let failure: Option<StreamFailure> = match catch_unwind(run) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.into()),
                Err(panicked) => Some(format!("panicked: {}", message(panicked)).into()),
            };
            if let Some(failure) = failure {
                // An owner that is given up may panic, too; nothing may leave this closure.
                let _ = catch_unwind(AssertUnwindSafe(|| stream.fail_now(place, failure)));
            }
            stream.function_is_over();
            // Dropping the last handle calls the driver, which a host function must not do.
            release_elsewhere(stream);
        });
        // SAFETY: the stream lives as long as its state.
        let launched = unsafe { host_call::launch(state.raw, call) };
        if launched.is_err() {
            state.function_is_over();
        }
        // The closure is dropped after this, and may queue on this stream when it is.
        drop(queue);
        launched.map_err(|(error, _)| error)
    }

    /// Queues a kernel that runs for `time`, an hour at most, and does nothing, as work for measurements. The GPU's clock has a resolution of up to a
    /// microsecond.
    ///
    /// # Errors
    /// [`Error::State`] if this library was built without kernels, and those of [`Executor::submit`].
    pub fn spin(&self, time: Duration) -> Result<()> {
        let ns = ns_of(time);
        self.launch_kernel(|module, raw| {
            // SAFETY: its one parameter, a `uint64_t`.
            unsafe { module.spin.launch(raw, [std::ptr::from_ref(&ns).cast()]) }
        })
    }

    /// Queues a kernel of one thread that runs for `work` and then executes a trigger, whose waits it bounds by `timeout`: a minimal application
    /// kernel, for tests and measurements. It stores the trigger's code, an `int32_t`, at the device address `code`, unless that is 0.
    ///
    /// # Errors
    /// As [`CudaStream::spin`].
    ///
    /// # Safety
    /// The trigger is of a [`TriggerStream`](super::TriggerStream) of this context that has a handle or work until the kernel is done, and was not
    /// discarded; `code` is 0 or memory that stays as long.
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
        self.launch_kernel(|module, raw| unsafe { module.step.launch(raw, parameters) })
    }

    /// Queues a kernel that makes a work request: `doorbell_put_step`.
    ///
    /// # Errors
    /// As [`CudaStream::spin`].
    ///
    /// # Safety
    /// `queue` is a `struct doorbell_queue_view`, and `step` a `struct dbl_step`; what they name stays until the kernel is done.
    pub(crate) unsafe fn put_step(&self, queue: &[u64; 14], step: &[u64; 8]) -> Result<()> {
        let parameters = [
            std::ptr::from_ref(queue).cast(),
            std::ptr::from_ref(step).cast(),
        ];
        // SAFETY: its parameters, by this function's contract.
        self.launch_kernel(|module, raw| unsafe { module.put_step.launch(raw, parameters) })
    }

    /// Queues a kernel of this library's.
    pub(super) fn launch_kernel(
        &self,
        launch: impl FnOnce(&KernelModule, CUstream) -> Result<()>,
    ) -> Result<()> {
        self.launch_counted(PendingWork::Count, launch)
    }

    /// The same, with what is pending until the kernel is done. An error says that the driver does not have the kernel.
    pub(super) fn launch_counted(
        &self,
        what: PendingWork,
        launch: impl FnOnce(&KernelModule, CUstream) -> Result<()>,
    ) -> Result<()> {
        let state = self.state();
        state.check()?;
        let module = state.context.module()?;
        let entered = state.context.enter()?;
        if let Some((_, graph)) = find_capture(self)? {
            // A count in the graph would repeat, so the graph keeps the kernel's module.
            let kept = match what {
                PendingWork::Kernel(kernel) => kernel.kept,
                _ => KeptByGraph::new(None, &state.count, &state.context),
            };
            retain(graph, kept)?;
            return launch(module, state.raw);
        }
        drop(entered);
        state.queue_by(
            |state, queue| {
                // The count keeps the stream, its context and with that the kernel's module until the kernel is done.
                let after = queue.issued;
                state.count_for(queue, after, what);
                Ok(())
            },
            |state, queue| {
                let before = state.enter(queue)?;
                // Before the launch: a thread that gives memory back must not find the stream idle when the kernel has begun, which may wait for this thread.
                state.ensure_watched();
                let launched = state
                    .context
                    .enter()
                    .and_then(|_entered| launch(module, state.raw));
                launched.inspect_err(|_| state.pending.take_back(before, &mut queue.entering))?;
                if let Err(error) = state.issue(queue, before) {
                    state.lose_count(queue, before, &error);
                }
                Ok(())
            },
        )
    }

    /// Gives up the work that is queued now. The GPU still executes it, since the driver takes nothing back; but functions of
    /// [`CudaStream::launch_host`] are not called, waits for completions, for words and for events of a [`HostStream`](crate::HostStream) end at once, and endpoints with operations in it fail
    /// ([`Cause::Discarded`](crate::Cause::Discarded)). Work that is queued later is executed.
    ///
    /// A wait for a word by a kernel ends if it is being executed, and is then a fault of the stream.
    ///
    /// With [`Execution::Kernel`] a wait for an event of another GPU stream ends, too. With [`Execution::MemoryOps`] it lasts until that stream has
    /// passed the event, because the GPU reads only that stream's count: abort that stream, or both.
    pub fn abort(&self) {
        self.state().abort();
    }

    /// Calls the driver with the stream's handle while nothing is queued and no thread queries the stream.
    pub(super) fn alone(&self, call: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        let state = self.state();
        state.alone(|| call(state.raw))
    }

    /// Launches a graph with new programs in its nodes: as many as it had, in the order of the nodes.
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

    /// How many calls of the driver have queued programs and steps on it so far (`cuStreamBatchMemOp`, `cuLaunchKernel`), for measurements.
    #[must_use]
    pub fn driver_calls(&self) -> u64 {
        self.state().queue.lock().taken
    }

    pub(super) fn state(&self) -> &StreamState {
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

impl crate::stream::SealedExecutor for CudaStream {}

// SAFETY: the driver executes a stream's operations once and in order; `settle` and `discard` take each program out of `pending` before
// its owner is told, so it is told once; nothing else is ever queued.
unsafe impl Executor for CudaStream {
    fn id(&self) -> u64 {
        self.state().id
    }

    fn name(&self) -> &str {
        &self.state().name
    }

    fn executes_on_host(&self) -> bool {
        false
    }

    fn has_room(&self, _entries: usize) -> Result<bool> {
        Ok(self.state().has_room())
    }

    fn turns(&self) -> Option<StreamTurns> {
        Some(self.state().turns())
    }

    fn works_on_memory(&self) -> bool {
        self.context().capabilities().kernels
    }

    fn takes_messages(&self) -> bool {
        self.context().capabilities().kernels
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

    fn replays(&self) -> Option<&dyn ReplayStream> {
        Some(self)
    }

    fn take_fault(&self) -> Option<Error> {
        self.state().take_fault()
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.state().fault.fail(failure)
    }

    fn query(&self) -> Result<bool> {
        let state = self.state();
        state.check()?;
        state.turn();
        // The driver may take a moment to retire the operation that has stored the count.
        let idle = state.is_idle()? || state.has_counted_all();
        if idle {
            state.settle_for_good();
            free_after_wait();
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
        let target = state.queue_count_until(deadline)?;
        if !target.is_some_and(|target| state.wait_until(target, deadline)) {
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
