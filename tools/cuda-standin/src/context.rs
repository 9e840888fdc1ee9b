//! Contexts: primary ones, those that programs create, and the error that one keeps.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use cudarc::driver::sys::{CUcontext, CUctxCreateParams, CUdevice};

use crate::call::{CUresult, In, Out, Outcome, cuda, valid};
use crate::handle::{self, Table};
use crate::stream::{Kind, Stream};
use crate::{capture, current, device, event, memory, module, names, stream};

pub struct Context {
    pub handle: u64,
    /// Unique for the life of the process.
    pub id: u64,
    pub device: CUdevice,
    pub flags: u32,
    primary: bool,
    over: AtomicBool,
    /// The number of the error that every later call returns; 0 is none.
    kept: AtomicU32,
    /// All streams with work, or that may get some. The lock also orders submissions: the legacy stream's order with the others is
    /// that of the calls.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// A thread frees memory, and waits for the device.
    frees: Mutex<bool>,
    freed: Condvar,
}

static CONTEXTS: Table<Context> = Table::new();

/// A context that is not destroyed.
pub fn find(handle: CUcontext) -> Option<Arc<Context>> {
    CONTEXTS.get(handle)
}

impl Context {
    fn create(handle: u64, device: CUdevice, flags: u32, primary: bool) -> Arc<Context> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Arc::new(Context {
            handle,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            flags,
            primary,
            over: AtomicBool::new(false),
            kept: AtomicU32::new(0),
            streams: Mutex::default(),
            frees: Mutex::default(),
            freed: Condvar::new(),
        });
        CONTEXTS.insert(handle, context.clone());
        context
    }

    /// The error that every call on this context gets.
    pub fn check(&self) -> Outcome {
        if self.is_destroyed() {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        match self.kept.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(names::result(number).unwrap_or(CUresult::CUDA_ERROR_UNKNOWN)),
        }
    }

    /// Whether what runs on its streams is to end.
    pub fn is_over(&self) -> bool {
        self.is_destroyed() || self.kept.load(Ordering::Acquire) != 0
    }

    pub fn is_destroyed(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Keeps the first error of work that ran.
    pub fn keep(&self, error: CUresult) {
        let _ = self
            .kept
            .compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn lock_streams(&self) -> MutexGuard<'_, Vec<Arc<Stream>>> {
        self.streams
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The default stream, made when it is first used.
    pub fn legacy(self: &Arc<Context>) -> Arc<Stream> {
        let mut streams = self.lock_streams();
        if let Some(found) = streams.iter().find(|stream| stream.kind == Kind::Legacy) {
            return found.clone();
        }
        let made = Stream::new(self, 0, 0, Kind::Legacy);
        streams.push(made.clone());
        made
    }

    /// Until all work that was submitted before has ended, or the context has.
    pub fn wait_idle(&self) {
        let streams = self.lock_streams().clone();
        for stream in streams {
            stream.wait_for(stream.submitted());
        }
    }

    fn lock_frees(&self) -> MutexGuard<'_, bool> {
        self.frees
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// [`Context::wait_idle`] with the driver's lock: a thread in cuMemFree waits for the device, and another thread's cuMemcpyHtoDAsync for a lock
    /// of the driver that the first one has (lupinemachines/lupine pull request 679; NVIDIA/nccl issue 48 of cuMemFreeHost).
    pub fn wait_idle_alone(&self) {
        *self.passed() = true;
        self.wait_idle();
        *self.lock_frees() = false;
        self.freed.notify_all();
    }

    /// Waits while a thread has the driver's lock. Called by all that gives a context work or allocates: it is known of cuMemcpyHtoDAsync, and not known
    /// that the others do not wait. Queries do not.
    pub fn pass(&self) {
        drop(self.passed());
    }

    pub fn passed(&self) -> MutexGuard<'_, bool> {
        let mut frees = self.lock_frees();
        while *frees {
            frees = self
                .freed
                .wait(frees)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        frees
    }

    /// Ends all that runs, and takes away all that belongs to it.
    fn destroy(&self) {
        self.over.store(true, Ordering::Release);
        CONTEXTS.remove(self.handle as CUcontext);
        capture::forget(self);
        stream::forget(self);
        event::forget(self);
        module::forget(self);
        let streams = std::mem::take(&mut *self.lock_streams());
        for stream in streams {
            stream.end();
        }
        memory::forget(self);
    }
}

/// What a device has one of, and its users share.
#[derive(Default)]
struct Primary {
    handle: u64,
    retained: u64,
    flags: u32,
}

static PRIMARIES: Mutex<Vec<Primary>> = Mutex::new(Vec::new());

fn with_primary<T>(device: CUdevice, work: impl FnOnce(&mut Primary) -> Outcome<T>) -> Outcome<T> {
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

fn create(pctx: &Out<CUcontext>, flags: u32, dev: CUdevice) -> Outcome {
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
        let context = find(ctx).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if context.primary {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        context.destroy();
        current::pop_destroyed(context.handle);
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(pctx: Out<CUcontext>, dev: CUdevice) {
        with_primary(dev, |primary| {
            valid(!pctx.is_null())?;
            if find(primary.handle as CUcontext).is_none() {
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
            Ok(if primary.retained == 0 { find(primary.handle as CUcontext) } else { None })
        })?;
        if let Some(context) = last {
            context.destroy();
        }
        Ok(())
    }

    // The references stay, and so does the handle, current where it was; but it names nothing before it is retained again.
    fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) {
        with_primary(dev, |primary| {
            if let Some(context) = find(primary.handle as CUcontext) {
                context.destroy();
            }
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: Out<u32>, active: Out<i32>) {
        with_primary(dev, |primary| {
            flags.put(primary.flags)?;
            active.put(i32::from(find(primary.handle as CUcontext).is_some()))
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
