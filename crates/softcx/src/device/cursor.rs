//! The two cursors of a lane: one process writes slots, another reads them.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A cursor alone on its cache line: its writer does not disturb the other side's.
#[derive(Debug)]
#[repr(C, align(64))]
struct CacheLine(AtomicU64);

/// Running counts of slots written and slots read. Zeroed memory is an empty pair.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Cursors {
    written: CacheLine,
    read: CacheLine,
}

/// A count that the other side cannot have written honestly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Corrupt;

impl Cursors {
    #[cfg(any(test, loom))]
    pub(crate) fn new() -> Cursors {
        Cursors {
            written: CacheLine(AtomicU64::new(0)),
            read: CacheLine(AtomicU64::new(0)),
        }
    }

    /// For the writer: the count of the next slot, if one of `capacity` is free.
    #[inline]
    pub(crate) fn free(&self, capacity: u64) -> Option<u64> {
        // The writer's own count: only the writer stores it.
        let written = self.written.0.load(Ordering::Relaxed);
        // Acquire: pairs with the release in `give_back`; the reader is done with the slot before it is written again.
        let read = self.read.0.load(Ordering::Acquire);
        (written.wrapping_sub(read) < capacity).then_some(written)
    }

    /// For the writer: the count of the next slot, and how many of `capacity` are free, if any are.
    #[inline]
    pub(crate) fn room(&self, capacity: u64) -> Option<(u64, u64)> {
        let written = self.free(capacity)?;
        // Acquire: as in `free`.
        let read = self.read.0.load(Ordering::Acquire);
        let used = written.wrapping_sub(read);
        Some((written, capacity.saturating_sub(used)))
    }

    /// For the writer: whether the reader has given back all that was written.
    #[inline]
    pub(crate) fn is_read(&self) -> bool {
        self.written.0.load(Ordering::Relaxed) == self.read.0.load(Ordering::Relaxed)
    }

    /// For the writer: the slot of this count is complete.
    #[inline]
    pub(crate) fn publish(&self, count: u64) {
        // Release: orders the stores into the slot before the count that shows them.
        self.written
            .0
            .store(count.wrapping_add(1), Ordering::Release);
    }

    /// For the reader: the count of the oldest unread slot, if there is one.
    ///
    /// # Errors
    /// [`Corrupt`] if the writer claims more slots than there are.
    #[inline]
    pub(crate) fn filled(&self, capacity: u64) -> Result<Option<u64>, Corrupt> {
        self.filled_behind(0, capacity)
    }

    /// For the reader: the count of the slot that follows the ones it has read and not given back, if that slot is filled.
    ///
    /// # Errors
    /// As of [`Cursors::filled`].
    #[inline]
    pub(crate) fn filled_behind(&self, held: u64, capacity: u64) -> Result<Option<u64>, Corrupt> {
        let read = self.read.0.load(Ordering::Relaxed);
        // Acquire: pairs with the release in `publish`.
        let written = self.written.0.load(Ordering::Acquire);
        match written.wrapping_sub(read) {
            filled if filled > capacity => Err(Corrupt),
            filled if filled <= held => Ok(None),
            _ => Ok(Some(read.wrapping_add(held))),
        }
    }

    /// For the reader: the slot of this count may be written again.
    #[inline]
    pub(crate) fn give_back(&self, count: u64) {
        // Release: orders the loads from the slot before the count that frees it.
        self.read.0.store(count.wrapping_add(1), Ordering::Release);
    }

    /// For the reader, when the writer is gone: everything is read.
    pub(crate) fn drain(&self) {
        self.read
            .0
            .store(self.written.0.load(Ordering::Acquire), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_wrap_and_impossible_counts_are_corrupt() {
        let cursors = Cursors::new();
        cursors.written.0.store(u64::MAX, Ordering::Relaxed);
        cursors.read.0.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(cursors.filled(2), Ok(None));
        for _ in 0..2 {
            let count = cursors.free(2).unwrap();
            cursors.publish(count);
        }
        assert_eq!(cursors.free(2), None);
        assert_eq!(cursors.filled(2), Ok(Some(u64::MAX)));
        cursors.give_back(u64::MAX);
        assert_eq!(cursors.filled(2), Ok(Some(0)));
        assert_eq!(cursors.free(2), Some(1));
        cursors.written.0.store(100, Ordering::Relaxed);
        assert_eq!(cursors.filled(2), Err(Corrupt));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    #[test]
    fn every_slot_arrives_once_whole_and_in_order() {
        loom::model(|| {
            const CAPACITY: u64 = 2;
            let shared = Arc::new((
                Cursors::new(),
                [UnsafeCell::new(0u64), UnsafeCell::new(0u64)],
            ));
            let writer = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let mut sent = 0;
                    while sent < 3 {
                        let Some(count) = shared.0.free(CAPACITY) else {
                            loom::thread::yield_now();
                            continue;
                        };
                        #[allow(unsafe_code)]
                        // SAFETY: loom's cell checks that no other thread accesses the slot now; that is the test.
                        shared.1[(count % CAPACITY) as usize]
                            .with_mut(|slot| unsafe { *slot = sent + 1 });
                        shared.0.publish(count);
                        sent += 1;
                    }
                })
            };
            let mut got = 0;
            while got < 3 {
                let Some(count) = shared.0.filled(CAPACITY).unwrap() else {
                    loom::thread::yield_now();
                    continue;
                };
                #[allow(unsafe_code)]
                // SAFETY: as above.
                let value = shared.1[(count % CAPACITY) as usize].with(|slot| unsafe { *slot });
                assert_eq!(value, got + 1);
                shared.0.give_back(count);
                got += 1;
            }
            writer.join().unwrap();
        });
    }
}
