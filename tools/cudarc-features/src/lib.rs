//! A program with doorbell and with another user of cudarc; see `Cargo.toml`.

use std::sync::Arc;

use doorbell::{CudaContext, Result};

/// A context of the program's cudarc is one of doorbell's: both have the same crate.
pub fn adopt(context: Arc<cudarc::driver::CudaContext>) -> Result<CudaContext> {
    let context: Arc<doorbell::cudarc::driver::CudaContext> = context;
    CudaContext::from_cudarc(&context)
}
