//! The thread that serves all matchers of the process.

use std::sync::{Arc, OnceLock};

use crate::proxy::{Pace, Placement, PollResult, ProgressThread};
use crate::{Error, Result};

/// What the thread serves.
pub(super) trait MatchServed: Send + Sync {
    /// Does what can be done without waiting.
    fn serve(&self) -> PollResult;
}

static THREAD: OnceLock<Result<Arc<ProgressThread<dyn MatchServed>>>> = OnceLock::new();

/// The thread, started with its first use. It spins for some time after it had something to do, and then sleeps for 200 us at most, or until it is woken.
///
/// # Errors
/// [`Error::System`] if there is no thread to be had.
pub(super) fn matcher_thread() -> Result<&'static ProgressThread<dyn MatchServed>> {
    THREAD
        .get_or_init(|| {
            let serve = <dyn MatchServed>::serve;
            // What it holds of a matcher has no queue once the matcher is dropped, so this does not block.
            let name = "doorbell-matcher";
            ProgressThread::start(name, Placement::Anywhere, Pace::default(), serve, drop)
        })
        .as_deref()
        .map_err(Error::clone)
}

/// Ends the sleep of the thread, if there is one and it sleeps.
pub(super) fn wake_thread() {
    if let Some(Ok(thread)) = THREAD.get() {
        thread.wake_thread();
    }
}
