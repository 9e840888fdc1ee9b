//! CUDA: programs executed by the streams of a GPU.
//!
//! [`CudaStream`] is an [`Executor`](crate::Executor) over a `CUstream`, one of its own or somebody else's: a program becomes memory
//! operations (`cuStreamBatchMemOp_v2`), and no thread of this process has a part in their execution. The driver is loaded when the first
//! [`CudaContext`] is asked for; without one that is an error and nothing else changes.
//!
//! [`KernelStream`] is an executor whose programs are executed by kernels of the application: a [`Trigger`] is what they are given.
//!
//! [`DeviceBuffer`] is memory of a GPU, this library's or somebody else's; a [`Region`](crate::Region) takes it. Contexts, streams and memory of
//! the crate `cudarc` become this library's and the other way round, so its version, 0.19, is part of this interface.

mod call_queue;
mod capabilities;
mod capture;
mod context;
mod contexts;
mod conversions;
mod copier;
mod copy_stream;
mod count;
mod decoded;
mod driver;
mod encode;
mod exec;
mod execution;
mod gpu_mapping;
mod graph;
mod handle;
mod host_call;
mod kernel_stream;
mod kernel_words;
mod launch;
mod memops;
mod memory;
mod module;
mod pending;
mod pinned;
mod probe;
mod settle;
mod state;
mod stream;
mod stream_words;
mod submit;
mod timing;
mod trigger;
mod watch;

pub use capabilities::{Capabilities, WritesOrdering};
pub use context::CudaContext;
pub(crate) use copy_stream::{CopyDirection, CopyStream};
pub(crate) use exec::InstantiatedGraph;
pub use execution::Execution;
pub(crate) use graph::Draft;
pub use kernel_stream::KernelStream;
pub use memory::DeviceBuffer;
pub(crate) use memory::{Allocation, HeldBuffer};
pub(crate) use pinned::Pinned;
pub use stream::CudaStream;
pub use timing::TimingEvent;
pub use trigger::Trigger;
