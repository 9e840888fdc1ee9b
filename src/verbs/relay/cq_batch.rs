//! Completions that were polled and not passed on yet.

use super::provider::{BATCH, PolledCompletion, Provider, Queue};

/// A batch of them, in order.
#[derive(Debug)]
pub(super) struct CqBatch {
    list: Box<[PolledCompletion; BATCH]>,
    next: usize,
    count: usize,
}

impl CqBatch {
    pub(super) fn new() -> CqBatch {
        CqBatch {
            list: Box::new([PolledCompletion::default(); BATCH]),
            next: 0,
            count: 0,
        }
    }

    pub(super) fn front(&self) -> Option<PolledCompletion> {
        self.list[..self.count].get(self.next).copied()
    }

    pub(super) fn pop(&mut self) {
        self.next += 1;
    }

    pub(super) fn clear(&mut self) {
        (self.next, self.count) = (0, 0);
    }

    /// Polls for more, when there is none left. `None` if the queue is broken.
    pub(super) fn poll(&mut self, provider: &mut impl Provider, queue: Queue) -> Option<usize> {
        self.clear();
        self.count = provider.poll(queue, &mut self.list[..])?;
        Some(self.count)
    }
}
