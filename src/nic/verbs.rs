//! Devices of libibverbs, and their protection domains. Their queue pairs are those of `mlx5.rs` or of `relay.rs`.
#![allow(unsafe_code)] // passes on promises about adopted objects

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Driver;
use super::domain::Deregister;
use super::mlx5::Mlx5QueuePair;
use super::relay::RelayQueuePair;
use super::{
    Access, Attributes, Capacity, KeptAlive, MemoryKeys, Nic, NicAddress, NicDomain, NicQueuePair,
    PeerQueuePair, RegisteredMemory,
};
use crate::{Result, verbs};

pub(super) const DRIVER: Driver = Driver {
    list: verbs::VerbsDevice::list,
    open: |name, gpu| {
        let device = verbs::VerbsDevice::open_near(name, gpu)?;
        Ok(device.map(|device| Arc::new(VerbsNic(device)) as Arc<dyn Nic>))
    },
};

/// Uses an `ibv_context` that was opened elsewhere, as [`verbs::VerbsDevice::adopt`].
///
/// # Safety
/// As there.
///
/// # Errors
/// As there.
pub(crate) unsafe fn adopt(
    context: NonNull<c_void>,
    settings: &str,
    reads_events: bool,
    owner: KeptAlive,
) -> Result<Arc<dyn Nic>> {
    // SAFETY: the caller's promise.
    let device = unsafe { verbs::VerbsDevice::adopt(context, settings, reads_events, owner) }?;
    Ok(Arc::new(VerbsNic(device)))
}

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

    unsafe fn adopt_domain(
        &self,
        pd: NonNull<c_void>,
        owner: KeptAlive,
    ) -> Result<Arc<dyn NicDomain>> {
        // SAFETY: the caller's promise.
        let domain = unsafe { verbs::Domain::adopt(&self.0, pd, owner) }?;
        Ok(Arc::new(VerbsDomain(Arc::new(domain))))
    }

    fn report_event(&self, kind: u32, object: usize) {
        self.0.report_event(kind, object);
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

    fn address_of(&self, peer: &PeerQueuePair, attributes: &Attributes) -> Result<NicAddress> {
        let port = peer.verbs()?.port;
        self.addressed(verbs::VerbsAddressHandle::new(&self.0, &port, attributes)?)
    }

    fn address_of_port(
        &self,
        lid: u16,
        gid: Option<[u8; 16]>,
        attributes: &Attributes,
    ) -> Result<NicAddress> {
        self.addressed(verbs::VerbsAddressHandle::create(
            &self.0, lid, gid, attributes,
        )?)
    }

    unsafe fn adopt_address(&self, ah: NonNull<c_void>, owner: KeptAlive) -> Result<NicAddress> {
        // SAFETY: the caller's promise.
        self.addressed(unsafe { verbs::VerbsAddressHandle::adopt(&self.0, ah, owner) }?)
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

    unsafe fn adopted_keys(&self, mr: NonNull<c_void>) -> Result<MemoryKeys> {
        // SAFETY: the caller's promise.
        unsafe { verbs::AdoptedMemory::keys(&self.0, mr) }
    }

    fn adopt_memory(&self, keys: MemoryKeys, owner: KeptAlive) -> Result<RegisteredMemory> {
        let memory = verbs::AdoptedMemory::new(&self.0, owner);
        Ok(RegisteredMemory::new(keys.lkey, keys.rkey, memory))
    }
}

impl VerbsDomain {
    /// WQEs of a card have the address vector of libmlx5, those of a relay the number of the handle.
    fn addressed(&self, handle: verbs::VerbsAddressHandle) -> Result<NicAddress> {
        if self.0.is_plain() {
            let tabled = verbs::TabledAddress::new(handle);
            Ok(NicAddress::new(tabled.segment(), tabled))
        } else {
            Ok(NicAddress::new(handle.vector()?, handle))
        }
    }
}

fn registered(region: verbs::MemoryRegion) -> RegisteredMemory {
    RegisteredMemory::new(region.lkey(), region.rkey(), region)
}

impl Deregister for verbs::MemoryRegion {
    fn deregister(&self) -> Result<bool> {
        verbs::MemoryRegion::deregister(self)
    }
}

impl Deregister for verbs::AdoptedMemory {
    /// The registration stays, because it is not the library's to end.
    fn deregister(&self) -> Result<bool> {
        Ok(true)
    }
}
