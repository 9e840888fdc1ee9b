//! The processes of a job: discovery of the ranks, exchange of their addresses, and propagation of the failure of one of them.
//!
//! - [`LaunchEnvironment`] is what the launcher says: rank, size, where rank 0 is, and the [`Token`] that keeps strangers out.
//! - [`Store`] is the key-value store by which the processes exchange their addresses. Rank 0 hosts it: `key_value_store` is its
//!   state machine, without sockets; `store_server` is the thread with the sockets, each a `connection`. `connect` and `client` are the other
//!   end, and `rendezvous` is how it finds rank 0. [`Message`] and `handshake` are what goes over the sockets.
//! - `exchange` gives addresses to all ranks through the store of the launcher, where it has one: `pmix`.
//! - [`Group`] has a connected endpoint to each peer, made when the first of the two asks for it. `endpoints` makes further ones, `messages` opens queues for messages with peers, and
//!   `communicators` and `matchers` make communicators and matchers of these queues. `links` connects what two ranks open by a tag.

mod client;
mod communicators;
mod connect;
mod connection;
mod endpoints;
mod exchange;
mod handshake;
mod interfaces;
mod key_value_store;
mod launch_environment;
mod links;
mod matchers;
mod member;
mod mesh;
mod message;
mod messages;
mod pmix;
mod rendezvous;
mod socket;
mod store;
mod store_server;
#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests;
mod token;
mod torch_store;

pub use launch_environment::LaunchEnvironment;
pub use member::{Group, GroupConfig};
pub use message::Message;
pub use store::Store;
pub use token::Token;

/// The largest group.
pub(crate) const SIZE_MAX: u32 = 1 << 16;
