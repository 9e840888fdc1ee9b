//! Sleep and wake-up of a stream's thread.

#[cfg(loom)]
use loom::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, Thread},
};
use std::sync::OnceLock;
#[cfg(not(loom))]
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, Thread},
};

use super::fence::Asymmetric;

/// Where one thread sleeps until others have something for it. Waking a thread that is awake costs two loads of a line that nobody
/// writes meanwhile; no fence where the kernel has the sleeper pay for both, and no system call.
pub(super) struct Parker {
    /// The sleeper announced that it goes to sleep, and nobody woke it since.
    parked: AtomicBool,
    fence: Asymmetric,
    sleeper: OnceLock<Thread>,
}

impl Parker {
    pub(super) fn new() -> Self {
        Self {
            parked: AtomicBool::new(false),
            fence: Asymmetric::new(),
            sleeper: OnceLock::new(),
        }
    }

    /// Sleeps unless `ready` holds. Always to be called by one and the same thread, in a loop: it may return for no reason.
    pub(super) fn park(&self, ready: impl FnOnce() -> bool) {
        self.sleeper.get_or_init(thread::current);
        // Release: a thread that sees the flag sees the sleeper's handle.
        self.parked.store(true, Ordering::Release);
        // Sleeper's side, the store of `parked` before the loads in `ready`. It pairs with the fence in `wake`: of the two
        // threads at least one sees what the other stored, so either `ready` holds here or `wake` finds the flag.
        let fenced = self.fence.heavy();
        if !ready() {
            if fenced {
                thread::park();
            } else {
                doze();
            }
        }
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Wakes the sleeper, if it sleeps. To be called after the stores that make its `ready` true.
    pub(super) fn wake(&self) {
        // Waker's side, the caller's stores before the load of `parked`. It pairs with the fence in `park`.
        self.fence.light();
        // Many wakers, one wake-up: the first to clear the flag makes the system call.
        if self.parked.load(Ordering::Relaxed)
            && self.parked.swap(false, Ordering::Acquire)
            && let Some(sleeper) = self.sleeper.get()
        {
            sleeper.unpark();
        }
    }
}

/// Sleeps for so short a time that a wake-up may be lost: by then, the store that it was for is seen. Of the fence's two sides the other one
/// may have gone without, this once.
#[cold]
fn doze() {
    #[cfg(not(loom))]
    thread::park_timeout(std::time::Duration::from_millis(1));
    #[cfg(loom)]
    thread::yield_now();
}

/// Run by `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`. A lost wake-up is a deadlock, which loom reports.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, atomic::AtomicU32};

    /// `preemptions` bounds the switches of thread that nothing forces; without a bound two wakers take minutes.
    fn sleeps_until_all_have_come(wakers: u32, preemptions: Option<usize>) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let shared = Arc::new((Parker::new(), AtomicU32::new(0)));
            let threads: Vec<_> = (0..wakers)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        shared.1.fetch_add(1, Ordering::Relaxed);
                        shared.0.wake();
                    })
                })
                .collect();
            while shared.1.load(Ordering::Relaxed) != wakers {
                shared.0.park(|| shared.1.load(Ordering::Relaxed) == wakers);
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_one_waker_is_never_missed() {
        sleeps_until_all_have_come(1, None);
    }

    #[test]
    fn loom_two_wakers_are_never_missed() {
        sleeps_until_all_have_come(2, Some(2));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::{Arc, atomic::AtomicU64, mpsc};
    use std::time::Duration;

    #[test]
    fn ready_work_keeps_it_awake() {
        let parker = Parker::new();
        parker.park(|| true);
        assert!(!parker.parked.load(Ordering::Relaxed));
    }

    #[test]
    fn ping_pong_of_two_sleepers_loses_no_wake_up() {
        const ROUNDS: u64 = 2000;
        // Each sleeps until the count is even, or odd, and then makes it the other.
        let shared = Arc::new(([Parker::new(), Parker::new()], AtomicU64::new(0)));
        let (done, both) = mpsc::channel();
        for side in [0, 1] {
            let (shared, done) = (Arc::clone(&shared), done.clone());
            std::thread::spawn(move || {
                let (parkers, count) = &*shared;
                for round in 0..ROUNDS {
                    let mine = || count.load(Ordering::Acquire) == 2 * round + side as u64;
                    while !mine() {
                        parkers[side].park(mine);
                    }
                    count.fetch_add(1, Ordering::Release);
                    parkers[1 - side].wake();
                }
                done.send(()).unwrap();
            });
        }
        // A thread that misses a wake-up sleeps for ever. A busy machine takes milliseconds for each.
        for _ in 0..2 {
            both.recv_timeout(Duration::from_secs(240)).unwrap();
        }
    }
}
