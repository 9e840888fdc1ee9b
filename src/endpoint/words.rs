//! The words by which streams and the library's threads tell each other how far they have come.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::proxy::TriggerCount;

/// Running counts of both queues, send and receive, that only grow until the endpoint is reset. Each pair on a cache line of its own, and apart
/// from its neighbour, which processors may fetch along: one is written by streams and the other by whoever reaps.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Words {
    /// Work requests whose programs were executed. On the proxy path this is the trigger.
    pub(super) rung: WordPair,
    /// Completions that were processed. On the proxy path this is what a stream waits for.
    pub(super) seen: WordPair,
}

impl TriggerCount for Words {
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
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct WordPair([AtomicU32; 2]);

impl std::ops::Deref for WordPair {
    type Target = [AtomicU32; 2];

    fn deref(&self) -> &[AtomicU32; 2] {
        &self.0
    }
}
