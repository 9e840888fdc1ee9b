//! Operations queued on a stream, at once or prepared first.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;

use crate::argument::{array, out_handle, queue_kind_of, write_bytes, write_text};
use crate::boundary::{call, guard};
use crate::endpoint::{doorbell_endpoint, try_lock, wait_timeout};
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use crate::stream::doorbell_stream;
use crate::ticket::{doorbell_ticket, ticket_place};
use crate::work::{doorbell_slice, doorbell_work, with_slices, with_work};
use doorbell_rs::{Prepared, Rejected, RemoteSlice, Work};

/// An operation that is ready to be given to a stream.
pub struct doorbell_prepared {
    /// Empty while a call uses it, and after a stream has taken it.
    inner: Mutex<Option<Prepared>>,
}

impl CObject for doorbell_prepared {
    const NAME: &'static str = "doorbell_prepared";
}

impl doorbell_prepared {
    fn new(prepared: Prepared) -> doorbell_prepared {
        doorbell_prepared {
            inner: Mutex::new(Some(prepared)),
        }
    }

    fn take(&self) -> Result<Prepared, Failure> {
        let taken = try_lock(&self.inner, "prepared")?.take();
        // Two threads use it, or one list contains it twice.
        taken.ok_or(Failure::Busy {
            argument: "prepared",
        })
    }

    fn put_back(&self, prepared: Prepared) {
        if let Ok(mut place) = self.inner.lock() {
            *place = Some(prepared);
        }
    }
}

/// Queues a work request.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_queue_send(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    work: *const doorbell_work,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and work requests.
        unsafe {
            let place = ticket_place(ticket);
            let (stream, endpoint) = (get(stream, "stream")?, get(endpoint, "endpoint")?);
            with_work(work, |work| {
                let ticket = endpoint
                    .lock()?
                    .stream_queue_send(stream.executor(), work)?;
                Ok(place.set(ticket))
            })
        }
    })
}

/// Queues a write.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_queue_write(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    slices: *const doorbell_slice,
    slice_count: u32,
    remote_addr: u64,
    rkey: u32,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let place = ticket_place(ticket);
            let (stream, endpoint) = (get(stream, "stream")?, get(endpoint, "endpoint")?);
            with_slices(slices, slice_count, |slices| {
                let work = Work::write(slices, RemoteSlice::at(remote_addr, rkey));
                let ticket = endpoint
                    .lock()?
                    .stream_queue_send(stream.executor(), &work)?;
                Ok(place.set(ticket))
            })
        }
    })
}

/// Queues a read.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_queue_read(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    slices: *const doorbell_slice,
    slice_count: u32,
    remote_addr: u64,
    rkey: u32,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let place = ticket_place(ticket);
            let (stream, endpoint) = (get(stream, "stream")?, get(endpoint, "endpoint")?);
            with_slices(slices, slice_count, |slices| {
                let work = Work::read(slices, RemoteSlice::at(remote_addr, rkey));
                let ticket = endpoint
                    .lock()?
                    .stream_queue_send(stream.executor(), &work)?;
                Ok(place.set(ticket))
            })
        }
    })
}

/// Queues a receive.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_queue_recv(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    wr_id: u64,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let place = ticket_place(ticket);
            let (stream, endpoint) = (get(stream, "stream")?, get(endpoint, "endpoint")?);
            with_slices(slices, slice_count, |slices| {
                let mut endpoint = endpoint.lock()?;
                let ticket = endpoint.stream_queue_recv(stream.executor(), wr_id, slices)?;
                Ok(place.set(ticket))
            })
        }
    })
}

/// Lets what is queued later wait for a completion.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_wait_cq(
    stream: *mut doorbell_stream,
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    timeout_ms: i64,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, endpoint) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(endpoint, "endpoint")?)
        };
        let mut endpoint = endpoint.lock()?;
        let timeout = wait_timeout(&endpoint, timeout_ms)?;
        let ticket =
            endpoint.stream_wait_cq_for(stream.executor(), queue_kind_of(queue_kind)?, timeout)?;
        Ok(place.set(ticket))
    })
}

/// Makes a work request ready.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepare_send(
    endpoint: *mut doorbell_endpoint,
    work: *const doorbell_work,
    prepared: *mut *mut doorbell_prepared,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and work requests.
        unsafe {
            let place = out_handle(prepared, "prepared")?;
            let endpoint = get(endpoint, "endpoint")?;
            with_work(work, |work| {
                let prepared = endpoint.lock()?.prepare_send(work)?;
                Ok(place.set(doorbell_prepared::new(prepared)))
            })
        }
    })
}

/// Makes a receive ready.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepare_recv(
    endpoint: *mut doorbell_endpoint,
    wr_id: u64,
    slices: *const doorbell_slice,
    slice_count: u32,
    prepared: *mut *mut doorbell_prepared,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places and slices.
        unsafe {
            let place = out_handle(prepared, "prepared")?;
            let endpoint = get(endpoint, "endpoint")?;
            with_slices(slices, slice_count, |slices| {
                let prepared = endpoint.lock()?.prepare_recv(wr_id, slices)?;
                Ok(place.set(doorbell_prepared::new(prepared)))
            })
        }
    })
}

/// Makes a wait for a completion ready.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepare_wait_cq(
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    timeout_ms: i64,
    prepared: *mut *mut doorbell_prepared,
) -> c_int {
    call!(
        place = out_handle(prepared),
        endpoint = get(endpoint),
        || {
            let mut endpoint = endpoint.lock()?;
            let timeout = wait_timeout(&endpoint, timeout_ms)?;
            let prepared = endpoint.prepare_wait_cq_for(queue_kind_of(queue_kind)?, timeout)?;
            Ok(place.set(doorbell_prepared::new(prepared)))
        }
    )
}

/// Gives a prepared operation to a stream.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_post(
    stream: *mut doorbell_stream,
    prepared: *mut doorbell_prepared,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, stream, held) = unsafe {
            let place = ticket_place(ticket);
            (place, get(stream, "stream")?, get(prepared, "prepared")?)
        };
        match doorbell_rs::stream_post(stream.executor(), held.take()?) {
            Ok(ticket) => {
                // SAFETY: as above; the reference is not used any more.
                unsafe { destroy(prepared, "prepared") }?;
                Ok(place.set(ticket))
            }
            Err(Rejected { prepared, error }) => {
                held.put_back(prepared);
                Err(error.into())
            }
        }
    })
}

/// Gives prepared operations to a stream in one batch.
///
/// # Safety
/// As the header says of pointers; both lists have `count` places.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_stream_post_all(
    stream: *mut doorbell_stream,
    prepared: *const *mut doorbell_prepared,
    count: usize,
    tickets: *mut *mut doorbell_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and arrays.
        let (stream, handles) =
            unsafe { (get(stream, "stream")?, array(prepared, count, "prepared")?) };
        if !tickets.is_null() {
            for at in 0..count {
                // SAFETY: as above: places for that many. They are set once the operations are queued.
                let _ = unsafe { ticket_place(tickets.add(at)) };
            }
        }
        let mut batch = Vec::with_capacity(count);
        let taken = handles.iter().try_for_each(|handle| {
            // SAFETY: as above.
            batch.push(unsafe { get(*handle, "prepared[]") }?.take()?);
            Ok::<_, Failure>(())
        });
        let posted =
            taken.and_then(|()| Ok(doorbell_rs::stream_post_all(stream.executor(), &mut batch)?));
        let posted = match posted {
            Ok(posted) => posted,
            Err(failure) => {
                for (handle, operation) in handles.iter().zip(batch) {
                    // SAFETY: as above; these were taken from their handles.
                    unsafe { get(*handle, "prepared[]") }?.put_back(operation);
                }
                return Err(failure);
            }
        };
        for (at, (handle, ticket)) in handles.iter().zip(posted).enumerate() {
            // SAFETY: as above; each was taken from its own handle, so they are all different.
            unsafe {
                destroy(*handle, "prepared[]")?;
                if !tickets.is_null() {
                    ticket_place(tickets.add(at)).set(ticket);
                }
            }
        }
        Ok(0)
    })
}

/// Takes a prepared operation back.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepared_rollback(
    endpoint: *mut doorbell_endpoint,
    prepared: *mut doorbell_prepared,
) -> c_int {
    call!(endpoint = get(endpoint), held = get(prepared), || {
        endpoint.lock()?.rollback(held.take()?);
        // SAFETY: the caller's promise about handles; the reference is not used any more.
        unsafe { destroy(prepared, "prepared") }.map(|()| 0)
    })
}

/// Cancels a prepared operation.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepared_destroy(prepared: *mut doorbell_prepared) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(prepared, "prepared") }.map(|()| 0))
}

/// The bytecode of a prepared operation, disassembled.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepared_disassemble(
    prepared: *const doorbell_prepared,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    call!(held = get(prepared), || {
        let operation = held.take()?;
        let disassembly = operation.disassemble();
        held.put_back(operation);
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&disassembly, text, capacity) }
    })
}

/// The ticket of a prepared operation.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepared_ticket(
    prepared: *const doorbell_prepared,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    call!(place = out_handle(ticket), held = get(prepared), || {
        let operation = held.take()?;
        let ticket = operation.ticket();
        held.put_back(operation);
        Ok(place.set(doorbell_ticket::new(ticket)))
    })
}

/// The WQE of a prepared operation.
///
/// # Safety
/// As the header says of handles; `bytes` has room for `capacity`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_prepared_wqe(
    prepared: *const doorbell_prepared,
    bytes: *mut c_void,
    capacity: usize,
) -> c_int {
    call!(held = get(prepared), || {
        let operation = held.take()?;
        let wqe = operation.wqe();
        held.put_back(operation);
        // SAFETY: the caller's promise about the place.
        unsafe { write_bytes(&wqe.unwrap_or_default(), bytes, capacity, "bytes") }
    })
}
