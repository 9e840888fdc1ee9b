//! The driver's functions that make graphs and look at them. What is wrong with a handle here is CUDA_ERROR_INVALID_VALUE.

use std::sync::atomic::Ordering;

use cudarc::driver::sys::{
    CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUgraph,
    CUgraphNode,
};

use crate::call::{CUresult, CudaResult, In, Out, cuda, valid};
use crate::graph::{self, Graph, NodeWork};
use crate::node::{self, BatchParams, BoxParams};

/// Adds a node that was made from its parameters.
fn add(
    node: &Out<CUgraphNode>,
    graph: CUgraph,
    after: &In<CUgraphNode>,
    count: usize,
    work: CudaResult<NodeWork>,
) -> CudaResult {
    let graph = graph::find(graph)?;
    valid(!node.is_null())?;
    let after: Vec<u64> = after
        .get_all(count)?
        .into_iter()
        .map(|node| node as u64)
        .collect();
    node.put(graph.add(work?, &after)? as CUgraphNode)
}

/// As many handles as the caller has room for, and how many those were; or how many there are, if it wants no handles.
fn put_handles(to: &Out<CUgraphNode>, count: &Out<usize>, handles: &[u64]) -> CudaResult {
    valid(!count.is_null())?;
    if to.is_null() {
        return count.put(handles.len());
    }
    let room = count.get()?;
    let mut all: Vec<CUgraphNode> = handles
        .iter()
        .map(|handle| *handle as CUgraphNode)
        .collect();
    all.resize(room, std::ptr::null_mut());
    to.put_all(&all);
    count.put(handles.len().min(room))
}

fn edges(graph: &Graph) -> Vec<(u64, u64)> {
    let nodes = graph.nodes();
    nodes
        .iter()
        .flat_map(|node| node.after.iter().map(|before| (*before, node.handle)))
        .collect()
}

fn put_edges(
    graph: CUgraph,
    from: &Out<CUgraphNode>,
    to: &Out<CUgraphNode>,
    count: &Out<usize>,
) -> CudaResult {
    let edges = edges(&*graph::find(graph)?);
    // Either both arrays or none.
    valid(!count.is_null() && from.is_null() == to.is_null())?;
    let room = if from.is_null() { 0 } else { count.get()? };
    let (first, second): (Vec<u64>, Vec<u64>) = edges.into_iter().unzip();
    put_handles(from, count, &first)?;
    if !from.is_null() {
        count.put(room)?;
    }
    put_handles(to, count, &second)
}

/// Adds edges between nodes of one graph, or takes them away; all or none.
fn change_edges(
    graph: CUgraph,
    from: &In<CUgraphNode>,
    to: &In<CUgraphNode>,
    count: usize,
    adds: bool,
) -> CudaResult {
    let graph = graph::find(graph)?;
    let (from, to) = (from.get_all(count)?, to.get_all(count)?);
    let mut nodes = graph.nodes();
    let mut changed = nodes.clone();
    for (from, to) in from.into_iter().zip(to) {
        let (from, to) = (from as u64, to as u64);
        valid(from != to && changed.iter().any(|node| node.handle == from))?;
        let node = changed.iter_mut().find(|node| node.handle == to);
        let node = node.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        valid(node.after.contains(&from) != adds)?;
        if adds {
            node.after.push(from);
        } else {
            node.after.retain(|before| *before != from);
        }
    }
    *nodes = changed;
    Ok(())
}

cuda! {
    fn cuGraphCreate(to: Out<CUgraph>, flags: u32) {
        valid(!to.is_null() && flags == 0)?;
        to.put(graph::create().handle as CUgraph)
    }

    // Not one that a stream is being captured into.
    fn cuGraphDestroy(graph: CUgraph) {
        let graph = graph::find(graph)?;
        valid(!graph.capturing.load(Ordering::Acquire))?;
        graph.destroy();
        Ok(())
    }

    fn cuGraphClone(to: Out<CUgraph>, graph: CUgraph) {
        let graph = graph::find(graph)?;
        valid(!to.is_null())?;
        to.put(graph.copy().handle as CUgraph)
    }

    fn cuGraphNodeFindInClone(to: Out<CUgraphNode>, original: CUgraphNode, clone: CUgraph) {
        let clone = graph::find(clone)?;
        let found = clone.nodes().iter().find(|node| node.original == original as u64).map(|node| node.handle);
        to.put(found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)? as CUgraphNode)
    }

    fn cuGraphAddEmptyNode(node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize) {
        add(&node, graph, &after, count, Ok(NodeWork::Empty))
    }

    fn cuGraphAddKernelNode_v2(
        node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<CUDA_KERNEL_NODE_PARAMS_v2>,
    ) {
        add(&node, graph, &after, count, node::kernel(&params))
    }

    fn cuGraphAddMemcpyNode(
        node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<BoxParams>, ctx: CUcontext,
    ) {
        add(&node, graph, &after, count, node::copy(&params, ctx))
    }

    fn cuGraphAddMemsetNode(
        node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<CUDA_MEMSET_NODE_PARAMS>,
        ctx: CUcontext,
    ) {
        add(&node, graph, &after, count, node::fill(&params, ctx))
    }

    fn cuGraphAddHostNode(
        node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<CUDA_HOST_NODE_PARAMS>,
    ) {
        add(&node, graph, &after, count, node::host(&params))
    }

    fn cuGraphAddBatchMemOpNode(
        node: Out<CUgraphNode>, graph: CUgraph, after: In<CUgraphNode>, count: usize, params: In<BatchParams>,
    ) {
        add(&node, graph, &after, count, node::batch(&params))
    }

    // The array that it points to is the node's: good until the node is changed or destroyed.
    fn cuGraphBatchMemOpNodeGetParams(node: CUgraphNode, params: Out<BatchParams>) {
        let graph = graph::find_of(node)?;
        let nodes = graph.nodes();
        let found = nodes.iter().find(|other| other.handle == node as u64).map(|node| &node.work);
        let Some(NodeWork::Memops { context, words, .. }) = found else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        params.put(BatchParams {
            context: *context as CUcontext,
            count: words.len() as u32,
            params: words.as_ptr(),
            flags: 0,
        })
    }

    fn cuGraphBatchMemOpNodeSetParams(node: CUgraphNode, params: In<BatchParams>) {
        set(node, node::batch(&params)?)
    }

    fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS_v2>) {
        set(node, node::kernel(&params)?)
    }

    fn cuGraphDestroyNode(node: CUgraphNode) {
        graph::find_of(node)?.remove(node)
    }

    fn cuGraphAddDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) {
        change_edges(graph, &from, &to, count, true)
    }

    fn cuGraphRemoveDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) {
        change_edges(graph, &from, &to, count, false)
    }

    fn cuGraphGetNodes(graph: CUgraph, nodes: Out<CUgraphNode>, count: Out<usize>) {
        let graph = graph::find(graph)?;
        let handles: Vec<u64> = graph.nodes().iter().map(|node| node.handle).collect();
        put_handles(&nodes, &count, &handles)
    }

    fn cuGraphGetRootNodes(graph: CUgraph, nodes: Out<CUgraphNode>, count: Out<usize>) {
        let graph = graph::find(graph)?;
        let roots: Vec<u64> = graph.nodes().iter().filter(|node| node.after.is_empty()).map(|node| node.handle).collect();
        put_handles(&nodes, &count, &roots)
    }

    fn cuGraphGetEdges(graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, count: Out<usize>) {
        put_edges(graph, &from, &to, &count)
    }

    fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: Out<CUgraphNode>, count: Out<usize>) {
        let edges = edges(&*graph::find_of(node)?);
        let found: Vec<u64> = edges.iter().filter(|(_, to)| *to == node as u64).map(|(from, _)| *from).collect();
        put_handles(&nodes, &count, &found)
    }

    fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: Out<CUgraphNode>, count: Out<usize>) {
        let edges = edges(&*graph::find_of(node)?);
        let found: Vec<u64> = edges.iter().filter(|(from, _)| *from == node as u64).map(|(_, to)| *to).collect();
        put_handles(&nodes, &count, &found)
    }

    fn cuGraphNodeGetType(node: CUgraphNode, kind: Out<u32>) {
        let graph = graph::find_of(node)?;
        let found = graph.nodes().iter().find(|other| other.handle == node as u64).map(|node| node.work.kind());
        kind.put(found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?)
    }
}

/// Gives a node other work of its kind.
fn set(node: CUgraphNode, work: NodeWork) -> CudaResult {
    let graph = graph::find_of(node)?;
    let mut nodes = graph.nodes();
    let found = nodes.iter_mut().find(|other| other.handle == node as u64);
    let found = found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    valid(found.work.kind() == work.kind())?;
    found.work = work;
    Ok(())
}
