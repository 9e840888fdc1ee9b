//! Where the sends of UD endpoints go.
#![cfg_attr(feature = "verbs", allow(unsafe_code))] // takes the address of an object of C

#[cfg(feature = "verbs")]
use std::any::Any;
#[cfg(feature = "verbs")]
use std::ffi::c_void;
#[cfg(feature = "verbs")]
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(feature = "verbs")]
use crate::Result;
use crate::mlx5::DatagramSegment;
#[cfg(feature = "verbs")]
use crate::nic::KeptAlive;
use crate::nic::NicAddress;
use crate::region::ProtectionDomain;

/// An address handle: the port that sends of a UD endpoint go to, as [`Work::to`](crate::Work::to) takes it. Verbs call it `ibv_ah`.
///
/// It belongs to a protection domain, and any UD endpoint of that domain can use it. Work in flight holds it. Clones are handles of the same one.
#[derive(Debug, Clone)]
pub struct AddressHandle {
    inner: Arc<AddressHandleInner>,
}

#[derive(Debug)]
struct AddressHandleInner {
    /// Before the domain that it is of.
    nic: NicAddress,
    domain: ProtectionDomain,
}

impl AddressHandle {
    pub(super) fn new(domain: &ProtectionDomain, nic: NicAddress) -> AddressHandle {
        AddressHandle {
            inner: Arc::new(AddressHandleInner {
                nic,
                domain: domain.clone(),
            }),
        }
    }

    /// Uses an `ibv_ah` that another part of the process has made (feature `verbs`). The library does not destroy it. `owner` is dropped after the last work
    /// request that names it has completed.
    ///
    /// # Safety
    /// `ah` is the address of an `ibv_ah`, which exists until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) if it is of another `ibv_context` than the domain; [`Error::State`](crate::Error::State) if the device is not one
    /// of libibverbs.
    #[cfg(feature = "verbs")]
    pub unsafe fn from_ibv_ah(
        domain: &ProtectionDomain,
        ah: NonNull<c_void>,
        owner: impl Any + Send + Sync,
    ) -> Result<AddressHandle> {
        // SAFETY: the caller's promise.
        let nic = unsafe { domain.on_device()?.adopt_address(ah, KeptAlive::new(owner)) }?;
        Ok(AddressHandle::new(domain, nic))
    }

    /// The protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner.domain
    }

    /// Whether it is the same handle, and not only one of the same port.
    #[inline]
    pub(super) fn is(&self, other: &AddressHandle) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(super) fn segment(&self, qpn: u32, qkey: u32) -> DatagramSegment {
        self.inner.nic.segment(qpn, qkey)
    }
}
