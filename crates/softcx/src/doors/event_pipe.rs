//! A queue of events that a process reads from a descriptor.
//!
//! It is a pipe whose two ends stay open here: a write never raises SIGPIPE, and events of an object that is destroyed can be taken
//! out again before they are read. What was read, and so has to be acknowledged, is counted from that.
#![allow(unsafe_code)] // system calls

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::client::Errno;
use crate::doors::abi::{AsyncEventDesc, CompEventDesc, Layout};

/// The number of unread events of a channel from which on an event that is already among them is not added again: a program that does not read
/// needs no second wake-up. A pipe holds 4,096 of the longer kind, so that other events still have room.
const CROWD: usize = 1024;

/// An event as it is read: a word that names the object, and a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChannelEvent {
    pub(super) element: u64,
    pub(super) kind: u32,
}

/// The kind of a channel, which decides what is read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChannelKind {
    /// `ib_uverbs_comp_event_desc`: the word.
    Completions,
    /// `ib_uverbs_async_event_desc`: the word, the type and four bytes of zero.
    AsyncEvents,
}

impl ChannelKind {
    fn bytes(self) -> usize {
        match self {
            ChannelKind::Completions => CompEventDesc::BYTES,
            ChannelKind::AsyncEvents => AsyncEventDesc::BYTES,
        }
    }
}

/// One channel.
#[derive(Debug)]
pub(super) struct EventPipe {
    kind: ChannelKind,
    inode: (u64, u64),
    queue: Mutex<ChannelQueue>,
}

#[derive(Debug)]
struct ChannelQueue {
    write: OwnedFd,
    /// A description of its own of the end that the process reads: non-blocking, whatever the process made of its one.
    read: OwnedFd,
    /// At least what is unread in the pipe, oldest first.
    sent: VecDeque<ChannelEvent>,
    /// What found no room.
    backlog: VecDeque<ChannelEvent>,
}

impl EventPipe {
    /// Makes one: the second is the descriptor for the process.
    pub(super) fn new(kind: ChannelKind) -> Result<(EventPipe, OwnedFd), Errno> {
        let mut ends = [0; 2];
        // SAFETY: the array has room for the two descriptors.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(last_errno());
        }
        // SAFETY: the call succeeded, and no other code has the descriptors.
        let (theirs, write) =
            unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
        // SAFETY: a flag of a description of ours.
        if unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(last_errno());
        }
        let read = reopen(&theirs, libc::O_RDONLY | libc::O_NONBLOCK)?;
        let channel = EventPipe {
            kind,
            inode: inode(&theirs)?,
            queue: Mutex::new(ChannelQueue {
                write,
                read,
                sent: VecDeque::new(),
                backlog: VecDeque::new(),
            }),
        };
        Ok((channel, theirs))
    }

    /// By which the process's descriptor is recognised.
    pub(super) fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Puts an event in. False if nothing was added, because the reader has that very event and much else to read. Never blocks.
    pub(super) fn push(&self, record: ChannelEvent) -> bool {
        let mut queue = self.lock();
        queue.flush(self.kind);
        if queue.sent.len() >= CROWD {
            queue.forget_read(self.kind);
            if queue.sent.len() >= CROWD && queue.sent.contains(&record) {
                return false;
            }
        }
        if !queue.backlog.is_empty() || !queue.write(self.kind, record) {
            if queue.backlog.contains(&record) {
                return false;
            }
            queue.backlog.push_back(record);
        }
        true
    }

    /// Takes out the events that `which` names: how many there were.
    pub(super) fn purge(&self, which: impl Fn(&ChannelEvent) -> bool) -> u32 {
        let mut queue = self.lock();
        let before = queue.backlog.len();
        queue.backlog.retain(|record| !which(record));
        let mut removed = before - queue.backlog.len();
        queue.forget_read(self.kind);
        if queue.sent.iter().any(&which) {
            let unread = queue.take_all(self.kind);
            for record in unread {
                if which(&record) {
                    removed += 1;
                } else if !queue.write(self.kind, record) {
                    // As much fits as was there before; if not, it keeps its place in the row.
                    queue.backlog.push_front(record);
                }
            }
        }
        queue.flush(self.kind);
        removed as u32
    }

    fn lock(&self) -> MutexGuard<'_, ChannelQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChannelQueue {
    /// Writes one event; false if there is no room.
    fn write(&mut self, kind: ChannelKind, record: ChannelEvent) -> bool {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&record.element.to_ne_bytes());
        bytes[8..12].copy_from_slice(&record.kind.to_ne_bytes());
        let length = kind.bytes();
        // SAFETY: the bytes are of this function, and there are at least so many.
        let written = unsafe { libc::write(self.write.as_raw_fd(), bytes.as_ptr().cast(), length) };
        // A pipe takes so few bytes whole or not at all.
        let done = written == length as isize;
        if done {
            self.sent.push_back(record);
        }
        done
    }

    fn flush(&mut self, kind: ChannelKind) {
        while let Some(record) = self.backlog.front().copied() {
            if !self.write(kind, record) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Drops from `sent` what the process has read.
    fn forget_read(&mut self, kind: ChannelKind) {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the call writes an int.
        if unsafe { libc::ioctl(self.read.as_raw_fd(), libc::FIONREAD, &raw mut bytes) } != 0 {
            return;
        }
        let unread = (bytes.max(0) as usize).div_ceil(kind.bytes());
        let read = self.sent.len().saturating_sub(unread);
        self.sent.drain(..read);
    }

    /// Everything that is unread, out of the pipe.
    fn take_all(&mut self, kind: ChannelKind) -> Vec<ChannelEvent> {
        let mut records = Vec::new();
        let mut bytes = [0u8; 4096];
        loop {
            // SAFETY: the buffer is of this function.
            let read = unsafe {
                libc::read(
                    self.read.as_raw_fd(),
                    bytes.as_mut_ptr().cast(),
                    bytes.len(),
                )
            };
            let Some(read) = usize::try_from(read).ok().filter(|read| *read > 0) else {
                break;
            };
            for record in bytes[..read.min(bytes.len())].chunks_exact(kind.bytes()) {
                records.push(match kind {
                    ChannelKind::Completions => ChannelEvent {
                        element: CompEventDesc::read(record).cq_handle,
                        kind: 0,
                    },
                    ChannelKind::AsyncEvents => {
                        let event = AsyncEventDesc::read(record);
                        ChannelEvent {
                            element: event.element,
                            kind: event.event_type,
                        }
                    }
                });
            }
        }
        self.sent.clear();
        records
    }
}

/// A description of its own of the file that a descriptor is open on.
pub(super) fn reopen(descriptor: &OwnedFd, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}\0", descriptor.as_raw_fd());
    // SAFETY: the path ends with a zero.
    let opened = unsafe { libc::open(path.as_ptr().cast(), flags | libc::O_CLOEXEC) };
    if opened < 0 {
        return Err(last_errno());
    }
    // SAFETY: the call succeeded, and no other code has the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

/// `st_dev` and `st_ino`.
pub(super) fn inode(descriptor: &OwnedFd) -> Result<(u64, u64), Errno> {
    // SAFETY: all zeros are a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is of this function.
    if unsafe { libc::fstat(descriptor.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(last_errno());
    }
    Ok((stat.st_dev, stat.st_ino))
}

pub(super) fn last_errno() -> Errno {
    io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    fn record(element: u64) -> ChannelEvent {
        ChannelEvent { element, kind: 0 }
    }

    fn next(file: &mut File) -> u64 {
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn events_come_in_order_and_what_is_purged_does_not() {
        let (channel, theirs) = EventPipe::new(ChannelKind::Completions).unwrap();
        assert_eq!(inode(&theirs).unwrap(), channel.inode());
        let mut file = File::from(theirs);
        for element in [1, 2, 1, 3, 1] {
            assert!(channel.push(record(element)));
        }
        assert_eq!(next(&mut file), 1);
        assert_eq!(channel.purge(|it| it.element == 1), 2);
        assert_eq!(channel.purge(|it| it.element == 1), 0);
        assert_eq!((next(&mut file), next(&mut file)), (2, 3));
        assert!(channel.push(record(4)));
        assert_eq!(next(&mut file), 4);
    }

    #[test]
    fn asynchronous_events_have_a_type() {
        let (channel, theirs) = EventPipe::new(ChannelKind::AsyncEvents).unwrap();
        let mut file = File::from(theirs);
        assert!(channel.push(ChannelEvent {
            element: 7,
            kind: 3
        }));
        assert!(channel.push(ChannelEvent {
            element: 7,
            kind: 4
        }));
        assert_eq!(channel.purge(|it| it.kind == 3), 1);
        let mut bytes = [0; 16];
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, *b"\x07\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0");
    }

    #[test]
    fn slow_reader_loses_no_wake_up_and_costs_no_memory() {
        let (channel, theirs) = EventPipe::new(ChannelKind::AsyncEvents).unwrap();
        let mut pushed = 0;
        for element in 0..100_000 {
            pushed += u32::from(channel.push(record(element % 6_000)));
        }
        let unread = {
            let queue = channel.lock();
            queue.sent.len() + queue.backlog.len()
        };
        assert_eq!(unread, pushed as usize);
        assert!((6_000..8_000).contains(&unread), "{unread}");
        let mut seen = std::collections::HashSet::new();
        let mut file = File::from(theirs);
        for _ in 0..pushed {
            let mut bytes = [0; 16];
            file.read_exact(&mut bytes).unwrap();
            seen.insert(u64::from_ne_bytes(*bytes.first_chunk().unwrap()));
            channel.lock().flush(ChannelKind::AsyncEvents);
        }
        assert_eq!(seen.len(), 6_000);
        assert_eq!(channel.purge(|_| true), 0);
    }
}
