//! CUDA graphs that can be launched.
#![allow(unsafe_code)] // calls the driver

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUgraphNode};

use super::context::CudaContext;
use super::memory_work::MemoryCall;

/// A node. Each launch of its graph gives it the operations or the words of that launch; work on memory stays what it was.
pub(super) struct GraphNode {
    pub(super) raw: CUgraphNode,
    pub(super) kind: NodeKind,
}

pub(super) enum NodeKind {
    MemoryOps,
    Kernel,
    Memory(MemoryCall),
}

/// The nodes of programs that were translated together, one behind the other.
pub(super) struct NodeGroup {
    pub(super) nodes: Vec<GraphNode>,
    /// How many programs. None: the group only counts.
    pub(super) programs: usize,
}

/// A graph that can be launched.
pub(crate) struct InstantiatedGraph {
    pub(super) raw: CUgraphExec,
    /// The graph that it was instantiated from, if that is destroyed with it.
    graph: Option<CUgraph>,
    context: CudaContext,
    /// This library's nodes, in order. The last group may have no programs.
    groups: Vec<NodeGroup>,
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
        groups: Vec<NodeGroup>,
    ) -> InstantiatedGraph {
        InstantiatedGraph {
            raw,
            graph,
            context: context.clone(),
            groups,
        }
    }

    pub(super) fn groups(&self) -> &[NodeGroup] {
        &self.groups
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
