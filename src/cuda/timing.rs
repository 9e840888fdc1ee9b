//! Events of the driver with timestamps of the GPU, for measurements.
#![allow(unsafe_code)] // calls the driver

use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUevent_flags};

use super::context::CudaContext;
use super::driver::check;
use super::stream::CudaStream;
use crate::Result;

/// A timestamp that the GPU takes in stream order (`cuEventRecord`). To order streams use [`Event`](crate::Event).
#[derive(Debug)]
pub struct TimingEvent {
    context: CudaContext,
    raw: CUevent,
}

// SAFETY: an event's handle may be used from any thread; the driver locks.
unsafe impl Send for TimingEvent {}
// SAFETY: as above.
unsafe impl Sync for TimingEvent {}

impl TimingEvent {
    /// A new event, which is not recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(context: &CudaContext) -> Result<TimingEvent> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, which is destroyed with this object.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DEFAULT as u32)
        })?;
        let context = context.clone();
        Ok(TimingEvent { context, raw })
    }

    /// The driver's handle.
    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Has the stream take the timestamp after the work that is queued now. A later call replaces it.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), a stream of another context among them.
    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: an event and a stream that live.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, stream.raw_inside())
        })
    }

    /// Waits, spinning, until the timestamp is taken. Returns at once if the event was never recorded.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), which includes errors of work that was queued earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter_relaxed()?;
        // SAFETY: an event that lives.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.raw)
        })
    }

    /// The time from `earlier` to this event, with a resolution of half a microsecond (`cuEventElapsedTime`). Zero if `earlier` is later.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) if one was never recorded, or its timestamp is not taken yet.
    pub fn since(&self, earlier: &TimingEvent) -> Result<Duration> {
        let _entered = self.context.enter()?;
        let mut ms = 0.0_f32;
        // SAFETY: writes one float.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut ms, earlier.raw, self.raw)
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default())
    }
}

impl Drop for TimingEvent {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_give_back() {
            // SAFETY: made by `new`. If its timestamp is not taken yet, the driver destroys it after that.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
