//! Copies between memories of the host and of devices.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUstream};

use crate::call::{CUresult, CudaResult, cuda, valid};
use crate::capture;
use crate::graph::NodeWork;
use crate::held;
use crate::life::ContextLife;
use crate::memory::{self, BlockKind, Place};
use crate::stream::Stream;
use crate::streams;
use crate::task::{Task, node_type};

/// What a side of a copy may be.
#[derive(Clone, std::marker::Copy, PartialEq, Eq)]
pub enum CopySide {
    Host,
    Device,
    /// Found out from the address.
    Any,
}

#[derive(Clone)]
enum CopySource {
    Address(u64),
    /// Pageable memory, read when the call was made.
    Staged(Arc<[u8]>),
}

/// One side of a copy: where it begins, and how far its rows and slices are apart.
pub struct Plane {
    pub side: CopySide,
    pub address: u64,
    pub pitch: u64,
    pub slice: u64,
}

/// A box of bytes: rows of `width`, in slices of `height` rows.
#[derive(Clone)]
pub struct Copy {
    to: u64,
    from: CopySource,
    width: u64,
    height: u64,
    depth: u64,
    to_pitch: u64,
    from_pitch: u64,
    to_slice: u64,
    from_slice: u64,
    /// It stands for a write of a NIC, which may be held back.
    is_nic: bool,
}

/// Memory at an address as one side of a copy; none if there is nothing.
fn place(side: CopySide, address: u64, len: u64) -> Option<Place> {
    match side {
        CopySide::Device => memory::device_place(address, len),
        CopySide::Host => memory::host_place(address, len),
        CopySide::Any => memory::any_place(address, len),
    }
}

fn is_pageable(side: CopySide, address: u64) -> bool {
    side != CopySide::Device
        && memory::find(address).is_none()
        && memory::find_host(address).is_none()
}

impl Copy {
    /// One row, checked as a call checks its arguments.
    pub fn of_row(to: (CopySide, u64), from: (CopySide, u64), len: u64) -> CudaResult<Copy> {
        let plane = |(side, address)| Plane {
            side,
            address,
            pitch: len,
            slice: len,
        };
        Copy::of_box(plane(to), plane(from), [len, 1, 1])
    }

    /// Rows of `size[0]` bytes, `size[1]` of them in each of `size[2]` slices.
    pub fn of_box(to: Plane, from: Plane, size: [u64; 3]) -> CudaResult<Copy> {
        let [width, height, depth] = size;
        valid(
            width > 0
                && height > 0
                && depth > 0
                && width < 1 << 48
                && height < 1 << 32
                && depth < 1 << 32,
        )?;
        for plane in [&to, &from] {
            valid(height == 1 || plane.pitch >= width)?;
            valid(depth == 1 || plane.slice >= plane.pitch)?;
            let last = (depth - 1).checked_mul(plane.slice);
            let last =
                last.and_then(|last| (height - 1).checked_mul(plane.pitch)?.checked_add(last));
            let len = last
                .and_then(|last| last.checked_add(width))
                .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            place(plane.side, plane.address, len).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        }
        Ok(Copy {
            to: to.address,
            from: CopySource::Address(from.address),
            width,
            height,
            depth,
            to_pitch: to.pitch,
            from_pitch: from.pitch,
            to_slice: to.slice,
            from_slice: from.slice,
            is_nic: held::is_nic(),
        })
    }

    /// Reads a row now, for a copy that is done later.
    fn stage(&mut self) {
        if let CopySource::Address(address) = self.from {
            let mut bytes = vec![0u8; self.width as usize];
            // SAFETY: memory of the program, which answers for its length; the vector is as long.
            unsafe {
                libc::memcpy(
                    bytes.as_mut_ptr().cast(),
                    address as *const c_void,
                    bytes.len(),
                )
            };
            self.from = CopySource::Staged(bytes.into());
        }
    }

    fn run_row(&self, to: u64, from_offset: u64) -> CudaResult {
        let reach = |address| {
            let place = memory::any_place(address, self.width);
            place.ok_or_else(|| memory::illegal("a copy", address, self.width))
        };
        if self.is_nic
            && is_device(to)
            && let CopySource::Address(address) = self.from
        {
            // What is read may be held itself.
            if is_device(address) {
                held::release();
            }
            let from = reach(address + from_offset)?;
            let mut bytes = vec![0; self.width as usize];
            // SAFETY: as below.
            unsafe {
                libc::memcpy(
                    bytes.as_mut_ptr().cast(),
                    from.address as *const c_void,
                    bytes.len(),
                )
            };
            held::hold(move || {
                // Memory that was freed meanwhile takes nothing.
                let Some(place) = memory::any_place(to, bytes.len() as u64) else {
                    return;
                };
                // SAFETY: device memory of that length, which the place keeps alive.
                unsafe {
                    libc::memcpy(
                        place.address as *mut c_void,
                        bytes.as_ptr().cast(),
                        bytes.len(),
                    )
                };
            });
            return Ok(());
        }
        let to = reach(to)?;
        let len = self.width as usize;
        match &self.from {
            CopySource::Address(address) => {
                let from = reach(address + from_offset)?;
                // SAFETY: device memory that the places keep alive, or memory of the program, which answers for it.
                unsafe {
                    libc::memmove(
                        to.address as *mut c_void,
                        from.address as *const c_void,
                        len,
                    )
                };
            }
            // SAFETY: as above; the staged bytes are `width` long.
            CopySource::Staged(bytes) => unsafe {
                libc::memcpy(
                    to.address as *mut c_void,
                    bytes.as_ptr().cast(),
                    len.min(bytes.len()),
                );
            },
        }
        Ok(())
    }
}

impl Task for Copy {
    fn run(&self, _life: &ContextLife) -> CudaResult {
        for slice in 0..self.depth {
            for row in 0..self.height {
                self.run_row(
                    self.to + slice * self.to_slice + row * self.to_pitch,
                    slice * self.from_slice + row * self.from_pitch,
                )?;
            }
        }
        Ok(())
    }

    fn node_type(&self) -> u32 {
        node_type::COPY
    }
}

/// Whether synchronous operations on this memory are to be so in all cases (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS).
fn syncs(address: u64) -> bool {
    memory::find(address).is_some_and(|block| block.sync_memops.load(Ordering::Relaxed))
}

fn is_device(address: u64) -> bool {
    memory::find(address).is_some_and(|block| block.kind == BlockKind::Device)
}

/// A copy that the call waits for, as far as the driver does: not between device memories, and from pageable memory only until it
/// has been read.
fn copy_now(to: (CopySide, u64), from: (CopySide, u64), len: usize) -> CudaResult {
    let legacy = streams::find(std::ptr::null_mut())?;
    capture::check_default(&legacy)?;
    capture::check_safe()?;
    if len == 0 {
        return Ok(());
    }
    let mut copy = Copy::of_row(to, from, len as u64)?;
    let syncs = syncs(to.1) || syncs(from.1);
    let from_pageable = is_pageable(from.0, from.1) && is_device(to.1);
    if from_pageable {
        legacy.wait_for(legacy.submitted());
        copy.stage();
    }
    if !syncs && (from_pageable || (is_device(to.1) && is_device(from.1))) {
        legacy.submit(Arc::new(copy))?;
        return Ok(());
    }
    legacy.submit_and_wait(Arc::new(copy))
}

/// A copy in a stream. Pageable memory makes it wait: for its own end where it is written, and it is read before the call returns.
fn copy_in(
    stream: &Arc<Stream>,
    to: (CopySide, u64),
    from: (CopySide, u64),
    len: usize,
) -> CudaResult {
    if len == 0 {
        return Ok(());
    }
    let mut copy = Copy::of_row(to, from, len as u64)?;
    if stream.capture().is_some() {
        return capture::queue(stream, NodeWork::of(copy));
    }
    capture::check_default(stream)?;
    if !is_device(to.1) && !is_device(from.1) {
        // "For transfers from any host memory to any host memory, the function is fully synchronous with respect to the host" (driver API, API synchronization
        // behavior). Seen on an H200 of driver 580: two threads that copy between registered memories, each on a stream that waits for work of the
        // other thread, block each other. So the call has the driver's lock.
        return stream.submit_and_wait_alone(Arc::new(copy));
    }
    if is_pageable(to.0, to.1) {
        return stream.submit_and_wait(Arc::new(copy));
    }
    if is_pageable(from.0, from.1) {
        copy.stage();
    }
    stream.submit(Arc::new(copy))?;
    Ok(())
}

cuda! {
    fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, len: usize) {
        copy_now((CopySide::Any, to), (CopySide::Any, from), len)
    }

    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, len: usize) {
        copy_now((CopySide::Device, to), (CopySide::Host, from as u64), len)
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, len: usize) {
        copy_now((CopySide::Host, to as u64), (CopySide::Device, from), len)
    }

    fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize) {
        copy_now((CopySide::Device, to), (CopySide::Device, from), len)
    }

    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) {
        copy_in(&streams::find(stream)?, (CopySide::Any, to), (CopySide::Any, from), len)
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream) {
        copy_in(&streams::find(stream)?, (CopySide::Device, to), (CopySide::Host, from as u64), len)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream) {
        copy_in(&streams::find(stream)?, (CopySide::Host, to as u64), (CopySide::Device, from), len)
    }

    // Between devices or on one; the contexts are those of the memory.
    fn cuMemcpyPeerAsync(to: CUdeviceptr, to_ctx: CUcontext, from: CUdeviceptr, from_ctx: CUcontext, len: usize, stream: CUstream) {
        for (address, ctx) in [(to, to_ctx), (from, from_ctx)] {
            let block = memory::find(address).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            if block.context.handle != ctx as u64 {
                return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            }
        }
        copy_in(&streams::find(stream)?, (CopySide::Device, to), (CopySide::Device, from), len)
    }

    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) {
        copy_in(&streams::find(stream)?, (CopySide::Device, to), (CopySide::Device, from), len)
    }
}
