//! A receive on a stream: what the stream executes, and how it ends.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::inbox::{MatchInbox, MatchRequest};
use super::state::ReceiveState;
use super::words::WordPlace;
use crate::bytecode::{TargetId, Targets};
use crate::stream::{Attachments, DeferredDrop, Outcome, Owner, StreamFailure, Submission};
use crate::{Error, Result};

/// The owner of the program of a receive.
pub(super) struct StreamReceive {
    pub(super) place: Arc<WordPlace>,
    pub(super) state: Arc<ReceiveState>,
    pub(super) inbox: Weak<MatchInbox>,
}

impl StreamReceive {
    /// # Errors
    /// None that are known.
    pub(super) fn submission(self) -> Result<Submission> {
        Ok(Submission {
            program: self.place.program()?,
            owner: Arc::new(self),
            cookie: 0,
        })
    }

    /// Tells the thread that the stream does not wait for the message any more.
    fn discard(&self) {
        // Before anything that lets the stream go on: the thread looks at this when the stream has told that it is there.
        self.state.give_up();
        if self.state.outcome().is_none()
            && let Some(inbox) = self.inbox.upgrade()
        {
            inbox.push(MatchRequest::Discard(Arc::clone(&self.state)));
        }
    }
}

// SAFETY: the one target of the region's table is the region's memory, which lives as long as the place has it.
unsafe impl Owner for StreamReceive {
    fn targets(&self) -> &Targets {
        self.place.region().targets()
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let region = self.place.region();
        (target == region.target().id()).then(|| region.start())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(self.place.region().attachments())
    }

    fn progress(&self) -> bool {
        self.place.region().domain().device().progress()
    }

    fn finished(&self, _cookie: u64, outcome: Outcome) {
        if outcome != Outcome::Done {
            self.discard();
        }
        self.state.leave_stream();
    }

    fn failure_of(&self, _cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        match (self.state.outcome(), outcome) {
            (Some(Err(error)), _) => Some(StreamFailure {
                reason: format!("a receive failed: {error}"),
                work: match error {
                    Error::Work(failure) | Error::Peer { failure, .. } => Some(*failure),
                    _ => None,
                },
            }),
            (_, Outcome::Released) => Some("a receive was given up".into()),
            _ => None,
        }
    }

    fn give_up(&self, _generation: u32) {
        self.discard();
    }

    fn released(&self, _cookie: u64) -> bool {
        self.state.is_given_up() || matches!(self.state.outcome(), Some(Err(_)))
    }

    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let region = self.place.region().clone();
        // Here, so that the place is free at once.
        drop(self.place);
        region.into_deferred_drop()
    }
}
