//! CUDA contexts.
#![allow(unsafe_code)] // calls the driver

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstream_st};

use super::capabilities::{Capabilities, Probed};
use super::capture::RelaxedCapture;
use super::driver::{check, create_stream, is};
use super::module::KernelModule;
use crate::{Error, Result, StateKind};

/// `CU_STREAM_PER_THREAD` of `cuda.h`, the last of the handles that mean a default stream.
pub(super) const PER_THREAD: usize = 2;

thread_local! {
    /// The address of the context that was current when this thread last looked. The application may have made another one current since.
    static LAST_CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// A CUDA context: the primary one of a device, or one of the application's. Clones are handles of the same context.
#[derive(Clone)]
pub struct CudaContext {
    inner: Arc<ContextInner>,
}

struct ContextInner {
    raw: CUcontext,
    device: CUdevice,
    name: String,
    /// A primary context, which is released with this object.
    primary: bool,
    /// What the driver says that the device can do. `probed` has what trying has shown.
    promised: Capabilities,
    probed: OnceLock<Probed>,
    module: OnceLock<Result<KernelModule>>,
    /// A stream without work, see [`CudaContext::check_health`]. Null until it is needed.
    idle_stream: AtomicPtr<CUstream_st>,
    /// The `cudarc` object that owns the context, if there is one.
    cudarc_owner: Option<Arc<cudarc::driver::CudaContext>>,
}

// SAFETY: a context's handle may be used from any thread; the driver locks.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl ContextInner {
    fn new(
        raw: CUcontext,
        device: CUdevice,
        primary: bool,
        cudarc_owner: Option<Arc<cudarc::driver::CudaContext>>,
    ) -> Result<ContextInner> {
        // Made first, so that the retention is given back if one of these calls fails.
        let mut inner = ContextInner {
            raw,
            device,
            name: String::new(),
            primary,
            promised: Capabilities::default(),
            probed: OnceLock::new(),
            module: OnceLock::new(),
            idle_stream: AtomicPtr::default(),
            cudarc_owner,
        };
        inner.name = name(device)?;
        let _entered = push(raw)?;
        inner.promised = Capabilities::promised(device)?;
        Ok(inner)
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        let idle_stream = *self.idle_stream.get_mut();
        let module = self.module.get().and_then(|module| module.as_ref().ok());
        // A context that was destroyed has taken its modules and streams with it.
        if (module.is_some() || !idle_stream.is_null())
            && let Ok(_entered) = push(self.raw)
        {
            // To unload a module invalidates captures.
            let _relaxed = RelaxedCapture::new();
            if let Some(module) = module {
                module.unload();
            }
            if !idle_stream.is_null() {
                // SAFETY: made by `check_health`, and used by nothing else.
                let _ = unsafe { sys::cuStreamDestroy_v2(idle_stream) };
            }
        }
        if self.primary {
            // SAFETY: retained once for this object. The driver refuses while it is unloaded at the end of the process, which is no error.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

/// A context that its handles keep, and this does not.
pub(super) struct WeakContext(Weak<ContextInner>);

impl WeakContext {
    pub(super) fn upgrade(&self) -> Option<CudaContext> {
        self.0.upgrade().map(|inner| CudaContext { inner })
    }

    pub(super) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl CudaContext {
    /// A first handle of a context, whose device is not probed yet. A `primary` context was retained; the last handle releases it, as does a failure
    /// of this call.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(super) fn new(
        raw: CUcontext,
        device: CUdevice,
        primary: bool,
        cudarc_owner: Option<Arc<cudarc::driver::CudaContext>>,
    ) -> Result<CudaContext> {
        let inner = Arc::new(ContextInner::new(raw, device, primary, cudarc_owner)?);
        Ok(CudaContext { inner })
    }

    pub(super) fn downgrade(&self) -> WeakContext {
        WeakContext(Arc::downgrade(&self.inner))
    }

    /// Sets what trying has shown about the device, once.
    pub(super) fn set_probed(&self, probed: Probed) {
        let _ = self.inner.probed.set(probed);
    }

    pub(super) fn cudarc_owner(&self) -> Option<&Arc<cudarc::driver::CudaContext>> {
        self.inner.cudarc_owner.as_ref()
    }

    /// The driver's handle of the context.
    #[must_use]
    pub fn raw(&self) -> CUcontext {
        self.inner.raw
    }

    /// The device's name.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.inner.name
    }

    /// The latest CUDA version that the driver supports, such as (13, 0); (0, 0) if it does not report one.
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

    /// Which features that this library uses the device and its driver have.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        let probed = self.inner.probed.get();
        probed.map_or(&self.inner.promised, |probed| &probed.capabilities)
    }

    /// Why [`CudaContext::capabilities`] lacks a feature or does not know it: a line for each.
    #[must_use]
    pub fn findings(&self) -> &[String] {
        let probed = self.inner.probed.get();
        probed.map_or(&[], |probed| &probed.findings)
    }

    /// The kernels of this library. They stay loaded as long as the context has a handle, which every stream with work has.
    ///
    /// # Errors
    /// [`Error::State`] if this library was built without them; [`Error::Cuda`].
    pub(super) fn module(&self) -> Result<&KernelModule> {
        let load = || {
            let _relaxed = RelaxedCapture::new();
            self.enter().and_then(|_entered| KernelModule::load())
        };
        let module = self.inner.module.get_or_init(load);
        module.as_ref().map_err(Error::clone)
    }

    /// Whether the driver registers host memory for the device. True if it does not say.
    pub(super) fn registers_host_memory(&self) -> bool {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED;
        let mut value = 1;
        // SAFETY: writes one int.
        let asked = check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, attribute, self.device())
        });
        asked.is_err() || value != 0
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
        Err(Error::state(
            StateKind::Unsupported,
            "execute programs by a kernel",
            reason.cloned().unwrap_or_default(),
        ))
    }

    /// A number that no other context has.
    pub(crate) fn key(&self) -> u64 {
        self.inner.raw as u64
    }

    /// Makes it the calling thread's current context until the guard is dropped.
    #[inline]
    pub(super) fn enter(&self) -> Result<EnteredContext> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuCtxGetCurrent", unsafe {
            sys::cuCtxGetCurrent(&mut current)
        })?;
        LAST_CURRENT.set(current.addr());
        if current == self.inner.raw {
            return Ok(EnteredContext {
                pushed: false,
                thread: PhantomData,
            });
        }
        push(self.inner.raw)
    }

    /// Asks the driver for an error that the context does not recover from, such as that of a kernel. It queries a stream of its own: a query of a
    /// stream of the application invalidates a capture that another thread has begun since this one looked.
    ///
    /// # Errors
    /// [`Error::Cuda`] with that error, or that of one call.
    pub(super) fn check_health(&self) -> Result<()> {
        let _entered = self.enter_relaxed()?;
        let mut stream = self.inner.idle_stream.load(Ordering::Acquire);
        if stream.is_null() {
            let made = create_stream()?;
            let before = self.inner.idle_stream.compare_exchange(
                std::ptr::null_mut(),
                made,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            stream = before.map_or_else(
                |other| {
                    // SAFETY: made here, and used by nothing else.
                    let _ = unsafe { sys::cuStreamDestroy_v2(made) };
                    other
                },
                |_null| made,
            );
        }
        // SAFETY: a stream of the context.
        check("cuStreamQuery", unsafe { sys::cuStreamQuery(stream) })
    }

    /// A guard for calls that name a stream of this context. Enters the context at once if `always`, or if it was not the current one when this thread
    /// last looked; otherwise when a call has failed. So a thread that keeps the context current makes no call to find that out.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(super) fn on_demand(&self, always: bool) -> Result<ContextOnDemand<'_>> {
        let is_current = LAST_CURRENT.get() == self.inner.raw.addr();
        let entered = if always || !is_current {
            Some(self.enter()?)
        } else {
            None
        };
        Ok(ContextOnDemand {
            context: self,
            entered,
        })
    }

    /// [`CudaContext::enter`], for calls that may not invalidate a graph capture that is under way in this process.
    pub(super) fn enter_relaxed(&self) -> Result<EnteredRelaxed> {
        let entered = self.enter()?;
        Ok(EnteredRelaxed {
            _relaxed: RelaxedCapture::new(),
            _entered: entered,
        })
    }

    /// [`CudaContext::enter_relaxed`], for what the driver is to be given back. `None` if the context is gone, and with it all that was
    /// made in it; also in a host function of the application's, and if the driver stays short of memory: then it is not given back.
    pub(super) fn enter_to_give_back(&self) -> Option<EnteredRelaxed> {
        unless_short_of_memory(|| self.enter_relaxed()).ok()
    }
}

/// Makes a call of the driver, and repeats it for up to 100 ms while the driver is short of memory. It is for calls that give something back: pages that
/// stay registered make the next registration of their addresses fail.
pub(super) fn unless_short_of_memory<R>(mut call: impl FnMut() -> Result<R>) -> Result<R> {
    let mut left = 100;
    loop {
        match call() {
            Err(error) if left > 0 && is(&error, CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                left -= 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
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
pub(super) struct EnteredContext {
    pushed: bool,
    // The stack of contexts is the thread's.
    thread: PhantomData<*const ()>,
}

impl Drop for EnteredContext {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `push` put on this thread's stack. It fails if the context was destroyed meanwhile, which the next call for the
            // context reports.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// See [`CudaContext::on_demand`].
pub(super) struct ContextOnDemand<'a> {
    context: &'a CudaContext,
    entered: Option<EnteredContext>,
}

impl ContextOnDemand<'_> {
    /// Makes a call, and repeats it in the context if it fails because the thread has changed its current context. A call that fails has queued nothing,
    /// and its error may be about the other context: that there is none (CUDA_ERROR_INVALID_CONTEXT), that the stream is not of it, that it was
    /// destroyed, or that it has failed. The driver does not document which of them a call for a stream reports, so any error is a reason to look.
    ///
    /// # Errors
    /// Those of the call in the context; [`Error::Cuda`].
    pub(super) fn call<T>(&mut self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let error = match call() {
            Err(error) if self.entered.is_none() => error,
            result => return result,
        };
        let entered = self.entered.insert(self.context.enter()?);
        if entered.pushed { call() } else { Err(error) }
    }
}

/// While it lives, a context is the calling thread's current one, and the thread's calls do not invalidate graph captures.
pub(super) struct EnteredRelaxed {
    _relaxed: RelaxedCapture,
    _entered: EnteredContext,
}

/// Makes a context the calling thread's current one until the guard is dropped.
pub(super) fn push(raw: CUcontext) -> Result<EnteredContext> {
    // SAFETY: a context that lives, by the contracts of the functions that return a `CudaContext`.
    check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(raw) })?;
    Ok(EnteredContext {
        pushed: true,
        thread: PhantomData,
    })
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
