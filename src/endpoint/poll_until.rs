//! Waiting in the calling thread for something that the device does.

use std::time::{Duration, Instant};

use crate::stream::{Backoff, has_own_streams, look_at_own_streams};
use crate::{Error, Result};

/// Calls `look` in this thread until it finds something, for at most `timeout`; `None` waits for ever. For a thread that waits for several things, of which any may come first:
/// `look` polls them all, by calls that do not wait, such as [`Endpoint::poll_cq`](crate::Endpoint::poll_cq). Between two looks this waits as the other waits of this library do: it spins for a
/// few microseconds, offers the core to others, and then sleeps for up to 100 us.
///
/// It also executes host streams without a thread on which this thread has queued work.
///
/// ```
/// # #[cfg(feature = "softcx")]
/// # fn main() -> doorbell::Result<()> {
/// # use doorbell::{Device, Endpoint, EndpointConfig, QueueKind, Work};
/// # use std::time::Duration;
/// # let domain = Device::open("softcx")?.protection_domain();
/// # let config = EndpointConfig::default();
/// # let mut sender = Endpoint::new(&domain, &config)?;
/// # let mut endpoints = [Endpoint::new(&domain, &config)?, Endpoint::new(&domain, &config)?];
/// # endpoints[1].connect(&sender.address())?;
/// # sender.connect(&endpoints[1].address())?;
/// # endpoints[1].post_recv(7, &[])?;
/// # sender.post_send(&Work::send_inline(b""))?;
/// let (index, received) = doorbell::wait_until(Some(Duration::from_secs(5)), || -> doorbell::Result<_> {
///     for (index, endpoint) in endpoints.iter_mut().enumerate() {
///         if let Some(completion) = endpoint.poll_cq(QueueKind::Recv)? {
///             return Ok(Some((index, completion)));
///         }
///     }
///     Ok(None)
/// })?;
/// assert_eq!((index, received.wr_id), (1, 7));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "softcx"))]
/// # fn main() {}
/// ```
///
/// # Errors
/// Those of `look`; [`Error::Timeout`], after a last look.
pub fn wait_until<T, E: From<Error>>(
    timeout: Option<Duration>,
    mut look: impl FnMut() -> std::result::Result<Option<T>, E>,
) -> std::result::Result<T, E> {
    let look = || Ok(look().transpose());
    poll_until("wait_until", timeout, || false, look)?
}

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
