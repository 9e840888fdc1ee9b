//! The ticket of a collective operation.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::local::LocalEnd;
use crate::endpoint::{Awaited, TicketFuture, notify, poll_until};
use crate::message::MessageTicket;
use crate::stream::StreamTurns;
use crate::{Cause, Error, Result, StateKind};

#[derive(Debug, Clone)]
pub(super) enum CollectivePart {
    /// With the peer.
    Message(u32, MessageTicket),
    Local(Arc<LocalEnd>, Option<StreamTurns>),
}

impl CollectivePart {
    fn check(&self) -> Result<bool> {
        match self {
            CollectivePart::Message(_, ticket) => ticket.check().map(|len| len.is_some()),
            CollectivePart::Local(end, _) => end.check(),
        }
    }

    fn check_now(&self) -> Result<bool> {
        match self {
            CollectivePart::Message(_, ticket) => ticket.check_now().map(|len| len.is_some()),
            CollectivePart::Local(end, _) => end.check(),
        }
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        match self {
            CollectivePart::Message(_, ticket) => ticket.wait(timeout).map(drop),
            CollectivePart::Local(end, turns) => {
                let turn = || turns.as_ref().is_some_and(StreamTurns::take);
                let look = || Ok(end.check()?.then_some(()));
                poll_until(WAIT, timeout, turn, look)
            }
        }
    }
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
    /// As [`MessageTicket::check`], of the first message that has failed. All parts are over then: no peer writes the memory any more.
    pub fn check(&self) -> Result<bool> {
        self.check_by(CollectivePart::check)
    }

    fn check_by(&self, check: impl Fn(&CollectivePart) -> Result<bool>) -> Result<bool> {
        let mut failed = None;
        for part in &self.parts {
            match check(part) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(true), Err)
    }

    /// Waits in this thread until the operation is over on this rank. `None` waits for ever.
    ///
    /// # Errors
    /// As [`CollectiveTicket::check`], and [`Error::Timeout`]; the operation goes on then.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut failed = None;
        for part in &self.parts {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match part.wait(left) {
                Ok(()) => {}
                Err(Error::Timeout { .. }) => {
                    return Err(Error::Timeout {
                        operation: WAIT,
                        timeout: timeout.unwrap_or_default(),
                    });
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
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

impl Awaited for CollectiveTicket {
    fn outcome(&self) -> Option<Result<()>> {
        let over = self.check_by(CollectivePart::check_now);
        over.map(|over| over.then_some(())).transpose()
    }

    fn looks(&self) -> bool {
        let mut looks = false;
        for part in &self.parts {
            looks |= match part {
                CollectivePart::Message(_, ticket) => ticket.looks(),
                CollectivePart::Local(_, turns) => {
                    turns.as_ref().map(StreamTurns::take);
                    turns.is_some()
                }
            };
        }
        looks
    }
}

impl CollectiveTicket {
    /// Adds 1 to an eventfd when the operation is over on this rank, as [`Ticket::notify`](crate::Ticket::notify).
    ///
    /// # Errors
    /// As [`Ticket::notify`](crate::Ticket::notify).
    pub fn notify(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        notify(self.clone(), eventfd)
    }
}

/// `ticket.await` is ready when the operation is over on this rank, with the errors of [`CollectiveTicket::check`].
impl IntoFuture for &CollectiveTicket {
    type Output = Result<()>;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture::new(self.clone())
    }
}
