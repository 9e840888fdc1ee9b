//! Collective operations in graphs.

use std::sync::Arc;

use super::communicator::{Collective, Communicator};
use super::local::LocalEnd;
use super::target::RoundTarget;
use super::ticket::{CollectivePart, CollectiveTicket};
use crate::message::{
    MessageQueue, MessageTicket, Outgoing, RecordedMessage, Recording, RecordingPart,
    RecordingParts, Taker,
};
use crate::region::Slice;
use crate::stream::{Executor, Submission};
use crate::{Error, Result};

/// An operation of a recording, until there are tickets.
#[derive(Default)]
pub(crate) struct RecordedCollective {
    parts: Vec<RecordedPart>,
}

enum RecordedPart {
    Message(u32, RecordedMessage),
    Local(Arc<LocalEnd>),
}

impl RecordedCollective {
    /// Its ticket after a launch on that stream; the recording's messages have these.
    pub(crate) fn ticket(
        self,
        messages: &[MessageTicket],
        stream: &dyn Executor,
    ) -> CollectiveTicket {
        let parts = self.parts.into_iter().filter_map(|part| match part {
            RecordedPart::Message(peer, message) => {
                let ticket = messages.get(message.index())?.clone();
                Some(CollectivePart::Message(peer, ticket))
            }
            RecordedPart::Local(end) => Some(CollectivePart::Local(end, stream.turns())),
        });
        CollectiveTicket {
            parts: parts.collect(),
        }
    }
}

struct InRecording<'a> {
    stream: &'a dyn Executor,
    recording: &'a mut Recording,
}

impl RoundTarget for InRecording<'_> {
    type Sent = RecordedMessage;
    type Part = RecordedPart;

    fn stream(&self) -> &dyn Executor {
        self.stream
    }

    /// A graph's operations are all prepared before the first is executed.
    fn makes_room(&self) -> bool {
        false
    }

    fn ready(&mut self, queue: &mut MessageQueue, ahead: u32) -> Result<()> {
        queue.record_ready(ahead, self.recording)
    }

    fn start_send(
        &mut self,
        queue: &mut MessageQueue,
        message: Outgoing<'_>,
    ) -> Result<RecordedMessage> {
        queue.record_start_send(message, self.recording)
    }

    fn recv(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        slices: &[Slice<'_>],
        is_placed: bool,
    ) -> Result<RecordedPart> {
        let taker = match is_placed {
            true => Taker::Peer,
            false => Taker::Kernel,
        };
        let message = queue.record_recv(self.stream, slices, taker, self.recording)?;
        Ok(RecordedPart::Message(peer, message))
    }

    // A round starts one message with a peer, or several that are waited for in the same order.
    fn wait_send(
        &mut self,
        peer: u32,
        queue: &mut MessageQueue,
        sent: RecordedMessage,
    ) -> Result<RecordedPart> {
        queue.record_wait_send(self.recording);
        Ok(RecordedPart::Message(peer, sent))
    }

    fn local(&mut self, work: Submission, end: Arc<LocalEnd>) -> Result<RecordedPart> {
        self.recording.batch.push(work);
        Ok(RecordedPart::Local(end))
    }
}

impl Communicator {
    /// The number by which graphs know it.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Records an operation.
    ///
    /// # Errors
    /// As [`Communicator::launch`]. If a part was recorded, the second value is true, and the recording is to be taken back.
    pub(crate) fn record(
        &mut self,
        stream: &dyn Executor,
        collective: &Collective,
        recording: &mut Recording,
    ) -> std::result::Result<RecordedCollective, (Error, bool)> {
        self.check_launch(stream, collective)
            .map_err(|error| (error, false))?;
        let mut parts = Vec::new();
        let mut target = InRecording { stream, recording };
        self.give_rounds(&mut target, collective, &mut parts)?;
        Ok(RecordedCollective { parts })
    }
}

impl RecordingParts for Communicator {
    fn part(&mut self, id: u64) -> Option<RecordingPart<'_>> {
        let mut queues = self.queues.iter_mut().flatten();
        let queue = queues.find(|queue| queue.has_endpoint(id))?;
        Some(RecordingPart::Queue(queue))
    }
}
