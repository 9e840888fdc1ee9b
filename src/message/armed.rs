//! The end of a queue whose messages are prepared in a graph.

use std::sync::Arc;

use crate::endpoint::AbortHandle;

/// Ends the connection of a queue that is dropped while a graph has messages of it prepared. They count as work of a stream that is still to come, which an
/// endpoint otherwise waits for; but without the queue they are never launched.
pub(super) struct ArmedGuard {
    abort: AbortHandle,
    marks: Arc<()>,
}

/// Messages of the queue are prepared as long as this lives.
pub(super) struct ArmedMark {
    _mark: Arc<()>,
}

impl ArmedGuard {
    pub(super) fn new(abort: AbortHandle) -> ArmedGuard {
        ArmedGuard {
            abort,
            marks: Arc::default(),
        }
    }

    pub(super) fn mark(&self) -> ArmedMark {
        ArmedMark {
            _mark: Arc::clone(&self.marks),
        }
    }
}

impl Drop for ArmedGuard {
    fn drop(&mut self) {
        if Arc::strong_count(&self.marks) > 1 {
            self.abort.abort();
        }
    }
}
