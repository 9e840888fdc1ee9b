//! Copies out of registered memory and into it, in whatever process it lies.
//!
//! Inside this process they are plain copies. Others' memory is reached by system calls, in large pieces.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

use crate::soft::dma;
use crate::soft::space::{Fault, Place};

/// Bytes that go from one foreign process to another in one piece.
const BOUNCE_BYTES: usize = 256 << 10;

/// Which end of a copy could not be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadEnd {
    From,
    Into,
}

/// The copying part of a device.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    bounce: Vec<u8>,
}

impl Copies {
    /// Copies out of registered memory.
    ///
    /// # Safety
    /// `from` was resolved by the key table for `into.len()` bytes, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn load(&mut self, from: Place, into: &mut [u8]) -> Result<(), Fault> {
        match from.pointer() {
            // SAFETY: the caller's promise.
            Some(from) => unsafe { dma::copy_out(from, into) },
            None if into.is_empty() => {}
            None => from.space.read(from.addr, into)?,
        }
        Ok(())
    }

    /// Copies into registered memory.
    ///
    /// # Safety
    /// `into` was resolved by the key table for `from.len()` bytes, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn store(&mut self, into: Place, from: &[u8]) -> Result<(), Fault> {
        match into.pointer() {
            // SAFETY: the caller's promise.
            Some(into) => unsafe { dma::copy_in(into, from) },
            None if from.is_empty() => {}
            None => into.space.write(into.addr, from)?,
        }
        Ok(())
    }

    /// Copies between two places, which may overlap if they are in one space.
    ///
    /// # Safety
    /// Both were resolved by the key table for `len_bytes`, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn copy(
        &mut self,
        from: Place,
        into: Place,
        len_bytes: usize,
    ) -> Result<(), BadEnd> {
        if let (Some(from), Some(into)) = (from.pointer(), into.pointer()) {
            // SAFETY: the caller's promise.
            unsafe { dma::copy_across(from, into, len_bytes) };
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_far(from, into, len_bytes) }
    }

    /// # Safety
    /// As [`Copies::copy`].
    unsafe fn copy_far(
        &mut self,
        from: Place,
        into: Place,
        len_bytes: usize,
    ) -> Result<(), BadEnd> {
        let mut done = 0;
        while done < len_bytes {
            let piece = (len_bytes - done).min(BOUNCE_BYTES);
            if self.bounce.len() < piece {
                self.bounce.resize(piece, 0);
            }
            let mut bounce = std::mem::take(&mut self.bounce);
            let (from, into) = (from.behind(done as u64), into.behind(done as u64));
            // SAFETY: the caller's promise.
            let copied = unsafe {
                self.load(from, &mut bounce[..piece])
                    .map_err(|Fault| BadEnd::From)
                    .and_then(|()| {
                        self.store(into, &bounce[..piece])
                            .map_err(|Fault| BadEnd::Into)
                    })
            };
            self.bounce = bounce;
            copied?;
            done += piece;
        }
        Ok(())
    }

    /// Adds to a word and gives its old value; honours the host's own atomics in this process, but not in another, and not if
    /// the word is not aligned, as in a region whose I/O addresses are not.
    ///
    /// # Safety
    /// `at` was resolved by the key table for 8 bytes, under the lock that deregistration takes.
    pub(crate) unsafe fn fetch_add(&mut self, at: Place, add: u64) -> Result<u64, Fault> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(at) = at.pointer().filter(|at| at.addr().is_multiple_of(8)) {
                return Ok(dma::fetch_add(at, add));
            }
            let old = self.word(at)?;
            self.store(at, &old.wrapping_add(add).to_ne_bytes())?;
            Ok(old)
        }
    }

    /// Swaps a word if it has the value to compare with, and gives its old value; as [`Copies::fetch_add`].
    ///
    /// # Safety
    /// As [`Copies::fetch_add`].
    pub(crate) unsafe fn compare_swap(
        &mut self,
        at: Place,
        compare: u64,
        swap: u64,
    ) -> Result<u64, Fault> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(at) = at.pointer().filter(|at| at.addr().is_multiple_of(8)) {
                return Ok(dma::compare_swap(at, compare, swap));
            }
            let old = self.word(at)?;
            if old == compare {
                self.store(at, &swap.to_ne_bytes())?;
            }
            Ok(old)
        }
    }

    /// # Safety
    /// As [`Copies::load`].
    unsafe fn word(&mut self, at: Place) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        // SAFETY: the caller's promise.
        unsafe { self.load(at, &mut bytes) }?;
        Ok(u64::from_ne_bytes(bytes))
    }
}
