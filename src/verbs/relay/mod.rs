//! Any verbs device behind the queues of an mlx5 one: a *relay* consumes rings and doorbell records in memory of this library, posts
//! what it finds by plain verbs, and writes completions as a card would. So the code above it does not depend on whether there is
//! such a card.
//!
//! A relay has no thread. It works in the threads that ring ([`Relay::rung`]) or look for completions ([`Relay::turn`]), one at a
//! time.

mod batch;
mod completion_ring;
mod core;
mod cq_batch;
mod limits;
mod pair;
mod provider;
mod recv_queue;
mod request;
mod send_queue;
mod staging;
mod work;

#[cfg(test)]
mod tests;

pub(super) use limits::Limits;
pub(crate) use pair::Relay;
