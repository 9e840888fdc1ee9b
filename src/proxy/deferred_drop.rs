//! Drops that may block, done by threads that no other thread waits for.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
#[cfg(feature = "cuda")]
use std::time::Instant;

use super::Workers;
#[cfg(feature = "cuda")]
use crate::stream::is_library_thread;

/// For handles that the caller must not wait for.
static DROPS: Workers = Workers::new("doorbell-ends", 16).keep_one();
/// For what takes a command of a device, which may hang.
static COMMANDS: Workers = Workers::new("doorbell-leaves", 16);

/// What was handed to these threads and is not dropped yet.
static DROPPING: DroppedJobs = DroppedJobs::new();
static EXECUTING: DroppedJobs = DroppedJobs::new();

/// Jobs that are not over, by number.
struct DroppedJobs {
    numbers: Mutex<Numbers>,
    over: Condvar,
}

struct Numbers {
    running: BTreeSet<u64>,
    next: u64,
    /// Jobs before this one were waited for in vain.
    #[cfg(feature = "cuda")]
    given_up: u64,
}

/// The number of a job, which is over when this is dropped: also where the job panics.
struct DroppedJob(&'static DroppedJobs, u64);

impl DroppedJobs {
    const fn new() -> DroppedJobs {
        let numbers = Numbers {
            running: BTreeSet::new(),
            next: 0,
            #[cfg(feature = "cuda")]
            given_up: 0,
        };
        DroppedJobs {
            numbers: Mutex::new(numbers),
            over: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&'static self) -> DroppedJob {
        let mut numbers = self.lock();
        let number = numbers.next;
        numbers.next += 1;
        numbers.running.insert(number);
        DroppedJob(self, number)
    }

    /// Waits until all that has begun is over, but no longer than that.
    fn wait(&self, limit: Duration) {
        self.wait_from(limit, |_| 0);
    }

    /// The same, and does not wait again for jobs that this has waited for in vain: one that hangs costs one wait.
    #[cfg(feature = "cuda")]
    fn wait_once(&self, limit: Duration) {
        if let Some(upto) = self.wait_from(limit, |numbers| numbers.given_up) {
            let mut numbers = self.lock();
            numbers.given_up = numbers.given_up.max(upto);
        }
    }

    /// Waits for the jobs from that number on. Returns the number behind them if some are not over.
    fn wait_from(&self, limit: Duration, from: fn(&Numbers) -> u64) -> Option<u64> {
        let numbers = self.lock();
        let upto = numbers.next;
        let first = from(&numbers).min(upto);
        let is_left = |numbers: &mut Numbers| numbers.running.range(first..upto).next().is_some();
        let waited = self.over.wait_timeout_while(numbers, limit, is_left);
        let (mut numbers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        is_left(&mut numbers).then_some(upto)
    }
}

impl Drop for DroppedJob {
    fn drop(&mut self) {
        self.0.lock().running.remove(&self.1);
        self.0.over.notify_all();
    }
}

/// Drops the object in a separate thread: an object of the application's may have a slow destructor, and the caller may be the thread that ends waits of
/// a GPU.
pub(crate) fn drop_elsewhere(what: Box<dyn Send>) {
    let job = DROPPING.begin();
    DROPS.run(Box::new(move || {
        drop(what);
        drop(job);
    }));
}

/// Waits until all that was given to [`drop_elsewhere`] and [`execute_elsewhere`] before has been dropped, but no longer than that. Returns at once in the
/// library's threads, which may be the ones that drop.
#[cfg(feature = "cuda")]
pub(crate) fn await_dropped(limit: Duration) {
    if !is_library_thread() {
        let start = Instant::now();
        // A work request's last handle of a region is dropped there, and has one of its memory.
        EXECUTING.wait_once(limit);
        DROPPING.wait_once(limit.saturating_sub(start.elapsed()));
    }
}

/// The same for an object whose drop issues a command of a device: a queue pair that is destroyed, or memory that is deregistered.
pub(crate) fn execute_elsewhere(what: Box<dyn Send>) {
    let job = EXECUTING.begin();
    COMMANDS.run(Box::new(move || {
        drop(what);
        drop(job);
    }));
}

/// Waits until all that was given to [`execute_elsewhere`] before has been dropped, but no longer than that.
pub(crate) fn await_executed(limit: Duration) {
    EXECUTING.wait(limit);
}
