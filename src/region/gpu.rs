//! Memory of a GPU in regions, and access of a GPU to regions.
#![allow(unsafe_code)] // promises the driver that memory stays mapped

#[cfg(feature = "softcx")]
use std::sync::Arc;

use super::doorbell_probe::try_ring;
use super::foreign_registration::{RegionKind, RegistrationReport, device_range};
use super::memory::OwnedMemory;
use crate::cuda::{
    Capabilities, CudaContext, DeviceBuffer, DmabufMapping, HostRegistration, RegistersFound,
    WritesOrdering, check_registers,
};
#[cfg(feature = "softcx")]
use crate::nic::Foreign;
use crate::nic::{Access, NicQueuePair, Queues};
use crate::region::{ProtectionDomain, Region};
use crate::{Error, Result, StateKind};

impl Region {
    /// Registers memory of a GPU, in the best way that is available; work requests and peers name it by its address on the device. The
    /// region keeps the buffer.
    ///
    /// - With `softcx`, the GPU's copy engines copy it, on a separate stream that waits for no other ([`RegionKind::Copied`]). A completion comes
    ///   when its copies are over. An atomic operation is a read and a write: atomic towards other operations of the same device, as a card's
    ///   without PCIe atomics, and not towards kernels. If a copy fails, for example because the context is gone, the work request fails, and
    ///   [`DeviceBuffer::copy_failure`] tells why.
    /// - Any other device accesses it directly, by dmabuf or peermem: [`Region::register_with_report`].
    ///
    /// Calls by which the CPU accesses the region, such as [`Region::read`], fail.
    ///
    /// # Errors
    /// [`Error::State`] if no way is left, with the reason of each; if `access` lets a device write memory whose GPU does not see the writes
    /// of NICs in order and cannot flush them. A [`Bounce`](crate::Bounce) buffer with a
    /// [`CudaEngine`](crate::bounce::CudaEngine) reaches the memory then.
    pub fn register_device(
        domain: &ProtectionDomain,
        memory: &DeviceBuffer,
        access: Access,
    ) -> Result<Region> {
        Region::register_device_with_report(domain, memory, access)?.into_region()
    }

    /// The address by which kernels of that context reach the first byte of host memory, for its words above all. With the first call for a
    /// context the memory is registered with the driver, until the region is gone.
    ///
    /// # Errors
    /// [`Error::State`] if it is not host memory: memory of a GPU has a device address already. [`Error::Cuda`] if the driver does not map the
    /// memory.
    pub fn device_address(&self, context: &CudaContext) -> Result<u64> {
        self.check_host()?;
        let len_bytes = usize::try_from(self.len_bytes()).unwrap_or(usize::MAX);
        // SAFETY: the memory of the region, which drops its attachments before it.
        let pinned =
            unsafe { HostRegistration::of(self.attachments(), context, self.start(), len_bytes) }?;
        Ok(pinned.device_address(self.start().as_ptr().addr()))
    }

    /// The context of memory of a GPU, if it is known.
    pub(crate) fn cuda_context(&self) -> Option<&CudaContext> {
        match self.own() {
            OwnedMemory::Device { held } => Some(held.context()),
            _ => None,
        }
    }

    /// [`DeviceBuffer::copy_failure`] of the buffer that the region keeps. `None`, too, for memory that is not [`RegionKind::Copied`].
    #[must_use]
    pub fn copy_failure(&self) -> Option<Error> {
        match self.own() {
            OwnedMemory::Device { held } if self.kind() == RegionKind::Copied => {
                held.copy_failure()
            }
            _ => None,
        }
    }

    /// As [`Region::register_device`], with the reason why each better way was not possible. If no way is possible, that is not an error here.
    ///
    /// # Errors
    /// Those of a device that writes to memory of a GPU which would not see it.
    pub fn register_device_with_report(
        domain: &ProtectionDomain,
        memory: &DeviceBuffer,
        access: Access,
    ) -> Result<RegistrationReport> {
        let (addr, len_bytes) = (memory.ptr(), memory.len_bytes());
        device_range(addr, len_bytes)?;
        let own = || OwnedMemory::Device {
            held: memory.clone().held(),
        };
        #[cfg(feature = "softcx")]
        if let Some(region) = Region::copied(domain, memory, access)? {
            return Ok(RegistrationReport {
                region: Some(region),
                refused: Vec::new(),
            });
        }
        check_visible(memory.context().capabilities(), access)?;
        let exports = [DmabufMapping::Usual, DmabufMapping::Pcie]
            .into_iter()
            .map(|mapping| memory.dmabuf(mapping));
        Region::try_methods(domain, addr, len_bytes, exports, access, own)
    }

    /// Registers memory of a GPU with a device that has it copied; `None` for any other device.
    #[cfg(feature = "softcx")]
    fn copied(
        domain: &ProtectionDomain,
        memory: &DeviceBuffer,
        access: Access,
    ) -> Result<Option<Region>> {
        let (addr, len_bytes) = (memory.ptr(), memory.len_bytes());
        let start = device_range(addr, len_bytes)?;
        let copier: Arc<dyn Foreign> = memory.copier().clone();
        let on_device = domain.on_device()?;
        let Some(made) = on_device.register_copied(&copier, addr, len_bytes, access) else {
            return Ok(None);
        };
        let own = OwnedMemory::Device {
            held: memory.clone().held(),
        };
        // Neither a flush nor an order of writes has a part in this: the copies are the GPU's own, and over before the completion is there.
        let region = Region::of(
            domain,
            made?,
            start,
            len_bytes,
            access,
            RegionKind::Copied,
            own,
        );
        Ok(Some(region))
    }
}

/// Fails if a NIC is to write what work of the GPU would not be sure to see: a completion in host memory may overtake the data on its way into
/// the GPU, where neither the GPU keeps the order nor a stream's wait flushes.
fn check_visible(gpu: &Capabilities, access: Access) -> Result<()> {
    let refuse = |reason: &str| {
        Err(Error::state(
            StateKind::Unsupported,
            "registration of a GPU's memory",
            format!("{reason}; a bounce buffer reaches it"),
        ))
    };
    if !gpu.gpudirect {
        return refuse("the GPU lets no NIC reach its memory (GPU_DIRECT_RDMA_SUPPORTED is 0)");
    }
    let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let is_written = access.bits() & writes.bits() != 0;
    if is_written && gpu.ordering == WritesOrdering::None && !gpu.flush {
        return refuse(
            "a NIC is to write it, and the GPU neither sees writes of NICs in order (GPU_DIRECT_RDMA_WRITES_ORDERING is NONE) nor flushes \
             them in a stream (CAN_FLUSH_REMOTE_WRITES is 0): completions might overtake their data; without the rights to write it can be sent",
        );
    }
    Ok(())
}

/// Fails with the reason if the GPU that this process uses could not ring the queue pair's doorbell. The result is the
/// registration of the registers, if this tried one.
///
/// # Safety
/// The returned registration is dropped before `qp`.
pub(crate) unsafe fn check_gpus(
    domain: &ProtectionDomain,
    qp: &dyn NicQueuePair,
) -> std::result::Result<RegistersFound, String> {
    let Some(device) = qp.uar_mapping() else {
        return Ok(RegistersFound::default());
    };
    let Queues::Mlx5(memory) = qp.queues();
    let (start, len_bytes) = (memory.uar[0].addr(), memory.uar_bytes as usize);
    // SAFETY: the registers are mapped as long as the queue pair lives.
    unsafe {
        check_registers(
            domain.device().name(),
            device,
            start,
            len_bytes,
            |context| try_ring(domain, context),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_writes_only_where_the_gpu_sees_it() {
        let all = |flush, ordering, gpudirect| {
            let mut gpu = Capabilities::default();
            (gpu.flush, gpu.ordering, gpu.gpudirect) = (flush, ordering, gpudirect);
            gpu
        };
        let reads = [Access::REMOTE_READ, Access::LOCAL_READ];
        let writes = [
            Access::LOCAL_WRITE,
            Access::REMOTE_WRITE,
            Access::REMOTE_ATOMIC,
            Access::ALL,
        ];
        let enough = [
            all(true, WritesOrdering::None, true),
            all(false, WritesOrdering::Owner, true),
            all(false, WritesOrdering::AllDevices, true),
        ];
        for gpu in enough {
            for access in writes.into_iter().chain(reads) {
                check_visible(&gpu, access).unwrap();
            }
        }
        let blind = all(false, WritesOrdering::None, true);
        for access in reads {
            check_visible(&blind, access).unwrap();
        }
        for access in writes {
            let error = check_visible(&blind, access).unwrap_err().to_string();
            assert!(
                error.contains("overtake") && error.contains("bounce"),
                "{error}"
            );
        }
        let apart = all(true, WritesOrdering::AllDevices, false);
        let error = check_visible(&apart, Access::REMOTE_READ).unwrap_err();
        assert!(error.to_string().contains("no NIC"), "{error}");
    }
}
