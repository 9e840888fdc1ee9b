//! The driver's functions for streams.

use std::ffi::c_void;

use cudarc::driver::sys::{CUcontext, CUdevice, CUhostFn, CUstream};

use crate::call::{CUresult, Out, cuda, valid};
use crate::graph::NodeWork;
use crate::stream::NON_BLOCKING;
use crate::task::HostCallback;
use crate::{capture, current, event, streams};

cuda! {
    fn cuStreamCreate(stream: Out<CUstream>, flags: u32) {
        valid(!stream.is_null() && flags & !NON_BLOCKING == 0)?;
        stream.put(streams::create(flags, 0)?.handle as CUstream)
    }

    // A priority beyond the range is the nearest in it.
    fn cuStreamCreateWithPriority(stream: Out<CUstream>, flags: u32, priority: i32) {
        valid(!stream.is_null() && flags & !NON_BLOCKING == 0)?;
        stream.put(streams::create(flags, priority)?.handle as CUstream)
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        streams::destroy(stream)
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let stream = streams::find(stream)?;
        capture::check_idle_call(&stream)?;
        stream.wait_for(stream.submitted());
        stream.context.life.check()
    }

    fn cuStreamQuery(stream: CUstream) {
        let stream = streams::find(stream)?;
        capture::check_idle_call(&stream)?;
        stream.wait_for_blocked_callers();
        if stream.is_idle() { stream.context.life.check() } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
    }

    fn cuStreamGetFlags(stream: CUstream, flags: Out<u32>) {
        flags.put(streams::find(stream)?.flags)
    }

    fn cuStreamGetPriority(stream: CUstream, priority: Out<i32>) {
        priority.put(streams::find(stream)?.priority)
    }

    fn cuStreamGetId(stream: CUstream, id: Out<u64>) {
        id.put(streams::find(stream)?.id)
    }

    fn cuStreamGetCtx(stream: CUstream, context: Out<CUcontext>) {
        context.put(streams::find(stream)?.context.handle as CUcontext)
    }

    fn cuStreamGetDevice(stream: CUstream, device: Out<CUdevice>) {
        device.put(streams::find(stream)?.context.device)
    }

    // What was recorded when this is called counts, and no later record. An event that never was is no wait.
    fn cuStreamWaitEvent(stream: CUstream, event: cudarc::driver::sys::CUevent, flags: u32) {
        valid(flags & !1 == 0)?;
        let stream = streams::find(stream)?;
        event::wait_in(&stream, event)
    }

    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, argument: *mut c_void) {
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let stream = streams::find(stream)?;
        capture::queue(&stream, NodeWork::of(HostCallback { function, argument }))
    }

    // There is one device, so memory operations need no distinction by device.
    fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) {
        let context = current::context()?;
        valid(target == 0 && (scope == 100 || scope == 200))?;
        // Bit 0: by the host.
        if crate::device::attribute(context.device, crate::device::FLUSH_WRITES_OPTIONS) & 1 == 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        crate::held::release();
        Ok(())
    }
}
