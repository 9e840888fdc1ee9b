//! Failures of queued work, kept until a later call reports them.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU8, Ordering};

use super::lock::Lock;
use crate::{Error, Result};

/// Why a stream reports a wait that was let go.
pub(crate) const RELEASED: &str = "a wait was released before its condition held: its deadline passed, or its endpoint failed; its ticket tells which";

const NONE: u8 = 0;
const PASSING: u8 = 1;
const STICKY: u8 = 2;

/// The failures of one stream. Asking costs one load as long as there is none.
pub(crate) struct Fault {
    /// The worst kind in `reasons`.
    kind: AtomicU8,
    reasons: Lock<Reasons>,
}

#[derive(Default)]
struct Reasons {
    /// The first passing failure that no call reported yet.
    passing: Option<String>,
    /// How many more came after it.
    more: u64,
    sticky: Option<String>,
}

impl Fault {
    pub(crate) fn new() -> Self {
        Self {
            kind: AtomicU8::new(NONE),
            reasons: Lock::default(),
        }
    }

    /// True once a sticky failure came.
    pub(crate) fn is_sticky(&self) -> bool {
        self.kind.load(Ordering::Acquire) == STICKY
    }

    /// Notes a failure that one later call reports.
    pub(crate) fn pass(&self, reason: String) {
        let mut reasons = self.reasons();
        match reasons.passing {
            None => reasons.passing = Some(reason),
            Some(_) => reasons.more += 1,
        }
        // Release: who sees the kind and then takes the lock finds a reason. `max`, because sticky stays.
        self.kind.fetch_max(PASSING, Ordering::Release);
    }

    /// Notes a failure that every later call reports. The first one counts.
    pub(crate) fn stick(&self, reason: String) {
        self.reasons().sticky.get_or_insert(reason);
        self.kind.store(STICKY, Ordering::Release);
    }

    /// Reports what there is to report: passing failures first and once, a sticky one from then on.
    pub(crate) fn check(&self, stream: &str) -> Result<()> {
        if self.kind.load(Ordering::Acquire) == NONE {
            return Ok(());
        }
        self.report(stream)
    }

    #[cold]
    fn report(&self, stream: &str) -> Result<()> {
        let mut reasons = self.reasons();
        let reason = match (reasons.passing.take(), std::mem::take(&mut reasons.more)) {
            (Some(reason), 0) => reason,
            (Some(reason), more) => format!("{reason} (and {more} more)"),
            (None, _) => match &reasons.sticky {
                Some(reason) => reason.clone(),
                // Another caller took the report between our load and the lock.
                None => return Ok(()),
            },
        };
        if reasons.sticky.is_none() {
            // Under the lock, so that a failure noted meanwhile is not wiped.
            self.kind.store(NONE, Ordering::Release);
        }
        Err(Error::Asynchronous {
            stream: stream.to_owned(),
            reason,
        })
    }

    /// The sticky failure, if there is one, without reporting it.
    pub(crate) fn sticky_reason(&self) -> Option<String> {
        self.reasons().sticky.clone()
    }

    fn reasons(&self) -> MutexGuard<'_, Reasons> {
        self.reasons.lock()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn reason(fault: &Fault) -> Option<String> {
        match fault.check("s") {
            Ok(()) => None,
            Err(Error::Asynchronous { stream, reason }) => {
                assert_eq!(stream, "s");
                Some(reason)
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_passing_failure_is_reported_once_and_counts_its_like() {
        let fault = Fault::new();
        assert_eq!(reason(&fault), None);
        fault.pass("a".into());
        assert_eq!(reason(&fault).unwrap(), "a");
        assert_eq!(reason(&fault), None);
        for name in ["b", "c", "d"] {
            fault.pass(name.into());
        }
        assert_eq!(reason(&fault).unwrap(), "b (and 2 more)");
        assert_eq!(reason(&fault), None);
        assert!(!fault.is_sticky());
    }

    #[test]
    fn a_sticky_failure_stays_and_hides_no_passing_one() {
        let fault = Fault::new();
        fault.pass("a".into());
        fault.stick("b".into());
        fault.stick("c".into());
        assert!(fault.is_sticky());
        assert_eq!(reason(&fault).unwrap(), "a");
        assert_eq!(reason(&fault).unwrap(), "b");
        fault.pass("d".into());
        assert!(fault.is_sticky());
        assert_eq!(reason(&fault).unwrap(), "d");
        assert_eq!(reason(&fault).unwrap(), "b");
    }
}
