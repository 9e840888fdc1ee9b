//! How a thread waits for memory to change.
#![allow(unsafe_code)] // one prctl that sets the timer slack of the calling thread

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How a host stream's thread that has run out of work waits for more, and how [`Executor::synchronize`](crate::Executor::synchronize) waits
/// for that thread; see [`HostStream::set_spin`](crate::HostStream::set_spin).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Spin {
    /// Spins 20 us, then offers its core to others for 100 us, then sleeps. Spins about 1 us only where the streams of this process that are awake
    /// and the thread that waits for one are more than the cores, or the last wait ended when it offered its core: the thread that is waited
    /// for then needs this very core.
    #[default]
    Auto,
    /// Spins that long, then goes on as [`Spin::Auto`] does after its 20 us.
    For(Duration),
    /// Never sleeps, and never offers its core to others: the shortest latency, where each such thread has a core to itself.
    Always,
    /// Sleeps at once. A stream's thread that sleeps answers some 50 us late.
    Never,
}

/// Threads of host streams that are awake.
static AWAKE: AtomicUsize = AtomicUsize::new(0);

/// Counts a stream's thread as awake.
pub(super) struct Awake(());

impl Awake {
    pub(super) fn new() -> Awake {
        AWAKE.fetch_add(1, Ordering::Relaxed);
        Awake(())
    }

    /// Does not count while it sleeps in there.
    pub(super) fn except<R>(&self, sleep: impl FnOnce() -> R) -> R {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
        let result = sleep();
        AWAKE.fetch_add(1, Ordering::Relaxed);
        result
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether streams that are awake, and one thread that waits for one of them, are more than the cores.
fn is_crowded() -> bool {
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
    AWAKE.load(Ordering::Relaxed) >= cores
}

/// How long a wait burns its core, counted from its first look at the clock. About the price of two context switches: less would
/// pay for a sleep that was not needed, more starves the thread that is waited for when threads outnumber cores.
const SPIN: Duration = Duration::from_micros(20);

/// Turns between two looks at the clock while spinning. A short wait ends before the first.
const TURNS_PER_CLOCK: u32 = 32;

/// How long the core is then offered to others before the thread sleeps. Longer than it takes to wake a thread of another core: a
/// thread that already sleeps by then oversleeps by the timer slack, 50 us, in which the stream's thread goes to sleep in turn, and
/// the next wait takes that long again.
const YIELD: Duration = Duration::from_micros(100);

/// The first sleep; each one after it is twice as long, up to [`LONGEST_SLEEP`].
const SHORTEST_SLEEP: Duration = Duration::from_micros(1);

/// The longest sleep. It bounds what a sleeping thread adds to the latency of the thing that it waits for.
const LONGEST_SLEEP: Duration = Duration::from_micros(100);

/// The pauses of one wait: spin about 20 us, offer the core for about 100 us, then sleep 1 us growing to 100 us.
///
/// A wait that spins on and on costs its machine milliseconds a turn as soon as more threads spin than there are cores, because
/// the thread that is waited for gets no core before a scheduler slice is over. A wait that sleeps at once costs every short
/// wait two context switches. This one does the cheap thing first and gets out of the way soon.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    policy: Spin,
    turns: u32,
    spin_ends: Option<Instant>,
    /// Spins no longer than to the first look at the clock, where the policy leaves it the choice.
    yields_first: bool,
    yields: u32,
    sleep: Duration,
    /// The thread executes what it waits for.
    executes: bool,
}

/// Turns that a thread spins that executes what it waits for, before it offers its core at each turn.
const EXECUTING_SPINS: u32 = 8;

/// How many of its turns go by between two looks at the clock.
const EXECUTING_TURNS_PER_CLOCK: u32 = 4;

/// How long it offers its core before it sleeps. On the direct path a software device's own thread needs a core as well, so this is no longer than in other waits.
const EXECUTING_YIELD: Duration = Duration::from_micros(100);

/// A wait that ends with one of its first so many offers of its core waited for a thread of the same core.
const YIELDS_TO_SHARE: u32 = 2;

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

impl Backoff {
    /// The beginning of a wait. Reads no clock.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            policy: Spin::For(SPIN),
            turns: 0,
            spin_ends: None,
            yields_first: false,
            yields: 0,
            sleep: SHORTEST_SLEEP,
            executes: false,
        }
    }

    /// The beginning of a wait in a thread that executes what it waits for ([`look_at_own_streams`](super::look_at_own_streams)). No other thread of the process is waited
    /// for, which could be awake on another core, so it offers its core soon and sleeps late.
    pub(crate) const fn of_executing() -> Self {
        Self {
            executes: true,
            ..Self::new()
        }
    }

    /// The beginning of a wait for a stream's thread, or of that thread.
    pub(super) const fn of(policy: Spin) -> Self {
        Self {
            policy,
            ..Self::new()
        }
    }

    /// As [`Backoff::of`], for a wait whose predecessor found what [`Backoff::shares_core`] says.
    pub(super) const fn after(policy: Spin, shares_core: bool) -> Self {
        Self {
            yields_first: shares_core,
            ..Self::of(policy)
        }
    }

    /// Whether the wait, which is over, was for a thread that needed this very core. To spin would then only delay it.
    pub(super) fn shares_core(&self) -> bool {
        if self.turns < TURNS_PER_CLOCK {
            // Too short to tell.
            return self.yields_first;
        }
        !self.has_slept() && (1..=YIELDS_TO_SHARE).contains(&self.yields)
    }

    /// How long it spins.
    fn spin_time(&self) -> Duration {
        match self.policy {
            Spin::Auto if self.yields_first || is_crowded() => Duration::ZERO,
            Spin::Auto => SPIN,
            Spin::For(time) => time,
            // Longer than a process lives.
            Spin::Always => Duration::from_secs(1 << 32),
            Spin::Never => Duration::ZERO,
        }
    }

    /// How long it offers its core to others, after that.
    fn yield_time(&self) -> Duration {
        if self.policy == Spin::Never {
            Duration::ZERO
        } else {
            YIELD
        }
    }

    /// Begins again with spinning: something happened, so more may happen soon.
    pub fn reset(&mut self) {
        *self = Self {
            executes: self.executes,
            ..Self::after(self.policy, self.yields_first)
        };
    }

    /// One pause.
    pub fn pause(&mut self) {
        self.pause_until(None);
    }

    /// One pause that does not outlast `deadline`. False: the deadline has passed. While it spins, it looks at the clock every
    /// few turns only, so the caller learns of the deadline up to some microseconds late.
    pub fn pause_until(&mut self, deadline: Option<Instant>) -> bool {
        self.turns = self.turns.wrapping_add(1);
        if self.executes {
            return self.pause_executing(deadline);
        }
        if self.spins() && !self.turns.is_multiple_of(TURNS_PER_CLOCK) {
            std::hint::spin_loop();
            return true;
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return false;
        }
        let spin_ends = match self.spin_ends {
            Some(ends) => ends,
            None => {
                let ends = now.checked_add(self.spin_time());
                *self.spin_ends.insert(ends.unwrap_or(now))
            }
        };
        if self.spins() && now < spin_ends {
            std::hint::spin_loop();
        } else if self.yields == 0 || now < spin_ends + self.yield_time() {
            self.yields = self.yields.saturating_add(1);
            std::thread::yield_now();
        } else {
            let left = deadline.map_or(self.sleep, |deadline| deadline - now);
            std::thread::sleep(self.sleep.min(left));
            self.sleep = (self.sleep * 2).min(LONGEST_SLEEP);
        }
        true
    }

    fn pause_executing(&mut self, deadline: Option<Instant>) -> bool {
        if self.turns <= EXECUTING_SPINS {
            std::hint::spin_loop();
            return true;
        }
        if !self.turns.is_multiple_of(EXECUTING_TURNS_PER_CLOCK) {
            self.yields = self.yields.saturating_add(1);
            std::thread::yield_now();
            return true;
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return false;
        }
        let begun = *self.spin_ends.get_or_insert(now);
        if now.saturating_duration_since(begun) < EXECUTING_YIELD {
            std::thread::yield_now();
        } else {
            let left = deadline.map_or(self.sleep, |deadline| deadline - now);
            std::thread::sleep(self.sleep.min(left));
            self.sleep = (self.sleep * 2).min(LONGEST_SLEEP);
        }
        true
    }

    /// True as long as pauses spin: the core was not yielded yet.
    #[must_use]
    pub fn spins(&self) -> bool {
        self.yields == 0
    }

    /// True once a pause was a sleep: the wait is a long one.
    #[must_use]
    pub fn has_slept(&self) -> bool {
        self.sleep != SHORTEST_SLEEP
    }
}

/// The moment `timeout` from now; none when there is no timeout or it lies beyond what the clock can tell.
pub(super) fn deadline_after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Lets the calling thread's short sleeps be short: Linux adds up to 50 us to each one unless told otherwise. Only for threads of
/// this library: the slack of an application's thread is the application's.
pub(crate) fn set_min_timer_slack() {
    #[cfg(target_os = "linux")]
    // SAFETY: PR_SET_TIMERSLACK takes one integer, touches no memory of ours and changes the calling thread only. When the
    // kernel refuses, sleeps are longer and nothing else changes, so the result does not matter.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong, 0, 0, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spins_then_yields_then_sleeps_longer_each_time() {
        let mut backoff = Backoff::new();
        let begin = Instant::now();
        while backoff.spins() {
            backoff.pause();
        }
        assert!(
            begin.elapsed() >= SPIN,
            "gave up its core after {:?}",
            begin.elapsed()
        );
        assert_eq!(backoff.sleep, SHORTEST_SLEEP);
        while backoff.sleep == SHORTEST_SLEEP {
            backoff.pause();
        }
        assert!(
            begin.elapsed() >= SPIN + YIELD,
            "slept after {:?}",
            begin.elapsed()
        );
        for _ in 0..10 {
            let planned = backoff.sleep;
            let begin = Instant::now();
            backoff.pause();
            assert!(begin.elapsed() >= planned);
        }
        assert_eq!(backoff.sleep, LONGEST_SLEEP);
        backoff.reset();
        assert!(backoff.spins());
        assert_eq!(backoff.sleep, SHORTEST_SLEEP);
    }

    #[test]
    fn a_deadline_ends_the_wait() {
        let timeout = Duration::from_millis(3);
        let begin = Instant::now();
        let deadline = deadline_after(Some(timeout));
        let mut backoff = Backoff::new();
        while backoff.pause_until(deadline) {}
        assert!(begin.elapsed() >= timeout);
        assert!(
            (0..TURNS_PER_CLOCK).any(|_| !backoff.pause_until(deadline)),
            "a passed deadline is seen at the next look at the clock"
        );
    }

    #[test]
    fn no_sleep_outlasts_the_deadline() {
        let long = Duration::from_secs(60);
        let mut backoff = Backoff {
            yields: 1,
            spin_ends: Instant::now().checked_sub(SPIN + YIELD),
            sleep: long,
            ..Backoff::new()
        };
        let (begin, near) = (Instant::now(), Duration::from_millis(20));
        // A thread that gets no processor meanwhile finds the deadline passed, and has not slept.
        while !backoff.pause_until(deadline_after(Some(near))) {
            assert!(begin.elapsed() < long / 2, "no deadline is ahead");
        }
        let slept = begin.elapsed();
        assert!((near..long / 2).contains(&slept), "{slept:?}");
    }

    #[test]
    fn a_wait_spins_as_long_as_configured() {
        let long = Duration::from_millis(3);
        let spins = |policy, most| {
            let mut backoff = Backoff::of(policy);
            let begin = Instant::now();
            while backoff.spins() && begin.elapsed() < most {
                backoff.pause();
            }
            begin.elapsed()
        };
        assert!(spins(Spin::For(long), Duration::MAX) >= long);
        assert!(spins(Spin::Always, 4 * long) >= 4 * long);
        // Ends.
        spins(Spin::For(Duration::ZERO), Duration::MAX);
        spins(Spin::For(Duration::MAX), long);
        let mut never = Backoff::of(Spin::Never);
        for _ in 0..=2 * TURNS_PER_CLOCK {
            never.pause();
        }
        assert!(never.has_slept());
    }

    #[test]
    fn a_wait_that_ended_with_an_offer_of_its_core_has_the_next_offer_it_at_once() {
        let mut backoff = Backoff::of(Spin::Auto);
        while backoff.spins() {
            backoff.pause();
        }
        assert!(backoff.shares_core());
        let mut next = Backoff::after(Spin::Auto, true);
        assert!(next.shares_core(), "too short to tell");
        for _ in 0..TURNS_PER_CLOCK {
            next.pause();
        }
        assert!(!next.spins() && next.shares_core());
        for _ in 0..YIELDS_TO_SHARE {
            next.pause();
        }
        assert!(!next.shares_core(), "nobody took it");
    }

    #[test]
    fn a_thread_that_executes_offers_its_core_soon_and_sleeps_late() {
        let mut backoff = Backoff::of_executing();
        for _ in 0..EXECUTING_SPINS {
            backoff.pause();
            assert!(backoff.spins());
        }
        backoff.pause();
        assert!(!backoff.spins() && !backoff.has_slept());
        let begin = Instant::now();
        while !backoff.has_slept() {
            backoff.pause();
        }
        assert!(begin.elapsed() >= EXECUTING_YIELD, "{:?}", begin.elapsed());
        backoff.reset();
        assert!(backoff.spins() && backoff.executes);
        let deadline = deadline_after(Some(Duration::from_millis(2)));
        let begin = Instant::now();
        while backoff.pause_until(deadline) {}
        assert!(begin.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn where_streams_are_more_than_cores_a_wait_offers_its_core_at_once() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let awake: Vec<Awake> = (0..cores).map(|_| Awake::new()).collect();
        let mut backoff = Backoff::of(Spin::Auto);
        for _ in 0..TURNS_PER_CLOCK {
            backoff.pause();
        }
        assert!(!backoff.spins());
        drop(awake);
    }

    #[test]
    fn a_timeout_beyond_the_clock_is_no_deadline() {
        assert_eq!(deadline_after(Some(Duration::MAX)), None);
        assert_eq!(deadline_after(None), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn sharpened_threads_sleep_briefly() {
        std::thread::spawn(|| {
            set_min_timer_slack();
            // SAFETY: PR_GET_TIMERSLACK takes no argument and returns the slack of the calling thread.
            let slack_ns = unsafe { libc::prctl(libc::PR_GET_TIMERSLACK, 0, 0, 0, 0) };
            assert_eq!(slack_ns, 1);
        })
        .join()
        .unwrap();
    }
}
