//! Messages between two processes, queued on streams: each send is matched with one receive, in order.
//!
//! [`MessageQueue`] is one end of a connection for messages. Short messages are *eager*: they go into a slot of the receiver, which copies them out. Of a
//! longer message only its address goes into the slot, and the receiver reads it into place (*rendezvous*). Credits bound what a sender may have in
//! the slots. `docs/messages.md` has the protocol.
//!
//! - `queue`: [`MessageQueue`], which queues programs on streams.
//! - `cpu`: its calls that send and receive from the calling thread.
//! - `receive`: what the receiver's stream does with a message that has arrived.
//! - `memory`: its slots, and the headers of messages to send.
//! - `header`: the bytes in front of each message.
//! - `matched`: what a matcher does with a queue, in place of its receives.
//! - `costs`: [`MessageCosts`], from which length on a message is better read.
//! - `recording`, `armed`: the operations of one launch of a graph.
//! - `config`, `address`, `ticket`: [`MessageConfig`], [`MessageAddress`], [`MessageTicket`].

mod address;
#[cfg(feature = "cuda")]
mod armed;
mod batch;
mod config;
mod costs;
mod cpu;
mod header;
mod matched;
mod memory;
mod queue;
mod receive;
#[cfg(feature = "cuda")]
mod recording;
mod ticket;

pub use address::MessageAddress;
#[cfg(feature = "cuda")]
pub(crate) use batch::OperationBatch;
pub use config::MessageConfig;
pub use costs::{CostCurve, MessageCosts};
pub use cpu::PostedSend;
pub(crate) use header::MessagePlace;
pub(crate) use matched::{ArrivedMessage, ReturnKind};
pub(crate) use memory::{TargetLimits, check_target};
pub(crate) use queue::Outgoing;
pub use queue::{MessageQueue, PendingSend};
pub(crate) use receive::{Taker, copy_out};
#[cfg(feature = "cuda")]
pub(crate) use recording::{RecordedMessage, Recording, RecordingPart, RecordingParts};
pub use ticket::MessageTicket;
