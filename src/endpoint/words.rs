//! The words by which streams and the library's threads tell each other how far they have come.
#![allow(unsafe_code)] // lays words out in pages of the kernel's

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Result;
use crate::nic::Pages;
use crate::proxy::TriggerCount;

/// Running counts of both queues, send and receive, that only grow until the endpoint is reset. Each pair is on a cache line of its own, and
/// not on the adjacent line, which processors may fetch along: streams write one pair, and the thread that reaps writes the other.
///
/// All bits 0 are valid words.
#[derive(Debug)]
#[repr(C)]
pub(super) struct ProgressWords {
    /// Work requests whose programs were executed. On the proxy path this is the trigger.
    pub(super) rung: WordPair,
    /// Completions that were processed. On the proxy path this is what a stream waits for.
    pub(super) seen: WordPair,
}

/// The words of one endpoint, in a page of their own.
///
/// A GPU reaches registered memory, and the driver registers whole pages. Memory of the application in such a page would be pinned memory to the
/// driver: a copy to it would not be waited for, and registering it would be refused. So these words do not come from the allocator. Endpoints do not
/// share a page either: the driver may unregister it only when the GPU is idle, and a thread that registers it again has to wait for that.
#[derive(Debug)]
pub(super) struct ProgressPage(Pages);

impl ProgressPage {
    /// ProgressWords that are 0.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System): no memory.
    pub(super) fn new() -> Result<ProgressPage> {
        Pages::new(size_of::<ProgressWords>()).map(ProgressPage)
    }
}

impl Deref for ProgressPage {
    type Target = ProgressWords;

    fn deref(&self) -> &ProgressWords {
        // SAFETY: pages of zeros, which is what the words may be, long enough and aligned as these are. They are atomics to everyone.
        unsafe { &*self.0.start().as_ptr().cast() }
    }
}

impl TriggerCount for ProgressPage {
    fn count(&self) -> u64 {
        let [send, recv] = &*self.rung;
        u64::from(send.load(Ordering::Relaxed)) << 32 | u64::from(recv.load(Ordering::Relaxed))
    }
}

/// Begins a cache line: what is declared before it and what after it, in a `repr(C)` struct, are written by different threads. Where two
/// share a line, each has to wait for it whenever the other has written, though neither wants to know.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct CacheLineStart;

/// Two words.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct WordPair([AtomicU32; 2]);

impl Deref for WordPair {
    type Target = [AtomicU32; 2];

    fn deref(&self) -> &[AtomicU32; 2] {
        &self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_and_alone_in_their_pages() {
        let words: Vec<ProgressPage> = (0..3).map(|_| ProgressPage::new().unwrap()).collect();
        for own in &words {
            assert_eq!(own.count(), 0);
            assert_eq!(std::ptr::from_ref::<ProgressWords>(own).addr() % 4096, 0);
            assert_eq!(own.seen[1].swap(1, Ordering::Relaxed), 0);
        }
    }
}
