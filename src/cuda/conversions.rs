//! Conversions from and to contexts, streams and memory of the crate `cudarc`. Its version, 0.19, is part of this interface.
#![allow(unsafe_code)] // calls the driver, and takes over its memory

use std::sync::Arc;

use cudarc::driver::{self as theirs, CudaSlice, CudaViewMut, DevicePtr, sys};

use super::capture::RelaxedCapture;
use super::context::CudaContext;
use super::driver::check;
use super::memory::DeviceBuffer;
use super::stream::CudaStream;
use crate::{Error, Result, StateKind};

/// An error of `cudarc` as this library's.
fn failed(call: &'static str, error: theirs::DriverError) -> Error {
    match check(call, error.0) {
        Err(error) => error,
        Ok(()) => Error::state(StateKind::Unexpected, call, "an error without a number"),
    }
}

/// Restores the thread's current context when dropped: `cudarc` makes its own context current, and leaves it so.
struct Current(sys::CUcontext);

impl Current {
    fn keep() -> Result<Current> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle, null if there is none.
        check("cuCtxGetCurrent", unsafe {
            sys::cuCtxGetCurrent(&mut current)
        })?;
        Ok(Current(current))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: the context that was current before.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

impl CudaContext {
    /// A context of `cudarc`'s, which is kept as long as this handle and what is made with it.
    ///
    /// # Errors
    /// As [`CudaContext::primary`].
    pub fn from_cudarc(context: &Arc<theirs::CudaContext>) -> Result<CudaContext> {
        if context.is_primary() {
            let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
            return CudaContext::primary(ordinal);
        }
        CudaContext::borrowed(context)
    }

    /// The context as an object of `cudarc`'s.
    ///
    /// # Errors
    /// [`Error::State`] for a context that is neither a device's primary one nor `cudarc`'s own: `cudarc` would destroy it. [`Error::Cuda`].
    pub fn to_cudarc(&self) -> Result<Arc<theirs::CudaContext>> {
        if let Some(cudarc_owner) = self.cudarc_owner() {
            return Ok(Arc::clone(cudarc_owner));
        }
        let current = Current::keep()?;
        let made = theirs::CudaContext::new(usize::try_from(self.device()).unwrap_or(usize::MAX));
        drop(current);
        let made = made.map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
        if made.cu_ctx() == self.raw() {
            return Ok(made);
        }
        Err(Error::state(
            StateKind::WrongKind,
            "a context for cudarc",
            "it is not a primary context, and cudarc would destroy it",
        ))
    }
}

impl CudaStream {
    /// A stream of `cudarc`'s, which is kept until the last handle of this one is dropped and its queued work is done.
    ///
    /// # Errors
    /// As [`CudaStream::new`].
    pub fn from_cudarc(
        stream: &Arc<theirs::CudaStream>,
        name: impl Into<String>,
    ) -> Result<CudaStream> {
        let context = CudaContext::from_cudarc(stream.context())?;
        let owner = Box::new(Arc::clone(stream));
        // SAFETY: the object keeps the stream.
        unsafe { CudaStream::from_owner(&context, stream.cu_stream(), name, owner) }
    }

    /// The stream as an object of `cudarc`'s, which does not destroy it.
    ///
    /// # Errors
    /// As [`CudaContext::to_cudarc`].
    ///
    /// # Safety
    /// The last handle of this stream is not dropped before the last use of that object.
    pub unsafe fn to_cudarc(&self) -> Result<Arc<theirs::CudaStream>> {
        let context = self.context().to_cudarc()?;
        // SAFETY: a stream of that context, and the caller's promise.
        Ok(unsafe { context.wrap_borrowed_stream(self.raw()) })
    }
}

impl DeviceBuffer {
    /// Memory of `cudarc`'s, which `cudarc` frees when the last handle is dropped. Waits until the memory is allocated and the writes that `cudarc`
    /// knows of are done.
    ///
    /// # Errors
    /// As [`DeviceBuffer::from_raw`].
    pub fn from_cudarc<T: 'static>(slice: CudaSlice<T>) -> Result<DeviceBuffer> {
        let context = CudaContext::from_cudarc(slice.context())?;
        let ptr = settled(&slice, slice.stream())?;
        let len_bytes = slice.num_bytes() as u64;
        // SAFETY: the memory is valid as long as the slice lives.
        unsafe { DeviceBuffer::from_owner(&context, ptr, len_bytes, Box::new(slice)) }
    }

    /// A part of a slice of `cudarc`'s. Waits as [`DeviceBuffer::from_cudarc`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::from_raw`].
    ///
    /// # Safety
    /// The slice is not dropped before the last handle, including those of regions and of their queued work, and is not used elsewhere while a transfer
    /// uses it. The borrow does not guarantee that, since it may end before.
    pub unsafe fn from_cudarc_view<T>(view: &CudaViewMut<'_, T>) -> Result<DeviceBuffer> {
        let stream = theirs::DeviceSlice::stream(view);
        let context = CudaContext::from_cudarc(stream.context())?;
        let ptr = settled(view, stream)?;
        let len_bytes = theirs::DeviceSlice::num_bytes(view) as u64;
        // SAFETY: the caller's promise.
        unsafe { DeviceBuffer::from_raw(&context, ptr, len_bytes) }
    }

    /// The slice that it was made from.
    ///
    /// # Errors
    /// The buffer, if it was not made from a slice of that type, or if there are other handles.
    pub fn into_cudarc<T: 'static>(self) -> std::result::Result<CudaSlice<T>, DeviceBuffer> {
        self.into_owner()
    }

    /// Memory of [`CudaContext::alloc`] as a slice that `cudarc` frees on that stream.
    ///
    /// # Errors
    /// The buffer, if this library has not allocated it, if it is a part, if there are other handles, or if its context is not the stream's.
    pub fn into_cudarc_on(
        self,
        stream: &Arc<theirs::CudaStream>,
    ) -> std::result::Result<CudaSlice<u8>, DeviceBuffer> {
        if stream.context().cu_ctx() != self.context().raw() {
            return Err(self);
        }
        let Ok(_current) = Current::keep() else {
            return Err(self);
        };
        // `cudarc` creates events for the slice, and panics if it cannot.
        if stream.context().bind_to_thread().is_err() {
            return Err(self);
        }
        let (ptr, len_bytes) = self.leak()?;
        // SAFETY: an allocation of that length, which `leak` has given up; bytes have no invalid values.
        Ok(unsafe { stream.upgrade_device_ptr(ptr, len_bytes as usize) })
    }
}

/// The address of memory, after the work that `cudarc` has queued on it.
fn settled<T>(memory: &impl DevicePtr<T>, stream: &theirs::CudaStream) -> Result<sys::CUdeviceptr> {
    // The wait would invalidate captures of other threads.
    let _relaxed = RelaxedCapture::new();
    let (ptr, reads) = memory.device_ptr(stream);
    drop(reads);
    let synchronised = stream.synchronize();
    synchronised.map_err(|error| failed("cuStreamSynchronize", error))?;
    Ok(ptr)
}
