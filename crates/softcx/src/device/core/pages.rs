//! UAR pages of clients: one register rings for many queue pairs.

use super::client_objects::own;
use super::objects::free_slot;
use super::uar_page::UarPage;
use super::{DeviceCore, doorbells};
use crate::device::client::Errno;
use crate::device::dma::{RecordWord, UarRegister};
use crate::device::qp::State;
use doorbell_wire::mlx5::Doorbell;

/// Reads without a hit after which a page is read less often.
const HOT_LOOKS: u32 = 1 << 14;
/// Turns between two reads of such a page.
const COLD_TURNS: u32 = 8;

impl DeviceCore {
    pub(crate) fn add_uar(
        &mut self,
        client: u32,
        doorbells: [UarRegister; 4],
        arm: UarRegister,
    ) -> Result<u32, Errno> {
        let slot = free_slot(&mut self.pages, 0);
        self.owner_mut(client)?.uars.push(slot);
        self.pages[slot] = Some(UarPage {
            doorbells,
            arm,
            qps: Vec::new(),
            cqs: Vec::new(),
            quiet: 0,
        });
        Ok(slot as u32)
    }

    pub(crate) fn free_uar(&mut self, client: u32, uar: u32) -> Result<(), Errno> {
        let slot = own(&self.owner(client)?.uars, uar)?;
        match self.pages.get_mut(slot) {
            Some(Some(page)) if !page.qps.is_empty() || !page.cqs.is_empty() => Err(libc::EBUSY),
            Some(page) => {
                *page = None;
                self.owner_mut(client)?.uars.retain(|&uar| uar != slot);
                Ok(())
            }
            None => Err(libc::EINVAL),
        }
    }

    pub(super) fn page_mut(&mut self, uar: usize) -> Option<&mut UarPage> {
        self.pages.get_mut(uar).and_then(Option::as_mut)
    }

    /// The number of UAR pages with clients' queue pairs that accept requests. Doorbells may be stored to these pages at any time, and are not
    /// reported.
    pub(crate) fn pages_that_may_be_rung(&self) -> usize {
        let awake = |slot: &usize| {
            let qp = self.qps.get(*slot).and_then(Option::as_ref);
            qp.is_some_and(|qp| !matches!(qp.state(), State::Reset | State::Init))
        };
        let pages = self.pages.iter().flatten();
        pages.filter(|page| page.qps.iter().any(awake)).count()
    }

    /// Makes the next turn read all pages, also those that were quiet for long.
    pub(crate) fn look_at_all_pages(&mut self) {
        for page in self.pages.iter_mut().flatten() {
            page.quiet = page.quiet.min(HOT_LOOKS - 1);
        }
    }

    /// Reads the registers of all pages. A register may have been overwritten before it was read, so a hit counts as one
    /// for each queue pair on its page, and their doorbell records decide.
    #[inline]
    pub(super) fn look_at_pages(&mut self) -> bool {
        let mut worked = false;
        self.page_turns = self.page_turns.wrapping_add(1);
        for at in 0..self.pages.len() {
            let Some(Some(page)) = self.pages.get_mut(at) else {
                continue;
            };
            let waits = page.quiet >= HOT_LOOKS
                && !(self.page_turns.wrapping_add(at as u32)).is_multiple_of(COLD_TURNS);
            if waits || (page.qps.is_empty() && page.cqs.is_empty()) {
                continue;
            }
            worked |= self.look_at_page(at);
        }
        worked
    }

    /// Takes the doorbells and arms of a page. Returns whether there were any.
    pub(super) fn look_at_page(&mut self, at: usize) -> bool {
        let Some(page) = self.page_mut(at) else {
            return false;
        };
        let rung = page.look();
        let any = rung.doorbells != [None; 4];
        if any {
            self.count_page(at, rung.doorbells);
        }
        if rung.armed {
            self.arm_page(at);
        }
        any || rung.armed
    }

    fn count_page(&mut self, at: usize, doorbells: [Option<u64>; 4]) {
        self.parts.counters.doorbells += doorbells.iter().flatten().count() as u64;
        let Some(page) = self.page_mut(at) else {
            return;
        };
        let qps = std::mem::take(&mut page.qps);
        // If a queue pair is alone on its page, its doorbells show which came before the record, and which went backwards.
        let mut alone = qps.len() == 1;
        if let [slot] = qps.as_slice() {
            for (register, value) in (0..).zip(doorbells) {
                if let Some(value) = value {
                    alone &= self.apply_doorbell(*slot, register, Doorbell::parse(value));
                }
            }
        }
        if !alone {
            self.count_all(&qps);
        }
        if let Some(page) = self.page_mut(at) {
            page.qps = qps;
        }
    }

    /// Announces the work requests that a doorbell covers. Returns `false` if the doorbell is another queue pair's.
    fn apply_doorbell(&mut self, slot: usize, register: usize, doorbell: Doorbell) -> bool {
        let recorded = self.record_of(slot).map(RecordWord::load);
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return true;
        };
        if doorbell.qpn != qp.parts.qpn || doorbell.ds == 0 {
            return false;
        }
        match recorded {
            Some(Ok(recorded)) => {
                doorbells::apply_doorbell(qp, register, doorbell, recorded, &mut self.parts);
            }
            Some(Err(_)) => qp.lose_queue(),
            None => return true,
        }
        self.mark_active(slot);
        true
    }

    /// Announces what the doorbell records of these queue pairs cover.
    fn count_all(&mut self, slots: &[usize]) {
        let is_far = |slot: &usize| self.record_of(*slot).is_some_and(|record| record.is_far());
        if !slots.iter().any(is_far) {
            // Each is one load: nothing is gained by reading them together.
            return slots.iter().for_each(|slot| self.count_sends(*slot));
        }
        let takes = |slot: &usize| self.record_of(*slot).map(|record| (*slot, record));
        let (slots, records): (Vec<_>, Vec<_>) = slots.iter().filter_map(takes).unzip();
        let Ok(counts) = RecordWord::load_all(&records) else {
            // One of them is gone; reading each alone finds it.
            return slots.into_iter().for_each(|slot| self.count_sends(slot));
        };
        for (slot, count) in slots.into_iter().zip(counts) {
            self.announce(slot, count as u16);
        }
    }

    /// The record of a queue pair that takes doorbells.
    fn record_of(&self, slot: usize) -> Option<RecordWord> {
        let qp = self.qps.get(slot)?.as_ref()?;
        let takes = !matches!(qp.state(), State::Reset | State::Init) && !qp.is_lost();
        (takes && qp.parts.send_ring.len_bytes() > 0).then_some(qp.parts.send_record)
    }

    fn announce(&mut self, slot: usize, count: u16) {
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        let ring_wqebbs = qp.parts.send_ring.len_bytes() as u32 / 64;
        let before = qp.requester.announced;
        if qp.requester.announce_recorded(count, ring_wqebbs) {
            qp.fetch(&self.parts, before);
            self.mark_active(slot);
        }
    }

    fn arm_page(&mut self, at: usize) {
        let Some(Some(page)) = self.pages.get(at) else {
            return;
        };
        let mut cqs = Vec::new();
        let mut records = Vec::new();
        for &slot in &page.cqs {
            if let Some(Some(cq)) = self.parts.cqs.get_mut(slot)
                && let Some(owned) = cq.owned()
            {
                records.push(owned.arm_record);
                cqs.push(slot);
            }
        }
        // A record that cannot be read arms nothing, and the others are read alone.
        let words = RecordWord::load_all(&records);
        for (at, slot) in cqs.into_iter().enumerate() {
            let word = match &words {
                Ok(words) => words.get(at).copied(),
                Err(_) => records.get(at).and_then(|record| record.load().ok()),
            };
            if let (Some(Some(cq)), Some(word)) = (self.parts.cqs.get_mut(slot), word) {
                cq.arm(word);
            }
        }
    }

    /// Announces what a queue pair's doorbell record covers.
    pub(super) fn count_sends(&mut self, slot: usize) {
        match self.record_of(slot).map(RecordWord::load) {
            Some(Ok(count)) => self.announce(slot, count as u16),
            Some(Err(_)) => {
                if let Some(Some(qp)) = self.qps.get_mut(slot) {
                    qp.lose_queue();
                }
                self.mark_active(slot);
            }
            None => {}
        }
    }
}
