//! Devices, protection domains, and the memory that a device may access.

mod device;
mod memory;

pub use crate::nic::{Access, Counters, Faults};
pub use device::{Device, ProtectionDomain};
pub use memory::{REGION_BYTES_MAX, Region, RemoteRegion, Slice};
