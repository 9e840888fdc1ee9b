//! Devices of libibverbs, and their protection domains. Their queue pairs are those of `mlx5.rs` or of `relay.rs`.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Driver;
use super::domain::Deregister;
use super::mlx5::Mlx5QueuePair;
use super::relay::RelayQueuePair;
use super::{Access, Capacity, Nic, NicDomain, NicQueuePair, RegisteredMemory};
use crate::{Result, verbs};

pub(super) const DRIVER: Driver = Driver {
    list: verbs::VerbsDevice::list,
    open: |name, gpu| {
        let device = verbs::VerbsDevice::open_near(name, gpu)?;
        Ok(device.map(|device| Arc::new(VerbsNic(device)) as Arc<dyn Nic>))
    },
};

#[derive(Debug)]
struct VerbsNic(verbs::VerbsDevice);

impl Nic for VerbsNic {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn domain(&self) -> Result<Arc<dyn NicDomain>> {
        let domain = Arc::new(verbs::Domain::new(&self.0)?);
        Ok(Arc::new(VerbsDomain(domain)))
    }
}

#[derive(Debug)]
struct VerbsDomain(Arc<verbs::Domain>);

impl NicDomain for VerbsDomain {
    fn number(&self) -> u32 {
        self.0.number()
    }

    fn queue_pair(&self, capacity: &Capacity) -> Result<Box<dyn NicQueuePair>> {
        Ok(if self.0.is_plain() {
            Box::new(RelayQueuePair::new(&self.0, capacity)?)
        } else {
            Box::new(Mlx5QueuePair::new(&self.0, capacity)?)
        })
    }

    fn register(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<RegisteredMemory> {
        verbs::MemoryRegion::new(&self.0, start, len_bytes, access).map(registered)
    }

    fn register_peer(
        &self,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<RegisteredMemory> {
        self.register(start, len_bytes, access)
    }

    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<RegisteredMemory> {
        verbs::MemoryRegion::dmabuf(&self.0, fd, offset, len_bytes, iova, access).map(registered)
    }
}

fn registered(region: verbs::MemoryRegion) -> RegisteredMemory {
    RegisteredMemory::new(region.lkey(), region.rkey(), region)
}

impl Deregister for verbs::MemoryRegion {
    fn deregister(&self) -> bool {
        verbs::MemoryRegion::deregister(self)
    }
}
