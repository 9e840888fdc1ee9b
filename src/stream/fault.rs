//! Failures of queued work, kept until a later call reports them.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use super::lock::Lock;
use crate::{Error, Result, WorkError};

const NONE: u8 = 0;
const PASSING: u8 = 1;
const STICKY: u8 = 2;
const FINAL: u8 = 3;

/// Why queued work failed.
#[derive(Debug, Clone)]
pub struct StreamFailure {
    /// Text for messages.
    pub(crate) reason: String,
    /// The failure of the endpoint that was waited for, if that is the cause.
    pub(crate) work: Option<WorkError>,
}

impl StreamFailure {
    /// As a later call on that stream reports it.
    pub(crate) fn report(&self, stream: &str) -> Error {
        Error::Asynchronous {
            stream: stream.to_owned(),
            reason: self.reason.clone(),
            work: self.work,
        }
    }

    /// That of work which was not executed because of this failure.
    pub(crate) fn of_discarded(&self) -> StreamFailure {
        StreamFailure {
            reason: format!("discarded, because earlier work failed: {}", self.reason),
            work: self.work,
        }
    }
}

impl From<WorkError> for StreamFailure {
    fn from(work: WorkError) -> StreamFailure {
        StreamFailure {
            reason: format!("a wait ended without success: {work}"),
            work: Some(work),
        }
    }
}

/// The error of a kernel.
impl From<Error> for StreamFailure {
    fn from(error: Error) -> StreamFailure {
        StreamFailure {
            reason: format!("a kernel failed: {error}"),
            work: match error {
                Error::Work(work) => Some(work),
                Error::Asynchronous { work, .. } => work,
                _ => None,
            },
        }
    }
}

impl From<String> for StreamFailure {
    fn from(reason: String) -> StreamFailure {
        StreamFailure { reason, work: None }
    }
}

impl From<&str> for StreamFailure {
    fn from(reason: &str) -> StreamFailure {
        reason.to_owned().into()
    }
}

/// The failures of one stream. Asking costs one load as long as there is none.
pub(crate) struct Fault {
    /// The worst kind of those kept.
    kind: AtomicU8,
    failures: Lock<Failures>,
    /// Whether the stream goes on behind work that failed.
    continues: AtomicBool,
}

#[derive(Default)]
struct Failures {
    /// The first passing failure that no call reported yet.
    passing: Option<StreamFailure>,
    /// How many more came after it.
    more: u64,
    sticky: Option<StreamFailure>,
    is_final: bool,
}

impl Failures {
    fn kind(&self) -> u8 {
        match (&self.sticky, &self.passing) {
            (Some(_), _) if self.is_final => FINAL,
            (Some(_), _) => STICKY,
            (None, Some(_)) => PASSING,
            (None, None) => NONE,
        }
    }
}

impl Fault {
    pub(crate) fn new() -> Self {
        Self {
            kind: AtomicU8::new(NONE),
            failures: Lock::default(),
            continues: AtomicBool::new(false),
        }
    }

    /// True while a sticky failure is there: what is queued is not to be executed.
    pub(crate) fn is_sticky(&self) -> bool {
        self.kind.load(Ordering::Acquire) >= STICKY
    }

    /// True once nothing that is queued will be executed.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_final(&self) -> bool {
        self.kind.load(Ordering::Acquire) == FINAL
    }

    /// Whether the stream goes on behind work that failed.
    #[cfg(feature = "cuda")]
    pub(crate) fn continues(&self) -> bool {
        self.continues.load(Ordering::Relaxed)
    }

    pub(crate) fn set_continues(&self, continues: bool) {
        self.continues.store(continues, Ordering::Relaxed);
    }

    /// Queued work has failed: sticky, unless the application wants the stream to go on. Returns whether it goes on.
    pub(crate) fn fail(&self, failure: impl Into<StreamFailure>) -> bool {
        let goes_on = self.continues.load(Ordering::Relaxed);
        if goes_on {
            self.pass(failure);
        } else {
            self.stick(failure);
        }
        goes_on
    }

    /// Notes a failure that one later call reports.
    pub(crate) fn pass(&self, failure: impl Into<StreamFailure>) {
        self.change(|failures| match failures.passing {
            None => failures.passing = Some(failure.into()),
            Some(_) => failures.more += 1,
        });
    }

    /// Notes a failure that every later call reports until [`Fault::take`]. The first one counts.
    pub(crate) fn stick(&self, failure: impl Into<StreamFailure>) {
        self.change(|failures| {
            failures.sticky.get_or_insert_with(|| failure.into());
        });
    }

    /// Notes a failure that every later call reports, for good. The first one counts, but for failures that could be taken.
    #[cfg(feature = "cuda")]
    pub(crate) fn end(&self, failure: impl Into<StreamFailure>) {
        self.change(|failures| {
            if !std::mem::replace(&mut failures.is_final, true) {
                failures.sticky = Some(failure.into());
            }
        });
    }

    /// Takes the failures that are not for good, and gives the first of them: the sticky one, if there is one. While a sticky one is there nothing is
    /// executed; `taking` it sees to what was queued behind it.
    pub(crate) fn take(&self, taking: impl FnOnce(&StreamFailure)) -> Option<StreamFailure> {
        self.change(|failures| {
            if let Some(failure) = &failures.sticky {
                taking(failure);
            }
            failures.more = 0;
            let passing = failures.passing.take();
            if failures.is_final {
                return failures.sticky.clone();
            }
            failures.sticky.take().or(passing)
        })
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
        let failure = self.change(|failures| {
            match (failures.passing.take(), std::mem::take(&mut failures.more)) {
                (Some(failure), 0) => Some(failure),
                (Some(failure), more) => Some(StreamFailure {
                    reason: format!("{} (and {more} more)", failure.reason),
                    ..failure
                }),
                // None: another caller took the report between our load and the lock.
                (None, _) => failures.sticky.clone(),
            }
        });
        failure.map_or(Ok(()), |failure| Err(failure.report(stream)))
    }

    /// The sticky failure, if there is one, without reporting it.
    pub(crate) fn sticky(&self) -> Option<StreamFailure> {
        self.failures().sticky.clone()
    }

    fn change<R>(&self, change: impl FnOnce(&mut Failures) -> R) -> R {
        let mut failures = self.failures();
        let result = change(&mut failures);
        // Under the lock, so that a failure noted meanwhile is not wiped. Release: a thread that sees the kind and then takes the lock finds a
        // failure.
        self.kind.store(failures.kind(), Ordering::Release);
        result
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn reason(fault: &Fault) -> Option<String> {
        match fault.check("s") {
            Ok(()) => None,
            Err(Error::Asynchronous { stream, reason, .. }) => {
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
        fault.pass("a");
        assert_eq!(reason(&fault).unwrap(), "a");
        assert_eq!(reason(&fault), None);
        for name in ["b", "c", "d"] {
            fault.pass(name);
        }
        assert_eq!(reason(&fault).unwrap(), "b (and 2 more)");
        assert_eq!(reason(&fault), None);
        assert!(!fault.is_sticky());
    }

    #[test]
    fn a_sticky_failure_stays_and_hides_no_passing_one() {
        let fault = Fault::new();
        fault.pass("a");
        fault.stick("b");
        fault.stick("c");
        assert!(fault.is_sticky());
        assert_eq!(reason(&fault).unwrap(), "a");
        assert_eq!(reason(&fault).unwrap(), "b");
        fault.pass("d");
        assert!(fault.is_sticky());
        assert_eq!(reason(&fault).unwrap(), "d");
        assert_eq!(reason(&fault).unwrap(), "b");
    }

    #[test]
    fn a_sticky_failure_is_taken_and_a_final_one_is_not() {
        let fault = Fault::new();
        assert!(fault.take(|_| {}).is_none());
        fault.pass("a");
        fault.stick("b");
        assert_eq!(fault.take(|_| {}).unwrap().reason, "b");
        assert!(!fault.is_sticky());
        assert_eq!(reason(&fault), None);
        #[cfg(feature = "cuda")]
        {
            fault.stick("c");
            fault.end("d");
            fault.end("e");
            assert_eq!(fault.take(|_| {}).unwrap().reason, "d");
            assert_eq!(reason(&fault).unwrap(), "d");
        }
    }
}
