//! How often a queue pair yields to congestion.

/// One congestion lasts so long: packets that are under way as before bring more notices of the same one.
pub(super) const CONGESTION_NS: u64 = 1_000_000;

/// When a rate or a window was cut last.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CongestionCuts {
    last_ns: Option<u64>,
}

impl CongestionCuts {
    /// Whether a sign of congestion is to be followed by a cut, which then counts as made. One of the same congestion as the last cut is not.
    pub(super) fn take(&mut self, now_ns: u64) -> bool {
        let is_recent = |last_ns: u64| now_ns.saturating_sub(last_ns) < CONGESTION_NS;
        if self.last_ns.is_some_and(is_recent) {
            return false;
        }
        self.last_ns = Some(now_ns);
        true
    }

    /// A cut was made for another reason.
    pub(super) fn record(&mut self, now_ns: u64) {
        self.last_ns = Some(now_ns);
    }
}
