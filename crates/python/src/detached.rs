//! Waiting without the interpreter's lock.

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use doorbell::{EndpointConfig, Error, Executor};
use pyo3::exceptions::PyRuntimeError;
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

/// Calls the library without the lock, where the call may wait for long and cannot be divided. It is made by a thread of its own. If a signal comes, `give_up` is to end the
/// call, and this ends with Python's exception once it has.
pub fn wait_whole<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> doorbell::Result<T> + Send,
    give_up: impl Fn() + Sync,
) -> PyResult<T> {
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let thread = std::thread::Builder::new().name("doorbell-python".into());
        thread.spawn_scoped(scope, move || {
            // The receiver is there until this thread has ended.
            let _ = done.send(call());
        })?;
        let is_done = Mutex::new(is_done);
        let mut signal = None;
        let result = loop {
            let look = || lock(&is_done).recv_timeout(SLICE);
            match py.detach(look) {
                Ok(result) => break Some(result),
                Err(mpsc::RecvTimeoutError::Disconnected) => break None,
                Err(mpsc::RecvTimeoutError::Timeout) if signal.is_none() => {
                    signal = py.check_signals().err();
                    if signal.is_some() {
                        py.detach(&give_up);
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        };
        match (signal, result) {
            (Some(signal), result) => {
                // It may have the last handle of an endpoint.
                py.detach(|| drop(result));
                Err(signal)
            }
            (None, Some(result)) => result.map_err(|error| to_exception(py, error)),
            (None, None) => Err(PyRuntimeError::new_err(
                "the thread of the call has panicked",
            )),
        }
    })
}

/// As [`wait_whole`], where nothing can end the call: after a signal the thread goes on, and its result is dropped.
pub fn wait_apart<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> doorbell::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::Builder::new().name("doorbell-python".into());
    thread.spawn(move || {
        // Without a receiver nobody waits any more.
        let _ = done.send(call());
    })?;
    let is_done = Mutex::new(is_done);
    loop {
        match py.detach(|| lock(&is_done).recv_timeout(SLICE)) {
            Ok(result) => return result.map_err(|error| to_exception(py, error)),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "the thread of the call has panicked",
                ));
            }
        }
    }
}

/// How long calls of an object wait for room in its queues. The library waits for a part of that, and the call is repeated.
#[derive(Clone, Copy)]
pub struct Room(Option<Duration>);

impl Room {
    pub const NONE: Room = Room(None);

    /// Takes the time out of a configuration.
    pub fn of(config: &mut EndpointConfig) -> Room {
        let whole = config.room_timeout;
        config.room_timeout = whole.map(|whole| whole.min(SLICE));
        Room(whole)
    }

    pub fn longer(self, other: Room) -> Room {
        Room(self.0.max(other.0))
    }
}

/// What the library calls the waits that `room_timeout` ends. Nothing has changed after those.
const ROOM: [&str; 2] = [
    "the wait for room in a queue",
    "the wait for room in the queue",
];

/// Entries of a stream that most calls need at most.
const ENTRIES: usize = 8;

/// Waits until a stream takes what a call queues. Another thread may be faster; then the call itself waits.
pub fn await_room(py: Python<'_>, stream: &dyn Executor) -> PyResult<()> {
    let look = |slice: Option<Duration>| {
        let end = slice.and_then(|slice| Instant::now().checked_add(slice));
        let mut pause = Duration::from_micros(20);
        while !stream.has_room(ENTRIES)? {
            if end.is_some_and(|end| Instant::now() >= end) {
                let timeout = slice.unwrap_or_default();
                let operation = "the wait for room in a stream";
                return Err(Error::Timeout { operation, timeout });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(1));
        }
        Ok(())
    };
    wait(py, None, look)
}

/// Makes a call that queues something, once the stream has room, and again while the object's own queue has none.
pub fn queue<T: Send>(
    py: Python<'_>,
    room: Room,
    stream: Option<&dyn Executor>,
    call: impl Fn() -> doorbell::Result<T> + Sync,
) -> PyResult<T> {
    let begin = Instant::now();
    loop {
        if let Some(stream) = stream {
            await_room(py, stream)?;
        }
        match (py.detach(&call), room.0) {
            (Err(Error::Timeout { operation, .. }), Some(whole)) if ROOM.contains(&operation) => {
                if begin.elapsed() >= whole {
                    let timeout = whole;
                    return Err(to_exception(py, Error::Timeout { operation, timeout }));
                }
                py.check_signals()?;
            }
            (result, _) => return result.map_err(|error| to_exception(py, error)),
        }
    }
}

/// Locks, whatever became of a thread that had the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
