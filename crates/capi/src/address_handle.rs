//! Address handles: where sends of UD endpoints go.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;

use crate::argument::{choice, out_handle};
use crate::boundary::{call, guard};
use crate::endpoint::{doorbell_address, doorbell_endpoint, read_address};
use crate::handle::get;
use crate::handle::{CObject, destroy};
use doorbell_rs::AddressHandle;

/// A port that datagrams go to.
pub struct doorbell_address_handle {
    pub(super) inner: AddressHandle,
}

impl CObject for doorbell_address_handle {
    const NAME: &'static str = "doorbell_address_handle";
}

/// Makes the handle of a peer's port.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_handle_create(
    endpoint: *const doorbell_endpoint,
    peer: *const doorbell_address,
    handle: *mut *mut doorbell_address_handle,
) -> c_int {
    call!(place = out_handle(handle), endpoint = get(endpoint), || {
        // SAFETY: the caller's promise: null or an address, which is bytes.
        let peer = unsafe { read_address(peer, "peer") }?;
        let inner = endpoint.lock()?.address_handle(&peer)?;
        Ok(place.set(doorbell_address_handle { inner }))
    })
}

/// Makes the handle of a port.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_handle_create_for_port(
    endpoint: *const doorbell_endpoint,
    lid: u32,
    gid: *const u8,
    handle: *mut *mut doorbell_address_handle,
) -> c_int {
    call!(place = out_handle(handle), endpoint = get(endpoint), || {
        let lid = u16::try_from(lid).map_err(|_| choice("lid", lid, u16::MAX.into()))?;
        // SAFETY: the caller's promise: null or 16 bytes.
        let gid = unsafe { gid.cast::<[u8; 16]>().as_ref() };
        let inner = endpoint.lock()?.address_handle_of_port(lid, gid.copied())?;
        Ok(place.set(doorbell_address_handle { inner }))
    })
}

/// Destroys an address handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_handle_destroy(
    handle: *mut doorbell_address_handle,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(handle, "handle") }.map(|()| 0))
}
