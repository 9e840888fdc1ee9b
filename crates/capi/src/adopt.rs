//! Objects of libibverbs that another part of the program has made.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::address_handle::doorbell_address_handle;
use crate::argument::{choice, out_handle, text};
use crate::boundary::call;
use crate::device::{doorbell_device, doorbell_domain};
use crate::failure::Failure;
use crate::handle::get;
use crate::region::{
    DOORBELL_REGION_COPIED, DOORBELL_REGION_DMABUF, DOORBELL_REGION_HOST, DOORBELL_REGION_PEERMEM,
    access, doorbell_region,
};
#[cfg(feature = "verbs")]
use doorbell_rs::MemoryKeys;
use doorbell_rs::{Access, AddressHandle, Device, ProtectionDomain, Region, RegionKind};

/// An `ibv_context` of libibverbs, known by its name.
pub enum ibv_context {}
/// An `ibv_pd`, likewise.
pub enum ibv_pd {}
/// An `ibv_mr`, likewise.
pub enum ibv_mr {}
/// An `ibv_ah`, likewise.
pub enum ibv_ah {}

/// Called when the library is done with an adopted object.
pub type doorbell_release = Option<unsafe extern "C" fn(*mut c_void)>;

/// [`doorbell_rs::MemoryKeys`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_memory_keys {
    pub start: u64,
    pub len_bytes: u64,
    pub lkey: u32,
    pub rkey: u32,
}

/// The owner of an adopted object: its drop calls the application, if the adoption has succeeded.
struct ReleaseCall {
    call: doorbell_release,
    argument: *mut c_void,
    /// A call that fails changes nothing, and drops the owner.
    adopted: Arc<AtomicBool>,
}

// SAFETY: the header says that the call may come in any thread.
unsafe impl Send for ReleaseCall {}
// SAFETY: only its drop does anything.
unsafe impl Sync for ReleaseCall {}

impl Drop for ReleaseCall {
    fn drop(&mut self) {
        if let Some(call) = self.call
            && self.adopted.load(Ordering::Acquire)
        {
            // SAFETY: the caller's promise at the adoption: the argument is what the function takes.
            unsafe { call(self.argument) };
        }
    }
}

/// Makes something with an owner that calls `call` from success on.
fn owned<T>(
    call: doorbell_release,
    argument: *mut c_void,
    make: impl FnOnce(ReleaseCall) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let adopted = Arc::new(AtomicBool::new(false));
    let made = make(ReleaseCall {
        call,
        argument,
        adopted: Arc::clone(&adopted),
    })?;
    adopted.store(true, Ordering::Release);
    Ok(made)
}

/// The address of an object of C.
///
/// # Safety
/// None; the signature is that of the readers of arguments.
unsafe fn address<T>(object: *const T, argument: &'static str) -> Result<NonNull<c_void>, Failure> {
    NonNull::new(object.cast_mut().cast()).ok_or_else(|| Failure::null(argument))
}

/// Uses an open device.
///
/// # Safety
/// As the header says of pointers, and of the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_adopt(
    context: *mut ibv_context,
    settings: *const c_char,
    release: doorbell_release,
    argument: *mut c_void,
    device: *mut *mut doorbell_device,
) -> c_int {
    call!(
        place = out_handle(device),
        context = address(context),
        || {
            let settings = if settings.is_null() {
                ""
            } else {
                // SAFETY: the caller's promise about texts.
                unsafe { text(settings, "settings") }?
            };
            // SAFETY: the caller's promise about the context.
            let inner = owned(release, argument, |owner| unsafe {
                adopt_context(context, settings, owner)
            })?;
            Ok(place.set(doorbell_device { inner }))
        }
    )
}

/// Takes note of an asynchronous event.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_report_async_event(
    device: *const doorbell_device,
    event_type: u32,
    element: *const c_void,
) -> c_int {
    call!(device = get(device), || {
        report(&device.inner, event_type, element)?;
        Ok(0)
    })
}

/// Uses a protection domain.
///
/// # Safety
/// As the header says of pointers, and of the protection domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_domain_adopt(
    device: *const doorbell_device,
    pd: *mut ibv_pd,
    release: doorbell_release,
    argument: *mut c_void,
    domain: *mut *mut doorbell_domain,
) -> c_int {
    call!(
        place = out_handle(domain),
        device = get(device),
        pd = address(pd),
        || {
            // SAFETY: the caller's promise about the protection domain.
            let inner = owned(release, argument, |owner| unsafe {
                adopt_pd(&device.inner, pd, owner)
            })?;
            Ok(place.set(doorbell_domain { inner }))
        }
    )
}

/// Uses registered memory.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_adopt(
    domain: *const doorbell_domain,
    mr: *mut ibv_mr,
    access_flags: u32,
    kind: u32,
    release: doorbell_release,
    argument: *mut c_void,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(
        place = out_handle(region),
        domain = get(domain),
        mr = address(mr),
        || {
            let (rights, kind) = (access(access_flags)?, kind_of(kind)?);
            // SAFETY: the caller's promise about the memory.
            let inner = owned(release, argument, |owner| unsafe {
                adopt_mr(&domain.inner, mr, rights, kind, owner)
            })?;
            Ok(place.set(doorbell_region::new(inner)))
        }
    )
}

/// Uses an address handle.
///
/// # Safety
/// As the header says of pointers, and of the address handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_handle_adopt(
    domain: *const doorbell_domain,
    ah: *mut ibv_ah,
    release: doorbell_release,
    argument: *mut c_void,
    handle: *mut *mut doorbell_address_handle,
) -> c_int {
    call!(
        place = out_handle(handle),
        domain = get(domain),
        ah = address(ah),
        || {
            // SAFETY: the caller's promise about the address handle.
            let inner = owned(release, argument, |owner| unsafe {
                adopt_ah(&domain.inner, ah, owner)
            })?;
            Ok(place.set(doorbell_address_handle { inner }))
        }
    )
}

/// Uses registered memory by its range and keys.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_adopt_keys(
    domain: *const doorbell_domain,
    keys: *const doorbell_memory_keys,
    access_flags: u32,
    kind: u32,
    release: doorbell_release,
    argument: *mut c_void,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(
        place = out_handle(region),
        domain = get(domain),
        keys = address(keys),
        || {
            let (rights, kind) = (access(access_flags)?, kind_of(kind)?);
            // SAFETY: the caller's promise about pointers.
            let keys = unsafe { keys.cast::<doorbell_memory_keys>().read() };
            // SAFETY: the caller's promise about the memory.
            let inner = owned(release, argument, |owner| unsafe {
                adopt_keys(&domain.inner, keys, rights, kind, owner)
            })?;
            Ok(place.set(doorbell_region::new(inner)))
        }
    )
}

fn kind_of(kind: u32) -> Result<RegionKind, Failure> {
    match c_int::try_from(kind) {
        Ok(DOORBELL_REGION_HOST) => Ok(RegionKind::Host),
        Ok(DOORBELL_REGION_DMABUF) => Ok(RegionKind::Dmabuf),
        Ok(DOORBELL_REGION_PEERMEM) => Ok(RegionKind::Peermem),
        Ok(DOORBELL_REGION_COPIED) => Ok(RegionKind::Copied),
        _ => Err(choice("kind", kind, DOORBELL_REGION_PEERMEM.unsigned_abs())),
    }
}

/// # Safety
/// As [`Device::from_ibv_context`].
#[cfg(feature = "verbs")]
unsafe fn adopt_context(
    context: NonNull<c_void>,
    settings: &str,
    owner: ReleaseCall,
) -> Result<Device, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { Device::from_ibv_context(context, settings, owner) }?)
}

#[cfg(feature = "verbs")]
#[expect(clippy::unnecessary_wraps)] // without the feature it fails
fn report(device: &Device, event_type: u32, element: *const c_void) -> Result<(), Failure> {
    device.report_async_event(event_type, element);
    Ok(())
}

/// # Safety
/// As [`ProtectionDomain::from_ibv_pd`].
#[cfg(feature = "verbs")]
unsafe fn adopt_pd(
    device: &Device,
    pd: NonNull<c_void>,
    owner: ReleaseCall,
) -> Result<ProtectionDomain, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { ProtectionDomain::from_ibv_pd(device, pd, owner) }?)
}

/// # Safety
/// As [`Region::from_ibv_mr`].
#[cfg(feature = "verbs")]
unsafe fn adopt_mr(
    domain: &ProtectionDomain,
    mr: NonNull<c_void>,
    access: Access,
    kind: RegionKind,
    owner: ReleaseCall,
) -> Result<Region, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { Region::from_ibv_mr(domain, mr, access, kind, owner) }?)
}

/// # Safety
/// As [`AddressHandle::from_ibv_ah`].
#[cfg(feature = "verbs")]
unsafe fn adopt_ah(
    domain: &ProtectionDomain,
    ah: NonNull<c_void>,
    owner: ReleaseCall,
) -> Result<AddressHandle, Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { AddressHandle::from_ibv_ah(domain, ah, owner) }?)
}

/// # Safety
/// As [`Region::from_keys`].
#[cfg(feature = "verbs")]
unsafe fn adopt_keys(
    domain: &ProtectionDomain,
    keys: doorbell_memory_keys,
    access: Access,
    kind: RegionKind,
    owner: ReleaseCall,
) -> Result<Region, Failure> {
    let keys = MemoryKeys {
        start: keys.start,
        len_bytes: keys.len_bytes,
        lkey: keys.lkey,
        rkey: keys.rkey,
    };
    // SAFETY: the caller's promise.
    Ok(unsafe { Region::from_keys(domain, keys, access, kind, owner) }?)
}

#[cfg(not(feature = "verbs"))]
use without::{adopt_ah, adopt_context, adopt_keys, adopt_mr, adopt_pd, report};

/// What a library without the feature says.
#[cfg(not(feature = "verbs"))]
mod without {
    use super::*;

    const FAILURE: Failure = Failure::Feature { feature: "verbs" };

    pub(super) unsafe fn adopt_context(
        _: NonNull<c_void>,
        _: &str,
        _: ReleaseCall,
    ) -> Result<Device, Failure> {
        Err(FAILURE)
    }

    pub(super) fn report(_: &Device, _: u32, _: *const c_void) -> Result<(), Failure> {
        Err(FAILURE)
    }

    pub(super) unsafe fn adopt_pd(
        _: &Device,
        _: NonNull<c_void>,
        _: ReleaseCall,
    ) -> Result<ProtectionDomain, Failure> {
        Err(FAILURE)
    }

    pub(super) unsafe fn adopt_ah(
        _: &ProtectionDomain,
        _: NonNull<c_void>,
        _: ReleaseCall,
    ) -> Result<AddressHandle, Failure> {
        Err(FAILURE)
    }

    pub(super) unsafe fn adopt_mr(
        _: &ProtectionDomain,
        _: NonNull<c_void>,
        _: Access,
        _: RegionKind,
        _: ReleaseCall,
    ) -> Result<Region, Failure> {
        Err(FAILURE)
    }

    pub(super) unsafe fn adopt_keys(
        _: &ProtectionDomain,
        _: doorbell_memory_keys,
        _: Access,
        _: RegionKind,
        _: ReleaseCall,
    ) -> Result<Region, Failure> {
        Err(FAILURE)
    }
}
