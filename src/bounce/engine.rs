//! The engines that copy between foreign memory and host memory.
#![allow(unsafe_code)] // copies between addresses

use std::ptr::NonNull;

use crate::Result;
use crate::region::Region;

/// A copy that an engine was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyTicket(pub u64);

/// Copies between host memory and memory that only the engine reaches, in the background if it can.
///
/// Copies that were given to it and are not over may be carried out at any time and in any order. A caller that needs an order has to wait.
///
/// # Safety
/// An engine touches the memory of a copy only between the call that begins it and the [`CopyEngine::is_copy_done`] that says `true`, or an
/// error, for its ticket; then all of it has been copied, or there was an error. A ticket is unique among the copies in progress.
pub unsafe trait CopyEngine: Send {
    /// Gets the pinned memory that the host's side of all copies from now on will be in, to make ready what it needs for them; it is called
    /// again if there is other memory later.
    ///
    /// # Errors
    /// Errors of the engine. It is given no copy after that.
    fn use_staging(&mut self, staging: &Region) -> Result<()> {
        let _ = staging;
        Ok(())
    }

    /// Begins to copy `len_bytes` from foreign memory to host memory. The engine defines what the foreign address means.
    ///
    /// # Safety
    /// Until the copy is over, the foreign memory is valid for reads, and the host memory for writes and not used otherwise.
    ///
    /// # Errors
    /// Errors of the engine. No copy was begun.
    unsafe fn copy_to_host(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<CopyTicket>;

    /// Begins to copy `len_bytes` from host memory to foreign memory.
    ///
    /// # Safety
    /// Until the copy is over, the host memory is valid for reads and not written otherwise, and the foreign memory is valid for writes.
    ///
    /// # Errors
    /// Errors of the engine. No copy was begun.
    unsafe fn copy_from_host(
        &mut self,
        host: NonNull<u8>,
        foreign: u64,
        len_bytes: usize,
    ) -> Result<CopyTicket>;

    /// Returns whether a copy is finished, without waiting. It is not called again after it returned `true` or an error.
    ///
    /// # Errors
    /// The reason why the copy failed. The copy has ended.
    fn is_copy_done(&mut self, copy: CopyTicket) -> Result<bool>;
}

/// Copies by the processor, at once: for memory that is mapped, but that the NIC cannot reach.
#[derive(Debug, Default)]
pub struct MemcpyEngine {
    copies: u64,
}

impl MemcpyEngine {
    fn ticket(&mut self) -> CopyTicket {
        self.copies += 1;
        CopyTicket(self.copies)
    }
}

// SAFETY: a copy is over before the call that begins it returns.
unsafe impl CopyEngine for MemcpyEngine {
    unsafe fn copy_to_host(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        let foreign: *const u8 = std::ptr::with_exposed_provenance(foreign as usize);
        // SAFETY: the caller's promise; memory that a NIC cannot reach does not overlap what it can.
        unsafe { std::ptr::copy(foreign, host.as_ptr(), len_bytes) };
        Ok(self.ticket())
    }

    unsafe fn copy_from_host(
        &mut self,
        host: NonNull<u8>,
        foreign: u64,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        let foreign: *mut u8 = std::ptr::with_exposed_provenance_mut(foreign as usize);
        // SAFETY: as above.
        unsafe { std::ptr::copy(host.as_ptr(), foreign, len_bytes) };
        Ok(self.ticket())
    }

    fn is_copy_done(&mut self, _: CopyTicket) -> Result<bool> {
        Ok(true)
    }
}
