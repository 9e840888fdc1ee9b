//! The handle of a CUDA stream's state.
#![allow(unsafe_code)] // calls the driver

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::context::CudaContext;
use super::contexts::check_stream;
use super::deferred_free::free_parked;
use super::driver::create_stream;
use super::pending::defer_drops;
use super::state::{StreamOwner, StreamState};
use super::watch::{release, start};
use crate::Result;

/// Keeps the state of a stream until it is dropped, and after that as long as the stream has work.
pub(super) struct CudaStreamHandle {
    state: ManuallyDrop<Arc<StreamState>>,
}

impl CudaStreamHandle {
    /// A new stream of that context, which does not synchronize with the legacy default stream.
    pub(super) fn new(context: &CudaContext, name: String) -> Result<CudaStreamHandle> {
        start()?;
        let entered = context.enter()?;
        let raw = create_stream()?;
        drop(entered);
        Self::over(context, raw, StreamOwner::Library, name)
    }

    /// A stream that this library has not created.
    pub(super) fn borrowed(
        context: &CudaContext,
        raw: CUstream,
        owner: StreamOwner,
        name: String,
    ) -> Result<CudaStreamHandle> {
        start()?;
        check_stream(raw)?;
        Self::over(context, raw, owner, name)
    }

    fn over(
        context: &CudaContext,
        raw: CUstream,
        owner: StreamOwner,
        name: String,
    ) -> Result<CudaStreamHandle> {
        let state = ManuallyDrop::new(StreamState::new(context, raw, owner, name)?);
        Ok(CudaStreamHandle { state })
    }

    pub(super) fn state(&self) -> &StreamState {
        &self.state
    }
}

impl Drop for CudaStreamHandle {
    fn drop(&mut self) {
        // SAFETY: taken once, in here, and not used after it.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        // The watching thread may not have found yet that the work is done.
        defer_drops(state.settle());
        if state.has_work() {
            // The watching thread releases it when the work is done.
            state.keep();
        }
        release(state);
        free_parked();
    }
}
