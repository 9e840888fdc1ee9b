//! Devices: how many, what they are called, what they can do.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute_enum as A, CUuuid};

use crate::call::{CUresult, CudaResult, Out, always, cuda, set_initialized, valid};
use crate::fault;
use crate::settings::settings;

const NAME: &CStr = c"doorbell's CUDA stand-in, no GPU";
pub const FLUSH_WRITES_OPTIONS: u32 =
    A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as u32;

/// CUDA_ERROR_INVALID_DEVICE if this is not a device.
pub fn check(device: CUdevice) -> CudaResult {
    if (0..settings().devices).contains(&device) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }
}

/// What a device can do, as one that has what the settings do not take away; 0 where there is no such attribute.
pub fn attribute(device: CUdevice, number: u32) -> i32 {
    value(device, number).unwrap_or(0)
}

fn value(device: CUdevice, number: u32) -> Option<i32> {
    let settings = settings();
    let has = |what: &str| i32::from(!settings.lacks(what));
    let has_both = |one: &str, two: &str| has(one) & has(two);
    let is = |attribute: A| number == attribute as u32;
    // An H200's where there is no reason for another.
    let plain: &[(A, i32)] = &[
        (A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, i32::MAX),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535),
        (A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152),
        (A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536),
        (A::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (A::CU_DEVICE_ATTRIBUTE_MAX_PITCH, i32::MAX),
        (A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536),
        (A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_000_000),
        (A::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
        (A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1),
        (A::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT, 0),
        (A::CU_DEVICE_ATTRIBUTE_INTEGRATED, 0),
        (A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0),
        (A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
        (A::CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1),
        (A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0),
        (A::CU_DEVICE_ATTRIBUTE_TCC_DRIVER, 0),
        (A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1_000_000),
        (A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 64),
        (A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20),
        (A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048),
        (A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
        (A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        (A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0xffff),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
        (A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
        (A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
        (A::CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD, 0),
        (A::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, 0),
        (A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0),
        (A::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1),
        (A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 0),
        (
            A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            0,
        ),
        (
            A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            0,
        ),
        (A::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 0),
        (A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0),
        (
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            0,
        ),
        (A::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 0),
        (A::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0),
    ];
    if let Some((_, value)) = plain.iter().find(|(attribute, _)| is(*attribute)) {
        return Some(*value);
    }
    Some(if is(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        device
    } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
        has("samepointer")
    } else if is(A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) {
        has("hostregister")
    } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1) {
        // The first version of the calls is off unless the driver is configured otherwise.
        0
    } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
        || is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1)
    {
        has_both("memops", "memops64")
    } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR)
        || is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1)
    {
        has_both("memops", "nor")
    } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) {
        has_both("memops", "flush")
    } else if is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) {
        has("gdr")
    } else if is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) {
        // HOST 1, MEMOPS 2.
        has("gdr") * (1 | (has_both("memops", "flush") << 1))
    } else if is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
        // ALL_DEVICES, or NONE.
        200 * has_both("gdr", "ordering")
    } else if is(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
        i32::from(settings.has("dmabuf") || settings.has("dmabuf-pcie"))
    } else {
        return None;
    })
}

/// `domain:bus:device.function`; the domain is one that no machine has.
fn bus_id(device: CUdevice) -> String {
    format!("ffff:{device:02x}:00.0")
}

/// Into a buffer of C, which cuts what is longer.
fn put_text(to: &Out<c_char>, len: i32, text: &[u8]) -> CudaResult {
    valid(!to.is_null() && len > 0)?;
    let kept = text.len().min(len as usize - 1);
    let mut bytes: Vec<c_char> = text[..kept].iter().map(|byte| *byte as c_char).collect();
    bytes.push(0);
    to.put_all(&bytes);
    Ok(())
}

/// No device unless the environment asks for the stand-in: a program that loads it by mistake gets an error.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cuInit(flags: u32) -> CUresult {
    fault::start();
    always("cuInit", || {
        valid(flags == 0)?;
        if !settings().enabled || settings().devices <= 0 {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        set_initialized();
        Ok(())
    })
}

#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cuDriverGetVersion(version: Out<i32>) -> CUresult {
    always("cuDriverGetVersion", || version.put(settings().driver))
}

cuda! {
    fn cuDeviceGetCount(count: Out<i32>) {
        count.put(settings().devices)
    }

    fn cuDeviceGet(device: Out<CUdevice>, ordinal: i32) {
        valid(!device.is_null())?;
        check(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<c_char>, len: i32, dev: CUdevice) {
        check(dev)?;
        put_text(&name, len, NAME.to_bytes())
    }

    fn cuDeviceGetUuid(uuid: Out<CUuuid>, dev: CUdevice) {
        put_uuid(&uuid, dev)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, dev: CUdevice) {
        put_uuid(&uuid, dev)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, dev: CUdevice) {
        check(dev)?;
        bytes.put(settings().memory_bytes as usize)
    }

    fn cuDeviceGetAttribute(pi: Out<i32>, attribute: u32, dev: CUdevice) {
        valid(!pi.is_null())?;
        check(dev)?;
        pi.put(value(dev, attribute).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?)
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, dev: CUdevice) {
        check(dev)?;
        major.put(9)?;
        minor.put(0)
    }

    fn cuDeviceGetPCIBusId(id: Out<c_char>, len: i32, dev: CUdevice) {
        check(dev)?;
        put_text(&id, len, bus_id(dev).as_bytes())
    }

    fn cuDeviceGetByPCIBusId(dev: Out<CUdevice>, id: *const c_char) {
        valid(!id.is_null())?;
        // SAFETY: the caller gave a string.
        let id = unsafe { CStr::from_ptr(id) }.to_bytes().to_ascii_lowercase();
        let found = (0..settings().devices).find(|device| bus_id(*device).as_bytes() == id);
        dev.put(found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, dev: CUdevice, peer: CUdevice) {
        check(dev)?;
        check(peer)?;
        can.put(0)
    }
}

fn put_uuid(uuid: &Out<CUuuid>, dev: CUdevice) -> CudaResult {
    check(dev)?;
    let mut bytes = *b"cuda-standin---\0";
    bytes[15] = dev as u8;
    uuid.put(CUuuid {
        bytes: bytes.map(|byte| byte as c_char),
    })
}
