//! The stream that the tests of the public interface queue on: `DOORBELL_TEST_STREAM` is `host` (the default), `host-no-thread`, `cuda`, `cuda-kernel`, or
//! `cuda-trigger`. With `host-no-thread` the threads of the test that wait execute the streams. With the last, kernels of an application execute the queued work, one after the other on a CUDA stream.
#![allow(unsafe_code)] // implements an unsafe trait by delegation
#![allow(dead_code)] // Reason: each test uses a part.

use std::time::Duration;

#[cfg(feature = "cuda")]
use doorbell::__private::ReplayStream;
use doorbell::__private::{StreamFailure, StreamTurns, Submission};
#[cfg(feature = "cuda")]
use doorbell::{CudaContext, CudaStream, Execution, TriggerStream};
use doorbell::{Error, Event, Executor, HostStream, Result};

pub enum Stream {
    Host(HostStream),
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
    #[cfg(feature = "cuda")]
    Triggered(Triggered),
}

/// Each queued step is one or more triggers, each executed by a kernel that is launched at once.
#[cfg(feature = "cuda")]
pub struct Triggered {
    kernels: TriggerStream,
    cuda: CudaStream,
    /// Held from a step to its launch.
    launching: std::sync::Mutex<()>,
}

#[cfg(feature = "cuda")]
impl Triggered {
    fn step<R>(&self, queue: impl FnOnce(&TriggerStream) -> R) -> R {
        let launching = self.launching.lock();
        let queued = queue(&self.kernels);
        while let Ok(Some(trigger)) = self.kernels.take() {
            let bound = Duration::from_secs(3600);
            // SAFETY: of this context; what is taken stays until it is executed.
            let launched = unsafe { self.cuda.step(Duration::ZERO, &trigger, bound, 0) };
            if launched.is_err() {
                self.cuda.synchronize(None).ok();
                // SAFETY: the stream is done, and this trigger, which no kernel has, is the last one.
                unsafe { self.kernels.discard_taken() }.unwrap();
            }
        }
        drop(launching);
        queued
    }
}

/// A new stream.
pub fn stream(name: &str) -> Stream {
    Streams::default().stream(name)
}

/// Where streams are made: those of a GPU in one context.
#[derive(Default)]
pub struct Streams {
    /// `None`: the primary one.
    #[cfg(feature = "cuda")]
    context: Option<CudaContext>,
}

impl Streams {
    /// In a context of their own, if they are streams of a GPU. It stays until the process ends.
    pub fn apart() -> Streams {
        #[cfg(feature = "cuda")]
        if is_cuda() {
            use cudarc::driver::sys;
            // Loads the driver.
            let _primary = CudaContext::primary(0).unwrap();
            let (mut raw, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: writes one handle, of a context that is current then, and no longer.
            unsafe {
                sys::cuCtxCreate_v2(&mut raw, 0, 0).result().unwrap();
                sys::cuCtxPopCurrent_v2(&mut popped).result().unwrap();
            }
            // SAFETY: a context, which nobody destroys.
            let context = unsafe { CudaContext::from_raw(raw) }.unwrap();
            return Streams {
                context: Some(context),
            };
        }
        Streams::default()
    }

    #[cfg(feature = "cuda")]
    fn context(&self) -> CudaContext {
        let context = self.context.clone();
        context.unwrap_or_else(|| CudaContext::primary(0).unwrap())
    }

    pub fn stream(&self, name: &str) -> Stream {
        match kind().as_str() {
            "host" => Stream::Host(HostStream::new(name).unwrap()),
            "host-no-thread" => Stream::Host(HostStream::without_thread(name)),
            #[cfg(feature = "cuda")]
            "cuda" => Stream::Cuda(CudaStream::new(&self.context(), name).unwrap()),
            #[cfg(feature = "cuda")]
            "cuda-kernel" => {
                let stream = CudaStream::new(&self.context(), name).unwrap();
                Stream::Cuda(stream.with_execution(Execution::Kernel).unwrap())
            }
            #[cfg(feature = "cuda")]
            "cuda-trigger" => {
                let context = self.context();
                Stream::Triggered(Triggered {
                    kernels: TriggerStream::new(&context, name).unwrap(),
                    cuda: CudaStream::new(&context, name).unwrap(),
                    launching: std::sync::Mutex::default(),
                })
            }
            other => panic!("DOORBELL_TEST_STREAM={other}"),
        }
    }
}

/// Whether streams are those of a GPU.
pub fn is_cuda() -> bool {
    kind().starts_with("cuda")
}

/// Whether streams have no thread, so that nothing is executed unless a thread of the test waits.
pub fn has_no_thread() -> bool {
    kind() == "host-no-thread"
}

/// Whether their programs are executed by a kernel.
pub fn by_kernel() -> bool {
    kind() == "cuda-kernel"
}

/// Whether they are executed by kernels of an application.
pub fn by_trigger() -> bool {
    kind() == "cuda-trigger"
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
            #[cfg(feature = "cuda")]
            Stream::Triggered(stream) => stream.cuda.launch_host(kernel),
        }
    }

    /// The host stream, if it is one.
    pub fn host(&self) -> Option<&HostStream> {
        match self {
            Stream::Host(stream) => Some(stream),
            #[cfg(feature = "cuda")]
            Stream::Cuda(_) | Stream::Triggered(_) => None,
        }
    }

    /// The stream, if it is one of a GPU whose work the driver executes.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&CudaStream> {
        match self {
            Stream::Cuda(stream) => Some(stream),
            Stream::Host(_) | Stream::Triggered(_) => None,
        }
    }

    /// Sets whether the stream continues behind failed work.
    pub fn continue_on_error(&self, continues: bool) {
        match self {
            Stream::Host(stream) => stream.continue_on_error(continues),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.continue_on_error(continues),
            #[cfg(feature = "cuda")]
            Stream::Triggered(stream) => stream.kernels.continue_on_error(continues),
        }
    }

    /// Gives up what is queued.
    pub fn abort(&self) {
        match self {
            Stream::Host(stream) => stream.abort(),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.abort(),
            #[cfg(feature = "cuda")]
            Stream::Triggered(stream) => stream.kernels.abort(),
        }
    }

    fn executor(&self) -> &dyn Executor {
        match self {
            Stream::Host(stream) => stream,
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream,
            #[cfg(feature = "cuda")]
            Stream::Triggered(stream) => &stream.kernels,
        }
    }

    fn step<R>(&self, queue: impl FnOnce(&dyn Executor) -> R) -> R {
        match self {
            #[cfg(feature = "cuda")]
            Stream::Triggered(stream) => stream.step(|kernels| queue(kernels)),
            _ => queue(self.executor()),
        }
    }
}

impl doorbell::__private::SealedExecutor for Stream {}

// SAFETY: all of it is done by an executor of the library.
unsafe impl Executor for Stream {
    fn id(&self) -> u64 {
        self.executor().id()
    }

    fn name(&self) -> &str {
        self.executor().name()
    }

    fn executes_on_host(&self) -> bool {
        self.executor().executes_on_host()
    }

    fn has_room(&self, entries: usize) -> Result<bool> {
        self.executor().has_room(entries)
    }

    fn is_executed_by_looks(&self) -> bool {
        self.executor().is_executed_by_looks()
    }

    fn turns(&self) -> Option<StreamTurns> {
        self.executor().turns()
    }

    fn works_on_memory(&self) -> bool {
        self.executor().works_on_memory()
    }

    fn takes_messages(&self) -> bool {
        self.executor().takes_messages()
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.step(|stream| stream.submit(batch))
    }

    #[allow(clippy::result_large_err)] // Reason: as the trait has it.
    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.step(|stream| stream.submit_one(submission))
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.step(|stream| stream.record(event))
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.step(|stream| stream.wait_event(event))
    }

    #[cfg(feature = "cuda")]
    fn replays(&self) -> Option<&dyn ReplayStream> {
        self.executor().replays()
    }

    fn take_fault(&self) -> Option<Error> {
        self.executor().take_fault()
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.executor().fail(failure)
    }

    fn query(&self) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Stream::Triggered(stream) = self
            && !stream.cuda.query()?
        {
            return Ok(false);
        }
        self.executor().query()
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Stream::Triggered(stream) = self {
            stream.cuda.synchronize(timeout)?;
        }
        self.executor().synchronize(timeout)
    }
}
