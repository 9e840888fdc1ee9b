//! The steps of a graph, which each launch repeats.

use std::time::Duration;

use crate::Result;
use crate::endpoint::{Condition, Endpoint, OperationTemplate, Ticket, value_wait, value_write};
use crate::region::Region;
use crate::stream::Submission;

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
}

impl GraphStep {
    pub(super) fn post(endpoint: &Endpoint, recipe: OperationTemplate) -> GraphStep {
        GraphStep::Post {
            endpoint: endpoint.id(),
            recipe,
        }
    }

    /// The program of a step that is of no endpoint, with its ticket.
    ///
    /// # Errors
    /// Those of [`stream_wait_value32`](crate::stream_wait_value32).
    pub(super) fn value(&self) -> Option<Result<(Submission, Ticket)>> {
        let made = match self {
            GraphStep::Post { .. } => return None,
            GraphStep::Wait {
                region,
                offset,
                condition,
                timeout,
            } => value_wait(region, *offset, *condition, *timeout),
            GraphStep::Write {
                region,
                offset,
                value,
            } => value_write(region, *offset, *value),
        };
        Some(made.map(|(program, owner)| {
            let ticket = Ticket::of_value(&owner);
            let submission = Submission {
                program,
                owner,
                cookie: 0,
            };
            (submission, ticket)
        }))
    }
}
