//! What rings the doorbell in the asynchronous loop: the stream, or the kernel of the step.
#![allow(unsafe_code)] // launches kernels that execute prepared operations

#[cfg(feature = "cuda")]
use std::time::Duration;

use clap::ValueEnum;
#[cfg(feature = "cuda")]
use doorbell::__private::PutStep;
use doorbell::Result;
#[cfg(feature = "cuda")]
use doorbell::{
    CudaContext, CudaStream, DeviceBuffer, DeviceQueue, Endpoint, Error, Executor, StateKind,
    TriggerStream,
};

/// What rings the doorbell of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TriggerKind {
    /// The stream, behind the kernel of the step
    #[default]
    Stream,
    /// The kernel: it rings a prepared work request and waits for its completion
    Kernel,
    /// The kernel: it builds the work request too
    Build,
}

/// Launches the kernels that ring.
#[cfg(feature = "cuda")]
pub struct TriggerKernels {
    context: CudaContext,
    /// Longest wait of a kernel.
    timeout: Duration,
    by: By,
}

/// No stream of this build has kernels that ring.
#[cfg(not(feature = "cuda"))]
pub enum TriggerKernels {}

#[cfg(feature = "cuda")]
enum By {
    Prepared(TriggerStream),
    Built {
        /// Set when the endpoint is connected.
        queue: Option<Box<DeviceQueue>>,
        /// Error code of the last kernel that failed.
        code: DeviceBuffer,
        /// The stream that kernels were launched on.
        stream: Option<CudaStream>,
    },
}

#[cfg(feature = "cuda")]
impl TriggerKernels {
    /// For kernels of a context. Each waits for `timeout` at most.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(
        context: &CudaContext,
        kind: TriggerKind,
        timeout: Duration,
    ) -> Result<Option<TriggerKernels>> {
        let by = match kind {
            TriggerKind::Stream => return Ok(None),
            TriggerKind::Kernel => By::Prepared(TriggerStream::new(context, "bench-kernels")?),
            TriggerKind::Build => {
                let code = context.alloc(4)?;
                code.copy_from_host(0, &[0; 4])?;
                By::Built {
                    queue: None,
                    code,
                    stream: None,
                }
            }
        };
        Ok(Some(TriggerKernels {
            context: context.clone(),
            timeout,
            by,
        }))
    }

    /// Takes the send queue of an endpoint once it is connected, if kernels build work requests.
    ///
    /// # Errors
    /// Those of the library.
    pub fn connected(&mut self, endpoint: &mut Endpoint) -> Result<()> {
        if let By::Built { queue, .. } = &mut self.by {
            *queue = Some(Box::new(DeviceQueue::on_gpu(&self.context, endpoint)?));
        }
        Ok(())
    }

    /// Launches a kernel that spins for `kernel` and then executes what `prepare` queues; further kernels execute what one cannot take.
    /// If kernels build work requests, launches one that does `put`.
    ///
    /// # Errors
    /// Those of the library, also of earlier steps.
    pub fn step(
        &mut self,
        on: &CudaStream,
        kernel: Duration,
        put: impl FnOnce(&DeviceQueue) -> Result<PutStep>,
        prepare: impl FnOnce(&dyn Executor) -> Result<()>,
    ) -> Result<()> {
        let kernels = match &mut self.by {
            By::Prepared(kernels) => kernels,
            By::Built {
                queue,
                code,
                stream,
            } => {
                let Some(queue) = queue else {
                    return Err(Error::state(
                        StateKind::NotConnected,
                        "--trigger build",
                        "the endpoint is not connected",
                    ));
                };
                let put = PutStep {
                    work: kernel,
                    timeout: self.timeout,
                    code: code.ptr(),
                    ..put(queue)?
                };
                stream.get_or_insert_with(|| on.clone());
                // SAFETY: queue and code are dropped after the stream's work (see `Drop`); the peer holds the messages as long as the queue.
                return unsafe { queue.put_step(on, &put) };
            }
        };
        prepare(kernels)?;
        let mut work = kernel;
        while let Some(trigger) = kernels.take()? {
            // SAFETY: the trigger is of these kernels, whose context is the stream's; what it refers to stays until it is executed.
            let launched = unsafe { on.step(work, &trigger, self.timeout, 0) };
            if let Err(error) = launched {
                let _ = on.synchronize(None);
                // SAFETY: the launched kernels have ended, and this one was not launched.
                unsafe { kernels.discard_taken() }?;
                return Err(error);
            }
            work = Duration::ZERO;
        }
        Ok(())
    }

    /// Reports failures of the steps, after they have run.
    ///
    /// # Errors
    /// The first failure of prepared work; the last code of kernels that build it.
    pub fn verdict(&self) -> Result<()> {
        let (queue, code) = match &self.by {
            By::Prepared(kernels) => return kernels.synchronize(Some(self.timeout)),
            By::Built { queue, code, .. } => (queue, code),
        };
        let mut bytes = [0; 4];
        code.copy_to_host(0, &mut bytes)?;
        let code = i32::from_ne_bytes(bytes);
        if code == 0 {
            return Ok(());
        }
        let failure = queue.as_ref().and_then(|queue| queue.failure());
        Err(failure.map_or_else(
            || {
                Error::state(
                    StateKind::Unexpected,
                    "--trigger build",
                    format!("a kernel failed with code {code}"),
                )
            },
            Error::Work,
        ))
    }
}

#[cfg(feature = "cuda")]
impl Drop for TriggerKernels {
    fn drop(&mut self) {
        // Kernels use the queue until they end, and each of their waits has a deadline.
        if let By::Built {
            stream: Some(stream),
            ..
        } = &self.by
        {
            let _ = stream.synchronize(None);
        }
    }
}

#[cfg(not(feature = "cuda"))]
impl TriggerKernels {
    /// As with the feature `cuda`.
    pub fn verdict(&self) -> Result<()> {
        match *self {}
    }
}
