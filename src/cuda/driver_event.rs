//! Waits of streams for events of CUDA that the application has recorded.
#![allow(unsafe_code)] // calls the driver

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use super::capture::is_captured;
use super::context::CudaContext;
use super::driver::check;
use super::host_call::in_host_function;
use super::stream::CudaStream;
use super::timing::TimingEvent;
use crate::stream::{
    Event, Executor, ExternalProgress, HostStream, Lock, Progress, StreamFailure, StreamPosition,
    next_id,
};
use crate::{Error, Result, StateKind};

impl CudaStream {
    /// Makes work that is queued later wait for the work that an event of CUDA stands for at this moment (`cuStreamWaitEvent`): a `CUevent`, which is a
    /// `cudaEvent_t`, recorded on any stream of any context of this process. Does nothing if the event was never recorded. To wait for an [`Event`] of this
    /// library, use [`Executor::wait_event`].
    ///
    /// The call does not keep the event: it may be recorded again or destroyed as soon as the call returns. It is never destroyed by this library.
    ///
    /// If the event was recorded in a stream capture, this stream joins the capture, as with the driver's call. On a stream that is being captured, the wait becomes part of
    /// the graph. So from this call on, queueing on a stream that this library has created takes one more driver call, as after [`CudaStream::raw`].
    ///
    /// # Errors
    /// [`Error::State`] for a null event, [`Error::Cuda`], [`Error::Asynchronous`].
    ///
    /// # Safety
    /// `event` is null, or an event that is not destroyed during the call.
    pub unsafe fn wait_cuda_event(&self, event: CUevent) -> Result<()> {
        check_event(event)?;
        let state = self.state();
        state.check()?;
        let _queue = state.queue.lock();
        let _entered = state.context.enter()?;
        // From now on each call asks whether the stream is captured: it joins the capture that the event is of.
        let raw = state.expose();
        // SAFETY: the stream lives as long as its state, and the event by the caller's promise.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(raw, event, 0)
        })
    }
}

impl HostStream {
    /// Makes work that is queued later wait for the work that an event of CUDA stands for: a `CUevent`, which is a `cudaEvent_t`, recorded on any stream of any context of
    /// this process. Does nothing if that work is done, or if the event was never recorded. To wait for an [`Event`] of this library, use [`Executor::wait_event`].
    ///
    /// The thread that executes this stream asks the driver (`cuEventQuery`), with pauses, until the work is done; [`HostStream::abort`] ends the wait. So the event must stay, and
    /// must not be recorded again, until the stream has passed the wait: if it is recorded again, the stream waits for the later record. `kept` is dropped when the wait is over. It may own
    /// the event; without an owner give `()`. The event is never destroyed by this library.
    ///
    /// `context` is made current for the driver's calls. It need not be the event's.
    ///
    /// # Errors
    /// [`Error::State`] for a null event; [`Error::Cuda`], such as that for an event of a stream that is being captured, which then breaks that capture; [`Error::Asynchronous`]. If the driver reports
    /// an error later, that is a fault of the stream.
    ///
    /// # Safety
    /// `event` is null, or an event that is not destroyed until the stream has passed the wait or discarded it, or until `kept` is dropped.
    pub unsafe fn wait_cuda_event(
        &self,
        context: &CudaContext,
        event: CUevent,
        kept: impl Any + Send,
    ) -> Result<()> {
        check_event(event)?;
        // A fault of the stream is reported even if there is nothing to wait for.
        self.wait_event(&Event::new())?;
        let progress = driver_event_wait(context, event, Box::new(kept));
        if is_passed(context, event)? {
            return Ok(());
        }
        let position = PASSED;
        self.wait_event(&Event::at(StreamPosition { progress, position }))
    }
}

impl CudaContext {
    /// An event that has passed when a stream of other code has executed what it was given before this call. `raw` is a `CUstream`, which is a `cudaStream_t`; it may
    /// also be a default stream, of which `CU_STREAM_PER_THREAD` is the calling thread's. Nothing of the stream is used after the call.
    ///
    /// The event has passed at once if the stream is being captured: a graph that is being made executes nothing.
    ///
    /// # Errors
    /// [`Error::Cuda`], such as that for the legacy default stream while a stream that it is ordered with is being captured.
    ///
    /// # Safety
    /// `raw` is a stream of this context, and is not destroyed during the call.
    pub unsafe fn record_event(&self, raw: CUstream) -> Result<Event> {
        let entered = self.enter_relaxed()?;
        if is_captured(raw)? {
            return Ok(Event::new());
        }
        let recorded = TimingEvent::new(self)?;
        // SAFETY: an event that lives, and a stream by the caller's promise.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(recorded.raw(), raw)
        })?;
        drop(entered);
        let event = recorded.raw();
        let progress = driver_event_wait(self, event, Box::new(recorded));
        let position = PASSED;
        Ok(Event::at(StreamPosition { progress, position }))
    }
}

/// The progress of an event of the driver, which is used until it has passed. `kept` is dropped then.
fn driver_event_wait(
    context: &CudaContext,
    event: CUevent,
    kept: Box<dyn Any + Send>,
) -> Arc<Progress> {
    Arc::new_cyclic(|progress: &Weak<Progress>| {
        let wait = DriverEventWait {
            context: context.clone(),
            event,
            is_over: AtomicBool::new(false),
            kept: Lock::new(Some(kept)),
            progress: progress.clone(),
        };
        Progress::external(next_id(), Box::new(wait))
    })
}

fn check_event(event: CUevent) -> Result<()> {
    if !event.is_null() {
        return Ok(());
    }
    Err(Error::state(
        StateKind::NotFound,
        "wait for a CUDA event",
        "the event is null",
    ))
}

/// Whether the work is done that an event stands for.
fn is_passed(context: &CudaContext, event: CUevent) -> Result<bool> {
    let _entered = context.enter_relaxed()?;
    // SAFETY: the caller that queued the wait promised that the event lives until the wait is over.
    match unsafe { sys::cuEventQuery(event) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check("cuEventQuery", result).map(|()| true),
    }
}

/// The position at which the work of an event is done.
const PASSED: u64 = 1;

/// An event of the application as a stream of its own, with one position.
struct DriverEventWait {
    context: CudaContext,
    event: CUevent,
    /// The event was found passed, and is not used any more.
    is_over: AtomicBool,
    kept: Lock<Option<Box<dyn Any + Send>>>,
    progress: Weak<Progress>,
}

// SAFETY: an event's handle may be used from any thread; the driver locks. All else is Send.
unsafe impl Send for DriverEventWait {}
// SAFETY: as above; all else is locks and atomics.
unsafe impl Sync for DriverEventWait {}

impl ExternalProgress for DriverEventWait {
    fn completed(&self) -> u64 {
        // Acquire: pairs with the store below.
        if self.is_over.load(Ordering::Acquire) {
            return PASSED;
        }
        // One thread asks at a time, so that none asks for an event whose owner is dropped.
        let mut kept = self.kept.lock();
        if self.is_over.load(Ordering::Acquire) {
            return PASSED;
        }
        // A host function of the driver must not call it.
        if in_host_function() {
            return 0;
        }
        match is_passed(&self.context, self.event) {
            Ok(false) => return 0,
            Ok(true) => {}
            Err(error) => {
                let failure = StreamFailure::from(format!("the wait for a CUDA event: {error}"));
                if let Some(progress) = self.progress.upgrade() {
                    progress.poison(PASSED, failure);
                }
            }
        }
        // Release: a thread that sees it finds the failure.
        self.is_over.store(true, Ordering::Release);
        let last = kept.take();
        drop(kept);
        drop(last);
        PASSED
    }

    fn device_word(&self) -> Option<u64> {
        None
    }
}
