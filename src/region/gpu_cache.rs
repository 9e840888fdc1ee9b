//! Registrations of a GPU's memory that outlive their use.
#![allow(unsafe_code)] // registers foreign memory

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cache::{CacheConfig, CacheCounters, CachedRegion};
use crate::Result;
use crate::cuda::{Allocation, CudaContext, DeviceBuffer};
use crate::nic::Access;
use crate::region::{ProtectionDomain, Region};

/// A cache of registrations of GPU memory in one protection domain, by allocation and rights.
///
/// [`DeviceCache::get`] registers the whole allocation that some bytes are part of, as a framework's allocator got it from the driver, and
/// returns that region for requests of any part of it. Unused entries make room for others, the least recently used first.
///
/// # Memory that is freed
/// The driver numbers its allocations, and never uses a number again. Each request asks the driver for the number, in
/// one call, so memory that was freed and allocated anew at the same address is registered anew. The cache is not told when memory is freed.
/// A region that is still in the cache then has keys that peers may use, for whatever memory is there next. An application that gave out a
/// key calls [`DeviceCache::invalidate`] before it frees the memory.
pub struct DeviceCache {
    domain: ProtectionDomain,
    config: CacheConfig,
    table: Mutex<GpuTable>,
}

#[derive(Default)]
struct GpuTable {
    /// By first address and rights.
    entries: BTreeMap<(u64, u32), GpuEntry>,
    bytes: u64,
    clock: u64,
    counters: CacheCounters,
}

struct GpuEntry {
    /// The driver's number of the allocation.
    number: u64,
    region: Region,
    used: u64,
}

impl DeviceCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) for a limit of 0 or too large.
    pub fn new(domain: &ProtectionDomain, config: &CacheConfig) -> Result<DeviceCache> {
        config.check()?;
        Ok(DeviceCache {
            domain: domain.clone(),
            config: *config,
            table: Mutex::default(),
        })
    }

    /// Returns a registration of its allocation with these rights. An entry of the cache is used if one fits. Otherwise the allocation is registered, and
    /// becomes an entry if there is room.
    ///
    /// # Safety
    /// The memory is not freed before the last handle of the region that this call returned is gone, those of work in flight included. The
    /// rest of the region does not belong to the caller, unless the caller knows that it does.
    ///
    /// # Errors
    /// As [`DeviceBuffer::from_raw`] and [`Region::register_device`].
    pub unsafe fn get(
        &self,
        context: &CudaContext,
        ptr: u64,
        len_bytes: u64,
        access: Access,
    ) -> Result<CachedRegion> {
        let found = Allocation::of(context, ptr, len_bytes)?;
        let offset = ptr - found.start;
        let key = (found.start, access.bits());
        // Dropped without the lock.
        let mut gone = Vec::new();
        {
            let mut table = self.lock();
            table.clock += 1;
            let clock = table.clock;
            match table.entries.get_mut(&key) {
                Some(entry) if entry.number == found.number => {
                    entry.used = clock;
                    let region = entry.region.clone();
                    table.counters.hits += 1;
                    return Ok(CachedRegion { region, offset });
                }
                Some(_) => {
                    gone.extend(table.remove(key));
                    table.counters.invalidations += 1;
                }
                None => {}
            }
            table.counters.misses += 1;
        }
        drop(gone);
        // SAFETY: the caller's promise, for what it asked for. Of the rest of the allocation the driver knows whether it is there.
        let buffer = unsafe { DeviceBuffer::from_raw(context, found.start, found.len_bytes) }?;
        let region = Region::register_device(&self.domain, &buffer, access)?;
        drop(buffer);
        let entry = GpuEntry {
            number: found.number,
            region: region.clone(),
            used: 0,
        };
        let gone = self.keep(key, entry, found.number != 0);
        drop(gone);
        Ok(CachedRegion { region, offset })
    }

    /// Takes out every entry that has any of these bytes, because they are about to be freed. Returns how many there were. A region that has
    /// a handle stays registered: [`Region::deregister`] takes it from the device.
    pub fn invalidate(&self, ptr: u64, len_bytes: u64) -> u64 {
        let mut table = self.lock();
        let end = ptr.saturating_add(len_bytes);
        let hit = |((start, _), entry): (&(u64, u32), &GpuEntry)| {
            *start < end && ptr < start + entry.region.len_bytes()
        };
        let keys = table.entries.iter().filter(|it| hit(*it));
        let keys: Vec<(u64, u32)> = keys.map(|(key, _)| *key).collect();
        let gone: Vec<GpuEntry> = keys.iter().filter_map(|key| table.remove(*key)).collect();
        table.counters.invalidations += gone.len() as u64;
        drop(table);
        gone.len() as u64
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        self.lock().counters
    }

    /// How many entries there are, and how many bytes they have.
    #[must_use]
    pub fn size(&self) -> (usize, u64) {
        let table = self.lock();
        (table.entries.len(), table.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, GpuTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has to go for it, or itself.
    fn keep(&self, key: (u64, u32), entry: GpuEntry, numbered: bool) -> Vec<GpuEntry> {
        let mut table = self.lock();
        let bytes = entry.region.len_bytes();
        let mut gone = Vec::new();
        // Another thread may have been here first, for the same memory.
        gone.extend(table.remove(key));
        let fits = |table: &GpuTable| {
            table.entries.len() < self.config.max_entries as usize
                && table.bytes.saturating_add(bytes) <= self.config.max_bytes
        };
        // Without a number, it would not be known later whether it is the same memory.
        let may_be = numbered && bytes <= self.config.max_bytes;
        while !may_be || !fits(&table) {
            let idle = table
                .entries
                .iter()
                .filter(|(_, it)| it.region.handles() == 1);
            let oldest = idle.min_by_key(|(_, it)| it.used).map(|(key, _)| *key);
            let Some(oldest) = oldest.filter(|_| may_be) else {
                table.counters.uncached += 1;
                gone.push(entry);
                return gone;
            };
            gone.extend(table.remove(oldest));
            table.counters.evictions += 1;
        }
        let used = table.clock;
        table.bytes += bytes;
        table.entries.insert(key, GpuEntry { used, ..entry });
        gone
    }
}

impl GpuTable {
    fn remove(&mut self, key: (u64, u32)) -> Option<GpuEntry> {
        let entry = self.entries.remove(&key)?;
        self.bytes -= entry.region.len_bytes();
        Some(entry)
    }
}

impl fmt::Debug for DeviceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCache")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
