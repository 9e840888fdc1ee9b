//! The handle of a host stream.
#![allow(unsafe_code)] // implements an unsafe trait; there is no unsafe block in here

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::backoff::{Spin, deadline_after};
use super::current::forbid_on;
use super::event::{Record, StreamPosition};
use super::executor::check;
use super::fault::StreamFailure;
use super::host_closure::HostClosure;
use super::library_thread::begin_library_thread;
use super::own_streams::{self, look_at_own_streams};
use super::ring::{Claim, Ring};
use super::turns::StreamTurns;
use super::worker::{self, Item, Queued, StreamShared};
use super::{Backoff, Event, Executor, Owner, Submission};
use crate::bytecode::Program;
use crate::{Error, Result};

/// An in-order queue of kernels, programs, records and waits with a thread that executes them: the semantics of a CUDA stream on
/// a machine without one.
///
/// It is a handle; clones are handles of the same stream, usable from any thread. When the last one is dropped, what is queued is
/// still executed, as with `cudaStreamDestroy`, and then the thread ends. The drop does not wait for that.
///
/// - A full queue makes the caller wait, with back-off.
/// - A kernel that fails or panics, or a wait that ends without success, is a fault of the stream; see [`Executor`] for how that is reported. What is queued
///   behind it is not executed: operations end as [`Status::Discarded`](crate::Status::Discarded), events pass and report the failure, and a
///   stream that waits for such an event has a fault, too. [`Executor::take_fault`] takes the fault, and the stream can be used again.
///   [`HostStream::continue_on_error`] lets the stream go on instead.
/// - Streams that wait for each other's events in a circle wait until one of them is aborted, as in CUDA. Each wait of the host has a timeout.
/// - A kernel may queue work, on this stream too, but must not wait for this stream. `synchronize`, also of an event, and a call that finds the stream's queue full
///   fail with [`Error::State`]. Waits for tickets, completions or room do not know for which stream they wait, and end at their own time limit.
///
/// The thread stays awake some 120 us when it runs out of work, then sleeps; [`HostStream::set_spin`] changes that. Its waits back off, so more
/// streams than cores hinder one another little.
#[derive(Clone)]
pub struct HostStream {
    handle: Arc<StreamHandle>,
}

/// A new stream number, unique among streams of all kinds.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Shared by all handles, but not by the thread, so the thread learns when all handles are gone.
struct StreamHandle {
    shared: Arc<StreamShared>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        // Release: a thread that sees this also sees what was queued before.
        self.shared.closing.store(true, Ordering::Release);
        if self.shared.look.is_some() {
            own_streams::unregister(self.shared.id);
            let end = self.shared.ring.claimed();
            self.shared.aborted.fetch_max(end, Ordering::Release);
            self.shared.discard();
        } else {
            self.shared.parker.wake();
        }
    }
}

impl HostStream {
    /// Entries of a stream's queue unless told otherwise; as many as CUDA gives a stream.
    pub const CAPACITY_DEFAULT: usize = 1024;

    /// The most entries that a stream's queue may have.
    pub const CAPACITY_MAX: usize = 1 << 16;

    /// A stream with a queue of [`HostStream::CAPACITY_DEFAULT`] entries. Error messages contain the name, and the thread has it.
    ///
    /// # Errors
    /// [`Error::System`] when the thread cannot be started.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        Self::with_capacity(name, Self::CAPACITY_DEFAULT)
    }

    /// A stream with a queue of at least `capacity` entries, 1 to [`HostStream::CAPACITY_MAX`]: the next power of two. An entry takes some 450
    /// bytes.
    ///
    /// # Errors
    /// [`Error::Range`] for the capacity, [`Error::System`] when the thread cannot be started.
    pub fn with_capacity(name: impl Into<String>, capacity: usize) -> Result<Self> {
        check_capacity(capacity)?;
        let id = next_id();
        let (ring, consumer) = Ring::new(capacity.next_power_of_two());
        let shared = Arc::new(StreamShared::new(id, name.into(), ring));
        let thread_shared = Arc::clone(&shared);
        std::thread::Builder::new()
            // A NUL would end the name in the middle, which the standard library answers with a panic.
            .name(shared.name.replace('\0', " "))
            .spawn(move || {
                begin_library_thread();
                worker::run(&thread_shared, consumer);
            })
            .map_err(|error| Error::System {
                operation: "start the thread of a host stream",
                errno: error.raw_os_error().unwrap_or(0),
            })?;
        let handle = Arc::new(StreamHandle { shared });
        Ok(Self { handle })
    }

    /// A stream without a thread, with a queue of [`HostStream::CAPACITY_DEFAULT`] entries. Its work is executed by the threads that wait for it: for programs that wait for each
    /// operation, or that have a progress engine, and for more streams than cores. No core is handed from one thread to another then.
    ///
    /// Queueing executes nothing. These calls execute what can be executed at once, in order, and go on where the call before has stopped:
    ///
    /// - [`Executor::query`] and [`Executor::synchronize`] of the stream, and a call that finds its queue full;
    /// - [`Event::query`] and [`Event::synchronize`] of an event that is recorded on it, and a poll of [`Event::reached`], which has its task polled again at once;
    /// - the same calls for a stream that waits for an event of this one, also by way of other streams, and for an event that is recorded on such a stream;
    /// - waits for the tickets of messages, collective operations and operations of endpoints that are queued on it;
    /// - every call of the library that waits in a thread that has queued work on the stream, whatever it waits for, until that work is done. So a thread can drive several streams
    ///   that wait for each other.
    ///
    /// Kernels run inside these calls, so a thread should not hold a lock that a kernel needs while it waits. One thread at a time executes; others go on waiting.
    ///
    /// Nothing is executed while no thread makes such a call, and an operation that has not begun has no deadline yet. The deadline of a wait that has begun holds all the same.
    /// [`Event::notify`] writes when a thread executes the record. When the last handle is dropped, what is queued is discarded, as by [`HostStream::abort`].
    pub fn without_thread(name: impl Into<String>) -> HostStream {
        Self::looked_at(name.into(), Self::CAPACITY_DEFAULT)
    }

    /// As [`HostStream::without_thread`], with a queue as [`HostStream::with_capacity`] has it.
    ///
    /// # Errors
    /// [`Error::Range`] for the capacity.
    pub fn without_thread_with_capacity(name: impl Into<String>, capacity: usize) -> Result<Self> {
        check_capacity(capacity)?;
        Ok(Self::looked_at(name.into(), capacity))
    }

    fn looked_at(name: String, capacity: usize) -> HostStream {
        let (ring, consumer) = Ring::new(capacity.next_power_of_two());
        let shared = StreamShared::without_thread(next_id(), name, ring, consumer);
        let shared = Arc::new(shared);
        let weak: Weak<StreamShared> = Arc::downgrade(&shared);
        own_streams::register(shared.id, weak);
        shared.progress.set_turns(turns_of(&shared));
        let handle = Arc::new(StreamHandle { shared });
        Self { handle }
    }

    /// Whether a thread executes the stream. False for one of [`HostStream::without_thread`].
    #[must_use]
    pub fn has_thread(&self) -> bool {
        self.shared().look.is_none()
    }

    /// Entries of the queue. The one that is being executed counts.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared().ring.capacity()
    }

    /// Queues a kernel: a closure that the stream's thread runs in its turn. One that captures no more than 64 bytes, aligned to
    /// 8, costs no allocation.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn launch(&self, kernel: impl FnOnce() + Send + 'static) -> Result<()> {
        self.try_launch(move || {
            kernel();
            Ok(())
        })
    }

    /// Queues a kernel as [`HostStream::launch`] does, one that may fail. Its error is a fault of the stream, as a panic is, and
    /// [`Error::Asynchronous`](crate::Error::Asynchronous) has the error's text and its [`WorkError`](crate::WorkError), if it has one.
    ///
    /// # Errors
    /// As [`Executor::submit`]. The closure is then dropped without having run.
    pub fn try_launch(&self, kernel: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let kernel = HostClosure::new(kernel);
        self.push(|queued| queued.hold_kernel(kernel)).map(drop)
    }

    /// Discards what is queued at this moment, and breaks the wait that the stream is in. A kernel that runs is not stopped. Work
    /// queued later is executed.
    ///
    /// Operations that were discarded end as [`Status::Discarded`](crate::Status::Discarded). That includes the one in a wait, whose later ops are not
    /// executed.
    /// Events recorded before this call pass, and report that the work before them was discarded.
    pub fn abort(&self) {
        let shared = self.shared();
        shared
            .aborted
            .fetch_max(shared.ring.claimed(), Ordering::Release);
        shared.discard();
    }

    /// Whether the stream goes on behind work that failed. Off by default: what is queued behind a failure is discarded. A failure is then reported
    /// by one call, and what is behind it is executed with whatever data there is.
    pub fn continue_on_error(&self, continues: bool) {
        self.shared().fault.set_continues(continues);
    }

    /// How the stream's thread waits for work, and how [`Executor::synchronize`] waits for the thread, from now on. [`Spin::Auto`] unless set.
    pub fn set_spin(&self, spin: Spin) {
        self.shared().set_spin(spin);
    }

    fn shared(&self) -> &StreamShared {
        &self.handle.shared
    }

    fn check(&self) -> Result<()> {
        self.shared().fault.check(&self.shared().name)
    }

    /// Queues one entry that `write` makes. Returns its position.
    #[inline]
    fn push(&self, write: impl FnOnce(&mut Queued)) -> Result<u64> {
        let mut claim = self.claim(1)?;
        let position = claim.position();
        claim.put_with(write);
        drop(claim);
        self.tell();
        Ok(position)
    }

    /// Has what was queued executed.
    #[inline]
    fn tell(&self) {
        let shared = &self.handle.shared;
        if shared.look.is_some() {
            own_streams::note_own(shared);
        } else {
            shared.parker.wake();
        }
    }

    /// Waits for room for `count` entries.
    fn claim(&self, count: usize) -> Result<Claim<'_, Queued>> {
        self.check()?;
        match self.shared().ring.claim(count) {
            Some(claim) => Ok(claim),
            None => self.claim_when_free(count),
        }
    }

    #[cold]
    fn claim_when_free(&self, count: usize) -> Result<Claim<'_, Queued>> {
        forbid_on(self.shared().id, "queue on a full stream")?;
        let mut backoff = Backoff::new();
        loop {
            if self.shared().look_unless_own() | look_at_own_streams() {
                backoff.reset();
            } else {
                backoff.pause();
            }
            self.check()?;
            if let Some(claim) = self.shared().ring.claim(count) {
                return Ok(claim);
            }
        }
    }
}

fn check_capacity(capacity: usize) -> Result<()> {
    if (1..=HostStream::CAPACITY_MAX).contains(&capacity) {
        return Ok(());
    }
    Err(Error::Range {
        argument: "capacity",
        value: capacity as u64,
        min: 1,
        max: HostStream::CAPACITY_MAX as u64,
    })
}

fn turns_of(shared: &Arc<StreamShared>) -> StreamTurns {
    let stream: Weak<StreamShared> = Arc::downgrade(shared);
    StreamTurns::of(stream)
}

impl crate::stream::SealedExecutor for HostStream {}

// SAFETY: the stream's thread takes each entry of its queue once and in order (`ring`), interprets it, and calls `finished`
// (`worker`); nobody else executes.
unsafe impl Executor for HostStream {
    fn id(&self) -> u64 {
        self.shared().id
    }

    fn name(&self) -> &str {
        &self.shared().name
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        if batch.len() > self.capacity() {
            return Err(Error::Range {
                argument: "batch.len()",
                value: batch.len() as u64,
                min: 0,
                max: self.capacity() as u64,
            });
        }
        batch.iter().try_for_each(Submission::check)?;
        let mut claim = self.claim(batch.len())?;
        for Submission {
            program,
            owner,
            cookie,
        } in batch.drain(..)
        {
            claim.put_with(|queued| queued.hold_program(&program, owner, cookie));
        }
        drop(claim);
        self.tell();
        Ok(())
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        if let Err(error) = submission.check() {
            return Err((submission, error));
        }
        match self.claim(1) {
            Ok(mut claim) => {
                let Submission {
                    program,
                    owner,
                    cookie,
                } = submission;
                claim.put_with(|queued| queued.hold_program(&program, owner, cookie));
            }
            Err(error) => return Err((submission, error)),
        }
        self.tell();
        Ok(())
    }

    fn submit_program(&self, program: &Program, owner: Arc<dyn Owner>, cookie: u64) -> Result<()> {
        check(program, &*owner)?;
        let mut claim = self.claim(1)?;
        claim.put_with(|queued| queued.hold_program(program, owner, cookie));
        drop(claim);
        self.tell();
        Ok(())
    }

    fn executes_on_host(&self) -> bool {
        true
    }

    fn has_room(&self, entries: usize) -> Result<bool> {
        let shared = self.shared();
        let entries = entries.min(self.capacity() / 2) as u64;
        let end = shared.ring.claimed() + entries;
        let is_free = || {
            let first = end.saturating_sub(self.capacity() as u64);
            shared.progress.reached(first)
        };
        if is_free() {
            return Ok(true);
        }
        forbid_on(shared.id, "queue on a full stream")?;
        Ok((shared.look_unless_own() | look_at_own_streams()) && is_free())
    }

    fn is_executed_by_looks(&self) -> bool {
        !self.has_thread()
    }

    fn turns(&self) -> Option<StreamTurns> {
        (!self.has_thread()).then(|| turns_of(&self.handle.shared))
    }

    fn record(&self, event: &Event) -> Result<()> {
        let (record, number) = event.begin_record();
        let position = self.push(|queued| queued.hold(Item::Record(record)))?;
        let progress = Arc::clone(&self.shared().progress);
        let mark = StreamPosition {
            progress,
            position: position + 1,
        };
        Record::announce(event, number, mark);
        Ok(())
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        match event.mark() {
            // Also a mark of this very stream: the work before it may be discarded because of a failure that was reported meanwhile, and the
            // stream has not come to it yet.
            Some(mark) if !mark.is_reached() || mark.failure().is_some() => {
                self.push(|queued| queued.hold(Item::Wait(mark))).map(drop)
            }
            _ => self.check(),
        }
    }

    fn take_fault(&self) -> Option<Error> {
        let shared = self.shared();
        // Before the fault goes, so that nothing is executed that was queued behind it. Nothing is queued while it is there.
        let mut discards = false;
        let failure = shared.fault.take(|failure| {
            discards = true;
            let end = shared.ring.claimed();
            *shared.taken.lock() = Some((end, failure.clone()));
            shared.aborted.fetch_max(end, Ordering::Release);
        });
        if discards {
            shared.discard();
        }
        Some(failure?.report(&shared.name))
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.shared().fault.fail(failure)
    }

    fn query(&self) -> Result<bool> {
        let shared = self.shared();
        let end = shared.ring.claimed();
        let is_done = || shared.progress.reached(end);
        let done = is_done() || (shared.look_unless_own() | look_at_own_streams()) && is_done();
        // After the look at the progress: a failure of the work that is done is there by then.
        self.check()?;
        Ok(done)
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        let shared = self.shared();
        forbid_on(shared.id, "stream synchronize")?;
        let end = shared.ring.claimed();
        if !shared.progress.reached(end) {
            let deadline = deadline_after(timeout);
            let shares_core = shared.shares_core.load(Ordering::Relaxed);
            let mut backoff = match self.has_thread() {
                true => Backoff::after(shared.spin(), shares_core),
                false => Backoff::of_executing(),
            };
            while !shared.progress.reached(end) {
                let has_changed = shared.look_unless_own() | look_at_own_streams();
                if shared.progress.reached(end) {
                    break;
                }
                let in_time = if has_changed {
                    backoff.reset();
                    deadline.is_none_or(|deadline| Instant::now() < deadline)
                } else {
                    backoff.pause_until(deadline)
                };
                if !in_time && !shared.progress.reached(end) {
                    return Err(Error::Timeout {
                        operation: "stream synchronize",
                        timeout: timeout.unwrap_or(Duration::MAX),
                    });
                }
            }
            if backoff.shares_core() != shares_core {
                shared.shares_core.store(!shares_core, Ordering::Relaxed);
            }
        }
        self.check()
    }
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostStream")
            .field("id", &self.id())
            .field("name", &self.name())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
