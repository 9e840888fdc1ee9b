//! Endpoints: a queue pair with its completions, its peer, and its operations on streams.
//!
//! The calls:
//! - `post`: [`Endpoint`] as applications use it; inside it, `prepare` makes operations, `datagram` those of UD endpoints, and `flow` finds room in the queues.
//! - `work`: [`Work`], what a send or an RDMA operation transfers.
//! - `prepared`: [`Prepared`], an operation that is ready; gives its program to a stream.
//! - `sync_path`: executes a program in the calling thread, on the path `sync`.
//! - `ticket`: [`Ticket`], the handle of a queued operation.
//! - `ticket_future`: waits for a ticket without a thread of the application.
//! - `outcome`: [`Status`], and what a completion proves about operations.
//! - `late_read`: a read whose source the stream finds out.
//! - `stream_value`: words in memory, on streams.
//! - `value`: programs that write and wait for words in memory.
//! - `peer_value`: waits for words that the peer writes.
//! - `operation_template` (feature `cuda`): an operation that a CUDA graph prepares anew for each launch.
//! - `config`: [`EndpointConfig`], [`QueueKind`] and [`Completion`].
//! - `path`: [`PathReport`], the choice of the control path.
//!
//! The connection:
//! - `connection`: creates, connects, aborts and resets an endpoint.
//! - `address`: [`Address`], what two endpoints exchange.
//! - `address_handle`: [`AddressHandle`], where sends of UD endpoints go.
//! - `rendezvous`: [`Listener`] and [`Channel`], a way to exchange it.
//! - `deadline`: the deadline of a call that uses a socket.
//! - `clock`: time as a number that fits an atomic.
//! - `poll_until`: waits in the calling thread for something that the device does.
//!
//! The state:
//! - `shared`: what the endpoint, its tickets, programs on streams and the watchdog share.
//! - `shared/owner`: the endpoint as streams see it, the owner of programs.
//! - `shared/proxy_doorbells`: stores doorbells for streams that cannot.
//! - `shared/in_flight`: counts the programs that streams have.
//! - `shared/status`: the status of an operation, in this generation of the endpoint or an earlier one.
//! - `shared/watched`: what the watchdog does at each visit.
//! - `shared/recovery`: everything from a failure to the next generation.
//! - `queue`: the state of one queue, send or receive.
//! - `queue/completions`: processes completions.
//! - `queue/status`, `queue/wait_word`: the statuses of the operations of a queue, and of one wait.
//! - `queue/ownership`: whether the host or kernels post.
//! - `queue/held_regions`: keeps the memory of work in flight.
//! - `queue/turn_waits`: the streams that wait for their turn behind another stream.
//! - `outstanding`: the ring of work requests in flight, which the poster fills and the thread that processes completions empties.
//! - `words`: the words by which streams and the library's threads report progress.
//! - `owned_queue`: a send queue that kernels own.
//! - `queue_view`: [`QueueView`], what kernels are given of it.
//! - `replay` (feature `cuda`): operations of graphs that the application captures and launches by itself.
//! - `device_queue_state`: the words that it shares with these kernels.
//! - `watchdog`: the thread that looks for failures and missed deadlines.

mod address;
mod address_handle;
mod clock;
mod config;
mod connection;
mod deadline;
mod device_queue_state;
mod late_read;
#[cfg(feature = "cuda")]
mod operation_template;
mod outcome;
mod outstanding;
mod owned_queue;
mod path;
mod peer_value;
mod poll_until;
mod post;
mod prepared;
mod queue;
mod queue_view;
mod rendezvous;
#[cfg(feature = "cuda")]
mod replay;
mod shared;
mod stream_value;
mod sync_path;
#[cfg(all(test, not(loom)))]
mod tests;
mod ticket;
mod ticket_future;
mod value;
mod watchdog;
mod words;
mod work;

pub use crate::nic::Transport;
pub use crate::region::Control;
pub use address::Address;
pub use address_handle::AddressHandle;
pub use config::{Completion, DatagramSource, EndpointConfig, Operation, QueueKind};
pub use connection::AbortHandle;
#[cfg(feature = "verbs")]
pub(crate) use connection::ConnectedGeneration;
#[cfg(any(feature = "group", feature = "verbs"))]
pub(crate) use deadline::Deadline;
#[cfg(feature = "group")]
pub(crate) use deadline::system;
#[cfg(feature = "cuda")]
pub(crate) use device_queue_state::fresh_marks;
pub(crate) use device_queue_state::state_words;
pub(crate) use late_read::LateRead;
#[cfg(feature = "cuda")]
pub(crate) use operation_template::{OperationTemplate, OwnedSlices};
pub use outcome::{Status, TransferDetails};
pub(crate) use owned_queue::OwnedSendQueue;
pub use path::PathReport;
pub(crate) use poll_until::poll_until;
pub use poll_until::wait_until;
pub use post::Endpoint;
#[cfg(feature = "cuda")]
pub(crate) use prepared::graph_post_all;
pub(crate) use prepared::stream_post_among;
pub use prepared::{Prepared, Rejected, stream_post, stream_post_all};
pub use queue_view::QueueView;
#[cfg(feature = "verbs")]
pub(crate) use rendezvous::resolve;
pub use rendezvous::{Channel, Listener};
#[cfg(feature = "cuda")]
pub use replay::pages::PagePush;
pub use stream_value::{
    Condition64, stream_wait_count64, stream_wait_value32, stream_wait_value64,
    stream_write_value32, stream_write_value64, wait_value64,
};
pub use ticket::Ticket;
pub use ticket_future::TicketFuture;
pub(crate) use ticket_future::{Awaited, notify};
pub use value::{Condition, wait_value32};
#[cfg(feature = "cuda")]
pub(crate) use value::{ValueWait, value_wait, value_write};
pub use work::Work;
