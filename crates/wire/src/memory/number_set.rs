//! A set of numbers by which threads announce work to the one thread that does it.

use std::sync::atomic::{AtomicU64, Ordering};

/// A set of numbers. Adding one and taking all of them cost the same however many could be in it.
///
/// Numbers that differ by a multiple of [`NumberSet::COUNT`] share a bit. The thread that takes the bit has to look at each of them.
#[derive(Debug)]
#[repr(align(128))]
pub struct NumberSet {
    /// The words that may have a bit set.
    groups: AtomicU64,
    words: [AtomicU64; 64],
}

impl Default for NumberSet {
    fn default() -> NumberSet {
        NumberSet {
            groups: AtomicU64::new(0),
            words: [const { AtomicU64::new(0) }; 64],
        }
    }
}

impl NumberSet {
    /// Numbers that it distinguishes.
    pub const COUNT: usize = 64 * 64;

    /// Adds a number. The thread that takes it sees what the caller stored before this call.
    #[inline]
    pub fn add(&self, number: usize) {
        let number = number % Self::COUNT;
        // The word is set before the group, so the thread that takes the group finds the bit. If an earlier take has cleared the bit, the
        // group's next take finds an empty word.
        self.words[number / 64].fetch_or(1 << (number % 64), Ordering::Release);
        self.groups.fetch_or(1 << (number / 64), Ordering::Release);
    }

    /// Whether nothing was added since the last [`NumberSet::take`].
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.groups.load(Ordering::Relaxed) == 0
    }

    /// Removes all numbers, each below [`NumberSet::COUNT`], and passes them to `each`.
    #[inline]
    pub fn take(&self, mut each: impl FnMut(usize)) {
        let mut groups = self.groups.swap(0, Ordering::Acquire);
        while groups != 0 {
            let group = groups.trailing_zeros() as usize;
            groups &= groups - 1;
            let mut bits = self.words[group].swap(0, Ordering::Acquire);
            while bits != 0 {
                each(group * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(set: &NumberSet) -> Vec<usize> {
        let mut taken = Vec::new();
        set.take(|number| taken.push(number));
        taken
    }

    #[test]
    fn added_numbers_are_taken_once() {
        let set = NumberSet::default();
        assert!(set.is_empty());
        for number in [4095, 0, 63, 64, 63, 4096 + 1] {
            set.add(number);
        }
        assert!(!set.is_empty());
        assert_eq!(taken(&set), [0, 1, 63, 64, 4095]);
        assert!(set.is_empty());
        assert_eq!(taken(&set), []);
    }

    #[test]
    fn concurrent_adds_lose_no_number() {
        const EACH: usize = 100_000;
        let set = NumberSet::default();
        let counts: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for (of, count) in counts.iter().enumerate() {
                let set = &set;
                scope.spawn(move || {
                    for _ in 0..EACH {
                        count.fetch_add(1, Ordering::Relaxed);
                        // Two of them share a word.
                        set.add(of * 40);
                    }
                });
            }
            // What was seen of each count when its number was taken: in the end all of it.
            let mut seen = [0; 4];
            while seen != [EACH as u64; 4] {
                set.take(|number| seen[number / 40] = counts[number / 40].load(Ordering::Relaxed));
                std::thread::yield_now();
            }
        });
    }
}
