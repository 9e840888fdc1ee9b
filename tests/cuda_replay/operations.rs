//! All operations in captures, and the same calls outside of them.

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use doorbell::{Control, Executor, QueueKind, Status, Work};

use crate::rig::gpu::alone;
use crate::rig::{SOON, control, device};
use crate::{Bench, SIDE, assert_never_over, check, config, exchange};

/// A receive is posted ahead, by the same calls outside of a capture; each launch posts the next one when it has its own.
#[test]
fn calls_outside_of_a_capture_use_the_same_queues() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("calls_outside_of_a_capture", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let endpoint = &mut bench.pair.b;
    let slices = [to.slice(0, 64).unwrap()];
    let receiver = bench.b.capture(mode, |stream| {
        endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap();
        endpoint.stream_queue_recv(stream, 0, &slices).unwrap();
    });
    let endpoint = &mut bench.pair.a;
    let data = [from.slice(0, 64).unwrap()];
    let sender = bench.a.capture(mode, |stream| {
        endpoint
            .stream_queue_send(stream, &Work::send(&data))
            .unwrap();
        endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
    });
    let posted = bench
        .pair
        .b
        .stream_queue_recv(&bench.b.stream, 0, &slices)
        .unwrap();
    bench.b.stream.synchronize(SOON).unwrap();
    assert_eq!(
        (posted.status(), posted.launches()),
        (Status::Rung, Some(1))
    );
    assert_never_over(&posted);
    for launch in 0..100 {
        from.fill(0, 64, launch).unwrap();
        bench.a.launch(&sender);
        bench.b.launch(&receiver);
        bench.b.wait();
        assert!(bench.is_filled(64, launch), "launch {launch}");
        bench.a.wait();
    }
    // One more, by a kernel that is no node.
    from.fill(0, 64, 200).unwrap();
    let a = &mut bench.pair.a;
    let sent = a
        .stream_queue_send(&bench.a.stream, &Work::send(&data))
        .unwrap();
    let waited = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
    bench.a.stream.synchronize(SOON).unwrap();
    assert_eq!(waited.launches(), Some(1));
    // The wait is over, and tells of the send, whose own ticket says where to look.
    waited.wait(SOON).unwrap();
    assert_never_over(&sent);
    assert!(
        sent.wait(SOON)
            .unwrap_err()
            .to_string()
            .contains("completion is that of its wait")
    );
    bench.b.launch(&receiver);
    bench.b.wait();
    assert!(bench.is_filled(64, 200));
}

/// Writes and reads of more slices than a work request holds, inline data, unsignaled work.
#[test]
fn all_operations_are_replayed() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("all_operations_are_replayed", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let remote = |offset, len| to.remote().slice(offset, len).unwrap();
    let has_reads =
        control(&device()) != Control::Sync && !crate::rig::has_no_queue(&device(), "reads");
    let endpoint = &mut bench.pair.a;
    let slices: Vec<_> = (0..7)
        .map(|at| from.slice(at * 128, 100 + at).unwrap())
        .collect();
    let length: u64 = (0..7).map(|at| 100 + at).sum();
    let back: Vec<_> = (0..5)
        .map(|at| from.slice(8192 + at * 64, 8).unwrap())
        .collect();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let work = Work::write(&slices, remote(0, length)).signaled(false);
            endpoint.stream_queue_send(stream, &work).unwrap();
            let inline = Work::write_inline(b"twenty-eight bytes, no more.", remote(4096, 28));
            endpoint
                .stream_queue_send(stream, &inline.signaled(false))
                .unwrap();
            let read = Work::read(&back, remote(0, 40)).fence(true);
            endpoint.stream_queue_send(stream, &read).unwrap();
            endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
        });
    assert!(has_reads);
    for launch in 1..50 {
        for at in 0..7 {
            from.fill(at * 128, 128, launch + at as u8).unwrap();
        }
        to.fill(0, SIDE, 0).unwrap();
        from.fill(8192, 320, 0).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        let mut offset = 0;
        for at in 0..7 {
            let len = 100 + at;
            assert!(to.is_filled_with(offset, len, launch + at as u8).unwrap());
            offset += len;
        }
        assert!(to.is_filled_with(offset, 4096 - offset, 0).unwrap());
        let mut text = [0; 29];
        to.read(4096, &mut text).unwrap();
        assert_eq!(&text, b"twenty-eight bytes, no more.\0");
        for at in 0..5 {
            assert!(from.is_filled_with(8192 + at * 64, 8, launch).unwrap());
        }
    }
}

#[test]
fn a_receive_without_immediate_data_reports_none() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_receive_without_immediate", &config()) else {
        return;
    };
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    check(&bench, &both, 3);
    assert_eq!(both.tickets[3].details(), Some((64, None)));
}
