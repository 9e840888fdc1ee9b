//! The memory of a plan: each step has its own range in every region, and its own bytes to transfer.

use doorbell::{Access, ProtectionDomain, Region};

use crate::plan::{BANKS, GATES, PLACE, STEPS_MAX};
use crate::rig::Random;

/// Adds that a counter has room for: two bits each, so that an add that is executed twice differs from the next add.
const ADDS_PER_COUNTER: usize = 31;

pub struct Memory {
    seed: u64,
    pub sources: Vec<Region>,
    pub targets: Vec<Region>,
    pub counters: Region,
    /// A word of each step that swaps, 0 at first.
    pub swaps: Region,
    /// Words that streams wait for, and behind them one that each step may write.
    pub words: Region,
}

/// How much of a step's bytes its range holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Nothing,
    Part,
    All,
}

impl Memory {
    pub fn new(
        domain: &ProtectionDomain,
        seed: u64,
        numbers: impl Iterator<Item = usize>,
    ) -> Memory {
        let region = |len_bytes| Region::alloc(domain, len_bytes, Access::ALL).unwrap();
        let bank = |_| region(PLACE * STEPS_MAX as u64);
        let memory = Memory {
            seed,
            sources: (0..BANKS).map(bank).collect(),
            targets: (0..BANKS).map(bank).collect(),
            counters: region(8 * STEPS_MAX.div_ceil(ADDS_PER_COUNTER) as u64),
            swaps: region(8 * STEPS_MAX as u64),
            words: region(4 * (GATES + STEPS_MAX) as u64),
        };
        for number in numbers {
            for source in &memory.sources {
                source
                    .write(place(number), &memory.stamp(number, PLACE))
                    .unwrap();
            }
        }
        memory
    }

    /// The bytes that a step transfers, which no other step has.
    pub fn stamp(&self, number: usize, len_bytes: u64) -> Vec<u8> {
        let mut random = Random(self.seed ^ (number as u64) << 48);
        // The number can be read from the first word.
        let first = (self.seed << 16) | (number as u64 + 1);
        let words = std::iter::once(first).chain(std::iter::from_fn(|| Some(random.next() | 1)));
        words
            .take(len_bytes as usize / 8)
            .flat_map(u64::to_le_bytes)
            .collect()
    }

    /// The bytes of a step's place.
    pub fn read(region: &Region, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; PLACE as usize];
        region.read(place(number), &mut bytes).unwrap();
        bytes
    }

    /// How much of the bytes of the step `number` its range holds, and whether it holds anything else.
    pub fn find(&self, bytes: &[u8], number: usize, len_bytes: u64) -> (Found, bool) {
        let (own, rest) = bytes.split_at(len_bytes as usize);
        let stamp = self.stamp(number, len_bytes);
        let foreign = own
            .iter()
            .zip(&stamp)
            .any(|(byte, stamp)| *byte != 0 && byte != stamp);
        let found = if own == stamp {
            Found::All
        } else if own.iter().all(|byte| *byte == 0) {
            Found::Nothing
        } else {
            Found::Part
        };
        (found, foreign || rest.iter().any(|byte| *byte != 0))
    }

    /// The step whose bytes begin here.
    pub fn sender(&self, bytes: &[u8]) -> Option<usize> {
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let number = (first & 0xffff) as usize;
        (first >> 16 == self.seed << 16 >> 16 && (1..=STEPS_MAX).contains(&number))
            .then(|| number - 1)
    }

    /// The counter of a step that adds, as an offset, and what it adds.
    pub fn counter(number: usize) -> (u64, u64) {
        (
            (number / ADDS_PER_COUNTER) as u64 * 8,
            1 << (number % ADDS_PER_COUNTER * 2),
        )
    }

    /// The result of an atomic, in the step's range.
    pub fn result(&self, number: usize, bank: usize) -> u64 {
        let mut bytes = [0; 8];
        self.targets[bank].read(place(number), &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Whether the word of a step that swaps holds what it puts there.
    pub fn is_swapped(&self, number: usize) -> bool {
        let mut bytes = [0; 8];
        self.swaps.read(swapped(number), &mut bytes).unwrap();
        u64::from_le_bytes(bytes) == number as u64 + 1
    }

    /// How often a step has added to its counter: 3 is three times or more.
    pub fn added(&self, number: usize) -> u64 {
        let (offset, one) = Memory::counter(number);
        let mut bytes = [0; 8];
        self.counters.read(offset, &mut bytes).unwrap();
        (u64::from_le_bytes(bytes) / one) & 3
    }
}

/// The word of a step that swaps, as an offset.
pub fn swapped(number: usize) -> u64 {
    8 * number as u64
}

/// Where the place of a step begins, in each of the sources and targets.
pub fn place(number: usize) -> u64 {
    number as u64 * PLACE
}

/// The word that a step may write.
pub fn word(number: usize) -> u64 {
    4 * (GATES + number) as u64
}
