//! Stream captures into CUDA graphs, by this library and by the application.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::driver::check;
use crate::{Error, Result, StateKind};

/// Fails if a stream is under capture: queued operations would not be executed now, and each launch of the graph would repeat the same stores. A
/// query of the stream would invalidate the capture.
pub(super) fn forbid(raw: CUstream, operation: &'static str) -> Result<()> {
    if is_captured(raw)? {
        return Err(Error::state(
            StateKind::Captured,
            operation,
            "the stream is being captured; add the operations with a `GraphBuilder`, which updates them for each launch",
        ));
    }
    Ok(())
}

/// Whether a stream is under capture.
pub(super) fn is_captured(raw: CUstream) -> Result<bool> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: writes one value of the enumeration.
    check("cuStreamIsCapturing", unsafe {
        sys::cuStreamIsCapturing(raw, &mut status)
    })?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A guard of relaxed capture mode (`CU_STREAM_CAPTURE_MODE_RELAXED`): while it lives, calls of this thread such as registering memory do not
/// invalidate captures of this thread or others. They are safe, since they concern no memory of a graph.
pub(super) struct RelaxedCapture(Option<CUstreamCaptureMode>);

impl RelaxedCapture {
    pub(super) fn new() -> RelaxedCapture {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the thread's mode for the one before.
        let changed = check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        });
        RelaxedCapture(changed.is_ok().then_some(mode))
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mut mode) = self.0 {
            // SAFETY: as above.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }
}
