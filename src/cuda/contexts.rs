//! The contexts that this process has handles of.
#![allow(unsafe_code)] // calls the driver

use std::collections::BTreeMap;
#[cfg(feature = "verbs")]
use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUstream};

use super::context::{CudaContext, PER_THREAD, WeakContext, push};
#[cfg(feature = "verbs")]
use super::driver::is_loaded;
use super::driver::{check, load};
#[cfg(feature = "verbs")]
use super::host_call::in_host_function;
use super::probe::probe;
use crate::{Error, Result, StateKind};

/// `CU_STREAM_LEGACY` of `cuda.h`.
const LEGACY: usize = 1;

/// # Errors
/// [`Error::State`] for `CU_STREAM_PER_THREAD`: the threads of this library would use streams of their own by that handle.
pub(super) fn check_stream(raw: CUstream) -> Result<()> {
    if raw.addr() != PER_THREAD {
        return Ok(());
    }
    Err(Error::state(
        StateKind::Unsupported,
        "use of a CUDA stream",
        "the per-thread default stream differs between threads; create a stream with cudaStreamCreate",
    ))
}

impl CudaContext {
    /// The primary context of that device, which the runtime API and frameworks use. It is retained until the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::State`] without a driver, [`Error::Range`] without such a device, [`Error::Cuda`].
    pub fn primary(ordinal: u32) -> Result<CudaContext> {
        load()?;
        let device = device(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the retention is given back by the handle, which is made next.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        Self::adopt(raw, device, true)
    }

    /// The context that is current in the calling thread, such as the one that the runtime API makes current with its first call. The application
    /// must not destroy it, nor reset its device, before everything that was made with this handle is dropped. That includes the regions and endpoints that streams of the
    /// context have used: they are registered there.
    ///
    /// # Errors
    /// [`Error::State`] without a driver, or if there is no current context; [`Error::Cuda`].
    pub fn current() -> Result<CudaContext> {
        load()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, null if there is none.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut raw) })?;
        if raw.is_null() {
            return Err(Error::state(
                StateKind::NotFound,
                "current CUDA context",
                "the calling thread has none",
            ));
        }
        let mut device = 0;
        // SAFETY: writes one int.
        check("cuCtxGetDevice", unsafe {
            sys::cuCtxGetDevice(&mut device)
        })?;
        Self::adopt(raw, device, false)
    }

    /// A context of the application's: a `CUcontext` of the driver API.
    ///
    /// # Errors
    /// As [`CudaContext::current`].
    ///
    /// # Safety
    /// `raw` is a context, and is not destroyed before all that is made with this handle is gone, as [`CudaContext::current`] says.
    pub unsafe fn from_raw(raw: CUcontext) -> Result<CudaContext> {
        load()?;
        let entered = push(raw)?;
        let context = Self::current();
        drop(entered);
        context
    }

    /// The context of a stream of the application's: a `CUstream`, which is a `cudaStream_t`. Null is the legacy default stream of the calling
    /// thread's current context. The application keeps the context, as that of [`CudaContext::current`].
    ///
    /// # Errors
    /// As [`CudaContext::current`]; [`Error::State`] for `CU_STREAM_PER_THREAD`, which means a different stream in each thread.
    ///
    /// # Safety
    /// `raw` is a stream, and its context is not destroyed before all that is made with this handle is gone, as [`CudaContext::current`] says.
    pub unsafe fn of_stream(raw: CUstream) -> Result<CudaContext> {
        load()?;
        match raw.addr() {
            0 | LEGACY => return Self::current(),
            _ => check_stream(raw)?,
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: a stream, by the caller's promise; writes one handle.
        check("cuStreamGetCtx", unsafe {
            sys::cuStreamGetCtx(raw, &mut context)
        })?;
        // SAFETY: the caller's promise about the context.
        unsafe { Self::from_raw(context) }
    }

    /// The known handle of a context, or a new one.
    fn adopt(raw: CUcontext, device: CUdevice, primary: bool) -> Result<CudaContext> {
        static CONTEXTS: Mutex<BTreeMap<(usize, bool), WeakContext>> = Mutex::new(BTreeMap::new());
        let mut known = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (raw as usize, primary);
        if let Some(context) = known.get(&key).and_then(WeakContext::upgrade) {
            if primary {
                // SAFETY: gives back what the caller has just retained; the known handle has a retention of its own.
                let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
            }
            return Ok(context);
        }
        // Under the lock, so that no caller gets a context whose device was not probed yet.
        let context = probed(CudaContext::new(raw, device, primary, None)?);
        known.retain(|_, weak| !weak.is_gone());
        known.insert(key, context.downgrade());
        Ok(context)
    }

    /// A handle that keeps the `cudarc` object that owns the context.
    pub(super) fn borrowed(context: &Arc<cudarc::driver::CudaContext>) -> Result<CudaContext> {
        load()?;
        let cudarc_owner = Some(Arc::clone(context));
        CudaContext::new(context.cu_ctx(), context.cu_device(), false, cudarc_owner).map(probed)
    }
}

/// The context that was taken up last.
static LATEST: Mutex<Option<WeakContext>> = Mutex::new(None);

/// The PCI address of the GPU of the context that is current in this thread, or else of one that the library knows, as sysfs writes it: `0000:3b:00.0`. A
/// process that has not loaded the driver is not made to, and a host function must not call it.
#[cfg(feature = "verbs")]
pub(crate) fn gpu_address() -> Option<String> {
    if !is_loaded() || in_host_function() {
        return None;
    }
    let context = CudaContext::current_here().or_else(CudaContext::any)?;
    let mut text = [0; 32];
    // SAFETY: writes a string of at most that length, with its end mark.
    check("cuDeviceGetPCIBusId", unsafe {
        sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, context.device())
    })
    .ok()?;
    // SAFETY: the string that the driver has written.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Some(text.to_str().ok()?.to_ascii_lowercase())
}

impl CudaContext {
    /// A context that this process has a handle of, or the one that is current in this thread, which is not probed. The driver's library is loaded.
    pub(super) fn any() -> Option<CudaContext> {
        let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = latest.as_ref().and_then(WeakContext::upgrade) {
            return Some(known);
        }
        drop(latest);
        CudaContext::current_here()
    }

    /// The context that is current in this thread, which is not probed. The driver's library is loaded.
    fn current_here() -> Option<CudaContext> {
        let (mut raw, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: writes one handle, null if there is none. The driver returns an error if it was not initialised.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut raw) }).ok()?;
        if raw.is_null() {
            return None;
        }
        // SAFETY: writes one int.
        check("cuCtxGetDevice", unsafe {
            sys::cuCtxGetDevice(&mut device)
        })
        .ok()?;
        CudaContext::new(raw, device, false, None).ok()
    }
}

/// The same context, with what its device was found to do.
fn probed(context: CudaContext) -> CudaContext {
    *LATEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.downgrade());
    context.set_probed(probe(&context, *context.capabilities()));
    context
}

fn device(ordinal: u32) -> Result<CUdevice> {
    let mut count = 0;
    // SAFETY: writes one int.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    let count = u64::try_from(count).unwrap_or(0);
    if u64::from(ordinal) >= count {
        return Err(Error::Range {
            argument: "ordinal",
            value: u64::from(ordinal),
            min: 0,
            max: count.saturating_sub(1),
        });
    }
    let mut device = 0;
    // SAFETY: writes one int.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal as i32)
    })?;
    Ok(device)
}
