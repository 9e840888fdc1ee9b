//! Progress threads: each polls all that are registered with it. The proxy rings for streams that cannot, as often as the work needs;
//! the watchdog looks at every endpoint once a tick.
//!
//! There is one proxy for each placement that is asked for ([`Placement`]), usually one. A progress thread starts when the first object is
//! registered and stays. It sleeps while it has nothing to poll.

mod deferred_drop;
mod pace;
mod placement;
mod poll_membership;
mod progress_thread;
mod workers;

#[cfg(feature = "cuda")]
pub(crate) use deferred_drop::await_dropped;
pub(crate) use deferred_drop::{await_executed, drop_elsewhere, execute_elsewhere};
pub(crate) use pace::Pace;
pub(crate) use placement::Placement;
pub(crate) use poll_membership::PollMembership;
pub(crate) use progress_thread::{
    PollResult, ProgressThread, Proxied, Proxy, TriggerCount, proxy_at,
};
pub(crate) use workers::Workers;
