//! Devices and protection domains.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};

use crate::ffi::argument::{choice, out_handle, text, write_text};
use crate::ffi::boundary::guard;
use crate::ffi::handle::{Handle, destroy, get};
use crate::{Device, ProtectionDomain};

/// A NIC.
pub struct doorbell_device {
    inner: Device,
}

impl Handle for doorbell_device {
    const NAME: &'static str = "doorbell_device";
}

/// A protection domain of a device.
pub struct doorbell_domain {
    pub(super) inner: ProtectionDomain,
}

impl Handle for doorbell_domain {
    const NAME: &'static str = "doorbell_domain";
}

/// How many devices there are.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_device_count() -> c_int {
    guard(|| Ok(c_int::try_from(Device::list().len()).unwrap_or(c_int::MAX)))
}

/// The name of a device, best first.
///
/// # Safety
/// As the header says of text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_name(
    index: u32,
    name: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        let names = Device::list();
        let last = names.len().saturating_sub(1) as u32;
        let found = names
            .get(index as usize)
            .ok_or_else(|| choice("index", index, last))?;
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(found, name, capacity) }
    })
}

/// Opens a device.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_open(
    name: *const c_char,
    device: *mut *mut doorbell_device,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about texts and places for handles.
        let (place, name) = unsafe { (out_handle(device, "device")?, text(name, "name")?) };
        let inner = Device::open(name)?;
        Ok(place.set(doorbell_device { inner }))
    })
}

/// Closes a device.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_close(device: *mut doorbell_device) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(device, "device") }.map(|()| 0))
}

/// Lets the device do some of its work in the caller.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_progress(device: *const doorbell_device) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let device = unsafe { get(device, "device") }?;
        Ok(device.inner.progress().into())
    })
}

/// Makes a protection domain.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_domain_create(
    device: *const doorbell_device,
    domain: *mut *mut doorbell_domain,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places for them.
        let (place, device) = unsafe { (out_handle(domain, "domain")?, get(device, "device")?) };
        let inner = device.inner.protection_domain();
        Ok(place.set(doorbell_domain { inner }))
    })
}

/// Destroys the handle of a protection domain.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_domain_destroy(domain: *mut doorbell_domain) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(domain, "domain") }.map(|()| 0))
}
