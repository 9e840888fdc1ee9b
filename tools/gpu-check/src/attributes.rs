//! What the driver says of the device, and what it makes of memory that is not registered in the usual way.

use anyhow::Result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUmemRangeHandleType, CUresult};
use serde_json::{Map, Value, json};

use super::gpu::{Gpu, IOMEMORY, PORTABLE, check};

/// Attributes of the device, memory of `cuMemAllocHost` that is registered as well, and handles of the GPU's memory for another device.
pub fn attributes() -> Result<Value> {
    let _gpu = Gpu::new()?;
    Ok(json!({
        "attributes": of_device()?,
        "memory of cuMemAllocHost": registered()?,
        "dmabuf": dmabufs()?,
    }))
}

fn of_device() -> Result<Value> {
    let mut found = Map::new();
    let mut device = 0;
    // SAFETY: writes one int.
    check("cuCtxGetDevice", unsafe {
        sys::cuCtxGetDevice(&mut device)
    })?;
    for attribute in [
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
        Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
        Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
        Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
    ] {
        let mut value = 0;
        // SAFETY: writes one int.
        let asked = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        let said = check("cuDeviceGetAttribute", asked)
            .map_or_else(|error| json!(error.to_string()), |()| json!(value));
        let name = format!("{attribute:?}");
        found.insert(name.replace("CU_DEVICE_ATTRIBUTE_", ""), said);
    }
    Ok(found.into())
}

/// The library does not register what the driver has allocated: these are the errors.
fn registered() -> Result<Value> {
    let mut memory = std::ptr::null_mut();
    // SAFETY: writes one address.
    check("cuMemAllocHost", unsafe {
        sys::cuMemAllocHost_v2(&mut memory, 1 << 16)
    })?;
    let mut found = Map::new();
    for (name, flags) in [
        ("registered", PORTABLE),
        ("as IOMEMORY", PORTABLE | IOMEMORY),
    ] {
        // SAFETY: allocated above.
        let answer = unsafe { sys::cuMemHostRegister_v2(memory, 1 << 16, flags) };
        if answer == CUresult::CUDA_SUCCESS {
            // SAFETY: registered just now.
            check("cuMemHostUnregister", unsafe {
                sys::cuMemHostUnregister(memory)
            })?;
        }
        found.insert(name.into(), json!(format!("{answer:?}")));
    }
    Ok(found.into())
}

/// A NIC reaches the GPU's memory by such a handle; of which parts of an allocation there is one.
fn dmabufs() -> Result<Value> {
    const WHOLE: usize = 2 << 20;
    let mut memory = 0;
    // SAFETY: writes one address.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&mut memory, WHOLE)
    })?;
    let mut found = Map::new();
    for (name, offset, len_bytes, flags) in [
        ("the whole", 0, WHOLE, 0),
        ("the whole, by PCIe", 0, WHOLE, 1),
        ("64 KiB in it", 1 << 16, 1 << 16, 0),
        ("4 KiB in it", 4096, 4096, 0),
        ("256 bytes in it", 256, 256, 0),
    ] {
        let mut fd = -1_i32;
        // SAFETY: writes one descriptor; a range of the allocation.
        let answer = unsafe {
            sys::cuMemGetHandleForAddressRange(
                (&raw mut fd).cast(),
                memory + offset,
                len_bytes,
                CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                flags,
            )
        };
        if answer == CUresult::CUDA_SUCCESS {
            // SAFETY: given out just now.
            unsafe { libc::close(fd) };
        }
        found.insert(name.into(), json!(format!("{answer:?}")));
    }
    Ok(found.into())
}
