//! The driver's functions that make and destroy contexts: primary ones, and those that programs create.

use std::sync::Mutex;

use cudarc::driver::sys::{CUcontext, CUctxCreateParams, CUdevice};

use crate::call::{CUresult, CudaResult, In, Out, cuda, valid};
use crate::context::{self, Context};
use crate::{capture, current, device, event, handle, memory, module, streams};

/// Ends all that runs, and takes away all that belongs to it.
fn destroy(context: &Context) {
    context.end();
    capture::forget(context);
    streams::forget(context);
    event::forget(context);
    module::forget(context);
    let streams = std::mem::take(&mut *context.lock_streams());
    for stream in streams {
        stream.end();
    }
    memory::forget(context);
}

/// What a device has one of, and its users share.
#[derive(Default)]
struct Primary {
    handle: u64,
    retained: u64,
    flags: u32,
}

static PRIMARIES: Mutex<Vec<Primary>> = Mutex::new(Vec::new());

fn with_primary<T>(
    device: CUdevice,
    work: impl FnOnce(&mut Primary) -> CudaResult<T>,
) -> CudaResult<T> {
    device::check(device)?;
    let mut all = PRIMARIES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    while all.len() <= device as usize {
        all.push(Primary {
            handle: handle::fresh(),
            ..Primary::default()
        });
    }
    work(&mut all[device as usize])
}

/// The scheduling flags, of which one may be given, and those beside them (cuda.h, CUctx_flags).
fn flags_are_known(flags: u32) -> bool {
    const SCHEDULES: [u32; 4] = [0, 1, 2, 4];
    const OTHERS: u32 = 0x08 | 0x10 | 0x20 | 0x40 | 0x80;
    flags & !(0x7 | OTHERS) == 0 && SCHEDULES.contains(&(flags & 0x7))
}

fn create(pctx: &Out<CUcontext>, flags: u32, dev: CUdevice) -> CudaResult {
    valid(!pctx.is_null() && flags_are_known(flags))?;
    device::check(dev)?;
    let context = Context::create(handle::fresh(), dev, flags, false);
    current::push(context.handle);
    pctx.put(context.handle as CUcontext)
}

cuda! {
    fn cuCtxCreate_v2(pctx: Out<CUcontext>, flags: u32, dev: CUdevice) {
        create(&pctx, flags, dev)
    }

    // No affinity of execution is known here.
    fn cuCtxCreate_v4(pctx: Out<CUcontext>, params: In<CUctxCreateParams>, flags: u32, dev: CUdevice) {
        if let Ok(params) = params.get() {
            valid(params.execAffinityParams.is_null() && params.numExecAffinityParams == 0 && params.cigParams.is_null())?;
        }
        create(&pctx, flags, dev)
    }

    // Not for a primary context, which is released.
    fn cuCtxDestroy_v2(ctx: CUcontext) {
        let context = context::find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if context.primary {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        destroy(&context);
        current::pop_destroyed(context.handle);
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(pctx: Out<CUcontext>, dev: CUdevice) {
        with_primary(dev, |primary| {
            valid(!pctx.is_null())?;
            if context::find(primary.handle as CUcontext).is_none() {
                Context::create(primary.handle, dev, primary.flags, true);
            }
            primary.retained += 1;
            pctx.put(primary.handle as CUcontext)
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) {
        let last = with_primary(dev, |primary| {
            if primary.retained == 0 {
                return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            }
            primary.retained -= 1;
            Ok(if primary.retained == 0 { context::find(primary.handle as CUcontext) } else { None })
        })?;
        if let Some(context) = last {
            destroy(&context);
        }
        Ok(())
    }

    // The references stay, and so does the handle, current where it was; but it names nothing before it is retained again.
    fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) {
        with_primary(dev, |primary| {
            if let Some(context) = context::find(primary.handle as CUcontext) {
                destroy(&context);
            }
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: Out<u32>, active: Out<i32>) {
        with_primary(dev, |primary| {
            flags.put(primary.flags)?;
            active.put(i32::from(context::find(primary.handle as CUcontext).is_some()))
        })
    }

    // For the next time that it becomes active, if it is.
    fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: u32) {
        with_primary(dev, |primary| {
            valid(flags_are_known(flags))?;
            primary.flags = flags;
            Ok(())
        })
    }
}
