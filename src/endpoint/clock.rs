//! Time as a number that fits an atomic.

use std::sync::OnceLock;
use std::time::Instant;

/// Nanoseconds since the first call in this process, never 0.
#[inline]
pub(super) fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}
