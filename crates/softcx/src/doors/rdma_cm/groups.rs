//! Multicast groups that identifiers have joined: on Ethernet, where no subnet manager is asked.

use super::address::SocketAddress;
use super::attributes::PORT;
use super::connect::UDP_QKEY;
use super::event_file::QueuedCmEvent;
use super::id::{FileKey, IdState};
use super::table::{CmTable, EventParam, event};
use crate::device::client::Errno;
use crate::device::management::MadPeer;
use crate::device::roce::gid_of_address;
use crate::doors::abi::{AhAttr, CmEventResp, CmUdParam, GlobalRoute};
use doorbell_wire::mlx5::Datagram;

/// Datagrams to a group do not leave the network of their sender.
const HOPS: u8 = 1;

impl CmTable {
    /// Joins a group (`cma_iboe_join_multicast` of core/cma.c). The queue pair joins by a command of its own. `answer` tells the process the number before there is
    /// an event of it.
    ///
    /// # Errors
    /// EINVAL for an identifier that has no address yet or is not for datagrams, and for the zero address; EOPNOTSUPP where there is no subnet manager to be
    /// asked, and where members on other hosts would have to join by IGMP; those of `answer`.
    pub(super) fn join(
        &mut self,
        (file, handle): (FileKey, u32),
        user_handle: u64,
        address: &SocketAddress,
        answer: impl FnOnce(u32) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let id = self.id_of(file, handle)?;
        let is_early = !matches!(id.state, IdState::AddressBound | IdState::AddressResolved);
        if is_early || !id.has_device || !id.is_datagram() {
            return Err(libc::EINVAL);
        }
        if !self.port.is_ethernet() || matches!(self.own, MadPeer::Host(_)) {
            return Err(libc::EOPNOTSUPP);
        }
        if address.is_zero() {
            return Err(libc::EINVAL);
        }
        let gid = address.ip().map_or(address.gid(), gid_of_address);
        let number = self.groups.add(handle);
        if let Err(error) = answer(number) {
            self.groups.remove(number);
            return Err(error);
        }
        let param = CmUdParam {
            qp_num: Datagram::MULTICAST_QPN,
            qkey: UDP_QKEY,
            ah_attr: AhAttr {
                grh: GlobalRoute {
                    dgid: gid,
                    sgid_index: self.device.gid_index().unwrap_or(0),
                    hop_limit: HOPS,
                    ..GlobalRoute::default()
                },
                is_global: 1,
                port_num: PORT,
                ..AhAttr::default()
            },
            ..CmUdParam::default()
        };
        let response = CmEventResp {
            uid: user_handle,
            id: number,
            event: event::MULTICAST_JOIN,
            param: EventParam::Datagram(param).bytes(),
            ..CmEventResp::default()
        };
        let event = QueuedCmEvent {
            owner: handle,
            request: None,
            group: Some(number),
            response,
        };
        self.deliver(file, event);
        Ok(())
    }

    /// Leaves a group: how many of its events its process has read. Those that it has not read are gone.
    ///
    /// # Errors
    /// ENOENT if there is no such group, EINVAL if it is one of another file.
    pub(super) fn leave(&mut self, file: FileKey, number: u32) -> Result<u32, Errno> {
        let id = self.groups.id_of(number).ok_or(libc::ENOENT)?;
        self.id_of(file, id).map_err(|_| libc::EINVAL)?;
        let events_read = self.groups.remove(number);
        if let Some(file) = self.files.get_mut(&file) {
            file.events.retain(|event| event.group != Some(number));
            file.settle();
        }
        Ok(events_read)
    }
}
