//! Endpoints: a queue pair with its completions, its peer, and its operations on streams.
//!
//! - [`Endpoint`] prepares and queues operations; [`Prepared`] is one that is ready, [`Ticket`] tells what became of it.
//! - `post` is the endpoint as applications use it; `prepare` inside it is what all its operations begin with, `flow` is the room in its queues.
//! - `queue` is the state of one queue, send or receive, with its completions: `completions` reaps them, `status` says what became of
//!   an operation, `ownership` whether the host or kernels post, `held_regions` keeps the memory of work in flight.
//! - `outstanding` is the ring of work requests in flight, which the poster fills and the reaper empties.
//! - `shared` is what the endpoint, its tickets, programs on streams and the watchdog hold together. `proxy_doorbells` stores doorbells for
//!   streams that cannot. `failure` records a failure; `stopping` and `stop_state` then stop the device, and `release_waits` ends the waits.
//!   `reset` and `generation` end one generation of the endpoint and start the next. `in_flight` counts programs that streams have.
//! - `device_queue` is a send queue that kernels own. `watchdog` looks after deadlines and failures.
//! - [`Address`] is what two endpoints exchange, [`Listener`] and [`Channel`] a way to do so.

mod address;
mod clock;
mod config;
mod connection;
mod deadline;
mod device_queue;
mod device_queue_state;
#[cfg(feature = "cuda")]
mod operation_template;
mod outcome;
mod outstanding;
mod path;
mod poll_until;
mod post;
mod prepared;
mod queue;
mod rendezvous;
mod shared;
mod sync_path;
#[cfg(all(test, not(loom)))]
mod tests;
mod ticket;
mod value;
mod watchdog;
mod words;
mod work;

pub use crate::region::Control;
pub use address::Address;
pub use config::{Completion, EndpointConfig, Operation, QueueKind};
pub use connection::AbortHandle;
#[cfg(feature = "verbs")]
pub(crate) use connection::Life;
#[cfg(any(feature = "group", feature = "verbs"))]
pub(crate) use deadline::Deadline;
#[cfg(feature = "group")]
pub(crate) use deadline::system;
pub(crate) use device_queue::DeviceQueue;
#[cfg(feature = "cuda")]
pub(crate) use device_queue_state::fresh_mark;
#[cfg(feature = "cuda")]
pub(crate) use operation_template::OperationTemplate;
pub use outcome::Status;
pub use path::PathReport;
pub use post::Endpoint;
#[cfg(feature = "cuda")]
pub(crate) use prepared::graph_post_all;
pub use prepared::{Prepared, Rejected, stream_post, stream_post_all};
#[cfg(feature = "verbs")]
pub(crate) use rendezvous::resolve;
pub use rendezvous::{Channel, Listener};
pub use ticket::Ticket;
pub use value::{Condition, stream_wait_value32, stream_write_value32, wait_value32};
#[cfg(feature = "cuda")]
pub(crate) use value::{value_wait, value_write};
pub use work::Work;
