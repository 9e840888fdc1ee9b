//! CUDA graphs that can be launched.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUDA_BATCH_MEM_OP_NODE_PARAMS, CUgraph, CUgraphExec, CUgraphNode};

use super::context::CudaContext;
use super::memops::MemOp;

/// A graph that can be launched.
pub(crate) struct InstantiatedGraph {
    pub(super) raw: CUgraphExec,
    /// The graph that it was instantiated from, if that is destroyed with it.
    graph: Option<CUgraph>,
    context: CudaContext,
    /// This library's nodes, in order, each with the number of its programs. The last one may have none.
    nodes: Vec<(CUgraphNode, usize)>,
}

// SAFETY: the handles may be used from any thread; a stream's queue is locked while they are used, and the driver has launches of one graph
// wait for each other. Two threads cannot patch it at once, since a launch takes `&mut` of the `GraphExec`.
unsafe impl Send for InstantiatedGraph {}
// SAFETY: as above.
unsafe impl Sync for InstantiatedGraph {}

impl InstantiatedGraph {
    /// `raw` was instantiated in that context, and belongs to this object. So does `graph`, if there is one.
    pub(super) fn new(
        context: &CudaContext,
        raw: CUgraphExec,
        graph: Option<CUgraph>,
        nodes: Vec<(CUgraphNode, usize)>,
    ) -> InstantiatedGraph {
        InstantiatedGraph {
            raw,
            graph,
            context: context.clone(),
            nodes,
        }
    }

    pub(super) fn nodes(&self) -> &[(CUgraphNode, usize)] {
        &self.nodes
    }

    pub(crate) fn context(&self) -> &CudaContext {
        &self.context
    }

    pub(crate) fn raw(&self) -> CUgraphExec {
        self.raw
    }
}

impl Drop for InstantiatedGraph {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_give_back() else {
            return;
        };
        // SAFETY: belongs to this object. Streams keep the object until their launches of it are done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        if let Some(graph) = self.graph {
            // SAFETY: as above.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

/// The parameters of a node with these operations, which the driver copies.
pub(super) fn params(context: &CudaContext, ops: &mut [MemOp]) -> CUDA_BATCH_MEM_OP_NODE_PARAMS {
    CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: context.raw(),
        count: ops.len() as u32,
        paramArray: ops.as_mut_ptr(),
        flags: 0,
    }
}
