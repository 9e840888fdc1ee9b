//! Whether an object is registered with a progress thread, agreed between the threads that need the progress thread and the progress
//! thread itself, which stops when there is nothing to do.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

use super::PollResult;

/// Set while a thread serves its owner, or is about to. The need itself is published elsewhere, by accesses that are sequentially
/// consistent like those here. So either the joining thread sees that the progress thread has stopped, or the progress thread sees the new work.
#[derive(Debug, Default)]
pub(crate) struct PollMembership(AtomicBool);

impl PollMembership {
    /// The progress thread is needed from now on, and the need was published. Returns whether the caller has to register the object with
    /// it.
    #[inline]
    pub(crate) fn join(&self) -> bool {
        among_others();
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// Called by the progress thread when it has found no need for it. It stops, unless it is needed after all.
    pub(crate) fn leave(&self, is_needed: impl FnOnce() -> bool) -> PollResult {
        self.0.store(false, Ordering::SeqCst);
        among_others();
        // A thread that joined just before the store found the flag set and did not register the object, so look once more.
        if is_needed() && !self.0.swap(true, Ordering::SeqCst) {
            PollResult::Waiting
        } else {
            PollResult::Over
        }
    }
}

/// Loom models sequentially consistent accesses as acquire and release, so it needs an explicit fence.
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

    /// Served, with nothing under way, while `users` join: afterwards exactly one poll is due.
    fn is_served_once(users: u32) {
        loom::model(move || {
            let shared = Arc::new((
                PollMembership::default(),
                AtomicU32::new(0),
                AtomicU32::new(1),
            ));
            assert!(shared.0.join());
            let threads: Vec<_> = (0..users)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (registration, under_way, polls) = &*shared;
                        under_way.fetch_add(1, Ordering::SeqCst);
                        if registration.join() {
                            polls.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let (registration, under_way, polls) = &*shared;
            if registration.leave(|| under_way.load(Ordering::SeqCst) > 0) == PollResult::Over {
                polls.fetch_sub(1, Ordering::Relaxed);
            }
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(polls.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn loom_a_join_while_the_thread_leaves_is_served() {
        is_served_once(1);
    }

    #[test]
    fn loom_two_joins_while_the_thread_leaves_are_served_once() {
        is_served_once(2);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_join_registers() {
        let registration = PollMembership::default();
        assert!(registration.join());
        assert!(!registration.join());
        assert_eq!(registration.leave(|| false), PollResult::Over);
        assert!(registration.join());
    }

    /// The need is published before [`PollMembership::join`], so there are three moments to join at.
    #[test]
    fn a_join_while_the_thread_leaves_is_served_once() {
        // After its last look and before its store: no thread registers the object, so the progress thread stays.
        let registration = PollMembership::default();
        assert!(registration.join());
        assert!(!registration.join());
        assert_eq!(registration.leave(|| true), PollResult::Waiting);
        assert!(!registration.join(), "served twice");
        // Between the store and the second look, a thread joined and registered the object, so the progress thread stops.
        let poll = registration.leave(|| {
            assert!(registration.join());
            true
        });
        assert_eq!(poll, PollResult::Over);
        assert!(!registration.join(), "served twice");
        // The progress thread sees the need before the thread that published it joins.
        assert_eq!(registration.leave(|| true), PollResult::Waiting);
        assert!(!registration.join(), "served twice");
    }
}
