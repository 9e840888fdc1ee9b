//! The registers of all queue pairs: which of them each turn looks at, and what a doorbell does.

use std::sync::atomic::{Ordering, fence};

use super::DeviceCore;
use super::uar::Uar;
use crate::device::qp::{DeviceParts, Qp, State};
use crate::device::requester::AnnouncedCount;
use doorbell_wire::memory::NumberSet;
use doorbell_wire::mlx5::Doorbell;

/// The number of idle queue pairs whose registers are read in one turn, for doorbells that were not reported. A turn costs the same with one and with
/// a thousand idle pairs.
const COLD_LOOKS: usize = 1;

/// The largest number of queue pairs with reported doorbells whose registers every turn reads.
const HOT_MAX: usize = 4;

impl DeviceCore {
    #[inline]
    pub(super) fn look_at_doorbells(&mut self, now_ns: u64) -> bool {
        let turns = self.registers.begin_turn(now_ns);
        let mut worked = false;
        let mut at = 0;
        while let Some(slot) = self.registers.hot(at) {
            let rung = self.look_at(slot);
            worked |= rung;
            let quiet = self.registers.count_look(slot, rung, turns);
            if quiet && !self.stop_watching(slot) {
                self.registers.cool(at);
            } else {
                at += 1;
            }
        }
        // Each read is probably a cache miss, so few turns read one while other doorbells arrive.
        if self.registers.cold_look_is_due() {
            worked |= self.look_at_idle(COLD_LOOKS);
        }
        worked
    }

    /// A caller reports a doorbell of one of the queue pairs whose slots have this number in a [`NumberSet`]. If few queue pairs are in use, every
    /// turn reads their registers from now on, and later doorbells need not be reported. Otherwise each doorbell must be reported, and only this
    /// turn reads the registers.
    pub(crate) fn look_at_reported(&mut self, number: usize) {
        for slot in (number..self.registers.len()).step_by(NumberSet::COUNT) {
            if self.registers.hot_count() < HOT_MAX {
                self.watch(slot);
            } else {
                self.look_at(slot);
            }
        }
    }

    /// Reads the registers of this queue pair in every turn from now on.
    fn watch(&mut self, slot: usize) {
        if let Some(Some(qp)) = self.qps.get(slot)
            && self.registers.heat(slot)
        {
            qp.status.set_watched(true);
        }
    }

    /// Stops reading these registers in every turn, unless the last read finds a doorbell.
    #[cold]
    fn stop_watching(&mut self, slot: usize) -> bool {
        let Some(Some(qp)) = self.qps.get(slot) else {
            return false;
        };
        qp.status.set_watched(false);
        // Orders the flag before the last look; pairs with the fence in `QueuePair::rung`, between the doorbell and the flag.
        fence(Ordering::SeqCst);
        let rung = self.look_at(slot);
        if rung && let Some(Some(qp)) = self.qps.get(slot) {
            self.registers.count_look(slot, rung, 0);
            qp.status.set_watched(true);
        }
        rung
    }

    /// Reads the registers of up to `count` idle queue pairs, from where the last call ended. Returns whether one held a doorbell.
    pub(crate) fn look_at_idle(&mut self, count: usize) -> bool {
        let mut found = false;
        for _ in 0..count.min(self.registers.len()) {
            let (slot, rung) = self.registers.next_cold();
            if rung && self.look_at(slot) {
                self.watch(slot);
                found = true;
            }
        }
        found
    }

    #[inline]
    fn look_at(&mut self, slot: usize) -> bool {
        let (Some(uar), Some(Some(qp))) = (self.registers.get(slot), self.qps.get_mut(slot)) else {
            return false;
        };
        if !ring(qp, uar, &mut self.parts) {
            return false;
        }
        self.registers.count_rung();
        self.mark_active(slot);
        true
    }
}

/// Takes a queue pair's doorbells. Returns whether there were any.
#[inline]
pub(super) fn ring(qp: &mut Qp, uar: &Uar, parts: &mut DeviceParts) -> bool {
    let mut rung = false;
    for (register, at) in (0..).zip(uar.registers) {
        let Some(value) = at.take() else {
            continue;
        };
        let doorbell = Doorbell::parse(value);
        if doorbell.qpn != qp.parts.qpn || matches!(qp.state(), State::Reset | State::Init) {
            continue;
        }
        rung = true;
        parts.counters.doorbells += 1;
        let Ok(recorded) = qp.parts.send_record.load() else {
            qp.lose_queue();
            continue;
        };
        apply_doorbell(qp, register, doorbell, recorded, parts);
    }
    rung
}

/// Announces the work requests that a doorbell in this register covers.
pub(super) fn apply_doorbell(
    qp: &mut Qp,
    register: usize,
    doorbell: Doorbell,
    recorded: u32,
    parts: &mut DeviceParts,
) {
    let wqebbs = u16::from(doorbell.ds).div_ceil(4);
    let ring_wqebbs = qp.parts.send_ring.len_bytes() as u32 / 64;
    let announced = AnnouncedCount {
        register,
        upto: doorbell.index.wrapping_add(wqebbs),
    };
    let before = qp.requester.announced;
    let order = qp
        .requester
        .announce(announced, recorded as u16, ring_wqebbs);
    qp.fetch(parts, before);
    parts.counters.doorbells_before_record += u64::from(order.before_record);
    parts.counters.doorbells_backwards += u64::from(order.backwards);
    if (order.before_record || order.backwards) && !parts.takes_doorbells_out_of_order {
        qp.fail_by_itself();
    }
}
