//! What the thread serves of a matcher.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::engine::MatchEngine;
use super::inbox::MatchInbox;
use super::thread::MatchServed;
use crate::proxy::PollResult;

/// A matcher as its thread sees it.
pub(super) struct MatcherCore {
    pub(super) inbox: Arc<MatchInbox>,
    /// None once the matcher is dropped. Locked by the thread that matches, and by the drop.
    engine: Mutex<Option<MatchEngine>>,
}

impl MatcherCore {
    pub(super) fn new(inbox: Arc<MatchInbox>, engine: MatchEngine) -> MatcherCore {
        MatcherCore {
            inbox,
            engine: Mutex::new(Some(engine)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<MatchEngine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all receives. The thread does not look at the queues any more when this returns.
    pub(super) fn close(&self) {
        let engine = self.lock().take();
        if let Some(mut engine) = engine {
            engine.close();
        }
    }
}

impl MatchServed for MatcherCore {
    fn serve(&self) -> PollResult {
        match &mut *self.lock() {
            None => PollResult::Over,
            Some(engine) => match engine.serve() {
                true => PollResult::Worked,
                false => PollResult::Waiting,
            },
        }
    }
}
