//! The open files of the connection manager in this process, as a table that is read without a lock: a signal handler may ask.

use std::sync::atomic::{AtomicU64, Ordering};

/// Files of one process. One that finds no place cannot be used.
const FILES: usize = 4096;

/// Their inodes. All of them are of one file system, that of the kernel's pipes.
#[derive(Debug)]
pub(super) struct CmFiles {
    file_system: AtomicU64,
    inodes: Box<[AtomicU64]>,
    /// Places from this one on were never used.
    end: AtomicU64,
}

impl Default for CmFiles {
    fn default() -> CmFiles {
        CmFiles {
            file_system: AtomicU64::new(0),
            inodes: (0..FILES).map(|_| AtomicU64::new(0)).collect(),
            end: AtomicU64::new(0),
        }
    }
}

impl CmFiles {
    /// Adds a file. Whether there was a place for it.
    pub(super) fn enter(&self, inode: (u64, u64)) -> bool {
        self.file_system.store(inode.0, Ordering::Relaxed);
        for (at, place) in self.inodes.iter().enumerate() {
            if place
                .compare_exchange(0, inode.1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                self.end.fetch_max(at as u64 + 1, Ordering::AcqRel);
                return true;
            }
        }
        false
    }

    /// Removes one.
    pub(super) fn leave(&self, inode: (u64, u64)) {
        for place in self.used() {
            let _ = place.compare_exchange(inode.1, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Whether it is one.
    pub(super) fn contains(&self, inode: (u64, u64)) -> bool {
        inode.0 == self.file_system.load(Ordering::Relaxed)
            && self
                .used()
                .any(|place| place.load(Ordering::Acquire) == inode.1)
    }

    fn used(&self) -> impl Iterator<Item = &AtomicU64> {
        let end = self.end.load(Ordering::Acquire) as usize;
        self.inodes.iter().take(end)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_full_takes_no_more() {
        let files = CmFiles::default();
        for inode in 1..=FILES as u64 {
            assert!(files.enter((9, inode)));
        }
        assert!(!files.enter((9, 5000)));
        assert!(files.contains((9, 7)) && !files.contains((8, 7)) && !files.contains((9, 5000)));
        files.leave((9, 7));
        assert!(!files.contains((9, 7)) && files.enter((9, 5000)));
        assert!(files.contains((9, 5000)));
    }
}
