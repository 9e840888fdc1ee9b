//! A job of many processes: who they are, how they find each other, and what becomes of the others when one of them ends.
//!
//! - [`LaunchEnvironment`] is what the launcher says: rank, size, where rank 0 is, and the [`Token`] that keeps strangers out.
//! - [`Store`] is the key-value store by which the processes exchange their addresses. Rank 0 hosts it: `key_value_store` is its
//!   state machine, without sockets; `host` is the thread with the sockets, each a `connection`. `connect` and `client` are the other
//!   end, and `rendezvous` is how it finds rank 0. [`Message`] and `handshake` are what goes over the sockets.
//! - [`Group`] has a connected endpoint to each peer, made when the first of the two asks for it.
//!
//! # When a rank ends
//! A group fails as a whole, once: when the connection between a rank and the store ends before that rank has [left](Group::leave), every
//! other one is told which rank it was. Its calls return [`Error::Rank`](crate::Error::Rank) from then on, and its endpoints are aborted, so
//! that no stream goes on waiting. A killed process is noticed at once, a host that loses its power after about 20 seconds. A process that is
//! stopped, or hangs, keeps its connection: there the deadlines of the calls are what ends a wait.
//!
//! # What the token protects against
//! Each side proves that it has the token without showing it, and nothing that the store knows is told to a process before it has done so. So who can
//! reach the port, and does not know the token, can neither join nor read nor pose as the store; at most it can hold places in the queue of
//! connections for a few seconds. What follows is neither encrypted nor signed: who can read the network can read it, and who can change it can
//! take a connection over. And who sees a handshake can try out tokens at leisure, so a token should be long and random.
//! [`LaunchEnvironment::from_env`] says where the token is from; without `DOORBELL_TOKEN` it may be no secret.

mod client;
mod connect;
mod connection;
mod handshake;
mod host;
mod key_value_store;
mod launch_environment;
mod member;
mod mesh;
mod message;
mod rendezvous;
mod socket;
mod store;
#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests;
mod token;

pub use launch_environment::LaunchEnvironment;
pub use member::{Group, GroupConfig};
pub use message::Message;
pub use store::Store;
pub use token::Token;

/// The largest group.
pub const SIZE_MAX: u32 = 1 << 16;
