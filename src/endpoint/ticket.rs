//! What became of a queued operation.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::endpoint::Side;
use crate::endpoint::prepared::PreparedOperation;
use crate::endpoint::queue::OpStatus;
use crate::endpoint::shared::Shared;
use crate::endpoint::value::ValueWait;
use crate::{Error, Result, WorkError};

/// The state of a queued operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// Prepared, and not yet given to a stream.
    Prepared,
    /// In a stream's queue.
    Queued,
    /// The stream has executed the doorbell of a work request; of a wait: the stream waits now.
    Rung,
    /// Done. A receive or a work request is known to be done when its completion, or that of a later one, is there.
    Complete,
    /// It failed, or its endpoint failed first; a wait that was released counts as failed. The error says which.
    Failed(WorkError),
    /// Dropped or rolled back before it was given to a stream.
    Cancelled,
}

#[derive(Clone)]
enum Subject {
    Operation {
        shared: Arc<Shared>,
        side: Side,
        is_wait: bool,
        count: u32,
        serial: u32,
        epoch: u32,
    },
    Value(Arc<ValueWait>),
}

/// A handle of one queued operation. It keeps the endpoint's queue memory alive, and may be kept for as long as one likes.
#[derive(Clone)]
pub struct Ticket {
    subject: Subject,
}

impl Ticket {
    pub(super) fn of_operation(shared: &Arc<Shared>, operation: PreparedOperation) -> Ticket {
        Ticket {
            subject: Subject::Operation {
                shared: Arc::clone(shared),
                side: operation.side,
                is_wait: operation.is_wait(),
                count: operation.count,
                serial: operation.serial,
                epoch: operation.epoch,
            },
        }
    }

    pub(crate) fn of_value(wait: Arc<ValueWait>) -> Ticket {
        Ticket {
            subject: Subject::Value(wait),
        }
    }

    /// The state now. Looks at new completions first, without waiting; unless the endpoint has failed just now. Then
    /// the device is brought to flush first what it was at, 20 ms at most, so that it is not at the memory any more of what is over.
    pub fn status(&self) -> Status {
        let (shared, side, is_wait, count, serial, epoch) = match &self.subject {
            Subject::Operation {
                shared,
                side,
                is_wait,
                count,
                serial,
                epoch,
            } => (shared, *side, *is_wait, *count, *serial, *epoch),
            Subject::Value(wait) => return wait.status(),
        };
        let unknown = WorkError {
            qpn: shared.qp.qpn(),
            wr_id: None,
            cause: crate::Cause::Aborted,
        };
        let now = shared.is_in(epoch).then(|| {
            shared.look_for_failure();
            // Before the last look at completions: what was complete when it failed, is.
            let failure = shared.failure();
            let queue = shared.queue(side);
            let look = || {
                // The caller may know that it is done, from the stream or the peer, while another thread is about to look.
                shared.reap_fully();
                if is_wait {
                    queue.wait_status(count, serial)
                } else {
                    queue.op_status(count, serial, shared.rung(side))
                }
            };
            let mut op_status = look();
            if failure.is_some() && matches!(op_status, OpStatus::Queued | OpStatus::Rung) {
                // The device may still be at it, and do it well.
                shared.break_down_now();
                op_status = look();
            }
            let failure = match op_status {
                // Reaped in that look; where it was a flush, whoever found it may not have said so yet.
                OpStatus::Failed => failure
                    .or_else(|| shared.failure())
                    .or_else(|| queue.has_error().then(|| shared.failure_of_flush(epoch))),
                // The stream is going to get through it.
                OpStatus::Queued | OpStatus::Rung if is_wait && queue.has_succeeded(count) => None,
                _ => failure,
            };
            (op_status, failure)
        });
        // Of a reset meanwhile the above has seen a mixture.
        let now = now.filter(|_| shared.is_in(epoch));
        let (op_status, failure) = now.unwrap_or_else(|| {
            let (op_status, failure) = shared.status_in_generation(epoch, side, is_wait, count);
            (op_status, failure.or(Some(unknown)))
        });
        match (op_status, failure) {
            (OpStatus::Done, _) => Status::Complete,
            (OpStatus::Cancelled, _) => Status::Cancelled,
            (_, Some(failure)) => Status::Failed(failure),
            (OpStatus::Prepared, None) => Status::Prepared,
            (OpStatus::Queued, None) => Status::Queued,
            // A wait was given up, and who did that is about to say why.
            (OpStatus::Rung | OpStatus::Failed, None) => Status::Rung,
        }
    }

    /// Whether it is over, well or not.
    pub fn is_over(&self) -> bool {
        matches!(
            self.status(),
            Status::Complete | Status::Failed(_) | Status::Cancelled
        )
    }

    /// Bytes and immediate data of a work request or receive that is complete; `None` before that, for waits, and when the
    /// queue has since used the place again.
    pub fn details(&self) -> Option<(u32, Option<u32>)> {
        match &self.subject {
            Subject::Operation {
                shared,
                side,
                is_wait: false,
                count,
                serial,
                epoch,
            } if shared.epoch.load(Ordering::Acquire) == *epoch => {
                shared.reap_fully();
                shared
                    .queue(*side)
                    .details(*count, *serial)
                    .map(|(_, len_bytes, imm)| (len_bytes, imm))
            }
            _ => None,
        }
    }

    /// The status as a result: `Ok(true)` when complete, `Ok(false)` when not yet.
    ///
    /// # Errors
    /// [`Error::Work`] if it failed, [`Error::State`] if it was cancelled.
    pub fn check(&self) -> Result<bool> {
        match self.status() {
            Status::Complete => Ok(true),
            Status::Failed(failure) => Err(Error::Work(failure)),
            Status::Cancelled => Err(Error::State {
                operation: "ticket",
                reason: "the operation was dropped before it was given to a stream".into(),
            }),
            Status::Prepared | Status::Queued | Status::Rung => Ok(false),
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("status", &self.status())
            .finish()
    }
}
