//! The state of stopping the device after a failure. `stopping` has the steps.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Error;
use crate::endpoint::clock::now_ns;
use crate::stream::EndingDevice;

/// How often a thread that waits for a device to stop checks that.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// How long a device may take for both commands, and to flush in between, before its endpoint is given up.
pub(super) const STOP: Duration = Duration::from_secs(2);
pub(super) const STOP_NS: u64 = STOP.as_nanos() as u64;

/// A device that executes nothing more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quiesced {
    /// Its consumer records have to be set again.
    pub(super) resets_records: bool,
    /// As in [`StopState`].
    pub(super) rung: [u32; 2],
}

#[derive(Debug)]
pub(super) enum Phase {
    /// No command was issued.
    Working,
    /// The command to ERR is on its way.
    Failing,
    /// In error since then. If the command failed, nothing is flushed.
    Failed { since_ns: u64, flushes: bool },
    /// The command to RESET is on its way.
    Quiescing,
    /// It does nothing more.
    Quiet(Quiesced),
    /// The command to RESET failed.
    Refused,
}

/// How far the streams of GPUs that wait for the endpoint are stopped. They are stopped before any wait ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamsStop {
    NotAsked,
    /// Another thread is stopping them.
    Asked {
        since_ns: u64,
    },
    Done,
}

#[derive(Debug)]
pub(super) struct StopState {
    pub(super) phase: Phase,
    /// When the first command was issued.
    pub(super) asked_ns: u64,
    pub(super) streams: StreamsStop,
    /// Of each queue, the work requests that may have been rung when the queue pair was in ERR. Requests that are rung later are not executed,
    /// only flushed.
    pub(super) rung: [u32; 2],
    /// The errors of the commands.
    pub(super) errors: Vec<Error>,
    /// Set if the endpoint was given up.
    pub(super) kept: Option<RetainedEndpoint>,
}

/// A handle of an endpoint, whatever it is.
type AnyEndpoint = Arc<dyn fmt::Debug + Send + Sync>;

/// The endpoints that were given up, by number: their queue pairs, their rings, and the regions of their work requests stay, if need be until the
/// process ends.
static RETAINED: Mutex<BTreeMap<u64, AnyEndpoint>> = Mutex::new(BTreeMap::new());

/// An endpoint in [`RETAINED`].
#[derive(Debug)]
pub(super) struct RetainedEndpoint(u64);

impl RetainedEndpoint {
    pub(super) fn new(endpoint: AnyEndpoint) -> RetainedEndpoint {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        RetainedEndpoint::all().insert(number, endpoint);
        RetainedEndpoint(number)
    }

    /// Its handle, which may be the last.
    #[must_use]
    pub(super) fn release(self) -> Option<AnyEndpoint> {
        RetainedEndpoint::all().remove(&self.0)
    }

    fn all() -> MutexGuard<'static, BTreeMap<u64, AnyEndpoint>> {
        RETAINED.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StopState {
    const fn new() -> StopState {
        StopState {
            phase: Phase::Working,
            asked_ns: 0,
            streams: StreamsStop::NotAsked,
            rung: [0; 2],
            errors: Vec::new(),
            kept: None,
        }
    }
}

/// How far the device is stopped, in this generation of its endpoint.
#[derive(Debug)]
pub(in crate::endpoint::shared) struct DeviceStop {
    state: Mutex<StopState>,
    pub(super) changed: Condvar,
    /// Threads with a handle of the endpoint for a command.
    pub(super) orders: Arc<AtomicU32>,
}

/// The result of a look at the device that is being stopped.
pub(super) enum Stopped {
    /// It is not known yet.
    NotYet,
    /// It does nothing more.
    Yes(Quiesced),
    /// It was given up: it may still execute work, or may have done so for longer than was known.
    Unresponsive,
}

impl DeviceStop {
    pub(in crate::endpoint::shared) fn new() -> DeviceStop {
        DeviceStop {
            state: Mutex::new(StopState::new()),
            changed: Condvar::new(),
            orders: Arc::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A generation begins.
    pub(super) fn start_over(&self) {
        let kept = std::mem::replace(&mut *self.lock(), StopState::new()).kept;
        // The caller has another handle.
        drop(kept.and_then(RetainedEndpoint::release));
    }
}

impl EndingDevice for DeviceStop {
    fn wait(&self) {
        let mut state = self.lock();
        while matches!(state.phase, Phase::Failing)
            && let Some(left_ns) = (state.asked_ns.saturating_add(STOP_NS)).checked_sub(now_ns())
            && left_ns > 0
        {
            let left = Duration::from_nanos(left_ns);
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
