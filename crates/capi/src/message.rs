//! Messages between two processes.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};
use std::sync::{Mutex, MutexGuard};

use crate::argument::{
    VersionedStruct, array, choice, descriptor, out, out_handle, out_optional, read_struct,
    timeout, write_struct,
};
use crate::boundary::{call, guard};
use crate::device::doorbell_domain;
use crate::endpoint::{
    config_or_default, doorbell_endpoint_config, try_lock, write_failure, write_path,
};
use crate::error::doorbell_failure;
use crate::failure::Failure;
use crate::group::{doorbell_group, doorbell_group_peer, open_links};
use crate::handle::{CObject, create, destroy, get, take};
use crate::stream::doorbell_stream;
use crate::work::{doorbell_slice, with_slices};
use doorbell_rs::{
    AbortHandle, Executor, MessageAddress, MessageConfig, MessageQueue, MessageTicket, PendingSend,
    PostedSend, Result as LibraryResult, Slice,
};

/// Bytes of an address.
pub const DOORBELL_MESSAGE_ADDRESS_BYTES: usize = 128;

const _: () = assert!(DOORBELL_MESSAGE_ADDRESS_BYTES == MessageAddress::BYTES);

/// One end of a connection for messages.
pub struct doorbell_message_queue {
    /// Never waited for, as that of an endpoint.
    inner: Mutex<MessageQueue>,
    /// Used without the lock.
    abort: AbortHandle,
}

impl CObject for doorbell_message_queue {
    const NAME: &'static str = "doorbell_message_queue";
}

impl doorbell_message_queue {
    fn new(queue: MessageQueue) -> doorbell_message_queue {
        doorbell_message_queue {
            abort: queue.abort_handle(),
            inner: Mutex::new(queue),
        }
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, MessageQueue>, Failure> {
        try_lock(&self.inner, "queue")
    }

    fn into_inner(self) -> Result<MessageQueue, Failure> {
        self.inner.into_inner().map_err(|_| Failure::Panic {
            reason: "an earlier call with the queue panicked".into(),
        })
    }
}

/// A message without a wait.
pub struct doorbell_pending_send {
    inner: Mutex<PendingSend>,
}

impl doorbell_pending_send {
    pub(super) fn new(sent: PendingSend) -> doorbell_pending_send {
        doorbell_pending_send {
            inner: Mutex::new(sent),
        }
    }

    pub(super) fn into_inner(self) -> PendingSend {
        let inner = self.inner.into_inner();
        inner.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl CObject for doorbell_pending_send {
    const NAME: &'static str = "doorbell_pending_send";
}

/// A message that a thread has sent.
pub struct doorbell_posted_send {
    pub(super) inner: PostedSend,
}

impl CObject for doorbell_posted_send {
    const NAME: &'static str = "doorbell_posted_send";
}

/// A handle of a queued message.
pub struct doorbell_message_ticket {
    inner: MessageTicket,
}

impl doorbell_message_ticket {
    pub(super) fn new(inner: MessageTicket) -> doorbell_message_ticket {
        doorbell_message_ticket { inner }
    }
}

impl CObject for doorbell_message_ticket {
    const NAME: &'static str = "doorbell_message_ticket";
}

/// [`MessageConfig`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_message_config {
    pub struct_size: u32,
    pub slots: u32,
    pub eager_bytes: u32,
    pub ahead: u32,
    pub max_slices: u32,
    pub reserved: u32,
    pub endpoint: *const doorbell_endpoint_config,
}

// SAFETY: repr(C), six 4-byte fields and a pointer, without padding, integers and a raw pointer, and the size first.
unsafe impl VersionedStruct for doorbell_message_config {
    const BYTES_FIRST: usize = 24 + size_of::<*const doorbell_endpoint_config>();

    fn defaults() -> doorbell_message_config {
        let config = MessageConfig::default();
        doorbell_message_config {
            struct_size: size_of::<doorbell_message_config>() as u32,
            slots: config.slots,
            eager_bytes: config.eager_bytes,
            ahead: config.ahead,
            max_slices: config.max_slices,
            reserved: 0,
            endpoint: std::ptr::null(),
        }
    }
}

const _: () = assert!(size_of::<doorbell_message_config>() == doorbell_message_config::BYTES_FIRST);

/// The configuration behind a pointer: null is the defaults.
///
/// # Safety
/// As [`read_struct`], and of the pointer in it.
pub(super) unsafe fn message_config(
    config: *const doorbell_message_config,
) -> Result<MessageConfig, Failure> {
    if config.is_null() {
        return Ok(MessageConfig::default());
    }
    // SAFETY: the caller's promise.
    let (given, endpoint) = unsafe {
        let given = read_struct(config, "config")?;
        (given, config_or_default(given.endpoint)?)
    };
    if given.reserved != 0 {
        return Err(choice("reserved", given.reserved, 0));
    }
    Ok(MessageConfig::default()
        .slots(given.slots)
        .eager_bytes(given.eager_bytes)
        .ahead(given.ahead)
        .max_slices(given.max_slices)
        .endpoint(endpoint))
}

/// The address of a message queue.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_message_address {
    pub bytes: [u8; DOORBELL_MESSAGE_ADDRESS_BYTES],
}

/// Takes the queues of a list. A null pointer in it stands for no queue. All entries are checked before the first queue is taken, so a call takes all of them or none.
///
/// # Safety
/// As the header says of arrays and handles; no other thread uses the queues now or later.
pub(super) unsafe fn take_queues(
    queues: *const *mut doorbell_message_queue,
    count: u32,
) -> Result<Vec<Option<MessageQueue>>, Failure> {
    // SAFETY: the caller's promise about arrays.
    let queues = unsafe { array(queues, count as usize, "queues") }?;
    let given = || queues.iter().filter(|queue| !queue.is_null());
    for (at, queue) in given().enumerate() {
        // SAFETY: the caller's promise about handles.
        let held = unsafe { get(*queue, "queues[]") }?;
        drop(held.lock()?);
        if given().skip(at + 1).any(|other| other == queue) {
            return Err(Failure::argument("queues[]", "a queue is there twice"));
        }
    }
    let mut taken = Vec::with_capacity(queues.len());
    for queue in queues {
        taken.push(match queue.is_null() {
            true => None,
            // SAFETY: the caller's promise about handles.
            false => Some(unsafe { take(*queue, "queues[]") }?.into_inner()?),
        });
    }
    Ok(taken)
}

/// Writes a ticket, if the caller wants one: null before that.
///
/// # Safety
/// The pointer is null, or aligned and good for a write.
pub(super) unsafe fn with_ticket(
    place: *mut *mut doorbell_message_ticket,
    body: impl FnOnce() -> Result<MessageTicket, Failure>,
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise.
    let mut place = unsafe { out_optional(place) };
    if let Some(place) = &mut place {
        place.write(std::ptr::null_mut());
    }
    let inner = body()?;
    if let Some(place) = place {
        place.write(create(doorbell_message_ticket::new(inner)));
    }
    Ok(0)
}

/// A call that gives a stream a message, sent or received.
type GiveMessage =
    fn(&mut MessageQueue, &dyn Executor, &[Slice<'_>]) -> LibraryResult<MessageTicket>;

/// Makes the call, and writes its ticket.
///
/// # Safety
/// The pointers are as the header says of `doorbell_message_queue_send`.
unsafe fn give(
    call: GiveMessage,
    queue: *const doorbell_message_queue,
    stream: *const doorbell_stream,
    (slices, slice_count): (*const doorbell_slice, u32),
    ticket: *mut *mut doorbell_message_ticket,
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        with_ticket(ticket, || {
            let (queue, stream) = (get(queue, "queue")?, get(stream, "stream")?);
            with_slices(slices, slice_count, |slices| {
                Ok(call(&mut *queue.lock()?, stream.executor(), slices)?)
            })
        })
    }
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_config_init(
    config: *mut doorbell_message_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_message_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Makes a queue.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_create(
    domain: *const doorbell_domain,
    config: *const doorbell_message_config,
    queue: *mut *mut doorbell_message_queue,
) -> c_int {
    call!(place = out_handle(queue), domain = get(domain), || {
        // SAFETY: the caller's promise about structs and their sizes.
        let config = unsafe { message_config(config) }?;
        let queue = MessageQueue::new(&domain.inner, &config)?;
        Ok(place.set(doorbell_message_queue::new(queue)))
    })
}

/// Destroys a queue.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_destroy(
    queue: *mut doorbell_message_queue,
) -> c_int {
    guard(|| {
        if !queue.is_null() {
            // SAFETY: the caller's promise about handles.
            let held = unsafe { get(queue, "queue") }?;
            match held.lock() {
                // One that panicked can be destroyed, and nothing else.
                Ok(_) | Err(Failure::Panic { .. }) => {}
                Err(busy) => return Err(busy),
            }
        }
        // SAFETY: as above.
        unsafe { destroy(queue, "queue") }.map(|()| 0)
    })
}

/// The address of a queue.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_address(
    queue: *const doorbell_message_queue,
    address: *mut doorbell_message_address,
) -> c_int {
    call!(place = out(address), queue = get(queue), || {
        let bytes = queue.lock()?.address().to_bytes();
        place.write(doorbell_message_address { bytes });
        Ok(0)
    })
}

/// Connects a queue to its peer.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_connect(
    queue: *mut doorbell_message_queue,
    peer: *const doorbell_message_address,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles; of the peer: null or an address, which is bytes.
        let (queue, peer) = unsafe { (get(queue, "queue")?, peer.as_ref()) };
        let peer = peer.ok_or_else(|| Failure::null("peer"))?;
        let peer = MessageAddress::from_bytes(&peer.bytes)?;
        queue.lock()?.connect(&peer)?;
        Ok(0)
    })
}

/// Queues a message and the wait for it.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_send(
    queue: *mut doorbell_message_queue,
    stream: *mut doorbell_stream,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles, places and slices.
    guard(|| unsafe {
        give(
            MessageQueue::send,
            queue,
            stream,
            (slices, slice_count),
            ticket,
        )
    })
}

/// Queues a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_start_send(
    queue: *mut doorbell_message_queue,
    stream: *mut doorbell_stream,
    slices: *const doorbell_slice,
    slice_count: u32,
    pending: *mut *mut doorbell_pending_send,
) -> c_int {
    call!(
        place = out_handle(pending),
        queue = get(queue),
        stream = get(stream),
        || {
            // SAFETY: the caller's promise about slices.
            let sent = unsafe {
                with_slices(slices, slice_count, |slices| {
                    Ok(queue.lock()?.start_send(stream.executor(), slices)?)
                })
            }?;
            Ok(place.set(doorbell_pending_send::new(sent)))
        }
    )
}

/// Queues the wait for a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_wait_send(
    queue: *mut doorbell_message_queue,
    stream: *mut doorbell_stream,
    pending: *mut doorbell_pending_send,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles and places.
    guard(|| unsafe {
        with_ticket(ticket, || {
            let (queue, stream) = (get(queue, "queue")?, get(stream, "stream")?);
            let mut queue = queue.lock()?;
            // Last, so that nothing else is refused after it.
            let pending = take(pending, "pending")?.into_inner();
            Ok(queue.wait_send(stream.executor(), pending)?)
        })
    })
}

/// Destroys the handle of a message without a wait.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_pending_send_destroy(
    pending: *mut doorbell_pending_send,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(pending, "pending") }.map(|()| 0))
}

/// Queues a receive.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_recv(
    queue: *mut doorbell_message_queue,
    stream: *mut doorbell_stream,
    slices: *const doorbell_slice,
    slice_count: u32,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles, places and slices.
    guard(|| unsafe {
        give(
            MessageQueue::recv,
            queue,
            stream,
            (slices, slice_count),
            ticket,
        )
    })
}

/// Sends a message from the calling thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_send_now(
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
    timeout_ms: i64,
) -> c_int {
    call!(queue = get(queue), || {
        let timeout = timeout(timeout_ms)?;
        // SAFETY: the caller's promise about slices.
        unsafe {
            with_slices(slices, slice_count, |slices| {
                queue.lock()?.send_now(slices, timeout)?;
                Ok(0)
            })
        }
    })
}

/// Sends a message from the calling thread, and does not wait until its memory may be used again.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_start_send_now(
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
    posted: *mut *mut doorbell_posted_send,
    timeout_ms: i64,
) -> c_int {
    call!(place = out_handle(posted), queue = get(queue), || {
        let timeout = timeout(timeout_ms)?;
        // SAFETY: the caller's promise about slices.
        let inner = unsafe {
            with_slices(slices, slice_count, |slices| {
                Ok(queue.lock()?.start_send_now(slices, timeout)?)
            })
        }?;
        Ok(place.set(doorbell_posted_send { inner }))
    })
}

/// Waits for a message that a thread has sent.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_wait_send_now(
    queue: *mut doorbell_message_queue,
    posted: *mut doorbell_posted_send,
    timeout_ms: i64,
) -> c_int {
    call!(queue = get(queue), posted = get(posted), || {
        let timeout = timeout(timeout_ms)?;
        queue.lock()?.wait_send_now(&posted.inner, timeout)?;
        Ok(0)
    })
}

/// Destroys the handle of a message that a thread has sent.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_posted_send_destroy(posted: *mut doorbell_posted_send) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(posted, "posted") }.map(|()| 0))
}

/// Receives a message in the calling thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_recv_now(
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
    len_bytes: *mut u64,
    timeout_ms: i64,
) -> c_int {
    call!(queue = get(queue), || {
        let timeout = timeout(timeout_ms)?;
        // SAFETY: the caller's promise about slices and places.
        let (place, received) = unsafe {
            let place = out_optional(len_bytes);
            let received = with_slices(slices, slice_count, |slices| {
                Ok(queue.lock()?.recv_now(slices, timeout)?)
            })?;
            (place, received)
        };
        place.map(|place| place.write(received));
        Ok(0)
    })
}

/// Receives the next message of any queue in this thread.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queues_recv_any_now(
    queues: *const *mut doorbell_message_queue,
    queue_count: usize,
    slices: *const doorbell_slice,
    slice_count: u32,
    index: *mut usize,
    len_bytes: *mut u64,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        let timeout = timeout(timeout_ms)?;
        if queues.is_null() {
            return Err(Failure::null("queues"));
        }
        // SAFETY: the caller's promise about handles, arrays, slices and places.
        unsafe {
            let (index, len_bytes) = (out_optional(index), out_optional(len_bytes));
            let mut locked = Vec::new();
            for queue in array(queues, queue_count, "queues")? {
                locked.push(get(*queue, "queues[]")?.lock()?);
            }
            let mut all: Vec<&mut MessageQueue> = locked.iter_mut().map(|it| &mut **it).collect();
            let (from, len) = with_slices(slices, slice_count, |slices| {
                Ok(MessageQueue::recv_any_now(&mut all, slices, timeout)?)
            })?;
            index.map(|place| place.write(from));
            len_bytes.map(|place| place.write(len));
        }
        Ok(0)
    })
}

/// Waits until the peer has everything.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_finish(
    queue: *mut doorbell_message_queue,
    timeout_ms: i64,
) -> c_int {
    call!(queue = get(queue), || {
        queue.lock()?.finish(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Fails a queue.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_abort(queue: *mut doorbell_message_queue) -> c_int {
    call!(queue = get(queue), || {
        queue.abort.abort();
        Ok(0)
    })
}

/// How a queue failed, if it did.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_failure(
    queue: *const doorbell_message_queue,
    failure: *mut doorbell_failure,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, queue) = unsafe { (out_optional(failure), get(queue, "queue")?) };
        let found = queue.lock()?.failure();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_failure(found, place, text, capacity) }
    })
}

/// Which way doorbells take, and why.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_queue_path(
    queue: *const doorbell_message_queue,
    control: *mut u32,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, queue) = unsafe { (out_optional(control), get(queue, "queue")?) };
        let path = queue.lock()?.path();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_path(path, place, text, capacity) }
    })
}

/// Whether a message is sent or received.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_ticket_check(
    ticket: *const doorbell_message_ticket,
    len_bytes: *mut u64,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller's promise about places.
        let place = unsafe { out_optional(len_bytes) };
        let found = ticket.inner.check()?;
        if let (Some(place), Some(len_bytes)) = (place, found) {
            place.write(len_bytes);
        }
        Ok(found.is_some().into())
    })
}

/// Waits until a message is sent or received.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_ticket_wait(
    ticket: *const doorbell_message_ticket,
    len_bytes: *mut u64,
    timeout_ms: i64,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller's promise about places.
        let place = unsafe { out_optional(len_bytes) };
        let found = ticket.inner.wait(timeout(timeout_ms)?)?;
        place.map(|place| place.write(found));
        Ok(0)
    })
}

/// Notifies a descriptor when a message is sent or received.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_ticket_notify(
    ticket: *const doorbell_message_ticket,
    eventfd: c_int,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller does not close it within this call.
        let eventfd = unsafe { descriptor(eventfd, "eventfd") }?;
        ticket.inner.notify(eventfd)?;
        Ok(0)
    })
}

/// Destroys a ticket.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_message_ticket_destroy(
    ticket: *mut doorbell_message_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(ticket, "ticket") }.map(|()| 0))
}

/// Opens queues with other ranks of a group.
///
/// # Safety
/// As the header says of pointers; `queues` has room for as many handles as there are peers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_message_queues(
    group: *const doorbell_group,
    peers: *const doorbell_group_peer,
    peer_count: u32,
    config: *const doorbell_message_config,
    queues: *mut *mut doorbell_message_queue,
) -> c_int {
    // SAFETY: the caller's promise about handles, arrays and structs.
    guard(|| unsafe {
        open_links((queues, "queues"), peers, peer_count, |with| {
            let (group, config) = (get(group, "group")?, message_config(config)?);
            let opened = group.inner.message_queues(with, &config)?;
            Ok(opened.into_iter().map(doorbell_message_queue::new))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let config = doorbell_message_config::defaults();
        // SAFETY: a struct of this version.
        let config = unsafe { message_config(&config) }.unwrap();
        assert_eq!(config, MessageConfig::default());
    }
}
