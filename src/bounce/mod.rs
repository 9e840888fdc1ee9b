//! Transfers of memory that no NIC reaches, through pinned memory in between.
//!
//! [`Bounce`] moves any length between foreign memory and a peer, over an ordinary endpoint, in chunks: while one chunk is on the wire, the
//! next one is copied. A [`CopyEngine`] makes the copies: [`MemcpyEngine`] for memory that this process has mapped, and `CudaEngine`
//! (feature `cuda`) for memory of a GPU.

mod chunk_counts;
#[cfg(feature = "cuda")]
mod cuda;
mod engine;
mod transfer;

#[cfg(feature = "cuda")]
pub use cuda::CudaEngine;
pub use engine::{CopyEngine, CopyTicket, MemcpyEngine};
pub use transfer::{Bounce, BounceConfig};
