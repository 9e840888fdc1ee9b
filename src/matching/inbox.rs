//! What the threads of the application, and streams, want of the thread that matches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::state::{PostedReceive, ReceiveState};
use super::thread::wake_thread;
use super::{Envelope, Source, TagSelector};
use crate::Result;

/// Where the thread puts its answer.
pub(super) type MatchReply<T> = Arc<OnceLock<T>>;

/// Something for the thread to do.
pub(super) enum MatchRequest {
    Post(PostedReceive),
    /// Its stream will not execute it to its end.
    Discard(Arc<ReceiveState>),
    /// Answered with whether it had no message.
    Cancel(Arc<ReceiveState>, MatchReply<bool>),
    Probe(Source, TagSelector, MatchReply<Option<Envelope>>),
    /// Answered when the peer has all credits of before.
    Flush(usize, MatchReply<Result<()>>),
    Exclude(usize),
    IsExcluded(usize, MatchReply<bool>),
}

/// The requests that the thread has not taken yet, in the order of the calls.
#[derive(Default)]
pub(super) struct MatchInbox {
    requests: Mutex<InboxState>,
    /// So that the thread need not lock to find none.
    has_some: AtomicBool,
}

#[derive(Default)]
struct InboxState {
    requests: Vec<MatchRequest>,
    /// The matcher is being dropped.
    is_closed: bool,
}

impl MatchInbox {
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, and wakes the thread. Does nothing once the matcher is dropped, which ends all receives.
    pub(super) fn push(&self, request: MatchRequest) {
        let mut inbox = self.lock();
        if inbox.is_closed {
            return;
        }
        inbox.requests.push(request);
        // Under the lock, so that it is not reset for a request that is taken before this one.
        self.has_some.store(true, Ordering::Release);
        drop(inbox);
        wake_thread();
    }

    /// Moves all requests into a list.
    pub(super) fn take(&self, requests: &mut Vec<MatchRequest>) {
        if self.has_some.load(Ordering::Acquire) {
            let mut inbox = self.lock();
            self.has_some.store(false, Ordering::Release);
            requests.append(&mut inbox.requests);
        }
    }

    /// Takes no further requests, and returns those that nobody has taken.
    pub(super) fn close(&self) -> Vec<MatchRequest> {
        let mut inbox = self.lock();
        inbox.is_closed = true;
        std::mem::take(&mut inbox.requests)
    }
}
