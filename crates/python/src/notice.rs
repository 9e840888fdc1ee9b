//! What `await` needs: a descriptor for each event loop, and the operations that have ended since it was looked at.
//!
//! A task that waits has a future of the library, whose waker notes the number of the wait and writes to the descriptor of its loop. So a loop has one descriptor,
//! whatever the number of its waits. The waker keeps neither the descriptor nor the operation.
#![allow(unsafe_code)] // takes a descriptor of Python's

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::{PyClass, pyclass::boolean_struct::True};

use crate::collective::PyCollectiveTicket;
use crate::detached::{Detached, call, lock};
use crate::matcher::PyMatchTicket;
use crate::message::PyMessageTicket;
use crate::stream::PyEvent;
use crate::ticket::{AnyTicket, Over, PyTicket, TicketClass};

struct NoticeQueue {
    /// `None` once it is closed.
    eventfd: Option<File>,
    ended: Vec<u64>,
}

/// Notes that a wait has ended, from whatever thread.
struct NoticeWaker {
    queue: Weak<Mutex<NoticeQueue>>,
    number: u64,
}

impl Wake for NoticeWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(queue) = self.queue.upgrade() else {
            return;
        };
        // The write is under the lock, so that the descriptor is closed when `close` returns.
        let mut queue = lock(&queue);
        queue.ended.push(self.number);
        if let Some(mut eventfd) = queue.eventfd.as_ref() {
            // It does not block: it is non-blocking, and counts to 2^64.
            let _ = eventfd.write(&1_u64.to_ne_bytes());
        }
    }
}

/// The notices of one event loop.
#[pyclass(frozen, module = "doorbell._doorbell", name = "_Notices")]
pub struct PyNotices(Arc<Mutex<NoticeQueue>>);

#[pymethods]
impl PyNotices {
    /// Takes an eventfd, which is closed by this object from now on. It must be non-blocking.
    #[new]
    fn new(descriptor: i32) -> PyResult<PyNotices> {
        if descriptor < 0 {
            return Err(PyValueError::new_err("a descriptor is not negative"));
        }
        // SAFETY: the caller, `doorbell/_await.py`, has made the descriptor for this and leaves it to this object.
        let eventfd = unsafe { File::from_raw_fd(descriptor) };
        Ok(PyNotices(Arc::new(Mutex::new(NoticeQueue {
            eventfd: Some(eventfd),
            ended: Vec::new(),
        }))))
    }

    /// The descriptor, which is readable when waits have ended; -1 once it is closed.
    fn fileno(&self) -> i32 {
        lock(&self.0).eventfd.as_ref().map_or(-1, File::as_raw_fd)
    }

    /// The numbers of the waits that have ended since the last call.
    fn take(&self) -> Vec<u64> {
        let mut queue = lock(&self.0);
        if let Some(mut eventfd) = queue.eventfd.as_ref() {
            let _ = eventfd.read(&mut [0; 8]);
        }
        std::mem::take(&mut queue.ended)
    }

    /// Begins a wait for a ticket or an event. None: it is over already. The wait ends early when the result is dropped.
    fn watch(&self, subject: &Bound<'_, PyAny>, number: u64) -> PyResult<Option<PyWatch>> {
        let py = subject.py();
        let queue = Arc::downgrade(&self.0);
        let waker = Waker::from(Arc::new(NoticeWaker { queue, number }));
        let mut over = over(subject)?;
        let is_over = |over: &mut Over| over.as_mut().poll(&mut Context::from_waker(&waker));
        // How it has ended is asked of the subject.
        match py.detach(|| is_over(&mut over).is_ready()) {
            true => Ok(None),
            false => Ok(Some(PyWatch {
                _over: Detached::new(Mutex::new(over)),
            })),
        }
    }

    /// Closes the descriptor.
    fn close(&self) {
        lock(&self.0).eventfd.take();
    }
}

/// That of a ticket, if the subject is one of that class.
fn ticket_over<C>(subject: &Bound<'_, PyAny>) -> Option<PyResult<Over>>
where
    C: PyClass<Frozen = True> + TicketClass + Sync,
{
    let ticket = subject.cast::<C>().ok()?;
    Some(ticket.get().ticket().map(AnyTicket::over))
}

/// The future that is ready when the subject of a wait is over.
fn over(subject: &Bound<'_, PyAny>) -> PyResult<Over> {
    let of_ticket = ticket_over::<PyTicket>(subject)
        .or_else(|| ticket_over::<PyMessageTicket>(subject))
        .or_else(|| ticket_over::<PyCollectiveTicket>(subject))
        .or_else(|| ticket_over::<PyMatchTicket>(subject));
    if let Some(over) = of_ticket {
        return over;
    }
    if let Ok(event) = subject.cast::<PyEvent>() {
        let event = event.get().inner()?.clone();
        let reached = call(subject.py(), move || event.reached())?;
        return Ok(Box::pin(reached));
    }
    Err(PyTypeError::new_err(format!(
        "{} is not awaited",
        subject.get_type()
    )))
}

/// A wait that goes on. It has no methods: it ends when it is dropped.
#[pyclass(frozen, module = "doorbell._doorbell", name = "_Watch")]
pub struct PyWatch {
    _over: Detached<Mutex<Over>>,
}
