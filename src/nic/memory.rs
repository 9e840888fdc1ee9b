//! Memory registered with a device.

use std::ptr::NonNull;

use super::Domain;
use crate::Result;
use crate::soft::{self, Access};
#[cfg(feature = "verbs")]
use crate::verbs;

/// A registration; it ends with this, if [`MemoryRegion::deregister`] did not end it before.
#[derive(Debug)]
pub(crate) enum MemoryRegion {
    Soft {
        device: soft::Device,
        key: u32,
    },
    #[cfg(feature = "verbs")]
    Verbs(verbs::MemoryRegion),
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
            Domain::Soft { device, number } => Ok(MemoryRegion::Soft {
                device: device.clone(),
                key: device.register(*number, start.as_ptr() as usize, len_bytes, access)?,
            }),
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) => {
                verbs::MemoryRegion::new(domain, start, len_bytes, access).map(MemoryRegion::Verbs)
            }
        }
    }

    /// The key by which this side's work requests name the memory.
    pub(crate) fn lkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft { key, .. } => *key,
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.lkey(),
        }
    }

    /// The key by which peers name it.
    pub(crate) fn rkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft { key, .. } => *key,
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.rkey(),
        }
    }

    /// Takes the memory from the device: once this has returned, it does not touch it. Whether the device still had it; the caller sees
    /// to it that there is one such call.
    pub(crate) fn deregister(&self) -> bool {
        match self {
            MemoryRegion::Soft { device, key } => device.deregister(*key),
            #[cfg(feature = "verbs")]
            MemoryRegion::Verbs(region) => region.deregister(),
        }
    }
}
