//! Endpoints connected by rdma_cm.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;
use std::time::Duration;

use crate::argument::{array, finite_timeout, out_handle, text, write_bytes, write_text};
use crate::boundary::{call, guard};
use crate::endpoint::{doorbell_endpoint, try_lock, wait_timeout};
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get, take};
use doorbell_rs::Endpoint;
#[cfg(feature = "verbs")]
use doorbell_rs::{CmConnection, CmListener, CmRequest};
#[cfg(not(feature = "verbs"))]
use nothing::{CmConnection, CmListener, CmRequest};

/// Waits for peers.
pub struct doorbell_cm_listener {
    inner: CmListener,
}

/// A peer that wants a connection.
pub struct doorbell_cm_request {
    /// rdma_cm's object is used by one thread at a time.
    inner: Mutex<CmRequest>,
}

/// The connection of an endpoint.
pub struct doorbell_cm_connection {
    inner: Mutex<CmConnection>,
}

impl CObject for doorbell_cm_listener {
    const NAME: &'static str = "doorbell_cm_listener";
}

impl CObject for doorbell_cm_request {
    const NAME: &'static str = "doorbell_cm_request";
}

impl CObject for doorbell_cm_connection {
    const NAME: &'static str = "doorbell_cm_connection";
}

/// Takes what a lock guards, which its handle's call has alone.
fn alone<T>(mutex: Mutex<T>) -> T {
    mutex
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Connects an endpoint to the process that listens at an address.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connect(
    endpoint: *mut doorbell_endpoint,
    address: *const c_char,
    private_data: *const c_void,
    len_bytes: usize,
    timeout_ms: i64,
    connection: *mut *mut doorbell_cm_connection,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places for them, texts and arrays.
        let (place, endpoint, address, private_data) = unsafe {
            let place = out_handle(connection, "connection")?;
            let endpoint = get(endpoint, "endpoint")?;
            let private_data = array(private_data.cast::<u8>(), len_bytes, "private_data")?;
            (place, endpoint, text(address, "address")?, private_data)
        };
        let mut endpoint = endpoint.lock()?;
        let timeout = wait_timeout(&endpoint, timeout_ms)?.unwrap_or(Duration::MAX);
        let inner = connect(&mut endpoint, address, private_data, timeout)?;
        let inner = Mutex::new(inner);
        Ok(place.set(doorbell_cm_connection { inner }))
    })
}

/// The address of the peer of a connection.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_peer(
    connection: *const doorbell_cm_connection,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    call!(connection = get(connection), || {
        let peer = try_lock(&connection.inner, "connection")?.peer();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&peer.to_string(), text, capacity) }
    })
}

/// What the peer gave with its request or its answer.
///
/// # Safety
/// As the header says of handles; `bytes` has room for `capacity`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_private_data(
    connection: *const doorbell_cm_connection,
    bytes: *mut c_void,
    capacity: usize,
) -> c_int {
    call!(connection = get(connection), || {
        let connection = try_lock(&connection.inner, "connection")?;
        // SAFETY: the caller's promise about the place.
        unsafe { write_bytes(connection.private_data(), bytes, capacity, "bytes") }
    })
}

/// Whether the connection still is.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_check(
    connection: *mut doorbell_cm_connection,
) -> c_int {
    call!(connection = get(connection), || {
        try_lock(&connection.inner, "connection")?.check()?;
        Ok(0)
    })
}

/// Waits until the peer disconnects.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_wait_disconnected(
    connection: *mut doorbell_cm_connection,
    timeout_ms: i64,
) -> c_int {
    call!(connection = get(connection), || {
        let timeout = finite_timeout(timeout_ms)?;
        try_lock(&connection.inner, "connection")?.wait_disconnected(timeout)?;
        Ok(0)
    })
}

/// Disconnects, and ends the handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_disconnect(
    connection: *mut doorbell_cm_connection,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        let timeout = finite_timeout(timeout_ms)?;
        // SAFETY: the caller's promise about handles.
        let connection = unsafe { take(connection, "connection") }?;
        alone(connection.inner).disconnect(timeout)?;
        Ok(0)
    })
}

/// Disconnects without waiting, and ends the handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_connection_destroy(
    connection: *mut doorbell_cm_connection,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(connection, "connection") }.map(|()| 0))
}

/// Listens at an address.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_listener_create(
    address: *const c_char,
    listener: *mut *mut doorbell_cm_listener,
) -> c_int {
    call!(
        place = out_handle(listener),
        address = text(address),
        || {
            let inner = bind(address)?;
            Ok(place.set(doorbell_cm_listener { inner }))
        }
    )
}

/// Where a listener listens.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_listener_address(
    listener: *const doorbell_cm_listener,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let address = unsafe { get(listener, "listener") }?.inner.address()?;
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&address.to_string(), text, capacity) }
    })
}

/// Waits for a request.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_listener_accept(
    listener: *const doorbell_cm_listener,
    timeout_ms: i64,
    request: *mut *mut doorbell_cm_request,
) -> c_int {
    call!(
        place = out_handle(request),
        listener = get(listener),
        || {
            let inner = Mutex::new(listener.inner.accept(finite_timeout(timeout_ms)?)?);
            Ok(place.set(doorbell_cm_request { inner }))
        }
    )
}

/// Stops listening.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_listener_destroy(
    listener: *mut doorbell_cm_listener,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(listener, "listener") }.map(|()| 0))
}

/// The address of the peer that requests a connection, and the device by which the
/// request came in.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_peer(
    request: *const doorbell_cm_request,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    call!(request = get(request), || {
        let peer = try_lock(&request.inner, "request")?.peer()?;
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&peer.to_string(), text, capacity) }
    })
}

/// The device that a request came in by.
///
/// # Safety
/// As the header says of handles and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_device(
    request: *const doorbell_cm_request,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    call!(request = get(request), || {
        let device = try_lock(&request.inner, "request")?.device();
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_text(&device.unwrap_or_default(), text, capacity) }
    })
}

/// What the peer gave with its request.
///
/// # Safety
/// As the header says of handles; `bytes` has room for `capacity`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_private_data(
    request: *const doorbell_cm_request,
    bytes: *mut c_void,
    capacity: usize,
) -> c_int {
    call!(request = get(request), || {
        let request = try_lock(&request.inner, "request")?;
        // SAFETY: the caller's promise about the place.
        unsafe { write_bytes(request.private_data(), bytes, capacity, "bytes") }
    })
}

/// Takes a request, and ends its handle.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_accept(
    request: *mut doorbell_cm_request,
    endpoint: *mut doorbell_endpoint,
    private_data: *const c_void,
    len_bytes: usize,
    timeout_ms: i64,
    connection: *mut *mut doorbell_cm_connection,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places for them and arrays.
        let (place, endpoint, private_data) = unsafe {
            let place = out_handle(connection, "connection")?;
            get(request, "request")?;
            let private_data = array(private_data.cast::<u8>(), len_bytes, "private_data")?;
            (place, get(endpoint, "endpoint")?, private_data)
        };
        let mut endpoint = endpoint.lock()?;
        let timeout = wait_timeout(&endpoint, timeout_ms)?.unwrap_or(Duration::MAX);
        // SAFETY: as above.
        let request = unsafe { take(request, "request") }?;
        let inner = alone(request.inner).accept(&mut endpoint, private_data, timeout)?;
        let inner = Mutex::new(inner);
        Ok(place.set(doorbell_cm_connection { inner }))
    })
}

/// Refuses a request, and ends its handle.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_reject(
    request: *mut doorbell_cm_request,
    private_data: *const c_void,
    len_bytes: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and arrays.
        let (private_data, request) = unsafe {
            let private_data = array(private_data.cast::<u8>(), len_bytes, "private_data")?;
            (private_data, take(request, "request")?)
        };
        alone(request.inner).reject(private_data)?;
        Ok(0)
    })
}

/// Refuses a request without a word, and ends its handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cm_request_destroy(request: *mut doorbell_cm_request) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(request, "request") }.map(|()| 0))
}

#[cfg(feature = "verbs")]
fn connect(
    endpoint: &mut Endpoint,
    address: &str,
    private_data: &[u8],
    timeout: std::time::Duration,
) -> Result<CmConnection, Failure> {
    Ok(CmConnection::connect(
        endpoint,
        address,
        private_data,
        timeout,
    )?)
}

#[cfg(feature = "verbs")]
fn bind(address: &str) -> Result<CmListener, Failure> {
    Ok(CmListener::bind(address)?)
}

#[cfg(not(feature = "verbs"))]
fn connect(
    _: &mut Endpoint,
    _: &str,
    _: &[u8],
    _: std::time::Duration,
) -> Result<CmConnection, Failure> {
    Err(Failure::Feature { feature: "verbs" })
}

#[cfg(not(feature = "verbs"))]
fn bind(_: &str) -> Result<CmListener, Failure> {
    Err(Failure::Feature { feature: "verbs" })
}

/// Stand-ins for the types that need the feature. They have the same calls, which are
/// never made.
#[cfg(not(feature = "verbs"))]
mod nothing {
    use std::convert::Infallible;
    use std::net::SocketAddr;
    use std::time::Duration;

    use doorbell_rs::{Endpoint, Result};

    pub(super) struct CmListener(Infallible);
    pub(super) struct CmRequest(Infallible);
    pub(super) struct CmConnection(Infallible);

    impl CmListener {
        pub(super) fn address(&self) -> Result<SocketAddr> {
            match self.0 {}
        }

        pub(super) fn accept(&self, _: Duration) -> Result<CmRequest> {
            match self.0 {}
        }
    }

    impl CmRequest {
        pub(super) fn peer(&self) -> Result<SocketAddr> {
            match self.0 {}
        }

        pub(super) fn device(&self) -> Option<String> {
            match self.0 {}
        }

        pub(super) fn private_data(&self) -> &[u8] {
            match self.0 {}
        }

        pub(super) fn accept(
            self,
            _: &mut Endpoint,
            _: &[u8],
            _: Duration,
        ) -> Result<CmConnection> {
            match self.0 {}
        }

        pub(super) fn reject(self, _: &[u8]) -> Result<()> {
            match self.0 {}
        }
    }

    impl CmConnection {
        pub(super) fn peer(&self) -> SocketAddr {
            match self.0 {}
        }

        pub(super) fn private_data(&self) -> &[u8] {
            match self.0 {}
        }

        pub(super) fn check(&mut self) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn disconnect(self, _: Duration) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn wait_disconnected(&mut self, _: Duration) -> Result<()> {
            match self.0 {}
        }
    }
}
