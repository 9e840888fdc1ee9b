//! Pages whose numbers a kernel finds in memory.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;

use crate::argument::{VersionedStruct, read_struct, write_struct};
use crate::boundary::guard;
use crate::endpoint::doorbell_endpoint;
#[cfg(not(feature = "cuda"))]
use crate::failure::Failure;
use crate::handle::get;
use crate::region::{doorbell_region, doorbell_remote};
use crate::stream::doorbell_stream;
use crate::ticket::{doorbell_ticket, ticket_place};
use crate::work::doorbell_slice;
#[cfg(feature = "cuda")]
use crate::work::with_slices;
#[cfg(feature = "cuda")]
use doorbell_rs::{PagePush, RemoteSlice};

/// What is pushed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_page_push {
    pub struct_size: u32,
    pub page_bytes: u32,
    pub local: doorbell_slice,
    pub table: doorbell_slice,
    pub count_region: *const doorbell_region,
    pub count_offset: u64,
    pub remote: doorbell_remote,
    pub signal: doorbell_remote,
}

const NO_SLICE: doorbell_slice = doorbell_slice {
    region: std::ptr::null(),
    offset: 0,
    len_bytes: 0,
};
const NO_REMOTE: doorbell_remote = doorbell_remote {
    addr: 0,
    len_bytes: 0,
    rkey: 0,
    reserved: 0,
};

// SAFETY: repr(C), integers and pointers without padding, any bytes of which are values, and the size first.
unsafe impl VersionedStruct for doorbell_page_push {
    const BYTES_FIRST: usize = 8 + 2 * 24 + 16 + 2 * 24;

    fn defaults() -> doorbell_page_push {
        doorbell_page_push {
            struct_size: size_of::<doorbell_page_push>() as u32,
            page_bytes: 0,
            local: NO_SLICE,
            table: NO_SLICE,
            count_region: std::ptr::null(),
            count_offset: 0,
            remote: NO_REMOTE,
            signal: NO_REMOTE,
        }
    }
}

const _: () = assert!(size_of::<doorbell_page_push>() == doorbell_page_push::BYTES_FIRST);

/// Fills in what is pushed with nothing.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_page_push_init(
    push: *mut doorbell_page_push,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let none = doorbell_page_push::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(none, push, struct_size, "push") }
    })
}

/// Queues a push of pages.
///
/// # Safety
/// As the header says of pointers and handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_push_pages(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    push: *const doorbell_page_push,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and structs.
        let (place, stream, endpoint, given) = unsafe {
            let place = ticket_place(ticket);
            let (stream, endpoint) = (get(stream, "stream")?, get(endpoint, "endpoint")?);
            (place, stream, endpoint, read_struct(push, "push")?)
        };
        #[cfg(feature = "cuda")]
        {
            let remote = |remote: doorbell_remote| {
                RemoteSlice::new(remote.addr, remote.rkey, remote.len_bytes)
            };
            // SAFETY: the caller's promise about handles.
            let count = unsafe { get(given.count_region, "push.count_region") }?;
            // SAFETY: the caller's promise about handles.
            let local = unsafe { get(given.local.region, "push.local.region") }?;
            let local = (local.inner).span(given.local.offset, given.local.len_bytes)?;
            let mut endpoint = endpoint.lock()?;
            let push = |slices: &[doorbell_rs::Slice<'_>]| {
                let push = PagePush {
                    page_bytes: given.page_bytes,
                    local,
                    table: slices[0],
                    count: (&count.inner, given.count_offset),
                    remote: remote(given.remote),
                    signal: remote(given.signal),
                };
                Ok(endpoint.stream_push_pages(stream.executor(), &push)?)
            };
            // SAFETY: the caller's promise about handles.
            let ticket = unsafe { with_slices(&raw const given.table, 1, push) }?;
            Ok(place.set(ticket))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (place, stream, endpoint, given);
            Err(Failure::Feature { feature: "cuda" })
        }
    })
}
