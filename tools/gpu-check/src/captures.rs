//! Which calls make a capture in GLOBAL mode invalid, by the thread that makes them and its mode. The library makes all of its calls that do in relaxed mode.

use std::ffi::c_void;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{self, CUgraph, CUresult, CUstream, CUstreamCaptureMode as Mode};
use serde_json::{Map, Value, json};

use super::blocking::PTX;
use super::gpu::{Gpu, PORTABLE, Page, check, drained, new_stream, write32};

/// What the calls are made with: handles of the driver, as numbers.
#[derive(Clone, Copy)]
struct Made {
    context: usize,
    /// Another context.
    second: usize,
    other: usize,
    event: usize,
    page: Page,
    /// Not registered.
    plain: usize,
    memory: u64,
}

const LEN: usize = 1 << 16;
const OK: CUresult = CUresult::CUDA_SUCCESS;

/// Makes a call, and what undoes it if it has succeeded; each would be refused in the same way.
fn and_back(made: CUresult, undo: impl FnOnce() -> CUresult) -> CUresult {
    if made == OK { undo() } else { made }
}

/// Each is refused in the same way as what undoes it.
const CALLS: [&str; 19] = [
    "cuMemHostRegister, cuMemHostUnregister",
    "cuMemAlloc, cuMemFree",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate, cuStreamDestroy",
    "cuEventCreate, cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamBatchMemOp",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuPointerGetAttribute",
    "cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease",
    "cuCtxSynchronize of another context",
];
/// Of the context that has the capture. The library never makes it.
const OF_CONTEXT: &str = "cuCtxSynchronize";

fn call(name: &str, made: Made) -> CUresult {
    let (event, other) = (made.event as sys::CUevent, made.other as CUstream);
    let (mut handle, mut memory) = (std::ptr::null_mut::<c_void>(), 0);
    // SAFETY: handles and memory that live as long as the process, and places for what the calls write. What is made here is given back here.
    unsafe {
        match name {
            "cuMemHostRegister, cuMemHostUnregister" => {
                let plain = made.plain as *mut c_void;
                let registered = sys::cuMemHostRegister_v2(plain, LEN, PORTABLE);
                and_back(registered, || sys::cuMemHostUnregister(plain))
            }
            "cuMemAlloc, cuMemFree" => {
                let allocated = sys::cuMemAlloc_v2(&mut memory, LEN);
                and_back(allocated, || sys::cuMemFree_v2(memory))
            }
            "cuModuleLoadData" => {
                sys::cuModuleLoadData((&raw mut handle).cast(), PTX.as_ptr().cast())
            }
            "cuModuleUnload" => {
                let loaded = sys::cuModuleLoadData((&raw mut handle).cast(), PTX.as_ptr().cast());
                and_back(loaded, || sys::cuModuleUnload(handle.cast()))
            }
            "cuStreamCreate, cuStreamDestroy" => {
                let created = sys::cuStreamCreate((&raw mut handle).cast(), 1);
                and_back(created, || sys::cuStreamDestroy_v2(handle.cast()))
            }
            "cuEventCreate, cuEventDestroy" => {
                let created = sys::cuEventCreate((&raw mut handle).cast(), 0);
                and_back(created, || sys::cuEventDestroy_v2(handle.cast()))
            }
            "cuEventRecord" => sys::cuEventRecord(event, other),
            "cuEventQuery" => sys::cuEventQuery(event),
            "cuEventSynchronize" => sys::cuEventSynchronize(event),
            "cuStreamQuery" => sys::cuStreamQuery(other),
            "cuStreamSynchronize" => sys::cuStreamSynchronize(other),
            "cuStreamIsCapturing" => {
                let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                sys::cuStreamIsCapturing(other, &mut status)
            }
            "cuStreamBatchMemOp" => {
                let mut op = write32(made.page.gpu, 1);
                sys::cuStreamBatchMemOp_v2(other, 1, &mut op, 0)
            }
            "cuStreamWaitEvent" => sys::cuStreamWaitEvent(other, event, 0),
            "cuMemcpyHtoDAsync" => {
                sys::cuMemcpyHtoDAsync_v2(made.memory, made.page.host.cast(), 64, other)
            }
            "cuMemcpyDtoHAsync" => {
                sys::cuMemcpyDtoHAsync_v2(made.page.host.cast(), made.memory, 64, other)
            }
            "cuPointerGetAttribute" => {
                let kind = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
                sys::cuPointerGetAttribute((&raw mut memory).cast(), kind, made.memory)
            }
            "cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease" => {
                let retained = sys::cuDevicePrimaryCtxRetain((&raw mut handle).cast(), 0);
                and_back(retained, || sys::cuDevicePrimaryCtxRelease_v2(0))
            }
            "cuCtxSynchronize of another context" => {
                sys::cuCtxPushCurrent_v2(made.second as _);
                let synchronized = sys::cuCtxSynchronize();
                sys::cuCtxPopCurrent_v2((&raw mut handle).cast());
                synchronized
            }
            _ => sys::cuCtxSynchronize(),
        }
    }
}

/// The calls that a capture does not survive, for each way of making them.
pub fn calls() -> Result<Value> {
    let gpu = Gpu::new()?;
    let (mut event, mut memory) = (std::ptr::null_mut(), 0);
    let captured = new_stream()?;
    let other = new_stream()?;
    let (mut second, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: each call writes one handle or address.
    unsafe {
        check("cuCtxCreate", sys::cuCtxCreate_v2(&mut second, 0, 0))?;
        check("cuCtxPopCurrent", sys::cuCtxPopCurrent_v2(&mut popped))?;
        check("cuEventCreate", sys::cuEventCreate(&mut event, 2))?;
        check("cuEventRecord", sys::cuEventRecord(event, other))?;
        check("cuMemAlloc", sys::cuMemAlloc_v2(&mut memory, LEN))?;
    }
    ensure!(drained(other, super::gpu::SOON), "a stream does not work");
    let page = Page::new(PORTABLE, false)?;
    let plain = Page::unregistered(LEN)?;
    let made = Made {
        context: gpu.context.raw() as usize,
        second: second as usize,
        other: other as usize,
        event: event as usize,
        page,
        plain: plain as usize,
        memory,
    };
    let mut found = Map::new();
    for (way, elsewhere, relaxed) in [
        ("same thread", false, false),
        ("same thread, relaxed", false, true),
        ("other thread", true, false),
        ("other thread, relaxed", true, true),
    ] {
        let mut fatal = Vec::new();
        for name in CALLS {
            if !survives(captured, made, name, elsewhere, relaxed)
                .with_context(|| format!("{way}: {name}"))?
            {
                fatal.push(name);
            }
        }
        found.insert(way.into(), json!(fatal));
    }
    let is_valid = survives(captured, made, OF_CONTEXT, true, true)?;
    found.insert(
        format!("other thread, relaxed: {OF_CONTEXT}"),
        json!(is_valid),
    );
    Ok(found.into())
}

/// Whether a capture stays valid beside a call.
fn survives(
    captured: CUstream,
    made: Made,
    name: &'static str,
    elsewhere: bool,
    relaxed: bool,
) -> Result<bool> {
    let run = move || {
        // SAFETY: a context that lives as long as the process; exchanges the mode of this thread, and back.
        unsafe {
            sys::cuCtxSetCurrent(made.context as _);
            let mut mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
            if relaxed {
                sys::cuThreadExchangeStreamCaptureMode(&mut mode);
            }
            // What the capture makes of it is the question.
            let _ = call(name, made);
            if relaxed {
                sys::cuThreadExchangeStreamCaptureMode(&mut mode);
            }
        }
    };
    // SAFETY: a stream; writes one handle, which is destroyed.
    unsafe {
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        check(
            "cuStreamBeginCapture",
            sys::cuStreamBeginCapture_v2(captured, mode),
        )?;
        if elsewhere {
            ensure!(std::thread::spawn(run).join().is_ok(), "it panicked");
        } else {
            run();
        }
        let mut graph: CUgraph = std::ptr::null_mut();
        let ended = sys::cuStreamEndCapture(captured, &mut graph);
        if !graph.is_null() {
            check("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
        }
        Ok(ended == OK)
    }
}
