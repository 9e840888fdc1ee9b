//! Transfers of memory that no NIC reaches.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;
use std::sync::Mutex;
use std::time::Duration;

use crate::argument::{VersionedStruct, choice, out_handle, read_struct, write_struct};
use crate::boundary::guard;
use crate::device::doorbell_domain;
use crate::endpoint::{doorbell_endpoint, try_lock, wait_timeout};
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get};
use crate::region::doorbell_remote;
use doorbell_rs::{Bounce, BounceConfig, Endpoint, MemcpyEngine, RemoteRegion, Result};
#[cfg(feature = "cuda")]
use doorbell_rs::{CudaContext, CudaEngine};

/// The processor copies.
pub const DOORBELL_ENGINE_MEMCPY: u32 = 0;
/// The copy engines of the GPU do.
pub const DOORBELL_ENGINE_CUDA: u32 = 1;

/// Pinned memory between foreign memory and a NIC.
pub struct doorbell_bounce {
    inner: Mutex<Engines>,
}

enum Engines {
    Memcpy(Bounce<MemcpyEngine>),
    #[cfg(feature = "cuda")]
    Cuda(Bounce<CudaEngine>),
}

impl CObject for doorbell_bounce {
    const NAME: &'static str = "doorbell_bounce";
}

/// [`BounceConfig`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_bounce_config {
    pub struct_size: u32,
    pub chunk_bytes: u32,
    pub slots: u32,
    pub engine: u32,
}

// SAFETY: repr(C), 4-byte fields without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_bounce_config {
    const BYTES_FIRST: usize = 16;

    fn defaults() -> doorbell_bounce_config {
        let config = BounceConfig::default();
        doorbell_bounce_config {
            struct_size: size_of::<doorbell_bounce_config>() as u32,
            chunk_bytes: config.chunk_bytes,
            slots: config.slots,
            engine: DOORBELL_ENGINE_MEMCPY,
        }
    }
}

const _: () = assert!(size_of::<doorbell_bounce_config>() == doorbell_bounce_config::BYTES_FIRST);

/// What is done with the memory.
#[derive(Clone, Copy)]
enum BounceTransfer<'a> {
    Write(&'a RemoteRegion, u64),
    Read(&'a RemoteRegion, u64),
    Send,
    Recv,
}

impl Engines {
    /// # Safety
    /// The foreign memory is what the engine takes, until this returns.
    unsafe fn run(
        &mut self,
        endpoint: &mut Endpoint,
        way: BounceTransfer<'_>,
        foreign: u64,
        len_bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        // One engine's calls are spelled like another's.
        macro_rules! run {
            ($bounce:expr) => {
                // SAFETY: the caller's promise.
                unsafe {
                    match way {
                        BounceTransfer::Write(remote, offset) => {
                            $bounce.write(endpoint, foreign, len_bytes, remote, offset, timeout)
                        }
                        BounceTransfer::Read(remote, offset) => {
                            $bounce.read(endpoint, remote, offset, foreign, len_bytes, timeout)
                        }
                        BounceTransfer::Send => $bounce.send(endpoint, foreign, len_bytes, timeout),
                        BounceTransfer::Recv => $bounce.recv(endpoint, foreign, len_bytes, timeout),
                    }
                }
            };
        }
        match self {
            Engines::Memcpy(bounce) => run!(bounce),
            #[cfg(feature = "cuda")]
            Engines::Cuda(bounce) => run!(bounce),
        }
    }
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_config_init(
    config: *mut doorbell_bounce_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_bounce_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Pins memory for transfers.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_create(
    domain: *const doorbell_domain,
    config: *const doorbell_bounce_config,
    bounce: *mut *mut doorbell_bounce,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, places for them, and structs.
        let (place, domain, given) = unsafe {
            let place = out_handle(bounce, "bounce")?;
            let domain = get(domain, "domain")?;
            let given = if config.is_null() {
                doorbell_bounce_config::defaults()
            } else {
                read_struct(config, "config")?
            };
            (place, domain, given)
        };
        let config = BounceConfig::default()
            .chunk_bytes(given.chunk_bytes)
            .slots(given.slots);
        let engines = match given.engine {
            DOORBELL_ENGINE_MEMCPY => {
                Engines::Memcpy(Bounce::new(&domain.inner, MemcpyEngine::default(), config)?)
            }
            #[cfg(feature = "cuda")]
            DOORBELL_ENGINE_CUDA => {
                let engine = CudaEngine::new(&CudaContext::current()?)?;
                Engines::Cuda(Bounce::new(&domain.inner, engine, config)?)
            }
            #[cfg(not(feature = "cuda"))]
            DOORBELL_ENGINE_CUDA => return Err(Failure::Feature { feature: "cuda" }),
            other => return Err(choice("engine", other, DOORBELL_ENGINE_CUDA)),
        };
        let inner = Mutex::new(engines);
        Ok(place.set(doorbell_bounce { inner }))
    })
}

/// # Safety
/// As the header says of handles, and of the memory.
unsafe fn run(
    bounce: *mut doorbell_bounce,
    endpoint: *mut doorbell_endpoint,
    way: BounceTransfer<'_>,
    foreign: u64,
    len_bytes: u64,
    timeout_ms: i64,
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise about handles.
    let (bounce, endpoint) = unsafe { (get(bounce, "bounce")?, get(endpoint, "endpoint")?) };
    let mut engines = try_lock(&bounce.inner, "bounce")?;
    let mut endpoint = endpoint.lock()?;
    let timeout = wait_timeout(&endpoint, timeout_ms)?.unwrap_or(Duration::MAX);
    // SAFETY: the caller's promise about the memory.
    unsafe { engines.run(&mut endpoint, way, foreign, len_bytes, timeout) }?;
    Ok(0)
}

/// What a peer's region is, as C has it.
///
/// # Safety
/// The pointer is null, or of a region of a peer.
unsafe fn remote_region(remote: *const doorbell_remote) -> Result<RemoteRegion, Failure> {
    // SAFETY: the caller's promise.
    let remote = unsafe { remote.as_ref() }.ok_or_else(|| Failure::null("remote"))?;
    Ok(RemoteRegion {
        addr: remote.addr,
        rkey: remote.rkey,
        len_bytes: remote.len_bytes,
    })
}

/// Writes foreign memory to a peer's region.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_write(
    bounce: *mut doorbell_bounce,
    endpoint: *mut doorbell_endpoint,
    address: u64,
    len_bytes: u64,
    remote: *const doorbell_remote,
    offset: u64,
    timeout_ms: i64,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        let (_, remote) = (get(bounce, "bounce")?, remote_region(remote)?);
        let way = BounceTransfer::Write(&remote, offset);
        run(bounce, endpoint, way, address, len_bytes, timeout_ms)
    })
}

/// Reads a peer's region into foreign memory.
///
/// # Safety
/// As the header says of pointers, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_read(
    bounce: *mut doorbell_bounce,
    endpoint: *mut doorbell_endpoint,
    remote: *const doorbell_remote,
    offset: u64,
    address: u64,
    len_bytes: u64,
    timeout_ms: i64,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        let (_, remote) = (get(bounce, "bounce")?, remote_region(remote)?);
        let way = BounceTransfer::Read(&remote, offset);
        run(bounce, endpoint, way, address, len_bytes, timeout_ms)
    })
}

/// Sends foreign memory.
///
/// # Safety
/// As the header says of handles, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_send(
    bounce: *mut doorbell_bounce,
    endpoint: *mut doorbell_endpoint,
    address: u64,
    len_bytes: u64,
    timeout_ms: i64,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        run(
            bounce,
            endpoint,
            BounceTransfer::Send,
            address,
            len_bytes,
            timeout_ms,
        )
    })
}

/// Receives into foreign memory.
///
/// # Safety
/// As the header says of handles, and of the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_recv(
    bounce: *mut doorbell_bounce,
    endpoint: *mut doorbell_endpoint,
    address: u64,
    len_bytes: u64,
    timeout_ms: i64,
) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe {
        run(
            bounce,
            endpoint,
            BounceTransfer::Recv,
            address,
            len_bytes,
            timeout_ms,
        )
    })
}

/// Destroys the handle of a bounce buffer.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_bounce_destroy(bounce: *mut doorbell_bounce) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(bounce, "bounce") }.map(|()| 0))
}
