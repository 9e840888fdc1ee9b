//! GPU-triggered RDMA: queue a transfer on a stream as you queue a kernel, and the GPU rings the NIC.
//!
//! In plain GPUDirect RDMA the data goes straight between GPU and NIC, but a CPU waits for each kernel, posts each transfer and polls for its
//! completion. Here the CPU prepares the work request in advance. The stores that ring its doorbell and the poll that waits for its
//! completion are a short program, which the stream executes in order.
//!
//! | you want to | use |
//! |---|---|
//! | open a NIC, register memory | [`Device`], [`ProtectionDomain`], [`Region`] |
//! | register the same memory repeatedly | [`RegionCache`] |
//! | transfer memory that no NIC can reach | [`Bounce`], [`CopyEngine`] |
//! | send and receive messages, eager or by rendezvous, on streams | [`MessageQueue`] |
//! | match messages by tag, from any peer | [`Matcher`] |
//! | connect two endpoints | [`Endpoint`], [`Address`], [`Listener`], [`Channel`] |
//! | send unreliable datagrams (UD) | [`EndpointConfig::transport`], [`AddressHandle`], [`Work::to`] |
//! | connect by rdma_cm, also with programs that do not use this library (feature `verbs`) | `CmConnection`, `CmListener` |
//! | queue transfers and waits on a stream | [`Endpoint::stream_queue_send`], [`Endpoint::stream_wait_cq`], [`Work`] |
//! | prepare now and queue later, several at once | [`Endpoint::prepare_send`], [`stream_post`], [`stream_post_all`] |
//! | signal and wait by words in memory | [`stream_write_value32`], [`stream_wait_value32`] |
//! | use streams of a GPU (feature `cuda`) | `CudaContext`, `CudaStream` |
//! | ring from a kernel of the application (feature `cuda`) | `TriggerStream`, `Trigger`; `include/doorbell/device.cuh` |
//! | register and transfer memory of a GPU (feature `cuda`) | `DeviceBuffer`, `Region::register_device` |
//! | use a CUDA graph, launched repeatedly (feature `cuda`) | `GraphBuilder`, `GraphExec` |
//! | let threads of a GPU make and ring work requests | [`DeviceQueue`], `include/doorbell/queue.h` |
//! | know the result of an operation | [`Ticket`], [`Endpoint::failure`], [`Error`] |
//! | run as one of many processes, whatever launched them (feature `group`) | `Group`, `LaunchEnvironment`, `Store` |
//! | post and poll from the CPU | [`Endpoint::post_send`], [`Endpoint::post_recv`], [`Endpoint::poll_cq`], [`Endpoint::wait_cq`] |
//!
//! A first program, `examples/first.rs`. The README has a shorter form of it.
//!
//! ```
#![doc = include_str!("../examples/first.rs")]
//! ```
//!
//! # Control paths
//! The NICs are the software ConnectX inside the process (feature `softcx`, on by default) and, with the feature `verbs`, the devices of
//! rdma-core. Streams can ring the doorbells of mlx5 devices; other devices are used by plain verbs. [`Control`] names the component
//! that rings: the stream itself, a thread of the library that polls trigger words, or the calling thread after it has waited for the
//! stream. [`Endpoint::path`] reports which one is in force, and why no better one is. Calls and results are the same on all of them.
//!
//! Streams are [`HostStream`]s, which every machine has, and with the feature `cuda` those of a GPU: `CudaStream`. Nothing in this
//! library has run on a real card. The code for GPUs has run on an H100, over the software ConnectX.
//!
//! # Features
//! docs.rs builds this documentation with the default features and `cuda`, which needs neither CUDA nor a GPU to build. Items of the feature
//! `verbs`, such as `CmConnection` and `CmListener`, are missing there: to build that feature takes rdma-core's headers and a libclang of
//! version 15 or older. `cargo doc --features verbs,cuda` documents all items.
//!
//! # Threads
//! All types are `Send`. Posting to an endpoint takes `&mut`. [`stream_post`] refuses operations of one endpoint that several threads
//! queue at the same time; it does not wait.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use]
mod setters;

mod bounce;
#[cfg(feature = "verbs")]
mod cm;
mod collective;
#[cfg(feature = "cuda")]
mod cuda;
mod device_queue;
mod endpoint;
#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "group")]
mod group;
mod matching;
mod message;
mod nic;
mod proxy;
mod region;
mod stream;
#[cfg(feature = "verbs")]
mod verbs;

/// The crate whose contexts, streams and memory can be converted to and from those of this library, in the version that this library was built with.
#[cfg(feature = "cuda")]
pub use cudarc;
#[doc(hidden)]
pub use doorbell_wire::{bytecode, mlx5};

#[cfg(feature = "cuda")]
pub use bounce::CudaEngine;
pub use bounce::{Bounce, BounceConfig, CopyEngine, CopyTicket, MemcpyEngine};
#[cfg(feature = "verbs")]
pub use cm::{CmConnection, CmListener, CmRequest};
pub use collective::{
    Algorithm, Collective, CollectiveCosts, CollectiveTicket, Communicator, DataType, ReduceOp,
    Reduction,
};
#[cfg(feature = "cuda")]
pub use cuda::{
    Capabilities, CudaContext, CudaStream, DeviceBuffer, Execution, TimingEvent, Trigger,
    TriggerStream, WritesOrdering,
};
pub use device_queue::DeviceQueue;
pub use doorbell_wire::mlx5::Opcode;
pub use doorbell_wire::verbs::WcStatus;
#[doc(inline)]
pub use doorbell_wire::{Cause, Error, Result, StateKind, WorkError};
#[cfg(feature = "cuda")]
pub use endpoint::PagePush;
pub use endpoint::{
    AbortHandle, Address, AddressHandle, Channel, Completion, Condition, Condition64, Control,
    DatagramSource, Endpoint, EndpointConfig, Listener, Operation, PathReport, Prepared, QueueKind,
    QueueView, Rejected, Status, Ticket, TicketFuture, TransferDetails, Transport, Work,
    stream_post, stream_post_all, stream_wait_count64, stream_wait_value32, stream_wait_value64,
    stream_write_value32, stream_write_value64, wait_until, wait_value32, wait_value64,
};
#[cfg(feature = "cuda")]
pub use graph::{GraphBuilder, GraphExec, GraphMember};
#[cfg(feature = "group")]
pub use group::{Group, GroupConfig, LaunchEnvironment, Store, Token};
pub use matching::{Envelope, MatchTicket, Matcher, MatcherConfig, Source, TagSelector};
pub use message::{
    CostCurve, MessageAddress, MessageConfig, MessageCosts, MessageQueue, MessageTicket,
    PendingSend, PostedSend,
};
#[cfg(feature = "cuda")]
pub use region::DeviceCache;
#[cfg(feature = "verbs")]
pub use region::MemoryKeys;
pub use region::{
    Access, CacheConfig, CacheCounters, CachedRegion, Device, DeviceMemory, Element,
    HeldRegistration, Invalidation, PageSize, ProtectionDomain, REGION_BYTES_MAX, Region,
    RegionCache, RegionKind, RegionSpan, RegistrationReport, RemoteRegion, RemoteSlice, Slice,
};
pub use stream::{Event, Executor, HostStream, Reached, Spin};

/// What only the software ConnectX has: the faults that it can inject and what it counts, for tests. See [`Device::set_faults`] and
/// [`Device::counters`].
#[cfg(feature = "softcx")]
pub mod softcx {
    pub use crate::region::{CommandKind, CommandKinds, Counters, Faults};
}

/// For the packages, tests and benchmarks of this repository. Not part of the public interface: it may change in any release.
#[doc(hidden)]
pub mod __private {
    #[cfg(feature = "cuda")]
    pub use crate::cuda::kernels_made_by;
    /// One step of a loop of puts by one thread of a GPU: for `doorbell bench` and for tests.
    #[cfg(feature = "cuda")]
    pub use crate::device_queue::PutStep;
    #[cfg(feature = "group")]
    pub use crate::group::Message;
    #[cfg(feature = "cuda")]
    pub use crate::stream::ReplayStream;
    /// What streams and queues pass to each other.
    pub use crate::stream::{
        Attachments, Outcome, Owner, SealedExecutor, StreamFailure, StreamTurns, Submission,
        execute,
    };

    /// The features of this crate, and whether this build has them: for `doorbell info`. Other crates of a build may have turned some on.
    pub const FEATURES: [(&str, bool); 4] = [
        ("softcx", cfg!(feature = "softcx")),
        ("group", cfg!(feature = "group")),
        ("verbs", cfg!(feature = "verbs")),
        ("cuda", cfg!(feature = "cuda")),
    ];
}

/// Compiles the example of the README as a documentation test.
#[cfg(all(doctest, feature = "softcx"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
