//! Operations as nodes of graphs that the application captures and launches by itself.
//!
//! No call of this library comes between the launches of such a graph, so nothing can be prepared for them here. Each operation is a kernel of one thread,
//! which finds in memory how far the queues are: `include/doorbell/detail/replay.h`. From the first such operation on, the queues of the endpoint are
//! those of the kernels, until a reset.

mod images;
pub(super) mod operation;
pub(super) mod pages;
pub(super) mod queues;
pub(super) mod word;

use std::sync::Arc;
use std::time::Duration;

use super::post::Endpoint;
use super::shared::timeout_ns;
use super::{QueueKind, Ticket, Work};
use crate::region::Slice;
use crate::stream::{Executor, ReplayStream};
use crate::{Cause, Error, Result, StateKind};
use operation::{ReplayKind, ReplayOperation, refused};
use queues::ReplayQueues;

impl Endpoint {
    /// What the stream offers, if this operation is to be one of a graph: the application captures the stream, or the queues of this endpoint are those of
    /// graphs already. Called when the operation could not be queued otherwise.
    #[cold]
    pub(super) fn replays<'s>(
        &self,
        stream: &'s dyn Executor,
    ) -> Result<Option<&'s dyn ReplayStream>> {
        let Some(stream) = stream.replays() else {
            return Ok(None);
        };
        let is_replayed = self.replay.is_some() || stream.capture()?.is_some();
        Ok(is_replayed.then_some(stream))
    }

    /// Adds a send, write, read or atomic.
    pub(super) fn replay_send(
        &mut self,
        stream: &dyn ReplayStream,
        work: &Work<'_>,
    ) -> Result<Ticket> {
        let requests = self.send_images(work)?;
        let held = self.held_of(work);
        let (capture, timeout) = (stream.capture()?, self.config.wait_timeout);
        let replay = self.take_queues(stream)?;
        for region in &held {
            replay.hold(region)?;
        }
        let cells = requests.iter().map(|_| stream.cells().take(stream));
        let cells = cells.collect::<Result<Vec<_>>>()?;
        let mut ticket = None;
        for ((image, segments, is_last), cell) in requests.into_iter().zip(cells) {
            let signaled = is_last && work.signaled;
            let [first, words @ ..] = image;
            let operation = ReplayOperation {
                kind: ReplayKind::Send,
                opcode: u32::from_be(first as u32) & 0xff,
                segments,
                words: [&words[..], &[0]].concat().try_into().unwrap_or_default(),
                ..ReplayOperation::new(timeout_ns(timeout))
            };
            let cell = Arc::new(cell);
            let queued = replay.queue(stream, &operation, &cell, None);
            if let Err(error) = queued {
                if ticket.is_some() {
                    // Requests of this work are queued already. They must not transmit a part of it, also if the graph is launched at once.
                    self.fail(Cause::Discarded);
                    self.await_stop();
                }
                return Err(error);
            }
            if signaled {
                replay.expect(capture, &cell);
            }
            ticket = Some(Ticket::of_replay(replay.ticket(cell, (false, false))));
        }
        // There is at least one request.
        ticket.ok_or_else(|| refused("the work has no request"))
    }

    /// Adds a receive.
    pub(super) fn replay_recv(
        &mut self,
        stream: &dyn ReplayStream,
        slices: &[Slice<'_>],
    ) -> Result<Ticket> {
        let (words, segments) = self.recv_image(slices)?;
        let timeout = self.config.wait_timeout;
        let replay = self.take_queues(stream)?;
        for slice in slices {
            replay.hold(slice.region)?;
        }
        let operation = ReplayOperation {
            kind: ReplayKind::Recv,
            segments,
            words,
            ..ReplayOperation::new(timeout_ns(timeout))
        };
        let cell = Arc::new(stream.cells().take(stream)?);
        replay.queue(stream, &operation, &cell, None)?;
        Ok(Ticket::of_replay(replay.ticket(cell, (false, false))))
    }

    /// Adds a wait for a completion.
    pub(super) fn replay_wait_cq(
        &mut self,
        stream: &dyn ReplayStream,
        kind: QueueKind,
        timeout: Option<Duration>,
    ) -> Result<Ticket> {
        self.check_alive()?;
        let capture = stream.capture()?;
        let replay = self.take_queues(stream)?;
        let awaited = match kind {
            QueueKind::Send => Some(replay.next_unwaited(capture)?),
            QueueKind::Recv => None,
        };
        let operation = ReplayOperation {
            kind: match kind {
                QueueKind::Send => ReplayKind::WaitSend,
                QueueKind::Recv => ReplayKind::WaitRecv,
            },
            ..ReplayOperation::new(timeout_ns(timeout))
        };
        let cell = Arc::new(stream.cells().take(stream)?);
        replay.queue(stream, &operation, &cell, awaited.clone())?;
        // Not before: what was refused has left the send to the next wait.
        if let Some(send) = &awaited {
            replay.has_wait(send);
        }
        Ok(Ticket::of_replay(replay.ticket(
            cell,
            (kind == QueueKind::Recv, capture.is_none()),
        )))
    }

    /// The queues as those of graphs.
    fn take_queues(&mut self, stream: &dyn ReplayStream) -> Result<&mut ReplayQueues> {
        if self.replay.is_none() {
            let send = self.take_send_queue(false)?;
            let recv = self.take_recv_queue()?;
            let queues = ReplayQueues::new(send, recv, stream)?;
            self.replay = Some(Box::new(queues));
        }
        let Some(replay) = &mut self.replay else {
            return Err(refused("the queues are not there"));
        };
        replay.check_context(stream)?;
        Ok(replay)
    }

    /// Gives the queues back, for a reset.
    ///
    /// # Errors
    /// [`Error::State`] while there is a graph with operations of this endpoint.
    pub(super) fn end_replays(&mut self) -> Result<()> {
        let Some(replay) = self.replay.take() else {
            return Ok(());
        };
        match replay.end() {
            Ok(()) => Ok(()),
            Err(replay) => {
                self.replay = Some(replay);
                Err(Error::state(
                    StateKind::KernelsOwnQueue,
                    "reset",
                    "graphs of the application have operations of this endpoint; destroy them and what was instantiated of them first",
                ))
            }
        }
    }
}
