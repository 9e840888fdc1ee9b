//! The state of a CUDA stream: what its handles, the threads that watch it and its queued work share.
#![allow(unsafe_code)] // calls the driver

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, RwLock, Weak};

use cudarc::driver::sys::{self, CUstream};

use super::context::CudaContext;
use super::count::Count;
use super::pending::PendingQueue;
use super::queue::Queue;
use super::word::Words;
use crate::Result;
use crate::proxy::Enlistment;
use crate::stream::{Fault, Lock, Mark, Progress, next_id};

pub(super) struct StreamState {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) context: CudaContext,
    pub(super) raw: CUstream,
    /// The library has created the stream, and destroys it.
    owned: bool,
    /// The `cudarc` object that owns the stream, if there is one.
    pub(super) lender: OnceLock<Arc<cudarc::driver::CudaStream>>,
    pub(super) progress: Arc<Progress>,
    pub(super) count: Arc<Count>,
    /// The one lock of the hot path. It is held over the driver call, which may block while the driver's queue is full.
    pub(super) queue: Lock<Queue>,
    pub(super) pending: PendingQueue,
    /// Held for reading while a thread has handles of owners whose programs may finish meanwhile.
    pub(super) visiting: RwLock<()>,
    /// Waits for marks that no GPU counts, in the order of the gates.
    pub(super) gates: Lock<std::collections::VecDeque<(u32, Mark)>>,
    pub(super) fault: Fault,
    /// Held during `cuStreamQuery`, which would invalidate a capture of the stream.
    pub(super) asking: Lock<()>,
    pub(super) looks: AtomicU32,
    pub(super) watched: Enlistment,
    pub(super) asked: Enlistment,
    /// The driver has reported an error after which it executes nothing that is queued.
    pub(super) ended: AtomicBool,
    /// Every wait that the stream reaches is ended.
    pub(super) aborted: AtomicBool,
    /// Work that comes after this count will never be executed.
    pub(super) cut: AtomicU64,
    /// The stream itself, kept for its work after the last handle was dropped.
    pub(super) remaining: Lock<Option<Arc<StreamState>>>,
    pub(super) weak: Weak<StreamState>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks. All else is locks and atomics.
unsafe impl Send for StreamState {}
// SAFETY: as above.
unsafe impl Sync for StreamState {}

impl StreamState {
    /// The state of a stream of the driver. An `owned` stream is destroyed with it, and if this fails.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the stream's words cannot be registered.
    pub(super) fn new(
        context: &CudaContext,
        raw: CUstream,
        owned: bool,
        name: String,
    ) -> Result<Arc<StreamState>> {
        let id = next_id();
        let words = Words::new(context).inspect_err(|_| {
            if let (true, Ok(_entered)) = (owned, context.enter()) {
                // SAFETY: the caller has just made it, and nobody else has it.
                let _ = unsafe { sys::cuStreamDestroy_v2(raw) };
            }
        })?;
        let count = Arc::new(Count::new(words));
        let progress = Progress::elsewhere(id, Box::new(Arc::clone(&count)));
        Ok(Arc::new_cyclic(|weak| StreamState {
            id,
            name,
            context: context.clone(),
            raw,
            owned,
            lender: OnceLock::new(),
            progress: Arc::new(progress),
            count,
            queue: Lock::default(),
            pending: PendingQueue::default(),
            visiting: RwLock::default(),
            gates: Lock::default(),
            fault: Fault::new(),
            asking: Lock::default(),
            looks: AtomicU32::new(0),
            watched: Enlistment::default(),
            asked: Enlistment::default(),
            ended: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            cut: AtomicU64::new(u64::MAX),
            remaining: Lock::default(),
            weak: weak.clone(),
        }))
    }

    pub(super) fn has_work(&self) -> bool {
        !self.pending.lock().is_empty() || !self.gates.lock().is_empty()
    }

    /// Reports a failure of earlier work.
    pub(super) fn check(&self) -> Result<()> {
        self.fault.check(&self.name)
    }

    /// Calls the driver while nothing is queued and no thread queries the stream.
    pub(super) fn alone(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let _queue = self.queue.lock();
        let _asking = self.asking.lock();
        let _entered = self.context.enter()?;
        call()
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created by this library, and the last handle is gone. The driver still executes what others have queued on it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
