//! Reports when the last reference to a descriptor that was handed out is gone: duplicates, forked copies and mappings included.
//!
//! The descriptor is an open file description of its own on a memfd that the device keeps under another one. It has a shared
//! `flock`, which ends with the description and with nothing else. So the description is closed if an exclusive lock of the file succeeds. inotify
//! reports when to try. Counting the events of inotify would not suffice: it merges equal events.
#![allow(unsafe_code)] // inotify and flock

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::caller::Inode;

#[derive(Debug)]
struct WatchedDescriptor {
    inode: Inode,
    /// The file under the other description.
    file: OwnedFd,
    /// Some description of it was closed.
    in_doubt: bool,
}

/// Pauses between attempts to lock a file after an event. The kernel reports a close before it drops the lock, usually a few instructions earlier.
/// If all attempts fail, another description of the file was probably closed. The file is tried again at each later event.
const PAUSES_MS: [u64; 6] = [0, 1, 2, 4, 8, 16];

impl WatchedDescriptor {
    fn is_closed(&self) -> bool {
        lock(self.file.as_fd(), libc::LOCK_EX | libc::LOCK_NB).is_ok()
    }
}

fn lock(descriptor: BorrowedFd<'_>, how: i32) -> io::Result<()> {
    loop {
        // SAFETY: an open descriptor.
        if unsafe { libc::flock(descriptor.as_raw_fd(), how) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Watches descriptors.
#[derive(Debug)]
pub(super) struct DescriptorWatch {
    inotify: OwnedFd,
    watched: Mutex<HashMap<i32, WatchedDescriptor>>,
}

impl DescriptorWatch {
    /// `flags`: `IN_NONBLOCK`, or 0 for a reader that waits.
    pub(super) fn new(flags: i32) -> io::Result<DescriptorWatch> {
        // SAFETY: takes flags only.
        let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(DescriptorWatch {
            // SAFETY: just opened, with no other owner.
            inotify: unsafe { OwnedFd::from_raw_fd(fd) },
            watched: Mutex::default(),
        })
    }

    /// Watches a descriptor that is to be handed out. `file` is the same file, under another description.
    pub(super) fn watch(
        &self,
        descriptor: BorrowedFd<'_>,
        file: OwnedFd,
        inode: Inode,
    ) -> io::Result<()> {
        lock(descriptor, libc::LOCK_SH | libc::LOCK_NB)?;
        let path = CString::new(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
        let mut watched = self.watched();
        // SAFETY: a terminated path.
        let watch = unsafe {
            libc::inotify_add_watch(self.inotify.as_raw_fd(), path.as_ptr(), libc::IN_CLOSE)
        };
        if watch < 0 {
            return Err(io::Error::last_os_error());
        }
        watched.insert(
            watch,
            WatchedDescriptor {
                inode,
                file,
                in_doubt: false,
            },
        );
        Ok(())
    }

    /// Looks no more for the end of this one.
    pub(super) fn forget(&self, inode: Inode) {
        let mut watched = self.watched();
        watched.retain(|_, entry| entry.inode != inode);
    }

    /// Reads the events of inotify and returns the descriptors whose last reference is gone. Blocks until there is an event, unless
    /// [`DescriptorWatch::new`] was called with `IN_NONBLOCK`.
    pub(super) fn closed(&self) -> Vec<Inode> {
        let mut bytes = [0u8; 1 << 14];
        // SAFETY: a buffer with its length.
        let len = unsafe {
            libc::read(
                self.inotify.as_raw_fd(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
            )
        };
        let mut left = bytes.get(..len.max(0) as usize).unwrap_or_default();
        let mut fresh = HashSet::new();
        while let Some((watch, mask, rest)) = event(left) {
            left = rest;
            let mut watched = self.watched();
            if mask & libc::IN_Q_OVERFLOW != 0 {
                // Events are lost: any of them may have been.
                watched.values_mut().for_each(|it| it.in_doubt = true);
                fresh.extend(watched.keys().copied());
            } else if mask & libc::IN_CLOSE != 0
                && let Some(entry) = watched.get_mut(&watch)
            {
                entry.in_doubt = true;
                fresh.insert(watch);
            }
        }
        let mut closed = Vec::new();
        for pause_ms in PAUSES_MS {
            let is_over = |it: &WatchedDescriptor| it.in_doubt && it.is_closed();
            closed.extend(self.watched().extract_if(|_, it| is_over(it)));
            if fresh
                .iter()
                .all(|watch| !self.watched().contains_key(watch))
            {
                break;
            }
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
        closed.into_iter().map(|(_, it)| it.inode).collect()
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<i32, WatchedDescriptor>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
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

impl AsFd for DescriptorWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    impl DescriptorWatch {
        fn is_idle(&self) -> bool {
            crate::doors::poll::wait([(self.as_fd(), libc::POLLIN)], 0).unwrap() == [0]
        }
    }

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

    /// What is closed, as soon as something is: a test in another thread that forks holds every descriptor until its child has begun.
    fn soon_closed(watch: &DescriptorWatch) -> Vec<Inode> {
        let started = std::time::Instant::now();
        loop {
            let closed = watch.closed();
            if !closed.is_empty() || started.elapsed() > std::time::Duration::from_secs(60) {
                return closed;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn close_is_reported_after_the_last_duplicate_closes() {
        let watch = DescriptorWatch::new(libc::IN_NONBLOCK).unwrap();
        let (kept, given, inode) = reopened();
        watch
            .watch(given.as_fd(), kept.try_clone().unwrap().into(), inode)
            .unwrap();
        let duplicate = given.try_clone().unwrap();
        drop(given);
        assert_eq!(watch.closed(), []);
        // Other openers: several at once, which close one by one.
        let look = || File::open(format!("/proc/self/fd/{}", duplicate.as_raw_fd())).unwrap();
        for opener in [look(), look(), look()] {
            drop(opener);
            assert_eq!(watch.closed(), []);
        }
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
        assert_eq!(soon_closed(&watch), [inode]);
        assert_eq!(watch.closed(), []);
        drop(kept);
    }

    #[test]
    fn lost_events_lose_nothing() {
        let watch = DescriptorWatch::new(libc::IN_NONBLOCK).unwrap();
        let (kept, given, inode) = reopened();
        watch
            .watch(given.as_fd(), kept.try_clone().unwrap().into(), inode)
            .unwrap();
        let (others_kept, others, others_inode) = reopened();
        let file = others_kept.try_clone().unwrap().into();
        watch.watch(others.as_fd(), file, others_inode).unwrap();
        // Alike events are one: the two take turns.
        let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        for _ in 0..limit.trim().parse::<usize>().unwrap() {
            for file in [&kept, &others_kept] {
                drop(File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap());
            }
        }
        drop(given);
        let mut closed = soon_closed(&watch);
        while !watch.is_idle() {
            closed.extend(watch.closed());
        }
        assert_eq!(closed, [inode]);
        drop(others);
        assert_eq!(soon_closed(&watch), [others_inode]);
    }

    #[test]
    fn an_unwatched_descriptor_reports_no_close() {
        let watch = DescriptorWatch::new(libc::IN_NONBLOCK).unwrap();
        let (kept, given, inode) = reopened();
        watch
            .watch(given.as_fd(), kept.try_clone().unwrap().into(), inode)
            .unwrap();
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
