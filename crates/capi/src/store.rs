//! The store of a job's processes without a group.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};

use crate::argument::{array, out_handle, out_optional, read_struct};
use crate::boundary::{call, guard};
use crate::exchange::{Terms, whole};
use crate::failure::Failure;
use crate::group::doorbell_group_config;
use crate::handle::{CObject, destroy, get, take};
use doorbell_rs::{GroupConfig, LaunchEnvironment, Store};

/// A store without a group.
pub struct doorbell_store {
    inner: Store,
    terms: Terms,
}

impl CObject for doorbell_store {
    const NAME: &'static str = "doorbell_store";
}

/// Goes to a store.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_join(
    config: *const doorbell_group_config,
    store: *mut *mut doorbell_store,
) -> c_int {
    call!(place_for = out_handle(store), || {
        let (environment, timeout) = if config.is_null() {
            (
                LaunchEnvironment::from_env()?,
                GroupConfig::default().timeout,
            )
        } else {
            // SAFETY: the caller's promise about structs and their sizes.
            let config = unsafe { read_struct(config, "config") }?;
            if !config.endpoint.is_null() {
                let reason = "a store makes no endpoints";
                return Err(Failure::argument("endpoint", reason));
            }
            // SAFETY: the caller's promise about what is in it.
            (unsafe { config.launch_environment() }?, config.timeout()?)
        };
        let inner = Store::join(&environment, timeout)?;
        let terms = Terms::new(timeout);
        Ok(place_for.set(doorbell_store { inner, terms }))
    })
}

/// Leaves a store, and ends its handle.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_leave(store: *mut doorbell_store) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let store = unsafe { take(store, "store") }?;
        store.inner.leave(store.terms.timeout)?;
        Ok(0)
    })
}

/// Ends the handle of a store that was not left.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_destroy(store: *mut doorbell_store) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(store, "store") }.map(|()| 0))
}

/// The number of this process.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_rank(store: *const doorbell_store) -> c_int {
    // SAFETY: the caller's promise about handles. At most 65536, by the library.
    guard(|| Ok(unsafe { get(store, "store") }?.inner.rank() as c_int))
}

/// How many processes there are.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_size(store: *const doorbell_store) -> c_int {
    // SAFETY: as of the rank.
    guard(|| Ok(unsafe { get(store, "store") }?.inner.size() as c_int))
}

/// Waits until every rank has come here.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_barrier(
    store: *const doorbell_store,
    timeout_ms: i64,
) -> c_int {
    call!(store = get(store), || {
        store.terms.barrier(&store.inner, "store", timeout_ms)
    })
}

/// Remembers a value under a key, for all ranks.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_set(
    store: *const doorbell_store,
    key: *const c_char,
    value: *const c_void,
    len_bytes: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, texts and arrays.
        unsafe {
            let doorbell_store { inner, terms } = get(store, "store")?;
            terms.set(inner, key, value, len_bytes, timeout_ms)
        }
    })
}

/// The value under a key.
///
/// # Safety
/// As the header says of pointers; `value` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_get(
    store: *const doorbell_store,
    key: *const c_char,
    value: *mut c_void,
    capacity: usize,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, texts and the place.
        unsafe {
            let doorbell_store { inner, terms } = get(store, "store")?;
            terms.get(inner, key, value, capacity, timeout_ms)
        }
    })
}

/// Gives every rank the values of all.
///
/// # Safety
/// As the header says of pointers; `values` has room for as many values as there are ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_gather(
    store: *const doorbell_store,
    value: *const c_void,
    len_bytes: usize,
    values: *mut c_void,
    timeout_ms: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, arrays and the place.
        unsafe {
            let doorbell_store { inner, terms } = get(store, "store")?;
            let own = array(value.cast::<u8>(), len_bytes, "value")?;
            terms.gather(inner, "store", own, values, timeout_ms)
        }
    })
}

/// Whether all ranks are there.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_store_check(
    store: *const doorbell_store,
    rank: *mut u32,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, store) = unsafe { (out_optional(rank), get(store, "store")?) };
        whole(store.inner.failure().map_or(Ok(()), Err), place)
    })
}
