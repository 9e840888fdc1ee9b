//! Completion queues, which the library's own ring reads.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::call::{object, release};
use super::context::Context;
use super::domain::ThreadDomainUar;
use crate::Result;

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    cq: NonNull<rdma_sys::ibv_cq>,
    _context: Arc<Context>,
}

// SAFETY: it is only handed to calls that any thread may make.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue of that many entries of 64 bytes, a power of two from 2 on, of the mlx5 provider: it adds one and rounds up to a power of two. It is
    /// destroyed before `uar`.
    ///
    /// # Errors
    /// [`crate::Error::System`] of `mlx5dv_create_cq`.
    pub(super) fn new(
        context: &Arc<Context>,
        uar: &ThreadDomainUar,
        cqes: u32,
    ) -> Result<CompletionQueue> {
        let least = cqes.saturating_sub(1).max(1);
        let parent = uar.for_cqs().map_or(null_mut(), NonNull::as_ptr);
        // SAFETY: an open context, which the queue holds, and no domain or a parent domain of it, which outlives the queue.
        let cq = object("mlx5dv_create_cq", || unsafe {
            doorbell_dv_sys::doorbell_dv_create_cq(context.raw().as_ptr().cast(), least, parent)
        })?;
        Ok(CompletionQueue {
            cq: cq.cast(),
            _context: Arc::clone(context),
        })
    }

    /// A queue of that many entries or more, for any provider.
    ///
    /// # Errors
    /// [`crate::Error::System`] of `ibv_create_cq`.
    pub(super) fn of_at_least(context: &Arc<Context>, cqes: u32) -> Result<CompletionQueue> {
        let least = i32::try_from(cqes).unwrap_or(i32::MAX);
        // SAFETY: an open context, which the queue holds; no channel.
        let cq = object("ibv_create_cq", || unsafe {
            rdma_sys::ibv_create_cq(context.raw().as_ptr(), least, null_mut(), null_mut(), 0)
        })?;
        Ok(CompletionQueue {
            cq,
            _context: Arc::clone(context),
        })
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_cq> {
        self.cq
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once, after the queue pair that used it.
        release("ibv_destroy_cq", || unsafe {
            rdma_sys::ibv_destroy_cq(self.cq.as_ptr())
        });
    }
}
