//! The watchdog: one thread of the process that looks after operations under way, so that no wait is for ever.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::{Error, Result};

/// How often the watched are looked at, while there are any. An error completion is noticed this late, if nobody polls.
const TICK: Duration = Duration::from_millis(1);

/// What the watchdog looks after.
pub(super) trait Watched: Send + Sync {
    /// Looks at deadlines and errors. `false` when there is nothing more to look after; it is then to be given to
    /// [`watch`] again when there is.
    fn look(&self) -> bool;
}

type List = Vec<Weak<dyn Watched>>;

#[derive(Default)]
struct Watchdog {
    arrivals: Mutex<List>,
    arrived: Condvar,
}

fn watchdog() -> Result<&'static Arc<Watchdog>> {
    static WATCHDOG: OnceLock<Option<Arc<Watchdog>>> = OnceLock::new();
    let started = WATCHDOG.get_or_init(|| {
        let watchdog = Arc::<Watchdog>::default();
        let run = Arc::clone(&watchdog);
        std::thread::Builder::new()
            .name("doorbell-watchdog".into())
            .spawn(move || run.run())
            .ok()?;
        Some(watchdog)
    });
    started.as_ref().ok_or(Error::System {
        operation: "start of the watchdog thread",
        errno: libc::EAGAIN,
    })
}

/// Starts the watchdog's thread, if it does not run.
///
/// # Errors
/// [`Error::System`] if there is no thread to be had.
pub(super) fn start() -> Result<()> {
    watchdog().map(drop)
}

/// Has `watched` looked at from now on, until its [`Watched::look`] says `false`.
pub(super) fn watch(watched: Weak<dyn Watched>) {
    // `start` was called when the first endpoint was made, and its failure reported there.
    if let Ok(watchdog) = watchdog() {
        watchdog
            .arrivals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(watched);
        watchdog.arrived.notify_one();
    }
}

impl Watchdog {
    fn run(&self) {
        let mut watched: List = Vec::new();
        loop {
            let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
            while watched.is_empty() && arrivals.is_empty() {
                arrivals = self
                    .arrived
                    .wait(arrivals)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            watched.append(&mut arrivals);
            drop(arrivals);
            watched.retain(|entry| entry.upgrade().is_some_and(|watched| watched.look()));
            if !watched.is_empty() {
                std::thread::sleep(TICK);
            }
        }
    }
}
