//! Words of memory as signals on a stream: waiting for one, and storing one.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::bytecode::{Fence, Program, TargetId, Targets};
use crate::endpoint::clock::now_ns;
use crate::endpoint::shared::{EndpointShared, end_elsewhere, timeout_ns};
use crate::endpoint::watchdog::{Watched, watchdog};
use crate::endpoint::{Status, Ticket};
use crate::proxy::PollResult;
use crate::region::{Device, Region};
#[cfg(feature = "cuda")]
use crate::stream::may_have_seen;
use crate::stream::{
    Attachments, Backoff, DeferredDrop, Outcome, Owner, StreamFailure, Submission,
    look_at_own_streams,
};
use crate::{Cause, Error, Result, StateKind, WorkError};

/// The condition on a word that ends a wait, with CUDA's definitions (`cuStreamWaitValue32`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// The word minus this value is not negative, as a signed 32-bit number.
    GreaterOrEqual(u32),
    /// The word has a bit of this value.
    And(u32),
    /// The word lacks a bit that this value lacks.
    Nor(u32),
    /// The word is this value. Memory operations of a GPU do not end such a wait at its deadline, so on a CUDA stream a kernel waits, as for
    /// [`stream_wait_value64`](crate::stream_wait_value64). Not in a graph of a [`GraphBuilder`](https://docs.rs/doorbell/latest/doorbell/struct.GraphBuilder.html).
    Equal(u32),
}

impl Condition {
    pub(super) fn holds(self, word: u32) -> bool {
        match self {
            Condition::GreaterOrEqual(value) => word.wrapping_sub(value) as i32 >= 0,
            Condition::And(value) => word & value != 0,
            Condition::Nor(value) => !(word | value) != 0,
            Condition::Equal(value) => word == value,
        }
    }
}

/// The region behind a program that stores or polls one of its words. Tickets and the watchdog have only its state, so that they do not keep the region.
pub(crate) struct ValueWait {
    region: Region,
    is_store: bool,
    /// Of a wait: its word, as an offset in the region, and the condition.
    #[cfg(feature = "cuda")]
    awaited: Option<(u64, Condition)>,
    #[cfg(feature = "cuda")]
    queued: Instant,
    state: Arc<ValueState>,
    writer: Option<Writer>,
}

/// The endpoint whose peer writes the word. The wait ends with its failure, and counts as an operation of it on a stream.
struct Writer {
    /// `None` once it is being dropped.
    shared: Option<Arc<EndpointShared>>,
    is_entered: AtomicBool,
    /// Memory that the peer uses until it writes the word.
    held: Option<Region>,
}

impl Writer {
    fn leave(&self) {
        if let Some(shared) = &self.shared
            && self.is_entered.swap(false, Ordering::AcqRel)
        {
            shared.leave_stream();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The state of a program that stores or polls a value.
pub(crate) struct ValueState {
    state: AtomicU8,
    released: AtomicBool,
    /// Ended by the application, and not by its deadline.
    is_abandoned: AtomicBool,
    started_ns: AtomicU64,
    timeout_ns: u64,
    writer: Option<Weak<EndpointShared>>,
    /// The failure of the writer, by which the wait was released.
    failure: OnceLock<WorkError>,
}

const QUEUED: u8 = 0;
const STARTED: u8 = 1;
const DONE: u8 = 2;
const GIVEN_UP: u8 = 3;
const DISCARDED: u8 = 4;
/// Over, and it is not known whether its condition was met.
const UNPROVEN: u8 = 5;
/// The stream ended while it was at it: a store may have been executed.
const LOST: u8 = 6;

impl ValueWait {
    fn of_wait(
        region: &Region,
        word: (u64, Condition),
        timeout: Option<Duration>,
    ) -> Arc<ValueWait> {
        ValueWait::new(region, Some(word), timeout, None)
    }

    /// Of a wait for a word that no program polls.
    pub(super) fn of_looked_wait(region: &Region, timeout: Option<Duration>) -> Arc<ValueWait> {
        let mut wait = ValueWait::new(region, None, timeout, None);
        if let Some(wait) = Arc::get_mut(&mut wait) {
            wait.is_store = false;
        }
        wait
    }

    fn of_store(region: &Region) -> Arc<ValueWait> {
        ValueWait::new(region, None, None, None)
    }

    fn new(
        region: &Region,
        awaited: Option<(u64, Condition)>,
        timeout: Option<Duration>,
        writer: Option<Writer>,
    ) -> Arc<ValueWait> {
        Arc::new(ValueWait {
            region: region.clone(),
            is_store: awaited.is_none(),
            #[cfg(feature = "cuda")]
            awaited,
            #[cfg(feature = "cuda")]
            queued: Instant::now(),
            state: Arc::new(ValueState {
                state: AtomicU8::new(QUEUED),
                released: AtomicBool::new(false),
                is_abandoned: AtomicBool::new(false),
                started_ns: AtomicU64::new(0),
                timeout_ns: timeout_ns(timeout),
                writer: (writer.as_ref())
                    .and_then(|it| it.shared.as_ref())
                    .map(Arc::downgrade),
                failure: OnceLock::new(),
            }),
            writer,
        })
    }

    pub(super) fn state(&self) -> Arc<ValueState> {
        Arc::clone(&self.state)
    }

    pub(super) fn device(&self) -> &Device {
        self.region.domain().device()
    }

    /// Whether the value that ended the wait may be one by which this process has ended the wait of another stream.
    #[cfg(feature = "cuda")]
    fn is_doubtful(&self) -> bool {
        let Some((offset, condition)) = self.awaited else {
            return false;
        };
        let address = self.region.start().addr().get() + offset as usize;
        let holds = || {
            let word = self.region.load_u32(offset);
            word.is_ok_and(|word| condition.holds(word))
        };
        may_have_seen(address, self.queued, holds)
    }

    #[cfg(not(feature = "cuda"))]
    fn is_doubtful(&self) -> bool {
        false
    }
}

impl ValueState {
    pub(super) fn status(&self) -> Status {
        match self.get() {
            QUEUED => Status::Queued,
            STARTED => Status::Rung,
            DONE => Status::Complete,
            GIVEN_UP => Status::Failed(self.release_failure()),
            UNPROVEN => Status::Unknown(value_error(Cause::Substitute)),
            LOST => Status::Unknown(value_error(Cause::Discarded)),
            _ => Status::Discarded,
        }
    }

    /// Why the wait was released, if the application did not do it.
    fn release_failure(&self) -> WorkError {
        let deadline = || value_error(Cause::Deadline(Duration::from_nanos(self.timeout_ns)));
        self.failure.get().copied().unwrap_or_else(deadline)
    }

    fn get(&self) -> u8 {
        self.state.load(Ordering::Acquire)
    }

    fn set(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }
}

impl Watched for ValueState {
    fn drop_reference(self: Arc<Self>) {}

    fn look(&self) -> PollResult {
        if self.get() != STARTED {
            return PollResult::Over;
        }
        let waited = now_ns().saturating_sub(self.started_ns.load(Ordering::Relaxed));
        let is_late = waited > self.timeout_ns;
        match self.writer.as_ref().map(Weak::upgrade) {
            Some(Some(writer)) => {
                if is_late {
                    writer.fail(None, Cause::Deadline(Duration::from_nanos(self.timeout_ns)));
                }
                // Not before the device has stopped: what is behind the wait is not to be transmitted.
                let failure = writer.released(0).then(|| writer.failure()).flatten();
                end_elsewhere(writer);
                let Some(failure) = failure else {
                    return PollResult::Waiting;
                };
                let _ = self.failure.set(failure);
            }
            // Nothing else holds it: this wait is over and has left it.
            Some(None) => return PollResult::Over,
            None if is_late => {}
            None => return PollResult::Waiting,
        }
        self.released.store(true, Ordering::Release);
        PollResult::Over
    }
}

// SAFETY: the one target of the region's table is the region's memory, which lives as long as `region`.
unsafe impl Owner for ValueWait {
    fn targets(&self) -> &Targets {
        self.region.targets()
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        (target == self.region.target().id()).then(|| self.region.start())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(self.region.attachments())
    }

    fn progress(&self) -> bool {
        self.region.domain().device().progress()
    }

    fn started(&self, _cookie: u64) {
        if self.is_store {
            // A GPU counts no beginning of a program without a wait: work that it does not count may come first.
            return;
        }
        self.state.started_ns.store(now_ns(), Ordering::Relaxed);
        self.state.set(STARTED);
        // The constructor has started the watchdog, and has reported its failure.
        if (self.state.timeout_ns != u64::MAX || self.writer.is_some())
            && let Ok(watchdog) = watchdog()
        {
            watchdog.register(Arc::downgrade(&self.state) as Weak<dyn Watched>);
        }
    }

    fn finished(&self, _cookie: u64, outcome: Outcome) {
        let state = match outcome {
            // Noted by `failure_of`, so that the ticket and the stream agree.
            Outcome::Done if self.state.get() == UNPROVEN => UNPROVEN,
            Outcome::Done => DONE,
            Outcome::Released if !self.state.is_abandoned.load(Ordering::Acquire) => GIVEN_UP,
            Outcome::Lost => LOST,
            Outcome::Released | Outcome::Discarded => DISCARDED,
        };
        self.state.set(state);
        let Some(writer) = &self.writer else { return };
        if state != DONE
            && let Some(shared) = &writer.shared
        {
            // The peer may still use what the wait is for, so nothing may go on as if it had not begun.
            let cause = match state {
                UNPROVEN => Cause::Substitute,
                _ => Cause::Discarded,
            };
            // Does nothing to one that has failed, which is why most waits are released.
            shared.fail(None, cause);
        }
        writer.leave();
    }

    fn failure_of(&self, _cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        if outcome == Outcome::Done && self.is_doubtful() {
            self.state.set(UNPROVEN);
            return Some(value_error(Cause::Substitute).into());
        }
        if self.state.is_abandoned.load(Ordering::Acquire) {
            return (outcome == Outcome::Released)
                .then(|| "a wait for a value was given up".into());
        }
        let failure = self.state.release_failure();
        (outcome == Outcome::Released).then(|| match self.state.failure.get() {
            Some(failure) => (*failure).into(),
            None => StreamFailure {
                reason: format!(
                    "a wait for a value did not end within {:?}",
                    Duration::from_nanos(self.state.timeout_ns)
                ),
                work: Some(failure),
            },
        })
    }

    fn give_up(&self, _generation: u32) {
        self.state.is_abandoned.store(true, Ordering::Release);
        self.state.released.store(true, Ordering::Release);
    }

    fn released(&self, _cookie: u64) -> bool {
        self.state.released.load(Ordering::Acquire)
    }

    /// The region is the application's, too, which may free the memory once the stream is synchronised and its own handles are dropped.
    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let region = self.region.into_deferred_drop();
        let Some(mut writer) = self.writer else {
            return region;
        };
        writer.leave();
        let held = writer.held.take().and_then(Region::into_deferred_drop);
        let last = writer.shared.take().and_then(Arc::into_inner);
        let is_to_drop = region.is_some() || held.is_some() || last.is_some();
        is_to_drop.then(|| Box::new((last, region, held)) as DeferredDrop)
    }
}

/// The failure of a wait for a value, which has no endpoint.
fn value_error(cause: Cause) -> WorkError {
    WorkError::new(0, None, cause)
}

pub(super) fn check_registered(region: &Region) -> Result<()> {
    // Streams of the host load and store.
    region.check_host()?;
    if region.is_registered() {
        return Ok(());
    }
    Err(Error::state(
        StateKind::Deregistered,
        "stream value",
        "the region is deregistered",
    ))
}

/// The program of [`stream_wait_value32`](crate::stream_wait_value32), and its owner.
pub(crate) fn value_wait(
    region: &Region,
    offset: u64,
    condition: Condition,
    timeout: Option<Duration>,
) -> Result<(Program, Arc<ValueWait>)> {
    watchdog()?;
    check_registered(region)?;
    region.check_aligned("offset", offset, 4)?;
    let at = region.target().dword(offset)?;
    let mut program = Program::new(region.targets());
    match condition {
        Condition::GreaterOrEqual(value) => program.poll_geq(at, value),
        Condition::And(value) => program.poll_and(at, value),
        Condition::Nor(value) => program.poll_nor(at, value),
        Condition::Equal(_) => {
            return Err(Error::state(
                StateKind::Unsupported,
                "stream value",
                "programs do not wait for equality; queue the wait on a stream by `stream_wait_value32`",
            ));
        }
    }?;
    Ok((
        program,
        ValueWait::of_wait(region, (offset, condition), timeout),
    ))
}

/// [`Endpoint::peer_value_wait`](crate::Endpoint) of the endpoint with that state.
pub(super) fn peer_value_wait(
    shared: Arc<EndpointShared>,
    (region, offset): (&Region, u64),
    value: u32,
    timeout: Option<Duration>,
    held: Option<Region>,
) -> Result<(Submission, Ticket)> {
    watchdog()?;
    check_registered(region)?;
    region.check_aligned("offset", offset, 4)?;
    let mut program = Program::new(region.targets());
    program.poll_geq(region.target().dword(offset)?, value)?;
    shared.check_alive()?;
    shared.enter_stream()?.stay();
    // The watchdog sees to it that the device of a failed endpoint is stopped, which ends the wait.
    shared.activate();
    let writer = Writer {
        shared: Some(shared),
        is_entered: AtomicBool::new(true),
        held,
    };
    let word = (offset, Condition::GreaterOrEqual(value));
    let wait = ValueWait::new(region, Some(word), timeout, Some(writer));
    let ticket = Ticket::of_value(&wait);
    let submission = Submission {
        program,
        owner: wait,
        cookie: 0,
    };
    Ok((submission, ticket))
}

/// The program of [`stream_write_value32`](crate::stream_write_value32), and its owner.
pub(crate) fn value_write(
    region: &Region,
    offset: u64,
    value: u32,
) -> Result<(Program, Arc<ValueWait>)> {
    value_write_of(region, |program| {
        region.check_aligned("offset", offset, 4)?;
        program.store_dword(region.target().dword(offset)?, value)
    })
}

/// A program that makes a store, behind everything before it, and its owner.
pub(super) fn value_write_of(
    region: &Region,
    store: impl FnOnce(&mut Program) -> Result<()>,
) -> Result<(Program, Arc<ValueWait>)> {
    check_registered(region)?;
    let mut program = Program::new(region.targets());
    program.fence(Fence::WORK_BEFORE_FLAG)?;
    store(&mut program)?;
    Ok((program, ValueWait::of_store(region)))
}

/// The counterpart of [`stream_wait_value32`](crate::stream_wait_value32) for the CPU: waits in the calling thread.
///
/// # Errors
/// [`Error::OutOfBounds`], [`Error::Alignment`], [`Error::Timeout`].
pub fn wait_value32(
    region: &Region,
    offset: u64,
    condition: Condition,
    timeout: Option<Duration>,
) -> Result<()> {
    wait_until(
        || Ok(condition.holds(region.load_u32(offset)?)),
        || region.domain().device().progress(),
        timeout,
    )
}

/// Waits until `holds` returns true. Calls `progress` meanwhile, for NICs that work only inside threads that wait.
pub(super) fn wait_until(
    mut holds: impl FnMut() -> Result<bool>,
    progress: impl Fn() -> bool,
    timeout: Option<Duration>,
) -> Result<()> {
    let started = Instant::now();
    let mut backoff = Backoff::new();
    while !holds()? {
        if let Some(timeout) = timeout.filter(|timeout| started.elapsed() > *timeout) {
            // It may have come in time, and this thread got no processor since it looked.
            if holds()? {
                break;
            }
            return Err(Error::Timeout {
                operation: "wait for a value",
                timeout,
            });
        }
        if progress() | look_at_own_streams() {
            backoff.reset();
        } else {
            backoff.pause();
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_late_look_finds_what_came_before_the_deadline() {
        let timeout = Duration::from_millis(1);
        for comes in [true, false] {
            let mut looks = 0;
            // After each look, the thread gets no processor for some time, in which the value comes, or does not.
            let look = || {
                looks += 1;
                std::thread::sleep(3 * timeout);
                Ok(comes && looks > 1)
            };
            let waited = wait_until(look, || false, Some(timeout));
            assert_eq!(waited.is_ok(), comes);
            assert_eq!(looks, 2);
        }
    }
    #[test]
    fn finished_programs_keep_a_region_only_with_its_last_handle() {
        let domain = crate::Device::open("softcx").unwrap().protection_domain();
        let region = Region::alloc(&domain, 64, crate::Access::ALL).unwrap();
        let store = || value_write(&region, 0, 1).unwrap().1;
        let wait = || {
            let condition = Condition::GreaterOrEqual(1);
            let timeout = Some(Duration::from_secs(60));
            value_wait(&region, 0, condition, timeout).unwrap().1
        };
        for of in [&store as &dyn Fn() -> _, &wait] {
            let program: Arc<ValueWait> = of();
            // From here on the watchdog may have a handle of the state.
            program.started(0);
            let ticket = Ticket::of_value(&program);
            let program: Arc<dyn Owner> = program;
            program.finished(0, Outcome::Done);
            assert!(Arc::clone(&program).into_deferred_drop().is_none());
            assert_eq!(region.handles(), 2);
            assert!(program.into_deferred_drop().is_none());
            assert_eq!(region.handles(), 1);
            assert_eq!(ticket.status(), Status::Complete);
        }
        // A stream that ended in the middle of it.
        let lost = store();
        lost.finished(0, Outcome::Lost);
        assert!(matches!(
            Ticket::of_value(&lost).status(),
            Status::Unknown(_)
        ));
        drop(lost);
        let last: Arc<dyn Owner> = store();
        drop(region);
        assert!(last.into_deferred_drop().is_some());
    }
}
