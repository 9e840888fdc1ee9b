//! Captures of streams, by this library and by others.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::driver::check;
use crate::{Error, Result};

/// Fails if a stream is being captured. What is queued on it then would not be executed, and would repeat the same stores with every launch of
/// the graph; and to ask how far it is would break the capture off. The context is current.
pub(super) fn forbid(raw: CUstream, operation: &'static str) -> Result<()> {
    if is_captured(raw)? {
        return Err(Error::State {
            operation,
            reason: "the stream is being captured: what belongs into the graph is added by a `GraphBuilder`, which sees to it that each launch has \
                     values of its own"
                .into(),
        });
    }
    Ok(())
}

/// Whether a stream is being captured. The context is current.
pub(super) fn is_captured(raw: CUstream) -> Result<bool> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: writes one value of the enumeration.
    check("cuStreamIsCapturing", unsafe {
        sys::cuStreamIsCapturing(raw, &mut status)
    })?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// While it lives, the calls of this thread do not break captures off that other threads make, or this one: the driver takes registering memory
/// for a thing that a capture may not see. It may: the memory is not that of the graph.
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
