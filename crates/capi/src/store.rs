//! What the processes of a job exchange: the store of a group, or one without a group.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::Duration;

use crate::argument::{
    DOORBELL_DEFAULT_TIMEOUT, array, finite_timeout, out_handle, out_optional, read_struct, text,
    write_bytes,
};
use crate::boundary::guard;
use crate::endpoint::try_lock;
use crate::failure::Failure;
use crate::group::doorbell_group_config;
use crate::handle::{CObject, destroy, get, take};
use doorbell_rs::{Error, GroupConfig, LaunchEnvironment, Result as LibraryResult, Store};

/// On what terms one process exchanges: how long it waits, and what it does one at a time.
pub(super) struct Terms {
    timeout: Duration,
    /// The store takes one barrier or gathering of a rank at a time.
    together: Mutex<()>,
}

impl Terms {
    pub(super) fn new(timeout: Duration) -> Terms {
        Terms {
            timeout,
            together: Mutex::new(()),
        }
    }

    /// The deadline of an exchange.
    fn timeout(&self, timeout_ms: i64) -> Result<Duration, Failure> {
        match timeout_ms {
            DOORBELL_DEFAULT_TIMEOUT => Ok(self.timeout),
            _ => finite_timeout(timeout_ms),
        }
    }

    /// A barrier; `argument` is what the caller calls the object.
    pub(super) fn barrier(
        &self,
        store: &Store,
        argument: &'static str,
        timeout_ms: i64,
    ) -> Result<c_int, Failure> {
        let timeout = self.timeout(timeout_ms)?;
        let _together = try_lock(&self.together, argument)?;
        store.barrier(timeout)?;
        Ok(0)
    }

    /// Remembers a value under a key.
    ///
    /// # Safety
    /// The key is null or a text, and `value` null or of `len_bytes` bytes.
    pub(super) unsafe fn set(
        &self,
        store: &Store,
        key: *const c_char,
        value: *const c_void,
        len_bytes: usize,
        timeout_ms: i64,
    ) -> Result<c_int, Failure> {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe {
            let value = array(value.cast::<u8>(), len_bytes, "value")?;
            (text(key, "key")?, value)
        };
        store.set(key.as_bytes(), value, self.timeout(timeout_ms)?)?;
        Ok(0)
    }

    /// The value under a key.
    ///
    /// # Safety
    /// The key is null or a text, and `value` null or has room for `capacity` bytes.
    pub(super) unsafe fn get(
        &self,
        store: &Store,
        key: *const c_char,
        value: *mut c_void,
        capacity: usize,
        timeout_ms: i64,
    ) -> Result<c_int, Failure> {
        // SAFETY: the caller's promise.
        let key = unsafe { text(key, "key") }?;
        let found = store.get(key.as_bytes(), self.timeout(timeout_ms)?)?;
        // SAFETY: the caller's promise.
        unsafe { write_bytes(&found, value, capacity, "value") }
    }

    /// The values of all; `argument` as in [`Terms::barrier`].
    ///
    /// # Safety
    /// `values` is null or has room for as many values of that length as there are ranks.
    pub(super) unsafe fn gather(
        &self,
        store: &Store,
        argument: &'static str,
        own: &[u8],
        values: *mut c_void,
        timeout_ms: i64,
    ) -> Result<c_int, Failure> {
        if values.is_null() && !own.is_empty() {
            return Err(Failure::null("values"));
        }
        let timeout = self.timeout(timeout_ms)?;
        let together = try_lock(&self.together, argument)?;
        let all = store.gather(own, timeout)?;
        drop(together);
        let other = all.iter().zip(0..).find(|(of, _)| of.len() != own.len());
        if let Some((of, rank)) = other {
            let rank: u32 = rank;
            let reason = format!("rank {rank} gave {} bytes, not {}", of.len(), own.len());
            let what = "value of a rank";
            return Err(Failure::Library(Error::Malformed { what, reason }));
        }
        let all = all.concat();
        // SAFETY: the caller's promise about the place, which is for all of them.
        unsafe { write_bytes(&all, values, all.len(), "values") }?;
        Ok(0)
    }
}

/// What a call says that asks whether all ranks are there, and which is not.
pub(super) fn whole(
    result: LibraryResult<()>,
    place: Option<&mut MaybeUninit<u32>>,
) -> Result<c_int, Failure> {
    if let (Err(Error::Rank { rank, .. }), Some(place)) = (&result, place) {
        place.write(*rank);
    }
    result?;
    Ok(0)
}

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
    guard(|| {
        // SAFETY: the caller's promise about places for handles.
        let place_for = unsafe { out_handle(store, "store") }?;
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
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let store = unsafe { get(store, "store") }?;
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
