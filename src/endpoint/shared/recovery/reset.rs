//! The reset of an endpoint: it ends a generation, and the next one starts.
#![allow(unsafe_code)] // clears the doorbell record

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::stop_state::{POLL_INTERVAL, STOP};
use crate::endpoint::QueueKind;
use crate::endpoint::queue::QueueState;
use crate::endpoint::shared::EndpointShared;
use crate::endpoint::shared::status::GenerationEnd;
use crate::nic::Queues;
use crate::proxy::await_executed;
use crate::{Cause, Error, Result, StateKind};

/// The number of generations whose final statuses are kept while there are tickets.
const GENERATIONS_KEPT: usize = 1 << 16;

impl EndpointShared {
    /// Starts a new generation. The caller has the endpoint to itself, holds the generation, and no stream has a program of it.
    pub(in crate::endpoint) fn start_over(&self) -> Result<()> {
        // An operation that is complete by now is reported as complete, also if no thread has looked for its completion yet. The others end as
        // by an abort: the device is stopped before the final statuses are taken, so that nothing completes between the two.
        self.look_for_failure();
        self.reap_fully();
        if self.failure().is_none() {
            self.fail(None, Cause::Aborted);
        }
        while !self.shut_down() {
            std::thread::sleep(POLL_INTERVAL);
        }
        if self.is_unresponsive() {
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
            ends: [QueueKind::Send, QueueKind::Recv]
                .map(|kind| self.queue(kind).ends(self.doorbells_stored(kind))),
            failure: self.failure(),
        };
        // Their threads have handles.
        self.await_orders();
        let mut generations = self
            .generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The endpoint and the caller's `Closing`.
        const OWN_HANDLES: usize = 2;
        if self.weak.strong_count() <= OWN_HANDLES {
            // There is no ticket.
            generations.clear();
        } else {
            if generations.len() == GENERATIONS_KEPT {
                generations.pop_front();
            }
            generations.push_back(past);
        }
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
        self.set_rung(QueueKind::Send, 0);
        self.set_rung(QueueKind::Recv, 0);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        *failure = None;
        self.attachments.failure_notifier().reset();
        self.has_failed.store(false, Ordering::Release);
        self.is_shut_down.store(false, Ordering::Release);
        self.stop_state.start_over();
        // A failure of the new generation is not to wait for what follows.
        drop(failure);
        // What work of the generation held is deregistered by threads that nobody waits for. A peer of the next generation is not to reach it.
        await_executed(STOP);
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
}
