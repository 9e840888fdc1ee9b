//! Endpoints: a queue pair with its completions, its peer, and its operations on streams.
//!
//! - [`Endpoint`] prepares and queues operations; [`Prepared`] is one that is ready, [`Ticket`] tells what became of it.
//! - `queue` is the endpoint as applications use it, `prepare` inside it what all its operations begin with.
//! - `side` is one queue with its completions as poster, reaper, stream and watchdog see it; `ledger` holds what work in
//!   flight needs to live; `shared` is what all of them hold; `watchdog` sees to it that no wait is for ever.
//! - [`Address`] is what two endpoints exchange, [`Listener`] and [`Channel`] a way to do so.

mod address;
mod clock;
mod config;
mod connection;
mod deadline;
mod ledger;
mod lent;
mod path;
mod prepared;
mod queue;
#[cfg(feature = "cuda")]
mod recipe;
mod rendezvous;
mod shared;
mod side;
mod ticket;
mod value;
mod watchdog;
mod words;
mod work;

pub use crate::region::Control;
pub use address::Address;
pub use config::{Completion, EndpointConfig, Operation, Side};
pub use connection::AbortHandle;
#[cfg(feature = "verbs")]
pub(crate) use connection::Life;
pub(crate) use deadline::{Deadline, system};
pub(crate) use lent::Lent;
#[cfg(feature = "cuda")]
pub(crate) use lent::fresh_mark;
pub use path::Path;
#[cfg(feature = "cuda")]
pub(crate) use prepared::graph_post_all;
pub use prepared::{Prepared, Rejected, stream_post, stream_post_all};
pub use queue::Endpoint;
#[cfg(feature = "cuda")]
pub(crate) use recipe::Recipe;
#[cfg(feature = "verbs")]
pub(crate) use rendezvous::resolve;
pub use rendezvous::{Channel, Listener};
pub use ticket::{Status, Ticket};
pub use value::{Condition, stream_wait_value32, stream_write_value32, wait_value32};
#[cfg(feature = "cuda")]
pub(crate) use value::{value_wait, value_write};
pub use work::Work;
