//! Numbers of queue pairs: a slot each, and a generation that distinguishes successive users of the slot.

use std::collections::VecDeque;

/// Slots that are made before a free one is used again.
const FRESH_SLOTS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct QpNumbers {
    /// By slot.
    generations: Vec<u8>,
    first_generation: u8,
    free: VecDeque<usize>,
}

impl QpNumbers {
    /// The generation before that of each slot's first queue pair.
    pub(super) fn after(first_generation: u8) -> QpNumbers {
        QpNumbers {
            first_generation,
            ..QpNumbers::default()
        }
    }

    /// A slot and its generation; `None` if `max` slots are in use. A freed slot is used again last, so that late packets for its
    /// old number find no queue pair.
    pub(super) fn reserve(&mut self, max: usize) -> Option<(usize, u32)> {
        let count = self.generations.len();
        let slot = if count < FRESH_SLOTS || self.free.is_empty() {
            if count == max {
                return None;
            }
            self.generations.push(self.first_generation);
            count
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
