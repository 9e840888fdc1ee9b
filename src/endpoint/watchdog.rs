//! The watchdog: one thread of the process that looks after operations under way, so that no wait is for ever.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::proxy::{Pace, Placement, PollResult, ProgressThread};
use crate::{Error, Result};

/// How often the watchdog looks at its endpoints, while there are any. If an endpoint is not polled, an error
/// completion is noticed after up to this time.
const TICK: Duration = Duration::from_millis(1);

/// What the watchdog looks after.
pub(super) trait Watched: Send + Sync {
    /// Looks at deadlines and errors.
    fn look(&self) -> PollResult;

    /// Gives up the thread's handle.
    fn drop_reference(self: Arc<Self>);
}

/// The watchdog, started with its first use.
///
/// # Errors
/// [`Error::System`] if there is no thread to be had.
pub(super) fn watchdog() -> Result<&'static ProgressThread<dyn Watched>> {
    static WATCHDOG: OnceLock<Result<Arc<ProgressThread<dyn Watched>>>> = OnceLock::new();
    WATCHDOG
        .get_or_init(|| {
            let look = <dyn Watched>::look;
            ProgressThread::start(
                "doorbell-watchdog",
                Placement::Anywhere,
                Pace::every(TICK),
                look,
                <dyn Watched>::drop_reference,
            )
        })
        .as_deref()
        .map_err(Error::clone)
}
