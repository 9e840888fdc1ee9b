//! Memory of other devices, such as GPUs. The CPU cannot load from it or store to it, so the code that registered it makes the copies.
#![allow(unsafe_code)] // an unsafe trait: copies between addresses

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::space::{AccessFault, Span};

/// A copy within the memory of another device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// First byte to read.
    pub from: u64,
    /// First byte to write.
    pub into: u64,
    /// The number of bytes.
    pub len_bytes: usize,
}

/// What copies between this process and the memory of another device.
///
/// # Safety
/// A call returns when its copies are over, also if it fails, and accesses neither memory after that. Copies are made one after the other.
pub unsafe trait Foreign: Send + Sync {
    /// Copies from `theirs`, in the device's memory, to `own`, in this process. Both lists have the same total length.
    ///
    /// # Safety
    /// `own` may be written; `theirs` is memory of the device for as long as the call takes.
    ///
    /// # Errors
    /// [`AccessFault`] if the device refuses or fails.
    unsafe fn fetch(&self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault>;

    /// Copies from `own`, in this process, to `theirs`, in the device's memory. Both lists have the same total length.
    ///
    /// # Safety
    /// `own` may be read; `theirs` is memory of the device for as long as the call takes.
    ///
    /// # Errors
    /// [`AccessFault`] if the device refuses or fails.
    unsafe fn put(&self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault>;

    /// Copies inside of the device's memory, one after the other. None of them overlaps itself.
    ///
    /// # Safety
    /// All of it is memory of the device for as long as the call takes.
    ///
    /// # Errors
    /// [`AccessFault`] if the device refuses or fails.
    unsafe fn shift(&self, moves: &[Move]) -> Result<(), AccessFault>;
}

/// One memory that copies know by its place in the table, and how many regions are in it.
struct ForeignEntry {
    memory: Arc<dyn Foreign>,
    regions: usize,
}

static TABLE: Mutex<Vec<Option<ForeignEntry>>> = Mutex::new(Vec::new());

fn table() -> MutexGuard<'static, Vec<Option<ForeignEntry>>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory at a place of the table. Asked with each copy of such memory, and with no other.
pub(super) fn at(place: u32) -> Option<Arc<dyn Foreign>> {
    let table = table();
    let entry = table.get(place as usize)?.as_ref()?;
    Some(Arc::clone(&entry.memory))
}

/// A region's reference to a memory, which keeps its place in the table as long as one of these exists.
pub struct ForeignRegion {
    place: u32,
}

impl ForeignRegion {
    /// A region in `memory`, which gets a place in the table with its first region.
    pub fn new(memory: &Arc<dyn Foreign>) -> ForeignRegion {
        let mut table = table();
        let same = |entry: &Option<ForeignEntry>| {
            entry.as_ref().is_some_and(|entry| {
                std::ptr::addr_eq(Arc::as_ptr(&entry.memory), Arc::as_ptr(memory))
            })
        };
        if let Some(place) = table.iter().position(same) {
            if let Some(Some(entry)) = table.get_mut(place) {
                entry.regions += 1;
            }
            return ForeignRegion {
                place: place as u32,
            };
        }
        let entry = Some(ForeignEntry {
            memory: Arc::clone(memory),
            regions: 1,
        });
        let place = match table.iter().position(Option::is_none) {
            Some(place) => {
                table[place] = entry;
                place
            }
            None => {
                table.push(entry);
                table.len() - 1
            }
        };
        ForeignRegion {
            place: place as u32,
        }
    }

    pub(crate) fn place(&self) -> u32 {
        self.place
    }
}

impl Drop for ForeignRegion {
    fn drop(&mut self) {
        let mut table = table();
        let Some(slot) = table.get_mut(self.place as usize) else {
            return;
        };
        let gone = match slot {
            Some(entry) if entry.regions > 1 => {
                entry.regions -= 1;
                None
            }
            slot => slot.take(),
        };
        // Without the lock: what the memory's own end does is its owner's.
        drop(table);
        drop(gone);
    }
}

impl fmt::Debug for ForeignRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignRegion")
            .field("place", &self.place)
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::copies::{Copies, CopyOrigin};
    use crate::device::space::{Space, SpaceAddress};

    /// Where its memory begins: nothing is mapped there in this process.
    const START: u64 = 0x7000_0000_0000_0000;

    #[derive(Default)]
    struct Other {
        bytes: Mutex<Vec<u8>>,
        calls: Mutex<Vec<&'static str>>,
        broken: std::sync::atomic::AtomicBool,
    }

    impl Other {
        fn begin(&self, call: &'static str) -> Result<MutexGuard<'_, Vec<u8>>, AccessFault> {
            self.calls.lock().unwrap().push(call);
            let broken = self.broken.load(std::sync::atomic::Ordering::Relaxed);
            (!broken)
                .then(|| self.bytes.lock().unwrap())
                .ok_or(AccessFault)
        }
    }

    fn bytes_of(spans: &[Span]) -> Vec<usize> {
        let addresses = spans
            .iter()
            .flat_map(|it| it.addr..it.addr + it.len_bytes as u64);
        addresses.map(|addr| addr as usize).collect()
    }

    // SAFETY: what it does is over when it returns.
    unsafe impl Foreign for Other {
        unsafe fn fetch(&self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault> {
            let bytes = self.begin("fetch")?;
            for (own, their) in bytes_of(own).into_iter().zip(bytes_of(theirs)) {
                // SAFETY: the caller's promise.
                unsafe {
                    *std::ptr::with_exposed_provenance_mut(own) = bytes[their - START as usize];
                }
            }
            Ok(())
        }

        unsafe fn put(&self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault> {
            let mut bytes = self.begin("put")?;
            for (own, their) in bytes_of(own).into_iter().zip(bytes_of(theirs)) {
                // SAFETY: the caller's promise.
                bytes[their - START as usize] = unsafe { *std::ptr::with_exposed_provenance(own) };
            }
            Ok(())
        }

        unsafe fn shift(&self, moves: &[Move]) -> Result<(), AccessFault> {
            let mut bytes = self.begin("shift")?;
            for it in moves {
                let from = (it.from - START) as usize;
                assert!(it.from.abs_diff(it.into) >= it.len_bytes as u64, "{it:?}");
                bytes.copy_within(from..from + it.len_bytes, (it.into - START) as usize);
            }
            Ok(())
        }
    }

    struct Bench {
        other: Arc<Other>,
        region: ForeignRegion,
        copies: Copies,
    }

    impl Bench {
        fn new() -> Bench {
            let other = Arc::new(Other::default());
            *other.bytes.lock().unwrap() = (0..=255).collect();
            let memory: Arc<dyn Foreign> = other.clone();
            Bench {
                region: ForeignRegion::new(&memory),
                other,
                copies: Copies::default(),
            }
        }

        fn place(&self, offset: u64) -> SpaceAddress {
            SpaceAddress {
                space: Space::of_foreign(&self.region),
                addr: START + offset,
            }
        }

        /// Copies inside of it.
        fn copy(&mut self, from: u64, into: u64, len_bytes: usize) {
            let (from, into) = (self.place(from), self.place(into));
            // SAFETY: the double checks the range.
            unsafe { self.copies.copy(from, into, len_bytes) }.unwrap();
        }

        fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
            self.other.bytes.lock().unwrap()[offset..offset + len].to_vec()
        }

        fn calls(&self) -> Vec<&'static str> {
            std::mem::take(&mut self.other.calls.lock().unwrap())
        }
    }

    #[test]
    fn copies_within_foreign_memory_use_shift_unless_they_overlap() {
        let mut bench = Bench::new();
        bench.copy(0, 100, 10);
        bench.copy(20, 110, 10);
        assert!(bench.calls().is_empty());
        bench.copies.settle();
        assert_eq!(bench.calls(), ["shift"]);
        assert_eq!(bench.bytes(100, 11), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20]);
        bench.copy(50, 51, 10);
        bench.copies.settle();
        assert_eq!(bench.calls(), ["fetch", "put"]);
        assert_eq!(bench.bytes(50, 4), [50, 50, 51, 52]);
        // What a collected copy writes is read behind it.
        bench.copy(200, 0, 4);
        bench.copy(0, 30, 4);
        bench.copies.settle();
        assert_eq!(bench.calls(), ["shift", "shift"]);
        assert_eq!(bench.bytes(30, 4), [200, 201, 202, 203]);
    }

    #[test]
    fn words_and_bytes_are_copied_to_and_from_this_process() {
        let mut bench = Bench::new();
        let mut got = [0; 9];
        let place = bench.place(3);
        // SAFETY: memory of this function, and ranges of the double.
        unsafe {
            bench.copies.store(place, &7_u64.to_ne_bytes()).unwrap();
            assert_eq!(bench.copies.fetch_add(place, 5), Ok(7));
            assert_eq!(bench.copies.compare_swap(place, 12, 1 << 40), Ok(12));
            assert_eq!(bench.copies.compare_swap(place, 12, 3), Ok(1 << 40));
            bench.copies.load(place, &mut got).unwrap();
            assert_eq!((&got[..8], got[8]), (&(1_u64 << 40).to_ne_bytes()[..], 11));
            bench
                .copies
                .copy(
                    place,
                    SpaceAddress::local(got.as_mut_ptr().wrapping_add(5)),
                    4,
                )
                .unwrap();
        }
        bench.copies.settle();
        assert_eq!(got[5..], [0, 0, 0, 0]);
    }

    #[test]
    fn collected_copies_are_made_before_their_target_is_accessed() {
        let mut bench = Bench::new();
        let mut own = [0_u64; 16];
        let start = own.as_mut_ptr().cast::<u8>();
        let here = |offset: usize| SpaceAddress::local(start.wrapping_add(offset));
        let bring = |bench: &mut Bench, from: u64, into: usize| {
            // SAFETY: within `own`, and the double checks the range.
            unsafe { bench.copies.copy(bench.place(from), here(into), 8) }.unwrap();
        };
        let mut got = [0; 8];
        // SAFETY: all within `own`.
        unsafe {
            bring(&mut bench, 8, 0);
            bring(&mut bench, 16, 8);
            assert!(bench.calls().is_empty());
            bench.copies.load(here(8), &mut got).unwrap();
            assert_eq!(got, [16, 17, 18, 19, 20, 21, 22, 23]);
            assert_eq!(bench.calls(), ["fetch"]);
            // What is stored later stays.
            bring(&mut bench, 32, 0);
            bench.copies.store(here(0), &[7; 8]).unwrap();
            bring(&mut bench, 40, 16);
            bench.copies.copy(here(16), here(24), 8).unwrap();
            bring(&mut bench, 0, 32);
            assert_eq!(
                bench.copies.fetch_add(here(32), 1),
                Ok(0x0706_0504_0302_0100)
            );
            bring(&mut bench, 0, 40);
            let swapped = bench
                .copies
                .compare_swap(here(40), 0x0706_0504_0302_0100, 9);
            assert_eq!(swapped, Ok(0x0706_0504_0302_0100));
            // And back from where it was brought to.
            bring(&mut bench, 48, 48);
            bench.copies.copy(here(48), bench.place(100), 8).unwrap();
            bench.copies.settle();
            let mut word = |offset| {
                bench.copies.load(here(offset), &mut got).unwrap();
                got
            };
            assert_eq!(word(0), [7; 8]);
            assert_eq!(word(24), [40, 41, 42, 43, 44, 45, 46, 47]);
            assert_eq!(word(40), 9_u64.to_ne_bytes());
        }
        assert_eq!(bench.bytes(100, 8), [48, 49, 50, 51, 52, 53, 54, 55]);
        // Its queue pair is notified, after the copy.
        bench.copies.work_for(3, false, 0);
        bring(&mut bench, 0, 0);
        bench
            .other
            .broken
            .store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(bench.copies.settle_for(4, false).is_none());
        assert!(bench.copies.settle_for(3, false).is_some());
    }

    #[test]
    fn copy_failure_is_reported_to_its_queue_pair_only() {
        let mut bench = Bench::new();
        bench.copies.work_for(5, true, 0);
        bench.copy(0, 100, 10);
        let place = bench.place(0);
        bench
            .other
            .broken
            .store(true, std::sync::atomic::Ordering::Relaxed);
        bench.copies.settle();
        let cause = CopyOrigin {
            qpn: 5,
            request: true,
            psn: 0,
            ..CopyOrigin::default()
        };
        assert_eq!(bench.copies.take_any_fault(), Some(cause));
        assert_eq!(bench.copies.take_lost_sender(), None);
        // SAFETY: as above.
        let refused = unsafe { bench.copies.load(place, &mut [0; 4]) };
        assert_eq!(refused, Err(AccessFault));
    }

    #[test]
    fn foreign_memory_has_one_place_while_a_region_is_in_it() {
        let bench = Bench::new();
        let memory: Arc<dyn Foreign> = bench.other.clone();
        let again = ForeignRegion::new(&memory);
        drop(memory);
        assert_eq!(again.place(), bench.region.place());
        let place = bench.place(0);
        let other = Bench::new();
        assert_ne!(other.place(0).space, place.space);
        drop(bench);
        assert!(place.space.foreign().is_ok());
        let known = Arc::downgrade(&again_memory(&again));
        drop(again);
        assert!(known.upgrade().is_none());
    }

    fn again_memory(region: &ForeignRegion) -> Arc<dyn Foreign> {
        Space::of_foreign(region).foreign().unwrap()
    }
}
