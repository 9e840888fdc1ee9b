//! One interface to the NICs that there are: the software ConnectX inside this process, and with the feature `verbs` the cards that
//! rdma-core drives.
//!
//! Control goes through here, and which NIC it is ends here: queues, programs and completions are memory, of the same formats on all of
//! them.

mod device;
mod memory;
mod queue_pair;
mod remote;

#[cfg(feature = "cuda")]
pub(crate) use crate::soft::foreign::Foreign;
pub use crate::soft::{Access, Counters, Faults};
pub(crate) use crate::soft::{Attributes, Pages, State};
#[cfg(feature = "verbs")]
pub(crate) use crate::verbs::{Step, Steps};
pub(crate) use device::{Device, Domain};
pub(crate) use memory::MemoryRegion;
pub(crate) use queue_pair::{QueueMemory, QueuePair, QueuePairConfig};
pub(crate) use remote::{RemoteQueuePair, Unreadable};
