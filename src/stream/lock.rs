//! The mutex of the rooms whose hot path is held to a number of locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex that ignores poisoning: its data stays consistent when a thread panics that holds it.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
