//! Devices, protection domains, and the memory that a device may access.

mod control;
mod device;
mod mapping;
mod memory;
mod remote;

pub use crate::nic::{Access, Counters, Faults};
pub use control::Control;
pub use device::{Device, ProtectionDomain};
pub use memory::{REGION_BYTES_MAX, Region, Slice};
pub use remote::RemoteRegion;
