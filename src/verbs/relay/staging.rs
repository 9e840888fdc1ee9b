//! Memory for inline payloads: a slot for each request in flight.
#![allow(unsafe_code)] // memory that a device reads

use std::sync::Arc;

use crate::Result;
use crate::verbs::domain::{Domain, MemoryRegion};
use doorbell_wire::memory::Pages;
use doorbell_wire::verbs::Access;

/// A provider that takes inline payloads copies them when they are posted; another one is given the slot by its key, and the device reads
/// it as long as the request is in flight. So the same call works on both.
#[derive(Debug)]
pub(super) struct Staging {
    slots: Option<Slots>,
    /// How much of a payload the provider takes itself.
    pub(super) inline_bytes: u32,
}

#[derive(Debug)]
struct Slots {
    /// First: it ends before the memory.
    _region: Option<MemoryRegion>,
    lkey: Option<u32>,
    pages: Pages,
    bytes_each: usize,
    /// Positions run round at 2^32, so slots are a power of two.
    count: u32,
}

/// Where an inline payload went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Staged {
    pub(super) addr: u64,
    /// `None`: only for a provider that copies it.
    pub(super) lkey: Option<u32>,
}

impl Staging {
    /// A slot of `bytes_each` for each of `count` requests, or more. With a domain they are registered.
    ///
    /// # Errors
    /// [`crate::Error::System`] for memory, or of `ibv_reg_mr`.
    pub(super) fn new(
        domain: Option<&Arc<Domain>>,
        count: u32,
        bytes_each: u32,
        inline_bytes: u32,
    ) -> Result<Staging> {
        if bytes_each == 0 {
            return Ok(Staging {
                slots: None,
                inline_bytes,
            });
        }
        // On cache lines of their own: the device reads one while the next is written.
        let bytes_each = (bytes_each as usize).next_multiple_of(64);
        let count = count.next_power_of_two();
        let pages = Pages::new(bytes_each * count as usize)?;
        let region = match domain {
            Some(domain) => Some(MemoryRegion::new(
                domain,
                pages.start(),
                pages.len_bytes() as u64,
                Access::LOCAL_WRITE,
            )?),
            None => None,
        };
        Ok(Staging {
            slots: Some(Slots {
                lkey: region.as_ref().map(MemoryRegion::lkey),
                _region: region,
                pages,
                bytes_each,
                count,
            }),
            inline_bytes,
        })
    }

    /// As if it were registered under that key.
    #[cfg(test)]
    pub(super) fn set_key(&mut self, lkey: u32) {
        if let Some(slots) = &mut self.slots {
            slots.lkey = Some(lkey);
        }
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.slots
            .as_ref()
            .map_or(0, |slots| slots.pages.len_bytes())
    }

    /// Copies bytes to `offset` in the slot of a position. `None` if they do not fit.
    pub(super) fn put(&mut self, position: u32, offset: usize, bytes: &[u8]) -> Option<Staged> {
        let slots = self.slots.as_mut()?;
        if offset + bytes.len() > slots.bytes_each {
            return None;
        }
        let start = (position & (slots.count - 1)) as usize * slots.bytes_each + offset;
        let at = slots.pages.at(start);
        // SAFETY: within the slot, which the device is done with: its position had another request before, and that is over. IgnoreEvents else
        // has the address.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Some(Staged {
            addr: at.addr() as u64,
            lkey: slots.lkey,
        })
    }
}
