//! Nodes of graphs, made from their parameters: checked as the calls that add them do.

use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMSET_NODE_PARAMS, CUcontext,
};

use crate::call::{CUresult, CudaResult, In, valid};
use crate::context::{self, Context};
use crate::copy::{Copy, CopySide, Plane};
use crate::current;
use crate::fill::Fill;
use crate::graph::{MemopWords, NodeWork};
use crate::memop::{self, Memops};
use crate::module::Launch;
use crate::task::HostCallback;

/// CUDA_BATCH_MEM_OP_NODE_PARAMS, with the operations as words: what comes from C need not be a value of their enumeration.
#[derive(Clone, std::marker::Copy)]
#[repr(C)]
pub struct BatchParams {
    pub context: CUcontext,
    pub count: u32,
    pub params: *const MemopWords,
    pub flags: u32,
}

/// CUDA_MEMCPY3D as words, for the same reason.
pub type BoxParams = [u64; 25];

fn context(handle: CUcontext) -> CudaResult<Arc<Context>> {
    let context = context::find(handle).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    context.life.check()?;
    Ok(context)
}

pub fn kernel(params: &In<CUDA_KERNEL_NODE_PARAMS_v2>) -> CudaResult<NodeWork> {
    let params = params.get()?;
    if !params.kern.is_null() || !params.extra.is_null() {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let context = if params.ctx.is_null() {
        current::context()?
    } else {
        context(params.ctx)?
    };
    let launch = Launch::new(
        &context,
        params.func,
        [params.gridDimX, params.gridDimY, params.gridDimZ],
        [params.blockDimX, params.blockDimY, params.blockDimZ],
        params.sharedMemBytes,
        &In::at(params.kernelParams.cast()),
    );
    // Functions of graphs know no wrong handles.
    let launch = launch.map_err(|error| match error {
        CUresult::CUDA_ERROR_INVALID_HANDLE => CUresult::CUDA_ERROR_INVALID_VALUE,
        other => other,
    })?;
    Ok(NodeWork::of(launch))
}

pub fn copy(params: &In<BoxParams>, ctx: CUcontext) -> CudaResult<NodeWork> {
    context(ctx)?;
    let words = params.get()?;
    // One side: its offsets, kind, addresses and pitches begin at `base`.
    let plane = |base: usize| {
        let kind = words[base + 4] as u32;
        let pitch = words[base + 9];
        let slice = words[base + 10].wrapping_mul(pitch);
        let (side, address) = match kind {
            1 => (CopySide::Host, words[base + 5]),
            2 => (CopySide::Device, words[base + 6]),
            4 => (CopySide::Any, words[base + 6]),
            // Arrays: there are none.
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        let offset =
            words[base] + words[base + 1].wrapping_mul(pitch) + words[base + 2].wrapping_mul(slice);
        Ok(Plane {
            side,
            address: address.wrapping_add(offset),
            pitch,
            slice,
        })
    };
    let copy = Copy::of_box(plane(11)?, plane(0)?, [words[22], words[23], words[24]])?;
    Ok(NodeWork::of(copy))
}

pub fn fill(params: &In<CUDA_MEMSET_NODE_PARAMS>, ctx: CUcontext) -> CudaResult<NodeWork> {
    context(ctx)?;
    let params = params.get()?;
    valid(params.width > 0 && params.height > 0)?;
    let fill = Fill::new(
        params.dst,
        params.value,
        params.elementSize,
        params.width as u64,
        params.height as u64,
        params.pitch as u64,
    )?;
    Ok(NodeWork::of(fill))
}

pub fn host(params: &In<CUDA_HOST_NODE_PARAMS>) -> CudaResult<NodeWork> {
    let params = params.get()?;
    let function = params.fn_.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    Ok(NodeWork::of(HostCallback {
        function,
        argument: params.userData,
    }))
}

pub fn batch(params: &In<BatchParams>) -> CudaResult<NodeWork> {
    let params = params.get()?;
    valid(params.flags == 0)?;
    let context = context(params.context)?;
    let (words, memops) =
        memop::parse_all(context.device, params.count, &In::at(params.params.cast()))?;
    Ok(NodeWork::Memops {
        context: params.context as u64,
        words,
        task: Arc::new(Memops(memops)),
    })
}

/// Whether an instantiated node may go from the one to the other: the kind stays, and of memory operations all but the address, the
/// value and the condition (cuGraphExecBatchMemOpNodeSetParams); a kernel stays in its context.
pub fn check_change(from: &NodeWork, to: &NodeWork) -> CudaResult {
    valid(from.kind() == to.kind())?;
    match (from, to) {
        (
            NodeWork::Memops { context, words, .. },
            NodeWork::Memops {
                context: next_context,
                words: next,
                ..
            },
        ) => {
            let same = |(one, other): (&MemopWords, &MemopWords)| {
                let is_barrier = matches!(one[0] as u32, 3 | 6);
                one[0] as u32 == other[0] as u32
                    && (!is_barrier || one[0] == other[0])
                    && (is_barrier || (one[3] ^ other[3]) & u64::from(memop::FLUSH) == 0)
            };
            valid(
                context == next_context
                    && words.len() == next.len()
                    && words.iter().zip(next).all(same),
            )
        }
        _ => {
            let context = |work: &NodeWork| work.task().and_then(|task| task.context());
            valid(context(from) == context(to))
        }
    }
}
