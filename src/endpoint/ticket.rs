//! The status of a queued operation.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::endpoint::QueueKind;
use crate::endpoint::clock::now_ns;
use crate::endpoint::outcome::{Status, TransferDetails};
use crate::endpoint::poll_until::poll_until;
use crate::endpoint::prepared::PreparedOperation;
#[cfg(feature = "cuda")]
use crate::endpoint::replay::operation::ReplayTicket;
use crate::endpoint::shared::{EndpointShared, timeout_ns};
use crate::endpoint::value::{ValueState, ValueWait};
use crate::region::Device;
use crate::stream::has_own_streams;
use crate::{Error, Result, StateKind};

#[derive(Clone)]
enum Subject {
    Operation {
        shared: Arc<EndpointShared>,
        kind: QueueKind,
        is_wait: bool,
        count: u32,
        serial: u32,
        epoch: u32,
        /// Set when the operation is dropped. Only tickets that were made before it was posted need it.
        cancelled: Option<Arc<AtomicBool>>,
    },
    Value {
        state: Arc<ValueState>,
        device: Device,
    },
    #[cfg(feature = "cuda")]
    Replay(ReplayTicket),
}

/// A handle of one queued operation. It keeps the endpoint's queue memory alive; one of a value keeps the device open, and not the
/// region. As long as there are tickets, an endpoint keeps the final statuses
/// of its last 65,536 generations: a ticket of an older generation reports [`Status::Unknown`]. Within a generation the status is exact for the last 2^31
/// operations of a queue: a ticket that is older may report a failure of later operations as its own.
#[derive(Clone)]
pub struct Ticket {
    subject: Subject,
}

impl Ticket {
    pub(super) fn of_operation(
        shared: &Arc<EndpointShared>,
        operation: PreparedOperation,
    ) -> Ticket {
        Ticket {
            subject: Subject::Operation {
                shared: Arc::clone(shared),
                kind: operation.queue_kind,
                is_wait: operation.is_wait(),
                count: operation.count,
                serial: operation.serial,
                epoch: operation.epoch,
                cancelled: None,
            },
        }
    }

    /// The ticket of an operation that may still be dropped. The drop sets the flag, because another operation will use the place in the queue.
    pub(super) fn of_prepared(
        shared: &Arc<EndpointShared>,
        operation: PreparedOperation,
        flag: &Arc<AtomicBool>,
    ) -> Ticket {
        let mut ticket = Ticket::of_operation(shared, operation);
        if let Subject::Operation { cancelled, .. } = &mut ticket.subject {
            *cancelled = Some(Arc::clone(flag));
        }
        ticket
    }

    pub(crate) fn of_value(value: &ValueWait) -> Ticket {
        Ticket {
            subject: Subject::Value {
                state: value.state(),
                device: value.device().clone(),
            },
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn of_replay(replay: ReplayTicket) -> Ticket {
        Ticket {
            subject: Subject::Replay(replay),
        }
    }

    /// Whether it is of an operation of the endpoint with that state.
    pub(super) fn is_of(&self, endpoint: &Arc<EndpointShared>) -> bool {
        match &self.subject {
            Subject::Operation { shared, .. } => Arc::ptr_eq(shared, endpoint),
            Subject::Value { .. } => false,
            #[cfg(feature = "cuda")]
            Subject::Replay(replay) => replay.is_of(endpoint),
        }
    }

    /// How many launches have executed the operation, if a kernel of this library does: one of a graph that the application captured, or of an endpoint whose queues
    /// belong to such graphs, or a wait that memory operations cannot make. A send, a receive or a store was made so often, and a wait has ended so often. None for other operations.
    ///
    /// The status of such an operation is [`Status::Prepared`] before the first launch has executed it, [`Status::Rung`] after that, and
    /// [`Status::Failed`] if a launch did not execute it or its endpoint has failed. One of a graph is never complete, since the next launch executes it again; a send or a receive
    /// is not either, because its completion is that of its wait.
    #[cfg(feature = "cuda")]
    pub fn launches(&self) -> Option<u64> {
        match &self.subject {
            Subject::Replay(replay) => Some(replay.launches()),
            _ => None,
        }
    }

    /// The current status. Processes new completions first, without waiting. If the endpoint has failed just now, it first stops the device,
    /// which takes up to 20 ms: only then is it known which operations were carried out. If the device does not stop within half a second of the
    /// failure, the status is not final yet.
    pub fn status(&self) -> Status {
        self.status_until(u64::MAX)
    }

    /// [`Ticket::status`] without the wait for the device: for a thread that looks at many operations, or holds a lock. While the device of an endpoint that has
    /// failed is being stopped, the status is not final yet. Ask again later.
    pub fn status_now(&self) -> Status {
        self.status_until(0)
    }

    /// [`Ticket::status`], with an earlier end of the wait for the device.
    fn status_until(&self, until_ns: u64) -> Status {
        let (shared, kind, is_wait, count, serial, epoch, cancelled) = match &self.subject {
            Subject::Operation {
                shared,
                kind,
                is_wait,
                count,
                serial,
                epoch,
                cancelled,
            } => (shared, *kind, *is_wait, *count, *serial, *epoch, cancelled),
            Subject::Value { state, .. } => return state.status(),
            #[cfg(feature = "cuda")]
            Subject::Replay(replay) => return replay.status(),
        };
        let (status, failure) = shared
            .is_in(epoch)
            .then(|| shared.status_now(epoch, kind, is_wait, (count, serial), until_ns))
            // If a reset came meanwhile, that has seen a mixture.
            .filter(|_| shared.is_in(epoch))
            .unwrap_or_else(|| shared.status_in_generation(epoch, kind, is_wait, count));
        // After the look at the failure: on an endpoint that has failed nothing is cancelled.
        match cancelled {
            Some(cancelled) if cancelled.load(Ordering::Acquire) => Status::Cancelled,
            _ => status.report(is_wait, failure),
        }
    }

    /// Whether the completion of a work request has come that succeeded, as far as that is known without a look at the device or at a clock. Such a status is
    /// final. False of waits, of values, and of operations that might have been dropped.
    pub(crate) fn has_succeeded(&self) -> bool {
        match &self.subject {
            Subject::Operation {
                shared,
                kind,
                is_wait: false,
                count,
                serial,
                epoch,
                cancelled: None,
            } => shared.has_succeeded(*epoch, *kind, (*count, *serial)),
            _ => false,
        }
    }

    /// Waits in this thread until the operation is complete; `None` means no timeout. Calls the progress function of a device that needs it, and
    /// does not keep the core busy.
    ///
    /// # Errors
    /// As [`Ticket::check`], and [`Error::Timeout`]; the operation goes on then. [`Error::State`] with [`StateKind::Captured`] for an operation that is never complete, see
    /// [`Ticket::is_over`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.has_succeeded() {
            return Ok(());
        }
        self.check_ends()?;
        let progress = || self.progress() | self.look_at_stream();
        let until_ns = now_ns().saturating_add(timeout_ns(timeout));
        let look = || Ok(is_complete(self.status_until(until_ns))?.then_some(()));
        poll_until("the wait for an operation", timeout, progress, look)
    }

    /// Lets the device work within the caller. True: something has changed.
    pub(super) fn progress(&self) -> bool {
        match &self.subject {
            Subject::Operation { shared, .. } => shared.qp.progress(),
            Subject::Value { device, .. } => device.progress(),
            #[cfg(feature = "cuda")]
            Subject::Replay(replay) => replay.progress(),
        }
    }

    /// Executes the stream without a thread that has the operation, if one has.
    pub(super) fn look_at_stream(&self) -> bool {
        match &self.subject {
            Subject::Operation { shared, .. } => shared.look_at_stream(),
            Subject::Value { .. } => false,
            #[cfg(feature = "cuda")]
            Subject::Replay(_) => false,
        }
    }

    /// Fails for an operation that is never complete: one of a graph that the application captured, whose next launch executes it again, or a send, receive or
    /// push that a kernel has executed outside of a capture, whose completion is that of its wait.
    pub(super) fn check_ends(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Subject::Replay(replay) = &self.subject
            && !replay.ends
        {
            is_complete(replay.status())?;
            return Err(Error::state(
                StateKind::Captured,
                "the wait for an operation",
                "a kernel executes it, and it is never complete: the next launch of its graph executes it again, or, outside of a capture, its completion is that of its wait; `Ticket::launches` counts",
            ));
        }
        Ok(())
    }

    /// Whether a stream without a thread has operations of the endpoint, and this one may be one of them that it has not executed.
    pub(super) fn needs_looks(&self) -> bool {
        match &self.subject {
            Subject::Operation { shared, .. } => {
                shared.looked_stream.load(Ordering::Relaxed) != 0
                    && matches!(self.status_now(), Status::Prepared | Status::Queued)
            }
            Subject::Value { .. } => has_own_streams(),
            #[cfg(feature = "cuda")]
            Subject::Replay(_) => false,
        }
    }

    /// Whether the operation is over, with success or not. An operation of a graph that the application captured is never over unless it has failed, because the
    /// next launch executes it again. Neither is a send, a receive or a push of such an endpoint outside of a capture: the ticket of its wait reports the completion.
    pub fn is_over(&self) -> bool {
        matches!(
            self.status(),
            Status::Complete
                | Status::Failed(_)
                | Status::Unknown(_)
                | Status::Discarded
                | Status::Cancelled
        )
    }

    /// Bytes that a receive, a read or an atomic has brought, and the immediate data of a receive; of a wait in a graph that the application captured, those of its last receive. `None` before it is complete, and when the queue has
    /// since used the place again; also for sends, writes, unsignaled work requests and waits, of which the device reports nothing.
    pub fn details(&self) -> Option<(u32, Option<u32>)> {
        let details = self.transfer_details()?;
        Some((details.len_bytes, details.imm))
    }

    /// [`Ticket::details`], with the kind of work request of the peer that took a receive.
    pub fn transfer_details(&self) -> Option<TransferDetails> {
        match &self.subject {
            Subject::Operation {
                shared,
                kind,
                is_wait: false,
                count,
                serial,
                epoch,
                ..
            } if shared.epoch.load(Ordering::Acquire) == *epoch => {
                shared.reap_fully();
                shared.queue(*kind).details(*count, *serial)
            }
            #[cfg(feature = "cuda")]
            Subject::Replay(replay) => replay.details().map(|(len_bytes, imm)| TransferDetails {
                len_bytes,
                imm,
                is_write: false,
            }),
            _ => None,
        }
    }

    /// The status as a result: `Ok(true)` when complete, `Ok(false)` when not yet.
    ///
    /// # Errors
    /// [`Error::Work`] if it failed or its outcome is unknown, [`Error::State`] if it was cancelled or discarded.
    pub fn check(&self) -> Result<bool> {
        is_complete(self.status())
    }

    /// [`Ticket::check`] for threads that look at many tickets: it never waits for the device. While the device of a failed endpoint is being stopped, the
    /// operation is not over yet.
    pub(crate) fn check_now(&self) -> Result<bool> {
        is_complete(self.status_now())
    }
}

/// As [`Ticket::check`].
fn is_complete(status: Status) -> Result<bool> {
    match status {
        Status::Complete => Ok(true),
        Status::Failed(failure) | Status::Unknown(failure) => Err(Error::Work(failure)),
        Status::Discarded => Err(Error::state(
            StateKind::Discarded,
            "ticket",
            "its stream failed or was aborted before it executed the operation",
        )),
        Status::Cancelled => Err(Error::state(
            StateKind::Cancelled,
            "ticket",
            "the operation was dropped before it was given to a stream",
        )),
        Status::Prepared | Status::Queued | Status::Rung => Ok(false),
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("status", &self.status())
            .finish()
    }
}
