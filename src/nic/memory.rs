//! Memory registered with a device.
#![allow(unsafe_code)] // the software NIC accesses what is registered

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::Domain;
#[cfg(feature = "verbs")]
use crate::verbs;
use crate::{Error, Result};
use doorbell_softcx::device::{self as soft, Access};
#[cfg(feature = "cuda")]
use doorbell_softcx::device::{Foothold, Foreign};

/// A registration; it ends with this, if [`MemoryRegion::deregister`] did not end it before.
#[derive(Debug)]
pub(crate) enum MemoryRegion {
    Soft {
        device: soft::Device,
        key: u32,
    },
    /// Memory that the software NIC has copied by its owner.
    #[cfg(feature = "cuda")]
    Copied {
        device: soft::Device,
        key: u32,
        _foothold: Foothold,
    },
    #[cfg(feature = "verbs")]
    Verbs(verbs::MemoryRegion),
}

/// The software NIC loads and stores; of another device's memory it knows by what copies it.
fn only_mapped(what: &str) -> Error {
    Error::State {
        operation: "registration",
        reason: format!("softcx reaches memory that its process has mapped, and not {what}"),
    }
}

impl MemoryRegion {
    /// Registers memory, which the caller keeps valid until the registration ends.
    pub(crate) fn new(
        domain: &Domain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        match domain {
            Domain::Soft { device, number } => {
                // SAFETY: the caller's promise.
                let key = unsafe { device.register(*number, start.as_ptr(), len_bytes, access) }?;
                Ok(MemoryRegion::Soft {
                    device: device.clone(),
                    key,
                })
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) => {
                verbs::MemoryRegion::new(domain, start, len_bytes, access).map(MemoryRegion::Verbs)
            }
        }
    }

    /// Registers memory of another device, which `memory` copies; `None` for a NIC that reaches such memory by itself or not at all. The
    /// caller keeps the memory until the registration ends.
    #[cfg(feature = "cuda")]
    pub(crate) fn copied(
        domain: &Domain,
        memory: &Arc<dyn Foreign>,
        addr: u64,
        len_bytes: u64,
        access: Access,
    ) -> Option<Result<MemoryRegion>> {
        match domain {
            Domain::Soft { device, number } => {
                let foothold = Foothold::new(memory);
                // SAFETY: the caller's promise.
                let key =
                    unsafe { device.register_foreign(*number, &foothold, addr, len_bytes, access) };
                Some(key.map_err(Into::into).map(|key| MemoryRegion::Copied {
                    device: device.clone(),
                    key,
                    _foothold: foothold,
                }))
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(_) => None,
        }
    }

    /// Registers a part of a dmabuf under an address.
    pub(crate) fn dmabuf(
        domain: &Domain,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        match domain {
            Domain::Soft { .. } => {
                let _ = (fd, offset, len_bytes, iova, access);
                Err(only_mapped("a dmabuf"))
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) => {
                verbs::MemoryRegion::dmabuf(domain, fd, offset, len_bytes, iova, access)
                    .map(MemoryRegion::Verbs)
            }
        }
    }

    /// Registers memory by an address of another device's. A card's driver asks the kernel's modules whose it is.
    pub(crate) fn peer(
        domain: &Domain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        match domain {
            Domain::Soft { .. } => {
                let _ = (start, len_bytes, access);
                Err(only_mapped("memory of another device"))
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(_) => MemoryRegion::new(domain, start, len_bytes, access),
        }
    }

    /// The key by which this side's work requests name the memory.
    pub(crate) fn lkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft { key, .. } => *key,
            #[cfg(feature = "cuda")]
            MemoryRegion::Copied { key, .. } => *key,
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.lkey(),
        }
    }

    /// The key by which peers name it.
    pub(crate) fn rkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft { key, .. } => *key,
            #[cfg(feature = "cuda")]
            MemoryRegion::Copied { key, .. } => *key,
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.rkey(),
        }
    }

    /// Takes the memory from the device: once this has returned, it does not touch it. Whether the device still had it; the caller sees
    /// to it that there is one such call.
    pub(crate) fn deregister(&self) -> bool {
        match self {
            MemoryRegion::Soft { device, key } => device.deregister(*key),
            #[cfg(feature = "cuda")]
            MemoryRegion::Copied { device, key, .. } => device.deregister(*key),
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.deregister(),
        }
    }
}
