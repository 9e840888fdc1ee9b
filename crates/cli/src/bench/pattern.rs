//! Message bytes that depend on the seed, the step and their offset, so that stale or misplaced bytes are found.

/// The bytes of one message. Bytes at one offset differ from step to step, so that stale and incomplete messages are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    state: u64,
}

impl Pattern {
    /// The pattern of a step in the run with this seed.
    pub fn new(seed: u64, step: u64) -> Self {
        Self {
            state: mix(seed ^ mix(step)),
        }
    }

    /// The pattern from `offset` on, a multiple of 8.
    pub fn skip(self, offset: u64) -> Self {
        debug_assert!(offset.is_multiple_of(8), "patterns are made of words");
        Self {
            state: self.state.wrapping_add(offset / 8),
        }
    }

    /// Writes the pattern over all of `bytes`.
    pub fn fill(self, bytes: &mut [u8]) {
        for (word, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(word)[..chunk.len()]);
        }
    }

    /// The first difference of `bytes` from the pattern: its offset, the byte there, and the right one.
    pub fn mismatch(self, bytes: &[u8]) -> Option<(usize, u8, u8)> {
        for (word, chunk) in bytes.chunks(8).enumerate() {
            let expected = &self.word(word)[..chunk.len()];
            if chunk != expected {
                let at = (0..chunk.len()).find(|&at| chunk[at] != expected[at])?;
                return Some((word * 8 + at, chunk[at], expected[at]));
            }
        }
        None
    }

    fn word(self, index: usize) -> [u8; 8] {
        mix(self.state.wrapping_add(index as u64)).to_le_bytes()
    }
}

/// SplitMix64's output function (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): a bijection.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_word_of_splitmix64() {
        // The generator's first outputs from state 0, as published.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn every_byte_counts() {
        for len_bytes in [1, 7, 8, 9, 64, 1001] {
            let pattern = Pattern::new(7, 3);
            let mut bytes = vec![0; len_bytes];
            pattern.fill(&mut bytes);
            assert_eq!(pattern.mismatch(&bytes), None);
            for at in 0..len_bytes {
                let right = bytes[at];
                bytes[at] ^= 0x40;
                assert_eq!(pattern.mismatch(&bytes), Some((at, right ^ 0x40, right)));
                bytes[at] = right;
            }
        }
    }

    #[test]
    fn pieces_are_the_whole() {
        let mut bytes = [0; 40];
        Pattern::new(7, 3).fill(&mut bytes);
        assert_eq!(Pattern::new(7, 3).skip(16).mismatch(&bytes[16..]), None);
    }

    #[test]
    fn other_steps_and_seeds_have_other_bytes() {
        let mut bytes = [0; 16];
        Pattern::new(1, 0).fill(&mut bytes);
        assert!(Pattern::new(1, 1).mismatch(&bytes).is_some());
        assert!(Pattern::new(2, 0).mismatch(&bytes).is_some());
        assert!(Pattern::new(0, 1).mismatch(&bytes).is_some());
    }
}
