//! The library's errors as Python exceptions: the classes of `doorbell/_errors.py`.

use doorbell::{Cause, Error, StateKind, WorkError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

/// A class of the package's modules in Python.
pub fn class<'py>(py: Python<'py>, module: &str, name: &str) -> PyResult<Bound<'py, PyType>> {
    Ok(py.import(module)?.getattr(name)?.cast_into()?)
}

/// An exception with the attributes of its class.
struct Exception<'py>(Bound<'py, PyAny>);

impl<'py> Exception<'py> {
    fn new(py: Python<'py>, class_name: &str, text: &str) -> PyResult<Exception<'py>> {
        let class = class(py, "doorbell._errors", class_name)?;
        Ok(Exception(class.call1((text,))?))
    }

    fn with(self, name: &str, value: impl IntoPyObject<'py>) -> PyResult<Exception<'py>> {
        self.0.setattr(name, value)?;
        Ok(self)
    }

    fn of_work(self, work: &WorkError) -> PyResult<Exception<'py>> {
        let cause = format!("{:?}", work.cause);
        let name_end = cause.find([' ', '(']).unwrap_or(cause.len());
        let (status, syndrome) = match work.cause {
            Cause::Completion {
                status, syndrome, ..
            } => (Some(format!("{status:?}")), Some(syndrome)),
            _ => (None, None),
        };
        self.with("qpn", work.qpn)?
            .with("wr_id", work.wr_id)?
            .with("cause", &cause[..name_end])?
            .with("status", status)?
            .with("syndrome", syndrome)
    }
}

/// The failure of an endpoint.
pub fn work_exception<'py>(py: Python<'py>, work: &WorkError) -> PyResult<Bound<'py, PyAny>> {
    Ok(Exception::new(py, "WorkError", &work.to_string())?
        .of_work(work)?
        .0)
}

/// The exception of an error.
pub fn to_exception(py: Python<'_>, error: Error) -> PyErr {
    match exception(py, &error) {
        Ok(exception) => PyErr::from_value(exception.0),
        Err(other) => other,
    }
}

/// An error that the package itself finds.
pub fn state_exception(
    py: Python<'_>,
    kind: StateKind,
    operation: &'static str,
    reason: &str,
) -> PyErr {
    to_exception(py, Error::state(kind, operation, reason))
}

fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Exception<'py>> {
    let text = error.to_string();
    let new = |name| Exception::new(py, name, &text);
    match error {
        Error::Range {
            argument,
            value,
            min,
            max,
        } => new("RangeError")?
            .with("argument", argument)?
            .with("value", value)?
            .with("min", min)?
            .with("max", max),
        Error::Choice {
            argument,
            value,
            allowed,
        } => new("ChoiceError")?
            .with("argument", argument)?
            .with("value", value)?
            .with("allowed", allowed),
        Error::Alignment {
            argument,
            value,
            align,
        } => new("AlignmentError")?
            .with("argument", argument)?
            .with("value", value)?
            .with("align", align),
        Error::OutOfBounds {
            argument,
            offset,
            len_bytes,
            limit_bytes,
            ..
        } => new("OutOfBoundsError")?
            .with("argument", argument)?
            .with("offset", offset)?
            .with("len_bytes", len_bytes)?
            .with("limit_bytes", limit_bytes),
        Error::Foreign {
            argument,
            found,
            expected,
        } => new("ForeignError")?
            .with("argument", argument)?
            .with("found", found)?
            .with("expected", expected),
        Error::QueueFull { queue, depth } => new("QueueFullError")?
            .with("queue", queue)?
            .with("depth", depth),
        Error::State {
            kind,
            operation,
            reason,
        } => new("StateError")?
            .with("kind", format!("{kind:?}"))?
            .with("operation", operation)?
            .with("reason", reason),
        Error::Timeout { operation, timeout } => new("TimeoutError")?
            .with("operation", operation)?
            .with("timeout", timeout.as_secs_f64()),
        Error::Asynchronous {
            stream,
            reason,
            work,
        } => {
            let work = work.map(|work| work_exception(py, &work)).transpose()?;
            new("AsynchronousError")?
                .with("stream", stream)?
                .with("reason", reason)?
                .with("work", work)
        }
        Error::Work(work) => new("WorkError")?.of_work(work),
        Error::System { operation, errno } => new("SystemCallError")?
            .with("operation", operation)?
            .with("errno", errno),
        Error::Cuda { call, code, name } => new("CudaError")?
            .with("call", call)?
            .with("code", code)?
            .with("name", name),
        Error::Malformed { what, reason } => new("MalformedError")?
            .with("what", what)?
            .with("reason", reason),
        Error::Truncated {
            len_bytes,
            limit_bytes,
        } => new("TruncatedError")?
            .with("len_bytes", len_bytes)?
            .with("limit_bytes", limit_bytes),
        Error::Peer { peer, failure } => {
            let work = work_exception(py, failure)?;
            new("PeerError")?.with("peer", peer)?.with("work", work)
        }
        Error::Rank { rank, reason } => {
            new("RankError")?.with("rank", rank)?.with("reason", reason)
        }
        Error::Refused {
            peer,
            reason,
            private_data,
        } => new("RefusedError")?
            .with("peer", peer)?
            .with("reason", reason)?
            .with("private_data", PyBytes::new(py, private_data)),
        // Of calls that this package does not have: addresses over sockets.
        _ => new("Error"),
    }
}

/// The error of an object that is being dropped, which no caller can have.
pub fn is_gone() -> PyErr {
    PyRuntimeError::new_err("the object is being dropped")
}
