//! Multicast groups of this device: which queue pairs are in them.

use super::DeviceCore;
use crate::device::client::{Errno, Transport};

impl DeviceCore {
    /// Joins a multicast group, as often as it likes.
    pub(crate) fn attach_multicast(
        &mut self,
        client: u32,
        qpn: u32,
        gid: [u8; 16],
    ) -> Result<(), Errno> {
        let (slot, qp) = self.client_qp(client, qpn)?;
        if self.parts.host_gid.is_some() {
            // Members on other hosts would have to join the group by IGMP.
            return Err(libc::EOPNOTSUPP);
        }
        // Multicast GIDs begin so (IBTA 4.1.1).
        if qp.parts.transport != Transport::Ud || gid[0] != 0xff {
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
        let (slot, _) = self.client_qp(client, qpn)?;
        let members = self.multicast.get_mut(&gid).ok_or(libc::EINVAL)?;
        let at = members.iter().position(|&member| member == slot);
        members.swap_remove(at.ok_or(libc::EINVAL)?);
        self.multicast.retain(|_, members| !members.is_empty());
        Ok(())
    }

    /// Leaves all groups.
    pub(super) fn leave_groups(&mut self, slot: usize) {
        for members in self.multicast.values_mut() {
            members.retain(|&member| member != slot);
        }
        self.multicast.retain(|_, members| !members.is_empty());
    }
}
