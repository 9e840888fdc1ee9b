//! Protection: memory regions, their keys, and the check of every access.

mod windows;

pub(crate) use self::windows::Binding;
use crate::device::packet::KeyedSpan;
use crate::device::space::{Space, SpaceAddress};
pub use doorbell_wire::verbs::Access;

/// Why an access was refused. The requester and the responder see the same refusal under different names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// A range of memory to be registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryRange {
    pub(crate) pd: u32,
    /// Whose memory it is, and where it lies there.
    pub(crate) start: SpaceAddress,
    pub(crate) len_bytes: u64,
    /// The address by which work requests name the first byte.
    pub(crate) iova: u64,
    pub(crate) access: Access,
    /// Memory windows may be bound to it.
    pub(crate) windows: bool,
}

/// A queue pair as the table sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accessor {
    pub(crate) pd: u32,
    pub(crate) qpn: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyKind {
    /// With the number of windows that are bound to it.
    Region { bound: u32, windows: bool },
    /// Type 1 or 2, and the slot of the region that it is bound to.
    Window { kind: u8, to: Option<usize> },
}

#[derive(Debug, Clone, Copy)]
struct KeyEntry {
    key: u32,
    pd: u32,
    start: SpaceAddress,
    len_bytes: u64,
    iova: u64,
    access: Access,
    /// The only queue pair that may use it, 0 for all.
    qpn: u32,
    kind: KeyKind,
}

impl KeyEntry {
    /// A region to which no window is bound.
    fn of(key: u32, region: &MemoryRange) -> KeyEntry {
        KeyEntry {
            key,
            pd: region.pd,
            start: region.start,
            len_bytes: region.len_bytes,
            iova: region.iova,
            access: region.access,
            qpn: 0,
            kind: KeyKind::Region {
                bound: 0,
                windows: region.windows,
            },
        }
    }

    fn is_window(&self) -> bool {
        matches!(self.kind, KeyKind::Window { .. })
    }
}

/// The table of registered memory. A key is `slot << 8 | generation`: a key of a region that is gone stays invalid until
/// its slot was used 255 times more. A window's low 8 bits are the driver's to choose with each binding.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    slots: Vec<Option<KeyEntry>>,
    generations: Vec<u8>,
    free: Vec<usize>,
}

/// Keys are 24 bits of slot above 8 bits of generation.
const MAX_REGIONS: usize = 1 << 24;

#[inline]
fn slot_of(key: u32) -> usize {
    (key >> 8) as usize
}

impl Keys {
    /// Registers `len_bytes` at the address `base` of this process, which is also its I/O address. `None` when the table is
    /// full.
    pub(crate) fn register(
        &mut self,
        pd: u32,
        base: usize,
        len_bytes: u64,
        access: Access,
    ) -> Option<u32> {
        self.add_region(&MemoryRange {
            pd,
            start: SpaceAddress {
                space: Space::LOCAL,
                addr: base as u64,
            },
            len_bytes,
            iova: base as u64,
            access,
            windows: false,
        })
    }

    /// [`Keys::register`] of the memory of another device.
    pub(crate) fn register_foreign(
        &mut self,
        pd: u32,
        start: SpaceAddress,
        len_bytes: u64,
        access: Access,
    ) -> Option<u32> {
        self.add_region(&MemoryRange {
            pd,
            start,
            len_bytes,
            iova: start.addr,
            access,
            windows: false,
        })
    }

    /// Registers a region, in whatever space. `None` when the table is full.
    pub(crate) fn add_region(&mut self, region: &MemoryRange) -> Option<u32> {
        self.add(KeyEntry::of(0, region))
    }

    fn add(&mut self, entry: KeyEntry) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < MAX_REGIONS => {
                self.slots.push(None);
                self.generations.push(0);
                self.slots.len() - 1
            }
            None => return None,
        };
        // Generation 0 is skipped, so that no key is ever 0 and a slot's first key is not guessed by a zeroed WQE.
        self.generations[slot] = self.generations[slot].checked_add(1).unwrap_or(1);
        let key = (slot as u32) << 8 | u32::from(self.generations[slot]);
        self.slots[slot] = Some(KeyEntry { key, ..entry });
        Some(key)
    }

    /// What has the slot of a key, whatever the key's low 8 bits.
    #[inline]
    fn at_slot_of(&self, key: u32) -> Option<&KeyEntry> {
        self.slots.get(slot_of(key))?.as_ref()
    }

    fn at_slot_of_mut(&mut self, key: u32) -> Option<&mut KeyEntry> {
        self.slots.get_mut(slot_of(key))?.as_mut()
    }

    /// Whether a key names memory of another process, or of another device.
    pub(crate) fn is_far(&self, key: u32) -> bool {
        self.at_slot_of(key)
            .is_some_and(|entry| !entry.start.space.is_local())
    }

    /// Takes a region or a window out; its key is invalid from now on. Whether it was there, and no window is bound to it.
    pub(crate) fn deregister(&mut self, key: u32) -> bool {
        let to = match self.at_slot_of_mut(key) {
            Some(entry) if entry.key == key => match entry.kind {
                KeyKind::Region { bound: 0, .. } => None,
                KeyKind::Region { .. } => return false,
                KeyKind::Window { to, .. } => to,
            },
            _ => return false,
        };
        self.unbind_from(to);
        let slot = slot_of(key);
        self.slots[slot] = None;
        self.free.push(slot);
        true
    }

    /// The region of that key.
    pub(crate) fn region(&self, key: u32) -> Option<MemoryRange> {
        let entry = self.at_slot_of(key)?;
        let KeyKind::Region { windows, .. } = entry.kind else {
            return None;
        };
        (entry.key == key).then_some(MemoryRange {
            pd: entry.pd,
            start: entry.start,
            len_bytes: entry.len_bytes,
            iova: entry.iova,
            access: entry.access,
            windows,
        })
    }

    /// Puts other memory or rights under a key. `false`, and nothing has changed, if windows are bound to the region.
    pub(crate) fn change_region(&mut self, key: u32, region: &MemoryRange) -> bool {
        let slot = slot_of(key);
        let free = |entry: &KeyEntry| {
            entry.key == key && matches!(entry.kind, KeyKind::Region { bound: 0, .. })
        };
        if !self.at_slot_of(key).is_some_and(free) {
            return false;
        }
        self.slots[slot] = Some(KeyEntry::of(key, region));
        true
    }

    /// Takes a region out by its slot, for an owner that is gone.
    pub(crate) fn remove_region(&mut self, key: u32) -> bool {
        match self.at_slot_of_mut(key) {
            Some(entry) if !entry.is_window() => {
                let key = entry.key;
                self.deregister(key)
            }
            _ => false,
        }
    }

    /// The place of `len_bytes` at `addr` under `key`, if `pd` may do `need` there. Nothing is ever refused for a length
    /// of zero, as in verbs: no byte is touched.
    ///
    /// Windows are accepted here. They give no local right to write, and [`Keys::resolve_remote`] or [`Keys::resolve_span`] has checked remote
    /// reads.
    #[inline]
    pub(crate) fn resolve(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len_bytes: u64,
        need: Access,
    ) -> Result<SpaceAddress, Refused> {
        self.entry(key, pd, addr, len_bytes, need)
            .map(|(place, _)| place)
    }

    #[inline]
    fn entry(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len_bytes: u64,
        need: Access,
    ) -> Result<(SpaceAddress, Option<&KeyEntry>), Refused> {
        if len_bytes == 0 {
            return Ok((SpaceAddress::local(std::ptr::null()), None));
        }
        let entry = self.at_slot_of(key).ok_or(Refused)?;
        let offset = addr.wrapping_sub(entry.iova);
        let fits = offset < entry.len_bytes && len_bytes <= entry.len_bytes - offset;
        if entry.key == key && entry.pd == pd && fits && entry.access.contains(need) {
            Ok((entry.start.behind(offset), Some(entry)))
        } else {
            Err(Refused)
        }
    }

    /// [`Keys::resolve`] for a peer of the queue pair: a window of type 2 opens for the one that bound it alone.
    #[inline]
    pub(crate) fn resolve_remote(
        &self,
        key: u32,
        by: Accessor,
        addr: u64,
        len_bytes: u64,
        need: Access,
    ) -> Result<SpaceAddress, Refused> {
        match self.entry(key, by.pd, addr, len_bytes, need)? {
            (_, Some(entry)) if entry.qpn != 0 && entry.qpn != by.qpn => Err(Refused),
            (place, _) => Ok(place),
        }
    }

    /// [`Keys::resolve`] of a span that a work request names: a window is no local key.
    pub(crate) fn resolve_span(
        &self,
        span: &KeyedSpan,
        pd: u32,
        need: Access,
    ) -> Result<SpaceAddress, Refused> {
        let len_bytes = u64::from(span.len_bytes);
        match self.entry(span.lkey, pd, span.addr, len_bytes, need)? {
            (_, Some(entry)) if entry.is_window() => Err(Refused),
            (place, _) => Ok(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_edge_of_a_region_is_checked() {
        let mut keys = Keys::default();
        let key = keys
            .register(7, 0x1000, 0x100, Access::REMOTE_READ)
            .unwrap();
        let get = |k, pd, addr, len, need| keys.resolve(k, pd, addr, len, need).map(|p| p.addr);
        assert_eq!(get(key, 7, 0x1000, 0x100, Access::REMOTE_READ), Ok(0x1000));
        assert_eq!(get(key, 7, 0x10ff, 1, Access::LOCAL_READ), Ok(0x10ff));
        assert_eq!(get(key, 7, 0x1000, 0x101, Access::LOCAL_READ), Err(Refused));
        assert_eq!(get(key, 7, 0xfff, 1, Access::LOCAL_READ), Err(Refused));
        assert_eq!(get(key, 7, 0x1100, 1, Access::LOCAL_READ), Err(Refused));
        assert_eq!(get(key, 7, u64::MAX, 2, Access::LOCAL_READ), Err(Refused));
        assert_eq!(
            get(key, 7, 0x1001, u64::MAX, Access::LOCAL_READ),
            Err(Refused)
        );
        assert_eq!(get(key, 8, 0x1000, 1, Access::LOCAL_READ), Err(Refused));
        assert_eq!(get(key, 7, 0x1000, 1, Access::REMOTE_WRITE), Err(Refused));
        assert_eq!(get(key ^ 1, 7, 0x1000, 1, Access::LOCAL_READ), Err(Refused));
        assert_eq!(
            get(0xffff_ff01, 7, 0x1000, 1, Access::LOCAL_READ),
            Err(Refused)
        );
        assert_eq!(
            get(0xbad, 9, 0x5, 0, Access::ALL),
            Ok(0),
            "zero bytes are never refused"
        );
    }

    #[test]
    fn stale_key_does_not_access_the_slot_s_next_region() {
        let mut keys = Keys::default();
        let old = keys.register(1, 0x1000, 0x100, Access::ALL).unwrap();
        assert!(keys.deregister(old));
        assert!(!keys.deregister(old));
        let new = keys.register(1, 0x1000, 0x100, Access::ALL).unwrap();
        assert_ne!(old, new);
        assert_eq!(
            keys.resolve(old, 1, 0x1000, 1, Access::LOCAL_READ),
            Err(Refused)
        );
        assert!(keys.resolve(new, 1, 0x1000, 1, Access::LOCAL_READ).is_ok());
        assert!(keys.region(old).is_none() && keys.region(new).is_some());
    }
}
