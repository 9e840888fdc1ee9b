//! Transfers in CUDA graphs. `scripts/test cuda` runs this over the stand-in for the driver, on each control path; without a driver its tests are
//! WAIVED. With a GPU they use the real driver, except those that make the driver fail.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::sys;
use doorbell::{
    Condition, Condition64, Control, CudaContext, CudaStream, EndpointConfig, Error, Executor,
    GraphBuilder, GraphExec, HostStream, QueueKind, Region, RemoteSlice, Status, Work,
    WritesOrdering, stream_write_value32,
};
use rig::gpu::{alone, context};
use rig::{Limit, Pair, Random, SOON, control, device, from_env};
use standin::{Fault, is_standin};
use waived::waived;

const BOUND: Duration = Duration::from_secs(120);

/// A pair, its memory, and a stream; `None` where the test is WAIVED.
struct Bench {
    pair: Pair,
    region: Region,
    stream: CudaStream,
    context: CudaContext,
    _limit: Limit,
}

impl Bench {
    fn new(test: &'static str, depth: u32) -> Option<Bench> {
        let context = context(test)?;
        let device = device();
        if control(&device) == Control::Sync {
            waived(test, "the doorbells of the sync path are in no graph");
            return None;
        }
        // A lost peer is detected after half a second.
        let config = EndpointConfig::default()
            .send_depth(depth)
            .recv_depth(depth)
            .ack_timeout(14);
        let pair = Pair::new(&device, &config);
        let region = pair.region(1 << 16);
        let stream = CudaStream::new(&context, test).unwrap();
        Some(Bench {
            pair,
            region,
            stream,
            context,
            _limit: Limit::new(test, BOUND),
        })
    }

    /// Writes of 8 bytes from the first half of the memory to the second, and a wait for the last.
    fn writes(&mut self, count: u64) -> GraphExec {
        let mut graph = GraphBuilder::capture(&self.stream).unwrap();
        let remote = self.region.remote();
        for at in 0..count {
            let data = [self.region.slice(at * 8, 8).unwrap()];
            let to = remote.addr + (1 << 15) + at * 8;
            let work =
                Work::write(&data, RemoteSlice::at(to, remote.rkey)).signaled(at == count - 1);
            graph.send(&mut self.pair.a, &work).unwrap();
        }
        graph.wait_cq(&mut self.pair.a, QueueKind::Send).unwrap();
        graph.instantiate().unwrap()
    }

    fn launch(&mut self, graph: &mut GraphExec) -> doorbell::Result<()> {
        let Pair { a, b, .. } = &mut self.pair;
        graph.launch(&self.stream, &mut [b, a])
    }

    fn arm(&mut self, graph: &mut GraphExec) -> doorbell::Result<()> {
        let Pair { a, b, .. } = &mut self.pair;
        graph.arm(&mut [b, a])
    }

    /// Each launch transfers the current contents of the memory.
    fn check(&mut self, graph: &mut GraphExec, launches: u64) {
        for round in 0..launches {
            self.region.fill(0, 1 << 15, round as u8 + 1).unwrap();
            self.region.fill(1 << 15, 1 << 15, !(round as u8)).unwrap();
            self.launch(graph).unwrap();
            self.stream.synchronize(SOON).unwrap();
            let bytes = 8 * (graph.tickets().len() as u64 - 1);
            assert!(
                self.region
                    .is_filled_with(1 << 15, bytes, round as u8 + 1)
                    .unwrap()
            );
            for ticket in graph.tickets() {
                assert_eq!(ticket.status(), Status::Complete, "launch {round}");
            }
        }
    }
}

fn is_state(error: &Error) -> bool {
    matches!(error, Error::State { .. })
}

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// The device address of a region's memory, for work that the application queues itself. Makes the context current to the thread, as an application
/// would.
fn device_address(context: &CudaContext, region: &Region) -> sys::CUdeviceptr {
    // SAFETY: the context lives longer than the test's work.
    ok(unsafe { sys::cuCtxSetCurrent(context.raw()) });
    region.device_address(context).unwrap()
}

#[test]
fn graph_of_64_sends_is_launched_until_every_counter_wraps() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("wraps", 256) else {
        return;
    };
    let mut graph = bench.writes(64);
    bench.check(&mut graph, 5);
    // The doorbell record's 16 bits, twice; and the completion queue's owner bit with every lap.
    let launches = from_env("DOORBELL_TEST_LAUNCHES", 2100);
    for _ in 0..launches {
        while let Err(error) = bench.launch(&mut graph) {
            assert!(matches!(error, Error::QueueFull { .. }), "{error}");
            assert!(!graph.is_armed());
            bench.stream.synchronize(SOON).unwrap();
        }
    }
    bench.stream.synchronize(SOON).unwrap();
    bench.check(&mut graph, 3);
}

#[test]
fn every_launch_needs_its_operations_prepared() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("prepared_each_time", 64) else {
        return;
    };
    let mut graph = bench.writes(3);
    assert!(graph.is_armed());
    assert!(is_state(&bench.arm(&mut graph).unwrap_err()));
    graph.launch_armed(&bench.stream).unwrap();
    assert!(is_state(&graph.launch_armed(&bench.stream).unwrap_err()));
    bench.arm(&mut graph).unwrap();
    // Once the prepared launch is rolled back, other work may be posted.
    let Pair { a, b, .. } = &mut bench.pair;
    let work = Work::write_inline(
        b"x",
        RemoteSlice::at(bench.region.remote().addr, bench.region.remote().rkey),
    );
    assert!(is_state(&a.post_send(&work).unwrap_err()));
    graph.disarm(&mut [a, b]).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    a.post_send(&work).unwrap();
    a.wait_cq(QueueKind::Send, SOON).unwrap();
    assert!(is_state(&graph.launch_armed(&bench.stream).unwrap_err()));
    bench.check(&mut graph, 3);
}

#[test]
fn next_launch_is_prepared_while_the_last_is_blocked() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("prepared_ahead", 64) else {
        return;
    };
    let flag = bench.pair.region(4096);
    let remote = bench.region.remote();
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    let condition = Condition::And(1);
    graph.wait_value32(&flag, 0, condition, None).unwrap();
    graph.write_value32(&flag, 0, 0).unwrap();
    let data = [bench.region.slice(0, 8).unwrap()];
    let work = Work::write(&data, RemoteSlice::at(remote.addr + (1 << 15), remote.rkey));
    graph.send(&mut bench.pair.a, &work).unwrap();
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    graph.write_value32(&flag, 64, 1).unwrap();
    let mut graph = graph.instantiate().unwrap();
    bench.launch(&mut graph).unwrap();
    let first = graph.tickets().to_vec();
    bench.arm(&mut graph).unwrap();
    graph.launch_armed(&bench.stream).unwrap();
    bench.arm(&mut graph).unwrap();
    for value in 1..=2 {
        bench.region.fill(0, 8, value).unwrap();
        assert!(!bench.stream.query().unwrap());
        flag.store_u32(0, 1).unwrap();
        doorbell::wait_value32(&flag, 64, Condition::And(1), SOON).unwrap();
        assert!(bench.region.is_filled_with(1 << 15, 8, value).unwrap());
        flag.store_u32(64, 0).unwrap();
    }
    bench.stream.synchronize(SOON).unwrap();
    for ticket in first.iter().chain(graph.tickets()) {
        assert_eq!(ticket.status(), Status::Complete);
    }
}

#[test]
fn kernels_and_transfers_keep_their_capture_order() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("captured_order", 64) else {
        return;
    };
    let memory = device_address(&bench.context, &bench.region);
    let remote = bench.region.remote();
    let there = memory + (1 << 15);
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    let fill = |at, value| {
        // SAFETY: memory that stays registered.
        ok(unsafe { sys::cuMemsetD8Async(at, value, 512, bench.stream.raw()) });
    };
    let data = [bench.region.slice(0, 512).unwrap()];
    for value in [1, 2] {
        // The send transfers the contents at its place in the graph, and work behind the wait runs after the transfer.
        fill(memory, value);
        let to = remote.addr + (1 << 15) + 1024 * u64::from(value);
        let work = Work::write(&data, RemoteSlice::at(to, remote.rkey));
        graph.send(&mut bench.pair.a, &work).unwrap();
        graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
        fill(there + 1024 * u64::from(value) + 256, 9);
    }
    let mut graph = graph.instantiate().unwrap();
    for _ in 0..20 {
        bench.region.fill(1 << 15, 4096, 0).unwrap();
        bench.launch(&mut graph).unwrap();
        bench.stream.synchronize(SOON).unwrap();
        for value in [1, 2] {
            let at = (1 << 15) + 1024 * u64::from(value);
            assert!(bench.region.is_filled_with(at, 256, value).unwrap());
            assert!(bench.region.is_filled_with(at + 256, 512, 9).unwrap());
        }
    }
    drop(graph);
}

/// The dependency of the next node of a captured stream.
fn place_in(stream: &CudaStream) -> sys::CUgraphNode {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut count) = (null(), 0);
    // SAFETY: writes what is pointed to; the nodes are read before the next call.
    unsafe {
        ok(sys::cuCtxSetCurrent(stream.context().raw()));
        ok(sys::cuStreamGetCaptureInfo_v2(
            stream.raw(),
            &mut status,
            null_mut(),
            null_mut(),
            &mut nodes,
            &mut count,
        ));
        assert_eq!(count, 1);
        *nodes
    }
}

#[test]
fn operations_share_a_graph_node_until_a_wait() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("shared_nodes", 64) else {
        return;
    };
    let remote = bench.region.remote();
    let work = Work::write_inline(b"12345678", RemoteSlice::at(remote.addr, remote.rkey));
    let flag = bench.pair.region(4096);
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    let stream = bench.stream.clone();
    // The send and its wait are in different nodes: the wait may depend on work of another stream behind the first node.
    graph.send(&mut bench.pair.a, &work).unwrap();
    let sent = place_in(&stream);
    graph.write_value32(&flag, 0, 1).unwrap();
    assert_eq!(place_in(&stream), sent);
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    let waited = place_in(&stream);
    assert_ne!(waited, sent);
    graph.send(&mut bench.pair.a, &work).unwrap();
    assert_eq!(place_in(&stream), waited);
    let condition = Condition::GreaterOrEqual(1);
    graph.wait_value32(&flag, 0, condition, SOON).unwrap();
    let again = place_in(&stream);
    assert_ne!(again, waited);
    // Work of the application is between the two.
    stream.spin(Duration::ZERO).unwrap();
    let spun = place_in(&stream);
    graph.write_value32(&flag, 64, 1).unwrap();
    let last = place_in(&stream);
    assert!(last != spun && last != again);
    // More than fit into one node.
    for _ in 0..300 {
        graph.write_value32(&flag, 64, 1).unwrap();
    }
    assert_ne!(place_in(&stream), last);
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for _ in 0..3 {
        bench.launch(&mut graph).unwrap();
        bench.stream.synchronize(SOON).unwrap();
        for ticket in graph.tickets() {
            assert_eq!(ticket.status(), Status::Complete);
        }
    }
}

#[test]
fn library_and_application_nodes_share_a_graph() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("explicit_nodes", 64) else {
        return;
    };
    let memory = device_address(&bench.context, &bench.region);
    let remote = bench.region.remote();
    let mut raw = null_mut();
    // SAFETY: writes one handle.
    ok(unsafe { sys::cuGraphCreate(&mut raw, 0) });
    let fill = |at: u64, value: u32, after: &[sys::CUgraphNode]| {
        let params = sys::CUDA_MEMSET_NODE_PARAMS {
            dst: memory + at,
            pitch: 0,
            value,
            elementSize: 1,
            width: 512,
            height: 1,
        };
        let mut node = null_mut();
        // SAFETY: memory that stays registered; nodes of the graph.
        ok(unsafe {
            sys::cuGraphAddMemsetNode(
                &mut node,
                raw,
                after.as_ptr(),
                after.len(),
                &params,
                bench.context.raw(),
            )
        });
        node
    };
    // SAFETY: the graph is destroyed at the end of the test.
    let mut graph = unsafe { GraphBuilder::over(&bench.stream, raw) };
    let before = fill(0, 5, &[]);
    graph.after(&[before]).unwrap();
    let data = [bench.region.slice(0, 512).unwrap()];
    let work = Work::write(&data, RemoteSlice::at(remote.addr + (1 << 15), remote.rkey));
    graph.send(&mut bench.pair.a, &work).unwrap();
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    let waited = graph.last_node().unwrap();
    let behind = fill((1 << 15) + 256, 6, &[waited]);
    // No node of the library depends on this one; the launch still ends only after it.
    fill((1 << 15) + 2048, 7, &[behind]);
    let data = [bench.region.slice((1 << 15) + 256, 256).unwrap()];
    graph.after(&[behind]).unwrap();
    let work = Work::write(
        &data,
        RemoteSlice::at(remote.addr + (1 << 15) + 1024, remote.rkey),
    );
    graph.send(&mut bench.pair.a, &work).unwrap();
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    let sent = graph.last_node().unwrap();
    graph
        .send(&mut bench.pair.a, &work.signaled(false))
        .unwrap();
    assert_ne!(
        graph.last_node().unwrap(),
        sent,
        "a node that was returned is not extended"
    );
    let mut graph = graph.instantiate().unwrap();
    for _ in 0..20 {
        bench.region.fill(0, 1 << 16, 0).unwrap();
        bench.launch(&mut graph).unwrap();
        bench.stream.synchronize(SOON).unwrap();
        let has = |at: u64, len, value| {
            let half = 1 << 15;
            bench.region.is_filled_with(half + at, len, value)
        };
        assert!(has(0, 256, 5).unwrap() && has(256, 512, 6).unwrap());
        assert!(has(1024, 256, 6).unwrap() && has(2048, 512, 7).unwrap());
    }
    drop(graph);
    bench.stream.synchronize(SOON).unwrap();
    // SAFETY: nobody launches it any more.
    ok(unsafe { sys::cuGraphDestroy(raw) });
}

#[test]
fn both_endpoints_exchange_messages_within_a_graph() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("ping_pong", 16) else {
        return;
    };
    let region = bench.region.clone();
    let slice = |at| [region.slice(at, 64).unwrap()];
    let pair = &mut bench.pair;
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    graph.recv(&mut pair.b, 1, &slice(1024)).unwrap();
    graph.recv(&mut pair.a, 2, &slice(2048)).unwrap();
    graph.send(&mut pair.a, &Work::send(&slice(0))).unwrap();
    graph.wait_cq(&mut pair.b, QueueKind::Recv).unwrap();
    graph.send(&mut pair.b, &Work::send(&slice(1024))).unwrap();
    graph.wait_cq(&mut pair.a, QueueKind::Recv).unwrap();
    graph.wait_cq(&mut pair.a, QueueKind::Send).unwrap();
    graph.wait_cq(&mut pair.b, QueueKind::Send).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for round in 0..200 {
        bench.region.fill(0, 64, round).unwrap();
        bench.launch(&mut graph).unwrap();
        bench.stream.synchronize(SOON).unwrap();
        assert!(bench.region.is_filled_with(2048, 64, round).unwrap());
        let received = graph.tickets()[1].details();
        assert_eq!(received, Some((64, None)));
    }
}

#[test]
fn capture_refuses_unrepeatable_calls_and_stays_valid() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("capture_refuses", 64) else {
        return;
    };
    let stream = bench.stream.clone();
    let flag = bench.pair.region(4096);
    // Work queued before the capture, which the watcher thread queries all the time.
    let condition = Condition::GreaterOrEqual(1);
    doorbell::stream_wait_value32(&stream, &flag, 0, condition, None).unwrap();
    let mut graph = GraphBuilder::capture(&stream).unwrap();
    let again = GraphBuilder::capture(&stream);
    assert!(matches!(again, Err(Error::Cuda { .. })), "{again:?}");
    let remote = bench.region.remote();
    let work = Work::write_inline(
        b"captured",
        RemoteSlice::at(remote.addr + (1 << 15), remote.rkey),
    );
    for _ in 0..3 {
        let ran = Arc::new(AtomicBool::new(false));
        let set = Arc::clone(&ran);
        let refusals = [
            stream_write_value32(&stream, &flag, 8, 1).map(drop),
            stream.launch_host(move || set.store(true, Ordering::Release)),
            stream.synchronize(SOON),
            stream.query().map(drop),
            stream.record(&doorbell::Event::new()),
            bench.pair.a.stream_queue_send(&stream, &work).map(drop),
        ];
        for refused in refusals {
            assert!(is_state(&refused.unwrap_err()));
        }
        assert_eq!(
            (Arc::strong_count(&ran), ran.load(Ordering::Acquire)),
            (1, false)
        );
        std::thread::sleep(Duration::from_millis(200));
        graph.send(&mut bench.pair.a, &work).unwrap();
        graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    }
    // It may wait for all streams of the context.
    flag.store_u32(0, 1).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for _ in 0..5 {
        bench.region.fill(1 << 15, 64, 0).unwrap();
        bench.launch(&mut graph).unwrap();
        bench.stream.synchronize(SOON).unwrap();
        assert!(!bench.region.is_filled_with(1 << 15, 8, 0).unwrap());
    }
    assert_eq!(flag.load_u32(8), Ok(0));
}

#[test]
fn refused_recordings_and_launches_change_nothing() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("cannot_be_recorded", 8) else {
        return;
    };
    let remote = bench.region.remote();
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    // There is no completion to wait for.
    let error = graph
        .wait_cq(&mut bench.pair.a, QueueKind::Send)
        .unwrap_err();
    assert!(is_state(&error));
    assert!(is_state(&graph.after(&[null_mut()]).unwrap_err()));
    let config = EndpointConfig::default().control(Some(Control::Sync));
    let mut pair = Pair::new(&device(), &config);
    let work = Work::write_inline(
        b"12345678",
        RemoteSlice::at(remote.addr + (1 << 15), remote.rkey),
    );
    assert!(is_state(&graph.send(&mut pair.a, &work).unwrap_err()));
    // More than the queue has room for.
    let mut recorded = 0;
    let error = loop {
        match graph.send(&mut bench.pair.a, &work) {
            Ok(()) => recorded += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::QueueFull { .. }) && recorded >= 8);
    drop(graph);
    // The stream and the queues are unchanged.
    bench.stream.synchronize(SOON).unwrap();
    let mut graph = bench.writes(5);
    bench.check(&mut graph, 3);
    let b = &mut bench.pair.b;
    let error = graph.launch(&bench.stream, &mut [b]).unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
    // Room for only some of its operations: five are queued on the stream, which is blocked.
    let flag = bench.pair.region(4096);
    let condition = Condition::GreaterOrEqual(1);
    doorbell::stream_wait_value32(&bench.stream, &flag, 0, condition, None).unwrap();
    for _ in 0..5 {
        let a = &mut bench.pair.a;
        a.stream_queue_send(&bench.stream, &work).unwrap();
    }
    for _ in 0..2 {
        let full = bench.launch(&mut graph);
        assert!(
            matches!(full, Err(Error::QueueFull { .. })) && !graph.is_armed(),
            "{full:?}"
        );
    }
    flag.store_u32(0, 1).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    for _ in 0..5 {
        bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    bench.check(&mut graph, 3);
}

#[test]
fn graph_ends_if_its_endpoint_fails_and_runs_again_after_reset() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("fails_within", 64) else {
        return;
    };
    let flag = bench.pair.region(4096);
    let data = [bench.region.slice(0, 64).unwrap()];
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    // Completes only if the application posts the receive.
    graph.send(&mut bench.pair.a, &Work::send(&data)).unwrap();
    graph.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
    graph.write_value32(&flag, 0, 1).unwrap();
    let mut graph = graph.instantiate().unwrap();
    let region = bench.region.clone();
    let to = [region.slice(1 << 15, 64).unwrap()];
    bench.pair.b.post_recv(1, &to).unwrap();
    bench.launch(&mut graph).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    bench.pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
    flag.store_u32(0, 0).unwrap();
    // Without a receive; the endpoint is aborted.
    bench.launch(&mut graph).unwrap();
    bench.pair.a.abort();
    let end = bench.stream.synchronize(SOON).unwrap_err();
    assert_eq!(bench.stream.take_fault(), Some(end));
    assert_eq!(flag.load_u32(0), Ok(1));
    let status = graph.tickets()[1].status();
    assert!(matches!(status, Status::Failed(_)), "{status:?}");
    assert!(matches!(bench.launch(&mut graph), Err(Error::Work(_))));
    assert!(!graph.is_armed());
    bench.pair.reset();
    let mut again = bench.writes(2);
    bench.check(&mut again, 2);
    bench.pair.b.post_recv(1, &to).unwrap();
    bench.launch(&mut graph).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    assert_eq!(graph.tickets()[1].status(), Status::Complete);
}

#[test]
fn deadline_in_a_graph_ends_the_wait_of_that_launch() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("graph_deadline", 64) else {
        return;
    };
    let flag = bench.pair.region(4096);
    let timeout = Some(Duration::from_millis(100));
    let mut graph = GraphBuilder::capture(&bench.stream).unwrap();
    let condition = Condition::GreaterOrEqual(1);
    graph.wait_value32(&flag, 0, condition, timeout).unwrap();
    graph.write_value32(&flag, 64, 1).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for round in 0..4 {
        let comes = round % 2 == 0;
        flag.store_u32(0, u32::from(comes)).unwrap();
        bench.launch(&mut graph).unwrap();
        let synchronized = bench.stream.synchronize(SOON);
        assert_eq!(bench.stream.take_fault(), synchronized.clone().err());
        assert_eq!(synchronized.is_ok(), comes, "{synchronized:?}");
        let status = graph.tickets()[0].status();
        assert_eq!(matches!(status, Status::Failed(_)), !comes, "{status:?}");
        assert_eq!(flag.load_u32(0), Ok(u32::from(comes)));
        assert_eq!(graph.tickets()[1].status(), Status::Complete);
    }
}

#[test]
fn graph_waits_for_earlier_streams_and_moves_between_streams() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("turns", 64) else {
        return;
    };
    let other = CudaStream::new(&bench.context, "other").unwrap();
    let host = HostStream::new("host").unwrap();
    let flag = bench.pair.region(4096);
    let remote = bench.region.remote();
    let mut graph = bench.writes(4);
    bench.check(&mut graph, 1);
    for round in 1..=6 {
        // Queued first on a blocked stream; a doorbell of the graph would ring for this send as well.
        let condition = Condition::GreaterOrEqual(round);
        doorbell::stream_wait_value32(&host, &flag, 0, condition, None).unwrap();
        let late = Work::write_inline(
            b"first one",
            RemoteSlice::at(remote.addr + 40_000, remote.rkey),
        );
        bench
            .pair
            .a
            .stream_queue_send(&host, &late.signaled(false))
            .unwrap();
        bench.region.fill(40_000, 9, 0).unwrap();
        let stream = if round % 2 == 0 {
            &other
        } else {
            &bench.stream
        };
        let Pair { a, b, .. } = &mut bench.pair;
        graph.launch(stream, &mut [a, b]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(bench.region.is_filled_with(40_000, 9, 0).unwrap());
        assert!(!stream.query().unwrap());
        flag.store_u32(0, round).unwrap();
        stream.synchronize(SOON).unwrap();
        assert!(!bench.region.is_filled_with(40_000, 9, 0).unwrap());
        for ticket in graph.tickets() {
            assert_eq!(ticket.status(), Status::Complete);
        }
    }
    // A refused launch leaves no turn for which a reset would wait.
    let condition = Condition::GreaterOrEqual(7);
    doorbell::stream_wait_value32(&host, &flag, 0, condition, None).unwrap();
    let late = Work::write_inline(b"x", RemoteSlice::at(remote.addr + 40_000, remote.rkey))
        .signaled(false);
    bench.pair.a.stream_queue_send(&host, &late).unwrap();
    if let Some(fault) = Fault::new("turns", "cuStreamBatchMemOp_v2:2,nth=1") {
        assert!(bench.launch(&mut graph).is_err());
        drop(fault);
    }
    flag.store_u32(0, 7).unwrap();
    host.synchronize(SOON).unwrap();
    bench.launch(&mut graph).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    bench.pair.reset();
}

#[test]
fn launch_refused_by_the_driver_can_be_repeated() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("driver_refuses", 64) else {
        return;
    };
    let mut graph = bench.writes(5);
    bench.check(&mut graph, 1);
    for call in ["cuGraphExecBatchMemOpNodeSetParams", "cuGraphLaunch"] {
        let Some(fault) = Fault::new("driver_refuses", &format!("{call}:2,nth=1")) else {
            return;
        };
        let error = bench.launch(&mut graph).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{error}");
        assert!(graph.is_armed());
        drop(fault);
        bench.check(&mut graph, 2);
    }
    for call in [
        "cuGraphAddBatchMemOpNode",
        "cuGraphBatchMemOpNodeSetParams",
        "cuStreamUpdateCaptureDependencies",
        "cuStreamGetCaptureInfo_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuStreamBeginCapture_v2",
    ] {
        let fault = Fault::new("driver_refuses", &format!("{call}:2,nth=1"));
        let built = (|| {
            let mut graph = GraphBuilder::capture(&bench.stream)?;
            let remote = bench.region.remote();
            let work = Work::write_inline(b"12345678", RemoteSlice::at(remote.addr, remote.rkey));
            graph.send(&mut bench.pair.a, &work)?;
            graph.send(&mut bench.pair.a, &work)?;
            graph.instantiate()
        })();
        assert!(
            matches!(built, Err(Error::Cuda { .. })),
            "{call}: {built:?}"
        );
        drop((built, fault));
        bench.stream.synchronize(SOON).unwrap();
        bench.check(&mut graph, 2);
    }
}

#[test]
fn dropped_graph_completes_and_dropped_capture_ends() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("dropped_graph", 64) else {
        return;
    };
    let flag = bench.pair.region(4096);
    let condition = Condition::GreaterOrEqual(1);
    // Instantiated before a stream waits, for which that may wait as well.
    let mut graph = bench.writes(4);
    doorbell::stream_wait_value32(&bench.stream, &flag, 0, condition, None).unwrap();
    bench.region.fill(0, 64, 3).unwrap();
    bench.launch(&mut graph).unwrap();
    let tickets = graph.tickets().to_vec();
    drop(graph);
    let mut dropped = GraphBuilder::capture(&bench.stream).unwrap();
    let remote = bench.region.remote();
    let work = Work::write_inline(b"12345678", RemoteSlice::at(remote.addr, remote.rkey));
    dropped.send(&mut bench.pair.a, &work).unwrap();
    drop(dropped);
    flag.store_u32(0, 1).unwrap();
    bench.stream.synchronize(SOON).unwrap();
    for ticket in tickets {
        assert_eq!(ticket.status(), Status::Complete);
    }
    assert!(bench.region.is_filled_with(1 << 15, 32, 3).unwrap());
    // A graph that was prepared and not launched leaves the queues usable.
    drop(bench.writes(4));
    let mut graph = bench.writes(4);
    bench.check(&mut graph, 3);
    // All are dropped with work queued.
    bench.launch(&mut graph).unwrap();
    drop((graph, bench));
}

#[test]
fn capture_that_was_broken_off_leaves_the_stream_usable() {
    let _alone = alone();
    let Some(bench) = Bench::new("broken_off_capture", 8) else {
        return;
    };
    if bench.context.capabilities().ordering == WritesOrdering::None {
        waived(
            "broken_off_capture",
            "the GPU does not see writes of NICs in order, so no kernel waits for a word",
        );
        return;
    }
    let (stream, words) = (bench.stream.clone(), bench.pair.region(4096));
    let raw = stream.raw();
    // SAFETY: the context lives longer than the test's work.
    ok(unsafe { sys::cuCtxSetCurrent(bench.context.raw()) });
    let wait = || {
        let condition = Condition64::Equal(0);
        doorbell::stream_wait_value64(&stream, &words, 0, condition, SOON)
    };
    for instantiates in [false, true] {
        let graph = GraphBuilder::capture(&stream).unwrap();
        // SAFETY: a stream of a context that lives. The query invalidates the capture.
        let queried = unsafe { sys::cuStreamQuery(raw) };
        let unsupported = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        assert_eq!(queried, unsupported);
        if instantiates {
            graph.instantiate().unwrap_err();
        } else {
            drop(graph);
        }
        wait().unwrap();
        stream.synchronize(SOON).unwrap();
    }
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: as above.
    ok(unsafe { sys::cuStreamBeginCapture_v2(raw, mode) });
    GraphBuilder::capture(&stream).map(drop).unwrap_err();
    wait().unwrap();
    let mut graph = null_mut();
    // SAFETY: the capture was begun above; the graph is destroyed once.
    unsafe {
        ok(sys::cuStreamEndCapture(raw, &mut graph));
        ok(sys::cuGraphDestroy(graph));
    }
    wait().unwrap();
    stream.synchronize(SOON).unwrap();
}

#[test]
fn dropped_graph_is_destroyed_after_its_last_node() {
    const TEST: &str = "stays_until_done";
    let _alone = alone();
    if !is_standin() {
        waived(
            TEST,
            "a real driver is not to be asked for what is destroyed",
        );
        return;
    }
    let Some(mut bench) = Bench::new(TEST, 64) else {
        return;
    };
    unsafe extern "C" fn wait(opened: *mut c_void) {
        // SAFETY: of the test, which waits until the graph is destroyed.
        let opened = unsafe { &*opened.cast::<AtomicBool>() };
        while !opened.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let opened = AtomicBool::new(false);
    let params = sys::CUDA_HOST_NODE_PARAMS {
        fn_: Some(wait),
        userData: (&raw const opened).cast_mut().cast(),
    };
    let (mut raw, mut leaf) = (null_mut(), null_mut());
    // SAFETY: writes one handle.
    ok(unsafe { sys::cuGraphCreate(&mut raw, 0) });
    // SAFETY: the graph is destroyed at the end of the test.
    let mut graph = unsafe { GraphBuilder::over(&bench.stream, raw) };
    graph.write_value32(&bench.region, 0, 1).unwrap();
    let written = graph.last_node().unwrap();
    // Behind every node of the library but the last. SAFETY: a node of the graph.
    ok(unsafe { sys::cuGraphAddHostNode(&mut leaf, raw, &written, 1, &params) });
    let mut graph = graph.instantiate().unwrap();
    bench.launch(&mut graph).unwrap();
    let exec = graph.raw();
    let exists = || {
        let mut flags = 0;
        // SAFETY: the stand-in minds no wrong handles.
        let result = unsafe { sys::cuGraphExecGetFlags(exec, &mut flags) };
        result == sys::CUresult::CUDA_SUCCESS
    };
    drop(graph);
    let written = doorbell::wait_value32(&bench.region, 0, Condition::And(1), SOON);
    std::thread::sleep(Duration::from_millis(50));
    let kept = exists();
    opened.store(true, Ordering::Release);
    assert_eq!((written, kept), (Ok(()), true));
    while exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: nobody launches it any more.
    ok(unsafe { sys::cuGraphDestroy(raw) });
}

/// Random graphs, launched and relaunched between operations that are queued directly: each operation is executed once.
#[test]
fn random_graphs_among_queued_work_execute_exactly_once() {
    let _alone = alone();
    let seed = from_env("DOORBELL_TEST_SEED", 1);
    let Some(mut bench) = Bench::new("random_graphs", 64) else {
        return;
    };
    let mut random = Random(seed);
    let graphs = from_env("DOORBELL_TEST_GRAPHS", 30);
    let remote = bench.region.remote();
    // Each send adds 1 to a word of the peer's, with a weight of its own: the sums show that each was executed once.
    let mut expected = [0u64; 4];
    let sums = 1 << 15;
    bench.region.fill(sums, 64, 0).unwrap();
    let region = bench.region.clone();
    let result = [region.slice(0, 8).unwrap()];
    let add = |word: u64, weight| {
        Work::fetch_add(
            &result,
            RemoteSlice::at(remote.addr + sums + 8 * word, remote.rkey),
            weight,
        )
    };
    for _ in 0..graphs {
        // Recording needs room.
        bench.stream.synchronize(SOON).unwrap();
        let mut builder = GraphBuilder::capture(&bench.stream).unwrap();
        let mut adds = Vec::new();
        let mut waiting = 0;
        for _ in 0..1 + random.below(12) {
            if random.below(3) == 0 && waiting > 0 {
                builder.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
                waiting -= 1;
            } else {
                let (word, weight) = (random.below(4), 1 + random.below(1000));
                builder.send(&mut bench.pair.a, &add(word, weight)).unwrap();
                adds.push((word, weight));
                waiting += 1;
            }
        }
        for _ in 0..waiting {
            builder.wait_cq(&mut bench.pair.a, QueueKind::Send).unwrap();
        }
        let mut graph = builder.instantiate().unwrap();
        for _ in 0..1 + random.below(6) {
            if random.below(3) == 0 && !graph.is_armed() {
                let (word, weight) = (random.below(4), 1 + random.below(1000));
                let stream = &bench.stream;
                let a = &mut bench.pair.a;
                let queued = a
                    .stream_queue_send(stream, &add(word, weight))
                    .and_then(|_| a.stream_wait_cq(stream, QueueKind::Send));
                match queued {
                    Ok(_) => expected[word as usize] += weight,
                    Err(Error::QueueFull { .. }) => stream.synchronize(SOON).unwrap(),
                    Err(error) => panic!("{error}"),
                }
            }
            match bench.launch(&mut graph) {
                Ok(()) => {
                    for (word, weight) in &adds {
                        expected[*word as usize] += weight;
                    }
                }
                Err(Error::QueueFull { .. }) => bench.stream.synchronize(SOON).unwrap(),
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if random.below(2) == 0 {
            drop(graph);
        }
    }
    bench.stream.synchronize(SOON).unwrap();
    for (word, expected) in expected.iter().enumerate() {
        let mut bytes = [0; 8];
        bench
            .region
            .read(sums + 8 * word as u64, &mut bytes)
            .unwrap();
        assert_eq!(
            u64::from_ne_bytes(bytes),
            *expected,
            "seed {seed}, word {word}"
        );
    }
}
