//! The driver's functions for captures.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{CUgraph, CUgraphNode, CUstream};

use crate::call::{CUresult, CudaResult, In, Out, cuda, valid};
use crate::capture::{self, Capture};
use crate::stream::Stream;
use crate::streams;

/// CUstreamCaptureStatus.
const NONE: u32 = 0;
const RUNNING: u32 = 1;
const INVALIDATED: u32 = 2;
/// CU_STREAM_SET_CAPTURE_DEPENDENCIES.
const SET: u32 = 1;

thread_local! {
    /// What cuStreamGetCaptureInfo gave out last: good until the next call for the stream, and so until this thread's next one.
    static GIVEN: RefCell<Vec<CUgraphNode>> = const { RefCell::new(Vec::new()) };
}

/// A stream as these functions see it: they do not mind that it is being captured.
fn status(stream: &Stream) -> CudaResult<(u32, Option<Arc<Capture>>)> {
    if capture::is_default_beside_capture(stream) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    Ok(match stream.capture() {
        None => (NONE, None),
        Some(capture) if capture.is_invalid() => (INVALIDATED, None),
        Some(capture) => (RUNNING, Some(capture)),
    })
}

/// All but the edges' data, of which there is none.
fn info(
    stream: CUstream,
    to_status: &Out<u32>,
    to_id: &Out<u64>,
    to_graph: &Out<CUgraph>,
    to_nodes: &Out<*const CUgraphNode>,
    to_count: &Out<usize>,
) -> CudaResult {
    let stream = streams::find(stream)?;
    valid(!to_status.is_null())?;
    let (status, capture) = status(&stream)?;
    to_status.put(status)?;
    let Some(capture) = capture else {
        return Ok(());
    };
    to_id.put_if_wanted(capture.id);
    to_graph.put_if_wanted(capture.graph.handle as CUgraph);
    let nodes: Vec<CUgraphNode> = capture
        .after(&stream)
        .into_iter()
        .map(|node| node as CUgraphNode)
        .collect();
    to_count.put_if_wanted(nodes.len());
    GIVEN.with_borrow_mut(|given| {
        *given = nodes;
        to_nodes.put_if_wanted(given.as_ptr());
    });
    Ok(())
}

fn update(stream: CUstream, nodes: &In<CUgraphNode>, count: usize, flags: u32) -> CudaResult {
    let stream = streams::find(stream)?;
    valid(flags <= SET)?;
    let capture = stream.capture().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    if capture.is_invalid() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let given: Vec<u64> = nodes
        .get_all(count)?
        .into_iter()
        .map(|node| node as u64)
        .collect();
    let known: Vec<u64> = capture
        .graph
        .nodes()
        .iter()
        .map(|node| node.handle)
        .collect();
    valid(given.iter().all(|node| known.contains(node)))?;
    let mut after = if flags == SET {
        Vec::new()
    } else {
        capture.after(&stream)
    };
    after.extend(given);
    after.sort_unstable();
    after.dedup();
    capture.set_after(&stream, after);
    Ok(())
}

cuda! {
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) {
        valid(mode <= capture::RELAXED)?;
        capture::begin(&streams::find(stream)?, mode)
    }

    // Where it fails there is no graph.
    fn cuStreamEndCapture(stream: CUstream, graph: Out<CUgraph>) {
        let stream = streams::find(stream)?;
        graph.put(null_mut())?;
        graph.put(capture::end(&stream)?.handle as CUgraph)
    }

    fn cuStreamIsCapturing(stream: CUstream, to: Out<u32>) {
        let stream = streams::find(stream)?;
        valid(!to.is_null())?;
        to.put(status(&stream)?.0)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<CUgraph>, nodes: Out<*const CUgraphNode>, count: Out<usize>,
    ) {
        info(stream, &status, &id, &graph, &nodes, &count)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<CUgraph>, nodes: Out<*const CUgraphNode>,
        edges: Out<*const c_void>, count: Out<usize>,
    ) {
        valid(edges.is_null() || !nodes.is_null())?;
        info(stream, &status, &id, &graph, &nodes, &count)?;
        edges.put_if_wanted(null());
        Ok(())
    }

    fn cuStreamUpdateCaptureDependencies(stream: CUstream, nodes: In<CUgraphNode>, count: usize, flags: u32) {
        update(stream, &nodes, count, flags)
    }

    // Edges have no data here.
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: CUstream, nodes: In<CUgraphNode>, edges: *const c_void, count: usize, flags: u32,
    ) {
        if !edges.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        update(stream, &nodes, count, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        let given = mode.get()?;
        valid(given <= capture::RELAXED)?;
        mode.put(capture::exchange_mode(given))
    }
}
