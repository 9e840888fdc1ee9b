//! How far the chunks of a transfer have come. Each goes through two stages in order, and has a slot from the begin of the first to the end of
//! the second. Nothing here touches memory.

use crate::Result;

/// The two stages of every chunk, first to last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkStage {
    First,
    Second,
}

/// The stages of one chunk.
pub(super) trait Stages {
    /// Begins a stage of a chunk. `false` if there is no room for it now.
    fn begin(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool>;

    /// Whether that stage of a chunk is over; asked for the oldest one that is not.
    fn is_copy_done(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool>;
}

/// Counts of chunks: each is at most the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkCounts {
    chunks: u64,
    slots: u64,
    begun_first: u64,
    over_first: u64,
    begun_second: u64,
    over_second: u64,
}

impl ChunkCounts {
    pub(super) fn new(chunks: u64, slots: u64) -> ChunkCounts {
        ChunkCounts {
            chunks,
            slots,
            begun_first: 0,
            over_first: 0,
            begun_second: 0,
            over_second: 0,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.over_second == self.chunks
    }

    /// Does the work that is possible without waiting. Returns whether there was any.
    ///
    /// # Errors
    /// Those of the stages; the line does not go on then.
    pub(super) fn turn(&mut self, stages: &mut impl Stages) -> Result<bool> {
        let before = *self;
        // A stage that was begun is asked about before the next one begins, so that a slot is free as soon as it can be.
        while self.over_second < self.begun_second
            && stages.is_copy_done(ChunkStage::Second, self.over_second)?
        {
            self.over_second += 1;
        }
        while self.over_first < self.begun_first
            && stages.is_copy_done(ChunkStage::First, self.over_first)?
        {
            self.over_first += 1;
        }
        while self.begun_second < self.over_first
            && stages.begin(ChunkStage::Second, self.begun_second)?
        {
            self.begun_second += 1;
        }
        while self.begun_first < self.chunks
            && self.begun_first - self.over_second < self.slots
            && stages.begin(ChunkStage::First, self.begun_first)?
        {
            self.begun_first += 1;
            // One at a time: an engine that copies in the call would fill all slots before anything is on the wire.
            if self.over_first < self.begun_first
                && stages.is_copy_done(ChunkStage::First, self.over_first)?
            {
                self.over_first += 1;
                if self.begun_second < self.over_first
                    && stages.begin(ChunkStage::Second, self.begun_second)?
                {
                    self.begun_second += 1;
                }
            }
        }
        Ok(*self != before)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{Error, StateKind};

    /// Stages that end when it pleases them, and that check what they are asked.
    struct Strict {
        slots: u64,
        /// What of each chunk is known: 1 and 2 for the first stage begun and over, 3 and 4 for the second.
        state: BTreeMap<u64, u8>,
        moods: Vec<bool>,
        at: usize,
        fail_at: Option<usize>,
        most: usize,
    }

    impl Strict {
        fn mood(&mut self) -> Result<bool> {
            self.at += 1;
            if self.fail_at == Some(self.at) {
                return Err(Error::state(StateKind::Unexpected, "test", "to fail"));
            }
            // In the end everything is in the mood.
            Ok(self.at > 2000 || self.moods[self.at % self.moods.len()])
        }

        fn step(&mut self, chunk: u64, from: u8) -> Result<bool> {
            assert_eq!(
                self.state.get(&chunk).copied().unwrap_or(0),
                from,
                "chunk {chunk}"
            );
            // In order: all before it are at least as far as it will be.
            for (_, state) in self.state.range(..chunk) {
                assert!(*state > from, "chunk {chunk}: {:?}", self.state);
            }
            let yes = self.mood()?;
            if yes {
                self.state.insert(chunk, from + 1);
            }
            let busy = self
                .state
                .values()
                .filter(|state| (1..4).contains(*state))
                .count();
            self.most = self.most.max(busy);
            assert!(busy as u64 <= self.slots);
            Ok(yes)
        }
    }

    impl Stages for Strict {
        fn begin(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool> {
            self.step(chunk, if stage == ChunkStage::First { 0 } else { 2 })
        }

        fn is_copy_done(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool> {
            self.step(chunk, if stage == ChunkStage::First { 1 } else { 3 })
        }
    }

    proptest! {
        #[test]
        fn every_chunk_goes_through_both_stages_in_order_within_the_slots(
            chunks in 0..40u64,
            slots in 1..6u64,
            moods in proptest::collection::vec(any::<bool>(), 1..50),
            fail_at in proptest::option::of(1..200usize),
        ) {
            let mut line = ChunkCounts::new(chunks, slots);
            let mut stages = Strict { slots, state: BTreeMap::new(), moods, at: 0, fail_at, most: 0 };
            let mut turns = 0;
            while !line.is_done() {
                if line.turn(&mut stages).is_err() {
                    prop_assert_eq!(stages.fail_at, Some(stages.at));
                    return Ok(());
                }
                turns += 1;
                prop_assert!(turns < 10_000);
            }
            prop_assert_eq!(stages.state.len() as u64, chunks);
            prop_assert!(stages.state.values().all(|state| *state == 4));
        }
    }

    #[test]
    fn the_next_chunk_is_in_the_first_stage_while_one_is_in_the_second() {
        struct Log(Vec<(ChunkStage, u64)>);
        impl Stages for Log {
            fn begin(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool> {
                self.0.push((stage, chunk));
                Ok(true)
            }
            fn is_copy_done(&mut self, stage: ChunkStage, _: u64) -> Result<bool> {
                Ok(stage == ChunkStage::First)
            }
        }
        let mut log = Log(Vec::new());
        let mut line = ChunkCounts::new(9, 3);
        line.turn(&mut log).unwrap();
        let expected =
            [0, 1, 2].map(|chunk| [(ChunkStage::First, chunk), (ChunkStage::Second, chunk)]);
        assert_eq!(log.0, expected.concat());
    }
}
