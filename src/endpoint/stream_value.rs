//! Words in memory, on streams: stores, and waits. Also of 64 bits, for equality, and in memory of a GPU.
//!
//! The polls of programs are of 32 bits, because those of the devices' queues are, and a wait by memory operations is ended by a store of this process to the
//! word. So these waits have other means: on a stream of the host, the thread that executes it looks at the word; on a CUDA stream a kernel does, which has its own
//! time limit and reaches words of the GPU's memory.
#![allow(unsafe_code)] // promises that memory stays

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Ticket;
use super::value::{
    Condition, ValueWait, check_registered, value_wait, value_write, value_write_of, wait_until,
};
use super::watchdog::watchdog;
use crate::bytecode::{Program, Role, TargetId, Targets};
use crate::region::Region;
use crate::stream::{DeferredDrop, Executor, Outcome, Owner, StreamFailure};
use crate::{Error, Result, StateKind};
#[cfg(feature = "cuda")]
use crate::{
    endpoint::replay::word::{WordWait, replay_store, replay_wait},
    endpoint::shared::timeout_ns,
    stream::ReplayStream,
};

/// A condition of a 64-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition64 {
    /// The word minus this value is not negative, as a signed 64-bit number.
    GreaterOrEqual(u64),
    /// The word has a bit of this value.
    And(u64),
    /// The word lacks a bit that this value lacks.
    Nor(u64),
    /// The word is this value.
    Equal(u64),
}

impl Condition64 {
    fn holds(self, word: u64) -> bool {
        match self {
            Condition64::GreaterOrEqual(value) => word.wrapping_sub(value).cast_signed() >= 0,
            Condition64::And(value) => word & value != 0,
            Condition64::Nor(value) => !(word | value) != 0,
            Condition64::Equal(value) => word == value,
        }
    }
}

/// What a wait looks at.
#[derive(Debug, Clone, Copy)]
enum AnyCondition {
    Narrow(Condition),
    Wide(Condition64),
}

impl AnyCondition {
    fn holds(self, region: &Region, offset: u64) -> Result<bool> {
        Ok(match self {
            AnyCondition::Narrow(condition) => condition.holds(region.load_u32(offset)?),
            AnyCondition::Wide(condition) => condition.holds(region.load_u64(offset)?),
        })
    }

    #[cfg(feature = "cuda")]
    fn of_kernel(self, timeout: Option<Duration>) -> WordWait {
        // `enum dbl_replay_condition`
        let (condition, value, is_wide) = match self {
            AnyCondition::Narrow(condition) => {
                let (condition, value) = match condition {
                    Condition::GreaterOrEqual(value) => (0, value),
                    Condition::Equal(value) => (1, value),
                    Condition::And(value) => (2, value),
                    Condition::Nor(value) => (3, value),
                };
                (condition, u64::from(value), false)
            }
            AnyCondition::Wide(condition) => {
                let (condition, value) = match condition {
                    Condition64::GreaterOrEqual(value) => (0, value),
                    Condition64::Equal(value) => (1, value),
                    Condition64::And(value) => (2, value),
                    Condition64::Nor(value) => (3, value),
                };
                (condition, value, true)
            }
        };
        WordWait {
            condition,
            value,
            step: 0,
            is_wide,
            timeout_ns: timeout_ns(timeout),
        }
    }
}

/// Makes work that is queued on `stream` later wait until the 32-bit word at `offset` of `region` meets `condition`, for
/// at most `timeout`; `None` means no timeout. Once it is met, everything that was stored before the word is visible to
/// the stream.
///
/// # Errors
/// [`Error::OutOfBounds`], [`Error::Alignment`], [`Error::State`] for a region that is deregistered or in memory of a GPU, unless the stream is one of that
/// GPU: then a kernel waits, as for [`stream_wait_value64`](crate::stream_wait_value64); and those of the stream.
pub fn stream_wait_value32(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    condition: Condition,
    timeout: Option<Duration>,
) -> Result<Ticket> {
    let queued = value_wait(region, offset, condition, timeout).and_then(|(program, wait)| {
        let ticket = Ticket::of_value(&wait);
        stream.submit_program(&program, wait, 0)?;
        Ok(ticket)
    });
    if queued.is_err()
        && (matches!(condition, Condition::Equal(_)) || is_by_kernel(stream, region)?)
    {
        return wait_any(
            stream,
            region,
            offset,
            AnyCondition::Narrow(condition),
            timeout,
        );
    }
    queued
}

/// Stores `value` into the 32-bit word at `offset` of `region`, after everything that was queued on `stream` before.
///
/// # Errors
/// [`Error::OutOfBounds`], [`Error::Alignment`], [`Error::State`] for a region that is deregistered, and what the stream refuses.
pub fn stream_write_value32(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    value: u32,
) -> Result<Ticket> {
    let queued = value_write(region, offset, value).and_then(|(program, write)| {
        let ticket = Ticket::of_value(&write);
        stream.submit_program(&program, write, 0)?;
        Ok(ticket)
    });
    #[cfg(feature = "cuda")]
    if queued.is_err()
        && let Some(stream) = by_kernel(stream, region)?
    {
        return replay_store(stream, (region, offset), value.into(), false).map(Ticket::of_replay);
    }
    queued
}

/// Makes work that is queued on `stream` later wait until the 64-bit word at `offset` of `region`, a multiple of 8, meets `condition`, for at most `timeout`;
/// `None` means no timeout, and on a CUDA stream an hour. Once it is met, everything that was stored before the word is visible to the stream.
///
/// On a CUDA stream the wait is a kernel of one thread; the region may be memory of its GPU. If its time limit passes, that is a fault of the stream, and the ticket has
/// failed. An abort of the stream ends it if the kernel is being executed; that is a fault of the stream, too.
///
/// # Errors
/// [`Error::OutOfBounds`], [`Error::Alignment`], [`Error::State`] for a region that is deregistered, memory of a GPU on a stream of the host, and a `TriggerStream`;
/// those of the stream.
pub fn stream_wait_value64(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    condition: Condition64,
    timeout: Option<Duration>,
) -> Result<Ticket> {
    wait_any(
        stream,
        region,
        offset,
        AnyCondition::Wide(condition),
        timeout,
    )
}

/// Makes work that is queued on `stream` later wait until the count at `offset` of `region`, a 64-bit word, has reached `first`. In a graph that the application
/// captures, each further launch waits until it has reached `step` more: `first + step * n` in the launch `n`, counted from 0.
///
/// # Errors
/// As [`stream_wait_value64`].
pub fn stream_wait_count64(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    (first, step): (u64, u64),
    timeout: Option<Duration>,
) -> Result<Ticket> {
    let condition = AnyCondition::Wide(Condition64::GreaterOrEqual(first));
    #[cfg(feature = "cuda")]
    if let Some(stream) = stream.replays() {
        let wait = WordWait {
            step,
            ..condition.of_kernel(timeout)
        };
        return replay_wait(stream, (region, offset), wait).map(Ticket::of_replay);
    }
    let _ = step;
    wait_any(stream, region, offset, condition, timeout)
}

/// Stores `value` into the 64-bit word at `offset` of `region`, a multiple of 8, after everything that was queued on `stream` before. The region may be memory of
/// the GPU of a CUDA stream.
///
/// # Errors
/// As [`stream_wait_value64`].
pub fn stream_write_value64(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    value: u64,
) -> Result<Ticket> {
    let queued = value_write_of(region, |program| {
        region.check_aligned("offset", offset, 8)?;
        program.store_qword(region.target().qword(offset)?, value)
    })
    .and_then(|(program, write)| {
        let ticket = Ticket::of_value(&write);
        stream.submit_program(&program, write, 0)?;
        Ok(ticket)
    });
    #[cfg(feature = "cuda")]
    if queued.is_err()
        && let Some(stream) = by_kernel(stream, region)?
    {
        return replay_store(stream, (region, offset), value, true).map(Ticket::of_replay);
    }
    queued
}

/// The counterpart of [`stream_wait_value64`] for the CPU: waits in the calling thread.
///
/// # Errors
/// [`Error::OutOfBounds`], [`Error::Alignment`], [`Error::Timeout`].
pub fn wait_value64(
    region: &Region,
    offset: u64,
    condition: Condition64,
    timeout: Option<Duration>,
) -> Result<()> {
    wait_until(
        || AnyCondition::Wide(condition).holds(region, offset),
        || region.domain().device().progress(),
        timeout,
    )
}

/// The stream, if a kernel of it is to do it: the application captures the stream, or the region is memory of a GPU.
#[cfg(feature = "cuda")]
fn by_kernel<'s>(
    stream: &'s dyn Executor,
    region: &Region,
) -> Result<Option<&'s dyn ReplayStream>> {
    let Some(stream) = stream.replays() else {
        return Ok(None);
    };
    let is_needed = region.check_host().is_err() || stream.capture()?.is_some();
    Ok(is_needed.then_some(stream))
}

/// Whether a kernel of the stream is to do what the stream cannot.
fn is_by_kernel(stream: &dyn Executor, region: &Region) -> Result<bool> {
    #[cfg(feature = "cuda")]
    return Ok(by_kernel(stream, region)?.is_some());
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (stream, region);
        Ok(false)
    }
}

fn wait_any(
    stream: &dyn Executor,
    region: &Region,
    offset: u64,
    condition: AnyCondition,
    timeout: Option<Duration>,
) -> Result<Ticket> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = stream.replays() {
        let wait = condition.of_kernel(timeout);
        return replay_wait(stream, (region, offset), wait).map(Ticket::of_replay);
    }
    if !stream.executes_on_host() {
        return Err(Error::state(
            StateKind::Unsupported,
            "stream value",
            "a trigger stream waits for words of 32 bits in host memory; use a CUDA stream",
        ));
    }
    watchdog()?;
    check_registered(region)?;
    // It is in bounds and aligned.
    condition.holds(region, offset)?;
    let wait = LookedWait::new(region, offset, condition, timeout)?;
    let mut program = Program::new(&wait.targets);
    program.poll_geq(
        wait.targets
            .get(wait.held)
            .map_or_else(|| Err(no_target()), |target| target.dword(0))?,
        1,
    )?;
    let ticket = Ticket::of_value(&wait.value);
    stream.submit_program(&program, Arc::new(wait), 0)?;
    Ok(ticket)
}

#[cold]
fn no_target() -> Error {
    Error::state(
        StateKind::NotFound,
        "stream value",
        "the word has no target",
    )
}

/// A wait on a stream of the host for a word that its thread looks at in each turn. The program polls a word of this wait, which the look sets.
struct LookedWait {
    value: Arc<ValueWait>,
    region: Region,
    offset: u64,
    condition: AnyCondition,
    targets: Targets,
    held: TargetId,
    holds: Box<AtomicU32>,
}

impl LookedWait {
    fn new(
        region: &Region,
        offset: u64,
        condition: AnyCondition,
        timeout: Option<Duration>,
    ) -> Result<LookedWait> {
        let mut targets = Targets::new();
        let held = targets.register("value", Role::Memory, 4).id();
        Ok(LookedWait {
            value: ValueWait::of_looked_wait(region, timeout),
            region: region.clone(),
            offset,
            condition,
            targets,
            held,
            holds: Box::new(AtomicU32::new(0)),
        })
    }

    /// Returns whether the condition holds.
    fn look(&self) -> bool {
        let holds = self.condition.holds(&self.region, self.offset);
        if holds == Ok(true) {
            // Release: the word was loaded with acquire, and the stream loads this one so.
            self.holds.store(1, Ordering::Release);
            return true;
        }
        false
    }
}

// SAFETY: the one target of the table is `holds`, which lives as long as the wait and is atomic to everyone.
unsafe impl Owner for LookedWait {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        (target == self.held).then(|| NonNull::from(&*self.holds).cast())
    }

    fn progress(&self) -> bool {
        self.look() | self.value.progress()
    }

    fn progress_in_look(&self) -> bool {
        self.look() | self.value.progress_in_look()
    }

    fn started(&self, cookie: u64) {
        self.value.started(cookie);
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        self.value.finished(cookie, outcome);
    }

    fn failure_of(&self, cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        self.value.failure_of(cookie, outcome)
    }

    fn give_up(&self, generation: u32) {
        self.value.give_up(generation);
    }

    fn released(&self, cookie: u64) -> bool {
        self.value.released(cookie)
    }

    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let own = self.region.into_deferred_drop();
        let value = Arc::into_inner(self.value).and_then(Owner::drop_nonblocking);
        let is_to_drop = own.is_some() || value.is_some();
        is_to_drop.then(|| Box::new((own, value)) as DeferredDrop)
    }
}
