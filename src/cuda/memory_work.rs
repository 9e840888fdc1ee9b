//! Copies and reductions of memory between the programs of a stream.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUdeviceptr, CUstream};

use super::context::CudaContext;
use super::driver::check;
use super::kernel_address::kernel_address;
use super::kernel_reduction::{COPY, KernelReduction};
use crate::Result;
use crate::stream::{KernelMemory, MemoryWork};

/// A call of the driver that works on memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MemoryCall {
    Copy {
        into: CUdeviceptr,
        from: CUdeviceptr,
        len_bytes: u64,
    },
    Reduce(KernelReduction),
}

impl MemoryCall {
    /// The call for that work in a context.
    ///
    /// # Errors
    /// As [`kernel_address`].
    pub(super) fn of(work: &MemoryWork<'_>, context: &CudaContext) -> Result<MemoryCall> {
        let locate = |memory| kernel_address(memory, context);
        let is_host = |memory: &KernelMemory<'_>| memory.attachments.is_some();
        Ok(match work {
            // The driver's copy would block its caller until the stream comes to it, and the calls of other threads.
            MemoryWork::Copy {
                into,
                from,
                len_bytes,
            } if is_host(into) && is_host(from) => MemoryCall::Reduce(KernelReduction {
                into: locate(into)?,
                first: locate(from)?,
                second: 0,
                len_bytes: *len_bytes,
                data: COPY.0,
                op: COPY.1,
                count: 0,
                reserved: 0,
            }),
            MemoryWork::Copy {
                into,
                from,
                len_bytes,
            } => MemoryCall::Copy {
                into: locate(into)?,
                from: locate(from)?,
                len_bytes: *len_bytes,
            },
            MemoryWork::Reduce {
                into,
                first,
                second,
                len_bytes,
                data,
                op,
                count,
            } => MemoryCall::Reduce(KernelReduction {
                into: locate(into)?,
                first: locate(first)?,
                second: second.as_ref().map_or(Ok(0), locate)?,
                len_bytes: *len_bytes,
                data: *data,
                op: *op,
                count: *count,
                reserved: 0,
            }),
        })
    }

    /// Queues it on a stream of the context, which is current.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    /// The memory stays until the stream is done with it.
    pub(super) unsafe fn give(&self, stream: CUstream, context: &CudaContext) -> Result<()> {
        match self {
            // A copy engine does this, not the kernels' processors.
            MemoryCall::Copy {
                into,
                from,
                len_bytes,
            } => {
                // SAFETY: by this function's contract.
                let queued =
                    unsafe { sys::cuMemcpyAsync(*into, *from, *len_bytes as usize, stream) };
                check("cuMemcpyAsync", queued)
            }
            MemoryCall::Reduce(reduction) => {
                let launch = context.module()?.reduce(reduction);
                // SAFETY: as above.
                unsafe { launch.queue(stream) }
            }
        }
    }
}
