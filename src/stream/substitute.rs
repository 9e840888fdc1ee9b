//! Values that this process stores in order to end waits of GPUs. Other waits for the same word may see them, too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A GPU whose wait has ended counts next. That it takes longer, between its read of the word and its store of the count, is not expected.
const COUNTS_WITHIN: Duration = Duration::from_secs(1);
/// How long a word is remembered, for waits whose end this process notices late.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Whether there ever was one. There almost never is; then a wait costs a check of this flag.
static ANY: AtomicBool = AtomicBool::new(false);
static WORDS: Mutex<Vec<Substituted>> = Mutex::new(Vec::new());

struct Substituted {
    address: usize,
    restored: Option<Instant>,
}

fn words() -> MutexGuard<'static, Vec<Substituted>> {
    WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, the word at that address may have a value that nobody but this process has stored.
pub(crate) struct Substitute {
    address: usize,
}

impl Substitute {
    /// Called before the value is stored.
    pub(crate) fn new(address: usize) -> Substitute {
        let mut words = words();
        words.retain(|word| (word.restored).is_none_or(|restored| restored.elapsed() < REMEMBERED));
        words.push(Substituted {
            address,
            restored: None,
        });
        // Release: pairs with the load in `may_have_seen`, by way of the word and of the count of whoever saw it.
        ANY.store(true, Ordering::Release);
        Substitute { address }
    }
}

impl Drop for Substitute {
    fn drop(&mut self) {
        let mut words = words();
        let mut under_way = words.iter_mut().filter(|word| word.restored.is_none());
        if let Some(word) = under_way.find(|word| word.address == self.address) {
            word.restored = Some(Instant::now());
        }
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

    #[test]
    fn a_wait_may_have_seen_a_substitute_that_was_there_since_it_was_queued() {
        let word = 0_u32;
        let address = (&raw const word).addr();
        let queued = Instant::now();
        assert!(!may_have_seen(address, queued, || false), "there was none");
        let substitute = Substitute::new(address);
        assert!(may_have_seen(address, queued, || true), "under way");
        assert!(
            !may_have_seen(address + 4, queued, || false),
            "another word"
        );
        let other = Substitute::new(address);
        drop(substitute);
        assert!(may_have_seen(address, Instant::now(), || true), "the other");
        drop(other);
        assert!(may_have_seen(address, queued, || true), "just restored");
        let later = Instant::now();
        assert!(!may_have_seen(address, later, || false), "queued later");
    }

    #[test]
    fn a_wait_that_ends_long_after_the_substitute_has_seen_it_if_its_condition_does_not_hold() {
        let word = 0_u32;
        let address = (&raw const word).addr();
        let queued = Instant::now();
        drop(Substitute::new(address));
        let long_ago = COUNTS_WITHIN + Duration::from_millis(1);
        for word in words().iter_mut().filter(|word| word.address == address) {
            // Both are made earlier than they were.
            word.restored = word.restored.and_then(|at| at.checked_sub(long_ago));
        }
        let queued = queued.checked_sub(2 * long_ago).unwrap();
        assert!(!may_have_seen(address, queued, || true));
        assert!(may_have_seen(address, queued, || false));
    }
}
