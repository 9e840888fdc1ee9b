//! The thread of a host stream: executes the entries of its queue, one after the other.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::backoff::{Awake, Backoff, Spin, set_min_timer_slack};
use super::event::{Event, Progress, Record, StreamPosition};
use super::fault::{Fault, StreamFailure};
use super::host_closure::HostClosure;
use super::lock::Lock;
use super::parker::Parker;
use super::ring::{Consumer, Ring, SlotValue};
use super::stopping::{await_ending, defer_waits};
use super::{Outcome, Owner, execute_program};
use crate::bytecode::Program;
use crate::{Error, Result, StateKind};

thread_local! {
    /// The id of the stream whose thread this is; 0 elsewhere.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Fails when the calling thread is the one of `stream`, for an operation that would then wait for itself.
pub(crate) fn forbid_on(stream: u64, operation: &'static str) -> Result<()> {
    if CURRENT.get() != stream {
        return Ok(());
    }
    Err(Error::state(
        StateKind::Deadlock,
        operation,
        "called from work on the same stream, so it would wait for itself",
    ))
}

/// Runs work of that stream in the calling thread.
#[cfg(feature = "cuda")]
pub(crate) fn run_as_stream<R>(stream: u64, work: impl FnOnce() -> R) -> R {
    let before = CURRENT.replace(stream);
    let result = work();
    CURRENT.set(before);
    result
}

/// What the handles of a stream and its thread share.
pub(super) struct StreamShared {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) ring: Arc<Ring<Queued>>,
    pub(super) parker: Parker,
    pub(super) progress: Arc<Progress>,
    pub(super) fault: Fault,
    /// Positions below this one were aborted.
    pub(super) aborted: AtomicU64,
    /// The fault that was taken last. What was queued behind it, below this position, is discarded because of it.
    pub(super) taken: Lock<Option<(u64, StreamFailure)>>,
    /// The last handle is gone.
    pub(super) closing: AtomicBool,
    /// A [`Spin`], see [`StreamShared::spin`].
    spin_ns: AtomicU64,
    /// What the last wait for the thread says of the next, see [`Backoff::shares_core`].
    pub(super) shares_core: AtomicBool,
}

/// What an entry of the queue is.
#[derive(Default)]
pub(super) enum Item {
    #[default]
    Nothing,
    /// The kernel lies beside it, until it is launched.
    HostClosure,
    /// The program lies beside it.
    Program {
        owner: Arc<dyn Owner>,
        cookie: u64,
    },
    Record(Record),
    Wait(StreamPosition),
}

/// An entry of the queue: executed where it lies, so that a submission allocates nothing.
///
/// Kernel and program are beside the item and not in it, because of their size: only what is in use is then written by one core and read by
/// another. In this order, with the slot's own word behind it, a kernel takes two cache lines, and the programs of a wait and of a send
/// two and three: the front of a program, which is in use, and the end of the slot.
#[repr(C)]
pub(super) struct Queued {
    program: Program,
    kernel: Option<HostClosure>,
    item: Item,
}

impl Default for Queued {
    fn default() -> Self {
        Self {
            program: Program::for_targets(0),
            kernel: None,
            item: Item::Nothing,
        }
    }
}

impl SlotValue for Queued {
    fn clear(&mut self) {
        if matches!(self.item, Item::HostClosure) {
            // Not launched, if it still is there.
            drop(self.kernel.take());
        }
        drop(std::mem::take(&mut self.item));
    }
}

/// What was cleared owns nothing, so it need not be dropped: that would be a look at memory which the other core wrote last, and the caller
/// would have to wait for it.
#[inline]
fn write_over<T>(cleared: &mut T, value: T) {
    std::mem::forget(std::mem::replace(cleared, value));
}

impl Queued {
    /// Becomes an item without kernel or program.
    #[inline]
    pub(super) fn hold(&mut self, item: Item) {
        write_over(&mut self.item, item);
    }

    /// Becomes a kernel to be launched.
    #[inline]
    pub(super) fn hold_kernel(&mut self, kernel: HostClosure) {
        write_over(&mut self.kernel, Some(kernel));
        write_over(&mut self.item, Item::HostClosure);
    }

    /// Becomes a program to be executed.
    #[inline]
    pub(super) fn hold_program(&mut self, program: &Program, owner: Arc<dyn Owner>, cookie: u64) {
        self.program.assign(program);
        write_over(&mut self.item, Item::Program { owner, cookie });
    }
}

/// The thread of a stream.
pub(super) fn run(shared: &StreamShared, mut consumer: Consumer<Queued>) {
    CURRENT.set(shared.id);
    defer_waits(true);
    set_min_timer_slack();
    let awake = Awake::new();
    let mut shares_core = false;
    loop {
        if consumer.is_ready() {
            shared.step(&mut consumer);
            continue;
        }
        await_ending(0);
        // The queue is looked at after the flag, so what was queued before the last handle went is seen.
        if shared.closing.load(Ordering::Acquire) && consumer.is_empty() {
            defer_waits(false);
            return;
        }
        // A parked thread answers some 50 us late, which an application that synchronizes after each kernel would pay at each
        // step. So it stays awake, and out of the way of others, for as long as such a step takes.
        let spin = shared.spin();
        let mut backoff = Backoff::after(spin, shares_core);
        while spin != Spin::Never && !backoff.has_slept() && !consumer.is_ready() {
            backoff.pause();
            // It may spin for ever otherwise.
            if shared.closing.load(Ordering::Acquire) || shared.spin() != spin {
                break;
            }
        }
        shares_core = backoff.shares_core();
        if consumer.is_ready() {
            // Not by way of the parker, whose fence costs the sleeper a system call that interrupts the other processors.
            continue;
        }
        let is_ready = || consumer.is_ready() || shared.closing.load(Ordering::Acquire);
        awake.except(|| shared.parker.park(is_ready));
    }
}

/// What stands for a [`Spin`] that is no time, in nanoseconds.
const SPIN_AUTO: u64 = u64::MAX;
const SPIN_ALWAYS: u64 = u64::MAX - 1;
const SPIN_NEVER: u64 = u64::MAX - 2;

impl StreamShared {
    pub(super) fn spin(&self) -> Spin {
        match self.spin_ns.load(Ordering::Relaxed) {
            SPIN_AUTO => Spin::Auto,
            SPIN_ALWAYS => Spin::Always,
            SPIN_NEVER => Spin::Never,
            ns => Spin::For(Duration::from_nanos(ns)),
        }
    }

    pub(super) fn set_spin(&self, spin: Spin) {
        let ns = match spin {
            Spin::Auto => SPIN_AUTO,
            Spin::Always => SPIN_ALWAYS,
            Spin::Never => SPIN_NEVER,
            Spin::For(time) => u64::try_from(time.as_nanos())
                .unwrap_or(SPIN_ALWAYS)
                .min(SPIN_ALWAYS),
        };
        self.spin_ns.store(ns, Ordering::Relaxed);
        // One that sleeps is to go on as it is told now.
        self.parker.wake();
    }

    pub(super) fn new(id: u64, name: String, ring: Arc<Ring<Queued>>) -> StreamShared {
        StreamShared {
            id,
            name,
            ring,
            parker: Parker::new(),
            progress: Arc::new(Progress::new(id)),
            fault: Fault::new(),
            aborted: AtomicU64::new(0),
            taken: Lock::default(),
            closing: AtomicBool::new(false),
            spin_ns: AtomicU64::new(SPIN_AUTO),
            shares_core: AtomicBool::new(false),
        }
    }

    /// Executes the front of the queue and is done with it, whatever it does.
    fn step(&self, consumer: &mut Consumer<Queued>) {
        let position = consumer.position();
        let mut sleepers = None;
        let performed = catch_unwind(AssertUnwindSafe(|| {
            consumer.with_front(|queued| sleepers = self.perform(queued, position));
        }));
        // Dropping the entry may drop the last reference to an owner, so that may panic, too.
        let dropped = catch_unwind(AssertUnwindSafe(|| consumer.pop()));
        for panicked in [performed.err(), dropped.err()].into_iter().flatten() {
            self.fault.fail(format!("panicked: {}", message(panicked)));
        }
        self.progress.complete(position + 1);
        if let Some(event) = sleepers {
            event.wake();
            event.wake_tasks();
        }
    }

    /// Gives the event to wake when the entry is done with.
    fn perform(&self, queued: &mut Queued, position: u64) -> Option<Event> {
        let aborted = || position < self.aborted.load(Ordering::Acquire);
        let discards = || self.fault.is_sticky() || aborted();
        if !discards() {
            // The doorbells of requests that were discarded are not to be rung by what is executed now.
            await_ending(0);
        }
        // The stream may have been aborted during that wait.
        let discards = discards();
        match &mut queued.item {
            Item::Nothing => {}
            Item::HostClosure => {
                let kernel = queued.kernel.take().filter(|_| !discards);
                if let Some(kernel) = kernel {
                    kernel.run();
                }
            }
            Item::Program { owner, cookie } if discards => {
                owner.finished(*cookie, Outcome::Discarded);
            }
            Item::Program { owner, cookie } => {
                self.execute(&queued.program, &**owner, *cookie, aborted);
            }
            Item::Record(record) => {
                if discards {
                    let failure = self.discard_reason(position);
                    self.progress.poison(position + 1, failure.clone());
                    record.fire(Some(failure.report(&self.name)));
                } else {
                    self.progress.passed_well();
                    record.fire(None);
                }
                return record.sleepers();
            }
            Item::Wait(mark) => {
                let mut backoff = Backoff::new();
                while !discards && !mark.is_reached() && !aborted() {
                    backoff.pause();
                }
                if !discards
                    && !aborted()
                    && let Some(failure) = mark.failure()
                {
                    self.fault.fail(failure);
                }
            }
        }
        None
    }

    fn execute(
        &self,
        program: &Program,
        owner: &dyn Owner,
        cookie: u64,
        aborted: impl Fn() -> bool,
    ) {
        let executed = catch_unwind(AssertUnwindSafe(|| {
            owner.started(cookie);
            let outcome = execute_program::run(program, owner, cookie, &aborted);
            let failure = (outcome != Outcome::Discarded)
                .then(|| owner.failure_of(cookie, outcome))
                .flatten();
            (outcome, failure)
        }));
        // The failure is recorded before the owner is told of it, so that a thread that learns of it through the owner finds it.
        let outcome = match executed {
            Ok((outcome, failure)) => {
                let failure = match (outcome, failure) {
                    (Outcome::Discarded, None) if !aborted() => {
                        Some("a target of the program has no memory in this process".into())
                    }
                    (_, failure) => failure,
                };
                if let Some(failure) = failure {
                    self.fault.fail(failure);
                }
                outcome
            }
            Err(panicked) => {
                let reason = format!("the owner of a program panicked: {}", message(panicked));
                self.fault.stick(reason);
                Outcome::Discarded
            }
        };
        owner.finished(cookie, outcome);
    }

    /// What an event reports that stands for discarded work.
    fn discard_reason(&self, position: u64) -> StreamFailure {
        let taken = || {
            let taken = self.taken.lock();
            let (upto, failure) = taken.as_ref()?;
            (position < *upto).then(|| failure.clone())
        };
        match self.fault.sticky().or_else(taken) {
            Some(failure) => failure.of_discarded(),
            None => "discarded by abort".into(),
        }
    }
}

/// The text of a panic.
pub(crate) fn message(panicked: Box<dyn Any + Send>) -> String {
    match panicked.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => match other.downcast_ref::<&str>() {
            Some(text) => (*text).to_owned(),
            None => {
                // Its drop may panic as well, and nothing would catch that.
                std::mem::forget(other);
                "no message".to_owned()
            }
        },
    }
}
