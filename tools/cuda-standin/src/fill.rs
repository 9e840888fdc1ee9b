//! Filling memory with a value.

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::call::{CUresult, CudaResult, cuda, valid};
use crate::capture;
use crate::graph::NodeWork;
use crate::life::ContextLife;
use crate::memory::{self, BlockKind};
use crate::stream::Stream;
use crate::streams;
use crate::task::{Task, node_type};

/// Rows of elements of 1, 2 or 4 bytes.
#[derive(Clone)]
pub struct Fill {
    to: u64,
    element: [u8; 4],
    element_len: usize,
    /// In elements.
    width: u64,
    height: u64,
    /// In bytes; only where there are more rows than one.
    pitch: u64,
}

impl Fill {
    /// Checked as a call checks its arguments.
    pub fn new(
        to: u64,
        value: u32,
        element_len: u32,
        width: u64,
        height: u64,
        pitch: u64,
    ) -> CudaResult<Fill> {
        valid(matches!(element_len, 1 | 2 | 4) && to.is_multiple_of(u64::from(element_len)))?;
        valid(value as u64 >> (8 * element_len) == 0)?;
        let row = width
            .checked_mul(u64::from(element_len))
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        valid(height <= 1 || (pitch >= row && pitch.is_multiple_of(u64::from(element_len))))?;
        let fill = Fill {
            to,
            element: value.to_le_bytes(),
            element_len: element_len as usize,
            width,
            height,
            pitch,
        };
        for line in [0, height.saturating_sub(1)] {
            let at = to.wrapping_add(line.wrapping_mul(pitch));
            memory::device_place(at, row).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        }
        Ok(fill)
    }
}

impl Task for Fill {
    fn run(&self, _life: &ContextLife) -> CudaResult {
        let len = self.width as usize * self.element_len;
        for row in 0..self.height {
            let (at, len_bytes) = (self.to + row * self.pitch, len as u64);
            let place = memory::device_place(at, len_bytes)
                .ok_or_else(|| memory::illegal("a fill", at, len_bytes))?;
            for at in 0..len {
                // SAFETY: within the place, which keeps device memory alive; host memory is the program's to keep.
                unsafe {
                    ((place.address as usize + at) as *mut u8)
                        .write_volatile(self.element[at % self.element_len])
                };
            }
        }
        Ok(())
    }

    fn node_type(&self) -> u32 {
        node_type::FILL
    }
}

/// In a stream; or, without one, in the default stream: then host memory has been written when the call returns.
fn fill(
    stream: Option<&Arc<Stream>>,
    to: u64,
    value: u32,
    element_len: u32,
    count: usize,
) -> CudaResult {
    let legacy = streams::find(std::ptr::null_mut())?;
    if count == 0 {
        return Ok(());
    }
    let fill = Fill::new(to, value, element_len, count as u64, 1, 0)?;
    match stream {
        Some(stream) => capture::queue(stream, NodeWork::of(fill)),
        None if memory::find(to).is_some_and(|block| block.kind == BlockKind::Device) => {
            capture::queue(&legacy, NodeWork::of(fill))
        }
        None => {
            capture::check_default(&legacy)?;
            capture::check_safe()?;
            legacy.submit_and_wait(Arc::new(fill))
        }
    }
}

cuda! {
    fn cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize) {
        fill(None, to, value.into(), 1, count)
    }

    fn cuMemsetD16_v2(to: CUdeviceptr, value: u16, count: usize) {
        fill(None, to, value.into(), 2, count)
    }

    fn cuMemsetD32_v2(to: CUdeviceptr, value: u32, count: usize) {
        fill(None, to, value, 4, count)
    }

    fn cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream) {
        fill(Some(&streams::find(stream)?), to, value.into(), 1, count)
    }

    fn cuMemsetD16Async(to: CUdeviceptr, value: u16, count: usize, stream: CUstream) {
        fill(Some(&streams::find(stream)?), to, value.into(), 2, count)
    }

    fn cuMemsetD32Async(to: CUdeviceptr, value: u32, count: usize, stream: CUstream) {
        fill(Some(&streams::find(stream)?), to, value, 4, count)
    }
}
