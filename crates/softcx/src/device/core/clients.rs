//! Ownership of objects by the kernel driver's clients: numbers are looked up here before anything is done to the object.

use std::sync::Arc;

use super::DeviceCore;
use super::client_objects::ClientObjects;
use crate::device::client::{Errno, EventSink};
use crate::device::dma::ClockWord;

impl DeviceCore {
    /// A new client.
    pub(crate) fn add_client(&mut self, events: Arc<dyn EventSink>) -> u32 {
        self.clients.add(events)
    }

    /// Releases everything of a client.
    pub(crate) fn remove_client(&mut self, client: u32) {
        let Ok(owner) = self.clients.get(client) else {
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
        self.clients.remove(client);
    }

    /// Sets the clock in a page of the client's at each turn from now on.
    pub(crate) fn show_clock(&mut self, client: u32, clock: ClockWord) {
        self.clients.show_clock(client, clock);
    }

    pub(super) fn owner(&self, client: u32) -> Result<&ClientObjects, Errno> {
        self.clients.get(client)
    }

    pub(super) fn owner_mut(&mut self, client: u32) -> Result<&mut ClientObjects, Errno> {
        self.clients.get_mut(client)
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
