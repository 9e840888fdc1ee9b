//! Which features that programs need a GPU and its driver have.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute};

use super::driver::check;
use crate::Result;

/// Why kernels of a GPU with [`WritesOrdering::None`] cannot wait.
pub(crate) const UNORDERED_WRITES: &str = "the GPU does not see writes of NICs in order (GPU_DIRECT_RDMA_WRITES_ORDERING is NONE), and kernels cannot flush them; \
                 streams can";

/// Whether a GPU sees the writes of a NIC in order (`CUGPUDirectRDMAWritesOrdering`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritesOrdering {
    /// Not without a flush.
    #[default]
    None,
    /// In order, for the GPU that owns the memory.
    Owner,
    /// In order, for every GPU of the system.
    AllDevices,
}

/// Features of a device and its driver, determined with the first handle of the context. Features of streams are tried once, and are absent if that
/// fails: [`CudaContext::findings`](super::CudaContext::findings) has the reason. The others are as the driver reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Capabilities {
    /// Memory operations in streams: 32-bit stores and waits.
    pub memops: bool,
    /// This library's kernels, which replace missing memory operations.
    pub kernels: bool,
    /// Registers of a device, such as a UAR page, can be registered. None: not known, since trying takes such a page.
    pub iomemory: Option<bool>,
    /// 64-bit stores and waits in streams. Without them a stream cannot ring a UAR.
    pub qwords: bool,
    /// Waits for a bit that becomes 0 ([`Condition::Nor`](crate::Condition::Nor)).
    pub nor: bool,
    /// Waits that flush earlier writes of NICs.
    pub flush: bool,
    /// NICs can access the memory of the device.
    pub gpudirect: bool,
    /// Whether writes of NICs are ordered without a flush.
    pub ordering: WritesOrdering,
    /// The memory of the device can be exported as dmabuf.
    pub dmabuf: bool,
    /// Registered host memory has the same address on the device.
    pub host_addresses: bool,
}

/// The result of probing a device.
#[derive(Debug)]
pub(super) struct Probed {
    pub(super) capabilities: Capabilities,
    /// Missing features with the reason, a line each.
    pub(super) findings: Vec<String>,
}

impl Capabilities {
    /// The features that the driver reports. Those of streams are tried after that.
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
