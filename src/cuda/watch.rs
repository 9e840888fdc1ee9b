//! The threads that watch CUDA streams, and what the driver reports about a stream.
#![allow(unsafe_code)] // calls the driver

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use super::capture::{RelaxedCapture, forbid, is_captured};
use super::deferred_free;
use super::driver::{check, is};
use super::pending::defer_drops;
use super::state::StreamState;
use super::stream_words::STATUS_STREAM;
use crate::proxy::{Pace, Placement, PollResult, ProgressThread, drop_elsewhere};
use crate::stream::{Backoff, look_at_own_streams};
use crate::{Error, Result};

/// How often the watching thread looks how far the streams have come.
const TICK: Duration = Duration::from_millis(1);

/// How often the driver is queried for errors that no count shows.
const QUERY_TICK: Duration = Duration::from_millis(50);

/// Starts the thread that watches streams, unless it runs.
///
/// # Errors
/// [`Error::System`] if the thread cannot be started.
pub(super) fn start() -> Result<()> {
    watcher().map(drop)
}

/// The thread that looks how far streams have come, ends waits and tells owners.
fn watcher() -> Result<&'static Arc<ProgressThread<StreamState>>> {
    static WATCHER: OnceLock<Result<Arc<ProgressThread<StreamState>>>> = OnceLock::new();
    WATCHER
        .get_or_init(|| {
            ProgressThread::start(
                "doorbell-cuda",
                Placement::Anywhere,
                Pace::every(TICK),
                StreamState::look,
                // Rarely the last handle: see `release`. A thread that must not wait for a turn has dropped its own during this one then.
                drop_stream,
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

/// The thread that queries the driver about streams. It is not the watching thread: the driver may block a query behind another call that
/// waits for queued work, and only the watching thread may be able to end that wait.
fn querier() -> Result<&'static Arc<ProgressThread<StreamState>>> {
    static QUERIER: OnceLock<Result<Arc<ProgressThread<StreamState>>>> = OnceLock::new();
    QUERIER
        .get_or_init(|| {
            ProgressThread::start(
                "doorbell-ask",
                Placement::Anywhere,
                Pace::every(QUERY_TICK),
                StreamState::ask,
                release_elsewhere,
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

/// Drops a handle of a stream. If it was the last, another thread destroys the stream, which may block until the GPU is done.
pub(super) fn drop_stream(stream: Arc<StreamState>) {
    if let Some(last) = Arc::into_inner(stream) {
        drop_elsewhere(Box::new(last));
    }
}

/// Drops a handle of a stream between the turns of the watching thread, so that this thread never drops the last one: destroying a stream may
/// block until the GPU is done, and the watching thread ends the waits that the GPU may be in.
pub(super) fn release(stream: Arc<StreamState>) {
    let last = match watcher() {
        Ok(watcher) => watcher.between_polls(|| Arc::into_inner(stream)),
        Err(_) => Arc::into_inner(stream),
    };
    drop(last);
}

/// [`release`], by a thread that no other thread waits for.
pub(super) fn release_elsewhere(stream: Arc<StreamState>) {
    struct DeferredRelease(Option<Arc<StreamState>>);
    impl Drop for DeferredRelease {
        fn drop(&mut self) {
            if let Some(stream) = self.0.take() {
                release(stream);
            }
        }
    }
    drop_elsewhere(Box::new(DeferredRelease(Some(stream))));
}

/// Whether the driver refused a call because a stream is being captured: this one, or for the legacy default stream any that is ordered with it.
fn is_of_a_capture(error: &Error) -> bool {
    let codes = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32
        ..=CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as u32;
    matches!(error, Error::Cuda { code, .. } if codes.contains(code))
}

/// Whether a refusal is of one call alone: the driver was short of memory, or the call came from a host function.
fn says_nothing(error: &Error) -> bool {
    [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_NOT_PERMITTED,
    ]
    .iter()
    .any(|passing| is(error, *passing))
}

impl StreamState {
    pub(super) fn ensure_watched(&self) {
        if self.watched.join() {
            self.busy.fetch_add(1, Ordering::Relaxed);
            deferred_free::stream_gets_work(&self.count);
            if let Ok(watcher) = watcher() {
                watcher.register(self.weak.clone());
            }
        }
        if self.asked.join()
            && let Ok(querier) = querier()
        {
            querier.register(self.weak.clone());
        }
    }

    /// A function of the host is launched on the stream.
    pub(super) fn function_comes(&self) {
        self.count.functions.fetch_add(1, Ordering::AcqRel);
        deferred_free::stream_gets_work(&self.count);
    }

    /// The function has returned, or the driver has refused it.
    pub(super) fn function_is_over(&self) {
        let less = |functions: usize| functions.checked_sub(1);
        let functions = &self.count.functions;
        // Not if the stream has ended before.
        if (functions.fetch_update(Ordering::AcqRel, Ordering::Acquire, less)).is_ok() {
            deferred_free::stream_is_idle(&self.count);
        }
    }

    /// Keeps the stream until the watching thread finds that it has no work.
    pub(super) fn keep(&self) {
        if let Some(state) = self.weak.upgrade() {
            *self.remaining.lock() = Some(state);
            self.ensure_watched();
        }
    }

    /// Waits until the stream has counted to `target`, or never will. Returns false if the deadline passes before.
    pub(super) fn wait_until(&self, target: u64, deadline: Option<Instant>) -> bool {
        let mut backoff = Backoff::new();
        let mut turns = 0_u32;
        while !self.progress.reached(target) {
            if self.turn() | look_at_own_streams() {
                backoff.reset();
            } else if !backoff.pause_until(deadline) {
                // The count may have come in time, while this thread had no processor.
                return self.progress.reached(target);
            }
            turns = turns.wrapping_add(1);
            if backoff.has_slept() && turns.is_multiple_of(16) {
                // An error that does not end the stream does not mean that the work is done.
                self.check_for_error();
                if self.ended.load(Ordering::Acquire) || self.fault.is_final() {
                    break;
                }
            }
        }
        true
    }

    /// Whether all work of the stream is done, by the driver's account. An error that the context does not recover from ends the stream. Asks the driver
    /// nothing while the stream is nearly full: the query would wait as long as another thread is blocked in a call that queues on the stream.
    pub(super) fn is_idle(&self) -> Result<bool> {
        if self.is_nearly_full() {
            return Ok(false);
        }
        let _asking = self.asking.lock();
        let _entered = self.context.enter().inspect_err(|error| self.note(error))?;
        forbid(self.raw, "query a CUDA stream").inspect_err(|error| self.note(error))?;
        // The query would also invalidate captures of other streams.
        let _relaxed = RelaxedCapture::new();
        // SAFETY: a stream of the context.
        match check("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) }) {
            Ok(()) => Ok(true),
            Err(error) if is(&error, CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => {
                self.note(&error);
                Err(error)
            }
        }
    }

    /// A turn of the watching thread.
    fn look(&self) -> PollResult {
        self.count.words.stay_alive();
        self.release_host_event_waits();
        defer_drops(self.settle_in_look());
        if self.has_work() {
            return PollResult::Waiting;
        }
        if self.watched.leave(|| self.has_work()) == PollResult::Waiting {
            return PollResult::Waiting;
        }
        self.busy.fetch_sub(1, Ordering::Relaxed);
        deferred_free::stream_is_idle(&self.count);
        // The handle that was kept for the work. Since this turn has found none, a thread may have queued some, registered the stream again and dropped its
        // last handle, all before this: then the handle is kept for that work, and a later turn releases it. Looked at under the lock, because `keep`
        // comes after the work.
        let mut remaining = self.remaining.lock();
        let kept = if self.has_work() {
            None
        } else {
            remaining.take()
        };
        drop(remaining);
        if let Some(inner) = kept {
            release_elsewhere(inner);
        }
        PollResult::Over
    }

    /// A turn of the querying thread.
    fn ask(&self) -> PollResult {
        if self.has_work() {
            self.check_for_error();
            return PollResult::Waiting;
        }
        self.asked.leave(|| self.has_work())
    }

    /// Looks for errors that no count shows: those of the stream, such as that it was destroyed, which the question about a capture reports, and at every
    /// eighth turn those of the context. It never queries the stream. That would invalidate a capture that another thread begins just before it, and
    /// a query of the legacy default stream those of all blocking streams.
    fn check_for_error(&self) {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        let asked = if looks.is_multiple_of(8) {
            self.context.check_health()
        } else {
            (self.context.enter()).and_then(|_entered| is_captured(self.raw).map(drop))
        };
        if let Err(error) = asked {
            self.note(&error);
        }
    }

    /// Takes note of a driver's error. One that the context does not recover from ends the stream. Of the locks that `look` takes, the caller may hold
    /// only `asking`.
    pub(super) fn note(&self, error: &Error) {
        if is(error, CUresult::CUDA_ERROR_NOT_PERMITTED) || is_of_a_capture(error) {
            // A host function, of the application's maybe, has called the driver by way of this library, or there is a capture: that says nothing of
            // the stream. A query of the legacy default stream would invalidate the captures of all blocking streams.
            return;
        }
        if is(error, CUresult::CUDA_ERROR_INVALID_HANDLE) {
            // The stream was destroyed. The driver still executes the queued work, which counts and can be released as before.
            self.end_here(error.to_string());
        } else if matches!(error, Error::Cuda { .. }) && !self.goes_on() {
            self.end(error);
        }
    }

    /// Whether the driver still executes queued work, as far as it says. An error that the context does not recover from is
    /// returned by every later call, too; any other error concerns one call.
    fn goes_on(&self) -> bool {
        match self.context.check_health() {
            Ok(()) => true,
            Err(error) => says_nothing(&error) || is_of_a_capture(&error),
        }
    }

    /// Ends the stream: the driver will not execute the queued work.
    fn end(&self, error: &Error) {
        self.count.words.note(STATUS_STREAM);
        self.end_here(error.to_string());
        self.ended.store(true, Ordering::Release);
        // The driver does not call them any more.
        for _ in 0..self.count.functions.swap(0, Ordering::AcqRel) {
            deferred_free::stream_is_idle(&self.count);
        }
        self.ensure_watched();
    }
}
