//! Capturing streams: what becomes a node, how streams join, and everything that breaks it.

mod rig;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard};

use cu::CUstreamCaptureMode::{self as Mode, *};
use cu::CUstreamCaptureStatus::{self as Status, *};
use rig::*;

/// A capture of the global mode forbids things to all threads, other tests' too.
fn alone() -> (MutexGuard<'static, ()>, Gpu) {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    (guard, Gpu::new())
}

fn begin(stream: cu::CUstream) {
    good!(cuStreamBeginCapture_v2(
        stream,
        CU_STREAM_CAPTURE_MODE_GLOBAL
    ));
}

fn end(stream: cu::CUstream) -> Result<cu::CUgraph, CUresult> {
    let mut graph = 8 as cu::CUgraph;
    match call!(cuStreamEndCapture(stream, &mut graph)) {
        CUDA_SUCCESS => Ok(graph),
        error => {
            assert!(graph.is_null());
            Err(error)
        }
    }
}

fn status(stream: cu::CUstream) -> Status {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    good!(cuStreamIsCapturing(stream, &mut status));
    status
}

fn count(graph: cu::CUgraph) -> (usize, usize) {
    let (mut nodes, mut edges) = (0, 0);
    good!(cuGraphGetNodes(graph, null_mut(), &mut nodes); cuGraphGetEdges(graph, null_mut(), null_mut(), &mut edges));
    (nodes, edges)
}

fn launch(graph: cu::CUgraph, stream: cu::CUstream) {
    let mut exec = null_mut();
    good!(cuGraphInstantiateWithFlags(&mut exec, graph, 0); cuGraphLaunch(exec, stream); cuStreamSynchronize(stream));
}

#[test]
fn captured_work_becomes_nodes_and_does_not_run() {
    let (_alone, gpu) = alone();
    let (stream, words) = (gpu.stream(), gpu.words());
    let device = gpu.alloc(64);
    let function = gpu.function(c"doorbell_standin_mark");
    let (address, value) = (words.at(3), 4u32);
    let mut arguments: [*mut c_void; 2] = [
        (&raw const address).cast_mut().cast(),
        (&raw const value).cast_mut().cast(),
    ];
    assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    begin(stream);
    assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    good!(cuStreamWriteValue32_v2(stream, words.at(0), 7, 0));
    good!(cuMemsetD32Async(device, 9, 4, stream); cuMemcpyDtoHAsync_v2(words.at(1) as *mut c_void, device, 8, stream));
    good!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        stream,
        arguments.as_mut_ptr(),
        null_mut()
    ));
    let graph = end(stream).unwrap();
    assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    good!(cuStreamSynchronize(stream));
    assert_eq!(words.get(0), 0);
    assert_eq!(count(graph), (4, 3));
    let (mut nodes, mut count) = ([null_mut(); 4], 4);
    good!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    let kinds = nodes.map(|node| {
        let mut kind = cu::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        good!(cuGraphNodeGetType(node, &mut kind));
        kind as u32
    });
    assert_eq!(kinds, [12, 2, 1, 0]);
    launch(graph, stream);
    assert_eq!([0, 1, 2, 3].map(|index| words.get(index)), [7, 9, 9, 4]);
    good!(cuGraphDestroy(graph));
}

#[test]
fn wrong_arguments_are_found_as_without_a_capture() {
    let (_alone, gpu) = alone();
    let (stream, words) = (gpu.stream(), gpu.words());
    begin(stream);
    assert_eq!(
        call!(cuStreamWriteValue32_v2(stream, words.at(0) + 1, 7, 0)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(count(end(stream).unwrap()), (0, 0));
}

#[test]
fn asking_a_stream_that_is_captured_breaks_the_capture() {
    let (_alone, gpu) = alone();
    let (stream, words) = (gpu.stream(), gpu.words());
    let other = gpu.stream();
    let event = gpu.event(0);
    let mut pointer = 0;
    let breaks: [(&dyn Fn() -> CUresult, CUresult); 8] = [
        (
            &|| call!(cuStreamSynchronize(stream)),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (
            &|| call!(cuStreamQuery(stream)),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (
            &|| call!(cuCtxSynchronize()),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (&|| call!(cuEventQuery(event)), CUDA_ERROR_CAPTURED_EVENT),
        (
            &|| call!(cuEventSynchronize(event)),
            CUDA_ERROR_CAPTURED_EVENT,
        ),
        (
            &|| call!(cuMemFree_v2(64)),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (
            &|| call!(cuMemHostUnregister(64 as *mut c_void)),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (
            &|| call!(cuStreamQuery(other)),
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
    ];
    for (index, (break_it, expected)) in breaks.into_iter().enumerate() {
        begin(stream);
        good!(cuStreamWriteValue32_v2(stream, words.at(0), 7, 0); cuEventRecord(event, stream));
        assert_eq!(break_it(), expected, "{index}");
        assert_eq!(
            status(stream),
            CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            "{index}"
        );
        let invalid = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(
            call!(cuStreamWriteValue32_v2(stream, words.at(0), 7, 0)),
            invalid
        );
        assert_eq!(end(stream), Err(invalid), "{index}");
        good!(cuStreamSynchronize(stream); cuMemAlloc_v2(&mut pointer, 64));
    }
    assert_eq!(words.get(0), 0);
}

#[test]
fn capture_mode_decides_which_calls_are_forbidden() {
    let (_alone, gpu) = alone();
    let stream = gpu.stream();
    let context = gpu.context as usize;
    let alloc = || {
        let mut pointer = 0;
        call!(cuMemAlloc_v2(&mut pointer, 64))
    };
    let elsewhere = |mode: Option<Mode>| {
        std::thread::spawn(move || {
            good!(cuCtxSetCurrent(context as cu::CUcontext));
            if let Some(mut mode) = mode {
                good!(cuThreadExchangeStreamCaptureMode(&mut mode));
                assert_eq!(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
            }
            let mut pointer = 0;
            call!(cuMemAlloc_v2(&mut pointer, 64))
        })
        .join()
        .unwrap()
    };
    let no = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    let (global, local, relaxed) = (
        CU_STREAM_CAPTURE_MODE_GLOBAL,
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CU_STREAM_CAPTURE_MODE_RELAXED,
    );
    // The capture's mode; then what becomes of this thread, of another, and of others with modes of their own.
    for (mode, own, other, other_local, other_relaxed) in [
        (global, no, no, CUDA_SUCCESS, CUDA_SUCCESS),
        (local, no, CUDA_SUCCESS, CUDA_SUCCESS, CUDA_SUCCESS),
        (
            relaxed,
            CUDA_SUCCESS,
            CUDA_SUCCESS,
            CUDA_SUCCESS,
            CUDA_SUCCESS,
        ),
    ] {
        good!(cuStreamBeginCapture_v2(stream, mode));
        assert_eq!(elsewhere(Some(local)), other_local, "{mode:?}");
        assert_eq!(elsewhere(Some(relaxed)), other_relaxed, "{mode:?}");
        let mut own_mode = relaxed;
        good!(cuThreadExchangeStreamCaptureMode(&mut own_mode));
        assert_eq!(alloc(), CUDA_SUCCESS);
        good!(cuThreadExchangeStreamCaptureMode(&mut own_mode));
        assert_eq!(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        assert_eq!((elsewhere(None), alloc()), (other, own), "{mode:?}");
        assert_eq!(end(stream).is_ok(), own == CUDA_SUCCESS, "{mode:?}");
    }
}

#[test]
fn streams_join_by_events_and_must_come_back() {
    let (_alone, gpu) = alone();
    let words = gpu.words();
    let (origin, branch) = (gpu.stream(), gpu.stream());
    let (fork, join) = (gpu.event(2), gpu.event(2));
    let split = || {
        begin(origin);
        good!(cuStreamWriteValue32_v2(origin, words.at(0), 1, 0); cuEventRecord(fork, origin));
        good!(cuStreamWaitEvent(branch, fork, 0));
        assert_eq!(status(branch), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        good!(cuStreamWriteValue32_v2(branch, words.at(1), 1, 0));
        good!(cuStreamWriteValue32_v2(origin, words.at(2), 1, 0));
    };
    split();
    good!(cuEventRecord(join, branch); cuStreamWaitEvent(origin, join, 0));
    good!(cuStreamWriteValue32_v2(origin, words.at(3), 1, 0));
    assert_eq!(
        call!(cuStreamQuery(branch)),
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    );
    assert_eq!(end(origin), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    split();
    good!(cuEventRecord(join, branch); cuStreamWaitEvent(origin, join, 0));
    good!(cuStreamWriteValue32_v2(origin, words.at(3), 1, 0));
    let graph = end(origin).unwrap();
    // One, then two side by side, then one.
    assert_eq!(count(graph), (4, 4));
    assert_eq!(status(branch), CU_STREAM_CAPTURE_STATUS_NONE);
    launch(graph, origin);
    assert_eq!([0, 1, 2, 3].map(|index| words.get(index)), [1; 4]);
    split();
    assert_eq!(end(origin), Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    assert_eq!(status(branch), CU_STREAM_CAPTURE_STATUS_NONE);
    // Work after the join is not joined.
    split();
    good!(cuEventRecord(join, branch); cuStreamWaitEvent(origin, join, 0));
    good!(cuStreamWriteValue32_v2(branch, words.at(1), 1, 0));
    assert_eq!(end(origin), Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    split();
    assert_eq!(end(branch), Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    assert_eq!(end(origin), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // A graph that was captured is no place to wait for.
    assert_eq!(
        call!(cuStreamWaitEvent(branch, fork, 0)),
        CUDA_ERROR_CAPTURED_EVENT
    );
}

#[test]
fn captures_are_isolated() {
    let (_alone, gpu) = alone();
    let words = gpu.words();
    let (one, two) = (gpu.stream(), gpu.stream());
    let (outside, inside) = (gpu.event(2), gpu.event(2));
    good!(cuStreamWriteValue32_v2(two, words.at(0), 1, 0); cuEventRecord(outside, two); cuStreamSynchronize(two));
    begin(one);
    assert_eq!(
        call!(cuStreamWaitEvent(one, outside, 0)),
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    );
    assert_eq!(end(one), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    begin(one);
    begin(two);
    good!(cuEventRecord(inside, one));
    assert_eq!(
        call!(cuStreamWaitEvent(two, inside, 0)),
        CUDA_ERROR_STREAM_CAPTURE_MERGE
    );
    assert_eq!(end(one), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(end(two), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn the_default_stream_is_not_captured_and_may_not_come_between() {
    let (_alone, gpu) = alone();
    let words = gpu.words();
    let (blocking, free) = (gpu.stream_with(0), gpu.stream());
    let relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    assert_eq!(
        call!(cuStreamBeginCapture_v2(null_mut(), relaxed)),
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    );
    good!(cuStreamBeginCapture_v2(blocking, relaxed));
    let mut seen = CU_STREAM_CAPTURE_STATUS_NONE;
    let implicit = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    assert_eq!(call!(cuStreamIsCapturing(null_mut(), &mut seen)), implicit);
    assert_eq!(
        status(blocking),
        CU_STREAM_CAPTURE_STATUS_ACTIVE,
        "asking breaks nothing"
    );
    assert_eq!(
        call!(cuStreamWriteValue32_v2(null_mut(), words.at(0), 1, 0)),
        implicit
    );
    assert_eq!(end(blocking), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    good!(cuStreamBeginCapture_v2(free, relaxed));
    good!(cuStreamWriteValue32_v2(null_mut(), words.at(0), 1, 0); cuStreamSynchronize(null_mut()));
    assert_eq!(words.get(0), 1);
    assert_eq!(count(end(free).unwrap()), (0, 0));
}

#[test]
fn beginning_and_ending() {
    let (_alone, gpu) = alone();
    let stream = gpu.stream();
    assert_eq!(end(stream), Err(CUDA_ERROR_ILLEGAL_STATE));
    begin(stream);
    assert_eq!(
        call!(cuStreamBeginCapture_v2(
            stream,
            CU_STREAM_CAPTURE_MODE_GLOBAL
        )),
        CUDA_ERROR_ILLEGAL_STATE
    );
    let (context, handle) = (gpu.context as usize, stream as usize);
    let elsewhere = move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext));
        let mut graph = null_mut();
        call!(cuStreamEndCapture(handle as cu::CUstream, &mut graph))
    };
    let other = std::thread::spawn(elsewhere);
    assert_eq!(
        other.join().unwrap(),
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    );
    assert_eq!(count(end(stream).unwrap()), (0, 0));
    good!(cuStreamBeginCapture_v2(
        stream,
        CU_STREAM_CAPTURE_MODE_RELAXED
    ));
    assert_eq!(std::thread::spawn(elsewhere).join().unwrap(), CUDA_SUCCESS);
    // A context that is destroyed meanwhile leaves no call forbidden.
    begin(stream);
    good!(cuCtxDestroy_v2(gpu.context));
    let next = Gpu::new();
    next.alloc(64);
}

#[test]
fn a_stream_that_is_destroyed_breaks_its_capture() {
    let (_alone, gpu) = alone();
    let (origin, branch) = (gpu.stream(), gpu.stream());
    let event = gpu.event(2);
    begin(origin);
    good!(cuEventRecord(event, origin); cuStreamWaitEvent(branch, event, 0); cuStreamDestroy_v2(branch));
    assert_eq!(status(origin), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    assert_eq!(end(origin), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // The origin itself: no stream is left to end the capture, and no call is forbidden.
    begin(origin);
    good!(cuStreamDestroy_v2(origin));
    gpu.alloc(64);
}

#[test]
fn capture_dependencies_can_be_queried_and_changed() {
    let (_alone, gpu) = alone();
    let (stream, words) = (gpu.stream(), gpu.words());
    begin(stream);
    good!(cuStreamWriteValue32_v2(stream, words.at(0), 1, 0));
    let (mut seen, mut id, mut graph) = (CU_STREAM_CAPTURE_STATUS_NONE, 0, null_mut());
    let (mut nodes, mut nodes_count) = (null(), 0);
    let mut ask = || {
        good!(cuStreamGetCaptureInfo_v2(
            stream,
            &mut seen,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut nodes_count
        ));
        // SAFETY: that many handles, until the next call for the stream.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, nodes_count) }.to_vec();
        (seen, graph, nodes)
    };
    let (seen, graph, nodes) = ask();
    assert_eq!((seen, nodes.len()), (CU_STREAM_CAPTURE_STATUS_ACTIVE, 1));
    assert_eq!(
        call!(cuGraphDestroy(graph)),
        CUDA_ERROR_INVALID_VALUE,
        "while it is being captured into"
    );
    // A node of one's own, which what is captured next comes after.
    let mut own = null_mut();
    good!(cuGraphAddEmptyNode(&mut own, graph, nodes.as_ptr(), 1));
    let set =
        cu::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    good!(cuStreamUpdateCaptureDependencies(stream, &mut own, 1, set));
    assert_eq!(ask().2, [own]);
    let mut first = nodes[0];
    good!(cuStreamUpdateCaptureDependencies(stream, &mut first, 1, 0));
    assert_eq!(ask().2.len(), 2);
    good!(cuStreamUpdateCaptureDependencies(stream, &mut own, 1, set));
    good!(cuStreamWriteValue32_v2(stream, words.at(0), 2, 0));
    let mut wrong = 8 as cu::CUgraphNode;
    assert_eq!(
        call!(cuStreamUpdateCaptureDependencies(
            stream, &mut wrong, 1, set
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    let captured = end(stream).unwrap();
    assert_eq!((captured, count(captured)), (graph, (3, 2)));
    assert_eq!(
        call!(cuStreamUpdateCaptureDependencies(stream, &mut own, 1, set)),
        CUDA_ERROR_ILLEGAL_STATE
    );
    launch(captured, stream);
    assert_eq!(words.get(0), 2);
}
