//! Each thread's stack of contexts, and the calls that move it.

use std::cell::RefCell;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice};

use crate::call::{CUresult, CudaResult, Out, cuda};
use crate::context::{self, Context};

thread_local! {
    /// Handles, not contexts: one that is destroyed stays current, and is found to be destroyed.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

fn top() -> Option<u64> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// The context that is current to this thread, whatever its state.
pub fn any() -> CudaResult<Arc<Context>> {
    let handle = top().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    context::find(handle as CUcontext).ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
}

/// The context that is current to this thread, if it can be used: it neither is destroyed nor had an error that it keeps.
pub fn context() -> CudaResult<Arc<Context>> {
    let context = any()?;
    context.life.check()?;
    Ok(context)
}

/// A destroyed context is popped from the thread that destroys it, if it is the current one.
pub fn pop_destroyed(handle: u64) {
    STACK.with_borrow_mut(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    });
}

pub fn push(handle: u64) {
    STACK.with_borrow_mut(|stack| stack.push(handle));
}

cuda! {
    fn cuCtxPushCurrent_v2(ctx: CUcontext) {
        context::find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        push(ctx as u64);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(pctx: Out<CUcontext>) {
        let popped = STACK.with_borrow_mut(Vec::pop);
        let handle = popped.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        pctx.put_if_wanted(handle as CUcontext);
        Ok(())
    }

    // Replaces the top; null pops it.
    fn cuCtxSetCurrent(ctx: CUcontext) {
        if !ctx.is_null() {
            context::find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if !ctx.is_null() {
                stack.push(ctx as u64);
            }
        });
        Ok(())
    }

    // No context is no error: the value is null.
    fn cuCtxGetCurrent(pctx: Out<CUcontext>) {
        pctx.put(top().map_or(null_mut(), |handle| handle as CUcontext))
    }

    fn cuCtxGetDevice(device: Out<CUdevice>) {
        device.put(any()?.device)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.put(context()?.flags)
    }

    fn cuCtxGetId(ctx: CUcontext, id: Out<u64>) {
        let context = if ctx.is_null() {
            any()?
        } else {
            context::find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?
        };
        id.put(context.id)
    }

    fn cuCtxGetApiVersion(ctx: CUcontext, version: Out<u32>) {
        if ctx.is_null() {
            any()?;
        } else {
            context::find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        }
        version.put(3020)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        context()?;
        least.put_if_wanted(0);
        greatest.put_if_wanted(crate::stream::GREATEST_PRIORITY);
        Ok(())
    }

    fn cuCtxSynchronize() {
        let context = context()?;
        crate::capture::check_context_call(&context)?;
        context.wait_idle();
        context.life.check()
    }
}
