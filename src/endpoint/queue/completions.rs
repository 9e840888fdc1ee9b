//! The reaper: completions processed in order, work requests done, and completions given back or handed out.

use std::sync::atomic::{Ordering, fence};
use std::sync::{PoisonError, TryLockError};

use super::{Details, QueueState};
use crate::Cause;
use crate::endpoint::outcome::{Evidence, RequestState};
use crate::endpoint::{Completion, DatagramSource, Operation};
use crate::mlx5::{Cqe, CqeOpcode, Opcode, Syndrome, is_synthetic};

#[derive(Debug, Default)]
pub(super) struct Cursor {
    pub(super) seen: u32,
    pub(super) freed: u32,
    /// An error completion was seen.
    pub(super) failed: bool,
    /// Streams are told of completions from the first error on.
    pub(super) errors_published: bool,
    /// The device was given up: completions that it writes from now on are not processed.
    pub(super) is_over: bool,
    /// Behind the last completion that the device wrote, once it writes no more in this generation.
    pub(super) quiesced_from: Option<u32>,
}

/// An error completion, as found by [`QueueState::reap`].
#[derive(Debug, Clone, Copy)]
pub(in crate::endpoint) struct ErrorCompletion {
    pub(in crate::endpoint) wr_id: Option<u64>,
    pub(in crate::endpoint) cause: Cause,
    pub(in crate::endpoint) flushed: bool,
}

impl QueueState {
    /// Processes new completions, and gives back those that are no longer needed. Each error goes to `failed`. Returns
    /// whether any was new. If another thread is processing completions, returns at once.
    #[inline]
    pub(in crate::endpoint) fn reap(&self, failed: &dyn Fn(ErrorCompletion)) -> bool {
        match self.cursor.try_lock() {
            Ok(mut cursor) => self.reap_with(&mut cursor, failed),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.reap_with(&mut poisoned.into_inner(), failed)
            }
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// [`QueueState::reap`] that waits for the other thread.
    pub(in crate::endpoint) fn reap_fully(&self, failed: &dyn Fn(ErrorCompletion)) -> bool {
        self.reap_with(
            &mut self.cursor.lock().unwrap_or_else(PoisonError::into_inner),
            failed,
        )
    }

    /// [`QueueState::reap_fully`] of a device that cannot be stopped. A completion that comes after this counts for nothing: neither for its work request
    /// nor for a wait.
    pub(in crate::endpoint) fn reap_for_the_last_time(
        &self,
        failed: &dyn Fn(ErrorCompletion),
    ) -> bool {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_given_up.store(true, Ordering::Relaxed);
        // A thread that has found a completion and not this flag (`has_succeeded`) has looked before this fence, so it is processed here.
        fence(Ordering::SeqCst);
        let new = self.reap_with(&mut cursor, failed);
        cursor.is_over = true;
        new
    }

    #[inline]
    fn reap_with(&self, cursor: &mut Cursor, failed: &dyn Fn(ErrorCompletion)) -> bool {
        if cursor.is_over {
            return false;
        }
        let first = cursor.seen;
        while cursor.seen.wrapping_sub(cursor.freed) < self.cq.cqe_count() {
            let Some(cqe) = self.cq.cqe(cursor.seen) else {
                break;
            };
            if cqe.opcode.is_error() && !cursor.failed {
                cursor.failed = true;
                // Everything from this completion on has failed; see `wait_status`.
                self.failed_at
                    .store(u64::from(cursor.seen), Ordering::Release);
                self.shown().store(cursor.seen, Ordering::Release);
            }
            self.arrived
                .store(cursor.seen.wrapping_add(1), Ordering::Relaxed);
            // Release inside, where the work request is not outstanding any more: orders the store before it.
            self.process(cursor.seen, &cqe, failed);
            cursor.seen = cursor.seen.wrapping_add(1);
        }
        let new = cursor.seen != first;
        if new {
            self.seen.store(cursor.seen, Ordering::Release);
            if !cursor.failed || cursor.errors_published {
                self.shown().store(cursor.seen, Ordering::Release);
            }
        }
        let freed = cursor.freed;
        if freed != cursor.seen {
            // Loaded only if there is something to give back: the poster writes it, and a proxy runs this all the time.
            let taken = self.taken.load(Ordering::Acquire);
            // No stream waits for completions of kernels, and `count_for_kernels` has given their places back.
            let retires = !self.is_device_owned();
            while cursor.freed != cursor.seen
                && cursor.freed != taken
                && !self.cq.is_marked(cursor.freed)
            {
                if retires {
                    self.cq.retire(cursor.freed);
                }
                cursor.freed = cursor.freed.wrapping_add(1);
            }
        }
        if cursor.freed != freed {
            self.cq.set_consumer_index(cursor.freed);
            self.freed.store(cursor.freed, Ordering::Release);
        }
        new
    }

    /// Processes a completion: the work requests up to its own are done.
    fn process(&self, index: u32, cqe: &Cqe, failed: &dyn Fn(ErrorCompletion)) {
        let record = self.record(index);
        let done = self.outstanding.done();
        let in_flight = self.outstanding.posted().wrapping_sub(done);
        let error = cqe.opcode.is_error();
        let flushed = cqe.syndrome == Syndrome::WrFlush as u8;
        let evidence = match (error, flushed) {
            (false, _) => Evidence::Success,
            (true, false) => Evidence::Error,
            (true, true) => Evidence::Flush,
        };
        let tell = |wr_id| {
            if error {
                let cause = Cause::Completion {
                    status: cqe.status(),
                    syndrome: cqe.syndrome,
                    vendor_syndrome: cqe.vendor_syndrome,
                };
                failed(ErrorCompletion {
                    wr_id,
                    cause,
                    flushed,
                });
            }
        };
        // A completion that the watchdog wrote to release a waiter belongs to no work request: its counter means nothing.
        let ours = is_synthetic(cqe);
        let own = (0..in_flight).find(|ahead| {
            !ours
                && self
                    .outcome(done.wrapping_add(*ahead))
                    .index
                    .load(Ordering::Relaxed) as u16
                    == cqe.wqe_counter
        });
        let mut wr_id = None;
        if in_flight == 0 && !ours {
            self.count_for_kernels(index, cqe);
        }
        if let Some(ahead) = own {
            for count in 0..=ahead {
                let outcome = self.outcome(done.wrapping_add(count));
                let last = count == ahead;
                // The state and the failure are recorded before the poster may use the place again. The regions are released
                // after that.
                let reaped = self.outstanding.reap_with(|work| {
                    outcome.wr_id.store(work.wr_id, Ordering::Relaxed);
                    self.consumed.store(work.end, Ordering::Release);
                    let state = RequestState::from_byte(outcome.state.load(Ordering::Relaxed));
                    if !last {
                        outcome.note(Details::None);
                        outcome.set_state(state.after_later(evidence));
                        return;
                    }
                    // A request that was cancelled is a no-operation in the ring. It completes under its number, or is flushed with what is
                    // behind it: it has not failed then.
                    let is_named = !error || state != RequestState::Cancelled;
                    wr_id = is_named.then_some(work.wr_id);
                    outcome.note(match (cqe.transferred(), cqe.opcode) {
                        (None, _) => Details::None,
                        (Some(len_bytes), opcode) => {
                            outcome.len_bytes.store(len_bytes, Ordering::Relaxed);
                            outcome.imm.store(cqe.imm, Ordering::Relaxed);
                            match opcode {
                                CqeOpcode::RespSendImm => Details::BytesAndImm,
                                CqeOpcode::RespWriteImm => Details::BytesAndWriteImm,
                                _ => Details::Bytes,
                            }
                        }
                    });
                    outcome.set_state(state.after_own(evidence));
                    tell(wr_id);
                });
                if reaped.is_none() {
                    break;
                }
            }
        } else {
            tell(None);
        }
        record.wr_id.store(wr_id.unwrap_or(0), Ordering::Relaxed);
        self.known(index).store(wr_id.is_some(), Ordering::Relaxed);
    }

    /// Takes the next completion for the caller, if it is there. `has_source`: receives are of datagrams.
    pub(in crate::endpoint) fn poll(
        &self,
        has_source: bool,
    ) -> Option<std::result::Result<Completion, ErrorCompletion>> {
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
            return Some(Err(ErrorCompletion {
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
            len_bytes: cqe.transferred().unwrap_or(0),
            imm,
            source: (has_source && cqe.opcode.is_receive()).then_some(DatagramSource {
                qpn: cqe.source_qpn,
                lid: cqe.source_lid,
                has_grh: cqe.grh != 0,
            }),
        }))
    }
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::endpoint::queue::{HeldRegions, WorkInFlight};
    use crate::{Device, Endpoint, EndpointConfig, QueueKind};

    /// The completion of a request at that place of the ring.
    fn completion(index: u16, opcode: CqeOpcode, syndrome: u8) -> Cqe {
        Cqe {
            opcode,
            qpn: 1,
            wqe_counter: index,
            byte_count: 0,
            imm: 0,
            source_qpn: 0,
            source_lid: 0,
            sl: 0,
            grh: 0,
            srqn_uidx: 0,
            syndrome,
            vendor_syndrome: 0,
            timestamp: 0,
            send_opcode: 0,
            signature: 0,
            solicited: false,
            owner: false,
        }
    }

    /// Two requests, 7 and 8, of which the first is cancelled.
    fn first_is_cancelled(queue: &QueueState) {
        for (index, is_cancelled) in [(0, true), (1, false)] {
            let work = WorkInFlight {
                wr_id: 7 + u64::from(index),
                end: index + 1,
                held: HeldRegions::default(),
            };
            let seq = queue.outstanding.posted();
            queue.enter(index, work);
            if is_cancelled {
                queue.cancel(seq);
            }
        }
    }

    #[test]
    fn failure_names_no_request_that_was_cancelled() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let queue = endpoint.shared.queue(QueueKind::Send);
        first_is_cancelled(queue);
        let named = RefCell::new(Vec::new());
        for index in 0..2 {
            let flushed = completion(index, CqeOpcode::ReqErr, Syndrome::WrFlush as u8);
            let note = |error: ErrorCompletion| named.borrow_mut().push(error.wr_id);
            queue.process(index.into(), &flushed, &note);
        }
        assert_eq!(named.into_inner(), [None, Some(8)]);
    }

    #[test]
    fn the_completion_of_a_request_that_was_cancelled_has_its_number() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let queue = endpoint.shared.queue(QueueKind::Send);
        first_is_cancelled(queue);
        for index in 0..2 {
            let done = completion(index, CqeOpcode::Req, 0);
            queue.process(index.into(), &done, &|error| panic!("{error:?}"));
            let index = u32::from(index);
            assert!(queue.known(index).load(Ordering::Relaxed));
            let wr_id = queue.record(index).wr_id.load(Ordering::Relaxed);
            assert_eq!(wr_id, 7 + u64::from(index));
        }
    }
}
