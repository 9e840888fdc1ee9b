//! A card through rdma-core: contexts, memory, queue pairs and events of libibverbs, and by mlx5dv the memory of their queues.
//!
//! Control goes through the verbs calls; every one that fails is an error that names it and its errno, and leaves nothing behind.
//! Data does not go through them: the rings, records and UAR pages that mlx5dv shows are those of `wire::mlx5` to write and read.

mod address_handle;
mod address_table;
mod adopted;
mod call;
mod completion_queue;
mod context;
mod domain;
mod events;
mod gid;
mod managed;
mod nearness;
mod port;
mod qp_states;
mod queue_pair;
mod relay;
mod select;

pub(crate) use address_handle::{TabledAddress, VerbsAddressHandle};
pub(crate) use adopted::KeptAlive;
pub(crate) use context::VerbsDevice;
pub use domain::MemoryKeys;
pub(crate) use domain::{AdoptedMemory, Domain, MemoryRegion};
pub(crate) use managed::{Step, Steps};
pub(crate) use port::{Link, PortAddress};
pub(crate) use qp_states::VerbsRemote;
pub(crate) use queue_pair::VerbsQueuePair;
pub(crate) use relay::Relay;

#[cfg(test)]
mod tests;
