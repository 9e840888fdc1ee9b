//! Operations of an endpoint: prepared, queued on a stream, or carried out by the calling thread.

mod datagram;
mod flow;
mod prepare;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::bytecode::Program;
use crate::endpoint::prepared::{Prepared, PreparedOperation, PreparedRef};
#[cfg(feature = "cuda")]
use crate::endpoint::replay::queues::ReplayQueues;
use crate::endpoint::shared::EndpointRef;
use crate::endpoint::{Completion, EndpointConfig, QueueKind, Ticket, Work};
use crate::mlx5::{Commit, RecvCommit, RecvQueue, SendQueue};
use crate::region::{RemoteSlice, Slice};
use crate::stream::{Backoff, Executor, execute, look_at_own_streams};
use crate::{Error, Result, StateKind};

/// Turns of a wait, while it does not sleep, between two checks of the deadline and of the device's asynchronous events. Both checks read a
/// clock, which may be a system call.
const TURNS_PER_LOOK: u32 = 64;

/// One end of a reliable connection, or of unreliable datagrams ([`EndpointConfig::transport`]): a send and a receive queue, each with its completions.
///
/// Every operation comes in three forms. `stream_queue_*` and [`Endpoint::stream_wait_cq`] put it in a stream's queue, where
/// the stream carries it out in its turn. `prepare_*` prepares it, and [`stream_post`](crate::stream_post) or
/// [`stream_post_all`](crate::stream_post_all) puts it in the queue later. `post_*`, [`Endpoint::poll_cq`] and
/// [`Endpoint::wait_cq`] do the same from the calling thread.
///
/// Posting takes `&mut self`: one thread at a time posts to an endpoint, so posting takes no lock. Each completion is
/// delivered once, to the first that asks for it: a wait on a stream or a poll of the CPU.
///
/// Work in flight holds the regions that it names. Dropping the endpoint drops work that was not transmitted yet. Programs
/// that streams still have keep its queues alive until they are done.
#[derive(Debug)]
pub struct Endpoint {
    pub(super) send: SendQueue,
    pub(super) recv: RecvQueue,
    /// Commits that can still be rolled back, by the running count of their work request.
    /// With those of sends, whether they were signaled.
    pub(super) send_commits: VecDeque<(u32, (Commit, bool))>,
    pub(super) recv_commits: VecDeque<(u32, RecvCommit)>,
    /// The program of the operation that is being prepared. In one place for all, because a new one would have to be cleared.
    pub(super) program: Program,
    pub(super) config: EndpointConfig,
    /// The queues as those of graphs that the application launches, from the first operation in one on.
    #[cfg(feature = "cuda")]
    pub(super) replay: Option<Box<ReplayQueues>>,
    /// Behind the queues, which point into its memory.
    pub(super) shared: EndpointRef,
}

impl Endpoint {
    /// Queues a send, write, read or atomic on a stream. It is transmitted when the stream reaches it.
    ///
    /// On a CUDA stream that the application captures, it becomes a node of the application's graph, and each launch transmits it:
    /// [`Ticket::launches`](crate::Ticket). The queues of this endpoint belong to such graphs until [`Endpoint::reset`]. `docs/gpu.md` has the rules.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_send`] and [`stream_post`](crate::stream_post). Nothing has changed then.
    pub fn stream_queue_send(&mut self, stream: &dyn Executor, work: &Work<'_>) -> Result<Ticket> {
        let queued = self.make_and_give(stream, |endpoint| endpoint.make_send(work));
        #[cfg(feature = "cuda")]
        if queued.is_err()
            && let Some(stream) = self.replays(stream)?
        {
            return self.replay_send(stream, work);
        }
        queued
    }

    /// Queues a write: [`Endpoint::stream_queue_send`] of a [`Work::write`].
    ///
    /// # Errors
    /// As [`Endpoint::stream_queue_send`].
    pub fn stream_queue_write(
        &mut self,
        stream: &dyn Executor,
        slices: &[Slice<'_>],
        remote: RemoteSlice,
    ) -> Result<Ticket> {
        self.stream_queue_send(stream, &Work::write(slices, remote))
    }

    /// Queues a read: [`Endpoint::stream_queue_send`] of a [`Work::read`].
    ///
    /// # Errors
    /// As [`Endpoint::stream_queue_send`].
    pub fn stream_queue_read(
        &mut self,
        stream: &dyn Executor,
        slices: &[Slice<'_>],
        remote: RemoteSlice,
    ) -> Result<Ticket> {
        self.stream_queue_send(stream, &Work::read(slices, remote))
    }

    /// Queues a receive on a stream. It is posted when the stream reaches it. On the proxy path the stream then stores a trigger, and the
    /// device has the receive only when the proxy has seen the trigger. The stream's next operations may take effect earlier, so a peer that
    /// they notify may have to repeat its attempt ([`EndpointConfig::rnr_retry`](crate::EndpointConfig::rnr_retry)).
    ///
    /// # Errors
    /// As [`Endpoint::prepare_recv`] and [`stream_post`](crate::stream_post). Nothing has changed then.
    pub fn stream_queue_recv(
        &mut self,
        stream: &dyn Executor,
        wr_id: u64,
        slices: &[Slice<'_>],
    ) -> Result<Ticket> {
        let queued = self.make_and_give(stream, |endpoint| endpoint.make_recv(wr_id, slices));
        #[cfg(feature = "cuda")]
        if queued.is_err()
            && let Some(stream) = self.replays(stream)?
        {
            return self.replay_recv(stream, slices);
        }
        queued
    }

    /// Makes work that is queued later on the stream wait for the next completion of a queue.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_wait_cq`] and [`stream_post`](crate::stream_post). Nothing has changed then.
    pub fn stream_wait_cq(&mut self, stream: &dyn Executor, kind: QueueKind) -> Result<Ticket> {
        self.stream_wait_cq_for(stream, kind, self.config.wait_timeout)
    }

    /// [`Endpoint::stream_wait_cq`] with a deadline of its own; `None` waits for ever.
    ///
    /// # Errors
    /// As [`Endpoint::stream_wait_cq`].
    pub fn stream_wait_cq_for(
        &mut self,
        stream: &dyn Executor,
        kind: QueueKind,
        timeout: Option<Duration>,
    ) -> Result<Ticket> {
        let queued = self.make_and_give(stream, |endpoint| endpoint.make_wait_cq(kind, timeout));
        #[cfg(feature = "cuda")]
        if queued.is_err()
            && let Some(stream) = self.replays(stream)?
        {
            return self.replay_wait_cq(stream, kind, timeout);
        }
        queued
    }

    /// Posts a send, write, read or atomic now, from this thread.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_send`]; [`Error::State`] if operations of this queue are still on a stream, or prepared and
    /// not given to one: this one would overtake them.
    pub fn post_send(&mut self, work: &Work<'_>) -> Result<Ticket> {
        let prepared = self.prepare_send(work)?;
        self.execute_or_roll_back(prepared)
    }

    /// Posts a receive now, from this thread. The device has it when this returns, so the peer may send as soon as it learns of that.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_recv`] and [`Endpoint::post_send`].
    pub fn post_recv(&mut self, wr_id: u64, slices: &[Slice<'_>]) -> Result<Ticket> {
        let prepared = self.prepare_recv(wr_id, slices)?;
        self.execute_or_roll_back(prepared)
    }

    /// Takes the next completion of a queue, if it is there; makes progress on a device that needs it.
    ///
    /// # Errors
    /// [`Error::Work`] for a completion in error, and for an endpoint that failed without one.
    pub fn poll_cq(&mut self, kind: QueueKind) -> Result<Option<Completion>> {
        if let Some(completion) = self.take_completion(kind)? {
            return Ok(Some(completion));
        }
        self.shared.qp.progress();
        if let Some(completion) = self.take_completion(kind)? {
            return Ok(Some(completion));
        }
        self.shared.look_for_failure();
        self.take_completion(kind)
    }

    /// Checks that polls take the completions of work requests that are posted from here on.
    ///
    /// # Errors
    /// [`Error::Work`] if the endpoint has failed; those of `QueueState::check_collected`.
    pub(crate) fn check_collected(
        &mut self,
        kind: QueueKind,
        operation: &'static str,
    ) -> Result<()> {
        self.shared.check_alive()?;
        self.roll_back_cancelled(kind)?;
        self.shared.queue(kind).check_collected(operation)
    }

    /// The next completion that the device has written; the failure of the endpoint, if there is one and none before it.
    fn take_completion(&mut self, kind: QueueKind) -> Result<Option<Completion>> {
        self.shared.reap();
        let queue = self.shared.queue(kind);
        let is_datagram = self.is_datagram();
        let mut taken = queue.poll(is_datagram);
        if taken.is_none()
            && let Err(failure) = self.shared.check_alive()
        {
            // Another thread that found the failure may not have published yet what completed before it.
            self.shared.reap_fully();
            taken = queue.poll(is_datagram);
            if taken.is_none() {
                return Err(failure);
            }
        }
        if is_datagram {
            self.release_handles();
        }
        let Some(Err(found)) = taken else {
            return Ok(taken.and_then(std::result::Result::ok));
        };
        let failure = crate::WorkError::new(self.qpn(), found.wr_id, found.cause);
        Err(Error::Work(failure))
    }

    /// Lets a device of software, or a relay, work inside the caller. Returns whether there was any work.
    pub(crate) fn progress(&self) -> bool {
        self.shared.qp.progress()
    }

    /// Waits in this thread for the next completion of a queue; `None` waits for ever.
    ///
    /// # Errors
    /// As [`Endpoint::poll_cq`]; [`Error::Timeout`], after which the endpoint is as it was.
    pub fn wait_cq(&mut self, kind: QueueKind, timeout: Option<Duration>) -> Result<Completion> {
        self.wait_cq_beside(kind, timeout, None)
    }

    /// [`Endpoint::wait_cq`], which also ends when another endpoint fails.
    ///
    /// # Errors
    /// As [`Endpoint::wait_cq`], and [`Error::Work`] if the other endpoint has failed.
    pub(crate) fn wait_cq_beside(
        &mut self,
        kind: QueueKind,
        timeout: Option<Duration>,
        other: Option<&Endpoint>,
    ) -> Result<Completion> {
        let mut deadline = None;
        let mut backoff = Backoff::new();
        let mut turns = 0u32;
        loop {
            if let Some(completion) = self.take_completion(kind)? {
                return Ok(completion);
            }
            turns = turns.wrapping_add(1);
            let looks = turns.is_multiple_of(TURNS_PER_LOOK) || !backoff.spins();
            if looks && deadline.is_none() {
                // Most waits are over before this.
                deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            }
            let in_time = if self.shared.qp.progress() | look_at_own_streams() {
                backoff.reset();
                !looks || deadline.is_none_or(|deadline| Instant::now() < deadline)
            } else {
                backoff.pause_until(deadline)
            };
            if in_time && !looks {
                continue;
            }
            self.shared.look_for_failure();
            let of_other = other.map_or(Ok(()), Endpoint::look_whether_alive);
            if in_time {
                of_other?;
                continue;
            }
            // Another thread that reaps may have found a completion after this thread's last look and before the deadline.
            self.shared.reap_fully();
            if let Some(completion) = self.take_completion(kind)? {
                return Ok(completion);
            }
            of_other?;
            return Err(Error::Timeout {
                operation: match self.shared.queue(kind).expects_completions() {
                    true => "wait_cq",
                    false => "wait_cq (no posted operation can complete it)",
                },
                timeout: timeout.unwrap_or_default(),
            });
        }
    }

    /// Prepares and posts an operation without moving it: its program stays where it was made until the stream copies what is in use of it,
    /// and the only handles of what is shared are the stream's and the ticket's.
    #[inline(always)]
    fn make_and_give(
        &mut self,
        stream: &dyn Executor,
        make: impl FnOnce(&mut Self) -> Result<PreparedOperation>,
    ) -> Result<Ticket> {
        let operation = make(self)?;
        let guard = CancelOnDrop(PreparedRef {
            shared: &self.shared,
            program: &self.program,
            operation,
        });
        let given = guard.0.give_to(stream);
        std::mem::forget(guard);
        match given {
            Ok(()) => Ok(Ticket::of_operation(&self.shared, operation)),
            Err(error) => {
                self.rollback(self.prepared(operation));
                Err(error)
            }
        }
    }

    /// Fails if a post from the calling thread would overtake an operation that is on a stream, or prepared for one.
    ///
    /// # Errors
    /// [`Error::State`]; [`Error::Work`] if the endpoint has failed.
    pub(crate) fn check_post(&mut self, kind: QueueKind) -> Result<()> {
        // What was prepared on an endpoint that has failed stays.
        self.shared.check_alive()?;
        self.roll_back_cancelled(kind)?;
        let queue = self.shared.queue(kind);
        if queue.outstanding.posted() != queue.queued.load(Ordering::Relaxed) {
            let reason = format!(
                "operations of the {} queue are prepared and not given to a stream; this one would overtake them",
                kind.name()
            );
            return Err(Error::state(StateKind::OutOfOrder, "post", reason));
        }
        self.shared.check_no_stream_ahead(kind)
    }

    fn execute_or_roll_back(&mut self, mut prepared: Prepared) -> Result<Ticket> {
        let shared = Arc::clone(&self.shared);
        let kind = prepared.operation.queue_kind;
        let queue = shared.queue(kind);
        let ready = queue.begin_posting_alone().and_then(|posting| {
            prepared.parts().check_turn()?;
            shared.check_no_stream_ahead(kind)?;
            Ok(posting)
        });
        let _posting = match ready {
            Ok(posting) => posting,
            Err(error) => {
                self.rollback(prepared);
                return Err(error);
            }
        };
        let ticket = prepared.posted();
        prepared.parts().enter_queued();
        prepared.live = false;
        queue.last_stream.store(0, Ordering::Relaxed);
        let begun = prepared.operation.count.wrapping_add(1);
        queue.begun.store(begun, Ordering::Relaxed);
        let cookie = prepared.parts().cookie(false);
        // Balanced by `finished`, which the interpreter does not call: there is no stream that could be done with it.
        let _ = execute(&prepared.program, &*shared, cookie);
        // On the proxy path that was a trigger. This thread need not wait for another one to see it.
        shared.ring_now(kind);
        if shared.qp.holds_work() {
            // No stream makes it go out, and the caller may never look here again.
            shared.activate();
        }
        Ok(ticket)
    }
}

/// Cancels the operation in it, should a stream panic that it is being given to.
struct CancelOnDrop<'a>(PreparedRef<'a>);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel(None);
    }
}
