//! A mutex for code that limits how many locks its hot path takes.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A mutex that ignores poisoning: its data stays consistent when a thread panics that holds it. Unit tests count how often each thread takes one.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + 1);
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while a thread holds it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + 1);
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
thread_local! {
    static TAKEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How many locks of this type the calling thread has taken.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn locks_taken() -> u64 {
    TAKEN.get()
}
