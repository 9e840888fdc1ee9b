//! CUDA: streams of a GPU that execute programs.
//!
//! [`CudaStream`] is an [`Executor`](crate::Executor) over a `CUstream` that it creates or that the application has created. A program becomes
//! memory operations (`cuStreamBatchMemOp_v2`), which the GPU executes without a thread of this process. The driver is loaded with the first
//! [`CudaContext`]; without a driver, creating one is an error.
//!
//! [`TriggerStream`] is an executor whose programs are executed by kernels of the application, which get them as a [`Trigger`].
//!
//! [`DeviceBuffer`] is memory of a GPU, allocated by this library or by the application; a [`Region`](crate::Region) registers it. Contexts, streams
//! and memory can be converted from and to those of the crate `cudarc`, so its version, 0.19, is part of this interface, and the crate is exported as
//! [`doorbell::cudarc`](crate::cudarc). It loads the driver at run time, unless another crate of the program makes it link the driver.
//!
//! The way of a program: `submit` queues it; `decoded` reads it once; `encode` makes operations of it in a `call_queue`, with addresses from a
//! `gpu_mapping`, as `memops` or as `kernel_words`; `pending` has its entry until `settle` tells the owner; `watch` has the threads that look.

mod call_queue;
mod capabilities;
mod capture;
mod context;
mod contexts;
mod conversions;
mod copier;
mod copy_stream;
mod decoded;
mod deferred_free;
mod driver;
mod driver_event;
mod encode;
mod execution;
mod fail_behind;
mod gpu_mapping;
mod graph;
mod graph_node;
mod handle;
mod host_call;
mod host_functions;
mod host_registration;
mod instantiated_graph;
mod kernel_address;
mod kernel_reduction;
mod kernel_words;
mod launch;
mod memops;
mod memory;
mod memory_work;
mod module;
mod nic_registers;
#[cfg(feature = "softcx")]
mod nic_write_scope;
mod owner_readers;
mod pending;
mod pending_queue;
mod probe;
mod queued_kernel;
mod replay;
mod settle;
mod state;
mod stream;
mod stream_progress;
mod stream_words;
mod submit;
mod timing;
mod trigger;
mod trigger_stream;
mod watch;

pub(crate) use capabilities::UNORDERED_WRITES;
pub use capabilities::{Capabilities, WritesOrdering};
pub use context::CudaContext;
#[cfg(feature = "verbs")]
pub(crate) use contexts::gpu_address;
pub(crate) use copy_stream::{CopyDirection, CopyStream};
pub use execution::Execution;
pub(crate) use gpu_mapping::registers_error;
pub(crate) use graph::Draft;
pub(crate) use host_registration::HostRegistration;
pub(crate) use instantiated_graph::InstantiatedGraph;
pub use memory::DeviceBuffer;
pub(crate) use memory::{Allocation, DmabufMapping, HeldBuffer};
pub use module::kernels_made_by;
pub(crate) use nic_registers::{ProbeResult, RegistersFound, check_registers};
pub use stream::CudaStream;
pub use timing::TimingEvent;
pub use trigger::Trigger;
pub use trigger_stream::TriggerStream;
