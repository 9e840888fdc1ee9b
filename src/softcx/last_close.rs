//! Tells when the last reference to a descriptor that was handed out is gone: duplicates, forked copies and mappings included.
//!
//! The descriptor is an open file description of its own on a memfd that the device keeps under another one. inotify reports
//! each opening and each end of such a description.
#![allow(unsafe_code)] // inotify

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use super::caller::Inode;

#[derive(Debug)]
struct Watched {
    inode: Inode,
    /// Descriptions that are open; whoever looks into `/proc/PID/fd` by opening it makes one more for a moment.
    open: u32,
}

/// Watches descriptors.
#[derive(Debug)]
pub(super) struct LastClose {
    inotify: OwnedFd,
    watched: Mutex<HashMap<i32, Watched>>,
}

impl LastClose {
    /// `flags`: `IN_NONBLOCK`, or 0 for a reader that waits.
    pub(super) fn new(flags: i32) -> io::Result<LastClose> {
        // SAFETY: takes flags only.
        let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(LastClose {
            // SAFETY: just opened, and nobody else's.
            inotify: unsafe { OwnedFd::from_raw_fd(fd) },
            watched: Mutex::default(),
        })
    }

    /// Watches a descriptor whose description is the only one so far, beside those of the memfd itself.
    pub(super) fn watch(&self, descriptor: BorrowedFd<'_>, inode: Inode) -> io::Result<()> {
        let path = CString::new(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a terminated path.
        let watch = unsafe {
            libc::inotify_add_watch(
                self.inotify.as_raw_fd(),
                path.as_ptr(),
                libc::IN_OPEN | libc::IN_CLOSE,
            )
        };
        if watch < 0 {
            return Err(io::Error::last_os_error());
        }
        watched.insert(watch, Watched { inode, open: 1 });
        Ok(())
    }

    /// Looks no more for the end of this one.
    pub(super) fn forget(&self, inode: Inode) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|_, entry| entry.inode != inode);
    }

    /// Takes what has happened; blocks until something has, unless told not to by [`LastClose::new`]. The descriptors whose last
    /// reference is gone.
    pub(super) fn closed(&self) -> Vec<Inode> {
        let mut bytes = [0u8; 4096];
        // SAFETY: a buffer with its length.
        let len = unsafe {
            libc::read(
                self.inotify.as_raw_fd(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
            )
        };
        let mut left = bytes.get(..len.max(0) as usize).unwrap_or_default();
        let mut closed = Vec::new();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((watch, mask, rest)) = event(left) {
            left = rest;
            let Some(entry) = watched.get_mut(&watch) else {
                continue;
            };
            if mask & libc::IN_OPEN != 0 {
                entry.open += 1;
            }
            if mask & libc::IN_CLOSE != 0 {
                entry.open = entry.open.saturating_sub(1);
                if entry.open == 0 {
                    closed.push(entry.inode);
                    watched.remove(&watch);
                }
            }
        }
        closed
    }
}

/// Splits off the first event: its watch and its mask.
fn event(bytes: &[u8]) -> Option<(i32, u32, &[u8])> {
    let word = |at: usize| {
        bytes
            .get(at..)?
            .first_chunk()
            .map(|b| u32::from_ne_bytes(*b))
    };
    let name_bytes = word(offset_of!(libc::inotify_event, len))? as usize;
    let rest = bytes.get(size_of::<libc::inotify_event>() + name_bytes..)?;
    let watch = word(offset_of!(libc::inotify_event, wd))? as i32;
    Some((watch, word(offset_of!(libc::inotify_event, mask))?, rest))
}

impl AsFd for LastClose {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    fn reopened() -> (File, File, Inode) {
        // SAFETY: a terminated name.
        let fd = unsafe { libc::memfd_create(c"last-close".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just opened.
        let kept = unsafe { File::from_raw_fd(fd) };
        kept.set_len(8192).unwrap();
        let given = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{fd}"))
            .unwrap();
        let found = kept.metadata().unwrap();
        (kept, given, (found.dev(), found.ino()))
    }

    #[test]
    fn only_the_last_reference_counts() {
        let watch = LastClose::new(libc::IN_NONBLOCK).unwrap();
        let (kept, given, inode) = reopened();
        watch.watch(given.as_fd(), inode).unwrap();
        let duplicate = given.try_clone().unwrap();
        drop(given);
        assert_eq!(watch.closed(), []);
        // A stranger looks at it.
        drop(File::open(format!("/proc/self/fd/{}", duplicate.as_raw_fd())).unwrap());
        assert_eq!(watch.closed(), []);
        // SAFETY: a fresh mapping.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_WRITE,
                libc::MAP_SHARED,
                duplicate.as_raw_fd(),
                0,
            )
        };
        drop(duplicate);
        assert_eq!(watch.closed(), [], "a mapping is a reference");
        // SAFETY: mapped above.
        unsafe { libc::munmap(map, 4096) };
        assert_eq!(watch.closed(), [inode]);
        assert_eq!(watch.closed(), []);
        drop(kept);
    }

    #[test]
    fn a_forgotten_one_is_not_reported() {
        let watch = LastClose::new(libc::IN_NONBLOCK).unwrap();
        let (_kept, given, inode) = reopened();
        watch.watch(given.as_fd(), inode).unwrap();
        watch.forget(inode);
        drop(given);
        assert_eq!(watch.closed(), []);
    }

    #[test]
    fn torn_events_are_no_events() {
        assert!(event(&[0; 15]).is_none());
        let mut one = [0; 16];
        one[12] = 1;
        assert!(event(&one).is_none());
    }
}
