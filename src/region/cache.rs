//! Registrations that outlive their use, so that the next one of the same memory costs nothing.
#![allow(unsafe_code)] // registers foreign memory

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::fork_guard::ForkGuard;
use super::mapping::Backing;
use super::monitor::{Monitor, SharedTable, locked, sweep};
use super::table::{RegisteredRange, Table};
use crate::nic::Access;
use crate::region::{ProtectionDomain, Region};
use crate::{Error, Result, StateKind};

/// The most entries of a cache.
const ENTRIES_MAX: u32 = 1 << 16;

/// How large a cache may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Entries, 1 to 65536. Default 1024.
    pub max_entries: u32,
    /// Registered bytes of all entries together. Bytes in several entries count several times. Default 64 GiB.
    pub max_bytes: u64,
}

setters!(CacheConfig {
    max_entries: u32,
    max_bytes: u64,
});

impl Default for CacheConfig {
    fn default() -> CacheConfig {
        CacheConfig {
            max_entries: 1024,
            max_bytes: 64 << 30,
        }
    }
}

impl CacheConfig {
    /// # Errors
    /// [`Error::Range`] for a limit of 0 or too large.
    pub(super) fn check(&self) -> Result<()> {
        let limits = [
            (
                "max_entries",
                u64::from(self.max_entries),
                u64::from(ENTRIES_MAX),
            ),
            ("max_bytes", self.max_bytes, u64::MAX),
        ];
        for (argument, value, max) in limits {
            if !(1..=max).contains(&value) {
                return Err(Error::Range {
                    argument,
                    value,
                    min: 1,
                    max,
                });
            }
        }
        Ok(())
    }
}

/// What a cache has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounters {
    /// Requests that an entry answered.
    pub hits: u64,
    /// Requests that needed a new registration.
    pub misses: u64,
    /// Of these, registrations that the cache did not keep: it may not, or has no room.
    pub uncached: u64,
    /// Entries that made room.
    pub evictions: u64,
    /// Entries whose memory was unmapped, moved, discarded, or named to [`RegionCache::invalidate`].
    pub invalidations: u64,
}

/// How a cache learns that memory is no longer what it registered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Invalidation {
    /// From the kernel, by userfaultfd.
    Kernel,
    /// From the application, by [`RegionCache::invalidate`].
    Explicit,
    /// Not at all, for this reason. So nothing is kept.
    None(String),
}

/// Registered memory from a cache.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CachedRegion {
    /// The region. It may begin before the requested range and end after it.
    pub region: Region,
    /// The offset of the requested range in the region, in bytes.
    pub offset: u64,
}

/// Memory that the application has promised to leave mapped as it is; see [`RegionCache::hold`].
#[derive(Debug)]
pub struct HeldRegistration {
    region: Region,
    entry: Option<u64>,
    cache: RegionCache,
}

impl HeldRegistration {
    /// The memory.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl Drop for HeldRegistration {
    fn drop(&mut self) {
        if let Some(id) = self.entry
            && self.cache.check().is_ok()
        {
            locked(&self.cache.inner.table).release(id);
        }
    }
}

/// A cache of registrations in one protection domain, by address range and rights. Clones are handles of the same one.
///
/// [`RegionCache::get`] gives a [`Region`] for memory that the application owns. If the memory, or more around it, was registered before with the
/// same rights, it returns that registration. Unused entries make room for others, the least recently used first. A region that has a handle
/// stays registered whatever the cache does.
///
/// # No entry outlives its memory
/// A registration is of pages, not of addresses: after `munmap` and `mmap` at the same place, the device would continue to access the
/// old pages. So an entry is removed as soon as its memory is unmapped, moved or discarded (`munmap`, `mmap` over it, `mremap`, a heap that
/// shrinks, `madvise` with `MADV_DONTNEED`, `MADV_FREE` or `MADV_REMOVE`), by whichever thread. [`RegionCache::invalidation`] says which mechanism
/// ensures that:
///
/// - [`Invalidation::Kernel`]: Linux 5.19 or later reports changes by userfaultfd; no privilege is needed. Only private anonymous memory is kept,
///   because the pages of other mappings can be replaced by way of their files. `shmat` with `SHM_REMAP` over memory that is in the cache is not
///   reported: call [`RegionCache::invalidate`] for it. A hit asks the kernel whether a change is under way, which is one short system call,
///   except for memory that is held ([`RegionCache::hold`]). The first such cache of a process starts two threads. From then on a thread that
///   unmaps memory that was ever registered here waits until one of them has taken notice. A process that stops that thread alone stops those,
///   too; valgrind is an example, and under it there is no such cache.
/// - [`Invalidation::Explicit`]: the application has promised to report changes; see [`RegionCache::explicit`]. Memory of all kinds is kept, and a
///   hit is a lookup.
/// - [`Invalidation::None`]: nothing is kept, and each request is a registration of its own.
///
/// In a child of `fork` registrations are the parent's, and so is the cache: its calls are errors there.
#[derive(Clone)]
pub struct RegionCache {
    inner: Arc<CacheShared>,
}

impl std::fmt::Debug for RegionCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the table: text is allocated, and what that frees may be watched, while the table's lock is held.
        f.debug_struct("RegionCache")
            .field("invalidation", &self.inner.invalidation)
            .finish_non_exhaustive()
    }
}

struct CacheShared {
    domain: ProtectionDomain,
    table: SharedTable,
    invalidation: Invalidation,
    /// With [`Invalidation::Kernel`].
    monitor: Option<Arc<Monitor>>,
    parent: ForkGuard,
}

impl Drop for CacheShared {
    fn drop(&mut self) {
        if let Some(monitor) = &self.monitor
            && self.parent.is_here()
        {
            monitor.remove(&self.table);
        }
    }
}

/// What a request is to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheRequest {
    /// Any entry that contains it.
    Use,
    /// An entry of just this range, held.
    Hold,
}

/// What is known of a range without asking the kernel.
enum Lookup {
    /// An entry, by its number.
    Hit(Region, u64),
    /// An entry, if its memory is still the same.
    Unsure,
    Nothing,
}

impl RegionCache {
    /// A cache that the kernel tells of unmapped memory, or that keeps nothing: [`RegionCache::invalidation`] says which, and why.
    ///
    /// # Errors
    /// [`Error::Range`] for a limit of 0 or too large; [`Error::State`] if the process has too many caches; [`Error::System`] if the kernel
    /// provides no page that a child does not inherit.
    pub fn new(domain: &ProtectionDomain, config: &CacheConfig) -> Result<RegionCache> {
        let (invalidation, monitor) = match Monitor::get() {
            Ok(monitor) => (Invalidation::Kernel, Some(monitor)),
            Err(reason) => (Invalidation::None(reason), None),
        };
        RegionCache::with(domain, config, invalidation, monitor)
    }

    /// A cache that the application tells of memory that is about to change.
    ///
    /// # Safety
    /// Before memory that was given to the cache is unmapped, moved, discarded or otherwise replaced, and before its file is truncated, the
    /// application calls [`RegionCache::invalidate`] for it. That includes what an allocator does in `free`.
    ///
    /// # Errors
    /// As [`RegionCache::new`].
    pub unsafe fn explicit(domain: &ProtectionDomain, config: &CacheConfig) -> Result<RegionCache> {
        RegionCache::with(domain, config, Invalidation::Explicit, None)
    }

    fn with(
        domain: &ProtectionDomain,
        config: &CacheConfig,
        invalidation: Invalidation,
        monitor: Option<Arc<Monitor>>,
    ) -> Result<RegionCache> {
        config.check()?;
        let parent = ForkGuard::new()?;
        let table = Table::new(config.max_entries as usize, config.max_bytes);
        let table = Arc::new(Mutex::new(table));
        if let Some(monitor) = &monitor {
            monitor.add(&table)?;
        }
        let inner = CacheShared {
            domain: domain.clone(),
            table,
            invalidation,
            monitor,
            parent,
        };
        Ok(RegionCache {
            inner: Arc::new(inner),
        })
    }

    /// How the cache learns of memory that is unmapped or changed.
    pub fn invalidation(&self) -> &Invalidation {
        &self.inner.invalidation
    }

    /// What it has done so far. In a child of `fork`: nothing.
    pub fn counters(&self) -> CacheCounters {
        match self.check() {
            Ok(()) => locked(&self.inner.table).counters,
            Err(_) => CacheCounters::default(),
        }
    }

    /// How many entries there are, and how many bytes they have.
    pub fn size(&self) -> (usize, u64) {
        if self.check().is_err() {
            return (0, 0);
        }
        let table = locked(&self.inner.table);
        (table.len(), table.bytes())
    }

    /// Returns a registration that has these rights and contains the range. An entry of the cache is used if one fits. Otherwise the range is registered, and
    /// becomes an entry if it may be kept and there is room.
    ///
    /// # Safety
    /// As [`Region::register`], for the bytes that are asked for: from the beginning of the call until the last handle of the region that
    /// it returned is gone, they stay mapped as they are. The rest of the region does not belong to the caller, unless the caller knows
    /// that it does. With [`RegionCache::explicit`] the promise made there.
    ///
    /// # Errors
    /// As [`Region::register`]; [`Error::State`] in a child of `fork`.
    #[inline]
    pub unsafe fn get(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<CachedRegion> {
        // SAFETY: the caller's promise.
        let (region, _) = unsafe { self.request(start, len_bytes, access, CacheRequest::Use) }?;
        let offset = start.as_ptr() as u64 - region.as_ptr() as u64;
        Ok(CachedRegion { region, offset })
    }

    /// As [`RegionCache::get`], for memory that dropping `owner` frees. The result is a region of just these bytes, which keeps the owner; `owner` is dropped when
    /// its last handle is gone, those of work in flight and of streams included, by any thread. The registration stays in the cache, as long as the memory
    /// stays mapped. [`Region::deregister`] of the result ends nothing at the device, because others may use the registration.
    ///
    /// # Safety
    /// As [`Region::register_from_owner`].
    ///
    /// # Errors
    /// As [`RegionCache::get`]. `owner` is dropped then.
    pub unsafe fn get_from_owner(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region> {
        // SAFETY: the result keeps the owner, and with it the memory, for as long as it has a handle.
        let CachedRegion { region, offset } = unsafe { self.get(start, len_bytes, access) }?;
        region.part_with_owner(offset, len_bytes, owner)
    }

    /// Registers memory, or finds its registration, and relies on the caller's promise that it stays mapped as it is. Until the
    /// result is dropped, [`RegionCache::get`] of any part of it asks the kernel nothing.
    ///
    /// # Safety
    /// As [`RegionCache::get`], and until the result is dropped.
    ///
    /// # Errors
    /// As [`RegionCache::get`].
    pub unsafe fn hold(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<HeldRegistration> {
        // SAFETY: the caller's promise.
        let (region, entry) =
            unsafe { self.request(start, len_bytes, access, CacheRequest::Hold) }?;
        Ok(HeldRegistration {
            region,
            entry,
            cache: self.clone(),
        })
    }

    /// Takes out every entry that has any of these bytes, because they are about to change or have changed. Returns how many there were.
    pub fn invalidate(&self, start: *const u8, len_bytes: u64) -> u64 {
        if self.check().is_err() {
            return 0;
        }
        let start = start as u64;
        let end = start.saturating_add(len_bytes);
        let count = locked(&self.inner.table).invalidate(start, end);
        sweep(&self.inner.table);
        count
    }

    /// Whether the cache can be used: in a child of `fork` it cannot.
    ///
    /// # Errors
    /// [`Error::State`] there.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.inner.parent.is_here() {
            return Ok(());
        }
        Err(Error::state(
            StateKind::Forked,
            "registration cache",
            "it belongs to the process that this one was forked from",
        ))
    }

    /// # Safety
    /// As `get` or `hold`.
    #[inline]
    unsafe fn request(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        wish: CacheRequest,
    ) -> Result<(Region, Option<u64>)> {
        self.check()?;
        let addr = start.as_ptr() as u64;
        let range = RegisteredRange {
            access: access.bits(),
            start: addr,
            end: addr.saturating_add(len_bytes),
        };
        // A cache without a monitor has no unsure entries.
        let monitor = self.inner.monitor.as_deref();
        let mut found = self.find(&range, wish, monitor.is_none());
        if let (Lookup::Unsure, Some(monitor)) = (&found, monitor) {
            // First the question, then the lookup: what was changed before is out of the table by then.
            found = match monitor.settled() {
                true => self.find(&range, wish, true),
                false => Lookup::Nothing,
            };
        }
        if let Lookup::Hit(region, id) = found {
            return Ok((region, Some(id)));
        }
        // SAFETY: the caller's promise.
        unsafe { self.register(start, len_bytes, access, range, wish) }
    }

    #[inline]
    fn find(&self, range: &RegisteredRange, wish: CacheRequest, settled: bool) -> Lookup {
        let mut table = locked(&self.inner.table);
        let Some((entry, counters)) = table.find(range) else {
            return Lookup::Nothing;
        };
        if !entry.value.is_registered() {
            // A holder of the region has deregistered it, so it is not what the caller asks for.
            table.discard(range);
            return Lookup::Nothing;
        }
        if wish == CacheRequest::Hold && entry.range != *range {
            return Lookup::Nothing;
        }
        if !settled && entry.held == 0 {
            return Lookup::Unsure;
        }
        entry.held += u32::from(wish == CacheRequest::Hold);
        counters.hits += 1;
        Lookup::Hit(entry.value(), entry.id)
    }

    /// # Safety
    /// As `get` or `hold`.
    #[cold]
    unsafe fn register(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        range: RegisteredRange,
        wish: CacheRequest,
    ) -> Result<(Region, Option<u64>)> {
        let table = &self.inner.table;
        let backing = Region::look(start, len_bytes, access)?;
        let monitor = self.inner.monitor.as_deref();
        let may_keep = match (&self.inner.invalidation, backing) {
            (Invalidation::Explicit, _) => true,
            (Invalidation::Kernel, Backing::Private { .. }) => true,
            (Invalidation::Kernel, Backing::Other) | (Invalidation::None(_), _) => false,
        };
        let begun = may_keep.then(|| locked(table).begin(range)).flatten();
        // From here on a change of the memory is noticed, and it is registered after that.
        let watched = match (monitor, backing) {
            (Some(monitor), Backing::Private { start, end }) => monitor.arm(start, end),
            (Some(_), Backing::Other) => false,
            (None, _) => true,
        };
        // SAFETY: the caller's promise.
        let registered =
            unsafe { Region::register_looked_at(&self.inner.domain, start, len_bytes, access) };
        let mut guard = locked(table);
        let (region, id) = match (registered, begun) {
            (Ok(region), Some(id)) => (region, id),
            (Err(error), Some(id)) => {
                guard.end(id);
                return Err(error);
            }
            (registered, None) => {
                guard.counters.misses += 1;
                guard.counters.uncached += 1;
                drop(guard);
                return registered.map(|region| (region, None));
            }
        };
        let held = u32::from(wish == CacheRequest::Hold);
        let kept = if watched {
            // What comes back is one handle of several, so nothing is freed under the lock.
            let in_use = |region: &Region| region.handles() > 1;
            guard
                .keep(id, region.clone(), held, wish == CacheRequest::Hold, in_use)
                .is_ok()
        } else {
            guard.end(id);
            false
        };
        guard.counters.misses += 1;
        guard.counters.uncached += u64::from(!kept);
        drop(guard);
        sweep(table);
        Ok((region, kept.then_some(id)))
    }
}
