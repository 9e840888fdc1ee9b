//! A list of requests for one call, and the pieces of memory that they name. Made once; filling it allocates nothing.

use super::provider::{BATCH, Sge};

/// Requests, each with what is to be remembered of it.
#[derive(Debug)]
pub(super) struct Batch<R, M> {
    pub(super) requests: Vec<R>,
    pub(super) memos: Vec<M>,
    pub(super) sges: Vec<Sge>,
}

impl<R, M> Batch<R, M> {
    /// For requests of up to `segments` pieces each.
    pub(super) fn new(segments: u32) -> Batch<R, M> {
        Batch {
            requests: Vec::with_capacity(BATCH),
            memos: Vec::with_capacity(BATCH),
            sges: Vec::with_capacity(BATCH * segments as usize),
        }
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.memos.clear();
        self.sges.clear();
    }

    pub(super) fn push(&mut self, request: R, memo: M) {
        self.requests.push(request);
        self.memos.push(memo);
    }

    pub(super) fn is_full(&self) -> bool {
        self.requests.len() >= BATCH
    }
}
