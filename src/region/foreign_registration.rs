//! Memory of other devices, as GPUs: how the NIC may reach it, best way first.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;

use super::memory::{OwnedMemory, REGION_BYTES_MAX};
use crate::nic::Access;
use crate::region::{ProtectionDomain, Region};
use crate::{Error, Result, StateKind};

/// What a region's memory is, and how the device reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionKind {
    /// Memory of this process.
    Host,
    /// Memory of another device that its driver exported as a dmabuf.
    Dmabuf,
    /// Memory of another device, found by its address: the kernel has a module that knows it (nvidia-peermem), or one address space with
    /// that device.
    Peermem,
    /// Memory of another device, which the software NIC has its driver copy.
    Copied,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RegionKind::Host => "host",
            RegionKind::Dmabuf => "dmabuf",
            RegionKind::Peermem => "peermem",
            RegionKind::Copied => "copies of its driver",
        })
    }
}

/// Memory of another device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMemory<'fd> {
    /// What that device calls its first byte; not 0. Work requests and peers name it so.
    pub addr: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The dmabuf that it is part of, and where in that it begins, if its driver exported one.
    pub dmabuf: Option<(BorrowedFd<'fd>, u64)>,
}

/// The result of registering device memory with a NIC; see [`Region::register_with_report`].
#[derive(Debug)]
#[non_exhaustive]
pub struct RegistrationReport {
    /// The memory, registered in the best way there is. `None`: only a [`Bounce`](crate::Bounce) buffer reaches it.
    pub region: Option<Region>,
    /// The better ways that were tried, best first, each with the reason why it failed. A dmabuf is tried as the driver maps it, and then mapped through PCIe.
    pub refused: Vec<(RegionKind, Error)>,
}

impl RegistrationReport {
    /// The region.
    ///
    /// # Errors
    /// [`Error::State`] if there is none, with the reason of each way.
    pub fn into_region(self) -> Result<Region> {
        let RegistrationReport { region, refused } = self;
        region.ok_or_else(|| {
            let reasons: Vec<String> = refused
                .iter()
                .map(|(kind, error)| format!("{kind}: {error}"))
                .collect();
            Error::state(
                StateKind::Unsupported,
                "registration of a GPU's memory",
                format!("{}; a bounce buffer reaches it", reasons.join("; ")),
            )
        })
    }
}

/// The modules that find memory of NVIDIA's by its address: now, and before it came with the driver.
const PEER_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

impl Region {
    /// Registers a part of a dmabuf, whose first byte work requests and peers then name by the address `iova`; not 0. The kernel holds the dmabuf
    /// as long as it is registered. The processor does not reach the memory through the region.
    ///
    /// # Errors
    /// [`Error::Range`] for the length or the address; [`Error::State`] of a device that has none of this; [`Error::System`] of
    /// `ibv_reg_dmabuf_mr`, EOPNOTSUPP where the NIC's driver cannot do it.
    pub fn register_dmabuf(
        domain: &ProtectionDomain,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<Region> {
        Region::by_dmabuf(
            domain,
            (fd, offset),
            len_bytes,
            iova,
            access,
            OwnedMemory::Nothing,
        )
    }

    fn by_dmabuf(
        domain: &ProtectionDomain,
        (fd, offset): (BorrowedFd<'_>, u64),
        len_bytes: u64,
        iova: u64,
        access: Access,
        own: OwnedMemory,
    ) -> Result<Region> {
        let start = device_range(iova, len_bytes)?;
        let on_device = domain.on_device()?;
        let region = on_device.register_dmabuf(fd, offset, len_bytes, iova, access)?;
        Ok(Region::of(
            domain,
            region,
            start,
            len_bytes,
            access,
            RegionKind::Dmabuf,
            own,
        ))
    }

    /// Registers memory of another device by its address. The processor does not reach the memory through the region.
    ///
    /// # Errors
    /// [`Error::Range`] for the length or the address; [`Error::State`] of a device that has none of this, or if the kernel does not know whose memory
    /// it is: it says whether nvidia-peermem is loaded.
    pub fn register_peermem(
        domain: &ProtectionDomain,
        addr: u64,
        len_bytes: u64,
        access: Access,
    ) -> Result<Region> {
        Region::by_peermem(domain, addr, len_bytes, access, OwnedMemory::Nothing)
    }

    fn by_peermem(
        domain: &ProtectionDomain,
        addr: u64,
        len_bytes: u64,
        access: Access,
        own: OwnedMemory,
    ) -> Result<Region> {
        let start = device_range(addr, len_bytes)?;
        let on_device = domain.on_device()?;
        let region = on_device
            .register_peer(start, len_bytes, access)
            .map_err(|error| {
                let Error::System { .. } = error else {
                    return error;
                };
                let loaded = |name: &&str| Path::new("/sys/module").join(name).exists();
                let modules = match PEER_MODULES.iter().find(|name| loaded(name)) {
                    Some(name) => format!("the module {name} is loaded"),
                    None => "the module nvidia_peermem is not loaded".to_owned(),
                };
                Error::state(
                    StateKind::Unsupported,
                    "registration",
                    format!("{len_bytes} bytes of a device at {addr:#x}: {error}; {modules}"),
                )
            })?;
        Ok(Region::of(
            domain,
            region,
            start,
            len_bytes,
            access,
            RegionKind::Peermem,
            own,
        ))
    }

    /// Registers device memory in the best way there is: a dmabuf, peermem. If both are refused, there is no region, and only a
    /// [`Bounce`](crate::Bounce) buffer reaches the memory; the reasons are told either way.
    ///
    /// # Errors
    /// [`Error::Range`] for the length or the address, which no way would take.
    pub fn register_with_report(
        domain: &ProtectionDomain,
        memory: &DeviceMemory<'_>,
        access: Access,
    ) -> Result<RegistrationReport> {
        let DeviceMemory {
            addr,
            len_bytes,
            dmabuf,
        } = *memory;
        let exported = dmabuf.ok_or_else(|| {
            Error::state(
                StateKind::Unsupported,
                "registration",
                "the memory was not exported as a dmabuf",
            )
        });
        Region::try_methods(domain, addr, len_bytes, [exported], access, || {
            OwnedMemory::Nothing
        })
    }

    /// [`Region::register_with_report`] of memory that was exported in these ways, best first, or was not for these reasons; what becomes a region holds
    /// `own`. Of the second way on, only refusals of the NIC are reported: a driver may not know the way.
    pub(super) fn try_methods<F: AsFd>(
        domain: &ProtectionDomain,
        addr: u64,
        len_bytes: u64,
        exports: impl IntoIterator<Item = Result<(F, u64)>>,
        access: Access,
        own: impl Fn() -> OwnedMemory,
    ) -> Result<RegistrationReport> {
        device_range(addr, len_bytes)?;
        let mut refused = Vec::new();
        for export in exports {
            let registered = match export {
                Ok((fd, offset)) => {
                    let dmabuf = (fd.as_fd(), offset);
                    Region::by_dmabuf(domain, dmabuf, len_bytes, addr, access, own())
                }
                Err(_) if !refused.is_empty() => continue,
                Err(error) => Err(error),
            };
            match registered {
                Ok(region) => {
                    let region = Some(region);
                    return Ok(RegistrationReport { region, refused });
                }
                Err(error) => refused.push((RegionKind::Dmabuf, error)),
            }
        }
        let region = Region::by_peermem(domain, addr, len_bytes, access, own())
            .map_err(|error| refused.push((RegionKind::Peermem, error)))
            .ok();
        Ok(RegistrationReport { region, refused })
    }
}

/// The first byte of device memory, as a pointer that nobody follows.
pub(super) fn device_range(addr: u64, len_bytes: u64) -> Result<NonNull<u8>> {
    let range = |argument, value, min, max| {
        Err(Error::Range {
            argument,
            value,
            min,
            max,
        })
    };
    if !(1..=REGION_BYTES_MAX).contains(&len_bytes) {
        return range("len_bytes", len_bytes, 1, REGION_BYTES_MAX);
    }
    let max = u64::MAX - len_bytes;
    match NonNull::new(std::ptr::without_provenance_mut(addr as usize)) {
        Some(start) if addr <= max => Ok(start),
        _ => range("addr", addr, 1, max),
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use super::*;
    use crate::nic::Pages;
    use crate::region::Device;

    /// A region as a card makes it of another device's memory; here the memory is of this process, and the processor keeps away all the same.
    #[test]
    fn the_processor_keeps_away_from_memory_of_other_devices() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let pages = Pages::new(4096).unwrap();
        let start = pages.start();
        let on_device = domain.on_device().unwrap();
        let made = on_device.register(start, 4096, Access::ALL).unwrap();
        let region = Region::of(
            &domain,
            made,
            start,
            4096,
            Access::ALL,
            RegionKind::Peermem,
            OwnedMemory::Pages { _held: pages },
        );
        assert_eq!(region.kind(), RegionKind::Peermem);
        for refused in [
            region.write(0, &[1]),
            region.read(0, &mut [1]),
            region.fill(0, 1, 1),
            region.is_filled_with(0, 1, 1).map(drop),
            region.load_u32(0).map(drop),
            region.store_u32(0, 1),
        ] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::State { .. }), "{error}");
            assert!(
                error
                    .to_string()
                    .contains("cannot access this memory (peermem)"),
                "{error}"
            );
        }
        // The device uses it like any other region.
        assert_eq!(region.remote().addr, start.as_ptr() as u64);
        assert!(region.slice(4000, 96).is_ok());
        assert!(matches!(
            region.slice(4000, 97),
            Err(Error::OutOfBounds { .. })
        ));
        let host = Region::alloc(&domain, 64, Access::ALL).unwrap();
        assert_eq!(host.kind(), RegionKind::Host);
    }
}
