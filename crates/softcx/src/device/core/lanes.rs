//! Packets from other devices and to them.

use std::collections::VecDeque;

use super::DeviceCore;
use super::packets::is_refused_instead;
use super::peer_links::PeerLink;
use crate::device::client::AddressVector;
use crate::device::copies::Copies;
use crate::device::fabric::{NODES, node_of};
use crate::device::gather::GatherSource;
use crate::device::inbox::{Arrival, LaneWriter, WireAddress};
use crate::device::keys::Keys;
use crate::device::options::LinkLayer;
use crate::device::packet::{MAX_PAYLOAD_BYTES, Packet, PacketKind, PacketPayload};
use crate::device::qp::RemoteEnd;
use crate::device::space::SpaceAddress;
use crate::device::wire::Destination;
use crate::{Error, Result, StateKind};

/// Packets taken from one lane before others have their turn.
const BURST: usize = 128;
/// After so many their slots are given back.
const GIVE_BACK: u64 = 32;
/// Packets that are put on a lane together.
const GROUP: usize = 16;

impl DeviceCore {
    pub(super) fn destination(&mut self, port: &WireAddress) -> Result<Destination> {
        let port = match (port, self.parts.host_gid) {
            (WireAddress::Inbox(port), None) => port,
            (WireAddress::Host(gid), Some(_)) => return Ok(self.parts.route_to_host(gid)),
            _ => {
                return Err(Error::state(
                    StateKind::Unsupported,
                    "connect",
                    "the two devices have different wires: one has UDP, and the other has the memory of its host",
                ));
            }
        };
        if *port == self.inbox.address() {
            return Ok(Destination::Local);
        }
        self.parts.links.number_of(port).map(Destination::Lane)
    }

    /// The number of a port for datagrams, until as many calls of [`DeviceCore::close_datagram_path`] were made.
    pub(crate) fn open_datagram_path(&mut self, port: &WireAddress) -> Result<u16> {
        if let Some(number) = self.parts.datagram_paths.enter_known(port) {
            return Ok(number);
        }
        let to = self.destination(port)?;
        self.parts.links.enter(to);
        let number = self.parts.datagram_paths.enter_new(*port, to);
        number.ok_or_else(|| {
            self.close_destination(to);
            Error::state(
                StateKind::Exhausted,
                "create_ah",
                "the device has no number left for the port",
            )
        })
    }

    /// The number is needed once less.
    pub(crate) fn close_datagram_path(&mut self, number: u16) {
        if let Some(to) = self.parts.datagram_paths.leave(number) {
            self.close_destination(to);
        }
    }

    /// Sets where a queue pair's packets go. The peer is not checked, and there is no agreed connection
    /// number.
    pub(crate) fn set_destination(&mut self, slot: usize, path: &AddressVector, qpn: u32) {
        let node = self.node_at(path).unwrap_or(0);
        let to = match self.parts.host_gid {
            Some(_) => self.parts.route_to_host(&path.dgid),
            None => self.route(node),
        };
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            qp.remote = Some(RemoteEnd {
                to,
                host: self.parts.host_gid.map(|_| path.dgid),
                qpn,
                connection: 0,
                node,
                sl: path.sl & 0xf,
            });
            qp.connection = 0;
        }
    }

    /// Where packets for a node of the fabric go. A device on no fabric is alone with itself.
    pub(crate) fn route(&self, node: u16) -> Destination {
        self.parts
            .fabric
            .as_ref()
            .map_or(Destination::Local, |fabric| fabric.route(node))
    }

    /// The node that an address vector leads to.
    pub(crate) fn node_at(&self, path: &AddressVector) -> Option<u16> {
        let link = self.parts.fabric.as_ref()?.link();
        let by_gid = || path.is_global.then(|| node_of(link, &path.dgid)).flatten();
        match link {
            // Within a subnet the LID routes, also where there is a GRH.
            LinkLayer::InfiniBand if (1..=NODES).contains(&path.dlid) => Some(path.dlid),
            _ => by_gid(),
        }
    }

    pub(super) fn leave_lane(&mut self, slot: usize) {
        if let Some(remote) = self.qps[slot].as_ref().and_then(|qp| qp.remote) {
            self.close_destination(remote.to);
        }
    }

    /// The lane has one user less, if it is one.
    fn close_destination(&mut self, to: Destination) {
        let Destination::Lane(lane) = to else {
            return;
        };
        if self.parts.links.leave(lane)
            && let Some(queue) = self.parts.wire.lane(lane)
        {
            queue.clear();
        }
    }

    /// Takes packets from other devices.
    pub(super) fn receive(&mut self, now_ns: u64) -> bool {
        let mut claimed = self.inbox.claimed();
        let mut worked = false;
        while claimed != 0 {
            let lane = claimed.trailing_zeros() as usize;
            claimed &= claimed - 1;
            // Slots go back when what was in them is where it belongs.
            let mut read = 0;
            let mut last = None;
            for _ in 0..BURST {
                match self.inbox.receive(lane, read) {
                    Arrival::Packet(count, header, start) => {
                        let len_bytes = u32::from(header.payload_bytes);
                        self.parts.sender = self.parts.host_behind(&header);
                        if self.parts.host_gid.is_some() && self.parts.sender.is_none() {
                            // Of a device that has told no address: by memory it is no peer of this one.
                            self.parts.counters.packets_dropped += 1;
                        } else {
                            let source = GatherSource::Lane { start, len_bytes };
                            self.dispatch(now_ns, &header, &source);
                        }
                        (read, last) = (read + 1, Some(count));
                    }
                    Arrival::Garbage(count) => {
                        self.parts.counters.packets_dropped += 1;
                        (read, last) = (read + 1, count);
                        if count.is_none() {
                            break;
                        }
                    }
                    Arrival::Empty => break,
                }
                worked = true;
                if read == GIVE_BACK {
                    self.give_back(now_ns, lane, last);
                    (read, last) = (0, None);
                }
            }
            self.give_back(now_ns, lane, last);
        }
        self.parts.sender = None;
        worked
    }

    fn give_back(&mut self, now_ns: u64, lane: usize, last: Option<u64>) {
        self.settle(now_ns);
        if let Some(count) = last {
            self.inbox.give_back(lane, count);
        }
    }

    /// Moves packets into the lanes of other devices.
    #[inline]
    pub(super) fn fill_lanes(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        let mut at = 0;
        // Requests and responses whose bytes cannot be read.
        let (mut lost, mut refused) = (Vec::new(), Vec::new());
        let slot_mask = self.parts.slot_mask();
        while let Some(index) = self.parts.wire.waiting(at) {
            let fabric = self.parts.fabric.as_ref();
            let link = self.parts.links.opened(fabric, index, now_ns);
            let Some(queue) = self.parts.wire.lane(index) else {
                at += 1;
                continue;
            };
            let before = queue.len();
            if let Some(PeerLink { lane, .. }) = link {
                let far = |packet: &Packet| match &packet.payload {
                    PacketPayload::Memory { spans, .. } => self.parts.keys.is_far(spans[0].lkey),
                    _ => false,
                };
                while let Some(packet) = queue.front() {
                    // Memory of other processes is read for several packets at once.
                    if queue.len() > 1 && far(packet) {
                        let passed =
                            pass_group(&self.parts.keys, &mut self.parts.copies, lane, queue);
                        queue.drain(..passed);
                        if passed > 0 {
                            continue;
                        }
                    }
                    let Some(packet) = queue.front() else { break };
                    let passage = pass(&self.parts.keys, &mut self.parts.copies, lane, packet);
                    if passage == Passage::Full {
                        break;
                    }
                    let Some(Packet { header, .. }) = queue.pop_front() else {
                        break;
                    };
                    if self.parts.copies.take_lost_source() {
                        lost.push(header);
                    }
                    if passage == Passage::Unreadable
                        && header.kind == PacketKind::ReadResponse
                        && is_refused_instead(&mut self.qps, slot_mask, &header, &refused)
                    {
                        // The slot is still there.
                        lane.send(&header.refused(), |_| true);
                        refused.push(header);
                    }
                }
                if queue.len() != before {
                    lane.wake_peer();
                }
            } else {
                // No such node: lost, as in a switch that has no such port.
                self.parts.counters.packets_dropped += before as u64;
                queue.clear();
            }
            worked |= queue.len() != before;
            if !self.parts.wire.forget_empty(at) {
                at += 1;
            }
        }
        if worked {
            self.release_held();
        }
        for header in lost {
            self.lose_source(now_ns, &header);
        }
        for header in refused {
            self.fail_responder(now_ns, &header);
        }
        worked
    }
}

impl DeviceCore {
    /// There is room again: those that waited for it go on.
    pub(super) fn release_held(&mut self) {
        for slot in self.lists.take_held() {
            if let Some(Some(qp)) = self.qps.get_mut(slot) {
                qp.held = false;
            }
            self.mark_active(slot);
        }
    }
}

/// What became of a packet that was to be put on a lane.
#[derive(PartialEq)]
enum Passage {
    /// The packet is on the lane, or is of a kind that does not go over lanes.
    Done,
    /// There is no room.
    Full,
    /// Its bytes cannot be read. The slot is not used.
    Unreadable,
}

/// Puts a packet on a lane.
#[inline]
#[allow(unsafe_code)] // slots are raw memory
fn pass(keys: &Keys, copies: &mut Copies, lane: &LaneWriter, packet: &Packet) -> Passage {
    let source = GatherSource::of(&packet.payload, packet.header.payload_bytes);
    if source.len_bytes() as usize > MAX_PAYLOAD_BYTES {
        return Passage::Done;
    }
    let mut filled = true;
    let sent = lane.send(&packet.header, |slot| {
        copies.begin_fetches();
        let begun = fill(keys, copies, &source, slot);
        // SAFETY: a slot of the lane, which is ours until it is published.
        filled = unsafe { copies.end_fetches() }.is_ok() && begun;
        filled
    });
    match (sent, filled) {
        (false, _) => Passage::Full,
        (true, true) => Passage::Done,
        (true, false) => Passage::Unreadable,
    }
}

/// Puts packets on a lane together: how many. None, if one of them has to be looked at alone.
#[allow(unsafe_code)] // slots are raw memory
fn pass_group(
    keys: &Keys,
    copies: &mut Copies,
    lane: &LaneWriter,
    queue: &VecDeque<Packet>,
) -> usize {
    let Some((first, room)) = lane.room() else {
        return 0;
    };
    copies.begin_fetches();
    let mut filled = 0;
    for (packet, count) in queue.iter().take(GROUP.min(room as usize)).zip(first..) {
        let source = GatherSource::of(&packet.payload, packet.header.payload_bytes);
        let fits = source.len_bytes() as usize <= MAX_PAYLOAD_BYTES;
        if !fits || !fill(keys, copies, &source, lane.payload(count)) {
            break;
        }
        filled += 1;
    }
    // SAFETY: slots of the lane, which are ours until they are published.
    if unsafe { copies.end_fetches() }.is_err() {
        // Of which packet, is found out when each goes alone.
        copies.take_lost_source();
        return 0;
    }
    for (packet, count) in queue.iter().take(filled).zip(first..) {
        lane.publish(count, &packet.header);
    }
    filled
}

/// Copies a payload into a lane's slot. `false` if the sender's memory is gone: the packet is then as good as lost.
#[allow(unsafe_code)] // a slot is raw memory
pub(super) fn fill(
    keys: &Keys,
    copies: &mut Copies,
    source: &GatherSource<'_>,
    slot: *mut u8,
) -> bool {
    // SAFETY: the slot has room for MAX_PAYLOAD_BYTES and is ours until it is published; the caller compared the length.
    unsafe {
        source.copy_to(
            keys,
            copies,
            0,
            SpaceAddress::local(slot),
            source.len_bytes(),
        )
    }
    .is_ok()
}
