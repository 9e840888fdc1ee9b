//! Streams of a GPU.
#![allow(unsafe_code)] // calls the driver, and implements an unsafe trait

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

use super::CudaContext;
use super::capture::{forbid, is_captured};
use super::driver::check;
use super::graph::Exec;
use super::host_call::{HostCall, call_host};
use super::letting_go::let_go;
use super::memops::MemOp;
use super::module::Module;
use super::pending::What;
use super::queue::Queue;
use super::shared::{Shared, lock};
use super::trigger::Trigger;
use crate::stream::{Event, Executor, Submission, forbid_on};
use crate::{Error, Result};

/// What executes the programs of a CUDA stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Execution {
    /// The memory operations of the driver (`cuStreamBatchMemOp_v2`); and a kernel where the device has none for an op of a program.
    #[default]
    MemoryOps,
    /// A kernel of one thread that interprets them. It takes a place on the GPU while it waits.
    Kernel,
}

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
    handle: Arc<Handle>,
}

pub(super) struct Handle {
    shared: ManuallyDrop<Arc<Shared>>,
}

impl Handle {
    /// A stream of that context, of this library's own, which does not wait for the legacy default stream.
    pub(super) fn new(context: &CudaContext, name: String) -> Result<Handle> {
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, which `Shared` destroys.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
        })?;
        drop(entered);
        Self::over(context, raw, true, name)
    }

    fn over(context: &CudaContext, raw: CUstream, owned: bool, name: String) -> Result<Handle> {
        let shared = ManuallyDrop::new(Shared::new(context, raw, owned, name)?);
        Ok(Handle { shared })
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: taken once, in here, and not used after it.
        let shared = unsafe { ManuallyDrop::take(&mut self.shared) };
        if shared.has_work() {
            // The thread that looks finds out when it is done.
            shared.keep();
        }
        let_go(shared);
    }
}

impl CudaStream {
    /// A new stream of that context, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if there is no thread to be had.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<CudaStream> {
        let handle = Arc::new(Handle::new(context, name.into())?);
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
        Self::over(context, raw, false, name.into())
    }

    /// A stream that somebody else has made and whose object is kept as long.
    pub(super) fn lent(
        context: &CudaContext,
        stream: &Arc<cudarc::driver::CudaStream>,
        name: String,
    ) -> Result<CudaStream> {
        let lent = Self::over(context, stream.cu_stream(), false, name)?;
        let _ = lent.shared().lender.set(Arc::clone(stream));
        Ok(lent)
    }

    fn over(context: &CudaContext, raw: CUstream, owned: bool, name: String) -> Result<CudaStream> {
        let handle = Arc::new(Handle::over(context, raw, owned, name)?);
        Ok(CudaStream { handle })
    }

    /// The same stream, whose programs are executed by that from now on, whichever handle they are queued by. So are its own steps: events
    /// that are recorded and waited for.
    ///
    /// # Errors
    /// [`Error::State`] without kernels.
    pub fn with_execution(self, execution: Execution) -> Result<CudaStream> {
        let shared = self.shared();
        if execution == Execution::Kernel {
            shared.context.check_kernels()?;
        }
        lock(&shared.queue).execution = execution;
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
        let shared = self.shared();
        let words = &shared.count.words;
        let mut queue = lock(&shared.queue);
        if !std::mem::replace(&mut queue.is_watched, true) {
            // Nobody listened before.
            words.status().store(0, Ordering::SeqCst);
        }
        words.status_at()
    }

    /// What [`CudaStream::status_word`] says.
    #[must_use]
    pub fn status(&self) -> i32 {
        self.shared().count.words.status().load(Ordering::Acquire)
    }

    /// Takes note of later failures again, after one was noted.
    pub fn clear_status(&self) {
        let words = &self.shared().count.words;
        words.status().store(0, Ordering::SeqCst);
    }

    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.shared().raw
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.shared().context
    }

    /// Queues a function of the host (`cuLaunchHostFunc`), which a thread of the driver calls in its turn. It must not call CUDA, nor wait
    /// for work of a GPU. One that panics makes the stream fail: later calls report it. The stream stays until it has run.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn launch_host(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        let shared = self.shared();
        shared.check()?;
        let Some(stream) = shared.weak.upgrade() else {
            return shared.check();
        };
        let call = Box::new(HostCall {
            stream,
            function: Box::new(function),
        });
        let queue = lock(&shared.queue);
        let _entered = shared.context.enter()?;
        // A graph would call it once with each launch.
        forbid(shared.raw, "launch a function of the host")?;
        let data = Box::into_raw(call);
        // SAFETY: the driver calls the function once, with `data`, which is then its.
        let launched = check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(shared.raw, Some(call_host), data.cast())
        });
        // What it drops may be what queues here.
        drop(queue);
        if launched.is_err() {
            // SAFETY: made above, and not given away.
            drop(unsafe { Box::from_raw(data) });
        }
        launched
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
    fn launch(&self, launch: impl FnOnce(&Module, CUstream) -> Result<()>) -> Result<()> {
        let shared = self.shared();
        shared.check()?;
        let module = shared.context.module()?;
        let entered = shared.context.enter()?;
        if is_captured(shared.raw)? {
            // The graph has a context of its own, and nothing is counted in it.
            return launch(module, shared.raw);
        }
        drop(entered);
        shared.queue(|shared, queue| {
            let _entered = shared.context.enter()?;
            launch(module, shared.raw)?;
            // Counted, so that the stream has its context, and with it the kernel, until this is done.
            let after = queue.issued;
            shared.count_for(queue, after, What::Passing);
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
        self.shared().give_up();
    }

    /// The operations of programs, in `queue`.
    pub(super) fn translate(&self, queue: &mut Queue, programs: &[Submission]) -> Result<()> {
        self.shared().prepare(queue, programs.iter())
    }

    /// The operation by which the stream counts, alone.
    pub(super) fn count_op(&self) -> Vec<MemOp> {
        let mut queue = Queue::for_node();
        self.shared().count(&mut queue);
        queue.into_one_call().unwrap_or_default()
    }

    /// Does what no look at the stream may come between.
    pub(super) fn while_not_looked_at(
        &self,
        act: impl FnOnce(CUstream) -> Result<()>,
    ) -> Result<()> {
        let shared = self.shared();
        shared.while_not_looked_at(|| act(shared.raw))
    }

    /// Launches a graph with other programs than it had: as many, in the order of the nodes.
    ///
    /// # Errors
    /// As [`Executor::submit`]. Nothing was launched then.
    pub(crate) fn launch_graph(&self, exec: &Arc<Exec>, batch: &[Submission]) -> Result<()> {
        self.shared().launch(exec, batch)
    }

    /// How many calls of the driver have queued memory operations on it so far (`cuStreamBatchMemOp`), for who measures.
    #[must_use]
    pub fn driver_calls(&self) -> u64 {
        lock(&self.shared().queue).taken
    }

    fn shared(&self) -> &Shared {
        &self.handle.shared
    }
}

fn ns_of(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream")
            .field("name", &self.shared().name)
            .field("raw", &self.shared().raw)
            .finish_non_exhaustive()
    }
}

// SAFETY: the driver executes a stream's operations once and in order; `settle` and `discard` take each program out of `pending` before
// its owner is told, so it is told once; nothing else is ever queued.
unsafe impl Executor for CudaStream {
    fn id(&self) -> u64 {
        self.shared().id
    }

    fn name(&self) -> &str {
        &self.shared().name
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.shared().submit(batch)
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.shared().submit_one(submission)
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.shared().record(event)
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.shared().wait_event(event)
    }

    fn query(&self) -> Result<bool> {
        let shared = self.shared();
        shared.check()?;
        shared.turn();
        let idle = shared.is_idle()?;
        if idle {
            shared.settle_for_good();
        }
        shared.check()?;
        Ok(idle)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let shared = self.shared();
        forbid_on(shared.id, "stream synchronize")?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if shared.ended.load(Ordering::Acquire) {
            shared.settle_for_good();
            return shared.check();
        }
        let mut target = 0;
        shared.queue_unchecked(|shared, queue| {
            let after = queue.issued;
            shared.count_for(queue, after, What::Passing);
            target = queue.issued;
            Ok(())
        })?;
        if !shared.wait_until(target, deadline) {
            return Err(Error::Timeout {
                operation: "stream synchronize",
                timeout: timeout.unwrap_or(Duration::MAX),
            });
        }
        shared.settle_for_good();
        shared.check()
    }
}
