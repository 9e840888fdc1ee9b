//! Registered memory.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use crate::argument::{choice, out, out_handle, write_text};
use crate::boundary::{call, guard, guard_or};
use crate::device::doorbell_domain;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use doorbell_rs::{Access, HeldRegistration, PageSize, ProtectionDomain, Region, RegionKind};
#[cfg(feature = "cuda")]
use doorbell_rs::{CudaContext, DeviceBuffer};

/// The device may write on behalf of this side: receives, results of reads and atomics.
pub const DOORBELL_ACCESS_LOCAL_WRITE: u32 = 1;
/// A peer may write.
pub const DOORBELL_ACCESS_REMOTE_WRITE: u32 = 2;
/// A peer may read.
pub const DOORBELL_ACCESS_REMOTE_READ: u32 = 4;
/// A peer may run atomics.
pub const DOORBELL_ACCESS_REMOTE_ATOMIC: u32 = 8;
/// All of them.
pub const DOORBELL_ACCESS_ALL: u32 = 15;

/// Memory of this process.
pub const DOORBELL_REGION_HOST: c_int = 0;
/// By the dmabuf that another device's driver exported.
pub const DOORBELL_REGION_DMABUF: c_int = 1;
/// By its address on another device.
pub const DOORBELL_REGION_PEERMEM: c_int = 2;
/// By copies of the GPU's.
pub const DOORBELL_REGION_COPIED: c_int = 3;

/// The rights of these flags.
pub(super) fn access(flags: u32) -> Result<Access, Failure> {
    if flags & !DOORBELL_ACCESS_ALL != 0 {
        return Err(choice("access_flags", flags, DOORBELL_ACCESS_ALL));
    }
    let rights = [
        (DOORBELL_ACCESS_LOCAL_WRITE, Access::LOCAL_WRITE),
        (DOORBELL_ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE),
        (DOORBELL_ACCESS_REMOTE_READ, Access::REMOTE_READ),
        (DOORBELL_ACCESS_REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
    ];
    Ok(rights
        .into_iter()
        .filter(|(flag, _)| flags & flag != 0)
        .fold(Access::LOCAL_READ, |all, (_, right)| all | right))
}

/// Registered memory.
pub struct doorbell_region {
    pub(super) inner: Region,
    /// What keeps an entry of a cache for it.
    _held: Option<HeldRegistration>,
    /// Why it is registered in no better way, a line for each.
    reasons: String,
}

impl doorbell_region {
    pub(super) fn new(inner: Region) -> doorbell_region {
        doorbell_region {
            inner,
            _held: None,
            reasons: String::new(),
        }
    }

    /// Of a GPU's memory.
    #[cfg(feature = "cuda")]
    fn of_device(
        domain: &ProtectionDomain,
        buffer: &DeviceBuffer,
        access: Access,
    ) -> Result<doorbell_region, Failure> {
        let reach = Region::register_device_with_report(domain, buffer, access)?;
        let reasons = lines(&reach.refused);
        Ok(doorbell_region {
            inner: reach.into_region()?,
            _held: None,
            reasons,
        })
    }

    pub(super) fn held(held: HeldRegistration) -> doorbell_region {
        doorbell_region {
            inner: held.region().clone(),
            _held: Some(held),
            reasons: String::new(),
        }
    }
}

/// Ways that are not, a line for each with its reason.
#[cfg(any(test, feature = "cuda"))]
fn lines(refused: &[(RegionKind, doorbell_rs::Error)]) -> String {
    let lines = refused.iter();
    lines
        .map(|(kind, error)| format!("{kind}: {error}\n"))
        .collect()
}

impl CObject for doorbell_region {
    const NAME: &'static str = "doorbell_region";
}

/// [`doorbell_rs::RemoteRegion`] for C: in memory its first 20 bytes are those of `RemoteRegion::to_bytes` on a little-endian machine.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_remote {
    pub addr: u64,
    pub len_bytes: u64,
    pub rkey: u32,
    pub reserved: u32,
}

/// Allocates and registers memory.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_alloc(
    domain: *const doorbell_domain,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let inner = Region::alloc(&domain.inner, len_bytes, access(access_flags)?)?;
        Ok(place.set(doorbell_region::new(inner)))
    })
}

/// Registers memory of the caller's.
///
/// # Safety
/// As the header says of pointers, and of the memory: it stays until all that holds it is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_register(
    domain: *const doorbell_domain,
    start: *mut c_void,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let start = NonNull::new(start.cast()).ok_or_else(|| Failure::null("start"))?;
        if (start.as_ptr() as u64).checked_add(len_bytes).is_none() {
            let reason = format!("{len_bytes} bytes from there leave the address space");
            return Err(Failure::argument("start", reason));
        }
        let rights = access(access_flags)?;
        // SAFETY: the caller's promise about the memory; a C program has no Rust references into it.
        let inner = unsafe { Region::register(&domain.inner, start, len_bytes, rights) }?;
        Ok(place.set(doorbell_region::new(inner)))
    })
}

/// Allocates and registers memory in huge pages.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_alloc_huge(
    domain: *const doorbell_domain,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let inner = Region::alloc_huge(&domain.inner, len_bytes, access(access_flags)?)?;
        Ok(place.set(doorbell_region::new(inner)))
    })
}

/// Registers a part of a dmabuf.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_register_dmabuf(
    domain: *const doorbell_domain,
    fd: c_int,
    offset: u64,
    len_bytes: u64,
    iova: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let rights = access(access_flags)?;
        if fd < 0 {
            return Err(Failure::argument("fd", format!("{fd} is no descriptor")));
        }
        // SAFETY: not -1; it stays open for the call by the caller's promise, and is the kernel's to judge.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let inner = Region::register_dmabuf(&domain.inner, fd, offset, len_bytes, iova, rights)?;
        Ok(place.set(doorbell_region::new(inner)))
    })
}

/// Registers memory of another device by its address.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_register_peermem(
    domain: *const doorbell_domain,
    address: u64,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let rights = access(access_flags)?;
        let inner = Region::register_peermem(&domain.inner, address, len_bytes, rights)?;
        Ok(place.set(doorbell_region::new(inner)))
    })
}

/// Allocates memory of a GPU, and registers it.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_alloc_device(
    domain: *const doorbell_domain,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        let made = alloc_device(&domain.inner, len_bytes, access(access_flags)?)?;
        Ok(place.set(made))
    })
}

/// Registers memory of a GPU that is the caller's.
///
/// # Safety
/// As the header says of pointers, and of the memory: it stays until all that holds it is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_register_device(
    domain: *const doorbell_domain,
    device_pointer: u64,
    len_bytes: u64,
    access_flags: u32,
    region: *mut *mut doorbell_region,
) -> c_int {
    call!(place = out_handle(region), domain = get(domain), || {
        if device_pointer == 0 {
            return Err(Failure::null("device_pointer"));
        }
        let rights = access(access_flags)?;
        // SAFETY: the caller's promise about the memory.
        let made = unsafe { register_device(&domain.inner, device_pointer, len_bytes, rights) }?;
        Ok(place.set(made))
    })
}

#[cfg(feature = "cuda")]
fn alloc_device(
    domain: &ProtectionDomain,
    len_bytes: u64,
    access: Access,
) -> Result<doorbell_region, Failure> {
    let buffer = CudaContext::current()?.alloc(len_bytes)?;
    doorbell_region::of_device(domain, &buffer, access)
}

#[cfg(not(feature = "cuda"))]
fn alloc_device(_: &ProtectionDomain, _: u64, _: Access) -> Result<doorbell_region, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

/// # Safety
/// As [`DeviceBuffer::from_raw`] of the memory.
#[cfg(feature = "cuda")]
unsafe fn register_device(
    domain: &ProtectionDomain,
    device_pointer: u64,
    len_bytes: u64,
    access: Access,
) -> Result<doorbell_region, Failure> {
    let context = CudaContext::current()?;
    // SAFETY: the caller's promise.
    let buffer = unsafe { DeviceBuffer::from_raw(&context, device_pointer, len_bytes) }?;
    doorbell_region::of_device(domain, &buffer, access)
}

#[cfg(not(feature = "cuda"))]
unsafe fn register_device(
    _: &ProtectionDomain,
    _: u64,
    _: u64,
    _: Access,
) -> Result<doorbell_region, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

/// Takes a region from its device.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_deregister(region: *const doorbell_region) -> c_int {
    call!(region = get(region), || {
        Ok(region.inner.deregister()?.into())
    })
}

/// Destroys the handle of a region.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_destroy(region: *mut doorbell_region) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(region, "region") }.map(|()| 0))
}

/// The first byte of a region.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_pointer(region: *const doorbell_region) -> *mut c_void {
    guard_or(null_mut(), || {
        // SAFETY: the caller's promise about handles.
        let region = unsafe { get(region, "region") }?;
        Ok(region.inner.as_ptr().cast())
    })
}

/// The address of a host region on the GPU of the current context.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_device_pointer(
    region: *const doorbell_region,
    device_pointer: *mut u64,
) -> c_int {
    call!(region = get(region), || {
        if device_pointer.is_null() {
            return Err(Failure::null("device_pointer"));
        }
        let address = device_address(&region.inner)?;
        // SAFETY: the caller's promise about places for results.
        unsafe { device_pointer.write(address) };
        Ok(0)
    })
}

#[cfg(feature = "cuda")]
fn device_address(region: &Region) -> Result<u64, Failure> {
    Ok(region.device_address(&doorbell_rs::CudaContext::current()?)?)
}

#[cfg(not(feature = "cuda"))]
fn device_address(_: &Region) -> Result<u64, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

/// The length of a region.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_len_bytes(region: *const doorbell_region) -> u64 {
    guard_or(0, || {
        // SAFETY: the caller's promise about handles.
        let region = unsafe { get(region, "region") }?;
        Ok(region.inner.len_bytes())
    })
}

/// How the device reaches the memory of a region.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_kind(region: *const doorbell_region) -> c_int {
    call!(region = get(region), || {
        Ok(match region.inner.kind() {
            RegionKind::Host => DOORBELL_REGION_HOST,
            RegionKind::Dmabuf => DOORBELL_REGION_DMABUF,
            RegionKind::Peermem => DOORBELL_REGION_PEERMEM,
            RegionKind::Copied => DOORBELL_REGION_COPIED,
            other => unreachable!("{other:?} is no value of this version"),
        })
    })
}

/// Why a device reaches a region in no better way.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_reasons(
    region: *const doorbell_region,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and text buffers.
        unsafe { write_text(&get(region, "region")?.reasons, text, capacity) }
    })
}

/// Why a copy of a GPU's memory failed.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_copy_failure(
    region: *const doorbell_region,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        match copy_failure(&unsafe { get(region, "region") }?.inner) {
            None => Ok(0),
            // SAFETY: the caller's promise about text buffers.
            Some(why) => unsafe { write_text(&why.to_string(), text, capacity) },
        }
    })
}

#[cfg(feature = "cuda")]
fn copy_failure(region: &Region) -> Option<doorbell_rs::Error> {
    region.copy_failure()
}

#[cfg(not(feature = "cuda"))]
fn copy_failure(_: &Region) -> Option<doorbell_rs::Error> {
    None
}

/// The pages that the memory of a region is in.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_page_bytes(region: *const doorbell_region) -> u64 {
    guard_or(0, || {
        // SAFETY: the caller's promise about handles.
        let region = unsafe { get(region, "region") }?;
        Ok(match region.inner.page_size() {
            PageSize::Huge(bytes) => bytes,
            _ => 0,
        })
    })
}

/// The key by which work requests of this side name a region.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_lkey(
    region: *const doorbell_region,
    lkey: *mut u32,
) -> c_int {
    call!(place = out(lkey), region = get(region), || {
        place.write(region.inner.lkey());
        Ok(0)
    })
}

/// What a peer needs to know of a region.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_region_remote(
    region: *const doorbell_region,
    remote: *mut doorbell_remote,
) -> c_int {
    call!(place = out(remote), region = get(region), || {
        let remote = region.inner.remote();
        place.write(doorbell_remote {
            addr: remote.addr,
            len_bytes: remote.len_bytes,
            rkey: remote.rkey,
            reserved: 0,
        });
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::create;
    use doorbell_rs::{Device, Error, RemoteRegion, StateKind};

    /// Of a GPU's memory that a card reaches by the second best way, which no machine has that the tests run on.
    #[test]
    fn each_better_way_is_a_line_with_its_reason() {
        let why = |reason: &str| Error::state(StateKind::Unsupported, "registration", reason);
        let domain = Device::open("softcx").unwrap().protection_domain();
        let region = create(doorbell_region {
            inner: Region::alloc(&domain, 64, Access::ALL).unwrap(),
            _held: None,
            reasons: lines(&[
                (RegionKind::Dmabuf, why("first")),
                (RegionKind::Peermem, why("second")),
            ]),
        });
        let mut text = [1 as c_char; 256];
        // SAFETY: a handle that is used as it should be, and a buffer of that size.
        let text = unsafe {
            let len = doorbell_region_reasons(region, text.as_mut_ptr(), text.len());
            assert_eq!(doorbell_region_destroy(region), 0);
            let text = std::ffi::CStr::from_ptr(text.as_ptr()).to_str().unwrap();
            assert_eq!(text.len(), len as usize);
            text
        };
        let lines: Vec<&str> = text.lines().collect();
        let [first, second] = lines[..] else {
            panic!("{text}")
        };
        assert!(first.starts_with("dmabuf: ") && first.contains("first"));
        assert!(second.starts_with("peermem: ") && second.contains("second"));
    }

    #[test]
    fn rights_are_those_of_the_library() {
        for flags in 0..=DOORBELL_ACCESS_ALL {
            assert_eq!(access(flags).unwrap(), Access::from_bits(flags).unwrap());
        }
        assert!(access(16).is_err());
    }

    #[test]
    fn a_remote_region_crosses_between_c_and_rust() {
        let ours = doorbell_remote {
            addr: 0x1122_3344_5566_7788,
            len_bytes: 4096,
            rkey: 0xabcd,
            reserved: 0,
        };
        let mut bytes = [0; RemoteRegion::BYTES];
        // SAFETY: the struct has 24 bytes, all of them initialised.
        unsafe {
            bytes
                .as_mut_ptr()
                .copy_from_nonoverlapping((&raw const ours).cast(), bytes.len());
        }
        let theirs = RemoteRegion::from_bytes(&bytes);
        assert_eq!(
            (theirs.addr, theirs.len_bytes, theirs.rkey),
            (ours.addr, ours.len_bytes, ours.rkey)
        );
    }
}
