//! A kernel that makes a work request, for tests and benchmarks.
#![allow(unsafe_code)] // launches a kernel with addresses

use std::time::Duration;

use super::DeviceQueue;
use crate::Result;
use crate::cuda::CudaStream;

/// A put of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PutStep {
    /// How long the kernel works before.
    pub work: Duration,
    /// Address and key of what is to be put, as [`DeviceQueue::local`] has them.
    pub local: (u64, u32),
    /// Bytes.
    pub len_bytes: u32,
    /// Address and key where it goes.
    pub remote: (u64, u32),
    /// Immediate data, if the peer is to learn of it.
    pub imm: Option<u32>,
    /// The longest wait for room in the queue, and for the completion.
    pub timeout: Duration,
    /// Address on the device of an `int32_t`, which is written if the kernel fails: the code of the C interface.
    pub code: u64,
}

impl DeviceQueue {
    /// Queues a kernel of one thread that works, puts and waits for the completion: an application's kernel in small. The queue is one
    /// [of the stream's GPU](DeviceQueue::on_gpu).
    ///
    /// # Errors
    /// As [`CudaStream::spin`].
    ///
    /// # Safety
    /// This is not dropped before the kernel is done, and the memory that the step names, `code` included, stays as long.
    #[doc(hidden)]
    pub unsafe fn put_step(&self, stream: &CudaStream, step: &PutStep) -> Result<()> {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        // `struct dbl_step` of cuda/step.h.
        let parameters = [
            ns(step.work),
            ns(step.timeout),
            step.local.0,
            step.remote.0,
            step.code,
            pair(step.local.1, step.remote.1),
            pair(step.len_bytes, step.imm.unwrap_or_default()),
            pair(step.imm.is_some().into(), 0),
        ];
        // SAFETY: by this function's contract, and that of the view.
        unsafe { stream.put_step(&self.view.words(), &parameters) }
    }
}
