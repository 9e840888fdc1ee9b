//! The end of the interpreter. A thread that asks for the interpreter's lock after that hangs or is ended by Python. So the functions of streams, which
//! threads of the library call, pass a gate, which `atexit` closes: it waits for the functions that run, and no other begins.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyCFunction;

/// How long a wait goes on between two looks at Python's signals.
const LOOK: Duration = Duration::from_millis(50);

struct ExitGate {
    is_closed: bool,
    /// Functions that run.
    inside: usize,
}

static GATE: Mutex<ExitGate> = Mutex::new(ExitGate {
    is_closed: false,
    inside: 0,
});
static LEFT: Condvar = Condvar::new();

fn gate() -> MutexGuard<'static, ExitGate> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The interpreter stays until this is dropped.
struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        gate().inside -= 1;
        LEFT.notify_all();
    }
}

/// Calls `function` with the interpreter's lock, from a thread of the library. `None`: the interpreter has ended, or is about to.
pub fn attach<R>(function: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    let inside = {
        let mut gate = gate();
        if gate.is_closed {
            return None;
        }
        gate.inside += 1;
        Inside
    };
    let result = Python::try_attach(function);
    drop(inside);
    result
}

/// Closes the gate, and waits a little. Whether no function runs any more.
fn close_for_a_while() -> bool {
    let mut gate = gate();
    gate.is_closed = true;
    let has_left = LEFT.wait_timeout_while(gate, LOOK, |gate| gate.inside > 0);
    has_left.unwrap_or_else(PoisonError::into_inner).0.inside == 0
}

/// Has the gate closed when the interpreter ends.
pub fn install(py: Python<'_>) -> PyResult<()> {
    let installed = std::process::id();
    let close = PyCFunction::new_closure(py, None, None, move |arguments, _| {
        // A child of `fork` has none of the threads, and nobody would leave.
        if std::process::id() != installed {
            return Ok(());
        }
        let py = arguments.py();
        while !py.detach(close_for_a_while) {
            py.check_signals()?;
        }
        PyResult::Ok(())
    })?;
    py.import("atexit")?.call_method1("register", (close,))?;
    Ok(())
}
