//! Operations of kernels that are given up: behind waits that have failed, by aborts, and with their context. What was final stays.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::{
    Cause, Condition, Condition64, CudaContext, Executor, QueueKind, Status, Ticket, Work,
    stream_wait_value64,
};

use crate::rig::gpu::alone;
use crate::rig::{Pair, SOON, device};
use crate::standin::{Fault, is_standin};
use crate::waived::waived;
use crate::{Application, BOUND, Bench, config, exchange};

/// From here on the queues of both endpoints are those of graphs.
fn hand_over(bench: &mut Bench) {
    drop(exchange(bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL));
}

fn write(bench: &mut Bench) -> Ticket {
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let stream = &bench.a.stream;
    bench.pair.a.stream_queue_send(stream, &work).unwrap()
}

/// The wait is of an endpoint whose queues are its own. The kernel behind it looks at no word of that wait.
#[test]
fn a_send_of_a_kernel_behind_a_failed_wait_is_not_transmitted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_send_behind_a_failed_wait", &config()) else {
        return;
    };
    for is_aborted in [false, true] {
        hand_over(&mut bench);
        bench.from.fill(0, 8, 7).unwrap();
        bench.to.fill(0, 8, 0).unwrap();
        let mut other = Pair::new(&device(), &config());
        let region = other.region(64);
        let timeout = (!is_aborted).then_some(Duration::from_millis(100));
        let into = [region.slice(0, 64).unwrap()];
        other.b.post_recv(0, &into).unwrap();
        let stream = bench.a.stream.clone();
        let waited = (other.b)
            .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
            .unwrap();
        let sent = write(&mut bench);
        if is_aborted {
            std::thread::sleep(Duration::from_millis(20));
            stream.abort();
        }
        let _ = stream.synchronize(SOON);
        bench.a.wait();
        std::thread::sleep(Duration::from_millis(20));
        assert!(bench.is_filled(8, 0), "aborted: {is_aborted}");
        assert_ne!(waited.status(), Status::Complete);
        let status = sent.status();
        let is_discarded =
            matches!(status, Status::Failed(failure) if failure.cause == Cause::Discarded);
        assert!(is_discarded, "{status:?}");
        assert_eq!(bench.pair.a.failure().unwrap().cause, Cause::Discarded);
        let _ = stream.take_fault();
        bench.pair.reset();
        assert_eq!(sent.status(), status);
    }
}

/// The driver has the kernel and refuses the count, or the wait, behind it: the operation may be executed at any time, with what it uses. The queues come
/// back when it is done.
#[test]
fn what_a_kernel_uses_is_kept_until_it_is_done() {
    let _alone = alone();
    let test = "what_a_kernel_uses";
    let Some(mut bench) = Bench::new(test, &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    for refused in [1, 2] {
        hand_over(&mut bench);
        words.fill(0, 4096, 0).unwrap();
        bench.from.fill(0, 8, 7).unwrap();
        bench.to.fill(0, 8, 0).unwrap();
        let stream = bench.a.stream.clone();
        let reached = Condition64::GreaterOrEqual(1);
        stream_wait_value64(&stream, &words, 0, reached, SOON).unwrap();
        let Some(fault) = Fault::new(test, &format!("cuStreamBatchMemOp_v2:2,nth={refused}"))
        else {
            return;
        };
        let sent = write(&mut bench);
        drop(fault);
        assert_eq!(sent.launches(), Some(0), "{refused}");
        stream.take_fault().unwrap();
        // Its cell is not that of the kernel which still waits.
        let next = stream_wait_value64(&stream, &words, 8, reached, SOON).unwrap();
        words.store_u64(0, 1).unwrap();
        let end = Instant::now() + BOUND;
        while sent.launches() != Some(1) || !bench.is_filled(8, 7) {
            assert!(Instant::now() < end, "{refused}: {sent:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_ne!(next.status(), Status::Complete, "{refused}");
        words.store_u64(8, 1).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(next.status(), Status::Complete);
        bench.pair.reset();
    }
}

/// Neither a reset nor a failure of the next generation changes a status that was final.
#[test]
fn final_statuses_of_kernels_operations_stay() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("final_statuses", &config()) else {
        return;
    };
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let sent = both.tickets[0].clone();
    // Nobody has asked for the status of this one before the reset.
    let unasked = both.tickets[1].clone();
    bench.pair.a.abort();
    let status = sent.status();
    let is_aborted = |status: Status| matches!(status, Status::Failed(failure) if failure.cause == Cause::Aborted);
    assert!(is_aborted(status), "{status:?}");
    drop(both);
    bench.pair.reset();
    assert_eq!(sent.status(), status);
    assert!(is_aborted(unasked.status()), "{:?}", unasked.status());
    hand_over(&mut bench);
    bench.pair.b.abort();
    bench.pair.a.abort();
    assert_eq!(sent.status(), status);
    assert!(sent.is_over());
}

/// A wait that a stream has not come to may still find its completion, though its endpoint has failed. It has one end, and the stream goes on if and only if that is
/// success.
#[test]
fn a_wait_of_an_endpoint_that_has_failed_has_one_end() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("one_end", &config()) else {
        return;
    };
    hand_over(&mut bench);
    bench.from.fill(0, 8, 7).unwrap();
    bench.to.fill(0, 8, 0).unwrap();
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    write(&mut bench);
    let stream = bench.a.stream.clone();
    stream.synchronize(SOON).unwrap();
    let end = Instant::now() + BOUND;
    while !bench.is_filled(8, 7) {
        assert!(Instant::now() < end);
    }
    let reached = Condition64::GreaterOrEqual(1);
    stream_wait_value64(&stream, &words, 0, reached, SOON).unwrap();
    let waited = (bench.pair.a)
        .stream_wait_cq(&stream, QueueKind::Send)
        .unwrap();
    bench.pair.a.abort();
    let early = (waited.status(), waited.is_over());
    words.store_u64(0, 1).unwrap();
    let has_gone_on = stream.synchronize(SOON).is_ok();
    let last = waited.status();
    assert_eq!(last == Status::Complete, has_gone_on, "{last:?}");
    assert!(!early.1 || early.0 == last, "{early:?}, then {last:?}");
    let _ = stream.take_fault();
}

/// A destroyed context executes nothing any more.
#[test]
fn operations_of_a_lost_context_end() {
    let _alone = alone();
    let test = "operations_of_a_lost_context";
    if Bench::new(test, &config()).is_none() {
        return;
    }
    if !is_standin() {
        return waived(
            test,
            "a real driver may crash on handles of a context that is gone",
        );
    }
    let (mut raw, mut popped) = (null_mut(), null_mut());
    // SAFETY: writes handles; creation made the context current.
    unsafe {
        crate::ok(sys::cuCtxCreate_v2(&mut raw, 0, 0));
        crate::ok(sys::cuCtxPopCurrent_v2(&mut popped));
    }
    // SAFETY: a context; it is destroyed early on purpose, and the stand-in checks handles.
    let context = unsafe { CudaContext::from_raw(raw) }.unwrap();
    let application = Application::new(&context);
    let stream = application.stream.clone();
    let mut pair = Pair::new(&device(), &config());
    let words = pair.region(4096);
    let slices = [words.slice(64, 8).unwrap()];
    let work = Work::write(&slices, words.remote().slice(128, 8).unwrap());
    let a = &mut pair.a;
    drop(
        application.capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            a.stream_queue_send(stream, &work).unwrap();
        }),
    );
    // A memory operation: to destroy a context ends it, and no kernel that has begun.
    let at_least = Condition::GreaterOrEqual(1);
    let first = doorbell::stream_wait_value32(&stream, &words, 0, at_least, None).unwrap();
    let reached = Condition64::GreaterOrEqual(1);
    let word = stream_wait_value64(&stream, &words, 8, reached, None).unwrap();
    let sent = a.stream_queue_send(&stream, &work).unwrap();
    let waited = a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // SAFETY: made above.
    crate::ok(unsafe { sys::cuCtxDestroy_v2(raw) });
    let end = Instant::now() + BOUND;
    for ticket in [&first, &word, &sent, &waited] {
        while !ticket.is_over() {
            assert!(Instant::now() < end, "{ticket:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // The stream may have come to it when it ended.
    let status = word.status();
    assert!(
        matches!(status, Status::Unknown(_) | Status::Discarded),
        "{status:?}"
    );
    assert_eq!(
        [sent.status(), waited.status()],
        [Status::Discarded, Status::Discarded]
    );
    assert_eq!(pair.a.failure().unwrap().cause, Cause::Discarded);
    // Its stream is gone with the context.
    std::mem::forget(application);
}
