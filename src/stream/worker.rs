//! The thread of a host stream: executes the entries of its queue, one after the other.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::backoff::{Awake, Backoff, Spin, set_min_timer_slack};
use super::current::become_thread_of;
use super::event::{Progress, Record, StreamPosition};
use super::execute_program::BlockingWaits;
use super::fault::{Fault, StreamFailure};
use super::front::{FrontPosition, Look, Performed};
use super::host_closure::HostClosure;
use super::lock::Lock;
use super::parker::Parker;
use super::ring::{Consumer, Ring, SlotValue};
use super::stopping::{await_ending, defer_waits};
use super::{Outcome, Owner, execute_program};
use crate::bytecode::Program;

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
    /// Of a stream without a thread.
    pub(super) look: Option<Lock<Look>>,
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
    become_thread_of(shared.id);
    defer_waits(true);
    set_min_timer_slack();
    let awake = Awake::new();
    let mut shares_core = false;
    loop {
        if consumer.is_ready() {
            shared.step(&mut consumer, None);
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

    /// Of a stream that a thread executes.
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
            look: None,
        }
    }

    /// Of a stream that is executed by the threads that wait for its work.
    pub(super) fn without_thread(
        id: u64,
        name: String,
        ring: Arc<Ring<Queued>>,
        consumer: Consumer<Queued>,
    ) -> StreamShared {
        StreamShared {
            look: Some(Lock::new(Look {
                consumer,
                front: FrontPosition::default(),
            })),
            ..StreamShared::new(id, name, ring)
        }
    }

    /// Executes the front of the queue and is done with it, whatever it does. In a look, which tells how far the front is, it may have to wait: then it stays there, and the result
    /// is false.
    pub(super) fn step(
        &self,
        consumer: &mut Consumer<Queued>,
        mut front: Option<&mut FrontPosition>,
    ) -> bool {
        let position = consumer.position();
        let mut done = Performed::Done(None);
        let performed = catch_unwind(AssertUnwindSafe(|| {
            consumer.with_front(|queued| {
                done = self.perform(queued, position, front.as_deref_mut());
            });
        }));
        let sleepers = match done {
            Performed::Done(sleepers) => sleepers,
            Performed::Waits => {
                if let Some(front) = front {
                    front.has_begun = true;
                }
                return false;
            }
        };
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
        true
    }

    fn perform(
        &self,
        queued: &mut Queued,
        position: u64,
        front: Option<&mut FrontPosition>,
    ) -> Performed {
        let has_begun = front.as_ref().is_some_and(|front| front.has_begun);
        let aborted = || position < self.aborted.load(Ordering::Acquire);
        // As by a thread, a fault does not end the wait that the stream is in.
        let discards = || !has_begun && self.fault.is_sticky() || aborted();
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
                if let Some(Err(error)) = kernel.map(HostClosure::run) {
                    self.fault.fail(error);
                }
            }
            Item::Program { owner, cookie } if discards => {
                owner.finished(*cookie, Outcome::Discarded);
            }
            Item::Program { owner, cookie } => {
                let is_done = self.execute(&queued.program, &**owner, *cookie, aborted, front);
                if !is_done {
                    return Performed::Waits;
                }
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
                return Performed::Done(record.sleepers());
            }
            Item::Wait(mark) => {
                let mut backoff = Backoff::new();
                while !discards && !mark.is_reached() && !aborted() {
                    let has_changed = mark.look();
                    if front.is_some() {
                        if mark.is_reached() {
                            break;
                        }
                        return Performed::Waits;
                    }
                    if !has_changed {
                        backoff.pause();
                    }
                }
                if !discards
                    && !aborted()
                    && let Some(failure) = mark.failure()
                {
                    self.fault.fail(failure);
                }
            }
        }
        Performed::Done(None)
    }

    /// False: it waits, which it does only in a look.
    fn execute(
        &self,
        program: &Program,
        owner: &dyn Owner,
        cookie: u64,
        aborted: impl Fn() -> bool,
        front: Option<&mut FrontPosition>,
    ) -> bool {
        let executed = catch_unwind(AssertUnwindSafe(|| {
            let outcome = match front {
                None => {
                    owner.started(cookie);
                    execute_program::run(program, owner, cookie, &aborted, &mut BlockingWaits)?
                }
                Some(front) => {
                    if !front.has_begun {
                        owner.started(cookie);
                    }
                    execute_program::run(program, owner, cookie, &aborted, &mut front.program)?
                }
            };
            let failure = (outcome != Outcome::Discarded)
                .then(|| owner.failure_of(cookie, outcome))
                .flatten();
            Some((outcome, failure))
        }));
        // The failure is recorded before the owner is told of it, so that a thread that learns of it through the owner finds it.
        let outcome = match executed {
            Ok(None) => return false,
            Ok(Some((outcome, failure))) => {
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
        true
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
