//! GPU-triggered RDMA: queue a transfer on a stream the way you queue a kernel.

pub mod endpoint;
mod error;
pub mod mlx5;
pub mod peer;
pub mod region;
pub mod soft;
mod status;
pub mod stream;

pub use endpoint::{
    Address, Channel, Completion, Condition, Control, Endpoint, EndpointConfig, Listener,
    Operation, Path, Prepared, Rejected, Side, Status, Ticket, Work, stream_post, stream_post_all,
    stream_wait_value32, stream_write_value32, wait_value32,
};
pub use error::{Cause, Error, Result, WorkError};
pub use region::{Access, Counters, Device, Faults, ProtectionDomain, Region, RemoteRegion, Slice};
pub use status::WcStatus;
pub use stream::{Event, Executor, HostStream};
