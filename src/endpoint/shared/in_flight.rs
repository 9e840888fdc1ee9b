//! How many are inside, counted where they come in and where they leave.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

use crate::endpoint::words::CacheLineStart;

/// Those who came less those who left. Two counts, because other threads let them in than see them out: of one count, each would have to
/// fetch the line from the other.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct InFlight {
    came: AtomicU32,
    _left: CacheLineStart,
    left: AtomicU32,
    _end: CacheLineStart,
}

impl InFlight {
    /// One more, before the caller's later loads: who sees nobody inside after a store of its own is seen by who comes in after it.
    #[inline]
    pub(super) fn enter(&self) {
        self.came.fetch_add(1, Ordering::SeqCst);
        among_others();
    }

    /// One less. What it did inside is seen by who sees it gone.
    #[inline]
    pub(super) fn leave(&self) {
        self.left.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether anybody is inside. Sees all who came before it; some who have just left may still count.
    #[inline]
    pub(super) fn any(&self) -> bool {
        among_others();
        // In this order: who leaves between the two looks counts as there. The other way round, one who came and left between them would
        // make up for one who stays.
        let left = self.left.load(Ordering::SeqCst);
        self.came.load(Ordering::SeqCst) != left
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
    use loom::sync::{Arc, atomic::AtomicBool};

    /// Two come, unless it is closed, and one of them leaves again; a third closes, and looks whether anybody is inside. That the one who
    /// stays was neither told nor seen must not happen.
    #[test]
    fn loom_who_comes_in_and_who_closes_see_one_another() {
        loom::model(|| {
            let shared = Arc::new((
                InFlight::default(),
                AtomicBool::new(false),
                AtomicBool::new(false),
            ));
            let guests: Vec<_> = [true, false]
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
            let anybody = in_flight.any();
            for guest in guests {
                guest.join().unwrap();
            }
            assert!(anybody || !inside.load(Ordering::Relaxed));
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
