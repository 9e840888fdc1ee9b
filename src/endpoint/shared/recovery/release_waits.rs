//! What is done to an endpoint that has failed: the device is stopped, and then waits are released.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::stop_state::{DeviceStop, POLL_INTERVAL, Quiesced, Stopped};
use crate::Cause;
use crate::endpoint::QueueKind;
use crate::endpoint::clock::now_ns;
use crate::endpoint::queue::QueueState;
use crate::endpoint::shared::EndpointShared;
use crate::proxy::drop_elsewhere;
use crate::stream::{await_or_defer, stopping};

impl EndpointShared {
    /// The endpoint was dropped, and tickets or streams still have handles. Nothing is received any more, and every ticket ends.
    pub(in crate::endpoint::shared) fn end_endpoint(&self) {
        self.is_dropped.store(true, Ordering::SeqCst);
        if self.on_streams.any() || self.queue(QueueKind::Send).is_device_owned() {
            // The watchdog fails it when the streams are done with it.
            self.activate();
            return;
        }
        self.fail(None, Cause::Dropped);
        self.stop_transmitting();
    }

    /// After a failure of that generation, and before any wait of this endpoint is released: moves the queue pair to error, so that doorbells transmit
    /// nothing, and those of the endpoints behind the waits on streams that cannot skip what is queued.
    pub(in crate::endpoint::shared) fn stop(&self, generation: u32) {
        stopping(|| {
            let this = std::ptr::from_ref(self).addr();
            let notifier = self.attachments.failure_notifier();
            let streams = notifier.fail_queued_after(this, generation);
            if !streams.is_empty() {
                drop_elsewhere(Box::new(streams));
            }
            self.tell_device(generation);
        });
    }

    /// Moves the queue pair to error, unless that generation is over. The caller waits for the device later if it is [`stopping`].
    pub(in crate::endpoint::shared) fn tell_device(&self, generation: u32) {
        if self.begin_error(generation) {
            await_or_defer(Arc::<DeviceStop>::clone(&self.stop_state));
        }
    }

    /// After a failure: ends everything that waits for the endpoint. Goes as far as possible without waiting, and returns whether it is done. The
    /// caller holds the generation, and calls again until it is.
    pub(in crate::endpoint::shared) fn shut_down(&self) -> bool {
        if !self.is_shut_down.load(Ordering::Relaxed) {
            let stopped = self.stop_device();
            if matches!(stopped, Stopped::NotYet) {
                return false;
            }
            // See `PreparedRef::hand_over`: from here on, a thread that gives a stream an operation has entered that, or finds the failure.
            let _ = self.handing.heavy();
            match stopped {
                Stopped::NotYet => {}
                Stopped::Yes(quiesce) => self.finish_stopped(quiesce),
                Stopped::Unresponsive => self.finish_unresponsive(),
            }
            (self.queues.iter()).for_each(QueueState::fail_prepared_waits);
            // From here on the device executes nothing. Streams are released after this, not before: a doorbell behind a wait that was
            // given up must not send what the wait was to protect. (A device that was given up may send it: such work is reported as
            // unknown.)
            self.is_shut_down.store(true, Ordering::Release);
        }
        let is_counted = self.doorbells().is_some();
        if self.is_unresponsive() {
            // Only the word that it waits for ends a wait of a GPU.
            let needs_word = !is_counted && !self.attachments.is_empty();
            (self.queues.iter()).for_each(|queue| queue.release_unresponsive(needs_word));
        } else {
            self.reap();
            (self.queues.iter()).for_each(|queue| queue.release_waiters(is_counted));
        }
        for queue in &self.queues {
            // No stream has to wait for its turn any more.
            self.set_rung(queue.kind, queue.queued.load(Ordering::Acquire));
        }
        true
    }

    /// The device is stopped: it will never complete what it has not completed by now.
    fn finish_stopped(&self, quiesce: Quiesced) {
        if quiesce.resets_records {
            self.queues.iter().for_each(QueueState::enter_quiesced);
        }
        for (queue, rung) in self.queues.iter().zip(quiesce.rung) {
            // Not between a discard's check of this count and the discard.
            let _failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            queue.end_rung(rung);
        }
    }

    /// The device cannot be stopped. Operations that are complete by now are complete. Of the others that streams have, nothing is known,
    /// whether they were rung or not: their doorbells may still be executed.
    pub(in crate::endpoint) fn finish_unresponsive(&self) {
        self.reap_for_the_last_time();
        for queue in &self.queues {
            // Not between a discard's check of this count and the discard.
            let _failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            queue.give_up();
        }
    }

    /// Whether the endpoint was given up in this generation: see [`Stopped::Unresponsive`].
    pub(super) fn is_unresponsive(&self) -> bool {
        self.queues.iter().any(QueueState::is_unresponsive)
    }

    /// Running count of work requests whose doorbell may have been stored. A program counts its doorbell after it has stored it.
    pub(super) fn may_be_rung(&self, queue: &QueueState) -> u32 {
        let doorbells_stored = self.doorbells_stored(queue.kind);
        if self.doorbells().is_some() {
            return doorbells_stored;
        }
        let queued = queue.queued.load(Ordering::Acquire);
        let begun = queue.begun.load(Ordering::Relaxed);
        let has_begun = begun.wrapping_sub(doorbells_stored).cast_signed() > 0;
        // It is not known how far a GPU has come in a program.
        let may_have_begun = !self.attachments.is_empty() && queued != doorbells_stored;
        if !has_begun && !may_have_begun {
            return doorbells_stored;
        }
        // A turn begins when the doorbell before it is counted, so one doorbell may be stored and not counted. It is that of the next request that was
        // not cancelled.
        let mut next = doorbells_stored;
        while next != queued && queue.is_cancelled(next) {
            next = next.wrapping_add(1);
        }
        // A launch that was refused has begun requests that no stream has.
        if next == queued {
            next
        } else {
            next.wrapping_add(1)
        }
    }

    /// [`EndpointShared::shut_down`] of an endpoint that has failed, if the watchdog has not done it yet. Waits until it is done, at most until `until_ns`.
    #[cold]
    pub(in crate::endpoint) fn shut_down_until(&self, until_ns: u64) {
        while !self.is_shut_down.load(Ordering::Acquire) {
            // Not for a thread that holds it while the device executes a command.
            if let Some(_generation) = self.try_hold_generation()
                && (!self.has_failed.load(Ordering::Acquire) || self.shut_down())
            {
                return;
            }
            if now_ns() >= until_ns {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Whether the device of a failed endpoint has stopped, or was given up.
    pub(in crate::endpoint) fn has_stopped(&self) -> bool {
        self.is_shut_down.load(Ordering::Acquire)
    }

    /// Looks for the completions in error of everything that was rung, and returns whether all are there. A device may take some time to write
    /// them. A device that hangs is not waited for long: it is quiesced after this, and requests that it did not complete never get a completion.
    pub(super) fn has_flushed(&self) -> bool {
        // Requests that were triggered and not rung are flushed as well, once the device is told of them.
        for queue in &self.queues {
            self.ring_triggered(queue.kind);
        }
        self.qp.progress();
        self.reap_fully();
        self.queues.iter().all(|queue| {
            if queue.is_device_owned() {
                // Nothing of it is outstanding; kernels learn of the failure, not of each request's end.
                return true;
            }
            let left = self.rung(queue.kind).wrapping_sub(queue.outstanding.done());
            left.cast_signed() <= 0
        })
    }
}
