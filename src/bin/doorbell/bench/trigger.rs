//! Who rings in the asynchronous loop: the stream, or the kernel of the step.
#![allow(unsafe_code)] // launches kernels that execute what was queued for them

#[cfg(feature = "cuda")]
use std::time::Duration;

use clap::ValueEnum;
use doorbell::Result;
#[cfg(feature = "cuda")]
use doorbell::{CudaContext, CudaStream, Executor, KernelStream};

/// Who rings for a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TriggerKind {
    /// The stream, behind the kernel of the step.
    #[default]
    Stream,
    /// The kernel itself, which rings what was prepared, and waits for its completion.
    Kernel,
}

/// Steps whose kernels ring.
#[cfg(feature = "cuda")]
pub struct Trigger {
    kernels: KernelStream,
    /// Longest wait of a kernel.
    timeout: Duration,
}

/// No stream of this build has kernels that ring.
#[cfg(not(feature = "cuda"))]
pub enum Trigger {}

#[cfg(feature = "cuda")]
impl Trigger {
    /// For kernels of that context, each of which waits so long at most.
    ///
    /// # Errors
    /// What the library refuses.
    pub fn new(context: &CudaContext, name: String, timeout: Duration) -> Result<Trigger> {
        Ok(Trigger {
            kernels: KernelStream::new(context, name)?,
            timeout,
        })
    }

    /// Launches one kernel that takes that long and then executes what `queue` has queued; or, if that is more than one takes, more kernels
    /// for the rest.
    ///
    /// # Errors
    /// What the library refuses, and what it reports of earlier steps.
    pub fn step(
        &self,
        stream: &CudaStream,
        kernel: Duration,
        queue: impl FnOnce(&dyn Executor) -> Result<()>,
    ) -> Result<()> {
        queue(&self.kernels)?;
        let mut work = kernel;
        while let Some(trigger) = self.kernels.take()? {
            // SAFETY: of this stream of kernels, whose context is the stream's; and what was taken stays until it is executed.
            let launched = unsafe { stream.step(work, &trigger, self.timeout, 0) };
            if let Err(error) = launched {
                let _ = stream.synchronize(Some(self.timeout));
                // SAFETY: what was launched is done, or has been given up by its kernel within the same time; this one nobody has.
                unsafe { self.kernels.discard_taken() }?;
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
        self.kernels.synchronize(Some(self.timeout))
    }
}

#[cfg(not(feature = "cuda"))]
impl Trigger {
    /// As with the feature `cuda`.
    pub fn verdict(&self) -> Result<()> {
        match *self {}
    }
}
