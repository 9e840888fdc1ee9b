//! Drops that may block, done by threads that no other thread waits for.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Workers;

/// For what a GPU has mapped. Memory is unregistered only when the GPU is idle.
static DROPS: Workers = Workers::new("doorbell-ends", 16).keep_one();
/// For what takes a command of a device, which may hang.
static COMMANDS: Workers = Workers::new("doorbell-leaves", 16);

/// Drops the object in a separate thread: memory that a GPU has mapped is unregistered only when the GPU is done, which may wait for the very thread that
/// would wait for it.
pub(crate) fn drop_elsewhere(what: Box<dyn Send>) {
    DROPS.run(Box::new(move || drop(what)));
}

/// The drops of [`execute_elsewhere`] that are not over, by number.
struct Executing {
    numbers: BTreeSet<u64>,
    next: u64,
}

static EXECUTING: Mutex<Executing> = Mutex::new(Executing {
    numbers: BTreeSet::new(),
    next: 0,
});
static EXECUTED: Condvar = Condvar::new();

fn executing() -> MutexGuard<'static, Executing> {
    EXECUTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number in [`EXECUTING`], also where a drop panics.
struct Number(u64);

impl Drop for Number {
    fn drop(&mut self) {
        executing().numbers.remove(&self.0);
        EXECUTED.notify_all();
    }
}

/// The same for an object whose drop issues a command of a device: a queue pair that is destroyed, or memory that is deregistered. It may also wait for a
/// GPU.
pub(crate) fn execute_elsewhere(what: Box<dyn Send>) {
    let mut executing = executing();
    let number = executing.next;
    executing.next += 1;
    executing.numbers.insert(number);
    drop(executing);
    let number = Number(number);
    COMMANDS.run(Box::new(move || {
        drop(what);
        drop(number);
    }));
}

/// Waits until all that was given to [`execute_elsewhere`] before has been dropped, but no longer than that.
pub(crate) fn await_executed(limit: Duration) {
    let executing = executing();
    let upto = executing.next;
    let is_left =
        |executing: &mut Executing| (executing.numbers.first()).is_some_and(|first| *first < upto);
    let waited = EXECUTED.wait_timeout_while(executing, limit, is_left);
    drop(waited.unwrap_or_else(PoisonError::into_inner));
}
