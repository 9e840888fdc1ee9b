//! When an engine looks for work.
//!
//! Threads of this process report the doorbells that they ring, which wakes the engine; a GPU does not. So the engine sleeps when it has found nothing
//! for a while, reads the registers for doorbells of GPUs each time it wakes, and expects more of them for a time once it has found one.
//!
//! A client rings by storing to a page, and no store wakes a thread. So while a client has a queue pair that can be rung, the engine
//! polls: at once after it had something to do, then after ever longer sleeps, each a small part of the time since.
//! A doorbell after a pause is found later by that part of the pause, and an unused device needs hardly any CPU time.
//!
//! It sleeps rather than spins or yields because clients spin: where there are no more cores than those, the scheduler lets a thread
//! that wakes up go first, above all one with short slices, but lets one that never sleeps wait for whole ticks.
#![allow(unsafe_code)] // scheduling of the calling thread

use std::time::{Duration, Instant};

/// How long an engine that gets reports spins with nothing to do before it sleeps.
const REPORTED_SPIN: Duration = Duration::from_micros(20);
/// The same after it has found an unreported doorbell, which a GPU has stored. Kernels may need some time between two doorbells.
const UNREPORTED_SPIN: Duration = Duration::from_micros(200);
/// Then it sleeps for this part of the time since the last one, so that a kernel that takes longer is rung for that part too late at most.
const UNREPORTED_PART: u32 = 4;
/// For how long after that it expects more of these doorbells.
const UNREPORTED_FOR: Duration = Duration::from_secs(1);
/// How long it sleeps at most. It reads the registers for unreported doorbells each time it wakes.
pub(super) const REPORTED_SLEEP: Duration = Duration::from_millis(1);
/// The same for a device with nothing to do for [`DOZE_AFTER`].
const DOZE: Duration = Duration::from_millis(10);
/// When an idle device becomes one that is not used.
const DOZE_AFTER: Duration = Duration::from_millis(100);
/// How long an engine that polls for doorbells sleeps to let threads run that wait for its core.
const STEP_ASIDE: Duration = Duration::from_micros(2);

/// Sleeps are this part of the time since there was something to do.
const PART: u32 = 32;
const SHORTEST: Duration = Duration::from_micros(2);
/// The same where a client's polls do the device's work: they take doorbells, too, and packets wake the engine. What is left is a program that
/// posts and then reads only its own memory; and it needs the core.
const SHORTEST_DRIVEN: Duration = Duration::from_micros(50);
/// For how long a client counts as one whose polls do that. Its other queues may be ones that it polls and rings itself.
pub(super) const DRIVEN_FOR: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_micros(500);
/// Added for each page that has to be read after the sleep: some fifty times what the read takes.
const LONGER_A_PAGE: Duration = Duration::from_micros(1);
/// The same when no client could ring.
const UNUSED: Duration = Duration::from_millis(10);
/// From this length on a wake can end a sleep; below, the wake would take its caller longer than the rest of the sleep.
const WAKEABLE: Duration = Duration::from_micros(10);
/// How long the engine goes on looking before the first sleep: as long as a client takes to answer with a doorbell.
const SPIN: Duration = Duration::from_nanos(1200);
/// The same where there are cores to spare.
const LONG_SPIN: Duration = Duration::from_micros(100);
const MANY_CORES: usize = 8;
/// Sleeps that are timed to find out what the shortest is.
const NAPS: u32 = 5;
/// What the scheduler may let this thread run in one go; the shortest that it takes (Linux 6.12).
const SLICE_NS: u64 = 100_000;

/// What an engine without work is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Look again.
    Spin,
    /// Sleep for so long, whatever happens.
    Nap(Duration),
    /// Sleep for at most so long, or until woken.
    Sleep(Duration),
}

impl Rest {
    /// Not longer than until something is due.
    pub(super) fn until(self, due: Option<Duration>) -> Rest {
        let Some(due) = due else {
            return self;
        };
        match self {
            Rest::Spin => Rest::Spin,
            _ if due.is_zero() => Rest::Spin,
            Rest::Nap(time) => Rest::Nap(time.min(due)),
            Rest::Sleep(time) => Rest::Sleep(time.min(due)),
        }
    }
}

/// How the engine learns of doorbells, which decides how long it rests.
#[derive(Debug, Clone, Copy)]
pub(super) enum EnginePace {
    /// The threads of this process report doorbells and wake the engine. GPUs do not: `last_unreported` is when a doorbell of theirs was found last.
    Reported { last_unreported: Option<Instant> },
    /// Clients only store to a page, and the engine polls it.
    Polled(PolledPace),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct PolledPace {
    spin: Duration,
    shortest: Duration,
}

impl EnginePace {
    pub(super) fn reported() -> EnginePace {
        EnginePace::Reported {
            last_unreported: None,
        }
    }

    pub(super) fn polled() -> EnginePace {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        EnginePace::Polled(PolledPace {
            spin: if cores < MANY_CORES { SPIN } else { LONG_SPIN },
            shortest: SHORTEST,
        })
    }

    /// Whether threads report doorbells to the engine.
    pub(super) fn gets_reports(&self) -> bool {
        matches!(self, EnginePace::Reported { .. })
    }

    /// This pace in the thread of the engine, which is the calling one.
    pub(super) fn begun(self) -> EnginePace {
        match self {
            EnginePace::Polled(pace) => {
                wake_promptly();
                EnginePace::Polled(pace.calibrated())
            }
            reported => reported,
        }
    }

    /// Gives the device's lock to a thread that waits for it.
    pub(super) fn step_aside(&self) {
        if self.gets_reports() {
            std::thread::yield_now();
        } else {
            std::thread::sleep(STEP_ASIDE);
        }
    }

    /// The engine has found a doorbell that was not reported.
    pub(super) fn found_unreported(&mut self) {
        if let EnginePace::Reported { last_unreported } = self {
            *last_unreported = Some(Instant::now());
        }
    }

    /// Whether the next doorbell probably comes from a GPU, which does not report it.
    pub(super) fn expects_unreported(&self) -> bool {
        matches!(self, EnginePace::Reported { last_unreported: Some(at) } if at.elapsed() < UNREPORTED_FOR)
    }

    /// `idle`: how long there has been nothing to do; `driven`: whether a client's polls did the device's work within [`DRIVEN_FOR`];
    /// `pages`: how many a client could ring.
    pub(super) fn rest(&self, idle: Duration, driven: bool, pages: usize) -> Rest {
        match self {
            EnginePace::Polled(pace) => pace.rest(idle, driven, pages),
            EnginePace::Reported { .. } if idle < REPORTED_SPIN => Rest::Spin,
            EnginePace::Reported { .. } if idle < UNREPORTED_SPIN && self.expects_unreported() => {
                Rest::Spin
            }
            EnginePace::Reported { .. } if idle < DOZE_AFTER && self.expects_unreported() => {
                Rest::Sleep((idle / UNREPORTED_PART).min(REPORTED_SLEEP))
            }
            EnginePace::Reported { .. } if idle < DOZE_AFTER => Rest::Sleep(REPORTED_SLEEP),
            EnginePace::Reported { .. } => Rest::Sleep(DOZE),
        }
    }
}

impl PolledPace {
    /// This pace with sleeps that are sleeps, on this machine, for the calling thread. To set a timer and to take its interrupt cost
    /// 20 us on some virtual machines. A timer that is due before the thread has gone to sleep wakes it on the spot, and a client
    /// that waits for the core does not get it: not once, however often that is repeated.
    fn calibrated(self) -> PolledPace {
        let nap = |_| {
            let start = Instant::now();
            std::thread::sleep(Duration::from_nanos(1));
            start.elapsed()
        };
        let least = (0..NAPS).map(nap).min().unwrap_or_default();
        // Longer than that, so that the thread is off its core when the timer is due. With the half of it, which comes before the sleep, a client
        // that writes its own work requests got no further in one of four messages until the sleeps had grown.
        let shortest = (least * 6 / 5).clamp(SHORTEST, SHORTEST_DRIVEN);
        PolledPace { shortest, ..self }
    }

    fn rest(self, idle: Duration, driven: bool, pages: usize) -> Rest {
        let longest = LONGEST + LONGER_A_PAGE * pages.min(10_000) as u32;
        if driven && pages > 0 {
            return Rest::Sleep((idle / PART).clamp(SHORTEST_DRIVEN, longest));
        }
        if idle < self.spin {
            return Rest::Spin;
        }
        if pages == 0 {
            return Rest::Sleep(UNUSED);
        }
        let sleep = (idle / PART).clamp(self.shortest, longest);
        if sleep < WAKEABLE.max(self.shortest * 2) {
            Rest::Nap(sleep)
        } else {
            Rest::Sleep(sleep)
        }
    }
}

/// Has the scheduler wake the calling thread on time, and put it before threads that run on and on. What the kernel does not know, it
/// refuses, and nothing is lost.
fn wake_promptly() {
    // SAFETY: takes numbers only, and is about the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
    let attributes = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        // SAFETY: takes numbers only. Niceness is set together with the slice.
        nice: unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) },
        runtime: SLICE_NS,
        ..SchedAttr::default()
    };
    // SAFETY: a structure that says its own length; about the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// `struct sched_attr`, as of its first version.
#[derive(Debug, Default)]
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_is_a_small_part_of_idle_time_and_capped() {
        let pace = PolledPace {
            spin: SPIN,
            shortest: SHORTEST,
        };
        let rest = |idle_us| pace.rest(Duration::from_micros(idle_us), false, 1);
        assert_eq!(rest(0), Rest::Spin);
        assert_eq!(rest(6), Rest::Nap(SHORTEST));
        assert_eq!(rest(128), Rest::Nap(Duration::from_micros(4)));
        assert_eq!(rest(3200), Rest::Sleep(Duration::from_micros(100)));
        let longest = LONGEST + LONGER_A_PAGE;
        assert_eq!(rest(1_000_000), Rest::Sleep(longest));
        let many = pace.rest(Duration::from_secs(1), false, 2000);
        assert_eq!(many, Rest::Sleep(Duration::from_micros(2500)));
        let driven = |idle_us| pace.rest(Duration::from_micros(idle_us), true, 1);
        assert_eq!(driven(0), Rest::Sleep(SHORTEST_DRIVEN));
        assert_eq!(driven(3200), Rest::Sleep(Duration::from_micros(100)));
        let unused = pace.rest(Duration::from_secs(1), false, 0);
        assert_eq!(unused, Rest::Sleep(UNUSED));
    }

    #[test]
    fn sleep_ends_by_the_next_deadline() {
        let (short, long) = (Duration::from_micros(1), Duration::from_secs(1));
        let rest = Rest::Sleep(LONGEST);
        assert_eq!(rest.until(None), rest);
        assert_eq!(rest.until(Some(long)), rest);
        assert_eq!(rest.until(Some(short)), Rest::Sleep(short));
        assert_eq!(Rest::Nap(SHORTEST).until(Some(short)), Rest::Nap(short));
        assert_eq!(rest.until(Some(Duration::ZERO)), Rest::Spin);
    }

    #[test]
    fn wake_promptly_keeps_niceness() {
        let thread = std::thread::spawn(|| {
            // SAFETY: takes numbers only; about this thread.
            let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
            // SAFETY: as above.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 3) };
            let before = nice();
            wake_promptly();
            assert_eq!(nice(), before);
        });
        thread.join().unwrap();
    }
}
