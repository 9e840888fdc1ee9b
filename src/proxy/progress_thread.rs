//! A progress thread: it polls all that are registered with it, one after the other.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use super::elsewhere::begin_to_go_round;
use super::{Pace, Placement};
use crate::stream::sharpen_sleeps;
use crate::{Error, Result};

/// What a poll found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollResult {
    /// Something was done, so more may come soon.
    Worked,
    /// There was nothing to do now.
    Waiting,
    /// There is nothing to come before it is registered again.
    Over,
}

/// A thread and those that it polls.
pub(crate) struct ProgressThread<T: ?Sized> {
    /// Polls one of them. It must not block: the others wait for it.
    serve: fn(&T) -> PollResult,
    /// Gives up a handle, which may be the last. It never waits, either.
    let_go: fn(Arc<T>),
    arrivals: Mutex<Vec<Weak<T>>>,
    arrived: Condvar,
    /// Set with `arrivals` locked, so that a round need not lock to find none.
    any_arrived: AtomicBool,
    stalled: AtomicBool,
    /// Those that it polls. Locked during a poll.
    polled: Mutex<Vec<Served<T>>>,
    /// Threads that wait for the lock of `polled`. The progress thread takes it again and again, and a lock is not fair.
    waiting: AtomicU32,
}

/// One that is polled.
struct Served<T: ?Sized> {
    weak: Weak<T>,
    /// A handle from one poll to the next. To make one each time would have the thread write to the very line that others count their
    /// handles in, and while it spins it would take that line from them at each of theirs.
    held: Option<Arc<T>>,
}

/// Rounds for which it keeps its handles at most, while it spins: nobody whose last other handle is gone lives longer than that.
const KEPT_ROUNDS: u32 = 64;

/// What a proxy rings for.
pub(crate) trait Proxied: Send + Sync {
    /// Rings for what was triggered, and counts what is complete.
    fn ring_for_streams(&self) -> PollResult;

    /// Gives up the thread's handle.
    fn let_go(self: Arc<Self>);
}

/// A thread that rings for streams.
pub(crate) type Proxy = ProgressThread<dyn Proxied>;

/// The proxy of that place, started with its first use.
///
/// # Errors
/// [`Error::System`] if there is no thread to be had.
pub(crate) fn proxy_at(placement: Placement) -> Result<Arc<Proxy>> {
    static PROXIES: Mutex<BTreeMap<Placement, Arc<Proxy>>> = Mutex::new(BTreeMap::new());
    let mut proxies = PROXIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(proxy) = proxies.get(&placement) {
        return Ok(Arc::clone(proxy));
    }
    let serve = <dyn Proxied>::ring_for_streams;
    let let_go = <dyn Proxied>::let_go;
    let proxy = ProgressThread::start("doorbell-proxy", placement, Pace::default(), serve, let_go)?;
    proxies.insert(placement, Arc::clone(&proxy));
    Ok(proxy)
}

impl<T: ?Sized + Send + Sync + 'static> ProgressThread<T> {
    /// Starts a thread of that name, there, at that pace.
    ///
    /// # Errors
    /// [`Error::System`] if there is no thread to be had.
    pub(crate) fn start(
        name: &str,
        placement: Placement,
        pace: Pace,
        serve: fn(&T) -> PollResult,
        let_go: fn(Arc<T>),
    ) -> Result<Arc<ProgressThread<T>>> {
        let thread = Arc::new(ProgressThread {
            serve,
            let_go,
            arrivals: Mutex::default(),
            arrived: Condvar::new(),
            any_arrived: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            polled: Mutex::new(Vec::new()),
            waiting: AtomicU32::new(0),
        });
        let run = Arc::clone(&thread);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                placement.apply();
                sharpen_sleeps();
                begin_to_go_round();
                run.run(pace);
            })
            .map_err(|error| Error::System {
                operation: "start of a thread that looks after endpoints",
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
            })?;
        Ok(thread)
    }

    /// Polls `served` from now on, until a poll returns [`PollResult::Over`].
    pub(crate) fn register(&self, served: Weak<T>) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.push(served);
        // Release: who sees it locks, and that orders the rest.
        self.any_arrived.store(true, Ordering::Release);
        drop(arrivals);
        self.arrived.notify_one();
    }

    /// Does something between two polls, and so nobody is kept alive by the thread. It must not wait for the thread.
    pub(crate) fn between_polls<R>(&self, what: impl FnOnce() -> R) -> R {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        polled.iter_mut().for_each(|served| self.release(served));
        let result = what();
        drop(polled);
        result
    }

    /// Stops polling before this call returns, or goes on with it: a thread that the system does not let run, for tests.
    pub(crate) fn set_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Release);
        // The poll under way ends, and who has the lock after this sees what was stored.
        self.between_polls(|| ());
        // Under the lock, so that the thread is not just about to wait.
        drop(self.arrivals.lock().unwrap_or_else(PoisonError::into_inner));
        self.arrived.notify_one();
    }

    fn run(&self, mut pace: Pace) {
        let mut serves_nobody = true;
        let mut rounds = 0u32;
        let mut arrived = Vec::new();
        loop {
            if serves_nobody
                || self.any_arrived.load(Ordering::Acquire)
                || self.stalled.load(Ordering::Acquire)
            {
                // It may wait in there.
                self.between_polls(|| ());
                self.take_arrivals(serves_nobody, &mut arrived);
                let mut polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
                polled.extend(arrived.drain(..).map(|weak| Served { weak, held: None }));
                drop(polled);
                pace.start();
            }
            rounds = rounds.wrapping_add(1);
            let keeps = pace.spins() && !rounds.is_multiple_of(KEPT_ROUNDS);
            let worked;
            (worked, serves_nobody) = self.round(keeps);
            if !serves_nobody {
                pace.pause(worked);
            }
        }
    }

    /// Polls each once. Whether one of them did something, and whether nobody is left.
    fn round(&self, keeps: bool) -> (bool, bool) {
        let mut worked = false;
        let mut polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = 0;
        let mut locked = true;
        loop {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                drop(polled);
                while self.waiting.load(Ordering::Relaxed) > 0 {
                    std::thread::yield_now();
                }
                polled = self.polled.lock().unwrap_or_else(PoisonError::into_inner);
                locked = true;
            }
            if std::mem::take(&mut locked) && self.stalled.load(Ordering::Relaxed) {
                return (worked, polled.is_empty());
            }
            // Nobody else adds or removes one.
            let Some(served) = polled.get_mut(at) else {
                return (worked, polled.is_empty());
            };
            let done = self.poll_one(served);
            worked |= done == PollResult::Worked;
            if !keeps || done == PollResult::Over {
                self.release(served);
            }
            if done == PollResult::Over {
                polled.remove(at);
            } else {
                at += 1;
            }
        }
    }

    #[inline]
    fn release(&self, served: &mut Served<T>) {
        if let Some(held) = served.held.take() {
            (self.let_go)(held);
        }
    }

    #[inline]
    fn poll_one(&self, served: &mut Served<T>) -> PollResult {
        if served.held.is_none() {
            served.held = served.weak.upgrade();
        }
        let Some(held) = &served.held else {
            return PollResult::Over;
        };
        // None is known to panic. One that does is not polled again, and the others go on.
        catch_unwind(AssertUnwindSafe(|| (self.serve)(held))).unwrap_or(PollResult::Over)
    }

    /// Takes those that came; waits for some while there are none to serve, and while it is stalled.
    fn take_arrivals(&self, serves_nobody: bool, arrived: &mut Vec<Weak<T>>) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        while self.stalled.load(Ordering::Acquire) || (serves_nobody && arrivals.is_empty()) {
            arrivals = self
                .arrived
                .wait(arrivals)
                .unwrap_or_else(PoisonError::into_inner);
        }
        // Which leaves it its room: who comes next need not make any.
        arrived.append(&mut arrivals);
        self.any_arrived.store(false, Ordering::Relaxed);
    }
}

impl<T: ?Sized> std::fmt::Debug for ProgressThread<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProgressThread").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Counts its polls, and is over after so many.
    struct Counter {
        polls: AtomicU32,
        over_after: u32,
    }

    impl Counter {
        fn new(over_after: u32) -> Arc<Counter> {
            Arc::new(Counter {
                polls: AtomicU32::new(0),
                over_after,
            })
        }

        fn polls(&self) -> u32 {
            self.polls.load(Ordering::SeqCst)
        }

        fn serve(&self) -> PollResult {
            if self.polls.fetch_add(1, Ordering::SeqCst) + 1 >= self.over_after {
                PollResult::Over
            } else {
                PollResult::Waiting
            }
        }
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < SOON, "{what}");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn thread(pace: Pace) -> Arc<ProgressThread<Counter>> {
        ProgressThread::start("rounds", Placement::Anywhere, pace, Counter::serve, drop).unwrap()
    }

    #[test]
    fn everyone_has_turns_until_it_is_over_and_again_when_it_comes_back() {
        let thread = thread(Pace::default());
        let (short, long) = (Counter::new(3), Counter::new(u32::MAX));
        thread.register(Arc::downgrade(&short));
        thread.register(Arc::downgrade(&long));
        until("polls", || long.polls() > 100);
        assert_eq!(short.polls(), 3);
        thread.register(Arc::downgrade(&short));
        until("a poll more", || short.polls() == 4);
    }

    #[test]
    fn who_is_gone_is_served_no_more_and_kept_by_nobody() {
        let thread = thread(Pace::default());
        let (gone, stays) = (Counter::new(u32::MAX), Counter::new(u32::MAX));
        thread.register(Arc::downgrade(&gone));
        thread.register(Arc::downgrade(&stays));
        until("polls", || gone.polls() > 0);
        let last = Arc::downgrade(&gone);
        drop(gone);
        until("its memory is free", || last.strong_count() == 0);
        let polls = stays.polls();
        until("others go on", || stays.polls() > polls + 10);
    }

    #[test]
    fn who_is_dropped_between_polls_is_gone_at_once() {
        let thread = thread(Pace::default());
        for _ in 0..200 {
            let served = Counter::new(u32::MAX);
            thread.register(Arc::downgrade(&served));
            // Without a sleep: while the thread spins, it keeps its handles.
            let start = Instant::now();
            while served.polls() == 0 {
                assert!(start.elapsed() < SOON, "polls");
                std::hint::spin_loop();
            }
            let last = Arc::downgrade(&served);
            thread.between_polls(|| drop(served));
            assert_eq!(last.strong_count(), 0);
        }
    }

    #[test]
    fn while_it_is_stalled_nobody_has_a_turn_and_nobody_is_forgotten() {
        let thread = thread(Pace::default());
        let (early, late) = (Counter::new(u32::MAX), Counter::new(1));
        thread.register(Arc::downgrade(&early));
        until("polls", || early.polls() > 0);
        thread.set_stalled(true);
        let polls = early.polls();
        thread.register(Arc::downgrade(&late));
        std::thread::sleep(Duration::from_millis(50));
        // A round that has begun ends, as soon as its thread gets a processor.
        let most = polls + 1;
        assert!((polls..=most).contains(&early.polls()));
        assert_eq!(late.polls(), 0);
        thread.set_stalled(false);
        until("both", || early.polls() > most && late.polls() == 1);
    }

    #[test]
    fn a_tick_is_kept() {
        let thread = thread(Pace::every(Duration::from_millis(5)));
        let served = Counter::new(u32::MAX);
        let start = Instant::now();
        thread.register(Arc::downgrade(&served));
        until("rounds", || served.polls() >= 10);
        assert!(start.elapsed() >= Duration::from_millis(45));
    }

    #[test]
    fn a_place_has_one_proxy() {
        let [one, other] = [Placement::Anywhere; 2].map(|place| proxy_at(place).unwrap());
        assert!(Arc::ptr_eq(&one, &other));
    }

    #[test]
    fn one_that_panics_ends_no_other() {
        struct Panics(Counter, bool);
        let serve = |it: &Panics| {
            let poll = it.0.serve();
            assert!(!it.1, "on purpose");
            poll
        };
        let thread =
            ProgressThread::start("rounds", Placement::Anywhere, Pace::default(), serve, drop)
                .unwrap();
        let make = |panics| {
            let polls = AtomicU32::new(0);
            let over_after = u32::MAX;
            Arc::new(Panics(Counter { polls, over_after }, panics))
        };
        let (bad, good) = (make(true), make(false));
        thread.register(Arc::downgrade(&bad));
        thread.register(Arc::downgrade(&good));
        until("others go on", || good.0.polls() > 100);
        assert_eq!(bad.0.polls(), 1);
    }
}
