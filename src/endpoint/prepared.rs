//! Operations that are prepared and not yet given to a stream, and giving them to one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::bytecode::Program;
use crate::endpoint::queue::{QueueState, Wait, next_call};
use crate::endpoint::shared::{Cookie, EndpointShared, Entered};
use crate::endpoint::sync_path::{SYNC_EXECUTED, execute_all_sync, execute_sync};
use crate::endpoint::{Control, QueueKind, Ticket};
use crate::mlx5::Posted;
#[cfg(feature = "cuda")]
use crate::stream::Outcome;
use crate::stream::{Executor, Submission};
use crate::{Error, Result, StateKind};

/// What is to happen to the queue when a prepared operation is dropped.
#[derive(Debug, Clone, Copy)]
pub(super) enum OperationKind {
    /// A work request of the send queue: the device skips it.
    Send { posted: Posted, signaled: bool },
    /// A receive: the receives behind it must be dropped as well.
    Recv,
    /// A wait: its completion goes to no caller.
    Wait,
}

/// An operation without its endpoint and its program, which is expensive to move.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreparedOperation {
    pub(super) queue_kind: QueueKind,
    pub(super) kind: OperationKind,
    /// Running count of the work request, or running index of the completion.
    pub(super) count: u32,
    pub(super) serial: u32,
    pub(super) epoch: u32,
}

impl PreparedOperation {
    pub(super) fn is_wait(&self) -> bool {
        matches!(self.kind, OperationKind::Wait)
    }
}

/// An operation that can be queued on a stream by [`stream_post`] or [`stream_post_all`]. Operations of one queue have to be
/// queued in the order in which they were prepared; waits can be queued in any order.
///
/// Dropping it cancels it: a send becomes a no-operation in its place, the completion of a wait is dropped. After a dropped
/// receive, the receives that were prepared behind it are refused: drop them as well.
#[derive(Debug)]
#[must_use = "an operation that is dropped is cancelled"]
pub struct Prepared {
    pub(super) shared: Arc<EndpointShared>,
    pub(super) program: Program,
    pub(super) operation: PreparedOperation,
    pub(super) live: bool,
    /// Set when the operation is dropped. Made for the first ticket.
    cancelled: OnceLock<Arc<AtomicBool>>,
}

impl Prepared {
    pub(super) fn new(
        shared: Arc<EndpointShared>,
        program: Program,
        operation: PreparedOperation,
    ) -> Prepared {
        Prepared {
            shared,
            program,
            operation,
            live: true,
            cancelled: OnceLock::new(),
        }
    }

    /// Cancels the operation. Returns whether it was cancelled: on an endpoint that has failed, the operation has failed and stays failed.
    pub(super) fn mark_cancelled(&mut self) -> bool {
        let PreparedOperation { count, epoch, .. } = self.operation;
        let queue = self.shared.queue(self.operation.queue_kind);
        let cancelled = self.shared.if_alive(epoch, || {
            if self.operation.is_wait() {
                queue.set_wait(count, Wait::Cancelled);
            } else {
                queue.cancel(count);
            }
            if let Some(cancelled) = self.cancelled.get() {
                cancelled.store(true, Ordering::Release);
            }
        });
        self.live &= !cancelled;
        cancelled
    }

    /// The bytecode that rings the doorbell or waits.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The bytecode, disassembled, with the names of this endpoint's memory.
    pub fn disassemble(&self) -> String {
        self.program
            .disassemble(self.shared.target_table())
            .to_string()
    }

    /// A copy of the work queue entry that a doorbell of this operation names, in the bytes of the device's format (see
    /// [`Wqe`](crate::mlx5::Wqe)). `None` for receives and waits, and once the endpoint was reset. It is for
    /// inspection: nothing in the library reads it back.
    pub fn wqe(&self) -> Option<Vec<u8>> {
        let _generation = self.shared.hold_generation();
        match self.operation.kind {
            OperationKind::Send { posted, .. }
                if self.shared.epoch.load(Ordering::Acquire) == self.operation.epoch =>
            {
                Some(self.shared.wqe(posted))
            }
            _ => None,
        }
    }

    /// The ticket of the operation, which reports its status.
    pub fn ticket(&self) -> Ticket {
        let cancelled = self.cancelled.get_or_init(Arc::default);
        Ticket::of_prepared(&self.shared, self.operation, cancelled)
    }

    /// Whether a ticket of it was given out.
    pub(super) fn has_ticket(&self) -> bool {
        self.cancelled.get().is_some()
    }

    /// The ticket of an operation that a stream has.
    pub(super) fn posted(&self) -> Ticket {
        Ticket::of_operation(&self.shared, self.operation)
    }

    /// The endpoint that it belongs to: [`Endpoint::id`](crate::Endpoint).
    pub(crate) fn endpoint_id(&self) -> u64 {
        self.shared.targets_id()
    }

    /// The program with its owner, for a graph to have nodes like it. It is not to be executed.
    #[cfg(feature = "cuda")]
    pub(crate) fn submission_for_graph(&self) -> Submission {
        Submission {
            program: self.program,
            owner: self.shared.clone(),
            cookie: self.parts().cookie(false),
        }
    }

    /// Borrows the endpoint, the program and the operation.
    pub(super) fn parts(&self) -> PreparedRef<'_> {
        PreparedRef {
            shared: &self.shared,
            program: &self.program,
            operation: self.operation,
        }
    }
}

/// An operation where it lies, in a [`Prepared`] or, without a handle of its own, in the call that prepares and posts it: a handle costs two
/// locked instructions.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreparedRef<'a> {
    pub(super) shared: &'a Arc<EndpointShared>,
    pub(super) program: &'a Program,
    pub(super) operation: PreparedOperation,
}

impl PreparedRef<'_> {
    fn queue(&self) -> &QueueState {
        self.shared.queue(self.operation.queue_kind)
    }

    fn is_wait(&self) -> bool {
        self.operation.is_wait()
    }

    /// Fails unless the endpoint still is what it was, and this operation is the next of its queue.
    pub(super) fn check_turn(&self) -> Result<()> {
        self.shared.check_alive()?;
        let PreparedOperation {
            queue_kind,
            count,
            epoch,
            ..
        } = self.operation;
        let no = |kind, reason: String| Err(Error::state(kind, "stream_post", reason));
        if self.shared.epoch.load(Ordering::Acquire) != epoch {
            return no(
                StateKind::Stale,
                "the endpoint was reset since the operation was prepared".into(),
            );
        }
        if self.is_wait() {
            return Ok(());
        }
        let queue = self.queue();
        let next = queue.queued.load(Ordering::Acquire);
        let mut before = next;
        while before != count && queue.is_cancelled(before) {
            before = before.wrapping_add(1);
        }
        if before != count {
            let waiting = count.wrapping_sub(before);
            return no(
                StateKind::OutOfOrder,
                format!(
                    "operations that were prepared before this one on the {} queue ({waiting}) are not given to a stream yet; give or drop them first",
                    queue_kind.name()
                ),
            );
        }
        if queue_kind == QueueKind::Recv && next != count {
            return no(StateKind::OutOfOrder, "a receive that was prepared before this one was dropped, and the device would take it; drop this one, too".into());
        }
        Ok(())
    }

    /// Enters that the operation is handed over, unless the endpoint has failed; the caller holds the right to post.
    ///
    /// # Errors
    /// [`Error::Work`]. The operation has failed then: [`PreparedRef::enter_prepared`] leaves it so.
    fn hand_over(&self) -> Result<()> {
        if self.enter_queued() && self.is_wait() {
            // A wait that has failed is not prepared any more.
            return Ok(());
        }
        // A ticket may have reported the failure since `check_turn`. Of this thread's store and load, and the store of the failure and the load of what
        // streams have, one sees the other's: the heavy fence is in `EndpointShared::shut_down`.
        self.shared.handing.light();
        self.shared.check_alive()
    }

    /// Enters that the operation is handed over. Returns false of a wait that has failed.
    pub(super) fn enter_queued(&self) -> bool {
        let queue = self.queue();
        let count = self.operation.count;
        if self.is_wait() {
            return queue.queue_wait(count);
        }
        queue.queued.store(count.wrapping_add(1), Ordering::Release);
        true
    }

    /// Takes [`PreparedRef::hand_over`] back: `queued` is the count of the queue before. Of an endpoint that has failed, the status may have been
    /// reported, and stays.
    #[cold]
    fn enter_prepared(&self, queued: u32) {
        let queue = self.queue();
        let PreparedOperation { count, epoch, .. } = self.operation;
        let is_alive = self.shared.if_alive(epoch, || {
            if self.is_wait() {
                queue.set_wait(count, Wait::Prepared);
            } else {
                queue.queued.store(queued, Ordering::Release);
            }
        });
        if !is_alive && self.is_wait() {
            // No stream ends it.
            queue.set_wait(count, Wait::Failed);
        }
    }

    /// Gives the operation to a stream. It is as it was after an error, and spent after success.
    pub(super) fn give_to(&self, stream: &dyn Executor) -> Result<()> {
        let shared = self.shared;
        let is_sync = shared.path.control == Control::Sync;
        if is_sync {
            // Before anything is taken: the stream may never come to its end.
            stream.synchronize(self.patience())?;
        }
        let queue = self.queue();
        let _posting = if self.is_wait() {
            None
        } else {
            Some(queue.begin_posting_alone()?)
        };
        // Before the look at whose turn it is: a reset that comes after that look waits for this operation.
        let entered = shared.enter_stream()?;
        self.check_turn()?;
        let turn = self.turn(if is_sync { 0 } else { stream.id() })?;
        let cookie = self.cookie(turn.is_some());
        let program = turn.as_ref().unwrap_or(self.program);
        let queued = queue.queued.load(Ordering::Relaxed);
        // Before the stream has it: it may be executed before `submit_one` returns.
        self.hand_over()
            .inspect_err(|_| self.enter_prepared(queued))?;
        shared.activate_for(looked_stream(stream));
        if is_sync {
            // Blocks, if it is a wait; the watchdog ends it as it ends those of streams.
            entered.stay();
            queue.last_stream.store(stream.id(), Ordering::Relaxed);
            execute_sync(stream, program, &**shared, cookie);
            return Ok(());
        }
        if let Err(error) = stream.submit_program(program, shared.clone(), cookie) {
            self.enter_prepared(queued);
            return Err(error);
        }
        entered.stay();
        if !self.is_wait() {
            queue.last_stream.store(stream.id(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// How long the stream may take until the calling thread has its turn.
    fn patience(&self) -> Option<Duration> {
        match self.queue().turn_timeout_ns {
            u64::MAX => None,
            timeout_ns => Some(Duration::from_nanos(timeout_ns)),
        }
    }

    /// The program for that stream, if it is another than the operation's own: behind work that another stream has not executed yet it
    /// begins with a wait for it.
    #[inline(always)]
    fn turn(&self, stream: u64) -> Result<Option<Program>> {
        match self.ahead(stream) {
            None => Ok(None),
            Some(before) => self.program_after(before).map(Some),
        }
    }

    /// How many work requests must have been executed before, if another stream has some that it has not executed yet: the doorbell record
    /// counts, so a later doorbell that comes first would release the earlier work request, too.
    #[inline(always)]
    fn ahead(&self, stream: u64) -> Option<u32> {
        if self.is_wait() {
            return None;
        }
        let queue = self.queue();
        let before = queue.queued.load(Ordering::Relaxed);
        let is_done = queue.last_stream.load(Ordering::Relaxed) == stream
            || self.shared.rung(self.operation.queue_kind) == before;
        (!is_done).then_some(before)
    }

    pub(super) fn cookie(&self, waits_turn: bool) -> u64 {
        let cookie = Cookie {
            kind: self.operation.queue_kind,
            is_wait: self.is_wait(),
            waits_turn,
            count: self.operation.count,
        };
        cookie.to_bits()
    }

    /// For a batch, which has programs of its own.
    fn submission(&self, stream: u64) -> Result<Submission> {
        let turn = self.turn(stream)?;
        Ok(Submission {
            owner: self.shared.clone(),
            cookie: self.cookie(turn.is_some()),
            program: turn.unwrap_or(*self.program),
        })
    }

    /// For a graph, whose programs stay as long as they were: the wait for its turn, if there is one, apart.
    #[cfg(feature = "cuda")]
    fn submissions(&self, stream: u64) -> Result<(Option<Submission>, Submission)> {
        let submission = |program, waits_turn| Submission {
            owner: self.shared.clone(),
            cookie: self.cookie(waits_turn),
            program,
        };
        let turn = match self.ahead(stream) {
            None => None,
            Some(before) => Some(submission(self.wait_until_executed(before)?, true)),
        };
        Ok((turn, submission(*self.program, false)))
    }

    /// The program, behind a wait for the executed work to be `before` many.
    #[cold]
    fn program_after(&self, before: u32) -> Result<Program> {
        let mut program = self.wait_until_executed(before)?;
        program.append(self.program)?;
        Ok(program)
    }

    fn wait_until_executed(&self, before: u32) -> Result<Program> {
        let mut program = Program::for_targets(self.shared.targets_id());
        program.poll_geq(
            self.shared.progress_words[self.operation.queue_kind as usize],
            before,
        )?;
        Ok(program)
    }

    /// Cancels the operation, which was not given to a stream. On an endpoint that has failed it has failed with it, and stays so. The flag is that of its
    /// tickets.
    pub(super) fn cancel(&self, cancelled: Option<&AtomicBool>) {
        let PreparedOperation {
            kind, count, epoch, ..
        } = self.operation;
        let queue = self.queue();
        self.shared.if_alive(epoch, || {
            match kind {
                OperationKind::Send { posted, signaled } => {
                    self.shared.overwrite_with_nop(posted, signaled);
                    queue.cancel(count);
                }
                OperationKind::Recv => queue.cancel(count),
                OperationKind::Wait => {
                    queue.set_wait(count, Wait::Cancelled);
                    queue.cq.abort_peek(count);
                }
            }
            if let Some(cancelled) = cancelled {
                cancelled.store(true, Ordering::Release);
            }
        });
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if self.live {
            let cancelled = self.cancelled.get().map(Arc::as_ref);
            self.parts().cancel(cancelled);
        }
    }
}

/// An operation that a stream did not take, and why. It can be given again, or dropped.
pub struct Rejected {
    /// The operation, as it was.
    pub prepared: Prepared,
    /// Why it was not taken.
    pub error: Error,
}

impl From<Rejected> for Error {
    fn from(rejected: Rejected) -> Error {
        rejected.error
    }
}

/// Shows the error only: the operation's bytecode does not help a reader.
impl std::fmt::Debug for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rejected")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Display for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Rejected {}

/// Gives a prepared operation to a stream.
///
/// # Errors
/// [`Error::Work`] if the endpoint has failed; [`Error::State`] if it is not this operation's turn, or the endpoint was reset
/// since; and what the stream refuses. The operation comes back.
// The operation comes back by value: a box would be an allocation on the way that must not have one.
#[allow(clippy::result_large_err)]
pub fn stream_post(
    stream: &dyn Executor,
    mut prepared: Prepared,
) -> std::result::Result<Ticket, Rejected> {
    match prepared.parts().give_to(stream) {
        Ok(()) => {
            prepared.live = false;
            Ok(prepared.posted())
        }
        Err(error) => Err(Rejected { prepared, error }),
    }
}

/// Gives prepared operations, of as many endpoints as one likes, to a stream in one batch, in order. On success the list is
/// empty and the tickets are in its order; on an error nothing was given and the list is as it was.
///
/// # Errors
/// As [`stream_post`], and [`Error::Range`] if the stream's queue is too short for the batch.
pub fn stream_post_all(stream: &dyn Executor, prepared: &mut Vec<Prepared>) -> Result<Vec<Ticket>> {
    stream_post_among(stream, prepared, Vec::new())
}

/// A batch, the indices of the operations that are not in it yet, and the other programs that are not.
type AmongBatch = (
    Vec<Submission>,
    std::ops::Range<usize>,
    std::iter::Peekable<std::vec::IntoIter<(usize, Submission)>>,
);

/// [`stream_post_all`] with other programs among the operations, in the same batch. Each of `others` has the index of the operation that it is executed
/// before. One with the number of operations as its index is executed last. The list is sorted by index.
///
/// # Errors
/// As [`stream_post_all`]. The other programs are dropped then.
pub(crate) fn stream_post_among(
    stream: &dyn Executor,
    prepared: &mut Vec<Prepared>,
    others: Vec<(usize, Submission)>,
) -> Result<Vec<Ticket>> {
    // One that is to be carried out here, behind those before it and before those behind it, has all of them carried out here.
    let in_sync = prepared
        .iter()
        .find(|operation| operation.shared.path.control == Control::Sync);
    let is_sync = in_sync.is_some();
    if let Some(operation) = in_sync {
        stream.synchronize(operation.parts().patience())?;
    }
    // Carried out here, it waits for what another thread has given to the stream since: no stream's order does.
    let id = if is_sync { 0 } else { stream.id() };
    let batch = Vec::with_capacity(prepared.len() + others.len());
    let mut batch = (batch, 0..prepared.len(), others.into_iter().peekable());
    let batched = |operation: PreparedRef<'_>, (batch, indices, others): &mut AmongBatch| {
        let index = indices.next();
        while let Some((_, other)) = others.next_if(|(before, _)| Some(*before) <= index) {
            batch.push(other);
        }
        batch.push(operation.submission(id)?);
        Ok(())
    };
    let last_stream = if is_sync { SYNC_EXECUTED } else { stream.id() };
    let tickets = hand_over(
        (last_stream, looked_stream(stream)),
        prepared,
        &mut batch,
        batched,
        |(batch, _, others)| {
            batch.extend(others.map(|(_, other)| other));
            if is_sync {
                return Ok(());
            }
            stream.submit(batch)
        },
    )?;
    // Empty, but for what the stream was not given.
    execute_all_sync(stream, &batch.0);
    Ok(tickets)
}

/// Gives prepared operations to a graph that is launched on that stream: the waits for their turn, which come before the graph, and the
/// programs, one for each operation. On success the list is empty and the tickets are in its order; on an error nothing was given and the list
/// is as it was.
///
/// # Errors
/// As [`stream_post_all`], and those of `give`, which takes the turns that it queues out of the list.
#[cfg(feature = "cuda")]
pub(crate) fn graph_post_all(
    stream: u64,
    prepared: &mut Vec<Prepared>,
    give: impl FnOnce(&mut Vec<Submission>, &mut Vec<Submission>) -> Result<()>,
) -> Result<Vec<Ticket>> {
    let mut batch = (Vec::new(), Vec::with_capacity(prepared.len()));
    let batched = |operation: PreparedRef<'_>, (turns, batch): &mut (Vec<_>, Vec<_>)| {
        let (turn, submission) = operation.submissions(stream)?;
        if let Some(turn) = turn {
            // A program of its own, which finishes for itself.
            operation.shared.enter_stream()?.stay();
            turns.push(turn);
        }
        batch.push(submission);
        Ok(())
    };
    let result = hand_over(
        (stream, None),
        prepared,
        &mut batch,
        batched,
        |(turns, batch)| give(turns, batch),
    );
    for turn in batch.0 {
        turn.owner.started(turn.cookie);
        turn.owner.finished(turn.cookie, Outcome::Done);
    }
    result
}

/// The number of the stream, if threads that wait execute it.
#[inline]
fn looked_stream(stream: &dyn Executor) -> Option<u64> {
    stream.is_executed_by_looks().then(|| stream.id())
}

/// Hands prepared operations over, all or none: each goes into `batch` by `add`, and the whole to the stream of that number by `give`. The second number is
/// [`looked_stream`].
fn hand_over<B>(
    (stream, looked): (u64, Option<u64>),
    prepared: &mut Vec<Prepared>,
    batch: &mut B,
    mut add: impl FnMut(PreparedRef<'_>, &mut B) -> Result<()>,
    give: impl FnOnce(&mut B) -> Result<()>,
) -> Result<Vec<Ticket>> {
    let shareds: Vec<_> = prepared
        .iter()
        .map(|operation| Arc::clone(&operation.shared))
        .collect();
    // Held until the stream has the batch: work that another thread queues meanwhile would come before what was handed over here.
    let mut postings = Vec::with_capacity(prepared.len());
    let call = next_call();
    let mut entered = Vec::with_capacity(prepared.len());
    let mut handed = 0;
    let mut undo = Vec::with_capacity(prepared.len());
    let result = (|| {
        for (prepared, shared) in prepared.iter_mut().zip(&shareds) {
            let operation = prepared.parts();
            let queue = shared.queue(operation.operation.queue_kind);
            if !operation.is_wait() {
                postings.extend(queue.begin_posting(call)?);
            }
            entered.push(shared.enter_stream()?);
            operation.check_turn()?;
            add(operation, batch)?;
            undo.push((
                queue.queued.load(Ordering::Relaxed),
                queue.last_stream.load(Ordering::Relaxed),
            ));
            handed += 1;
            operation.hand_over()?;
            if !operation.is_wait() {
                queue.last_stream.store(stream, Ordering::Relaxed);
            }
            prepared.live = false;
            shared.activate_for(looked);
        }
        give(batch)
    })();
    if let Err(error) = result {
        for (prepared, (queued, last_stream)) in prepared.iter_mut().take(handed).zip(undo).rev() {
            prepared.live = true;
            let operation = prepared.parts();
            operation.enter_prepared(queued);
            if !operation.is_wait() {
                operation
                    .queue()
                    .last_stream
                    .store(last_stream, Ordering::Relaxed);
            }
        }
        return Err(error);
    }
    entered.into_iter().for_each(Entered::stay);
    Ok(prepared
        .drain(..)
        .map(|operation| operation.posted())
        .collect())
}
