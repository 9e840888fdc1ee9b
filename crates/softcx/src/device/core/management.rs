//! Management datagrams: what leaves for queue pair 1 of another port, and what arrives at this one's.

use std::sync::Arc;

use super::DeviceCore;
use crate::device::fabric::{Fabric, NODES, gid_of};
use crate::device::gather::GatherSource;
use crate::device::management::{
    MAD_BYTES, MadBytes, MadPeer, MadQueue, QP1, QP1_QKEY, cm_message_name,
};
use crate::device::options::LinkLayer;
use crate::device::packet::{Header, Packet, PacketKind, PacketPayload, Service, flag, psn_add};
use doorbell_wire::mlx5::Datagram;

/// Hop limit of a GRH that crosses no router.
const HOPS: u8 = 64;

impl DeviceCore {
    /// The datagrams that have arrived.
    pub(crate) fn mads(&self) -> &Arc<MadQueue> {
        &self.management.arrived
    }

    /// Sends a datagram to queue pair 1 of a port. It leaves with the next turn, and may be lost.
    pub(crate) fn send_mad(&mut self, now_ns: u64, peer: MadPeer, mad: &MadBytes) {
        if self.gone {
            return;
        }
        self.management.psn = psn_add(self.management.psn, 1);
        let mut header = Header::new(PacketKind::Send, QP1, self.management.psn, 0);
        header.flags = flag::FIRST | flag::LAST;
        header.payload_bytes = MAD_BYTES as u16;
        header.total_bytes = MAD_BYTES as u32;
        header.service = Service::Datagram;
        header.source_lid = self.fabric().map_or(0, Fabric::node);
        header.source_qpn = QP1;
        header.qkey = QP1_QKEY;
        let link = self.parts.link();
        let (gid, to) = match peer {
            MadPeer::Node(node) => (gid_of(link, node), self.parts.route(node)),
            MadPeer::Host(gid) => (gid, self.parts.route_to_host(&gid)),
        };
        if link == LinkLayer::Ethernet {
            header.set_grh(&Datagram {
                gid,
                hop_limit: HOPS,
                ..Datagram::default()
            });
        }
        self.parts.counters.packets_sent += 1;
        if let Some(trace) = &mut self.parts.trace {
            trace.sent(now_ns, to, &header, cm_message_name(mad));
        }
        let payload = PacketPayload::Heap(Box::new(*mad));
        self.parts.wire.send(now_ns, to, Packet { header, payload });
    }

    /// Takes a packet for queue pair 1. Returns the name of its message if it is one of the connection manager and was kept.
    #[cold]
    pub(super) fn receive_mad(
        &mut self,
        header: &Header,
        source: &GatherSource<'_>,
    ) -> Option<&'static str> {
        let is_mad = header.dst_qpn == QP1
            && header.service == Service::Datagram
            && header.kind == PacketKind::Send
            && header.qkey == QP1_QKEY
            && self.parts.fabric.is_some();
        if !is_mad {
            return None;
        }
        let taken = source.take(&self.parts.keys, &mut self.parts.copies);
        let mad = MadBytes::try_from(taken.ok()?).ok()?;
        let name = cm_message_name(&mad)?;
        let from = match self.parts.host_gid {
            Some(_) => MadPeer::Host(self.parts.sender?),
            None => MadPeer::Node(header.source_lid),
        };
        self.management.arrived.push(from, mad).then_some(name)
    }

    /// The nodes of the fabric, this one included, whose devices are alive.
    pub(crate) fn nodes(&self) -> Vec<u16> {
        let fabric = self.fabric();
        let is_there =
            |node: &u16| fabric.is_some_and(|it| it.port(*node) != 0 && !it.is_vacant(*node));
        (1..=NODES).filter(is_there).collect()
    }

    /// The port that has that number on the fabric now; 0 if its device has gone.
    pub(crate) fn port_of(&self, node: u16) -> u64 {
        let fabric = self.fabric().filter(|it| !it.is_vacant(node));
        fabric.map_or(0, |fabric| fabric.port(node))
    }
}

/// The part of the device that deals with management datagrams.
#[derive(Debug, Default)]
pub(super) struct Management {
    arrived: Arc<MadQueue>,
    /// Of the last one that was sent.
    psn: u32,
}
