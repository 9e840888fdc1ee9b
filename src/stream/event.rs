//! Events: marks in the work of a stream.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(feature = "cuda")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::backoff::{Backoff, deadline_after};
use super::current::forbid_on;
use super::fault::StreamFailure;
use super::lock::Lock;
use super::own_streams::{has_own_streams, look_at_own_streams, streams_without_thread};
use super::turns::StreamTurns;
use crate::{Error, Result, StateKind};

/// How far a stream has come. It outlives the stream, for events that do.
pub(crate) struct Progress {
    pub(crate) stream: u64,
    /// Positions of the stream's queue that are done with; of a stream that counts elsewhere, those of which this process knows.
    completed: AtomicU64,
    external: Option<Box<dyn ExternalProgress>>,
    poison: Poison,
    /// Of a stream without a thread.
    turns: OnceLock<StreamTurns>,
    #[cfg(feature = "cuda")]
    followers: Lock<Vec<DependentWait>>,
}

/// A stream whose work behind an entry waits for a position of another stream.
#[cfg(feature = "cuda")]
struct DependentWait {
    position: u64,
    stream: Weak<dyn Dependent>,
    entry: u64,
}

/// A stream that cannot skip what it has queued.
#[cfg(feature = "cuda")]
pub(crate) trait Dependent: Send + Sync {
    /// The entry waits for work that failed with this failure: gives up all behind it. Called within [`stopping`](super::stopping), and returns the
    /// handle, whose drop may block.
    fn stop_from(self: Arc<Self>, entry: u64, failure: StreamFailure);
}

/// The records of a stream behind work that was not done. There are almost never any; then asking costs a check of a flag.
#[derive(Default)]
struct Poison {
    any: AtomicBool,
    spans: Lock<Spans>,
}

#[derive(Default)]
struct Spans {
    /// Positions from first to last, in order.
    all: Vec<(u64, u64, StreamFailure)>,
    /// A record was passed well since the last one was added: the next one is apart.
    is_last_over: bool,
}

/// Spans that are kept apart.
const SPANS_MAX: usize = 64;

impl Poison {
    /// The failure of a record joins that of the record before it, if that is the same. Of `several`, only those join that follow upon each other: the
    /// stream may have passed records of which this process does not know yet.
    fn add(&self, (first, last): (u64, u64), failure: StreamFailure, several: bool) {
        let mut spans = self.spans.lock();
        let covers = |(from, to, _): &(u64, u64, StreamFailure)| *from <= first && last <= *to;
        if several && spans.all.iter().any(covers) {
            // Another thread has given them up, too.
            return;
        }
        let is_over = std::mem::replace(&mut spans.is_last_over, false);
        match spans.all.last_mut() {
            Some((_, end, known))
                if known.reason == failure.reason
                    && first > *end
                    && if several { first == *end + 1 } else { !is_over } =>
            {
                *end = last;
            }
            _ => spans.all.push((first, last, failure)),
        }
        if spans.all.len() > SPANS_MAX {
            // Records between the two were good, and now count as failed: the other way round stale data would pass for good.
            let (_, last, _) = spans.all.remove(1);
            spans.all[0].1 = spans.all[0].1.max(last);
        }
        // Release: pairs with the load in `of`.
        self.any.store(true, Ordering::Release);
    }

    fn passed_well(&self) {
        if self.any.load(Ordering::Relaxed) {
            self.spans.lock().is_last_over = true;
        }
    }

    fn of(&self, position: u64) -> Option<StreamFailure> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let spans = self.spans.lock();
        let span =
            (spans.all.iter()).find(|(first, last, _)| (*first..=*last).contains(&position))?;
        Some(span.2.clone())
    }
}

/// The position count of a stream that no thread of this process executes.
pub(crate) trait ExternalProgress: Send + Sync {
    /// Positions that are done with. Acquire order: a thread that sees the position sees what the work wrote.
    fn completed(&self) -> u64;

    /// The address, for devices, of the 32-bit word that counts, if there is one.
    #[cfg(feature = "cuda")]
    fn device_word(&self) -> Option<u64>;

    /// Makes this process find out how the work up to there has ended.
    fn settle(&self) {}

    /// Executes, in the calling thread, what the work before the position waits for on streams without a thread. True: something has changed.
    fn look(&self, position: u64) -> bool {
        let _ = position;
        false
    }

    /// Whether the work before the position may wait for a stream without a thread.
    fn needs_looks(&self, position: u64) -> bool {
        let _ = position;
        false
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

impl Progress {
    pub(super) fn new(stream: u64) -> Self {
        Self {
            stream,
            completed: AtomicU64::new(0),
            external: None,
            poison: Poison::default(),
            turns: OnceLock::new(),
            #[cfg(feature = "cuda")]
            followers: Lock::default(),
        }
    }

    /// That of a stream which counts elsewhere.
    #[cfg(feature = "cuda")]
    pub(crate) fn external(stream: u64, external: Box<dyn ExternalProgress>) -> Self {
        Self {
            external: Some(external),
            ..Self::new(stream)
        }
    }

    /// The address, for devices, of the word that counts, if there is one.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_word(&self) -> Option<u64> {
        self.external
            .as_ref()
            .and_then(|external| external.device_word())
    }

    /// The stream has no thread: threads that wait for it execute it with these.
    pub(super) fn set_turns(&self, turns: StreamTurns) {
        // Once, when the stream is made.
        let _ = self.turns.set(turns);
    }

    /// Everything before `position` is done.
    pub(crate) fn complete(&self, position: u64) {
        // Release: a thread that sees the position sees what the work wrote. Pairs with `reached`.
        self.completed.store(position, Ordering::Release);
    }

    /// The work before the record at `position` was not done.
    pub(crate) fn poison(&self, position: u64, failure: StreamFailure) {
        self.poison.add((position, position), failure, false);
    }

    /// The stream passes a record whose work was done.
    pub(crate) fn passed_well(&self) {
        self.poison.passed_well();
    }

    /// The work before the records at these positions, first to last, was or will not be done.
    #[cfg(feature = "cuda")]
    pub(crate) fn poison_all(&self, span: (u64, u64), failure: StreamFailure) {
        self.poison.add(span, failure, true);
    }

    /// Why the work before the record at `position` was not done.
    pub(crate) fn failure_at(&self, position: u64) -> Option<StreamFailure> {
        self.poison.of(position)
    }

    /// That stream waits for `position` before the work behind `entry`.
    #[cfg(feature = "cuda")]
    pub(crate) fn follow(&self, position: u64, stream: Weak<dyn Dependent>, entry: u64) {
        let mut followers = self.followers.lock();
        followers.retain(|follower| !self.is_settled(follower.position));
        followers.push(DependentWait {
            position,
            stream,
            entry,
        });
    }

    /// That stream was not given its work from that entry on.
    #[cfg(feature = "cuda")]
    pub(crate) fn leave(&self, stream: &Weak<dyn Dependent>, from: u64) {
        let is_left = |it: &DependentWait| it.entry >= from && it.stream.ptr_eq(stream);
        self.followers.lock().retain(|follower| !is_left(follower));
    }

    /// Gives up the work of other streams that waits for `position` or one behind it. Called within [`stopping`](super::stopping).
    #[cfg(feature = "cuda")]
    pub(crate) fn fail_dependents(&self, position: u64) {
        let behind: Vec<_> = (self.followers.lock().iter())
            .filter(|follower| follower.position >= position)
            .map(|follower| (follower.position, follower.stream.clone(), follower.entry))
            .collect();
        for (position, stream, entry) in behind {
            if let (Some(stream), Some(failure)) = (stream.upgrade(), self.failure_at(position)) {
                stream.stop_from(entry, waited_for(failure));
            }
        }
    }

    /// Whether this process knows how the work before `position` has ended.
    pub(crate) fn is_settled(&self, position: u64) -> bool {
        // Acquire: pairs with `complete`.
        self.completed.load(Ordering::Acquire) >= position
    }

    /// Makes this process find out how the work before `position`, which is done, has ended.
    pub(crate) fn settle(&self, position: u64) {
        if let Some(external) = &self.external
            && !self.is_settled(position)
        {
            external.settle();
        }
    }

    pub(crate) fn reached(&self, position: u64) -> bool {
        // Acquire: pairs with `complete`.
        self.completed.load(Ordering::Acquire) >= position
            || self
                .external
                .as_ref()
                .is_some_and(|external| external.completed() >= position)
    }
}

/// A moment in the work of a stream: everything before a position.
#[derive(Debug, Clone)]
pub(crate) struct StreamPosition {
    pub(crate) progress: Arc<Progress>,
    pub(crate) position: u64,
}

impl PartialEq for StreamPosition {
    fn eq(&self, other: &StreamPosition) -> bool {
        Arc::ptr_eq(&self.progress, &other.progress) && self.position == other.position
    }
}

impl StreamPosition {
    pub(crate) fn is_reached(&self) -> bool {
        self.progress.reached(self.position)
    }

    /// Looks at the stream, if it has no thread, or at the streams without a thread that its work before the mark waits for. True: something has changed.
    pub(crate) fn look(&self) -> bool {
        match (self.progress.turns.get(), &self.progress.external) {
            (Some(turns), _) => turns.take(),
            (None, Some(external)) if streams_without_thread() => external.look(self.position),
            _ => false,
        }
    }

    /// Whether the work before the mark is executed by threads that wait for it, or may wait for such work.
    pub(super) fn needs_looks(&self) -> bool {
        match (self.progress.turns.get(), &self.progress.external) {
            (Some(_), _) => true,
            (None, Some(external)) => {
                streams_without_thread() && external.needs_looks(self.position)
            }
            _ => false,
        }
    }

    /// As [`Progress::is_settled`].
    #[cfg(feature = "cuda")]
    pub(crate) fn is_settled(&self) -> bool {
        self.progress.is_settled(self.position)
    }

    /// Why the work before the mark is known not to be done.
    #[cfg(feature = "cuda")]
    pub(crate) fn known_failure(&self) -> Option<StreamFailure> {
        self.progress.failure_at(self.position).map(waited_for)
    }

    /// Why the work before the mark was not done, once it is reached.
    pub(crate) fn failure(&self) -> Option<StreamFailure> {
        self.progress.settle(self.position);
        self.progress.failure_at(self.position).map(waited_for)
    }
}

/// The failure of work that has waited for an event.
fn waited_for(failure: StreamFailure) -> StreamFailure {
    StreamFailure {
        reason: format!(
            "waited for an event behind work that failed: {}",
            failure.reason
        ),
        ..failure
    }
}

/// A mark that a stream passes, to wait for on the host or in other streams.
///
/// [`Executor::record`](super::Executor::record) makes it stand for the work queued so far, and may do so again and again. An event
/// that was never recorded counts as passed. Clones are handles of one and the same event, and it goes on working after the
/// streams that it was recorded on are gone.
#[derive(Clone)]
pub struct Event {
    inner: Arc<EventShared>,
}

struct EventShared {
    blocks: bool,
    timed: bool,
    state: Mutex<EventState>,
    /// Told after a record of a blocking event was passed.
    passed: Condvar,
}

#[derive(Default)]
struct EventState {
    /// Records begun; each has its number, from 1.
    records: u64,
    latest: Option<(u64, StreamPosition)>,
    fired: Option<Fired>,
    /// Tasks to be woken when a mark is reached.
    tasks: Vec<(StreamPosition, Waker)>,
}

/// What the stream noted when it passed a record.
#[derive(Clone)]
struct Fired {
    record: u64,
    at: Option<Instant>,
    /// Why the work before the record was not done.
    failure: Option<Error>,
}

/// One record of an event on its way through a stream's queue.
pub(crate) struct Record {
    event: Event,
    number: u64,
}

impl Record {
    /// Lets the event stand for this record, which is at `mark`, unless it already stands for a later one.
    pub(crate) fn announce(event: &Event, number: u64, mark: StreamPosition) {
        let mut state = event.state();
        if state.latest.as_ref().is_none_or(|latest| latest.0 < number) {
            state.latest = Some((number, mark));
        }
    }

    /// Notes the time, and the reason if the work before it was not done. The event has passed when the stream's progress says so.
    pub(crate) fn fire(&self, failure: Option<Error>) {
        let at = self.event.inner.timed.then(Instant::now);
        let mut state = self.event.state();
        if state
            .fired
            .as_ref()
            .is_none_or(|fired| fired.record < self.number)
        {
            state.fired = Some(Fired {
                record: self.number,
                at,
                failure,
            });
        }
    }

    /// The event if threads may sleep on it, or tasks wait for it. They are to be woken with [`Event::wake`] and [`Event::wake_tasks`] after the stream's
    /// progress has passed the record.
    pub(crate) fn sleepers(&self) -> Option<Event> {
        self.event.inner.blocks.then(|| self.event.clone())
    }
}

impl Default for Event {
    fn default() -> Self {
        Self::new()
    }
}

impl Event {
    /// An event whose [`Event::synchronize`] spins, with back-off: the lowest latency.
    #[must_use]
    pub fn new() -> Self {
        Self::build(false, true)
    }

    /// An event whose [`Event::synchronize`] sleeps until the stream wakes it: the lowest use of the CPU. Corresponds
    /// to `cudaEventBlockingSync`.
    #[must_use]
    pub fn blocking() -> Self {
        Self::build(true, true)
    }

    /// An event of the same kind without timing: recording it reads no clock, and [`Event::elapsed`] fails for it. Corresponds
    /// to `cudaEventDisableTiming`.
    #[must_use]
    pub fn without_timing(&self) -> Self {
        Self::build(self.inner.blocks, false)
    }

    fn build(blocks: bool, timed: bool) -> Self {
        Self {
            inner: Arc::new(EventShared {
                blocks,
                timed,
                state: Mutex::default(),
                passed: Condvar::new(),
            }),
        }
    }

    /// True if the work that the event stands for is done, or if the event was never recorded.
    ///
    /// # Errors
    /// [`Error::Asynchronous`] when that work was discarded because its stream failed or was aborted.
    pub fn query(&self) -> Result<bool> {
        match self.mark() {
            Some(mark) if !mark.is_reached() && !is_reached_by_look(&mark) => Ok(false),
            Some(mark) => self.verdict(&mark).map(|()| true),
            None => Ok(true),
        }
    }

    /// Waits until the work that the event stands for at this moment is done. Returns at once if the event was never recorded.
    ///
    /// # Errors
    /// [`Error::Timeout`] when that takes longer than `timeout`. [`Error::Asynchronous`] when the work was discarded because its
    /// stream failed or was aborted. [`Error::State`] when called by work of the stream before the record, which would wait for
    /// itself.
    pub fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let Some(mark) = self.mark() else {
            return Ok(());
        };
        if mark.is_reached() {
            return self.verdict(&mark);
        }
        forbid_on(mark.progress.stream, "event synchronize")?;
        let deadline = deadline_after(timeout);
        // A thread that sleeps executes nothing.
        let passed = if self.inner.blocks && !mark.needs_looks() && !has_own_streams() {
            self.sleep(&mark, deadline)
        } else {
            spin(&mark, deadline)
        };
        if passed {
            return self.verdict(&mark);
        }
        Err(Error::Timeout {
            operation: "event synchronize",
            timeout: timeout.unwrap_or(Duration::MAX),
        })
    }

    /// The time between the moments when the streams passed this event and `end`.
    ///
    /// # Errors
    /// [`Error::State`] if one of the two was never recorded, has not passed yet or has no timing, or if `end` passed first.
    pub fn elapsed(&self, end: &Event) -> Result<Duration> {
        let start = self.passed_at("the start event")?;
        let end = end.passed_at("the end event")?;
        end.checked_duration_since(start).ok_or_else(|| {
            no_time(
                StateKind::OutOfOrder,
                "the end event passed before the start event".to_owned(),
            )
        })
    }

    /// How the record at `mark`, which is reached, came out.
    pub(super) fn verdict(&self, mark: &StreamPosition) -> Result<()> {
        // Without the lock of the state, which the stream takes to tell.
        mark.progress.settle(mark.position);
        if let Some(verdict) = self.state().verdict(mark) {
            return verdict;
        }
        // The event was recorded again since.
        let failure = mark.progress.failure_at(mark.position);
        failure.map_or(Ok(()), |failure| Err(failure.report("its stream")))
    }

    fn passed_at(&self, which: &str) -> Result<Instant> {
        if !self.inner.timed {
            return Err(no_time(
                StateKind::WrongKind,
                format!("{which} was created without timing"),
            ));
        }
        let state = self.state();
        let Some((record, mark)) = &state.latest else {
            return Err(no_time(
                StateKind::NotRecorded,
                format!("{which} was never recorded"),
            ));
        };
        match &state.fired {
            Some(Fired {
                record: fired,
                at: Some(at),
                ..
            }) if fired == record && mark.is_reached() => Ok(*at),
            _ => Err(no_time(
                StateKind::NotReady,
                format!("{which} has not passed yet"),
            )),
        }
    }

    /// An event that stands for that mark. No stream wakes those who wait for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn at(mark: StreamPosition) -> Event {
        let event = Event::build(false, false);
        event.state().latest = Some((0, mark));
        event
    }

    /// What the event stands for now.
    pub(crate) fn mark(&self) -> Option<StreamPosition> {
        self.state().latest.as_ref().map(|(_, mark)| mark.clone())
    }

    /// The record that goes into the queue, and its number for [`Record::announce`].
    pub(crate) fn begin_record(&self) -> (Record, u64) {
        let mut state = self.state();
        state.records += 1;
        let number = state.records;
        let event = self.clone();
        (Record { event, number }, number)
    }

    /// Wakes the threads that sleep in [`Event::synchronize`].
    pub(crate) fn wake(&self) {
        // With the lock taken once, no thread is between a look at the mark and going to sleep.
        drop(self.state());
        self.inner.passed.notify_all();
    }

    /// Wakes the tasks whose marks are reached. This calls code of other libraries, so the caller has no lock.
    pub(crate) fn wake_tasks(&self) {
        let woken: Vec<_> = (self.state().tasks)
            .extract_if(.., |(mark, _)| mark.is_reached())
            .collect();
        for (_, waker) in woken {
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Whether the mark is reached. If not, the task is woken when it is.
    pub(super) fn wake_at(&self, mark: &StreamPosition, waker: &Waker) -> bool {
        if mark.is_reached() {
            return true;
        }
        let mut state = self.state();
        // Under the lock, which `wake_tasks` takes after the mark is reached.
        if mark.is_reached() {
            return true;
        }
        let is_it = |(at, known): &(StreamPosition, Waker)| at == mark && known.will_wake(waker);
        if !state.tasks.iter().any(is_it) {
            state.tasks.push((mark.clone(), waker.clone()));
        }
        false
    }

    /// Fails unless streams wake those who wait for the event.
    pub(super) fn check_blocking(&self, operation: &'static str) -> Result<()> {
        if self.inner.blocks {
            return Ok(());
        }
        let reason = "its waiters spin; one that is made by Event::blocking wakes them";
        Err(Error::state(
            StateKind::WrongKind,
            operation,
            reason.to_owned(),
        ))
    }

    fn sleep(&self, mark: &StreamPosition, deadline: Option<Instant>) -> bool {
        let mut state = self.state();
        while !mark.is_reached() {
            state = match deadline {
                None => self
                    .inner
                    .passed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        // It may have come in time, and this thread got no processor since it looked.
                        return mark.is_reached();
                    }
                    let waited = self.inner.passed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, EventState> {
        self.inner
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Executes what this thread has to execute of streams without a thread. Whether the mark is reached then.
fn is_reached_by_look(mark: &StreamPosition) -> bool {
    (mark.look() | look_at_own_streams()) && mark.is_reached()
}

fn spin(mark: &StreamPosition, deadline: Option<Instant>) -> bool {
    let mut backoff = match mark.needs_looks() || has_own_streams() {
        true => Backoff::of_executing(),
        false => Backoff::new(),
    };
    while !mark.is_reached() {
        if mark.look() | look_at_own_streams() {
            backoff.reset();
            if deadline.is_none_or(|deadline| Instant::now() < deadline) {
                continue;
            }
        }
        if !backoff.pause_until(deadline) {
            return mark.is_reached();
        }
    }
    true
}

impl EventState {
    /// How the record at `mark` came out, if it is the latest one and has passed.
    fn verdict(&self, mark: &StreamPosition) -> Option<Result<()>> {
        let (Some((record, latest)), Some(fired)) = (&self.latest, &self.fired) else {
            return None;
        };
        let is_it = latest.position == mark.position
            && Arc::ptr_eq(&latest.progress, &mark.progress)
            && fired.record == *record;
        is_it.then(|| fired.failure.clone().map_or(Ok(()), Err))
    }
}

fn no_time(kind: StateKind, reason: String) -> Error {
    Error::state(kind, "event elapsed", reason)
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("blocks", &self.inner.blocks)
            .field("timed", &self.inner.timed)
            .field("latest", &self.mark())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A record at `position` of a stream that is played by the test.
    fn record(event: &Event, progress: &Arc<Progress>, position: u64) -> Record {
        let (record, number) = event.begin_record();
        let mark = StreamPosition {
            progress: Arc::clone(progress),
            position,
        };
        Record::announce(event, number, mark);
        record
    }

    #[test]
    fn a_record_between_two_failures_of_the_same_reason_is_good() {
        let failure = || StreamFailure::from("it was aborted");
        let progress = Progress::new(1);
        progress.poison(1, failure());
        progress.poison(3, failure());
        progress.passed_well();
        progress.poison(7, failure());
        let failed: Vec<u64> = (0..9)
            .filter(|at| progress.failure_at(*at).is_some())
            .collect();
        assert_eq!(failed, [1, 2, 3, 7]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn spans_of_failed_records_join_only_if_nothing_is_between_them() {
        let failure = || StreamFailure::from("it was aborted");
        let progress = Progress::new(1);
        progress.poison_all((1, 3), failure());
        progress.poison_all((4, 5), failure());
        // The stream has passed a record of which nobody has told it yet.
        progress.poison_all((7, 8), failure());
        assert!(progress.failure_at(5).is_some() && progress.failure_at(6).is_none());
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn span_that_is_told_again_takes_no_place() {
        let progress = Progress::new(1);
        for _ in 0..SPANS_MAX {
            // Two threads that stop endpoints may both come to a stream.
            for position in [1, 3] {
                progress.poison_all((position, position), "it was aborted".into());
            }
        }
        let failed: Vec<u64> = (0..5)
            .filter(|at| progress.failure_at(*at).is_some())
            .collect();
        assert_eq!(failed, [1, 3]);
    }

    #[test]
    fn never_recorded_is_passed() {
        let event = Event::new();
        assert_eq!(event.query(), Ok(true));
        assert_eq!(event.synchronize(Some(Duration::ZERO)), Ok(()));
        assert!(event.mark().is_none());
    }

    #[test]
    fn the_latest_record_counts_and_a_late_older_one_does_not() {
        let (slow, quick) = (Arc::new(Progress::new(1)), Arc::new(Progress::new(2)));
        let event = Event::new();
        let older = record(&event, &slow, 1);
        let captured = event.mark().unwrap();
        let newer = record(&event, &quick, 1);
        newer.fire(None);
        quick.complete(1);
        assert_eq!(event.query(), Ok(true));
        assert!(
            !captured.is_reached(),
            "who waits for the older one goes on waiting"
        );
        older.fire(Some(Error::Asynchronous {
            stream: "slow".into(),
            reason: "x".into(),
            work: None,
        }));
        slow.complete(1);
        assert!(captured.is_reached());
        assert_eq!(
            event.query(),
            Ok(true),
            "the older one's failure is not this record's"
        );
    }

    #[test]
    fn announcements_out_of_order() {
        let progress = Arc::new(Progress::new(1));
        let event = Event::new();
        let numbers = [event.begin_record().1, event.begin_record().1];
        for (number, position) in [(numbers[1], 2), (numbers[0], 1)] {
            let progress = Arc::clone(&progress);
            Record::announce(&event, number, StreamPosition { progress, position });
        }
        assert_eq!(event.mark().unwrap().position, 2);
    }

    #[test]
    fn elapsed_needs_two_passed_records_with_time() {
        let progress = Arc::new(Progress::new(1));
        let (start, end) = (Event::new(), Event::blocking());
        let reason = |result: Result<Duration>| match result {
            Err(Error::State { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            reason(start.elapsed(&end)),
            "the start event was never recorded"
        );
        let first = record(&start, &progress, 1);
        assert_eq!(
            reason(start.elapsed(&end)),
            "the start event has not passed yet"
        );
        first.fire(None);
        progress.complete(1);
        assert_eq!(
            reason(start.elapsed(&end)),
            "the end event was never recorded"
        );
        let second = record(&end, &progress, 2);
        std::thread::sleep(Duration::from_millis(1));
        second.fire(None);
        assert_eq!(
            reason(start.elapsed(&end)),
            "the end event has not passed yet"
        );
        progress.complete(2);
        assert!(start.elapsed(&end).unwrap() >= Duration::from_millis(1));
        assert_eq!(
            reason(end.elapsed(&start)),
            "the end event passed before the start event"
        );
        let untimed = end.without_timing();
        record(&untimed, &progress, 2).fire(None);
        assert_eq!(
            reason(start.elapsed(&untimed)),
            "the end event was created without timing"
        );
        assert!(untimed.inner.blocks, "the kind stays");
    }

    /// Simulates a waiting thread that gets no processor for `time` after its first look, while the work is done.
    struct Preempts {
        looks: AtomicU64,
        time: Duration,
    }

    impl ExternalProgress for Preempts {
        fn completed(&self) -> u64 {
            // The first look is before the wait.
            match self.looks.fetch_add(1, Ordering::Relaxed) {
                0 => 0,
                1 => {
                    std::thread::sleep(self.time);
                    0
                }
                _ => 1,
            }
        }

        #[cfg(feature = "cuda")]
        fn device_word(&self) -> Option<u64> {
            None
        }
    }

    #[test]
    fn a_late_look_finds_what_came_before_the_deadline() {
        let timeout = Duration::from_millis(1);
        for event in [Event::new(), Event::blocking()] {
            let preempts = Preempts {
                looks: AtomicU64::new(0),
                time: 3 * timeout,
            };
            let progress = Arc::new(Progress {
                external: Some(Box::new(preempts)),
                ..Progress::new(1)
            });
            record(&event, &progress, 1).fire(None);
            assert_eq!(event.synchronize(Some(timeout)), Ok(()));
        }
    }

    #[test]
    fn a_sleeper_is_woken_and_a_deadline_ends_both_kinds_of_wait() {
        for event in [Event::new(), Event::blocking()] {
            let progress = Arc::new(Progress::new(1));
            let record = record(&event, &progress, 1);
            let timeout = Duration::from_millis(3);
            let begin = Instant::now();
            assert!(matches!(
                event.synchronize(Some(timeout)),
                Err(Error::Timeout { timeout: t, .. }) if t == timeout
            ));
            assert!(begin.elapsed() >= timeout);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(3));
                    record.fire(None);
                    progress.complete(1);
                    if let Some(sleepers) = record.sleepers() {
                        sleepers.wake();
                    }
                });
                assert_eq!(event.synchronize(None), Ok(()));
            });
            assert_eq!(event.query(), Ok(true));
        }
    }
}
