//! A point in a stream's work that others wait for.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::life::ContextLife;

/// How long a waiting thread sleeps at most before it looks whether its context is over.
pub const LOOK: Duration = Duration::from_millis(10);

#[derive(Default)]
pub struct StreamMark {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl StreamMark {
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.reached
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The stream came to it, or will never.
    pub fn reach(&self) {
        self.lock().get_or_insert_with(Instant::now);
        self.changed.notify_all();
    }

    /// When it was reached, if it was.
    pub fn reached(&self) -> Option<Instant> {
        *self.lock()
    }

    /// Until it is reached, or the context is over.
    pub fn wait(&self, life: &ContextLife) {
        let mut reached = self.lock();
        while reached.is_none() && !life.is_over() {
            reached = self
                .changed
                .wait_timeout(reached, LOOK)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard);
        }
    }
}
