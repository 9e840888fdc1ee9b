//! Memory that processes have pinned for devices, and the limit to it, as `ib_umem_get` of the kernel counts it: in pages, for each process, regions and
//! rings of queues. Pages of doorbell records are not counted.

use std::sync::{Mutex, PoisonError};

use crate::device::capability::Capability;
use crate::device::client::Errno;
use crate::device::core::Need;
use crate::device::space::Space;

/// Bytes of a page, as the kernel's checks of this device have it.
const PAGE_BYTES: u64 = 4096;

/// How many pages each process has pinned, for all devices of this process.
static PINNED: Mutex<Vec<(Space, u64)>> = Mutex::new(Vec::new());

/// An object whose memory is pinned, by its number; a region by the slot of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PinnedObject {
    Region(u32),
    Cq(u32),
    Srq(u32),
    Qp(u32),
}

/// Pages that a process has pinned, until this is dropped.
#[derive(Debug)]
pub(crate) struct PinnedPages {
    space: Space,
    pages: u64,
}

impl PinnedPages {
    /// Pins the pages of a range.
    ///
    /// # Errors
    /// EPERM if the process may lock no memory at all, ENOMEM if it would have more than its limit. A process with `CAP_IPC_LOCK` has no limit.
    pub(crate) fn of(space: Space, start: u64, len_bytes: u64) -> Result<PinnedPages, Errno> {
        let pages = (start % PAGE_BYTES)
            .saturating_add(len_bytes)
            .div_ceil(PAGE_BYTES);
        let limit = match space.lock_limit_bytes() {
            Some(_) if space.has_capability(Capability::IpcLock) => u64::MAX,
            Some(0) => return Err(libc::EPERM),
            Some(bytes) => bytes / PAGE_BYTES,
            None => u64::MAX,
        };
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match pinned.iter().position(|(of, _)| *of == space) {
            Some(at) => at,
            None => {
                pinned.push((space, 0));
                pinned.len() - 1
            }
        };
        let total = pinned[at].1.saturating_add(pages);
        if total > limit {
            pinned.retain(|(_, pages)| *pages > 0);
            return Err(libc::ENOMEM);
        }
        pinned[at].1 = total;
        Ok(PinnedPages { space, pages })
    }

    /// Pins the rings of a queue, which lie in one buffer, one behind the other.
    ///
    /// # Errors
    /// As [`PinnedPages::of`].
    pub(crate) fn of_rings(space: Space, rings: &[Need]) -> Result<PinnedPages, Errno> {
        let rings = rings.iter().filter(|ring| ring.len_bytes > 0);
        let start = rings.clone().map(|ring| ring.addr).min();
        let len_bytes = rings.map(|ring| ring.len_bytes).sum();
        PinnedPages::of(space, start.unwrap_or(0), len_bytes)
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        for (space, pages) in pinned.iter_mut() {
            if *space == self.space {
                *pages = pages.saturating_sub(self.pages);
            }
        }
        pinned.retain(|(_, pages)| *pages > 0);
    }
}

impl Space {
    /// How many bytes the process may lock (`RLIMIT_MEMLOCK`, the soft limit); `None` if there is no limit, or if the process is gone.
    fn lock_limit_bytes(self) -> Option<u64> {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.pid())).ok()?;
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory"))?;
        line.split_whitespace().next()?.parse().ok()
    }
}
