//! What threads call that wait for the work of a stream.

use std::fmt;
use std::sync::Weak;

/// A handle of a stream for threads that wait for its work. It does not keep the stream.
#[doc(hidden)]
#[derive(Clone)]
pub struct StreamTurns(Weak<dyn StreamTurn>);

#[doc(hidden)]
pub trait StreamTurn: Send + Sync {
    /// Looks at the stream. True: something has changed.
    fn turn(&self) -> bool;
}

impl StreamTurns {
    /// Of a stream.
    pub fn of(stream: Weak<dyn StreamTurn>) -> StreamTurns {
        StreamTurns(stream)
    }

    /// Looks at the stream, if it still is. True: something has changed.
    pub fn take(&self) -> bool {
        self.0.upgrade().is_some_and(|stream| stream.turn())
    }
}

impl fmt::Debug for StreamTurns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamTurns").finish_non_exhaustive()
    }
}
