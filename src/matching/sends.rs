//! The sends of a matcher: those of its queues, with a tag.

use std::time::{Duration, Instant};

use super::Matcher;
use super::matcher::SendingPeer;
use super::peer::lock;
use crate::endpoint::poll_until;
use crate::message::{MessageQueue, MessageTicket, PendingSend, PostedSend};
use crate::region::Slice;
use crate::stream::Executor;
use crate::{Error, Result};

/// The most programs of a send, unless an application has waited for few of its sends: the credit, the send, and its waits.
const SEND_ENTRIES: usize = 72;

/// What a thread waits for that sends.
const SEND: &str = "the send of a message";

impl Matcher {
    /// Queues a message with a tag on a stream, and a wait until its memory may be used again. The slices are sent one after the other.
    ///
    /// A message of at most [`MessageConfig::eager_bytes`](crate::MessageConfig::eager_bytes) of the peer is done when it is there, received or not. A longer one is done when a receive
    /// has taken it.
    ///
    /// # Errors
    /// As [`Matcher::start_send`].
    pub fn send(
        &self,
        stream: &dyn Executor,
        peer: usize,
        tag: u32,
        slices: &[Slice<'_>],
    ) -> Result<MessageTicket> {
        let to = self.peer(peer)?;
        if to.is_sync {
            let pending = self.start_send(stream, peer, tag, slices)?;
            return self.wait_send(stream, pending);
        }
        self.with_room(to, stream, |queue| {
            queue.set_tag(tag);
            queue.send(stream, slices)
        })
    }

    /// Queues a message on a stream, as [`Matcher::send`], but no wait.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send`]; [`Error::Range`] for the peer. Nothing has changed then.
    pub fn start_send(
        &self,
        stream: &dyn Executor,
        peer: usize,
        tag: u32,
        slices: &[Slice<'_>],
    ) -> Result<PendingSend> {
        let to = self.peer(peer)?;
        if to.is_sync {
            // The calling thread executes it. What it would wait for is waited for here, without the lock: the matcher's thread needs the queue meanwhile.
            stream.synchronize(to.wait_timeout)?;
            self.await_free(to, to.wait_timeout, |queue| queue.has_credit())?;
        }
        self.with_room(to, stream, |queue| {
            queue.set_tag(tag);
            queue.start_send(stream, slices)
        })
    }

    /// Queues the wait for a message that was sent before, on the same stream or another one.
    ///
    /// # Errors
    /// As [`MessageQueue::wait_send`].
    pub fn wait_send(&self, stream: &dyn Executor, pending: PendingSend) -> Result<MessageTicket> {
        let Some(to) = self.sender(pending.queue()) else {
            return Err(foreign("pending"));
        };
        if to.is_sync {
            stream.synchronize(to.wait_timeout)?;
            // If the time is over, so it is for the wait itself, which fails the queue.
            match self.await_free(to, to.wait_timeout, |queue| queue.has_been_read(&pending)) {
                Ok(()) | Err(Error::Timeout { .. } | Error::Work(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.await_stream(stream)?;
        lock(&to.queue).wait_send(stream, pending)
    }

    /// Sends a message from this thread, and waits until its memory may be used again, for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::send_now`]; [`Error::Range`] for the peer.
    pub fn send_now(
        &self,
        peer: usize,
        tag: u32,
        slices: &[Slice<'_>],
        timeout: Option<Duration>,
    ) -> Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let sent = self.start_send_now(peer, tag, slices, timeout)?;
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let waited = self.wait_send_now(&sent, left);
        waited.map_err(|error| match error {
            Error::Timeout { operation, .. } => Error::Timeout {
                operation,
                timeout: timeout.unwrap_or_default(),
            },
            error => error,
        })
    }

    /// Sends a message from this thread, and does not wait until its memory may be used again. Waits for at most `timeout` for a slot of the peer.
    ///
    /// # Errors
    /// As [`MessageQueue::start_send_now`]; [`Error::Range`] for the peer.
    pub fn start_send_now(
        &self,
        peer: usize,
        tag: u32,
        slices: &[Slice<'_>],
        timeout: Option<Duration>,
    ) -> Result<PostedSend> {
        let to = self.peer(peer)?;
        self.repeat(timeout, || {
            let mut queue = lock(&to.queue);
            queue.set_tag(tag);
            queue.start_send_now(slices, Some(Duration::ZERO))
        })
    }

    /// Waits in this thread until the memory of a message may be used again, for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`MessageQueue::wait_send_now`].
    pub fn wait_send_now(&self, sent: &PostedSend, timeout: Option<Duration>) -> Result<()> {
        let Some(to) = self.sender(sent.queue()) else {
            return Err(foreign("sent"));
        };
        self.repeat(timeout, || {
            lock(&to.queue).wait_send_now(sent, Some(Duration::ZERO))
        })
    }

    /// The peer whose queue has that number.
    fn sender(&self, number: u64) -> Option<&SendingPeer> {
        self.peers.iter().find(|peer| peer.number == number)
    }

    /// Makes a call that is in time at once or not at all, until it is. No lock is held in between: the thread that matches needs the queue for what the call waits for.
    fn repeat<T>(
        &self,
        timeout: Option<Duration>,
        mut call: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let progress = || self.domain().device().progress();
        poll_until(SEND, timeout, progress, || match call() {
            Err(Error::Timeout { .. }) => Ok(None),
            done => done.map(Some),
        })
    }

    /// Makes a call of a queue, and makes it again while there is no room, for as long as the configuration says.
    fn with_room<T>(
        &self,
        to: &SendingPeer,
        stream: &dyn Executor,
        mut call: impl FnMut(&mut MessageQueue) -> Result<T>,
    ) -> Result<T> {
        let mut call = || {
            self.await_stream(stream)?;
            let mut queue = lock(&to.queue);
            call(&mut queue)
        };
        let timeout = match (call(), to.room_timeout) {
            (Err(Error::QueueFull { .. }), Some(timeout)) => timeout,
            (done, _) => return done,
        };
        let turns = stream.turns();
        let progress = || {
            // The room comes when the stream has taken completions, which a stream of a GPU is asked for.
            let turned = turns.as_ref().is_some_and(|turns| turns.take());
            self.domain().device().progress() || turned
        };
        let operation = "the wait for room in a queue";
        poll_until(operation, Some(timeout), progress, || match call() {
            Err(Error::QueueFull { .. }) => Ok(None),
            done => done.map(Some),
        })
    }

    /// Waits until the stream takes what a send queues. Its front may be a receive for whose message the thread that matches needs the queue, so no lock is held.
    fn await_stream(&self, stream: &dyn Executor) -> Result<()> {
        let look = || Ok(stream.has_room(SEND_ENTRIES)?.then_some(()));
        poll_until(SEND, None, || false, look)
    }

    /// Waits for something of a queue, which is locked only for the looks.
    fn await_free(
        &self,
        to: &SendingPeer,
        timeout: Option<Duration>,
        is_free: impl Fn(&MessageQueue) -> Result<bool>,
    ) -> Result<()> {
        let progress = || self.domain().device().progress();
        poll_until(SEND, timeout, progress, || {
            Ok(is_free(&lock(&to.queue))?.then_some(()))
        })
    }
}

fn foreign(argument: &'static str) -> Error {
    Error::Foreign {
        argument,
        found: "another matcher".into(),
        expected: "the matcher that has sent the message".into(),
    }
}
