//! The device itself: its objects, and one turn of its work. It has no clock and no thread; both are given to it.

mod client_objects;
mod clients;
mod doorbells;
mod hosts;
mod lanes;
mod management;
mod modify;
mod multicast;
mod needs;
mod objects;
mod packets;
mod pages;
mod peer_links;
mod qp_numbers;
mod queues;
pub(crate) mod regions;
mod registers;
mod ticks;
mod uar;
pub(crate) mod uar_page;
mod work_lists;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use self::client_objects::ClientRegistry;
use self::management::Management;
pub(crate) use self::needs::Need;
pub(crate) use self::peer_links::PeerLinks;
use self::qp_numbers::QpNumbers;
use self::registers::Registers;
use self::uar_page::UarPage;
use self::work_lists::WorkLists;
use crate::Result;
use crate::device::commands::Commands;
use crate::device::fabric::Fabric;
use crate::device::faults::Faults;
use crate::device::inbox::Inbox;
use crate::device::options::LinkLayer;
use crate::device::qp::{Counters, DeviceParts, Qp};
use crate::device::requester::TransmitStop;
use crate::device::trace::Trace;
use crate::device::udp::UdpWire;

/// A full lane, or a full socket buffer, is tried again this often, if nothing else happens.
const LANE_RETRY_NS: u64 = 50_000;

#[derive(Debug)]
pub(crate) struct DeviceCore {
    qps: Vec<Option<Box<Qp>>>,
    numbers: QpNumbers,
    registers: Registers,
    /// Dropped before the inbox, with the place on the fabric, so that no other device looks for an inbox that is gone.
    pub(crate) parts: DeviceParts,
    next_pd: u32,
    clients: ClientRegistry,
    pages: Vec<Option<UarPage>>,
    page_turns: u32,
    /// Members of multicast groups: their slots, and the LIDs by which they have joined.
    multicast: HashMap<[u8; 16], Vec<(usize, u16)>>,
    lists: WorkLists,
    inbox: Inbox,
    next_tick_ns: u64,
    ticks: u32,
    next_sweep_ns: u64,
    /// A stuck device, for tests of what waits for it.
    frozen: bool,
    /// A device that was pulled out of the machine.
    pub(super) gone: bool,
    /// How commands are answered. The thread that issues a command reads this before it takes the device's lock.
    commands: Arc<Commands>,
    /// It has reported that it failed.
    has_failed: bool,
    /// Where in the port's table of GIDs its own stands, if it does.
    pub(crate) gid_index: Option<u8>,
    management: Management,
}

impl DeviceCore {
    pub(crate) fn new() -> Result<DeviceCore> {
        let inbox = Inbox::new()?;
        Ok(DeviceCore {
            qps: Vec::new(),
            numbers: QpNumbers::default(),
            registers: Registers::default(),
            parts: DeviceParts::default(),
            next_pd: 1,
            clients: ClientRegistry::default(),
            pages: Vec::new(),
            page_turns: 0,
            multicast: HashMap::new(),
            lists: WorkLists::default(),
            inbox,
            next_tick_ns: 0,
            ticks: 0,
            next_sweep_ns: 0,
            frozen: false,
            gone: false,
            commands: Arc::default(),
            has_failed: false,
            gid_index: Some(0),
            management: Management::default(),
        })
    }

    /// A device with a place on a fabric.
    pub(crate) fn on_fabric(name: &str, link: LinkLayer) -> Result<DeviceCore> {
        let mut core = DeviceCore::new()?;
        core.parts.fabric = Some(Fabric::join(name, link, core.inbox.address())?);
        core.parts.links = PeerLinks::to_nodes();
        core.numbers = QpNumbers::random(core.inbox.address().port);
        Ok(core)
    }

    /// Makes UDP its wire.
    pub(crate) fn set_udp(&mut self, address: Option<IpAddr>) -> Result<()> {
        let node = self.parts.fabric.as_ref().map_or(1, Fabric::node);
        let udp = UdpWire::bind(address, node)?;
        self.parts.host_gid = Some(udp.gid);
        self.numbers = QpNumbers::random(self.inbox.address().port);
        self.parts.udp = Some(Box::new(udp));
        Ok(())
    }

    /// Makes UDP its wire to other hosts, beside the memory of this one. A device without a fabric has no others there.
    pub(crate) fn set_udp_beside_memory(&mut self, address: Option<IpAddr>) -> Result<()> {
        self.set_udp(address)?;
        match (&mut self.parts.fabric, self.parts.host_gid) {
            (Some(fabric), Some(gid)) => fabric.tell_host(gid),
            _ => Ok(()),
        }
    }

    /// The largest MTU that its packets may have.
    pub(crate) fn mtu_bytes(&self) -> u32 {
        self.parts.mtu_bytes()
    }

    /// Writes every WQE, packet and CQE to this file from now on.
    pub(crate) fn set_trace(&mut self, path: &Path) -> Result<()> {
        let node = self.parts.fabric.as_ref().map_or(0, Fabric::node);
        self.parts.trace = Some(Box::new(Trace::open(path, node)?));
        Ok(())
    }

    /// Stops all work, or lets it go on.
    pub(crate) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    pub(crate) fn fabric(&self) -> Option<&Fabric> {
        self.parts.fabric.as_ref()
    }

    /// The place in the table of the queue pair with that number, if there is one.
    #[inline]
    fn slot_of(&self, qpn: u32) -> usize {
        (qpn & self.parts.slot_mask()) as usize
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.parts.wire.set_faults(faults);
        self.commands.set_faults(faults);
        for qp in self.qps.iter_mut().flatten() {
            qp.parts.send_ring.forget();
            qp.parts.recv_ring.forget();
        }
    }

    /// How commands are answered, for the handles of the device.
    pub(crate) fn commands(&self) -> &Arc<Commands> {
        &self.commands
    }

    /// Puts a queue pair on the lists where it belongs.
    #[inline]
    fn mark_active(&mut self, slot: usize) {
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        self.lists.mark_active(slot, qp);
    }

    /// One turn of the device's work. Whether there was any.
    pub(crate) fn turn(&mut self, now_ns: u64) -> bool {
        if self.frozen || self.gone {
            return false;
        }
        self.clients.set_clocks(now_ns);
        let mut worked = self.look_at_doorbells(now_ns);
        worked |= self.look_at_pages();
        worked |= self.receive(now_ns);
        if self.parts.udp.is_some() {
            worked |= self.receive_from_hosts(now_ns);
        }
        worked |= self.parts.wire.advance(now_ns);
        if now_ns >= self.next_tick_ns {
            worked |= self.tick(now_ns);
        }
        // A message and its acknowledgement inside one device need three rounds.
        for _ in 0..4 {
            let mut round = self.transmit(now_ns);
            round |= self.deliver(now_ns);
            round |= self.send_acks(now_ns);
            worked |= round;
            if !round {
                break;
            }
        }
        if self.parts.overran {
            self.spread_overruns();
        }
        if let Some(trace) = &mut self.parts.trace {
            trace.flush();
        }
        if self.parts.udp.is_some() {
            worked |= self.send_to_hosts(now_ns);
        }
        worked |= self.fill_lanes(now_ns);
        if let Some(capture) = &mut self.parts.capture {
            capture.flush();
        }
        worked
    }

    /// When the device needs a turn though nothing comes from outside; `None` for never.
    pub(crate) fn next_due_ns(&self, now_ns: u64) -> Option<u64> {
        if self.frozen || self.gone {
            return None;
        }
        let timers = self
            .lists
            .timed
            .iter()
            .filter_map(|&slot| self.qps.get(slot)?.as_ref()?.next_timer_ns());
        let now = self.lists.has_work();
        // Frames that were built and not taken wait in `departures`, notices of congestion behind them.
        let udp = self.parts.udp.as_ref();
        let is_unsent = udp.is_some_and(|udp| !udp.departures.is_empty());
        let is_full = is_unsent || self.parts.wire.any_for_others();
        let retry = is_full.then_some(now_ns + LANE_RETRY_NS);
        let flushes = (self.lists.failed.iter())
            .filter_map(|&slot| self.qps.get(slot)?.as_ref()?.flushes_at_ns(now_ns));
        timers
            .chain(flushes)
            .chain(self.parts.wire.next_due_ns())
            .chain(now.then_some(now_ns))
            .chain(retry)
            .min()
    }

    /// Whether something could be done right now.
    pub(crate) fn has_more_to_do(&self) -> bool {
        self.lists.has_work()
    }

    #[inline]
    fn transmit(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        for _ in 0..self.lists.ready.len() {
            let Some(slot) = self.lists.ready.pop_front() else {
                break;
            };
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                continue;
            };
            let done = |c: &Counters| c.packets_sent + c.completions;
            let before = done(&self.parts.counters);
            match qp.transmit(self.parts.at(now_ns)) {
                TransmitStop::Idle => qp.ready = false,
                TransmitStop::Burst => self.lists.ready.push_back(slot),
                TransmitStop::Congested => {
                    qp.ready = false;
                    self.lists.hold(slot, qp);
                }
            }
            worked |= done(&self.parts.counters) != before;
            self.lists.mark_active_others(slot, qp);
        }
        worked
    }

    #[inline]
    fn send_acks(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        for _ in 0..self.lists.answering.len() {
            let Some(slot) = self.lists.answering.pop_front() else {
                break;
            };
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                continue;
            };
            qp.answering = false;
            let before = self.parts.counters.packets_sent;
            if qp.send_acks(self.parts.at(now_ns)) && !qp.held {
                let to = qp.remote.map(|remote| remote.to);
                if to.is_some_and(|to| self.parts.wire.congested(to)) {
                    self.lists.hold(slot, qp);
                }
            }
            worked |= self.parts.counters.packets_sent != before;
            self.mark_active(slot);
        }
        worked
    }
}
