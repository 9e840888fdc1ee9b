//! Packets from other devices and to them.

use super::Core;
use crate::Result;
use crate::soft::copies::Copies;
use crate::soft::gather::Source;
use crate::soft::inbox::{Arrival, Lane, PortAddress};
use crate::soft::keys::Keys;
use crate::soft::packet::{Kind, MAX_PAYLOAD_BYTES};
use crate::soft::qp::Remote;
use crate::soft::space::Place;
use crate::soft::wire::Destination;

/// Packets taken from one lane before others have their turn.
const BURST: usize = 128;

impl Core {
    pub(super) fn destination(&mut self, port: &PortAddress) -> Result<Destination> {
        if *port == self.inbox.address() {
            return Ok(Destination::Local);
        }
        if let Some(&lane) = self.lane_of.get(&port.port) {
            return Ok(Destination::Lane(lane));
        }
        let opened = Lane::open(port)?;
        let lane = self
            .lanes
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.lanes.len());
        if lane == self.lanes.len() {
            self.lanes.push(None);
        }
        self.lanes[lane] = Some((opened, port.port, 0));
        self.lane_of.insert(port.port, lane);
        Ok(Destination::Lane(lane))
    }

    pub(super) fn leave_lane(&mut self, slot: usize) {
        let Some(Remote {
            to: Destination::Lane(lane),
            ..
        }) = self.qps[slot].as_ref().and_then(|qp| qp.remote)
        else {
            return;
        };
        if let Some(Some((_, port, users))) = self.lanes.get_mut(lane) {
            *users -= 1;
            if *users == 0 {
                self.lane_of.remove(port);
                self.wire.lane(lane).clear();
                self.lanes[lane] = None;
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
            for _ in 0..BURST {
                match self.inbox.receive(lane) {
                    Arrival::Packet(count, header, start) => {
                        let len_bytes = u32::from(header.payload_bytes);
                        self.dispatch(now_ns, &header, &Source::Lane { start, len_bytes });
                        self.inbox.give_back(lane, count);
                    }
                    Arrival::Garbage => self.counters.packets_dropped += 1,
                    Arrival::Empty => break,
                }
                worked = true;
            }
        }
        worked
    }

    /// Moves packets into the lanes of other devices.
    pub(super) fn fill_lanes(&mut self) -> bool {
        let mut worked = false;
        for (index, lane) in self.lanes.iter().enumerate() {
            let Some((lane, ..)) = lane else { continue };
            let queue = self.wire.lane(index);
            let before = queue.len();
            while let Some(packet) = queue.front() {
                let source = Source::of(&packet.payload, packet.header.payload_bytes);
                let mut filled = true;
                if source.len_bytes() as usize <= MAX_PAYLOAD_BYTES
                    && !lane.send(&packet.header, |slot| {
                        filled = fill(&self.keys, &mut self.copies, &source, slot);
                        filled
                    })
                {
                    break;
                }
                if !filled && packet.header.kind == Kind::ReadResponse {
                    // The slot is still there.
                    lane.send(&packet.header.refused(), |_| true);
                }
                queue.pop_front();
            }
            if queue.len() != before {
                worked = true;
                lane.ring();
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
        worked
    }
}

/// Copies a payload into a lane's slot. `false` if the sender's memory is gone: the packet is then as good as lost.
#[allow(unsafe_code)] // a slot is raw memory
fn fill(keys: &Keys, copies: &mut Copies, source: &Source<'_>, slot: *mut u8) -> bool {
    // SAFETY: the slot has room for MAX_PAYLOAD_BYTES and is ours until it is published; the caller compared the length.
    unsafe { source.copy_to(keys, copies, 0, Place::local(slot), source.len_bytes()) }.is_ok()
}
