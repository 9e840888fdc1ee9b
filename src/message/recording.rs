//! Messages in graphs: the same operations with each launch, whatever was sent before it.

use std::collections::VecDeque;

use super::MessageTicket;
use super::batch::OperationBatch;
use super::queue::{MessageQueue, PendingSend, Repeats};
use super::ticket::MessageReport;
use crate::endpoint::{AbortHandle, Endpoint, Prepared, QueueKind, Ticket, stream_post_all};
use crate::region::Slice;
use crate::stream::{Executor, Submission};
use crate::{Error, Result, StateKind};

/// The operations of one launch of a graph: those of endpoints, of message queues, and other programs.
///
/// If it is dropped with operations of message queues, those queues are aborted: the peers wait for messages that are not sent any more.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) batch: OperationBatch,
    /// Waits for completions of earlier work that nobody has waited for, in front of all.
    owed: Vec<Prepared>,
    queues: Vec<RecordedQueue>,
    reports: Vec<MessageReport>,
}

struct RecordedQueue {
    id: u64,
    before: QueueNumbers,
    abort: AbortHandle,
    /// Messages whose wait is not recorded yet.
    sends: VecDeque<RecordedSend>,
    /// The wait for the completion of the last credit.
    credit: Option<Prepared>,
}

struct RecordedSend {
    wait: Prepared,
    end: Option<(Submission, Ticket)>,
    report: usize,
}

/// The numbers of a queue before its operations of a launch were prepared.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueNumbers {
    pub(super) sent: u32,
    pub(super) received: u32,
    pub(super) unsignaled: u32,
    pub(super) uncollected: u32,
    pub(super) unwaited: u32,
}

/// A message of a recording, until there are tickets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordedMessage(usize);

impl Recording {
    fn queue(&mut self, id: u64) -> Option<&mut RecordedQueue> {
        self.queues.iter_mut().find(|queue| queue.id == id)
    }

    /// Adds the waits that no step has added: for the messages that were started, and for the last credits.
    pub(crate) fn finish(&mut self) {
        let Recording {
            batch,
            queues,
            reports,
            ..
        } = self;
        for queue in queues {
            for send in queue.sends.drain(..) {
                send.end_in(batch, reports);
            }
            batch.prepared.extend(queue.credit.take());
        }
    }

    /// Queues the waits that come before the graph.
    ///
    /// # Errors
    /// As [`stream_post_all`].
    pub(crate) fn post_owed(&mut self, stream: &dyn Executor) -> Result<()> {
        if self.owed.is_empty() {
            return Ok(());
        }
        stream_post_all(stream, &mut self.owed)?;
        for queue in &mut self.queues {
            (queue.before.unwaited, queue.before.uncollected) = (0, 0);
        }
        Ok(())
    }

    /// Takes the operations back whose endpoints are among `parts`, the newest first. Returns whether those were all. Others are cancelled, and their
    /// queues are aborted when this is dropped.
    pub(crate) fn take_back(&mut self, parts: &mut dyn RecordingParts) -> bool {
        let pending = self.queues.iter_mut().flat_map(|queue| {
            let waits = queue.sends.drain(..).rev().map(|send| send.wait);
            waits.chain(queue.credit.take())
        });
        let pending: Vec<Prepared> = pending.collect();
        let in_order = self.owed.drain(..).chain(self.batch.prepared.drain(..));
        let mut is_all = true;
        for prepared in pending.into_iter().chain(in_order.rev()) {
            match parts.part(prepared.endpoint_id()) {
                Some(RecordingPart::Endpoint(endpoint)) => endpoint.rollback(prepared),
                Some(RecordingPart::Queue(queue)) => queue.take_back(prepared),
                None => is_all = false,
            }
        }
        self.queues.retain(|recorded| {
            let Some(RecordingPart::Queue(queue)) = parts.part(recorded.id) else {
                return true;
            };
            queue.set_numbers(recorded.before);
            false
        });
        self.batch.others.clear();
        self.reports.clear();
        is_all && self.queues.is_empty()
    }

    /// Takes back what was added since there were so many operations and other programs. These are of endpoints.
    pub(crate) fn take_back_last(
        &mut self,
        (operations, others): (usize, usize),
        parts: &mut dyn RecordingParts,
    ) {
        self.batch.others.truncate(others);
        while self.batch.prepared.len() > operations
            && let Some(prepared) = self.batch.prepared.pop()
        {
            if let Some(RecordingPart::Endpoint(endpoint)) = parts.part(prepared.endpoint_id()) {
                endpoint.rollback(prepared);
            }
        }
    }

    /// The tickets of the messages, after a launch on that stream: the operations have these, in order, and belong to the stream now.
    pub(crate) fn launched(
        &mut self,
        posted: &[Ticket],
        stream: &dyn Executor,
    ) -> Vec<MessageTicket> {
        self.queues.clear();
        self.batch.others.clear();
        let reports = self.reports.drain(..);
        reports
            .map(|report| report.ticket(posted, stream.turns()))
            .collect()
    }
}

/// Where an operation of a recording goes back to.
pub(crate) enum RecordingPart<'a> {
    Endpoint(&'a mut Endpoint),
    Queue(&'a mut MessageQueue),
}

/// What has the endpoints of a recording.
pub(crate) trait RecordingParts {
    /// What has the endpoint of that number.
    fn part(&mut self, id: u64) -> Option<RecordingPart<'_>>;
}

impl RecordingParts for MessageQueue {
    fn part(&mut self, id: u64) -> Option<RecordingPart<'_>> {
        self.has_endpoint(id).then_some(RecordingPart::Queue(self))
    }
}

impl RecordedMessage {
    /// Its place among the tickets of [`Recording::launched`].
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

impl RecordedSend {
    fn end_in(self, batch: &mut OperationBatch, reports: &mut [MessageReport]) {
        let index = batch.prepared.len();
        batch.prepared.push(self.wait);
        let after = self.end.map(|(end, ticket)| (batch.push(end), ticket).1);
        if let Some(report) = reports.get_mut(self.report) {
            report.ends(index, after);
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        for queue in &self.queues {
            queue.abort.abort();
        }
    }
}

impl MessageQueue {
    /// The number by which graphs know it.
    pub(crate) fn id(&self) -> u64 {
        self.endpoint.id()
    }

    /// Whether one of its endpoints has that number.
    pub(crate) fn has_endpoint(&self, id: u64) -> bool {
        self.endpoint.id() == id || self.returns.id() == id
    }

    /// Records a message whose wait is recorded later.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`]. Nothing was recorded then.
    pub(crate) fn record_start_send(
        &mut self,
        slices: &[Slice<'_>],
        recording: &mut Recording,
    ) -> Result<RecordedMessage> {
        self.enter(recording)?;
        let mut batch = OperationBatch::default();
        let made = self.make_send(slices, Repeats::Always, &mut batch);
        let PendingSend {
            wait,
            parts,
            number,
            len_bytes,
            held,
        } = self.or_roll_back(&mut batch, made)?;
        let end = match self.make_end(number, held.clone()) {
            Ok(end) => end,
            Err(error) => {
                self.endpoint.rollback(wait);
                self.roll_back(&mut batch);
                return Err(error);
            }
        };
        self.note_message(held);
        let report = recording.reports.len();
        let mut made = MessageReport::of_send(parts, len_bytes);
        let count = batch.prepared.len();
        let before = recording.batch.append(batch);
        (before..before + count).for_each(|index| made.waits_for(index));
        recording.reports.push(made);
        if let Some(recorded) = recording.queue(self.endpoint.id()) {
            recorded.sends.push_back(RecordedSend { wait, end, report });
        }
        Ok(RecordedMessage(report))
    }

    /// Records the wait for the oldest message that has none. Returns false if there is no such message.
    pub(crate) fn record_wait_send(&self, recording: &mut Recording) -> bool {
        let Recording {
            batch,
            queues,
            reports,
            ..
        } = recording;
        let recorded = queues.iter_mut().find(|queue| queue.id == self.id());
        let Some(send) = recorded.and_then(|queue| queue.sends.pop_front()) else {
            return false;
        };
        send.end_in(batch, reports);
        true
    }

    /// Records a receive.
    ///
    /// # Errors
    /// As [`MessageQueue::recv`]. Nothing was recorded then.
    pub(crate) fn record_recv(
        &mut self,
        stream: &dyn Executor,
        slices: &[Slice<'_>],
        recording: &mut Recording,
    ) -> Result<RecordedMessage> {
        self.enter(recording)?;
        self.make_result_free(stream)?;
        let mut batch = OperationBatch::default();
        let made = self.make_receive(slices, true, Repeats::Always, &mut batch);
        let (receive, waits) = self.or_roll_back(&mut batch, made)?;
        let timeout = self.timeout();
        // Prepared now, because the recording may end without the queue; executed before the next receive, or at the end: the stream does not wait for the answer of the peer's NIC.
        let credit = self.returns.prepare_wait_cq_for(QueueKind::Send, timeout);
        let credit = self.or_roll_back(&mut batch, credit)?;
        self.note_kernel(&receive);
        self.received = self.received.wrapping_add(1);
        self.unsignaled = 0;
        if let Some(recorded) = recording.queue(self.endpoint.id())
            && let Some(last) = recorded.credit.replace(credit)
        {
            recording.batch.prepared.push(last);
        }
        let before = recording.batch.append(batch);
        let mut report = MessageReport::of_receive(receive.outcome());
        for index in waits {
            report.waits_for(before + index);
        }
        let index = recording.reports.len();
        recording.reports.push(report);
        Ok(RecordedMessage(index))
    }

    /// The queue's first operation of a launch: what comes before must not change what the launch executes.
    fn enter(&mut self, recording: &mut Recording) -> Result<()> {
        let id = self.endpoint.id();
        if recording.queue(id).is_some() {
            return Ok(());
        }
        if let Some(failure) = self.failure() {
            return Err(Error::Work(failure));
        }
        let before = self.numbers();
        let mut owed = OperationBatch::default();
        let made = self.make_owed(&mut owed);
        self.or_roll_back(&mut owed, made)?;
        (self.unwaited, self.uncollected) = (0, 0);
        recording.owed.extend(owed.prepared);
        recording.queues.push(RecordedQueue {
            id,
            before,
            abort: self.abort_handle(),
            sends: VecDeque::new(),
            credit: None,
        });
        Ok(())
    }

    fn make_owed(&mut self, owed: &mut OperationBatch) -> Result<()> {
        if self.path().control == crate::Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "GraphBuilder",
                "the queue uses the path `sync`, whose doorbells are rung by the calling thread; graphs need another path",
            ));
        }
        let timeout = self.timeout();
        for _ in 0..self.unwaited {
            let wait = self
                .endpoint
                .prepare_wait_cq_for(QueueKind::Send, timeout)?;
            owed.prepared.push(wait);
        }
        self.collect(owed)
    }

    /// Takes a prepared operation back.
    fn take_back(&mut self, prepared: Prepared) {
        let mut one = OperationBatch::default();
        one.prepared.push(prepared);
        self.roll_back(&mut one);
    }
}
