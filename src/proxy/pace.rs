//! How a proxy waits for triggers, which are not announced.

use std::time::{Duration, Instant};

/// Polls between two looks at the clock while it spins.
const POLLS_PER_CLOCK: u32 = 32;
/// How long it spins after work: a stream that chains kernels and transfers triggers again within that time.
const SPIN: Duration = Duration::from_micros(20);
/// How long it then yields its core before it sleeps. A sleep has a cost that does not depend on its length.
const YIELD: Duration = Duration::from_micros(100);
/// A sleep is this part of the time since the last work, so that it adds no more than that to what the stream waited for.
const SHARE: u32 = 32;
/// The longest sleep, however long there was no work.
const LONGEST_SLEEP: Duration = Duration::from_micros(200);

/// The pauses between rounds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// The same pause after every round, whatever it found.
    tick: Option<Duration>,
    polls: u32,
    idle_since: Option<Instant>,
    /// The core was yielded since the last work.
    rested: bool,
}

/// What to do between two rounds of polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    Spin,
    Yield,
    Sleep(Duration),
}

impl Pace {
    /// A round each `tick`, for a thread that only checks whether all is well.
    pub(crate) fn every(tick: Duration) -> Pace {
        Pace {
            tick: Some(tick),
            ..Pace::default()
        }
    }

    /// An object was registered.
    pub(super) fn start(&mut self) {
        self.polls = 0;
        self.idle_since = None;
        self.rested = false;
    }

    /// Whether rounds come at fixed times.
    pub(super) fn has_tick(&self) -> bool {
        self.tick.is_some()
    }

    /// Whether it spins now.
    pub(super) fn spins(&self) -> bool {
        self.tick.is_none() && !self.rested
    }

    /// The pause after a round, if there is to be one.
    #[inline]
    pub(super) fn pause(&mut self, worked: bool) {
        if let Some(tick) = self.tick {
            std::thread::sleep(tick);
        } else if worked {
            self.start();
        } else {
            self.back_off();
        }
    }

    #[inline]
    fn back_off(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        let spins = self.idle_since.is_none() || self.polls < POLLS_PER_CLOCK;
        if spins && !self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            std::hint::spin_loop();
            return;
        }
        let now = Instant::now();
        let since = *self.idle_since.get_or_insert(now);
        let pause = Pace::after(now.saturating_duration_since(since));
        self.rested = !matches!(pause, Pause::Spin);
        match pause {
            Pause::Spin => std::hint::spin_loop(),
            Pause::Yield => std::thread::yield_now(),
            // `ProgressThread::wake_thread` ends it.
            Pause::Sleep(length) => std::thread::park_timeout(length),
        }
    }

    fn after(idle: Duration) -> Pause {
        if idle < SPIN {
            Pause::Spin
        } else if idle < YIELD {
            Pause::Yield
        } else {
            Pause::Sleep((idle / SHARE).min(LONGEST_SLEEP))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_time_since_the_last_work_and_no_further() {
        let us = Duration::from_micros;
        assert_eq!(Pace::after(us(0)), Pause::Spin);
        assert_eq!(Pace::after(us(20)), Pause::Yield);
        assert_eq!(Pace::after(us(320)), Pause::Sleep(us(10)));
        assert_eq!(Pace::after(us(10_000_000)), Pause::Sleep(LONGEST_SLEEP));
    }

    #[test]
    fn work_resets_the_idle_time() {
        let mut pace = Pace::default();
        for _ in 0..4 * POLLS_PER_CLOCK {
            pace.pause(false);
        }
        assert!(pace.idle_since.is_some());
        pace.pause(true);
        assert!(pace.idle_since.is_none());
    }
}
