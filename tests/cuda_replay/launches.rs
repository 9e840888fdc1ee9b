//! Launches of captured graphs: what they transfer, and that each is executed once.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::{Executor, HostStream, QueueKind, Status, Work};

use crate::rig::gpu::alone;
use crate::rig::{Pair, SOON, device, from_env};
use crate::{Bench, Graph, SIDE, assert_never_over, check, config, exchange, number, ok};

/// Sends, receives, and waits of both sides, in every mode of captures. The contents of the memory are those of the launch.
#[test]
fn a_captured_graph_transfers_the_contents_of_each_launch() {
    let _alone = alone();
    for mode in [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        let Some(mut bench) = Bench::new("a_captured_graph_transfers", &config()) else {
            return;
        };
        let (from, to) = (bench.from.clone(), bench.to.clone());
        let mut tickets = Vec::new();
        let endpoint = &mut bench.pair.a;
        let sender = bench.a.capture(mode, |stream| {
            let slices = [from.slice(0, 100).unwrap(), from.slice(4096, 28).unwrap()];
            let work = Work::send(&slices).imm(77);
            tickets.push(endpoint.stream_queue_send(stream, &work).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
        let endpoint = &mut bench.pair.b;
        let receiver = bench.b.capture(mode, |stream| {
            let slices = [to.slice(0, 64).unwrap(), to.slice(64, 64).unwrap()];
            tickets.push(endpoint.stream_queue_recv(stream, 0, &slices).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Prepared, Some(0))
            );
        }
        let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
        for launch in 1..=launches {
            bench.from.fill(0, SIDE, launch as u8).unwrap();
            bench.b.launch(&receiver);
            bench.a.launch(&sender);
            bench.b.wait();
            assert!(bench.is_filled(128, launch as u8), "launch {launch}");
            bench.a.wait();
        }
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Rung, Some(launches))
            );
            assert!(!ticket.is_over());
            assert_never_over(ticket);
        }
        assert_eq!(tickets[3].details(), Some((128, Some(77))));
        assert_eq!(tickets[0].details(), None);
    }
}

/// No call of this process comes between the launches, and no wait: each launch adds one to a number of the peer, and the queues wrap many times.
#[test]
fn launches_behind_each_other_are_all_executed_once() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_behind_each_other", &config()) else {
        return;
    };
    if crate::rig::has_no_queue(&device(), "launches_behind_each_other")
        || !crate::rig::has_atomics(&device(), "launches_behind_each_other")
    {
        return;
    }
    bench.to.fill(0, 64, 0).unwrap();
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let remote = to.remote().slice(0, 8).unwrap();
    let endpoint = &mut bench.pair.a;
    let mut waited = None;
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let old = from.slice(0, 8).unwrap();
            for _ in 0..3 {
                let work = Work::fetch_add(std::slice::from_ref(&old), remote, 1);
                endpoint.stream_queue_send(stream, &work).unwrap();
            }
            for _ in 0..3 {
                waited = Some(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
            }
        });
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&graph);
    }
    bench.a.wait();
    assert_eq!(number(&to), 3 * launches);
    assert_eq!(number(&from), 3 * launches - 1);
    assert_eq!(waited.unwrap().launches(), Some(launches));
}

/// The queues are in the middle of a lap when they are handed over.
#[test]
fn queues_that_were_in_use_go_on_where_they_were() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("queues_that_were_in_use", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let stream = HostStream::new("before").unwrap();
    for round in 0..37 {
        from.fill(0, 8, round).unwrap();
        bench
            .pair
            .b
            .post_recv(0, &[to.slice(0, 8).unwrap()])
            .unwrap();
        let slices = [from.slice(0, 8).unwrap()];
        let Pair { a, b, .. } = &mut bench.pair;
        a.stream_queue_send(&stream, &Work::send(&slices)).unwrap();
        a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        stream.synchronize(SOON).unwrap();
    }
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let both = exchange(&mut bench, mode);
    check(&bench, &both, 200);
}

/// Two instances of a graph, on two streams at the same time.
#[test]
fn launches_of_two_instances_are_all_counted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_of_two_instances", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, endpoint) = (&bench.a.stream, &mut bench.pair.a);
    bench.a.begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let sent = endpoint.stream_queue_send(stream, &work).unwrap();
    let waited = endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
    let (mut graph, mut one, mut two) = (null_mut(), null_mut(), null_mut());
    // SAFETY: the capture of this stream; the graph is destroyed once, and the executable ones by `Graph`.
    unsafe {
        ok(sys::cuStreamEndCapture(bench.a.raw, &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut one, graph, 0));
        ok(sys::cuGraphInstantiateWithFlags(&mut two, graph, 0));
        ok(sys::cuGraphDestroy(graph));
    }
    let (one, two) = (Graph(one), Graph(two));
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&one);
        bench.b.launch(&two);
    }
    bench.a.wait();
    bench.b.wait();
    let counts = (sent.launches(), waited.launches());
    assert_eq!(counts, (Some(2 * launches), Some(2 * launches)));
}

/// More receives than the 16 bits of a doorbell record count.
#[test]
fn doorbell_records_wrap() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("doorbell_records_wrap", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let Pair { a, b, .. } = &mut bench.pair;
    let s = [from.slice(0, 8).unwrap()];
    let r = [to.slice(0, 8).unwrap()];
    let mut last = None;
    let sender = bench.a.capture(mode, |stream| {
        for _ in 0..24 {
            a.stream_queue_send(stream, &Work::send(&s)).unwrap();
        }
        for _ in 0..24 {
            a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    });
    let receiver = bench.b.capture(mode, |stream| {
        for _ in 0..24 {
            b.stream_queue_recv(stream, 0, &r).unwrap();
        }
        for _ in 0..24 {
            last = Some(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        }
    });
    for launch in 0..3000u64 {
        bench.b.launch(&receiver);
        bench.a.launch(&sender);
        if launch % 64 == 0 {
            bench.a.wait();
            bench.b.wait();
        }
    }
    bench.a.wait();
    bench.b.wait();
    assert_eq!(last.unwrap().launches(), Some(3000));
}
