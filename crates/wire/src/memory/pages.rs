//! Memory that driver and device of one process share.
#![allow(unsafe_code)] // maps it

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::{Error, Result};

/// Zeroed, page-aligned memory that a device may access. Its address never changes.
///
/// A driver may have registered the memory, and may be able to end that only later, for example when a GPU is idle: see [`Pages::hold`]. Such
/// memory is not unmapped when it is dropped: at the same address there would be other memory soon, which could not be registered. It is given
/// to the next [`Pages::new`] of the same length instead.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len_bytes: usize,
}

/// A mapping of this module's.
#[derive(Debug)]
struct MappedPages {
    len_bytes: usize,
    /// How many calls of [`Pages::hold`] were not followed by [`Pages::release`].
    holds: usize,
    /// See [`Pages::give_up`].
    is_given_up: bool,
}

/// All mappings of this module's.
struct Mappings {
    /// By their first address.
    blocks: BTreeMap<usize, MappedPages>,
    /// Those that are held and no [`Pages`]: length and first address.
    free: BTreeSet<(usize, usize)>,
}

static MAPPINGS: Mutex<Mappings> = Mutex::new(Mappings {
    blocks: BTreeMap::new(),
    free: BTreeSet::new(),
});

fn mappings() -> MutexGuard<'static, Mappings> {
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mappings {
    /// The mapping around that address, and where it begins.
    fn find(&mut self, address: usize) -> Option<(usize, &mut MappedPages)> {
        let (start, block) = self.blocks.range_mut(..=address).next_back()?;
        (address - start < block.len_bytes).then_some((*start, block))
    }
}

/// Alignment and granularity of [`Pages`]: bytes of a page of the system's, 4 KiB on x86-64, 4 or 64 KiB on arm64.
pub fn page_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        // SAFETY: asks for a number.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes)
            .ok()
            .filter(|bytes| bytes.is_power_of_two())
            .unwrap_or(4096)
    })
}

// SAFETY: `Pages` owns plain memory and gives out addresses only; driver and device agree on which of them writes where.
unsafe impl Send for Pages {}
// SAFETY: as above; there is no interior state besides the memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len_bytes` of memory, rounded up to whole pages. It comes from the kernel and not from the allocator, which would write the
    /// zeros: a page becomes resident when it is first used.
    ///
    /// # Errors
    /// [`Error::System`] with ENOMEM if there is not so much.
    pub fn new(len_bytes: usize) -> Result<Pages> {
        let none = Error::System {
            operation: "allocation of device memory",
            errno: libc::ENOMEM,
        };
        let Some(len_bytes) = len_bytes.max(1).checked_next_multiple_of(page_bytes()) else {
            return Err(none);
        };
        if let Some(pages) = Pages::held_before(len_bytes) {
            return Ok(pages);
        }
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(none);
        }
        let start = NonNull::new(start.cast()).ok_or(none)?;
        let block = MappedPages {
            len_bytes,
            holds: 0,
            is_given_up: false,
        };
        mappings().blocks.insert(start.addr().get(), block);
        Ok(Pages { start, len_bytes })
    }

    /// Memory of that length that was dropped while it was held.
    fn held_before(len_bytes: usize) -> Option<Pages> {
        let found = {
            let free = &mut mappings().free;
            let found = *free
                .range((len_bytes, 0)..=(len_bytes, usize::MAX))
                .next()?;
            free.remove(&found);
            found.1
        };
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(found))?;
        // SAFETY: a mapping of that length, with no other owner from now on.
        unsafe { start.write_bytes(0, len_bytes) };
        Some(Pages { start, len_bytes })
    }

    /// Keeps the memory around that address mapped, as the same memory, until [`Pages::release`]. False if it is no memory of this module's.
    pub fn hold(address: usize) -> bool {
        match mappings().find(address) {
            Some((_, block)) => {
                block.holds += 1;
                true
            }
            None => false,
        }
    }

    /// Ends a [`Pages::hold`] that has returned true.
    pub fn release(address: usize) {
        let gone = {
            let mut mappings = mappings();
            let Some((start, block)) = mappings.find(address) else {
                return;
            };
            block.holds = block.holds.saturating_sub(1);
            let (is_held, len_bytes) = (block.holds > 0, block.len_bytes);
            if is_held || !mappings.free.remove(&(len_bytes, start)) {
                return;
            }
            mappings.blocks.remove(&start);
            (start, len_bytes)
        };
        unmap(gone.0, gone.1);
    }

    /// A device may access the memory around that address for ever: when it is dropped, it stays mapped, and nobody gets it.
    pub fn give_up(address: usize) {
        let mut mappings = mappings();
        if let Some((start, block)) = mappings.find(address) {
            block.is_given_up = true;
            let len_bytes = block.len_bytes;
            mappings.free.remove(&(len_bytes, start));
        }
    }

    /// How many there are in this process, and were given up. For tests of leaks.
    #[doc(hidden)]
    pub fn count() -> usize {
        let mappings = mappings();
        mappings.blocks.len() - mappings.free.len()
    }

    /// Gives up the ownership, for callers of C. [`Pages::from_raw`] takes it back.
    pub fn into_raw(self) -> NonNull<u8> {
        let start = self.start;
        std::mem::forget(self);
        start
    }

    /// The pages that begin there. `None` if no [`Pages::into_raw`] has given that address.
    ///
    /// # Safety
    /// Each address is taken back once.
    pub unsafe fn from_raw(start: NonNull<u8>) -> Option<Pages> {
        let len_bytes = {
            let (mappings, start) = (mappings(), start.addr().get());
            let len_bytes = mappings.blocks.get(&start)?.len_bytes;
            (!mappings.free.contains(&(len_bytes, start))).then_some(len_bytes)?
        };
        Some(Pages { start, len_bytes })
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length, a multiple of [`page_bytes`].
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The byte at `offset`.
    ///
    /// # Panics
    /// If `offset` is past the end: the layout of driver memory is computed, never given from outside.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len_bytes());
        self.start.as_ptr().wrapping_add(offset)
    }
}

fn unmap(start: usize, len_bytes: usize) {
    // SAFETY: mapped in `Pages::new` with the same length, and not used any more.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), len_bytes) };
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = self.start.as_ptr().expose_provenance();
        {
            let mut mappings = mappings();
            if let Some(block) = mappings.blocks.get(&start)
                && (block.holds > 0 || block.is_given_up)
            {
                if !block.is_given_up {
                    mappings.free.insert((self.len_bytes, start));
                }
                return;
            }
            // Before it is unmapped: then the kernel may give the address to another thread.
            mappings.blocks.remove(&start);
        }
        // Without the lock: `munmap` waits for a thread that has asked the kernel for a notification of it.
        unmap(start, self.len_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        for len_bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let refused = Pages::new(len_bytes);
            assert!(
                matches!(
                    refused,
                    Err(Error::System {
                        errno: libc::ENOMEM,
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
    }

    /// A length that no other test asks for, so that no other one is given the memory.
    const PAGES: usize = 37;

    fn is_mapped(start: usize) -> bool {
        let mut seen = 0_u8;
        // SAFETY: it looks at page tables only.
        unsafe { libc::mincore(start as *mut _, 1, &raw mut seen) == 0 }
    }

    #[test]
    fn held_memory_stays_mapped_and_is_given_out_again_zeroed() {
        let len_bytes = PAGES * page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        // SAFETY: within the pages, which have no other owner.
        unsafe { pages.at(len_bytes - 1).write(7) };
        assert!(Pages::hold(start + 1) && Pages::hold(start + len_bytes - 1));
        assert!(!Pages::hold(start + len_bytes) || mappings().find(start + len_bytes).is_some());
        drop(pages);
        assert!(is_mapped(start));
        // Another length does not fit.
        let other = Pages::new(len_bytes + page_bytes()).unwrap();
        assert_ne!(other.start().addr().get(), start);
        let again = Pages::new(len_bytes).unwrap();
        assert_eq!(again.start().addr().get(), start);
        // SAFETY: as above.
        assert_eq!(unsafe { again.at(len_bytes - 1).read() }, 0);
        Pages::release(start);
        drop(again);
        assert!(is_mapped(start), "it is held once more");
        Pages::release(start);
        assert!(
            mappings()
                .blocks
                .get(&start)
                .is_none_or(|block| block.len_bytes != len_bytes)
        );
    }

    #[test]
    fn memory_that_was_given_up_is_given_to_nobody() {
        for is_held in [false, true] {
            let len_bytes = (PAGES + 4) * page_bytes();
            let pages = Pages::new(len_bytes).unwrap();
            let start = pages.start().addr().get();
            assert!(!is_held || Pages::hold(start));
            Pages::give_up(start + 1);
            drop(pages);
            assert!(is_mapped(start));
            assert_ne!(Pages::new(len_bytes).unwrap().start().addr().get(), start);
            Pages::release(start);
            assert!(is_mapped(start));
        }
    }

    #[test]
    fn memory_that_is_held_no_more_is_unmapped_with_its_last_owner() {
        let len_bytes = (PAGES + 2) * page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        assert!(Pages::hold(start));
        Pages::release(start);
        drop(pages);
        assert!(
            mappings()
                .blocks
                .get(&start)
                .is_none_or(|block| block.len_bytes != len_bytes)
        );
        assert!(!Pages::hold(0));
    }
}
