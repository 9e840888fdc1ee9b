//! GPU-triggered RDMA: queue a transfer on a stream the way you queue a kernel, and let the GPU ring the NIC.
//!
//! In plain GPUDirect RDMA the data goes straight between GPU and NIC, but a CPU must wait for the GPU, post the transfer,
//! poll for it, and launch again. Here the CPU only *prepares*: the work request lies ready in the queue, and the few stores
//! and polls that ring its doorbell and wait for it are a [program](peer::Program) that a stream executes in its turn.
//!
//! | you want to | look at |
//! |---|---|
//! | open a NIC, register memory | [`Device`], [`ProtectionDomain`], [`Region`] |
//! | register the same memory again and again | [`RegionCache`] |
//! | transfer memory that no NIC reaches | [`Bounce`], [`CopyEngine`] |
//! | connect two ends | [`Endpoint`], [`Address`], [`Listener`], [`Channel`] |
//! | connect by rdma_cm, with peers that need not know this library (feature `verbs`) | `cm`: `CmConnection`, `CmListener` |
//! | queue transfers and waits on a stream | [`Endpoint::stream_queue_send`], [`Endpoint::stream_wait_cq`], [`Work`] |
//! | prepare now and queue later, many at once | [`Endpoint::prepare_send`], [`stream_post`], [`stream_post_all`] |
//! | signal and wait by words in memory | [`stream_write_value32`], [`stream_wait_value32`] |
//! | do so on a stream of a GPU (feature `cuda`) | `cuda`: `CudaContext`, `CudaStream` |
//! | have a kernel of the application ring (feature `cuda`) | `cuda`: `KernelStream`, `Trigger`; `include/doorbell/device.cuh` |
//! | register and transfer the memory of a GPU (feature `cuda`) | `cuda`: `DeviceBuffer`, `Region::register_device` |
//! | do so in a CUDA graph, launched again and again (feature `cuda`) | `graph`: `GraphBuilder`, `GraphExec` |
//! | let threads of a GPU make and ring work requests themselves | [`KernelQueue`], `include/doorbell/queue.h` |
//! | know what became of it | [`Ticket`], [`Endpoint::failure`], [`Error`] |
//! | be one of many processes, however they were started (feature `group`) | [`Group`], [`LaunchEnvironment`], [`Store`] |
//! | post and poll from the CPU | [`Endpoint::post_send`], [`Endpoint::post_recv`], [`Endpoint::poll_cq`], [`Endpoint::wait_cq`] |
//!
//! The example of the README, as `examples/first.rs` has it:
//!
//! ```
#![doc = include_str!("../examples/first.rs")]
//! ```
//!
//! # Control paths and what they need
//! The NICs are the software ConnectX inside the process (`softcx`, with the feature of that name) and, with the feature `verbs`, the devices that rdma-core drives: mlx5
//! ones, whose doorbells streams can ring, and any others by plain verbs. [`Control`] says who rings: the stream itself, a thread of the
//! library that looks at trigger words, or the calling thread once it has waited for the stream; [`Endpoint::path`] says which way is in
//! force and why no better one. The calls and their results are the same on all of them.
//!
//! Streams are [`HostStream`]s, which every machine has, and with the feature `cuda` those of a GPU: `CudaStream`. Nothing in here has
//! run on a real card or on a GPU.
//!
//! # Threads
//! Everything is `Send`; posting to an endpoint takes `&mut`. [`stream_post`] of prepared operations of one endpoint from
//! several threads at once is refused, not waited for.

#[macro_use]
mod setters;

pub mod bounce;
#[cfg(feature = "verbs")]
pub mod cm;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod endpoint;
mod error;
#[cfg(feature = "cuda")]
pub mod graph;
#[cfg(feature = "group")]
pub mod group;
pub mod kernel_queue;
mod nic;
mod proxy;
pub mod region;
pub mod stream;
#[cfg(feature = "verbs")]
mod verbs;

/// The crate whose types of contexts, streams and memory the `cuda` room takes and returns, in the version that this library was built with.
#[cfg(feature = "cuda")]
pub use cudarc;
#[doc(hidden)]
pub use doorbell_wire::{mlx5, peer};

#[cfg(feature = "cuda")]
pub use bounce::CudaEngine;
pub use bounce::{Bounce, BounceConfig, CopyEngine, MemcpyEngine};
#[cfg(feature = "verbs")]
pub use cm::{CmConnection, CmListener, CmRequest};
#[cfg(feature = "cuda")]
pub use cuda::{
    Capabilities, CudaContext, CudaStream, DeviceBuffer, Execution, KernelStream, TimingEvent,
    Trigger, WritesOrdering,
};
pub use doorbell_wire::mlx5::Opcode;
pub use doorbell_wire::verbs::WcStatus;
pub use endpoint::{
    AbortHandle, Address, Channel, Completion, Condition, Control, Endpoint, EndpointConfig,
    Listener, Operation, Path, Prepared, Rejected, Side, Status, Ticket, Work, stream_post,
    stream_post_all, stream_wait_value32, stream_write_value32, wait_value32,
};
pub use error::{Cause, Error, Result, WorkError};
#[cfg(feature = "cuda")]
pub use graph::{GraphBuilder, GraphExec};
#[cfg(feature = "group")]
pub use group::{Group, GroupConfig, LaunchEnvironment, Store, Token};
#[cfg(feature = "cuda")]
pub use kernel_queue::PutStep;
pub use kernel_queue::{KernelQueue, QueueView};
#[cfg(feature = "cuda")]
pub use region::DeviceCache;
pub use region::{
    Access, CacheConfig, CacheCounters, Cached, Device, Held, Invalidation, PageSize,
    ProtectionDomain, Region, RegionCache, RegionKind, RemoteRegion, RemoteSlice, Slice,
};
#[cfg(feature = "softcx")]
pub use region::{Counters, Faults};
pub use stream::{Event, Executor, HostStream};
