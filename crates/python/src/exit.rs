//! The end of the interpreter. A thread that asks for the interpreter's lock after that hangs or is ended by Python. So the functions of streams, which
//! threads of the library call, pass a gate, which `atexit` closes: it waits for the functions that run, and no other begins.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyCFunction;

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

/// Has the gate closed when the interpreter ends.
pub fn install(py: Python<'_>) -> PyResult<()> {
    let close = PyCFunction::new_closure(py, None, None, |arguments, _| {
        arguments.py().detach(|| {
            let mut gate = gate();
            gate.is_closed = true;
            while gate.inside > 0 {
                gate = LEFT.wait(gate).unwrap_or_else(PoisonError::into_inner);
            }
        });
    })?;
    py.import("atexit")?.call_method1("register", (close,))?;
    Ok(())
}
