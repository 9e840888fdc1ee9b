//! The steps that are over, in memory that does not grow with their number.

use std::collections::BTreeMap;

/// A set of steps. Steps that follow each other take one entry together.
#[derive(Default)]
pub struct FinishedSteps {
    /// First and last step of each range, which do not touch.
    ranges: BTreeMap<u64, u64>,
}

impl FinishedSteps {
    pub fn contains(&self, step: u64) -> bool {
        let range = self.ranges.range(..=step).next_back();
        range.is_some_and(|(_, last)| step <= *last)
    }

    pub fn insert(&mut self, step: u64) {
        if self.contains(step) {
            return;
        }
        let (mut first, mut last) = (step, step);
        if let Some((before, end)) = self.ranges.range(..step).next_back()
            && end + 1 == step
        {
            first = *before;
        }
        if let Some(end) = step
            .checked_add(1)
            .and_then(|next| self.ranges.remove(&next))
        {
            last = end;
        }
        self.ranges.insert(first, last);
    }

    /// Entries that the set takes.
    pub fn entries(&self) -> usize {
        self.ranges.len()
    }
}
