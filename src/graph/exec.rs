//! [`GraphExec`]: launches a recorded graph.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUgraphExec;

use super::member::{GraphMember, Members};
use super::step::{GraphStep, StepReport};
use crate::collective::CollectiveTicket;
use crate::cuda::{CudaStream, InstantiatedGraph};
use crate::endpoint::{Ticket, graph_post_all};
use crate::message::{MessageTicket, OperationBatch, Recording};
use crate::stream::Executor;
use crate::{Error, Result, StateKind};

/// A graph that is launched again and again: recorded by a [`GraphBuilder`](crate::GraphBuilder).
///
/// A launch needs its operations prepared: [`GraphExec::launch`] does both; [`GraphExec::arm`] prepares ahead, while what was launched before
/// is still running, and [`GraphExec::launch_armed`] launches that. The driver executes the launches of one graph one after the other, on
/// whatever streams. How many can be queued depends on the room in the endpoints' queues.
///
/// If it is dropped while launches are queued or running, it is destroyed when they are done.
pub struct GraphExec {
    exec: Arc<InstantiatedGraph>,
    /// Where it was launched last, or recorded.
    stream: CudaStream,
    steps: Vec<GraphStep>,
    /// What is prepared for the next launch.
    recording: Recording,
    reports: Vec<StepReport>,
    is_armed: bool,
    tickets: Vec<Ticket>,
    message_tickets: Vec<MessageTicket>,
    collective_tickets: Vec<CollectiveTicket>,
}

impl GraphExec {
    pub(super) fn new(
        exec: Arc<InstantiatedGraph>,
        stream: CudaStream,
        steps: Vec<GraphStep>,
        recording: Recording,
        reports: Vec<StepReport>,
    ) -> GraphExec {
        GraphExec {
            exec,
            stream,
            steps,
            recording,
            reports,
            is_armed: true,
            tickets: Vec::new(),
            message_tickets: Vec::new(),
            collective_tickets: Vec::new(),
        }
    }

    /// Prepares the operations of the next launch, unless they are prepared, and launches it. `members` contains the endpoints, message queues and communicators that were
    /// recorded, in any order; those that were not recorded are ignored.
    ///
    /// # Errors
    /// Those of [`GraphExec::arm`] and [`GraphExec::launch_armed`]. If the launch was refused, the graph is armed; if it could not be armed, it
    /// is as it was.
    pub fn launch(
        &mut self,
        stream: &CudaStream,
        members: &mut [&mut dyn GraphMember],
    ) -> Result<()> {
        if !self.is_armed {
            self.arm(members)?;
        }
        self.launch_armed(stream)
    }

    /// Prepares the operations of the next launch.
    ///
    /// # Errors
    /// [`Error::State`] if it is armed; [`Error::Foreign`] if a member that was recorded is missing; those of preparing, a full queue for one:
    /// then nothing is prepared.
    pub fn arm(&mut self, members: &mut [&mut dyn GraphMember]) -> Result<()> {
        if self.is_armed {
            return Err(Error::state(
                StateKind::Armed,
                "GraphExec::arm",
                "it is armed",
            ));
        }
        let (recording, reports) = (&mut self.recording, &mut self.reports);
        for step in &self.steps {
            if let Err((error, _)) = step.record(members, &self.stream, recording, reports) {
                recording.take_back(&mut Members(members));
                reports.clear();
                return Err(error);
            }
        }
        recording.finish();
        self.is_armed = true;
        Ok(())
    }

    /// Takes the preparation of the next launch back, so that other work can be posted to the members before it. An operation behind which another one was
    /// prepared since stays in its queue as a no-operation, as with [`Endpoint::rollback`](crate::Endpoint::rollback), and completes under its `wr_id`.
    ///
    /// # Errors
    /// [`Error::Foreign`] if a member that was recorded is missing; [`Error::State`] if another graph has messages of the same queue prepared behind those of this one: nothing has changed then.
    pub fn disarm(&mut self, members: &mut [&mut dyn GraphMember]) -> Result<()> {
        for step in &self.steps {
            step.check_member(members)?;
        }
        self.recording.check_last(&mut Members(members))?;
        self.recording.take_back(&mut Members(members));
        self.reports.clear();
        self.is_armed = false;
        Ok(())
    }

    /// Launches what is armed, once.
    ///
    /// # Errors
    /// [`Error::State`] if it is not armed, or the stream is of another context; [`Error::Work`] if an endpoint has failed; and what the
    /// stream refuses. It is armed as before then.
    pub fn launch_armed(&mut self, stream: &CudaStream) -> Result<()> {
        const OPERATION: &str = "GraphExec::launch";
        if !self.is_armed {
            return Err(Error::state(
                StateKind::NotArmed,
                OPERATION,
                "it is not armed; call `arm`, or `launch`, which arms it",
            ));
        }
        if stream.context().raw() != self.exec.context().raw() {
            return Err(Error::state(
                StateKind::WrongKind,
                OPERATION,
                "the stream is of another context",
            ));
        }
        self.recording.post_owed(stream)?;
        let OperationBatch { prepared, others } = &mut self.recording.batch;
        let posted = graph_post_all(stream.id(), prepared, |turns, batch| {
            let all = OperationBatch::in_order(others, batch.drain(..));
            if !turns.is_empty() {
                stream.submit(turns)?;
            }
            stream.launch_graph(&self.exec, &all)
        })?;
        self.is_armed = false;
        self.stream = stream.clone();
        let messages = self.recording.launched(&posted, stream);
        self.tickets.clear();
        self.message_tickets.clear();
        self.collective_tickets.clear();
        for report in self.reports.drain(..) {
            match report {
                StepReport::Posted(index) => self.tickets.extend(posted.get(index).cloned()),
                StepReport::Value(ticket) => self.tickets.push(ticket),
                StepReport::Message(message) => {
                    let ticket = messages.get(message.index());
                    self.message_tickets.extend(ticket.cloned());
                }
                StepReport::Collective(recorded) => {
                    let ticket = recorded.ticket(&messages, stream);
                    self.collective_tickets.push(ticket);
                }
            }
        }
        Ok(())
    }

    /// Whether the next launch is prepared.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.is_armed
    }

    /// The tickets of the last launch, one for each operation of an endpoint or on a word, in the order of recording. Empty before the first.
    #[must_use]
    pub fn tickets(&self) -> &[Ticket] {
        &self.tickets
    }

    /// The same of its messages, sent and received.
    #[must_use]
    pub fn message_tickets(&self) -> &[MessageTicket] {
        &self.message_tickets
    }

    /// The same of its collective operations.
    #[must_use]
    pub fn collective_tickets(&self) -> &[CollectiveTicket] {
        &self.collective_tickets
    }

    /// The driver's handle. A launch without this library rings doorbells of work that is complete.
    #[must_use]
    pub fn raw(&self) -> CUgraphExec {
        self.exec.raw()
    }
}

impl fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphExec")
            .field("operations", &self.steps.len())
            .field("is_armed", &self.is_armed)
            .finish_non_exhaustive()
    }
}
