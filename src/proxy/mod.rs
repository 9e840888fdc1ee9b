//! Threads that go round to many: a proxy to ring for streams which cannot, at the pace of the work, and the watchdog, once a tick.
//!
//! There is one proxy for each place where one is wanted ([`Placement`]), which usually means one. A thread begins with the first that is
//! to be served and stays: waiting costs it nothing.

mod elsewhere;
mod enlistment;
mod pace;
mod placement;
mod rounds;

pub(crate) use elsewhere::{drop_elsewhere, goes_round};
pub(crate) use enlistment::Enlistment;
pub(crate) use pace::Pace;
pub(crate) use placement::Placement;
pub(crate) use rounds::{Proxied, Proxy, Rounds, Turn, proxy_at};
