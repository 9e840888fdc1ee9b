//! The ticket of a message.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::receive::ReceiveOutcome;
use crate::endpoint::{Awaited, Ticket, TicketFuture, notify, poll_until};
use crate::stream::StreamTurns;
use crate::{Error, Result};

/// Reports how a message that was queued on a stream fares.
///
/// A send is done when its memory may be used again; that says nothing of the receiver's stream, except for a message longer than the peer's
/// [`eager_bytes`](crate::MessageConfig::eager_bytes), which the peer has received by then. A receive is done when the message is in its memory, visible to what
/// the stream executes next.
#[derive(Debug, Clone)]
pub struct MessageTicket {
    /// In the order in which the stream executes them.
    parts: Vec<Ticket>,
    kind: MessageKind,
    turns: Option<StreamTurns>,
}

#[derive(Debug, Clone)]
enum MessageKind {
    Sent(u64),
    Received(Arc<ReceiveOutcome>),
}

/// A message of a graph: what becomes its ticket with the launch.
#[cfg(feature = "cuda")]
pub(super) struct MessageReport {
    ticket: MessageTicket,
    /// The operations that it is done with, by their place among those of the launch.
    waits: Vec<usize>,
    /// After these.
    end: Option<Ticket>,
}

#[cfg(feature = "cuda")]
impl MessageReport {
    pub(super) fn of_send(parts: Vec<Ticket>, len_bytes: u64) -> MessageReport {
        MessageReport::of(MessageTicket::of_send(parts, len_bytes, None))
    }

    pub(super) fn of_receive(outcome: Arc<ReceiveOutcome>) -> MessageReport {
        MessageReport::of(MessageTicket::of_receive(Vec::new(), outcome, None))
    }

    fn of(ticket: MessageTicket) -> MessageReport {
        MessageReport {
            ticket,
            waits: Vec::new(),
            end: None,
        }
    }

    pub(super) fn waits_for(&mut self, index: usize) {
        self.waits.push(index);
    }

    /// It ends with that operation, and then with that wait.
    pub(super) fn ends(&mut self, index: usize, end: Option<Ticket>) {
        self.waits.push(index);
        self.end = end;
    }

    /// The ticket of a launch with these operations, on a stream with these turns.
    pub(super) fn ticket(self, posted: &[Ticket], turns: Option<StreamTurns>) -> MessageTicket {
        let mut ticket = self.ticket;
        ticket.turns = turns;
        let waits = self.waits.iter().filter_map(|index| posted.get(*index));
        ticket.parts.extend(waits.cloned());
        ticket.parts.extend(self.end);
        ticket
    }
}

/// What a wait for a ticket is called in errors.
const WAIT: &str = "the wait for a message";

impl MessageTicket {
    pub(super) fn of_send(
        parts: Vec<Ticket>,
        len_bytes: u64,
        turns: Option<StreamTurns>,
    ) -> MessageTicket {
        MessageTicket {
            parts,
            kind: MessageKind::Sent(len_bytes),
            turns,
        }
    }

    pub(super) fn of_receive(
        parts: Vec<Ticket>,
        outcome: Arc<ReceiveOutcome>,
        turns: Option<StreamTurns>,
    ) -> MessageTicket {
        MessageTicket {
            parts,
            kind: MessageKind::Received(outcome),
            turns,
        }
    }

    /// The length of the message in bytes once it is sent or received, and `None` before.
    ///
    /// # Errors
    /// [`Error::Work`] if an operation failed; [`Error::Truncated`] if the message was longer than the memory; [`Error::Malformed`] if the peer sent no
    /// message; [`Error::State`] if the stream discarded it.
    pub fn check(&self) -> Result<Option<u64>> {
        self.check_by(Ticket::check)
    }

    /// [`MessageTicket::check`] that waits for no device, as [`Ticket::check_now`].
    pub(crate) fn check_now(&self) -> Result<Option<u64>> {
        self.check_by(Ticket::check_now)
    }

    fn check_by(&self, check: impl Fn(&Ticket) -> Result<bool>) -> Result<Option<u64>> {
        for part in &self.parts {
            if !check(part)? {
                return Ok(None);
            }
        }
        match &self.kind {
            MessageKind::Sent(len_bytes) => Ok(Some(*len_bytes)),
            MessageKind::Received(outcome) => outcome.check(),
        }
    }

    /// Waits in this thread until the message is sent or received, and returns its length in bytes. `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageTicket::check`], and [`Error::Timeout`]; the operation goes on then.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<u64> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = |error| match error {
            Error::Timeout { .. } => Error::Timeout {
                operation: WAIT,
                timeout: timeout.unwrap_or_default(),
            },
            error => error,
        };
        if let Some(turns) = &self.turns {
            // What the stream has done is known from its counts.
            return poll_until(WAIT, timeout, || turns.take(), || self.check());
        }
        for part in &self.parts {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            part.wait(left).map_err(late)?;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        poll_until(WAIT, left, || false, || self.check()).map_err(late)
    }
}

impl Awaited for MessageTicket {
    fn outcome(&self) -> Option<Result<()>> {
        self.check_now().map(|len| len.map(drop)).transpose()
    }

    fn looks(&self) -> bool {
        let Some(turns) = &self.turns else {
            return false;
        };
        turns.take();
        true
    }
}

impl MessageTicket {
    /// Adds 1 to an eventfd when the message is sent or received, or has failed, as [`Ticket::notify`].
    ///
    /// # Errors
    /// As [`Ticket::notify`].
    pub fn notify(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        notify(self.clone(), eventfd)
    }
}

/// `ticket.await` is ready when the message is sent or received, with the errors of [`MessageTicket::check`], which then tells the length.
impl IntoFuture for &MessageTicket {
    type Output = Result<()>;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture::new(self.clone())
    }
}
