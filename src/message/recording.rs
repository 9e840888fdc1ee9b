//! Messages in graphs: the same operations with each launch, whatever was sent before it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::MessageTicket;
use super::armed::ArmedMark;
use super::batch::OperationBatch;
use super::queue::{MessageQueue, Outgoing, PendingSend, Repeats};
use super::receive::{Receive, Taker};
use super::ticket::MessageReport;
use crate::endpoint::{
    AbortHandle, Control, Endpoint, Prepared, QueueKind, Ticket, stream_post_all,
};
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
    abort: AbortHandle,
    /// Its drop ends the connection if the operations are still prepared then.
    _armed: ArmedMark,
    sending: Option<SendNumbers>,
    receiving: Option<ReceiveNumbers>,
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

/// The numbers of a queue before its messages of a launch were prepared, and how many those are.
#[derive(Debug, Clone, Copy)]
struct SendNumbers {
    sent: u32,
    placed: u32,
    unwaited: u32,
    count: u32,
}

/// The same of receives.
#[derive(Debug, Clone, Copy)]
struct ReceiveNumbers {
    received: u32,
    placed: u32,
    unsignaled: u32,
    uncollected: u32,
    count: u32,
}

/// A message of a recording, until there are tickets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordedMessage(usize);

impl Recording {
    fn queue(&self, id: u64) -> Option<&RecordedQueue> {
        self.queues.iter().find(|queue| queue.id == id)
    }

    /// What is recorded of a queue.
    fn queue_of(&mut self, queue: &MessageQueue) -> &mut RecordedQueue {
        let id = queue.id();
        let found = self.queues.iter().position(|recorded| recorded.id == id);
        let at = found.unwrap_or(self.queues.len());
        if found.is_none() {
            self.queues.push(RecordedQueue {
                id,
                abort: queue.abort_handle(),
                _armed: queue.armed.mark(),
                sending: None,
                receiving: None,
                sends: VecDeque::new(),
                credit: None,
            });
        }
        &mut self.queues[at]
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
            if let Some(before) = &mut queue.sending {
                before.unwaited = 0;
            }
            if let Some(before) = &mut queue.receiving {
                before.uncollected = 0;
            }
        }
        Ok(())
    }

    /// Fails if a message was sent or received behind those that are prepared here: their numbers cannot be given again then.
    ///
    /// # Errors
    /// [`Error::State`].
    pub(crate) fn check_last(&self, parts: &mut dyn RecordingParts) -> Result<()> {
        for recorded in &self.queues {
            if let Some(RecordingPart::Queue(queue)) = parts.part(recorded.id)
                && !recorded.is_last_of(queue)
            {
                return Err(Error::state(
                    StateKind::OutOfOrder,
                    "GraphExec::disarm",
                    "another graph has messages prepared behind those of this one; disarm that one first",
                ));
            }
        }
        Ok(())
    }

    /// Takes the operations back whose endpoints are among `parts`, the newest first. Others are cancelled, and their queues are aborted when this is dropped.
    pub(crate) fn take_back(&mut self, parts: &mut dyn RecordingParts) {
        let pending = self.queues.iter_mut().flat_map(|queue| {
            let waits = queue.sends.drain(..).rev().map(|send| send.wait);
            waits.chain(queue.credit.take())
        });
        let pending: Vec<Prepared> = pending.collect();
        let in_order = self.owed.drain(..).chain(self.batch.prepared.drain(..));
        for prepared in pending.into_iter().chain(in_order.rev()) {
            match parts.part(prepared.endpoint_id()) {
                Some(RecordingPart::Endpoint(endpoint)) => endpoint.rollback(prepared),
                Some(RecordingPart::Queue(queue)) => queue.take_back(prepared),
                None => {}
            }
        }
        self.queues.retain(|recorded| {
            let Some(RecordingPart::Queue(queue)) = parts.part(recorded.id) else {
                return true;
            };
            if recorded.is_last_of(queue) {
                recorded.give_numbers_back(queue);
            } else {
                recorded.abort.abort();
            }
            false
        });
        self.batch.others.clear();
        self.reports.clear();
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

impl RecordedQueue {
    /// Whether the queue has sent and received nothing since.
    fn is_last_of(&self, queue: &MessageQueue) -> bool {
        let is_sent = |it: SendNumbers| queue.sent == it.sent.wrapping_add(it.count);
        let is_received = |it: ReceiveNumbers| queue.received == it.received.wrapping_add(it.count);
        self.sending.is_none_or(is_sent) && self.receiving.is_none_or(is_received)
    }

    fn give_numbers_back(&self, queue: &mut MessageQueue) {
        if let Some(before) = self.sending {
            queue.forget_sent(before.count);
            queue.placed_sent = before.placed;
            queue.unwaited = before.unwaited;
        }
        if let Some(before) = self.receiving {
            queue.forget_received(before.count);
            queue.placed_received = before.placed;
            queue.unsignaled = before.unsignaled;
            queue.uncollected = before.uncollected;
        }
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
        message: Outgoing<'_>,
        recording: &mut Recording,
    ) -> Result<RecordedMessage> {
        self.check_recordable()?;
        let id = self.id();
        let before = SendNumbers {
            sent: self.sent,
            placed: self.placed_sent,
            unwaited: self.unwaited,
            count: 0,
        };
        let recorded = recording.queue(id);
        let is_first = recorded.is_none_or(|recorded| recorded.sending.is_none());
        let mut owed = OperationBatch::default();
        let mut batch = OperationBatch::default();
        let made = self.make_recorded_send(message, is_first, &mut owed, &mut batch);
        let (pending, end) = match made {
            Ok(made) => made,
            Err(error) => {
                self.roll_back(&mut batch);
                self.roll_back(&mut owed);
                self.unwaited = before.unwaited;
                return Err(error);
            }
        };
        let PendingSend {
            wait,
            parts,
            len_bytes,
            held,
            ..
        } = pending;
        self.note_message(held, message.is_placed());
        recording.owed.extend(owed.prepared);
        let index = recording.reports.len();
        let mut report = MessageReport::of_send(parts, len_bytes);
        let count = batch.prepared.len();
        let first = recording.batch.append(batch);
        (first..first + count).for_each(|operation| report.waits_for(operation));
        recording.reports.push(report);
        let recorded = recording.queue_of(self);
        recorded.sending.get_or_insert(before).count += 1;
        recorded.sends.push_back(RecordedSend {
            wait,
            end,
            report: index,
        });
        Ok(RecordedMessage(index))
    }

    fn make_recorded_send(
        &mut self,
        message: Outgoing<'_>,
        is_first: bool,
        owed: &mut OperationBatch,
        batch: &mut OperationBatch,
    ) -> Result<(PendingSend, Option<(Submission, Ticket)>)> {
        if is_first {
            let timeout = self.timeout();
            for _ in 0..self.unwaited {
                let wait = self
                    .endpoint
                    .prepare_wait_cq_for(QueueKind::Send, timeout)?;
                owed.prepared.push(wait);
            }
            self.unwaited = 0;
        }
        let pending = self.make_send(message, Repeats::Always, batch)?;
        match self.make_end(pending.number, pending.held.clone()) {
            Ok(end) => Ok((pending, end)),
            Err(error) => {
                self.endpoint.rollback(pending.wait);
                Err(error)
            }
        }
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
        taker: Taker,
        recording: &mut Recording,
    ) -> Result<RecordedMessage> {
        self.check_recordable()?;
        if taker == Taker::Kernel {
            self.make_result_free(stream)?;
        }
        let id = self.id();
        let before = ReceiveNumbers {
            received: self.received,
            placed: self.placed_received,
            unsignaled: self.unsignaled,
            uncollected: self.uncollected,
            count: 0,
        };
        let recorded = recording.queue(id);
        let is_first = recorded.is_none_or(|recorded| recorded.receiving.is_none());
        let mut owed = OperationBatch::default();
        let mut batch = OperationBatch::default();
        let made = self.make_recorded_receive(slices, taker, is_first, &mut owed, &mut batch);
        let (receive, waits, credit) = match made {
            Ok(made) => made,
            Err(error) => {
                self.roll_back(&mut batch);
                self.roll_back(&mut owed);
                self.uncollected = before.uncollected;
                return Err(error);
            }
        };
        self.note_received(&receive);
        self.unsignaled = 0;
        recording.owed.extend(owed.prepared);
        let recorded = recording.queue_of(self);
        recorded.receiving.get_or_insert(before).count += 1;
        if let Some(last) = recorded.credit.replace(credit) {
            recording.batch.prepared.push(last);
        }
        let first = recording.batch.append(batch);
        let mut report = MessageReport::of_receive(receive.outcome());
        for operation in waits {
            report.waits_for(first + operation);
        }
        let index = recording.reports.len();
        recording.reports.push(report);
        Ok(RecordedMessage(index))
    }

    fn make_recorded_receive(
        &mut self,
        slices: &[Slice<'_>],
        taker: Taker,
        is_first: bool,
        owed: &mut OperationBatch,
        batch: &mut OperationBatch,
    ) -> Result<(Arc<Receive>, Vec<usize>, Prepared)> {
        if is_first {
            self.collect(owed)?;
            self.uncollected = 0;
        }
        let (receive, waits) = self.make_receive(slices, taker, Repeats::Always, batch)?;
        // Prepared now, because the recording may end without the queue; executed before the next receive, or at the end: the stream does not wait for the answer of the peer's NIC.
        let timeout = self.timeout();
        let credit = self.returns.prepare_wait_cq_for(QueueKind::Send, timeout)?;
        Ok((receive, waits, credit))
    }

    /// Records what tells the peer that memory is ready, as [`MessageQueue::prepare_ready`].
    ///
    /// # Errors
    /// As [`MessageQueue::prepare_ready`]. Nothing was recorded then.
    pub(crate) fn record_ready(&mut self, ahead: u32, recording: &mut Recording) -> Result<()> {
        self.check_recordable()?;
        let ready = self.prepare_ready(ahead)?;
        // So that the queue is aborted if the recording is dropped.
        recording.queue_of(self);
        recording.batch.prepared.push(ready);
        Ok(())
    }

    /// Fails for a queue whose operations no graph can have.
    fn check_recordable(&self) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(Error::Work(failure));
        }
        if self.path().control == Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "GraphBuilder",
                "the queue uses the path `sync`, whose doorbells are rung by the calling thread; graphs need another path",
            ));
        }
        Ok(())
    }

    /// Takes a prepared operation back.
    fn take_back(&mut self, prepared: Prepared) {
        let mut one = OperationBatch::default();
        one.prepared.push(prepared);
        self.roll_back(&mut one);
    }
}
