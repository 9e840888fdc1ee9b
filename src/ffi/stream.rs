//! Streams.
#![allow(unsafe_code)] // exports functions to C, takes its pointers, and calls its kernels
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};

use crate::ffi::argument::{out_handle, text, timeout};
use crate::ffi::boundary::{Failure, guard};
use crate::ffi::event::doorbell_event;
use crate::ffi::handle::{Handle, destroy, get};
use crate::{Executor, HostStream};

/// A kernel of a host stream.
pub type doorbell_kernel = Option<unsafe extern "C" fn(*mut c_void)>;

/// A stream. One kind so far; the calls that every kind has go through [`doorbell_stream::executor`].
pub struct doorbell_stream {
    pub(super) host: HostStream,
}

impl Handle for doorbell_stream {
    const NAME: &'static str = "doorbell_stream";
}

impl doorbell_stream {
    #[inline]
    pub(super) fn executor(&self) -> &dyn Executor {
        &self.host
    }
}

/// A kernel with its argument, on its way to the stream's thread.
struct Call {
    kernel: unsafe extern "C" fn(*mut c_void),
    argument: *mut c_void,
}

// SAFETY: the header says that the kernel gets its argument in the stream's thread; the caller launched it knowing that.
unsafe impl Send for Call {}

impl Call {
    fn run(self) {
        // SAFETY: the caller's promise at launch: the argument is what the kernel takes, and is there until the kernel has run.
        unsafe { (self.kernel)(self.argument) };
    }
}

/// Makes a host stream.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_create_host(
    name: *const c_char,
    capacity: u32,
    stream: *mut *mut doorbell_stream,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about texts and places for handles.
        let (place, name) = unsafe {
            let place = out_handle(stream, "stream")?;
            let name = if name.is_null() {
                "host"
            } else {
                text(name, "name")?
            };
            (place, name)
        };
        let host = match capacity {
            0 => HostStream::new(name),
            _ => HostStream::with_capacity(name, capacity as usize),
        }?;
        Ok(place.set(doorbell_stream { host }))
    })
}

/// Destroys the handle of a stream.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_destroy(stream: *mut doorbell_stream) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(stream, "stream") }.map(|()| 0))
}

/// Queues a kernel.
///
/// # Safety
/// As the header says of handles and kernels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_launch(
    stream: *mut doorbell_stream,
    kernel: doorbell_kernel,
    argument: *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let stream = unsafe { get(stream, "stream") }?;
        let kernel = kernel.ok_or_else(|| Failure::null("kernel"))?;
        let call = Call { kernel, argument };
        stream.host.launch(move || call.run())?;
        Ok(0)
    })
}

/// Waits for the work of a stream.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_synchronize(
    stream: *mut doorbell_stream,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let stream = unsafe { get(stream, "stream") }?;
        stream.executor().synchronize(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Whether the work of a stream is done.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_query(stream: *mut doorbell_stream) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let stream = unsafe { get(stream, "stream") }?;
        Ok(stream.executor().query()?.into())
    })
}

/// Discards what is queued.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_abort(stream: *mut doorbell_stream) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let stream = unsafe { get(stream, "stream") }?;
        stream.host.abort();
        Ok(0)
    })
}

/// Makes an event stand for the work queued so far.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_record(
    stream: *mut doorbell_stream,
    event: *mut doorbell_event,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let (stream, event) = unsafe { (get(stream, "stream")?, get(event, "event")?) };
        stream.executor().record(&event.inner)?;
        Ok(0)
    })
}

/// Lets what is queued later wait for the work that an event stands for.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_event(
    stream: *mut doorbell_stream,
    event: *const doorbell_event,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let (stream, event) = unsafe { (get(stream, "stream")?, get(event, "event")?) };
        stream.executor().wait_event(&event.inner)?;
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::error::tests::last_error;
    use crate::ffi::error::{DOORBELL_EASYNC, DOORBELL_OK};
    use crate::ffi::handle::create;

    #[test]
    fn a_kernel_that_panics_is_an_error_of_its_stream() {
        let host = HostStream::new("panics").unwrap();
        host.launch(|| panic!("in a kernel")).unwrap();
        let stream = create(doorbell_stream { host });
        // SAFETY: a handle that is used as it should be.
        unsafe {
            for _ in 0..2 {
                assert_eq!(doorbell_stream_synchronize(stream, 20_000), DOORBELL_EASYNC);
                assert!(last_error().contains("panicked: in a kernel"));
                assert_eq!(doorbell_stream_query(stream), DOORBELL_EASYNC);
            }
            assert_eq!(doorbell_stream_destroy(stream), DOORBELL_OK);
        }
    }
}
