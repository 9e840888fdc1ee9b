//! What the options choose from.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::trigger::TriggerKind;

/// The two ways to follow a kernel with a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Loop {
    /// The CPU waits for the stream, posts, and polls for the completion.
    Sync,
    /// Kernel, transfer and wait are queued on the stream; the CPU is free.
    Async,
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sync => "sync",
            Self::Async => "async",
        })
    }
}

/// The kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StreamKind {
    /// Threads of this process; kernels are closures
    Host,
    /// CUDA streams
    Cuda,
}

/// The memory of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    /// Host memory
    Host,
    /// Memory of the GPU
    Gpu,
}

/// What chooses the streams.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // all but the first are for streams of a GPU
pub struct StreamOptions {
    /// The kind of stream.
    pub stream: StreamKind,
    /// The memory of the messages.
    pub memory: MemoryKind,
    /// Whether a batch is launched as one graph.
    pub graph: bool,
    /// What rings the doorbell.
    pub trigger: TriggerKind,
    /// The GPU's index.
    pub gpu: u32,
}
