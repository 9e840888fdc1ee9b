//! Waiting without the interpreter's lock.

use std::time::{Duration, Instant};

use doorbell::Error;
use pyo3::prelude::*;

use crate::error::to_exception;

/// How long a wait goes on between two looks at Python's signals.
const SLICE: Duration = Duration::from_millis(50);

/// What is dropped without the interpreter's lock, because the drop may wait for the device, or for a thread that wants the lock.
pub struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Detached<T> {
        Detached(Some(value))
    }

    /// The value; `None` only while it is dropped.
    pub fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let value = &mut self.0;
        // At the end of the interpreter nothing attaches, and no thread of the library waits for the lock any more.
        let _ = Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}

/// Calls the library without the lock.
pub fn call<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> doorbell::Result<T> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| to_exception(py, error))
}

/// Waits without the lock, and ends with Python's exception if a signal comes, such as that of Ctrl-C. `wait` takes its time limit.
pub fn wait<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Option<Duration>) -> doorbell::Result<T> + Sync,
) -> PyResult<T> {
    let begin = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()));
        let is_last = left.is_some_and(|left| left <= SLICE);
        let slice = if is_last { left } else { Some(SLICE) };
        match (py.detach(|| wait(slice)), timeout) {
            (Err(Error::Timeout { .. }), _) if !is_last => py.check_signals()?,
            (Err(Error::Timeout { operation, .. }), Some(timeout)) => {
                return Err(to_exception(py, Error::Timeout { operation, timeout }));
            }
            (result, _) => return result.map_err(|error| to_exception(py, error)),
        }
    }
}
