//! The stream that the tests of the public interface queue on: `DOORBELL_TEST_STREAM` is `host`, which it also is if it is not set, `cuda`,
//! or `cuda-kernel`.
#![allow(unsafe_code)] // implements an unsafe trait by delegation
#![allow(dead_code)] // Reason: each test uses a part.

use std::time::Duration;

use doorbell::stream::Submission;
#[cfg(feature = "cuda")]
use doorbell::{CudaContext, CudaStream, cuda::Execution};
use doorbell::{Error, Event, Executor, HostStream, Result};

pub enum Stream {
    Host(HostStream),
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
}

/// A new stream.
pub fn stream(name: &str) -> Stream {
    match kind().as_str() {
        "host" => Stream::Host(HostStream::new(name).unwrap()),
        #[cfg(feature = "cuda")]
        "cuda" => {
            let context = CudaContext::primary(0).unwrap();
            Stream::Cuda(CudaStream::new(&context, name).unwrap())
        }
        #[cfg(feature = "cuda")]
        "cuda-kernel" => {
            let context = CudaContext::primary(0).unwrap();
            let stream = CudaStream::new(&context, name).unwrap();
            Stream::Cuda(stream.with_execution(Execution::Kernel).unwrap())
        }
        other => panic!("DOORBELL_TEST_STREAM={other}"),
    }
}

/// Whether streams are those of a GPU.
pub fn is_cuda() -> bool {
    kind().starts_with("cuda")
}

/// Whether their programs are executed by a kernel.
pub fn by_kernel() -> bool {
    kind() == "cuda-kernel"
}

/// The call of the driver by which programs are queued, and the name of its symbol.
pub fn queueing() -> (&'static str, &'static str) {
    if by_kernel() {
        ("cuLaunchKernel", "cuLaunchKernel")
    } else {
        ("cuStreamBatchMemOp", "cuStreamBatchMemOp_v2")
    }
}

fn kind() -> String {
    std::env::var("DOORBELL_TEST_STREAM").unwrap_or_else(|_| "host".to_owned())
}

impl Stream {
    /// Queues a function of the host.
    pub fn launch(&self, kernel: impl FnOnce() + Send + 'static) -> Result<()> {
        match self {
            Stream::Host(stream) => stream.launch(kernel),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.launch_host(kernel),
        }
    }

    /// The stream of the host that it is, if it is one.
    pub fn host(&self) -> Option<&HostStream> {
        match self {
            Stream::Host(stream) => Some(stream),
            #[cfg(feature = "cuda")]
            Stream::Cuda(_) => None,
        }
    }

    fn executor(&self) -> &dyn Executor {
        match self {
            Stream::Host(stream) => stream,
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream,
        }
    }
}

// SAFETY: all of it is done by an executor of the library.
unsafe impl Executor for Stream {
    fn id(&self) -> u64 {
        self.executor().id()
    }

    fn name(&self) -> &str {
        self.executor().name()
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.executor().submit(batch)
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.executor().submit_one(submission)
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.executor().record(event)
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.executor().wait_event(event)
    }

    fn query(&self) -> Result<bool> {
        self.executor().query()
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.executor().synchronize(timeout)
    }
}
