//! What the work requests in flight hold: the thread that posts puts it here, and the thread that reaps takes it out.
#![allow(unsafe_code)] // a cell that two threads hand to each other by counters

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, Ordering},
};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

use super::words::CacheLineStart;

#[cfg(not(loom))]
#[derive(Debug)]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A ring of entries with running counts: entries from `done` up to `posted` are in flight.
///
/// One thread at a time posts ([`OutstandingWork::post`], [`OutstandingWork::unpost`]), and one at a time reaps
/// ([`OutstandingWork::reap_with`]). The owner ensures that: by exclusive access to the endpoint, and by the lock of the reaper.
#[derive(Debug)]
#[repr(C)]
pub(super) struct OutstandingWork<T> {
    entries: Box<[UnsafeCell<Option<T>>]>,
    _poster: CacheLineStart,
    posted: AtomicU32,
    _reaper: CacheLineStart,
    done: AtomicU32,
}

// SAFETY: an entry is touched by the poster before `posted` shows it and by the reaper after, see `post` and `reap_with`.
unsafe impl<T: Send> Sync for OutstandingWork<T> {}

impl<T> OutstandingWork<T> {
    /// A ring of `depth` entries, rounded up to a power of two.
    pub(super) fn new(depth: u32) -> OutstandingWork<T> {
        let entries = (0..depth.next_power_of_two())
            .map(|_| UnsafeCell::new(None))
            .collect();
        OutstandingWork {
            entries,
            _poster: CacheLineStart,
            _reaper: CacheLineStart,
            posted: AtomicU32::new(0),
            done: AtomicU32::new(0),
        }
    }

    #[inline]
    fn entry(&self, count: u32) -> &UnsafeCell<Option<T>> {
        &self.entries[count as usize & (self.entries.len() - 1)]
    }

    /// Where the entry of that running count lies.
    #[inline]
    pub(super) fn place(&self, count: u32) -> *const u8 {
        let entry: *const UnsafeCell<Option<T>> = self.entry(count);
        entry.cast()
    }

    /// Running count of entries posted.
    #[inline]
    pub(super) fn posted(&self) -> u32 {
        self.posted.load(Ordering::Acquire)
    }

    /// Running count of entries reaped.
    #[inline]
    pub(super) fn done(&self) -> u32 {
        self.done.load(Ordering::Acquire)
    }

    /// Entries in flight. Exact for the poster and for the reaper, each in its own direction.
    #[inline]
    pub(super) fn in_flight(&self) -> u32 {
        self.posted().wrapping_sub(self.done())
    }

    /// Posts the next entry. The poster has seen that fewer than the depth are in flight.
    #[inline]
    pub(super) fn post(&self, value: T) -> u32 {
        let count = self.posted.load(Ordering::Relaxed);
        let entry = self.entry(count);
        // SAFETY: not in flight: the reaper left this place before `done` passed it (acquired by the poster's look at
        // `in_flight`), and does not come back before `posted` shows it.
        let left = entry.with_mut(|entry| unsafe { (*entry).replace(value) });
        // A place that is not in flight is empty. To check that, the poster would have to fetch a cache line that the reaper
        // wrote last.
        std::mem::forget(left);
        // Release: orders the entry before the count that shows it to the reaper.
        self.posted.store(count.wrapping_add(1), Ordering::Release);
        count
    }

    /// Takes the newest entry back. The device was never told of it, so the reaper does not touch it.
    pub(super) fn unpost(&self) -> Option<T> {
        let count = self.posted.load(Ordering::Relaxed).wrapping_sub(1);
        self.posted.store(count, Ordering::Release);
        // SAFETY: the reaper takes only what the device has completed.
        self.entry(count)
            .with_mut(|entry| unsafe { (*entry).take() })
    }

    /// Reaps the oldest entry, if one is in flight. `end` sees it before its place is the poster's again.
    #[inline]
    pub(super) fn reap_with(&self, end: impl FnOnce(&T)) -> Option<T> {
        let count = self.done.load(Ordering::Relaxed);
        // Acquire: pairs with the release in `post`.
        if self.posted.load(Ordering::Acquire) == count {
            return None;
        }
        // SAFETY: in flight, so the poster does not touch it before `done` has passed it.
        let value = self
            .entry(count)
            .with_mut(|entry| unsafe { (*entry).take() });
        if let Some(value) = &value {
            end(value);
        }
        // Release: orders the take before the count that gives the place to the poster.
        self.done.store(count.wrapping_add(1), Ordering::Release);
        value
    }

    /// Shows the entry of that count, if it is in flight. The reaper's call, for an entry that the poster does not take back.
    pub(super) fn show<R>(&self, count: u32, show: impl FnOnce(&T) -> R) -> Option<R> {
        let done = self.done.load(Ordering::Relaxed);
        // Acquire inside: pairs with the release in `post`.
        if count.wrapping_sub(done) >= self.posted().wrapping_sub(done) {
            return None;
        }
        // SAFETY: in flight, so the poster does not touch it before `done` has passed it, which only the caller moves.
        self.entry(count)
            .with_mut(|entry| unsafe { (*entry).as_ref().map(show) })
    }

    /// Drops everything; poster and reaper are both the caller.
    pub(super) fn clear(&self) {
        while self.reap_with(|_| {}).is_some() {}
        self.posted.store(0, Ordering::Release);
        self.done.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn entries_are_held_until_reaped_and_counts_wrap() {
        let outstanding = OutstandingWork::new(3);
        outstanding.posted.store(u32::MAX, Ordering::Relaxed);
        outstanding.done.store(u32::MAX, Ordering::Relaxed);
        let value = Arc::new(());
        for i in 0..4u32 {
            assert_eq!(
                outstanding.post(Arc::clone(&value)),
                u32::MAX.wrapping_add(i)
            );
        }
        assert_eq!(outstanding.in_flight(), 4);
        assert_eq!(Arc::strong_count(&value), 5);
        drop(outstanding.reap_with(|_| {}));
        assert_eq!(Arc::strong_count(&value), 4);
        assert!(outstanding.unpost().is_some());
        assert_eq!((outstanding.in_flight(), Arc::strong_count(&value)), (2, 3));
        outstanding.clear();
        assert_eq!((outstanding.in_flight(), Arc::strong_count(&value)), (0, 1));
        assert!(outstanding.reap_with(|_| {}).is_none());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn every_entry_is_reaped_once_and_in_order() {
        loom::model(|| {
            let outstanding = Arc::new(OutstandingWork::new(2));
            let poster = {
                let outstanding = Arc::clone(&outstanding);
                loom::thread::spawn(move || {
                    let mut next = 0u32;
                    while next < 3 {
                        if outstanding.in_flight() < 2 {
                            outstanding.post(next);
                            next += 1;
                        } else {
                            loom::thread::yield_now();
                        }
                    }
                })
            };
            let mut expected = 0;
            while expected < 3 {
                match outstanding.reap_with(|_| {}) {
                    Some(value) => {
                        assert_eq!(value, expected);
                        expected += 1;
                    }
                    None => loom::thread::yield_now(),
                }
            }
            poster.join().unwrap();
        });
    }
}
