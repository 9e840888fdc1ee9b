//! The ticket of a collective operation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::local::LocalEnd;
use crate::endpoint::poll_until;
use crate::message::MessageTicket;
use crate::stream::StreamTurns;
use crate::{Cause, Error, Result, StateKind};

#[derive(Debug, Clone)]
pub(super) enum CollectivePart {
    /// With the peer.
    Message(u32, MessageTicket),
    Local(Arc<LocalEnd>, Option<StreamTurns>),
}

/// Reports how an operation that was launched fares on this rank.
#[derive(Debug, Clone)]
pub struct CollectiveTicket {
    /// In the order in which the stream executes them.
    pub(super) parts: Vec<CollectivePart>,
}

/// What a wait for a ticket is called in errors.
const WAIT: &str = "the wait for a collective operation";

impl CollectiveTicket {
    /// Whether the operation is over on this rank: its memory has the result, and may be changed.
    ///
    /// # Errors
    /// As [`MessageTicket::check`], of the first message that has failed.
    pub fn check(&self) -> Result<bool> {
        for part in &self.parts {
            let is_over = match part {
                CollectivePart::Message(_, ticket) => ticket.check()?.is_some(),
                CollectivePart::Local(end, _) => end.check()?,
            };
            if !is_over {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits in this thread until the operation is over on this rank. `None` waits for ever.
    ///
    /// # Errors
    /// As [`CollectiveTicket::check`], and [`Error::Timeout`]; the operation goes on then.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = || Error::Timeout {
            operation: WAIT,
            timeout: timeout.unwrap_or_default(),
        };
        for part in &self.parts {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match part {
                CollectivePart::Message(_, ticket) => {
                    let waited = ticket.wait(left);
                    waited.map_err(|error| match error {
                        Error::Timeout { .. } => late(),
                        error => error,
                    })?;
                }
                CollectivePart::Local(local, turns) => {
                    let turn = || turns.as_ref().is_some_and(StreamTurns::take);
                    let look = || Ok(local.check()?.then_some(()));
                    let waited = poll_until(WAIT, left, turn, look);
                    waited.map_err(|error| match error {
                        Error::Timeout { .. } => late(),
                        error => error,
                    })?;
                }
            }
        }
        Ok(())
    }

    /// The peer of the first message that has failed, and not only been discarded behind another failure.
    pub fn failed_peer(&self) -> Option<u32> {
        let failures = self.parts.iter().filter_map(|part| match part {
            CollectivePart::Message(peer, ticket) => Some((*peer, ticket.check().err()?)),
            CollectivePart::Local(..) => None,
        });
        let is_behind = |error: &Error| match error {
            Error::Work(failure) => failure.cause == Cause::Discarded,
            Error::State { kind, .. } => *kind == StateKind::Discarded,
            _ => false,
        };
        let first = failures.min_by_key(|(_, error)| is_behind(error));
        first.map(|(peer, _)| peer)
    }
}
