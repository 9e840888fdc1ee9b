//! An asymmetric fence: a compiler fence on the frequent side, membarrier(2) on the rare side.
#![allow(unsafe_code)] // two system calls without memory

#[cfg(loom)]
use loom::sync::atomic::fence;
#[cfg(not(loom))]
use std::sync::atomic::{compiler_fence, fence};
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// The store of one thread before its load, against the same of another: of the two at least one sees what the other stored. Each side
/// would need a full fence for that, which waits until all stores before it have reached the cache. Here the frequent side has
/// [`Asymmetric::light`], which only keeps the compiler from exchanging the two, and the rare side [`Asymmetric::heavy`], in which the
/// kernel makes every running thread of the process pass a full fence (membarrier(2), private expedited).
///
/// Why that suffices: that fence falls somewhere into the program of the other thread. If its store is before it, the rare side's load,
/// which comes after the system call, sees the store. If not, its load is behind the fence, too, and sees the rare side's store, which
/// came before the system call. A thread that does not run passes a full fence when it is switched out and in.
///
/// Where the kernel has no such call, or a sandbox forbids it, both are full fences. So they are under loom, which has no such call
/// either: what it checks of the two threads is the same, because the call is a full fence at some point of the frequent side, and the
/// full fence there is one at the point that matters.
pub(crate) struct Asymmetric {
    /// Cleared when the kernel has taken its promise back.
    by_kernel: AtomicBool,
}

impl Asymmetric {
    pub(crate) fn new() -> Self {
        Self {
            by_kernel: AtomicBool::new(kernel_has_it()),
        }
    }

    /// Between the store and the load of the frequent side.
    #[inline]
    pub(crate) fn light(&self) {
        #[cfg(not(loom))]
        if self.by_kernel.load(Ordering::Relaxed) {
            compiler_fence(Ordering::SeqCst);
            return;
        }
        fence(Ordering::SeqCst);
    }

    /// Between the store and the load of the rare side. False: the kernel did not do it, though it had said that it would. From then on both
    /// sides are full fences, but a thread that is just between a store and a load may have gone without.
    #[must_use]
    pub(crate) fn heavy(&self) -> bool {
        // This thread's own, and the whole of it where the other side has a full one.
        fence(Ordering::SeqCst);
        if !self.by_kernel.load(Ordering::Relaxed) || membarrier(PRIVATE_EXPEDITED) {
            return true;
        }
        self.by_kernel.store(false, Ordering::Relaxed);
        false
    }
}

// Numbers of commands: linux/membarrier.h, which `libc` does not have for every system.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// Whether this process may have the kernel fence its threads. Asked once: to register makes the kernel wait for all processors.
fn kernel_has_it() -> bool {
    static HAS_IT: OnceLock<bool> = OnceLock::new();
    *HAS_IT.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED))
}

#[cfg(all(target_os = "linux", not(loom)))]
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes two integers and touches no memory. A kernel without it, and a sandbox that forbids it, say so.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

#[cfg(not(all(target_os = "linux", not(loom))))]
fn membarrier(_: libc::c_int) -> bool {
    false
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Both sides store their round and then load that of the other, as fast as they can. That a round of each missed the other's store must
    /// not happen.
    fn one_sees_the_other(fence: &Asymmetric) {
        const RARE: u32 = 20_000;
        // Apart, or the line of one store would have to be there for the load of the other.
        #[repr(align(128))]
        struct PaddedWord(AtomicU32);
        let words = [const { PaddedWord(AtomicU32::new(0)) }; 2];
        // The rounds of the frequent side that saw another value than the one before, and what they saw. The last is the first that saw what
        // the rare side stores when its rounds are over: nothing else may end them, for a round that saw less may have been followed by any
        // number of the other side's, and what comes after it is what tells of those.
        let changes = || -> Vec<(u32, u32)> {
            let mut changes = vec![(0, 0)];
            let mut last = 0;
            for round in 1.. {
                words[0].0.store(round, Ordering::Relaxed);
                fence.light();
                let saw = words[1].0.load(Ordering::Relaxed);
                if saw != last {
                    changes.push((round, saw));
                    last = saw;
                }
                if saw > RARE {
                    break;
                }
            }
            changes
        };
        let (changes, seen) = std::thread::scope(|scope| {
            let frequent = scope.spawn(changes);
            while words[0].0.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            let seen: Vec<Option<u32>> = (1..=RARE)
                .map(|round| {
                    words[1].0.store(round, Ordering::Relaxed);
                    fence.heavy().then(|| words[0].0.load(Ordering::Relaxed))
                })
                .collect();
            words[1].0.store(RARE + 1, Ordering::Relaxed);
            (frequent.join().unwrap(), seen)
        });
        for (round, seen) in (1..=RARE).zip(seen) {
            let seen = seen.expect("the kernel fences as it said");
            // The first round of the other side that was not seen, and what that one saw: later ones saw no less.
            let until = changes.partition_point(|(from, _)| *from <= seen + 1);
            let saw = changes[until - 1].1;
            assert!(
                saw >= round,
                "round {round} saw {seen}, and the next saw {saw}"
            );
        }
    }

    #[test]
    fn store_load_order_holds_with_membarrier() {
        // On a kernel without the call it is the same as the next one.
        one_sees_the_other(&Asymmetric::new());
    }

    #[test]
    fn store_load_order_holds_with_two_fences() {
        let by_kernel = AtomicBool::new(false);
        one_sees_the_other(&Asymmetric { by_kernel });
    }
}
