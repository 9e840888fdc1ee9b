//! The ticket of a receive.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Envelope;
use super::inbox::MatchInbox;
use super::state::ReceiveState;
use crate::Result;
use crate::endpoint::{Awaited, TicketFuture, notify, poll_until};
use crate::stream::StreamTurns;

/// Reports how a receive of a [`Matcher`](crate::Matcher) on a stream fares. It is done when the message is in its memory, visible to what the stream executes next.
#[derive(Clone)]
pub struct MatchTicket {
    pub(super) state: Arc<ReceiveState>,
    /// Of the matcher that has given it out.
    pub(super) inbox: Weak<MatchInbox>,
    pub(super) turns: Option<StreamTurns>,
}

/// What a wait for a ticket is called in errors.
pub(super) const WAIT: &str = "the wait for a message";

impl MatchTicket {
    /// What is known of the message once it is there, and `None` before. A receive that has failed says so when its stream has come to it.
    ///
    /// # Errors
    /// [`Error::Truncated`](crate::Error::Truncated) if the message was longer than the memory; [`Error::Peer`](crate::Error::Peer) if a peer has failed whose message it waited for;
    /// [`Error::Timeout`](crate::Error::Timeout) if no message came within
    /// [`EndpointConfig::wait_timeout`](crate::EndpointConfig::wait_timeout); [`Error::State`](crate::Error::State) if it was cancelled, if the stream discarded it,
    /// or if the matcher was dropped. Nothing was received then.
    pub fn check(&self) -> Result<Option<Envelope>> {
        match self.state.settled() {
            None => Ok(None),
            Some(outcome) => outcome.clone().map(Some),
        }
    }

    /// Waits in this thread until the message is there. `None` waits for ever.
    ///
    /// # Errors
    /// As [`MatchTicket::check`], and [`Error::Timeout`](crate::Error::Timeout); the receive goes on then.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Envelope> {
        let turn = || self.turns.as_ref().is_some_and(StreamTurns::take);
        poll_until(WAIT, timeout, turn, || self.check())
    }
}

impl Awaited for MatchTicket {
    fn outcome(&self) -> Option<Result<()>> {
        self.check().map(|envelope| envelope.map(drop)).transpose()
    }

    fn looks(&self) -> bool {
        let Some(turns) = &self.turns else {
            return false;
        };
        turns.take();
        true
    }
}

impl MatchTicket {
    /// Adds 1 to an eventfd when the message is there, or the receive has failed, as [`Ticket::notify`](crate::Ticket::notify).
    ///
    /// # Errors
    /// As [`Ticket::notify`](crate::Ticket::notify).
    pub fn notify(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        notify(self.clone(), eventfd)
    }
}

/// `ticket.await` is ready when the message is there, with the errors of [`MatchTicket::check`], which then tells what is known of it.
impl IntoFuture for &MatchTicket {
    type Output = Result<()>;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture::new(self.clone())
    }
}

impl fmt::Debug for MatchTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MatchTicket")
            .field("outcome", &self.state.outcome())
            .finish_non_exhaustive()
    }
}
