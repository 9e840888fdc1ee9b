//! Streams: in-order executors of kernels and programs.
//!
//! A queue prepares a [`Program`](crate::bytecode::Program); an [`Executor`] runs it, in its place between the kernels of a stream.
//! Executors and queues do not depend on each other. They share the program and the memory behind it; an [`Owner`] keeps that memory
//! alive and knows its addresses.
//!
//! `execute_program` carries out the stores and polls of a program, so it rings the doorbell of a host stream.
//!
//! [`HostStream`] is the executor that every machine has: a thread, with the semantics of a CUDA stream.
//!
//! ```
//! use doorbell::{Event, Executor, HostStream};
//! use std::sync::{Arc, atomic::{AtomicU32, Ordering}};
//!
//! let stream = HostStream::new("compute")?;
//! let steps = Arc::new(AtomicU32::new(0));
//! for _ in 0..3 {
//!     let steps = Arc::clone(&steps);
//!     stream.launch(move || { steps.fetch_add(1, Ordering::Relaxed); })?;
//! }
//! let done = Event::blocking();
//! stream.record(&done)?;
//! done.synchronize(None)?;
//! assert_eq!(steps.load(Ordering::Relaxed), 3);
//! # Ok::<(), doorbell::Error>(())
//! ```

mod backoff;
mod current;
mod event;
mod execute_program;
mod executor;
mod failure_notifier;
mod fault;
mod fence;
mod front;
mod host;
mod host_closure;
mod kernel_step;
mod library_thread;
mod lock;
mod look;
mod own_streams;
mod owner;
mod parker;
mod reached;
#[cfg(feature = "cuda")]
mod replay;
mod ring;
mod stopping;
#[cfg(feature = "cuda")]
mod substitute;
mod turns;
mod worker;

pub use backoff::Spin;
pub(crate) use backoff::{Backoff, set_min_timer_slack};
#[cfg(feature = "cuda")]
pub(crate) use current::{forbid_on, run_as_stream};
pub use event::Event;
#[cfg(feature = "cuda")]
pub(crate) use event::{Dependent, ExternalProgress, Progress, Record, StreamPosition};
pub use execute_program::execute;
pub use executor::{Executor, SealedExecutor, Submission};
pub(crate) use failure_notifier::FailureListener;
#[cfg(feature = "cuda")]
pub(crate) use fault::Fault;
pub use fault::StreamFailure;
pub(crate) use fence::Asymmetric;
pub use host::HostStream;
pub(crate) use host::next_id;
pub use kernel_step::{KernelMemory, KernelStep, MemoryWork, MessageTake, ReadPlace};
pub(crate) use library_thread::begin_library_thread;
#[cfg(feature = "cuda")]
pub(crate) use library_thread::is_library_thread;
pub(crate) use lock::Lock;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use lock::locks_taken;
#[cfg(feature = "cuda")]
pub(crate) use own_streams::streams_without_thread;
pub(crate) use own_streams::{has_own_streams, look_at_own_streams, look_at_stream};
pub(crate) use owner::DeferredDrop;
pub use owner::{Attachments, Outcome, Owner};
pub use reached::Reached;
pub(crate) use reached::eventfd_waker;
#[cfg(feature = "cuda")]
pub(crate) use replay::ReplayCell;
#[cfg(feature = "cuda")]
pub use replay::{
    ReplayCells, ReplayEnd, ReplayKeeper, ReplayMemory, ReplayPart, ReplayStream, ReplayWords,
};
pub(crate) use stopping::{EndingDevice, await_or_defer, stopping};
#[cfg(feature = "cuda")]
pub(crate) use stopping::{after_stopping, await_told, told_devices, visit};
#[cfg(feature = "cuda")]
pub(crate) use substitute::{Substitute, may_have_seen};
#[cfg(feature = "cuda")]
pub(crate) use turns::StreamTurn;
pub use turns::StreamTurns;
#[cfg(feature = "cuda")]
pub(crate) use worker::message;
