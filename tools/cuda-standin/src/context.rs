//! A context: its streams, and which calls may give it work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use cudarc::driver::sys::{CUcontext, CUdevice};

use crate::call::count_wait;
use crate::handle::ObjectTable;
use crate::life::ContextLife;
use crate::settings::settings;
use crate::stream::{Stream, StreamOrder};

pub struct Context {
    pub handle: u64,
    /// Unique for the life of the process.
    pub id: u64,
    pub device: CUdevice,
    pub flags: u32,
    pub primary: bool,
    pub life: ContextLife,
    /// All streams with work, or that may get some. The lock also orders submissions: the legacy stream's order with the others is
    /// that of the calls.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// How many streams are at a task that holds a work queue.
    holding: Mutex<u64>,
    let_go: Condvar,
    /// A thread frees memory, and waits for the device.
    frees: Mutex<bool>,
    freed: Condvar,
}

static CONTEXTS: ObjectTable<Context> = ObjectTable::new();

/// A context that is not destroyed.
pub fn find(handle: CUcontext) -> Option<Arc<Context>> {
    CONTEXTS.get(handle)
}

impl Context {
    pub fn create(handle: u64, device: CUdevice, flags: u32, primary: bool) -> Arc<Context> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Arc::new(Context {
            handle,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            flags,
            primary,
            life: ContextLife::default(),
            streams: Mutex::default(),
            holding: Mutex::default(),
            let_go: Condvar::new(),
            frees: Mutex::default(),
            freed: Condvar::new(),
        });
        CONTEXTS.insert(handle, context.clone());
        context
    }

    pub fn lock_streams(&self) -> MutexGuard<'_, Vec<Arc<Stream>>> {
        self.streams
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The default stream, made when it is first used.
    pub fn legacy(self: &Arc<Context>) -> Arc<Stream> {
        let mut streams = self.lock_streams();
        if let Some(found) = streams
            .iter()
            .find(|stream| stream.kind == StreamOrder::Legacy)
        {
            return found.clone();
        }
        let made = Stream::new(self, 0, 0, StreamOrder::Legacy);
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

    /// Waits for a work queue, and does a task with it. Seen on an H100 with driver 580.159: while as many streams wait as there
    /// are queues, no other stream goes on, whatever its priority and wherever it worked before; while there is one less, all do.
    pub fn with_work_queue(&self, holds: bool, task: impl FnOnce()) {
        let lock = || {
            self.holding
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
        };
        let mut holding = lock();
        while *holding >= settings().work_queues && !self.life.is_over() {
            // The end of the context is not announced.
            let waited = self.let_go.wait_timeout(holding, Duration::from_millis(10));
            holding = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        *holding += u64::from(holds);
        drop(holding);
        task();
        if holds {
            *lock() -= 1;
            self.let_go.notify_all();
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
        self.alone(|| {
            if self.lock_streams().iter().any(|stream| !stream.is_idle()) {
                count_wait();
            }
            self.wait_idle();
        });
    }

    /// Calls with the driver's lock.
    pub fn alone(&self, call: impl FnOnce()) {
        *self.passed() = true;
        call();
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
        if *frees {
            count_wait();
        }
        while *frees {
            frees = self
                .freed
                .wait(frees)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        frees
    }

    /// No call finds it any more, and what runs on its streams ends.
    pub fn end(&self) {
        self.life.end();
        CONTEXTS.remove(self.handle as CUcontext);
    }
}
