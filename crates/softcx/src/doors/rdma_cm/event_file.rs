//! One open of `/dev/infiniband/rdma_cm`: its events, and the descriptor that is readable while there are any.
//!
//! The descriptor is the reading end of a pipe, which has a byte for each event.
#![allow(unsafe_code)] // system calls on the pipe

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::device::client::Errno;
use crate::doors::abi::CmEventResp;
use crate::doors::event_pipe::{inode, reopen};

/// An event that has not been read.
#[derive(Debug)]
pub(super) struct QueuedCmEvent {
    /// The identifier that it is about: for a request, the one that listens.
    pub(super) owner: u32,
    /// The identifier of a request's connection.
    pub(super) request: Option<u32>,
    /// The number of a multicast group that was joined.
    pub(super) group: Option<u32>,
    pub(super) response: CmEventResp,
}

/// A call that waits for an event.
pub(in crate::doors) trait EventWaiter: Debug + Send {
    /// Whether it still waits.
    fn is_waiting(&self) -> bool;

    /// Writes the event to the place that the call named. Whether that succeeded.
    fn write(&self, event: &[u8]) -> bool;

    /// Ends the call: successfully, or with an errno.
    fn finish(&self, result: Result<(), Errno>);
}

/// One open file.
#[derive(Debug)]
pub(super) struct EventFile {
    write: OwnedFd,
    /// A description of its own of the end that the process has.
    read: OwnedFd,
    /// Bytes in the pipe, if nobody else has read any.
    bytes: usize,
    pub(super) events: VecDeque<QueuedCmEvent>,
    pub(super) waiters: VecDeque<Box<dyn EventWaiter>>,
}

impl EventFile {
    /// Makes one: its inode, and the descriptor for the process.
    pub(super) fn new() -> io::Result<(EventFile, (u64, u64), OwnedFd)> {
        let mut ends = [0; 2];
        // SAFETY: the array has room for the two descriptors.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, and no other code has the descriptors.
        let (theirs, write) =
            unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
        let failed = io::Error::from_raw_os_error;
        let read = reopen(&theirs, libc::O_RDONLY | libc::O_NONBLOCK).map_err(failed)?;
        // SAFETY: a flag of a description of ours.
        if unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let inode = inode(&theirs).map_err(failed)?;
        let file = EventFile {
            write,
            read,
            bytes: 0,
            events: VecDeque::new(),
            waiters: VecDeque::new(),
        };
        Ok((file, inode, theirs))
    }

    /// Another descriptor of the end that the process has.
    pub(super) fn reader(&self) -> io::Result<OwnedFd> {
        self.read.try_clone()
    }

    /// Makes the pipe have a byte for each event.
    pub(super) fn settle(&mut self) {
        while self.bytes < self.events.len() {
            // By number: a library that is preloaded puts itself before the function.
            // SAFETY: one byte, which outlives the call.
            let done = unsafe {
                libc::syscall(libc::SYS_write, self.write.as_raw_fd(), [0_u8].as_ptr(), 1)
            };
            if done != 1 {
                // The pipe is full, and so readable.
                return;
            }
            self.bytes += 1;
        }
        while self.bytes > self.events.len() {
            let mut byte = [0_u8];
            // SAFETY: room for one byte. If another reader was faster, there is none.
            unsafe { libc::read(self.read.as_raw_fd(), byte.as_mut_ptr().cast(), 1) };
            self.bytes -= 1;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::doors::abi::Layout;
    use std::os::fd::AsFd;

    #[test]
    fn the_descriptor_is_readable_while_there_are_events() {
        let (mut file, _, theirs) = EventFile::new().unwrap();
        let readable =
            || crate::doors::poll::wait([(theirs.as_fd(), libc::POLLIN)], 0).unwrap() != [0];
        for _ in 0..2 {
            file.events.push_back(QueuedCmEvent {
                owner: 1,
                request: None,
                group: None,
                response: CmEventResp::read(&[]),
            });
        }
        file.settle();
        assert!(readable());
        file.events.pop_front();
        file.settle();
        assert!(readable());
        file.events.clear();
        file.settle();
        assert!(!readable());
    }
}
