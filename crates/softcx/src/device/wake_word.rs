//! A futex word that wakes a sleeping engine, also from another process.
#![allow(unsafe_code)] // the futex system call

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// Zeroed memory is the word of an engine that is awake.
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
    /// Wakes the engine if it sleeps. The caller has stored the work before.
    #[inline]
    pub(crate) fn wake(&self) {
        // Orders the caller's stores before the load of the word; pairs with the fence in `sleep`. Either the sleeper sees
        // the stores in its last look, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.word.load(Ordering::Relaxed) == ASLEEP
            && self.word.swap(AWAKE, Ordering::AcqRel) == ASLEEP
        {
            self.futex_wake();
        }
    }

    /// Suppresses wakes while the caller polls for the engine, until [`WakeWord::resume_wake`].
    #[inline]
    pub(crate) fn suppress_wake(&self) {
        if self.word.load(Ordering::Relaxed) == ASLEEP {
            // Failing is fine: the engine has woken up.
            let _ =
                self.word
                    .compare_exchange(ASLEEP, SUPPRESSED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Whether a thread polls for the engine.
    pub(crate) fn is_suppressed(&self) -> bool {
        self.word.load(Ordering::Relaxed) == SUPPRESSED
    }

    /// Ends that. If it returns `true`, the caller polls once more, because a wake may have been suppressed before.
    #[inline]
    pub(crate) fn resume_wake(&self) -> bool {
        if self.word.load(Ordering::Relaxed) != SUPPRESSED {
            return false;
        }
        let done = self
            .word
            .compare_exchange(SUPPRESSED, ASLEEP, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        // Orders the word before the last look; pairs with the fence in `wake`.
        fence(Ordering::SeqCst);
        done
    }

    /// Sleeps until [`WakeWord::wake`] or `timeout`; not at all if `last_look` finds work. Returns whether it was woken.
    pub(crate) fn sleep(&self, timeout: Duration, last_look: impl FnOnce() -> bool) -> bool {
        self.word.store(ASLEEP, Ordering::Relaxed);
        // Orders the store before the last look; pairs with the fence in `wake`.
        fence(Ordering::SeqCst);
        if !last_look() {
            // Loaded again: another thread may have suppressed wakes since.
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

/// The futex for loom, and the model of the word.
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
        /// lost wake.
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
    fn loom_no_wake_is_lost() {
        use loom::sync::Arc;
        loom::model(|| {
            let shared = Arc::new((WakeWord::default(), AtomicU32::new(0)));
            let wakers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        shared.1.fetch_add(1, Ordering::Relaxed);
                        shared.0.wake();
                    })
                })
                .collect();
            while shared.1.load(Ordering::Relaxed) < 2 {
                shared
                    .0
                    .sleep(Duration::ZERO, || shared.1.load(Ordering::Relaxed) == 2);
            }
            for waker in wakers {
                waker.join().unwrap();
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
    fn suppressed_wake_does_not_wake_until_resumed() {
        let wake_word = WakeWord::default();
        assert!(!wake_word.resume_wake(), "wakes were not suppressed");
        wake_word.suppress_wake();
        wake_word.sleep(Duration::from_millis(1), || {
            wake_word.suppress_wake();
            wake_word.wake();
            assert!(wake_word.resume_wake());
            assert!(!wake_word.resume_wake());
            wake_word.suppress_wake();
            false
        });
        // The time-out ended the sleep, and with it the suppression.
        assert!(!wake_word.resume_wake());
        let start = Instant::now();
        wake_word.sleep(Duration::from_secs(60), || {
            wake_word.suppress_wake();
            assert!(wake_word.resume_wake());
            wake_word.wake();
            false
        });
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "a wake after `resume_wake` ends the sleep"
        );
    }

    #[test]
    fn wake_ends_sleep_and_work_found_in_last_look_prevents_it() {
        let wake_word = WakeWord::default();
        let start = Instant::now();
        wake_word.sleep(Duration::from_secs(60), || true);
        let flag = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !flag.load(Ordering::Acquire) {
                    wake_word.sleep(Duration::from_secs(60), || flag.load(Ordering::Acquire));
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            flag.store(true, Ordering::Release);
            wake_word.wake();
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
