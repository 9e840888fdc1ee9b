//! Packets from other devices and to them.

use std::collections::{HashMap, VecDeque};

use super::Core;
use crate::Result;
use crate::device::client::AddressVector;
use crate::device::copies::Copies;
use crate::device::fabric::{Fabric, NODES, node_of};
use crate::device::gather::Source;
use crate::device::inbox::{Arrival, Lane, PortAddress};
use crate::device::keys::Keys;
use crate::device::options::Link;
use crate::device::packet::{Kind, MAX_PAYLOAD_BYTES, Packet, Payload};
use crate::device::qp::Remote;
use crate::device::space::Place;
use crate::device::wire::Destination;

/// Packets taken from one lane before others have their turn.
const BURST: usize = 128;
/// After so many their slots are given back.
const GIVE_BACK: u64 = 32;
/// Packets that are put on a lane together.
const GROUP: usize = 16;

/// How soon a node whose lane could not be opened is tried again.
const REOPEN_NS: u64 = 10_000_000;
/// How long the answer is used that a peer still has its inbox.
const OWNED_NS: u64 = 1_000_000;

/// The way into another device.
#[derive(Debug)]
pub(crate) struct Way {
    lane: Lane,
    port: u64,
    /// Queue pairs that use it. The way to a node of a fabric stays without any.
    users: usize,
    /// When it was last found that the peer still has its inbox.
    found_ns: Option<u64>,
}

impl Way {
    fn open(to: &PortAddress) -> Result<Way> {
        Ok(Way {
            lane: Lane::open(to)?,
            port: to.port,
            users: 0,
            found_ns: None,
        })
    }

    /// Whether a process still has the inbox. The kernel is asked once in [`OWNED_NS`].
    fn is_owned(&mut self, now_ns: u64) -> bool {
        let fresh = |found_ns| now_ns.wrapping_sub(found_ns) < OWNED_NS;
        if !self.found_ns.is_some_and(fresh) {
            self.found_ns = self.lane.is_owned().then_some(now_ns);
        }
        self.found_ns.is_some()
    }
}

/// The ways out of a device. On a fabric the first ones are those to its nodes, by number.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    ways: Vec<Option<Way>>,
    by_port: HashMap<u64, usize>,
    /// By node: not before this time, and not to this port.
    closed: Vec<(u64, u64)>,
    nodes: usize,
}

impl Ways {
    pub(super) fn to_nodes() -> Ways {
        let nodes = usize::from(NODES) + 1;
        Ways {
            ways: std::iter::repeat_with(|| None).take(nodes).collect(),
            by_port: HashMap::new(),
            closed: vec![(0, 0); nodes],
            nodes,
        }
    }

    /// Opens the way to a node, or opens it anew if another device has the number now.
    fn open_to_node(&mut self, fabric: &Fabric, node: usize, now_ns: u64) -> Option<&Way> {
        let port = fabric.port(node as u16);
        let way = self.ways.get_mut(node)?;
        if way.as_ref().is_none_or(|way| way.port != port) {
            *way = None;
            let closed = self.closed.get_mut(node)?;
            if port == 0 || (closed.1 == port && now_ns < closed.0) {
                return None;
            }
            match fabric.address(node as u16).map(|to| Way::open(&to)) {
                Some(Ok(opened)) => *way = Some(opened),
                _ => *closed = (now_ns + REOPEN_NS, port),
            }
        }
        way.as_ref()
    }

    /// Whether packets lie there that a living process has not read: nothing is lost, its device has not had its turn.
    #[cold]
    pub(crate) fn is_behind(&mut self, to: Destination, now_ns: u64) -> bool {
        let Destination::Lane(index) = to else {
            return false;
        };
        let way = self.ways.get_mut(index).and_then(Option::as_mut);
        way.is_some_and(|way| !way.lane.is_read() && way.is_owned(now_ns))
    }
}

impl Core {
    pub(super) fn destination(&mut self, port: &PortAddress) -> Result<Destination> {
        if *port == self.inbox.address() {
            return Ok(Destination::Local);
        }
        let ways = &mut self.ways;
        if let Some(&lane) = ways.by_port.get(&port.port) {
            return Ok(Destination::Lane(lane));
        }
        let way = Way::open(port)?;
        let free = ways.ways.iter().skip(ways.nodes).position(Option::is_none);
        let at = free.map_or(ways.ways.len(), |free| ways.nodes + free);
        if at == ways.ways.len() {
            ways.ways.push(None);
        }
        ways.ways[at] = Some(way);
        ways.by_port.insert(port.port, at);
        Ok(Destination::Lane(at))
    }

    /// Sets where a queue pair's packets go. The other end is not asked whether it is there, and agreed on no connection number.
    pub(crate) fn aim_qp(&mut self, slot: usize, path: &AddressVector, qpn: u32) {
        let node = self.node_at(path).unwrap_or(0);
        let to = self.route(node);
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            qp.remote = Some(Remote {
                to,
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
        self.fabric
            .as_ref()
            .map_or(Destination::Local, |fabric| fabric.route(node))
    }

    /// The node that an address vector leads to.
    pub(crate) fn node_at(&self, path: &AddressVector) -> Option<u16> {
        let link = self.fabric.as_ref()?.link();
        let by_gid = || path.is_global.then(|| node_of(link, &path.dgid)).flatten();
        match link {
            // Within a subnet the LID routes, also where there is a GRH.
            Link::InfiniBand if (1..=NODES).contains(&path.dlid) => Some(path.dlid),
            _ => by_gid(),
        }
    }

    /// Counts a queue pair that uses this way.
    pub(super) fn enter_lane(&mut self, to: Destination) {
        if let Destination::Lane(lane) = to
            && let Some(Some(way)) = self.ways.ways.get_mut(lane)
        {
            way.users += 1;
        }
    }

    pub(super) fn leave_lane(&mut self, slot: usize) {
        let Some(Remote {
            to: Destination::Lane(lane),
            ..
        }) = self.qps[slot].as_ref().and_then(|qp| qp.remote)
        else {
            return;
        };
        if lane < self.ways.nodes {
            return;
        }
        let Some(entry) = self.ways.ways.get_mut(lane) else {
            return;
        };
        if let Some(way) = entry {
            way.users -= 1;
            if way.users == 0 {
                self.ways.by_port.remove(&way.port);
                if let Some(queue) = self.wire.lane(lane) {
                    queue.clear();
                }
                *entry = None;
            }
        }
    }

    /// Closes the ways to nodes that are no more. One that died in silence is looked for only where packets wait for room.
    pub(super) fn sweep_nodes(&mut self) {
        let Some(fabric) = &self.fabric else { return };
        for node in 1..self.ways.nodes {
            let Some(Some(way)) = self.ways.ways.get(node) else {
                continue;
            };
            let stuck = self.wire.lane(node).is_some_and(|queue| !queue.is_empty());
            let gone =
                fabric.port(node as u16) != way.port || (stuck && fabric.is_vacant(node as u16));
            if gone {
                self.ways.closed[node] = (u64::MAX, way.port);
                self.ways.ways[node] = None;
            }
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
                        self.dispatch(now_ns, &header, &Source::Lane { start, len_bytes });
                        (read, last) = (read + 1, Some(count));
                    }
                    Arrival::Garbage(count) => {
                        self.counters.packets_dropped += 1;
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
        // Requests whose bytes cannot be read.
        let mut lost = Vec::new();
        while let Some(index) = self.wire.waiting(at) {
            let way = match &self.fabric {
                Some(fabric) if index < self.ways.nodes => {
                    self.ways.open_to_node(fabric, index, now_ns)
                }
                _ => self.ways.ways.get(index).and_then(Option::as_ref),
            };
            let Some(queue) = self.wire.lane(index) else {
                at += 1;
                continue;
            };
            let before = queue.len();
            if let Some(Way { lane, .. }) = way {
                let far = |packet: &Packet| match &packet.payload {
                    Payload::Memory { spans, .. } => self.keys.is_far(spans[0].lkey),
                    _ => false,
                };
                while let Some(packet) = queue.front() {
                    // Memory of other processes is read for several packets at once.
                    if queue.len() > 1 && far(packet) {
                        let passed = pass_group(&self.keys, &mut self.copies, lane, queue);
                        queue.drain(..passed);
                        if passed > 0 {
                            continue;
                        }
                    }
                    let Some(packet) = queue.front() else { break };
                    if !pass(&self.keys, &mut self.copies, lane, packet) {
                        break;
                    }
                    let gone = queue.pop_front();
                    if self.copies.take_lost_source() {
                        lost.extend(gone.map(|packet| packet.header));
                    }
                }
                if queue.len() != before {
                    lane.ring();
                }
            } else {
                // Nobody is there: lost, as in a switch that has no such port.
                self.counters.packets_dropped += before as u64;
                queue.clear();
            }
            worked |= queue.len() != before;
            if !self.wire.forget_empty(at) {
                at += 1;
            }
        }
        if worked && !self.held.is_empty() {
            for slot in std::mem::take(&mut self.held) {
                if let Some(Some(qp)) = self.qps.get_mut(slot) {
                    qp.held = false;
                }
                self.enlist(slot);
            }
        }
        for header in lost {
            self.lose_source(now_ns, &header);
        }
        worked
    }
}

/// Puts a packet on a lane. `false` if there is no room.
#[inline]
#[allow(unsafe_code)] // slots are raw memory
fn pass(keys: &Keys, copies: &mut Copies, lane: &Lane, packet: &Packet) -> bool {
    let source = Source::of(&packet.payload, packet.header.payload_bytes);
    if source.len_bytes() as usize > MAX_PAYLOAD_BYTES {
        return true;
    }
    let mut filled = true;
    let sent = lane.send(&packet.header, |slot| {
        copies.begin_fetches();
        let begun = fill(keys, copies, &source, slot);
        // SAFETY: a slot of the lane, which is ours until it is published.
        filled = unsafe { copies.end_fetches() }.is_ok() && begun;
        filled
    });
    if !filled && packet.header.kind == Kind::ReadResponse {
        // The slot is still there.
        lane.send(&packet.header.refused(), |_| true);
    }
    sent
}

/// Puts packets on a lane together: how many. None, if one of them has to be looked at alone.
#[allow(unsafe_code)] // slots are raw memory
fn pass_group(keys: &Keys, copies: &mut Copies, lane: &Lane, queue: &VecDeque<Packet>) -> usize {
    let Some((first, room)) = lane.room() else {
        return 0;
    };
    copies.begin_fetches();
    let mut filled = 0;
    for (packet, count) in queue.iter().take(GROUP.min(room as usize)).zip(first..) {
        let source = Source::of(&packet.payload, packet.header.payload_bytes);
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
fn fill(keys: &Keys, copies: &mut Copies, source: &Source<'_>, slot: *mut u8) -> bool {
    // SAFETY: the slot has room for MAX_PAYLOAD_BYTES and is ours until it is published; the caller compared the length.
    unsafe { source.copy_to(keys, copies, 0, Place::local(slot), source.len_bytes()) }.is_ok()
}
