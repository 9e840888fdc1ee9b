//! What a benchmark queues on: a thread of this process, or a GPU.

use std::time::Duration;

use clap::ValueEnum;
#[cfg(feature = "cuda")]
use doorbell::{CudaContext, CudaStream, DeviceBuffer, Region, TimingEvent};
use doorbell::{Executor, HostStream, Result};

use super::graph::BatchGraph;
use super::pass::BenchStep;
use super::trigger::{TriggerKernels, TriggerKind};

/// Whose streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StreamKind {
    /// Threads of this process, whose kernels are closures.
    Host,
    /// A GPU's; the device's time is by its events.
    Cuda,
}

/// Where the messages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    /// In host memory.
    Host,
    /// In memory of the GPU.
    Gpu,
}

/// What streams are made from. Each process has its own.
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
        /// Whether a batch is queued as one graph.
        graph: bool,
        /// Who rings.
        trigger: TriggerKind,
    },
}

impl Backend {
    /// That of the options.
    ///
    /// # Errors
    /// This build or this machine has no such streams.
    pub fn new(
        kind: StreamKind,
        memory: MemoryKind,
        graph: bool,
        trigger: TriggerKind,
        gpu: u32,
    ) -> anyhow::Result<Backend> {
        match kind {
            StreamKind::Host => Ok(Backend::Host),
            #[cfg(feature = "cuda")]
            StreamKind::Cuda => Ok(Backend::Cuda {
                context: CudaContext::primary(gpu)?,
                memory,
                graph,
                trigger,
            }),
            #[cfg(not(feature = "cuda"))]
            StreamKind::Cuda => {
                let _ = (memory, graph, trigger, gpu);
                anyhow::bail!("--stream cuda: this build is without the feature cuda")
            }
        }
    }

    /// The name of the streams, as the rows have it.
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

    /// What there is to say of the GPU.
    pub fn describe(&self) -> Option<String> {
        match self {
            Backend::Host => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda {
                context,
                memory,
                graph,
                trigger,
            } => {
                let (major, minor) = context.driver_version();
                let memory = match memory {
                    MemoryKind::Host => "host",
                    MemoryKind::Gpu => "gpu",
                };
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
    /// What the library refuses.
    pub fn stream(&self, name: String, entries: usize) -> Result<BenchStream> {
        match self {
            Backend::Host => HostStream::with_capacity(name, entries).map(BenchStream::Host),
            #[cfg(feature = "cuda")]
            Backend::Cuda { context, .. } => CudaStream::new(context, name).map(BenchStream::Cuda),
        }
    }

    /// Memory of the GPU, registered, if that is where messages are to lie.
    ///
    /// # Errors
    /// What the library refuses.
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

    /// What queues batches as graphs, if that is how.
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

    /// What has the kernels of steps ring, if they do, and wait so long at most.
    ///
    /// # Errors
    /// What the library refuses.
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

    /// What notes the device's time on a stream; none where kernels note it themselves.
    ///
    /// # Errors
    /// What the library refuses.
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
    /// The stream as those see it who queue transfers.
    pub fn executor(&self) -> &dyn Executor {
        match self {
            BenchStream::Host(stream) => stream,
            #[cfg(feature = "cuda")]
            BenchStream::Cuda(stream) => stream,
        }
    }

    /// Queues a function of the host.
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

    /// Queues the kernel of a step: a closure that notes its end, or a kernel of the GPU, which notes nothing.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn launch_kernel(&self, step: BenchStep) -> Result<()> {
        match self {
            // Small enough to lie in the stream's queue: nothing is allocated.
            BenchStream::Host(stream) => stream.launch(move || step.run_kernel()),
            #[cfg(feature = "cuda")]
            BenchStream::Cuda(stream) => stream.spin(step.kernel()),
        }
    }
}

/// The device's time, at the ends of batches.
#[cfg(feature = "cuda")]
pub struct Clock {
    context: CudaContext,
    noted: usize,
    events: Vec<TimingEvent>,
}

/// No stream of this build has a time of its own.
#[cfg(not(feature = "cuda"))]
pub enum Clock {}

#[cfg(feature = "cuda")]
impl Clock {
    /// Forgets what was noted, and gets ready to note so often: nothing is made while it is measured.
    pub fn begin(&mut self, count: usize) -> Result<()> {
        self.noted = 0;
        while self.events.len() < count {
            self.events.push(TimingEvent::new(&self.context)?);
        }
        Ok(())
    }

    /// Has the stream note its time.
    pub fn note(&mut self, stream: &BenchStream) -> Result<()> {
        if let (BenchStream::Cuda(stream), Some(event)) = (stream, self.events.get(self.noted)) {
            self.noted += 1;
            event.record(stream)?;
        }
        Ok(())
    }

    /// Nanoseconds from each note to the next, once the stream has passed them.
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
