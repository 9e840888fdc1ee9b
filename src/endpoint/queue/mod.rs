//! One queue of an endpoint with its completion queue: what poster, reaper, stream and watchdog share of it.
//!
//! Three cursors run over the completions. `seen`: processed, work requests before it are done. `taken`: given to a wait or
//! a poll, each completion once. `freed`: given back to the device, which may write there again.

mod completions;
mod held_regions;
mod ownership;
mod status;
mod turn_waits;
mod wait_word;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::endpoint::QueueKind;
use crate::endpoint::outcome::RequestState;
use crate::endpoint::outstanding::OutstandingWork;
use crate::mlx5::{CqRing, Syndrome};
use crate::{Error, Result, StateKind};

use super::words::{CacheLineStart, ProgressPage};
use completions::Cursor;
pub(super) use completions::ErrorCompletion;
pub(super) use held_regions::{HeldRegions, WorkInFlight};
use ownership::Ownership;
pub(super) use status::FinalStatuses;
use turn_waits::TurnWaits;
pub(super) use wait_word::{Wait, WaitWord};

/// The result of a work request, for tickets, from its end until the place is used again.
#[derive(Debug)]
pub(super) struct RequestOutcome {
    /// The running count of the work request; together with `state` it says whether the rest is of this one.
    seq: AtomicU32,
    /// Tells work requests apart that had the same running count, because the earlier one was taken back.
    serial: AtomicU32,
    /// Running count of ring entries at its start, by which completions find it.
    index: AtomicU32,
    /// [`RequestState`].
    state: AtomicU8,
    /// [`Details`].
    details: AtomicU8,
    len_bytes: AtomicU32,
    imm: AtomicU32,
    wr_id: AtomicU64,
}

/// What a completion has said of a work request besides that it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Details {
    None = 0,
    Bytes = 1,
    BytesAndImm = 2,
    /// The immediate data is that of a write.
    BytesAndWriteImm = 3,
}

impl RequestOutcome {
    #[inline]
    fn state(&self) -> RequestState {
        RequestState::from_byte(self.state.load(Ordering::Acquire))
    }

    #[inline]
    fn note(&self, details: Details) {
        self.details.store(details as u8, Ordering::Relaxed);
    }

    /// Release: a thread that sees the state sees the other fields.
    #[inline]
    fn set_state(&self, state: RequestState) {
        self.state.store(state as u8, Ordering::Release);
    }
}

/// What is known of one completion until it is freed, and of the wait that took it.
#[derive(Debug)]
pub(super) struct CompletionRecord {
    /// The number of its work request; valid if it is known.
    wr_id: AtomicU64,
    /// The wait that took it, see [`WaitWord`].
    wait: AtomicU64,
    /// When the stream began to wait; 0 while it does not.
    pub(super) wait_started_ns: AtomicU64,
    pub(super) wait_timeout_ns: AtomicU64,
}

/// A queue. The fields that all threads read, those that the poster writes, and those that the reaper writes are on separate cache lines.
#[derive(Debug)]
#[repr(C)]
pub(super) struct QueueState {
    pub(super) kind: QueueKind,
    pub(super) depth: u32,
    pub(super) cq: CqRing,
    pub(super) turn_timeout_ns: u64,
    /// Has the count that streams may poll: like `seen`, but it stays before an error until the breakdown releases streams.
    words: Arc<ProgressPage>,
    outcomes: Box<[RequestOutcome]>,
    records: Box<[CompletionRecord]>,
    /// Whether the work request of a completion is known; apart from the records, where it would take 8 bytes each.
    known: Box<[AtomicBool]>,
    _outstanding: CacheLineStart,
    pub(super) outstanding: OutstandingWork<WorkInFlight>,
    _poster: CacheLineStart,
    /// Running count of work requests handed to a stream or rung by the CPU, in order.
    pub(super) queued: AtomicU32,
    /// The number of the call that hands work requests over, 0 while none does; never waited for.
    posting: AtomicU64,
    /// Running count of work requests of which a thread of this process has begun to store the doorbell.
    pub(super) begun: AtomicU32,
    /// The stream of the last hand-over; 0 for the CPU.
    pub(super) last_stream: AtomicU64,
    /// Completions that can come: signaled sends, or receives.
    pub(super) expected: AtomicU32,
    pub(super) taken: AtomicU32,
    serials: AtomicU32,
    /// Free places for work requests when the poster last counted them; there may be more by now.
    room: AtomicU32,
    _reaper: CacheLineStart,
    /// Completions found, stored before they are processed; `seen` is stored after.
    arrived: AtomicU32,
    /// Running count of completions that are processed.
    seen: AtomicU32,
    freed: AtomicU32,
    /// Running index of the first completion in error; above 32 bits while there is none.
    failed_at: AtomicU64,
    cursor: Mutex<Cursor>,
    /// Running count of ring entries that the device is done with.
    pub(super) consumed: AtomicU32,
    /// Work requests that may have been rung before the device was quiesced; above 32 bits before that, and [`ALL_QUEUED`] if it could not be.
    rung_in_all: AtomicU64,
    /// What streams had when the device was given up. A thread that gives a stream more at that moment finds the failure, and takes it back.
    queued_in_all: AtomicU32,
    /// Set before the last look at completions of a device that cannot be stopped.
    is_given_up: AtomicBool,
    /// A completion was written beside a device that may have written it, too.
    has_mixed: AtomicBool,
    pub(super) turn_waits: TurnWaits,
    /// Which side owns the queue. Rarely used.
    ownership: Mutex<Ownership>,
    is_device_owned: AtomicBool,
}

impl QueueState {
    pub(super) fn new(
        kind: QueueKind,
        depth: u32,
        turn_timeout_ns: u64,
        cq: CqRing,
        words: Arc<ProgressPage>,
    ) -> QueueState {
        let outcome = |_| RequestOutcome {
            seq: AtomicU32::new(u32::MAX),
            serial: AtomicU32::new(0),
            index: AtomicU32::new(0),
            state: AtomicU8::new(RequestState::Posted as u8),
            details: AtomicU8::new(Details::None as u8),
            len_bytes: AtomicU32::new(0),
            imm: AtomicU32::new(0),
            wr_id: AtomicU64::new(0),
        };
        let record = |_| CompletionRecord {
            wr_id: AtomicU64::new(0),
            wait: AtomicU64::new(WaitWord::NONE.0),
            wait_started_ns: AtomicU64::new(0),
            wait_timeout_ns: AtomicU64::new(0),
        };
        let slots = depth.next_power_of_two();
        QueueState {
            kind,
            depth,
            outstanding: OutstandingWork::new(depth),
            queued: AtomicU32::new(0),
            posting: AtomicU64::new(0),
            begun: AtomicU32::new(0),
            last_stream: AtomicU64::new(0),
            turn_waits: TurnWaits::default(),
            turn_timeout_ns,
            expected: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            arrived: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            words,
            freed: AtomicU32::new(0),
            failed_at: AtomicU64::new(u64::MAX),
            cursor: Mutex::default(),
            consumed: AtomicU32::new(0),
            rung_in_all: AtomicU64::new(u64::MAX),
            queued_in_all: AtomicU32::new(0),
            is_given_up: AtomicBool::new(false),
            has_mixed: AtomicBool::new(false),
            ownership: Mutex::default(),
            is_device_owned: AtomicBool::new(false),
            outcomes: (0..slots).map(outcome).collect(),
            records: (0..cq.cqe_count()).map(record).collect(),
            known: (0..cq.cqe_count())
                .map(|_| AtomicBool::new(false))
                .collect(),
            serials: AtomicU32::new(0),
            room: AtomicU32::new(0),
            _outstanding: CacheLineStart,
            _poster: CacheLineStart,
            _reaper: CacheLineStart,
            cq,
        }
    }

    /// The count of completions that streams poll.
    #[inline]
    fn shown(&self) -> &AtomicU32 {
        &self.words.seen[self.kind as usize]
    }

    #[inline]
    fn outcome(&self, seq: u32) -> &RequestOutcome {
        &self.outcomes[seq as usize & (self.outcomes.len() - 1)]
    }

    /// Addresses of the outcome and the entry of outstanding work of the work request with that running count, for the thread that is about to reap it.
    #[inline]
    pub(super) fn places(&self, seq: u32) -> [*const u8; 2] {
        let outcome: *const RequestOutcome = self.outcome(seq);
        [outcome.cast(), self.outstanding.place(seq)]
    }

    #[inline]
    pub(super) fn record(&self, index: u32) -> &CompletionRecord {
        &self.records[index as usize & (self.records.len() - 1)]
    }

    #[inline]
    fn known(&self, index: u32) -> &AtomicBool {
        &self.known[index as usize & (self.known.len() - 1)]
    }

    /// Takes a free entry that [`QueueState::has_room`] found last, without loading the reaper's cache line. Only the poster calls this: a completion
    /// uses the entry of its work request.
    #[inline]
    pub(super) fn take_known_room(&self) -> bool {
        let room = self.room.load(Ordering::Relaxed);
        self.room.store(room.saturating_sub(1), Ordering::Relaxed);
        room > 0
    }

    /// Whether there is a place for a further work request and for its completion. Only the poster calls this, so the answer is
    /// exact; the number of further places is cached for it.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        let places = self.free_places();
        self.room.store(places.saturating_sub(1), Ordering::Relaxed);
        places > 0
    }

    /// The number of further work requests for which there is a place, with their completions. Exact if the poster calls it.
    #[inline]
    pub(super) fn free_places(&self) -> u32 {
        // Every work request in flight may end in a completion (in error, even an unsignaled one does), and completions that the
        // application has not collected stay in the completion queue, too. Loaded in this order, against a reaper at work: a
        // completion that is no longer outstanding has arrived, and what is freed has arrived, too. So one may be counted twice, and
        // none is missed.
        if self.is_device_owned() {
            return 0;
        }
        let in_flight = self.outstanding.in_flight();
        let freed = self.freed.load(Ordering::Acquire);
        let uncollected = self.arrived.load(Ordering::Acquire).wrapping_sub(freed);
        self.depth
            .saturating_sub(in_flight)
            .min(self.cq.cqe_count().saturating_sub(in_flight + uncollected))
    }

    /// Checks that [`QueueState::free_places`] can become `count` without a further call of the poster.
    ///
    /// # Errors
    /// [`Error::QueueFull`] with the queue that stays full.
    pub(super) fn check_room_to_come(&self, count: u32) -> Result<()> {
        // Not while another thread processes a completion, which arrives before it is not outstanding any more.
        let _cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = self.expected.load(Ordering::Relaxed);
        let taken = self.taken.load(Ordering::Relaxed);
        // Completions that no wait was posted for, whether they have arrived or not. Only the poster can take them.
        let untaken = expected
            .wrapping_sub(taken)
            .cast_signed()
            .max(0)
            .cast_unsigned();
        // No completion will come, so the requests in flight are unsignaled, and stay.
        let stays = if self.arrived.load(Ordering::Acquire) == expected {
            self.outstanding.in_flight()
        } else {
            0
        };
        if self.depth.saturating_sub(stays) < count {
            return Err(self.full_of(false));
        }
        if self.cq.cqe_count().saturating_sub(stays + untaken) < count {
            return Err(self.full_of(true));
        }
        Ok(())
    }

    pub(super) fn full(&self) -> Error {
        self.full_of(self.outstanding.in_flight() < self.depth)
    }

    /// `completions`: the completion queue is full, because completions of signaled requests are neither waited for nor polled.
    fn full_of(&self, completions: bool) -> Error {
        if completions {
            let queue = if self.kind == QueueKind::Send {
                "send completion"
            } else {
                "receive completion"
            };
            return Error::QueueFull {
                queue,
                depth: self.cq.cqe_count(),
            };
        }
        Error::QueueFull {
            queue: self.kind.name(),
            depth: self.depth,
        }
    }

    /// Counts further completions that can come. Only the poster calls this.
    #[inline]
    pub(super) fn expect(&self, more: i32) {
        // The poster's alone, so a load and a store will do.
        let expected = self.expected.load(Ordering::Relaxed);
        self.expected
            .store(expected.wrapping_add_signed(more), Ordering::Relaxed);
    }

    #[inline]
    fn next_serial(&self) -> u32 {
        // The poster's alone, so a load and a store will do.
        let serial = self.serials.load(Ordering::Relaxed);
        self.serials
            .store(serial.wrapping_add(1), Ordering::Relaxed);
        serial
    }

    /// Enters a work request; `index` is the running count of ring entries at its start. Returns its serial.
    #[inline]
    pub(super) fn enter(&self, index: u32, work: WorkInFlight) -> u32 {
        let seq = self.outstanding.posted();
        let serial = self.next_serial();
        let outcome = self.outcome(seq);
        outcome.seq.store(seq, Ordering::Relaxed);
        // Release, as for the state: a thread that sees this request's serial number sees its count.
        outcome.serial.store(serial, Ordering::Release);
        outcome.index.store(index, Ordering::Relaxed);
        outcome.set_state(RequestState::Posted);
        // Release inside: the reaper that sees the entry sees the outcome's index.
        self.outstanding.post(work);
        serial
    }

    /// Takes back the newest work request, of which the device was never told.
    pub(super) fn take_back(&self) {
        let seq = self.outstanding.posted().wrapping_sub(1);
        drop(self.outstanding.unpost());
        self.cancel(seq);
    }

    pub(super) fn cancel(&self, seq: u32) {
        self.outcome(seq).set_state(RequestState::Cancelled);
    }

    /// The stream that had the work request of this running count has not executed its doorbell.
    pub(super) fn discard(&self, seq: u32) {
        let outcome = self.outcome(seq);
        if outcome.seq.load(Ordering::Relaxed) == seq {
            let (posted, discarded) = (RequestState::Posted as u8, RequestState::Discarded as u8);
            // A completion that is there is more specific.
            let _ = outcome.state.compare_exchange(
                posted,
                discarded,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
        }
    }

    pub(super) fn is_cancelled(&self, seq: u32) -> bool {
        let outcome = self.outcome(seq);
        outcome.state() == RequestState::Cancelled && outcome.seq.load(Ordering::Relaxed) == seq
    }

    /// Takes the right to hand over the next work requests for the call of this number; `None` if that call has the right
    /// already. Does not wait: if another thread has the right, this fails.
    pub(super) fn begin_posting(&self, call: u64) -> Result<Option<Posting<'_>>> {
        let found = self
            .posting
            .compare_exchange(0, call, Ordering::Acquire, Ordering::Relaxed);
        if found == Err(call) {
            return Ok(None);
        }
        if found.is_err() {
            return Err(self.posted_by_another());
        }
        Ok(Some(Posting(&self.posting)))
    }

    /// [`QueueState::begin_posting`] for a call that hands over one work request only, and so needs no number of its own.
    #[inline]
    pub(super) fn begin_posting_alone(&self) -> Result<Posting<'_>> {
        match self.begin_posting(ALONE)? {
            Some(posting) => Ok(posting),
            // Another thread has it, in a call of the same kind.
            None => Err(self.posted_by_another()),
        }
    }

    #[cold]
    fn posted_by_another(&self) -> Error {
        let reason = format!(
            "another thread hands work to the {} queue of this endpoint right now",
            self.kind.name()
        );
        Error::state(StateKind::Busy, "stream_post", reason)
    }

    /// Gives the newest taken completion back, so that the next wait or poll gets it, and cancels the wait that had it. Only the poster calls this.
    pub(super) fn return_completion(&self, index: u32) {
        // Under the reaper's lock, and the mark with it: a reaper between the two would give the completion back to the device.
        let _cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_wait(index, Wait::Cancelled);
        self.cq.abort_peek(index);
        self.taken.store(index, Ordering::Release);
    }

    /// Gives completions back that were taken by waits which were dropped since, of work that was taken back, so the completions will not come.
    /// Otherwise later waits would find that all completions are taken. Only the poster calls this.
    pub(super) fn return_unexpected(&self) {
        let expected = self.expected.load(Ordering::Relaxed);
        loop {
            let taken = self.taken.load(Ordering::Relaxed);
            let newest = taken.wrapping_sub(1);
            if taken.wrapping_sub(expected).cast_signed() <= 0 || !self.is_dropped_wait(newest) {
                return;
            }
            self.return_completion(newest);
        }
    }

    /// Checks that the next poll takes the completion of the next work request. Only the poster calls this.
    ///
    /// # Errors
    /// [`Error::State`] if kernels own the queue, if earlier completions are not taken, or if a wait has taken the next one already.
    pub(super) fn check_collected(&self, operation: &'static str) -> Result<()> {
        self.check_host_owned(operation)?;
        let (expected, taken) = (&self.expected, &self.taken);
        let untaken =
            (expected.load(Ordering::Relaxed)).wrapping_sub(taken.load(Ordering::Relaxed));
        let reason = match untaken.cast_signed() {
            0 => return Ok(()),
            1.. => format!(
                "{untaken} completions of earlier work requests are not collected; poll or wait for them first, and post or drop what is prepared"
            ),
            _ => "a wait is there for the completion of the next work request".into(),
        };
        Err(Error::state(StateKind::WorkPending, operation, reason))
    }

    /// Whether anything is posted whose completion was not taken: a signaled send or a receive, or work that may fail.
    pub(super) fn expects_completions(&self) -> bool {
        let ahead = (self.expected.load(Ordering::Relaxed))
            .wrapping_sub(self.taken.load(Ordering::Relaxed));
        ahead.cast_signed() > 0 || self.outstanding.in_flight() > 0 || self.is_device_owned()
    }

    /// Running indices of completions that were taken and not given back.
    pub(super) fn under_way(&self) -> impl Iterator<Item = u32> + '_ {
        let freed = self.freed.load(Ordering::Acquire);
        let count = self
            .taken
            .load(Ordering::Acquire)
            .wrapping_sub(freed)
            .min(self.cq.cqe_count());
        (0..count).map(move |ahead| freed.wrapping_add(ahead))
    }

    /// Releases every stream that waits here. Allowed once the device writes no more, see [`CqRing::release_waiter`]. Streams that wait
    /// for a count of completions (`counted`) need the completions before theirs as well, whether these are waited for or not.
    pub(super) fn release_waiters(&self, counted: bool) {
        let waits = |index: &u32| self.cq.is_marked(*index);
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        cursor.errors_published = true;
        self.shown().store(cursor.seen, Ordering::Release);
        drop(cursor);
        let Some(last) = self.under_way().filter(waits).last() else {
            return;
        };
        for index in self.under_way() {
            if counted || waits(&index) {
                self.cq.release_waiter(index, Syndrome::WrFlush);
            }
            if index == last {
                return;
            }
        }
    }

    /// The running index of the first completion that the device has not written. No other thread uses the queue at this time, and the device is
    /// idle.
    pub(super) fn next_cqe(&self) -> u32 {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.catch_up(&mut cursor);
        cursor
            .quiesced_from
            .unwrap_or_else(|| self.cq.next_index(cursor.freed))
    }

    /// The device was quiesced. Records how far it has come, before this library writes its own completions behind the device's last
    /// one, and tells the device again how far completions are read.
    pub(super) fn enter_quiesced(&self) {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.catch_up(&mut cursor);
        cursor.quiesced_from = Some(self.cq.next_index(cursor.freed));
        self.cq.set_consumer_index(cursor.freed);
    }

    /// The device was quiesced: work that was not rung by now is never rung.
    pub(super) fn end_rung(&self, rung: u32) {
        self.rung_in_all.store(rung.into(), Ordering::Release);
    }

    /// The device cannot be quiesced: everything that streams have may be rung, now or later. Decides each wait that a stream has. No completion is
    /// processed after [`QueueState::reap_for_the_last_time`], which was called before, so reported statuses stay.
    pub(super) fn give_up(&self) {
        let queued = self.queued.load(Ordering::Acquire);
        self.queued_in_all.store(queued, Ordering::Relaxed);
        self.rung_in_all.store(ALL_QUEUED, Ordering::Release);
        self.give_up_waits();
    }

    /// Whether [`QueueState::give_up`] was called in this generation.
    pub(super) fn is_unresponsive(&self) -> bool {
        self.rung_in_all.load(Ordering::Acquire) == ALL_QUEUED
    }

    /// Releases every stream that waits here for a device that was given up. Streams of this process leave a wait by themselves, and those that wait for a
    /// count find it. The others need a completion, which the device may write at the same time. Each wait was decided before that, and the completion is
    /// used for nothing else.
    pub(super) fn release_unresponsive(&self, needs_word: bool) {
        self.shown()
            .store(self.taken.load(Ordering::Acquire), Ordering::Release);
        for index in self.under_way() {
            if needs_word && self.cq.is_marked(index) {
                self.has_mixed.store(true, Ordering::Relaxed);
                self.cq.release_waiter(index, Syndrome::WrFlush);
            }
        }
    }

    /// Whether [`QueueState::release_unresponsive`] has written a completion.
    pub(super) fn has_mixed(&self) -> bool {
        self.has_mixed.load(Ordering::Relaxed)
    }

    /// The count of [`QueueState::end_rung`], since the device was quiesced; or all that streams have, if it was given up.
    pub(super) fn rung_in_all(&self) -> Option<u32> {
        match self.rung_in_all.load(Ordering::Acquire) {
            ALL_QUEUED => Some(self.queued_in_all.load(Ordering::Relaxed)),
            rung => u32::try_from(rung).ok(),
        }
    }

    /// The count and the number of the oldest work request that is neither done nor cancelled, of those that a stream has executed or the CPU has rung.
    /// `executed` is their running count, which the poster cannot take back any more.
    pub(super) fn oldest_request(&self, executed: u32) -> Option<(u32, u64)> {
        // Only the reaper may do this.
        let _cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let done = self.outstanding.done();
        // The count may be in memory that streams and kernels write, so it is bounded by what they were given.
        let handed = self.queued.load(Ordering::Acquire);
        let in_flight = |upto: u32| upto.wrapping_sub(done).cast_signed().max(0);
        let count = (0..in_flight(executed).min(in_flight(handed)).cast_unsigned())
            .map(|ahead| done.wrapping_add(ahead))
            .find(|count| !self.is_cancelled(*count))?;
        let wr_id = self.outstanding.show(count, |work| work.wr_id)?;
        Some((count, wr_id))
    }

    /// Starts over when the endpoint is reset; the next completion has the running index `next_cqe`. No other thread uses the queue at this time.
    pub(super) fn reset(&self, next_cqe: u32) {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        *cursor = Cursor {
            seen: next_cqe,
            freed: next_cqe,
            ..Cursor::default()
        };
        self.clear_ownership();
        self.outstanding.clear();
        self.cq.reset_at(next_cqe);
        for counter in [
            &self.expected,
            &self.taken,
            &self.arrived,
            &self.seen,
            self.shown(),
            &self.freed,
        ] {
            counter.store(next_cqe, Ordering::Release);
        }
        self.room.store(0, Ordering::Relaxed);
        self.queued.store(0, Ordering::Release);
        self.consumed.store(0, Ordering::Release);
        self.failed_at.store(u64::MAX, Ordering::Release);
        self.rung_in_all.store(u64::MAX, Ordering::Release);
        self.is_given_up.store(false, Ordering::Relaxed);
        self.has_mixed.store(false, Ordering::Relaxed);
        self.begun.store(0, Ordering::Relaxed);
        self.last_stream.store(0, Ordering::Relaxed);
        self.turn_waits.reset();
        for outcome in &self.outcomes {
            outcome.seq.store(u32::MAX, Ordering::Relaxed);
        }
        for record in &self.records {
            record.wait.store(WaitWord::NONE.0, Ordering::Relaxed);
            record.wait_started_ns.store(0, Ordering::Relaxed);
        }
    }
}

/// The right to hand over work, see [`QueueState::begin_posting`].
#[derive(Debug)]
pub(super) struct Posting<'a>(&'a AtomicU64);

/// Stands for a count that may still grow: see [`QueueState::give_up`].
const ALL_QUEUED: u64 = 1 << 32;

/// Stands for the number of a call that hands over one work request.
const ALONE: u64 = 1;

/// A number for a call that hands work over, never 0 nor [`ALONE`].
pub(super) fn next_call() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(ALONE + 1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Posting<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
