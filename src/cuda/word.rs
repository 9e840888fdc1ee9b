//! Words that streams and this process share.
#![allow(unsafe_code)] // has memory registered that it keeps

use std::sync::atomic::AtomicU32;

use cudarc::driver::sys::CUdeviceptr;

use super::CudaContext;
use super::pinned::Pinned;
use crate::Result;

/// Two words on cache lines of their own, which GPUs can load and store. The memory is this process's own, so that it is there to be read
/// after a context has been destroyed, which frees what the driver allocates.
pub(super) struct Words {
    /// Before the memory that it is about.
    pinned: Pinned,
    page: Box<Page>,
}

/// A page, so that nothing else is registered with it.
#[repr(C, align(4096))]
#[derive(Default)]
struct Page {
    done: Line,
    gate: Line,
}

#[repr(C, align(128))]
#[derive(Default)]
struct Line(AtomicU32);

impl Words {
    /// Two words that are 0.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn new(context: &CudaContext) -> Result<Words> {
        let page = Box::<Page>::default();
        let start = std::ptr::from_ref(&*page).addr();
        // SAFETY: the page lives as long as `pinned`, and is atomics to everyone.
        let pinned = unsafe { Pinned::new(context, start, size_of::<Page>())? };
        Ok(Words { pinned, page })
    }

    /// What the stream has done.
    pub(super) fn done(&self) -> &AtomicU32 {
        &self.page.done.0
    }

    /// What the stream may pass.
    pub(super) fn gate(&self) -> &AtomicU32 {
        &self.page.gate.0
    }

    /// The address of [`Words::done`] on devices.
    pub(super) fn done_at(&self) -> CUdeviceptr {
        self.device_address(self.done())
    }

    /// The address of [`Words::gate`] on devices.
    pub(super) fn gate_at(&self) -> CUdeviceptr {
        self.device_address(self.gate())
    }

    fn device_address(&self, word: &AtomicU32) -> CUdeviceptr {
        self.pinned.device_address(std::ptr::from_ref(word).addr())
    }
}
