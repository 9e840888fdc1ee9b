//! Whether a thread that goes round serves somebody, agreed between those who come to need it and the thread that stops.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use super::Turn;

/// Set while a thread serves its owner, or is about to. What is needed is told elsewhere, by accesses that are sequentially consistent as
/// those here are: of who comes and the thread that leaves, one sees the other.
#[derive(Debug, Default)]
pub(crate) struct Enlistment(AtomicBool);

impl Enlistment {
    /// The thread is needed from now on, and was told so. Whether the caller is the one to enlist its owner with it.
    #[inline]
    pub(crate) fn come(&self) -> bool {
        among_others();
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// The thread's: it has found nothing that it is needed for, and stops, unless it is after all.
    pub(crate) fn leave(&self, is_needed: impl FnOnce() -> bool) -> Turn {
        self.0.store(false, Ordering::SeqCst);
        among_others();
        // Whoever came just before the store found it set, and enlisted nobody: one more look.
        if is_needed() && !self.0.swap(true, Ordering::SeqCst) {
            Turn::Waiting
        } else {
            Turn::Over
        }
    }
}

/// Loom takes sequentially consistent accesses for ones of acquire and release, and only a fence for what it is.
#[inline]
fn among_others() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

/// Run by `RUSTFLAGS="--cfg loom" cargo test --lib loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, atomic::AtomicU32};
    use loom::thread;

    /// Served, with nothing under way, while `users` come: afterwards exactly one turn is to come.
    fn is_served_once(users: u32) {
        loom::model(move || {
            let shared = Arc::new((Enlistment::default(), AtomicU32::new(0), AtomicU32::new(1)));
            assert!(shared.0.come());
            let threads: Vec<_> = (0..users)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (enlistment, under_way, turns) = &*shared;
                        under_way.fetch_add(1, Ordering::SeqCst);
                        if enlistment.come() {
                            turns.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let (enlistment, under_way, turns) = &*shared;
            if enlistment.leave(|| under_way.load(Ordering::SeqCst) > 0) == Turn::Over {
                turns.fetch_sub(1, Ordering::Relaxed);
            }
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(turns.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn loom_who_comes_while_the_thread_leaves_is_served() {
        is_served_once(1);
    }

    #[test]
    fn loom_two_who_come_while_the_thread_leaves_are_served_once() {
        is_served_once(2);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_who_comes_enlists() {
        let enlistment = Enlistment::default();
        assert!(enlistment.come());
        assert!(!enlistment.come());
        assert_eq!(enlistment.leave(|| false), Turn::Over);
        assert!(enlistment.come());
    }

    /// The need is told of before [`Enlistment::come`], so there are three moments to come at.
    #[test]
    fn who_comes_while_the_thread_leaves_is_served_once() {
        // After its last look and before its store: nobody enlists, so it stays.
        let enlistment = Enlistment::default();
        assert!(enlistment.come());
        assert!(!enlistment.come());
        assert_eq!(enlistment.leave(|| true), Turn::Waiting);
        assert!(!enlistment.come(), "served twice");
        // Between the store and the one look more: who came has enlisted, so it goes.
        let turn = enlistment.leave(|| {
            assert!(enlistment.come());
            true
        });
        assert_eq!(turn, Turn::Over);
        assert!(!enlistment.come(), "served twice");
        // The need is seen, and who has it comes last.
        assert_eq!(enlistment.leave(|| true), Turn::Waiting);
        assert!(!enlistment.come(), "served twice");
    }
}
