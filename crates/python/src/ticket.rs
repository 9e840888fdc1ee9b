//! The statuses of operations.
#![allow(unsafe_code)] // borrows descriptors of Python's

use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::time::Duration;

use doorbell::{CollectiveTicket, Completion, Error, MessageTicket, StateKind, Status, Ticket};
use pyo3::prelude::*;

use crate::arguments::timeout;
use crate::detached::{Detached, call, wait};
use crate::error::{class, is_gone, state_exception, to_exception};

/// The future that is ready when something is over.
pub type Over = Pin<Box<dyn Future<Output = doorbell::Result<()>> + Send>>;

/// What the tickets of the library have in common.
pub trait AnyTicket: Send + Sync {
    /// What a wait returns.
    type Outcome: Send;

    fn wait(&self, timeout: Option<Duration>) -> doorbell::Result<Self::Outcome>;

    fn notify(&self, descriptor: BorrowedFd<'_>) -> doorbell::Result<()>;

    fn over(&self) -> Over;

    /// Whether the operation is over, with success or not, as far as that is known.
    fn has_ended(&self) -> bool;

    /// The same. A wait without time lets the device work in this thread first. Its outcome does not tell: it also fails for an operation of a captured
    /// graph, which is never over, and a receive that is over may have failed by a timeout of its own.
    fn is_over(&self) -> bool {
        let _ = self.wait(Some(Duration::ZERO));
        self.has_ended()
    }
}

macro_rules! any_ticket {
    ($ticket:ty: $outcome:ty, $of:expr, $has_ended:expr) => {
        impl $crate::ticket::AnyTicket for $ticket {
            type Outcome = $outcome;

            fn wait(&self, timeout: Option<std::time::Duration>) -> doorbell::Result<$outcome> {
                <$ticket>::wait(self, timeout).map($of)
            }

            fn notify(&self, descriptor: std::os::fd::BorrowedFd<'_>) -> doorbell::Result<()> {
                <$ticket>::notify(self, descriptor)
            }

            fn over(&self) -> $crate::ticket::Over {
                Box::pin(self.into_future())
            }

            fn has_ended(&self) -> bool {
                let has_ended: fn(&$ticket) -> bool = $has_ended;
                has_ended(self)
            }
        }
    };
}
pub(crate) use any_ticket;

any_ticket!(Ticket: (), |()| (), Ticket::is_over);
any_ticket!(MessageTicket: u64, |len_bytes| len_bytes, |ticket| !matches!(ticket.check(), Ok(None)));
any_ticket!(CollectiveTicket: (), |()| (), |ticket| !matches!(ticket.check(), Ok(false)));

/// A class of tickets.
pub trait TicketClass {
    type Ticket: AnyTicket;

    fn ticket(&self) -> PyResult<&Self::Ticket>;

    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let ticket = self.ticket()?;
        Ok(py.detach(|| ticket.is_over()))
    }

    fn await_end(
        &self,
        py: Python<'_>,
        seconds: Option<f64>,
    ) -> PyResult<<Self::Ticket as AnyTicket>::Outcome> {
        let ticket = self.ticket()?;
        // The wait goes on after a slice of its time, but not after a timeout that is the outcome of the operation.
        let outcome = wait(py, timeout(seconds)?, |slice| match ticket.wait(slice) {
            Err(Error::Timeout { .. }) if ticket.has_ended() => {
                Ok(ticket.wait(Some(Duration::ZERO)))
            }
            waited => waited.map(Ok),
        })?;
        outcome.map_err(|error| to_exception(py, error))
    }

    fn notify_end(&self, py: Python<'_>, descriptor: i32) -> PyResult<()> {
        let ticket = self.ticket()?;
        notify(py, descriptor, |descriptor| ticket.notify(descriptor))
    }
}

/// The methods that all classes of tickets have, for one whose `inner` is a ticket.
macro_rules! ticket_methods {
    ($class:ident, $ticket:ty) => {
        impl $crate::ticket::TicketClass for $class {
            type Ticket = $ticket;

            fn ticket(&self) -> PyResult<&$ticket> {
                self.inner()
            }
        }

        #[pymethods]
        impl $class {
            /// Whether the operation is over, with success or not. One of a captured graph is never over, unless it has failed.
            fn done(&self, py: Python<'_>) -> PyResult<bool> {
                $crate::ticket::TicketClass::is_done(self, py)
            }

            /// Waits until the operation is over, and returns what it has brought. Raises `StateError` for an operation of a captured graph, which is never over.
            #[pyo3(signature = (timeout = None))]
            fn wait(
                &self,
                py: Python<'_>,
                timeout: Option<f64>,
            ) -> PyResult<<$ticket as $crate::ticket::AnyTicket>::Outcome> {
                $crate::ticket::TicketClass::await_end(self, py, timeout)
            }

            /// Adds 1 to an eventfd when the operation is over, with success or not. Raises `StateError` for an operation of a captured graph, which is never over.
            fn notify(&self, py: Python<'_>, descriptor: i32) -> PyResult<()> {
                $crate::ticket::TicketClass::notify_end(self, py, descriptor)
            }

            fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
                $crate::ticket::awaited(slf)
            }
        }
    };
}
pub(crate) use ticket_methods;

ticket_methods!(PyTicket, Ticket);

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
    /// The number that the work request was given.
    #[getter]
    fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Bytes that a receive or a read has brought; 0 for sends and writes.
    #[getter]
    fn nbytes(&self) -> u32 {
        self.0.len_bytes
    }

    /// The immediate data of a receive.
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
    /// The status of the operation now.
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
}
