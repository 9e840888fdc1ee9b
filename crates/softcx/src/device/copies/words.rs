//! Atomics on words of registered memory.
#![allow(unsafe_code)] // words at addresses that the key table resolved

use super::Copies;
use crate::device::dma;
use crate::device::space::{AccessFault, SpaceAddress};

impl Copies {
    /// Adds to a word and gives its old value; honours the host's own atomics in this process, but not in another, and not if
    /// the word is not aligned, as in a region whose I/O addresses are not.
    ///
    /// # Safety
    /// `at` was resolved by the key table for 8 bytes, under the lock that deregistration takes.
    pub(crate) unsafe fn fetch_add(
        &mut self,
        at: SpaceAddress,
        add: u64,
    ) -> Result<u64, AccessFault> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(at) = at.pointer().filter(|at| at.addr().is_multiple_of(8)) {
                self.settle_here();
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
        at: SpaceAddress,
        compare: u64,
        swap: u64,
    ) -> Result<u64, AccessFault> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(at) = at.pointer().filter(|at| at.addr().is_multiple_of(8)) {
                self.settle_here();
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
    unsafe fn word(&mut self, at: SpaceAddress) -> Result<u64, AccessFault> {
        let mut bytes = [0; 8];
        // SAFETY: the caller's promise.
        unsafe { self.load(at, &mut bytes) }?;
        Ok(u64::from_ne_bytes(bytes))
    }
}
