//! The words by which streams and the library's threads tell each other how far they have come.

use std::sync::atomic::AtomicU32;

/// Running counts of both queues, send and receive, that only grow until the endpoint is reset. Each pair on a cache line of its own: one
/// is written by streams and the other by whoever reaps.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Words {
    /// Work requests whose programs were executed. On the proxy path this is the trigger.
    pub(super) rung: Line,
    /// Completions that were processed. On the proxy path this is what a stream waits for.
    pub(super) seen: Line,
}

/// Two words.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Line([AtomicU32; 2]);

impl std::ops::Deref for Line {
    type Target = [AtomicU32; 2];

    fn deref(&self) -> &[AtomicU32; 2] {
        &self.0
    }
}
