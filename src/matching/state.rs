//! What the ticket, the stream and the thread of the matcher share of a receive.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::Envelope;
use super::words::WordPlace;
use super::{Source, TagSelector};
use crate::region::{Region, Slice};
use crate::{Error, Result, StateKind};

/// What the errors of a receive name.
pub(super) const RECEIVE: &str = "receive a message";

/// The state of a receive.
#[derive(Debug, Default)]
pub(super) struct ReceiveState {
    /// Its number among the receives of the matcher, once the thread has posted it.
    number: OnceLock<u64>,
    outcome: OnceLock<Result<Envelope>>,
    /// No stream is in it, or comes to it.
    is_over: AtomicBool,
    /// The stream does not execute what is behind it: it has failed, or was aborted.
    is_given_up: AtomicBool,
}

impl ReceiveState {
    /// Of a receive by a thread, which no stream has.
    pub(super) fn of_thread() -> ReceiveState {
        let state = ReceiveState::default();
        state.leave_stream();
        state
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.number.get().copied()
    }

    pub(super) fn set_number(&self, number: u64) {
        let _ = self.number.set(number);
    }

    pub(super) fn outcome(&self) -> Option<&Result<Envelope>> {
        self.outcome.get()
    }

    /// Only the first counts.
    pub(super) fn end(&self, outcome: Result<Envelope>) {
        let _ = self.outcome.set(outcome);
    }

    /// The outcome, if the stream is done with the receive, too: so that a thread that has it also finds the fault of the stream.
    pub(super) fn settled(&self) -> Option<&Result<Envelope>> {
        // Acquire: what the stream has reported before.
        self.is_over
            .load(Ordering::Acquire)
            .then(|| self.outcome())?
    }

    pub(super) fn leave_stream(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }
}

/// A part of the memory of a receive.
pub(super) struct TargetPart {
    pub(super) region: Region,
    pub(super) offset: u64,
    pub(super) len_bytes: u32,
}

impl TargetPart {
    pub(super) fn of(slice: &Slice<'_>) -> TargetPart {
        TargetPart {
            region: slice.region.clone(),
            offset: slice.offset,
            len_bytes: slice.len_bytes,
        }
    }

    pub(super) fn slice(&self) -> Slice<'_> {
        Slice {
            region: &self.region,
            offset: self.offset,
            len_bytes: self.len_bytes,
        }
    }
}

/// A receive on its way to the thread.
pub(super) struct PostedReceive {
    pub(super) source: Source,
    pub(super) tag: TagSelector,
    pub(super) target: Vec<TargetPart>,
    /// Length of the target.
    pub(super) capacity: u64,
    /// Of one on a stream.
    pub(super) place: Option<Arc<WordPlace>>,
    pub(super) state: Arc<ReceiveState>,
}

/// Why a receive without a message ends with its stream.
pub(super) fn discarded() -> Error {
    Error::state(
        StateKind::Discarded,
        RECEIVE,
        "its stream failed or was aborted before the receive was over",
    )
}
