//! Gives a device's number back without the device: at the end of a process whose threads may hold the device's lock for ever.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Fabric;
use super::table;

/// Who has the table locked is about to join or to leave, which is short. If it is not, the next who joins finds out who is gone.
const PATIENCE: Duration = Duration::from_millis(20);

/// A place on a fabric, and the way to leave it.
#[derive(Debug)]
pub(crate) struct Leaver {
    path: PathBuf,
    inode: u64,
    node: u16,
    port: u64,
}

impl Leaver {
    pub(super) fn of(fabric: &Fabric) -> Leaver {
        Leaver {
            path: fabric.path.clone(),
            inode: fabric.inode,
            node: fabric.node,
            port: fabric.address.port,
        }
    }

    /// Leaves: for others the device is not there any more. The last one to go removes the table. Waits for nobody for long.
    pub(crate) fn leave(&self) {
        if let Some(locked) = table::lock_existing(&self.path, PATIENCE)
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
