//! A progress thread: it polls all that are registered with it, one after the other.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;

use doorbell_wire::memory::NumberSet;

use super::{Pace, Placement};
use crate::stream::{begin_library_thread, set_min_timer_slack};
use crate::{Error, Result};

/// The result of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollResult {
    /// Something was done, so more may come soon.
    Worked,
    /// There was nothing to do now.
    Waiting,
    /// There was nothing to do now. New work is announced, or changes the trigger, or can wait for the regular look.
    Resting,
    /// No work comes before it is registered again.
    Over,
}

/// A count in memory that changes when there is something to do. The component that stores it has no way to announce that.
pub(crate) trait TriggerCount: Send + Sync {
    /// The count.
    fn count(&self) -> u64;
}

/// The count that is watched for an object that rests, if it has one.
pub(crate) type RestingTrigger = Option<Arc<dyn TriggerCount>>;

/// The calls that a thread makes to the objects that it polls.
pub(crate) struct PolledCalls<T: ?Sized> {
    /// Polls one of them. It must not block: the others wait for it.
    pub(crate) serve: fn(&T) -> PollResult,
    /// Gives up a handle, which may be the last. It must not block, either.
    pub(crate) drop_reference: fn(Arc<T>),
    /// Called with a number: from now on the object is polled seldom, and a thread that has work for it announces this number
    /// ([`ProgressThread::announce`]). Called without a number: it is polled in every round again. Returns the trigger to look at meanwhile.
    pub(crate) rest: fn(&T, Option<usize>) -> RestingTrigger,
}

/// A thread and the objects that it polls.
pub(crate) struct ProgressThread<T: ?Sized> {
    calls: PolledCalls<T>,
    /// Numbers of resting objects that have something to do.
    announced: NumberSet,
    arrivals: Mutex<Vec<Weak<T>>>,
    arrived: Condvar,
    /// Set with `arrivals` locked, so that a round need not lock to find none.
    any_arrived: AtomicBool,
    stalled: AtomicBool,
    /// The objects that it polls. Locked during a poll.
    polled: Mutex<Polled<T>>,
    /// Threads that wait for the lock of `polled`. The progress thread takes it again and again, and a lock is not fair.
    waiting: AtomicU32,
    thread: OnceLock<Thread>,
}

/// An object that is polled.
struct Served<T: ?Sized> {
    weak: Weak<T>,
    /// A handle from one poll to the next, of one that every round polls. If the thread made a handle each time, it would write to the cache
    /// line of the reference count, and while it spins it would take that line from the other threads.
    held: Option<Arc<T>>,
    is_active: bool,
    trigger: RestingTrigger,
    /// The trigger's count when it was last polled.
    count: u64,
}

/// All objects that are polled.
struct Polled<T: ?Sized> {
    /// By number.
    served: Vec<Option<Served<T>>>,
    free: Vec<usize>,
    /// Numbers of the objects that every round polls.
    active: Vec<usize>,
    /// Where the check of the others' triggers continues, and which of them is polled next.
    next_trigger: usize,
    next_poll: usize,
}

impl<T: ?Sized> Default for Polled<T> {
    fn default() -> Self {
        Polled {
            served: Vec::new(),
            free: Vec::new(),
            active: Vec::new(),
            next_trigger: 0,
            next_poll: 0,
        }
    }
}

impl<T: ?Sized> Polled<T> {
    fn count(&self) -> usize {
        self.served.len() - self.free.len()
    }

    /// A new object, which every round polls until it rests.
    fn add(&mut self, weak: Weak<T>) {
        let served = Some(Served {
            weak,
            held: None,
            is_active: true,
            trigger: None,
            count: 0,
        });
        let number = match self.free.pop() {
            Some(number) => {
                self.served[number] = served;
                number
            }
            None => {
                self.served.push(served);
                self.served.len() - 1
            }
        };
        self.active.push(number);
    }

    fn remove(&mut self, number: usize) {
        self.served[number] = None;
        self.free.push(number);
    }

    fn get(&mut self, number: usize) -> Option<&mut Served<T>> {
        self.served.get_mut(number)?.as_mut()
    }
}

/// Rounds for which it keeps its handles at most, while it spins: an object whose last other handle is gone lives no longer than that.
const KEPT_ROUNDS: u32 = 64;
/// If no more objects than this rest, every round polls them all the same.
const ACTIVE_MAX: usize = 4;
/// The number of resting objects whose triggers a spinning thread checks in a round. It is small because each trigger is on a cache line of its own,
/// which is seldom in the cache, and because announced work waits for the end of the round. A thread that sleeps between rounds checks all.
const TRIGGERS_A_ROUND: usize = 8;
/// Resting ones polled in a round that comes at a fixed time: as many, or an eighth of all if that is more.
const POLLS_A_TICK: usize = 128;

/// An object that a proxy rings for.
pub(crate) trait Proxied: Send + Sync {
    /// Rings for triggered work, and counts completions.
    fn ring_for_streams(&self) -> PollResult;

    /// Gives up the thread's handle.
    fn drop_reference(self: Arc<Self>);

    /// See [`PolledCalls::rest`].
    fn rest(&self, number: Option<usize>) -> RestingTrigger;
}

/// A thread that rings for streams.
pub(crate) type Proxy = ProgressThread<dyn Proxied>;

/// The proxy of that place, started with its first use.
///
/// # Errors
/// [`Error::System`] if no thread can be started.
pub(crate) fn proxy_at(placement: Placement) -> Result<Arc<Proxy>> {
    static PROXIES: Mutex<BTreeMap<Placement, Arc<Proxy>>> = Mutex::new(BTreeMap::new());
    let mut proxies = PROXIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(proxy) = proxies.get(&placement) {
        return Ok(Arc::clone(proxy));
    }
    let calls = PolledCalls {
        serve: <dyn Proxied>::ring_for_streams,
        drop_reference: <dyn Proxied>::drop_reference,
        rest: <dyn Proxied>::rest,
    };
    let proxy = ProgressThread::start_with("doorbell-proxy", placement, Pace::default(), calls)?;
    proxies.insert(placement, Arc::clone(&proxy));
    Ok(proxy)
}

impl<T: ?Sized + Send + Sync + 'static> ProgressThread<T> {
    /// Starts a thread with that name, placement and pace, for objects that announce nothing.
    ///
    /// # Errors
    /// [`Error::System`] if there is no thread to be had.
    pub(crate) fn start(
        name: &str,
        placement: Placement,
        pace: Pace,
        serve: fn(&T) -> PollResult,
        drop_reference: fn(Arc<T>),
    ) -> Result<Arc<ProgressThread<T>>> {
        let calls = PolledCalls {
            serve,
            drop_reference,
            rest: |_, _| None,
        };
        Self::start_with(name, placement, pace, calls)
    }

    fn start_with(
        name: &str,
        placement: Placement,
        pace: Pace,
        calls: PolledCalls<T>,
    ) -> Result<Arc<ProgressThread<T>>> {
        let thread = Arc::new(ProgressThread {
            calls,
            announced: NumberSet::default(),
            arrivals: Mutex::default(),
            arrived: Condvar::new(),
            any_arrived: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            polled: Mutex::new(Polled::default()),
            waiting: AtomicU32::new(0),
            thread: OnceLock::new(),
        });
        let run = Arc::clone(&thread);
        let handle = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                begin_library_thread();
                placement.apply();
                set_min_timer_slack();
                run.run(pace);
            })
            .map_err(|error| Error::System {
                operation: "start of a progress thread",
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
            })?;
        let _ = thread.thread.set(handle.thread().clone());
        Ok(thread)
    }

    /// Polls `served` from now on, until a poll returns [`PollResult::Over`].
    pub(crate) fn register(&self, served: Weak<T>) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.push(served);
        // Release: a thread that sees it takes the lock, which orders the rest.
        self.any_arrived.store(true, Ordering::Release);
        drop(arrivals);
        self.arrived.notify_one();
    }

    /// There is something to do for the object that rests under this number.
    #[inline]
    pub(crate) fn announce(&self, number: usize) {
        self.announced.add(number);
    }

    /// There may be something to do for objects that every round polls: ends the sleep between two rounds, and the thread begins as after work. Work that is seen
    /// without a lock must be stored before.
    pub(crate) fn wake_thread(&self) {
        // Release: the next round sees what was stored before. The thread takes it for an arrival, and finds none.
        self.any_arrived.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Calls a function between two polls, when the thread keeps no object alive. The function must not wait for the thread.
    pub(crate) fn between_polls<R>(&self, what: impl FnOnce() -> R) -> R {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut polled = self.lock_polled();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let polled_now = &mut *polled;
        for &number in &polled_now.active {
            if let Some(Some(served)) = polled_now.served.get_mut(number) {
                self.release(served);
            }
        }
        let result = what();
        drop(polled);
        result
    }

    fn lock_polled(&self) -> MutexGuard<'_, Polled<T>> {
        self.polled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops polling before this call returns, or resumes it. For tests of a thread that the system does not let run.
    pub(crate) fn set_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Release);
        // The poll under way ends, and the thread that takes the lock next sees what was stored.
        self.between_polls(|| ());
        // Under the lock, so that the thread is not just about to wait.
        drop(self.arrivals.lock().unwrap_or_else(PoisonError::into_inner));
        self.arrived.notify_one();
    }

    fn run(&self, mut pace: Pace) {
        let mut serves_none = true;
        let mut rounds = 0u32;
        let mut arrived = Vec::new();
        loop {
            if serves_none
                || self.any_arrived.load(Ordering::Acquire)
                || self.stalled.load(Ordering::Acquire)
            {
                // This may wait.
                self.between_polls(|| ());
                self.take_arrivals(serves_none, &mut arrived);
                let mut polled = self.lock_polled();
                arrived.drain(..).for_each(|weak| polled.add(weak));
                drop(polled);
                pace.start();
            }
            rounds = rounds.wrapping_add(1);
            let keeps = pace.spins() && !rounds.is_multiple_of(KEPT_ROUNDS);
            let worked;
            (worked, serves_none) = self.round(&pace, keeps);
            if !serves_none {
                pace.pause(worked);
            }
        }
    }

    /// Polls each active object, and checks some of the others. Returns whether one of them did something, and whether none is left.
    fn round(&self, pace: &Pace, keeps: bool) -> (bool, bool) {
        let mut worked = false;
        let mut polled = self.lock_polled();
        let mut at = 0;
        let mut locked = true;
        if !self.announced.is_empty() && !self.stalled.load(Ordering::Relaxed) {
            self.announced.take(|number| {
                for number in (number..polled.served.len()).step_by(NumberSet::COUNT) {
                    self.wake(&mut polled, number);
                }
            });
        }
        loop {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                drop(polled);
                while self.waiting.load(Ordering::Relaxed) > 0 {
                    std::thread::yield_now();
                }
                polled = self.lock_polled();
                locked = true;
            }
            if std::mem::take(&mut locked) && self.stalled.load(Ordering::Relaxed) {
                return (worked, polled.count() == 0);
            }
            // Only this thread adds or removes one.
            let Some(&number) = polled.active.get(at) else {
                break;
            };
            let is_one_of_many = polled.active.len() > ACTIVE_MAX;
            let Some(served) = polled.get(number) else {
                polled.active.swap_remove(at);
                continue;
            };
            let mut done = self.poll_one(served);
            if done == PollResult::Resting && is_one_of_many {
                done = self.rest(served, number);
            }
            worked |= done == PollResult::Worked;
            if !keeps || done == PollResult::Over || !served.is_active {
                self.release(served);
            }
            if done == PollResult::Over {
                polled.remove(number);
                polled.active.swap_remove(at);
            } else if !served.is_active {
                polled.active.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if polled.count() > polled.active.len() {
            worked |= self.look_around(&mut polled, pace);
        }
        (worked, polled.count() == 0)
    }

    /// Checks the resting objects: their triggers, and polls a few of them in turn.
    fn look_around(&self, polled: &mut Polled<T>, pace: &Pace) -> bool {
        let mut woken = 0;
        let all = polled.served.len();
        let (triggers, polls) = if pace.has_tick() {
            (0, POLLS_A_TICK.max(all.div_ceil(8)))
        } else if pace.spins() {
            (TRIGGERS_A_ROUND, 1)
        } else {
            (all, all.div_ceil(64))
        };
        for _ in 0..triggers.min(all) {
            let number = polled.next_trigger % all;
            polled.next_trigger = number + 1;
            if let Some(served) = polled.get(number)
                && !served.is_active
                && let Some(trigger) = &served.trigger
                && trigger.count() != served.count
            {
                self.wake(polled, number);
                woken += 1;
            }
        }
        let mut worked = woken > 0;
        for _ in 0..polls.min(all) {
            let number = polled.next_poll % all;
            polled.next_poll = number + 1;
            let Some(served) = polled.get(number).filter(|served| !served.is_active) else {
                continue;
            };
            let done = self.poll_one(served);
            match done {
                PollResult::Resting => self.release(served),
                PollResult::Worked | PollResult::Waiting => self.wake(polled, number),
                PollResult::Over => {
                    self.wake_held(served);
                    self.release(served);
                    polled.remove(number);
                }
            }
            worked |= done == PollResult::Worked;
        }
        worked
    }

    /// Makes an object that has nothing to do rest, unless work has come meanwhile.
    fn rest(&self, served: &mut Served<T>, number: usize) -> PollResult {
        if let Some(held) = &served.held {
            served.trigger = (self.calls.rest)(held, Some(number));
        }
        served.count = served.trigger.as_ref().map_or(0, |trigger| trigger.count());
        // Orders the number before the last poll. A thread that has work stores it, passes a fence, and then looks for the number.
        fence(Ordering::SeqCst);
        let done = self.poll_one(served);
        served.is_active = done != PollResult::Resting;
        if served.is_active {
            self.wake_held(served);
        }
        done
    }

    /// Makes every round poll a resting object again.
    fn wake(&self, polled: &mut Polled<T>, number: usize) {
        let Some(served) = polled.get(number).filter(|served| !served.is_active) else {
            return;
        };
        if served.held.is_none() {
            served.held = served.weak.upgrade();
        }
        // An object that is gone is removed by the next poll.
        served.is_active = true;
        self.wake_held(served);
        polled.active.push(number);
    }

    fn wake_held(&self, served: &mut Served<T>) {
        served.trigger = None;
        if let Some(held) = &served.held {
            (self.calls.rest)(held, None);
        }
    }

    #[inline]
    fn release(&self, served: &mut Served<T>) {
        if let Some(held) = served.held.take() {
            (self.calls.drop_reference)(held);
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
        // No object is known to panic. One that does is not polled again, and the others are.
        catch_unwind(AssertUnwindSafe(|| (self.calls.serve)(held))).unwrap_or(PollResult::Over)
    }

    /// Takes the new arrivals. Waits for some while there is no object to serve, and while the thread is stalled.
    fn take_arrivals(&self, serves_none: bool, arrived: &mut Vec<Weak<T>>) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        while self.stalled.load(Ordering::Acquire) || (serves_none && arrivals.is_empty()) {
            arrivals = self
                .arrived
                .wait(arrivals)
                .unwrap_or_else(PoisonError::into_inner);
        }
        // `append` leaves the capacity of `arrivals`, so the next arrival need not allocate.
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
    use std::sync::atomic::{AtomicU64, AtomicUsize};
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
    fn a_dropped_object_is_freed_and_not_polled() {
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
    fn an_object_dropped_between_polls_is_freed_at_once() {
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
    fn a_stalled_thread_polls_nothing_and_forgets_nothing() {
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
    fn a_wake_ends_the_sleep_between_two_rounds() {
        let thread = thread(Pace::default());
        let served = Counter::new(u32::MAX);
        thread.register(Arc::downgrade(&served));
        until("polls", || served.polls() > 0);
        // Long enough for the thread to sleep as long as it ever does.
        std::thread::sleep(Duration::from_millis(50));
        for _ in 0..100 {
            let polls = served.polls();
            thread.wake_thread();
            // It spins then: more polls than a thread makes that sleeps.
            until("polls", || served.polls() > polls + 20);
        }
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

    /// Works when it was told to, and rests meanwhile.
    #[derive(Default)]
    struct Sleeper {
        polls: AtomicU32,
        todo: Arc<Count>,
        done: AtomicU64,
        number: AtomicUsize,
    }

    #[derive(Default)]
    struct Count(AtomicU64);

    impl TriggerCount for Count {
        fn count(&self) -> u64 {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl Sleeper {
        const AWAKE: usize = 0;

        fn serve(&self) -> PollResult {
            self.polls.fetch_add(1, Ordering::SeqCst);
            let todo = self.todo.count();
            if self.done.swap(todo, Ordering::SeqCst) == todo {
                PollResult::Resting
            } else {
                PollResult::Worked
            }
        }

        fn rest(&self, number: Option<usize>) -> RestingTrigger {
            let number = number.map_or(Self::AWAKE, |number| number + 1);
            self.number.store(number, Ordering::SeqCst);
            Some(Arc::clone(&self.todo) as Arc<dyn TriggerCount>)
        }

        fn thread() -> Arc<ProgressThread<Sleeper>> {
            let calls = PolledCalls {
                serve: Sleeper::serve,
                drop_reference: drop,
                rest: Sleeper::rest,
            };
            ProgressThread::start_with("rounds", Placement::Anywhere, Pace::default(), calls)
                .unwrap()
        }
    }

    #[test]
    fn of_many_a_few_are_polled_and_the_others_when_they_have_something_to_do() {
        const MANY: usize = 5000;
        let thread = Sleeper::thread();
        let all: Vec<Arc<Sleeper>> = (0..MANY).map(|_| Arc::default()).collect();
        for sleeper in &all {
            thread.register(Arc::downgrade(sleeper));
        }
        let resting = || {
            let rests = |it: &&Arc<Sleeper>| it.number.load(Ordering::SeqCst) != Sleeper::AWAKE;
            all.iter().filter(rests).count()
        };
        until("nearly all rest", || resting() >= MANY - ACTIVE_MAX);
        for round in 1..=3 {
            for (at, sleeper) in all.iter().enumerate() {
                sleeper.todo.0.store(round, Ordering::SeqCst);
                // One that cannot announce itself is found by its trigger.
                let number = sleeper.number.load(Ordering::SeqCst);
                if !at.is_multiple_of(7) && number != Sleeper::AWAKE {
                    thread.announce(number - 1);
                }
            }
            until("all worked", || {
                all.iter().all(|it| it.done.load(Ordering::SeqCst) == round)
            });
        }
        until("nearly all rest again", || resting() >= MANY - ACTIVE_MAX);
    }

    #[test]
    fn a_resting_object_that_is_dropped_is_freed() {
        let thread = Sleeper::thread();
        let all: Vec<Arc<Sleeper>> = (0..50).map(|_| Arc::default()).collect();
        for sleeper in &all {
            thread.register(Arc::downgrade(sleeper));
        }
        until("each was polled", || {
            all.iter().all(|it| it.polls.load(Ordering::SeqCst) > 0)
        });
        let last: Vec<_> = all.iter().map(Arc::downgrade).collect();
        drop(all);
        until("their memory is free", || {
            last.iter().all(|it| it.strong_count() == 0)
        });
        until("none is served", || {
            thread.between_polls(|| ());
            thread.lock_polled().count() == 0
        });
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
