//! The steps of a graph, which each launch repeats.

use std::sync::Arc;
use std::time::Duration;

use super::member::{self, GraphMember};
use crate::bytecode::Program;
use crate::collective::{Collective, RecordedCollective};
use crate::cuda::CudaStream;
use crate::endpoint::{
    Condition, OperationTemplate, OwnedSlices, Ticket, ValueWait, value_wait, value_write,
};
use crate::message::{Outgoing, RecordedMessage, Recording, Taker};
use crate::region::Region;
use crate::stream::Submission;
use crate::{Error, Result};

/// One operation of a graph.
pub(super) enum GraphStep {
    /// Of the endpoint of that number.
    Post {
        endpoint: u64,
        recipe: OperationTemplate,
    },
    /// A wait for a word.
    Wait {
        region: Region,
        offset: u64,
        condition: Condition,
        timeout: Option<Duration>,
    },
    /// A store to a word.
    Write {
        region: Region,
        offset: u64,
        value: u32,
    },
    /// Of the message queue of that number.
    Message { queue: u64, step: MessageStep },
    /// Of the communicator of that number.
    Collective {
        communicator: u64,
        operation: Box<Collective>,
    },
}

pub(super) enum MessageStep {
    /// Sends and waits.
    Send(OwnedSlices),
    /// Sends.
    Start(OwnedSlices),
    /// Waits for all that were started and not waited for.
    Wait,
    Recv(OwnedSlices),
}

/// What a step's ticket is made of.
pub(super) enum StepReport {
    /// Of the operation with that index.
    Posted(usize),
    Value(Ticket),
    Message(RecordedMessage),
    Collective(RecordedCollective),
}

/// An error, and whether a part of the step was recorded before it.
pub(super) type StepError = (Error, bool);

impl GraphStep {
    /// Fails if what it belongs to is not among the members.
    pub(super) fn check_member(&self, members: &mut [&mut dyn GraphMember]) -> Result<()> {
        match self {
            GraphStep::Post { endpoint, .. } => member::endpoint(members, *endpoint).map(drop),
            GraphStep::Message { queue, .. } => member::queue(members, *queue).map(drop),
            GraphStep::Collective { communicator, .. } => {
                member::communicator(members, *communicator).map(drop)
            }
            GraphStep::Wait { .. } | GraphStep::Write { .. } => Ok(()),
        }
    }

    /// Prepares the step once more.
    ///
    /// # Errors
    /// Those of the operation; [`Error::Foreign`] if what it belongs to is not among the members.
    pub(super) fn record(
        &self,
        members: &mut [&mut dyn GraphMember],
        stream: &CudaStream,
        recording: &mut Recording,
        reports: &mut Vec<StepReport>,
    ) -> std::result::Result<(), StepError> {
        let whole = |error| (error, false);
        match self {
            GraphStep::Post { endpoint, recipe } => {
                let endpoint = member::endpoint(members, *endpoint).map_err(whole)?;
                let prepared = recipe.prepare(endpoint).map_err(whole)?;
                reports.push(StepReport::Posted(recording.batch.prepared.len()));
                recording.batch.prepared.push(prepared);
            }
            GraphStep::Wait {
                region,
                offset,
                condition,
                timeout,
            } => {
                let made = value_wait(region, *offset, *condition, *timeout).map_err(whole)?;
                value(made, recording, reports);
            }
            GraphStep::Write {
                region,
                offset,
                value: word,
            } => {
                let made = value_write(region, *offset, *word).map_err(whole)?;
                value(made, recording, reports);
            }
            GraphStep::Message { queue, step } => {
                let queue = member::queue(members, *queue).map_err(whole)?;
                let message = match step {
                    MessageStep::Send(slices) => {
                        let sent = slices.with(|slices| {
                            queue.record_start_send(Outgoing::Slot(slices), recording)
                        });
                        let sent = sent.map_err(whole)?;
                        // Those that were started before are waited for first, in order.
                        while queue.record_wait_send(recording) {}
                        sent
                    }
                    MessageStep::Start(slices) => slices
                        .with(|slices| queue.record_start_send(Outgoing::Slot(slices), recording))
                        .map_err(whole)?,
                    MessageStep::Wait => {
                        while queue.record_wait_send(recording) {}
                        return Ok(());
                    }
                    MessageStep::Recv(slices) => slices
                        .with(|slices| queue.record_recv(stream, slices, Taker::Kernel, recording))
                        .map_err(whole)?,
                };
                reports.push(StepReport::Message(message));
            }
            GraphStep::Collective {
                communicator,
                operation,
            } => {
                let communicator = member::communicator(members, *communicator).map_err(whole)?;
                let recorded = communicator.record(stream, operation, recording)?;
                reports.push(StepReport::Collective(recorded));
            }
        }
        Ok(())
    }
}

/// Adds a program that is of no endpoint.
fn value(
    (program, owner): (Program, Arc<ValueWait>),
    recording: &mut Recording,
    reports: &mut Vec<StepReport>,
) {
    reports.push(StepReport::Value(Ticket::of_value(&owner)));
    recording.batch.push(Submission {
        program,
        owner,
        cookie: 0,
    });
}
