//! Connects to a peer at a TCP address.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;

use crate::argument::{array, finite_timeout, out_handle, text, write_bytes, write_text};
use crate::boundary::{call, guard};
use crate::endpoint::try_lock;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use doorbell_rs::{Channel, Listener};

/// Waits for peers.
pub struct doorbell_listener {
    inner: Listener,
}

impl CObject for doorbell_listener {
    const NAME: &'static str = "doorbell_listener";
}

/// A connection with a peer.
pub struct doorbell_channel {
    inner: Mutex<Channel>,
}

impl CObject for doorbell_channel {
    const NAME: &'static str = "doorbell_channel";
}

/// Listens at an address.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_create(
    address: *const c_char,
    listener: *mut *mut doorbell_listener,
) -> c_int {
    call!(
        place = out_handle(listener),
        address = text(address),
        || {
            let inner = Listener::bind(address)?;
            Ok(place.set(doorbell_listener { inner }))
        }
    )
}

/// Where a listener listens.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_address(
    listener: *const doorbell_listener,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    call!(listener = get(listener), || {
        let address = listener.inner.address()?.to_string();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&address, text, capacity) }
    })
}

/// Waits for a peer.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_accept(
    listener: *const doorbell_listener,
    timeout_ms: i64,
    channel: *mut *mut doorbell_channel,
) -> c_int {
    call!(
        place = out_handle(channel),
        listener = get(listener),
        || {
            let inner = Mutex::new(listener.inner.accept(finite_timeout(timeout_ms)?)?);
            Ok(place.set(doorbell_channel { inner }))
        }
    )
}

/// Stops listening.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_destroy(listener: *mut doorbell_listener) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(listener, "listener") }.map(|()| 0))
}

/// Goes to a peer that listens.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_channel_connect(
    address: *const c_char,
    timeout_ms: i64,
    channel: *mut *mut doorbell_channel,
) -> c_int {
    call!(place = out_handle(channel), address = text(address), || {
        let inner = Mutex::new(Channel::connect(address, finite_timeout(timeout_ms)?)?);
        Ok(place.set(doorbell_channel { inner }))
    })
}

/// Gives the peer a message and takes its own.
///
/// # Safety
/// As the header says of pointers; the messages may be at the same place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_channel_exchange(
    channel: *mut doorbell_channel,
    message: *const c_void,
    len_bytes: usize,
    answer: *mut c_void,
    capacity: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and arrays. The message is done with before the answer is written.
        let (channel, message) = unsafe {
            let message = array(message.cast::<u8>(), len_bytes, "message")?;
            (get(channel, "channel")?, message)
        };
        if answer.is_null() && capacity > 0 {
            return Err(Failure::null("answer"));
        }
        let timeout = finite_timeout(timeout_ms)?;
        let received = try_lock(&channel.inner, "channel")?.exchange(message, timeout)?;
        // SAFETY: the caller's promise about the place.
        unsafe { write_bytes(&received, answer, capacity, "answer") }
    })
}

/// Sends a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_channel_send(
    channel: *mut doorbell_channel,
    message: *const c_void,
    len_bytes: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and arrays.
        let (channel, message) = unsafe {
            let message = array(message.cast::<u8>(), len_bytes, "message")?;
            (get(channel, "channel")?, message)
        };
        let timeout = finite_timeout(timeout_ms)?;
        try_lock(&channel.inner, "channel")?.send(message, timeout)?;
        Ok(0)
    })
}

/// Receives a message.
///
/// # Safety
/// As the header says of handles; `message` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_channel_receive(
    channel: *mut doorbell_channel,
    message: *mut c_void,
    capacity: usize,
    timeout_ms: i64,
) -> c_int {
    call!(channel = get(channel), || {
        if message.is_null() && capacity > 0 {
            return Err(Failure::null("message"));
        }
        let timeout = finite_timeout(timeout_ms)?;
        let received = try_lock(&channel.inner, "channel")?.receive(timeout)?;
        // SAFETY: the caller's promise about the place.
        unsafe { write_bytes(&received, message, capacity, "message") }
    })
}

/// Ends a connection with a peer.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_channel_destroy(channel: *mut doorbell_channel) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(channel, "channel") }.map(|()| 0))
}
