//! Which stream the calling thread executes.

use std::cell::{Cell, RefCell};

use crate::{Error, Result, StateKind};

thread_local! {
    /// The id of the stream whose thread this is; 0 elsewhere.
    static CURRENT: Cell<u64> = const { Cell::new(0) };

    /// Those whose work has brought this thread to execute `CURRENT`: streams without a thread.
    static OUTER: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread executes work of a stream without a thread, until this is dropped.
pub(super) struct EnteredStream {
    before: u64,
}

impl EnteredStream {
    pub(super) fn new(stream: u64) -> EnteredStream {
        let before = CURRENT.replace(stream);
        if before != 0 {
            OUTER.with_borrow_mut(|outer| outer.push(before));
        }
        EnteredStream { before }
    }
}

impl Drop for EnteredStream {
    fn drop(&mut self) {
        CURRENT.set(self.before);
        if self.before != 0 {
            OUTER.with_borrow_mut(Vec::pop);
        }
    }
}

/// Fails when the calling thread is the one of `stream`, for an operation that would then wait for itself.
pub(crate) fn forbid_on(stream: u64, operation: &'static str) -> Result<()> {
    let current = CURRENT.get();
    let is_outer = || current != 0 && OUTER.with_borrow(|outer| outer.contains(&stream));
    if current != stream && !is_outer() {
        return Ok(());
    }
    Err(Error::state(
        StateKind::Deadlock,
        operation,
        "called from work on the same stream, so it would wait for itself",
    ))
}

/// Runs work of that stream in the calling thread.
#[cfg(feature = "cuda")]
pub(crate) fn run_as_stream<R>(stream: u64, work: impl FnOnce() -> R) -> R {
    let before = CURRENT.replace(stream);
    let result = work();
    CURRENT.set(before);
    result
}

/// The calling thread executes that stream and nothing else.
pub(super) fn become_thread_of(stream: u64) {
    CURRENT.set(stream);
}
