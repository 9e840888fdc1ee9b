//! What graphs keep, and what they leave behind.

use std::ptr::null_mut;
use std::time::Duration;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::{Executor, QueueKind, Status, Work};

use crate::rig::gpu::alone;
use crate::rig::{Pair, SOON, device};
use crate::{Bench, Exchange, check, config, exchange, is_failed};

/// The endpoint, its region and the library's stream are dropped: what the graph needs of them stays until it is destroyed.
#[test]
fn graphs_keep_what_they_use() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("graphs_keep_what_they_use", &config()) else {
        return;
    };
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
    check(&bench, &both, 3);
    for endpoint in [&mut bench.pair.a, &mut bench.pair.b] {
        let refused = endpoint.reset().unwrap_err();
        assert!(refused.to_string().contains("graphs"), "{refused}");
    }
    check(&bench, &both, 3);
    let other = Pair::new(&device(), &config());
    drop(std::mem::replace(&mut bench.pair, other));
    check(&bench, &both, 3);
    assert_eq!(both.tickets[3].launches(), Some(9));
    for ticket in &both.tickets {
        assert_eq!(ticket.status(), Status::Rung);
    }
    let Exchange {
        sender,
        receiver,
        tickets,
    } = both;
    drop((sender, receiver));
    // The graphs are destroyed, so nothing keeps the queue pairs any more.
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while tickets.iter().any(|ticket| !is_failed(ticket)) {
        assert!(std::time::Instant::now() < until, "{tickets:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// After its graphs were destroyed, an endpoint is reset, and is as new: for streams, and for other graphs.
#[test]
fn endpoints_are_reset_behind_their_graphs() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("endpoints_are_reset", &config()) else {
        return;
    };
    for round in 0..5 {
        let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        check(&bench, &both, 3 + round);
        // Work of the host is refused, and says why.
        let slices = [bench.from.slice(0, 8).unwrap()];
        let refused = bench.pair.a.post_send(&Work::send(&slices)).unwrap_err();
        assert!(
            refused.to_string().contains("owned by kernels"),
            "{refused}"
        );
        let refused = bench.pair.b.post_recv(0, &slices).unwrap_err();
        assert!(
            refused.to_string().contains("receive queue is owned"),
            "{refused}"
        );
        drop(both);
        bench.pair.reset();
        let (from, to) = (bench.from.clone(), bench.to.clone());
        from.fill(0, 8, 200).unwrap();
        let Pair { a, b, .. } = &mut bench.pair;
        b.post_recv(0, &[to.slice(0, 8).unwrap()]).unwrap();
        let slices = [from.slice(0, 8).unwrap()];
        a.stream_queue_send(&bench.a.stream, &Work::send(&slices))
            .unwrap();
        let waited = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
        bench.a.stream.synchronize(SOON).unwrap();
        assert_eq!(waited.status(), Status::Complete);
        b.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert!(to.is_filled_with(0, 8, 200).unwrap());
    }
}

/// Graph, endpoints and regions go while a launch runs, which has to end as if they were there.
#[test]
fn graphs_are_destroyed_while_they_run() {
    let _alone = alone();
    for _ in 0..10 {
        let Some(mut bench) = Bench::new("graphs_are_destroyed", &config()) else {
            return;
        };
        let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        bench.from.fill(0, 64, 1).unwrap();
        bench.to.fill(0, 64, 0).unwrap();
        bench.b.launch(&both.receiver);
        let Exchange {
            sender,
            receiver,
            tickets,
        } = both;
        drop(receiver);
        bench.a.launch(&sender);
        drop(sender);
        let other = Pair::new(&device(), &config());
        drop(std::mem::replace(&mut bench.pair, other));
        bench.b.wait();
        bench.a.wait();
        assert!(bench.is_filled(64, 1));
        assert_eq!(tickets[3].launches(), Some(1));
    }
}

/// A send of a capture that was broken off is not taken for one of the next capture.
#[test]
fn captures_that_are_broken_off_leave_nothing_to_wait_for() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("captures_that_are_broken_off", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    for round in 0..10 {
        bench.a.begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
        a.stream_queue_send(stream, &work).unwrap();
        let mut graph = null_mut();
        // SAFETY: calls that a capture does not permit, which breaks it off, and that ends it.
        unsafe {
            assert_ne!(
                sys::cuStreamSynchronize(bench.a.raw),
                sys::CUresult::CUDA_SUCCESS
            );
            a.stream_queue_send(stream, &work).unwrap_err();
            a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
            assert_ne!(
                sys::cuStreamEndCapture(bench.a.raw, &mut graph),
                sys::CUresult::CUDA_SUCCESS
            );
        }
        let mut waited = None;
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let graph = bench.a.capture(mode, |stream| {
            a.stream_queue_send(stream, &work).unwrap();
            waited = Some(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
            a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
        });
        from.fill(0, 8, round).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        assert!(bench.is_filled(8, round));
        assert_eq!(waited.unwrap().launches(), Some(1));
        drop(graph);
        if round % 3 == 2 {
            bench.pair.reset();
        }
    }
}

/// Nothing of an operation outside of a capture stays behind when the stream has executed it, also if the stream gets nothing more.
#[test]
fn operations_outside_of_a_capture_keep_nothing() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("operations_outside_of_a_capture", &config()) else {
        return;
    };
    let to = bench.to.clone();
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    for _ in 0..8 {
        bench
            .pair
            .b
            .stream_queue_recv(&bench.b.stream, 0, &[to.slice(0, 16).unwrap()])
            .unwrap();
        bench.b.wait();
    }
    drop(both);
    bench.pair.b.reset().unwrap();
}
