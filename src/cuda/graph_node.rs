//! Nodes of graphs that do what a call of the driver does for a stream.
#![allow(unsafe_code)] // calls the driver

use std::ptr::null_mut;

use cudarc::driver::sys::{
    self, CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_MEMCPY3D, CUgraph, CUgraphExec, CUgraphNode,
    CUmemorytype,
};

use super::call_queue::{CallData, CallQueue};
use super::driver::check;
use super::instantiated_graph::{GraphNode, NodeKind};
use super::kernel_words::KernelWords;
use super::memops::MemOp;
use super::memory_work::MemoryCall;
use super::state::StreamState;
use crate::{Error, Result, StateKind};

/// The parts of a [`CallQueue`] that calls refer to.
struct CallParts<'a> {
    ops: &'a mut [MemOp],
    batch: &'a KernelWords,
    memory: &'a [MemoryCall],
}

impl StreamState {
    /// Adds a node for each of the queue's calls to a graph, the first behind `after` and each behind the one before. What the nodes are executed for is of
    /// this stream, until a launch says otherwise. The context is current.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda); those of the kernels. Some nodes may have been added to `nodes` then.
    ///
    /// # Safety
    /// The graph and the nodes before live.
    pub(super) unsafe fn add_nodes(
        &self,
        graph: CUgraph,
        after: &[CUgraphNode],
        queue: &mut CallQueue,
        nodes: &mut Vec<GraphNode>,
    ) -> Result<()> {
        let (calls, mut parts) = split(queue);
        let mut last = None;
        for call in calls {
            let after = last.as_ref().map_or(after, std::slice::from_ref);
            // SAFETY: by this function's contract; the new nodes live as long as the graph.
            let node = unsafe { self.add_node(graph, after, call, &mut parts)? };
            last = Some(node.raw);
            nodes.push(node);
        }
        Ok(())
    }

    /// # Safety
    /// As [`StreamState::add_nodes`].
    unsafe fn add_node(
        &self,
        graph: CUgraph,
        after: &[CUgraphNode],
        call: &CallData,
        parts: &mut CallParts<'_>,
    ) -> Result<GraphNode> {
        let mut raw = null_mut();
        let (nodes, count, to) = (after.as_ptr(), after.len(), &raw mut raw);
        let context = self.context.raw();
        let kind = match call {
            CallData::MemoryOps(range) => {
                let ops = parts.ops.get_mut(range.clone()).unwrap_or_default();
                let params = self.memop_params(ops);
                // SAFETY: writes one handle; the nodes and the graph live; the driver copies the operations.
                check("cuGraphAddBatchMemOpNode", unsafe {
                    sys::cuGraphAddBatchMemOpNode(to, graph, nodes, count, &params)
                })?;
                NodeKind::MemoryOps
            }
            CallData::Kernel(range) => {
                let words = parts.batch.words(range.clone());
                let control = self.count.words.control_at();
                self.context.module()?.execute(words, control, |launch| {
                    launch.with_params(context, |params| {
                        // SAFETY: as above; the driver copies the parameter.
                        check("cuGraphAddKernelNode", unsafe {
                            sys::cuGraphAddKernelNode_v2(to, graph, nodes, count, params)
                        })
                    })
                })?;
                NodeKind::Kernel
            }
            CallData::Memory(at) => {
                let Some(call) = parts.memory.get(*at) else {
                    return Err(unlike("it has less work on memory"));
                };
                match call {
                    MemoryCall::Copy {
                        into,
                        from,
                        len_bytes,
                    } => {
                        let params = copy_params(*into, *from, *len_bytes as usize);
                        // SAFETY: as above.
                        check("cuGraphAddMemcpyNode", unsafe {
                            sys::cuGraphAddMemcpyNode(to, graph, nodes, count, &params, context)
                        })?;
                    }
                    MemoryCall::Reduce(reduction) => {
                        let launch = self.context.module()?.reduce(reduction);
                        launch.with_params(context, |params| {
                            // SAFETY: as above.
                            check("cuGraphAddKernelNode", unsafe {
                                sys::cuGraphAddKernelNode_v2(to, graph, nodes, count, params)
                            })
                        })?;
                    }
                }
                NodeKind::Memory(call.clone())
            }
        };
        Ok(GraphNode { raw, kind })
    }

    /// Gives the nodes of an instantiated graph the queue's calls, which are as many, for its next launches. The context is current.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::State`] if the calls are not those that the nodes were made for.
    ///
    /// # Safety
    /// The nodes are of the graph that `exec` was instantiated from, which lives.
    pub(super) unsafe fn set_nodes<'a>(
        &self,
        exec: CUgraphExec,
        nodes: impl Iterator<Item = &'a GraphNode>,
        queue: &mut CallQueue,
    ) -> Result<()> {
        let (calls, parts) = split(queue);
        for (call, node) in calls.zip(nodes) {
            match (call, &node.kind) {
                (CallData::MemoryOps(range), NodeKind::MemoryOps) => {
                    let ops = parts.ops.get_mut(range.clone()).unwrap_or_default();
                    let params = self.memop_params(ops);
                    // SAFETY: by this function's contract; operations as in `issue`, which the driver copies.
                    check("cuGraphExecBatchMemOpNodeSetParams", unsafe {
                        sys::cuGraphExecBatchMemOpNodeSetParams(exec, node.raw, &params)
                    })?;
                }
                (CallData::Kernel(range), NodeKind::Kernel) => {
                    let words = parts.batch.words(range.clone());
                    let control = self.count.words.control_at();
                    self.context.module()?.execute(words, control, |launch| {
                        launch.with_params(self.context.raw(), |params| {
                            // SAFETY: as above.
                            check("cuGraphExecKernelNodeSetParams", unsafe {
                                sys::cuGraphExecKernelNodeSetParams_v2(exec, node.raw, params)
                            })
                        })
                    })?;
                }
                (CallData::Memory(at), NodeKind::Memory(was))
                    if parts.memory.get(*at) == Some(was) => {}
                _ => return Err(unlike("its programs do not fit its nodes")),
            }
        }
        Ok(())
    }

    /// The parameters of a node with these operations, which the driver copies.
    pub(super) fn memop_params(&self, ops: &mut [MemOp]) -> CUDA_BATCH_MEM_OP_NODE_PARAMS {
        CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: self.context.raw(),
            count: ops.len() as u32,
            paramArray: ops.as_mut_ptr(),
            flags: 0,
        }
    }
}

/// The calls of a queue, and what they refer to.
fn split(queue: &mut CallQueue) -> (impl Iterator<Item = &CallData>, CallParts<'_>) {
    let parts = CallParts {
        ops: &mut queue.ops,
        batch: &queue.batch,
        memory: &queue.memory,
    };
    (queue.calls.iter().map(|call| &call.what), parts)
}

/// A copy of so many bytes. The driver finds out of what memory the addresses are.
fn copy_params(into: u64, from: u64, len_bytes: usize) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: null_mut(),
        srcDevice: from,
        srcArray: null_mut(),
        reserved0: null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: null_mut(),
        dstDevice: into,
        dstArray: null_mut(),
        reserved1: null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: len_bytes,
        Height: 1,
        Depth: 1,
    }
}

#[cold]
pub(super) fn unlike(how: &str) -> Error {
    Error::state(
        StateKind::Graph,
        "launch a graph",
        format!("it is not the one that was recorded: {how}"),
    )
}
