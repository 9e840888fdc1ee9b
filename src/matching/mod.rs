//! Messages with tags, from any peer: a thread of the library matches them with receives.
//!
//! [`Matcher`] has a message queue to each peer. Sends are those of the queues, with a tag in the header. A receive is posted to the thread `doorbell-matcher`, which takes
//! messages out of the queues of all matchers, finds the receive of each, and stores it. `docs/messages.md` has the protocol.
//!
//! - `matcher`: [`Matcher`], as applications use it; `sends` are its calls that send.
//! - `table`: which receive takes which message. Nothing else.
//! - `engine`: the state that only the thread has; `arrivals` is what it does at a queue, with `peer`, and `copier` has the NIC copy into memory of a GPU.
//! - `pool`: memory for messages without a receive.
//! - `core`, `thread`, `inbox`: what the thread serves, the thread, and how it learns of receives.
//! - `stream_receive`, `words`: the program of a receive on a stream.
//! - `state`, `ticket`: how a receive ends, and [`MatchTicket`].
//! - `selector`, `config`: [`Source`], [`TagSelector`], [`Envelope`] and [`MatcherConfig`].

mod arrivals;
mod config;
mod copier;
mod core;
mod engine;
mod inbox;
mod matcher;
mod peer;
mod pool;
mod selector;
mod sends;
mod state;
mod stream_receive;
mod table;
#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests;
mod thread;
mod ticket;
mod words;

pub use config::MatcherConfig;
pub use matcher::Matcher;
pub use selector::{Envelope, Source, TagSelector};
pub use ticket::MatchTicket;
