//! Memory that driver and device of one process share.
#![allow(unsafe_code)] // maps it

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::{Error, Result};

/// Zeroed, page-aligned memory that a device may access. Its address never changes.
///
/// Memory of up to 32 KiB shares mappings of 2 MiB, which are huge pages once there are several. When it is dropped, it is given to the next
/// [`Pages::new`] of any length that fits.
///
/// A driver may have registered the memory, and may be able to end that only later, for example when a GPU is idle: see [`Pages::hold`]. Such
/// memory keeps its length when it is dropped: at the same address there would be other memory soon, which could not be registered. It is given
/// to the next [`Pages::new`] of the same length.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len_bytes: usize,
}

/// Memory of one [`Pages`].
#[derive(Debug)]
struct PagesBlock {
    len_bytes: usize,
    /// How many calls of [`Pages::hold`] were not followed by [`Pages::release`].
    holds: usize,
    /// It is held, and no [`Pages`].
    is_free: bool,
    /// See [`Pages::give_up`].
    is_given_up: bool,
    /// The start of the slab that it is a part of. Otherwise it is a mapping of its own.
    slab: Option<usize>,
}

/// A mapping for many blocks. Queues of many endpoints in pages of 4 KiB each would need more translations than a processor keeps.
#[derive(Debug)]
struct Slab {
    /// Ranges without a block: offsets and lengths, neighbours joined.
    free: BTreeMap<usize, usize>,
    /// No block was ever behind this offset: those bytes are the kernel's zeros.
    used_bytes: usize,
}

/// Bytes of a slab and its alignment: a huge page of x86-64, and of arm64 with pages of 4 KiB.
const SLAB_BYTES: usize = 2 << 20;
/// Longer blocks have a mapping of their own.
/// The queues of a deep endpoint do: in a huge page all of them would be resident, used or not.
const SLAB_BLOCK_MAX: usize = SLAB_BYTES / 64;

impl Slab {
    fn new() -> Slab {
        Slab {
            free: BTreeMap::from([(0, SLAB_BYTES)]),
            used_bytes: 0,
        }
    }

    /// The offset of a range that had no block, and how many of its first bytes may not be 0.
    fn take(&mut self, len_bytes: usize) -> Option<(usize, usize)> {
        let fits = |(_, free): &(&usize, &usize)| **free >= len_bytes;
        let (&offset, &free) = self.free.iter().find(fits)?;
        self.free.remove(&offset);
        if free > len_bytes {
            self.free.insert(offset + len_bytes, free - len_bytes);
        }
        let stale = self.used_bytes.saturating_sub(offset).min(len_bytes);
        self.used_bytes = self.used_bytes.max(offset + len_bytes);
        Some((offset, stale))
    }

    fn is_empty(&self) -> bool {
        self.free.get(&0) == Some(&SLAB_BYTES)
    }

    /// The range has no block any more. Returns whether none has.
    fn give_back(&mut self, mut offset: usize, mut len_bytes: usize) -> bool {
        if let Some(next) = self.free.remove(&(offset + len_bytes)) {
            len_bytes += next;
        }
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            self.free.remove(&before);
            (offset, len_bytes) = (before, len + len_bytes);
        }
        self.free.insert(offset, len_bytes);
        self.is_empty()
    }
}

/// All blocks and slabs, by their first address.
#[derive(Debug)]
struct Memory {
    blocks: BTreeMap<usize, PagesBlock>,
    slabs: BTreeMap<usize, Slab>,
    /// The process that made the slabs.
    process: u32,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory {
    blocks: BTreeMap::new(),
    slabs: BTreeMap::new(),
    process: 0,
});

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// After a fork registered ranges may be holes (MADV_DONTFORK). So the child uses nothing again that its parent has made.
    fn check_process(&mut self) {
        let process = std::process::id();
        if std::mem::replace(&mut self.process, process) != process {
            self.slabs.clear();
            self.blocks
                .values_mut()
                .for_each(|block| block.is_free = false);
        }
    }

    /// A block of a slab: its address, and how many of its first bytes may not be 0.
    fn take_of_slab(&mut self, len_bytes: usize) -> Option<(usize, usize)> {
        if len_bytes > SLAB_BLOCK_MAX {
            return None;
        }
        let (slab, (offset, stale)) = self
            .slabs
            .iter_mut()
            .find_map(|(start, slab)| Some((*start, slab.take(len_bytes)?)))?;
        let block = PagesBlock {
            len_bytes,
            holds: 0,
            is_free: false,
            is_given_up: false,
            slab: Some(slab),
        };
        self.blocks.insert(slab + offset, block);
        Some((slab + offset, stale))
    }

    /// The address of memory of that length that was dropped while it was held.
    fn take_held(&mut self, len_bytes: usize) -> Option<usize> {
        let is_it =
            |(_, block): &(&usize, &mut PagesBlock)| block.is_free && block.len_bytes == len_bytes;
        let (start, block) = self.blocks.iter_mut().find(is_it)?;
        block.is_free = false;
        Some(*start)
    }

    /// The block is over. Returns the mapping that has no block any more. One slab without blocks is kept.
    fn remove(&mut self, start: usize) -> Option<(usize, usize)> {
        if self.blocks.get(&start)?.is_given_up {
            return None;
        }
        let block = self.blocks.remove(&start)?;
        let Some(slab) = block.slab else {
            return Some((start, block.len_bytes));
        };
        let is_empty = (self.slabs.get_mut(&slab)?).give_back(start - slab, block.len_bytes);
        let mut others = self.slabs.iter().filter(|(other, _)| **other != slab);
        let has_spare = others.any(|(_, other)| other.is_empty());
        (is_empty && has_spare).then(|| {
            self.slabs.remove(&slab);
            (slab, SLAB_BYTES)
        })
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
    /// zeros: a page becomes resident when it is first used. Shorter memory shares mappings, which are huge pages once there are several.
    ///
    /// # Errors
    /// [`Error::System`] with ENOMEM if there is not so much.
    pub fn new(len_bytes: usize) -> Result<Pages> {
        let Some(len_bytes) = len_bytes.max(1).checked_next_multiple_of(page_bytes()) else {
            return Err(NO_MEMORY);
        };
        let found = {
            let mut memory = memory();
            memory.check_process();
            let held = memory.take_held(len_bytes);
            let of_slab = || memory.take_of_slab(len_bytes);
            held.map(|start| (start, len_bytes)).or_else(of_slab)
        };
        let of_new_slab = || {
            let fits = len_bytes <= SLAB_BLOCK_MAX;
            fits.then(|| Pages::of_new_slab(len_bytes))?
        };
        let (start, stale) = match found.or_else(of_new_slab) {
            Some(found) => found,
            None => {
                let start = map(len_bytes)?;
                let block = PagesBlock {
                    len_bytes,
                    holds: 0,
                    is_free: false,
                    is_given_up: false,
                    slab: None,
                };
                memory().blocks.insert(start, block);
                (start, 0)
            }
        };
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(start));
        let start = start.ok_or(NO_MEMORY)?;
        // SAFETY: a block of that length, with no other owner from now on.
        unsafe { start.write_bytes(0, stale) };
        Ok(Pages { start, len_bytes })
    }

    /// `None` if there is not so much address space.
    fn of_new_slab(len_bytes: usize) -> Option<(usize, usize)> {
        let start = map_aligned().ok()?;
        let mut memory = memory();
        // A process with few endpoints has no use for 2 MiB of resident memory.
        let advice = if memory.slabs.is_empty() {
            libc::MADV_NOHUGEPAGE
        } else {
            libc::MADV_HUGEPAGE
        };
        let address = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the mapping made above. The advice changes no byte, and a kernel without huge pages refuses it.
        let _ = unsafe { libc::madvise(address, SLAB_BYTES, advice) };
        memory.slabs.insert(start, Slab::new());
        memory.take_of_slab(len_bytes)
    }

    /// Keeps the memory around that address mapped, as the same memory, until [`Pages::release`]. False if it is no memory of this module's.
    pub fn hold(address: usize) -> bool {
        match find(&mut memory().blocks, address) {
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
            let mut memory = memory();
            let Some((start, block)) = find(&mut memory.blocks, address) else {
                return;
            };
            block.holds = block.holds.saturating_sub(1);
            if !block.is_free || block.holds > 0 {
                return;
            }
            memory.remove(start)
        };
        gone.into_iter().for_each(unmap);
    }

    /// A device may access the memory around that address for ever: when it is dropped, it stays mapped, and nobody gets it.
    pub fn give_up(address: usize) {
        if let Some((_, block)) = find(&mut memory().blocks, address) {
            (block.is_given_up, block.is_free) = (true, false);
        }
    }

    /// How many there are in this process, and were given up. For tests of leaks.
    #[doc(hidden)]
    pub fn count() -> usize {
        let memory = memory();
        memory
            .blocks
            .values()
            .filter(|block| !block.is_free)
            .count()
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
            let memory = memory();
            let block = memory.blocks.get(&start.addr().get())?;
            (!block.is_free).then_some(block.len_bytes)?
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

const NO_MEMORY: Error = Error::System {
    operation: "allocation of device memory",
    errno: libc::ENOMEM,
};

/// The block around that address.
fn find(
    blocks: &mut BTreeMap<usize, PagesBlock>,
    address: usize,
) -> Option<(usize, &mut PagesBlock)> {
    let (start, block) = blocks.range_mut(..=address).next_back()?;
    (address - start < block.len_bytes).then_some((*start, block))
}

/// A new mapping, at an address of the kernel's choice.
fn map(len_bytes: usize) -> Result<usize> {
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(NO_MEMORY);
    }
    Ok(start.expose_provenance())
}

/// A new mapping for a slab.
fn map_aligned() -> Result<usize> {
    let start = map(2 * SLAB_BYTES)?;
    let slab = start.next_multiple_of(SLAB_BYTES);
    let end = slab + SLAB_BYTES;
    for (from, to) in [(start, slab), (end, start + 2 * SLAB_BYTES)] {
        if from < to {
            unmap((from, to - from));
        }
    }
    Ok(slab)
}

/// Ends a mapping, or a part of one.
fn unmap((start, len_bytes): (usize, usize)) {
    // SAFETY: mapped by `map`, and not used any more.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), len_bytes) };
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = self.start.as_ptr().expose_provenance();
        let gone = {
            let mut memory = memory();
            if let Some(block) = memory.blocks.get_mut(&start)
                && block.holds > 0
            {
                block.is_free = !block.is_given_up;
                return;
            }
            // Before it is unmapped: then the kernel may give the address to another thread.
            memory.remove(start)
        };
        // Without the lock: `munmap` waits for a thread that has asked the kernel for a notification of it.
        gone.into_iter().for_each(unmap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test at a time: each may be given what another one has dropped.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

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

    /// Each block has its bytes to itself, and is zeroed when it is given out again.
    #[test]
    fn blocks_of_slabs_are_apart_and_zeroed() {
        let _alone = alone();
        let mut random = 1_u64;
        let mut below = |end: usize| {
            random = (random.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1);
            (random >> 33) as usize % end
        };
        // SAFETY: within the pages, which have no other owner.
        let bytes = |pages: &Pages| unsafe {
            std::slice::from_raw_parts_mut(pages.at(0), pages.len_bytes())
        };
        let mut blocks: Vec<(Pages, u8)> = Vec::new();
        for turn in 0..2000 {
            if blocks.len() > 60 || (turn % 3 == 0 && !blocks.is_empty()) {
                let (pages, mark) = blocks.swap_remove(below(blocks.len()));
                assert!(bytes(&pages).iter().step_by(512).all(|byte| *byte == mark));
                continue;
            }
            let pages = Pages::new(1 + below(SLAB_BLOCK_MAX - 1)).unwrap();
            let all = bytes(&pages);
            assert!(all.iter().step_by(512).all(|byte| *byte == 0));
            let mark = 1 + (turn % 255) as u8;
            all.fill(mark);
            blocks.push((pages, mark));
        }
    }

    #[test]
    fn slab_without_blocks_is_unmapped() {
        let mut slab = Slab::new();
        let (one, two, three) = (4096, 8192, SLAB_BYTES - 12288);
        assert_eq!(slab.take(one), Some((0, 0)));
        assert_eq!(slab.take(two), Some((4096, 0)));
        assert!(!slab.give_back(0, one));
        // The first range is too short. Of that behind it nothing was used.
        assert_eq!(slab.take(three), Some((12288, 0)));
        assert_eq!(slab.take(one), Some((0, one)));
        assert_eq!(slab.take(1), None);
        assert!(!slab.give_back(4096, two));
        assert!(!slab.give_back(12288, three));
        assert_eq!(slab.take(three), Some((4096, three)));
        assert!(!slab.give_back(0, one));
        assert!(slab.give_back(4096, three));
        assert_eq!(slab.free, BTreeMap::from([(0, SLAB_BYTES)]));
    }

    #[test]
    fn held_block_of_a_slab_is_given_to_its_length_alone() {
        let _alone = alone();
        let (len_bytes, other) = (page_bytes(), 2 * page_bytes());
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        assert!(memory().blocks[&start].slab.is_some());
        assert!(Pages::hold(start));
        drop(pages);
        for _ in 0..100 {
            let pages = Pages::new(other).unwrap();
            let taken = pages.start().addr().get();
            assert!(taken + other <= start || start + len_bytes <= taken);
            std::mem::forget(pages);
        }
        let again = Pages::new(len_bytes).unwrap();
        assert_eq!(again.start().addr().get(), start);
        drop(again);
        Pages::release(start);
        assert!((memory().blocks.get(&start)).is_none_or(|block| block.len_bytes != len_bytes));
    }

    #[test]
    fn memory_that_was_given_up_is_given_to_nobody() {
        let _alone = alone();
        let len_bytes = page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        Pages::give_up(start + 1);
        drop(pages);
        assert!(is_mapped(start));
        assert_ne!(Pages::new(len_bytes).unwrap().start().addr().get(), start);
        // Also if a driver has it registered.
        let held = Pages::new(len_bytes).unwrap();
        let start = held.start().addr().get();
        assert!(Pages::hold(start));
        Pages::give_up(start);
        drop(held);
        assert_ne!(Pages::new(len_bytes).unwrap().start().addr().get(), start);
        Pages::release(start);
        assert!(is_mapped(start));
    }

    #[test]
    fn longer_memory_has_a_mapping_of_its_own() {
        let _alone = alone();
        let short = Pages::new(1).unwrap();
        let long = Pages::new(SLAB_BLOCK_MAX + 1).unwrap();
        let is_of_slab =
            |pages: &Pages| memory().blocks[&pages.start().addr().get()].slab.is_some();
        assert!(is_of_slab(&short) && !is_of_slab(&long));
    }

    /// Longer than blocks of slabs.
    const PAGES: usize = 37;

    fn is_mapped(start: usize) -> bool {
        let mut seen = 0_u8;
        // SAFETY: it looks at page tables only.
        unsafe { libc::mincore(start as *mut _, 1, &raw mut seen) == 0 }
    }

    #[test]
    fn held_memory_stays_mapped_and_is_given_out_again_zeroed() {
        let _alone = alone();
        let len_bytes = PAGES * page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        // SAFETY: within the pages, which have no other owner.
        unsafe { pages.at(len_bytes - 1).write(7) };
        assert!(Pages::hold(start + 1) && Pages::hold(start + len_bytes - 1));
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
        assert!((memory().blocks.get(&start)).is_none_or(|block| block.len_bytes != len_bytes));
    }

    #[test]
    fn memory_that_is_held_no_more_is_unmapped_with_its_last_owner() {
        let _alone = alone();
        let len_bytes = (PAGES + 2) * page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let start = pages.start().addr().get();
        assert!(Pages::hold(start));
        Pages::release(start);
        drop(pages);
        assert!((memory().blocks.get(&start)).is_none_or(|block| block.len_bytes != len_bytes));
        assert!(!Pages::hold(0));
    }
}
