//! Drafts of CUDA graphs whose nodes are programs. A graph is launched with new programs in the same nodes.
#![allow(unsafe_code)] // calls the driver

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphNode, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::call_queue::CallQueue;
use super::capture::RelaxedCapture;
use super::decoded::Decoded;
use super::driver::check;
use super::instantiated_graph::{InstantiatedGraph, params};
use super::memops::MemOp;
use super::stream::CudaStream;
use crate::stream::Submission;
use crate::{Error, Result, StateKind};

/// A graph that is being recorded: by a capture of a stream, or as nodes of a graph of the application's. It stays in its thread, because the driver
/// ends a capture in the thread that began it.
///
/// Each node of this library's depends on the one before, also where nothing else in the graph requires it: the values of doorbell records and of the
/// stream's count must not go back.
pub(crate) struct Draft {
    stream: CudaStream,
    graph: CUgraph,
    captured: bool,
    nodes: Vec<DraftNode>,
    /// The dependencies of the next node besides the last one, in a graph of the application's.
    after: Vec<CUgraphNode>,
    /// Nothing more may be added to the last node, which the application knows.
    closed: bool,
}

struct DraftNode {
    raw: CUgraphNode,
    programs: Vec<Submission>,
}

impl Draft {
    /// Begins to capture the stream. Everything that is queued on it goes into the graph.
    pub(crate) fn capture(stream: &CudaStream) -> Result<Draft> {
        stream.begin_capture()?;
        Ok(Draft {
            stream: stream.clone(),
            graph: null_mut(),
            captured: true,
            nodes: Vec::new(),
            after: Vec::new(),
            closed: false,
        })
    }

    /// Adds nodes to a graph of the application's.
    ///
    /// # Safety
    /// The graph lives, with the nodes added to it, until the draft and what is instantiated of it are dropped.
    pub(crate) unsafe fn over(stream: &CudaStream, graph: CUgraph) -> Draft {
        Draft {
            stream: stream.clone(),
            graph,
            captured: false,
            nodes: Vec::new(),
            after: Vec::new(),
            closed: false,
        }
    }

    pub(crate) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Adds dependencies to the next node.
    pub(crate) fn after(&mut self, nodes: &[CUgraphNode]) -> Result<()> {
        if self.captured {
            return Err(Error::state(
                StateKind::WrongKind,
                "GraphBuilder::after",
                "the streams set the order of a captured graph",
            ));
        }
        self.after.extend(nodes);
        self.closed |= !nodes.is_empty();
        Ok(())
    }

    /// The last node. Later programs are not added to it.
    pub(crate) fn last_node(&mut self) -> Option<CUgraphNode> {
        self.closed = true;
        self.nodes.last().map(|node| node.raw)
    }

    /// Adds a program. A program that waits gets its own node, since other nodes may have to run before it. Any other program is added to the last node
    /// if nothing was added to the graph after that.
    pub(crate) fn add(&mut self, submission: Submission) -> Result<()> {
        let _relaxed = RelaxedCapture::new();
        let waits = Decoded::new(&submission.program).waits;
        let (graph, after) = self.place()?;
        let last = self.nodes.last().map(|node| node.raw);
        if !waits && !self.closed && last.is_some() && after.as_slice() == last.as_slice() {
            // Removed again if it does not fit.
            if let Some(node) = self.nodes.last_mut() {
                node.programs.push(submission);
                if let Ok(mut ops) = ops_of(&self.stream, &node.programs) {
                    let _entered = self.stream.context().enter()?;
                    let params = params(self.stream.context(), &mut ops);
                    // SAFETY: a node of ours, in a graph that lives; the driver copies the operations.
                    let changed = check("cuGraphBatchMemOpNodeSetParams", unsafe {
                        sys::cuGraphBatchMemOpNodeSetParams(node.raw, &params)
                    });
                    if changed.is_err() {
                        node.programs.pop();
                    }
                    return changed;
                }
            }
            let submission = self.nodes.last_mut().and_then(|node| node.programs.pop());
            return submission.map_or(Ok(()), |submission| {
                self.add_node(graph, after, vec![submission])
            });
        }
        self.add_node(graph, after, vec![submission])
    }

    fn add_node(
        &mut self,
        graph: CUgraph,
        after: Vec<CUgraphNode>,
        programs: Vec<Submission>,
    ) -> Result<()> {
        let mut ops = if programs.is_empty() {
            self.stream.count_op()
        } else {
            ops_of(&self.stream, &programs)?
        };
        let _entered = self.stream.context().enter()?;
        let params = params(self.stream.context(), &mut ops);
        let mut raw = null_mut();
        // SAFETY: writes one handle; the nodes are of the graph, which lives; the driver copies the operations.
        check("cuGraphAddBatchMemOpNode", unsafe {
            sys::cuGraphAddBatchMemOpNode(&mut raw, graph, after.as_ptr(), after.len(), &params)
        })?;
        if self.captured {
            const SET: u32 =
                sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES
                    as u32;
            // SAFETY: a node of the graph that the stream is captured into.
            check("cuStreamUpdateCaptureDependencies", unsafe {
                sys::cuStreamUpdateCaptureDependencies(self.stream.raw_inside(), &mut raw, 1, SET)
            })?;
        }
        self.nodes.push(DraftNode { raw, programs });
        self.after.clear();
        self.closed = false;
        Ok(())
    }

    /// The graph, and the dependencies of the next node.
    fn place(&self) -> Result<(CUgraph, Vec<CUgraphNode>)> {
        if !self.captured {
            let mut after = self.after.clone();
            let last = self.nodes.last().map(|node| node.raw);
            after.extend(last.filter(|last| !after.contains(last)));
            return Ok((self.graph, after));
        }
        let _entered = self.stream.context().enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph = null_mut();
        let mut nodes = null();
        let mut count = 0;
        // SAFETY: writes what is pointed to; the id is not needed.
        check("cuStreamGetCaptureInfo", unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.stream.raw_inside(),
                &mut status,
                null_mut(),
                &mut graph,
                &mut nodes,
                &mut count,
            )
        })?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            return Err(Error::state(
                StateKind::Graph,
                "GraphBuilder",
                "the capture has been broken off",
            ));
        }
        if count == 0 {
            return Ok((graph, Vec::new()));
        }
        // SAFETY: as many handles, which are good until the next call for the stream.
        let after = unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec();
        Ok((graph, after))
    }

    /// The nodes of a graph of the application's on which no node depends.
    fn leaves(&self) -> Result<Vec<CUgraphNode>> {
        let mut count = 0;
        // SAFETY: writes the number of nodes; then, into room for as many, their handles.
        check("cuGraphGetNodes", unsafe {
            sys::cuGraphGetNodes(self.graph, null_mut(), &mut count)
        })?;
        let mut nodes = vec![null_mut(); count];
        if count > 0 {
            // SAFETY: as above.
            check("cuGraphGetNodes", unsafe {
                sys::cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &mut count)
            })?;
        }
        let mut leaves = Vec::new();
        for node in nodes {
            let mut followers = 0;
            // SAFETY: writes the number of nodes.
            check("cuGraphNodeGetDependentNodes", unsafe {
                sys::cuGraphNodeGetDependentNodes(node, null_mut(), &mut followers)
            })?;
            if followers == 0 {
                leaves.push(node);
            }
        }
        Ok(leaves)
    }

    /// Ends the recording. The last node, which comes after all others, is one of this library's: its count shows that the graph is done.
    pub(crate) fn instantiate(mut self) -> Result<Arc<InstantiatedGraph>> {
        let context = self.stream.context().clone();
        let _relaxed = RelaxedCapture::new();
        let _entered = context.enter()?;
        let (graph, mut after) = self.place()?;
        if !self.captured {
            after = self.leaves()?;
        }
        if self.nodes.last().map(|node| node.raw).as_slice() != after.as_slice() {
            self.add_node(graph, after, Vec::new())?;
        }
        if self.captured {
            self.graph = self.stream.end_capture()?;
        }
        let mut raw = null_mut();
        // SAFETY: writes one handle, which `InstantiatedGraph` destroys.
        check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut raw, self.graph, 0)
        })?;
        let nodes = self
            .nodes
            .drain(..)
            .map(|node| (node.raw, node.programs.len()))
            .collect();
        let graph = std::mem::replace(&mut self.graph, null_mut());
        Ok(Arc::new(InstantiatedGraph::new(
            &context,
            raw,
            self.captured.then_some(graph),
            nodes,
        )))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.captured {
            return;
        }
        if self.graph.is_null() {
            self.graph = self.stream.end_capture().unwrap_or(null_mut());
        }
        if !self.graph.is_null()
            && let Some(_entered) = self.stream.context().enter_to_give_back()
        {
            // SAFETY: of this draft's capture, and not given away.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

/// The operations of one node.
fn ops_of(stream: &CudaStream, programs: &[Submission]) -> Result<Vec<MemOp>> {
    let mut queue = CallQueue::for_node();
    stream.translate(&mut queue, programs)?;
    queue.into_one_call().ok_or_else(|| {
        Error::state(
            StateKind::Exhausted,
            "GraphBuilder",
            "more operations than a node can have",
        )
    })
}

impl CudaStream {
    /// Captures in thread-local mode, which calls of other threads do not invalidate. This library's own calls use a relaxed-capture guard.
    fn begin_capture(&self) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.alone(|raw| {
            self.set_captured(true);
            // SAFETY: a stream of the current context.
            check("cuStreamBeginCapture", unsafe {
                sys::cuStreamBeginCapture_v2(raw, mode)
            })
        })
    }

    fn end_capture(&self) -> Result<CUgraph> {
        let mut graph = null_mut();
        self.alone(|raw| {
            // SAFETY: a stream of the current context; writes one handle, null if there is none.
            check("cuStreamEndCapture", unsafe {
                sys::cuStreamEndCapture(raw, &mut graph)
            })?;
            self.set_captured(false);
            Ok(())
        })?;
        Ok(graph)
    }
}
