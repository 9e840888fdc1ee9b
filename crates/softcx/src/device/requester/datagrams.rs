//! Sending datagrams: each WQE has its own address, is one packet, and is done when that has left.

use std::net::Ipv6Addr;

use super::TransmitStop;
use super::message::OutstandingMessage;
use super::opcode::SEND_IMM;
use crate::device::fabric::{NODES, node_of};
use crate::device::options::LinkLayer;
use crate::device::packet::{Header, Packet, PacketKind, Service, flag, psn_add};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::wire::Destination;
use doorbell_wire::mlx5::{Datagram, Syndrome};

/// Set in the queue key of a WQE to send that of the queue pair instead (IBTA 10.2.5).
const OWN_QKEY: u32 = 0x8000_0000;

impl Qp {
    /// Sends one message of the datagram service, the one at the cursor.
    pub(super) fn send_datagram(&mut self, context: &mut DeviceParts) -> Option<TransmitStop> {
        let message = self.requester.messages.get(self.requester.cursor)?;
        let OutstandingMessage { index, request, .. } = *message;
        let loaded = context.gather.holds(self.parts.qpn, index)
            || context.gather.load(&self.parts, index, u32::MAX).is_ok();
        let Some(to) = context.gather.datagram.filter(|_| loaded) else {
            self.fail_at_cursor(context, Syndrome::LocalQpOp);
            return None;
        };
        let own = context.fabric.as_ref().map_or(0, |fabric| fabric.node());
        let reached = context.datagram_destinations(&to);
        if reached.iter().any(|&to| context.wire.congested(to)) {
            return Some(TransmitStop::Congested);
        }
        let total = request.total_bytes as u32;
        let payload = {
            let (keys, copies) = (&context.keys, &mut &mut context.copies);
            context
                .gather
                .by_value(keys, copies, self.parts.pd, 0, total)
        };
        let Ok(payload) = payload else {
            self.fail_at_cursor(context, Syndrome::LocalProt);
            return None;
        };
        let requester = &mut self.requester;
        let psn = requester.messages.get(requester.cursor)?.first_psn;
        requester.cursor += 1;
        requester.unsent_psn = psn_add(psn, 1);
        requester.unacked_psn = requester.unsent_psn;
        let mut header = Header::new(PacketKind::Send, to.qpn, psn, 0);
        header.flags = flag::FIRST | flag::LAST;
        if request.opcode == SEND_IMM {
            header.flags |= flag::IMMEDIATE;
            header.imm = request.imm;
        }
        if request.solicited {
            header.flags |= flag::SOLICITED;
        }
        header.payload_bytes = total as u16;
        header.total_bytes = total;
        header.service = Service::Datagram;
        header.source_lid = own;
        header.source_qpn = self.parts.qpn;
        header.qkey = if to.qkey & OWN_QKEY == 0 {
            to.qkey
        } else {
            self.asked.qkey
        };
        let link = context.link();
        header.sl = match link {
            LinkLayer::InfiniBand => to.sl,
            LinkLayer::Ethernet => to.sl >> 1,
        };
        if to.has_grh || link == LinkLayer::Ethernet {
            header.set_grh(&to);
        }
        if let Some((&last, others)) = reached.split_last() {
            for &to in others {
                let payload = payload.clone();
                self.send_to(context, to, Packet { header, payload });
            }
            self.send_to(context, last, Packet { header, payload });
        }
        self.reap(context);
        None
    }
}

/// The node that a datagram is for.
fn node_at(context: &DeviceParts, to: &Datagram) -> Option<u16> {
    match context.link() {
        LinkLayer::InfiniBand if (1..=NODES).contains(&to.lid) => Some(to.lid),
        LinkLayer::InfiniBand if !to.has_grh => None,
        link => node_of(link, &to.gid),
    }
}

impl DeviceParts {
    pub(crate) fn link(&self) -> LinkLayer {
        match (&self.fabric, self.host_gid) {
            (Some(fabric), _) => fabric.link(),
            (None, Some(_)) => LinkLayer::Ethernet,
            (None, None) => LinkLayer::default(),
        }
    }

    /// Where a datagram goes. The members of a group may be anywhere: every node gets a copy, this one, too, and knows whether it has members.
    fn datagram_destinations(&mut self, to: &Datagram) -> Vec<Destination> {
        let multicast = to.is_multicast();
        let fabric = match (&self.fabric, self.host_gid) {
            // Without a fabric the device has numbered the ports that it was asked about.
            (None, _) if !multicast => return vec![self.datagram_paths.route(to.lid)],
            // Members on other hosts would have to join the group by IGMP.
            (_, Some(_)) if multicast => return vec![Destination::Nowhere],
            (_, Some(_)) => return vec![self.route_to_host(&to.gid)],
            (fabric, None) => fabric.as_ref(),
        };
        let nodes = if multicast {
            1..=NODES
        } else {
            let node = node_at(self, to).unwrap_or(0);
            node..=node
        };
        let own = fabric.map_or(0, |fabric| fabric.node());
        let is_there = |node| fabric.is_some_and(|fabric| fabric.port(node) != 0);
        nodes
            .filter(|&node| node == own || !multicast || is_there(node))
            .map(|node| self.route(node))
            .collect()
    }

    /// Where packets for an address go, of a device whose wire is UDP: through the sockets, also if the address is its own; with the wire `udp+shm`
    /// through memory, if a device of this host has told the address and its lane can be had.
    pub(crate) fn route_to_host(&mut self, gid: &[u8; 16]) -> Destination {
        let is_v4 = |gid: &[u8; 16]| Ipv6Addr::from(*gid).to_ipv4_mapped().is_some();
        match self.host_gid {
            Some(own) if is_v4(&own) == is_v4(gid) && *gid != [0; 16] => {
                let within = self.route_within_host(own, gid);
                within.unwrap_or(Destination::Host(*gid))
            }
            _ => Destination::Nowhere,
        }
    }

    fn route_within_host(&mut self, own: [u8; 16], gid: &[u8; 16]) -> Option<Destination> {
        let fabric = self.fabric.as_ref()?;
        let node = fabric.node_of_host(gid)?;
        match fabric.route(node) {
            Destination::Local => (own == *gid).then_some(Destination::Local),
            to => {
                let is_there = self.links.reaches(fabric, node, self.now_ns);
                is_there.then_some(to)
            }
        }
    }

    /// Where packets for a node go; see `DeviceCore::route`.
    pub(crate) fn route(&self, node: u16) -> Destination {
        self.fabric
            .as_ref()
            .map_or(Destination::Local, |fabric| fabric.route(node))
    }
}
