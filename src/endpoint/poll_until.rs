//! Waiting in the calling thread for something that the device does.

use std::time::{Duration, Instant};

use crate::stream::{Backoff, has_own_streams, look_at_own_streams};
use crate::{Error, Result};

/// Looks until there is something, and lets the device work in between with `progress`; with pauses, if the device had nothing to do. Executes streams
/// without a thread on which this thread has queued work: what is waited for may depend on it.
///
/// # Errors
/// Those of `look`, and [`Error::Timeout`] of `operation`, after a last look.
pub(crate) fn poll_until<T>(
    operation: &'static str,
    timeout: Option<Duration>,
    progress: impl Fn() -> bool,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut backoff = if has_own_streams() {
        Backoff::of_executing()
    } else {
        Backoff::new()
    };
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        let in_time = if progress() | look_at_own_streams() {
            backoff.reset();
            deadline.is_none_or(|deadline| Instant::now() < deadline)
        } else {
            backoff.pause_until(deadline)
        };
        if !in_time {
            return look()?.ok_or(Error::Timeout {
                operation,
                timeout: timeout.unwrap_or_default(),
            });
        }
    }
}
