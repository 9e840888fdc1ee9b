//! Graphs: their structure, the order of a launch, and what can be changed between launches.

mod rig;

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use cu::CUgraphNodeType as Kind;
use cu::CUstreamBatchMemOpParams as Params;
use cu::CUstreamBatchMemOpType as Op;
use rig::*;

fn graph() -> cu::CUgraph {
    let mut graph = null_mut();
    good!(cuGraphCreate(&mut graph, 0));
    graph
}

fn write32(address: u64, value: u32) -> Params {
    let mut params = Params { pad: [0; 6] };
    params.writeValue.operation = Op::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    params.writeValue.address = address;
    params.writeValue.__bindgen_anon_1.value = value;
    params
}

fn wait32(address: u64, value: u32, flags: u32) -> Params {
    let mut params = write32(address, value);
    params.waitValue.operation = Op::CU_STREAM_MEM_OP_WAIT_VALUE_32;
    params.waitValue.flags = flags;
    params
}

fn batch(gpu: &Gpu, params: &mut [Params]) -> cu::CUDA_BATCH_MEM_OP_NODE_PARAMS {
    cu::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: gpu.context,
        count: params.len() as u32,
        paramArray: params.as_mut_ptr(),
        flags: 0,
    }
}

/// Adds memory operations after other nodes.
fn memops(
    gpu: &Gpu,
    graph: cu::CUgraph,
    after: &[cu::CUgraphNode],
    params: &mut [Params],
) -> cu::CUgraphNode {
    let mut node = null_mut();
    let params = batch(gpu, params);
    good!(cuGraphAddBatchMemOpNode(
        &mut node,
        graph,
        after.as_ptr(),
        after.len(),
        &params
    ));
    node
}

fn instantiate(graph: cu::CUgraph) -> cu::CUgraphExec {
    let mut exec = null_mut();
    good!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    exec
}

#[test]
fn a_launch_is_in_stream_order_and_repeats_what_it_was_made_of() {
    let gpu = Gpu::new();
    let (stream, words, graph) = (gpu.stream(), gpu.words(), graph());
    let first = memops(
        &gpu,
        graph,
        &[],
        &mut [write32(words.at(1), 1), write32(words.at(2), 1)],
    );
    memops(&gpu, graph, &[first], &mut [write32(words.at(1), 2)]);
    let exec = instantiate(graph);
    // What was instantiated needs its graph no more.
    good!(cuGraphDestroy(graph); cuGraphUpload(exec, stream));
    gpu.block(stream, words, 0);
    good!(cuGraphLaunch(exec, stream));
    a_while();
    assert_eq!(words.get(1), 0);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    assert_eq!((words.get(1), words.get(2)), (2, 1));
    words.set(2, 9);
    good!(cuGraphLaunch(exec, stream); cuStreamSynchronize(stream));
    assert_eq!((words.get(1), words.get(2)), (2, 1));
    good!(cuGraphExecDestroy(exec));
    assert_eq!(call!(cuGraphLaunch(exec, stream)), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(call!(cuGraphExecDestroy(exec)), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn launches_of_one_exec_follow_each_other_in_whatever_stream() {
    let gpu = Gpu::new();
    let (one, two, words, graph) = (gpu.stream(), gpu.stream(), gpu.words(), graph());
    memops(&gpu, graph, &[], &mut [write32(words.at(1), 1)]);
    let exec = instantiate(graph);
    gpu.block(one, words, 0);
    good!(cuGraphLaunch(exec, one); cuGraphLaunch(exec, two));
    // Destroyed with two launches queued: they are done nevertheless.
    good!(cuGraphExecDestroy(exec));
    good!(cuStreamWriteValue32_v2(two, words.at(2), 1, 0));
    a_while();
    assert_eq!((words.get(1), words.get(2)), (0, 0));
    words.set(0, 1);
    good!(cuStreamSynchronize(two); cuStreamSynchronize(one));
    assert_eq!((words.get(1), words.get(2)), (1, 1));
}

#[test]
fn graph_behind_a_waiting_stream_is_instantiated_later_and_blocks_other_driver_calls() {
    let gpu = Gpu::new();
    let (stream, words, graph, word) = (gpu.stream(), gpu.words(), graph(), gpu.alloc(4));
    memops(&gpu, graph, &[], &mut [write32(words.at(1), 1)]);
    let exec = instantiate(graph);
    gpu.block(stream, words, 0);
    // Launches wait for nothing.
    good!(cuGraphLaunch(exec, stream));
    let (context, graph) = (gpu.context as usize, graph as usize);
    let instantiating = std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext));
        instantiate(graph as cu::CUgraph) as usize
    });
    a_while();
    let filling = std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext); cuMemsetD32_v2(word, 5, 1));
    });
    a_while();
    assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
    assert!(!instantiating.is_finished() && !filling.is_finished());
    // Streams of other contexts wait for nothing.
    let other = Gpu::new();
    let (beside, empty) = (other.stream(), self::graph());
    good!(cuGraphLaunch(instantiate(empty), beside); cuStreamSynchronize(beside); cuCtxSetCurrent(gpu.context));
    words.set(0, 1);
    let second = instantiating.join().unwrap();
    filling.join().unwrap();
    words.set(1, 0);
    good!(cuGraphLaunch(second as cu::CUgraphExec, stream); cuStreamSynchronize(stream));
    assert_eq!(words.get(1), 1);
}

#[test]
fn abandoned_launch_does_not_block_the_next() {
    let other = Gpu::new();
    let (stream, words, graph) = (other.stream(), other.words(), graph());
    let mut node = null_mut();
    good!(cuGraphAddEmptyNode(&mut node, graph, null(), 0));
    let exec = instantiate(graph);
    other.block(stream, words, 0);
    good!(cuGraphLaunch(exec, stream); cuCtxDestroy_v2(other.context));
    let gpu = Gpu::new();
    let stream = gpu.stream();
    good!(cuGraphLaunch(exec, stream); cuStreamSynchronize(stream));
}

#[test]
fn a_patch_is_for_later_launches_only() {
    let gpu = Gpu::new();
    let (stream, words, graph) = (gpu.stream(), gpu.words(), graph());
    let node = memops(
        &gpu,
        graph,
        &[],
        &mut [write32(words.at(1), 1), wait32(words.at(0), 1, 0)],
    );
    let exec = instantiate(graph);
    gpu.block(stream, words, 0);
    for value in 2..=50 {
        good!(cuGraphLaunch(exec, stream));
        good!(cuStreamWriteValue32_v2(
            stream,
            words.at(value + 100),
            value as u32,
            0
        ));
        let mut next = [
            write32(words.at(value), value as u32),
            wait32(words.at(0), 1, 1),
        ];
        let params = batch(&gpu, &mut next);
        good!(cuGraphExecBatchMemOpNodeSetParams(exec, node, &params));
    }
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    assert!((1..50).all(|value| words.get(value) == value as u32));
    assert_eq!(words.get(50), 0, "the last patch was never launched");
    // The graph has what it was made with.
    let mut seen = cu::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: null_mut(),
        count: 0,
        paramArray: null_mut(),
        flags: 9,
    };
    good!(cuGraphBatchMemOpNodeGetParams(node, &mut seen));
    assert_eq!((seen.ctx, seen.count, seen.flags), (gpu.context, 2, 0));
    // SAFETY: the node's own array, of that length.
    let first = unsafe { (*seen.paramArray).writeValue.__bindgen_anon_1.value };
    assert_eq!(first, 1);
}

#[test]
fn a_patch_may_not_change_what_an_operation_is() {
    let gpu = Gpu::new();
    let (words, graph) = (gpu.words(), graph());
    let mut barrier = Params { pad: [0; 6] };
    barrier.memoryBarrier.operation = Op::CU_STREAM_MEM_OP_BARRIER;
    let own = [write32(words.at(0), 1), wait32(words.at(1), 1, 0), barrier];
    let node = memops(&gpu, graph, &[], &mut own.clone());
    let other = memops(&gpu, graph, &[], &mut [write32(words.at(0), 1)]);
    let exec = instantiate(graph);
    let later = memops(&gpu, graph, &[], &mut own.clone());
    let set = |node, ops: &mut [Params]| {
        let params = batch(&gpu, ops);
        call!(cuGraphExecBatchMemOpNodeSetParams(exec, node, &params))
    };
    assert_eq!(set(node, &mut own.clone()), CUDA_SUCCESS);
    let wrong = CUDA_ERROR_INVALID_VALUE;
    assert_eq!(
        set(node, &mut [own[1], own[0], barrier]),
        wrong,
        "the types"
    );
    assert_eq!(set(node, &mut own[..2].to_vec()), wrong, "the count");
    assert_eq!(
        set(
            node,
            &mut [own[0], wait32(words.at(1), 1, 1 << 30), barrier]
        ),
        wrong,
        "FLUSH"
    );
    assert_eq!(
        set(node, &mut [own[0], wait32(words.at(2), 7, 2), barrier]),
        CUDA_SUCCESS
    );
    let mut weaker = barrier;
    weaker.memoryBarrier.flags = 1;
    assert_eq!(set(node, &mut [own[0], own[1], weaker]), wrong, "a barrier");
    assert_eq!(
        set(node, &mut [write32(words.at(0) + 1, 1), own[1], barrier]),
        wrong,
        "not aligned"
    );
    assert_eq!(
        set(node, &mut [write32(64, 1), own[1], barrier]),
        wrong,
        "no memory of a device"
    );
    assert_eq!(
        set(later, &mut own.clone()),
        wrong,
        "not in what was instantiated"
    );
    assert_eq!(set(8 as cu::CUgraphNode, &mut own.clone()), wrong);
    good!(cuGraphDestroyNode(other));
    assert_eq!(
        set(other, &mut [write32(words.at(0), 1)]),
        wrong,
        "removed from its graph"
    );
    let second = Gpu::new();
    let mut copy = own;
    let mut params = batch(&gpu, &mut copy);
    params.ctx = second.context;
    assert_eq!(
        call!(cuGraphExecBatchMemOpNodeSetParams(exec, node, &params)),
        wrong,
        "the context"
    );
    drop(second);
    let mut empty = null_mut();
    good!(cuGraphAddEmptyNode(&mut empty, graph, null(), 0));
    let exec = instantiate(graph);
    let params = batch(&gpu, &mut copy);
    assert_eq!(
        call!(cuGraphExecBatchMemOpNodeSetParams(exec, empty, &params)),
        wrong,
        "the kind"
    );
}

#[test]
fn wrong_batches_are_refused_as_by_the_stream() {
    let gpu = Gpu::new();
    let (words, graph) = (gpu.words(), graph());
    let mut node = null_mut();
    let mut add = |params: &mut [Params]| {
        let params = batch(&gpu, params);
        call!(cuGraphAddBatchMemOpNode(
            &mut node,
            graph,
            null(),
            0,
            &params
        ))
    };
    let good = write32(words.at(0), 1);
    assert_eq!(add(&mut []), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(add(&mut vec![good; 256]), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(add(&mut vec![good; 255]), CUDA_SUCCESS);
    assert_eq!(
        add(&mut [write32(words.at(0) + 2, 1)]),
        CUDA_ERROR_INVALID_VALUE
    );
    let mut one = [good];
    let mut params = batch(&gpu, &mut one);
    params.ctx = null_mut();
    assert_eq!(
        call!(cuGraphAddBatchMemOpNode(
            &mut node,
            graph,
            null(),
            0,
            &params
        )),
        CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn structure() {
    let gpu = Gpu::new();
    let (words, graph) = (gpu.words(), graph());
    let [a, b, c] =
        [0, 1, 2].map(|index| memops(&gpu, graph, &[], &mut [write32(words.at(index), 1)]));
    let mut end = null_mut();
    let wrong = CUDA_ERROR_INVALID_VALUE;
    let twice = [a, a];
    assert_eq!(
        call!(cuGraphAddEmptyNode(&mut end, graph, twice.as_ptr(), 2)),
        wrong
    );
    let foreign = self::graph();
    let foreign_node = memops(&gpu, foreign, &[], &mut [write32(words.at(0), 1)]);
    assert_eq!(
        call!(cuGraphAddEmptyNode(&mut end, graph, &foreign_node, 1)),
        wrong
    );
    good!(cuGraphAddEmptyNode(&mut end, graph, [a, b].as_ptr(), 2));
    good!(cuGraphAddDependencies(graph, &c, &end, 1));
    assert_eq!(
        call!(cuGraphAddDependencies(graph, &c, &end, 1)),
        wrong,
        "is there already"
    );
    assert_eq!(call!(cuGraphAddDependencies(graph, &c, &c, 1)), wrong);
    let (mut count, mut kind) = (0, Kind::CU_GRAPH_NODE_TYPE_KERNEL);
    good!(cuGraphGetNodes(graph, null_mut(), &mut count));
    assert_eq!(count, 4);
    let mut nodes = [1 as cu::CUgraphNode; 6];
    count = 6;
    good!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    assert_eq!((count, nodes), (4, [a, b, c, end, null_mut(), null_mut()]));
    count = 2;
    good!(cuGraphGetRootNodes(graph, nodes.as_mut_ptr(), &mut count));
    assert_eq!((count, nodes[0], nodes[1]), (2, a, b));
    good!(cuGraphGetEdges(graph, null_mut(), null_mut(), &mut count));
    assert_eq!(count, 3);
    let (mut from, mut to) = ([null_mut(); 3], [null_mut(); 3]);
    good!(cuGraphGetEdges(
        graph,
        from.as_mut_ptr(),
        to.as_mut_ptr(),
        &mut count
    ));
    assert_eq!((count, from, to), (3, [a, b, c], [end; 3]));
    good!(cuGraphNodeGetType(a, &mut kind));
    assert_eq!(kind, Kind::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
    good!(cuGraphNodeGetType(end, &mut kind));
    assert_eq!(kind, Kind::CU_GRAPH_NODE_TYPE_EMPTY);
    // A circle can be made, and not be instantiated.
    good!(cuGraphAddDependencies(graph, &end, &a, 1));
    let mut exec = null_mut();
    assert_eq!(
        call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)),
        wrong
    );
    let mut params = cu::CUDA_GRAPH_INSTANTIATE_PARAMS {
        flags: 0,
        hUploadStream: null_mut(),
        hErrNode_out: null_mut(),
        result_out: cu::CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS,
    };
    assert_eq!(
        call!(cuGraphInstantiateWithParams(&mut exec, graph, &mut params)),
        wrong
    );
    assert_eq!(
        params.result_out,
        cu::CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_ERROR
    );
    good!(cuGraphRemoveDependencies(graph, &end, &a, 1));
    good!(cuGraphInstantiateWithParams(&mut exec, graph, &mut params));
    assert_eq!(
        params.result_out,
        cu::CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS
    );
    assert_eq!(
        call!(cuGraphInstantiateWithFlags(&mut exec, graph, 1 << 20)),
        wrong
    );
    // A copy has nodes of its own.
    let (mut clone, mut found) = (null_mut(), null_mut());
    good!(cuGraphClone(&mut clone, graph); cuGraphNodeFindInClone(&mut found, end, clone));
    assert_ne!(found, end);
    good!(cuGraphNodeGetDependencies(found, null_mut(), &mut count));
    assert_eq!(count, 3);
    good!(cuGraphNodeGetDependentNodes(a, null_mut(), &mut count));
    assert_eq!(count, 1);
    good!(cuGraphDestroyNode(a));
    assert_eq!(call!(cuGraphDestroyNode(a)), wrong);
    good!(cuGraphGetEdges(graph, null_mut(), null_mut(), &mut count));
    assert_eq!(count, 2);
    good!(cuGraphDestroy(graph));
    assert_eq!(call!(cuGraphDestroy(graph)), wrong);
    assert_eq!(call!(cuGraphNodeGetType(end, &mut kind)), wrong);
    good!(cuGraphNodeGetType(found, &mut kind));
}

static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());

unsafe extern "C" fn see(argument: *mut c_void) {
    SEEN.lock().unwrap().push(argument as usize);
}

/// What does not depend on each other is done in any order, what does in that.
#[test]
fn orders_of_a_launch() {
    let gpu = Gpu::new();
    let (stream, graph) = (gpu.stream(), graph());
    let host = |after: &[cu::CUgraphNode], number: usize| {
        let params = cu::CUDA_HOST_NODE_PARAMS {
            fn_: Some(see),
            userData: number as *mut c_void,
        };
        let mut node = null_mut();
        good!(cuGraphAddHostNode(
            &mut node,
            graph,
            after.as_ptr(),
            after.len(),
            &params
        ));
        node
    };
    let start = host(&[], 0);
    let middle = [1, 2, 3].map(|number| host(&[start], number));
    host(&middle, 4);
    let exec = instantiate(graph);
    let mut orders = HashSet::new();
    for _ in 0..60 {
        SEEN.lock().unwrap().clear();
        good!(cuGraphLaunch(exec, stream); cuStreamSynchronize(stream));
        let seen = SEEN.lock().unwrap().clone();
        assert_eq!((seen.len(), seen[0], seen[4]), (5, 0, 4));
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 5);
        orders.insert(seen);
    }
    assert!(orders.len() >= 4, "{orders:?}");
}

#[test]
fn nodes_of_every_kind() {
    let gpu = Gpu::new();
    let (stream, words, graph) = (gpu.stream(), gpu.words(), graph());
    let device = gpu.alloc(64);
    let mut nodes = [null_mut(); 3];
    let mut fill = cu::CUDA_MEMSET_NODE_PARAMS {
        dst: device,
        pitch: 16,
        value: 0x0102,
        elementSize: 2,
        width: 4,
        height: 2,
    };
    good!(cuGraphAddMemsetNode(
        &mut nodes[0],
        graph,
        null(),
        0,
        &fill,
        gpu.context
    ));
    fill.elementSize = 3;
    let wrong = CUDA_ERROR_INVALID_VALUE;
    assert_eq!(
        call!(cuGraphAddMemsetNode(
            &mut nodes[1],
            graph,
            null(),
            0,
            &fill,
            gpu.context
        )),
        wrong
    );
    // SAFETY: a structure of numbers and pointers, for which zeros will do but for the two kinds of memory.
    let mut copy: cu::CUDA_MEMCPY3D = unsafe {
        let mut copy = std::mem::MaybeUninit::<cu::CUDA_MEMCPY3D>::zeroed();
        (*copy.as_mut_ptr()).srcMemoryType = cu::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        (*copy.as_mut_ptr()).dstMemoryType = cu::CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.assume_init()
    };
    (copy.srcDevice, copy.srcPitch) = (device, 16);
    (copy.dstHost, copy.dstPitch) = (words.at(1) as *mut c_void, 8);
    (copy.WidthInBytes, copy.Height, copy.Depth) = (8, 2, 1);
    good!(cuGraphAddMemcpyNode(
        &mut nodes[1],
        graph,
        &nodes[0],
        1,
        &copy,
        gpu.context
    ));
    copy.WidthInBytes = 65;
    assert_eq!(
        call!(cuGraphAddMemcpyNode(
            &mut nodes[2],
            graph,
            null(),
            0,
            &copy,
            gpu.context
        )),
        wrong
    );
    let (mut address, mut value) = (words.at(8), 5u32);
    let mut arguments: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut value).cast()];
    let mut kernel = cu::CUDA_KERNEL_NODE_PARAMS {
        func: gpu.function(c"doorbell_standin_mark"),
        gridDimX: 2,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: arguments.as_mut_ptr(),
        extra: null_mut(),
        kern: null_mut(),
        ctx: null_mut(),
    };
    good!(cuGraphAddKernelNode_v2(
        &mut nodes[2],
        graph,
        &nodes[1],
        1,
        &kernel
    ));
    let exec = instantiate(graph);
    good!(cuGraphLaunch(exec, stream));
    value = 6;
    kernel.gridDimX = 1;
    good!(cuGraphExecKernelNodeSetParams_v2(exec, nodes[2], &kernel));
    good!(cuStreamSynchronize(stream));
    assert_eq!([1, 2, 3, 4].map(|index| words.get(index)), [0x0102_0102; 4]);
    assert_eq!([8, 9, 10].map(|index| words.get(index)), [5, 5, 0]);
    good!(cuGraphLaunch(exec, stream); cuStreamSynchronize(stream));
    assert_eq!([8, 9].map(|index| words.get(index)), [6, 5]);
    assert_eq!(value, 6);
    kernel.func = null_mut();
    assert_eq!(
        call!(cuGraphAddKernelNode_v2(
            &mut nodes[2],
            graph,
            null(),
            0,
            &kernel
        )),
        wrong
    );
    let mut kind = Kind::CU_GRAPH_NODE_TYPE_EMPTY;
    for (node, expected) in nodes.into_iter().zip([
        Kind::CU_GRAPH_NODE_TYPE_MEMSET,
        Kind::CU_GRAPH_NODE_TYPE_MEMCPY,
        Kind::CU_GRAPH_NODE_TYPE_KERNEL,
    ]) {
        good!(cuGraphNodeGetType(node, &mut kind));
        assert_eq!(kind, expected);
    }
}

#[test]
fn memory_that_was_freed_before_a_launch_breaks_the_context() {
    let gpu = Gpu::new();
    let (stream, graph) = (gpu.stream(), graph());
    let device = gpu.alloc(64);
    memops(&gpu, graph, &[], &mut [write32(device, 1)]);
    let exec = instantiate(graph);
    good!(cuMemFree_v2(device); cuGraphLaunch(exec, stream));
    assert_eq!(
        call!(cuStreamSynchronize(stream)),
        CUDA_ERROR_ILLEGAL_ADDRESS
    );
}

#[test]
fn a_context_destroyed_under_a_launch_ends_it() {
    let gpu = Gpu::new();
    let (one, two, words, graph) = (gpu.stream(), gpu.stream(), gpu.words(), graph());
    memops(&gpu, graph, &[], &mut [wait32(words.at(0), 1, 0)]);
    let exec = instantiate(graph);
    good!(cuGraphLaunch(exec, one); cuGraphLaunch(exec, two));
    a_while();
    good!(cuCtxDestroy_v2(gpu.context); cuGraphExecDestroy(exec));
}
