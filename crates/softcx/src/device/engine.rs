//! The thread of a device, and what it shares with the handles.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::core::DeviceCore;
use crate::device::inbox::EngineWake;
#[cfg(test)]
use crate::device::pace::REPORTED_SLEEP;
use crate::device::pace::{DRIVEN_FOR, EnginePace, Rest};
use crate::{Error, Result};
use doorbell_wire::memory::NumberSet;

/// How long the engine sleeps while another thread makes the device's progress.
const NAP: Duration = Duration::from_micros(50);
/// The same after the other thread has done so for a while. It is long enough for the scheduler to treat the engine's core as idle: the scheduler
/// moves no thread to a core whose idle periods are shorter than the cost of a migration (0.5 ms), and application and stream would share one core.
const LONGEST_NAP: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct EngineCore {
    pub(super) core: Mutex<DeviceCore>,
    pub(super) wake_word: EngineWake,
    started: Instant,
    stop: AtomicBool,
    /// When another thread than the engine last made a turn ([`EngineCore::now_ns`]). Changes also when one could not, because the core was locked.
    pub(super) driven: AtomicU64,
    /// When the engine wakes up by itself, if it sleeps until something is due; else 0. Written with the core locked.
    pub(super) sleeps_until_ns: AtomicU64,
    /// Slots of queue pairs whose doorbells were rung and that no turn looks at.
    pub(super) rung: NumberSet,
    /// A doorbell of some queue pair was rung.
    pub(super) any_rung: AtomicBool,
    /// Threads that wait for the lock of the core.
    wanted: AtomicU32,
    pace: EnginePace,
    /// Sleeps of [`REPORTED_SLEEP`] and longer that nothing ended early.
    #[cfg(test)]
    pub(super) long_sleeps: AtomicU64,
}

/// Idle queue pairs whose registers are read when the engine wakes by itself: executors that cannot report store there, too.
const IDLE_LOOKS: usize = 64;

impl EngineCore {
    fn new(core: DeviceCore, pace: EnginePace) -> EngineCore {
        let wake_word = core.inbox().engine_wake();
        EngineCore {
            core: Mutex::new(core),
            wake_word,
            started: Instant::now(),
            stop: AtomicBool::new(false),
            driven: AtomicU64::new(0),
            sleeps_until_ns: AtomicU64::new(0),
            rung: NumberSet::default(),
            any_rung: AtomicBool::new(false),
            wanted: AtomicU32::new(0),
            pace,
            #[cfg(test)]
            long_sleeps: AtomicU64::new(0),
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// The core is plain data: a panic while it was locked (none is known) leaves it as it was at that point.
    pub(super) fn lock(&self) -> MutexGuard<'_, DeviceCore> {
        // A busy engine unlocks and locks again faster than a sleeper wakes up. With this word it steps aside.
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let core = self
            .core
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        core
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, DeviceCore>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// One turn, which also reads the registers of reported doorbells.
    #[inline]
    pub(super) fn turn(&self, core: &mut DeviceCore, now_ns: u64) -> bool {
        core.parts.now_ns = now_ns;
        if !self.rung.is_empty() {
            self.rung.take(|number| core.look_at_reported(number));
        }
        // Acquire: pairs with `Device::rung`, so this turn sees the doorbell behind the hint.
        let any_rung =
            self.any_rung.load(Ordering::Relaxed) && self.any_rung.swap(false, Ordering::AcqRel);
        let worked = core.turn(now_ns);
        // Hot queue pairs come first: a hint that names no queue pair is nearly always about one of them.
        if !worked && any_rung && core.look_at_idle(usize::MAX) {
            return core.turn(now_ns);
        }
        worked
    }

    /// Ends a turn of another thread: wakes the engine if there is more to do, or if the turn has begun a wait that ends before the engine wakes up by itself.
    #[inline]
    pub(super) fn end_turn(&self, core: MutexGuard<'_, DeviceCore>, worked: bool) {
        let wakes = core.has_more_to_do() || (worked && self.is_due_in_sleep(&core));
        drop(core);
        if wakes {
            self.wake_word.wake();
        }
    }

    fn is_due_in_sleep(&self, core: &DeviceCore) -> bool {
        let until_ns = self.sleeps_until_ns.load(Ordering::Relaxed);
        until_ns > 0
            && core
                .next_due_ns(self.now_ns())
                .is_some_and(|due| due < until_ns)
    }

    /// Sleeps for that time while another thread makes the device's progress. Returns whether a wake ended the sleep, so that the engine has work.
    fn nap(&self, pace: &EnginePace, time: Duration) -> bool {
        if pace.gets_reports() {
            std::thread::sleep(time);
            return false;
        }
        // The thread that makes progress calls `progress_off` when it stops; packets after that wake the engine.
        // A packet may have come just after it stopped, while wakes were still suppressed: hence one turn.
        let last_look = || {
            if let Some(mut core) = self.try_lock() {
                self.turn(&mut core, self.now_ns());
            }
            self.stop.load(Ordering::Acquire)
        };
        self.wake_word.sleep(time, last_look)
    }

    /// One turn, and a look at idle queue pairs. Returns whether there was a doorbell.
    fn finds_doorbell(&self) -> bool {
        let mut core = self.lock();
        let before = core.parts.counters.doorbells;
        self.turn(&mut core, self.now_ns());
        core.look_at_idle(IDLE_LOOKS) || core.parts.counters.doorbells != before
    }

    fn run(&self) {
        let mut pace = self.pace.begun();
        let mut seen = 0;
        let mut driven_at: Option<Instant> = None;
        let mut idle_since: Option<Instant> = None;
        let mut nap = NAP;
        let mut napped = false;
        while !self.stop.load(Ordering::Acquire) {
            if self.wanted.load(Ordering::Relaxed) != 0 {
                pace.step_aside();
            }
            let driven = self.driven.load(Ordering::Relaxed);
            if driven != seen {
                (seen, idle_since, napped) = (driven, None, true);
                driven_at = Some(Instant::now());
                if !self.nap(&pace, nap) {
                    if !pace.expects_unreported() {
                        nap = (nap * 2).min(LONGEST_NAP);
                    }
                    continue;
                }
                seen = self.driven.load(Ordering::Relaxed);
            }
            nap = NAP;
            let Some(mut core) = self.try_lock() else {
                // The thread that holds the lock may be waiting for this processor core.
                pace.step_aside();
                continue;
            };
            let worked = self.turn(&mut core, self.now_ns());
            // No other thread ran the device during the nap, although there was work: the program that waits for it cannot run the device itself.
            if std::mem::take(&mut napped) && worked {
                pace.found_unreported();
            }
            if worked {
                idle_since = None;
                continue;
            }
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            let is_driven = driven_at.is_some_and(|at| at.elapsed() < DRIVEN_FOR);
            let mut rest = pace.rest(idle, is_driven, core.pages_that_may_be_rung());
            if rest != Rest::Spin {
                let now_ns = self.now_ns();
                let due = core.next_due_ns(now_ns);
                rest = rest.until(due.map(|due| Duration::from_nanos(due.saturating_sub(now_ns))));
                core.look_at_all_pages();
                if let Rest::Sleep(time) = rest {
                    let until_ns = now_ns.saturating_add(time.as_nanos() as u64);
                    self.sleeps_until_ns.store(until_ns, Ordering::Relaxed);
                }
            }
            drop(core);
            let time = match rest {
                Rest::Spin => {
                    std::hint::spin_loop();
                    continue;
                }
                Rest::Nap(time) => {
                    std::thread::sleep(time);
                    continue;
                }
                Rest::Sleep(time) => time,
            };
            let mut woken = false;
            let was_woken = self.wake_word.sleep(time, || {
                let mut core = self.lock();
                woken = self.stop.load(Ordering::Acquire)
                    || self.turn(&mut core, self.now_ns())
                    || self.is_due_in_sleep(&core);
                woken
            });
            self.sleeps_until_ns.store(0, Ordering::Relaxed);
            #[cfg(test)]
            if !woken && !was_woken && time >= REPORTED_SLEEP {
                self.long_sleeps.fetch_add(1, Ordering::Relaxed);
            }
            // Of a queue pair whose registers every turn reads, no thread reports more than a wake; such a doorbell may count as one of a GPU.
            let is_reported =
                was_woken && (!self.rung.is_empty() || self.any_rung.load(Ordering::Relaxed));
            // After a wake there is more to come. After a time-out one turn is enough to know: a doorbell that it finds was not reported.
            let found = woken || self.finds_doorbell();
            if found {
                idle_since = None;
            }
            if found && !woken && !is_reported {
                pace.found_unreported();
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) nic: Arc<EngineCore>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread that runs the core.
    pub(super) fn start(core: DeviceCore, pace: EnginePace) -> Result<Engine> {
        let nic = Arc::new(EngineCore::new(core, pace));
        let engine = Arc::clone(&nic);
        let thread = std::thread::Builder::new()
            .name("softcx-engine".into())
            .spawn(move || engine.run());
        let thread = thread.map_err(|error| Error::System {
            operation: "start of the engine thread",
            errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
        })?;
        Ok(Engine {
            nic,
            thread: Some(thread),
        })
    }

    /// A core without a thread: only its user runs it.
    #[cfg(test)]
    pub(super) fn resting(core: DeviceCore) -> Engine {
        Engine {
            nic: Arc::new(EngineCore::new(core, EnginePace::reported())),
            thread: None,
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.nic.stop.store(true, Ordering::Release);
        self.nic.wake_word.wake();
        if let Some(thread) = self.thread.take() {
            // The engine does not panic; if it did, the panic was printed, and a drop is no place for another.
            let _ = thread.join();
        }
    }
}
