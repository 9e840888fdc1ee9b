//! Threads that have handles of owners whose programs may finish meanwhile.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Unlike the readers of an `RwLock`, these never wait, not even for a thread that waits for them: a thread that gives up streams reads several of them, in
/// any order.
#[derive(Default)]
pub(super) struct OwnerReaders {
    state: Mutex<Readers>,
    left: Condvar,
}

#[derive(Default)]
struct Readers {
    entered: u64,
    /// The numbers of those that have not left.
    inside: Vec<u64>,
    /// Threads that wait for some to leave.
    waiting: u32,
}

impl OwnerReaders {
    fn lock(&self) -> MutexGuard<'_, Readers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self) -> OwnerReader<'_> {
        let mut state = self.lock();
        let number = state.entered;
        state.entered += 1;
        state.inside.push(number);
        OwnerReader { all: self, number }
    }

    /// Waits until all have left that are inside now.
    pub(super) fn await_inside(&self) {
        let mut state = self.lock();
        let entered = state.entered;
        while state.inside.iter().any(|number| *number < entered) {
            state.waiting += 1;
            state = (self.left.wait(state)).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }
}

/// A thread that has handles.
pub(super) struct OwnerReader<'a> {
    all: &'a OwnerReaders,
    number: u64,
}

impl Drop for OwnerReader<'_> {
    fn drop(&mut self) {
        let mut state = self.all.lock();
        state.inside.retain(|number| *number != self.number);
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.all.left.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_threads_that_were_inside_are_waited_for() {
        let readers = OwnerReaders::default();
        let is_over = AtomicBool::new(false);
        readers.await_inside();
        let first = readers.enter();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                readers.await_inside();
                is_over.store(true, Ordering::SeqCst);
            });
            while readers.lock().waiting == 0 {
                std::thread::yield_now();
            }
            // Neither waits for the thread that waits, nor is waited for.
            let second = readers.enter();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!is_over.load(Ordering::SeqCst));
            drop(first);
            while !is_over.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            drop(second);
        });
        assert!(readers.lock().inside.is_empty());
    }
}
