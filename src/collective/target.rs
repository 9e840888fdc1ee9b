//! What the rounds of a collective operation are given to: a stream, or a graph.

use std::sync::Arc;

use super::local::LocalEnd;
use super::ticket::CollectivePart;
use crate::Result;
use crate::message::{MessageQueue, Outgoing, PendingSend, Taker};
use crate::region::Slice;
use crate::stream::{Executor, Submission};

/// Takes the messages and the local work of a rank, in order.
pub(super) trait RoundTarget {
    /// A message that was sent, and that nothing waits for yet.
    type Sent;
    /// What a ticket is made of.
    type Part;

    /// The stream that executes it.
    fn stream(&self) -> &dyn Executor;
    /// Whether operations end while others are still to be given, so that their queues have room again.
    fn makes_room(&self) -> bool;
    /// Tells the peer that memory is ready ([`MessageQueue::prepare_ready`]).
    fn ready(&mut self, queue: &mut MessageQueue, ahead: u32) -> Result<()>;
    fn start_send(&mut self, queue: &mut MessageQueue, message: Outgoing<'_>)
    -> Result<Self::Sent>;
    /// With `is_placed` the peer writes the message into place.
    fn recv(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        slices: &[Slice<'_>],
        is_placed: bool,
    ) -> Result<Self::Part>;
    fn wait_send(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        sent: Self::Sent,
    ) -> Result<Self::Part>;
    fn local(&mut self, work: Submission, end: Arc<LocalEnd>) -> Result<Self::Part>;
}

/// A stream executes it, once.
pub(super) struct OnStream<'a>(pub(super) &'a dyn Executor);

impl RoundTarget for OnStream<'_> {
    type Sent = PendingSend;
    type Part = CollectivePart;

    fn stream(&self) -> &dyn Executor {
        self.0
    }

    fn makes_room(&self) -> bool {
        true
    }

    fn ready(&mut self, queue: &mut MessageQueue, ahead: u32) -> Result<()> {
        let ready = queue.prepare_ready(ahead)?;
        queue.post_ready(self.0, ready)
    }

    fn start_send(
        &mut self,
        queue: &mut MessageQueue,
        message: Outgoing<'_>,
    ) -> Result<PendingSend> {
        queue.start(self.0, message)
    }

    fn recv(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        slices: &[Slice<'_>],
        is_placed: bool,
    ) -> Result<CollectivePart> {
        let ticket = match is_placed {
            true => queue.receive(self.0, slices, Taker::Peer),
            false => queue.recv(self.0, slices),
        }?;
        Ok(CollectivePart::Message(peer, ticket))
    }

    fn wait_send(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        sent: PendingSend,
    ) -> Result<CollectivePart> {
        let ticket = queue.wait_send(self.0, sent)?;
        Ok(CollectivePart::Message(peer, ticket))
    }

    fn local(&mut self, work: Submission, end: Arc<LocalEnd>) -> Result<CollectivePart> {
        let given = self.0.submit_one(work);
        given.map_err(|(_, error)| error)?;
        Ok(CollectivePart::Local(end, self.0.turns()))
    }
}
