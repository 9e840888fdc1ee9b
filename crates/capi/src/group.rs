//! The processes of a job.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use crate::argument::{
    DOORBELL_DEFAULT_TIMEOUT, DOORBELL_NO_TIMEOUT, VersionedStruct, array, choice, finite_timeout,
    out, out_handle, out_optional, read_struct, text, write_struct,
};
use crate::boundary::{call, guard};
use crate::device::doorbell_domain;
use crate::endpoint::{config_or_default, doorbell_endpoint, doorbell_endpoint_config};
use crate::exchange::{Terms, whole};
use crate::failure::Failure;
use crate::handle::{CObject, create, destroy, get, take};
use doorbell_rs::{Error, Group, GroupConfig, LaunchEnvironment, StateKind, Token};

/// A job of many processes, from the side of one of them.
pub struct doorbell_group {
    pub(super) inner: Group,
    terms: Terms,
}

impl CObject for doorbell_group {
    const NAME: &'static str = "doorbell_group";
}

impl doorbell_group {
    fn new(inner: Group, timeout: Duration) -> doorbell_group {
        let terms = Terms::new(timeout);
        doorbell_group { inner, terms }
    }
}

/// [`GroupConfig`] and [`LaunchEnvironment`] for C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_group_config {
    pub struct_size: u32,
    pub rank: u32,
    pub size: u32,
    pub token_len_bytes: u32,
    pub timeout_ms: i64,
    pub address: *const c_char,
    pub token: *const c_void,
    pub endpoint: *const doorbell_endpoint_config,
}

// SAFETY: repr(C), four 4-byte fields, an 8-byte one and three pointers, without padding, integers and raw pointers, and the size first.
unsafe impl VersionedStruct for doorbell_group_config {
    const BYTES_FIRST: usize = 24 + 3 * size_of::<*const c_void>();

    fn defaults() -> doorbell_group_config {
        doorbell_group_config {
            struct_size: size_of::<doorbell_group_config>() as u32,
            rank: 0,
            size: 0,
            token_len_bytes: 0,
            timeout_ms: GroupConfig::default().timeout.as_millis() as i64,
            address: std::ptr::null(),
            token: std::ptr::null(),
            endpoint: std::ptr::null(),
        }
    }
}

const _: () = assert!(size_of::<doorbell_group_config>() == doorbell_group_config::BYTES_FIRST);

impl doorbell_group_config {
    /// Where this process stands, as far as it is not the launcher that says so.
    ///
    /// # Safety
    /// The pointers are as the header says.
    pub(super) unsafe fn launch_environment(&self) -> Result<LaunchEnvironment, Failure> {
        if self.size == 0 {
            let given = [
                ("rank", self.rank != 0),
                ("token_len_bytes", self.token_len_bytes != 0),
                ("address", !self.address.is_null()),
            ];
            if let Some((argument, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                let reason = "with a size of 0 the launcher determines it";
                return Err(Failure::argument(argument, reason));
            }
            return Ok(LaunchEnvironment::from_env()?);
        }
        // SAFETY: the caller's promise.
        let (address, token) = unsafe {
            let token = array(
                self.token.cast::<u8>(),
                self.token_len_bytes as usize,
                "token",
            )?;
            (text(self.address, "address")?, token)
        };
        Ok(LaunchEnvironment::new(
            self.rank,
            self.size,
            address,
            Token::new(token.to_vec()),
        )?)
    }

    /// The deadline of joining, and of exchanges where no other is given.
    pub(super) fn timeout(&self) -> Result<Duration, Failure> {
        match self.timeout_ms {
            DOORBELL_NO_TIMEOUT => {
                let reason = "joining needs a time limit: DOORBELL_NO_TIMEOUT is not allowed";
                Err(Failure::argument("timeout_ms", reason))
            }
            DOORBELL_DEFAULT_TIMEOUT => Ok(GroupConfig::default().timeout),
            timeout_ms => finite_timeout(timeout_ms),
        }
    }
}

/// Fills a configuration with the defaults.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_config_init(
    config: *mut doorbell_group_config,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let defaults = doorbell_group_config::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(defaults, config, struct_size, "config") }
    })
}

/// Joins a group.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_join(
    domain: *const doorbell_domain,
    config: *const doorbell_group_config,
    group: *mut *mut doorbell_group,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places for them, structs and their sizes.
        let (place_for, domain, config, environment, endpoint) = unsafe {
            let place_for = out_handle(group, "group")?;
            let domain = get(domain, "domain")?;
            let config = if config.is_null() {
                doorbell_group_config::defaults()
            } else {
                read_struct(config, "config")?
            };
            let endpoint = config_or_default(config.endpoint)?;
            (
                place_for,
                domain,
                config,
                config.launch_environment()?,
                endpoint,
            )
        };
        let timeout = config.timeout()?;
        let config = GroupConfig::default().endpoint(endpoint).timeout(timeout);
        let inner = Group::join(&environment, &domain.inner, &config)?;
        Ok(place_for.set(doorbell_group::new(inner, timeout)))
    })
}

/// What the launcher says of this process.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_rank_from_env(rank: *mut u32, size: *mut u32) -> c_int {
    call!(to_rank = out(rank), to_size = out(size), || {
        let environment = LaunchEnvironment::from_env()?;
        to_rank.write(environment.rank());
        to_size.write(environment.size());
        Ok(0)
    })
}

/// Joins the group that the launcher has started this process for.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_from_env(group: *mut *mut doorbell_group) -> c_int {
    call!(place = out_handle(group), || {
        let inner = Group::from_env()?;
        let timeout = GroupConfig::default().timeout;
        Ok(place.set(doorbell_group::new(inner, timeout)))
    })
}

/// Leaves a group, and ends its handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_leave(group: *mut doorbell_group) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let group = unsafe { take(group, "group") }?;
        group.inner.leave()?;
        Ok(0)
    })
}

/// A group of the ranks that are still here.
///
/// # Safety
/// As the header says of pointers; `ranks` has room for `capacity` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_shrink(
    group: *const doorbell_group,
    ranks: *mut u32,
    capacity: u32,
    survivors: *mut *mut doorbell_group,
) -> c_int {
    call!(place = out_handle(survivors), group = get(group), || {
        let size = group.inner.size();
        if !ranks.is_null() && capacity < size {
            return Err(Failure::Library(Error::Range {
                argument: "capacity",
                value: capacity.into(),
                min: size.into(),
                max: u32::MAX.into(),
            }));
        }
        let (inner, old) = group.inner.shrink()?;
        if !ranks.is_null() {
            for (at, rank) in old.into_iter().enumerate() {
                // SAFETY: the caller's promise; there are no more than the size.
                unsafe { ranks.add(at).write(rank) };
            }
        }
        Ok(place.set(doorbell_group::new(inner, group.terms.timeout)))
    })
}

/// Ends the handle of a group that was not left.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_destroy(group: *mut doorbell_group) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(group, "group") }.map(|()| 0))
}

/// The number of this process.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_rank(group: *const doorbell_group) -> c_int {
    // SAFETY: the caller's promise about handles. At most 65536, by the library.
    guard(|| Ok(unsafe { get(group, "group") }?.inner.rank() as c_int))
}

/// How many processes there are.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_size(group: *const doorbell_group) -> c_int {
    // SAFETY: as of the rank.
    guard(|| Ok(unsafe { get(group, "group") }?.inner.size() as c_int))
}

/// The domain of the group's endpoints.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_domain(
    group: *const doorbell_group,
    domain: *mut *mut doorbell_domain,
) -> c_int {
    call!(place = out_handle(domain), group = get(group), || {
        let inner = group.inner.domain().clone();
        Ok(place.set(doorbell_domain { inner }))
    })
}

/// The endpoint that is connected with another rank.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_endpoint(
    group: *const doorbell_group,
    peer: u32,
    endpoint: *mut *mut doorbell_endpoint,
) -> c_int {
    call!(place = out_handle(endpoint), group = get(group), || {
        let taken = group.inner.take_endpoint(peer)?;
        Ok(place.set(doorbell_endpoint::new(taken)))
    })
}

/// A connection to open with a rank of a group.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_group_peer {
    pub rank: u32,
    pub reserved: u32,
    pub tag: u64,
}

/// Opens connections with other ranks, and writes a handle for each entry of `peers`. All handles are null until all are open.
///
/// # Safety
/// `places` is null or has room for so many handles; `peers` as [`array`].
pub(super) unsafe fn open_links<T: CObject, I: IntoIterator<Item = T>>(
    (places, argument): (*mut *mut T, &'static str),
    peers: *const doorbell_group_peer,
    peer_count: u32,
    open: impl FnOnce(&[(u32, u64)]) -> Result<I, Failure>,
) -> Result<c_int, Failure> {
    if places.is_null() && peer_count > 0 {
        return Err(Failure::null(argument));
    }
    let places = (0..peer_count as usize).map(|at| places.wrapping_add(at));
    for place in places.clone() {
        // SAFETY: within the room of the caller's promise.
        unsafe { place.write(std::ptr::null_mut()) };
    }
    // SAFETY: the caller's promise.
    let peers = unsafe { array(peers, peer_count as usize, "peers") }?;
    if let Some(peer) = peers.iter().find(|peer| peer.reserved != 0) {
        return Err(choice("peers[].reserved", peer.reserved, 0));
    }
    let with: Vec<_> = peers.iter().map(|peer| (peer.rank, peer.tag)).collect();
    for (place, opened) in places.zip(open(&with)?) {
        // SAFETY: as above.
        unsafe { place.write(create(opened)) };
    }
    Ok(0)
}

/// Further endpoints to other ranks.
///
/// # Safety
/// As the header says of pointers; `endpoints` has room for as many handles as there are peers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_endpoints(
    group: *const doorbell_group,
    peers: *const doorbell_group_peer,
    peer_count: u32,
    config: *const doorbell_endpoint_config,
    endpoints: *mut *mut doorbell_endpoint,
) -> c_int {
    // SAFETY: the caller's promise about handles, arrays and structs.
    guard(|| unsafe {
        open_links((endpoints, "endpoints"), peers, peer_count, |with| {
            let (group, config) = (get(group, "group")?, config_or_default(config)?);
            let made = group.inner.endpoints(with, &config)?;
            Ok(made.into_iter().map(doorbell_endpoint::new))
        })
    })
}

/// Waits until every rank has come here.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_barrier(
    group: *const doorbell_group,
    timeout_ms: i64,
) -> c_int {
    call!(group = get(group), || {
        group
            .terms
            .barrier(group.inner.store(), "group", timeout_ms)
    })
}

/// Remembers a value under a key, for all ranks.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_set(
    group: *const doorbell_group,
    key: *const c_char,
    value: *const c_void,
    len_bytes: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, texts and arrays.
        unsafe {
            let group = get(group, "group")?;
            let store = group.inner.store();
            group.terms.set(store, key, value, len_bytes, timeout_ms)
        }
    })
}

/// The value under a key.
///
/// # Safety
/// As the header says of pointers; `value` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_get(
    group: *const doorbell_group,
    key: *const c_char,
    value: *mut c_void,
    capacity: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, texts and the place.
        unsafe {
            let group = get(group, "group")?;
            let store = group.inner.store();
            group.terms.get(store, key, value, capacity, timeout_ms)
        }
    })
}

/// Gives every rank the values of all.
///
/// # Safety
/// As the header says of pointers; `values` has room for as many values as there are ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_gather(
    group: *const doorbell_group,
    value: *const c_void,
    len_bytes: usize,
    values: *mut c_void,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, arrays and the place.
        unsafe {
            let group = get(group, "group")?;
            let store = group.inner.store();
            let own = array(value.cast::<u8>(), len_bytes, "value")?;
            group.terms.gather(store, "group", own, values, timeout_ms)
        }
    })
}

/// Whether the group is whole.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_check(
    group: *const doorbell_group,
    wait_for_notification: u32,
    rank: *mut u32,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, group) = unsafe { (out_optional(rank), get(group, "group")?) };
        let failed = match wait_for_notification {
            0 => group.inner.check(),
            1 => {
                let unknown = Error::state(
                    StateKind::Unexpected,
                    "check of the group",
                    "no rank has ended",
                );
                match group.inner.cause_of(unknown.clone()) {
                    same if same == unknown => Ok(()),
                    cause => Err(cause),
                }
            }
            _ => return Err(choice("wait_for_notification", wait_for_notification, 1)),
        };
        whole(failed, place)
    })
}
