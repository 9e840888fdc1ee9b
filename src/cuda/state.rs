//! The state of a CUDA stream: what its handles, the threads that watch it and its queued work share.
#![allow(unsafe_code)] // calls the driver

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::{self, CUstream};

use super::call_queue::CallQueue;
use super::capture::{forbid, is_captured};
use super::context::{ContextOnDemand, CudaContext, PER_THREAD};
use super::deferred_free::{self, StreamWork};
use super::host_call::{self, HostFunction, in_host_function};
use super::host_functions::GivenUpFunctions;
use super::owner_readers::OwnerReaders;
use super::pending_queue::PendingQueue;
use super::stream_progress::{Count, CountedStream};
use super::stream_words::{
    STATUS_FULL, STATUS_RANGE, STATUS_STREAM, STATUS_TIMEOUT, STATUS_WORK, StreamWords,
};
use crate::Result;
use crate::proxy::{PollMembership, drop_elsewhere};
use crate::stream::{Fault, Lock, Progress, ReplayCells, StreamFailure, StreamPosition, next_id};

/// A wait for a mark that no GPU counts.
pub(super) struct HostEventWait {
    pub(super) number: u32,
    pub(super) mark: StreamPosition,
    /// The count of the entry that waits.
    pub(super) done: u64,
    /// The work before the mark has failed, and a thread is giving up everything behind the wait.
    pub(super) is_failing: bool,
}

/// Who destroys the driver's stream.
pub(super) enum StreamOwner {
    /// This library, with the state: it has created the stream.
    Library,
    /// The application, which keeps it until its work is done.
    Application,
    /// This object, which is dropped with the state.
    Object { _owner: Box<dyn Any + Send + Sync> },
}

pub(super) struct StreamState {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) context: CudaContext,
    pub(super) raw: CUstream,
    owner: StreamOwner,
    /// The application has the driver's handle, and may capture the stream.
    is_exposed: AtomicBool,
    /// A graph builder captures the stream.
    is_captured: AtomicBool,
    pub(super) progress: Arc<Progress>,
    pub(super) count: Arc<Count>,
    /// The one lock of the hot path. It is held over the driver call, which may block while the driver's queue is full.
    pub(super) queue: Lock<CallQueue>,
    pub(super) pending: PendingQueue,
    pub(super) owner_readers: OwnerReaders,
    /// Waits for marks that no GPU counts, in the order of the gates.
    pub(super) host_event_waits: Lock<VecDeque<HostEventWait>>,
    pub(super) fault: Fault,
    /// Failures of entries up to this count are no fault: the fault was taken, or the stream aborted, behind them.
    pub(super) forgiven: AtomicU64,
    /// The entry that the stream's fault is of, if it is of one; else above all counts.
    pub(super) stopped_from: AtomicU64,
    /// Functions of the host that are not called.
    pub(super) functions: Lock<GivenUpFunctions>,
    /// Held during `cuStreamQuery`, which would invalidate a capture of the stream.
    pub(super) asking: Lock<()>,
    pub(super) looks: AtomicU32,
    pub(super) watched: PollMembership,
    /// How often [`deferred_free::stream_gets_work`] was called for the stream, and [`deferred_free::stream_is_idle`] was not.
    pub(super) busy: AtomicUsize,
    pub(super) asked: PollMembership,
    /// The driver has reported an error after which it executes nothing that is queued.
    pub(super) ended: AtomicBool,
    /// A thread discards the pending work for the watching thread.
    pub(super) is_discarding: AtomicBool,
    /// Every wait that the stream reaches is ended.
    pub(super) aborted: AtomicBool,
    /// Work that comes after this count will never be executed.
    pub(super) cut: AtomicU64,
    /// Of its operations in graphs of the application.
    pub(super) replay_cells: ReplayCells,
    pub(super) replay_fault: Arc<ReplayFaultState>,
    /// The stream itself, kept for its work after the last handle was dropped.
    pub(super) remaining: Lock<Option<Arc<StreamState>>>,
    pub(super) weak: Weak<StreamState>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks. All else is locks and atomics.
unsafe impl Send for StreamState {}
// SAFETY: as above.
unsafe impl Sync for StreamState {}

impl StreamState {
    /// The state of a stream of the driver. A stream of the library's own is destroyed with it, and if this fails.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the stream's words cannot be registered.
    pub(super) fn new(
        context: &CudaContext,
        raw: CUstream,
        owner: StreamOwner,
        name: String,
    ) -> Result<Arc<StreamState>> {
        let id = next_id();
        let is_own = matches!(owner, StreamOwner::Library);
        let words = StreamWords::new(context).inspect_err(|_| {
            if is_own && let Some(_entered) = context.enter_to_give_back() {
                // SAFETY: the caller has just made it, and has not given it away.
                let _ = unsafe { sys::cuStreamDestroy_v2(raw) };
            }
        })?;
        Ok(Arc::new_cyclic(|weak| {
            let count = Arc::new(Count::new(words, weak.clone() as Weak<dyn CountedStream>));
            let progress = Progress::external(id, Box::new(Arc::clone(&count)));
            StreamState {
                id,
                name,
                context: context.clone(),
                raw,
                owner,
                is_exposed: AtomicBool::new(!is_own),
                is_captured: AtomicBool::new(false),
                queue: Lock::default(),
                pending: PendingQueue::new(),
                owner_readers: OwnerReaders::default(),
                host_event_waits: Lock::default(),
                fault: Fault::new(),
                functions: Lock::default(),
                asking: Lock::default(),
                looks: AtomicU32::new(0),
                watched: PollMembership::default(),
                busy: AtomicUsize::new(0),
                asked: PollMembership::default(),
                ended: AtomicBool::new(false),
                is_discarding: AtomicBool::new(false),
                aborted: AtomicBool::new(false),
                cut: AtomicU64::new(u64::MAX),
                replay_cells: ReplayCells::default(),
                replay_fault: Arc::default(),
                remaining: Lock::default(),
                weak: weak.clone(),
                forgiven: AtomicU64::new(0),
                stopped_from: AtomicU64::new(u64::MAX),
                progress: Arc::new(progress),
                count,
            }
        }))
    }

    pub(super) fn has_work(&self) -> bool {
        !self.pending.is_empty() || !self.host_event_waits.lock().is_empty()
    }

    /// Reports a failure of earlier work.
    pub(super) fn check(&self) -> Result<()> {
        self.note_replay_fault();
        self.fault.check(&self.name)
    }

    /// Takes a failure that the stream's kernels have told into the fault, without reporting it.
    pub(super) fn note_replay_fault(&self) {
        let word = self.count.words.replay_fault();
        if self.fault.continues() {
            // Nothing is skipped because of it.
            let code = word.swap(0, Ordering::AcqRel);
            if code != 0 {
                self.fault.fail(replay_failure(code));
            }
            return;
        }
        let code = word.load(Ordering::Acquire);
        if code != 0 && !self.replay_fault.is_reported.swap(true, Ordering::AcqRel) {
            if word.load(Ordering::Acquire) != 0 {
                self.fault.fail(replay_failure(code));
            } else {
                // It was cleared meanwhile.
                self.replay_fault
                    .is_reported
                    .store(false, Ordering::Release);
            }
        }
    }

    /// Lets operations in graphs of the application be executed again, from here on in the order of the stream: the rest of the launch that has failed, and
    /// launches behind it, may still be queued, and stay given up. At once if the stream is being captured, or executes nothing any more.
    pub(super) fn clear_replay_fault(&self) {
        let fault = &self.replay_fault;
        if self.count.words.replay_fault().load(Ordering::Acquire) == 0
            || fault.is_clearing.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (count, state) = (Arc::clone(&self.count), Arc::clone(fault));
        let mut clear: Option<HostFunction> = Some(Box::new(move || {
            state.clear(&count);
            // A host function must not unregister the words.
            drop_elsewhere(Box::new(count));
        }));
        let _ = self.alone(|| {
            if self.ended.load(Ordering::Acquire) || in_host_function() || is_captured(self.raw)? {
                return Ok(());
            }
            let Some(function) = clear.take() else {
                return Ok(());
            };
            // SAFETY: the stream lives as long as its state.
            unsafe { host_call::launch(self.raw, function) }.map_err(|(error, function)| {
                clear = Some(function);
                error
            })
        });
        if clear.is_some() {
            fault.clear(&self.count);
        }
    }

    /// The driver's handle, for the application.
    pub(super) fn expose(&self) -> CUstream {
        // Release: see `may_be_captured`.
        self.is_exposed.store(true, Ordering::Release);
        self.raw
    }

    /// Whether the stream has executed all that it was given. Never if the application may have queued work that is not counted.
    pub(super) fn has_counted_all(&self) -> bool {
        !self.is_exposed.load(Ordering::Acquire) && !self.count.is_left()
    }

    /// Notes that a graph builder begins to capture the stream, or has ended that. Returns what was noted before. The caller holds the lock of the queue.
    pub(super) fn set_captured(&self, is_captured: bool) -> bool {
        self.is_captured.swap(is_captured, Ordering::AcqRel)
    }

    /// Whether the stream may be under capture. False is certain: this library has created the stream, has given nobody its handle, and does not
    /// capture it. A stream joins another stream's capture only by driver calls with its handle.
    fn may_be_captured(&self) -> bool {
        // Acquire: a call that comes after the capture has begun comes after the handle was given out, too.
        self.is_exposed.load(Ordering::Acquire) || self.is_captured.load(Ordering::Acquire)
    }

    /// Fails if a graph builder captures the stream: what is queued on it would be repeated, and the builder would not know.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State).
    pub(super) fn forbid_builder(&self, operation: &'static str) -> Result<()> {
        if self.is_captured.load(Ordering::Acquire) {
            return Err(crate::Error::state(
                crate::StateKind::Captured,
                operation,
                "a `GraphBuilder` captures the stream; add the operation with that",
            ));
        }
        Ok(())
    }

    /// Whether the application may capture the stream. False is certain.
    pub(super) fn may_be_captured_by_others(&self) -> bool {
        self.is_exposed.load(Ordering::Acquire) && !self.is_captured.load(Ordering::Acquire)
    }

    /// Fails if the stream is under capture: queued operations would go into the graph, and each launch would repeat the same stores. Asks the driver
    /// only if a capture is possible.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State); [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn forbid_capture(
        &self,
        driver: &mut ContextOnDemand<'_>,
        operation: &'static str,
    ) -> Result<()> {
        if self.may_be_captured() {
            driver.call(|| forbid(self.raw, operation))?;
        }
        Ok(())
    }

    /// The stream's context for calls of the driver, entered at once if `always`: calls that do not name the stream need that.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn driver(&self, always: bool) -> Result<ContextOnDemand<'_>> {
        // The handles of default streams mean those of the current context.
        let is_default = self.raw.addr() <= PER_THREAD;
        self.context.on_demand(always || is_default)
    }

    /// Calls the driver while nothing is queued and no thread queries the stream.
    pub(super) fn alone(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let _queue = self.queue.lock();
        let _asking = self.asking.lock();
        let _entered = self.context.enter()?;
        call()
    }
}

/// Operations in graphs of the application that were not executed.
#[derive(Debug, Default)]
pub(super) struct ReplayFaultState {
    /// The stream's fault says so.
    is_reported: AtomicBool,
    /// The stream is going to clear the word.
    is_clearing: AtomicBool,
}

impl ReplayFaultState {
    fn clear(&self, count: &Count) {
        count.words.replay_fault().store(0, Ordering::Release);
        self.is_reported.store(false, Ordering::Release);
        self.is_clearing.store(false, Ordering::Release);
    }
}

/// That of an operation in a graph of the application, by the code of the kernel.
#[cold]
pub(super) fn replay_failure(code: i32) -> StreamFailure {
    let reason = match code {
        STATUS_TIMEOUT => "it took longer than its time limit".to_owned(),
        STATUS_FULL => "its queue stayed full for its time limit".to_owned(),
        STATUS_RANGE => {
            "its table of pages names a page that there is not, or more than it has room for"
                .to_owned()
        }
        STATUS_WORK | STATUS_STREAM => {
            "its endpoint has failed, or the stream was aborted".to_owned()
        }
        code => format!("code {code}"),
    };
    format!("an operation of a captured graph was not executed: {reason}").into()
}

impl Drop for StreamState {
    fn drop(&mut self) {
        // The watching thread has not looked at it since its work was done.
        for _ in 0..*self.busy.get_mut() {
            deferred_free::stream_is_idle(&self.count);
        }
        // The driver may execute these kernels at any time.
        std::mem::forget(std::mem::take(&mut self.queue.lock().uncounted));
        if !matches!(self.owner, StreamOwner::Library) {
            return;
        }
        if let Some(_entered) = self.context.enter_to_give_back() {
            // SAFETY: created by this library, and the last handle is gone. The driver still executes what others have queued on it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
