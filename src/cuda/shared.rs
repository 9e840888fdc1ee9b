//! What the handles of a CUDA stream share with the thread that looks at it.
#![allow(unsafe_code)] // calls the driver

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};

use super::CudaContext;
use super::batch::Batch;
use super::capture::{Unseen, forbid, is_captured};
use super::count::Count;
use super::driver::{check, is};
use super::graph::{Exec, params};
use super::host_call::in_host_function;
use super::letting_go::{Dropped, drop_elsewhere};
use super::memops::{
    MemOp, has_waits, is_executed, store_dword, translate, wait_count, waits_for_completion,
};
use super::pending::{Awaited, Listening, Pending, What, settle};
use super::queue::{Call, Given, Queue};
use super::reach::Reach;
use super::stream::Execution;
use super::word::{STATUS_STREAM, STATUS_WORK, Stop, Words};
use crate::peer::Program;
use crate::proxy::drop_elsewhere as drop_owner_elsewhere;
use crate::proxy::{Enlistment, Pace, Placement, Rounds, Turn};
use crate::stream::{Backoff, Fault, Last, Mark, Owner, Progress, Submission, next_id};
use crate::{Error, Result};

/// How often the thread looks that tells owners what their programs have come to.
const TICK: Duration = Duration::from_millis(1);

/// How often the driver is asked what no count tells.
const ASKING_TICK: Duration = Duration::from_millis(50);

pub(super) struct Shared {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) context: CudaContext,
    pub(super) raw: CUstream,
    owned: bool,
    /// Whose it is, if that is an object of `cudarc`'s.
    pub(super) lender: OnceLock<Arc<cudarc::driver::CudaStream>>,
    pub(super) progress: Arc<Progress>,
    pub(super) count: Arc<Count>,
    pub(super) queue: Mutex<Queue>,
    pub(super) pending: Mutex<VecDeque<Pending>>,
    /// Held by who has handles of owners that may be finished meanwhile.
    visiting: RwLock<()>,
    /// Waits for what no GPU counts, in the order of the gates.
    pub(super) gates: Mutex<VecDeque<(u32, Mark)>>,
    pub(super) fault: Fault,
    /// Held while the driver is asked how far the stream is, which breaks a capture off.
    asking: Mutex<()>,
    looks: AtomicU32,
    watched: Enlistment,
    asked: Enlistment,
    /// The driver has said that nothing more will come of what is queued.
    pub(super) ended: AtomicBool,
    /// Every wait that the stream comes to is ended.
    pub(super) aborted: AtomicBool,
    /// What is to be done when the stream has counted to this never will be.
    pub(super) cut: AtomicU64,
    /// Set when the last handle went before the work.
    remaining: Mutex<Option<Arc<Shared>>>,
    pub(super) weak: Weak<Shared>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks. All else is locks and atomics.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The thread that looks at streams.
pub(super) fn watch() -> Result<&'static Arc<Rounds<Shared>>> {
    static WATCH: OnceLock<Result<Arc<Rounds<Shared>>>> = OnceLock::new();
    WATCH
        .get_or_init(|| {
            Rounds::start(
                "doorbell-cuda",
                Placement::Anywhere,
                Pace::every(TICK),
                Shared::look,
                // Never the last one: see `let_go`.
                drop,
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

/// The thread that asks the driver about streams. Not the one that ends waits: the driver may have it wait for another call, which waits for
/// what is queued.
fn asker() -> Result<&'static Arc<Rounds<Shared>>> {
    static ASKER: OnceLock<Result<Arc<Rounds<Shared>>>> = OnceLock::new();
    ASKER
        .get_or_init(|| {
            Rounds::start(
                "doorbell-ask",
                Placement::Anywhere,
                Pace::every(ASKING_TICK),
                Shared::ask,
                |stream| drop_elsewhere(Dropped::Stream(stream)),
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// What goes with a stream of the driver, which is destroyed if it is `owned` and this fails.
    pub(super) fn new(
        context: &CudaContext,
        raw: CUstream,
        owned: bool,
        name: String,
    ) -> Result<Arc<Shared>> {
        let id = next_id();
        let words = watch().and_then(|_| Words::new(context));
        let words = words.inspect_err(|_| {
            if let (true, Ok(_entered)) = (owned, context.enter()) {
                // SAFETY: the caller has just made it, and nobody else has it.
                let _ = unsafe { sys::cuStreamDestroy_v2(raw) };
            }
        })?;
        let count = Arc::new(Count::new(words));
        let progress = Progress::elsewhere(id, Box::new(Arc::clone(&count)));
        Ok(Arc::new_cyclic(|weak| Shared {
            id,
            name,
            context: context.clone(),
            raw,
            owned,
            lender: OnceLock::new(),
            progress: Arc::new(progress),
            count,
            queue: Mutex::default(),
            pending: Mutex::default(),
            visiting: RwLock::default(),
            gates: Mutex::default(),
            fault: Fault::new(),
            asking: Mutex::default(),
            looks: AtomicU32::new(0),
            watched: Enlistment::default(),
            asked: Enlistment::default(),
            ended: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            cut: AtomicU64::new(u64::MAX),
            remaining: Mutex::default(),
            weak: weak.clone(),
        }))
    }

    pub(super) fn has_work(&self) -> bool {
        !lock(&self.pending).is_empty() || !lock(&self.gates).is_empty()
    }

    /// Keeps it until the thread that looks finds that there is no work.
    pub(super) fn keep(&self) {
        if let Some(shared) = self.weak.upgrade() {
            *lock(&self.remaining) = Some(shared);
            self.ensure_watched();
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.fault.check(&self.name)
    }

    /// Does what no look at the stream may come between.
    pub(super) fn while_not_looked_at(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let _queue = lock(&self.queue);
        let _asking = lock(&self.asking);
        let _entered = self.context.enter()?;
        act()
    }

    /// Launches a graph whose nodes have these programs instead of those that they had: as many, in the order of the nodes. What was launched
    /// before keeps its own.
    ///
    /// # Errors
    /// As [`Executor::submit`](crate::Executor::submit). Nothing was launched then.
    pub(super) fn launch(&self, exec: &Arc<Exec>, batch: &[Submission]) -> Result<()> {
        self.check()?;
        self.queue_by(
            |shared, queue| {
                queue.of_graph = true;
                let mut rest = batch;
                for (_, programs) in exec.nodes() {
                    let Some((now, later)) = rest.split_at_checked(*programs) else {
                        return Err(unlike("it has fewer programs"));
                    };
                    rest = later;
                    if now.is_empty() {
                        shared.count(queue);
                    } else {
                        shared.prepare(queue, now.iter())?;
                    }
                    queue.end_call();
                }
                if !rest.is_empty() || queue.calls.len() != exec.nodes().len() {
                    return Err(unlike("its programs do not fit its nodes"));
                }
                // The last node is behind everything else in the graph.
                queue.entering.push(Pending {
                    after: queue.issued,
                    done: queue.issued,
                    what: What::Launched {
                        _exec: Arc::clone(exec),
                    },
                });
                Ok(())
            },
            |shared, queue| shared.issue_graph(exec, queue),
        )
    }

    fn issue_graph(&self, exec: &Exec, queue: &mut Queue) -> Result<()> {
        let entered = self.context.enter()?;
        forbid(self.raw, "launch a graph")?;
        for (Call { what, .. }, (node, _)) in queue.calls.iter().zip(exec.nodes()) {
            let Given::MemoryOps(range) = what else {
                return Err(unlike("a kernel would execute a program of it"));
            };
            let ops = queue.ops.get_mut(range.clone()).unwrap_or_default();
            let params = params(&self.context, ops);
            // SAFETY: a node of the graph that `exec` was instantiated of, and operations as in `issue`.
            check("cuGraphExecBatchMemOpNodeSetParams", unsafe {
                sys::cuGraphExecBatchMemOpNodeSetParams(exec.raw, *node, &params)
            })
            .inspect_err(|error| self.note(error))?;
        }
        // SAFETY: kept in `pending` until it is done.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(exec.raw, self.raw)
        })
        .inspect_err(|error| self.note(error))?;
        drop(entered);
        lock(&self.pending).extend(queue.entering.drain(..));
        self.ensure_watched();
        Ok(())
    }

    /// Queues what `queue.ops` holds, and enters what goes with it. Nothing of both on an error. Where the driver refuses a later call of
    /// several, those before it cannot be taken back: what was not given is discarded, and the failure is one of work queued earlier.
    fn issue(&self, queue: &mut Queue) -> Result<()> {
        let entered = self.context.enter()?;
        forbid(self.raw, "queue on a CUDA stream")?;
        queue.end_call();
        let mut given = None;
        let mut refused = None;
        for Call { what, issued } in &queue.calls {
            let result = self.give(what, &mut queue.ops, &queue.batch);
            match (result, given) {
                (Ok(()), _) => {
                    given = Some(*issued);
                    queue.taken += 1;
                }
                (Err(error), None) => {
                    self.note(&error);
                    return Err(error);
                }
                (Err(error), Some(_)) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        drop(entered);
        if let (Some(error), Some(given)) = (refused, given) {
            self.lose(queue, given, &error);
        }
        lock(&self.pending).extend(queue.entering.drain(..));
        self.ensure_watched();
        Ok(())
    }

    /// Enters what was made for kernels of the application, which [`KernelStream::take`](super::KernelStream::take) hands out.
    fn issue_to_kernels(&self, queue: &mut Queue) -> Result<()> {
        lock(&self.pending).extend(queue.entering.drain(..));
        self.ensure_watched();
        Ok(())
    }

    /// One call of the driver.
    fn give(&self, what: &Given, ops: &mut [MemOp], batch: &Batch) -> Result<()> {
        match what {
            Given::MemoryOps(range) => {
                let ops = ops.get_mut(range.clone()).unwrap_or_default();
                // SAFETY: operations of the layout of the driver's own header, on memory that stays registered until the stream is done with
                // them: each program's owner is kept in `pending`, and the stream's own words in `self`.
                check("cuStreamBatchMemOp", unsafe {
                    sys::cuStreamBatchMemOp_v2(self.raw, ops.len() as u32, ops.as_mut_ptr(), 0)
                })
            }
            Given::Kernel(range) => {
                let words = batch.words(range.clone());
                let control = self.count.words.control_at();
                // SAFETY: as above.
                unsafe { self.context.module()?.execute(self.raw, words, control) }
            }
        }
    }

    /// What was to come after the stream had counted to `given` was refused.
    fn lose(&self, queue: &mut Queue, given: u64, error: &Error) {
        queue.issued = given;
        let first = queue.entering.iter().position(|entry| entry.done > given);
        let lost = queue
            .entering
            .split_off(first.unwrap_or(queue.entering.len()));
        self.count.words.note(STATUS_STREAM);
        self.fault.pass(error.to_string());
        self.note(error);
        let reason = Error::Asynchronous {
            stream: self.name.clone(),
            reason: error.to_string(),
        };
        lost.iter().for_each(|pending| pending.discard(&reason));
        drop_elsewhere(Dropped::Owners(
            lost.into_iter().filter_map(Pending::into_last).collect(),
        ));
    }

    /// Queues operations made by `prepare`, which may fail and then leaves everything as it was.
    pub(super) fn queue(
        &self,
        prepare: impl FnOnce(&Shared, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        self.queue_unchecked(prepare)
    }

    /// [`Shared::queue`] that reports no earlier failure.
    pub(super) fn queue_unchecked(
        &self,
        prepare: impl FnOnce(&Shared, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        self.queue_by(prepare, |shared, queue| {
            if queue.for_kernels {
                shared.issue_to_kernels(queue)
            } else {
                shared.issue(queue)
            }
        })
    }

    fn queue_by(
        &self,
        prepare: impl FnOnce(&Shared, &mut Queue) -> Result<()>,
        issue: impl FnOnce(&Shared, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        let mut queue = lock(&self.queue);
        let kept = queue.keep();
        let result = prepare(self, &mut queue).and_then(|()| issue(self, &mut queue));
        // Not under the lock: an owner may be dropped with what was not entered.
        let refused = std::mem::take(&mut queue.entering);
        if result.is_err() {
            let gate = queue.go_back(&kept);
            // Their numbers are not used again: one may have been opened already.
            lock(&self.gates).retain(|(opened, _)| opened.wrapping_sub(gate).cast_signed() <= 0);
        } else {
            queue.settle();
            // Empty: its space is for the next call.
            queue.entering = refused;
            return result;
        }
        drop(queue);
        drop(refused);
        result
    }

    /// The operations of a batch of programs.
    pub(super) fn prepare<'a>(
        &self,
        queue: &mut Queue,
        batch: impl ExactSizeIterator<Item = &'a Submission>,
    ) -> Result<()> {
        let last = batch.len().wrapping_sub(1);
        let mut after = queue.issued;
        let mut grouped = queue.entering.len();
        // Whether the call that is being made has counted, and nothing comes between. What is made for kernels ends with a count each time.
        let mut counted = queue.for_kernels && queue.current().is_some();
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
            let program = &submission.program;
            let by = self.means(queue, program);
            queue.check_len(program)?;
            let waits = has_waits(program);
            if !queue.fits(by, program) {
                // Each call ends with a count, so that what it brings is known to be done whatever becomes of the next one.
                if grouped < queue.entering.len() {
                    self.count_group(queue, &mut grouped);
                }
                after = queue.issued;
                queue.end_call();
                counted = false;
            }
            if !counted && waits {
                // Between two calls others may have queued what takes its time: a wait has not begun before that is over.
                self.count_by(queue, by);
                self.group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
            let reach =
                attachments.get_or_make(self.context.key(), || Ok(Reach::new(&self.context)))?;
            let locate = |at| reach.locate(at, &**owner);
            let awaited = match by {
                Execution::MemoryOps => {
                    let capabilities = self.context.capabilities();
                    translate(program, capabilities, locate, &mut queue.ops)?;
                    Awaited::of(program)
                }
                Execution::Kernel => {
                    // By the count behind it, which a program that waits has to itself.
                    queue.batch.program(program, queue.issued + 1, locate)?;
                    queue.flush_behind |=
                        waits && self.context.capabilities().flush && !queue.for_kernels;
                    waits.then_some(Awaited::Kernel)
                }
            };
            let listening = queue
                .is_watched
                .then(|| Listening::new(owner, self.id, &self.count));
            queue.entering.push(Pending {
                after,
                done: 0,
                what: What::Program {
                    listening,
                    owner: Arc::clone(owner),
                    cookie: submission.cookie,
                    has_begun: false,
                    awaited,
                    released: None,
                },
            });
            // The stream counts after each wait, for only there it may stand still, and behind the last program.
            if waits || at == last {
                self.count_group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
        }
        Ok(())
    }

    /// What executes a program.
    fn means(&self, queue: &Queue, program: &Program) -> Execution {
        if queue.for_kernels {
            return Execution::Kernel;
        }
        let capabilities = self.context.capabilities();
        let can = || is_executed(program, capabilities);
        // Without either the error is that of the memory operations, which says what is missing.
        let may = capabilities.kernels && !queue.of_graph;
        // Nothing else sees that a completion is one in error before what is behind the wait runs.
        let looks = || queue.is_watched && waits_for_completion(program);
        if may && (queue.execution == Execution::Kernel || looks() || !can()) {
            return Execution::Kernel;
        }
        Execution::MemoryOps
    }

    /// What executes the stream's own steps, where they are in no call with others.
    fn own_means(&self, queue: &Queue) -> Execution {
        if queue.for_kernels {
            return Execution::Kernel;
        }
        let capabilities = self.context.capabilities();
        let wanted = queue.execution == Execution::Kernel || !capabilities.memops;
        if capabilities.kernels && !queue.of_graph && wanted {
            return Execution::Kernel;
        }
        Execution::MemoryOps
    }

    /// Lets the stream count, and finishes with that what was entered from `first` on.
    fn count_group(&self, queue: &mut Queue, first: &mut usize) {
        self.count(queue);
        self.group(queue, first);
    }

    /// What was entered from `first` on is finished with the count that was made last.
    fn group(&self, queue: &mut Queue, first: &mut usize) {
        for pending in &mut queue.entering[*first..] {
            pending.done = queue.issued;
        }
        *first = queue.entering.len();
    }

    /// Lets the stream count, in the call that is being made.
    pub(super) fn count(&self, queue: &mut Queue) {
        let by = queue.current().unwrap_or_else(|| self.own_means(queue));
        self.count_by(queue, by);
    }

    fn count_by(&self, queue: &mut Queue, by: Execution) {
        queue.issued += 1;
        match by {
            Execution::MemoryOps => {
                let op = store_dword(self.count.words.done_at(), queue.issued as u32);
                queue.ops.push(op);
            }
            Execution::Kernel => queue.batch.count(queue.issued),
        }
    }

    /// Lets the stream wait for a count of others. Whether by a kernel, which can be told to wait no more until the count that comes next.
    pub(super) fn wait_for_count(
        &self,
        queue: &mut Queue,
        address: CUdeviceptr,
        value: u32,
    ) -> bool {
        let by = self.own_means(queue);
        match by {
            Execution::MemoryOps => queue.ops.push(wait_count(address, value)),
            Execution::Kernel => queue.batch.wait_count(address, value, queue.issued + 1),
        }
        by == Execution::Kernel
    }

    /// Lets the stream count, and enters what is finished with that.
    pub(super) fn count_for(&self, queue: &mut Queue, after: u64, what: What) {
        self.count(queue);
        queue.entering.push(Pending {
            after,
            done: queue.issued,
            what,
        });
    }

    /// Tells everyone how far the stream has come. What it returns is dropped in the caller's thread, or by another. Handles of owners that
    /// others have, too, are given up under the lock: who finds everything settled finds them gone.
    pub(super) fn settle(&self) -> Vec<Last> {
        let mut pending = lock(&self.pending);
        // Under the lock, and before the owners hear of it: who finds everything settled finds what there is to report.
        let words = &self.count.words;
        // The count first: what stopped the stream is seen by who sees a count behind it.
        let done = self.count.read();
        match words.stop() {
            None => {}
            Some(_) if self.fault.is_sticky() => {}
            Some(Stop::Abandoned { .. }) => self.fault.stick(
                "a kernel waited, and this process did not look at the stream for a minute".into(),
            ),
            Some(Stop::Malformed { .. }) => {
                self.fault.stick("a kernel cannot read a program".into())
            }
            Some(Stop::TimedOut { .. }) => self
                .fault
                .stick("a kernel has given up a wait, and with it what came behind".into()),
        }
        let aborted = self.aborted.load(Ordering::Acquire);
        settle(&mut pending, done, words, aborted, |cookie| {
            self.fault.pass(format!(
                "the wait of program {cookie} was released before its condition held"
            ));
        })
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
    pub(super) fn is_idle(&self) -> Result<bool> {
        let _asking = lock(&self.asking);
        let _entered = self.context.enter().inspect_err(|error| self.note(error))?;
        forbid(self.raw, "query a CUDA stream").inspect_err(|error| self.note(error))?;
        // A capture of any other stream would be broken off, too.
        let _unseen = Unseen::new();
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

    /// An error of the driver: one that the context does not get over ends the stream. The caller holds no lock that a look needs but `asking`.
    fn note(&self, error: &Error) {
        if is(error, CUresult::CUDA_ERROR_INVALID_HANDLE) {
            // Its owner has destroyed the stream. The driver still executes what is queued, which counts and can be released as ever.
            self.fault.stick(error.to_string());
        } else if matches!(error, Error::Cuda { .. }) && !self.goes_on() {
            self.end(error);
        }
    }

    /// Whether the driver still executes what is queued. An error that a context does not get over is returned by every later call; any other
    /// one is of the call that returned it.
    fn goes_on(&self) -> bool {
        let Ok(_entered) = self.context.enter() else {
            // The driver is not to be called from in here: nothing is known.
            return in_host_function();
        };
        let _unseen = Unseen::new();
        if is_captured(self.raw).is_ok_and(|captured| captured) {
            return true;
        }
        // SAFETY: a stream of the context.
        let query = check("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) });
        match query {
            Ok(()) => true,
            Err(error) => {
                is(&error, CUresult::CUDA_ERROR_NOT_READY)
                    || is(&error, CUresult::CUDA_ERROR_NOT_PERMITTED)
            }
        }
    }

    /// Nothing more will come of what is queued.
    fn end(&self, error: &Error) {
        self.count.words.note(STATUS_STREAM);
        self.fault.stick(error.to_string());
        self.ended.store(true, Ordering::Release);
        self.ensure_watched();
    }

    /// Those who are not finished never will be.
    pub(super) fn discard(&self) {
        let reason = Error::Asynchronous {
            stream: self.name.clone(),
            reason: self.fault.sticky_reason().unwrap_or_default(),
        };
        // Told under the lock, as `settle` does: who finds nothing pending finds that everyone was told.
        let mut pending = lock(&self.pending);
        let dropped: Vec<Pending> = pending.drain(..).collect();
        // The reason before the end: who sees that nothing more is to come finds why.
        dropped.iter().for_each(|pending| pending.discard(&reason));
        self.count.over.store(true, Ordering::Release);
        if let Some(last) = dropped.last() {
            // Streams of other contexts may wait for the count of this one.
            let words = &self.count.words;
            words.done().store(last.done as u32, Ordering::Release);
        }
        dropped.iter().for_each(Pending::wake);
        let dropped = dropped.into_iter().filter_map(Pending::into_last).collect();
        drop(pending);
        lock(&self.gates).clear();
        // Not under a lock: an owner may end here.
        drop_elsewhere(Dropped::Owners(dropped));
    }

    /// Tells everyone how far the stream has come, and that this was all, where nothing more is to come. Who reports an end does this first, for it
    /// is the end of everybody's work.
    pub(super) fn settle_to_the_end(&self) -> Vec<Last> {
        let over = self.settle();
        let cut = self.cut.load(Ordering::Acquire);
        let is_cut = || {
            lock(&self.pending)
                .front()
                .is_some_and(|next| next.done > cut)
        };
        if self.ended.load(Ordering::Acquire) || is_cut() {
            self.discard();
        }
        over
    }

    pub(super) fn ensure_watched(&self) {
        if self.watched.come()
            && let Ok(watch) = watch()
        {
            watch.enlist(self.weak.clone());
        }
        if self.asked.come()
            && let Ok(asker) = asker()
        {
            asker.enlist(self.weak.clone());
        }
    }

    /// A question to the driver, by the thread that asks.
    fn ask(&self) -> Turn {
        if self.has_work() {
            self.look_for_the_end();
            return Turn::Waiting;
        }
        self.asked.leave(|| self.has_work())
    }

    /// A look at the stream, by the thread that looks.
    fn look(&self) -> Turn {
        self.count.words.stay_alive();
        self.open_gates();
        drop_elsewhere(Dropped::Owners(self.settle_to_the_end()));
        if self.has_work() {
            return Turn::Waiting;
        }
        if self.watched.leave(|| self.has_work()) == Turn::Waiting {
            return Turn::Waiting;
        }
        // The handle that the work kept.
        if let Some(inner) = lock(&self.remaining).take() {
            drop_elsewhere(Dropped::Stream(inner));
        }
        Turn::Over
    }

    /// What the driver knows and no count tells: a context that is no more. To query a stream breaks a capture off that another thread has
    /// begun since it was asked about, so that is seldom done; most errors are known to the question alone.
    fn look_for_the_end(&self) {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        if looks.is_multiple_of(8) {
            let _ = self.is_idle();
            return;
        }
        let asked = self
            .context
            .enter()
            .and_then(|_entered| is_captured(self.raw));
        if let Err(error) = asked {
            self.note(&error);
        }
    }

    /// Waits until the stream has counted to that, or will never. False: it has not by the deadline.
    pub(super) fn wait_until(&self, target: u64, deadline: Option<Instant>) -> bool {
        let mut backoff = Backoff::new();
        let mut turns = 0_u32;
        while !self.progress.reached(target) {
            if self.turn() {
                backoff.reset();
            } else if !backoff.pause_until(deadline) {
                // It may have come in time, and this thread got no processor since it looked.
                return self.progress.reached(target);
            }
            turns = turns.wrapping_add(1);
            if backoff.has_slept() && turns.is_multiple_of(16) {
                // An error that is none of the stream's is no reason to take the work for done: a capture that has begun since, for one.
                let _ = self.is_idle();
                if self.ended.load(Ordering::Acquire) || self.fault.is_sticky() {
                    break;
                }
            }
        }
        true
    }

    /// Tells the owners of what is queued that nobody wants it any more.
    pub(super) fn give_up(&self) {
        let visiting = self.visit();
        // Not under the lock, which the thread that ends waits takes.
        let pending: Vec<_> = lock(&self.pending)
            .iter_mut()
            .filter_map(Pending::give_up)
            .collect();
        for owner in pending {
            owner.give_up();
            if let Some(last) = owner.into_last() {
                // It was finished meanwhile, and its memory is unregistered with it.
                drop_owner_elsewhere(last);
            }
        }
        drop(visiting);
        // Behind the owners, whose waits come behind the gates.
        self.give_up_gates();
        self.ensure_watched();
    }

    /// Opens all gates, though nobody has come that they are for.
    fn give_up_gates(&self) {
        let mut gates = lock(&self.gates);
        if let Some((last, _)) = gates.back() {
            let words = &self.count.words;
            words.note(STATUS_WORK);
            // Release: what says why comes before.
            words.gate().store(*last, Ordering::Release);
        }
        gates.clear();
    }

    /// One turn of a wait for the stream.
    pub(super) fn turn(&self) -> bool {
        self.open_gates();
        drop(self.settle());
        let _visiting = self.visit();
        // What the stream waits for may be a NIC that lives by those who wait.
        let mut owners: [Option<Arc<dyn Owner>>; 8] = Default::default();
        // Not under the lock, which the thread that ends waits takes: the NIC may have to copy.
        for (place, pending) in owners.iter_mut().zip(lock(&self.pending).iter()) {
            *place = pending.owner().cloned();
        }
        let mut moved = false;
        for owner in owners.into_iter().flatten() {
            moved = moved || owner.progress();
            if let Some(last) = owner.into_last() {
                // It was finished meanwhile, and its memory is unregistered with it.
                drop_owner_elsewhere(last);
            }
        }
        moved
    }

    fn visit(&self) -> RwLockReadGuard<'_, ()> {
        self.visiting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Shared::settle_to_the_end`] for who then says that work is done: no thread has a handle left of an owner whose work is, unless it is the last
    /// one. An application may free an owner's memory next.
    pub(super) fn settle_for_good(&self) {
        drop(self.settle_to_the_end());
        // Those who have come since have handles of what is pending.
        drop(self.visiting.write());
    }
}

#[cold]
fn unlike(how: &str) -> Error {
    Error::State {
        operation: "launch a graph",
        reason: format!("it is not the one that was recorded: {how}"),
    }
}

impl Drop for Shared {
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
