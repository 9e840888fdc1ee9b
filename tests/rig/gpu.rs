//! A GPU for tests, or the stand-in for its driver.
#![allow(dead_code)] // Reason: each test uses a part.

use std::sync::{Mutex, MutexGuard, PoisonError};

use doorbell::CudaContext;

use crate::waived::waived;

/// One test at a time: what the driver is told to fail at, it does for all.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context of the first device; none, and the test is WAIVED, where there is no driver.
pub fn context(test: &str) -> Option<CudaContext> {
    match CudaContext::primary(0) {
        Ok(context) => Some(context),
        Err(error) if std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() => panic!("{error}"),
        Err(error) => {
            waived(test, &format!("{error}"));
            None
        }
    }
}
