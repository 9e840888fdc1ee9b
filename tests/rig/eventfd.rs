//! Descriptors that count notices: eventfd(2).
#![allow(unsafe_code)] // creates a descriptor, and reads it

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A new one, with the count 0.
pub fn eventfd() -> OwnedFd {
    // SAFETY: makes a descriptor, which belongs to the caller.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    assert!(fd >= 0);
    // SAFETY: just made.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The count, which becomes 0; 0 if it is.
pub fn count(eventfd: &impl AsRawFd) -> u64 {
    let mut count = 0_u64;
    // SAFETY: reads eight bytes into eight bytes.
    let read = unsafe { libc::read(eventfd.as_raw_fd(), (&raw mut count).cast(), 8) };
    if read == 8 { count } else { 0 }
}
