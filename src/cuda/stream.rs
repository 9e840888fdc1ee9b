//! Streams of a GPU.
#![allow(unsafe_code)] // calls the driver, and implements an unsafe trait

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};

use super::CudaContext;
use super::driver::{check, is};
use super::memops::{CALL_MAX, MemOp, store_dword, translate, wait_count};
use super::pending::{Awaited, Pending, What, settle};
use super::reach::Reach;
use super::word::Words;
use crate::proxy::{Pace, Placement, Rounds, Turn};
use crate::stream::{
    Backoff, Elsewhere, Event, Executor, Fault, Mark, Progress, Record, Submission, act_as,
    forbid_on, message, next_id,
};
use crate::{Error, Result};

/// How often the thread looks that tells owners what their programs have come to.
const TICK: Duration = Duration::from_millis(1);

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

struct Handle {
    inner: ManuallyDrop<Arc<Inner>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: taken once, in here, and not used after it.
        let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        let mut remaining = lock(&inner.remaining);
        if !lock(&inner.pending).is_empty() {
            // What is queued keeps the stream until it is done, and the thread that looks finds out.
            *remaining = Some(Arc::clone(&inner));
        }
        drop(remaining);
        let_go(inner);
    }
}

/// Gives up a handle between the turns of the thread that looks, so that it is not that thread which ends the stream: this may wait for
/// the GPU, and who ends waits that take too long must not.
fn let_go(inner: Arc<Inner>) {
    let last = match watch() {
        Ok(watch) => watch.between_turns(|| Arc::into_inner(inner)),
        Err(_) => Arc::into_inner(inner),
    };
    drop(last);
}

/// What the thread that looks has no more use for, dropped by another one: the last handle of an owner unregisters its memory.
enum Dropped {
    Owners(#[allow(dead_code)] Vec<Pending>),
    Stream(Arc<Inner>),
}

fn drop_elsewhere(what: Dropped) {
    static DROPPER: OnceLock<Option<Sender<Dropped>>> = OnceLock::new();
    let dropper = DROPPER.get_or_init(|| {
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("doorbell-drop".into())
            .spawn(move || {
                for dropped in receiver {
                    match dropped {
                        Dropped::Owners(owners) => drop(owners),
                        Dropped::Stream(inner) => let_go(inner),
                    }
                }
            })
            .ok()
            .map(|_| sender)
    });
    // Without a thread it is dropped here.
    if let Some(sender) = dropper {
        let _ = sender.send(what);
    }
}

struct Inner {
    id: u64,
    name: String,
    context: CudaContext,
    raw: CUstream,
    owned: bool,
    progress: Arc<Progress>,
    count: Arc<Count>,
    queue: Mutex<Queue>,
    pending: Mutex<VecDeque<Pending>>,
    /// Waits for what no GPU counts, in the order of the gates.
    gates: Mutex<VecDeque<(u32, Mark)>>,
    fault: Fault,
    watched: AtomicBool,
    /// The driver has said that nothing more will come of what is queued.
    ended: AtomicBool,
    /// Set when the last handle went before the work.
    remaining: Mutex<Option<Arc<Inner>>>,
    weak: Weak<Inner>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks. All else is locks and atomics.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What the next call of the driver needs.
#[derive(Default)]
struct Queue {
    /// Counts that stores of the stream will have made when it is done with everything.
    issued: u64,
    gate: u32,
    ops: Vec<MemOp>,
    entering: Vec<Pending>,
}

/// How far a stream has come: the word that it stores to, which goes round, as a count that does not.
struct Count {
    words: Words,
    seen: AtomicU64,
    /// The context is no more: nothing more will be counted, and nobody should wait for it.
    over: AtomicBool,
}

impl Count {
    fn read(&self) -> u64 {
        let seen = self.seen.load(Ordering::Acquire);
        // Acquire: what the stream did before it counted is seen by who sees the count.
        let now = self.words.done().load(Ordering::Acquire);
        let ahead = now.wrapping_sub(seen as u32).cast_signed();
        match u64::try_from(ahead) {
            Ok(ahead) if ahead > 0 => {
                let now = seen + ahead;
                self.seen.fetch_max(now, Ordering::AcqRel).max(now)
            }
            _ => seen,
        }
    }
}

impl Elsewhere for Arc<Count> {
    fn completed(&self) -> u64 {
        if self.over.load(Ordering::Acquire) {
            return u64::MAX;
        }
        self.read()
    }

    fn device_word(&self) -> u64 {
        self.words.done_at()
    }
}

/// The thread that looks at streams.
fn watch() -> Result<&'static Arc<Rounds<Inner>>> {
    static WATCH: OnceLock<Result<Arc<Rounds<Inner>>>> = OnceLock::new();
    WATCH
        .get_or_init(|| {
            Rounds::start(
                "doorbell-cuda",
                Placement::Anywhere,
                Pace::every(TICK),
                Inner::look,
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaStream {
    /// A new stream of that context, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::System`] if there is no thread to be had.
    pub fn new(context: &CudaContext, name: impl Into<String>) -> Result<CudaStream> {
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, which `Inner` destroys.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
        })?;
        drop(entered);
        Self::over(context, raw, true, name.into())
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

    fn over(context: &CudaContext, raw: CUstream, owned: bool, name: String) -> Result<CudaStream> {
        let id = next_id();
        let destroy = || {
            if let (true, Ok(_entered)) = (owned, context.enter()) {
                // SAFETY: made by `new`, and nobody has it.
                let _ = unsafe { sys::cuStreamDestroy_v2(raw) };
            }
        };
        let words = watch().and_then(|_| Words::new(context));
        let words = words.inspect_err(|_| destroy())?;
        let count = Arc::new(Count {
            words,
            seen: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        let progress = Progress::elsewhere(id, Box::new(Arc::clone(&count)));
        let inner = Arc::new_cyclic(|weak| Inner {
            id,
            name,
            context: context.clone(),
            raw,
            owned,
            progress: Arc::new(progress),
            count,
            queue: Mutex::default(),
            pending: Mutex::default(),
            gates: Mutex::default(),
            fault: Fault::new(),
            watched: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            remaining: Mutex::default(),
            weak: weak.clone(),
        });
        let inner = ManuallyDrop::new(inner);
        let handle = Arc::new(Handle { inner });
        Ok(CudaStream { handle })
    }

    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.inner().raw
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.inner().context
    }

    /// Queues a function of the host (`cuLaunchHostFunc`), which a thread of the driver calls in its turn. It must not call CUDA, nor wait
    /// for work of a GPU. One that panics makes the stream fail: later calls report it.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn launch_host(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        let inner = self.inner();
        inner.check()?;
        let _queue = lock(&inner.queue);
        let _entered = inner.context.enter()?;
        let call = Box::new(HostCall {
            stream: inner.weak.clone(),
            id: inner.id,
            function: Box::new(function),
        });
        let data = Box::into_raw(call);
        // SAFETY: the driver calls the function once, with `data`, which is then its.
        let launched = check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(inner.raw, Some(call_host), data.cast())
        });
        if launched.is_err() {
            // SAFETY: made above, and not given away.
            drop(unsafe { Box::from_raw(data) });
        }
        launched
    }

    fn inner(&self) -> &Inner {
        &self.handle.inner
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream")
            .field("name", &self.inner().name)
            .field("raw", &self.inner().raw)
            .finish_non_exhaustive()
    }
}

struct HostCall {
    stream: Weak<Inner>,
    id: u64,
    function: Box<dyn FnOnce() + Send>,
}

/// Where the driver calls a function of the host.
unsafe extern "C" fn call_host(data: *mut c_void) {
    // SAFETY: `launch_host` gave it, and the driver calls once.
    let call = unsafe { Box::from_raw(data.cast::<HostCall>()) };
    let HostCall {
        stream,
        id,
        function,
    } = *call;
    let called: std::result::Result<(), Box<dyn Any + Send>> =
        catch_unwind(AssertUnwindSafe(|| act_as(id, function)));
    if let Err(panicked) = called {
        let reason = format!("panicked: {}", message(panicked));
        match stream.upgrade() {
            Some(stream) => {
                stream.fault.stick(reason);
                // Not here, if it is the last handle: what it would do then calls the driver.
                *lock(&stream.remaining) = Some(Arc::clone(&stream));
                stream.ensure_watched();
            }
            None => drop(reason),
        }
    }
}

impl Inner {
    fn check(&self) -> Result<()> {
        self.fault.check(&self.name)
    }

    /// Queues what `queue.ops` holds, and enters what goes with it. Nothing of both on an error.
    fn issue(&self, queue: &mut Queue) -> Result<()> {
        let entered = self.context.enter()?;
        let mut given = 0;
        for ops in queue.ops.chunks_mut(CALL_MAX) {
            // SAFETY: operations of the layout of the driver's own header, on memory that stays registered until the stream is done with
            // them: each program's owner is kept in `pending`, and the stream's own words in `self`.
            let result = check("cuStreamBatchMemOp", unsafe {
                sys::cuStreamBatchMemOp_v2(self.raw, ops.len() as u32, ops.as_mut_ptr(), 0)
            });
            match result {
                Ok(()) => given += ops.len(),
                Err(error) if given == 0 => {
                    self.note(&error);
                    return Err(error);
                }
                // A part is in the stream and cannot be taken back.
                Err(error) => {
                    self.end(&error);
                    break;
                }
            }
        }
        drop(entered);
        lock(&self.pending).extend(queue.entering.drain(..));
        self.ensure_watched();
        Ok(())
    }

    /// Queues operations made by `prepare`, which may fail and then leaves everything as it was.
    fn queue(&self, prepare: impl FnOnce(&Inner, &mut Queue) -> Result<()>) -> Result<()> {
        self.check()?;
        self.queue_unchecked(prepare)
    }

    /// [`Inner::queue`] that reports no earlier failure.
    fn queue_unchecked(
        &self,
        prepare: impl FnOnce(&Inner, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        let mut queue = lock(&self.queue);
        let (issued, gate) = (queue.issued, queue.gate);
        let result = prepare(self, &mut queue).and_then(|()| self.issue(&mut queue));
        queue.ops.clear();
        // Not under the lock: an owner may be dropped with what was not entered.
        let refused = std::mem::take(&mut queue.entering);
        if result.is_err() {
            (queue.issued, queue.gate) = (issued, gate);
            // The next wait has the number of one that was refused.
            lock(&self.gates).retain(|(opened, _)| opened.wrapping_sub(gate).cast_signed() <= 0);
        } else {
            // Empty: its space is for the next call.
            queue.entering = refused;
            return result;
        }
        drop(queue);
        drop(refused);
        result
    }

    /// The operations of a batch of programs.
    fn prepare<'a>(
        &self,
        queue: &mut Queue,
        batch: impl ExactSizeIterator<Item = &'a Submission>,
    ) -> Result<()> {
        let last = batch.len().wrapping_sub(1);
        let mut after = queue.issued;
        let mut grouped = 0;
        for (at, submission) in batch.enumerate() {
            submission.check()?;
            let owner = &submission.owner;
            let Some(attachments) = owner.attachments() else {
                return Err(Error::State {
                    operation: "queue on a CUDA stream",
                    reason: "the owner of the program keeps no mappings of its memory for a GPU"
                        .into(),
                });
            };
            let reach =
                attachments.get_or_make(self.context.key(), || Ok(Reach::new(&self.context)))?;
            let waits = translate(
                &submission.program,
                self.context.capabilities(),
                |at| reach.locate(at, &**owner),
                &mut queue.ops,
            )?;
            queue.entering.push(Pending {
                after,
                done: 0,
                what: What::Program {
                    owner: Arc::clone(owner),
                    cookie: submission.cookie,
                    has_begun: false,
                    awaited: waits.then(|| Awaited::of(&submission.program)).flatten(),
                    released: None,
                },
            });
            // The stream counts after each wait, for only there it may stand still, and behind the last program.
            if waits || at == last {
                self.count(queue);
                for pending in &mut queue.entering[grouped..] {
                    pending.done = queue.issued;
                }
                grouped = queue.entering.len();
                after = queue.issued;
            }
        }
        Ok(())
    }

    /// Lets the stream count.
    fn count(&self, queue: &mut Queue) {
        queue.issued += 1;
        let op = store_dword(self.count.words.done_at(), queue.issued as u32);
        queue.ops.push(op);
    }

    /// Lets the stream count, and enters what is finished with that.
    fn count_for(&self, queue: &mut Queue, after: u64, what: What) {
        self.count(queue);
        queue.entering.push(Pending {
            after,
            done: queue.issued,
            what,
        });
    }

    /// Tells everyone how far the stream has come. What it returns holds owners.
    fn settle(&self) -> Vec<Pending> {
        let over = {
            let mut pending = lock(&self.pending);
            settle(&mut pending, self.count.read())
        };
        for pending in &over {
            if let Some(cookie) = pending.was_released() {
                self.fault.pass(format!(
                    "the wait of program {cookie} was released before its condition held"
                ));
            }
        }
        over
    }

    /// Opens the gates of those that wait for other streams of the host.
    fn open_gates(&self) {
        let mut gates = lock(&self.gates);
        while let Some((gate, _)) = gates.front().filter(|(_, mark)| mark.is_reached()) {
            // Release: what the other stream did comes before.
            self.count.words.gate().store(*gate, Ordering::Release);
            gates.pop_front();
        }
    }

    /// Whether everything is done, as the driver sees it. Its errors end the stream.
    fn is_idle(&self) -> Result<bool> {
        let _entered = self.context.enter().inspect_err(|error| self.note(error))?;
        // SAFETY: a stream of the context.
        match check("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) }) {
            Ok(()) => Ok(true),
            Err(error) if is(&error, CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => {
                self.note(&error);
                Err(error)
            }
        }
    }

    /// An error of the driver: one that the context does not get over ends the stream.
    fn note(&self, error: &Error) {
        const PASSING: [CUresult; 7] = [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_NOT_SUPPORTED,
            CUresult::CUDA_ERROR_NOT_READY,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        ];
        if !PASSING.iter().any(|passing| is(error, *passing)) {
            self.end(error);
        }
    }

    /// Nothing more will come of what is queued.
    fn end(&self, error: &Error) {
        self.fault.stick(error.to_string());
        self.ended.store(true, Ordering::Release);
        self.ensure_watched();
    }

    /// After [`Inner::end`]: those who are not finished never will be.
    fn discard(&self) {
        let reason = Error::Asynchronous {
            stream: self.name.clone(),
            reason: self.fault.sticky_reason().unwrap_or_default(),
        };
        // Not under the queue's lock: an owner may be dropped here.
        let dropped: Vec<Pending> = lock(&self.pending).drain(..).collect();
        self.count.over.store(true, Ordering::Release);
        for pending in &dropped {
            pending.discard(&reason);
        }
        lock(&self.gates).clear();
        if !dropped.is_empty() {
            drop_elsewhere(Dropped::Owners(dropped));
        }
    }

    fn ensure_watched(&self) {
        if !self.watched.swap(true, Ordering::SeqCst)
            && let Ok(watch) = watch()
        {
            watch.enlist(self.weak.clone());
        }
    }

    /// A look at the stream, by the thread that looks.
    fn look(&self) -> Turn {
        self.open_gates();
        let over = self.settle();
        if !over.is_empty() {
            drop_elsewhere(Dropped::Owners(over));
        }
        if self.ended.load(Ordering::Acquire) {
            self.discard();
        }
        let busy = || !lock(&self.pending).is_empty() || !lock(&self.gates).is_empty();
        if busy() {
            // What the driver knows and no count tells: a context that is no more.
            let _ = self.is_idle();
            return Turn::Waiting;
        }
        self.watched.store(false, Ordering::SeqCst);
        // Who queued just before the store found it set: look once more.
        if busy() && !self.watched.swap(true, Ordering::SeqCst) {
            return Turn::Waiting;
        }
        // The handle that the work kept.
        if let Some(inner) = lock(&self.remaining).take() {
            drop_elsewhere(Dropped::Stream(inner));
        }
        Turn::Over
    }

    /// One turn of a wait for the stream.
    fn turn(&self) -> bool {
        self.open_gates();
        drop(self.settle());
        // What the stream waits for may be a NIC that lives by those who wait.
        let pending = lock(&self.pending);
        pending.iter().take(8).any(Pending::progress)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by `new`; the last handle is gone. What others have queued on it is still executed, as the driver says.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

// SAFETY: the driver executes a stream's operations once and in order; `settle` and `discard` take each program out of `pending` before
// its owner is told, so it is told once; nothing else is ever queued.
unsafe impl Executor for CudaStream {
    fn id(&self) -> u64 {
        self.inner().id
    }

    fn name(&self) -> &str {
        &self.inner().name
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        let inner = self.inner();
        if batch.is_empty() {
            return inner.check();
        }
        inner.queue(|inner, queue| inner.prepare(queue, batch.iter()))?;
        batch.clear();
        Ok(())
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        let one = std::slice::from_ref(&submission);
        let queued = self
            .inner()
            .queue(|inner, queue| inner.prepare(queue, one.iter()));
        queued.map_err(|error| (submission, error))
    }

    fn record(&self, event: &Event) -> Result<()> {
        let inner = self.inner();
        let (record, number) = event.begin_record();
        let mut position = 0;
        inner.queue(|inner, queue| {
            let after = queue.issued;
            inner.count_for(queue, after, What::Record(record));
            position = queue.issued;
            Ok(())
        })?;
        let progress = Arc::clone(&inner.progress);
        Record::announce(event, number, Mark { progress, position });
        Ok(())
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        let inner = self.inner();
        let Some(mark) = event.mark() else {
            return inner.check();
        };
        if mark.progress.stream == inner.id || mark.is_reached() {
            return inner.check();
        }
        if let Some(word) = mark.progress.device_word() {
            // The word is that of another stream's count, whose memory the event keeps: so must this stream, until it has passed.
            return inner.queue(|inner, queue| {
                let after = queue.issued;
                queue.ops.push(wait_count(word, mark.position as u32));
                inner.count_for(queue, after, What::Passing { _mark: Some(mark) });
                Ok(())
            });
        }
        // Nothing that a GPU could look at: the thread that looks lets it pass.
        inner.queue(|inner, queue| {
            queue.gate = queue.gate.wrapping_add(1);
            let wait = wait_count(inner.count.words.gate_at(), queue.gate);
            queue.ops.push(wait);
            let after = queue.issued;
            inner.count_for(queue, after, What::Passing { _mark: None });
            // Before the driver has it. If it is refused, the gate is opened in vain, and the next one has its number.
            lock(&inner.gates).push_back((queue.gate, mark));
            Ok(())
        })
    }

    fn query(&self) -> Result<bool> {
        let inner = self.inner();
        inner.check()?;
        inner.turn();
        let idle = inner.is_idle()?;
        if idle {
            drop(inner.settle());
        }
        inner.check()?;
        Ok(idle)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let inner = self.inner();
        forbid_on(inner.id, "stream synchronize")?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if inner.ended.load(Ordering::Acquire) {
            return inner.check();
        }
        let mut target = 0;
        inner.queue_unchecked(|inner, queue| {
            let after = queue.issued;
            inner.count_for(queue, after, What::Passing { _mark: None });
            target = queue.issued;
            Ok(())
        })?;
        let mut backoff = Backoff::new();
        let mut turns = 0_u32;
        while !inner.progress.reached(target) {
            if inner.turn() {
                backoff.reset();
            } else if !backoff.pause_until(deadline) {
                return Err(Error::Timeout {
                    operation: "stream synchronize",
                    timeout: timeout.unwrap_or(Duration::MAX),
                });
            }
            turns = turns.wrapping_add(1);
            if backoff.has_slept() && turns.is_multiple_of(16) && inner.is_idle().is_err() {
                break;
            }
        }
        drop(inner.settle());
        inner.check()
    }
}
