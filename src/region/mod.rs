//! Devices, protection domains, and the memory that a device may access.

#[cfg(feature = "verbs")]
mod adopt;
mod cache;
mod control;
mod copy;
mod device;
#[cfg(feature = "cuda")]
mod doorbell_probe;
mod element;
mod foreign_registration;
mod fork_guard;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_cache;
mod huge;
mod mapping;
mod memory;
mod monitor;
mod remote;
mod table;

pub use crate::nic::Access;
#[cfg(feature = "verbs")]
pub use crate::nic::MemoryKeys;
#[cfg(feature = "softcx")]
pub use crate::nic::{CommandKind, CommandKinds, Counters, Faults};
pub use cache::{
    CacheConfig, CacheCounters, CachedRegion, HeldRegistration, Invalidation, RegionCache,
};
pub use control::Control;
pub use device::{Device, ProtectionDomain};
pub use element::Element;
pub use foreign_registration::{DeviceMemory, RegionKind, RegistrationReport};
#[cfg(feature = "cuda")]
pub(crate) use gpu::check_gpus;
#[cfg(feature = "cuda")]
pub use gpu_cache::DeviceCache;
pub use huge::PageSize;
pub use memory::{REGION_BYTES_MAX, Region, RegionSpan, Slice};
pub use remote::{RemoteRegion, RemoteSlice};
