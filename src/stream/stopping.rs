//! How a thread gives up endpoints and streams that wait for each other, and waits for their devices.
//!
//! A GPU stops at a completion in error until this process releases the wait. Before that, everything that is queued behind the wait is given up: the streams
//! would ring what the wait was to protect. So the thread that stops an endpoint tells the devices of all that is behind its waits, also on streams that
//! wait for events behind them, and waits for these devices at the same time. An endpoint that is given up so sees to what is behind its own waits before it
//! releases those. No lock is held meanwhile, so a device that does not answer delays only what waits for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::{self, ManuallyDrop};
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::library_thread::is_library_thread;

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
    /// By the number of a stream, the spans of its entries that are given up.
    visited: BTreeMap<u64, Vec<(u64, u64)>>,
    /// The functions that are called when all devices have been waited for.
    after: Vec<Box<dyn FnOnce()>>,
}

thread_local! {
    // Without a destructor: while a thread ends, a destructor of the application may still abort a stream. All memory is released before that.
    static STOPPING: ManuallyDrop<RefCell<Stopping>> = const {
        ManuallyDrop::new(RefCell::new(Stopping {
            is_stopping: false,
            is_deferring: false,
            ending: Vec::new(),
            visited: BTreeMap::new(),
            after: Vec::new(),
        }))
    };
}

fn with<R>(call: impl FnOnce(&mut Stopping) -> R) -> R {
    STOPPING.with(|stopping| call(&mut stopping.borrow_mut()))
}

/// Runs `stop`, which gives up owners and streams. When the outermost call returns, their devices were waited for.
pub(crate) fn stopping<R>(stop: impl FnOnce() -> R) -> R {
    let (is_nested, before) = with(|this| {
        let is_nested = mem::replace(&mut this.is_stopping, true);
        (is_nested, this.ending.len())
    });
    if is_nested {
        return stop();
    }
    /// Also where an owner panics. With the number of devices that were not waited for before.
    struct Leave(usize);

    impl Drop for Leave {
        fn drop(&mut self) {
            let _visited = with(|this| mem::take(&mut this.visited));
            await_ending(self.0);
            let after = with(|this| {
                this.is_stopping = false;
                mem::take(&mut this.after)
            });
            after.into_iter().for_each(|then| then());
        }
    }

    let _leave = Leave(before);
    stop()
}

/// Calls `then` when the outermost call of [`stopping`] has waited for all devices. Outside [`stopping`], calls it at once.
#[cfg(feature = "cuda")]
pub(crate) fn after_stopping(then: impl FnOnce() + 'static) {
    let is_stopping = with(|this| this.is_stopping);
    if is_stopping {
        with(|this| this.after.push(Box::new(then)));
    } else {
        then();
    }
}

/// Notes that this thread gives up that span of the entries of a stream, first to last. Returns false if it has done so since the outermost call of
/// [`stopping`] began. So a thread follows each stream once, however many ways lead there.
#[cfg(feature = "cuda")]
pub(crate) fn visit(stream: u64, (from, to): (u64, u64)) -> bool {
    with(|this| {
        let spans = this.visited.entry(stream).or_default();
        let is_new = !spans.iter().any(|span| span.0 <= from && to <= span.1);
        if is_new {
            spans.push((from, to));
        }
        is_new
    })
}

/// Until `defers` is false again, [`await_or_defer`] does not wait on this thread, which calls [`await_ending`] before it executes anything of an owner.
pub(super) fn defer_waits(defers: bool) {
    with(|this| this.is_deferring = defers);
}

/// Runs work of a stream in a thread that is not the stream's. Waits are deferred in it, and are over when it returns, unless the thread defers them itself.
pub(super) fn deferring_waits<R>(work: impl FnOnce() -> R) -> R {
    let (was_deferring, before) = with(|this| {
        let was_deferring = mem::replace(&mut this.is_deferring, true);
        (was_deferring, this.ending.len())
    });
    let result = work();
    with(|this| this.is_deferring = was_deferring);
    if !was_deferring {
        await_ending(before);
    }
    result
}

/// Runs work under a lock, in which owners may tell their devices to stop. Returns these devices, for [`await_told`] once the lock is released.
#[cfg(feature = "cuda")]
pub(crate) fn told_devices(work: impl FnOnce()) -> Vec<Arc<dyn EndingDevice>> {
    /// Also where an owner panics.
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            with(|this| this.is_deferring = self.0);
        }
    }

    let (was_deferring, before) = with(|this| {
        let was_deferring = mem::replace(&mut this.is_deferring, true);
        (was_deferring, this.ending.len())
    });
    let restore = Restore(was_deferring);
    work();
    drop(restore);
    with(|this| this.ending.split_off(before.min(this.ending.len())))
}

/// Waits for devices that [`told_devices`] has returned, as [`await_or_defer`] does. A thread of the library that executes no stream and stops nothing does not
/// wait, because it may keep the deadlines of streams. The commands are on their way without it, the owners take no further work, and programs of other streams
/// wait for their turn until the devices have stopped.
#[cfg(feature = "cuda")]
pub(crate) fn await_told(devices: Vec<Arc<dyn EndingDevice>>) {
    let defers = with(|this| this.is_stopping || this.is_deferring);
    if defers || !is_library_thread() {
        devices.into_iter().for_each(await_or_defer);
    }
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
    fn devices_are_waited_for_when_all_are_told() {
        let notes = Notes::default();
        notes.tell("outside");
        assert_eq!(notes.take(), ["outside"]);
        stopping(|| {
            notes.tell("one");
            stopping(|| notes.tell("other"));
            assert_eq!(notes.take(), [""; 0]);
        });
        assert_eq!(notes.take(), ["one", "other"]);
        // A thread that defers waits does so for what it tells apart from that.
        defer_waits(true);
        notes.tell("deferred");
        stopping(|| notes.tell("stopped"));
        assert_eq!(notes.take(), ["stopped"]);
        await_ending(0);
        assert_eq!(notes.take(), ["deferred"]);
        defer_waits(false);
        notes.tell("at once");
        assert_eq!(notes.take(), ["at once"]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn what_comes_after_comes_when_all_devices_were_waited_for() {
        let notes = Notes::default();
        let note = |name| {
            let notes = Arc::clone(&notes.0);
            move || notes.lock().unwrap().push(name)
        };
        stopping(|| {
            after_stopping(note("after"));
            stopping(|| {
                after_stopping(note("after that"));
                notes.tell("one");
            });
            notes.tell("other");
        });
        assert_eq!(notes.take(), ["one", "other", "after", "after that"]);
        after_stopping(note("at once"));
        assert_eq!(notes.take(), ["at once"]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn devices_told_under_a_lock_are_waited_for_after_it_and_not_by_a_thread_of_the_library() {
        let notes = Notes::default();
        let told = told_devices(|| notes.tell("one"));
        assert_eq!(notes.take(), [""; 0]);
        await_told(told);
        assert_eq!(notes.take(), ["one"]);
        notes.tell("at once");
        assert_eq!(notes.take(), ["at once"]);
        // What the thread has told before stays, and what it defers comes with the rest.
        stopping(|| {
            notes.tell("before");
            let told = told_devices(|| notes.tell("under the lock"));
            assert_eq!(told.len(), 1);
            await_told(told);
            assert_eq!(notes.take(), [""; 0]);
        });
        assert_eq!(notes.take(), ["before", "under the lock"]);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            told_devices(|| panic!("on purpose"))
        }));
        assert!(panicked.is_err());
        notes.tell("later");
        assert_eq!(notes.take(), ["later"]);
        let other = Notes(Arc::clone(&notes.0));
        std::thread::spawn(move || {
            super::super::begin_library_thread();
            await_told(told_devices(|| other.tell("of the library")));
            assert_eq!(other.take(), [""; 0]);
            stopping(|| await_told(told_devices(|| other.tell("stopped"))));
            assert_eq!(other.take(), ["stopped"]);
        })
        .join()
        .unwrap();
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn span_is_visited_once_in_an_outermost_call() {
        for _ in 0..2 {
            stopping(|| {
                assert!(visit(1, (5, 9)));
                for covered in [(5, 9), (6, 9), (5, 8)] {
                    assert!(!stopping(|| visit(1, covered)));
                }
                assert!(visit(1, (4, 9)) && visit(1, (5, 10)) && visit(2, (5, 9)));
            });
        }
    }

    #[test]
    fn panic_leaves_nothing_behind() {
        let notes = Notes::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stopping(|| {
                notes.tell("device");
                panic!("on purpose");
            });
        }));
        assert!(panicked.is_err());
        assert_eq!(notes.take(), ["device"]);
        notes.tell("later");
        assert_eq!(notes.take(), ["later"]);
    }
}
