//! The parts of the device that queue pairs share.

use super::Counters;
use crate::device::capture::FrameCapture;
use crate::device::copies::Copies;
use crate::device::core::PeerLinks;
use crate::device::cq::Cq;
use crate::device::datagram_paths::DatagramPaths;
use crate::device::fabric::{Fabric, gid_of};
use crate::device::gather::Gather;
use crate::device::keys::Keys;
use crate::device::packet::{Header, MAX_PAYLOAD_BYTES};
use crate::device::roce::CongestionNotice;
use crate::device::srq::Srq;
use crate::device::trace::Trace;
use crate::device::udp::UdpWire;
use crate::device::wire::{Counted, Destination, Wire};
use doorbell_wire::mlx5::Cqe;

/// What queue pairs share while they work: completion queues, keys, the wire.
#[derive(Debug, Default)]
pub(crate) struct DeviceParts {
    /// The time of the device's turn.
    pub(crate) now_ns: u64,
    pub(crate) cqs: Vec<Option<Cq>>,
    pub(crate) srqs: Vec<Option<Srq>>,
    pub(crate) keys: Keys,
    pub(crate) copies: Copies,
    pub(crate) wire: Wire,
    pub(crate) counters: Counters,
    /// A doorbell before its record, or behind a later one, does not fail its queue pair.
    pub(crate) takes_doorbells_out_of_order: bool,
    pub(crate) gather: Box<Gather>,
    /// The fabric that the device was made on.
    pub(crate) fabric: Option<Fabric>,
    pub(crate) links: PeerLinks,
    /// Of a device without a fabric: where datagrams go, by the LID of their address.
    pub(crate) datagram_paths: DatagramPaths,
    /// The sockets of a device whose wire is UDP.
    pub(crate) udp: Option<Box<UdpWire>>,
    /// The address of such a device.
    pub(crate) host_gid: Option<[u8; 16]>,
    /// The address that the packet at hand comes from, if this device has one.
    pub(crate) sender: Option<[u8; 16]>,
    /// Notices of congestion that are to be sent.
    pub(crate) notices: Vec<CongestionNotice>,
    pub(crate) trace: Option<Box<Trace>>,
    pub(crate) capture: Option<Box<FrameCapture>>,
    /// A completion queue lost a completion since the last turn.
    pub(crate) overran: bool,
}

impl DeviceParts {
    /// The parts at that time.
    #[inline]
    pub(crate) fn at(&mut self, now_ns: u64) -> &mut DeviceParts {
        self.now_ns = now_ns;
        self
    }

    /// The bits of a queue pair's number that are its place in the table.
    #[inline]
    pub(crate) fn slot_mask(&self) -> u32 {
        if self.fabric.is_some() {
            0x3fff
        } else {
            0xffff
        }
    }

    /// Whether there is neither a trace or capture, nor a fault, nor another host: packets may then be longer than the MTU.
    #[inline]
    pub(crate) fn has_no_observer(&self) -> bool {
        self.trace.is_none()
            && self.capture.is_none()
            && !self.wire.is_faulty()
            && self.host_gid.is_none()
    }

    /// The MTU of the port: the most payload that a packet of this device may have.
    pub(crate) fn mtu_bytes(&self) -> u32 {
        self.udp
            .as_ref()
            .map_or(MAX_PAYLOAD_BYTES as u32, |udp| 128 << udp.interface.mtu)
    }

    /// The GIDs of this device and of the one that a packet is for.
    pub(crate) fn ends_of(&self, to: Destination) -> Option<([u8; 16], [u8; 16])> {
        let node = self.fabric.as_ref().map_or(0, Fabric::node);
        let own = self.host_gid.unwrap_or_else(|| self.gid_of_node(node));
        match to {
            Destination::Local => Some((own, own)),
            Destination::Lane(node) => Some((own, self.gid_of_node(node as u16))),
            Destination::Host(gid) => Some((own, gid)),
            Destination::Nowhere => None,
        }
    }

    /// The address of the device that a packet without an address comes from, with the wire `udp+shm`.
    #[inline]
    pub(crate) fn host_behind(&self, header: &Header) -> Option<[u8; 16]> {
        self.fabric.as_ref()?.host_of(header.source_lid)
    }

    /// The GID of another device of the fabric.
    fn gid_of_node(&self, node: u16) -> [u8; 16] {
        let told = self.fabric.as_ref().and_then(|fabric| fabric.host_of(node));
        told.unwrap_or_else(|| gid_of(self.link(), node))
    }

    /// If packets lie there that a living process of this host has not read, because its device has not had its turn: how many have been dropped there
    /// since it began.
    #[cold]
    pub(crate) fn unread_at(&mut self, to: Destination) -> Option<i64> {
        let now_ns = self.now_ns;
        match (to, &mut self.udp) {
            (Destination::Host(gid), Some(udp)) => udp.backlog.unread(&gid, now_ns),
            _ => self.links.is_behind(to, now_ns).then_some(0),
        }
    }

    pub(super) fn complete(&mut self, cq: usize, cqe: &Cqe) -> bool {
        let lost = self.wire.fault_code(Counted::Completion).is_some();
        let queue = self.cqs.get_mut(cq).and_then(Option::as_mut);
        let pushed = queue.is_some_and(|queue| {
            if lost {
                queue.break_down();
            }
            queue.push(cqe)
        });
        self.overran |= !pushed;
        if let Some(trace) = &mut self.trace {
            trace.cqe(self.now_ns, cq, cqe, pushed);
        }
        self.counters.completions += u64::from(pushed);
        pushed
    }
}
