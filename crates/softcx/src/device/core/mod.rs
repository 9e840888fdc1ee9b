//! The device itself: its objects, and one turn of its work. It has no clock and no thread; both are given to it.

mod client_objects;
mod clients;
mod doorbells;
mod lanes;
mod modify;
mod multicast;
mod needs;
mod objects;
mod packets;
mod pages;
mod peer_links;
mod queues;
pub(crate) mod regions;
mod ticks;
mod uar;
pub(crate) mod uar_page;

use std::collections::{HashMap, VecDeque};
use std::path::Path;

use self::client_objects::ClientObjects;
pub(crate) use self::needs::Need;
pub(crate) use self::peer_links::PeerLinks;
use self::uar::Uar;
use self::uar_page::UarPage;
use crate::Result;
use crate::device::copies::Copies;
use crate::device::cq::Cq;
use crate::device::dma::ClockWord;
use crate::device::fabric::Fabric;
use crate::device::faults::Faults;
use crate::device::gather::Gather;
use crate::device::inbox::Inbox;
use crate::device::keys::Keys;
use crate::device::options::LinkLayer;
use crate::device::qp::{Counters, DeviceView, Qp, State};
use crate::device::requester::TransmitStop;
use crate::device::srq::Srq;
use crate::device::trace::Trace;
use crate::device::wire::Wire;

/// A full lane is tried again this often, if nothing else happens.
const LANE_RETRY_NS: u64 = 50_000;

/// Splits the core into the parts that a queue pair works with; the queue pairs themselves stay apart.
macro_rules! device_view {
    ($core:ident, $now_ns:expr) => {
        &mut DeviceView {
            now_ns: $now_ns,
            cqs: &mut $core.cqs,
            srqs: &mut $core.srqs,
            keys: &mut $core.keys,
            copies: &mut $core.copies,
            wire: &mut $core.wire,
            counters: &mut $core.counters,
            gather: &mut $core.gather,
            fabric: $core.fabric.as_ref(),
            links: &mut $core.links,
            trace: $core.trace.as_deref_mut(),
            overran: &mut $core.overran,
        }
    };
}
use device_view;

#[derive(Debug)]
pub(crate) struct DeviceCore {
    qps: Vec<Option<Box<Qp>>>,
    uars: Vec<Option<Uar>>,
    generations: Vec<u8>,
    first_generation: u8,
    free_qps: VecDeque<usize>,
    cqs: Vec<Option<Cq>>,
    srqs: Vec<Option<Srq>>,
    pub(crate) keys: Keys,
    copies: Copies,
    wire: Wire,
    pub(crate) counters: Counters,
    gather: Box<Gather>,
    next_pd: u32,
    clients: HashMap<u32, ClientObjects>,
    next_client: u32,
    /// Where clients see the clock.
    clocks: Vec<(u32, ClockWord)>,
    pages: Vec<Option<UarPage>>,
    page_turns: u32,
    /// Members of multicast groups.
    multicast: HashMap<[u8; 16], Vec<usize>>,
    /// A completion queue lost a completion since the last turn.
    overran: bool,
    /// Queue pairs whose registers are looked at every turn, and where the look at the others goes on.
    hot: Vec<usize>,
    cold: usize,
    /// When the last turn looked at registers.
    looked_ns: u64,
    /// Queue pairs with something to send, something to answer, a timer, or something to flush.
    ready: VecDeque<usize>,
    answering: VecDeque<usize>,
    timed: Vec<usize>,
    failed: Vec<usize>,
    /// Queue pairs that wait for room on a lane.
    held: Vec<usize>,
    /// The fabric that the device was made on. It goes before the inbox: nobody is to look for one that is gone.
    fabric: Option<Fabric>,
    inbox: Inbox,
    links: PeerLinks,
    next_tick_ns: u64,
    ticks: u32,
    next_sweep_ns: u64,
    trace: Option<Box<Trace>>,
    /// A stuck device, for tests of what waits for it.
    frozen: bool,
    /// A device that was pulled out of the machine.
    pub(super) gone: bool,
}

impl DeviceCore {
    pub(crate) fn new() -> Result<DeviceCore> {
        let inbox = Inbox::new()?;
        Ok(DeviceCore {
            qps: Vec::new(),
            uars: Vec::new(),
            generations: Vec::new(),
            first_generation: 0,
            free_qps: VecDeque::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            keys: Keys::default(),
            copies: Copies::default(),
            wire: Wire::default(),
            counters: Counters::default(),
            gather: Box::default(),
            next_pd: 1,
            clients: HashMap::new(),
            next_client: 0,
            clocks: Vec::new(),
            pages: Vec::new(),
            page_turns: 0,
            multicast: HashMap::new(),
            overran: false,
            hot: Vec::new(),
            cold: 0,
            looked_ns: 0,
            ready: VecDeque::new(),
            answering: VecDeque::new(),
            timed: Vec::new(),
            failed: Vec::new(),
            held: Vec::new(),
            inbox,
            fabric: None,
            links: PeerLinks::default(),
            next_tick_ns: 0,
            ticks: 0,
            next_sweep_ns: 0,
            trace: None,
            frozen: false,
            gone: false,
        })
    }

    /// A device with a place on a fabric.
    pub(crate) fn on_fabric(name: &str, link: LinkLayer) -> Result<DeviceCore> {
        let mut core = DeviceCore::new()?;
        core.fabric = Some(Fabric::join(name, link, core.inbox.address())?);
        core.links = PeerLinks::to_nodes();
        // Numbers of the node's last device are not met again at once.
        core.first_generation = core.inbox.address().port as u8;
        Ok(core)
    }

    /// Writes every WQE, packet and CQE to this file from now on.
    pub(crate) fn set_trace(&mut self, path: &Path) -> Result<()> {
        let node = self.fabric.as_ref().map_or(0, Fabric::node);
        self.trace = Some(Box::new(Trace::open(path, node)?));
        Ok(())
    }

    /// Stops all work, or lets it go on.
    pub(crate) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    pub(crate) fn fabric(&self) -> Option<&Fabric> {
        self.fabric.as_ref()
    }

    /// The place in the table of the queue pair with that number, if there is one.
    #[inline]
    fn slot_of(&self, qpn: u32) -> usize {
        let mask = if self.fabric.is_some() {
            0x3fff
        } else {
            0xffff
        };
        (qpn & mask) as usize
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.wire.set_faults(faults);
    }

    /// Puts a queue pair on the lists where it belongs.
    #[inline]
    fn enlist(&mut self, slot: usize) {
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        let state = qp.state();
        if !qp.ready && !qp.held && qp.is_sending() && qp.has_sends() {
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
        if matches!(state, State::Error | State::SendQueueError) && !self.failed.contains(&slot) {
            self.failed.push(slot);
        }
        if state == State::SendQueueDrained {
            qp.tell_drained();
        }
    }

    /// One turn of the device's work. Whether there was any.
    pub(crate) fn turn(&mut self, now_ns: u64) -> bool {
        if self.frozen || self.gone {
            return false;
        }
        for (_, clock) in &self.clocks {
            clock.set(now_ns);
        }
        let mut worked = self.look_at_doorbells(now_ns);
        worked |= self.look_at_pages();
        worked |= self.receive(now_ns);
        worked |= self.wire.advance(now_ns);
        if now_ns >= self.next_tick_ns {
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
        if self.overran {
            self.spread_overruns();
        }
        if let Some(trace) = &mut self.trace {
            trace.flush();
        }
        worked | self.fill_lanes(now_ns)
    }

    /// When the device needs a turn though nothing comes from outside; `None` for never.
    pub(crate) fn next_due_ns(&self, now_ns: u64) -> Option<u64> {
        if self.frozen || self.gone {
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

    /// Whether something could be done right now.
    pub(crate) fn has_more_to_do(&self) -> bool {
        !self.ready.is_empty() || !self.answering.is_empty()
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
            let done = |c: &Counters| c.packets_sent + c.completions;
            let before = done(&self.counters);
            match qp.transmit(device_view!(self, now_ns)) {
                TransmitStop::Idle => qp.ready = false,
                TransmitStop::Burst => self.ready.push_back(slot),
                TransmitStop::Congested => {
                    qp.ready = false;
                    qp.held = true;
                    self.held.push(slot);
                }
            }
            worked |= done(&self.counters) != before;
            self.enlist_others(slot);
        }
        worked
    }

    /// [`DeviceCore::enlist`] without the list of those with something to send, from which the caller has just taken it.
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
            if qp.send_answers(device_view!(self, now_ns)) && !qp.held {
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
}
