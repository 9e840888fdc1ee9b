//! Numbers of queue pairs: a slot each, and a generation that distinguishes successive users of the slot.

use std::collections::VecDeque;

/// Slots that are made before a free one is used again.
const FRESH_SLOTS: usize = 1024;

/// The order of the fresh slots is changed within groups of so many. A larger group would make the tables of a device with one queue pair longer.
const SHUFFLED_SLOTS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct QpNumbers {
    /// By slot.
    generations: Vec<u8>,
    /// Slots that were in use once.
    made: usize,
    first_generation: u8,
    /// Bits of the number of a fresh slot that are inverted, less than [`SHUFFLED_SLOTS`].
    inverted: usize,
    free: VecDeque<usize>,
}

impl QpNumbers {
    /// Numbers that depend on a random value. Otherwise a device would use the numbers of the device that was at its place before: the peers of
    /// that device may not know yet that it has ended, and then take a new connection for an old one.
    pub(super) fn random(value: u64) -> QpNumbers {
        let [generation, inverted, ..] = value.to_le_bytes();
        QpNumbers {
            first_generation: generation,
            inverted: usize::from(inverted) % SHUFFLED_SLOTS,
            ..QpNumbers::default()
        }
    }

    /// A slot and its generation; `None` if `max` slots are in use. A freed slot is used again last, so that late packets for its
    /// old number find no queue pair.
    pub(super) fn reserve(&mut self, max: usize) -> Option<(usize, u32)> {
        let slot = if self.made < FRESH_SLOTS || self.free.is_empty() {
            if self.made >= max {
                return None;
            }
            // `FRESH_SLOTS` is a multiple of a group, so that this names each of them once.
            let slot = match self.made {
                made if made < FRESH_SLOTS => made ^ self.inverted,
                made => made,
            };
            self.made += 1;
            if self.generations.len() <= slot {
                self.generations.resize(slot + 1, self.first_generation);
            }
            slot
        } else {
            self.free.pop_front().unwrap_or_default()
        };
        let generation = self.generations.get_mut(slot)?;
        *generation = generation.wrapping_add(1).max(1);
        Some((slot, (*generation).into()))
    }

    pub(super) fn free(&mut self, slot: usize) {
        self.free.push_back(slot);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MAX: usize = 3000;

    #[test]
    fn every_slot_is_used_once_before_one_is_used_again() {
        for value in [0, 0x3f05, 0xffff, 0x2a80] {
            let mut numbers = QpNumbers::random(value);
            let made: Vec<_> = (0..MAX).map(|_| numbers.reserve(MAX).unwrap()).collect();
            let mut slots: Vec<_> = made.iter().map(|&(slot, _)| slot).collect();
            slots.sort_unstable();
            assert!(slots.into_iter().eq(0..MAX));
            assert_eq!(numbers.reserve(MAX), None);
            let (slot, generation) = made[7];
            numbers.free(slot);
            let (again, next) = numbers.reserve(MAX).unwrap();
            assert_eq!(again, slot);
            assert_ne!(next, generation);
        }
    }

    #[test]
    fn devices_one_after_the_other_begin_with_different_numbers() {
        let first = |value| QpNumbers::random(value).reserve(MAX).unwrap();
        let values = (0_u64..256).map(|high| high << 8);
        let slots: std::collections::BTreeSet<_> = values.map(|value| first(value).0).collect();
        assert_eq!(slots.len(), SHUFFLED_SLOTS);
        let generations: std::collections::BTreeSet<_> =
            (0..16).map(|value| first(value).1 & 0xf).collect();
        assert_eq!(generations.len(), 16);
    }
}
