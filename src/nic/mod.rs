//! The NICs behind endpoints and regions: the software ConnectX inside this process (feature `softcx`), and the devices that rdma-core
//! drives (feature `verbs`), mlx5 ones directly and any other by plain verbs.
//!
//! The layers above do not depend on the kind of NIC. They use four things:
//!
//! | | what it is | made by |
//! |---|---|---|
//! | [`Nic`] | an open device | [`open`] |
//! | [`NicDomain`] | a protection domain | [`Nic::domain`] |
//! | [`RegisteredMemory`] | registered memory, by its keys | [`NicDomain::register`] and its siblings |
//! | [`NicQueuePair`] | a queue pair with two completion queues | [`NicDomain::queue_pair`] |
//!
//! | | [`Nic`], [`NicDomain`] | [`NicQueuePair`] |
//! |---|---|---|
//! | `softcx.rs` | the software ConnectX | its queue pairs |
//! | `verbs.rs`, `mlx5.rs` | a device of libibverbs | those of an mlx5 device, whose queues mlx5dv shows as memory |
//! | `verbs.rs`, `relay.rs` | the same | those of any device: a relay consumes queues in memory of the library and posts by plain verbs |
//!
//! # Control and data
//! Control calls go through the traits: making, connecting, failing and resetting queue pairs, a few times in their lives. Data does not.
//! Queues, doorbells and completions are memory, which posters, streams, GPUs and the completion code load from and store to without a call.
//! [`NicQueuePair::queues`] says where that memory is *and in which format*. All three implementations have mlx5's format today, so
//! [`Queues`] has one variant.
//!
//! # Room for another vendor
//! The traits say nothing of WQEs, doorbell records, UAR pages or CQEs: a queue pair is asked for by its [`Capacity`], and each implementation
//! sizes its own rings. Another vendor's format is another variant of [`Queues`]. The code that takes [`Queues`] apart then does not compile until
//! it has, for the new variant, its own emitter of work requests, its own doorbell, and its own reader of completions with its own way to
//! give them back. mlx5 gives completions back by a consumer record in host memory; others by a register (bnxt_re), or not at all. These
//! parts are not a trait yet: one implementation would not show which interface another one needs, and posting must not
//! cost an indirect call. docs/architecture.md, "Adding a vendor", lists the places.
// A build without any NIC is useless, but compiles.
#![cfg_attr(not(any(feature = "softcx", feature = "verbs")), allow(dead_code))]

mod device;
mod domain;
#[cfg(feature = "verbs")]
mod mlx5;
mod peer;
mod queue_pair;
#[cfg(feature = "verbs")]
mod relay;
#[cfg(feature = "softcx")]
mod softcx;
#[cfg(feature = "verbs")]
mod verbs;

#[cfg(feature = "verbs")]
pub use crate::verbs::MemoryKeys;
#[cfg(feature = "verbs")]
pub(crate) use crate::verbs::{KeptAlive, Step, Steps};
pub(crate) use device::{Nic, list, open};
pub(crate) use domain::{NicAddress, NicDomain, RegisteredMemory};
#[cfg(all(feature = "cuda", feature = "softcx"))]
pub(crate) use doorbell_softcx::device::Foreign;
#[cfg(feature = "softcx")]
pub use doorbell_softcx::device::{CommandKind, CommandKinds, Counters, Faults};
pub(crate) use doorbell_wire::memory::{PageBox, PageSlice, Pages, QueuePairMemory};
pub use doorbell_wire::verbs::Access;
pub use doorbell_wire::verbs::Transport;
pub(crate) use doorbell_wire::verbs::{Abilities, Attributes, Capacity, State};
pub(crate) use peer::{PeerQueuePair, Unreadable};
pub(crate) use queue_pair::{NicQueuePair, Queues};
#[cfg(feature = "verbs")]
pub(crate) use verbs::adopt;
