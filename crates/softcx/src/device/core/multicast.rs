//! Multicast groups of this device: which queue pairs are in them.

use std::net::Ipv6Addr;

use super::DeviceCore;
use crate::device::client::{Errno, Transport};
use crate::device::options::LinkLayer;

/// The first LID of a multicast group, and the permissive LID, which is behind the last (IBTA 4.1.3).
const FIRST_LID: u16 = 0xc000;
const PERMISSIVE_LID: u16 = 0xffff;

impl DeviceCore {
    /// Whether a port of this kind has groups with that LID (`is_valid_mcast_lid` of the kernel). Ethernet has no LIDs, and takes all.
    fn is_group_lid(&self, mlid: u16) -> bool {
        self.parts.link() == LinkLayer::Ethernet || (FIRST_LID..PERMISSIVE_LID).contains(&mlid)
    }

    /// Joins a multicast group. Joining again by the same LID changes nothing.
    pub(crate) fn attach_multicast(
        &mut self,
        client: u32,
        qpn: u32,
        gid: [u8; 16],
        mlid: u16,
    ) -> Result<(), Errno> {
        let (slot, qp) = self.client_qp(client, qpn)?;
        if self.parts.host_gid.is_some() {
            // Members on other hosts would have to join the group by IGMP.
            return Err(libc::EOPNOTSUPP);
        }
        // Multicast GIDs begin with 0xff (IBTA 4.1.1), and those of RoCE v2 may be addresses of IPv4 (`rdma_is_multicast_addr` of the kernel).
        let is_group = Ipv6Addr::from(gid).to_canonical().is_multicast();
        if qp.parts.transport != Transport::Ud || !is_group || !self.is_group_lid(mlid) {
            return Err(libc::EINVAL);
        }
        let members = self.multicast.entry(gid).or_default();
        if !members.contains(&(slot, mlid)) {
            members.push((slot, mlid));
        }
        Ok(())
    }

    pub(crate) fn detach_multicast(
        &mut self,
        client: u32,
        qpn: u32,
        gid: [u8; 16],
        mlid: u16,
    ) -> Result<(), Errno> {
        let (slot, _) = self.client_qp(client, qpn)?;
        let members = self.multicast.get_mut(&gid).ok_or(libc::EINVAL)?;
        let at = members.iter().position(|&member| member == (slot, mlid));
        members.swap_remove(at.ok_or(libc::EINVAL)?);
        self.multicast.retain(|_, members| !members.is_empty());
        Ok(())
    }

    /// The slots of the members of a group, each once; `None` if it has none.
    pub(super) fn group_members(&self, gid: &[u8; 16]) -> Option<Vec<usize>> {
        let members = self.multicast.get(gid)?;
        let mut slots: Vec<_> = members.iter().map(|(slot, _)| *slot).collect();
        slots.sort_unstable();
        slots.dedup();
        Some(slots)
    }

    /// Leaves all groups.
    pub(super) fn leave_groups(&mut self, slot: usize) {
        for members in self.multicast.values_mut() {
            members.retain(|&(member, _)| member != slot);
        }
        self.multicast.retain(|_, members| !members.is_empty());
    }
}
