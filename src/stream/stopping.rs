//! How a thread gives up endpoints and streams that wait for each other, and waits for their devices.
//!
//! An endpoint must not be in error before everything behind its waits is: otherwise its flush ends a wait, and the stream rings what the wait was to protect.
//! So a thread that stops an endpoint first stops what its streams have behind, and what other streams have behind those, in depth. Several threads may do
//! so at the same time, also for the same objects: each visits all of them itself, and waits for their devices, whoever has told those to stop. No lock is
//! held meanwhile, so a device that does not answer delays only what waits for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::{self, ManuallyDrop};
use std::sync::Arc;

/// A device that was told to transmit nothing more for an owner.
pub(crate) trait EndingDevice: Send + Sync {
    /// Waits until the device has confirmed it, at most as long as a device may take.
    fn wait(&self);
}

/// What a thread has begun to stop.
struct Stopping {
    /// In [`stopping`].
    is_stopping: bool,
    /// The thread called [`defer_waits`].
    is_deferring: bool,
    /// The devices that this thread has told to stop and not waited for. It waits for all of them at the same time, so the number of devices that do not answer
    /// adds no time.
    ending: Vec<Arc<dyn EndingDevice>>,
    /// The number of those that the outermost call of [`stopping`] found.
    found: usize,
    /// Something behind the next endpoint was visited before, so its devices may be any of those told since.
    meets_visited: bool,
    /// By the number of the endpoint or stream, the spans of its work that are given up.
    visited: BTreeMap<u64, Vec<VisitedSpan>>,
}

struct VisitedSpan {
    from: u64,
    to: u64,
    is_done: bool,
}

/// What this thread knows of a span of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visited {
    /// It was given up now.
    Now,
    /// The thread is giving it up: the caller is behind it, too.
    InProgress,
    /// It was given up, and its devices may still have to be waited for.
    Before,
}

thread_local! {
    // Without a destructor: while a thread ends, a destructor of the application may still abort a stream. All memory is released before that.
    static STOPPING: ManuallyDrop<RefCell<Stopping>> = const {
        ManuallyDrop::new(RefCell::new(Stopping {
            is_stopping: false,
            is_deferring: false,
            ending: Vec::new(),
            found: 0,
            meets_visited: false,
            visited: BTreeMap::new(),
        }))
    };
}

fn with<R>(call: impl FnOnce(&mut Stopping) -> R) -> R {
    STOPPING.with(|stopping| call(&mut stopping.borrow_mut()))
}

/// Runs `stop`, which gives up owners and streams. When the outermost call returns, all of them were given up, and their devices were waited for.
pub(crate) fn stopping<R>(stop: impl FnOnce() -> R) -> R {
    let is_nested = with(|this| {
        if !this.is_stopping {
            this.found = this.ending.len();
        }
        mem::replace(&mut this.is_stopping, true)
    });
    if is_nested {
        return stop();
    }
    /// Also where an owner panics.
    struct Leave;

    impl Drop for Leave {
        fn drop(&mut self) {
            await_ending(with(|this| this.found));
            let _visited = with(|this| {
                this.is_stopping = false;
                this.meets_visited = false;
                mem::take(&mut this.visited)
            });
        }
    }

    let _leave = Leave;
    stop()
}

/// Runs `give_up` for that span of the work of an endpoint or stream, first to last, unless this thread has done so since the outermost call of [`stopping`]
/// began. So each thread visits each once, however many ways lead there.
pub(crate) fn visit(id: u64, (from, to): (u64, u64), give_up: impl FnOnce()) -> Visited {
    let found = with(|this| {
        let spans = this.visited.entry(id).or_default();
        let covers = |span: &&VisitedSpan| span.from <= from && to <= span.to;
        if let Some(span) = spans.iter().find(covers) {
            return if span.is_done {
                Visited::Before
            } else {
                Visited::InProgress
            };
        }
        spans.push(VisitedSpan {
            from,
            to,
            is_done: false,
        });
        Visited::Now
    });
    if found == Visited::Now {
        give_up();
        with(|this| {
            let spans = this.visited.get_mut(&id).into_iter().flatten();
            let same = |span: &&mut VisitedSpan| (span.from, span.to) == (from, to);
            spans.filter(same).for_each(|span| span.is_done = true);
        });
    }
    found
}

/// Until `defers` is false again, [`await_or_defer`] does not wait on this thread, which calls [`await_ending`] before it executes anything of an owner.
pub(super) fn defer_waits(defers: bool) {
    with(|this| this.is_deferring = defers);
}

/// Waits for the device: in [`stopping`] at its end, and on a thread that defers waits when that thread waits for all.
pub(crate) fn await_or_defer(device: Arc<dyn EndingDevice>) {
    let left = with(|this| {
        if this.is_stopping || this.is_deferring {
            this.ending.push(device);
            return None;
        }
        Some(device)
    });
    if let Some(device) = left {
        device.wait();
    }
}

/// Gives up what is behind an endpoint, by `give_up`, and waits for the devices of all that.
pub(crate) fn await_behind(give_up: impl FnOnce()) {
    let (before, outer) = with(|this| {
        let outer = mem::replace(&mut this.meets_visited, false);
        (this.ending.len(), outer)
    });
    give_up();
    let first = with(|this| {
        let all = this.meets_visited;
        // What is waited for from `found` on is waited for by every call around this one.
        this.meets_visited |= outer;
        if all { this.found } else { before }
    });
    await_ending(first);
}

/// The stream behind the endpoint was visited before. Its devices may be any of those that the thread has told to stop.
#[cfg(feature = "cuda")]
pub(crate) fn meet_visited() {
    with(|this| this.meets_visited = true);
}

/// Waits for all devices but the `first` ones that this thread has told to stop.
pub(super) fn await_ending(first: usize) {
    let devices = with(|this| {
        let mut devices = mem::take(&mut this.ending);
        if first == 0 {
            return devices;
        }
        let later = devices.split_off(first.min(devices.len()));
        this.ending = devices;
        later
    });
    devices.iter().for_each(|device| device.wait());
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A device that notes when it is waited for.
    struct Noted(&'static str, Arc<Mutex<Vec<&'static str>>>);

    impl EndingDevice for Noted {
        fn wait(&self) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[derive(Default)]
    struct Notes(Arc<Mutex<Vec<&'static str>>>);

    impl Notes {
        fn tell(&self, name: &'static str) {
            await_or_defer(Arc::new(Noted(name, Arc::clone(&self.0))));
        }

        fn take(&self) -> Vec<&'static str> {
            mem::take(&mut self.0.lock().unwrap())
        }
    }

    #[test]
    fn devices_behind_an_endpoint_are_waited_for_before_its_own() {
        let notes = Notes::default();
        notes.tell("outside");
        assert_eq!(notes.take(), ["outside"]);
        stopping(|| {
            notes.tell("beside");
            stopping(|| await_behind(|| notes.tell("behind")));
            assert_eq!(notes.take(), ["behind"]);
            notes.tell("own");
            assert_eq!(notes.take(), [""; 0]);
        });
        assert_eq!(notes.take(), ["beside", "own"]);
    }

    #[test]
    fn span_is_visited_once_in_an_outermost_call() {
        let visits = Mutex::new(Vec::new());
        let look = |id: u64, span: (u64, u64)| visit(id, span, || visits.lock().unwrap().push(id));
        for _ in 0..2 {
            stopping(|| {
                let found = visit(1, (5, 9), || {
                    assert_eq!(look(1, (6, 9)), Visited::InProgress);
                    assert_eq!(look(2, (0, 0)), Visited::Now);
                });
                assert_eq!(found, Visited::Now);
                assert_eq!(look(1, (5, 8)), Visited::Before);
                assert_eq!(look(2, (0, 0)), Visited::Before);
                // More of the same stream, or another generation of the same endpoint.
                assert_eq!(look(1, (4, 9)), Visited::Now);
                assert_eq!(look(2, (1, 1)), Visited::Now);
            });
            assert_eq!(mem::take(&mut *visits.lock().unwrap()), [2, 1, 2]);
        }
    }

    /// What was visited before may have its devices among those of another endpoint.
    #[cfg(feature = "cuda")]
    #[test]
    fn endpoint_before_a_visited_stream_waits_for_all_devices() {
        let notes = Notes::default();
        stopping(|| {
            notes.tell("other");
            await_behind(|| {
                meet_visited();
                await_behind(|| notes.tell("inner"));
                assert_eq!(notes.take(), ["inner"]);
            });
            assert_eq!(notes.take(), ["other"]);
            notes.tell("more");
            await_behind(|| {});
            assert_eq!(notes.take(), [""; 0]);
            // The call around another one that has waited for all waits for what was told since.
            await_behind(|| {
                await_behind(meet_visited);
                assert_eq!(notes.take(), ["more"]);
                notes.tell("behind");
            });
            assert_eq!(notes.take(), ["behind"]);
        });
        assert_eq!(notes.take(), [""; 0]);
    }

    #[test]
    fn panic_leaves_nothing_behind() {
        let notes = Notes::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stopping(|| {
                notes.tell("device");
                visit(1, (0, 0), || panic!("on purpose"));
            });
        }));
        assert!(panicked.is_err());
        assert_eq!(notes.take(), ["device"]);
        assert!(with(|this| this.visited.is_empty() && !this.is_stopping));
        notes.tell("later");
        assert_eq!(notes.take(), ["later"]);
    }
}
