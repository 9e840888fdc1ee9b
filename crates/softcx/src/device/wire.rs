//! The wire: where packets of one device are on their way, and where faults are injected.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use crate::device::faults::Faults;
use crate::device::packet::Packet;

/// Events of which a fault may pick one by its number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counted {
    Packet,
    Request,
    Response,
    Send,
    Recv,
    Completion,
}

const REORDER_NS: u64 = 50_000;

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): small, seedable, and good
/// enough to decide which packet is lost.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

/// Where a connection's packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A queue pair of the same device.
    Local,
    /// The lane with this index into another device.
    Lane(usize),
    /// The device at this address, by UDP.
    Host([u8; 16]),
    /// No device has this address: packets are lost.
    Nowhere,
}

#[derive(Debug)]
struct DelayedPacket {
    at_ns: u64,
    order: u64,
    to: Destination,
    packet: Packet,
}

impl PartialEq for DelayedPacket {
    fn eq(&self, other: &DelayedPacket) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for DelayedPacket {}
impl PartialOrd for DelayedPacket {
    fn partial_cmp(&self, other: &DelayedPacket) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for DelayedPacket {
    fn cmp(&self, other: &DelayedPacket) -> Ordering {
        // The heap's greatest is the earliest, and first in first out among equals.
        (other.at_ns, other.order).cmp(&(self.at_ns, self.order))
    }
}

/// How far the failure of a device is that a fault has fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceFailure {
    /// It has not failed.
    None,
    /// It has, and works on.
    Working,
    /// It does nothing more.
    Over,
}

/// The link, as far as faults have it.
#[derive(Debug, Default)]
struct LinkState {
    start_ns: Option<u64>,
    down: bool,
    /// The port's GID has moved.
    gid_moved: bool,
}

/// Packets between queue pairs of one device, packets that faults hold back, and packets for lanes.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    local: Vec<Packet>,
    spare: Vec<Packet>,
    faults: Option<(Faults, Random)>,
    /// Some of them are about packets on their way.
    is_bad: bool,
    counts: [u64; 6],
    link: LinkState,
    late: BinaryHeap<DelayedPacket>,
    order: u64,
    outgoing: Vec<VecDeque<Packet>>,
    /// Packets for other hosts, with their addresses.
    hosts: VecDeque<([u8; 16], Packet)>,
    /// The lanes for which something waits.
    waiting: Vec<usize>,
}

impl Wire {
    /// Sets what happens to packets from now on.
    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.counts = [0; 6];
        self.link = LinkState::default();
        let shares = faults.loss + faults.duplicate + faults.reorder;
        let times = faults.delay_ns | faults.down_ns.1 | faults.drop_nth;
        self.is_bad = shares > 0.0 || times > 0;
        self.faults = (faults
            != Faults {
                seed: faults.seed,
                ..Faults::default()
            })
        .then_some((faults, Random(faults.seed)));
    }

    /// Whether anything is to go wrong at all.
    #[inline]
    pub(crate) fn is_faulty(&self) -> bool {
        self.faults.is_some()
    }

    /// How long a write that arrives is not placed.
    #[inline]
    pub(crate) fn late_writes_ns(&self) -> u64 {
        self.faults
            .as_ref()
            .map_or(0, |(faults, _)| faults.late_writes_ns)
    }

    /// How long a packet that does not end its message is not placed.
    #[inline]
    pub(crate) fn late_packets_ns(&self) -> u64 {
        self.faults
            .as_ref()
            .map_or(0, |(faults, _)| faults.late_packets_ns)
    }

    /// How long behind a doorbell work requests are read; see [`Faults::fetch_ns`].
    #[inline]
    pub(crate) fn fetch_ns(&self) -> Option<u64> {
        self.faults.as_ref().and_then(|(faults, _)| faults.fetch_ns)
    }

    /// Counts an event: whether a fault picks this one, and with what code.
    #[inline]
    pub(crate) fn fault_code(&mut self, event: Counted) -> Option<u8> {
        self.faults.as_ref()?;
        self.fault_code_now(event)
    }

    #[cold]
    fn fault_code_now(&mut self, event: Counted) -> Option<u8> {
        let (faults, _) = self.faults.as_ref()?;
        let (nth, code) = match event {
            Counted::Packet => (faults.drop_nth, 0),
            Counted::Request => faults.refuse,
            Counted::Response => (faults.garble_nth, 0),
            Counted::Send => faults.fail_send,
            Counted::Recv => faults.fail_recv,
            Counted::Completion => (faults.overrun_nth, 0),
        };
        let count = &mut self.counts[event as usize];
        *count += 1;
        (*count == nth).then_some(code)
    }

    /// Whether the link is down: nothing comes in either.
    #[inline]
    pub(crate) fn is_down(&self) -> bool {
        self.link.down
    }

    /// Whether the link has gone down or up since the last call.
    #[inline]
    pub(crate) fn link_change(&mut self, now_ns: u64) -> Option<bool> {
        let (faults, _) = self.faults.as_ref()?;
        let (after, down_for) = faults.down_ns;
        if down_for == 0 {
            return None;
        }
        let since = now_ns - *self.link.start_ns.get_or_insert(now_ns);
        let down = since >= after && since - after < down_for;
        let changed = down != self.link.down;
        self.link.down = down;
        changed.then_some(!down)
    }

    /// Whether the port's GID is to move now: once.
    pub(crate) fn gid_moves(&mut self, now_ns: u64) -> bool {
        let Some((faults, _)) = self.faults.as_ref() else {
            return false;
        };
        let since = now_ns - *self.link.start_ns.get_or_insert(now_ns);
        let moves = faults.gid_ns != 0 && since >= faults.gid_ns && !self.link.gid_moved;
        self.link.gid_moved |= moves;
        moves
    }

    /// Whether the device is to be gone by now.
    pub(crate) fn is_gone(&mut self, now_ns: u64) -> bool {
        let Some((faults, _)) = self.faults.as_ref() else {
            return false;
        };
        let since = now_ns - *self.link.start_ns.get_or_insert(now_ns);
        faults.gone_ns != 0 && since >= faults.gone_ns
    }

    /// Whether the device has failed by now, and whether it still works.
    pub(crate) fn failure(&mut self, now_ns: u64) -> DeviceFailure {
        let Some((faults, _)) = self.faults.as_ref() else {
            return DeviceFailure::None;
        };
        let (after, works_for) = faults.fatal_ns;
        if (after, works_for) == (0, 0) {
            return DeviceFailure::None;
        }
        let since = now_ns - *self.link.start_ns.get_or_insert(now_ns);
        match since {
            _ if since < after => DeviceFailure::None,
            _ if since - after < works_for => DeviceFailure::Working,
            _ => DeviceFailure::Over,
        }
    }

    /// How long a queue pair in error does not flush.
    #[inline]
    pub(crate) fn flush_ns(&self) -> u64 {
        (self.faults.as_ref()).map_or(0, |(faults, _)| faults.flush_ns)
    }

    /// Sends a packet off.
    #[inline]
    pub(crate) fn send(&mut self, now_ns: u64, to: Destination, packet: Packet) {
        if self.is_bad {
            return self.send_with_faults(now_ns, to, packet);
        }
        self.deliver(to, packet);
    }

    #[inline]
    fn deliver(&mut self, to: Destination, packet: Packet) {
        match to {
            Destination::Local => self.local.push(packet),
            Destination::Lane(lane) => self.queue(lane, packet),
            Destination::Host(gid) => self.hosts.push_back((gid, packet)),
            Destination::Nowhere => {}
        }
    }

    #[cold]
    fn send_with_faults(&mut self, now_ns: u64, to: Destination, packet: Packet) {
        let dropped = self.fault_code_now(Counted::Packet).is_some();
        let Some((faults, random)) = &mut self.faults else {
            return;
        };
        if dropped || self.link.down || random.happens(faults.loss) {
            return;
        }
        let copies = 1 + usize::from(random.happens(faults.duplicate));
        for _ in 0..copies {
            let held = if random.happens(faults.reorder) {
                random.next() % REORDER_NS
            } else {
                0
            };
            let at_ns = now_ns + faults.delay_ns + held;
            self.order += 1;
            self.late.push(DelayedPacket {
                at_ns,
                order: self.order,
                to,
                packet: packet.clone(),
            });
        }
    }

    /// Lets packets go whose time has come. Whether there were any.
    pub(crate) fn advance(&mut self, now_ns: u64) -> bool {
        let mut any = false;
        while self.late.peek().is_some_and(|late| late.at_ns <= now_ns) {
            if let Some(late) = self.late.pop() {
                self.deliver(late.to, late.packet);
                any = true;
            }
        }
        any
    }

    /// When the next held-back packet is due.
    pub(crate) fn next_due_ns(&self) -> Option<u64> {
        self.late.peek().map(|late| late.at_ns)
    }

    /// Whether a packet that arrives is lost.
    #[inline]
    pub(crate) fn loses_arrival(&mut self) -> bool {
        self.faults
            .as_mut()
            .is_some_and(|(faults, random)| random.happens(faults.arrival_loss))
    }

    /// All packets that have arrived for queue pairs of this device, oldest first. They are looked at where they lie: taking
    /// them out one by one is a copy of 150 bytes right behind the one that put them in.
    #[inline]
    pub(crate) fn take_arrived(&mut self) -> Vec<Packet> {
        std::mem::replace(&mut self.local, std::mem::take(&mut self.spare))
    }

    /// Takes the memory of [`Wire::take_arrived`] back, for the next packets.
    #[inline]
    pub(crate) fn give_back(&mut self, mut packets: Vec<Packet>) {
        packets.clear();
        self.spare = packets;
    }

    #[inline]
    fn queue(&mut self, lane: usize, packet: Packet) {
        if self.outgoing.len() <= lane {
            self.outgoing.resize_with(lane + 1, VecDeque::new);
        }
        if self.outgoing[lane].is_empty() {
            self.waiting.push(lane);
        }
        self.outgoing[lane].push_back(packet);
    }

    /// A lane for which something waits, by its place in the list of those.
    #[inline]
    pub(crate) fn waiting(&self, at: usize) -> Option<usize> {
        self.waiting.get(at).copied()
    }

    /// What waits for a lane, oldest first.
    pub(crate) fn lane(&mut self, lane: usize) -> Option<&mut VecDeque<Packet>> {
        self.outgoing.get_mut(lane)
    }

    /// Takes the lane at this place off the list if nothing waits for it. Whether it was taken off.
    #[inline]
    pub(crate) fn forget_empty(&mut self, at: usize) -> bool {
        let empty = self
            .waiting(at)
            .is_some_and(|lane| self.outgoing.get(lane).is_none_or(VecDeque::is_empty));
        if empty {
            self.waiting.swap_remove(at);
        }
        empty
    }

    /// Whether anything waits for room on a lane or in a socket.
    pub(crate) fn any_for_others(&self) -> bool {
        !self.waiting.is_empty() || !self.hosts.is_empty()
    }

    /// What waits for other hosts, oldest first.
    #[inline]
    pub(crate) fn for_hosts(&mut self) -> &mut VecDeque<([u8; 16], Packet)> {
        &mut self.hosts
    }

    /// Whether a requester should wait before it sends more this way: its packets would only pile up here.
    #[inline]
    pub(crate) fn congested(&self, to: Destination) -> bool {
        match to {
            Destination::Local | Destination::Nowhere => false,
            Destination::Host(_) => self.hosts.len() >= LANE_BACKLOG,
            Destination::Lane(lane) => self
                .outgoing
                .get(lane)
                .is_some_and(|queue| queue.len() >= LANE_BACKLOG),
        }
    }
}

/// Packets that may wait for room on one lane, or in the sockets, before requesters hold back. Answers are not held back: a requester's window
/// bounds them.
const LANE_BACKLOG: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::packet::{Header, PacketKind, PacketPayload};

    fn packet(psn: u32) -> Packet {
        Packet {
            header: Header::new(PacketKind::Send, 1, psn, 0),
            payload: PacketPayload::Empty,
        }
    }

    fn run(faults: Faults) -> Vec<u32> {
        let mut wire = Wire::default();
        wire.set_faults(faults);
        for psn in 0..1000 {
            wire.send(u64::from(psn) * 1000, Destination::Local, packet(psn));
        }
        wire.advance(u64::MAX);
        wire.take_arrived()
            .iter()
            .map(|packet| packet.header.psn)
            .collect()
    }

    #[test]
    fn a_good_wire_keeps_number_and_order() {
        assert_eq!(run(Faults::default()), (0..1000).collect::<Vec<_>>());
        assert_eq!(
            run(Faults {
                delay_ns: 5,
                ..Faults::default()
            }),
            (0..1000).collect::<Vec<_>>()
        );
    }

    #[test]
    fn faults_happen_about_as_often_as_asked_and_the_same_each_time() {
        let lossy = Faults {
            loss: 0.2,
            seed: 3,
            ..Faults::default()
        };
        let arrived = run(lossy);
        assert!((700..900).contains(&arrived.len()), "{}", arrived.len());
        assert_eq!(arrived, run(lossy));
        assert_ne!(arrived, run(Faults { seed: 4, ..lossy }));
        let doubled = run(Faults {
            duplicate: 0.5,
            ..Faults::default()
        });
        assert!((1400..1600).contains(&doubled.len()), "{}", doubled.len());
        let mixed = run(Faults {
            reorder: 0.3,
            ..Faults::default()
        });
        assert_eq!(mixed.len(), 1000);
        assert!(!mixed.is_sorted());
    }
}
