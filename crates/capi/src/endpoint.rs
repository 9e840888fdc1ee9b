//! Endpoints and their addresses.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use crate::argument::{
    DOORBELL_DEFAULT_TIMEOUT, DOORBELL_NO_TIMEOUT, VersionedStruct, choice, out, out_handle,
    out_optional, queue_kind_of, read_struct, text, timeout, write_struct, write_text,
};
use crate::boundary::{call, guard, guard_or};
use crate::device::doorbell_domain;
use crate::error::doorbell_failure;
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use crate::region::access;
use doorbell_rs::{
    AbortHandle, Address, Control, Endpoint, EndpointConfig, PathReport, Transport, WorkError,
};

/// The stream rings the device itself.
pub const DOORBELL_CONTROL_DIRECT: u32 = 0;
/// A thread of the library rings for the stream.
pub const DOORBELL_CONTROL_PROXY: u32 = 1;
/// The application's thread rings after it has waited for the stream.
pub const DOORBELL_CONTROL_SYNC: u32 = 2;

/// A reliable connection.
pub const DOORBELL_TRANSPORT_RC: u32 = 0;
/// Unreliable datagrams.
pub const DOORBELL_TRANSPORT_UD: u32 = 1;

/// Bytes of an address.
pub const DOORBELL_ADDRESS_BYTES: usize = 48;
/// Bytes of an address as a text, with the zero at its end.
pub const DOORBELL_ADDRESS_TEXT_BYTES: usize = 97;

const _: () = assert!(DOORBELL_ADDRESS_BYTES == Address::BYTES);
// Two digits a byte.
const _: () = assert!(DOORBELL_ADDRESS_TEXT_BYTES == 2 * Address::BYTES + 1);

/// One end of a connection.
pub struct doorbell_endpoint {
    /// Never waited for: a C program that uses an endpoint in two threads at once gets an error.
    inner: Mutex<Endpoint>,
    /// Used without the lock: a thread may abort because the thread that holds the lock does not return.
    abort: AbortHandle,
}

impl CObject for doorbell_endpoint {
    const NAME: &'static str = "doorbell_endpoint";
}

impl doorbell_endpoint {
    pub(super) fn new(endpoint: Endpoint) -> doorbell_endpoint {
        doorbell_endpoint {
            abort: endpoint.abort_handle(),
            inner: Mutex::new(endpoint),
        }
    }

    /// The endpoint, for this thread alone.
    #[inline]
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Endpoint>, Failure> {
        try_lock(&self.inner, "endpoint")
    }
}

/// Takes a lock that nobody else should be holding.
#[inline]
pub(super) fn try_lock<'a, T>(
    mutex: &'a Mutex<T>,
    argument: &'static str,
) -> Result<MutexGuard<'a, T>, Failure> {
    mutex.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => Failure::Busy { argument },
        TryLockError::Poisoned(_) => Failure::Panic {
            reason: format!("an earlier call with this `{argument}`; it can only be destroyed"),
        },
    })
}

/// [`EndpointConfig`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct doorbell_endpoint_config {
    pub struct_size: u32,
    pub send_depth: u32,
    pub recv_depth: u32,
    pub max_segments: u32,
    pub max_inline_bytes: u32,
    pub blueflame: u32,
    pub wait_timeout_ms: i64,
    pub mtu_bytes: u32,
    pub ack_timeout: u32,
    pub retry_count: u32,
    pub rnr_retry: u32,
    pub min_rnr_timer: u32,
    pub max_reads: u32,
    pub access_flags: u32,
    pub control: u32,
    pub room_timeout_ms: i64,
    pub traffic_class: u32,
    pub service_level: u32,
    pub pkey_index: u32,
    pub transport: u32,
    pub qkey: u32,
    pub reserved: u32,
}

// SAFETY: repr(C), the 64-bit fields at offsets 24 and 64 of 96 bytes without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_endpoint_config {
    const BYTES_FIRST: usize = 64;

    fn defaults() -> doorbell_endpoint_config {
        let config = EndpointConfig::default();
        doorbell_endpoint_config {
            struct_size: size_of::<doorbell_endpoint_config>() as u32,
            send_depth: config.send_depth,
            recv_depth: config.recv_depth,
            max_segments: config.max_segments,
            max_inline_bytes: config.max_inline_bytes,
            blueflame: config.blueflame.into(),
            wait_timeout_ms: config
                .wait_timeout
                .map_or(DOORBELL_NO_TIMEOUT, |timeout| timeout.as_millis() as i64),
            mtu_bytes: config.mtu_bytes,
            ack_timeout: config.ack_timeout.into(),
            retry_count: config.retry_count.into(),
            rnr_retry: config.rnr_retry.into(),
            min_rnr_timer: config.min_rnr_timer.into(),
            max_reads: config.max_reads.into(),
            access_flags: config.access.bits(),
            control: 0,
            room_timeout_ms: 0,
            traffic_class: config.traffic_class.into(),
            service_level: config.service_level.into(),
            pkey_index: config.pkey_index.into(),
            transport: DOORBELL_TRANSPORT_RC,
            qkey: config.qkey,
            reserved: 0,
        }
    }
}

const _: () =
    assert!(size_of::<doorbell_endpoint_config>() == doorbell_endpoint_config::BYTES_FIRST + 32);

impl doorbell_endpoint_config {
    pub(super) fn to_config(self) -> Result<EndpointConfig, Failure> {
        let byte = |argument, value: u32| {
            u8::try_from(value).map_err(|_| choice(argument, value, u8::MAX.into()))
        };
        if self.blueflame > 1 {
            return Err(choice("blueflame", self.blueflame, 1));
        }
        // 0 is what a program that knows nothing of this has.
        let control = match self.control.checked_sub(1) {
            None => None,
            Some(DOORBELL_CONTROL_DIRECT) => Some(Control::Direct),
            Some(DOORBELL_CONTROL_PROXY) => Some(Control::Proxy),
            Some(DOORBELL_CONTROL_SYNC) => Some(Control::Sync),
            Some(_) => return Err(choice("control", self.control, DOORBELL_CONTROL_SYNC + 1)),
        };
        let transport = match self.transport {
            DOORBELL_TRANSPORT_RC => Transport::Rc,
            DOORBELL_TRANSPORT_UD => Transport::Ud,
            other => return Err(choice("transport", other, DOORBELL_TRANSPORT_UD)),
        };
        if self.reserved != 0 {
            return Err(choice("reserved", self.reserved, 0));
        }
        // 0 is what a program that knows nothing of this has.
        let room_timeout = match self.room_timeout_ms {
            0 => None,
            DOORBELL_NO_TIMEOUT => Some(Duration::MAX),
            other => timeout(other)?,
        };
        Ok(EndpointConfig::default()
            .transport(transport)
            .qkey(self.qkey)
            .room_timeout(room_timeout)
            .send_depth(self.send_depth)
            .recv_depth(self.recv_depth)
            .max_segments(self.max_segments)
            .max_inline_bytes(self.max_inline_bytes)
            .wait_timeout(timeout(self.wait_timeout_ms)?)
            .blueflame(self.blueflame == 1)
            .mtu_bytes(self.mtu_bytes)
            .ack_timeout(byte("ack_timeout", self.ack_timeout)?)
            .retry_count(byte("retry_count", self.retry_count)?)
            .rnr_retry(byte("rnr_retry", self.rnr_retry)?)
            .min_rnr_timer(byte("min_rnr_timer", self.min_rnr_timer)?)
            .max_reads(byte("max_reads", self.max_reads)?)
            .access(access(self.access_flags)?)
            .traffic_class(byte("traffic_class", self.traffic_class)?)
            .service_level(byte("service_level", self.service_level)?)
            .pkey_index(
                u16::try_from(self.pkey_index)
                    .map_err(|_| choice("pkey_index", self.pkey_index, u16::MAX.into()))?,
            )
            .control(control))
    }
}

/// What a pointer to a configuration means: null is the defaults.
///
/// # Safety
/// As [`read_struct`].
pub(super) unsafe fn config_or_default(
    config: *const doorbell_endpoint_config,
) -> Result<EndpointConfig, Failure> {
    if config.is_null() {
        return Ok(EndpointConfig::default());
    }
    // SAFETY: the caller's promise.
    unsafe { read_struct(config, "config") }?.to_config()
}

/// The address of an endpoint.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_address {
    pub bytes: [u8; DOORBELL_ADDRESS_BYTES],
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_config_init(
    config: *mut doorbell_endpoint_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_endpoint_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Makes an endpoint.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_create(
    domain: *const doorbell_domain,
    config: *const doorbell_endpoint_config,
    endpoint: *mut *mut doorbell_endpoint,
) -> c_int {
    call!(place = out_handle(endpoint), domain = get(domain), || {
        // SAFETY: the caller's promise about structs and their sizes.
        let config = unsafe { config_or_default(config) }?;
        let endpoint = Endpoint::new(&domain.inner, &config)?;
        Ok(place.set(doorbell_endpoint::new(endpoint)))
    })
}

/// Destroys an endpoint.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_destroy(endpoint: *mut doorbell_endpoint) -> c_int {
    guard(|| {
        if !endpoint.is_null() {
            // SAFETY: the caller's promise about handles.
            let held = unsafe { get(endpoint, "endpoint") }?;
            match held.lock() {
                // One that panicked can be destroyed, and nothing else.
                Ok(_) | Err(Failure::Panic { .. }) => {}
                Err(busy) => return Err(busy),
            }
        }
        // SAFETY: as above.
        unsafe { destroy(endpoint, "endpoint") }.map(|()| 0)
    })
}

/// The address of an endpoint.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_address(
    endpoint: *const doorbell_endpoint,
    address: *mut doorbell_address,
) -> c_int {
    call!(place = out(address), endpoint = get(endpoint), || {
        let bytes = endpoint.lock()?.address().to_bytes();
        place.write(doorbell_address { bytes });
        Ok(0)
    })
}

/// An address as a text.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_to_text(
    address: *const doorbell_address,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise: null or an address, which is bytes.
        let address = unsafe { address.as_ref() }.ok_or_else(|| Failure::null("address"))?;
        let address = Address::from_bytes(&address.bytes)?;
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&address.to_string(), text, capacity) }
    })
}

/// An address from a text.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_from_text(
    text: *const c_char,
    address: *mut doorbell_address,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about texts and places.
        let (place, text) = unsafe { (out(address, "address")?, self::text(text, "text")?) };
        let bytes = text.parse::<Address>()?.to_bytes();
        place.write(doorbell_address { bytes });
        Ok(0)
    })
}

/// The number of an address's queue pair.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address_qpn(address: *const doorbell_address) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise: null or an address, which is bytes.
        let address = unsafe { read_address(address, "address") }?;
        // 24 bits, by the format.
        Ok((address.qpn() & 0xff_ffff) as c_int)
    })
}

/// The address at a pointer.
///
/// # Safety
/// The pointer is null or one to an address.
pub(super) unsafe fn read_address(
    address: *const doorbell_address,
    argument: &'static str,
) -> Result<Address, Failure> {
    // SAFETY: the caller's promise.
    let address = unsafe { address.as_ref() }.ok_or_else(|| Failure::null(argument))?;
    Ok(Address::from_bytes(&address.bytes)?)
}

/// Connects an endpoint to its peer.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_connect(
    endpoint: *mut doorbell_endpoint,
    peer: *const doorbell_address,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles; of the peer: null or an address, which is bytes.
        let (endpoint, peer) = unsafe { (get(endpoint, "endpoint")?, peer.as_ref()) };
        let peer = Address::from_bytes(&peer.ok_or_else(|| Failure::null("peer"))?.bytes)?;
        endpoint.lock()?.connect(&peer)?;
        Ok(0)
    })
}

/// Makes a UD endpoint ready.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_activate(endpoint: *mut doorbell_endpoint) -> c_int {
    call!(endpoint = get(endpoint), || {
        endpoint.lock()?.activate()?;
        Ok(0)
    })
}

/// A step of the application's to INIT, RTR or RTS.
///
/// # Safety
/// As the header says of pointers; `attributes` is a `struct ibv_qp_attr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_modify_qp(
    endpoint: *mut doorbell_endpoint,
    attributes: *const c_void,
    mask: c_int,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let endpoint = unsafe { get(endpoint, "endpoint") }?;
        let attributes =
            NonNull::new(attributes.cast_mut()).ok_or_else(|| Failure::null("attributes"))?;
        let mut endpoint = endpoint.lock()?;
        // SAFETY: the caller's promise about the attributes.
        unsafe { modify_qp(&mut endpoint, attributes, mask) }?;
        Ok(0)
    })
}

/// # Safety
/// As [`Endpoint::modify_qp`].
#[cfg(feature = "verbs")]
unsafe fn modify_qp(
    endpoint: &mut Endpoint,
    attributes: NonNull<c_void>,
    mask: c_int,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    Ok(unsafe { endpoint.modify_qp(attributes, mask) }?)
}

/// # Safety
/// None is needed.
#[cfg(not(feature = "verbs"))]
unsafe fn modify_qp(_: &mut Endpoint, _: NonNull<c_void>, _: c_int) -> Result<(), Failure> {
    Err(Failure::Feature { feature: "verbs" })
}

/// Whether an endpoint is connected.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_is_connected(
    endpoint: *const doorbell_endpoint,
) -> c_int {
    call!(endpoint = get(endpoint), || {
        Ok(endpoint.lock()?.is_connected().into())
    })
}

/// Brings an endpoint back to where it was when it was made.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_reset(endpoint: *mut doorbell_endpoint) -> c_int {
    call!(endpoint = get(endpoint), || {
        endpoint.lock()?.reset()?;
        Ok(0)
    })
}

/// Fails an endpoint.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_abort(endpoint: *mut doorbell_endpoint) -> c_int {
    call!(endpoint = get(endpoint), || {
        endpoint.abort.abort();
        Ok(0)
    })
}

/// The number of an endpoint's queue pair.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_qpn(endpoint: *const doorbell_endpoint) -> c_int {
    call!(endpoint = get(endpoint), || {
        // 24 bits, by the format.
        Ok((endpoint.lock()?.qpn() & 0xff_ffff) as c_int)
    })
}

/// How much memory the queues of an endpoint take.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_memory_bytes(endpoint: *const doorbell_endpoint) -> u64 {
    guard_or(0, || {
        // SAFETY: the caller's promise about handles.
        let endpoint = unsafe { get(endpoint, "endpoint") }?;
        Ok(endpoint.lock()?.memory_bytes() as u64)
    })
}

/// How many further work requests can be posted to a queue now.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_room(
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
) -> c_int {
    call!(endpoint = get(endpoint), || {
        let room = endpoint.lock()?.room(queue_kind_of(queue_kind)?);
        // At most the depth of a queue.
        Ok(room.min(c_int::MAX as u32) as c_int)
    })
}

/// The deadline of a wait on an endpoint.
pub(super) fn wait_timeout(
    endpoint: &Endpoint,
    timeout_ms: i64,
) -> Result<Option<Duration>, Failure> {
    match timeout_ms {
        DOORBELL_DEFAULT_TIMEOUT => Ok(endpoint.config().wait_timeout),
        _ => timeout(timeout_ms),
    }
}

/// Waits until so many further work requests can be posted to a queue.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_wait_room(
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    count: u32,
    timeout_ms: i64,
) -> c_int {
    call!(endpoint = get(endpoint), || {
        let kind = queue_kind_of(queue_kind)?;
        let mut endpoint = endpoint.lock()?;
        let timeout = wait_timeout(&endpoint, timeout_ms)?;
        endpoint.wait_room(kind, count, timeout)?;
        Ok(0)
    })
}

/// Which way doorbells take, and why.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_path(
    endpoint: *const doorbell_endpoint,
    control: *mut u32,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, endpoint) = unsafe { (out_optional(control), get(endpoint, "endpoint")?) };
        let path = endpoint.lock()?.path();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_path(path, place, text, capacity) }
    })
}

/// Writes which way doorbells take, and why.
///
/// # Safety
/// As [`write_text`].
pub(super) unsafe fn write_path(
    path: PathReport,
    place: Option<&mut MaybeUninit<u32>>,
    text: *mut c_char,
    capacity: usize,
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise.
    let length = unsafe { write_text(&path.to_string(), text, capacity) }?;
    if let Some(place) = place {
        place.write(match path.control {
            Control::Direct => DOORBELL_CONTROL_DIRECT,
            Control::Proxy => DOORBELL_CONTROL_PROXY,
            Control::Sync => DOORBELL_CONTROL_SYNC,
            other => unreachable!("{other:?} is no value of this version"),
        });
    }
    Ok(length)
}

/// How an endpoint failed, if it did.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_endpoint_failure(
    endpoint: *const doorbell_endpoint,
    failure: *mut doorbell_failure,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, endpoint) = unsafe { (out_optional(failure), get(endpoint, "endpoint")?) };
        let found = endpoint.lock()?.failure();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_failure(found, place, text, capacity) }
    })
}

/// Writes a failure, if there is one.
///
/// # Safety
/// As [`write_text`].
pub(super) unsafe fn write_failure(
    found: Option<WorkError>,
    place: Option<&mut MaybeUninit<doorbell_failure>>,
    text: *mut c_char,
    capacity: usize,
) -> Result<c_int, Failure> {
    let Some(found) = found else {
        return Ok(0);
    };
    // SAFETY: the caller's promise.
    let length = unsafe { write_text(&found.to_string(), text, capacity) }?;
    if let Some(place) = place {
        place.write(found.into());
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let config = doorbell_endpoint_config::defaults().to_config().unwrap();
        assert_eq!(config, EndpointConfig::default());
    }

    #[test]
    fn numbers_too_large_for_the_library_are_named() {
        let with = |change: fn(&mut doorbell_endpoint_config)| {
            let mut config = doorbell_endpoint_config::defaults();
            change(&mut config);
            config.to_config().unwrap_err().to_string()
        };
        assert!(with(|c| c.retry_count = 256).contains("`retry_count` is 256"));
        assert!(with(|c| c.blueflame = 2).contains("`blueflame` is 2"));
        assert!(with(|c| c.access_flags = 16).contains("`access_flags` is 16"));
        assert!(with(|c| c.wait_timeout_ms = -9).contains("timeout_ms"));
        assert!(with(|c| c.control = 4).contains("control"));
    }

    #[test]
    fn an_endpoint_that_panicked_says_so() {
        let mutex = Mutex::new(());
        let panicked = std::panic::catch_unwind(|| {
            let _held = mutex.lock();
            panic!("inside");
        });
        assert!(panicked.is_err());
        assert!(matches!(
            try_lock(&mutex, "endpoint"),
            Err(Failure::Panic { .. })
        ));
    }
}
