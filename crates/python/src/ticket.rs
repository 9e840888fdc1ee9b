//! The statuses of operations.

use std::time::Duration;

use doorbell::{Completion, Status, Ticket};
use pyo3::prelude::*;

use crate::arguments::timeout;
use crate::detached::{Detached, wait};
use crate::error::{class, is_gone};

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

    fn inner(&self) -> PyResult<&Ticket> {
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

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let wait = slf.py().import("doorbell._await")?;
        wait.call_method1("ticket_done", (slf,))?
            .call_method0("__await__")
    }
}
