//! The transitions of an operation: what a completion proves, and what a ticket reports. `docs/outcomes.md` describes the model, and
//! `endpoint/tests/outcomes.rs` explores it with these transitions.

use crate::{Cause, WorkError};

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
    /// It failed, or its endpoint failed before it was rung; a wait that was released counts as failed. The error says which.
    Failed(WorkError),
    /// It was rung, the endpoint failed with this error, and no completion tells whether it was carried out: it may have been, wholly or
    /// in part.
    Unknown(WorkError),
    /// It was not rung, and never will be: its stream had failed or was aborted, and did not execute it or an earlier operation of its endpoint.
    Discarded,
    /// Dropped or rolled back before it was given to a stream.
    Cancelled,
}

/// What a receive, a read or an atomic has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferDetails {
    /// Bytes. Of a receive that a write with immediate data took, the length of the write.
    pub len_bytes: u32,
    /// Immediate data, if the peer sent some.
    pub imm: Option<u32>,
    /// Whether a write with immediate data took the receive. False for operations of a graph that the application captured.
    pub is_write: bool,
}

/// What the queue records of a work request. The poster writes `Posted` and `Cancelled`, the stream `Discarded`, the reaper the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RequestState {
    /// In the queue. The count of executed doorbells says whether it was rung.
    Posted,
    /// Dropped or taken back before a stream had it: a no-operation stands in its place.
    Cancelled,
    /// Its stream had failed, and did not execute its doorbell.
    Discarded,
    /// A completion proves that it was carried out.
    Succeeded,
    /// Its own completion is in error.
    Failed,
    /// It was rung, and its completion was flushed away with the queue: it may have been carried out.
    Unproven,
}

/// What a completion of the device says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Evidence {
    /// The request was carried out.
    Success,
    /// The request failed.
    Error,
    /// The queue pair was in error when the request's turn came.
    Flush,
}

/// The state of the device behind a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceState {
    /// It works, or it is not known yet whether it is stopped.
    Open,
    /// It executes nothing more.
    Stopped,
    /// It could not be stopped, and may execute what streams have.
    Unresponsive,
}

impl RequestState {
    /// The state after the request's own completion.
    pub fn after_own(self, evidence: Evidence) -> RequestState {
        match (self, evidence) {
            // The no-operation in its place was completed.
            (RequestState::Cancelled, _) => RequestState::Cancelled,
            (_, Evidence::Success) => RequestState::Succeeded,
            // It was never rung: the device flushed a request that only a later doorbell released.
            (RequestState::Discarded, _) => RequestState::Discarded,
            (_, Evidence::Error | Evidence::Flush) => RequestState::Failed,
        }
    }

    /// The state after the completion of a later request of the same queue, without one of its own.
    pub fn after_later(self, evidence: Evidence) -> RequestState {
        match (self, evidence) {
            (RequestState::Cancelled | RequestState::Discarded, _) => self,
            // A reliable connection carries requests out in order. A request can only fail in its turn, after those before it.
            (_, Evidence::Success | Evidence::Error) => RequestState::Succeeded,
            // The queue pair failed at an unknown place before the flushed request.
            (_, Evidence::Flush) => RequestState::Unproven,
        }
    }

    /// How the request stands in its queue, whose device is or is not stopped. `is_rung` and `is_queued` as of [`RequestState::status`].
    pub fn status_in(self, queue: DeviceState, is_rung: bool, is_queued: bool) -> OpStatus {
        match (queue, self) {
            // A later doorbell would release it, too. Only a device that is stopped executes none.
            (DeviceState::Open, RequestState::Discarded) => OpStatus::Queued,
            (DeviceState::Unresponsive, RequestState::Discarded) => OpStatus::Unknown,
            // Its doorbell may be executed later.
            (DeviceState::Unresponsive, _) => self.status(is_queued, is_queued),
            _ => self.status(is_rung, is_queued),
        }
    }

    /// How the request stands in its queue. `is_rung`: its doorbell was executed; `is_queued`: a stream has its doorbell.
    pub fn status(self, is_rung: bool, is_queued: bool) -> OpStatus {
        match self {
            RequestState::Cancelled => OpStatus::Cancelled,
            RequestState::Succeeded => OpStatus::Done,
            RequestState::Failed => OpStatus::Failed,
            RequestState::Unproven => OpStatus::Unknown,
            RequestState::Discarded => OpStatus::Discarded,
            _ if is_rung => OpStatus::Rung,
            RequestState::Posted if is_queued => OpStatus::Queued,
            RequestState::Posted => OpStatus::Prepared,
        }
    }

    pub(super) fn from_byte(byte: u8) -> RequestState {
        const STATES: [RequestState; 6] = [
            RequestState::Posted,
            RequestState::Cancelled,
            RequestState::Discarded,
            RequestState::Succeeded,
            RequestState::Failed,
            RequestState::Unproven,
        ];
        STATES
            .get(usize::from(byte))
            .copied()
            .unwrap_or(RequestState::Failed)
    }
}

/// How an operation stands in its own queue, apart from the failure of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpStatus {
    Prepared,
    Queued,
    Rung,
    Done,
    Failed,
    Unknown,
    Discarded,
    Cancelled,
}

impl OpStatus {
    /// What a ticket reports. `failure`: that of the endpoint, once the device writes no more completions.
    pub fn report(self, is_wait: bool, failure: Option<WorkError>) -> Status {
        match (self, failure) {
            (OpStatus::Done, _) => Status::Complete,
            (OpStatus::Cancelled, _) => Status::Cancelled,
            (OpStatus::Discarded, _) => Status::Discarded,
            // The failure is that an operation before this one was discarded. A request that failed or was rung says so.
            (status, Some(failure))
                if failure.cause == Cause::Discarded
                    && (is_wait || matches!(status, OpStatus::Queued | OpStatus::Prepared)) =>
            {
                Status::Discarded
            }
            // A failure was found, and its finder is about to record the cause.
            (OpStatus::Failed | OpStatus::Unknown | OpStatus::Rung, None) => Status::Rung,
            (OpStatus::Queued, None) => Status::Queued,
            (OpStatus::Prepared, None) => Status::Prepared,
            // Rung, and no completion will come.
            (OpStatus::Rung, Some(failure)) if !is_wait => Status::Unknown(failure),
            (OpStatus::Unknown, Some(failure)) => Status::Unknown(failure),
            // A doorbell that was not rung before the queue pair was in error transmits nothing.
            (
                OpStatus::Failed | OpStatus::Rung | OpStatus::Queued | OpStatus::Prepared,
                Some(failure),
            ) => Status::Failed(failure),
        }
    }
}
