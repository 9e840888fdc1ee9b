//! Who rings in the asynchronous loop: the stream, or the kernel of the step.
#![allow(unsafe_code)] // launches kernels that execute what was queued for them

#[cfg(feature = "cuda")]
use std::time::Duration;

use clap::ValueEnum;
use doorbell::Result;
#[cfg(feature = "cuda")]
use doorbell::{
    CudaContext, CudaStream, DeviceBuffer, Endpoint, Error, Executor, KernelQueue, KernelStream,
    PutStep,
};

/// Who rings for a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TriggerKind {
    /// The stream, behind the kernel of the step.
    #[default]
    Stream,
    /// The kernel itself, which rings what was prepared, and waits for its completion.
    Kernel,
    /// The kernel itself, which makes the work request as well.
    Build,
}

/// Steps whose kernels ring.
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
    Prepared(KernelStream),
    Built {
        /// Once the endpoint is connected.
        queue: Option<Box<KernelQueue>>,
        /// Of the last kernel that failed.
        code: DeviceBuffer,
        /// That kernels were launched on.
        stream: Option<CudaStream>,
    },
}

#[cfg(feature = "cuda")]
impl TriggerKernels {
    /// For kernels of that context, each of which waits so long at most.
    ///
    /// # Errors
    /// What the library refuses.
    pub fn new(
        context: &CudaContext,
        kind: TriggerKind,
        timeout: Duration,
    ) -> Result<Option<TriggerKernels>> {
        let by = match kind {
            TriggerKind::Stream => return Ok(None),
            TriggerKind::Kernel => By::Prepared(KernelStream::new(context, "bench-kernels")?),
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

    /// Takes what it needs of an endpoint, which is connected.
    ///
    /// # Errors
    /// What the library refuses.
    pub fn connected(&mut self, endpoint: &mut Endpoint) -> Result<()> {
        if let By::Built { queue, .. } = &mut self.by {
            *queue = Some(Box::new(KernelQueue::on_gpu(&self.context, endpoint)?));
        }
        Ok(())
    }

    /// Launches one kernel that takes that long and then executes what `queue` queues; or, if that is more than one takes, more kernels
    /// for the rest. Or one that does `put` itself, if that is what kernels do.
    ///
    /// # Errors
    /// What the library refuses, and what it reports of earlier steps.
    pub fn step(
        &mut self,
        on: &CudaStream,
        kernel: Duration,
        put: impl FnOnce(&KernelQueue) -> Result<PutStep>,
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
                    return Err(Error::State {
                        operation: "--trigger build",
                        reason: "the endpoint is not connected".into(),
                    });
                };
                let put = PutStep {
                    work: kernel,
                    timeout: self.timeout,
                    code: code.ptr(),
                    ..put(queue)?
                };
                stream.get_or_insert_with(|| on.clone());
                // SAFETY: both are dropped behind the stream's work (see `Drop`); the messages are the end's, as the queue is.
                return unsafe { queue.put_step(on, &put) };
            }
        };
        prepare(kernels)?;
        let mut work = kernel;
        while let Some(trigger) = kernels.take()? {
            // SAFETY: of this stream of kernels, whose context is the stream's; and what was taken stays until it is executed.
            let launched = unsafe { on.step(work, &trigger, self.timeout, 0) };
            if let Err(error) = launched {
                let _ = on.synchronize(None);
                // SAFETY: what was launched is done; this one nobody has.
                unsafe { kernels.discard_taken() }?;
                return Err(error);
            }
            work = Duration::ZERO;
        }
        Ok(())
    }

    /// What failed of the steps, once they are done.
    ///
    /// # Errors
    /// That.
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
            || Error::State {
                operation: "--trigger build",
                reason: format!("a kernel has come to the code {code}"),
            },
            Error::Work,
        ))
    }
}

#[cfg(feature = "cuda")]
impl Drop for TriggerKernels {
    fn drop(&mut self) {
        // Kernels have the queue until they are done: each has a bound.
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
