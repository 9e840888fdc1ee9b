//! The address handles of a domain that work requests of relays name.
#![allow(unsafe_code)] // calls libibverbs

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::adopted::KeptAlive;
use super::call::release;
use crate::mlx5::Datagram;

/// An `ibv_ah`. Those who have it hold its domain.
#[derive(Debug)]
pub(super) struct RawAddressHandle {
    ah: NonNull<rdma_sys::ibv_ah>,
    /// Set for one that was made elsewhere, and is destroyed there.
    adopted: Option<KeptAlive>,
}

// SAFETY: it is handed to calls of libibverbs, which any thread may make.
unsafe impl Send for RawAddressHandle {}
// SAFETY: as above.
unsafe impl Sync for RawAddressHandle {}

impl RawAddressHandle {
    /// Destroys it in the end, unless it is adopted.
    pub(super) fn new(
        ah: NonNull<rdma_sys::ibv_ah>,
        adopted: Option<KeptAlive>,
    ) -> RawAddressHandle {
        RawAddressHandle { ah, adopted }
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_ah> {
        self.ah
    }

    /// Its address, for a request of plain verbs.
    pub(super) fn address(&self) -> u64 {
        self.ah.as_ptr().expose_provenance() as u64
    }
}

impl Drop for RawAddressHandle {
    fn drop(&mut self) {
        if self.adopted.is_some() {
            return;
        }
        // SAFETY: made for this, destroyed once, before its domain.
        release("ibv_destroy_ah", || unsafe {
            rdma_sys::ibv_destroy_ah(self.ah.as_ptr())
        });
    }
}

/// Handles by numbers that are never used again. A work request in a ring has no pointer, so one that names a handle which is gone is refused.
#[derive(Debug, Default)]
pub(super) struct AddressTable {
    handles: Mutex<HashMap<u64, Weak<RawAddressHandle>>>,
    last: AtomicU64,
}

impl AddressTable {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<RawAddressHandle>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a handle: its number.
    pub(super) fn enter(&self, handle: &Arc<RawAddressHandle>) -> u64 {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.lock().insert(number, Arc::downgrade(handle));
        number
    }

    pub(super) fn remove(&self, number: u64) {
        self.lock().remove(&number);
    }

    /// The handle of the number that a datagram segment has.
    pub(super) fn find(&self, datagram: &Datagram) -> Option<Arc<RawAddressHandle>> {
        let number = datagram
            .gid
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes))?;
        self.lock().get(&number)?.upgrade()
    }
}
