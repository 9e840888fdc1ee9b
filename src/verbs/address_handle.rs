//! Address handles: the ports that datagrams go to.
#![allow(unsafe_code)] // calls libibverbs

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use doorbell_dv_sys::DOORBELL_DV_AV_BYTES;

use super::address_table::RawAddressHandle;
use super::adopted::KeptAlive;
use super::call::{object, status};
use super::domain::Domain;
use super::port::PortAddress;
use super::qp_states::{HOP_LIMIT, needs_global_route};
use crate::mlx5::{Datagram, DatagramSegment};
use crate::{Error, Result};
use doorbell_wire::verbs::Attributes;

const _: () = assert!(DOORBELL_DV_AV_BYTES as usize == Datagram::BYTES);

/// An `ibv_ah` with the domain that it is of.
#[derive(Debug)]
pub(crate) struct VerbsAddressHandle {
    /// Before the domain.
    raw: Arc<RawAddressHandle>,
    domain: Arc<Domain>,
}

impl VerbsAddressHandle {
    /// The handle of a peer's port. Of `attributes` it has the traffic class and the service level.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_create_ah`.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        remote: &PortAddress,
        attributes: &Attributes,
    ) -> Result<VerbsAddressHandle> {
        let mut own_gid = None;
        let own = domain.context.address(&mut own_gid);
        let is_global = domain.context.port.needs_global_route || needs_global_route(&own, remote);
        VerbsAddressHandle::create(
            domain,
            remote.lid,
            is_global.then_some(remote.gid),
            attributes,
        )
    }

    /// The handle of the port of that LID, and, with a global route, of that GID.
    ///
    /// # Errors
    /// As [`VerbsAddressHandle::new`].
    pub(crate) fn create(
        domain: &Arc<Domain>,
        lid: u16,
        gid: Option<[u8; 16]>,
        attributes: &Attributes,
    ) -> Result<VerbsAddressHandle> {
        let context = &domain.context;
        // SAFETY: plain numbers and arrays of them, for which zero is a value.
        let mut attr: rdma_sys::ibv_ah_attr = unsafe { std::mem::zeroed() };
        attr.port_num = context.port.number;
        attr.dlid = lid;
        attr.sl = attributes.service_level;
        let mut own_gid = None;
        if let Some(gid) = gid {
            context.address(&mut own_gid);
            attr.is_global = 1;
            attr.grh.dgid.raw = gid;
            attr.grh.hop_limit = HOP_LIMIT;
            attr.grh.traffic_class = attributes.traffic_class;
        }
        let ah = loop {
            let used = own_gid;
            attr.grh.sgid_index = used.map_or(0, |gid| gid.index);
            // SAFETY: a live domain, which the handle holds, and attributes that are filled in.
            let made = object("ibv_create_ah", || unsafe {
                rdma_sys::ibv_create_ah(domain.raw().as_ptr(), &raw mut attr)
            });
            let error = match made {
                Ok(ah) => break ah,
                Err(error) => error,
            };
            // Once more if the address has moved meanwhile.
            if used.is_some() {
                context.address(&mut own_gid);
            }
            if own_gid == used {
                return Err(error);
            }
        };
        Ok(VerbsAddressHandle {
            raw: Arc::new(RawAddressHandle::new(ah, None)),
            domain: Arc::clone(domain),
        })
    }

    /// Uses a handle that was made elsewhere.
    ///
    /// # Safety
    /// It is an `ibv_ah`, and stays one until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is of another context than the domain.
    pub(crate) unsafe fn adopt(
        domain: &Arc<Domain>,
        ah: NonNull<c_void>,
        owner: KeptAlive,
    ) -> Result<VerbsAddressHandle> {
        let ah = ah.cast::<rdma_sys::ibv_ah>();
        // SAFETY: the caller's promise.
        let of = unsafe { doorbell_dv_sys::doorbell_dv_ah_context(ah.as_ptr()) };
        if of != domain.context.raw().as_ptr() {
            return Err(Error::Foreign {
                argument: "ah",
                found: format!("an address handle of the context {of:p}"),
                expected: format!("one of the context {:p}", domain.context.raw()),
            });
        }
        Ok(VerbsAddressHandle {
            raw: Arc::new(RawAddressHandle::new(ah, Some(owner))),
            domain: Arc::clone(domain),
        })
    }

    /// The address vector that libmlx5 has made.
    ///
    /// # Errors
    /// [`Error::System`] of `mlx5dv_init_obj`.
    pub(crate) fn vector(&self) -> Result<DatagramSegment> {
        let mut bytes = [0; Datagram::BYTES];
        // SAFETY: a live handle of the provider mlx5, and room for the vector.
        status("mlx5dv_init_obj", || unsafe {
            doorbell_dv_sys::doorbell_dv_address_vector(self.raw.raw().as_ptr(), bytes.as_mut_ptr())
        })?;
        Ok(DatagramSegment::from_bytes(&bytes))
    }
}

/// A handle in the table of its domain, until it is dropped.
#[derive(Debug)]
pub(crate) struct TabledAddress {
    number: u64,
    handle: VerbsAddressHandle,
}

impl TabledAddress {
    pub(crate) fn new(handle: VerbsAddressHandle) -> TabledAddress {
        TabledAddress {
            number: handle.domain.addresses.enter(&handle.raw),
            handle,
        }
    }

    /// The datagram segment by which the relay finds it.
    pub(crate) fn segment(&self) -> DatagramSegment {
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&self.number.to_le_bytes());
        let datagram = Datagram {
            gid,
            ..Datagram::default()
        };
        datagram.segment()
    }
}

impl Drop for TabledAddress {
    fn drop(&mut self) {
        self.handle.domain.addresses.remove(self.number);
    }
}
