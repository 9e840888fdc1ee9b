//! A mutex for code that limits how many locks its hot path takes.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex that ignores poisoning: its data stays consistent when a thread panics that holds it. Unit tests count how often each thread takes one.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    #[cfg(feature = "cuda")]
    pub(crate) fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + 1);
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
