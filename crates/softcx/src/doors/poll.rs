//! Waiting for descriptors.
#![allow(unsafe_code)] // the system call

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Waits until one of the descriptors has one of its events, or an error or a hang-up. Returns the events of each descriptor;
/// all zeros after `timeout_ms`. A negative `timeout_ms` waits without a limit.
pub(super) fn wait<const N: usize>(
    on: [(BorrowedFd<'_>, i16); N],
    timeout_ms: i32,
) -> io::Result<[i16; N]> {
    let mut entries = on.map(|(fd, events)| libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    });
    loop {
        // SAFETY: N entries, which outlive the call.
        let done = unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, timeout_ms) };
        if done >= 0 {
            return Ok(entries.map(|entry| entry.revents));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
