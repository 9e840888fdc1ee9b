//! Streams.
#![allow(unsafe_code)] // exports functions to C, takes its pointers, and calls its kernels
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};

use crate::argument::{
    VersionedStruct, check_text, choice, out, out_handle, out_optional, read_struct, text, timeout,
    write_struct, write_text,
};
use crate::boundary::{call, guard};
use crate::error::doorbell_failure;
use crate::event::doorbell_event;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
#[cfg(feature = "cuda")]
use doorbell_rs::{CudaContext, CudaStream, Execution, TriggerStream};
use doorbell_rs::{Error, Executor, HostStream, StateKind};

/// Memory operations of the driver, and a kernel for what they lack.
pub const DOORBELL_EXECUTION_MEMORY_OPS: u32 = 0;
/// A kernel of one thread.
pub const DOORBELL_EXECUTION_KERNEL: u32 = 1;

/// A kernel of a host stream.
pub type doorbell_host_fn = Option<unsafe extern "C" fn(*mut c_void)>;

/// A `CUstream`, which is a `cudaStream_t`: the driver's own type, known by its name.
#[allow(non_camel_case_types)]
pub enum CUstream_st {}

/// A `CUevent`, which is a `cudaEvent_t`.
#[allow(non_camel_case_types)]
pub enum CUevent_st {}

/// A stream. The calls that every kind has go through [`doorbell_stream::executor`].
pub enum doorbell_stream {
    Host(HostStream),
    #[cfg(feature = "cuda")]
    Cuda(CudaStream),
    #[cfg(feature = "cuda")]
    Trigger(TriggerStream),
}

impl CObject for doorbell_stream {
    const NAME: &'static str = "doorbell_stream";
}

impl doorbell_stream {
    #[inline]
    pub(super) fn executor(&self) -> &dyn Executor {
        match self {
            doorbell_stream::Host(host) => host,
            #[cfg(feature = "cuda")]
            doorbell_stream::Cuda(cuda) => cuda,
            #[cfg(feature = "cuda")]
            doorbell_stream::Trigger(kernels) => kernels,
        }
    }

    /// What only the streams of a GPU have.
    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self, operation: &'static str) -> Result<&CudaStream, Failure> {
        match self {
            doorbell_stream::Host(_) | doorbell_stream::Trigger(_) => Err(of_a_gpu(operation)),
            doorbell_stream::Cuda(cuda) => Ok(cuda),
        }
    }
}

#[cold]
fn of_a_gpu(operation: &'static str) -> Failure {
    Failure::Library(Error::state(
        StateKind::WrongKind,
        operation,
        "it is not a CUDA stream; doorbell_stream_create_cuda creates one",
    ))
}

/// How a CUDA stream is used.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_cuda_stream_config {
    pub struct_size: u32,
    pub execution: u32,
    pub name: *const c_char,
}

// SAFETY: repr(C), two 4-byte fields and a pointer, without padding, integers and a raw pointer, and the size first.
unsafe impl VersionedStruct for doorbell_cuda_stream_config {
    const BYTES_FIRST: usize = 8 + size_of::<*const c_char>();

    fn defaults() -> doorbell_cuda_stream_config {
        doorbell_cuda_stream_config {
            struct_size: size_of::<doorbell_cuda_stream_config>() as u32,
            execution: DOORBELL_EXECUTION_MEMORY_OPS,
            name: std::ptr::null(),
        }
    }
}

const _: () =
    assert!(size_of::<doorbell_cuda_stream_config>() == doorbell_cuda_stream_config::BYTES_FIRST);

/// A kernel with its argument, on its way to the stream's thread.
struct QueuedFunction {
    kernel: unsafe extern "C" fn(*mut c_void),
    argument: *mut c_void,
}

// SAFETY: the header says that the kernel gets its argument in the stream's thread; the caller launched it knowing that.
unsafe impl Send for QueuedFunction {}

impl QueuedFunction {
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
    // SAFETY: the caller's promise.
    unsafe {
        create_host(name, capacity, stream, |name, capacity| {
            HostStream::with_capacity(name, capacity)
        })
    }
}

/// Makes a host stream without a thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_create_host_without_thread(
    name: *const c_char,
    capacity: u32,
    stream: *mut *mut doorbell_stream,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        create_host(name, capacity, stream, |name, capacity| {
            HostStream::without_thread_with_capacity(name, capacity)
        })
    }
}

/// # Safety
/// As the header says of pointers.
unsafe fn create_host(
    name: *const c_char,
    capacity: u32,
    stream: *mut *mut doorbell_stream,
    make: impl FnOnce(&str, usize) -> doorbell_rs::Result<HostStream>,
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
        let capacity = match capacity {
            0 => HostStream::CAPACITY_DEFAULT,
            _ => capacity as usize,
        };
        let host = make(name, capacity)?;
        Ok(place.set(doorbell_stream::Host(host)))
    })
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cuda_stream_config_init(
    config: *mut doorbell_cuda_stream_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_cuda_stream_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Makes a stream of a `CUstream`.
///
/// # Safety
/// As the header says of pointers, and of the stream: it is one, and stays until what was queued is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_create_cuda(
    cuda_stream: *mut CUstream_st,
    config: *const doorbell_cuda_stream_config,
    stream: *mut *mut doorbell_stream,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about places for handles, structs and their sizes, and texts.
        let (place, by_kernel, name) = unsafe {
            let place = out_handle(stream, "stream")?;
            let config = if config.is_null() {
                doorbell_cuda_stream_config::defaults()
            } else {
                read_struct(config, "config")?
            };
            let by_kernel = match config.execution {
                DOORBELL_EXECUTION_MEMORY_OPS => false,
                DOORBELL_EXECUTION_KERNEL => true,
                other => return Err(choice("execution", other, DOORBELL_EXECUTION_KERNEL)),
            };
            let name = if config.name.is_null() {
                "cuda"
            } else {
                text(config.name, "name")?
            };
            (place, by_kernel, name)
        };
        // SAFETY: the caller's promise about the stream.
        Ok(place.set(unsafe { over(cuda_stream, by_kernel, name) }?))
    })
}

/// # Safety
/// As [`doorbell_stream_create_cuda`] of the stream.
#[cfg(feature = "cuda")]
unsafe fn over(
    raw: *mut CUstream_st,
    by_kernel: bool,
    name: &str,
) -> Result<doorbell_stream, Failure> {
    // SAFETY: the caller's promise.
    let stream = unsafe {
        let context = CudaContext::of_stream(raw.cast())?;
        CudaStream::from_raw(&context, raw.cast(), name)?
    };
    Ok(doorbell_stream::Cuda(match by_kernel {
        true => stream.with_execution(Execution::Kernel)?,
        false => stream,
    }))
}

#[cfg(not(feature = "cuda"))]
unsafe fn over(_: *mut CUstream_st, _: bool, _: &str) -> Result<doorbell_stream, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

/// Where kernels read whether something before has failed.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_status_word(
    stream: *mut doorbell_stream,
    device_address: *mut u64,
) -> c_int {
    call!(place = out(device_address), stream = get(stream), || {
        place.write(status_word(stream)?);
        Ok(0)
    })
}

/// What the status word says.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_status(
    stream: *const doorbell_stream,
    status: *mut c_int,
) -> c_int {
    call!(place = out(status), stream = get(stream), || {
        place.write(self::status(stream)?);
        Ok(0)
    })
}

/// Takes note of later failures again.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_clear_status(stream: *mut doorbell_stream) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        clear_status(unsafe { get(stream, "stream") }?)?;
        Ok(0)
    })
}

#[cfg(feature = "cuda")]
fn status_word(stream: &doorbell_stream) -> Result<u64, Failure> {
    match stream {
        doorbell_stream::Trigger(kernels) => Ok(kernels.status_word()),
        other => Ok(other.cuda("status word of a stream")?.status_word()),
    }
}

#[cfg(feature = "cuda")]
fn status(stream: &doorbell_stream) -> Result<c_int, Failure> {
    match stream {
        doorbell_stream::Trigger(kernels) => Ok(kernels.status()),
        other => Ok(other.cuda("status of a stream")?.status()),
    }
}

#[cfg(feature = "cuda")]
fn clear_status(stream: &doorbell_stream) -> Result<(), Failure> {
    match stream {
        doorbell_stream::Trigger(kernels) => kernels.clear_status(),
        other => other.cuda("status of a stream")?.clear_status(),
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn status_word(_: &doorbell_stream) -> Result<u64, Failure> {
    Err(of_a_gpu("status word of a stream"))
}

#[cfg(not(feature = "cuda"))]
fn status(_: &doorbell_stream) -> Result<c_int, Failure> {
    Err(of_a_gpu("status of a stream"))
}

#[cfg(not(feature = "cuda"))]
fn clear_status(_: &doorbell_stream) -> Result<(), Failure> {
    Err(of_a_gpu("status of a stream"))
}

/// How often the driver was called.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_driver_calls(
    stream: *const doorbell_stream,
    calls: *mut u64,
) -> c_int {
    call!(place = out(calls), stream = get(stream), || {
        place.write(driver_calls(stream)?);
        Ok(0)
    })
}

#[cfg(feature = "cuda")]
fn driver_calls(stream: &doorbell_stream) -> Result<u64, Failure> {
    Ok(stream.cuda("driver calls of a stream")?.driver_calls())
}

#[cfg(not(feature = "cuda"))]
fn driver_calls(_: &doorbell_stream) -> Result<u64, Failure> {
    Err(of_a_gpu("driver calls of a stream"))
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
    function: doorbell_host_fn,
    argument: *mut c_void,
) -> c_int {
    call!(stream = get(stream), || {
        let kernel = function.ok_or_else(|| Failure::null("function"))?;
        let call = QueuedFunction { kernel, argument };
        match stream {
            doorbell_stream::Host(host) => host.launch(move || call.run()),
            #[cfg(feature = "cuda")]
            doorbell_stream::Cuda(cuda) => cuda.launch_host(move || call.run()),
            #[cfg(feature = "cuda")]
            doorbell_stream::Trigger(_) => {
                return Err(Failure::Library(Error::state(
                    StateKind::WrongKind,
                    "launch on a stream",
                    "it is a trigger stream: kernels of the application execute it",
                )));
            }
        }?;
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
    call!(stream = get(stream), || {
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
    call!(stream = get(stream), || {
        Ok(stream.executor().query()?.into())
    })
}

/// Takes the fault of a stream.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_take_fault(
    stream: *mut doorbell_stream,
    failure: *mut doorbell_failure,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream) = unsafe { (out_optional(failure), get(stream, "stream")?) };
        // Before the fault is taken, which nobody would be told of.
        check_text(text, capacity)?;
        let Some(fault) = stream.executor().take_fault() else {
            return Ok(0);
        };
        // SAFETY: the caller's promise about text buffers.
        let length = unsafe { write_text(&fault.to_string(), text, capacity) }?;
        if let (Some(place), Error::Asynchronous { work, .. }) = (place, &fault) {
            place.write(work.map_or_else(doorbell_failure::default, Into::into));
        }
        Ok(length)
    })
}

/// Whether a stream goes on behind work that failed.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_continue_on_error(
    stream: *mut doorbell_stream,
    continues: c_int,
) -> c_int {
    call!(stream = get(stream), || {
        match stream {
            doorbell_stream::Host(host) => host.continue_on_error(continues != 0),
            #[cfg(feature = "cuda")]
            doorbell_stream::Cuda(cuda) => cuda.continue_on_error(continues != 0),
            #[cfg(feature = "cuda")]
            doorbell_stream::Trigger(kernels) => kernels.continue_on_error(continues != 0),
        }
        Ok(0)
    })
}

/// Discards what is queued.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_abort(stream: *mut doorbell_stream) -> c_int {
    call!(stream = get(stream), || {
        match stream {
            doorbell_stream::Host(host) => host.abort(),
            #[cfg(feature = "cuda")]
            doorbell_stream::Trigger(kernels) => kernels.abort(),
            #[cfg(feature = "cuda")]
            doorbell_stream::Cuda(cuda) => cuda.abort(),
        }
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
    call!(stream = get(stream), event = get(event), || {
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
    call!(stream = get(stream), event = get(event), || {
        stream.executor().wait_event(&event.inner)?;
        Ok(0)
    })
}

/// Lets what is queued later wait for the work that an event of CUDA stands for.
///
/// # Safety
/// As the header says of handles, and of the event: it is one, and a host stream's wait is over before it is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_cuda_event(
    stream: *mut doorbell_stream,
    cuda_event: *mut CUevent_st,
) -> c_int {
    call!(stream = get(stream), || {
        if cuda_event.is_null() {
            return Err(Failure::null("cuda_event"));
        }
        // SAFETY: the caller's promise about the event.
        unsafe { wait_cuda_event(stream, cuda_event) }?;
        Ok(0)
    })
}

/// # Safety
/// As [`doorbell_stream_wait_cuda_event`] of the event.
#[cfg(feature = "cuda")]
unsafe fn wait_cuda_event(stream: &doorbell_stream, event: *mut CUevent_st) -> Result<(), Failure> {
    match stream {
        doorbell_stream::Host(host) => {
            let context = CudaContext::current()?;
            // SAFETY: the caller's promise.
            unsafe { host.wait_cuda_event(&context, event.cast(), ()) }?;
        }
        // SAFETY: as above.
        doorbell_stream::Cuda(cuda) => unsafe { cuda.wait_cuda_event(event.cast()) }?,
        doorbell_stream::Trigger(_) => {
            return Err(Failure::Library(Error::state(
                StateKind::WrongKind,
                "wait for a CUDA event",
                "kernels execute a trigger stream; have the CUDA stream wait on which the kernel is launched",
            )));
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
unsafe fn wait_cuda_event(_: &doorbell_stream, _: *mut CUevent_st) -> Result<(), Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{DOORBELL_EASYNC, DOORBELL_EINVAL, DOORBELL_OK};
    use crate::handle::create;
    use crate::last_error::tests::last_error;

    #[test]
    fn a_kernel_that_panics_is_an_error_of_its_stream() {
        let host = HostStream::new("panics").unwrap();
        host.launch(|| panic!("in a kernel")).unwrap();
        let stream = create(doorbell_stream::Host(host));
        // SAFETY: a handle that is used as it should be.
        unsafe {
            for _ in 0..2 {
                assert_eq!(doorbell_stream_synchronize(stream, 20_000), DOORBELL_EASYNC);
                assert!(last_error().contains("panicked: in a kernel"));
                assert_eq!(doorbell_stream_query(stream), DOORBELL_EASYNC);
            }
            let nowhere = (std::ptr::null_mut(), std::ptr::null_mut());
            // The fault stays: nobody was told of it.
            let refused = doorbell_stream_take_fault(stream, nowhere.0, nowhere.1, 1);
            assert_eq!(refused, DOORBELL_EINVAL);
            assert_eq!(doorbell_stream_query(stream), DOORBELL_EASYNC);
            let take = || doorbell_stream_take_fault(stream, nowhere.0, nowhere.1, 0);
            assert!(take() > 0);
            assert_eq!(take(), 0);
            assert_eq!(doorbell_stream_query(stream), 1);
            assert_eq!(doorbell_stream_destroy(stream), DOORBELL_OK);
        }
    }
}
