//! What an executor is asked to queue, as the streams of a GPU and those of an application's kernels queue it.

use std::sync::Arc;

use super::batch::Batch;
use super::pending::What;
use super::shared::{Shared, lock};
use crate::stream::{Event, Mark, Record, Submission};
use crate::{Error, Result};

impl Shared {
    pub(super) fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        if batch.is_empty() {
            return self.check();
        }
        self.queue(|shared, queue| shared.prepare(queue, batch.iter()))?;
        batch.clear();
        Ok(())
    }

    #[allow(clippy::result_large_err)] // as Executor::submit_one has it
    pub(super) fn submit_one(
        &self,
        submission: Submission,
    ) -> std::result::Result<(), (Submission, Error)> {
        let one = std::slice::from_ref(&submission);
        let queued = self.queue(|shared, queue| shared.prepare(queue, one.iter()));
        queued.map_err(|error| (submission, error))
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        let (record, number) = event.begin_record();
        let mut position = 0;
        self.queue(|shared, queue| {
            queue.make_room(0);
            let after = queue.issued;
            shared.count_for(queue, after, What::Record(record));
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
            return self.queue(|shared, queue| {
                queue.make_room(Batch::WAIT_WORDS);
                let after = queue.issued;
                let by_kernel = shared.wait_for_count(queue, word, mark.position as u32);
                let what = What::Event {
                    _mark: Some(mark),
                    by_kernel,
                    given_up: false,
                    was_told: false,
                };
                shared.count_for(queue, after, what);
                Ok(())
            });
        }
        // Nothing that a GPU could look at: the thread that looks lets it pass.
        self.queue(|shared, queue| {
            queue.make_room(Batch::WAIT_WORDS);
            queue.gate = queue.gate.wrapping_add(1);
            let gate = queue.gate;
            let after = queue.issued;
            let by_kernel = shared.wait_for_count(queue, shared.count.words.gate_at(), gate);
            let what = What::Event {
                _mark: None,
                by_kernel,
                given_up: false,
                was_told: false,
            };
            shared.count_for(queue, after, what);
            // Before the driver has it. If it is refused, the gate is opened in vain, and the next one has its number.
            lock(&shared.gates).push_back((queue.gate, mark));
            Ok(())
        })
    }
}
