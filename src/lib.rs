//! GPU-triggered RDMA: queue a transfer on a stream the way you queue a kernel.

mod error;
pub mod mlx5;
pub mod peer;
pub mod soft;
pub mod stream;

pub use error::{Error, Result};
