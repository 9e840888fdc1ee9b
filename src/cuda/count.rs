//! How far a CUDA stream has come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::stream_words::StreamWords;
use crate::stream::Elsewhere;

/// How far a stream has come: a 64-bit count, from the 32-bit word that the stream stores its count to.
pub(super) struct Count {
    pub(super) words: StreamWords,
    seen: AtomicU64,
    /// The stream has ended: it will not count further, and nothing should wait for it.
    pub(super) over: AtomicBool,
}

impl Count {
    pub(super) fn new(words: StreamWords) -> Count {
        Count {
            words,
            seen: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    pub(super) fn read(&self) -> u64 {
        let seen = self.seen.load(Ordering::Acquire);
        // Acquire: orders the stream's work before the count.
        let now = self.words.done().load(Ordering::Acquire);
        let ahead = now.wrapping_sub(seen as u32).cast_signed();
        match u64::try_from(ahead) {
            Ok(ahead) if ahead > 0 => {
                let now = seen + ahead;
                self.seen.fetch_max(now, Ordering::AcqRel).max(now)
            }
            _ => seen,
        }
    }
}

impl Elsewhere for Arc<Count> {
    fn completed(&self) -> u64 {
        if self.over.load(Ordering::Acquire) {
            return u64::MAX;
        }
        self.read()
    }

    fn device_word(&self) -> u64 {
        self.words.done_at()
    }
}
