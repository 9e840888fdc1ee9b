//! Protection: memory regions, their keys, and the check of every access.

use crate::soft::packet::Span;

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

#[derive(Debug)]
struct MemoryRegion {
    key: u32,
    pd: u32,
    base: usize,
    len_bytes: u64,
    access: Access,
}

/// The table of registered memory. A key is `slot << 8 | generation`: a key of a region that is gone stays invalid until
/// its slot was used 255 times more.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    slots: Vec<Option<MemoryRegion>>,
    generations: Vec<u8>,
    free: Vec<usize>,
}

/// Keys are 24 bits of slot above 8 bits of generation.
const MAX_REGIONS: usize = 1 << 24;

impl Keys {
    /// Registers `len_bytes` at the address `base`, which is also its I/O address. `None` when the table is full.
    pub(crate) fn register(
        &mut self,
        pd: u32,
        base: usize,
        len_bytes: u64,
        access: Access,
    ) -> Option<u32> {
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
        self.slots[slot] = Some(MemoryRegion {
            key,
            pd,
            base,
            len_bytes,
            access,
        });
        Some(key)
    }

    /// Takes a region out; its key is invalid from now on. Whether it was there.
    pub(crate) fn deregister(&mut self, key: u32) -> bool {
        let slot = (key >> 8) as usize;
        match self.slots.get_mut(slot) {
            Some(entry) if entry.as_ref().is_some_and(|region| region.key == key) => {
                *entry = None;
                self.free.push(slot);
                true
            }
            _ => false,
        }
    }

    /// The address of `len_bytes` at `addr` under `key`, if `pd` may do `need` there. Nothing is ever refused for a length
    /// of zero, as in verbs: no byte is touched.
    #[inline]
    pub(crate) fn resolve(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len_bytes: u64,
        need: Access,
    ) -> Result<*mut u8, Refused> {
        if len_bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let Some(Some(region)) = self.slots.get((key >> 8) as usize) else {
            return Err(Refused);
        };
        let offset = addr.wrapping_sub(region.base as u64);
        let fits = offset < region.len_bytes && len_bytes <= region.len_bytes - offset;
        if region.key == key && region.pd == pd && fits && region.access.contains(need) {
            Ok(addr as usize as *mut u8)
        } else {
            Err(Refused)
        }
    }

    /// [`Keys::resolve`] of a span.
    pub(crate) fn resolve_span(
        &self,
        span: &Span,
        pd: u32,
        need: Access,
    ) -> Result<*mut u8, Refused> {
        self.resolve(span.lkey, pd, span.addr, u64::from(span.len_bytes), need)
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
        let get = |k, pd, addr, len, need| keys.resolve(k, pd, addr, len, need).map(|p| p as usize);
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
}
