//! The path `sync`: the thread that queues an operation executes it, and so rings its doorbell.

use crate::peer::Program;
use crate::stream::{Executor, Owner, execute};

/// Executes an operation in the calling thread, as a stream does. It is its turn.
pub(super) fn carry_out(stream: &dyn Executor, program: &Program, owner: &dyn Owner, cookie: u64) {
    owner.started(cookie);
    let outcome = execute(program, owner, cookie);
    // Before the owner hears of it, as on a stream.
    if let Some(failure) = owner.failure_of(cookie, outcome) {
        stream.fail(failure);
    }
    owner.finished(cookie, outcome);
}
