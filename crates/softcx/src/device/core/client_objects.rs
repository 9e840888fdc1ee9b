//! What a client has made, by number.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::client::{Errno, EventSink};

/// What one context of a process has.
#[derive(Debug)]
pub(super) struct ClientObjects {
    pub(super) events: Arc<dyn EventSink>,
    /// Protection domains, with the number of objects in each.
    pub(super) pds: HashMap<u32, u32>,
    /// Regions and windows: the domain of each, by the slot of its key.
    pub(super) keys: HashMap<u32, u32>,
    /// Queue pairs: slots by number.
    pub(super) qps: HashMap<u32, usize>,
    /// Slots of the others. Their numbers are the same.
    pub(super) cqs: Vec<usize>,
    pub(super) srqs: Vec<usize>,
    pub(super) uars: Vec<usize>,
}

/// The slot of that number in one of an owner's lists.
pub(super) fn own(list: &[usize], number: u32) -> Result<usize, Errno> {
    let slot = number as usize;
    list.contains(&slot).then_some(slot).ok_or(libc::EINVAL)
}

/// The slot of that number in one of an owner's lists, and what is in it.
pub(super) fn owned<'a, T>(
    list: &[usize],
    slots: &'a mut [Option<T>],
    number: u32,
) -> Result<(usize, &'a mut T), Errno> {
    let slot = own(list, number)?;
    let object = slots.get_mut(slot).and_then(Option::as_mut);
    object.map(|object| (slot, object)).ok_or(libc::EINVAL)
}
