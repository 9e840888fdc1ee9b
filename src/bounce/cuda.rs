//! Copies by the engines of a GPU.
#![allow(unsafe_code)] // implements an unsafe trait

use std::fmt;
use std::ptr::NonNull;

use super::engine::{CopyEngine, CopyTicket};
use crate::cuda::{CopyDirection, CopyStream, CudaContext};
use crate::region::Region;
use crate::{Error, Result};

/// Copies by the copy engines of a GPU: for its memory, where no NIC reaches it. Foreign addresses are those of device memory, as
/// [`DeviceBuffer::ptr`](crate::DeviceBuffer::ptr) has them.
///
/// It has its own stream, which waits for no other. Wait for kernels that write the data before you begin a transfer. Received data is
/// visible to work that is queued after the transfer.
pub struct CudaEngine {
    stream: CopyStream,
}

impl CudaEngine {
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(context: &CudaContext) -> Result<CudaEngine> {
        CopyStream::new(context).map(|stream| CudaEngine { stream })
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine").finish_non_exhaustive()
    }
}

// SAFETY: a copy of the stream is over when its event has passed, and the driver touches neither memory after that.
unsafe impl CopyEngine for CudaEngine {
    fn use_staging(&mut self, staging: &Region) -> Result<()> {
        let len_bytes = usize::try_from(staging.len_bytes()).map_err(|_| Error::Range {
            argument: "len_bytes",
            value: staging.len_bytes(),
            min: 1,
            max: usize::MAX as u64,
        })?;
        // SAFETY: the memory of the region, which drops its attachments before it.
        unsafe {
            self.stream
                .pin(staging.attachments(), staging.start(), len_bytes)
        }
    }

    unsafe fn copy_to_host(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        // SAFETY: the caller's promise.
        unsafe {
            self.stream
                .begin(CopyDirection::ToHost, foreign, host, len_bytes)
        }
        .map(CopyTicket)
    }

    unsafe fn copy_from_host(
        &mut self,
        host: NonNull<u8>,
        foreign: u64,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        // SAFETY: the caller's promise.
        unsafe {
            self.stream
                .begin(CopyDirection::FromHost, foreign, host, len_bytes)
        }
        .map(CopyTicket)
    }

    fn is_copy_done(&mut self, copy: CopyTicket) -> Result<bool> {
        self.stream.is_copy_done(copy.0)
    }
}
