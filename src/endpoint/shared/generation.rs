//! The generations of an endpoint: each reset ends one and starts the next.
#![allow(unsafe_code)] // clears the doorbell record

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::Shared;
use super::standstill::LOOK;
use crate::endpoint::Side;
use crate::endpoint::clock::now_ns;
use crate::endpoint::outcome::OpStatus;
use crate::endpoint::queue::{FinalStatuses, QueueState};
use crate::nic::Queues;
use crate::{Cause, Error, Result, StateKind, WorkError};

/// How an earlier generation of an endpoint ended, for the tickets of that time.
#[derive(Debug, Clone)]
pub(super) struct GenerationEnd {
    epoch: u32,
    /// Of each side: work requests, and waits.
    ends: [(FinalStatuses, FinalStatuses); 2],
    failure: Option<WorkError>,
}

/// The number of generations whose final statuses are kept.
const GENERATIONS_KEPT: usize = 64;

/// An operation that counts as one on a stream. The drop takes it off the count, unless [`Entered::stay`] was called.
pub(in crate::endpoint) struct Entered<'a>(&'a Shared);

impl Entered<'_> {
    /// The stream has the operation. From now on [`Shared`]'s `finished` takes it off the count.
    pub(in crate::endpoint) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.on_streams.leave();
    }
}

/// As long as this lives, nothing is given to streams.
pub(in crate::endpoint) struct Closing(Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        // Release: a thread that sees it sees the new generation.
        self.0.closing.store(false, Ordering::SeqCst);
    }
}

impl Shared {
    /// As long as this is held, no new generation begins.
    pub(in crate::endpoint) fn hold_generation(&self) -> MutexGuard<'_, ()> {
        self.generation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Shared::hold_generation`], if nobody holds it.
    pub(in crate::endpoint) fn try_hold_generation(&self) -> Option<MutexGuard<'_, ()>> {
        match self.generation.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Counts an operation that is about to be given to a stream.
    ///
    /// # Errors
    /// [`Error::State`] while the endpoint is being reset.
    pub(in crate::endpoint) fn enter_stream(&self) -> Result<Entered<'_>> {
        // SeqCst, as in `close`: either the reset sees this operation, or this sees the reset. The watchdog's look before it
        // stops watching pairs with it, too.
        self.on_streams.enter();
        let entered = Entered(self);
        if self.closing.load(Ordering::SeqCst) {
            return Err(Error::state(
                StateKind::Resetting,
                "stream_post",
                "the endpoint is being reset",
            ));
        }
        Ok(entered)
    }

    /// An operation that entered, and whose [`Entered`] was kept, is done.
    pub(in crate::endpoint) fn leave_stream(&self) {
        self.on_streams.leave();
    }

    /// Lets no more operations through to streams, and waits until they are done with those that they have.
    pub(in crate::endpoint) fn close(self: &Arc<Self>, timeout: Duration) -> Result<Closing> {
        self.closing.store(true, Ordering::SeqCst);
        let closing = Closing(Arc::clone(self));
        let deadline = now_ns().saturating_add(timeout.as_nanos() as u64);
        while self.on_streams.any() {
            if now_ns() > deadline {
                return Err(Error::Timeout {
                    operation: "reset: programs of the endpoint are still on a stream; this",
                    timeout,
                });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(closing)
    }

    /// Starts a new generation. The caller has the endpoint to itself, holds the generation, and no stream has a program of it.
    pub(in crate::endpoint) fn start_over(&self) -> Result<()> {
        // An operation that is complete by now is reported as complete, also if no thread has looked for its completion yet. The others end as
        // by an abort: the device is stopped before the final statuses are taken, so that nothing completes between the two.
        self.look_for_failure();
        self.reap_fully();
        if self.failure().is_none() {
            self.fail(None, Cause::Aborted);
        }
        while !self.break_down() {
            std::thread::sleep(LOOK);
        }
        if self.is_given_up() {
            self.stop_again()?;
            if self.queues.iter().any(QueueState::has_mixed) && !self.qp.resets_cqs() {
                return Err(Error::state(
                    StateKind::QueuePair,
                    "reset",
                    "waits of a GPU were released while the device was not stopped, so it is not known how far its completion queue came; \
                     make a new endpoint",
                ));
            }
        }
        self.qp.reset()?;
        let past = GenerationEnd {
            epoch: self.epoch.load(Ordering::Relaxed),
            ends: [Side::Send, Side::Recv].map(|side| self.queue(side).ends(self.told(side))),
            failure: self.failure(),
        };
        let mut generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if generations.len() == GENERATIONS_KEPT {
            generations.remove(0);
        }
        generations.push(past);
        drop(generations);
        // Before the queues are reset: a thread that looks at them and then finds the old count has not seen them start over.
        self.ended.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        for queue in &self.queues {
            queue.reset(if self.qp.resets_cqs() {
                0
            } else {
                queue.next_cqe()
            });
        }
        self.set_rung(Side::Send, 0);
        self.set_rung(Side::Recv, 0);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        *failure = None;
        self.attachments.alarm().reset();
        self.has_failed.store(false, Ordering::Release);
        self.broken_down.store(false, Ordering::Release);
        self.standstill.start_over();
        Ok(())
    }

    /// Clears the doorbell records, as after creation.
    pub(in crate::endpoint) fn reset_records(&self) {
        let Queues::Mlx5(memory) = self.qp.queues();
        for word in 0..2 {
            // SAFETY: the record has two words, which live as long as `qp`.
            unsafe { AtomicU32::from_ptr(memory.record.add(word)) }.store(0, Ordering::Release);
        }
    }

    /// Whether that generation has not ended, so that nothing that was loaded before this call is of the next one.
    pub(in crate::endpoint) fn is_in(&self, epoch: u32) -> bool {
        fence(Ordering::Acquire);
        self.ended.load(Ordering::Relaxed) == epoch
    }

    /// How an operation of an earlier generation ended: with success, or with that generation's failure. Nothing is known of generations
    /// whose statuses are no longer kept.
    pub(in crate::endpoint) fn status_in_generation(
        &self,
        epoch: u32,
        side: Side,
        is_wait: bool,
        count: u32,
    ) -> (OpStatus, Option<WorkError>) {
        let generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let aborted = WorkError {
            qpn: self.qp.qpn(),
            wr_id: None,
            cause: Cause::Aborted,
        };
        let Some(past) = generations.iter().find(|past| past.epoch == epoch) else {
            return (OpStatus::Unknown, Some(aborted));
        };
        let (requests, waits) = &past.ends[side as usize];
        let op_status = if is_wait { waits } else { requests }.of(count);
        (op_status, past.failure.or(Some(aborted)))
    }
}
