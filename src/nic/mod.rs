//! One interface to the NICs that there are: the software ConnectX inside this process, and with the feature `verbs` the cards that
//! rdma-core drives.
//!
//! Control goes through here, and which NIC it is ends here: queues, programs and completions are memory, of the same formats on all of
//! them.

mod device;
mod memory;
mod queue_pair;
mod remote;

#[cfg(feature = "verbs")]
pub(crate) use crate::verbs::{Step, Steps};
pub(crate) use device::{Device, Domain};
#[cfg(feature = "cuda")]
pub(crate) use doorbell_softcx::device::Foreign;
pub use doorbell_softcx::device::{Counters, Faults};
pub(crate) use doorbell_wire::memory::Pages;
pub use doorbell_wire::verbs::Access;
pub(crate) use doorbell_wire::verbs::{Attributes, State};
pub(crate) use memory::MemoryRegion;
pub(crate) use queue_pair::{QueueMemory, QueuePair, QueuePairConfig};
pub(crate) use remote::{RemoteQueuePair, Unreadable};
