//! The streams that wait for their turn behind another stream.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of streams that wait, and the time since when none of them made progress. One time serves all, because turns come one after the
/// other: a stream behind one that just had its turn may wait as long again.
#[derive(Debug, Default)]
pub(in crate::endpoint) struct TurnWaits(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    count: u32,
    since_ns: u64,
}

impl TurnWaits {
    // Not on the hot path: of a stream that finds another one before it.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more. The time of the streams that wait already is not restarted.
    pub(in crate::endpoint) fn begin(&self, now_ns: u64) {
        let mut waiting = self.waiting();
        if waiting.count == 0 {
            waiting.since_ns = now_ns;
        }
        waiting.count += 1;
    }

    /// One less. For the others the clock begins anew. Also of one that was discarded before it began.
    pub(in crate::endpoint) fn end(&self, now_ns: u64) {
        let mut waiting = self.waiting();
        waiting.count = waiting.count.saturating_sub(1);
        waiting.since_ns = now_ns;
    }

    /// Since when they wait, if there are any.
    pub(in crate::endpoint) fn since_ns(&self) -> Option<u64> {
        let waiting = self.waiting();
        (waiting.count > 0).then_some(waiting.since_ns)
    }

    pub(super) fn reset(&self) {
        *self.waiting() = Waiting::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_runs_while_a_stream_waits() {
        let waits = TurnWaits::default();
        assert_eq!(waits.since_ns(), None);
        waits.begin(10);
        waits.begin(20);
        waits.begin(30);
        assert_eq!(waits.since_ns(), Some(10));
        waits.end(40);
        assert_eq!(waits.since_ns(), Some(40));
        waits.begin(50);
        waits.end(60);
        assert_eq!(waits.since_ns(), Some(60));
        waits.end(70);
        assert_eq!(waits.since_ns(), Some(70));
        waits.end(80);
        assert_eq!(waits.since_ns(), None);
        // Discarded, and never begun.
        waits.end(90);
        waits.begin(100);
        assert_eq!(waits.since_ns(), Some(100));
        waits.reset();
        assert_eq!(waits.since_ns(), None);
    }
}
