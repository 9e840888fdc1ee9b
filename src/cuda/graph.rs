//! Drafts of CUDA graphs whose nodes are programs. A graph is launched with new programs in the same nodes.
#![allow(unsafe_code)] // calls the driver

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphNode, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::call_queue::CallQueue;
use super::capture::{RelaxedCapture, is_captured};
use super::decoded::Decoded;
use super::driver::check;
use super::instantiated_graph::{GraphNode, InstantiatedGraph, NodeGroup};
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
    groups: Vec<DraftGroup>,
    /// The dependencies of the next node besides the last one, in a graph of the application's.
    after: Vec<CUgraphNode>,
    /// Nothing more may be added to the last node, which the application knows.
    closed: bool,
    /// A program has left some of its nodes in the graph.
    is_partial: bool,
}

struct DraftGroup {
    nodes: Vec<GraphNode>,
    programs: Vec<Submission>,
    /// It is one node of memory operations, to which others may be added.
    takes_more: bool,
}

impl Draft {
    /// Begins to capture the stream. Everything that is queued on it goes into the graph.
    pub(crate) fn capture(stream: &CudaStream) -> Result<Draft> {
        stream.begin_capture()?;
        Ok(Draft {
            stream: stream.clone(),
            graph: null_mut(),
            captured: true,
            groups: Vec::new(),
            after: Vec::new(),
            closed: false,
            is_partial: false,
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
            groups: Vec::new(),
            after: Vec::new(),
            closed: false,
            is_partial: false,
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
        self.last()
    }

    fn last(&self) -> Option<CUgraphNode> {
        let last = self.groups.last()?.nodes.last();
        last.map(|node| node.raw)
    }

    /// Adds a program. A program that waits gets its own node, since other nodes may have to run before it. Any other program is added to the last node
    /// if nothing was added to the graph after that, and if both are memory operations.
    ///
    /// # Errors
    /// What the stream refuses; [`Error::State`] if the capture was broken off; [`Error::Cuda`](crate::Error::Cuda): then a program that takes several nodes, with
    /// work on memory, may have left some in the graph.
    pub(crate) fn add(&mut self, submission: Submission) -> Result<()> {
        let _relaxed = RelaxedCapture::new();
        let waits = Decoded::new(&submission.program).waits;
        let (graph, after) = self.place()?;
        let may_share = !waits && !self.closed && after.as_slice() == self.last().as_slice();
        let last = self.groups.last_mut().filter(|last| last.takes_more);
        // Removed again if it does not fit.
        if may_share && let Some(last) = last {
            last.programs.push(submission);
            let calls = calls_of(&self.stream, &last.programs);
            match (calls, last.nodes.first()) {
                (Ok(mut queue), Some(node)) if queue.is_one_call() => {
                    let _entered = self.stream.context().enter()?;
                    let params = self.stream.state().memop_params(&mut queue.ops);
                    // SAFETY: a node of ours, in a graph that lives; the driver copies the operations.
                    let changed = check("cuGraphBatchMemOpNodeSetParams", unsafe {
                        sys::cuGraphBatchMemOpNodeSetParams(node.raw, &params)
                    });
                    if changed.is_err() {
                        last.programs.pop();
                    }
                    return changed;
                }
                _ => {}
            }
            let submission = last.programs.pop();
            return submission.map_or(Ok(()), |submission| {
                self.add_group(graph, after, vec![submission])
            });
        }
        self.add_group(graph, after, vec![submission])
    }

    fn add_group(
        &mut self,
        graph: CUgraph,
        after: Vec<CUgraphNode>,
        programs: Vec<Submission>,
    ) -> Result<()> {
        let mut queue = calls_of(&self.stream, &programs)?;
        let _entered = self.stream.context().enter()?;
        let mut nodes = Vec::with_capacity(queue.calls.len());
        let state = self.stream.state();
        // SAFETY: the graph lives, and the nodes before are of it.
        let added = unsafe { state.add_nodes(graph, &after, &mut queue, &mut nodes) };
        let mut followed = Ok(());
        if self.captured
            && let Some(last) = nodes.last()
        {
            const SET: u32 =
                sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES
                    as u32;
            let mut last = last.raw;
            // SAFETY: a node of the graph that the stream is captured into.
            followed = check("cuStreamUpdateCaptureDependencies", unsafe {
                sys::cuStreamUpdateCaptureDependencies(self.stream.raw_inside(), &mut last, 1, SET)
            });
        }
        let added = added.and(followed);
        self.is_partial |= added.is_err() && !nodes.is_empty();
        added?;
        self.groups.push(DraftGroup {
            nodes,
            programs,
            takes_more: queue.is_one_call(),
        });
        self.after.clear();
        self.closed = false;
        Ok(())
    }

    /// The graph, and the dependencies of the next node.
    fn place(&self) -> Result<(CUgraph, Vec<CUgraphNode>)> {
        if !self.captured {
            let mut after = self.after.clone();
            let last = self.last();
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
    ///
    /// # Errors
    /// [`Error::State`] if a part of a program was recorded, or the capture was broken off; [`Error::Cuda`](crate::Error::Cuda).
    pub(crate) fn instantiate(mut self) -> Result<Arc<InstantiatedGraph>> {
        if self.is_partial {
            return Err(Error::state(
                StateKind::Graph,
                "GraphBuilder::instantiate",
                "an operation failed after some of its nodes had been added",
            ));
        }
        let context = self.stream.context().clone();
        let _relaxed = RelaxedCapture::new();
        let _entered = context.enter()?;
        let (graph, mut after) = self.place()?;
        if !self.captured {
            after = self.leaves()?;
        }
        if self.last().as_slice() != after.as_slice() {
            self.add_group(graph, after, Vec::new())?;
        }
        if self.captured {
            self.graph = self.stream.end_capture()?;
        }
        let mut raw = null_mut();
        // SAFETY: writes one handle, which `InstantiatedGraph` destroys.
        check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut raw, self.graph, 0)
        })?;
        let groups = self.groups.drain(..).map(|group| NodeGroup {
            nodes: group.nodes,
            programs: group.programs.len(),
        });
        let groups = groups.collect();
        let graph = std::mem::replace(&mut self.graph, null_mut());
        Ok(Arc::new(InstantiatedGraph::new(
            &context,
            raw,
            self.captured.then_some(graph),
            groups,
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

/// The calls of programs, or of a count if there are none.
fn calls_of(stream: &CudaStream, programs: &[Submission]) -> Result<CallQueue> {
    let mut queue = CallQueue::for_node();
    let state = stream.state();
    if programs.is_empty() {
        state.count(&mut queue);
    } else {
        state.prepare(&mut queue, programs.iter())?;
    }
    queue.end_call();
    Ok(queue)
}

impl CudaStream {
    /// Captures in thread-local mode, which calls of other threads do not invalidate. This library's own calls use a relaxed-capture guard.
    fn begin_capture(&self) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.alone(|raw| {
            let before = self.set_captured(true);
            // SAFETY: a stream of the current context.
            let begun = check("cuStreamBeginCapture", unsafe {
                sys::cuStreamBeginCapture_v2(raw, mode)
            });
            begun.inspect_err(|_| {
                self.set_captured(before);
            })
        })
    }

    fn end_capture(&self) -> Result<CUgraph> {
        let mut graph = null_mut();
        self.alone(|raw| {
            // SAFETY: a stream of the current context; writes one handle, null if there is none.
            let ended = check("cuStreamEndCapture", unsafe {
                sys::cuStreamEndCapture(raw, &mut graph)
            });
            // It reports a capture that was invalidated as an error, and ends it.
            let goes_on = ended.is_err() && is_captured(raw).unwrap_or(false);
            self.set_captured(goes_on);
            ended
        })?;
        Ok(graph)
    }
}
