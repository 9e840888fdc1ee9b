//! The number of operations on streams, with separate counters for entry and exit.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

use crate::endpoint::words::CacheLineStart;

/// The number of operations that entered less the number that left. There are two counts, because operations enter and leave in
/// different threads: with a single count, these threads would have to fetch the cache line from each other.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct InFlight {
    came: AtomicU32,
    _left: CacheLineStart,
    left: AtomicU32,
    _end: CacheLineStart,
}

impl InFlight {
    /// Counts one more, before the caller's later loads. SeqCst: if a thread stores and then sees nothing inside, each operation that
    /// enters after that sees the store.
    #[inline]
    pub(super) fn enter(&self) {
        self.came.fetch_add(1, Ordering::SeqCst);
        among_others();
    }

    /// Counts one less. A thread that sees that the operation has left also sees what it did inside.
    #[inline]
    pub(super) fn leave(&self) {
        self.left.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether any operation is inside. Sees all that entered before this call; some that have just left may still count.
    #[inline]
    pub(super) fn any(&self) -> bool {
        among_others();
        // In this order, an operation that leaves between the two loads counts as inside. In the other order, one that enters and leaves
        // between them would cancel out one that stays.
        let left = self.left.load(Ordering::SeqCst);
        self.came.load(Ordering::SeqCst) != left
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
    use loom::sync::{Arc, atomic::AtomicBool};

    /// Two threads enter, unless it is closed, and one of them leaves again; a third closes, and looks whether any is inside. The thread
    /// that stays must have seen that it is closed, or the third must have seen it inside.
    #[test]
    fn loom_an_entry_and_a_close_see_each_other() {
        loom::model(|| {
            let shared = Arc::new((
                InFlight::default(),
                AtomicBool::new(false),
                AtomicBool::new(false),
            ));
            let threads: Vec<_> = [true, false]
                .into_iter()
                .map(|stays| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        let (in_flight, closed, inside) = &*shared;
                        in_flight.enter();
                        if stays && !closed.load(Ordering::SeqCst) {
                            inside.store(true, Ordering::Relaxed);
                        } else {
                            in_flight.leave();
                        }
                    })
                })
                .collect();
            let (in_flight, closed, inside) = &*shared;
            closed.store(true, Ordering::SeqCst);
            let any = in_flight.any();
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(any || !inside.load(Ordering::Relaxed));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_over_the_wrap() {
        let in_flight = InFlight::default();
        for count in [&in_flight.came, &in_flight.left] {
            count.store(u32::MAX, Ordering::Relaxed);
        }
        assert!(!in_flight.any());
        in_flight.enter();
        in_flight.enter();
        in_flight.leave();
        assert!(in_flight.any());
        in_flight.leave();
        assert!(!in_flight.any());
    }
}
