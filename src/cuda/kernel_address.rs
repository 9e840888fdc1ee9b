//! Where kernels and copies find memory.
#![allow(unsafe_code)] // promises that memory stays mapped

use cudarc::driver::sys::CUdeviceptr;

use super::context::CudaContext;
use super::host_registration::HostRegistration;
use crate::stream::KernelMemory;
use crate::{Error, Result, StateKind};

/// The device's address of memory that a kernel uses.
///
/// # Errors
/// [`Error::Cuda`] if the driver does not map it; [`Error::Foreign`] for memory of another context; [`Error::State`] for memory whose address on the GPU is not known.
pub(super) fn kernel_address(
    memory: &KernelMemory<'_>,
    context: &CudaContext,
) -> Result<CUdeviceptr> {
    let start = memory.start;
    if let Some(key) = memory.context.filter(|key| *key != context.key()) {
        return Err(Error::Foreign {
            argument: "slices",
            found: format!("memory of CUDA context {key}"),
            expected: format!(
                "memory of CUDA context {}, that of the stream",
                context.key()
            ),
        });
    }
    let Some(attachments) = memory.attachments else {
        if memory.context.is_none() {
            return Err(Error::state(
                StateKind::Memory,
                "use memory on a CUDA stream",
                "the address of the region's memory on the GPU is not known; register it by `Region::register_device`",
            ));
        }
        return Ok((start.as_ptr().addr() as u64).wrapping_add(memory.offset));
    };
    // SAFETY: who keeps the attachments drops them before the memory, by the contract of `Owner::attachments`.
    let pinned = unsafe { HostRegistration::of(attachments, context, start, memory.len_bytes) }?;
    Ok(pinned
        .device_address(start.as_ptr().addr())
        .wrapping_add(memory.offset))
}
