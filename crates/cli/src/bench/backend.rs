//! The streams of a benchmark: threads of this process, or CUDA streams.

use std::time::Duration;

#[cfg(feature = "cuda")]
use doorbell::{CudaContext, CudaStream, DeviceBuffer, Region, TimingEvent};
use doorbell::{Executor, HostStream, Result};

use super::graph::BatchGraph;
#[cfg(feature = "cuda")]
use super::kinds::MemoryKind;
use super::kinds::{StreamKind, StreamOptions};
use super::step::BenchStep;
use super::trigger::TriggerKernels;
#[cfg(feature = "cuda")]
use super::trigger::TriggerKind;

/// What creates streams. Each process has its own.
#[derive(Clone, Debug)]
pub enum Backend {
    /// Threads.
    Host,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda {
        /// Its context.
        context: CudaContext,
        /// Where the messages lie.
        memory: MemoryKind,
        /// Whether a batch is launched as one graph.
        graph: bool,
        /// What rings the doorbell.
        trigger: TriggerKind,
    },
}

impl Backend {
    /// The backend of these options.
    ///
    /// # Errors
    /// This build or this machine has no such streams.
    pub fn new(options: StreamOptions) -> anyhow::Result<Backend> {
        match options.stream {
            StreamKind::Host => Ok(Backend::Host),
            #[cfg(feature = "cuda")]
            StreamKind::Cuda => Ok(Backend::Cuda {
                context: CudaContext::primary(options.gpu)?,
                memory: options.memory,
                graph: options.graph,
                trigger: options.trigger,
            }),
            #[cfg(not(feature = "cuda"))]
            StreamKind::Cuda => {
                anyhow::bail!(
                    "--stream cuda: this build lacks the feature `cuda`; build with --features cuda"
                )
            }
        }
    }

    /// The name of the streams in rows.
    pub fn name(&self) -> &'static str {
        match self {
            Backend::Host => "host",
            #[cfg(feature = "cuda")]
            Backend::Cuda { graph: true, .. } => "cuda-graph",
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                trigger: TriggerKind::Kernel,
                ..
            } => "cuda-trigger",
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                trigger: TriggerKind::Build,
                ..
            } => "cuda-build",
            #[cfg(feature = "cuda")]
            Backend::Cuda { .. } => "cuda",
        }
    }

    /// Name of the GPU.
    pub fn gpu(&self) -> Option<String> {
        match self {
            Backend::Host => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda { context, .. } => Some(context.device_name().to_string()),
        }
    }

    /// Where the messages lie: `host` or `gpu`.
    pub fn memory(&self) -> &'static str {
        match self {
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                memory: MemoryKind::Gpu,
                ..
            } => "gpu",
            _ => "host",
        }
    }

    /// The GPU, its driver and the options for it, for the table.
    pub fn describe(&self) -> Option<String> {
        match self {
            Backend::Host => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                context,
                graph,
                trigger,
                ..
            } => {
                let (major, minor) = context.driver_version();
                let memory = self.memory();
                let graph = if *graph { " graph=on" } else { "" };
                let trigger = match trigger {
                    TriggerKind::Stream => "",
                    TriggerKind::Kernel => " trigger=kernel",
                    TriggerKind::Build => " trigger=build",
                };
                let name = context.device_name();
                Some(format!(
                    "gpu={name:?} driver=CUDA-{major}.{minor} memory={memory} times=device{graph}{trigger}"
                ))
            }
        }
    }

    /// A stream with room for so many entries.
    ///
    /// # Errors
    /// Those of the library.
    pub fn stream(&self, name: String, entries: usize) -> Result<BenchStream> {
        match self {
            Backend::Host => HostStream::with_capacity(name, entries).map(BenchStream::Host),
            #[cfg(feature = "cuda")]
            Backend::Cuda { context, .. } => CudaStream::new(context, name).map(BenchStream::Cuda),
        }
    }

    /// A stream for the synchronous loop: one of the host has no thread, and is executed by the thread that waits for it.
    ///
    /// # Errors
    /// Those of the library.
    pub fn synchronous_stream(&self, name: String, entries: usize) -> Result<BenchStream> {
        match self {
            Backend::Host => {
                HostStream::without_thread_with_capacity(name, entries).map(BenchStream::Host)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda { .. } => self.stream(name, entries),
        }
    }

    /// Registered memory of the GPU, if messages are to lie there.
    ///
    /// # Errors
    /// Those of the library.
    #[cfg(feature = "cuda")]
    pub fn device_region(
        &self,
        domain: &doorbell::ProtectionDomain,
        len_bytes: u64,
    ) -> Result<Option<Region>> {
        match self {
            Backend::Cuda {
                context,
                memory: MemoryKind::Gpu,
                ..
            } => {
                let buffer: DeviceBuffer = context.alloc(len_bytes)?;
                Region::register_device(domain, &buffer, doorbell::Access::ALL).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// What launches batches as graphs, with `--graph`.
    pub fn graph(&self, steps: u64) -> Option<BatchGraph> {
        match self {
            #[cfg(feature = "cuda")]
            Backend::Cuda { graph: true, .. } => Some(BatchGraph::new(steps)),
            _ => {
                let _ = steps;
                None
            }
        }
    }

    /// What launches kernels that ring, with `--trigger`. Their waits end after `timeout`.
    ///
    /// # Errors
    /// Those of the library.
    pub fn trigger(&self, timeout: Duration) -> Result<Option<TriggerKernels>> {
        match self {
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                context, trigger, ..
            } => TriggerKernels::new(context, *trigger, timeout),
            Backend::Host => {
                let _ = timeout;
                Ok(None)
            }
        }
    }

    /// The device's clock; none where kernels note their end themselves.
    ///
    /// # Errors
    /// Those of the library.
    pub fn clock(&self) -> Option<Clock> {
        match self {
            Backend::Host => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda { context, .. } => Some(Clock {
                context: context.clone(),
                noted: 0,
                events: Vec::new(),
            }),
        }
    }
}

/// A stream.
#[derive(Clone, Debug)]
pub enum BenchStream {
    /// A thread.
    Host(HostStream),
    /// A GPU's.
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
}

impl BenchStream {
    /// The stream as the library takes it for transfers.
    pub fn executor(&self) -> &dyn Executor {
        match self {
            BenchStream::Host(stream) => stream,
            #[cfg(feature = "cuda")]
            BenchStream::Cuda(stream) => stream,
        }
    }

    /// Queues a host function.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn launch_host(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        match self {
            BenchStream::Host(stream) => stream.launch(function),
            #[cfg(feature = "cuda")]
            BenchStream::Cuda(stream) => stream.launch_host(function),
        }
    }

    /// Queues the kernel of a step: a closure that notes its end, or a GPU kernel, which notes nothing.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn launch_kernel(&self, step: BenchStep) -> Result<()> {
        match self {
            // The closure fits into the stream's queue: nothing is allocated.
            BenchStream::Host(stream) => stream.launch(move || step.run_kernel()),
            #[cfg(feature = "cuda")]
            BenchStream::Cuda(stream) => stream.spin(step.kernel()),
        }
    }
}

/// The GPU's clock, read by events at the end of each batch.
#[cfg(feature = "cuda")]
pub struct Clock {
    context: CudaContext,
    noted: usize,
    events: Vec<TimingEvent>,
}

/// No stream of this build has a clock.
#[cfg(not(feature = "cuda"))]
pub enum Clock {}

#[cfg(feature = "cuda")]
impl Clock {
    /// Clears all notes, and creates the events for `count` new ones: none are created during a measurement.
    pub fn begin(&mut self, count: usize) -> Result<()> {
        self.noted = 0;
        while self.events.len() < count {
            self.events.push(TimingEvent::new(&self.context)?);
        }
        Ok(())
    }

    /// Queues a note on the stream.
    pub fn note(&mut self, stream: &BenchStream) -> Result<()> {
        if let (BenchStream::Cuda(stream), Some(event)) = (stream, self.events.get(self.noted)) {
            self.noted += 1;
            event.record(stream)?;
        }
        Ok(())
    }

    /// Nanoseconds from each note to the next. Waits for the last one.
    pub fn periods_ns(&self) -> Result<Vec<u64>> {
        let noted = &self.events[..self.noted];
        if let Some(last) = noted.last() {
            last.synchronize()?;
        }
        let pairs = noted.windows(2);
        pairs
            .map(|pair| Ok(pair[1].since(&pair[0])?.as_nanos() as u64))
            .collect()
    }
}

#[cfg(not(feature = "cuda"))]
impl Clock {
    /// As with the feature `cuda`.
    pub fn begin(&mut self, _: usize) -> Result<()> {
        match *self {}
    }

    /// As with the feature `cuda`.
    pub fn note(&mut self, _: &BenchStream) -> Result<()> {
        match *self {}
    }

    /// As with the feature `cuda`.
    pub fn periods_ns(&self) -> Result<Vec<u64>> {
        match *self {}
    }
}
