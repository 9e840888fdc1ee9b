//! A kernel that executes an operation, and what kernels of operations use.

use std::sync::Arc;

use super::context::CudaContext;
use super::stream_progress::Count;
use crate::stream::{ReplayCell, ReplayKeeper};

/// What a graph, or a stream, keeps for such kernels: also the words of the stream that has them, and the context with the kernels' code.
pub(super) struct KeptByGraph {
    _keeper: Option<ReplayKeeper>,
    _words: Arc<Count>,
    _context: CudaContext,
}

impl KeptByGraph {
    pub(super) fn new(
        keeper: Option<ReplayKeeper>,
        words: &Arc<Count>,
        context: &CudaContext,
    ) -> KeptByGraph {
        KeptByGraph {
            _keeper: keeper,
            _words: Arc::clone(words),
            _context: context.clone(),
        }
    }
}

/// A kernel on a stream that is not captured.
pub(super) struct QueuedKernel {
    pub(super) kept: KeptByGraph,
    pub(super) cell: Arc<ReplayCell>,
    /// The driver has it, and has refused the count behind it.
    pub(super) is_uncounted: bool,
}
