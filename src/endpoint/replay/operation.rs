//! One operation of a graph, as the words of its kernel; and its ticket.

use std::sync::{Arc, OnceLock};

use super::super::outcome::Status;
use super::super::shared::EndpointShared;
use crate::stream::{Owner, ReplayCell, ReplayEnd, ReplayKeeper, ReplayStream, ReplayWords};
use crate::{Cause, Error, Result, StateKind, WorkError};

/// For errors.
pub(super) const OPERATION: &str = "add an operation to a graph of the application";

/// `enum dbl_replay_kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ReplayKind {
    Send = 1,
    WaitSend = 2,
    Recv = 3,
    WaitRecv = 4,
    Store = 5,
    WaitWord = 6,
    Pages = 7,
}

/// What is the operation's own in `struct dbl_replay`.
pub(super) struct ReplayOperation {
    pub(super) kind: ReplayKind,
    pub(super) timeout_ns: u64,
    pub(super) opcode: u32,
    pub(super) segments: u32,
    pub(super) condition: u32,
    pub(super) is_wide: bool,
    pub(super) words: [u64; 8],
}

/// What it has from elsewhere: the words of the queues, which are 0 for an operation without, and the cell of the send that it waits for.
#[derive(Clone, Copy, Default)]
pub(super) struct ReplayTarget<'a> {
    pub(super) queues: Option<&'a [u64; QUEUE_WORDS]>,
    /// The count of the first receive less that of its completion.
    pub(super) recv_ahead: u32,
    pub(super) awaited: Option<&'a ReplayCell>,
}

/// Words up to `recv_capacity`.
pub(super) const QUEUE_WORDS: usize = 21;

impl ReplayOperation {
    pub(super) fn new(timeout_ns: u64) -> ReplayOperation {
        ReplayOperation {
            kind: ReplayKind::Send,
            timeout_ns,
            opcode: 0,
            segments: 0,
            condition: 0,
            is_wide: false,
            words: [0; 8],
        }
    }

    /// `struct dbl_replay`.
    pub(super) fn words(
        &self,
        target: ReplayTarget<'_>,
        fault: u64,
        cell: &ReplayCell,
    ) -> ReplayWords {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = [0; 37];
        if let Some(queues) = target.queues {
            words[..QUEUE_WORDS].copy_from_slice(queues);
        }
        words[QUEUE_WORDS] = pair(target.recv_ahead, self.kind as u32);
        words[22] = fault;
        words[23] = cell.cell_at();
        words[24] = target.awaited.map_or(0, ReplayCell::cell_at);
        words[25] = cell.report_at();
        words[26] = self.timeout_ns;
        words[27] = pair(self.opcode, self.segments);
        words[28] = pair(self.condition, self.is_wide.into());
        words[29..].copy_from_slice(&self.words);
        words
    }
}

/// The handle of an operation in a graph.
#[derive(Clone)]
pub(in crate::endpoint) struct ReplayTicket {
    shared: Option<Arc<EndpointShared>>,
    epoch: u32,
    cell: Arc<ReplayCell>,
    waits_for_recv: bool,
    /// It is executed once, and over with that.
    pub(in crate::endpoint) ends: bool,
    /// The first final status.
    verdict: Arc<OnceLock<Status>>,
}

impl ReplayTicket {
    pub(super) fn new(
        shared: Option<Arc<EndpointShared>>,
        cell: Arc<ReplayCell>,
        (waits_for_recv, ends): (bool, bool),
    ) -> ReplayTicket {
        ReplayTicket {
            epoch: shared.as_ref().map_or(0, |shared| shared.generation()),
            shared,
            cell,
            waits_for_recv,
            ends,
            verdict: Arc::default(),
        }
    }

    pub(in crate::endpoint) fn progress(&self) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.qp.progress())
    }

    pub(in crate::endpoint) fn launches(&self) -> u64 {
        self.cell.launches()
    }

    /// Bytes and immediate data of the receive that a wait has waited for last.
    pub(in crate::endpoint) fn details(&self) -> Option<(u32, Option<u32>)> {
        let is_received = self.waits_for_recv && self.launches() > 0;
        is_received.then(|| self.cell.details())
    }

    pub(in crate::endpoint) fn is_of(&self, endpoint: &Arc<EndpointShared>) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| Arc::ptr_eq(shared, endpoint))
    }

    /// Whether it has been executed, and the failure.
    pub(in crate::endpoint) fn status(&self) -> Status {
        if let Some(verdict) = self.verdict.get() {
            return *verdict;
        }
        match self.look() {
            passing @ (Status::Prepared | Status::Queued | Status::Rung) => passing,
            last => *self.verdict.get_or_init(|| last),
        }
    }

    fn look(&self) -> Status {
        let shared = self.shared.as_ref();
        let failure = shared.and_then(|shared| {
            shared.look_for_failure();
            shared.failure()
        });
        // Behind the failure, which is of this generation if that is not over.
        let is_current = shared.is_none_or(|shared| shared.is_in(self.epoch));
        let because = |cause| {
            let qpn = shared.map_or(0, |shared| shared.qp.qpn());
            WorkError::new(qpn, None, cause)
        };
        // Before the launches: the kernel has told all when the stream has passed it.
        let end = self.cell.ended();
        let code = self.cell.code();
        if self.ends && self.launches() > 0 {
            return Status::Complete;
        }
        match end {
            ReplayEnd::Discarded => return Status::Discarded,
            ReplayEnd::Lost => return Status::Unknown(because(Cause::Discarded)),
            // The kernel may still find the completion, or the word.
            ReplayEnd::Pending if self.ends => return Status::Prepared,
            ReplayEnd::Untold | ReplayEnd::Pending | ReplayEnd::Passed => {}
        }
        if !is_current {
            return Status::Failed(because(Cause::Aborted));
        }
        if let Some(failure) = failure {
            return Status::Failed(failure);
        }
        if code != 0 {
            return Status::Failed(because(Cause::Discarded));
        }
        match self.launches() {
            0 => Status::Prepared,
            _ => Status::Rung,
        }
    }
}

pub(super) fn refused(reason: impl Into<String>) -> Error {
    Error::state(StateKind::Unsupported, OPERATION, reason.into())
}

/// Queues an operation with its cell, and what the graph keeps for it.
pub(super) fn add(
    stream: &dyn ReplayStream,
    operation: &ReplayOperation,
    target: ReplayTarget<'_>,
    cell: &Arc<ReplayCell>,
    kept: ReplayKeeper,
    endpoint: Option<&Arc<EndpointShared>>,
) -> Result<()> {
    let words: ReplayWords = operation.words(target, stream.fault_word(), cell);
    let endpoint = endpoint.map(|shared| Arc::clone(shared) as Arc<dyn Owner>);
    stream.queue(&words, cell, kept, endpoint)
}
