//! Registrations that outlive their use.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use crate::argument::{
    VersionedStruct, choice, out, out_handle, out_optional, read_struct, write_struct, write_text,
};
use crate::boundary::{call, guard};
use crate::device::doorbell_domain;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use crate::region::{access, doorbell_region};
use doorbell_rs::{CacheConfig, CacheCounters, Invalidation, RegionCache};
#[cfg(feature = "cuda")]
use doorbell_rs::{CachedRegion, CudaContext, DeviceCache};

/// The cache learns of changes of memory from the kernel.
pub const DOORBELL_INVALIDATION_KERNEL: u32 = 0;
/// The cache learns of changes of memory from the application.
pub const DOORBELL_INVALIDATION_EXPLICIT: u32 = 1;
/// The cache learns of no changes, and keeps nothing.
pub const DOORBELL_INVALIDATION_NONE: u32 = 2;

/// A cache of registrations.
pub enum doorbell_cache {
    Host(RegionCache),
    #[cfg(feature = "cuda")]
    Device(DeviceCache),
}

impl CObject for doorbell_cache {
    const NAME: &'static str = "doorbell_cache";
}

/// [`CacheConfig`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_cache_config {
    pub struct_size: u32,
    pub max_entries: u32,
    pub max_bytes: u64,
    pub is_explicit: u32,
    pub reserved: u32,
}

// SAFETY: repr(C), 4-byte fields in pairs around an 8-byte one at 8, without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_cache_config {
    const BYTES_FIRST: usize = 24;

    fn defaults() -> doorbell_cache_config {
        let config = CacheConfig::default();
        doorbell_cache_config {
            struct_size: size_of::<doorbell_cache_config>() as u32,
            max_entries: config.max_entries,
            max_bytes: config.max_bytes,
            is_explicit: 0,
            reserved: 0,
        }
    }
}

const _: () = assert!(size_of::<doorbell_cache_config>() == doorbell_cache_config::BYTES_FIRST);

/// [`CacheCounters`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_cache_counters {
    pub struct_size: u32,
    pub entries: u32,
    pub bytes: u64,
    pub hits: u64,
    pub misses: u64,
    pub uncached: u64,
    pub evictions: u64,
    pub invalidations: u64,
}

// SAFETY: repr(C), two 4-byte fields and 8-byte ones behind them, without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_cache_counters {
    const BYTES_FIRST: usize = 56;

    fn defaults() -> doorbell_cache_counters {
        (CacheCounters::default(), (0, 0)).into()
    }
}

const _: () = assert!(size_of::<doorbell_cache_counters>() == doorbell_cache_counters::BYTES_FIRST);

impl From<(CacheCounters, (usize, u64))> for doorbell_cache_counters {
    fn from((counters, (entries, bytes)): (CacheCounters, (usize, u64))) -> Self {
        doorbell_cache_counters {
            struct_size: size_of::<doorbell_cache_counters>() as u32,
            entries: u32::try_from(entries).unwrap_or(u32::MAX),
            bytes,
            hits: counters.hits,
            misses: counters.misses,
            uncached: counters.uncached,
            evictions: counters.evictions,
            invalidations: counters.invalidations,
        }
    }
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_config_init(
    config: *mut doorbell_cache_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_cache_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// What a pointer to a configuration means: null is the defaults. And whether the application tells of memory that goes.
///
/// # Safety
/// As [`read_struct`].
unsafe fn config_or_default(
    config: *const doorbell_cache_config,
) -> Result<(CacheConfig, bool), Failure> {
    if config.is_null() {
        return Ok((CacheConfig::default(), false));
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read_struct(config, "config") }?;
    if given.is_explicit > 1 {
        return Err(choice("is_explicit", given.is_explicit, 1));
    }
    if given.reserved != 0 {
        return Err(choice("reserved", given.reserved, 0));
    }
    let config = CacheConfig::default()
        .max_entries(given.max_entries)
        .max_bytes(given.max_bytes);
    Ok((config, given.is_explicit == 1))
}

/// Makes a cache of registrations of this process's memory.
///
/// # Safety
/// As the header says of pointers, and of explicit caches.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_create(
    domain: *const doorbell_domain,
    config: *const doorbell_cache_config,
    cache: *mut *mut doorbell_cache,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places for them, and structs.
        let (place, domain, (config, is_explicit)) = unsafe {
            let place = out_handle(cache, "cache")?;
            (place, get(domain, "domain")?, config_or_default(config)?)
        };
        let inner = if is_explicit {
            // SAFETY: the caller's promise: the header says what is called before memory goes.
            unsafe { RegionCache::explicit(&domain.inner, &config) }?
        } else {
            RegionCache::new(&domain.inner, &config)?
        };
        Ok(place.set(doorbell_cache::Host(inner)))
    })
}

/// Makes a cache of registrations of memory of GPUs.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_create_device(
    domain: *const doorbell_domain,
    config: *const doorbell_cache_config,
    cache: *mut *mut doorbell_cache,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places for them, and structs.
        let (place, domain, (config, _)) = unsafe {
            let place = out_handle(cache, "cache")?;
            (place, get(domain, "domain")?, config_or_default(config)?)
        };
        #[cfg(feature = "cuda")]
        {
            let inner = DeviceCache::new(&domain.inner, &config)?;
            Ok(place.set(doorbell_cache::Device(inner)))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (place, domain, config);
            Err(Failure::Feature { feature: "cuda" })
        }
    })
}

/// Registered memory, from the cache.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_get(
    cache: *const doorbell_cache,
    address: u64,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
    offset: *mut u64,
) -> c_int {
    call!(
        place = out_handle(region),
        offset = out(offset),
        cache = get(cache),
        || {
            let rights = access(access_flags)?;
            let cached = match cache {
                doorbell_cache::Host(cache) => {
                    let start = start_of(address, len_bytes)?;
                    // SAFETY: the caller's promise about the memory.
                    unsafe { cache.get(start, len_bytes, rights) }
                }
                #[cfg(feature = "cuda")]
                doorbell_cache::Device(cache) => {
                    // SAFETY: as above.
                    unsafe { of_device(cache, address, len_bytes, rights) }
                }
            }?;
            offset.write(cached.offset);
            Ok(place.set(doorbell_region::new(cached.region)))
        }
    )
}

#[cfg(feature = "cuda")]
unsafe fn of_device(
    cache: &DeviceCache,
    address: u64,
    len_bytes: u64,
    rights: doorbell_rs::Access,
) -> doorbell_rs::Result<CachedRegion> {
    let context = CudaContext::current()?;
    // SAFETY: the caller's promise about the memory.
    unsafe { cache.get(&context, address, len_bytes, rights) }
}

/// Registered memory of which the caller says that it stays as it is.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_hold(
    cache: *const doorbell_cache,
    address: u64,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), cache = get(cache), || {
        let rights = access(access_flags)?;
        match cache {
            doorbell_cache::Host(cache) => {
                let start = start_of(address, len_bytes)?;
                // SAFETY: the caller's promise about the memory.
                let held = unsafe { cache.hold(start, len_bytes, rights) }?;
                Ok(place.set(doorbell_region::held(held)))
            }
            #[cfg(feature = "cuda")]
            doorbell_cache::Device(_) => {
                let reason = "doorbell_cache_hold is for host memory; for the memory of a GPU, doorbell_cache_get is as fast";
                Err(Failure::argument("cache", reason))
            }
        }
    })
}

fn start_of(address: u64, len_bytes: u64) -> Result<NonNull<u8>, Failure> {
    if address.checked_add(len_bytes).is_none() {
        let reason = format!("{len_bytes} bytes from there leave the address space");
        return Err(Failure::argument("address", reason));
    }
    let start: *mut u8 = std::ptr::with_exposed_provenance_mut(address as usize);
    NonNull::new(start).ok_or_else(|| Failure::null("address"))
}

/// Takes out the entries that have any of these bytes.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_invalidate(
    cache: *const doorbell_cache,
    address: u64,
    len_bytes: u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let count = match unsafe { get(cache, "cache") }? {
            doorbell_cache::Host(cache) => {
                cache.check()?;
                let start: *const c_void = std::ptr::without_provenance(address as usize);
                cache.invalidate(start.cast(), len_bytes)
            }
            #[cfg(feature = "cuda")]
            doorbell_cache::Device(cache) => cache.invalidate(address, len_bytes),
        };
        Ok(c_int::try_from(count).unwrap_or(c_int::MAX))
    })
}

/// Which mechanism tells the cache of memory that is unmapped or freed.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_invalidation(
    cache: *const doorbell_cache,
    by: *mut u32,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, cache) = unsafe { (out_optional(by), get(cache, "cache")?) };
        let (code, reason) = match cache {
            doorbell_cache::Host(cache) => match cache.invalidation() {
                Invalidation::Kernel => (DOORBELL_INVALIDATION_KERNEL, "by userfaultfd"),
                Invalidation::Explicit => (
                    DOORBELL_INVALIDATION_EXPLICIT,
                    "by doorbell_cache_invalidate",
                ),
                Invalidation::None(reason) => (DOORBELL_INVALIDATION_NONE, reason.as_str()),
                other => unreachable!("{other:?} is no value of this version"),
            },
            #[cfg(feature = "cuda")]
            doorbell_cache::Device(_) => (
                DOORBELL_INVALIDATION_EXPLICIT,
                "by the driver's numbers of its allocations, and for keys that peers have by doorbell_cache_invalidate",
            ),
        };
        // SAFETY: the caller's promise about text buffers.
        let length = unsafe { write_text(reason, text, capacity) }?;
        if let Some(place) = place {
            place.write(code);
        }
        Ok(length)
    })
}

/// What the cache has done.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_read_counters(
    cache: *const doorbell_cache,
    counters: *mut doorbell_cache_counters,
    struct_size: u32,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let counted = match unsafe { get(cache, "cache") }? {
            doorbell_cache::Host(cache) => (cache.counters(), cache.size()),
            #[cfg(feature = "cuda")]
            doorbell_cache::Device(cache) => (cache.counters(), cache.size()),
        };
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(counted.into(), counters, struct_size, "counters") }
    })
}

/// Destroys the handle of a cache.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cache_destroy(cache: *mut doorbell_cache) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(cache, "cache") }.map(|()| 0))
}
