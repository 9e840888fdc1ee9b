//! Gives a device's number back without the device: at the end of a process whose threads may hold the device's lock for ever.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Fabric;
use super::table;

/// How long to wait for the lock of the table. A process holds it only while it joins or leaves. If the wait fails, the next process that joins
/// finds that this one is gone.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);

/// A place on a fabric, and the way to leave it.
#[derive(Debug)]
pub(crate) struct NodeReleaser {
    path: PathBuf,
    inode: u64,
    node: u16,
    port: u64,
}

impl NodeReleaser {
    pub(super) fn of(fabric: &Fabric) -> NodeReleaser {
        NodeReleaser {
            path: fabric.path.clone(),
            inode: fabric.inode,
            node: fabric.node,
            port: fabric.address.port,
        }
    }

    /// Leaves the fabric: other devices no longer find this one. The last device removes the table. Waits for a lock for 20 ms at most.
    pub(crate) fn release(&self) {
        if let Some(locked) = table::lock_existing(&self.path, LOCK_TIMEOUT)
            && locked.inode() == Some(self.inode)
            && let Ok(shared) = table::map(&locked, &self.path)
        {
            if let Some(entry) = shared.entry(self.node) {
                // Not if it was taken over.
                let (mine, gone) = (self.port, 0);
                let (done, failed) = (Ordering::AcqRel, Ordering::Relaxed);
                let _ = entry.port.compare_exchange(mine, gone, done, failed);
            }
            if shared.is_deserted() {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }
}
