//! What a GPU and its driver can do of what programs need.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute};

use super::driver::check;
use crate::Result;

/// In what order the GPU sees the writes of a NIC (`CUflushGPUDirectRDMAWritesOptions`, `CUGPUDirectRDMAWritesOrdering`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritesOrdering {
    /// Not by itself.
    #[default]
    None,
    /// In order, for the GPU that owns the memory.
    Owner,
    /// In order, for every GPU of the system.
    AllDevices,
}

/// What a device and its driver can do, found out when the context was first asked for. What streams need was done once, on a stream of its
/// own; what was promised and failed is not there, and [`CudaContext::findings`](super::CudaContext::findings) has the reason. The rest is
/// what the driver says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Capabilities {
    /// Memory operations in streams: stores and waits of 32 bits.
    pub memops: bool,
    /// This library's kernels: loaded, and executed once. They take the place of what memory operations lack.
    pub kernels: bool,
    /// Memory of devices, as the page of a UAR, can be registered. None: not known, since it takes such a page to try.
    pub iomemory: Option<bool>,
    /// 64-bit stores and waits in streams. Without them a stream cannot ring a UAR.
    pub qwords: bool,
    /// Waits for a bit that becomes 0, which every second lap of a completion queue needs.
    pub nor: bool,
    /// Waits that flush the writes of NICs which came before.
    pub flush: bool,
    /// NICs can reach the memory of the device at all.
    pub gpudirect: bool,
    /// What order writes of NICs have without a flush.
    pub ordering: WritesOrdering,
    /// The memory of the device can be exported as dmabuf.
    pub dmabuf: bool,
    /// Registered host memory has the same address on the device.
    pub host_addresses: bool,
}

/// What was found.
#[derive(Debug)]
pub(super) struct Probed {
    pub(super) capabilities: Capabilities,
    /// What is not there, and why.
    pub(super) findings: Vec<String>,
}

impl Capabilities {
    /// What the driver says: promises, as far as streams are concerned.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn promised(device: CUdevice) -> Result<Capabilities> {
        use CUdevice_attribute as Attribute;
        let ask = |attribute| -> Result<i32> {
            let mut value = 0;
            // SAFETY: writes one int.
            check("cuDeviceGetAttribute", unsafe {
                sys::cuDeviceGetAttribute(&mut value, attribute, device)
            })?;
            Ok(value)
        };
        let has = |attribute| ask(attribute).map(|value| value != 0);
        Ok(Capabilities {
            // No attribute is about those of the second version.
            memops: true,
            kernels: true,
            iomemory: None,
            qwords: has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)?,
            nor: has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR)?,
            flush: has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)?,
            gpudirect: has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
            ordering: match ask(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)? {
                200.. => WritesOrdering::AllDevices,
                100.. => WritesOrdering::Owner,
                _ => WritesOrdering::None,
            },
            dmabuf: has(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
            host_addresses: has(
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            )?,
        })
    }
}
