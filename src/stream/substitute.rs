//! Values that this process stores in order to end waits of GPUs. Other waits for the same word may see them, too.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest expected time between a GPU's read of the word that ends its wait and its store of the count.
const COUNTS_WITHIN: Duration = Duration::from_secs(1);
/// How long a word is remembered, for waits whose end this process notices late.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Whether there ever was one. There almost never is; then a wait costs a check of this flag.
static ANY: AtomicBool = AtomicBool::new(false);
static WORDS: Mutex<Vec<Substituted>> = Mutex::new(Vec::new());

/// A word that has a substitute, or had one.
struct Substituted {
    address: usize,
    /// Waits that the substitute is to end.
    users: u32,
    /// The last value that others have stored.
    before: u32,
    /// What this process has stored last.
    stored: Option<u32>,
    /// When the last user has restored the word.
    restored: Option<Instant>,
}

impl Substituted {
    /// Stores what `satisfying` makes of the word's value, and keeps that value.
    fn store(&mut self, word: &AtomicU32, satisfying: impl Fn(u32) -> u32) {
        let mut found = word.load(Ordering::Acquire);
        loop {
            let value = satisfying(found);
            match word.compare_exchange(found, value, Ordering::SeqCst, Ordering::Acquire) {
                Ok(_) => break self.note(found, value),
                Err(now) => found = now,
            }
        }
    }

    fn note(&mut self, found: u32, value: u32) {
        if self.stored != Some(found) {
            self.before = found;
        }
        self.stored = Some(value);
    }

    /// Ends a use. The last one restores the earlier value, unless another one was stored meanwhile.
    fn leave(&mut self, word: Option<&AtomicU32>) {
        self.users -= 1;
        if self.users > 0 {
            return;
        }
        if let (Some(word), Some(stored)) = (word, self.stored) {
            let _ = word.compare_exchange(stored, self.before, Ordering::SeqCst, Ordering::Relaxed);
        }
        self.restored = Some(Instant::now());
    }
}

fn words() -> MutexGuard<'static, Vec<Substituted>> {
    WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value in a word that ends a wait, until [`Substitute::restore`].
pub(crate) struct Substitute {
    address: usize,
}

impl Substitute {
    /// Stores into the word what `satisfying` makes of its value. Several waits for one word may have one each, which is why the last of them restores
    /// the word.
    pub(crate) fn store(word: &AtomicU32, satisfying: impl Fn(u32) -> u32) -> Substitute {
        let address = word.as_ptr().addr();
        let mut words = words();
        words.retain(|word| {
            word.restored
                .is_none_or(|restored| restored.elapsed() < REMEMBERED)
        });
        // Release: pairs with the load in `may_have_seen`, by way of the word and of the count of a GPU that saw it.
        ANY.store(true, Ordering::Release);
        let is_it = |word: &Substituted| word.address == address && word.restored.is_none();
        let at = words.iter().position(is_it).unwrap_or_else(|| {
            words.push(Substituted {
                address,
                users: 0,
                before: 0,
                stored: None,
                restored: None,
            });
            words.len() - 1
        });
        words[at].users += 1;
        words[at].store(word, satisfying);
        Substitute { address }
    }

    fn with_word(&self, what: impl FnOnce(&mut Substituted)) {
        let mut words = words();
        let mut under_way = words.iter_mut().filter(|word| word.restored.is_none());
        if let Some(word) = under_way.find(|word| word.address == self.address) {
            what(word);
        }
    }

    /// The same once more, for a wait that has not ended: another value may have been stored since.
    pub(crate) fn store_again(&self, word: &AtomicU32, satisfying: impl Fn(u32) -> u32) {
        self.with_word(|substituted| substituted.store(word, satisfying));
    }

    /// Restores the word's value, if no other wait has a substitute in it and no other value was stored meanwhile.
    pub(crate) fn restore(self, word: &AtomicU32) {
        self.with_word(|substituted| substituted.leave(Some(word)));
        std::mem::forget(self);
    }
}

impl Drop for Substitute {
    /// Without its word, which may be gone.
    fn drop(&mut self) {
        self.with_word(|substituted| substituted.leave(None));
    }
}

/// Whether a wait for that word, which was queued at that time and has ended, may have been ended by a substitute. `holds` tells whether its condition
/// holds now.
pub(crate) fn may_have_seen(address: usize, queued: Instant, holds: impl FnOnce() -> bool) -> bool {
    // Acquire: see `Substitute::new`.
    if !ANY.load(Ordering::Acquire) {
        return false;
    }
    let words = words();
    let mut seen = (words.iter())
        .filter(|word| word.address == address)
        .filter(|word| word.restored.is_none_or(|restored| restored > queued))
        .peekable();
    if seen.peek().is_none() {
        return false;
    }
    // Under the lock: if none is under way, the word has the value that others have stored.
    seen.any(|word| (word.restored).is_none_or(|restored| restored.elapsed() < COUNTS_WITHIN))
        || !holds()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn address(word: &AtomicU32) -> usize {
        word.as_ptr().addr()
    }

    #[test]
    fn a_wait_may_have_seen_a_substitute_that_was_there_since_it_was_queued() {
        let word = AtomicU32::new(7);
        let other = AtomicU32::new(7);
        let queued = Instant::now();
        let seen = |word, since, holds| may_have_seen(address(word), since, || holds);
        assert!(!seen(&word, queued, false), "there was none");
        let substitute = Substitute::store(&word, |_| 9);
        assert!(seen(&word, queued, true), "under way");
        assert!(!seen(&other, queued, false), "another word");
        substitute.restore(&word);
        assert!(seen(&word, queued, true), "just restored");
        assert!(!seen(&word, Instant::now(), false), "queued later");
    }

    #[test]
    fn a_wait_that_ends_long_after_the_substitute_has_seen_it_if_its_condition_does_not_hold() {
        let word = AtomicU32::new(0);
        let queued = Instant::now();
        Substitute::store(&word, |_| 1).restore(&word);
        let long_ago = COUNTS_WITHIN + Duration::from_millis(1);
        let of_it = |it: &&mut Substituted| it.address == address(&word);
        for substituted in words().iter_mut().filter(of_it) {
            // Both are made earlier than they were.
            substituted.restored = substituted.restored.and_then(|at| at.checked_sub(long_ago));
        }
        let queued = queued.checked_sub(2 * long_ago).unwrap();
        assert!(!may_have_seen(address(&word), queued, || true));
        assert!(may_have_seen(address(&word), queued, || false));
    }

    #[test]
    fn the_last_of_several_restores_the_value_of_before_the_first() {
        for first_leaves_first in [true, false] {
            let word = AtomicU32::new(0);
            let with = |bit: u32| move |value: u32| value | bit;
            let mut both = vec![
                Substitute::store(&word, with(1)),
                Substitute::store(&word, with(2)),
            ];
            assert_eq!(word.load(Ordering::Relaxed), 3);
            both.remove(usize::from(!first_leaves_first)).restore(&word);
            assert_eq!(word.load(Ordering::Relaxed), 3, "the other waits");
            both.remove(0).restore(&word);
            assert_eq!(word.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn a_value_that_others_store_stays() {
        let word = AtomicU32::new(0);
        let at_least_5 = |value: u32| value.max(5);
        let substitute = Substitute::store(&word, at_least_5);
        word.store(2, Ordering::Relaxed);
        substitute.store_again(&word, at_least_5);
        assert_eq!(word.load(Ordering::Relaxed), 5, "the wait has not ended");
        substitute.restore(&word);
        assert_eq!(word.load(Ordering::Relaxed), 2);
        let substitute = Substitute::store(&word, at_least_5);
        word.store(6, Ordering::Relaxed);
        substitute.restore(&word);
        assert_eq!(word.load(Ordering::Relaxed), 6);
    }
}
