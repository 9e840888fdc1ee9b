//! What cannot be captured.

use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use doorbell::softcx::Faults;
use doorbell::{
    Cause, Condition64, Device, Endpoint, EndpointConfig, Error, Executor, GraphBuilder,
    MessageConfig, MessageQueue, QueueKind, StateKind, Status, Ticket, Transport, Work,
    stream_post, stream_wait_value64,
};

use crate::rig::gpu::alone;
use crate::rig::{Pair, SOON};
use crate::standin::Fault;
use crate::{BOUND, Bench, config, exchange};

/// What cannot be executed again without this process is refused when it is captured, with the reason, and the capture goes on.
#[test]
fn what_cannot_be_replayed_is_refused_at_capture() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_cannot_be_replayed", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let Pair { a, b, .. } = &mut bench.pair;
    let received = b.post_recv(7, &[to.slice(0, 8).unwrap()]).unwrap();
    let refusal = |result: doorbell::Result<Ticket>| result.unwrap_err().to_string();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            // Receives in flight: their completions would be taken for those of the graph.
            let said = refusal(b.stream_wait_cq(stream, QueueKind::Recv));
            assert!(
                said.contains("1 work requests are prepared or in flight"),
                "{said}"
            );
            let said = refusal(a.stream_wait_cq(stream, QueueKind::Send));
            assert!(said.contains("nothing to wait for"), "{said}");
            let bytes = [0; 60];
            let remote = to.remote().slice(0, 60).unwrap();
            let said = refusal(a.stream_queue_send(stream, &Work::write_inline(&bytes, remote)));
            assert!(said.contains("60 inline bytes"), "{said}");
            let slices: Vec<_> = (0..4).map(|at| from.slice(at * 8, 8).unwrap()).collect();
            let said = refusal(a.stream_queue_send(stream, &Work::send(&slices)));
            assert!(said.contains("4 slices"), "{said}");
            let slices: Vec<_> = (0..5).map(|at| from.slice(at * 8, 8).unwrap()).collect();
            let said = refusal(a.stream_queue_recv(stream, 0, &slices));
            assert!(said.contains("at most 4 slices"), "{said}");
            // Bad input has its own error.
            let error = a
                .stream_queue_send(
                    stream,
                    &Work::write(&slices, to.remote().slice(0, 8).unwrap()),
                )
                .unwrap_err();
            assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
            for refused in [
                stream.record(&doorbell::Event::new()),
                stream.launch_host(|| unreachable!()),
                stream.query().map(drop),
            ] {
                let error = refused.unwrap_err();
                assert!(
                    matches!(&error, Error::State { kind, .. } if *kind == StateKind::Captured),
                    "{error}"
                );
            }
            let one = [from.slice(0, 8).unwrap()];
            a.stream_queue_send(stream, &Work::send(&one)).unwrap();
        });
    from.fill(0, 8, 9).unwrap();
    bench.a.launch(&graph);
    bench.a.wait();
    received.wait(SOON).unwrap();
    assert!(to.is_filled_with(0, 8, 9).unwrap());
}

/// Prepared operations and messages change with each use; the doorbells of the sync path are rung by the calling thread.
#[test]
fn what_needs_the_cpu_at_each_launch_is_refused_at_capture() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_needs_the_cpu", &config()) else {
        return;
    };
    let mut plain = Pair::new(bench.pair.domain.device(), &config());
    let region = plain.region(4096);
    let slices = [region.slice(0, 8).unwrap()];
    let work = Work::write(&slices, region.remote().slice(8, 8).unwrap());
    let mut queues =
        [(); 2].map(|()| MessageQueue::new(&plain.domain, &MessageConfig::default()).unwrap());
    let addresses = queues.each_ref().map(MessageQueue::address);
    queues[0].connect(&addresses[1]).unwrap();
    queues[1].connect(&addresses[0]).unwrap();
    let sync = Device::open("softcx,path=sync").unwrap();
    let mut rung_by_caller = Pair::new(&sync, &config());
    let of_sync = rung_by_caller.region(4096);
    let own = [of_sync.slice(0, 8).unwrap()];
    let prepared = plain.a.prepare_send(&work).unwrap();
    let mut returned = None;
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let is_captured = |error: &Error| matches!(error, Error::State { kind, .. } if *kind == StateKind::Captured);
            let rejected = stream_post(stream, prepared).unwrap_err();
            assert!(is_captured(&rejected.error), "{}", rejected.error);
            returned = Some(rejected.prepared);
            let error = queues[0].send(stream, &slices).unwrap_err();
            assert!(is_captured(&error), "{error}");
            let error = queues[1].recv(stream, &slices).unwrap_err();
            assert!(is_captured(&error), "{error}");
            let own_work = Work::write(&own, of_sync.remote().slice(8, 8).unwrap());
            let error = rung_by_caller
                .a
                .stream_queue_send(stream, &own_work)
                .unwrap_err();
            assert!(error.to_string().contains("sync"), "{error}");
            let slices = [bench.from.slice(0, 8).unwrap()];
            let remote = bench.to.remote().slice(0, 8).unwrap();
            let work = Work::write(&slices, remote);
            bench.pair.a.stream_queue_send(stream, &work).unwrap();
            (bench.pair.a.stream_wait_cq(stream, QueueKind::Send)).unwrap();
        });
    // What was refused is as it was, and the capture has the rest.
    bench.from.fill(0, 8, 9).unwrap();
    bench.a.launch(&graph);
    bench.a.wait();
    assert!(bench.is_filled(8, 9));
    region.fill(0, 8, 5).unwrap();
    let ticket = stream_post(&bench.b.stream, returned.unwrap()).unwrap();
    bench.b.wait();
    ticket.wait(SOON).unwrap();
    assert!(region.is_filled_with(8, 8, 5).unwrap());
}

/// Kernels and graphs of a builder send to the peer of the endpoint, so that a request with a receiver of its own would go to another one.
#[test]
fn what_a_post_refuses_is_refused_by_kernels_and_graphs() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_a_post_refuses", &config()) else {
        return;
    };
    let mut datagrams = Endpoint::new(
        &bench.pair.domain,
        &EndpointConfig::default().transport(Transport::Ud),
    )
    .unwrap();
    datagrams.activate().unwrap();
    let handle = datagrams.address_handle(&datagrams.address()).unwrap();
    drop(exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL));
    let mut plain = Pair::new(bench.pair.domain.device(), &config());
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let region = plain.region(64);
    let slices = [from.slice(0, 8).unwrap()];
    let others = [region.slice(0, 8).unwrap()];
    let kind = |result: doorbell::Result<()>| match result {
        Err(Error::State { kind, .. }) => Some(kind),
        _ => None,
    };
    let stream = &bench.a.stream;
    for (work, other) in [
        (
            Work::send(&slices).to(&handle, 1, 2),
            Work::send(&others).to(&handle, 1, 2),
        ),
        (
            Work::read(&slices, to.remote().slice(0, 8).unwrap()).imm(7),
            Work::read(&others, region.remote().slice(8, 8).unwrap()).imm(7),
        ),
    ] {
        let posted = kind(plain.a.post_send(&other).map(drop));
        assert!(posted.is_some());
        let queued = bench.pair.a.stream_queue_send(stream, &work);
        assert_eq!(kind(queued.map(drop)), posted);
        let mut builder = GraphBuilder::capture(stream).unwrap();
        assert_eq!(kind(builder.send(&mut plain.a, &other)), posted);
    }
    stream.synchronize(SOON).unwrap();
}

/// The builder would not know of the node, and its ticket would be that of an operation that is executed once.
#[test]
fn what_kernels_wait_for_is_refused_in_a_builders_capture() {
    let _alone = alone();
    let Some(bench) = Bench::new("what_kernels_wait_for", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let stream = &bench.a.stream;
    let builder = doorbell::GraphBuilder::capture(stream).unwrap();
    let equal = Condition64::Equal(0);
    let refused = stream_wait_value64(stream, &words, 0, equal, SOON).unwrap_err();
    assert!(
        matches!(&refused, Error::State { kind, .. } if *kind == StateKind::Captured),
        "{refused}"
    );
    drop(builder.instantiate().unwrap());
    stream_wait_value64(stream, &words, 0, equal, SOON).unwrap();
    stream.synchronize(SOON).unwrap();
}

#[test]
fn a_wait_that_is_refused_leaves_the_send_to_the_next() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_wait_that_is_refused", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let _both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
    a.stream_queue_send(stream, &work).unwrap();
    let short = Some(Duration::from_millis(20));
    stream_wait_value64(stream, &words, 0, Condition64::GreaterOrEqual(1), short).unwrap();
    stream.synchronize(SOON).unwrap_err();
    a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
    stream.take_fault().unwrap();
    let waited = a.stream_wait_cq(stream, QueueKind::Send).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
}

/// A write of many slices is several kernels. If the driver refuses one of them, those before it transmit nothing.
#[test]
fn a_part_of_a_work_is_not_transmitted() {
    let _alone = alone();
    let test = "a_part_of_a_work";
    let Some(mut bench) = Bench::new(test, &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    from.fill(0, 64, 5).unwrap();
    to.fill(0, 64, 0).unwrap();
    let slices = [0, 8, 16, 24].map(|at| from.slice(at, 8).unwrap());
    let work = Work::write(&slices, to.remote().slice(0, 32).unwrap());
    // Behind a device that is slow to stop, the launch comes sooner than the watchdog. Devices without injection are as fast as they are.
    bench.pair.domain.device().set_faults(Faults {
        commands_ns: Duration::from_millis(100).as_nanos() as u64,
        ..Faults::default()
    });
    let a = &mut bench.pair.a;
    let mut is_refused = false;
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let Some(fault) = Fault::new(test, "cuLaunchKernel:2,nth=2") else {
                return;
            };
            let queued = a.stream_queue_send(stream, &work);
            drop(fault);
            assert!(matches!(queued, Err(Error::Cuda { .. })), "{queued:?}");
            is_refused = true;
        });
    if !is_refused {
        return;
    }
    let failure = a.failure().unwrap();
    assert_eq!(failure.cause, Cause::Discarded);
    bench.a.launch(&graph);
    bench.a.wait();
    // Time for what should not come.
    std::thread::sleep(Duration::from_millis(20));
    assert!(to.is_filled_with(0, 64, 0).unwrap());
    bench.pair.domain.device().set_faults(Faults::default());
}

/// An operation whose kernel is queued is accepted, also if the driver refuses the wait behind it: the stream has failed then.
#[test]
fn what_a_kernel_may_execute_is_not_refused() {
    let _alone = alone();
    let test = "what_a_kernel_may_execute";
    let Some(mut bench) = Bench::new(test, &config()) else {
        return;
    };
    let _both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    from.fill(0, 8, 5).unwrap();
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
    // The first one is the count behind the kernel.
    let Some(fault) = Fault::new(test, "cuStreamBatchMemOp_v2:2,nth=2") else {
        return;
    };
    let ticket = a.stream_queue_send(stream, &work).unwrap();
    drop(fault);
    let refused = a.stream_queue_send(stream, &work);
    assert!(
        matches!(refused, Err(Error::Asynchronous { .. })),
        "{refused:?}"
    );
    bench.a.wait();
    assert_eq!(ticket.launches(), Some(1));
    let end = std::time::Instant::now() + BOUND;
    while !bench.is_filled(8, 5) {
        assert!(std::time::Instant::now() < end, "nothing was written");
    }
}
