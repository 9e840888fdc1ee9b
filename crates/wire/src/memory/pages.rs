//! Memory that driver and device of one process share.
#![allow(unsafe_code)] // maps it

use std::ptr::NonNull;

use crate::{Error, Result};

/// Zeroed, page-aligned memory that a device may access. Its address never changes.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len_bytes: usize,
}

/// Alignment and granularity of [`Pages`].
pub const PAGE_BYTES: usize = 4096;

// SAFETY: `Pages` owns plain memory and gives out addresses only; who writes where is agreed between driver and device.
unsafe impl Send for Pages {}
// SAFETY: as above; there is no interior state besides the memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len_bytes` of memory, rounded up to whole pages. It comes from the kernel and not from the allocator, which would write the
    /// zeros: a page becomes resident when it is first used.
    ///
    /// # Errors
    /// [`Error::System`] with ENOMEM if there is not so much.
    pub fn new(len_bytes: usize) -> Result<Pages> {
        let none = Error::System {
            operation: "allocation of device memory",
            errno: libc::ENOMEM,
        };
        let Some(len_bytes) = len_bytes.max(1).checked_next_multiple_of(PAGE_BYTES) else {
            return Err(none);
        };
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(none);
        }
        let start = NonNull::new(start.cast()).ok_or(none)?;
        Ok(Pages { start, len_bytes })
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length, a multiple of [`PAGE_BYTES`].
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The byte at `offset`.
    ///
    /// # Panics
    /// If `offset` is past the end: the layout of driver memory is computed, never given from outside.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len_bytes());
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with the same length.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        for len_bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let refused = Pages::new(len_bytes);
            assert!(
                matches!(
                    refused,
                    Err(Error::System {
                        errno: libc::ENOMEM,
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
    }
}
