//! Who of the kernel driver's clients has what: numbers are looked up here before anything is done to the object.

use std::collections::HashMap;
use std::sync::Arc;

use super::Core;
use crate::device::client::{Errno, Event, EventSink};
use crate::device::dma::ClockWord;

/// What one context of a process has.
#[derive(Debug)]
pub(super) struct Owner {
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

impl Core {
    /// A new client.
    pub(crate) fn add_client(&mut self, events: Arc<dyn EventSink>) -> u32 {
        self.next_client += 1;
        let owner = Owner {
            events,
            pds: HashMap::new(),
            keys: HashMap::new(),
            qps: HashMap::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            uars: Vec::new(),
        };
        self.clients.insert(self.next_client, owner);
        self.next_client
    }

    /// Tells every client of what concerns the device.
    pub(super) fn tell_clients(&self, event: Event) {
        for owner in self.clients.values() {
            owner.events.event(event);
        }
    }

    /// Releases everything of a client.
    pub(crate) fn remove_client(&mut self, client: u32) {
        let Some(owner) = self.clients.get(&client) else {
            return;
        };
        let (qps, srqs): (Vec<_>, Vec<_>) =
            (owner.qps.keys().copied().collect(), owner.srqs.clone());
        let (cqs, uars) = (owner.cqs.clone(), owner.uars.clone());
        for qpn in qps {
            let _ = self.destroy_client_qp(client, qpn);
        }
        for srq in srqs {
            let _ = self.destroy_srq(client, srq as u32);
        }
        for cq in cqs {
            let _ = self.destroy_client_cq(client, cq as u32);
        }
        self.remove_keys(client);
        for uar in uars {
            let _ = self.free_uar(client, uar as u32);
        }
        self.clocks.retain(|(owner, _)| *owner != client);
        self.clients.remove(&client);
    }

    /// Sets the clock in a page of the client's at each turn from now on.
    pub(crate) fn show_clock(&mut self, client: u32, clock: ClockWord) {
        self.clocks.push((client, clock));
    }

    pub(super) fn owner(&self, client: u32) -> Result<&Owner, Errno> {
        self.clients.get(&client).ok_or(libc::EINVAL)
    }

    pub(super) fn owner_mut(&mut self, client: u32) -> Result<&mut Owner, Errno> {
        self.clients.get_mut(&client).ok_or(libc::EINVAL)
    }

    /// As the kernel answers calls on a device that was pulled out (uverbs_ioctl.c: the device is disassociated).
    pub(super) fn check_present(&self) -> Result<(), Errno> {
        if self.gone { Err(libc::EIO) } else { Ok(()) }
    }

    pub(crate) fn alloc_pd(&mut self, client: u32) -> Result<u32, Errno> {
        self.check_present()?;
        let pd = self.create_pd();
        self.owner_mut(client)?.pds.insert(pd, 0);
        Ok(pd)
    }

    pub(crate) fn dealloc_pd(&mut self, client: u32, pd: u32) -> Result<(), Errno> {
        let pds = &mut self.owner_mut(client)?.pds;
        match pds.get(&pd) {
            Some(0) => pds.remove(&pd).map(drop).ok_or(libc::EINVAL),
            Some(_) => Err(libc::EBUSY),
            None => Err(libc::EINVAL),
        }
    }

    /// Counts an object in a domain of the client.
    pub(super) fn enter_pd(&mut self, client: u32, pd: u32) -> Result<(), Errno> {
        let uses = self.owner_mut(client)?.pds.get_mut(&pd);
        *uses.ok_or(libc::EINVAL)? += 1;
        Ok(())
    }

    pub(super) fn leave_pd(&mut self, client: u32, pd: u32) {
        if let Ok(owner) = self.owner_mut(client)
            && let Some(uses) = owner.pds.get_mut(&pd)
        {
            *uses = uses.saturating_sub(1);
        }
    }
}
