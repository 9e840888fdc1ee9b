//! The objects of a context, by the handles that the process knows.

use std::sync::Arc;

use crate::device::client::Errno;
use crate::doors::events::Completions;
use crate::doors::limits;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MrObject {
    pub(super) key: u32,
    pub(super) pd: u32,
    pub(super) len_bytes: u64,
    pub(super) iova: u64,
}

#[derive(Debug, Clone)]
pub(super) struct CqObject {
    pub(super) cqn: u32,
    pub(super) cqes: u32,
    pub(super) completions: Option<Arc<Completions>>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct SrqObject {
    pub(super) srqn: u32,
    /// Entries, a power of two; one of them is never used.
    pub(super) wqes: u32,
    pub(super) max_sge: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct QpObject {
    pub(super) qpn: u32,
    pub(super) recv_wqes: u32,
    pub(super) recv_sge: u32,
    pub(super) signal_all: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct UarObject {
    /// Its number in the device, and that of its page.
    pub(super) uar: u32,
    pub(super) page: u32,
}

/// An object of a context.
#[derive(Debug, Clone)]
pub(super) enum Object {
    Pd(u32),
    Mr(MrObject),
    Mw(u32),
    Cq(CqObject),
    Srq(SrqObject),
    Qp(QpObject),
    /// The domain it is in; the rest of an address handle is in the process.
    Ah(u32),
    Uar(UarObject),
}

impl Object {
    /// Which kind it is, and how many of them one context may have.
    fn kind(&self) -> (usize, u32) {
        match self {
            Object::Pd(_) => (0, limits::PDS),
            Object::Mr(_) => (1, limits::MRS),
            Object::Mw(_) => (2, limits::MWS),
            Object::Cq(_) => (3, limits::CQS),
            Object::Srq(_) => (4, limits::SRQS),
            Object::Qp(_) => (5, limits::QPS),
            Object::Ah(_) => (6, limits::AHS),
            Object::Uar(_) => (7, limits::UARS),
        }
    }
}

/// Objects by handle. The lowest free one is taken next.
#[derive(Debug, Default)]
pub(super) struct Objects {
    slots: Vec<Option<Object>>,
    /// No free slot is below.
    free_from: usize,
    /// How many there are of each kind.
    counts: [u32; 8],
}

impl Objects {
    /// ENOMEM when there are too many of the kind.
    pub(super) fn insert(&mut self, object: Object) -> Result<u32, Errno> {
        let (kind, limit) = object.kind();
        let count = self.counts.get_mut(kind).ok_or(libc::ENOMEM)?;
        if *count >= limit {
            return Err(libc::ENOMEM);
        }
        *count += 1;
        let at = self
            .slots
            .iter()
            .skip(self.free_from)
            .position(Option::is_none)
            .map_or(self.slots.len(), |at| at + self.free_from);
        match self.slots.get_mut(at) {
            Some(slot) => *slot = Some(object),
            None => self.slots.push(Some(object)),
        }
        self.free_from = at + 1;
        Ok(at as u32)
    }

    pub(super) fn get(&self, handle: u32) -> Option<&Object> {
        self.slots.get(handle as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, handle: u32) -> Option<&mut Object> {
        self.slots.get_mut(handle as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, handle: u32) -> Option<Object> {
        let object = self.slots.get_mut(handle as usize)?.take();
        if let Some(object) = &object {
            self.free_from = self.free_from.min(handle as usize);
            if let Some(count) = self.counts.get_mut(object.kind().0) {
                *count -= 1;
            }
        }
        object
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Object> {
        self.slots.iter().flatten()
    }
}

/// A lookup that fails with EINVAL when the handle is unknown or of something else, as in the kernel.
macro_rules! lookups {
    ($($lookup:ident: $kind:ident -> $value:ty;)*) => {
        impl Objects {
            $(
                #[doc = concat!("The ", stringify!($kind), " of that handle, or EINVAL.")]
                pub(super) fn $lookup(&self, handle: u32) -> Result<$value, Errno> {
                    match self.get(handle) {
                        Some(Object::$kind(it)) => Ok(it.clone()),
                        _ => Err(libc::EINVAL),
                    }
                }
            )*
        }
    };
}
lookups! {
    pd: Pd -> u32;
    mr: Mr -> MrObject;
    mw: Mw -> u32;
    cq: Cq -> CqObject;
    srq: Srq -> SrqObject;
    qp: Qp -> QpObject;
    ah: Ah -> u32;
    uar: Uar -> UarObject;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn handles_are_found_by_kind_and_used_again() {
        let mut objects = Objects::default();
        assert_eq!(objects.insert(Object::Pd(10)), Ok(0));
        assert_eq!(objects.insert(Object::Mw(11)), Ok(1));
        assert_eq!(objects.insert(Object::Pd(12)), Ok(2));
        assert_eq!(objects.pd(2), Ok(12));
        assert_eq!(objects.pd(1), Err(libc::EINVAL));
        assert_eq!(objects.mw(3), Err(libc::EINVAL));
        assert!(objects.remove(1).is_some());
        assert!(objects.remove(1).is_none());
        assert_eq!(objects.insert(Object::Pd(13)), Ok(1));
        assert_eq!(objects.insert(Object::Pd(14)), Ok(3));
        assert_eq!(objects.remove(u32::MAX).map(|_| ()), None);
    }

    #[test]
    fn object_table_returns_enomem_at_its_limit() {
        let mut objects = Objects::default();
        for _ in 0..limits::PDS {
            objects.insert(Object::Pd(0)).unwrap();
        }
        assert_eq!(objects.insert(Object::Pd(0)), Err(libc::ENOMEM));
        assert_eq!(objects.insert(Object::Mw(0)), Ok(limits::PDS));
        objects.remove(77);
        assert_eq!(objects.insert(Object::Pd(0)), Ok(77));
    }
}
