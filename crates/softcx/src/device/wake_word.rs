//! A bell that wakes a sleeping engine, also from another process.
#![allow(unsafe_code)] // the futex system call

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// Zeroed memory is a bell whose engine is awake.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct WakeWord {
    word: AtomicU32,
    #[cfg(loom)]
    kernel: model::FutexModel,
}

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
/// The engine sleeps, and another thread does its work meanwhile, so nothing needs to wake it.
const SUPPRESSED: u32 = 2;

impl WakeWord {
    /// Wakes the engine if it sleeps. What it is to find must have been stored before.
    #[inline]
    pub(crate) fn ring(&self) {
        // Orders the caller's stores before the look at the bell; pairs with the fence in `sleep`. Either the sleeper sees
        // the stores in its last look, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.word.load(Ordering::Relaxed) == ASLEEP
            && self.word.swap(AWAKE, Ordering::AcqRel) == ASLEEP
        {
            self.futex_wake();
        }
    }

    /// Does without rings for as long as the caller looks itself, again and again, from here on.
    #[inline]
    pub(crate) fn suppress_wake(&self) {
        if self.word.load(Ordering::Relaxed) == ASLEEP {
            // Failing is fine: the engine has woken up.
            let _ =
                self.word
                    .compare_exchange(ASLEEP, SUPPRESSED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Ends that. If it says so, the caller looks once more: a ring may have been left out that came before.
    #[inline]
    pub(crate) fn resume_wake(&self) -> bool {
        if self.word.load(Ordering::Relaxed) != SUPPRESSED {
            return false;
        }
        let done = self
            .word
            .compare_exchange(SUPPRESSED, ASLEEP, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        // Orders the bell before the last look; pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
        done
    }

    /// Sleeps until the bell rings or `timeout` passes; not at all if `last_look` finds something to do. Whether it rang.
    pub(crate) fn sleep(&self, timeout: Duration, last_look: impl FnOnce() -> bool) -> bool {
        self.word.store(ASLEEP, Ordering::Relaxed);
        // Orders the store before the last look; pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
        if !last_look() {
            // The word as it is: somebody may have stood in since.
            match self.word.load(Ordering::Relaxed) {
                AWAKE => {}
                asleep => self.futex_wait(asleep, timeout),
            }
        }
        self.word.swap(AWAKE, Ordering::Relaxed) == AWAKE
    }
}

#[cfg(not(loom))]
impl WakeWord {
    fn futex_wait(&self, word: u32, timeout: Duration) {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the word and the time outlive the call. Every outcome is fine: the caller looks again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word.as_ptr(),
                libc::FUTEX_WAIT,
                word,
                &raw const timeout,
            )
        };
    }

    fn futex_wake(&self) {
        // SAFETY: the word outlives the call.
        unsafe { libc::syscall(libc::SYS_futex, self.word.as_ptr(), libc::FUTEX_WAKE, 1) };
    }
}

/// The futex in a model of threads, and the model of the bell.
#[cfg(loom)]
mod model {
    use super::*;
    use loom::sync::{Condvar, Mutex};

    #[derive(Debug, Default)]
    pub(super) struct FutexModel {
        lock: Mutex<()>,
        woken: Condvar,
    }

    impl WakeWord {
        /// As the kernel does it: looks at the word and goes to sleep in one step. Without the time-out, which would hide a
        /// lost ring.
        pub(super) fn futex_wait(&self, word: u32, _timeout: Duration) {
            let guard = self.kernel.lock.lock().unwrap();
            if self.word.load(Ordering::SeqCst) == word {
                drop(self.kernel.woken.wait(guard).unwrap());
            }
        }

        pub(super) fn futex_wake(&self) {
            drop(self.kernel.lock.lock().unwrap());
            self.kernel.woken.notify_one();
        }
    }

    #[cfg(test)]
    #[test]
    fn loom_no_ring_is_lost() {
        use loom::sync::Arc;
        loom::model(|| {
            let shared = Arc::new((WakeWord::default(), AtomicU32::new(0)));
            let ringers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        shared.1.fetch_add(1, Ordering::Relaxed);
                        shared.0.ring();
                    })
                })
                .collect();
            while shared.1.load(Ordering::Relaxed) < 2 {
                shared
                    .0
                    .sleep(Duration::ZERO, || shared.1.load(Ordering::Relaxed) == 2);
            }
            for ringer in ringers {
                ringer.join().unwrap();
            }
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    #[test]
    fn no_wake_up_is_needed_while_a_poller_stands_in() {
        let bell = WakeWord::default();
        assert!(!bell.resume_wake(), "nobody stood in");
        bell.suppress_wake();
        bell.sleep(Duration::from_millis(1), || {
            bell.suppress_wake();
            bell.ring();
            assert!(bell.resume_wake());
            assert!(!bell.resume_wake());
            bell.suppress_wake();
            false
        });
        // It woke up by its time-out, and the standing in is over.
        assert!(!bell.resume_wake());
        let start = Instant::now();
        bell.sleep(Duration::from_secs(60), || {
            bell.suppress_wake();
            assert!(bell.resume_wake());
            bell.ring();
            false
        });
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "a ring after it counts"
        );
    }

    #[test]
    fn a_ring_wakes_and_work_found_in_the_last_look_does_not_sleep() {
        let bell = WakeWord::default();
        let start = Instant::now();
        bell.sleep(Duration::from_secs(60), || true);
        let flag = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !flag.load(Ordering::Acquire) {
                    bell.sleep(Duration::from_secs(60), || flag.load(Ordering::Acquire));
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            flag.store(true, Ordering::Release);
            bell.ring();
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
