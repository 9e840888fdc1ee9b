//! Whether this process is the one that made something, or a child of `fork`: without a system call, and for `clone` as well.
#![allow(unsafe_code)] // maps a page

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, Result};

/// A word that a child of `fork` finds zero.
#[derive(Debug)]
pub(super) struct ForkGuard(NonNull<AtomicU32>);

// SAFETY: an atomic word of a page that is mapped as long as this lives.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

const PAGE_BYTES: usize = 4096;

impl ForkGuard {
    /// # Errors
    /// [`Error::System`] if the kernel gives no page, or none of that kind (Linux 4.14).
    pub(super) fn new() -> Result<ForkGuard> {
        let failed = |operation| {
            let errno = io::Error::last_os_error().raw_os_error();
            Error::System {
                operation,
                errno: errno.unwrap_or(libc::EIO),
            }
        };
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever there is room.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_BYTES, rights, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(failed("mmap"));
        }
        let Some(word) = NonNull::new(page.cast()) else {
            return Err(failed("mmap"));
        };
        let parent = ForkGuard(word);
        // SAFETY: advice about that mapping alone.
        if unsafe { libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK) } != 0 {
            return Err(failed("madvise(MADV_WIPEONFORK)"));
        }
        parent.word().store(1, Ordering::Relaxed);
        Ok(parent)
    }

    /// Whether this is the process that made it, and not a child of that.
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        self.word().load(Ordering::Relaxed) != 0
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped and aligned, and as long as `self`.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody has a reference to it.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}
