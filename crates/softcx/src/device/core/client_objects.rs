//! What a client has made, by number.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::client::{DeviceEvent, Errno, EventSink};
use crate::device::dma::ClockWord;
use crate::device::pinned::{PinnedObject, PinnedPages};

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
    /// What its objects have pinned, if the function limits that.
    pub(super) pinned: HashMap<PinnedObject, PinnedPages>,
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

/// All clients of the device.
#[derive(Debug, Default)]
pub(super) struct ClientRegistry {
    clients: HashMap<u32, ClientObjects>,
    /// The number of the last one.
    last: u32,
    /// Where clients see the clock.
    clocks: Vec<(u32, ClockWord)>,
}

impl ClientRegistry {
    /// A new client: its number.
    pub(super) fn add(&mut self, events: Arc<dyn EventSink>) -> u32 {
        self.last += 1;
        let objects = ClientObjects {
            events,
            pds: HashMap::new(),
            keys: HashMap::new(),
            pinned: HashMap::new(),
            qps: HashMap::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            uars: Vec::new(),
        };
        self.clients.insert(self.last, objects);
        self.last
    }

    pub(super) fn get(&self, client: u32) -> Result<&ClientObjects, Errno> {
        self.clients.get(&client).ok_or(libc::EINVAL)
    }

    pub(super) fn get_mut(&mut self, client: u32) -> Result<&mut ClientObjects, Errno> {
        self.clients.get_mut(&client).ok_or(libc::EINVAL)
    }

    pub(super) fn remove(&mut self, client: u32) {
        self.clocks.retain(|(owner, _)| *owner != client);
        self.clients.remove(&client);
    }

    /// Sends every client an event of the device.
    pub(super) fn notify_all(&self, event: DeviceEvent) {
        for objects in self.clients.values() {
            objects.events.event(event);
        }
    }

    /// Sets the clock in a page of the client's at each turn from now on.
    pub(super) fn show_clock(&mut self, client: u32, clock: ClockWord) {
        self.clocks.push((client, clock));
    }

    pub(super) fn set_clocks(&self, now_ns: u64) {
        for (_, clock) in &self.clocks {
            clock.set(now_ns);
        }
    }
}
