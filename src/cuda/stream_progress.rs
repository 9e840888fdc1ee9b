//! How far a CUDA stream has come.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::deferred_free::StreamWork;
use super::stream_words::{STATUS_WORK, StreamWords};
use crate::stream::{ExternalProgress, FailureListener, StreamPosition};

/// A stream that counts. Each call returns the handle, whose drop may block.
pub(super) trait CountedStream: Send + Sync {
    /// Tells owners and events how far the stream has come.
    fn settle_now(self: Arc<Self>);

    /// As [`FailureListener::fail_queued_after`].
    fn fail_queued_after(self: Arc<Self>, owner: usize, generation: u32);

    /// The first mark that the stream's work before the position waits for and that is not reached.
    fn awaited_mark(self: Arc<Self>, position: u64) -> Option<StreamPosition>;
}

/// How far a stream has come: a 64-bit count, from the 32-bit word that the stream stores its count to.
pub(super) struct Count {
    pub(super) words: StreamWords,
    seen: AtomicU64,
    /// The stream has been given what comes up to this count. What is pending behind it may still be taken back.
    pub(super) given: AtomicU64,
    /// The stream has ended: it will not count further, and nothing should wait for it.
    pub(super) over: AtomicBool,
    /// Host functions that were launched and have not returned. The stream does not count them.
    pub(super) functions: AtomicUsize,
    stream: Weak<dyn CountedStream>,
}

impl Count {
    pub(super) fn new(words: StreamWords, stream: Weak<dyn CountedStream>) -> Count {
        Count {
            words,
            seen: AtomicU64::new(0),
            given: AtomicU64::new(0),
            functions: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            stream,
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

impl StreamWork for Count {
    fn is_left(&self) -> bool {
        let given = self.given.load(Ordering::Acquire);
        let is_ahead = given > self.read() || self.functions.load(Ordering::Acquire) > 0;
        is_ahead && !self.over.load(Ordering::Acquire)
    }
}

impl ExternalProgress for Arc<Count> {
    fn completed(&self) -> u64 {
        if self.over.load(Ordering::Acquire) {
            return u64::MAX;
        }
        self.read()
    }

    fn device_word(&self) -> Option<u64> {
        Some(self.words.done_at())
    }

    fn settle(&self) {
        // A stream that is gone has told all.
        if let Some(stream) = self.stream.upgrade() {
            stream.settle_now();
        }
    }

    fn look(&self, position: u64) -> bool {
        let stream = self.stream.upgrade();
        let mark = stream.and_then(|stream| stream.awaited_mark(position));
        // The mark is of a record that was made before the wait for it was queued. So this ends, whichever streams wait for each other.
        mark.is_some_and(|mark| mark.look())
    }

    fn needs_looks(&self, position: u64) -> bool {
        let stream = self.stream.upgrade();
        stream.is_some_and(|stream| stream.awaited_mark(position).is_some())
    }
}

impl FailureListener for Count {
    fn owner_failed(&self) {
        self.words.note(STATUS_WORK);
    }

    fn fail_queued_after(&self, owner: usize, generation: u32) {
        if let Some(stream) = self.stream.upgrade() {
            stream.fail_queued_after(owner, generation);
        }
    }
}
