//! Devices and protection domains.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};

use crate::argument::{VersionedStruct, choice, out_handle, text, write_struct, write_text};
use crate::boundary::{call, guard};
use crate::handle::{CObject, destroy, get};
#[cfg(feature = "cuda")]
use doorbell_rs::CudaContext;
use doorbell_rs::softcx::Counters;
use doorbell_rs::{Control, Device, Endpoint, EndpointConfig, ProtectionDomain};

/// A NIC.
pub struct doorbell_device {
    pub(super) inner: Device,
}

/// [`Counters`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_device_counters {
    pub struct_size: u32,
    pub reserved: u32,
    pub doorbells: u64,
    pub doorbells_before_record: u64,
    pub doorbells_backwards: u64,
    pub wqes: u64,
    pub packets_sent: u64,
    pub packets_received: u64,
    pub packets_dropped: u64,
    pub retransmissions: u64,
    pub rnr_naks: u64,
    pub completions: u64,
    pub congestion_notices: u64,
}

// SAFETY: repr(C), two 4-byte fields and 8-byte ones behind them, without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_device_counters {
    const BYTES_FIRST: usize = 88;

    fn defaults() -> doorbell_device_counters {
        Counters::default().into()
    }
}

const _: () =
    assert!(size_of::<doorbell_device_counters>() == doorbell_device_counters::BYTES_FIRST + 8);

impl From<Counters> for doorbell_device_counters {
    fn from(counters: Counters) -> Self {
        doorbell_device_counters {
            struct_size: size_of::<doorbell_device_counters>() as u32,
            reserved: 0,
            doorbells: counters.doorbells,
            doorbells_before_record: counters.doorbells_before_record,
            doorbells_backwards: counters.doorbells_backwards,
            wqes: counters.wqes,
            packets_sent: counters.packets_sent,
            packets_received: counters.packets_received,
            packets_dropped: counters.packets_dropped,
            retransmissions: counters.retransmissions,
            rnr_naks: counters.rnr_naks,
            completions: counters.completions,
            congestion_notices: counters.congestion_notices,
        }
    }
}

impl CObject for doorbell_device {
    const NAME: &'static str = "doorbell_device";
}

/// A protection domain of a device.
pub struct doorbell_domain {
    pub(super) inner: ProtectionDomain,
}

impl CObject for doorbell_domain {
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
    call!(place = out_handle(device), name = text(name), || {
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
    call!(device = get(device), || {
        Ok(device.inner.progress().into())
    })
}

/// What a device has counted.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_read_counters(
    device: *const doorbell_device,
    counters: *mut doorbell_device_counters,
    struct_size: u32,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let counted = unsafe { get(device, "device") }?.inner.counters();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(counted.into(), counters, struct_size, "counters") }
    })
}

/// What a device is, and which ways its doorbells can take.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_describe(
    device: *const doorbell_device,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let device = &unsafe { get(device, "device") }?.inner;
        let mut whole = format!("{}\n", device.name());
        let domain = device.protection_domain();
        for control in Control::ALL {
            let config = EndpointConfig::default().control(Some(control));
            let way = match Endpoint::new(&domain, &config) {
                Ok(endpoint) => endpoint.path().to_string(),
                Err(error) => format!("not {control}: {error}"),
            };
            whole += &format!("{way}\n");
        }
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&whole, text, capacity) }
    })
}

/// What this library and this machine have.
///
/// # Safety
/// As the header says of text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_describe(text: *mut c_char, capacity: usize) -> c_int {
    guard(|| {
        let mut whole = format!("doorbell {}\n", env!("CARGO_PKG_VERSION"));
        for (feature, is_there) in [
            ("verbs", cfg!(feature = "verbs")),
            ("cuda", cfg!(feature = "cuda")),
        ] {
            let with = if is_there { "with" } else { "without" };
            whole += &format!("{with} the feature {feature}\n");
        }
        for name in Device::list() {
            whole += &format!("device {name}\n");
        }
        #[cfg(feature = "cuda")]
        {
            // What is current, or what a program would get that asks for nothing else.
            let context = CudaContext::current().or_else(|_| CudaContext::primary(0));
            match context {
                Ok(context) => {
                    whole += &format!("GPU {}\n", context.device_name());
                    whole += &format!("{:?}\n", context.capabilities());
                    for finding in context.findings() {
                        whole += &format!("{finding}\n");
                    }
                }
                Err(error) => whole += &format!("no GPU: {error}\n"),
            }
        }
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&whole, text, capacity) }
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
    call!(place = out_handle(domain), device = get(device), || {
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

/// The device of a protection domain.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_domain_device(
    domain: *const doorbell_domain,
    device: *mut *mut doorbell_device,
) -> c_int {
    call!(place = out_handle(device), domain = get(domain), || {
        let inner = domain.inner.device().clone();
        Ok(place.set(doorbell_device { inner }))
    })
}
