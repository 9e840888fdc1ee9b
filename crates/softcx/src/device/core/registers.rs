//! The UAR registers of all queue pairs, and which of them every turn looks at.

use super::uar::{HOT_TURNS, Uar};
use crate::device::dma::UarRegister;

#[derive(Debug, Default)]
pub(super) struct Registers {
    /// By slot of the queue pair.
    uars: Vec<Option<Uar>>,
    /// Queue pairs whose registers every turn reads. `cold` is the slot at which the search of the others continues.
    hot: Vec<usize>,
    cold: usize,
    /// When the last turn looked.
    looked_ns: u64,
    /// Whether a doorbell was found since the last turn, and the turns in a row that found one.
    rung: bool,
    busy_turns: u32,
}

/// Turns in a row with doorbells, of which one looks at a register that no turn looks at.
const BUSY_TURNS: u32 = 8;

impl Registers {
    /// Gives a new queue pair its registers, or none.
    pub(super) fn set(&mut self, slot: usize, registers: Option<[UarRegister; 2]>) {
        if self.uars.len() <= slot {
            self.uars.resize_with(slot + 1, || None);
        }
        self.uars[slot] = registers.map(Uar::new);
    }

    pub(super) fn remove(&mut self, slot: usize) {
        if let Some(uar) = self.uars.get_mut(slot) {
            *uar = None;
        }
        self.hot.retain(|&hot| hot != slot);
    }

    #[inline]
    pub(super) fn get(&self, slot: usize) -> Option<&Uar> {
        self.uars.get(slot)?.as_ref()
    }

    pub(super) fn len(&self) -> usize {
        self.uars.len()
    }

    /// A turn looks at them: how many turns it counts for. A turn of an engine that slept counts for the turns that it did not make: a
    /// device that comes to rest with many registers rung lately is not to look at them all for seconds.
    pub(super) fn begin_turn(&mut self, now_ns: u64) -> u16 {
        let slept_us = now_ns.saturating_sub(self.looked_ns) / 1000;
        self.looked_ns = now_ns;
        1 + slept_us.min(u64::from(HOT_TURNS)) as u16
    }

    /// The queue pair at that place of the list of those that every turn looks at.
    #[inline]
    pub(super) fn hot(&self, at: usize) -> Option<usize> {
        self.hot.get(at).copied()
    }

    /// A doorbell was found.
    #[inline]
    pub(super) fn count_rung(&mut self) {
        self.rung = true;
    }

    /// Whether this turn, whose doorbells are found, is to look at a register that no turn looks at.
    #[inline]
    pub(super) fn cold_look_is_due(&mut self) -> bool {
        let rung = std::mem::take(&mut self.rung);
        self.busy_turns = if rung {
            self.busy_turns + 1
        } else {
            BUSY_TURNS
        };
        let is_due = self.busy_turns >= BUSY_TURNS;
        if is_due {
            self.busy_turns = 0;
        }
        is_due
    }

    /// How many every turn looks at.
    pub(super) fn hot_count(&self) -> usize {
        self.hot.len()
    }

    pub(super) fn cool(&mut self, at: usize) {
        self.hot.swap_remove(at);
    }

    /// Counts a look at registers: whether they were quiet for long.
    #[inline]
    pub(super) fn count_look(&mut self, slot: usize, rung: bool, turns: u16) -> bool {
        match self.uars.get_mut(slot) {
            Some(Some(uar)) if rung => {
                uar.quiet_turns = 0;
                false
            }
            Some(Some(uar)) => {
                uar.quiet_turns = uar.quiet_turns.saturating_add(turns);
                uar.quiet_turns >= HOT_TURNS
            }
            _ => true,
        }
    }

    /// Has every turn look at these from now on. Whether there are any.
    pub(super) fn heat(&mut self, slot: usize) -> bool {
        let Some(Some(uar)) = self.uars.get_mut(slot) else {
            return false;
        };
        if uar.quiet_turns >= HOT_TURNS {
            self.hot.push(slot);
        }
        uar.quiet_turns = 0;
        true
    }

    /// The next slot of all, and whether it has registers that no turn looks at and that hold a doorbell. It reads the registers and nothing of the
    /// queue pair, which is in no cache either: an idle device looks at many.
    pub(super) fn next_cold(&mut self) -> (usize, bool) {
        self.cold = if self.cold + 1 < self.uars.len() {
            self.cold + 1
        } else {
            0
        };
        let uar = self.get(self.cold);
        (
            self.cold,
            uar.is_some_and(|uar| uar.quiet_turns >= HOT_TURNS && uar.is_rung()),
        )
    }
}
