//! Asynchronous copies between host memory and the memory of a GPU.
#![allow(unsafe_code)] // calls the driver with addresses of memory of others

use std::collections::BTreeMap;
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUresult, CUstream};

use super::context::CudaContext;
use super::driver::{check, create_stream};
use super::host_registration::HostRegistration;
use crate::stream::Attachments;
use crate::{Error, Result, StateKind};

/// The most events that are kept for later copies.
const SPARE_MAX: usize = 256;

/// A stream for copies, which synchronizes with no other, with an event after each copy.
pub(crate) struct CopyStream {
    context: CudaContext,
    stream: CUstream,
    under_way: BTreeMap<u64, CopyEnd>,
    spare: Vec<CUevent>,
    copies: u64,
}

/// What shows that a copy is over.
#[derive(Clone, Copy)]
enum CopyEnd {
    Event(CUevent),
    /// No event could be recorded: the copy is over when the stream is idle.
    Stream,
}

/// Whether a copy goes to the host or from it.
#[derive(Clone, Copy)]
pub(crate) enum CopyDirection {
    ToHost,
    FromHost,
}

// SAFETY: streams and events may be used from any thread; the driver locks.
unsafe impl Send for CopyStream {}

impl CopyStream {
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn new(context: &CudaContext) -> Result<CopyStream> {
        let _entered = context.enter_relaxed()?;
        Ok(CopyStream {
            context: context.clone(),
            stream: create_stream()?,
            under_way: BTreeMap::new(),
            spare: Vec::new(),
            copies: 0,
        })
    }

    /// Page-locks host memory as long as its owner lives. Copies of pageable memory are not asynchronous.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// The memory stays mapped as long as `owner` lives.
    pub(crate) unsafe fn pin(
        &self,
        owner: &Attachments,
        start: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { HostRegistration::of(owner, &self.context, start, len_bytes) }.map(drop)
    }

    /// Begins a copy, and returns its number. After an error no copy is under way.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// Until [`CopyStream::is_copy_done`] returns true for it, both are memory of that length, and no one else accesses what is written.
    pub(crate) unsafe fn begin(
        &mut self,
        way: CopyDirection,
        device: CUdeviceptr,
        host: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<u64> {
        let _entered = self.context.enter_relaxed()?;
        let event = self.event()?;
        // SAFETY: the caller's promise.
        let begun = unsafe {
            match way {
                CopyDirection::ToHost => check(
                    "cuMemcpyDtoHAsync",
                    sys::cuMemcpyDtoHAsync_v2(host.as_ptr().cast(), device, len_bytes, self.stream),
                ),
                CopyDirection::FromHost => check(
                    "cuMemcpyHtoDAsync",
                    sys::cuMemcpyHtoDAsync_v2(device, host.as_ptr().cast(), len_bytes, self.stream),
                ),
            }
        };
        if let Err(error) = begun {
            self.spare.push(event);
            return Err(error);
        }
        // SAFETY: an event and a stream of ours.
        let recorded = unsafe { sys::cuEventRecord(event, self.stream) };
        let mark = if recorded == CUresult::CUDA_SUCCESS {
            CopyEnd::Event(event)
        } else {
            self.spare.push(event);
            CopyEnd::Stream
        };
        self.copies += 1;
        self.under_way.insert(self.copies, mark);
        Ok(self.copies)
    }

    /// Whether a copy is over. Not to be called again for it after that.
    ///
    /// # Errors
    /// [`Error::Cuda`]: it has failed, and is over.
    pub(crate) fn is_copy_done(&mut self, copy: u64) -> Result<bool> {
        let Some(mark) = self.under_way.get(&copy).copied() else {
            return Err(Error::state(
                StateKind::NothingPosted,
                "copy of a GPU's memory",
                format!("there is no copy {copy} under way"),
            ));
        };
        let answer = match self.context.enter_relaxed() {
            Ok(_entered) => self.look(mark),
            // A destroyed context has ended its copies.
            Err(error) => Err(error),
        };
        if !matches!(answer, Ok(false)) {
            self.under_way.remove(&copy);
            if let (CopyEnd::Event(event), true) = (mark, self.spare.len() < SPARE_MAX) {
                self.spare.push(event);
            } else if let CopyEnd::Event(event) = mark {
                // SAFETY: made by `event`, and no longer used.
                let _ = unsafe { sys::cuEventDestroy_v2(event) };
            }
        }
        answer
    }

    fn look(&mut self, mark: CopyEnd) -> Result<bool> {
        let ask_stream = |stream| {
            // SAFETY: a stream of ours.
            let result = unsafe { sys::cuStreamQuery(stream) };
            match result {
                CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                result => check("cuStreamQuery", result).map(|()| true),
            }
        };
        let CopyEnd::Event(event) = mark else {
            return ask_stream(self.stream);
        };
        // SAFETY: an event of ours.
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            // The copy is over if the stream is idle or has failed.
            result => match ask_stream(self.stream) {
                Ok(false) => Ok(false),
                _ => check("cuEventQuery", result).map(|()| true),
            },
        }
    }

    fn event(&mut self) -> Result<CUevent> {
        if let Some(event) = self.spare.pop() {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle, which `is_copy_done` or `drop` destroys.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, flags)
        })?;
        Ok(event)
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // A destroyed context has destroyed its streams and events.
        let Some(_entered) = self.context.enter_to_give_back() else {
            return;
        };
        let marked = self.under_way.values().filter_map(|mark| match mark {
            CopyEnd::Event(event) => Some(*event),
            CopyEnd::Stream => None,
        });
        for event in self.spare.iter().copied().chain(marked) {
            // SAFETY: made by `event`, and no longer used.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
        // SAFETY: made by `new`; the driver ends it when its copies are made.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}
