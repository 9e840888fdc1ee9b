//! The threads that watch CUDA streams, and what the driver reports about a stream.
#![allow(unsafe_code)] // calls the driver

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use super::capture::{RelaxedCapture, forbid, is_captured};
use super::driver::{check, is};
use super::host_call::in_host_function;
use super::pending::defer_drops;
use super::state::StreamState;
use super::stream_words::STATUS_STREAM;
use crate::proxy::{Pace, Placement, Rounds, Turn, drop_elsewhere};
use crate::stream::Backoff;
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
fn watcher() -> Result<&'static Arc<Rounds<StreamState>>> {
    static WATCHER: OnceLock<Result<Arc<Rounds<StreamState>>>> = OnceLock::new();
    WATCHER
        .get_or_init(|| {
            Rounds::start(
                "doorbell-cuda",
                Placement::Anywhere,
                Pace::every(TICK),
                StreamState::look,
                // Never the last handle: see `release`.
                drop,
            )
        })
        .as_ref()
        .map_err(Error::clone)
}

/// The thread that queries the driver about streams. It is not the watching thread: the driver may block a query behind another call that
/// waits for queued work, and only the watching thread may be able to end that wait.
fn querier() -> Result<&'static Arc<Rounds<StreamState>>> {
    static QUERIER: OnceLock<Result<Arc<Rounds<StreamState>>>> = OnceLock::new();
    QUERIER
        .get_or_init(|| {
            Rounds::start(
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

/// Drops a handle of a stream between the turns of the watching thread, so that this thread never drops the last one: destroying a stream may
/// block until the GPU is done, and the watching thread ends the waits that the GPU may be in.
pub(super) fn release(stream: Arc<StreamState>) {
    let last = match watcher() {
        Ok(watcher) => watcher.between_turns(|| Arc::into_inner(stream)),
        Err(_) => Arc::into_inner(stream),
    };
    drop(last);
}

/// [`release`], by a thread that nobody waits for.
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

impl StreamState {
    pub(super) fn ensure_watched(&self) {
        if self.watched.come()
            && let Ok(watcher) = watcher()
        {
            watcher.enlist(self.weak.clone());
        }
        if self.asked.come()
            && let Ok(querier) = querier()
        {
            querier.enlist(self.weak.clone());
        }
    }

    /// Keeps it until the thread that looks finds that there is no work.
    pub(super) fn keep(&self) {
        if let Some(state) = self.weak.upgrade() {
            *self.remaining.lock() = Some(state);
            self.ensure_watched();
        }
    }

    /// Waits until the stream has counted to that, or will never. False: it has not by the deadline.
    pub(super) fn wait_until(&self, target: u64, deadline: Option<Instant>) -> bool {
        let mut backoff = Backoff::new();
        let mut turns = 0_u32;
        while !self.progress.reached(target) {
            if self.turn() {
                backoff.reset();
            } else if !backoff.pause_until(deadline) {
                // It may have come in time, and this thread got no processor since it looked.
                return self.progress.reached(target);
            }
            turns = turns.wrapping_add(1);
            if backoff.has_slept() && turns.is_multiple_of(16) {
                // An error that is none of the stream's is no reason to take the work for done: a capture that has begun since, for one.
                let _ = self.is_idle();
                if self.ended.load(Ordering::Acquire) || self.fault.is_sticky() {
                    break;
                }
            }
        }
        true
    }

    /// Whether everything is done, as the driver sees it. Its errors end the stream.
    pub(super) fn is_idle(&self) -> Result<bool> {
        let _asking = self.asking.lock();
        let _entered = self.context.enter().inspect_err(|error| self.note(error))?;
        forbid(self.raw, "query a CUDA stream").inspect_err(|error| self.note(error))?;
        // A capture of any other stream would be broken off, too.
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

    /// A look at the stream, by the thread that looks.
    fn look(&self) -> Turn {
        self.count.words.stay_alive();
        self.open_gates();
        defer_drops(self.settle_to_the_end());
        if self.has_work() {
            return Turn::Waiting;
        }
        if self.watched.leave(|| self.has_work()) == Turn::Waiting {
            return Turn::Waiting;
        }
        // The handle that the work kept.
        if let Some(inner) = self.remaining.lock().take() {
            release_elsewhere(inner);
        }
        Turn::Over
    }

    /// A question to the driver, by the thread that asks.
    fn ask(&self) -> Turn {
        if self.has_work() {
            self.look_for_the_end();
            return Turn::Waiting;
        }
        self.asked.leave(|| self.has_work())
    }

    /// What the driver knows and no count tells: a context that is no more. To query a stream breaks a capture off that another thread has
    /// begun since it was asked about, so that is seldom done; most errors are known to the question alone.
    fn look_for_the_end(&self) {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        if looks.is_multiple_of(8) {
            let _ = self.is_idle();
            return;
        }
        let asked = self
            .context
            .enter()
            .and_then(|_entered| is_captured(self.raw));
        if let Err(error) = asked {
            self.note(&error);
        }
    }

    /// An error of the driver: one that the context does not get over ends the stream. The caller holds no lock that a look needs but `asking`.
    pub(super) fn note(&self, error: &Error) {
        if is(error, CUresult::CUDA_ERROR_NOT_PERMITTED) {
            // A host function, of the application's maybe, has called the driver by way of this library: that says nothing of the stream.
            return;
        }
        if is(error, CUresult::CUDA_ERROR_INVALID_HANDLE) {
            // Its owner has destroyed the stream. The driver still executes what is queued, which counts and can be released as ever.
            self.fault.stick(error.to_string());
        } else if matches!(error, Error::Cuda { .. }) && !self.goes_on() {
            self.end(error);
        }
    }

    /// Whether the driver still executes what is queued. An error that a context does not get over is returned by every later call; any other
    /// one is of the call that returned it.
    fn goes_on(&self) -> bool {
        let Ok(_entered) = self.context.enter() else {
            // The driver is not to be called from in here: nothing is known.
            return in_host_function();
        };
        let _relaxed = RelaxedCapture::new();
        if is_captured(self.raw).is_ok_and(|captured| captured) {
            return true;
        }
        // SAFETY: a stream of the context.
        let query = check("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) });
        match query {
            Ok(()) => true,
            Err(error) => {
                is(&error, CUresult::CUDA_ERROR_NOT_READY)
                    || is(&error, CUresult::CUDA_ERROR_NOT_PERMITTED)
            }
        }
    }

    /// Nothing more will come of what is queued.
    fn end(&self, error: &Error) {
        self.count.words.note(STATUS_STREAM);
        self.fault.stick(error.to_string());
        self.ended.store(true, Ordering::Release);
        self.ensure_watched();
    }
}
