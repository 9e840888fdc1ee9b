//! How the processes of a job exchange values: for a group, and for a store without one.
#![allow(unsafe_code)] // reads and writes through the pointers of C

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::Duration;

use crate::argument::{DOORBELL_DEFAULT_TIMEOUT, array, finite_timeout, text, write_bytes};
use crate::endpoint::try_lock;
use crate::failure::Failure;
use doorbell_rs::{Error, Result as LibraryResult, Store};

/// On what terms one process exchanges: how long it waits, and what it does one at a time.
pub(super) struct Terms {
    pub(super) timeout: Duration,
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
