//! What the GPU of the current context can do.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's
#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // constants of the header, which every library has

use std::ffi::c_int;

use crate::argument::{VersionedStruct, write_struct};
use crate::boundary::guard;
use crate::failure::Failure;
#[cfg(feature = "cuda")]
use doorbell_rs::{CudaContext, WritesOrdering};

/// Nothing orders the writes of a NIC for the GPU.
pub const DOORBELL_ORDERING_NONE: u32 = 0;
/// They are in order for the GPU that owns the memory.
pub const DOORBELL_ORDERING_OWNER: u32 = 1;
/// They are in order for every GPU.
pub const DOORBELL_ORDERING_ALL_DEVICES: u32 = 2;

/// It takes a UAR to find out.
pub const DOORBELL_IOMEMORY_UNKNOWN: u32 = 2;

/// `doorbell::Capabilities` for C, and the driver's version.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct doorbell_cuda_capabilities {
    pub struct_size: u32,
    pub driver_version: u32,
    pub memops: u32,
    pub kernels: u32,
    pub iomemory: u32,
    pub qwords: u32,
    pub nor: u32,
    pub flush: u32,
    pub gpudirect: u32,
    pub ordering: u32,
    pub dmabuf: u32,
    pub host_addresses: u32,
}

// SAFETY: repr(C), 4-byte fields, without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_cuda_capabilities {
    const BYTES_FIRST: usize = 48;

    fn defaults() -> doorbell_cuda_capabilities {
        doorbell_cuda_capabilities::default()
    }
}

const _: () =
    assert!(size_of::<doorbell_cuda_capabilities>() == doorbell_cuda_capabilities::BYTES_FIRST);

/// What the GPU of the current context can do.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cuda_read_capabilities(
    capabilities: *mut doorbell_cuda_capabilities,
    struct_size: u32,
) -> c_int {
    guard(|| {
        if capabilities.is_null() {
            return Err(Failure::null("capabilities"));
        }
        let found = found()?;
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(found, capabilities, struct_size, "capabilities") }
    })
}

#[cfg(feature = "cuda")]
fn found() -> Result<doorbell_cuda_capabilities, Failure> {
    let context = CudaContext::current()?;
    let (major, minor) = context.driver_version();
    let found = context.capabilities();
    Ok(doorbell_cuda_capabilities {
        struct_size: size_of::<doorbell_cuda_capabilities>() as u32,
        driver_version: 1000 * major + 10 * minor,
        memops: found.memops.into(),
        kernels: found.kernels.into(),
        iomemory: found.iomemory.map_or(DOORBELL_IOMEMORY_UNKNOWN, u32::from),
        qwords: found.qwords.into(),
        nor: found.nor.into(),
        flush: found.flush.into(),
        gpudirect: found.gpudirect.into(),
        ordering: match found.ordering {
            WritesOrdering::None => DOORBELL_ORDERING_NONE,
            WritesOrdering::Owner => DOORBELL_ORDERING_OWNER,
            WritesOrdering::AllDevices => DOORBELL_ORDERING_ALL_DEVICES,
        },
        dmabuf: found.dmabuf.into(),
        host_addresses: found.host_addresses.into(),
    })
}

#[cfg(not(feature = "cuda"))]
fn found() -> Result<doorbell_cuda_capabilities, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}
