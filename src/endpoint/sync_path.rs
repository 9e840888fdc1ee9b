//! The path `sync`: the thread that queues an operation executes it, and so rings its doorbell.

use crate::bytecode::Program;
use crate::stream::{Executor, Outcome, Owner, Submission, execute};

/// The stream's number for operations that the calling thread executes. No stream orders them before what is queued next.
pub(super) const SYNC_EXECUTED: u64 = u64::MAX;

/// Executes an operation in the calling thread, as a stream does. It is its turn. Returns whether what is behind it is to be executed.
pub(super) fn execute_sync(
    stream: &dyn Executor,
    program: &Program,
    owner: &dyn Owner,
    cookie: u64,
) -> bool {
    owner.started(cookie);
    let outcome = execute(program, owner, cookie);
    // Before the owner hears of it, as on a stream.
    let goes_on = match owner.failure_of(cookie, outcome) {
        Some(failure) => stream.fail(failure),
        None => true,
    };
    owner.finished(cookie, outcome);
    goes_on
}

/// Executes operations in order. Those behind one that fails are discarded, unless the stream is to go on.
pub(super) fn execute_all_sync(stream: &dyn Executor, batch: &[Submission]) {
    let mut goes_on = true;
    for Submission {
        program,
        owner,
        cookie,
    } in batch
    {
        if goes_on {
            goes_on = execute_sync(stream, program, &**owner, *cookie);
        } else {
            owner.finished(*cookie, Outcome::Discarded);
        }
    }
}
