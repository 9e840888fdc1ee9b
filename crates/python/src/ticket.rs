//! The statuses of operations.
#![allow(unsafe_code)] // borrows descriptors of Python's

use std::os::fd::BorrowedFd;
use std::time::Duration;

use doorbell::{Completion, StateKind, Status, Ticket};
use pyo3::prelude::*;

use crate::arguments::timeout;
use crate::detached::{Detached, call, wait};
use crate::error::{class, is_gone, state_exception};

/// What `await` of an object does.
pub fn awaited<'py, T: pyo3::PyClass>(subject: &Bound<'py, T>) -> PyResult<Bound<'py, PyAny>> {
    let module = subject.py().import("doorbell._await")?;
    let wait = module.call_method1("result", (subject,))?;
    wait.call_method0("__await__")
}

/// Has a descriptor of the caller's written to.
pub fn notify(
    py: Python<'_>,
    descriptor: i32,
    notify: impl FnOnce(BorrowedFd<'_>) -> doorbell::Result<()> + Send,
) -> PyResult<()> {
    if descriptor < 0 {
        let reason = "a descriptor is not negative";
        return Err(state_exception(py, StateKind::NotFound, "notify", reason));
    }
    // SAFETY: a descriptor of the caller's, which this call duplicates before it returns; a closed one is an error of that.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    call(py, || notify(descriptor))
}

/// A completion.
#[pyclass(frozen, module = "doorbell", name = "Completion")]
pub struct PyCompletion(pub Completion);

#[pymethods]
impl PyCompletion {
    #[getter]
    fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Bytes that a receive or a read has brought; 0 for sends and writes.
    #[getter]
    fn nbytes(&self) -> u32 {
        self.0.len_bytes
    }

    #[getter]
    fn immediate(&self) -> Option<u32> {
        self.0.imm
    }
}

/// A handle of one queued operation. It keeps the endpoint.
#[pyclass(frozen, module = "doorbell", name = "Ticket")]
pub struct PyTicket {
    inner: Detached<Ticket>,
    _endpoint: Option<Py<PyAny>>,
}

impl PyTicket {
    pub fn new(ticket: Ticket, endpoint: Option<&Bound<'_, PyAny>>) -> PyTicket {
        PyTicket {
            inner: Detached::new(ticket),
            _endpoint: endpoint.map(|endpoint| endpoint.clone().unbind()),
        }
    }

    pub fn inner(&self) -> PyResult<&Ticket> {
        self.inner.get().ok_or_else(is_gone)
    }

    fn details(&self, py: Python<'_>) -> PyResult<Option<(u32, Option<u32>)>> {
        let ticket = self.inner()?;
        Ok(py.detach(|| ticket.details()))
    }
}

#[pymethods]
impl PyTicket {
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ticket = self.inner()?;
        let name = match py.detach(|| ticket.status()) {
            Status::Prepared => "PREPARED",
            Status::Queued => "QUEUED",
            Status::Rung => "RUNG",
            Status::Complete => "COMPLETE",
            Status::Failed(_) => "FAILED",
            Status::Unknown(_) => "UNKNOWN",
            Status::Discarded => "DISCARDED",
            Status::Cancelled => "CANCELLED",
            _ => "UNKNOWN",
        };
        class(py, "doorbell._types", "Status")?.getattr(name)
    }

    /// How many launches of a captured graph have executed the operation; None for one that is of no such graph.
    #[getter]
    fn launches(&self) -> PyResult<Option<u64>> {
        #[cfg(feature = "cuda")]
        return Ok(self.inner()?.launches());
        #[cfg(not(feature = "cuda"))]
        self.inner().map(|_| None)
    }

    /// Bytes that a receive or a read has brought.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.details(py)?.map(|(len_bytes, _)| len_bytes))
    }

    /// The immediate data of a receive.
    #[getter]
    fn immediate(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.details(py)?.and_then(|(_, immediate)| immediate))
    }

    /// Whether the operation is over, with success or not.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let ticket = self.inner()?;
        Ok(py.detach(|| {
            // A wait without time lets the device work in this thread.
            ticket.wait(Some(Duration::ZERO)).is_ok() || ticket.is_over()
        }))
    }

    /// Waits until the operation is complete.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let ticket = self.inner()?;
        wait(py, self::timeout(timeout)?, |slice| ticket.wait(slice))
    }

    /// Adds 1 to an eventfd when the operation is over, with success or not.
    fn notify(&self, py: Python<'_>, descriptor: i32) -> PyResult<()> {
        let ticket = self.inner()?;
        notify(py, descriptor, |descriptor| ticket.notify(descriptor))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        awaited(slf)
    }
}
