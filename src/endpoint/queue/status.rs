//! The status of operations: work requests, and waits for completions.

use std::sync::atomic::{Ordering, fence};

use super::wait_word::{Wait, WaitWord};
use super::{Details, QueueState};
use crate::endpoint::outcome::{DeviceState, OpStatus, RequestState, TransferDetails};

/// The statuses of the operations of one kind when a generation of the endpoint ended: operations before `failed_from` succeeded, and
/// those from there on failed, apart from the exceptions.
#[derive(Debug, Clone, Default)]
pub(in crate::endpoint) struct FinalStatuses {
    failed_from: u32,
    exceptions: Vec<(u32, OpStatus)>,
}

impl FinalStatuses {
    /// `standings` are the statuses of the newest operations, newest first; earlier ones succeeded. `next` is the count of the next one.
    fn new(next: u32, standings: impl Iterator<Item = (u32, OpStatus)> + Clone) -> FinalStatuses {
        let failed_from = standings
            .clone()
            .filter(|(_, op_status)| *op_status == OpStatus::Failed)
            .last()
            .map_or(next, |(count, _)| count);
        let exceptions = standings
            .filter(|(count, op_status)| match op_status {
                OpStatus::Failed => false,
                OpStatus::Done => (count.wrapping_sub(failed_from) as i32) >= 0,
                _ => true,
            })
            .collect();
        FinalStatuses {
            failed_from,
            exceptions,
        }
    }

    pub(in crate::endpoint) fn of(&self, count: u32) -> OpStatus {
        let exception = self.exceptions.iter().find(|(other, _)| *other == count);
        match exception {
            Some((_, op_status)) => *op_status,
            None if (self.failed_from.wrapping_sub(count) as i32) > 0 => OpStatus::Done,
            None => OpStatus::Failed,
        }
    }
}

impl QueueState {
    /// The status of the work request with this running count; `rung` counts those that were executed.
    pub(in crate::endpoint) fn op_status(&self, seq: u32, serial: u32, rung: u32) -> OpStatus {
        let outcome = self.outcome(seq);
        // The poster writes the count first when it uses the place again, so the count is read last: what was read before it is of this count.
        let state = outcome.state();
        let serial_now = outcome.serial.load(Ordering::Acquire);
        if outcome.seq.load(Ordering::Relaxed) != seq {
            // The place is in use again, which happens only after success: see `Endpoint::make_room`.
            return OpStatus::Done;
        }
        if serial_now != serial {
            // It was taken back, and another work request has its count.
            return OpStatus::Cancelled;
        }
        let rung_in_all = self.rung_in_all();
        let rung = rung_in_all.unwrap_or(rung);
        let is_behind = |count: u32| count.wrapping_sub(seq).cast_signed() > 0;
        let end = match rung_in_all {
            None => DeviceState::Open,
            Some(_) if self.is_unresponsive() => DeviceState::Unresponsive,
            Some(_) => DeviceState::Stopped,
        };
        let queued = match end {
            DeviceState::Unresponsive => rung,
            _ => self.queued.load(Ordering::Acquire),
        };
        state.status_in(end, is_behind(rung), is_behind(queued))
    }

    /// What a receive, a read or an atomic has brought, as long as that is known.
    pub(in crate::endpoint) fn details(&self, seq: u32, serial: u32) -> Option<TransferDetails> {
        let outcome = self.outcome(seq);
        let done = outcome.state() == RequestState::Succeeded;
        let details = outcome.details.load(Ordering::Relaxed);
        let is_write = details == Details::BytesAndWriteImm as u8;
        let has_imm = is_write || details == Details::BytesAndImm as u8;
        let found = TransferDetails {
            len_bytes: outcome.len_bytes.load(Ordering::Relaxed),
            imm: has_imm.then(|| outcome.imm.load(Ordering::Relaxed)),
            is_write,
        };
        // Whether the place was used again meanwhile: see `op_status`.
        fence(Ordering::Acquire);
        let same = outcome.serial.load(Ordering::Acquire) == serial
            && outcome.seq.load(Ordering::Relaxed) == seq;
        (done && same && details != Details::None as u8).then_some(found)
    }

    /// Starts a wait for the completion of this running index. Returns its serial.
    pub(in crate::endpoint) fn enter_wait(&self, index: u32, timeout_ns: u64) -> u32 {
        let serial = self.next_serial() & 0xff_ffff;
        let record = self.record(index);
        record.wait_started_ns.store(0, Ordering::Relaxed);
        record.wait_timeout_ns.store(timeout_ns, Ordering::Relaxed);
        let word = WaitWord::new(serial, index, Wait::Prepared);
        record.wait.store(word.0, Ordering::Release);
        serial
    }

    /// Sets the state of the wait for this running index, unless it is over or the place belongs to a later one already. Returns whether it
    /// was set.
    pub(in crate::endpoint) fn set_wait(&self, index: u32, state: Wait) -> bool {
        let wait = &self.record(index).wait;
        let mut old = wait.load(Ordering::Acquire);
        while WaitWord(old).is_for(index)
            && let Some(new) = WaitWord(old).next(state)
        {
            match wait.compare_exchange_weak(old, new.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        false
    }

    /// Whether the wait for this running index ends with success. If not, or if its stream has started it, this is decided here, once: the stream's user
    /// is told of a failure also while a GPU has not come to the wait.
    pub(in crate::endpoint) fn decide_wait(&self, index: u32) -> bool {
        let has_succeeded = self.has_succeeded(index);
        let wait = || WaitWord(self.record(index).wait.load(Ordering::Acquire));
        match wait().op_status() {
            OpStatus::Rung if has_succeeded => _ = self.set_wait(index, Wait::Done),
            OpStatus::Rung | OpStatus::Queued if !has_succeeded => {
                self.set_wait(index, Wait::Failed);
            }
            _ => {}
        }
        let wait = wait();
        let is_given_up = wait.is_for(index) && wait.op_status() == OpStatus::Failed;
        has_succeeded && !is_given_up
    }

    /// Decides each wait that a stream has, by the current state of its completion.
    pub(super) fn give_up_waits(&self) {
        for index in self.under_way() {
            let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
            let is_on_stream = matches!(wait.op_status(), OpStatus::Queued | OpStatus::Rung);
            if is_on_stream && !self.has_succeeded(index) {
                self.set_wait(index, Wait::Failed);
            }
        }
    }

    /// Fails the waits that no stream has: none will have them.
    pub(in crate::endpoint) fn fail_prepared_waits(&self) {
        for index in self.under_way() {
            self.replace_prepared(index, Wait::Failed);
        }
    }

    /// The prepared wait for this running index is about to be given to a stream. Returns false if it has failed.
    #[inline]
    pub(in crate::endpoint) fn queue_wait(&self, index: u32) -> bool {
        self.replace_prepared(index, Wait::Queued)
    }

    /// Sets the state of a wait that is prepared, and returns whether it was.
    #[inline]
    fn replace_prepared(&self, index: u32, state: Wait) -> bool {
        let wait = &self.record(index).wait;
        let old = WaitWord(wait.load(Ordering::Relaxed));
        if !old.is_for(index) || old.op_status() != OpStatus::Prepared {
            return false;
        }
        let new = old.with(state).0;
        (wait.compare_exchange(old.0, new, Ordering::AcqRel, Ordering::Relaxed)).is_ok()
    }

    /// Whether a stream is in the wait for this running index.
    pub(in crate::endpoint) fn is_waiting(&self, index: u32) -> bool {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        wait.is_for(index) && wait.op_status() == OpStatus::Rung
    }

    /// Whether a stream has the wait for this running index, and has not decided it.
    pub(in crate::endpoint) fn is_on_stream(&self, index: u32) -> bool {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        wait.is_for(index) && matches!(wait.op_status(), OpStatus::Queued | OpStatus::Rung)
    }

    /// Whether the completion of this running index has come, in error or not.
    pub(in crate::endpoint) fn has_come(&self, index: u32) -> bool {
        // In this order: see `has_succeeded`.
        self.cq.cqe(index).is_some()
            || self.seen.load(Ordering::Acquire).wrapping_sub(index) as i32 > 0
    }

    /// The status of the wait for this running index. A wait is over when its completion is there, in error or not. The
    /// result is exact after a full reap.
    pub(in crate::endpoint) fn wait_status(&self, index: u32, serial: u32) -> OpStatus {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        let op_status = if !wait.is_for(index) {
            // The place is in use again, so the wait is over.
            OpStatus::Done
        } else if wait.serial() != serial {
            // It was taken back, and another wait has its index.
            OpStatus::Cancelled
        } else {
            wait.op_status()
        };
        if op_status == OpStatus::Done && self.is_behind_failure(index) {
            OpStatus::Failed
        } else {
            op_status
        }
    }

    /// Whether the completion of this running index was taken by a wait that was dropped before a stream had it.
    pub(in crate::endpoint) fn is_dropped_wait(&self, index: u32) -> bool {
        let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
        wait.is_for(index) && wait.op_status() == OpStatus::Cancelled
    }

    /// Whether the completion of this running index is the first in error, or behind it.
    fn is_behind_failure(&self, index: u32) -> bool {
        let failed_at = self.failed_at.load(Ordering::Acquire);
        u32::try_from(failed_at).is_ok_and(|at| index.wrapping_sub(at) as i32 >= 0)
    }

    /// Whether a completion in error was found.
    pub(in crate::endpoint) fn has_error(&self) -> bool {
        self.failed_at.load(Ordering::Acquire) != u64::MAX
    }

    /// Whether the completion of this running index is there, and is not an error.
    pub(in crate::endpoint) fn has_succeeded(&self, index: u32) -> bool {
        let cqe = self.cq.cqe(index);
        // After the look at the CQE, which acquires: see `reap_for_the_last_time`.
        let is_given_up = self.is_given_up.load(Ordering::Acquire);
        // After the look at the CQE, whose place is given back to the device only when it was seen.
        let seen = self.seen.load(Ordering::Acquire);
        if seen.wrapping_sub(index) as i32 > 0 {
            return !self.is_behind_failure(index);
        }
        !is_given_up && cqe.is_some_and(|cqe| !cqe.opcode.is_error())
    }

    /// The statuses of work requests and waits at the end of a generation; `rung` counts those that were executed.
    pub(in crate::endpoint) fn ends(&self, rung: u32) -> (FinalStatuses, FinalStatuses) {
        let posted = self.outstanding.posted();
        let requests = (1..=self.outcomes.len() as u32).filter_map(|back| {
            let seq = posted.wrapping_sub(back);
            let outcome = self.outcome(seq);
            let serial = outcome.serial.load(Ordering::Relaxed);
            let op_status = self.op_status(seq, serial, rung);
            (outcome.seq.load(Ordering::Relaxed) == seq).then_some((seq, op_status))
        });
        let taken = self.taken.load(Ordering::Acquire);
        let waits = (1..=self.records.len() as u32).filter_map(|back| {
            let index = taken.wrapping_sub(back);
            let wait = WaitWord(self.record(index).wait.load(Ordering::Acquire));
            let op_status = self.wait_status(index, wait.serial());
            wait.is_for(index).then_some((index, op_status))
        });
        (
            FinalStatuses::new(posted, requests),
            FinalStatuses::new(taken, waits),
        )
    }
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::sync::{Arc, mpsc};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::endpoint::queue::{HeldRegions, WorkInFlight};
    use crate::{Device, Endpoint, EndpointConfig, QueueKind};

    /// How long one thread enters requests while another asks about them: some millions of times.
    const TIME: Duration = Duration::from_millis(300);

    #[test]
    fn a_request_that_is_done_stays_so_while_its_place_is_used_again() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let config = EndpointConfig::default().send_depth(1);
        let endpoint = Endpoint::new(&domain, &config).unwrap();
        let queue = endpoint.shared.queue(QueueKind::Send);
        // Count and serial of the newest request that is done.
        let (newest, is_over) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
        let post = || {
            let seq = queue.outstanding.posted();
            let work = WorkInFlight {
                wr_id: 0,
                end: 0,
                held: HeldRegions::default(),
            };
            let serial = queue.enter(0, work);
            queue.outstanding.reap_with(|_| {
                queue.outcome(seq).set_state(RequestState::Succeeded);
            });
            newest.store(u64::from(seq) << 32 | u64::from(serial), Ordering::Release);
            // For different times, so that the other thread may be anywhere.
            (0..seq % 40).for_each(|_| std::hint::spin_loop());
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let begin = Instant::now();
                while begin.elapsed() < TIME {
                    (0..100).for_each(|_| post());
                }
                is_over.store(true, Ordering::Release);
            });
            while !is_over.load(Ordering::Acquire) {
                let asked = newest.load(Ordering::Acquire);
                if asked == u64::MAX {
                    continue;
                }
                let (seq, serial) = ((asked >> 32) as u32, asked as u32);
                for _ in 0..4 {
                    let found = queue.op_status(seq, serial, seq.wrapping_add(1));
                    assert_eq!(found, OpStatus::Done, "request {seq}");
                }
            }
        });
    }

    /// The thread that gives a device up and one that has found a completion in error need the same two locks.
    #[test]
    fn device_is_given_up_while_another_thread_reports_failures() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let shared = Arc::clone(&endpoint.shared);
        let (sender, is_over) = mpsc::channel();
        // Not scoped: the test is to fail, and not to wait, if they wait for each other.
        std::thread::spawn(move || {
            (0..5000).for_each(|_| shared.finish_unresponsive());
            sender.send(()).unwrap();
        });
        let shared = Arc::clone(&endpoint.shared);
        std::thread::spawn(move || {
            while Arc::strong_count(&shared) > 1 {
                // As while a completion in error is processed.
                let _cursor = shared.queue(QueueKind::Send).cursor.lock().unwrap();
                shared.fail(None, crate::Cause::QueuePair);
            }
        });
        let end = is_over.recv_timeout(Duration::from_secs(60));
        if end.is_err() {
            // Its drop would wait, too.
            std::mem::forget(endpoint);
        }
        assert!(end.is_ok(), "the threads wait for each other");
    }
}
