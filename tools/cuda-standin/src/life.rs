//! Whether a context lives, and the error that it keeps.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::call::{CUresult, CudaResult};
use crate::names;

#[derive(Default)]
pub struct ContextLife {
    destroyed: AtomicBool,
    /// The CUresult that every later call returns. 0 if there is no error.
    kept: AtomicU32,
}

impl ContextLife {
    /// The error that every call on this context gets.
    pub fn check(&self) -> CudaResult {
        if self.is_destroyed() {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        match self.kept.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(names::result(number).unwrap_or(CUresult::CUDA_ERROR_UNKNOWN)),
        }
    }

    /// Whether what runs on its streams is to end.
    pub fn is_over(&self) -> bool {
        self.is_destroyed() || self.kept.load(Ordering::Acquire) != 0
    }

    pub fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Keeps the first error of work that ran.
    pub fn keep(&self, error: CUresult) {
        let _ = self
            .kept
            .compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The context is destroyed.
    pub fn end(&self) {
        self.destroyed.store(true, Ordering::Release);
    }
}
