//! The device's access to memory: the one place of this crate where registered memory and rings are read and written.
//!
//! From the language's point of view this is the outside world, as a card's DMA engine is: an application that touches a
//! buffer while a transfer is using it sees torn bytes, here as there. Words by which two sides hand memory over (doorbell
//! records, UAR registers, the last word of a CQE) are atomics.
#![allow(unsafe_code)] // shared memory is what this file is about

mod ring;
mod words;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use self::ring::DmaRing;
pub(crate) use self::words::{ClockWord, RecordWord, UarRegister};
pub use doorbell_wire::memory::Pages;

/// Copies from registered memory into a local buffer.
///
/// # Safety
/// `from` was resolved by the key table for `into.len()` bytes, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_out(from: *const u8, into: &mut [u8]) {
    if !into.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }
}

/// Copies a local buffer into registered memory.
///
/// # Safety
/// `into` was resolved by the key table for `from.len()` bytes, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_in(into: *mut u8, from: &[u8]) {
    match from.len() {
        0 => {}
        // Words that a peer may be polling arrive whole, as they do from a card.
        // SAFETY: the caller's promise, and the alignment was looked at.
        4 if into as usize & 3 == 0 => unsafe {
            AtomicU32::from_ptr(into.cast()).store(
                u32::from_ne_bytes([from[0], from[1], from[2], from[3]]),
                Ordering::Release,
            );
        },
        // SAFETY: as above.
        8 if into as usize & 7 == 0 => unsafe {
            let value = u64::from_ne_bytes([
                from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7],
            ]);
            AtomicU64::from_ptr(into.cast()).store(value, Ordering::Release);
        },
        // SAFETY: the caller's promise.
        len => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, len) },
    }
}

/// Copies between two places of registered memory, which may overlap.
///
/// # Safety
/// Both were resolved by the key table for `len_bytes`, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_across(from: *const u8, into: *mut u8, len_bytes: usize) {
    if len_bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, into, len_bytes) }
    }
}

/// The atomics of the wire, carried out so that the host's own atomics on the same word are honoured.
///
/// # Safety
/// `at` is 8-byte aligned and was resolved by the key table for 8 bytes, under the lock that deregistration takes.
pub(crate) unsafe fn fetch_add(at: *mut u8, add: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at.cast()) }.fetch_add(add, Ordering::AcqRel)
}

/// # Safety
/// As [`fetch_add`].
pub(crate) unsafe fn compare_swap(at: *mut u8, compare: u64, swap: u64) -> u64 {
    // SAFETY: the caller's promise.
    match unsafe { AtomicU64::from_ptr(at.cast()) }.compare_exchange(
        compare,
        swap,
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        Ok(old) | Err(old) => old,
    }
}
