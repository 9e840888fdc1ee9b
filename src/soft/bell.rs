//! A bell that wakes a sleeping engine, also from another process.
#![allow(unsafe_code)] // the futex system call

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// Zeroed memory is a bell whose engine is awake.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Bell(AtomicU32);

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

impl Bell {
    /// Wakes the engine if it sleeps. What it is to find must have been stored before.
    #[inline]
    pub(crate) fn ring(&self) {
        // Orders the caller's stores before the look at the bell; pairs with the fence in `sleep`. Either the sleeper sees
        // the stores in its last look, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.0.load(Ordering::Relaxed) == ASLEEP
            && self.0.swap(AWAKE, Ordering::AcqRel) == ASLEEP
        {
            futex(&self.0, libc::FUTEX_WAKE, 1, None);
        }
    }

    /// Sleeps until the bell rings or `timeout` passes; not at all if `last_look` finds something to do.
    pub(crate) fn sleep(&self, timeout: Duration, last_look: impl FnOnce() -> bool) {
        self.0.store(ASLEEP, Ordering::Relaxed);
        // Orders the store before the last look; pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
        if !last_look() {
            futex(&self.0, libc::FUTEX_WAIT, ASLEEP, Some(timeout));
        }
        self.0.store(AWAKE, Ordering::Relaxed);
    }
}

fn futex(word: &AtomicU32, operation: libc::c_int, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs() as libc::time_t,
        tv_nsec: t.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word and the time outlive the call. Every outcome is fine: the caller looks again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    #[test]
    fn a_ring_wakes_and_work_found_in_the_last_look_does_not_sleep() {
        let bell = Bell::default();
        let start = Instant::now();
        bell.sleep(Duration::from_secs(20), || true);
        let flag = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !flag.load(Ordering::Acquire) {
                    bell.sleep(Duration::from_secs(20), || flag.load(Ordering::Acquire));
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            flag.store(true, Ordering::Release);
            bell.ring();
        });
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
