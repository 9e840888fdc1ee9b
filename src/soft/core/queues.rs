//! Completion queues, shared receive queues and queue pairs of clients.
#![allow(unsafe_code)] // rings of a client in this process are plain memory

use super::Core;
use super::clients::own;
use crate::soft::client::{CqParts, Errno, QpParts, SrqParts, Transport};
use crate::soft::cq::{Cq, Owned};
use crate::soft::dma::{RecordWord, Ring};
use crate::soft::qp::Parts;
use crate::soft::space::{Place, Space};
use crate::soft::srq::Srq;

/// Most entries of a completion queue: the driver counts them in 24 bits, and laps must differ.
pub(crate) const MAX_CQES: u32 = 1 << 22;
/// Most blocks of a send ring, and entries of a receive ring: they are counted in 16 bits.
pub(crate) const MAX_WQES: u32 = 1 << 15;
/// Bytes of a receive WQE.
const STRIDES: std::ops::RangeInclusive<u32> = 16..=1024;

/// A range of a client's memory that a queue needs. All of it is looked at before anything is made of it: in this process an
/// address is a pointer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    pub(crate) addr: u64,
    pub(crate) len_bytes: u64,
    pub(crate) align: u64,
    pub(crate) writable: bool,
}

impl Need {
    /// # Errors
    /// EINVAL if it is not aligned, EFAULT if it is not mapped.
    pub(crate) fn check(&self, space: Space) -> Result<(), Errno> {
        if !self.addr.is_multiple_of(self.align) {
            return Err(libc::EINVAL);
        }
        space
            .check(self.addr, self.len_bytes, self.writable)
            .map_err(|_| libc::EFAULT)
    }
}

fn is_size(size: u32, max: u32) -> bool {
    size.is_power_of_two() && size <= max
}

impl CqParts {
    /// What must be there of a ring.
    pub(crate) fn ring_need(ring: u64, cqes: u32, cqe_bytes: u32) -> Result<Need, Errno> {
        if !is_size(cqes, MAX_CQES) || !matches!(cqe_bytes, 64 | 128) {
            return Err(libc::EINVAL);
        }
        Ok(Need {
            addr: ring,
            len_bytes: u64::from(cqes) * u64::from(cqe_bytes),
            align: 64,
            writable: true,
        })
    }

    pub(crate) fn record_need(&self) -> Need {
        Need {
            addr: self.record,
            len_bytes: 8,
            align: 8,
            writable: true,
        }
    }
}

impl SrqParts {
    pub(crate) fn needs(&self) -> Result<[Need; 2], Errno> {
        // A next segment, and a data segment at least.
        let stride = STRIDES.contains(&self.stride_bytes) && self.stride_bytes >= 32;
        if !is_size(self.wqes, MAX_WQES) || !self.stride_bytes.is_power_of_two() || !stride {
            return Err(libc::EINVAL);
        }
        let ring = Need {
            addr: self.ring,
            len_bytes: u64::from(self.wqes) * u64::from(self.stride_bytes),
            align: 16,
            writable: false,
        };
        Ok([ring, record_need(self.record, 4)])
    }
}

impl QpParts {
    pub(crate) fn needs(&self) -> Result<[Need; 3], Errno> {
        let size = |size, max| size == 0 || is_size(size, max);
        let stride =
            STRIDES.contains(&self.recv_stride_bytes) && self.recv_stride_bytes.is_power_of_two();
        if !size(self.send_wqebbs, MAX_WQES)
            || !size(self.recv_wqes, MAX_WQES)
            || (self.recv_wqes > 0 && (!stride || self.srq.is_some()))
        {
            return Err(libc::EINVAL);
        }
        let ring = |addr, len_bytes, align| Need {
            addr,
            len_bytes,
            align: if len_bytes == 0 { 1 } else { align },
            writable: false,
        };
        let recv_bytes = u64::from(self.recv_wqes) * u64::from(self.recv_stride_bytes);
        Ok([
            ring(self.send_ring, u64::from(self.send_wqebbs) * 64, 64),
            ring(self.recv_ring, recv_bytes, 16),
            record_need(self.record, 8),
        ])
    }
}

fn record_need(addr: u64, len_bytes: u64) -> Need {
    Need {
        addr,
        len_bytes,
        align: 4,
        writable: false,
    }
}

impl Core {
    /// The parts were looked at already.
    pub(crate) fn create_client_cq(&mut self, client: u32, parts: CqParts) -> Result<u32, Errno> {
        let owner = self.owner(client)?;
        let (space, events) = (owner.space, owner.events.clone());
        let uar = own(&owner.uars, parts.uar)?;
        let at = |addr| Place { space, addr };
        let seeded = space.write(parts.record.wrapping_add(4), &[0xff; 4]);
        seeded.map_err(|_| libc::EFAULT)?;
        let len_bytes = parts.cqes as usize * parts.cqe_bytes as usize;
        // SAFETY: looked at by the caller; a process that unmaps or frees its rings while they are in use asks for a fault.
        let (ring, record, arm_record) = unsafe {
            (
                Ring::at(at(parts.ring), len_bytes),
                RecordWord::at(at(parts.record)),
                RecordWord::at(at(parts.record.wrapping_add(4))),
            )
        };
        let mut owned = Owned::new(uar, arm_record, parts.events, events);
        owned.ignore_overrun = parts.ignore_overrun;
        let mut cq = Cq::of_client(ring, parts.cqes, parts.cqe_bytes, record, owned);
        cq.set_padded(parts.padded);
        let slot = free_slot(&mut self.cqs);
        if let Some(owned) = cq.owned() {
            owned.cqn = slot as u32;
        }
        self.cqs[slot] = Some(cq);
        self.owner_mut(client)?.cqs.push(slot);
        if let Some(page) = self.page_mut(uar) {
            page.cqs.push(slot);
        }
        Ok(slot as u32)
    }

    fn client_cq(&mut self, client: u32, cqn: u32) -> Result<(usize, &mut Cq), Errno> {
        let slot = own(&self.owner(client)?.cqs, cqn)?;
        match self.cqs.get_mut(slot) {
            Some(Some(cq)) => Ok((slot, cq)),
            _ => Err(libc::EINVAL),
        }
    }

    /// The ring was looked at already.
    pub(crate) fn resize_cq(
        &mut self,
        client: u32,
        cqn: u32,
        ring: u64,
        cqes: u32,
        cqe_bytes: u32,
    ) -> Result<(), Errno> {
        let space = self.owner(client)?.space;
        let place = Place { space, addr: ring };
        // SAFETY: as in `create_client_cq`.
        let ring = unsafe { Ring::at(place, cqes as usize * cqe_bytes as usize) };
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
        if let Some(Some(cq)) = self.cqs.get_mut(slot)
            && let Some(owned) = cq.owned()
        {
            owned.users = owned.users.saturating_add_signed(by);
        }
    }

    /// The parts were looked at already.
    pub(crate) fn create_srq(&mut self, client: u32, parts: &SrqParts) -> Result<u32, Errno> {
        let owner = self.owner(client)?;
        let (space, events) = (owner.space, owner.events.clone());
        self.enter_pd(client, parts.pd)?;
        let at = |addr| Place { space, addr };
        let slot = free_slot(&mut self.srqs);
        // SAFETY: as in `create_client_cq`.
        let (ring, record) = unsafe {
            (
                Ring::at(at(parts.ring), (parts.wqes * parts.stride_bytes) as usize),
                RecordWord::at(at(parts.record)),
            )
        };
        self.srqs[slot] = Some(Srq {
            srqn: slot as u32,
            pd: parts.pd,
            ring,
            wqes: parts.wqes,
            stride_bytes: parts.stride_bytes,
            record,
            limit: parts.limit,
            events,
            users: 0,
            walk: crate::soft::srq::Walk::default(),
        });
        self.owner_mut(client)?.srqs.push(slot);
        Ok(slot as u32)
    }

    fn client_srq(&mut self, client: u32, srqn: u32) -> Result<(usize, &mut Srq), Errno> {
        let slot = own(&self.owner(client)?.srqs, srqn)?;
        match self.srqs.get_mut(slot) {
            Some(Some(srq)) => Ok((slot, srq)),
            _ => Err(libc::EINVAL),
        }
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
        self.srqs.get_mut(slot).and_then(Option::as_mut)
    }

    pub(crate) fn destroy_srq(&mut self, client: u32, srqn: u32) -> Result<(), Errno> {
        let (slot, srq) = self.client_srq(client, srqn)?;
        if srq.users > 0 {
            return Err(libc::EBUSY);
        }
        let pd = srq.pd;
        self.srqs[slot] = None;
        self.leave_pd(client, pd);
        self.owner_mut(client)?.srqs.retain(|&srq| srq != slot);
        Ok(())
    }

    fn use_srq(&mut self, slot: Option<usize>, by: i32) {
        if let Some(Some(srq)) = slot.and_then(|slot| self.srqs.get_mut(slot)) {
            srq.users = srq.users.saturating_add_signed(by);
        }
    }

    /// The parts were looked at already.
    pub(crate) fn create_client_qp(&mut self, client: u32, parts: &QpParts) -> Result<u32, Errno> {
        let owner = self.owner(client)?;
        let (space, events) = (owner.space, owner.events.clone());
        let send_cq = own(&owner.cqs, parts.send_cq)?;
        let recv_cq = own(&owner.cqs, parts.recv_cq)?;
        let uar = own(&owner.uars, parts.uar)?;
        let srq = parts.srq.map(|srqn| own(&owner.srqs, srqn)).transpose()?;
        self.enter_pd(client, parts.pd)?;
        let Ok((slot, qpn)) = self.reserve_qp() else {
            self.leave_pd(client, parts.pd);
            return Err(libc::ENOMEM);
        };
        let at = |addr| Place { space, addr };
        let recv_bytes = parts.recv_wqes as usize * parts.recv_stride_bytes as usize;
        // SAFETY: as in `create_client_cq`.
        let parts = unsafe {
            Parts {
                qpn,
                transport: parts.transport,
                pd: parts.pd,
                user_index: parts.user_index,
                srq,
                events: Some(events),
                send_cq,
                recv_cq,
                send_ring: Ring::at(at(parts.send_ring), parts.send_wqebbs as usize * 64),
                send_record: RecordWord::at(at(parts.record.wrapping_add(4))),
                recv_ring: Ring::at(at(parts.recv_ring), recv_bytes),
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

    pub(super) fn client_qp(&self, client: u32, qpn: u32) -> Result<usize, Errno> {
        let slot = self.owner(client)?.qps.get(&qpn);
        slot.copied().ok_or(libc::EINVAL)
    }

    pub(crate) fn destroy_client_qp(&mut self, client: u32, qpn: u32) -> Result<(), Errno> {
        let slot = self.client_qp(client, qpn)?;
        let Some(Some(qp)) = self.qps.get(slot) else {
            return Err(libc::EINVAL);
        };
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
        for members in self.multicast.values_mut() {
            members.retain(|&member| member != slot);
        }
        self.multicast.retain(|_, members| !members.is_empty());
        self.leave_pd(client, pd);
        self.owner_mut(client)?.qps.remove(&qpn);
        Ok(())
    }

    /// Joins a multicast group, as often as it likes.
    pub(crate) fn attach_multicast(
        &mut self,
        client: u32,
        qpn: u32,
        gid: [u8; 16],
    ) -> Result<(), Errno> {
        let slot = self.client_qp(client, qpn)?;
        let datagrams =
            matches!(self.qps.get(slot), Some(Some(qp)) if qp.parts.transport == Transport::Ud);
        // Multicast GIDs begin so (IBTA 4.1.1).
        if !datagrams || gid[0] != 0xff {
            return Err(libc::EINVAL);
        }
        let members = self.multicast.entry(gid).or_default();
        if !members.contains(&slot) {
            members.push(slot);
        }
        Ok(())
    }

    pub(crate) fn detach_multicast(
        &mut self,
        client: u32,
        qpn: u32,
        gid: [u8; 16],
    ) -> Result<(), Errno> {
        let slot = self.client_qp(client, qpn)?;
        let members = self.multicast.get_mut(&gid).ok_or(libc::EINVAL)?;
        let at = members.iter().position(|&member| member == slot);
        members.swap_remove(at.ok_or(libc::EINVAL)?);
        self.multicast.retain(|_, members| !members.is_empty());
        Ok(())
    }
}

/// A slot for a new object. The first one is never used: to libmlx5 a number of 0 is none.
fn free_slot<T>(slots: &mut Vec<Option<T>>) -> usize {
    let free = slots.iter().skip(1).position(Option::is_none);
    let slot = free.map_or(slots.len().max(1), |free| free + 1);
    while slots.len() <= slot {
        slots.push(None);
    }
    slot
}
