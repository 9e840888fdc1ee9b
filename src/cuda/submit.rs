//! How programs, records and waits for events are queued on a CUDA stream, or on the stream of an application's kernels.
#![allow(unsafe_code)] // calls the driver

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Instant;

use cudarc::driver::sys;

use super::call_queue::{CallData, CallQueue, DriverCall};
use super::driver::check;
use super::kernel_words::KernelWords;
use super::memops::MemOp;
use super::memory_work::MemoryCall;
use super::pending::{PendingEntry, PendingWork, defer_drops};
use super::state::{HostEventWait, StreamState};
use super::stream_words::STATUS_STREAM;
use crate::proxy::drop_elsewhere;
use crate::stream::{
    Backoff, Dependent, Event, Owner, Record, StreamFailure, StreamPosition, Submission, stopping,
};
use crate::{Error, Result, StateKind};

/// Calls of a stream from which on [`Executor::synchronize`](crate::Executor::synchronize) waits before it queues.
const CALLS_MAX: usize = 256;
/// Calls of a stream from which on it has no room ([`Executor::has_room`](crate::Executor::has_room)). The rest is for a send and for the application's own work.
const ROOM_MAX: usize = 768;

/// Gives the stream what was prepared, without a look at failures.
fn issue_unchecked(state: &StreamState, queue: &mut CallQueue) -> Result<()> {
    state.announce(queue);
    let before = state.count.given.load(Ordering::Relaxed);
    state.issue(queue, before)
}

impl StreamState {
    pub(super) fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        if batch.is_empty() {
            return self.check();
        }
        self.queue(|state, queue| state.prepare(queue, batch.iter()))?;
        batch.clear();
        Ok(())
    }

    #[allow(clippy::result_large_err)] // as `Executor::submit_one`
    pub(super) fn submit_one(
        &self,
        submission: Submission,
    ) -> std::result::Result<(), (Submission, Error)> {
        let one = std::slice::from_ref(&submission);
        let queued = self.queue(|state, queue| state.prepare(queue, one.iter()));
        queued.map_err(|error| (submission, error))
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        let (record, number) = event.begin_record();
        let mut position = 0;
        self.queue(|state, queue| {
            queue.make_room(0);
            let after = queue.issued;
            state.count_for(queue, after, PendingWork::Record(record));
            position = queue.issued;
            Ok(())
        })?;
        let progress = Arc::clone(&self.progress);
        Record::announce(event, number, StreamPosition { progress, position });
        Ok(())
    }

    pub(super) fn wait_event(&self, event: &Event) -> Result<()> {
        let Some(mark) = event.mark() else {
            return self.check();
        };
        if mark.progress.stream == self.id {
            // The failure before it may have been reported and taken since.
            return match mark.known_failure() {
                None => self.check(),
                Some(failure) => self.fail_here(failure),
            };
        }
        if mark.is_reached() {
            return match mark.failure() {
                None => self.check(),
                Some(failure) => self.fail_here(failure),
            };
        }
        let mut entry = 0;
        if let Some(word) = mark.progress.device_word() {
            // The word is another stream's count. The mark keeps its memory, so the entry keeps the mark until the wait is over.
            let followed = mark.clone();
            self.queue(|state, queue| {
                queue.make_room(KernelWords::WAIT_WORDS);
                let after = queue.issued;
                let by_kernel = state.wait_for_count(queue, word, mark.position as u32);
                state.count_for(queue, after, PendingWork::event(mark, by_kernel));
                entry = queue.issued;
                let stream: Weak<StreamState> = state.weak.clone();
                (followed.progress).follow(followed.position, stream, entry);
                queue.followed = Some(Arc::clone(&followed.progress));
                Ok(())
            })?;
            // The other stream may have failed before it knew of this one.
            if let Some(failure) = followed.known_failure() {
                self.fail_from(entry, failure);
            }
            return Ok(());
        }
        // No word that a GPU could read: the watching thread opens a gate.
        self.queue(|state, queue| {
            queue.make_room(KernelWords::WAIT_WORDS);
            queue.gate = queue.gate.wrapping_add(1);
            let gate = queue.gate;
            let after = queue.issued;
            let by_kernel = state.wait_for_count(queue, state.count.words.gate_at(), gate);
            state.count_for(queue, after, PendingWork::event(mark.clone(), by_kernel));
            // Before the driver call. If the driver refuses, `queue_by` takes the gate back.
            state.host_event_waits.lock().push_back(HostEventWait {
                number: gate,
                mark,
                done: queue.issued,
                is_failing: false,
            });
            Ok(())
        })
    }

    /// Whatever is queued from now on is behind a failure: an entry of its own stands for that.
    fn fail_here(&self, failure: StreamFailure) -> Result<()> {
        let mut entry = 0;
        self.queue(|state, queue| {
            queue.make_room(0);
            let after = queue.issued;
            state.count_for(queue, after, PendingWork::Count);
            entry = queue.issued;
            Ok(())
        })?;
        if self.fault.continues() {
            self.fault.pass(failure);
        } else {
            self.fail_from(entry, failure);
        }
        Ok(())
    }

    /// Queues the operations that `prepare` makes. If that fails, nothing has changed.
    pub(super) fn queue(
        &self,
        prepare: impl FnOnce(&StreamState, &mut CallQueue) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        self.queue_by(prepare, |state, queue| {
            let before = state.enter(queue)?;
            state.issue(queue, before)
        })
    }

    /// Queues a count for [`Executor::synchronize`](crate::Executor::synchronize), and returns its number. `None` if the stream was full until the deadline, or
    /// another thread was in a call of the driver until then.
    pub(super) fn queue_count_until(&self, deadline: Option<Instant>) -> Result<Option<u64>> {
        let mut backoff = Backoff::new();
        let queue = loop {
            // The driver's call would block while the stream is full, for which there is no deadline.
            if !self.is_nearly_full()
                && let Some(queue) = self.queue.try_lock()
            {
                break queue;
            }
            if self.turn() {
                backoff.reset();
            } else if !backoff.pause_until(deadline) {
                return Ok(None);
            }
            if self.ended.load(Ordering::Acquire) {
                break self.queue.lock();
            }
        };
        let mut number = 0;
        let prepare = |state: &StreamState, queue: &mut CallQueue| {
            let after = queue.issued;
            state.count_for(queue, after, PendingWork::Count);
            number = queue.issued;
            Ok(())
        };
        self.queue_in(queue, prepare, issue_unchecked)?;
        Ok(Some(number))
    }

    /// Enters the prepared work, with the number of its calls. A flush behind a kernel is one more.
    fn announce(&self, queue: &mut CallQueue) {
        let current = usize::from(queue.current().is_some());
        let flush = usize::from(queue.flush_behind);
        if let Some(last) = queue.entering.last_mut().filter(|_| !queue.for_kernels) {
            last.calls = queue.calls.len() + current + flush;
        }
        self.pending.enter(&mut queue.entering);
    }

    /// Whether the stream has many of the calls that a driver takes before it blocks: 1,020 (docs/measured/h200-5.md), where each node of a graph counts as one. The
    /// application's own work counts as well.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.calls() > CALLS_MAX
    }

    /// Whether the driver takes what a send queues without blocking, unless the application's own work fills the stream.
    pub(super) fn has_room(&self) -> bool {
        let has_room = || self.calls() <= ROOM_MAX;
        has_room() || {
            self.turn();
            has_room()
        }
    }

    /// Calls of this library that the stream is not done with.
    fn calls(&self) -> usize {
        let functions = self.count.functions.load(Ordering::Relaxed);
        functions + self.pending.lock().calls()
    }

    /// Enters the prepared work in `pending`. This comes before the driver call, so a thread that finds a failure of the stream finds this work as well.
    /// Returns the stream's count up to which the driver has all work.
    ///
    /// # Errors
    /// A failure that was found meanwhile. Nothing is entered then.
    pub(super) fn enter(&self, queue: &mut CallQueue) -> Result<u64> {
        let before = self.count.given.load(Ordering::Relaxed);
        let done = queue.issued;
        let uncounted = queue.uncounted.drain(..).map(|what| PendingEntry {
            after: before,
            done,
            calls: 0,
            what,
        });
        queue.entering.extend(uncounted);
        self.announce(queue);
        self.check()
            .and_then(|()| may_wait(&queue.waited))
            .inspect_err(|_| self.pending.take_back(before, &mut queue.entering))?;
        Ok(before)
    }

    pub(super) fn queue_by(
        &self,
        prepare: impl FnOnce(&StreamState, &mut CallQueue) -> Result<()>,
        issue: impl FnOnce(&StreamState, &mut CallQueue) -> Result<()>,
    ) -> Result<()> {
        self.queue_in(self.queue.lock(), prepare, issue)
    }

    fn queue_in(
        &self,
        mut queue: MutexGuard<'_, CallQueue>,
        prepare: impl FnOnce(&StreamState, &mut CallQueue) -> Result<()>,
        issue: impl FnOnce(&StreamState, &mut CallQueue) -> Result<()>,
    ) -> Result<()> {
        let before = queue.checkpoint();
        queue.waited.clear();
        queue.followed = None;
        let result = prepare(self, &mut queue).and_then(|()| issue(self, &mut queue));
        // Not with the stream's next operation, which may never come: the stream may be done with them already, and owners keep memory.
        for owner in queue.waited.drain(..) {
            if let Some(last) = owner.into_deferred_drop() {
                drop_elsewhere(last);
            }
        }
        // Dropped without the lock: an owner may be dropped with an entry that was refused.
        let mut refused = std::mem::take(&mut queue.entering);
        if result.is_err() {
            refused = queue.keep_uncounted(refused);
            let gate = queue.restore(&before);
            if let Some(followed) = queue.followed.take() {
                let stream: Weak<StreamState> = self.weak.clone();
                followed.leave(&(stream as Weak<dyn Dependent>), queue.issued + 1);
            }
            // The refused gates go. Their numbers are not used again, since one may be open already.
            self.host_event_waits
                .lock()
                .retain(|opened| opened.number.wrapping_sub(gate).cast_signed() <= 0);
        } else {
            queue.end_step();
            // Empty, and kept for its capacity.
            queue.entering = refused;
            return result;
        }
        drop(queue);
        drop(refused);
        result
    }

    /// Gives the stream what was entered; if that fails, takes it back.
    pub(super) fn issue(&self, queue: &mut CallQueue, before: u64) -> Result<()> {
        // Before the driver is called, which may block: deadlines of waits are to be looked at.
        self.ensure_watched();
        if queue.for_kernels {
            // `TriggerStream::take` hands it out.
            self.count.given.store(queue.issued, Ordering::Release);
        } else {
            self.call_driver(queue)
                .inspect_err(|_| self.pending.take_back(before, &mut queue.entering))?;
        }
        Ok(())
    }

    /// Makes the calls of `queue`. If the driver refuses a later one of several calls, the earlier ones cannot be taken back: the work of the refused
    /// ones is discarded, and the failure is reported as that of queued work.
    fn call_driver(&self, queue: &mut CallQueue) -> Result<()> {
        let mut driver = self.driver(false)?;
        self.forbid_capture(&mut driver, "queue on a CUDA stream")?;
        queue.end_call();
        let mut given = None;
        let mut refused = None;
        for DriverCall { what, issued } in &queue.calls {
            let result =
                driver.call(|| self.give(what, &mut queue.ops, &queue.batch, &queue.memory));
            match (result, given) {
                (Ok(()), _) => {
                    given = Some(*issued);
                    self.count.given.store(*issued, Ordering::Release);
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
        drop(driver);
        if let (Some(error), Some(given)) = (refused, given) {
            self.lose(queue, given, &error);
        }
        Ok(())
    }

    /// The driver has a kernel, and has refused the count behind it, whose entry was taken back. The kernel may be executed at any time, so its operation is
    /// queued; the refusal is a failure of the stream.
    pub(super) fn lose_count(&self, queue: &mut CallQueue, before: u64, error: &Error) {
        queue.issued = before;
        let mut entries = std::mem::take(&mut queue.entering);
        for entry in &mut entries {
            if let PendingWork::Kernel(kernel) = &mut entry.what {
                kernel.is_uncounted = true;
            }
        }
        // A count alone keeps nothing.
        queue.keep_uncounted(entries);
        self.count.words.note(STATUS_STREAM);
        self.fault.fail(error.to_string());
    }

    /// Makes one call of the driver.
    fn give(
        &self,
        what: &CallData,
        ops: &mut [MemOp],
        batch: &KernelWords,
        memory: &[MemoryCall],
    ) -> Result<()> {
        match what {
            CallData::MemoryOps(range) => {
                let ops = ops.get_mut(range.clone()).unwrap_or_default();
                // SAFETY: operations of the layout of the driver's own header, on memory that stays registered until the stream is done with
                // them: each program's owner is kept in `pending`, and the stream's own words in `self`.
                check("cuStreamBatchMemOp", unsafe {
                    sys::cuStreamBatchMemOp_v2(self.raw, ops.len() as u32, ops.as_mut_ptr(), 0)
                })
            }
            CallData::Kernel(range) => {
                let words = batch.words(range.clone());
                let control = self.count.words.control_at();
                let module = self.context.module()?;
                // SAFETY: as above.
                module.execute(words, control, |launch| unsafe { launch.queue(self.raw) })
            }
            CallData::Memory(at) => match memory.get(*at) {
                // SAFETY: as above.
                Some(call) => unsafe { call.give(self.raw, &self.context) },
                None => Ok(()),
            },
        }
    }

    /// Discards the work that comes after the count `given`, which the driver has refused. That is a fault of the stream: what would be queued next
    /// relies on what is missing.
    fn lose(&self, queue: &mut CallQueue, given: u64, error: &Error) {
        queue.issued = given;
        let mut lost = Vec::new();
        self.pending.take_back(given, &mut lost);
        lost = queue.keep_uncounted(lost);
        self.count.words.note(STATUS_STREAM);
        self.fault.fail(error.to_string());
        self.note(error);
        let reason = StreamFailure::from(error.to_string()).report(&self.name);
        // Under the lock of the queue, because the next doorbell of an owner would transmit what is lost. All devices are waited for at the same time.
        stopping(|| {
            lost.iter_mut()
                .for_each(|pending| pending.discard(&reason, false));
        });
        defer_drops(
            lost.into_iter()
                .filter_map(PendingEntry::into_deferred_drop)
                .collect(),
        );
    }
}

/// Fails if one of the owners has failed, and with it what a stream would wait for. The thread that found the failure may have given up what was
/// behind such waits before it could see the waits of this call.
fn may_wait(owners: &[Arc<dyn Owner>]) -> Result<()> {
    let has_failed = |owner: &Arc<dyn Owner>| {
        (owner.attachments()).is_some_and(|attachments| attachments.failure_notifier().has_failed())
    };
    match owners.iter().any(has_failed) {
        false => Ok(()),
        true => Err(Error::state(
            StateKind::QueuePair,
            "queue on a CUDA stream",
            "an endpoint that this wait depends on has failed; `Endpoint::failure` has the reason",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;
    use std::ffi::CStr;
    use std::io::Write;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use cudarc::driver::sys;

    use crate::bytecode::{Dword, Fence, Program, Qword, Role, TargetId, Targets};
    use crate::cuda::context::CudaContext;
    use crate::cuda::kernel_address::kernel_address;
    use crate::cuda::stream::CudaStream;
    use crate::cuda::watch::release;
    use crate::stream::{
        Attachments, Executor, KernelMemory, Outcome, Owner, Submission, locks_taken,
    };
    use crate::{Error, StateKind};

    /// A page of memory, in which programs store and wait.
    #[repr(C, align(4096))]
    struct Page([AtomicU64; 512]);

    /// Owns programs as an endpoint does: a doorbell record, a doorbell page, and a word to wait for.
    struct Bench {
        /// Before the memory.
        attachments: Attachments,
        page: Box<UnsafeCell<Page>>,
        targets: Targets,
        finished: AtomicU32,
        given_up: AtomicU32,
        unfinished: Mutex<Vec<Outcome>>,
    }

    // SAFETY: the page is atomics to everyone.
    unsafe impl Sync for Bench {}

    const RECORD: usize = 0;
    const DOORBELL: usize = 64;
    const FLAG: usize = 128;

    // SAFETY: one table, whose targets are 64 bytes each at these places of a page that the owner keeps.
    unsafe impl Owner for Bench {
        fn targets(&self) -> &Targets {
            &self.targets
        }

        fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
            let place = [RECORD, DOORBELL, FLAG][target.index() as usize];
            NonNull::new(self.page.get().cast::<u8>().wrapping_add(place))
        }

        fn attachments(&self) -> Option<&Attachments> {
            Some(&self.attachments)
        }

        fn finished(&self, _: u64, outcome: Outcome) {
            if outcome == Outcome::Done {
                self.finished.fetch_add(1, Ordering::SeqCst);
            } else {
                self.unfinished.lock().unwrap().push(outcome);
            }
        }

        fn give_up(&self, _generation: u32) {
            self.given_up.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Bench {
        fn new() -> (Arc<Bench>, Dword, Qword, Dword) {
            let mut targets = Targets::new();
            let record = targets.register("record", Role::DoorbellRecord, 64);
            let doorbell = targets.register("doorbell", Role::Uar, 64);
            let flag = targets.register("flag", Role::Memory, 64);
            let page = Box::new(UnsafeCell::new(Page([const { AtomicU64::new(0) }; 512])));
            let bench = Arc::new(Bench {
                attachments: Attachments::default(),
                page,
                targets,
                finished: AtomicU32::new(0),
                given_up: AtomicU32::new(0),
                unfinished: Mutex::default(),
            });
            let at = (record.dword(4), doorbell.qword(0), flag.dword(0));
            (bench, at.0.unwrap(), at.1.unwrap(), at.2.unwrap())
        }

        fn word(&self, place: usize) -> &AtomicU64 {
            // SAFETY: the page is never borrowed but as shared atomics.
            unsafe { &(&(*self.page.get()).0)[place / 8] }
        }

        fn submission(self: &Arc<Bench>, program: Program) -> Submission {
            let owner: Arc<dyn Owner> = Arc::clone(self) as Arc<dyn Owner>;
            Submission {
                program,
                owner,
                cookie: 0,
            }
        }
    }

    /// How many calls of the driver this thread has made; None, and the test is WAIVED, if it is not the stand-in.
    fn counter(test: &str) -> Option<extern "C" fn() -> u64> {
        const NAME: &CStr = c"doorbell_cuda_standin_calls_here";
        // SAFETY: opens a library and looks for a name; the stand-in's function is of that type.
        let found = unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            let symbol = match library.is_null() {
                true => std::ptr::null_mut(),
                false => libc::dlsym(library, NAME.as_ptr()),
            };
            std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn() -> u64>>(symbol)
        };
        if found.is_none() {
            let line =
                format!("{test}: the stand-in for the driver, which counts calls, is not loaded\n");
            let _ = std::io::stderr().write_all(format!("WAIVED: {line}").as_bytes());
            if let Some(log) = std::env::var_os("DOORBELL_WAIVED_LOG") {
                let log = std::fs::OpenOptions::new()
                    .append(true)
                    .create(true)
                    .open(log);
                log.and_then(|mut log| log.write_all(line.as_bytes()))
                    .unwrap();
            }
        }
        found
    }

    fn set_current(context: Option<&CudaContext>) {
        let raw = context.map_or(std::ptr::null_mut(), CudaContext::raw);
        // SAFETY: a context that lives, or none.
        let set = unsafe { sys::cuCtxSetCurrent(raw) };
        assert_eq!(set, sys::CUresult::CUDA_SUCCESS);
    }

    #[test]
    fn a_send_takes_one_lock_and_one_call_of_the_driver() {
        let test = "a_send_takes_one_lock_and_one_call_of_the_driver";
        let Some(calls) = counter(test) else { return };
        let context = CudaContext::primary(0).unwrap();
        let stream = CudaStream::new(&context, "hot path").unwrap();
        let (bench, record, doorbell, flag) = Bench::new();
        let mut sent: u32 = 0;
        // What `sends` sends of three ops each cost: locks, and calls of the driver.
        let mut cost = |sends: u64| {
            let before = (locks_taken(), calls());
            for _ in 0..sends {
                sent += 1;
                let mut program = Program::new(&bench.targets);
                program.store_dword(record, sent).unwrap();
                program.fence(Fence::RECORD_BEFORE_UAR).unwrap();
                program.store_qword(doorbell, u64::from(sent)).unwrap();
                let queued = stream.submit_one(bench.submission(program));
                queued.map_err(|(_, error)| error).unwrap();
            }
            (locks_taken() - before.0, calls() - before.1)
        };
        // Registers the memory. Behind it the stream waits, so that the threads that watch it go on with that.
        set_current(Some(&context));
        cost(1);
        let mut program = Program::new(&bench.targets);
        program.poll_geq(flag, 1).unwrap();
        let queued = stream.submit_one(bench.submission(program));
        queued.map_err(|(_, error)| error).unwrap();
        assert_eq!(cost(20), (20, 20));
        // A thread that has changed its context: a call that is refused and its error's name, then those that ask for the current context, enter the
        // stream's and leave it. From then on these come first.
        set_current(None);
        assert_eq!(cost(1), (1, 2 + 4));
        assert_eq!(cost(10), (10, 10 * 4));
        // The context is current again, as the next call finds.
        set_current(Some(&context));
        assert_eq!(cost(1), (1, 1 + 1));
        assert_eq!(cost(10), (10, 10));
        // With the driver's handle others may have the stream captured, so each call asks.
        let _ = stream.raw();
        assert_eq!(cost(10), (10, 10 * 2));
        set_current(None);
        bench.word(FLAG).store(1, Ordering::SeqCst);
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(bench.finished.load(Ordering::SeqCst), sent + 1);
        assert_eq!(bench.word(DOORBELL).load(Ordering::SeqCst), u64::from(sent));
        let record = bench.word(RECORD).load(Ordering::SeqCst);
        assert_eq!(record >> 32, u64::from(sent));
    }

    /// A thread may be about to call the driver, or blocked in that call, when another one finds a failure.
    #[test]
    fn an_operation_queued_while_a_failure_is_found_is_refused_or_given_up() {
        let test = "an_operation_queued_while_a_failure_is_found";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let (bench, record, _, flag) = Bench::new();
        let stream = CudaStream::new(&context, "fails").unwrap();
        let state = stream.state();
        let mut program = Program::new(&bench.targets);
        program.store_dword(record, 1).unwrap();
        let submission = bench.submission(program);
        let one = std::slice::from_ref(&submission);
        // Before the call is announced: refused, and nothing is left of it.
        let refused = state.queue_by(
            |state, queue| state.prepare(queue, one.iter()),
            |state, queue| {
                state.fail_from(1, "found just before".into());
                state.enter(queue).map(drop)
            },
        );
        assert!(refused.unwrap_err().to_string().contains("just before"));
        assert!(state.pending.is_empty());
        assert_eq!(bench.given_up.load(Ordering::SeqCst), 0);
        assert!(stream.take_fault().is_some());
        // An endpoint that fails before a wait for it is announced: refused as well.
        let mut waits = Program::new(&bench.targets);
        waits.poll_geq(flag, 1).unwrap();
        let waiting = bench.submission(waits);
        let failure_notifier = bench.attachments.failure_notifier();
        let refused = state.queue_by(
            |state, queue| state.prepare(queue, std::slice::from_ref(&waiting).iter()),
            |state, queue| {
                failure_notifier.notify();
                state.enter(queue).map(drop)
            },
        );
        failure_notifier.reset();
        assert!(refused.unwrap_err().to_string().contains("has failed"));
        assert!(state.pending.is_empty());
        // After that: the owner is given up before the one that found the failure goes on.
        let queued = stream.submit_one(bench.submission(program));
        queued.map_err(|(_, error)| error).unwrap();
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        let before = state.count.read();
        let queued = state.queue_by(
            |state, queue| state.prepare(queue, one.iter()),
            |state, queue| {
                let given = state.enter(queue)?;
                state.fail_from(before, "found in between".into());
                assert_eq!(bench.given_up.load(Ordering::SeqCst), 1);
                assert!(state.settle().is_empty(), "nothing is given yet");
                assert_eq!(bench.finished.load(Ordering::SeqCst), 1);
                state.issue(queue, given)
            },
        );
        queued.unwrap();
        assert!(stream.synchronize(Some(Duration::from_secs(60))).is_err());
        assert_eq!(bench.finished.load(Ordering::SeqCst), 2);
        assert!(state.pending.is_empty());
    }

    /// Several threads may find one failure. One that comes late finds that the fault was taken, and other work queued.
    #[test]
    fn a_failure_that_is_found_again_harms_nothing_that_was_queued_after_its_fault_was_taken() {
        let test = "a_failure_that_is_found_again";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let (bench, record, _, _) = Bench::new();
        let stream = CudaStream::new(&context, "found twice").unwrap();
        let state = stream.state();
        let mut program = Program::new(&bench.targets);
        program.store_dword(record, 1).unwrap();
        let works = || {
            let queued = stream.submit_one(bench.submission(program));
            queued.map_err(|(_, error)| error).unwrap();
        };
        works();
        let entry = state.count.read().max(1);
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        state.fail_from(entry, "found first".into());
        assert!(stream.take_fault().is_some());
        stream.clear_status();
        works();
        state.fail_from(entry, "found again".into());
        assert_eq!(bench.given_up.load(Ordering::SeqCst), 0);
        assert_eq!(stream.status(), 0);
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(stream.take_fault(), None);
    }

    #[test]
    fn what_a_stream_was_at_when_it_ended_is_lost_and_the_rest_is_discarded() {
        let test = "what_a_stream_was_at_when_it_ended";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let (bench, _, _, flag) = Bench::new();
        let stream = CudaStream::new(&context, "ends").unwrap();
        for _ in 0..3 {
            let mut program = Program::new(&bench.targets);
            program.poll_geq(flag, 1).unwrap();
            let queued = stream.submit_one(bench.submission(program));
            queued.map_err(|(_, error)| error).unwrap();
        }
        let state = stream.state();
        let has_begun = || {
            let pending = state.pending.lock();
            let first = pending.entries.front();
            first.is_some_and(|first| first.after <= state.count.read())
        };
        while !has_begun() {
            std::thread::yield_now();
        }
        state.ended.store(true, Ordering::SeqCst);
        state.discard();
        // The stand-in has not ended: lets it go before the memory does.
        bench.word(FLAG).store(1, Ordering::SeqCst);
        while !state.is_idle().unwrap() {
            std::thread::yield_now();
        }
        let ends = bench.unfinished.lock().unwrap().clone();
        assert_eq!(
            ends,
            [Outcome::Lost, Outcome::Discarded, Outcome::Discarded]
        );
        assert_eq!(bench.finished.load(Ordering::SeqCst), 0);
    }

    /// The watching thread finds no work. Before it looks for a handle that is kept, a thread queues work, keeps a handle for it, and drops its own.
    #[test]
    fn a_handle_kept_while_the_watching_thread_stops_is_kept_until_the_work_is_done() {
        let test = "a_handle_kept_while_the_watching_thread_stops";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let (bench, record, _, flag) = Bench::new();
        let stream = CudaStream::new(&context, "kept").unwrap();
        let submit = |fill: &dyn Fn(&mut Program)| {
            let mut program = Program::new(&bench.targets);
            fill(&mut program);
            let queued = stream.submit_one(bench.submission(program));
            queued.map_err(|(_, error)| error).unwrap();
        };
        let state = stream.state();
        let weak = state.weak.clone();
        let mut remaining = state.remaining.lock();
        submit(&|program| program.store_dword(record, 1).unwrap());
        // Then it waits for this lock.
        while state.busy.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        submit(&|program| program.poll_geq(flag, 1).unwrap());
        // As `keep` does.
        *remaining = weak.upgrade();
        state.ensure_watched();
        drop(remaining);
        // Waits for the end of its turn.
        release(weak.upgrade().unwrap());
        assert!(state.remaining.lock().is_some());
        drop(stream);
        assert!(weak.upgrade().is_some());
        bench.word(FLAG).store(1, Ordering::SeqCst);
        while weak.strong_count() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(bench.finished.load(Ordering::SeqCst), 2);
    }

    /// The driver frees memory when the GPU is idle, and until then other calls wait: also those of a thread that the kernel waits for.
    #[test]
    fn no_memory_is_given_back_while_a_kernel_is_launched() {
        let test = "no_memory_is_given_back_while_a_kernel_is_launched";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let stream = CudaStream::new(&context, "launches").unwrap();
        let memory = context.alloc(4096).unwrap();
        let start = memory.ptr();
        let is_allocated = || {
            let (mut first, mut len_bytes) = (0, 0);
            // SAFETY: writes an address and a length.
            let asked = unsafe { sys::cuMemGetAddressRange_v2(&mut first, &mut len_bytes, start) };
            asked == sys::CUresult::CUDA_SUCCESS
        };
        let launched = stream.launch_kernel(|_, _| {
            std::thread::spawn(move || drop(memory)).join().unwrap();
            assert!(is_allocated());
            Ok(())
        });
        launched.unwrap();
        set_current(Some(&context));
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_allocated() {
            assert!(Instant::now() < deadline, "it is not given back");
            stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        }
        set_current(None);
    }

    #[test]
    fn a_thread_queues_with_any_context_current_and_keeps_that() {
        let test = "a_thread_queues_with_any_context_current";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let (bench, record, ..) = Bench::new();
        let mut sent = 0;
        let stream = CudaStream::new(&context, "anywhere").unwrap();
        let mut works = || {
            sent += 1;
            let mut program = Program::new(&bench.targets);
            program.store_dword(record, sent).unwrap();
            let queued = stream.submit_one(bench.submission(program));
            queued.map_err(|(_, error)| error).unwrap();
            stream.synchronize(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(bench.finished.load(Ordering::SeqCst), sent);
            let mut current = std::ptr::null_mut();
            // SAFETY: writes one handle.
            let asked = unsafe { sys::cuCtxGetCurrent(&mut current) };
            assert_eq!(asked, sys::CUresult::CUDA_SUCCESS);
            current as usize
        };
        assert_eq!(works(), 0);
        set_current(Some(&context));
        assert_eq!(works(), context.raw() as usize);
        let mut other = std::ptr::null_mut();
        // SAFETY: writes one handle, of a context that becomes the current one.
        let created = unsafe { sys::cuCtxCreate_v2(&mut other, 0, 0) };
        assert_eq!(created, sys::CUresult::CUDA_SUCCESS);
        let other = other as usize;
        assert_eq!(works(), other);
        // By another thread, so that it stays the current one of this thread.
        let destroyed = std::thread::spawn(move || {
            // SAFETY: made above; nothing was made with it.
            unsafe { sys::cuCtxDestroy_v2(other as sys::CUcontext) }
        });
        assert_eq!(destroyed.join().unwrap(), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(works(), other);
        // Between two calls, the thread goes from the stream's context back to the destroyed one.
        // SAFETY: pushes a context that lives.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(context.raw()) };
        assert_eq!(pushed, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(works(), context.raw() as usize);
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what was pushed above.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        assert_eq!(popped, context.raw());
        assert_eq!(works(), other);
        set_current(None);
    }

    /// A kernel that stored to the number by which a NIC names memory would end the context.
    #[test]
    fn a_kernel_gets_no_address_that_is_not_known_to_be_one_of_its_context() {
        let test = "a_kernel_gets_no_address_that_is_not_known";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let mut bytes = [0_u64; 8];
        let memory = |context| KernelMemory {
            attachments: None,
            context,
            start: NonNull::from(&mut bytes).cast(),
            len_bytes: 64,
            offset: 8,
        };
        let [unknown, own, other] = [None, Some(context.key()), Some(u64::MAX)].map(memory);
        let kind = |error| match error {
            Error::State { kind, .. } => kind,
            error => panic!("{error:?}"),
        };
        let refused = kernel_address(&unknown, &context).unwrap_err();
        assert_eq!(kind(refused), StateKind::Memory);
        let refused = kernel_address(&other, &context).unwrap_err();
        assert!(matches!(refused, Error::Foreign { .. }), "{refused:?}");
        let address = own.start.as_ptr().addr() as u64 + 8;
        assert_eq!(kernel_address(&own, &context), Ok(address));
    }

    /// An application that captures a stream by its handle finds no operation of this library in the graph.
    #[test]
    fn a_stream_whose_handle_is_known_is_never_queued_on_while_it_is_captured() {
        let test = "a_stream_whose_handle_is_known";
        if counter(test).is_none() {
            return;
        }
        let context = CudaContext::primary(0).unwrap();
        let stream = CudaStream::new(&context, "captured").unwrap();
        let (bench, record, ..) = Bench::new();
        let send = || {
            let mut program = Program::new(&bench.targets);
            program.store_dword(record, 7).unwrap();
            let queued = stream.submit_one(bench.submission(program));
            queued.map_err(|(_, error)| error)
        };
        set_current(Some(&context));
        send().unwrap();
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        let raw = stream.raw();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut graph = std::ptr::null_mut();
        let mut nodes = usize::MAX;
        // SAFETY: a stream that lives, and a graph that is destroyed at the end; the second call only counts its nodes.
        unsafe {
            assert_eq!(
                sys::cuStreamBeginCapture_v2(raw, mode),
                sys::CUresult::CUDA_SUCCESS
            );
            let refused = send().unwrap_err().to_string();
            assert!(refused.contains("captured"), "{refused}");
            assert_eq!(
                sys::cuStreamEndCapture(raw, &mut graph),
                sys::CUresult::CUDA_SUCCESS
            );
            let counted = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes);
            assert_eq!((counted, nodes), (sys::CUresult::CUDA_SUCCESS, 0));
            assert_eq!(sys::cuGraphDestroy(graph), sys::CUresult::CUDA_SUCCESS);
        }
        send().unwrap();
        stream.synchronize(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(bench.finished.load(Ordering::SeqCst), 2);
        set_current(None);
    }
}
