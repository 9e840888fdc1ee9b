//! Collective operations on streams: all ranks of a communicator exchange messages, and have a common result.
//!
//! - `communicator`: [`Communicator`], which prepares operations and queues them on streams.
//! - `algorithms`: what a rank does for each operation, by the textbook's algorithms.
//! - `schedule`: rounds of messages, which algorithms make.
//! - `reduction`: types of numbers, and what two of them become.
//! - `local`: copies and reductions between messages.
//! - `rounds`: gives the rounds of an operation to a stream or a graph.
//! - `matched`: operations whose messages are written straight into place.
//! - `target`, `recording`: what the messages and the local work of a rank are given to: a stream, or a graph.
//! - `ticket`: [`CollectiveTicket`], which reports how a launch fares.
//! - `costs`, `measure`: by which algorithms are chosen.

mod algorithms;
mod communicator;
mod costs;
mod local;
mod matched;
mod measure;
#[cfg(feature = "cuda")]
mod recording;
mod reduction;
mod rounds;
mod schedule;
mod target;
#[cfg(all(test, not(loom)))]
mod tests;
mod ticket;

pub use algorithms::Algorithm;
pub use communicator::{Collective, Communicator};
pub use costs::CollectiveCosts;
#[cfg(feature = "cuda")]
pub(crate) use recording::RecordedCollective;
pub use reduction::{DataType, ReduceOp, Reduction};
pub use ticket::CollectiveTicket;
