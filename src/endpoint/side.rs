//! One queue of an endpoint with its completion queue: what poster, reaper, stream and watchdog share of it.
//!
//! Three cursors run over the completions. `seen`: processed, work requests before it are done. `taken`: given to a wait or
//! a poll, each completion once. `freed`: given back to the device, which may write there again.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use crate::endpoint::ledger::Ledger;
use crate::endpoint::{Completion, Operation, Side};
use crate::mlx5::{CqRing, Cqe, CqeOpcode, Opcode, RELEASED_VENDOR_SYNDROME, Syndrome};
use crate::region::Region;
use crate::{Cause, Error, Result};

/// What a work request in flight holds and what its completion will need.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) wr_id: u64,
    /// Running count of ring entries behind it.
    pub(super) end: u32,
    #[expect(
        dead_code,
        reason = "held for as long as the work is in flight, and then dropped"
    )]
    pub(super) held: Held,
}

/// Regions that must live until the device is done with a work request: four of them without an allocation.
#[derive(Debug, Default)]
pub(super) struct Held {
    few: [Option<Region>; 4],
    /// Rare, and every place of a queue has one: so not in here.
    more: Option<Box<Held>>,
}

impl Held {
    #[inline]
    pub(super) fn hold(&mut self, region: &Region) {
        for place in &mut self.few {
            match place {
                Some(held) if held.is(region) => return,
                Some(_) => {}
                None => {
                    *place = Some(region.clone());
                    return;
                }
            }
        }
        self.more.get_or_insert_default().hold(region);
    }
}

/// What a ticket can learn of a work request after it is done, until the place is used again.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The running count of the work request; together with `state` it says whether the rest is of this one.
    seq: AtomicU32,
    /// Tells work requests apart that had the same running count, because the earlier one was taken back.
    serial: AtomicU32,
    /// Running count of ring entries at its start, by which completions find it.
    index: AtomicU32,
    state: AtomicU8,
    imm_valid: AtomicBool,
    len_bytes: AtomicU32,
    imm: AtomicU32,
    wr_id: AtomicU64,
}

const POSTED: u8 = 0;
const CANCELLED: u8 = 1;
const SUCCEEDED: u8 = 2;
const FAILED: u8 = 3;

/// What is known of one completion until it is freed, and of the wait that took it.
#[derive(Debug)]
pub(super) struct Record {
    /// The number of its work request; valid if it is known.
    wr_id: AtomicU64,
    /// The wait that took it, see [`WaitWord`].
    wait: AtomicU64,
    /// When the stream began to wait; 0 while it does not.
    pub(super) wait_started_ns: AtomicU64,
    pub(super) wait_timeout_ns: AtomicU64,
}

/// The states of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Wait {
    Prepared,
    Queued,
    Started,
    Done,
    GivenUp,
    Cancelled,
}

/// A wait in one word: its state, the running index of its completion, and a serial that tells waits apart which had the same
/// index, because the earlier one was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WaitWord(u64);

impl WaitWord {
    const NONE: WaitWord = WaitWord(u64::MAX);

    fn new(serial: u32, index: u32, state: Wait) -> WaitWord {
        WaitWord(u64::from(serial) << 40 | u64::from(index) << 8 | state as u64)
    }

    fn with(self, state: Wait) -> WaitWord {
        WaitWord(self.0 & !0xff | state as u64)
    }

    fn is_for(self, index: u32) -> bool {
        self != WaitWord::NONE && (self.0 >> 8) as u32 == index
    }

    /// 24 bits.
    fn serial(self) -> u32 {
        (self.0 >> 40) as u32
    }

    fn standing(self) -> Standing {
        const STANDINGS: [Standing; 6] = [
            Standing::Prepared,
            Standing::Queued,
            Standing::Rung,
            Standing::Done,
            Standing::Failed,
            Standing::Cancelled,
        ];
        STANDINGS
            .get((self.0 & 0xff) as usize)
            .copied()
            .unwrap_or(Standing::Failed)
    }
}

/// How the operations of one kind stood when a life of the endpoint ended: well before `failed_from`, badly from there on, but for
/// the exceptions.
#[derive(Debug, Clone, Default)]
pub(super) struct Ends {
    failed_from: u32,
    exceptions: Vec<(u32, Standing)>,
}

impl Ends {
    /// `standings` of the newest operations, newest first; those before them ended well. `next` is the count of the next one.
    fn new(next: u32, standings: impl Iterator<Item = (u32, Standing)> + Clone) -> Ends {
        let failed_from = standings
            .clone()
            .filter(|(_, standing)| !matches!(standing, Standing::Done | Standing::Cancelled))
            .last()
            .map_or(next, |(count, _)| count);
        let exceptions = standings
            .filter(|(count, standing)| match standing {
                Standing::Cancelled => true,
                Standing::Done => (count.wrapping_sub(failed_from) as i32) >= 0,
                _ => false,
            })
            .collect();
        Ends {
            failed_from,
            exceptions,
        }
    }

    pub(super) fn of(&self, count: u32) -> Standing {
        let exception = self.exceptions.iter().find(|(other, _)| *other == count);
        match exception {
            Some((_, standing)) => *standing,
            None if (self.failed_from.wrapping_sub(count) as i32) > 0 => Standing::Done,
            None => Standing::Failed,
        }
    }
}

/// How a ticket stands in its own queue, apart from what befell the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Prepared,
    Queued,
    Rung,
    Done,
    Failed,
    Cancelled,
}

#[derive(Debug, Default)]
struct Cursor {
    seen: u32,
    freed: u32,
    /// An error completion was seen.
    failed: bool,
}

/// A queue.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) side: Side,
    pub(super) depth: u32,
    pub(super) ledger: Ledger<Work>,
    pub(super) cq: CqRing,
    /// Running count of work requests handed to a stream or rung by the CPU, in order.
    pub(super) queued: AtomicU32,
    /// The number of the call that hands work requests over, 0 while none does; never waited for.
    posting: AtomicU64,
    /// The stream of the last hand-over; 0 for the CPU.
    pub(super) last_stream: AtomicU64,
    /// When a stream began to wait for its turn behind another stream; 0 while none does.
    pub(super) turn_started_ns: AtomicU64,
    pub(super) turn_timeout_ns: u64,
    /// Completions that can come: signaled sends, or receives.
    pub(super) expected: AtomicU32,
    pub(super) taken: AtomicU32,
    /// Completions found, stored before they are processed; `seen` is stored after.
    arrived: AtomicU32,
    seen: AtomicU32,
    freed: AtomicU32,
    /// Running index of the first completion in error; above 32 bits while there is none.
    failed_at: AtomicU64,
    cursor: Mutex<Cursor>,
    /// Running count of ring entries that the device is done with.
    pub(super) consumed: AtomicU32,
    outcomes: Box<[Outcome]>,
    records: Box<[Record]>,
    /// Whether the work request of a completion is known; apart from the records, where it would take 8 bytes each.
    known: Box<[AtomicBool]>,
    serials: AtomicU32,
}

/// An error completion, as found by [`Lane::reap`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) wr_id: Option<u64>,
    pub(super) cause: Cause,
    pub(super) flushed: bool,
}

impl Lane {
    pub(super) fn new(side: Side, depth: u32, turn_timeout_ns: u64, cq: CqRing) -> Lane {
        let outcome = |_| Outcome {
            seq: AtomicU32::new(u32::MAX),
            serial: AtomicU32::new(0),
            index: AtomicU32::new(0),
            state: AtomicU8::new(POSTED),
            imm_valid: AtomicBool::new(false),
            len_bytes: AtomicU32::new(0),
            imm: AtomicU32::new(0),
            wr_id: AtomicU64::new(0),
        };
        let record = |_| Record {
            wr_id: AtomicU64::new(0),
            wait: AtomicU64::new(WaitWord::NONE.0),
            wait_started_ns: AtomicU64::new(0),
            wait_timeout_ns: AtomicU64::new(0),
        };
        let slots = depth.next_power_of_two();
        Lane {
            side,
            depth,
            ledger: Ledger::new(depth),
            queued: AtomicU32::new(0),
            posting: AtomicU64::new(0),
            last_stream: AtomicU64::new(0),
            turn_started_ns: AtomicU64::new(0),
            turn_timeout_ns,
            expected: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            arrived: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            freed: AtomicU32::new(0),
            failed_at: AtomicU64::new(u64::MAX),
            cursor: Mutex::default(),
            consumed: AtomicU32::new(0),
            outcomes: (0..slots).map(outcome).collect(),
            records: (0..cq.cqe_count()).map(record).collect(),
            known: (0..cq.cqe_count())
                .map(|_| AtomicBool::new(false))
                .collect(),
            serials: AtomicU32::new(0),
            cq,
        }
    }

    #[inline]
    fn outcome(&self, seq: u32) -> &Outcome {
        &self.outcomes[seq as usize & (self.outcomes.len() - 1)]
    }

    #[inline]
    pub(super) fn record(&self, index: u32) -> &Record {
        &self.records[index as usize & (self.records.len() - 1)]
    }

    #[inline]
    fn known(&self, index: u32) -> &AtomicBool {
        &self.known[index as usize & (self.known.len() - 1)]
    }

    /// Whether a further work request and its completion have a place. Exact for the poster.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        // Every work request in flight may end in a completion (in error, even an unsignaled one does), and what the
        // application has not collected stays in the completion queue, too.
        // Loaded in this order, against a reaper at work: a completion that has left the ledger has arrived, and what is freed has
        // arrived, too. So one may be counted twice, and none is missed.
        let in_flight = self.ledger.in_flight();
        let freed = self.freed.load(Ordering::Acquire);
        let uncollected = self.arrived.load(Ordering::Acquire).wrapping_sub(freed);
        in_flight < self.depth && in_flight + uncollected < self.cq.cqe_count()
    }

    pub(super) fn full(&self) -> Error {
        if self.ledger.in_flight() < self.depth {
            // The completion queue is what is full: nobody waits for or polls what was signaled.
            let queue = if self.side == Side::Send {
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
            queue: self.side.name(),
            depth: self.depth,
        }
    }

    #[inline]
    fn next_serial(&self) -> u32 {
        // The poster's alone, so a load and a store will do.
        let serial = self.serials.load(Ordering::Relaxed);
        self.serials
            .store(serial.wrapping_add(1), Ordering::Relaxed);
        serial
    }

    /// Enters a work request; `index` is the running count of ring entries at its start. Gives its serial.
    #[inline]
    pub(super) fn enter(&self, index: u32, work: Work) -> u32 {
        let seq = self.ledger.posted();
        let serial = self.next_serial();
        let outcome = self.outcome(seq);
        outcome.seq.store(seq, Ordering::Relaxed);
        outcome.serial.store(serial, Ordering::Relaxed);
        outcome.index.store(index, Ordering::Relaxed);
        outcome.state.store(POSTED, Ordering::Relaxed);
        // Release inside: the reaper that sees the entry sees the outcome's index.
        self.ledger.post(work);
        serial
    }

    /// Takes the newest work request back, of which the device never heard.
    pub(super) fn take_back(&self) {
        let seq = self.ledger.posted().wrapping_sub(1);
        drop(self.ledger.unpost());
        self.outcome(seq).state.store(CANCELLED, Ordering::Release);
    }

    pub(super) fn cancel(&self, seq: u32) {
        self.outcome(seq).state.store(CANCELLED, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self, seq: u32) -> bool {
        let outcome = self.outcome(seq);
        outcome.state.load(Ordering::Acquire) == CANCELLED
            && outcome.seq.load(Ordering::Relaxed) == seq
    }

    /// Takes the right to hand over the next work requests for the call of this number, or finds that it has it already (`None`).
    /// Another thread at it is an error, not a reason to wait.
    pub(super) fn begin_posting(&self, call: u64) -> Result<Option<Posting<'_>>> {
        let found = self
            .posting
            .compare_exchange(0, call, Ordering::Acquire, Ordering::Relaxed);
        if found == Err(call) {
            return Ok(None);
        }
        if found.is_err() {
            let reason = format!(
                "another thread hands work to the {} queue of this endpoint right now",
                self.side.name()
            );
            return Err(Error::State {
                operation: "stream_post",
                reason,
            });
        }
        Ok(Some(Posting(&self.posting)))
    }

    /// Processes new completions, and gives back those that nobody needs any more. Each error goes to `failed`. Whether any
    /// was new. Returns at once if another thread is at it.
    #[inline]
    pub(super) fn reap(&self, failed: &dyn Fn(Found)) -> bool {
        match self.cursor.try_lock() {
            Ok(mut cursor) => self.reap_with(&mut cursor, failed),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.reap_with(&mut poisoned.into_inner(), failed)
            }
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// [`Lane::reap`] that waits for the other thread.
    pub(super) fn reap_fully(&self, failed: &dyn Fn(Found)) -> bool {
        self.reap_with(
            &mut self.cursor.lock().unwrap_or_else(PoisonError::into_inner),
            failed,
        )
    }

    #[inline]
    fn reap_with(&self, cursor: &mut Cursor, failed: &dyn Fn(Found)) -> bool {
        let first = cursor.seen;
        while cursor.seen.wrapping_sub(cursor.freed) < self.cq.cqe_count() {
            let Some(cqe) = self.cq.cqe(cursor.seen) else {
                break;
            };
            if cqe.opcode.is_error() && !cursor.failed {
                cursor.failed = true;
                // Everything from this completion on has failed; see `wait_standing`.
                self.failed_at
                    .store(u64::from(cursor.seen), Ordering::Release);
            }
            self.arrived
                .store(cursor.seen.wrapping_add(1), Ordering::Relaxed);
            // Release inside, where the work request leaves the ledger: orders the store before it.
            self.process(cursor.seen, &cqe, failed);
            cursor.seen = cursor.seen.wrapping_add(1);
        }
        let new = cursor.seen != first;
        if new {
            self.seen.store(cursor.seen, Ordering::Release);
        }
        let freed = cursor.freed;
        let taken = self.taken.load(Ordering::Acquire);
        while cursor.freed != cursor.seen
            && cursor.freed != taken
            && !self.cq.is_marked(cursor.freed)
        {
            cursor.freed = cursor.freed.wrapping_add(1);
        }
        if cursor.freed != freed {
            self.cq.set_consumer_index(cursor.freed);
            self.freed.store(cursor.freed, Ordering::Release);
        }
        new
    }

    /// Enters a completion: the work requests up to its own are done.
    fn process(&self, index: u32, cqe: &Cqe, failed: &dyn Fn(Found)) {
        let record = self.record(index);
        let done = self.ledger.done();
        let in_flight = self.ledger.posted().wrapping_sub(done);
        let error = cqe.opcode.is_error();
        // What the watchdog wrote to let a waiter go is of no work request: its counter means nothing.
        let ours = error && cqe.vendor_syndrome == RELEASED_VENDOR_SYNDROME;
        let own = (0..in_flight).find(|ahead| {
            !ours
                && self
                    .outcome(done.wrapping_add(*ahead))
                    .index
                    .load(Ordering::Relaxed) as u16
                    == cqe.wqe_counter
        });
        let mut wr_id = None;
        if let Some(ahead) = own {
            for count in 0..=ahead {
                let seq = done.wrapping_add(count);
                let Some(work) = self.ledger.reap() else {
                    break;
                };
                let outcome = self.outcome(seq);
                outcome.wr_id.store(work.wr_id, Ordering::Relaxed);
                self.consumed.store(work.end, Ordering::Release);
                let last = count == ahead;
                if last {
                    wr_id = Some(work.wr_id);
                }
                if outcome.state.load(Ordering::Relaxed) == CANCELLED {
                    continue;
                }
                if last {
                    outcome.len_bytes.store(cqe.byte_count, Ordering::Relaxed);
                    outcome.imm.store(cqe.imm, Ordering::Relaxed);
                    let imm =
                        matches!(cqe.opcode, CqeOpcode::RespSendImm | CqeOpcode::RespWriteImm);
                    outcome.imm_valid.store(imm, Ordering::Relaxed);
                }
                // Release: who sees the state sees the fields. The regions are let go after it, at the end of the round.
                outcome.state.store(
                    if error && last { FAILED } else { SUCCEEDED },
                    Ordering::Release,
                );
            }
        }
        record.wr_id.store(wr_id.unwrap_or(0), Ordering::Relaxed);
        self.known(index).store(wr_id.is_some(), Ordering::Relaxed);
        if error {
            let cause = Cause::Completion {
                status: cqe.status(),
                syndrome: cqe.syndrome,
                vendor_syndrome: cqe.vendor_syndrome,
            };
            failed(Found {
                wr_id,
                cause,
                flushed: cqe.syndrome == Syndrome::WrFlush as u8,
            });
        }
    }

    /// Takes the next completion for the caller, if it is there.
    pub(super) fn poll(&self) -> Option<std::result::Result<Completion, Found>> {
        let index = self.taken.load(Ordering::Relaxed);
        // A wait may have taken completions that are not seen yet, so `seen` may also be behind.
        if self.seen.load(Ordering::Acquire).wrapping_sub(index) as i32 <= 0 {
            return None;
        }
        // Seen and not taken, so not freed: the CQE and its record are still there.
        let cqe = self.cq.cqe(index)?;
        let record = self.record(index);
        let wr_id = self
            .known(index)
            .load(Ordering::Relaxed)
            .then(|| record.wr_id.load(Ordering::Relaxed));
        self.taken.store(index.wrapping_add(1), Ordering::Release);
        if cqe.opcode.is_error() {
            let cause = Cause::Completion {
                status: cqe.status(),
                syndrome: cqe.syndrome,
                vendor_syndrome: cqe.vendor_syndrome,
            };
            return Some(Err(Found {
                wr_id,
                cause,
                flushed: cqe.syndrome == Syndrome::WrFlush as u8,
            }));
        }
        let operation = match cqe.opcode {
            CqeOpcode::Req => {
                Operation::Post(Opcode::from_raw(cqe.send_opcode).unwrap_or(Opcode::Nop))
            }
            CqeOpcode::RespWriteImm => Operation::ReceiveWrite,
            _ => Operation::Receive,
        };
        let imm = matches!(cqe.opcode, CqeOpcode::RespSendImm | CqeOpcode::RespWriteImm)
            .then_some(cqe.imm);
        Some(Ok(Completion {
            wr_id: wr_id.unwrap_or(0),
            operation,
            len_bytes: cqe.byte_count,
            imm,
        }))
    }

    /// How the work request of this running count stands; `rung` counts those that were executed.
    pub(super) fn standing(&self, seq: u32, serial: u32, rung: u32) -> Standing {
        let outcome = self.outcome(seq);
        let state = outcome.state.load(Ordering::Acquire);
        if outcome.seq.load(Ordering::Relaxed) != seq {
            // The place is used again, which it is only after success: a failed endpoint takes no more.
            return Standing::Done;
        }
        if outcome.serial.load(Ordering::Relaxed) != serial {
            // It was taken back, and another one has its count.
            return Standing::Cancelled;
        }
        match state {
            CANCELLED => Standing::Cancelled,
            SUCCEEDED => Standing::Done,
            FAILED => Standing::Failed,
            _ if (rung.wrapping_sub(seq) as i32) > 0 => Standing::Rung,
            _ if (self.queued.load(Ordering::Acquire).wrapping_sub(seq) as i32) > 0 => {
                Standing::Queued
            }
            _ => Standing::Prepared,
        }
    }

    /// What came in with a receive, or how much was sent, while it is still known.
    pub(super) fn details(&self, seq: u32, serial: u32) -> Option<(u64, u32, Option<u32>)> {
        let outcome = self.outcome(seq);
        let done = outcome.state.load(Ordering::Acquire) == SUCCEEDED;
        let imm = outcome
            .imm_valid
            .load(Ordering::Relaxed)
            .then(|| outcome.imm.load(Ordering::Relaxed));
        let found = (
            outcome.wr_id.load(Ordering::Relaxed),
            outcome.len_bytes.load(Ordering::Relaxed),
            imm,
        );
        let same = outcome.seq.load(Ordering::Acquire) == seq
            && outcome.serial.load(Ordering::Relaxed) == serial;
        (done && same).then_some(found)
    }

    /// Starts a wait for the completion of this running index. Gives its serial.
    pub(super) fn enter_wait(&self, index: u32, timeout_ns: u64) -> u32 {
        let serial = self.next_serial() & 0xff_ffff;
        let record = self.record(index);
        record.wait_started_ns.store(0, Ordering::Relaxed);
        record.wait_timeout_ns.store(timeout_ns, Ordering::Relaxed);
        let word = WaitWord::new(serial, index, Wait::Prepared);
        record.wait.store(word.0, Ordering::Release);
        serial
    }

    /// Sets the state of the wait for this running index, unless the place belongs to a later one already.
    pub(super) fn set_wait(&self, index: u32, state: Wait) {
        let wait = &self.record(index).wait;
        let mut old = wait.load(Ordering::Acquire);
        while WaitWord(old).is_for(index) {
            let new = WaitWord(old).with(state);
            match wait.compare_exchange_weak(old, new.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    /// Gives the newest taken completion back to whoever asks next, and cancels the wait that had it. The poster's call.
    pub(super) fn untake(&self, index: u32) {
        // Under the reaper's lock, and the mark with it: a reaper between the two would give the completion back to the device.
        let _cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_wait(index, Wait::Cancelled);
        self.cq.abort_peek(index);
        self.taken.store(index, Ordering::Release);
    }

    /// Whether a stream is in the wait for this running index.
    pub(super) fn is_waiting(&self, index: u32) -> bool {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        wait.is_for(index) && wait.standing() == Standing::Rung
    }

    /// How work requests and waits stand at the end of a life.
    pub(super) fn ends(&self) -> (Ends, Ends) {
        let posted = self.ledger.posted();
        let requests = (1..=self.outcomes.len() as u32).filter_map(|back| {
            let seq = posted.wrapping_sub(back);
            let outcome = self.outcome(seq);
            let standing = match outcome.state.load(Ordering::Acquire) {
                CANCELLED => Standing::Cancelled,
                SUCCEEDED => Standing::Done,
                _ => Standing::Failed,
            };
            (outcome.seq.load(Ordering::Relaxed) == seq).then_some((seq, standing))
        });
        let taken = self.taken.load(Ordering::Acquire);
        let waits = (1..=self.records.len() as u32).filter_map(|back| {
            let index = taken.wrapping_sub(back);
            let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
            wait.is_for(index)
                .then(|| (index, self.wait_standing(index, wait.serial())))
        });
        (Ends::new(posted, requests), Ends::new(taken, waits))
    }

    /// How the wait for this running index stands. A wait is over when its completion is there, in error or not: exact after
    /// a full reap.
    pub(super) fn wait_standing(&self, index: u32, serial: u32) -> Standing {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        let standing = if !wait.is_for(index) {
            // The place is used again, so the wait is over.
            Standing::Done
        } else if wait.serial() != serial {
            // It was taken back, and another one has its index.
            Standing::Cancelled
        } else {
            wait.standing()
        };
        let failed_at = self.failed_at.load(Ordering::Acquire);
        let failed = u32::try_from(failed_at).is_ok_and(|at| index.wrapping_sub(at) as i32 >= 0);
        if standing == Standing::Done && failed {
            Standing::Failed
        } else {
            standing
        }
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

    /// Lets every stream go that waits here. Legal once the device writes no more, see [`CqRing::release_waiter`].
    pub(super) fn release_waiters(&self) {
        for index in self.under_way() {
            if self.cq.is_marked(index) {
                self.cq.release_waiter(index, Syndrome::WrFlush);
            }
        }
    }

    /// Starts over, for an endpoint that is reset: nobody else is at it.
    pub(super) fn reset(&self) {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        *cursor = Cursor::default();
        self.ledger.clear();
        self.cq.reset();
        for counter in [
            &self.queued,
            &self.expected,
            &self.taken,
            &self.arrived,
            &self.seen,
            &self.freed,
            &self.consumed,
        ] {
            counter.store(0, Ordering::Release);
        }
        self.failed_at.store(u64::MAX, Ordering::Release);
        self.last_stream.store(0, Ordering::Relaxed);
        self.turn_started_ns.store(0, Ordering::Relaxed);
        for outcome in &self.outcomes {
            outcome.seq.store(u32::MAX, Ordering::Relaxed);
        }
        for record in &self.records {
            record.wait.store(WaitWord::NONE.0, Ordering::Relaxed);
            record.wait_started_ns.store(0, Ordering::Relaxed);
        }
    }
}

/// The right to hand over work, see [`Lane::begin_posting`].
#[derive(Debug)]
pub(super) struct Posting<'a>(&'a AtomicU64);

/// A number for a call that hands work over, never 0.
pub(super) fn next_call() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Posting<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
