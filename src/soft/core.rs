//! The device itself: its objects, and one turn of its work. It has no clock and no thread; both are given to it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{Ordering, fence};

use crate::mlx5::Doorbell;
use crate::soft::cq::Cq;
use crate::soft::dma::Register;
use crate::soft::gather::{Gather, Source};
use crate::soft::inbox::{Arrival, Inbox, Lane, PortAddress};
use crate::soft::keys::Keys;
use crate::soft::packet::{Header, Kind, MAX_PAYLOAD_BYTES, Packet};
use crate::soft::qp::{Attributes, Context, Counters, Parts, Qp, Remote, State};
use crate::soft::requester::Pause;
use crate::soft::wire::{Destination, Faults, Wire};
use crate::{Error, Result};

/// Queue pairs of one device: 16 bits of the number, the other 8 are a generation.
const MAX_QPS: usize = 1 << 16;
/// Turns without a doorbell after which a register is looked at only now and then.
const HOT_TURNS: u16 = 2048;
/// Registers of idle queue pairs looked at in one turn, for doorbells of which nobody told: a thousand idle pairs cost a turn
/// what one costs.
const COLD_LOOKS: usize = 1;
/// Packets taken from one lane before others have their turn.
const BURST: usize = 128;
/// Timers and failed queue pairs are looked at this often.
const TICK_NS: u64 = 20_000;
/// A full lane is tried again this often, if nothing else happens.
const LANE_RETRY_NS: u64 = 50_000;
/// Lanes are looked over for dead writers this often.
const SWEEP_NS: u64 = 20_000_000;

/// Splits the core into the parts that a queue pair works with; the queue pairs themselves stay apart.
macro_rules! context {
    ($core:ident, $now_ns:expr) => {
        &mut Context {
            now_ns: $now_ns,
            cqs: &mut $core.cqs,
            keys: &$core.keys,
            wire: &mut $core.wire,
            counters: &mut $core.counters,
            gather: &mut $core.gather,
        }
    };
}

/// A queue pair's UAR registers and how long ago they were rung.
#[derive(Debug)]
struct Uar {
    registers: [Register; 2],
    quiet_turns: u16,
}

#[derive(Debug)]
pub(crate) struct Core {
    qps: Vec<Option<Box<Qp>>>,
    uars: Vec<Option<Uar>>,
    generations: Vec<u8>,
    free_qps: VecDeque<usize>,
    cqs: Vec<Option<Cq>>,
    pub(crate) keys: Keys,
    wire: Wire,
    pub(crate) counters: Counters,
    gather: Box<Gather>,
    next_pd: u32,
    /// Queue pairs whose registers are looked at every turn, and where the look at the others goes on.
    hot: Vec<usize>,
    cold: usize,
    /// Queue pairs with something to send, something to answer, a timer, or something to flush.
    ready: VecDeque<usize>,
    answering: VecDeque<usize>,
    timed: Vec<usize>,
    failed: Vec<usize>,
    /// Queue pairs that wait for room on a lane.
    held: Vec<usize>,
    inbox: Inbox,
    lanes: Vec<Option<(Lane, u64, usize)>>,
    lane_of: HashMap<u64, usize>,
    next_tick_ns: u64,
    next_sweep_ns: u64,
    /// A stuck device, for tests of what waits for it.
    pub(crate) frozen: bool,
}

impl Core {
    pub(crate) fn new() -> Result<Core> {
        Ok(Core {
            qps: Vec::new(),
            uars: Vec::new(),
            generations: Vec::new(),
            free_qps: VecDeque::new(),
            cqs: Vec::new(),
            keys: Keys::default(),
            wire: Wire::default(),
            counters: Counters::default(),
            gather: Box::default(),
            next_pd: 1,
            hot: Vec::new(),
            cold: 0,
            ready: VecDeque::new(),
            answering: VecDeque::new(),
            timed: Vec::new(),
            failed: Vec::new(),
            held: Vec::new(),
            inbox: Inbox::new()?,
            lanes: Vec::new(),
            lane_of: HashMap::new(),
            next_tick_ns: 0,
            next_sweep_ns: 0,
            frozen: false,
        })
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.wire.set_faults(faults);
    }

    pub(crate) fn create_pd(&mut self) -> u32 {
        self.next_pd += 1;
        self.next_pd - 1
    }

    pub(crate) fn create_cq(&mut self, cq: Cq) -> usize {
        let slot = self
            .cqs
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.cqs.len());
        if slot == self.cqs.len() {
            self.cqs.push(None);
        }
        self.cqs[slot] = Some(cq);
        slot
    }

    pub(crate) fn destroy_cq(&mut self, cq: usize) {
        if let Some(slot) = self.cqs.get_mut(cq) {
            *slot = None;
        }
    }

    /// Reserves a queue pair number: slot, and the number itself.
    pub(crate) fn reserve_qp(&mut self) -> Result<(usize, u32)> {
        // A freed slot is used again last: late packets for its old number should find nobody.
        let slot = if self.qps.len() < 1024 || self.free_qps.is_empty() {
            if self.qps.len() == MAX_QPS {
                return Err(Error::State {
                    operation: "create_qp",
                    reason: format!("the device has {MAX_QPS} queue pairs"),
                });
            }
            self.qps.push(None);
            self.uars.push(None);
            self.generations.push(0);
            self.qps.len() - 1
        } else {
            self.free_qps.pop_front().unwrap_or_default()
        };
        self.generations[slot] = self.generations[slot].wrapping_add(1).max(1);
        Ok((slot, u32::from(self.generations[slot]) << 16 | slot as u32))
    }

    pub(crate) fn create_qp(&mut self, slot: usize, parts: Parts) -> &Qp {
        self.uars[slot] = Some(Uar {
            registers: parts.uar,
            quiet_turns: HOT_TURNS,
        });
        self.qps[slot].insert(Box::new(Qp::new(parts)))
    }

    pub(crate) fn destroy_qp(&mut self, slot: usize) {
        self.leave_lane(slot);
        self.qps[slot] = None;
        self.uars[slot] = None;
        self.hot.retain(|&hot| hot != slot);
        self.ready.retain(|&ready| ready != slot);
        self.answering.retain(|&answering| answering != slot);
        self.timed.retain(|&timed| timed != slot);
        self.failed.retain(|&failed| failed != slot);
        self.held.retain(|&held| held != slot);
        self.free_qps.push_back(slot);
    }

    fn leave_lane(&mut self, slot: usize) {
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

    fn qp_mut(&mut self, slot: usize) -> Result<&mut Qp> {
        let gone = Error::State {
            operation: "modify_qp",
            reason: "the queue pair is gone".into(),
        };
        self.qps
            .get_mut(slot)
            .and_then(Option::as_deref_mut)
            .ok_or(gone)
    }

    fn transition(&mut self, slot: usize, to: State) -> Result<&mut Qp> {
        let qp = self.qp_mut(slot)?;
        let from = qp.state();
        if from.allows(to) {
            Ok(qp)
        } else {
            Err(Error::State {
                operation: "modify_qp",
                reason: format!("{from:?} does not lead to {to:?}"),
            })
        }
    }

    /// RESET to INIT.
    pub(crate) fn init_qp(&mut self, slot: usize, attributes: Attributes) -> Result<()> {
        attributes.check()?;
        let qp = self.transition(slot, State::Init)?;
        qp.attributes = attributes;
        qp.set_state(State::Init);
        Ok(())
    }

    /// INIT to RTR: from now on the other end's packets are taken. `psn` and `connection` are what it will use.
    pub(crate) fn ready_to_receive(
        &mut self,
        slot: usize,
        port: &PortAddress,
        qpn: u32,
        own: (u32, u32),
        remote: (u32, u32),
    ) -> Result<()> {
        self.transition(slot, State::ReadyToReceive)?;
        let to = self.destination(port)?;
        let (psn, connection) = own;
        let qp = self.qp_mut(slot)?;
        qp.remote = Some(Remote {
            to,
            qpn,
            connection: remote.1,
        });
        qp.connection = connection;
        qp.requester.connect(psn);
        qp.responder.connect(remote.0);
        qp.set_state(State::ReadyToReceive);
        if let Destination::Lane(lane) = to
            && let Some(Some((_, _, users))) = self.lanes.get_mut(lane)
        {
            *users += 1;
        }
        Ok(())
    }

    fn destination(&mut self, port: &PortAddress) -> Result<Destination> {
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

    /// RTR to RTS.
    pub(crate) fn ready_to_send(&mut self, slot: usize) -> Result<()> {
        self.transition(slot, State::ReadyToSend)?
            .set_state(State::ReadyToSend);
        self.enlist(slot);
        Ok(())
    }

    /// Any state to ERR. When this returns, everything posted is flushed and the device writes nothing more but flushes.
    pub(crate) fn fail_qp(&mut self, slot: usize, now_ns: u64) {
        if let Some(qp) = self.qps.get_mut(slot).and_then(Option::as_mut) {
            // What was rung before this call counts as posted.
            if let Some(Some(uar)) = self.uars.get(slot) {
                ring(qp, uar, &mut self.counters);
            }
            qp.enter_error(context!(self, now_ns));
        }
        self.enlist(slot);
    }

    /// Any state to RESET.
    pub(crate) fn reset_qp(&mut self, slot: usize) {
        self.leave_lane(slot);
        if let Some(Some(uar)) = self.uars.get(slot) {
            for register in uar.registers {
                register.take();
            }
        }
        self.held.retain(|&held| held != slot);
        if let Some(qp) = self.qps.get_mut(slot).and_then(Option::as_mut) {
            qp.held = false;
            qp.reset();
            let cqs = [qp.parts.send_cq, qp.parts.recv_cq];
            for cq in cqs {
                if let Some(Some(cq)) = self.cqs.get_mut(cq) {
                    cq.reset();
                }
            }
        }
        self.failed.retain(|&failed| failed != slot);
    }

    /// Puts a queue pair on the lists where it belongs.
    #[inline]
    fn enlist(&mut self, slot: usize) {
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        let state = qp.state();
        if !qp.ready && !qp.held && state == State::ReadyToSend && qp.requester.has_work() {
            qp.ready = true;
            self.ready.push_back(slot);
        }
        if !qp.answering && !qp.held && qp.owes_answer() {
            qp.answering = true;
            self.answering.push_back(slot);
        }
        if !qp.timed && qp.requester.next_timer_ns().is_some() {
            qp.timed = true;
            self.timed.push(slot);
        }
        if state == State::Error && !self.failed.contains(&slot) {
            self.failed.push(slot);
        }
    }

    /// One turn of the device's work. Whether there was any.
    pub(crate) fn turn(&mut self, now_ns: u64) -> bool {
        if self.frozen {
            return false;
        }
        let mut worked = self.look_at_doorbells();
        worked |= self.receive(now_ns);
        worked |= self.wire.advance(now_ns);
        if now_ns >= self.next_tick_ns {
            self.next_tick_ns = now_ns + TICK_NS;
            worked |= self.tick(now_ns);
        }
        // A message and its acknowledgement inside one device need three rounds.
        for _ in 0..4 {
            let mut round = self.transmit(now_ns);
            round |= self.deliver(now_ns);
            round |= self.send_answers(now_ns);
            worked |= round;
            if !round {
                break;
            }
        }
        worked | self.fill_lanes()
    }

    /// When the device needs a turn though nothing comes from outside; `None` for never.
    pub(crate) fn next_due_ns(&self, now_ns: u64) -> Option<u64> {
        if self.frozen {
            return None;
        }
        let timers = self
            .timed
            .iter()
            .filter_map(|&slot| self.qps.get(slot)?.as_ref()?.requester.next_timer_ns());
        let now = !self.ready.is_empty() || !self.answering.is_empty();
        let lanes_full = self.wire.any_for_lanes().then_some(now_ns + LANE_RETRY_NS);
        timers
            .chain(self.wire.next_due_ns())
            .chain(now.then_some(now_ns))
            .chain(lanes_full)
            .min()
    }

    #[inline]
    fn look_at_doorbells(&mut self) -> bool {
        let mut worked = false;
        let mut at = 0;
        while let Some(&slot) = self.hot.get(at) {
            let rung = self.look_at(slot);
            worked |= rung;
            let quiet = match self.uars.get_mut(slot) {
                Some(Some(uar)) if rung => {
                    uar.quiet_turns = 0;
                    false
                }
                Some(Some(uar)) => {
                    uar.quiet_turns += 1;
                    uar.quiet_turns >= HOT_TURNS
                }
                _ => true,
            };
            if quiet && !self.stop_watching(slot) {
                self.hot.swap_remove(at);
            } else {
                at += 1;
            }
        }
        worked | self.look_at_idle(COLD_LOOKS)
    }

    /// Looks at the registers of this queue pair in every turn from now on: somebody says that it was rung.
    pub(crate) fn watch(&mut self, slot: usize) {
        let (Some(Some(uar)), Some(Some(qp))) = (self.uars.get_mut(slot), self.qps.get(slot))
        else {
            return;
        };
        if uar.quiet_turns >= HOT_TURNS {
            self.hot.push(slot);
        }
        uar.quiet_turns = 0;
        qp.status.set_watched(true);
    }

    /// Watches no more, unless it was rung just now.
    #[cold]
    fn stop_watching(&mut self, slot: usize) -> bool {
        let Some(Some(qp)) = self.qps.get(slot) else {
            return false;
        };
        qp.status.set_watched(false);
        // Orders the flag before the last look; pairs with the fence in `QueuePair::rung`, between the doorbell and the flag.
        fence(Ordering::SeqCst);
        let rung = self.look_at(slot);
        if rung
            && let (Some(Some(uar)), Some(Some(qp))) = (self.uars.get_mut(slot), self.qps.get(slot))
        {
            uar.quiet_turns = 0;
            qp.status.set_watched(true);
        }
        rung
    }

    /// Looks at up to `count` registers that no turn looks at, going on where the last look ended. Whether one was rung.
    pub(crate) fn look_at_idle(&mut self, count: usize) -> bool {
        let mut found = false;
        for _ in 0..count.min(self.uars.len()) {
            self.cold = if self.cold + 1 < self.uars.len() {
                self.cold + 1
            } else {
                0
            };
            let slot = self.cold;
            let cold =
                matches!(self.uars.get(slot), Some(Some(uar)) if uar.quiet_turns >= HOT_TURNS);
            if cold && self.look_at(slot) {
                self.watch(slot);
                found = true;
            }
        }
        found
    }

    /// Whether something could be done right now.
    pub(crate) fn has_more_to_do(&self) -> bool {
        !self.ready.is_empty() || !self.answering.is_empty()
    }

    #[inline]
    fn look_at(&mut self, slot: usize) -> bool {
        let (Some(Some(uar)), Some(Some(qp))) = (self.uars.get(slot), self.qps.get_mut(slot))
        else {
            return false;
        };
        if !ring(qp, uar, &mut self.counters) {
            return false;
        }
        self.enlist(slot);
        true
    }

    #[inline]
    fn transmit(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        for _ in 0..self.ready.len() {
            let Some(slot) = self.ready.pop_front() else {
                break;
            };
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                continue;
            };
            let before = self.counters.packets_sent + self.counters.completions;
            match qp.transmit(context!(self, now_ns)) {
                Pause::Idle => qp.ready = false,
                Pause::Burst => self.ready.push_back(slot),
                Pause::Congested => {
                    qp.ready = false;
                    qp.held = true;
                    self.held.push(slot);
                }
            }
            worked |= self.counters.packets_sent + self.counters.completions != before;
            self.enlist_others(slot);
        }
        worked
    }

    /// [`Core::enlist`] without the list of those with something to send, from which the caller has just taken it.
    #[inline]
    fn enlist_others(&mut self, slot: usize) {
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        let ready = std::mem::replace(&mut qp.ready, true);
        self.enlist(slot);
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            qp.ready = ready;
        }
    }

    #[inline]
    fn deliver(&mut self, now_ns: u64) -> bool {
        let packets = self.wire.take_arrived();
        for Packet { header, payload } in &packets {
            self.dispatch(now_ns, header, &Source::of(payload, header.payload_bytes));
        }
        let worked = !packets.is_empty();
        self.wire.give_back(packets);
        worked
    }

    #[inline]
    fn dispatch(&mut self, now_ns: u64, header: &Header, source: &Source<'_>) {
        let slot = (header.dst_qpn & 0xffff) as usize;
        let receiver = self.qps.get_mut(slot).and_then(Option::as_mut);
        let Some(qp) = receiver.filter(|qp| {
            qp.parts.qpn == header.dst_qpn
                && qp.connection == header.connection
                && qp.remote.is_some()
        }) else {
            self.counters.packets_dropped += 1;
            return;
        };
        self.counters.packets_received += 1;
        let context = context!(self, now_ns);
        if header.kind.is_request() {
            qp.on_request(context, header, source);
        } else if qp.state() == State::ReadyToSend {
            match header.kind {
                Kind::Ack => qp.on_ack(context, header),
                _ => qp.on_response(context, header, source),
            }
        }
        self.enlist(slot);
    }

    #[inline]
    fn send_answers(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        for _ in 0..self.answering.len() {
            let Some(slot) = self.answering.pop_front() else {
                break;
            };
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                continue;
            };
            qp.answering = false;
            let before = self.counters.packets_sent;
            if qp.send_answers(context!(self, now_ns)) && !qp.held {
                let to = qp.remote.map(|remote| remote.to);
                if to.is_some_and(|to| self.wire.congested(to)) {
                    qp.held = true;
                    self.held.push(slot);
                }
            }
            worked |= self.counters.packets_sent != before;
            self.enlist(slot);
        }
        worked
    }

    /// A packet without payload that nobody sent.
    #[cfg(test)]
    pub(crate) fn inject(&mut self, header: &Header) {
        self.dispatch(0, header, &Source::Bytes(&[]));
    }

    /// Takes packets from other devices.
    fn receive(&mut self, now_ns: u64) -> bool {
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
    fn fill_lanes(&mut self) -> bool {
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
                        filled = fill(&self.keys, &source, slot);
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

    /// Timers, flushes of what was posted to failed queue pairs, and lanes without a writer.
    #[cold]
    fn tick(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        let mut at = 0;
        while let Some(&slot) = self.timed.get(at) {
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                self.timed.swap_remove(at);
                continue;
            };
            worked |= qp.on_timer(context!(self, now_ns));
            if qp.requester.next_timer_ns().is_none() {
                qp.timed = false;
                self.timed.swap_remove(at);
            } else {
                at += 1;
            }
            self.enlist(slot);
        }
        for at in 0..self.failed.len() {
            let Some(Some(qp)) = self.qps.get_mut(self.failed[at]) else {
                continue;
            };
            let before = self.counters.completions;
            qp.flush(context!(self, now_ns));
            worked |= self.counters.completions != before;
        }
        if now_ns >= self.next_sweep_ns {
            self.next_sweep_ns = now_ns + SWEEP_NS;
            self.inbox.sweep();
        }
        worked
    }
}

/// Takes a queue pair's doorbells. Whether there were any.
#[inline]
fn ring(qp: &mut Qp, uar: &Uar, counters: &mut Counters) -> bool {
    let mut rung = false;
    for register in uar.registers {
        let Some(value) = register.take() else {
            continue;
        };
        let doorbell = Doorbell::parse(value);
        if doorbell.qpn != qp.parts.qpn || matches!(qp.state(), State::Reset | State::Init) {
            continue;
        }
        rung = true;
        counters.doorbells += 1;
        let recorded = qp.parts.send_record.load() as u16;
        let wqebbs = u16::from(doorbell.ds).div_ceil(4);
        let ring_wqebbs = qp.parts.send_ring.len_bytes() as u32 / 64;
        if qp
            .requester
            .announce(doorbell.index, wqebbs, recorded, ring_wqebbs)
        {
            counters.doorbells_before_record += 1;
        }
    }
    rung
}

/// Copies a payload into a lane's slot. `false` if the sender's memory is gone: the packet is then as good as lost.
#[allow(unsafe_code)] // a slot is raw memory
fn fill(keys: &Keys, source: &Source<'_>, slot: *mut u8) -> bool {
    // SAFETY: the slot has room for MAX_PAYLOAD_BYTES and is ours until it is published; the caller compared the length.
    unsafe { source.copy_to(keys, 0, slot, source.len_bytes()) }.is_ok()
}
