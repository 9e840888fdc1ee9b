//! CUDA contexts.
#![allow(unsafe_code)] // calls the driver

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUstream};

use super::capabilities::Capabilities;
use super::capture::Unseen;
use super::driver::{check, load};
use super::module::Module;
use super::probe::{Probed, probe};
use crate::{Error, Result};

/// `CU_STREAM_LEGACY` of `cuda.h`.
const LEGACY: usize = 1;

/// `CU_STREAM_PER_THREAD` of `cuda.h`.
const PER_THREAD: usize = 2;

/// A CUDA context: the primary one of a device, or somebody else's. Clones are handles of the same one.
#[derive(Clone)]
pub struct CudaContext {
    inner: Arc<Inner>,
}

struct Inner {
    raw: CUcontext,
    device: CUdevice,
    name: String,
    /// Retained by this handle, and to be released.
    primary: bool,
    /// What the driver promises; behind it what was found.
    promised: Capabilities,
    probed: OnceLock<Probed>,
    module: OnceLock<Result<Module>>,
    /// Whose it is, if that is an object of `cudarc`'s.
    lender: Option<Arc<cudarc::driver::CudaContext>>,
}

// SAFETY: a context's handle may be used from any thread; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    fn new(
        raw: CUcontext,
        device: CUdevice,
        primary: bool,
        lender: Option<Arc<cudarc::driver::CudaContext>>,
    ) -> Result<Inner> {
        // Made first, so that the retention is given back if one of these calls fails.
        let mut inner = Inner {
            raw,
            device,
            name: String::new(),
            primary,
            promised: Capabilities::default(),
            probed: OnceLock::new(),
            module: OnceLock::new(),
            lender,
        };
        inner.name = name(device)?;
        let _entered = push(raw)?;
        inner.promised = Capabilities::promised(device)?;
        Ok(inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A context that was destroyed has taken its modules with it.
        if let Some(Ok(module)) = self.module.get()
            && let Ok(_entered) = push(self.raw)
        {
            module.unload();
        }
        if self.primary {
            // SAFETY: retained once for this object. A driver that is being unloaded at the process's end refuses, and that is that.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

impl CudaContext {
    /// The primary context of that device, which the runtime API and the frameworks use. It is retained until the last handle is gone.
    ///
    /// # Errors
    /// [`Error::State`] without a driver, [`Error::Range`] without such a device, [`Error::Cuda`].
    pub fn primary(ordinal: u32) -> Result<CudaContext> {
        load()?;
        let device = device(ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the retention is given back by `Inner`, which is made next.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        Self::adopt(raw, device, true)
    }

    /// The context that is current in the calling thread, as the runtime API has made it by its first call. It stays its owner's, who
    /// destroys it after everything that was made with this handle.
    ///
    /// # Errors
    /// [`Error::State`] without a driver, or if there is no current context; [`Error::Cuda`].
    pub fn current() -> Result<CudaContext> {
        load()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, null if there is none.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut raw) })?;
        if raw.is_null() {
            return Err(Error::State {
                operation: "current CUDA context",
                reason: "the calling thread has none".into(),
            });
        }
        let mut device = 0;
        // SAFETY: writes one int.
        check("cuCtxGetDevice", unsafe {
            sys::cuCtxGetDevice(&mut device)
        })?;
        Self::adopt(raw, device, false)
    }

    /// A context that belongs to somebody else: a `CUcontext` of the driver's API, which all others give out.
    ///
    /// # Errors
    /// As [`CudaContext::current`].
    ///
    /// # Safety
    /// `raw` is a context, and is not destroyed before all that is made with this handle is gone.
    pub unsafe fn from_raw(raw: CUcontext) -> Result<CudaContext> {
        load()?;
        let entered = push(raw)?;
        let context = Self::current();
        drop(entered);
        context
    }

    /// The context of a stream that somebody has made: a `CUstream`, which is a `cudaStream_t`. Null is the legacy default stream of the calling
    /// thread's current context. The context stays its owner's, as that of [`CudaContext::current`].
    ///
    /// # Errors
    /// As [`CudaContext::current`]; [`Error::State`] for `CU_STREAM_PER_THREAD`, by which every thread that looks at it means another stream.
    ///
    /// # Safety
    /// `raw` is a stream, and its context is not destroyed before all that is made with this handle is gone.
    pub unsafe fn of_stream(raw: CUstream) -> Result<CudaContext> {
        load()?;
        match raw.addr() {
            0 | LEGACY => return Self::current(),
            PER_THREAD => {
                return Err(Error::State {
                    operation: "use of a CUDA stream",
                    reason:
                        "the default stream of each thread is another one in each; a stream of cudaStreamCreate is the same in all".into(),
                });
            }
            _ => {}
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: a stream, by the caller's promise; writes one handle.
        check("cuStreamGetCtx", unsafe {
            sys::cuStreamGetCtx(raw, &mut context)
        })?;
        // SAFETY: the caller's promise about the context.
        unsafe { Self::from_raw(context) }
    }

    /// The handle of the context that is known already, or a new one.
    fn adopt(raw: CUcontext, device: CUdevice, primary: bool) -> Result<CudaContext> {
        static KNOWN: Mutex<BTreeMap<(usize, bool), Weak<Inner>>> = Mutex::new(BTreeMap::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (raw as usize, primary);
        if let Some(inner) = known.get(&key).and_then(Weak::upgrade) {
            if primary {
                // SAFETY: gives back what the caller has just retained; the known handle has a retention of its own.
                let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
            }
            return Ok(CudaContext { inner });
        }
        // Under the lock, so that everybody finds it probed.
        let context = Self::probed(Inner::new(raw, device, primary, None)?);
        known.retain(|_, weak| weak.strong_count() > 0);
        known.insert(key, Arc::downgrade(&context.inner));
        Ok(context)
    }

    /// A handle that keeps somebody else's object of the context.
    pub(super) fn lent(context: &Arc<cudarc::driver::CudaContext>) -> Result<CudaContext> {
        load()?;
        let lender = Some(Arc::clone(context));
        let inner = Inner::new(context.cu_ctx(), context.cu_device(), false, lender)?;
        Ok(Self::probed(inner))
    }

    /// A handle that knows what its device can do.
    fn probed(inner: Inner) -> CudaContext {
        let context = CudaContext {
            inner: Arc::new(inner),
        };
        let probed = probe(&context, context.inner.promised);
        let _ = context.inner.probed.set(probed);
        context
    }

    pub(super) fn lender(&self) -> Option<&Arc<cudarc::driver::CudaContext>> {
        self.inner.lender.as_ref()
    }

    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> CUcontext {
        self.inner.raw
    }

    /// The device's name, as the driver has it.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.inner.name
    }

    /// The newest CUDA that the driver knows, as (13, 0); (0, 0) if it does not say.
    #[must_use]
    pub fn driver_version(&self) -> (u32, u32) {
        let mut version = 0;
        // SAFETY: writes one int.
        let asked = check("cuDriverGetVersion", unsafe {
            sys::cuDriverGetVersion(&mut version)
        });
        let version = asked
            .ok()
            .and_then(|()| u32::try_from(version).ok())
            .unwrap_or(0);
        (version / 1000, version % 1000 / 10)
    }

    /// What device and driver can do of what this library uses.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        let probed = self.inner.probed.get();
        probed.map_or(&self.inner.promised, |probed| &probed.capabilities)
    }

    /// What the device lacks of [`CudaContext::capabilities`] or could not be found out, and why: a line each.
    #[must_use]
    pub fn findings(&self) -> &[String] {
        let probed = self.inner.probed.get();
        probed.map_or(&[], |probed| &probed.findings)
    }

    /// The kernels. They stay loaded as long as there is a handle of the context, which every stream with work has.
    ///
    /// # Errors
    /// [`Error::State`] if this library was built without them; [`Error::Cuda`].
    pub(super) fn module(&self) -> Result<&Module> {
        let load = || {
            let _unseen = Unseen::new();
            self.enter().and_then(|_entered| Module::load())
        };
        let module = self.inner.module.get_or_init(load);
        module.as_ref().map_err(Error::clone)
    }

    /// Its device.
    pub(super) fn device(&self) -> CUdevice {
        self.inner.device
    }

    /// # Errors
    /// [`Error::State`] if kernels cannot be used here; [`CudaContext::module`]'s.
    pub(super) fn check_kernels(&self) -> Result<()> {
        self.module()?;
        if self.capabilities().kernels {
            return Ok(());
        }
        let of_kernels = |finding: &&String| finding.starts_with("kernels:");
        let reason = self.findings().iter().find(of_kernels);
        Err(Error::State {
            operation: "execute programs by a kernel",
            reason: reason.cloned().unwrap_or_default(),
        })
    }

    /// A number of its own among contexts.
    pub(super) fn key(&self) -> u64 {
        self.inner.raw as u64
    }

    /// Makes it the calling thread's current context until the guard is dropped.
    #[inline]
    pub(super) fn enter(&self) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuCtxGetCurrent", unsafe {
            sys::cuCtxGetCurrent(&mut current)
        })?;
        if current == self.inner.raw {
            return Ok(Entered {
                pushed: false,
                thread: PhantomData,
            });
        }
        push(self.inner.raw)
    }
}

impl fmt::Debug for CudaContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaContext")
            .field("raw", &self.inner.raw)
            .field("device", &self.inner.name)
            .finish_non_exhaustive()
    }
}

/// While it lives, a context is the calling thread's current one.
#[derive(Debug)]
pub(super) struct Entered {
    pushed: bool,
    // The stack of contexts is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: takes off what `push` put on this thread's stack. It fails where the context was destroyed meanwhile, which the
            // next call on it reports.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

fn push(raw: CUcontext) -> Result<Entered> {
    // SAFETY: the handle is that of a context which its owner keeps, by the contracts of those who made a `CudaContext` of it.
    check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(raw) })?;
    Ok(Entered {
        pushed: true,
        thread: PhantomData,
    })
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

fn name(device: CUdevice) -> Result<String> {
    let mut text = [0_u8; 256];
    // SAFETY: writes at most that many bytes, with a NUL at the end.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(text.as_mut_ptr().cast(), text.len() as i32, device)
    })?;
    let end = text
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}
