//! Memory windows: keys that open a part of a region, for as long as they are bound to it.

use super::{Access, Accessor, KeyEntry, KeyKind, Keys, Refused, slot_of};
use crate::device::space::{Space, SpaceAddress};

/// What a memory window opens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding {
    /// The key of the region.
    pub(crate) region: u32,
    /// The first byte, as the region's iova counts, and the length; nothing is a window that opens nothing.
    pub(crate) addr: u64,
    pub(crate) len_bytes: u64,
    /// The address by which peers name the first byte.
    pub(crate) iova: u64,
    pub(crate) access: Access,
}

impl Keys {
    /// A window of type 1 or 2 that opens nothing yet. `None` when the table is full.
    pub(crate) fn add_window(&mut self, pd: u32, kind: u8) -> Option<u32> {
        self.add(KeyEntry {
            key: 0,
            pd,
            start: SpaceAddress {
                space: Space::LOCAL,
                addr: 0,
            },
            len_bytes: 0,
            iova: 0,
            access: Access::LOCAL_READ,
            qpn: 0,
            kind: KeyKind::Window { kind, to: None },
        })
    }

    /// Removes a window; the low 8 bits of the key are ignored. Returns whether it existed.
    pub(crate) fn remove_window(&mut self, key: u32) -> bool {
        match self.at_slot_of_mut(key) {
            Some(entry) if entry.is_window() => {
                let key = entry.key;
                self.deregister(key)
            }
            _ => false,
        }
    }

    /// Binds a window: from now on it is known by `new_key`, which differs from `key` in the low 8 bits only. A window of type
    /// 2 opens for the queue pair that bound it alone, and can be bound again only when it was invalidated.
    ///
    /// # Errors
    /// [`Refused`] if `key` is no window of this kind, is of another domain, or is bound; if the region does not exist, is of another domain, or does
    /// not allow windows, this range or this access. Nothing has changed then.
    pub(crate) fn bind(
        &mut self,
        key: u32,
        new_key: u32,
        by: Accessor,
        binding: &Binding,
    ) -> Result<(), Refused> {
        let window = *self.at_slot_of_mut(key).ok_or(Refused)?;
        let KeyKind::Window { kind, to: old } = window.kind else {
            return Err(Refused);
        };
        let same = window.key == key && window.pd == by.pd && key >> 8 == new_key >> 8;
        if !same || (kind == 2 && old.is_some()) {
            return Err(Refused);
        }
        let mut bound = KeyEntry {
            key: new_key,
            qpn: if kind == 2 { by.qpn } else { 0 },
            len_bytes: 0,
            kind: KeyKind::Window { kind, to: None },
            ..window
        };
        if binding.len_bytes > 0 {
            let slot = slot_of(binding.region);
            let start = self.resolve(
                binding.region,
                by.pd,
                binding.addr,
                binding.len_bytes,
                Access::LOCAL_READ,
            )?;
            let region = self.at_slot_of_mut(binding.region).ok_or(Refused)?;
            let writes = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
            let needs_write = binding.access.bits() & writes != 0;
            if needs_write && !region.access.contains(Access::LOCAL_WRITE) {
                return Err(Refused);
            }
            match &mut region.kind {
                KeyKind::Region {
                    bound,
                    windows: true,
                } => *bound += 1,
                _ => return Err(Refused),
            }
            bound = KeyEntry {
                start,
                len_bytes: binding.len_bytes,
                iova: binding.iova,
                access: binding.access.without(Access::LOCAL_WRITE),
                kind: KeyKind::Window {
                    kind,
                    to: Some(slot),
                },
                ..bound
            };
        }
        self.unbind_from(old);
        if let Some(entry) = self.at_slot_of_mut(key) {
            *entry = bound;
        }
        Ok(())
    }

    /// Closes a bound window of type 2, for a request of its own side (LOCAL_INV) or of the peer (SEND_INVAL).
    ///
    /// # Errors
    /// [`Refused`] if the key is not one of a window that this queue pair has bound.
    pub(crate) fn invalidate(&mut self, key: u32, by: Accessor) -> Result<(), Refused> {
        let entry = self.at_slot_of_mut(key).ok_or(Refused)?;
        let KeyKind::Window {
            kind: 2,
            to: to @ Some(_),
        } = entry.kind
        else {
            return Err(Refused);
        };
        if entry.key != key || entry.pd != by.pd || entry.qpn != by.qpn {
            return Err(Refused);
        }
        entry.len_bytes = 0;
        entry.qpn = 0;
        entry.kind = KeyKind::Window { kind: 2, to: None };
        self.unbind_from(to);
        Ok(())
    }

    pub(super) fn unbind_from(&mut self, region: Option<usize>) {
        if let Some(Some(entry)) = region.and_then(|slot| self.slots.get_mut(slot))
            && let KeyKind::Region { bound, .. } = &mut entry.kind
        {
            *bound = bound.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryRange;
    use super::*;
    use crate::device::packet::KeyedSpan;

    const OWNER: Accessor = Accessor { pd: 7, qpn: 100 };

    fn region_with_windows(keys: &mut Keys, access: Access, windows: bool) -> u32 {
        let start = SpaceAddress {
            space: Space::LOCAL,
            addr: 0x1000,
        };
        keys.add_region(&MemoryRange {
            pd: 7,
            start,
            len_bytes: 0x100,
            iova: 0x5000,
            access,
            windows,
        })
        .unwrap()
    }

    fn binding(region: u32) -> Binding {
        Binding {
            region,
            addr: 0x5010,
            len_bytes: 0x20,
            iova: 0,
            access: Access::REMOTE_WRITE,
        }
    }

    #[test]
    fn window_allows_access_to_its_bound_range() {
        let mut keys = Keys::default();
        let region = region_with_windows(&mut keys, Access::LOCAL_WRITE, true);
        let write = |keys: &Keys, key, by, addr| {
            keys.resolve_remote(key, by, addr, 8, Access::REMOTE_WRITE)
                .map(|place| place.addr)
        };
        for kind in [1, 2] {
            let window = keys.add_window(7, kind).unwrap();
            assert_eq!(write(&keys, window, OWNER, 0), Err(Refused));
            let key = window ^ 0x55;
            keys.bind(window, key, OWNER, &binding(region)).unwrap();
            assert_eq!(write(&keys, key, OWNER, 0x18), Ok(0x1028));
            assert_eq!(write(&keys, key, OWNER, 0x19), Err(Refused));
            assert_eq!(write(&keys, window, OWNER, 0), Err(Refused), "the old key");
            let other = Accessor { qpn: 101, ..OWNER };
            assert_eq!(write(&keys, key, other, 0).is_ok(), kind == 1);
            let span = KeyedSpan {
                lkey: key,
                len_bytes: 8,
                addr: 0,
            };
            let local = keys.resolve_span(&span, 7, Access::LOCAL_READ);
            assert_eq!(local, Err(Refused), "no local key");
            assert!(!keys.deregister(region), "in use");
            let again = keys.bind(key, key ^ 1, OWNER, &binding(region));
            assert_eq!(again.is_ok(), kind == 1, "type 2 is invalidated first");
            if kind == 1 {
                assert_eq!(keys.invalidate(key ^ 1, OWNER), Err(Refused));
                let nothing = Binding {
                    len_bytes: 0,
                    ..binding(region)
                };
                keys.bind(key ^ 1, key, OWNER, &nothing).unwrap();
            } else {
                assert_eq!(keys.invalidate(key, other), Err(Refused));
                assert_eq!(keys.invalidate(window, OWNER), Err(Refused));
                assert_eq!(keys.invalidate(key, OWNER), Ok(()));
                assert_eq!(keys.invalidate(key, OWNER), Err(Refused));
                keys.bind(key, window, OWNER, &binding(region)).unwrap();
            }
            assert!(keys.remove_window(window));
            assert!(!keys.remove_window(window));
        }
        assert!(keys.deregister(region));
    }

    #[test]
    fn bind_without_the_region_s_permission_is_refused() {
        let mut keys = Keys::default();
        let good = region_with_windows(&mut keys, Access::LOCAL_WRITE, true);
        let closed = region_with_windows(&mut keys, Access::LOCAL_WRITE, false);
        let constant = region_with_windows(&mut keys, Access::LOCAL_READ, true);
        let window = keys.add_window(7, 2).unwrap();
        let other = keys.add_window(8, 2).unwrap();
        let far = Binding {
            addr: 0x50f0,
            ..binding(good)
        };
        for bad in [binding(closed), binding(constant), binding(good ^ 1), far] {
            assert_eq!(keys.bind(window, window, OWNER, &bad), Err(Refused));
        }
        let mut bind = |key, new| keys.bind(key, new, OWNER, &binding(good));
        assert_eq!(bind(other, other), Err(Refused), "another domain");
        assert_eq!(bind(window, window ^ 0x100), Err(Refused), "another slot");
        assert_eq!(bind(window ^ 1, window), Err(Refused), "a stale key");
        assert_eq!(bind(good, good ^ 1), Err(Refused), "no window");
        assert_eq!(bind(window, window), Ok(()));
        assert!(!keys.change_region(good, &keys.region(good).unwrap()));
    }
}
