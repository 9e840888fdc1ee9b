//! Protection: memory regions, their keys, and the check of every access.

use crate::soft::packet::Span;
use crate::soft::space::{Place, Space};

/// Access rights of a region, with the values of verbs' `ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(u32);

impl Access {
    /// Local reading only.
    pub const LOCAL_READ: Access = Access(0);
    /// The device may write on behalf of the local side: receives, results of reads and atomics.
    pub const LOCAL_WRITE: Access = Access(1);
    /// A peer may write.
    pub const REMOTE_WRITE: Access = Access(2);
    /// A peer may read.
    pub const REMOTE_READ: Access = Access(4);
    /// A peer may run atomics.
    pub const REMOTE_ATOMIC: Access = Access(8);
    /// All of them.
    pub const ALL: Access = Access(15);

    /// The rights with verbs' bits; unknown bits give `None`.
    pub fn from_bits(bits: u32) -> Option<Access> {
        (bits & !Access::ALL.0 == 0).then_some(Access(bits))
    }

    /// Verbs' bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other` is allowed.
    pub fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// Why an access was refused. The requester and the responder see the same refusal under different names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// A range of memory to be registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) pd: u32,
    /// Whose memory it is, and where it lies there.
    pub(crate) start: Place,
    pub(crate) len_bytes: u64,
    /// The address by which work requests name the first byte.
    pub(crate) iova: u64,
    pub(crate) access: Access,
    /// Memory windows may be bound to it.
    pub(crate) windows: bool,
}

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

/// A queue pair as the table sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accessor {
    pub(crate) pd: u32,
    pub(crate) qpn: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// With the number of windows that are bound to it.
    Region { bound: u32, windows: bool },
    /// Type 1 or 2, and the slot of the region that it is bound to.
    Window { kind: u8, to: Option<usize> },
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u32,
    pd: u32,
    start: Place,
    len_bytes: u64,
    iova: u64,
    access: Access,
    /// The only queue pair that may use it, 0 for all.
    qpn: u32,
    kind: Kind,
}

impl Entry {
    fn is_window(&self) -> bool {
        matches!(self.kind, Kind::Window { .. })
    }
}

/// The table of registered memory. A key is `slot << 8 | generation`: a key of a region that is gone stays invalid until
/// its slot was used 255 times more. A window's low 8 bits are the driver's to choose with each binding.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    slots: Vec<Option<Entry>>,
    generations: Vec<u8>,
    free: Vec<usize>,
}

/// Keys are 24 bits of slot above 8 bits of generation.
const MAX_REGIONS: usize = 1 << 24;

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
        self.add_region(&Region {
            pd,
            start: Place {
                space: Space::LOCAL,
                addr: base as u64,
            },
            len_bytes,
            iova: base as u64,
            access,
            windows: false,
        })
    }

    /// Registers a region, in whatever space. `None` when the table is full.
    pub(crate) fn add_region(&mut self, region: &Region) -> Option<u32> {
        self.add(Entry {
            key: 0,
            pd: region.pd,
            start: region.start,
            len_bytes: region.len_bytes,
            iova: region.iova,
            access: region.access,
            qpn: 0,
            kind: Kind::Region {
                bound: 0,
                windows: region.windows,
            },
        })
    }

    /// A window of type 1 or 2 that opens nothing yet. `None` when the table is full.
    pub(crate) fn add_window(&mut self, pd: u32, kind: u8) -> Option<u32> {
        self.add(Entry {
            key: 0,
            pd,
            start: Place {
                space: Space::LOCAL,
                addr: 0,
            },
            len_bytes: 0,
            iova: 0,
            access: Access::LOCAL_READ,
            qpn: 0,
            kind: Kind::Window { kind, to: None },
        })
    }

    fn add(&mut self, entry: Entry) -> Option<u32> {
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
        self.slots[slot] = Some(Entry { key, ..entry });
        Some(key)
    }

    fn entry_mut(&mut self, key: u32) -> Option<&mut Entry> {
        self.slots.get_mut((key >> 8) as usize)?.as_mut()
    }

    /// Whether a key names memory of another process.
    pub(crate) fn is_far(&self, key: u32) -> bool {
        let entry = self.slots.get((key >> 8) as usize);
        matches!(entry, Some(Some(entry)) if !entry.start.space.is_local())
    }

    /// Takes a region or a window out; its key is invalid from now on. Whether it was there, and no window is bound to it.
    pub(crate) fn deregister(&mut self, key: u32) -> bool {
        let to = match self.entry_mut(key) {
            Some(entry) if entry.key == key => match entry.kind {
                Kind::Region { bound: 0, .. } => None,
                Kind::Region { .. } => return false,
                Kind::Window { to, .. } => to,
            },
            _ => return false,
        };
        self.unbind_from(to);
        let slot = (key >> 8) as usize;
        self.slots[slot] = None;
        self.free.push(slot);
        true
    }

    /// The region of that key.
    pub(crate) fn region(&self, key: u32) -> Option<Region> {
        let entry = self.slots.get((key >> 8) as usize)?.as_ref()?;
        let Kind::Region { windows, .. } = entry.kind else {
            return None;
        };
        (entry.key == key).then_some(Region {
            pd: entry.pd,
            start: entry.start,
            len_bytes: entry.len_bytes,
            iova: entry.iova,
            access: entry.access,
            windows,
        })
    }

    /// Puts other memory or rights under a key. `false`, and nothing has changed, if windows are bound to the region.
    pub(crate) fn change_region(&mut self, key: u32, region: &Region) -> bool {
        let Some(entry) = self.entry_mut(key).filter(|entry| entry.key == key) else {
            return false;
        };
        if !matches!(entry.kind, Kind::Region { bound: 0, .. }) {
            return false;
        }
        *entry = Entry {
            key,
            pd: region.pd,
            start: region.start,
            len_bytes: region.len_bytes,
            iova: region.iova,
            access: region.access,
            qpn: 0,
            kind: Kind::Region {
                bound: 0,
                windows: region.windows,
            },
        };
        true
    }

    /// Takes a window out, whatever its low 8 bits are now. Whether it was there.
    pub(crate) fn remove_window(&mut self, key: u32) -> bool {
        match self.entry_mut(key) {
            Some(entry) if entry.is_window() => {
                let key = entry.key;
                self.deregister(key)
            }
            _ => false,
        }
    }

    /// Takes a region out by its slot, for an owner that is gone.
    pub(crate) fn remove_region(&mut self, key: u32) -> bool {
        match self.entry_mut(key) {
            Some(entry) if !entry.is_window() => {
                let key = entry.key;
                self.deregister(key)
            }
            _ => false,
        }
    }

    fn unbind_from(&mut self, region: Option<usize>) {
        if let Some(Some(entry)) = region.and_then(|slot| self.slots.get_mut(slot))
            && let Kind::Region { bound, .. } = &mut entry.kind
        {
            *bound = bound.saturating_sub(1);
        }
    }

    /// Binds a window: from now on it is known by `new_key`, which differs from `key` in the low 8 bits only. A window of type
    /// 2 opens for the queue pair that bound it alone, and can be bound again only when it was invalidated.
    ///
    /// # Errors
    /// [`Refused`] if it is no such window, of another domain, or bound; if the region is none, of another domain, does not
    /// allow windows, or not this range or access. Nothing has changed then.
    pub(crate) fn bind(
        &mut self,
        key: u32,
        new_key: u32,
        by: Accessor,
        binding: &Binding,
    ) -> Result<(), Refused> {
        let window = *self.entry_mut(key).ok_or(Refused)?;
        let Kind::Window { kind, to: old } = window.kind else {
            return Err(Refused);
        };
        let same = window.key == key && window.pd == by.pd && key >> 8 == new_key >> 8;
        if !same || (kind == 2 && old.is_some()) {
            return Err(Refused);
        }
        let mut bound = Entry {
            key: new_key,
            qpn: if kind == 2 { by.qpn } else { 0 },
            len_bytes: 0,
            kind: Kind::Window { kind, to: None },
            ..window
        };
        if binding.len_bytes > 0 {
            let slot = (binding.region >> 8) as usize;
            let start = self.resolve(
                binding.region,
                by.pd,
                binding.addr,
                binding.len_bytes,
                Access::LOCAL_READ,
            )?;
            let Some(Some(region)) = self.slots.get_mut(slot) else {
                return Err(Refused);
            };
            let writes = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
            let needs_write = binding.access.bits() & writes != 0;
            if needs_write && !region.access.contains(Access::LOCAL_WRITE) {
                return Err(Refused);
            }
            match &mut region.kind {
                Kind::Region {
                    bound,
                    windows: true,
                } => *bound += 1,
                _ => return Err(Refused),
            }
            bound = Entry {
                start,
                len_bytes: binding.len_bytes,
                iova: binding.iova,
                access: Access(binding.access.bits() & !Access::LOCAL_WRITE.bits()),
                kind: Kind::Window {
                    kind,
                    to: Some(slot),
                },
                ..bound
            };
        }
        self.unbind_from(old);
        if let Some(entry) = self.entry_mut(key) {
            *entry = bound;
        }
        Ok(())
    }

    /// Closes a bound window of type 2, for a request of its own side (LOCAL_INV) or of the peer (SEND_INVAL).
    ///
    /// # Errors
    /// [`Refused`] if the key is not one of a window that this queue pair has bound.
    pub(crate) fn invalidate(&mut self, key: u32, by: Accessor) -> Result<(), Refused> {
        let entry = self.entry_mut(key).ok_or(Refused)?;
        let Kind::Window {
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
        entry.kind = Kind::Window { kind: 2, to: None };
        self.unbind_from(to);
        Ok(())
    }

    /// The place of `len_bytes` at `addr` under `key`, if `pd` may do `need` there. Nothing is ever refused for a length
    /// of zero, as in verbs: no byte is touched.
    ///
    /// Windows are let pass: they give no local right to write, and of who may read by them [`Keys::resolve_remote`] has
    /// judged, or [`Keys::resolve_span`].
    #[inline]
    pub(crate) fn resolve(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len_bytes: u64,
        need: Access,
    ) -> Result<Place, Refused> {
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
    ) -> Result<(Place, Option<&Entry>), Refused> {
        if len_bytes == 0 {
            return Ok((Place::local(std::ptr::null()), None));
        }
        let Some(Some(entry)) = self.slots.get((key >> 8) as usize) else {
            return Err(Refused);
        };
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
    ) -> Result<Place, Refused> {
        match self.entry(key, by.pd, addr, len_bytes, need)? {
            (_, Some(entry)) if entry.qpn != 0 && entry.qpn != by.qpn => Err(Refused),
            (place, _) => Ok(place),
        }
    }

    /// [`Keys::resolve`] of a span that a work request names: a window is no local key.
    pub(crate) fn resolve_span(
        &self,
        span: &Span,
        pd: u32,
        need: Access,
    ) -> Result<Place, Refused> {
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
    fn a_stale_key_does_not_open_the_slot_s_next_region() {
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
    }

    #[test]
    fn access_bits_are_those_of_verbs() {
        assert_eq!((Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).bits(), 9);
        assert_eq!(Access::from_bits(16), None);
        assert_eq!(
            Access::from_bits(6),
            Some(Access::REMOTE_WRITE | Access::REMOTE_READ)
        );
    }

    const OWNER: Accessor = Accessor { pd: 7, qpn: 100 };

    fn region_with_windows(keys: &mut Keys, access: Access, windows: bool) -> u32 {
        let start = Place {
            space: Space::LOCAL,
            addr: 0x1000,
        };
        keys.add_region(&Region {
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
    fn a_window_opens_what_it_is_bound_to() {
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
            let stranger = Accessor { qpn: 101, ..OWNER };
            assert_eq!(write(&keys, key, stranger, 0).is_ok(), kind == 1);
            let span = Span {
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
                assert_eq!(keys.invalidate(key, stranger), Err(Refused));
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
    fn a_window_is_not_bound_to_what_does_not_allow_it() {
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
