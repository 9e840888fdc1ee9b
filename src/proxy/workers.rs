//! Threads for calls that may take long or never return: commands of a device, which its firmware executes. A thread that has to keep
//! deadlines leaves them to the threads here.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::stream::begin_library_thread;

/// A call to be made.
pub(crate) type WorkerJob = Box<dyn FnOnce() + Send>;

/// How long a thread without work is kept.
const IDLE: Duration = Duration::from_secs(1);

/// Some threads, started as they are needed, and the jobs that wait for one.
#[derive(Debug)]
pub(crate) struct Workers {
    name: &'static str,
    most: usize,
    /// Threads that stay without work.
    least: usize,
    state: Mutex<WorkersState>,
    come: Condvar,
}

struct WorkersState {
    jobs: VecDeque<WorkerJob>,
    threads: usize,
    /// The threads that wait for a job.
    idle: usize,
}

impl std::fmt::Debug for WorkersState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkersState").finish_non_exhaustive()
    }
}

impl Workers {
    /// At most so many threads, of that name.
    pub(crate) const fn new(name: &'static str, most: usize) -> Workers {
        Workers {
            name,
            most,
            least: 0,
            state: Mutex::new(WorkersState {
                jobs: VecDeque::new(),
                threads: 0,
                idle: 0,
            }),
            come: Condvar::new(),
        }
    }

    /// Once there is a thread, one stays: a job that may wait for its caller then never runs in its caller for want of a thread.
    pub(crate) const fn keep_one(mut self) -> Workers {
        self.least = 1;
        self
    }

    fn lock(&self) -> MutexGuard<'_, WorkersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one of the threads run the job, and does not wait for it. Only if the system cannot start any thread, the job runs here.
    pub(crate) fn run(&'static self, job: WorkerJob) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let needs_thread = state.jobs.len() > state.idle && state.threads < self.most;
        state.threads += usize::from(needs_thread);
        drop(state);
        if !needs_thread {
            self.come.notify_one();
            return;
        }
        let started = std::thread::Builder::new()
            .name(self.name.into())
            .spawn(move || self.work());
        if started.is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            let left = if state.threads == 0 {
                state.jobs.pop_back()
            } else {
                None
            };
            drop(state);
            if let Some(job) = left {
                job();
            }
        }
    }

    fn work(&self) {
        begin_library_thread();
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // No job is known to panic. If one does, the others still run.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let waited = self.come.wait_timeout(state, IDLE);
            let (now, time) = waited.unwrap_or_else(PoisonError::into_inner);
            state = now;
            state.idle -= 1;
            if time.timed_out() && state.jobs.is_empty() && state.threads > self.least {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_job_that_hangs_keeps_no_other_waiting() {
        static WORKERS: Workers = Workers::new("hangs", 2);
        let (release, held) = channel::<()>();
        WORKERS.run(Box::new(move || {
            let _ = held.recv();
        }));
        let (sender, done) = channel();
        for number in 0..100 {
            let sender = sender.clone();
            WORKERS.run(Box::new(move || sender.send(number).unwrap()));
        }
        for number in 0..100 {
            assert_eq!(done.recv_timeout(SOON), Ok(number));
        }
        drop(release);
    }

    #[test]
    fn threads_are_no_more_than_allowed_go_when_idle_and_survive_a_panic() {
        static WORKERS: Workers = Workers::new("few", 3);
        let (sender, done) = channel();
        for number in 0..50 {
            let sender = sender.clone();
            WORKERS.run(Box::new(move || {
                let threads = WORKERS.lock().threads;
                sender.send(threads).unwrap();
                assert!(number % 10 != 0, "on purpose");
            }));
        }
        for _ in 0..50 {
            assert!(done.recv_timeout(SOON).unwrap() <= 3);
        }
        let begin = Instant::now();
        while WORKERS.lock().threads > 0 {
            assert!(begin.elapsed() < SOON, "they stay");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
