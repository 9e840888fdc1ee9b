//! Who of the kernel driver's clients has what: numbers are looked up here before anything is done to the object.

use std::collections::HashMap;
use std::sync::Arc;

use super::DeviceCore;
use super::client_objects::ClientObjects;
use crate::device::client::{DeviceEvent, Errno, EventSink};
use crate::device::dma::ClockWord;

impl DeviceCore {
    /// A new client.
    pub(crate) fn add_client(&mut self, events: Arc<dyn EventSink>) -> u32 {
        self.next_client += 1;
        let owner = ClientObjects {
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
    pub(super) fn tell_clients(&self, event: DeviceEvent) {
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

    pub(super) fn owner(&self, client: u32) -> Result<&ClientObjects, Errno> {
        self.clients.get(&client).ok_or(libc::EINVAL)
    }

    pub(super) fn owner_mut(&mut self, client: u32) -> Result<&mut ClientObjects, Errno> {
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
