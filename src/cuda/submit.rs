//! How programs, records and waits for events are queued on a CUDA stream, or on the stream of an application's kernels.
#![allow(unsafe_code)] // calls the driver

use std::sync::Arc;

use cudarc::driver::sys;

use super::batch::Batch;
use super::capture::forbid;
use super::driver::check;
use super::memops::MemOp;
use super::pending::{Pending, What, defer_drops};
use super::queue::{Call, Given, Queue};
use super::state::StreamState;
use super::word::STATUS_STREAM;
use crate::stream::{Event, Mark, Record, Submission};
use crate::{Error, Result};

impl StreamState {
    pub(super) fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        if batch.is_empty() {
            return self.check();
        }
        self.queue(|state, queue| state.prepare(queue, batch.iter()))?;
        batch.clear();
        Ok(())
    }

    #[allow(clippy::result_large_err)] // as Executor::submit_one has it
    pub(super) fn submit_one(
        &self,
        submission: Submission,
    ) -> std::result::Result<(), (Submission, Error)> {
        let one = std::slice::from_ref(&submission);
        let queued = self.queue(|state, queue| state.prepare(queue, one.iter()));
        queued.map_err(|error| (submission, error))
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        let (record, number) = event.begin_record();
        let mut position = 0;
        self.queue(|state, queue| {
            queue.make_room(0);
            let after = queue.issued;
            state.count_for(queue, after, What::Record(record));
            position = queue.issued;
            Ok(())
        })?;
        let progress = Arc::clone(&self.progress);
        Record::announce(event, number, Mark { progress, position });
        Ok(())
    }

    pub(super) fn wait_event(&self, event: &Event) -> Result<()> {
        let Some(mark) = event.mark() else {
            return self.check();
        };
        if mark.progress.stream == self.id || mark.is_reached() {
            return self.check();
        }
        if let Some(word) = mark.progress.device_word() {
            // The word is that of another stream's count, whose memory the event keeps: so must this stream, until it has passed.
            return self.queue(|state, queue| {
                queue.make_room(Batch::WAIT_WORDS);
                let after = queue.issued;
                let by_kernel = state.wait_for_count(queue, word, mark.position as u32);
                let what = What::Event {
                    _mark: Some(mark),
                    by_kernel,
                    given_up: false,
                    was_told: false,
                };
                state.count_for(queue, after, what);
                Ok(())
            });
        }
        // Nothing that a GPU could look at: the thread that looks lets it pass.
        self.queue(|state, queue| {
            queue.make_room(Batch::WAIT_WORDS);
            queue.gate = queue.gate.wrapping_add(1);
            let gate = queue.gate;
            let after = queue.issued;
            let by_kernel = state.wait_for_count(queue, state.count.words.gate_at(), gate);
            let what = What::Event {
                _mark: None,
                by_kernel,
                given_up: false,
                was_told: false,
            };
            state.count_for(queue, after, what);
            // Before the driver has it. If it is refused, the gate is opened in vain, and the next one has its number.
            state.gates.lock().push_back((queue.gate, mark));
            Ok(())
        })
    }

    /// Queues operations made by `prepare`, which may fail and then leaves everything as it was.
    pub(super) fn queue(
        &self,
        prepare: impl FnOnce(&StreamState, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        self.queue_unchecked(prepare)
    }

    /// [`StreamState::queue`] that reports no earlier failure.
    pub(super) fn queue_unchecked(
        &self,
        prepare: impl FnOnce(&StreamState, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        self.queue_by(prepare, |state, queue| {
            if queue.for_kernels {
                state.issue_to_kernels(queue)
            } else {
                state.issue(queue)
            }
        })
    }

    pub(super) fn queue_by(
        &self,
        prepare: impl FnOnce(&StreamState, &mut Queue) -> Result<()>,
        issue: impl FnOnce(&StreamState, &mut Queue) -> Result<()>,
    ) -> Result<()> {
        let mut queue = self.queue.lock();
        let kept = queue.keep();
        let result = prepare(self, &mut queue).and_then(|()| issue(self, &mut queue));
        // Not under the lock: an owner may be dropped with what was not entered.
        let refused = std::mem::take(&mut queue.entering);
        if result.is_err() {
            let gate = queue.go_back(&kept);
            // Their numbers are not used again: one may have been opened already.
            self.gates
                .lock()
                .retain(|(opened, _)| opened.wrapping_sub(gate).cast_signed() <= 0);
        } else {
            queue.settle();
            // Empty: its space is for the next call.
            queue.entering = refused;
            return result;
        }
        drop(queue);
        drop(refused);
        result
    }

    /// Queues what `queue.ops` holds, and enters what goes with it. Nothing of both on an error. Where the driver refuses a later call of
    /// several, those before it cannot be taken back: what was not given is discarded, and the failure is one of work queued earlier.
    fn issue(&self, queue: &mut Queue) -> Result<()> {
        let entered = self.context.enter()?;
        forbid(self.raw, "queue on a CUDA stream")?;
        queue.end_call();
        let mut given = None;
        let mut refused = None;
        for Call { what, issued } in &queue.calls {
            let result = self.give(what, &mut queue.ops, &queue.batch);
            match (result, given) {
                (Ok(()), _) => {
                    given = Some(*issued);
                    queue.taken += 1;
                }
                (Err(error), None) => {
                    self.note(&error);
                    return Err(error);
                }
                (Err(error), Some(_)) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        drop(entered);
        if let (Some(error), Some(given)) = (refused, given) {
            self.lose(queue, given, &error);
        }
        self.pending.enter(&mut queue.entering);
        self.ensure_watched();
        Ok(())
    }

    /// Enters what was made for kernels of the application, which [`KernelStream::take`](super::KernelStream::take) hands out.
    fn issue_to_kernels(&self, queue: &mut Queue) -> Result<()> {
        self.pending.enter(&mut queue.entering);
        self.ensure_watched();
        Ok(())
    }

    /// One call of the driver.
    fn give(&self, what: &Given, ops: &mut [MemOp], batch: &Batch) -> Result<()> {
        match what {
            Given::MemoryOps(range) => {
                let ops = ops.get_mut(range.clone()).unwrap_or_default();
                // SAFETY: operations of the layout of the driver's own header, on memory that stays registered until the stream is done with
                // them: each program's owner is kept in `pending`, and the stream's own words in `self`.
                check("cuStreamBatchMemOp", unsafe {
                    sys::cuStreamBatchMemOp_v2(self.raw, ops.len() as u32, ops.as_mut_ptr(), 0)
                })
            }
            Given::Kernel(range) => {
                let words = batch.words(range.clone());
                let control = self.count.words.control_at();
                // SAFETY: as above.
                unsafe { self.context.module()?.execute(self.raw, words, control) }
            }
        }
    }

    /// What was to come after the stream had counted to `given` was refused.
    fn lose(&self, queue: &mut Queue, given: u64, error: &Error) {
        queue.issued = given;
        let first = queue.entering.iter().position(|entry| entry.done > given);
        let lost = queue
            .entering
            .split_off(first.unwrap_or(queue.entering.len()));
        self.count.words.note(STATUS_STREAM);
        self.fault.pass(error.to_string());
        self.note(error);
        let reason = Error::Asynchronous {
            stream: self.name.clone(),
            reason: error.to_string(),
        };
        lost.iter().for_each(|pending| pending.discard(&reason));
        defer_drops(
            lost.into_iter()
                .filter_map(Pending::into_deferred_drop)
                .collect(),
        );
    }
}
