//! The registration cache: hits, eviction, and that no entry outlives its memory. A stress test for the last has threads that map, fill, register,
//! transfer, unmap and map again at the same addresses, and traces each registration to the mapping that it was made from.
#![cfg(feature = "softcx")]
#![allow(unsafe_code)] // maps memory, and registers it

mod rig;
mod waived;

use std::collections::HashMap;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use doorbell::{
    Access, CacheConfig, CacheCounters, CachedRegion, Control, Endpoint, EndpointConfig, Error,
    Executor, Invalidation, ProtectionDomain, QueueKind, RegionCache, RemoteSlice, Work,
};
use rig::{Limit, Random, SOON, device, from_env};
use waived::waived;

const PAGE: usize = 4096;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Tests of one process share its addresses: a range that one unmaps, another may map before the kernel's event arrives. Its entry is then
/// invalidated, which is correct and not a hit.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn map(at: *mut u8, len: usize, flags: i32) -> NonNull<u8> {
    // SAFETY: wherever there is room, or, with MAP_FIXED, over a mapping of the test's own.
    let at = unsafe { libc::mmap(at.cast(), len, RW, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    NonNull::new(at.cast()).unwrap()
}

/// Maps a range again that was just unmapped, unless another thread of the process got the addresses.
fn again(at: NonNull<u8>, len: usize) -> Option<NonNull<u8>> {
    let flags = ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, where there is none.
    let found = unsafe { libc::mmap(at.as_ptr().cast(), len, RW, flags, -1, 0) };
    (found == at.as_ptr().cast()).then_some(at)
}

fn anywhere(len: usize) -> NonNull<u8> {
    map(std::ptr::null_mut(), len, ANONYMOUS)
}

fn unmap(at: NonNull<u8>, len: usize) {
    // SAFETY: a mapping of the test's own that nobody uses any more.
    assert_eq!(unsafe { libc::munmap(at.as_ptr().cast(), len) }, 0);
}

fn behind(at: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    NonNull::new(at.as_ptr().wrapping_add(bytes)).unwrap()
}

fn get(cache: &RegionCache, at: NonNull<u8>, len: usize) -> CachedRegion {
    // SAFETY: the mapping stays until the test has dropped the result.
    unsafe { cache.get(at, len as u64, Access::ALL) }.unwrap()
}

/// The id of the registration that a request returns.
fn id(cache: &RegionCache, at: NonNull<u8>, len: usize) -> u64 {
    get(cache, at, len).region.id()
}

fn explicit(domain: &ProtectionDomain, max_entries: u32, max_bytes: u64) -> RegionCache {
    let config = CacheConfig::default()
        .max_entries(max_entries)
        .max_bytes(max_bytes);
    // SAFETY: the tests that use it invalidate what they unmap, or unmap it after the cache.
    unsafe { RegionCache::explicit(domain, &config) }.unwrap()
}

/// A cache that is invalidated by events of the kernel, if this machine supports that.
fn watched(test: &str, domain: &ProtectionDomain) -> Option<RegionCache> {
    let cache = RegionCache::new(domain, &CacheConfig::default()).unwrap();
    match cache.invalidation() {
        Invalidation::Kernel => Some(cache),
        Invalidation::None(reason) => {
            waived(test, reason);
            None
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_part_of_a_registered_range_with_the_same_rights_is_a_hit() {
    let _alone = alone();
    let domain = device().protection_domain();
    let cache = explicit(&domain, 16, 1 << 30);
    assert_eq!(*cache.invalidation(), Invalidation::Explicit);
    let at = anywhere(8 * PAGE);
    let whole = get(&cache, at, 4 * PAGE);
    let part = get(&cache, behind(at, PAGE + 5), 100);
    assert_eq!(part.region.id(), whole.region.id());
    assert_eq!((whole.offset, part.offset), (0, PAGE as u64 + 5));
    // A range beyond its end, or with other access rights, is a separate entry.
    let beyond = get(&cache, behind(at, 3 * PAGE), 2 * PAGE);
    assert_ne!(beyond.region.id(), whole.region.id());
    // SAFETY: as in `get`.
    let other = unsafe { cache.get(at, 8, Access::LOCAL_READ) }.unwrap();
    assert_ne!(other.region.id(), whole.region.id());
    assert_eq!(other.region.access(), Access::LOCAL_READ);
    let mut counters = CacheCounters::default();
    (counters.hits, counters.misses) = (1, 3);
    assert_eq!(cache.counters(), counters);
    assert_eq!(cache.size(), (3, 6 * PAGE as u64 + 8));
    // A larger range replaces the entries within it.
    assert_ne!(id(&cache, at, 8 * PAGE), whole.region.id());
    assert_eq!(cache.size(), (2, 8 * PAGE as u64 + 8));
    assert!(whole.region.is_registered() && beyond.region.is_registered());
    drop((whole, part, beyond, other));
    assert_eq!(cache.invalidate(behind(at, 4 * PAGE).as_ptr(), 1), 1);
    assert_eq!(cache.invalidate(at.as_ptr(), 1), 1);
    assert_eq!(cache.invalidate(at.as_ptr(), u64::MAX), 0);
    assert_eq!(cache.size(), (0, 0));
    unmap(at, 8 * PAGE);
}

/// A mapping, which ends with this.
struct Mapped(NonNull<u8>, Arc<AtomicBool>);

// SAFETY: an address of a mapping that only this has.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(self.0, 4 * PAGE);
        self.1.store(true, Ordering::SeqCst);
    }
}

/// The owner of memory goes with the last handle of the region, which work on a stream has; the registration serves others until then.
#[test]
fn owner_of_memory_stays_while_work_has_its_region() {
    let test = "owner_of_memory_stays_while_work_has_its_region";
    let _alone = alone();
    let _limit = Limit::new(test, Duration::from_secs(60));
    let mut pair = rig::Pair::new(&device(), &EndpointConfig::default());
    if pair.a.path().control == Control::Sync {
        return waived(test, "on the sync path no work waits in a stream");
    }
    let cache = explicit(&pair.domain, 16, 1 << 30);
    let at = anywhere(4 * PAGE);
    let is_unmapped = Arc::new(AtomicBool::new(false));
    let owner: Arc<Mapped> = Arc::new(Mapped(at, Arc::clone(&is_unmapped)));
    let part = |offset: usize, len: u64| {
        let owner = Box::new(Arc::clone(&owner));
        // SAFETY: the owner keeps the mapping.
        unsafe { cache.get_from_owner(behind(at, offset), len, Access::ALL, owner) }.unwrap()
    };
    let (whole, small) = (part(0, 4 * PAGE as u64), part(PAGE + 8, 8));
    assert_eq!((cache.counters().hits, cache.counters().misses), (1, 1));
    assert_eq!((whole.len_bytes(), small.len_bytes()), (4 * PAGE as u64, 8));
    assert_eq!(small.as_ptr(), behind(at, PAGE + 8).as_ptr());
    assert!(small.slice(0, 9).is_err());
    whole.fill(PAGE as u64 + 8, 8, 7).unwrap();
    assert!(small.is_filled_with(0, 8, 7).unwrap());
    // It ends for itself alone.
    assert_eq!(small.deregister(), Ok(true));
    assert!(!small.is_registered() && whole.is_registered());
    drop((small, owner));
    let target = pair.region(64);
    let stream = rig::stream(test);
    let (go, wait) = rig::gate();
    stream.launch(wait).unwrap();
    let source = [whole.slice(PAGE as u64 + 8, 8).unwrap()];
    let there = target.remote();
    let work = Work::write(&source, RemoteSlice::at(there.addr, there.rkey));
    pair.a.stream_queue_send(&stream, &work).unwrap();
    pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    drop(whole);
    assert!(!is_unmapped.load(Ordering::SeqCst));
    go.store(true, Ordering::Release);
    stream.synchronize(SOON).unwrap();
    assert!(target.is_filled_with(0, 8, 7).unwrap());
    // The next look at the queue gives the regions of completed work back.
    let until = Instant::now() + Duration::from_secs(30);
    while !is_unmapped.load(Ordering::SeqCst) {
        assert!(Instant::now() < until);
        pair.a.room(QueueKind::Send);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(cache.invalidate(at.as_ptr(), 1), 1);
}

#[test]
fn entries_in_use_stay_and_others_are_evicted() {
    let _alone = alone();
    let domain = device().protection_domain();
    let cache = explicit(&domain, 3, 10 * PAGE as u64);
    let at = anywhere(64 * PAGE);
    let page = |i: usize| behind(at, 2 * i * PAGE);
    let used = get(&cache, page(0), PAGE);
    let [one, two] = [1, 2].map(|i| id(&cache, page(i), PAGE));
    // The second becomes the one used longest ago, as the first one is used.
    assert_eq!(id(&cache, page(1), PAGE), one);
    id(&cache, page(3), PAGE);
    assert_eq!(cache.counters().evictions, 1);
    assert_eq!(id(&cache, page(1), PAGE), one);
    assert_ne!(id(&cache, page(2), PAGE), two);
    assert_eq!(id(&cache, page(0), PAGE), used.region.id());
    assert_eq!(cache.size().0, 3);

    // The limit of bytes evicts all entries that are not in use.
    id(&cache, page(8), 9 * PAGE);
    assert_eq!(cache.size(), (2, 10 * PAGE as u64));
    assert_eq!(id(&cache, page(0), PAGE), used.region.id());
    // Too long for the bytes left, and for the whole cache: registered, but not kept.
    let uncached = cache.counters().uncached;
    for pages in [10, 11] {
        let region = get(&cache, page(16), pages * PAGE).region;
        assert!(region.is_registered());
        assert_eq!(region.len_bytes(), (pages * PAGE) as u64);
    }
    assert_eq!(cache.counters().uncached, uncached + 2);
    assert_eq!(id(&cache, page(0), PAGE), used.region.id());
    drop(used);
    cache.invalidate(at.as_ptr(), 64 * PAGE as u64);
    unmap(at, 64 * PAGE);

    for (config, name) in [
        (
            CacheConfig::default().max_entries(0).max_bytes(1),
            "max_entries",
        ),
        (
            CacheConfig::default().max_entries(65537).max_bytes(1),
            "max_entries",
        ),
        (
            CacheConfig::default().max_entries(1).max_bytes(0),
            "max_bytes",
        ),
    ] {
        let error = RegionCache::new(&domain, &config).unwrap_err();
        assert!(
            matches!(error, Error::Range { argument, .. } if argument == name),
            "{error}"
        );
    }
}

#[test]
fn failed_registration_is_an_error_and_adds_no_entry() {
    let _alone = alone();
    let domain = device().protection_domain();
    let cache = explicit(&domain, 4, 1 << 30);
    let at = anywhere(2 * PAGE);
    unmap(behind(at, PAGE), PAGE);
    for (at, len) in [
        (at, 2 * PAGE),
        (at, 0),
        (NonNull::<u8>::dangling(), 8),
        (at, usize::MAX),
    ] {
        // SAFETY: refused.
        assert!(unsafe { cache.get(at, len as u64, Access::ALL) }.is_err());
    }
    assert_eq!(cache.size(), (0, 0));
    assert_ne!(id(&cache, at, PAGE), 0);
    cache.invalidate(at.as_ptr(), PAGE as u64);
    unmap(at, PAGE);
}

/// Changes a mapping of eight pages, and restores it at the same address. `None` if that is impossible; the rest then stays mapped.
type Change = (&'static str, fn(NonNull<u8>) -> Option<NonNull<u8>>);

fn advise(at: NonNull<u8>, advice: i32) -> NonNull<u8> {
    // SAFETY: a page of a mapping of the test's own.
    let done = unsafe { libc::madvise(behind(at, 2 * PAGE).as_ptr().cast(), PAGE, advice) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    at
}

fn remap(at: NonNull<u8>, from: usize, len: usize, to: usize, flags: i32) -> NonNull<u8> {
    let from = behind(at, from);
    // SAFETY: a mapping of the test's own.
    let moved = unsafe {
        libc::mremap(
            from.as_ptr().cast(),
            len,
            to,
            flags,
            std::ptr::null_mut::<u8>(),
        )
    };
    assert_ne!(moved, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    NonNull::new(moved.cast()).unwrap()
}

const CHANGES: &[Change] = &[
    ("munmap of all", |at| {
        unmap(at, 8 * PAGE);
        again(at, 8 * PAGE)
    }),
    ("munmap of a page", |at| {
        unmap(behind(at, 5 * PAGE), PAGE);
        again(behind(at, 5 * PAGE), PAGE).and(Some(at))
    }),
    ("mmap over a page", |at| {
        map(
            behind(at, 7 * PAGE).as_ptr(),
            PAGE,
            ANONYMOUS | libc::MAP_FIXED,
        );
        Some(at)
    }),
    ("MADV_DONTNEED", |at| Some(advise(at, libc::MADV_DONTNEED))),
    ("MADV_FREE", |at| Some(advise(at, libc::MADV_FREE))),
    ("mremap to a smaller size", |at| {
        remap(at, 0, 8 * PAGE, 4 * PAGE, 0);
        again(behind(at, 4 * PAGE), 4 * PAGE).and(Some(at))
    }),
    ("mremap to another place", |at| {
        let to = anywhere(8 * PAGE);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are mappings of the test's own.
        let moved = unsafe {
            let to = to.as_ptr().cast::<u8>();
            libc::mremap(at.as_ptr().cast(), 8 * PAGE, 8 * PAGE, flags, to)
        };
        assert_eq!(moved, to.as_ptr().cast());
        unmap(to, 8 * PAGE);
        again(at, 8 * PAGE)
    }),
    ("mremap that leaves the place mapped", |at| {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        let moved = remap(at, 0, 8 * PAGE, 8 * PAGE, flags);
        unmap(moved, 8 * PAGE);
        Some(at)
    }),
];

#[test]
fn mapping_changes_invalidate_entries_before_they_return() {
    let _alone = alone();
    let _limit = Limit::new("changes", Duration::from_secs(100));
    let domain = device().protection_domain();
    let name = "mapping_changes_invalidate_entries_before_they_return";
    let Some(cache) = watched(name, &domain) else {
        return;
    };
    for (name, change) in CHANGES {
        for touched in [false, true] {
            let at = anywhere(8 * PAGE);
            if touched {
                // SAFETY: the test's own mapping.
                unsafe { at.as_ptr().write_bytes(1, 8 * PAGE) };
            }
            let before = id(&cache, at, 8 * PAGE);
            assert_eq!(id(&cache, at, 8 * PAGE), before, "{name}");
            let counted = cache.counters().invalidations;
            let after = change(at);
            assert_eq!(cache.size(), (0, 0), "{name}");
            assert!(cache.counters().invalidations > counted, "{name}");
            let Some(after) = after else { continue };
            assert_ne!(id(&cache, after, 8 * PAGE), before, "{name}");
            // First touches work as usual. SAFETY: the test's own mapping.
            unsafe { after.as_ptr().write_bytes(2, 8 * PAGE) };
            unmap(after, 8 * PAGE);
            assert_eq!(cache.size(), (0, 0), "{name}");
        }
    }
    // Neighbouring pages may be unmapped without effect.
    let at = anywhere(8 * PAGE);
    let before = id(&cache, behind(at, PAGE), PAGE);
    unmap(behind(at, 2 * PAGE), 6 * PAGE);
    unmap(at, PAGE);
    assert_eq!(id(&cache, behind(at, PAGE), PAGE), before);
    unmap(behind(at, PAGE), PAGE);
}

#[test]
fn shared_memory_is_cached_only_with_explicit_invalidation() {
    let _alone = alone();
    let domain = device().protection_domain();
    let name = "shared_memory_is_cached_only_with_explicit_invalidation";
    let shared = map(
        std::ptr::null_mut(),
        PAGE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
    );
    let promised = explicit(&domain, 4, 1 << 30);
    assert_eq!(id(&promised, shared, PAGE), id(&promised, shared, PAGE));
    promised.invalidate(shared.as_ptr(), PAGE as u64);
    if let Some(cache) = watched(name, &domain) {
        assert_ne!(id(&cache, shared, PAGE), id(&cache, shared, PAGE));
        // Constants of the program: a private mapping, but of a file.
        static BYTES: [u8; 4] = [1, 2, 3, 4];
        let constant = NonNull::from(&BYTES).cast();
        // SAFETY: constants stay, and a region that only reads does not write them.
        let read = || unsafe { cache.get(constant, 4, Access::LOCAL_READ) }.unwrap();
        assert_ne!(read().region.id(), read().region.id());
        assert_eq!(cache.counters().uncached, 4);
        assert_eq!(cache.size(), (0, 0));
    }
    unmap(shared, PAGE);
}

#[test]
fn held_region_stays_cached_and_serves_lookups() {
    let _alone = alone();
    let domain = device().protection_domain();
    let caches = [
        Some(explicit(&domain, 4, 1 << 30)),
        watched("held_region_stays_cached_and_serves_lookups", &domain),
    ];
    for cache in caches.iter().flatten() {
        let at = anywhere(8 * PAGE);
        let larger = id(cache, at, 8 * PAGE);
        // SAFETY: the mapping stays until the end.
        let hold =
            |pages: usize| unsafe { cache.hold(at, (pages * PAGE) as u64, Access::ALL) }.unwrap();
        let held = hold(4);
        assert_eq!(held.region().len_bytes(), 4 * PAGE as u64);
        assert_ne!(held.region().id(), larger);
        let again = hold(4);
        assert_eq!(again.region().id(), held.region().id());
        assert_eq!(id(cache, behind(at, PAGE), PAGE), held.region().id());
        drop(held);
        // Still held once: it is not evicted by other requests.
        let elsewhere = anywhere(64 * PAGE);
        for i in 0..8 {
            id(cache, behind(elsewhere, 2 * i * PAGE), PAGE);
        }
        let kept = again.region().id();
        drop(again);
        assert_eq!(id(cache, behind(at, PAGE), PAGE), kept);
        cache.invalidate(std::ptr::null(), u64::MAX);
        unmap(elsewhere, 64 * PAGE);
        unmap(at, 8 * PAGE);
    }
}

#[test]
fn forked_child_has_no_part_in_the_cache() {
    let _alone = alone();
    let _limit = Limit::new("fork", Duration::from_secs(100));
    let domain = device().protection_domain();
    let kernel = watched("forked_child_has_no_part_in_the_cache", &domain);
    for cache in [Some(explicit(&domain, 4, 1 << 30)), kernel]
        .iter()
        .flatten()
    {
        child_of(cache);
    }
}

fn child_of(cache: &RegionCache) {
    let at = anywhere(4 * PAGE);
    let before = id(cache, at, 4 * PAGE);
    // SAFETY: the child makes calls that neither allocate nor lock what another thread may have locked, and ends without destructors.
    let status = unsafe {
        let child = libc::fork();
        assert!(child >= 0, "{}", io::Error::last_os_error());
        if child == 0 {
            let refused = cache.check().is_err();
            // Changes of the child's copy of the memory do not affect the parent, and no thread blocks on an event.
            let done = libc::munmap(at.as_ptr().cast(), 4 * PAGE) == 0;
            let nothing =
                cache.size() == (0, 0) && cache.invalidate(std::ptr::null(), u64::MAX) == 0;
            libc::_exit((!(refused && done && nothing)).into());
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    };
    assert!(libc::WIFEXITED(status), "{status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0);
    assert_eq!(id(cache, at, 4 * PAGE), before);
    cache.invalidate(at.as_ptr(), 4 * PAGE as u64);
    unmap(at, 4 * PAGE);
}

/// The threads of the last cache of a process unmap memory when they end, and so do later callers. They must not block on an event that is no longer
/// read, not even while a child has a copy of the descriptor.
#[test]
fn unmapping_after_the_cache_is_dropped_does_not_block() {
    let _alone = alone();
    let _limit = Limit::new("gone", Duration::from_secs(100));
    let domain = device().protection_domain();
    for with_child in [false, true] {
        let at = anywhere(16 * PAGE);
        let Some(cache) = watched(
            "unmapping_after_the_cache_is_dropped_does_not_block",
            &domain,
        ) else {
            return;
        };
        // Neighbouring memory, such as stacks of threads, may be part of the same mapping, and is watched then.
        let beside = anywhere(16 * PAGE);
        for start in [at, beside] {
            id(&cache, start, 16 * PAGE);
        }
        // SAFETY: the child waits to be ended, and makes no other call.
        let child = with_child.then(|| unsafe {
            let child = libc::fork();
            if child == 0 {
                loop {
                    libc::pause();
                }
            }
            child
        });
        drop(cache);
        unmap(at, 16 * PAGE);
        unmap(beside, 16 * PAGE);
        if let Some(child) = child {
            // SAFETY: the test's own child.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// Which mapping each registration was made of.
#[derive(Default)]
struct Origins(Mutex<HashMap<u64, u64>>);

impl Origins {
    /// A request for memory of that mapping returned that registration.
    fn check(&self, registration: u64, mapping: u64) {
        let mut known = self.0.lock().unwrap();
        let first = *known.entry(registration).or_insert(mapping);
        assert_eq!(first, mapping, "STALE: registration {registration}");
    }
}

/// One thread of the test, which maps, registers, transfers and changes memory repeatedly.
struct Mapper {
    cache: RegionCache,
    origins: Arc<Origins>,
    mappings: Arc<AtomicU64>,
    random: Random,
    ends: (Endpoint, Endpoint),
    target: doorbell::Region,
    forks: bool,
}

const PAGES: usize = 4;

impl Mapper {
    /// Fills new memory with unique contents, registers parts of it, and checks the result of a transfer.
    fn use_it(&mut self, at: NonNull<u8>) {
        let mapping = self.mappings.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the thread's own mapping.
        let words =
            unsafe { std::slice::from_raw_parts_mut(at.as_ptr().cast::<u64>(), PAGES * PAGE / 8) };
        for (i, word) in words.iter_mut().enumerate() {
            *word = mapping << 16 | i as u64;
        }
        for _ in 0..=self.random.below(3) {
            let start = self.random.below((PAGES * PAGE / 8) as u64) as usize;
            let count = 1 + self.random.below((PAGES * PAGE / 8 - start) as u64) as usize;
            let found = match self.random.below(4) {
                // The whole range first, so that parts of it are hits.
                0 => get(&self.cache, at, PAGES * PAGE),
                _ => get(&self.cache, behind(at, start * 8), count * 8),
            };
            self.origins.check(found.region.id(), mapping);
            let offset =
                (at.as_ptr() as u64 + start as u64 * 8).wrapping_sub(found.region.as_ptr() as u64);
            let len = (count * 8) as u64;
            let slices = [found.region.slice(offset, len).unwrap()];
            let to = self.target.remote();
            self.ends
                .0
                .post_send(&Work::write(&slices, RemoteSlice::at(to.addr, to.rkey)))
                .unwrap();
            self.ends.0.wait_cq(QueueKind::Send, SOON).unwrap();
            let mut got = vec![0; count * 8];
            self.target.read(0, &mut got).unwrap();
            for (i, word) in got.chunks_exact(8).enumerate() {
                let word = u64::from_ne_bytes(word.try_into().unwrap());
                assert_eq!(
                    word,
                    mapping << 16 | (start + i) as u64,
                    "mapping {mapping}"
                );
            }
        }
    }

    fn round(&mut self) {
        let mut at = anywhere(PAGES * PAGE);
        self.use_it(at);
        for _ in 0..self.random.below(4) {
            match self.random.below(5) {
                0 => at = map(at.as_ptr(), PAGES * PAGE, ANONYMOUS | libc::MAP_FIXED),
                1 => {
                    // SAFETY: the thread's own mapping.
                    unsafe { libc::madvise(at.as_ptr().cast(), PAGES * PAGE, libc::MADV_DONTNEED) };
                }
                2 => {
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
                    let moved = remap(at, 0, PAGES * PAGE, PAGES * PAGE, flags);
                    let other = std::mem::replace(&mut at, moved);
                    unmap(other, PAGES * PAGE);
                }
                3 => {
                    unmap(at, PAGES * PAGE);
                    at = anywhere(PAGES * PAGE);
                }
                _ if self.forks && self.random.below(20) == 0 => {
                    // SAFETY: the child ends at once.
                    unsafe {
                        let child = libc::fork();
                        if child == 0 {
                            libc::_exit(0);
                        }
                        libc::waitpid(child, std::ptr::null_mut(), 0);
                    }
                    // The same memory: entries may stay, so this is no new mapping.
                    continue;
                }
                _ => continue,
            }
            self.use_it(at);
        }
        unmap(at, PAGES * PAGE);
    }
}

#[test]
fn concurrent_map_and_unmap_gives_no_stale_hit() {
    let _alone = alone();
    let time = Duration::from_millis(from_env("DOORBELL_CACHE_MS", 3000));
    let seed = from_env("DOORBELL_SEED", 1);
    let _limit = Limit::new("stale", time + Duration::from_secs(100));
    let device = device();
    let domain = device.protection_domain();
    let Some(cache) = watched("concurrent_map_and_unmap_gives_no_stale_hit", &domain) else {
        return;
    };
    let (origins, mappings, over) = (
        Arc::default(),
        Arc::new(AtomicU64::new(1)),
        AtomicBool::new(false),
    );
    let mapper = |number: u64| {
        let new = || Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let (mut a, mut b) = (new(), new());
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        Mapper {
            cache: cache.clone(),
            origins: Arc::clone(&origins),
            mappings: Arc::clone(&mappings),
            random: Random(seed * 1000 + number),
            ends: (a, b),
            target: doorbell::Region::alloc(&domain, (PAGES * PAGE) as u64, Access::ALL).unwrap(),
            forks: number == 0,
        }
    };
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (mut mapper, over) = (mapper(number), &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    mapper.round();
                }
            });
        }
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        over.store(true, Ordering::Relaxed);
    });
    let counters = cache.counters();
    println!(
        "{} mappings, {counters:?}",
        mappings.load(Ordering::Relaxed)
    );
    assert!(
        counters.hits > 0 && counters.invalidations > 0,
        "{counters:?}"
    );
    assert_eq!(cache.size(), (0, 0));
}
