//! Registered memory and memory windows of clients.

use super::DeviceCore;
use crate::device::client::{Errno, MrChange, MrRange};
use crate::device::keys::{Access, MemoryRange};
use crate::device::pinned::{PinnedObject, PinnedPages};
use crate::device::space::{Space, SpaceAddress};

/// Flags of `ibv_access_flags` besides the rights that [`Access`] has.
mod flag {
    pub(super) const MW_BIND: u32 = 1 << 4;
    pub(super) const ZERO_BASED: u32 = 1 << 5;
    pub(super) const HUGETLB: u32 = 1 << 7;
    /// What a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
    pub(super) const OPTIONAL: u32 = 0x3ff0_0000;
}

/// What `ibv_access_flags` ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights {
    access: Access,
    windows: bool,
    zero_based: bool,
}

impl Rights {
    /// # Errors
    /// EOPNOTSUPP for what the device does not have (paging on demand), EINVAL for rights that need one another.
    pub(crate) fn parse(flags: u32) -> Result<Rights, Errno> {
        let known =
            Access::ALL.bits() | flag::MW_BIND | flag::ZERO_BASED | flag::HUGETLB | flag::OPTIONAL;
        let access = Access::from_bits(flags & Access::ALL.bits()).ok_or(libc::EINVAL)?;
        if flags & !known != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let writes = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
        if flags & writes != 0 && !access.contains(Access::LOCAL_WRITE) {
            return Err(libc::EINVAL);
        }
        Ok(Rights {
            access,
            windows: flags & flag::MW_BIND != 0,
            zero_based: flags & flag::ZERO_BASED != 0,
        })
    }

    /// Whether the memory itself must be writable: what the kernel pins it for.
    pub(crate) fn writes(self) -> bool {
        self.windows || self.access.bits() & !Access::REMOTE_READ.bits() != 0
    }
}

impl DeviceCore {
    /// The range was looked at already.
    pub(crate) fn reg_mr(
        &mut self,
        client: u32,
        space: Space,
        pd: u32,
        range: MrRange,
        rights: Rights,
    ) -> Result<u32, Errno> {
        self.enter_pd(client, pd)?;
        let key = self.parts.keys.add_region(&MemoryRange {
            pd,
            start: SpaceAddress {
                space,
                addr: range.start,
            },
            len_bytes: range.len_bytes,
            iova: if rights.zero_based { 0 } else { range.iova },
            access: rights.access,
            windows: rights.windows,
        });
        self.keep_key(client, pd, key)
    }

    fn keep_key(&mut self, client: u32, pd: u32, key: Option<u32>) -> Result<u32, Errno> {
        let Some(key) = key else {
            self.leave_pd(client, pd);
            return Err(libc::ENOMEM);
        };
        self.owner_mut(client)?.keys.insert(key >> 8, pd);
        Ok(key)
    }

    /// The domain of a key of this client.
    fn key_pd(&self, client: u32, key: u32) -> Result<u32, Errno> {
        let pd = self.owner(client)?.keys.get(&(key >> 8));
        pd.copied().ok_or(libc::EINVAL)
    }

    /// A region of this client, with its domain.
    fn client_region(&self, client: u32, key: u32) -> Result<(u32, MemoryRange), Errno> {
        let pd = self.key_pd(client, key)?;
        let region = self.parts.keys.region(key).ok_or(libc::EINVAL)?;
        Ok((pd, region))
    }

    /// The range was looked at already.
    pub(crate) fn rereg_mr(
        &mut self,
        client: u32,
        space: Space,
        key: u32,
        change: &MrChange,
        rights: Option<Rights>,
    ) -> Result<u32, Errno> {
        let (old_pd, mut region) = self.client_region(client, key)?;
        let new_pd = change.pd.unwrap_or(old_pd);
        if !self.owner(client)?.pds.contains_key(&new_pd) {
            return Err(libc::EINVAL);
        }
        region.pd = new_pd;
        if let Some(range) = change.range {
            region.start = SpaceAddress {
                space,
                addr: range.start,
            };
            (region.len_bytes, region.iova) = (range.len_bytes, range.iova);
        }
        if let Some(rights) = rights {
            (region.access, region.windows) = (rights.access, rights.windows);
            if rights.zero_based {
                region.iova = 0;
            }
        }
        if !self.parts.keys.change_region(key, &region) {
            return Err(libc::EBUSY);
        }
        self.enter_pd(client, new_pd)?;
        self.leave_pd(client, old_pd);
        self.owner_mut(client)?.keys.insert(key >> 8, new_pd);
        Ok(key)
    }

    /// The range of a region, and whether the memory must be writable.
    pub(crate) fn mr_range(&self, client: u32, key: u32) -> Result<(MrRange, bool), Errno> {
        let (_, region) = self.client_region(client, key)?;
        let range = MrRange {
            start: region.start.addr,
            len_bytes: region.len_bytes,
            iova: region.iova,
        };
        let rights = Rights {
            access: region.access,
            windows: region.windows,
            zero_based: false,
        };
        Ok((range, rights.writes()))
    }

    pub(crate) fn dereg_mr(&mut self, client: u32, key: u32) -> Result<(), Errno> {
        let (pd, _) = self.client_region(client, key)?;
        if !self.parts.keys.deregister(key) {
            return Err(libc::EBUSY);
        }
        self.forget_key(client, key, pd)
    }

    pub(crate) fn alloc_mw(&mut self, client: u32, pd: u32, kind: u8) -> Result<u32, Errno> {
        if !matches!(kind, 1 | 2) {
            return Err(libc::EINVAL);
        }
        self.enter_pd(client, pd)?;
        let key = self.parts.keys.add_window(pd, kind);
        self.keep_key(client, pd, key)
    }

    /// The key may be the one that allocation gave, or the one of the last binding.
    pub(crate) fn dealloc_mw(&mut self, client: u32, key: u32) -> Result<(), Errno> {
        let pd = self.key_pd(client, key)?;
        if !self.parts.keys.remove_window(key) {
            return Err(libc::EINVAL);
        }
        self.forget_key(client, key, pd)
    }

    /// Keeps what an object of the client has pinned, in place of what it had.
    pub(crate) fn keep_pinned(
        &mut self,
        client: u32,
        object: PinnedObject,
        pages: Option<PinnedPages>,
    ) {
        if let (Some(pages), Ok(owner)) = (pages, self.owner_mut(client)) {
            owner.pinned.insert(object, pages);
        }
    }

    /// The object is gone.
    pub(crate) fn unpin(&mut self, client: u32, object: PinnedObject) {
        if let Ok(owner) = self.owner_mut(client) {
            owner.pinned.remove(&object);
        }
    }

    fn forget_key(&mut self, client: u32, key: u32, pd: u32) -> Result<(), Errno> {
        self.owner_mut(client)?.keys.remove(&(key >> 8));
        self.leave_pd(client, pd);
        Ok(())
    }

    /// Takes out all that a client has registered, windows first.
    pub(super) fn remove_keys(&mut self, client: u32) {
        let Ok(owner) = self.owner_mut(client) else {
            return;
        };
        let slots: Vec<u32> = std::mem::take(&mut owner.keys).into_keys().collect();
        for slot in &slots {
            self.parts.keys.remove_window(slot << 8);
        }
        for slot in slots {
            self.parts.keys.remove_region(slot << 8);
        }
    }
}
