//! Completion queues, shared receive queues and queue pairs of clients.
#![allow(unsafe_code)] // rings of a client in this process are plain memory

use super::DeviceCore;
use super::client_objects::{own, owned};
use super::objects::free_slot;
use crate::device::client::{CqParts, Errno, QpParts, SrqParts};
use crate::device::cq::{Cq, CqNotification};
use crate::device::dma::{DmaRing, RecordWord};
use crate::device::qp::{Qp, QpSetup};
use crate::device::space::{Space, SpaceAddress};
use crate::device::srq::Srq;

/// The number of the first queue. libmlx5 takes 0 for "no queue".
const FIRST: usize = 1;

impl DeviceCore {
    /// The parts were looked at already.
    pub(crate) fn create_client_cq(
        &mut self,
        client: u32,
        space: Space,
        parts: CqParts,
    ) -> Result<u32, Errno> {
        self.check_present()?;
        let owner = self.owner(client)?;
        let events = owner.events.clone();
        let uar = own(&owner.uars, parts.uar)?;
        let at = |addr| SpaceAddress { space, addr };
        let seeded = space.write(parts.record.wrapping_add(4), &[0xff; 4]);
        seeded.map_err(|_| libc::EFAULT)?;
        let len_bytes = parts.cqes as usize * parts.cqe_bytes as usize;
        // SAFETY: looked at by the caller; a process that unmaps or frees its rings while they are in use asks for a fault.
        let (ring, record, arm_record) = unsafe {
            (
                DmaRing::at(at(parts.ring), len_bytes),
                RecordWord::at(at(parts.record)),
                RecordWord::at(at(parts.record.wrapping_add(4))),
            )
        };
        let mut owned = CqNotification::new(uar, arm_record, parts.events, events);
        owned.ignore_overrun = parts.ignore_overrun;
        let mut cq = Cq::of_client(ring, parts.cqes, parts.cqe_bytes, record, owned);
        cq.set_padded(parts.padded);
        let slot = free_slot(&mut self.parts.cqs, FIRST);
        if let Some(owned) = cq.owned() {
            owned.cqn = slot as u32;
        }
        self.parts.cqs[slot] = Some(cq);
        self.owner_mut(client)?.cqs.push(slot);
        if let Some(page) = self.page_mut(uar) {
            page.cqs.push(slot);
        }
        Ok(slot as u32)
    }

    fn client_cq(&mut self, client: u32, cqn: u32) -> Result<(usize, &mut Cq), Errno> {
        let owner = self.clients.get(client)?;
        owned(&owner.cqs, &mut self.parts.cqs, cqn)
    }

    /// The ring was looked at already.
    pub(crate) fn resize_cq(
        &mut self,
        client: u32,
        space: Space,
        cqn: u32,
        ring: u64,
        cqes: u32,
        cqe_bytes: u32,
    ) -> Result<(), Errno> {
        let place = SpaceAddress { space, addr: ring };
        // SAFETY: as in `create_client_cq`.
        let ring = unsafe { DmaRing::at(place, cqes as usize * cqe_bytes as usize) };
        let (_, cq) = self.client_cq(client, cqn)?;
        cq.resize(ring, cqes, cqe_bytes)
            .then_some(())
            .ok_or(libc::EINVAL)
    }

    pub(crate) fn check_cq(&mut self, client: u32, cqn: u32) -> Result<(), Errno> {
        self.client_cq(client, cqn).map(drop)
    }

    pub(crate) fn destroy_client_cq(&mut self, client: u32, cqn: u32) -> Result<(), Errno> {
        let (slot, cq) = self.client_cq(client, cqn)?;
        let owned = cq.owned().ok_or(libc::EINVAL)?;
        if owned.users > 0 {
            return Err(libc::EBUSY);
        }
        let uar = owned.uar;
        if let Some(page) = self.page_mut(uar) {
            page.cqs.retain(|&cq| cq != slot);
        }
        self.destroy_cq(slot);
        self.owner_mut(client)?.cqs.retain(|&cq| cq != slot);
        Ok(())
    }

    fn use_cq(&mut self, slot: usize, by: i32) {
        if let Some(Some(cq)) = self.parts.cqs.get_mut(slot)
            && let Some(owned) = cq.owned()
        {
            owned.users = owned.users.saturating_add_signed(by);
        }
    }

    /// The parts were looked at already.
    pub(crate) fn create_srq(
        &mut self,
        client: u32,
        space: Space,
        parts: &SrqParts,
    ) -> Result<u32, Errno> {
        let events = self.owner(client)?.events.clone();
        self.enter_pd(client, parts.pd)?;
        let at = |addr| SpaceAddress { space, addr };
        let slot = free_slot(&mut self.parts.srqs, FIRST);
        // SAFETY: as in `create_client_cq`.
        let (ring, record) = unsafe {
            (
                DmaRing::at(at(parts.ring), (parts.wqes * parts.stride_bytes) as usize),
                RecordWord::at(at(parts.record)),
            )
        };
        self.parts.srqs[slot] = Some(Srq {
            srqn: slot as u32,
            pd: parts.pd,
            ring,
            wqes: parts.wqes,
            stride_bytes: parts.stride_bytes,
            record,
            limit: 0,
            events,
            users: 0,
            position: crate::device::srq::SrqPosition::default(),
        });
        self.owner_mut(client)?.srqs.push(slot);
        Ok(slot as u32)
    }

    fn client_srq(&mut self, client: u32, srqn: u32) -> Result<(usize, &mut Srq), Errno> {
        let owner = self.clients.get(client)?;
        owned(&owner.srqs, &mut self.parts.srqs, srqn)
    }

    pub(crate) fn set_srq_limit(
        &mut self,
        client: u32,
        srqn: u32,
        limit: u32,
    ) -> Result<(), Errno> {
        let (_, srq) = self.client_srq(client, srqn)?;
        if limit >= srq.wqes {
            return Err(libc::EINVAL);
        }
        srq.set_limit(limit);
        Ok(())
    }

    pub(crate) fn srq_limit(&mut self, client: u32, srqn: u32) -> Result<u32, Errno> {
        self.client_srq(client, srqn).map(|(_, srq)| srq.limit)
    }

    /// For tests of what no transport asks for.
    #[cfg(test)]
    pub(crate) fn srq_mut(&mut self, slot: usize) -> Option<&mut Srq> {
        self.parts.srqs.get_mut(slot).and_then(Option::as_mut)
    }

    pub(crate) fn destroy_srq(&mut self, client: u32, srqn: u32) -> Result<(), Errno> {
        let (slot, srq) = self.client_srq(client, srqn)?;
        if srq.users > 0 {
            return Err(libc::EBUSY);
        }
        let pd = srq.pd;
        self.parts.srqs[slot] = None;
        self.leave_pd(client, pd);
        self.owner_mut(client)?.srqs.retain(|&srq| srq != slot);
        Ok(())
    }

    fn use_srq(&mut self, slot: Option<usize>, by: i32) {
        if let Some(Some(srq)) = slot.and_then(|slot| self.parts.srqs.get_mut(slot)) {
            srq.users = srq.users.saturating_add_signed(by);
        }
    }

    /// The parts were looked at already.
    pub(crate) fn create_client_qp(
        &mut self,
        client: u32,
        space: Space,
        parts: &QpParts,
    ) -> Result<u32, Errno> {
        self.check_present()?;
        let owner = self.owner(client)?;
        let events = owner.events.clone();
        let send_cq = own(&owner.cqs, parts.send_cq)?;
        let recv_cq = own(&owner.cqs, parts.recv_cq)?;
        let uar = own(&owner.uars, parts.uar)?;
        let srq = parts.srq.map(|srqn| own(&owner.srqs, srqn)).transpose()?;
        self.enter_pd(client, parts.pd)?;
        let Ok((slot, qpn)) = self.reserve_qp() else {
            self.leave_pd(client, parts.pd);
            return Err(libc::ENOMEM);
        };
        let at = |addr| SpaceAddress { space, addr };
        let recv_bytes = parts.recv_wqes as usize * parts.recv_stride_bytes as usize;
        // SAFETY: as in `create_client_cq`.
        let parts = unsafe {
            QpSetup {
                qpn,
                transport: parts.transport,
                pd: parts.pd,
                user_index: parts.user_index,
                srq,
                events: Some(events),
                send_cq,
                recv_cq,
                send_ring: DmaRing::at(at(parts.send_ring), parts.send_wqebbs as usize * 64),
                send_record: RecordWord::at(at(parts.record.wrapping_add(4))),
                recv_ring: DmaRing::at(at(parts.recv_ring), recv_bytes),
                recv_wqes: parts.recv_wqes,
                recv_stride_bytes: parts.recv_stride_bytes,
                recv_record: RecordWord::at(at(parts.record)),
                uar: None,
                page: uar,
                blocks_loopback: parts.blocks_loopback,
            }
        };
        self.create_qp(slot, parts);
        self.use_cq(send_cq, 1);
        self.use_cq(recv_cq, 1);
        self.use_srq(srq, 1);
        if let Some(page) = self.page_mut(uar) {
            page.qps.push(slot);
        }
        self.owner_mut(client)?.qps.insert(qpn, slot);
        Ok(qpn)
    }

    pub(super) fn client_qp(&self, client: u32, qpn: u32) -> Result<(usize, &Qp), Errno> {
        let slot = self.owner(client)?.qps.get(&qpn);
        let slot = slot.copied().ok_or(libc::EINVAL)?;
        let qp = self.qps.get(slot).and_then(Option::as_deref);
        qp.map(|qp| (slot, qp)).ok_or(libc::EINVAL)
    }

    pub(crate) fn destroy_client_qp(&mut self, client: u32, qpn: u32) -> Result<(), Errno> {
        let (slot, qp) = self.client_qp(client, qpn)?;
        let (pd, srq, page) = (qp.parts.pd, qp.parts.srq, qp.parts.page);
        let cqs = [qp.parts.send_cq, qp.parts.recv_cq];
        self.destroy_qp(slot);
        for cq in cqs {
            self.use_cq(cq, -1);
        }
        self.use_srq(srq, -1);
        if let Some(page) = self.page_mut(page) {
            page.qps.retain(|&qp| qp != slot);
        }
        self.leave_groups(slot);
        self.leave_pd(client, pd);
        self.owner_mut(client)?.qps.remove(&qpn);
        Ok(())
    }
}
