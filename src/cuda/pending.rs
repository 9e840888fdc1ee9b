//! The work that a CUDA stream was given and has not finished, and the owners that are told of its end.
#![allow(unsafe_code)] // ends waits by stores to the words that they wait for

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

use super::decoded::Decoded;
use super::instantiated_graph::InstantiatedGraph;
use super::queued_kernel::QueuedKernel;
use super::stream_progress::Count;
use super::stream_words::{STATUS_WORK, Stop, StreamWords};
use crate::Error;
use crate::bytecode::{At, ProgramOp, Role};
use crate::proxy::drop_elsewhere;
use crate::stream::{
    DeferredDrop, EndingDevice, Event, FailureListener, Fault, Outcome, Owner, Progress, Record,
    ReplayEnd, StreamFailure, StreamPosition, Substitute, await_told, told_devices,
};

/// Drops these in a thread that no other thread waits for: an object of the application's may have a slow destructor, and the caller may be a thread that ends
/// waits of the GPU.
pub(super) fn defer_drops(drops: Vec<DeferredDrop>) {
    if !drops.is_empty() {
        drop_elsewhere(Box::new(drops));
    }
}

/// What is left to do for entries that the stream has passed, without its locks.
#[derive(Default)]
pub(super) struct Passed {
    /// Their tasks are to be woken.
    events: Vec<Event>,
    /// May block.
    drops: Vec<DeferredDrop>,
    /// They were told to transmit nothing more for programs that the stream has passed and not executed.
    told: Vec<Arc<dyn EndingDevice>>,
}

impl Passed {
    pub(super) fn add(&mut self, entry: PendingEntry) {
        if let PendingWork::Record(record) = &entry.what {
            self.events.extend(record.sleepers());
        }
        self.drops.extend(entry.into_deferred_drop());
    }

    /// Wakes the tasks, waits for the devices, and returns what is to be dropped.
    pub(super) fn wake(self) -> Vec<DeferredDrop> {
        self.events.iter().for_each(Event::wake_tasks);
        await_told(self.told);
        self.drops
    }
}

/// One entry of a stream's pending work. It has begun when the stream has counted to `after`, and is finished when it has counted to `done`.
pub(super) struct PendingEntry {
    pub(super) after: u64,
    pub(super) done: u64,
    /// Calls of the driver that were made for this entry and those before it that have none.
    pub(super) calls: usize,
    pub(super) what: PendingWork,
}

/// Where failures of a stream are reported.
pub(super) struct Reports<'a> {
    pub(super) fault: &'a Fault,
    pub(super) progress: &'a Progress,
    pub(super) name: &'a str,
    pub(super) forgiven: u64,
    /// The entry that the fault is of, or above all counts.
    pub(super) stopped_from: &'a AtomicU64,
}

/// What has to happen, without the lock of the pending work, before more of it is settled.
pub(super) enum Next {
    /// The other stream's work is to be settled.
    Settle(StreamPosition),
    /// The wait of the entry ends with this failure, once everything behind it is given up.
    GiveUpBehind(u64, StreamFailure),
}

pub(super) enum PendingWork {
    Program {
        owner: Arc<dyn Owner>,
        cookie: u64,
        has_begun: bool,
        waits: bool,
        /// How this process can end its wait, if it has one.
        release_by: Option<ReleaseMethod>,
        released: Option<Released>,
        ending: Ending,
        /// While it is pending, the owner's failure is the stream's.
        failure_notifier: Option<FailureGuard>,
    },
    Record(Record),
    /// A count that a thread waits for, or that keeps the stream alive.
    Count,
    /// A kernel that executes an operation, and what it uses.
    Kernel(Box<QueuedKernel>),
    /// A wait for another stream. The mark keeps that stream's words.
    Event {
        mark: StreamPosition,
        /// This process has asked how that stream's work has ended.
        is_settled: bool,
        /// The threads that ask it.
        settling: Vec<ThreadId>,
        /// A kernel waits, which can be notified to stop.
        by_kernel: bool,
        /// The application has given it up.
        given_up: bool,
        was_notified: bool,
    },
    /// A launch of a graph, which it keeps.
    Launched {
        _exec: Arc<InstantiatedGraph>,
    },
}

/// How far a wait that fails has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Waits,
    /// A thread is giving up everything behind it.
    StopsBehind,
    /// Everything behind it was given up, and the stream had not passed it: it may end, and fails whatever its word becomes meanwhile.
    MayEnd,
}

impl PendingWork {
    /// A wait for another stream.
    pub(super) fn event(mark: StreamPosition, by_kernel: bool) -> PendingWork {
        PendingWork::Event {
            mark,
            is_settled: false,
            settling: Vec::new(),
            by_kernel,
            given_up: false,
            was_notified: false,
        }
    }
}

/// While it lives, the stream hears of the failure of a program's owner.
pub(super) struct FailureGuard {
    owner: Arc<dyn Owner>,
    stream: u64,
}

impl FailureGuard {
    pub(super) fn new(owner: &Arc<dyn Owner>, stream: u64, count: &Arc<Count>) -> FailureGuard {
        if let Some(attachments) = owner.attachments() {
            let ring = || Arc::clone(count) as Arc<dyn FailureListener>;
            attachments.failure_notifier().enter(stream, ring);
        }
        FailureGuard {
            owner: Arc::clone(owner),
            stream,
        }
    }
}

impl Drop for FailureGuard {
    fn drop(&mut self) {
        if let Some(attachments) = self.owner.attachments() {
            attachments.failure_notifier().leave(self.stream);
        }
    }
}

/// How this process can end a wait.
#[derive(Clone, Copy)]
pub(super) enum ReleaseMethod {
    /// A memory operation reads nothing but its word: a store to that ends the wait. Only the program's first wait for a word of memory is ended so.
    Word(PolledWord),
    /// A kernel also reads the stream's own words, by which it is notified.
    Kernel,
}

#[derive(Clone, Copy)]
pub(super) struct PolledWord {
    at: At,
    condition: PollCondition,
}

#[derive(Clone, Copy)]
enum PollCondition {
    /// At least this, as a running count.
    Geq(u32),
    /// One of these bits is set.
    And(u32),
    /// A bit other than these is clear.
    Nor(u32),
}

/// How a wait was ended.
pub(super) enum Released {
    Stored(Substitute),
    /// The kernel was notified.
    Notified,
}

impl ReleaseMethod {
    /// The wait of a program that memory operations execute.
    pub(super) fn of(program: &Decoded<'_>) -> Option<ReleaseMethod> {
        program.ops().iter().find_map(|op| {
            let (at, condition) = match *op {
                ProgramOp::PollGeq { at, value } => (at, PollCondition::Geq(value)),
                ProgramOp::PollAnd { at, value } => (at, PollCondition::And(value)),
                ProgramOp::PollNor { at, value } => (at, PollCondition::Nor(value)),
                _ => return None,
            };
            (at.role == Role::Memory).then_some(ReleaseMethod::Word(PolledWord { at, condition }))
        })
    }
}

impl PollCondition {
    /// The value itself if it ends the wait, otherwise one that does.
    fn satisfying_value(self, found: u32) -> u32 {
        match self {
            PollCondition::Geq(value) if found.wrapping_sub(value).cast_signed() >= 0 => found,
            PollCondition::Geq(value) => value,
            PollCondition::And(bits) if found & bits != 0 => found,
            PollCondition::And(bits) => found | bits,
            PollCondition::Nor(bits) if !(found | bits) != 0 => found,
            PollCondition::Nor(bits) => found & bits,
        }
    }
}

/// The word that a wait reads. None if the owner has no memory for it here.
fn word(owner: &dyn Owner, at: At) -> Option<&AtomicU32> {
    let base = owner.base(at.target)?;
    let address = base.as_ptr().wrapping_add(usize::try_from(at.offset).ok()?);
    if !address.addr().is_multiple_of(4) {
        return None;
    }
    // SAFETY: programs are of their owner's table, whose addresses were checked when they were made, and the owner guarantees the memory
    // of its targets as long as it lives; others access the word atomically, or not from this process (the contract of `Owner`).
    Some(unsafe { AtomicU32::from_ptr(address.cast()) })
}

/// Restores the word of a wait that was ended by a store.
fn restore(owner: &dyn Owner, release_by: Option<&ReleaseMethod>, released: Option<Released>) {
    if let (Some(ReleaseMethod::Word(polled)), Some(Released::Stored(substitute))) =
        (release_by, released)
        && let Some(word) = word(owner, polled.at)
    {
        substitute.restore(word);
    }
}

/// Finishes the entries up to the count `done`, and ends waits of those that the stream has begun: all of them if it is `aborted`. Leaves alone what
/// comes behind the count `given`, which the stream may not have. Adds to `over` what is left to do; handles that are not an owner's last are dropped
/// in here. Returns what has to happen before it goes on.
pub(super) fn settle(
    queue: &mut VecDeque<PendingEntry>,
    (done, given): (u64, u64),
    words: &StreamWords,
    aborted: bool,
    stream: &Reports<'_>,
    over: &mut Passed,
) -> Option<Next> {
    let done = done.min(given);
    while let Some(front) = queue.front_mut().filter(|front| front.done <= done) {
        if let Some(mark) = front.unsettled() {
            return Some(Next::Settle(mark));
        }
        front.start();
        let number = front.done;
        let outcome = front.outcome(words);
        if let Some(failure) = front.failure(outcome) {
            let last = queue.back().map_or(number, |last| last.done);
            stream.report(number, last, failure);
        }
        if let Some(mut front) = queue.pop_front() {
            if outcome == Outcome::Discarded {
                // The owner tells its device to stop. Nobody waits for that here: the caller holds the lock of the pending work, and may be the thread that
                // keeps the deadlines of all streams.
                let told = told_devices(|| front.finish(outcome, stream));
                over.told.extend(told);
            } else {
                front.finish(outcome, stream);
            }
            over.add(front);
        }
        if queue.front().is_none_or(|next| next.done > number) {
            stream.progress.complete(number);
        }
    }
    // Entries with the same count have begun together. If the stream is in a wait, it is one of theirs.
    let current = queue.front().map(|front| front.done);
    for pending in queue.iter_mut() {
        if pending.after > done || pending.done > given || Some(pending.done) != current {
            break;
        }
        let next = pending.begin(words, aborted);
        if next.is_some() {
            return next;
        }
    }
    None
}

impl Reports<'_> {
    /// The entry has failed, and the stream has entries up to `last`.
    fn report(&self, entry: u64, last: u64, failure: StreamFailure) {
        if self.fault.continues() {
            self.fault.fail(failure);
            return;
        }
        if self.progress.failure_at(entry).is_none() {
            self.progress.poison_all((entry, last), failure.clone());
        }
        if entry > self.forgiven {
            self.fault.fail(failure);
        }
    }

    /// Why the work before the record with that number was not done.
    fn failure_before(&self, record: u64) -> Option<StreamFailure> {
        // The fault may also be of the stream as a whole.
        let of_stream = || {
            // The fault is read first: whoever sets it has set the place before it.
            let fault = self.fault.sticky()?;
            let from = self.stopped_from.load(Ordering::Acquire);
            (from == u64::MAX || from <= record).then_some(fault)
        };
        self.progress.failure_at(record).or_else(of_stream)
    }
}

impl PendingEntry {
    /// The position that a wait was for, if it is not known yet how the work before it has ended. Gives it to each thread once: the stream of that
    /// position may itself wait for this one.
    fn unsettled(&mut self) -> Option<StreamPosition> {
        let PendingWork::Event {
            mark,
            is_settled: false,
            settling,
            ..
        } = &mut self.what
        else {
            return None;
        };
        let this = std::thread::current().id();
        if mark.is_settled() || settling.contains(&this) {
            return None;
        }
        settling.push(this);
        Some(mark.clone())
    }

    /// The stream of the position that a wait was for was asked how the work before it has ended.
    pub(super) fn set_settled(&mut self, position: &StreamPosition) {
        if let PendingWork::Event {
            mark, is_settled, ..
        } = &mut self.what
        {
            *is_settled |= mark == position;
        }
    }

    /// Tells the owner that the stream has begun the program, once.
    fn start(&mut self) {
        if let PendingWork::Program {
            owner,
            cookie,
            has_begun,
            ..
        } = &mut self.what
            && !std::mem::replace(has_begun, true)
        {
            owner.started(*cookie);
        }
    }

    /// Everything behind the entry was given up.
    pub(super) fn let_end(&mut self) {
        if let PendingWork::Program { ending, .. } = &mut self.what {
            *ending = Ending::MayEnd;
        }
    }

    /// Why a wait of that generation of the owner at that address ends without success, if this is one and the stream, which has counted to `done`,
    /// has not passed it. While an entry is pending, its owner's generation stays.
    pub(super) fn failure_in(
        &self,
        (owner, generation): (usize, u32),
        done: u64,
    ) -> Option<StreamFailure> {
        match &self.what {
            PendingWork::Program {
                owner: own,
                cookie,
                waits: true,
                ..
            } if self.done > done
                && Arc::as_ptr(own).addr() == owner
                && own.generation() == generation =>
            {
                own.expected_failure(*cookie)
            }
            _ => None,
        }
    }

    /// Everything behind the entry was given up, because its wait was to fail.
    pub(super) fn stopped_behind(&self) {
        if let PendingWork::Program {
            owner,
            cookie,
            waits: true,
            ..
        } = &self.what
        {
            owner.stopped_behind(*cookie);
        }
    }

    /// The stream has begun the entry. Ends its wait if its owner or the application wants that, or returns what must happen before.
    fn begin(&mut self, words: &StreamWords, aborted: bool) -> Option<Next> {
        self.start();
        let (owner, cookie, release_by, released, ending) = match &mut self.what {
            PendingWork::Program {
                owner,
                cookie,
                release_by,
                released,
                ending,
                ..
            } => (owner, cookie, release_by, released, ending),
            PendingWork::Event {
                by_kernel: true,
                given_up,
                was_notified,
                ..
            } => {
                if (aborted || *given_up) && !std::mem::replace(was_notified, true) {
                    words.note(STATUS_WORK);
                    words.release(self.done);
                }
                return None;
            }
            PendingWork::Event { .. }
            | PendingWork::Record(_)
            | PendingWork::Count
            | PendingWork::Kernel(_)
            | PendingWork::Launched { .. } => return None,
        };
        let release_by = release_by.as_mut()?;
        let ends = || !owner.ends_waits() && owner.released(*cookie);
        if let (Some(Released::Stored(substitute)), ReleaseMethod::Word(polled)) =
            (&*released, &*release_by)
        {
            if let Some(word) = word(&**owner, polled.at) {
                substitute.store_again(word, |found| polled.condition.satisfying_value(found));
            }
            return None;
        }
        if released.is_some() || !(aborted || ends()) {
            return None;
        }
        match *ending {
            Ending::Waits => {
                if let Some(failure) = owner.failure_of(*cookie, Outcome::Released) {
                    *ending = Ending::StopsBehind;
                    return Some(Next::GiveUpBehind(self.done, failure));
                }
            }
            Ending::StopsBehind => return None,
            Ending::MayEnd => {}
        }
        // The status comes before the end of the wait, so that kernels behind the wait see it.
        words.note(STATUS_WORK);
        *released = match release_by {
            ReleaseMethod::Word(polled) => word(&**owner, polled.at).map(|word| {
                Released::Stored(Substitute::store(word, |found| {
                    polled.condition.satisfying_value(found)
                }))
            }),
            ReleaseMethod::Kernel => {
                words.release(self.done);
                Some(Released::Notified)
            }
        };
        None
    }

    /// The outcome of an entry that the stream has finished.
    fn outcome(&self, words: &StreamWords) -> Outcome {
        let PendingWork::Program {
            released, ending, ..
        } = &self.what
        else {
            return Outcome::Done;
        };
        match (words.stop(), released) {
            (
                Some(Stop::Abandoned { from } | Stop::Malformed { from } | Stop::TimedOut { from }),
                _,
            ) if from <= self.done => Outcome::Discarded,
            _ if *ending == Ending::MayEnd => Outcome::Released,
            (_, Some(Released::Stored(_))) => Outcome::Released,
            // The condition may have held just before the kernel was notified.
            (_, Some(Released::Notified)) if words.was_released(self.done) => Outcome::Released,
            _ => Outcome::Done,
        }
    }

    /// Why the program did not end well, if the stream has executed it.
    fn failure(&self, outcome: Outcome) -> Option<StreamFailure> {
        match &self.what {
            PendingWork::Program { owner, cookie, .. } if outcome != Outcome::Discarded => {
                owner.failure_of(*cookie, outcome)
            }
            PendingWork::Event { mark, given_up, .. } => mark.known_failure().or_else(|| {
                (*given_up && !mark.is_reached()).then(|| "a wait for an event was given up".into())
            }),
            _ => None,
        }
    }

    fn finish(&mut self, outcome: Outcome, stream: &Reports<'_>) {
        match &mut self.what {
            PendingWork::Program {
                owner,
                cookie,
                release_by,
                released,
                failure_notifier,
                ..
            } => {
                // A later failure of the owner does not concern the stream.
                *failure_notifier = None;
                restore(&**owner, release_by.as_ref(), released.take());
                owner.finished(*cookie, outcome);
            }
            PendingWork::Record(record) => {
                let failure = stream.failure_before(self.done);
                match &failure {
                    None => stream.progress.passed_well(),
                    Some(failure) if stream.progress.failure_at(self.done).is_none() => {
                        stream.progress.poison(self.done, failure.clone());
                    }
                    Some(_) => {}
                }
                record.fire(failure.map(|failure| failure.report(stream.name)));
                if let Some(event) = record.sleepers() {
                    event.wake();
                }
            }
            PendingWork::Event { .. }
            | PendingWork::Count
            | PendingWork::Kernel(_)
            | PendingWork::Launched { .. } => {}
        }
    }

    /// Tells the owner that the stream will not execute the entry. [`PendingEntry::discard`] follows.
    pub(super) fn announce_discard(&self) {
        if let PendingWork::Program { owner, cookie, .. } = &self.what {
            owner.not_executed(*cookie);
        }
    }

    /// Tells the owner or the event that the stream will not execute the entry, for that reason. If the stream `was_at_it`, that is not known of a
    /// program.
    pub(super) fn discard(&mut self, reason: &Error, was_at_it: bool) {
        if was_at_it {
            self.start();
        }
        match &mut self.what {
            PendingWork::Program {
                owner,
                cookie,
                release_by,
                released,
                ..
            } => {
                let outcome = match was_at_it {
                    true => Outcome::Lost,
                    false => Outcome::Discarded,
                };
                restore(&**owner, release_by.as_ref(), released.take());
                owner.finished(*cookie, outcome);
            }
            PendingWork::Record(record) => record.fire(Some(reason.clone())),
            PendingWork::Kernel(kernel) if was_at_it => kernel.cell.end(ReplayEnd::Lost),
            PendingWork::Event { .. }
            | PendingWork::Count
            | PendingWork::Kernel(_)
            | PendingWork::Launched { .. } => {}
        }
    }

    /// The application gives a wait for another stream up: it ends when the stream reaches it, if a kernel waits.
    pub(super) fn give_up_event(&mut self) {
        if let PendingWork::Event { given_up, .. } = &mut self.what {
            *given_up = true;
        }
    }

    /// Wakes the threads that sleep until the event. Called after [`PendingEntry::discard`] of all entries, when the count says that it is over.
    pub(super) fn wake(&self) {
        if let PendingWork::Record(record) = &self.what
            && let Some(event) = record.sleepers()
        {
            event.wake();
        }
    }

    /// Drops its handles but those whose drop may block, which it returns.
    pub(super) fn into_deferred_drop(self) -> Option<DeferredDrop> {
        match self.what {
            PendingWork::Program {
                owner,
                failure_notifier,
                ..
            } => {
                drop(failure_notifier);
                owner.into_deferred_drop()
            }
            PendingWork::Count => None,
            what => Some(Box::new(what)),
        }
    }

    /// The mark that a wait for another stream is for.
    pub(super) fn awaited_mark(&self) -> Option<&StreamPosition> {
        match &self.what {
            PendingWork::Event { mark, .. } => Some(mark),
            _ => None,
        }
    }

    /// The owner of a program.
    pub(super) fn owner(&self) -> Option<&Arc<dyn Owner>> {
        match &self.what {
            PendingWork::Program { owner, .. } => Some(owner),
            PendingWork::Record(_)
            | PendingWork::Event { .. }
            | PendingWork::Count
            | PendingWork::Kernel(_)
            | PendingWork::Launched { .. } => None,
        }
    }
}
