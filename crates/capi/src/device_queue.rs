//! Queues that kernels post to.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;

use crate::argument::{choice, out, out_handle};
use crate::boundary::{call, guard};
use crate::endpoint::doorbell_endpoint;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use crate::work::{doorbell_slice, with_slices};
use doorbell_rs::{DeviceQueue, QueueView};

/// Threads of this process.
pub const DOORBELL_KERNELS_HOST: u32 = 0;
/// Kernels of a GPU.
pub const DOORBELL_KERNELS_CUDA: u32 = 1;

/// A send queue that is lent to kernels.
pub struct doorbell_device_queue {
    inner: DeviceQueue,
}

impl CObject for doorbell_device_queue {
    const NAME: &'static str = "doorbell_device_queue";
}

/// As kernels see it: `include/doorbell/queue.h`.
pub type doorbell_queue_view = QueueView;

/// Local memory, as kernels name it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_local {
    pub addr: u64,
    pub len_bytes: u64,
    pub lkey: u32,
    pub reserved: u32,
}

#[cfg(feature = "cuda")]
fn on_gpu(endpoint: &mut doorbell_rs::Endpoint) -> Result<DeviceQueue, Failure> {
    Ok(DeviceQueue::on_gpu(
        &doorbell_rs::CudaContext::current()?,
        endpoint,
    )?)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_endpoint: &mut doorbell_rs::Endpoint) -> Result<DeviceQueue, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

/// Lends the send queue of an endpoint.
///
/// # Safety
/// As the header says of pointers and handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_queue_create(
    endpoint: *mut doorbell_endpoint,
    kernels: u32,
    queue: *mut *mut doorbell_device_queue,
) -> c_int {
    call!(place = out_handle(queue), endpoint = get(endpoint), || {
        let mut endpoint = endpoint.lock()?;
        let inner = match kernels {
            DOORBELL_KERNELS_HOST => DeviceQueue::new(&mut endpoint)?,
            DOORBELL_KERNELS_CUDA => on_gpu(&mut endpoint)?,
            other => return Err(choice("kernels", other, DOORBELL_KERNELS_CUDA)),
        };
        Ok(place.set(doorbell_device_queue { inner }))
    })
}

/// What kernels need.
///
/// # Safety
/// As the header says of pointers and handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_queue_view(
    queue: *const doorbell_device_queue,
    view: *mut doorbell_queue_view,
    view_bytes: usize,
) -> c_int {
    call!(queue = get(queue), || {
        if view_bytes != size_of::<doorbell_queue_view>() {
            let reason = format!(
                "{view_bytes} is not sizeof(struct doorbell_queue_view), which is {}: the kernels are of another version",
                size_of::<doorbell_queue_view>()
            );
            return Err(Failure::argument("view_bytes", reason));
        }
        // SAFETY: the caller's promise about pointers.
        unsafe { out(view, "view") }?.write(queue.inner.view());
        Ok(0)
    })
}

/// How kernels name local memory.
///
/// # Safety
/// As the header says of pointers and handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_queue_local(
    queue: *const doorbell_device_queue,
    slice: *const doorbell_slice,
    local: *mut doorbell_local,
) -> c_int {
    call!(queue = get(queue), local = out(local), || {
        if slice.is_null() {
            return Err(Failure::null("slice"));
        }
        // SAFETY: the caller's promise about slices.
        unsafe {
            with_slices(slice, 1, |slices| {
                for slice in slices {
                    let (addr, lkey) = queue.inner.local(slice)?;
                    local.write(doorbell_local {
                        addr,
                        len_bytes: slice.len_bytes().into(),
                        lkey,
                        reserved: 0,
                    });
                }
                Ok(0)
            })
        }
    })
}

/// Ends a queue of kernels.
///
/// # Safety
/// As the header says of handles, and no kernel uses the queue any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_queue_destroy(queue: *mut doorbell_device_queue) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(queue, "queue") }.map(|()| 0))
}
