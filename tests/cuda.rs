//! CUDA streams as executors, in addition to the suites of the public interface with `DOORBELL_TEST_STREAM=cuda`. `scripts/test cuda` runs these tests
//! over the stand-in for the driver; without a driver they are WAIVED. With a GPU they use the real driver, except those that make the driver fail.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use doorbell::__private::{Attachments, Outcome, Owner};
use doorbell::softcx::Faults;
use doorbell::{
    Access, Cause, Condition, Control, CudaContext, CudaStream, Device, DeviceQueue,
    EndpointConfig, Error, Event, Execution, Executor, HostStream, QueueKind, Region, StateKind,
    Status, Ticket, TimingEvent, Work, stream_post_all, stream_wait_value32, stream_write_value32,
};
use doorbell_wire::bytecode::{Program, Role, Target, TargetId, Targets};
use rig::gpu::{Bench, alone, config, context};
use rig::{Limit, Pair, Random, SOON, by_kernel, device, from_env, queueing};
use standin::{Fault, LACKS, is_standin, lacking, memops_here, with_setting};
use waived::waived;

const BOUND: Duration = Duration::from_secs(60);
const SHORT: Option<Duration> = Some(Duration::from_millis(20));
const OUT_OF_MEMORY: u32 = 2;
const OK: sys::CUresult = sys::CUresult::CUDA_SUCCESS;

/// A stream of the kind that `DOORBELL_TEST_STREAM` names.
fn new_stream(context: &CudaContext, name: &str) -> CudaStream {
    let stream = CudaStream::new(context, name).unwrap();
    if by_kernel() {
        return stream.with_execution(Execution::Kernel).unwrap();
    }
    stream
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < BOUND, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Polls until the query says that it is over.
fn polled(query: impl Fn() -> doorbell::Result<bool>) -> doorbell::Result<()> {
    let start = Instant::now();
    while !query()? {
        assert!(start.elapsed() < BOUND, "it is not over");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn context_without_a_driver_or_device_is_an_error() {
    let _alone = alone();
    let error = CudaContext::primary(10_000).unwrap_err();
    let expected = match context("context_without_a_driver_or_device_is_an_error") {
        Some(_) => matches!(
            error,
            Error::Range {
                argument: "ordinal",
                ..
            }
        ),
        None => matches!(&error, Error::State { reason, .. } if reason.contains("libcuda")),
    };
    assert!(expected, "{error}");
}

#[test]
fn batch_of_64_sends_takes_one_driver_call() {
    let _alone = alone();
    let test = "batch_of_64_sends_takes_one_driver_call";
    let Some(context) = context(test) else { return };
    let stream = new_stream(&context, "batch");
    let mut bench = Bench::new();
    bench.works(&stream, 1);
    let mut batch: Vec<_> = (0..64)
        .map(|_| bench.pair.a.prepare_send(&Work::nop()).unwrap())
        .collect();
    // A second call would fail.
    let Some(fault) = Fault::new(test, &format!("{}:1,nth=2", queueing().1)) else {
        return;
    };
    let before = stream.driver_calls();
    let tickets = stream_post_all(&stream, &mut batch).unwrap();
    assert_eq!((tickets.len(), stream.driver_calls() - before), (64, 1));
    for _ in 0..64 {
        bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    // The next driver call is the second.
    let refused = stream.record(&Event::new());
    assert!(
        matches!(refused, Err(Error::Cuda { code: 1, .. })),
        "{refused:?}"
    );
    drop(fault);
    stream.synchronize(SOON).unwrap();
    assert!(
        tickets
            .iter()
            .all(|ticket| ticket.status() == Status::Complete)
    );
}

#[test]
fn work_refused_by_the_driver_is_not_queued() {
    let _alone = alone();
    let test = "work_refused_by_the_driver_is_not_queued";
    let Some(context) = context(test) else { return };
    let stream = new_stream(&context, "refused");
    let mut bench = Bench::new();
    for round in 0..10 {
        let mut batch: Vec<_> = (0..4)
            .map(|_| bench.pair.a.prepare_send(&Work::nop()).unwrap())
            .collect();
        let Some(fault) = Fault::new(test, &format!("{}:2,nth=1", queueing().1)) else {
            return;
        };
        let error = stream_post_all(&stream, &mut batch).unwrap_err();
        drop(fault);
        let expected = Error::Cuda {
            call: queueing().0,
            code: OUT_OF_MEMORY,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        };
        assert_eq!(error, expected);
        assert_eq!(batch.len(), 4);
        assert!(
            batch
                .iter()
                .all(|op| op.ticket().status() == Status::Prepared)
        );
        stream_post_all(&stream, &mut batch).unwrap();
        for _ in 0..4 {
            bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
        bench.works(&stream, round);
    }
    // A refused wait for a host stream has no later effect either: the next wait waits for its own event.
    let host = HostStream::new("host").unwrap();
    let (refused, held) = (Event::new(), Event::new());
    let release = Arc::new(AtomicBool::new(false));
    let released = Arc::clone(&release);
    host.launch(move || {
        while !released.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    })
    .unwrap();
    host.record(&refused).unwrap();
    host.record(&held).unwrap();
    let fault = Fault::new(test, &format!("{}:2,nth=1", queueing().1));
    assert!(matches!(
        stream.wait_event(&refused),
        Err(Error::Cuda { .. })
    ));
    drop(fault);
    stream.wait_event(&held).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(stream.query(), Ok(false));
    release.store(true, Ordering::Release);
    stream.synchronize(SOON).unwrap();
}

#[test]
fn refused_event_wait_propagates_no_failure() {
    let _alone = alone();
    let test = "refused_event_wait_propagates_no_failure";
    let Some(context) = context(test) else { return };
    let (failing, stream) = (new_stream(&context, "failing"), new_stream(&context, test));
    let mut bench = Bench::new();
    let condition = Condition::GreaterOrEqual(1);
    let event = Event::new();
    stream_wait_value32(&failing, &bench.region, 0, condition, SHORT).unwrap();
    failing.record(&event).unwrap();
    // The stream is still at this wait when the other one fails.
    stream_wait_value32(&stream, &bench.region, 64, condition, SOON).unwrap();
    let Some(fault) = Fault::new(test, &format!("{}:2,nth=1", queueing().1)) else {
        return;
    };
    let refused = stream.wait_event(&event);
    drop(fault);
    assert!(matches!(refused, Err(Error::Cuda { .. })), "{refused:?}");
    // These take the entries of the refused wait.
    let stored = stream_write_value32(&stream, &bench.region, 128, 1).unwrap();
    let sent = bench
        .pair
        .a
        .stream_queue_send(&stream, &Work::nop())
        .unwrap();
    assert!(failing.synchronize(SOON).is_err());
    bench.region.store_u32(64, 1).unwrap();
    assert_eq!(stream.synchronize(SOON), Ok(()));
    assert_eq!(stored.status(), Status::Complete);
    assert_eq!(sent.wait(SOON), Ok(()));
    assert!(failing.take_fault().is_some());
}

#[test]
fn waiting_for_own_record_behind_a_failure_fails() {
    let _alone = alone();
    let test = "waiting_for_own_record_behind_a_failure_fails";
    let Some(context) = context(test) else { return };
    let stream = new_stream(&context, "own");
    let bench = Bench::new();
    let condition = Condition::GreaterOrEqual(1);
    let event = Event::new();
    stream_wait_value32(&stream, &bench.region, 0, condition, SHORT).unwrap();
    stream.record(&event).unwrap();
    until("the failure", || stream.take_fault().is_some());
    stream.wait_event(&event).unwrap();
    let error = stream.synchronize(SOON).unwrap_err();
    assert!(error.to_string().contains("waited for an event"), "{error}");
    assert!(stream.take_fault().is_some());
    let stored = stream_write_value32(&stream, &bench.region, 64, 1).unwrap();
    assert_eq!(stream.synchronize(SOON), Ok(()));
    assert_eq!(stored.status(), Status::Complete);
}

#[test]
fn partly_queued_batch_fails_the_operations_not_queued() {
    let _alone = alone();
    let test = "partly_queued_batch_fails_the_operations_not_queued";
    let Some(context) = context(test) else { return };
    let mut bench = Bench::new();
    let stream = new_stream(&context, "broken");
    bench.works(&stream, 3);
    // At least one store each: more than one driver call takes.
    let mut batch = Vec::new();
    for _ in 0..128 {
        for end in [&mut bench.pair.a, &mut bench.pair.b] {
            batch.push(end.prepare_send(&Work::nop()).unwrap());
        }
    }
    let Some(fault) = Fault::new(test, &format!("{}:2,nth=2", queueing().1)) else {
        return;
    };
    let tickets = stream_post_all(&stream, &mut batch).unwrap();
    drop(fault);
    until("an end", || tickets.iter().all(Ticket::is_over));
    // The stream executes what was queued before, and nothing is queued behind what is missing.
    let said = stream.synchronize(SOON);
    assert!(matches!(said, Err(Error::Asynchronous { .. })), "{said:?}");
    let said = stream_write_value32(&stream, &bench.region, 64, 1);
    assert!(matches!(said, Err(Error::Asynchronous { .. })), "{said:?}");
    assert!(stream.take_fault().is_some());
    assert_eq!(stream.synchronize(SOON), Ok(()));
    let lost = |ticket: &Ticket| matches!(ticket.status(), Status::Failed(_) | Status::Discarded);
    assert!(tickets.iter().any(lost));
    let failures = [&bench.pair.a, &bench.pair.b].map(|end| end.failure().map(|it| it.cause));
    assert!(failures.contains(&Some(Cause::Discarded)), "{failures:?}");
    bench.pair.reset();
    bench.works(&stream, 4);
    // The same with a wait at the front, and a reset while the stream still has the queued part.
    let mut batch = vec![];
    bench.pair.b.post_recv(1, &[]).unwrap();
    batch.push(bench.pair.b.prepare_wait_cq(QueueKind::Recv).unwrap());
    for _ in 0..120 {
        for end in [&mut bench.pair.a, &mut bench.pair.b] {
            batch.push(end.prepare_send(&Work::nop()).unwrap());
        }
    }
    batch.extend((0..8).map(|_| bench.pair.a.prepare_send(&Work::nop()).unwrap()));
    batch.extend((0..8).map(|_| bench.pair.b.prepare_send(&Work::nop()).unwrap()));
    let fault = Fault::new(test, &format!("{}:2,nth=2", queueing().1));
    let tickets = stream_post_all(&stream, &mut batch).unwrap();
    drop(fault);
    bench.pair.reset();
    assert!(tickets.iter().all(Ticket::is_over));
    assert!(matches!(
        stream.synchronize(SOON),
        Err(Error::Asynchronous { .. })
    ));
    // The wait failed with its endpoint, which is a fault of the stream.
    assert!(stream.take_fault().is_some());
    bench.works(&stream, 5);
}

/// The devices of operations that the driver has refused are waited for at the same time.
#[test]
fn refused_operations_of_hung_devices_block_the_caller_once() {
    const PAIRS: usize = 4;
    let test = "refused_operations_of_hung_devices_block_the_caller_once";
    let _alone = alone();
    let Some(context) = context(test) else { return };
    let device = device();
    let hangs = Faults {
        commands_ns: Duration::from_secs(4).as_nanos() as u64,
        ..Faults::default()
    };
    if !device.set_faults(Faults::default()) {
        return waived(test, "the device takes no faults from this process");
    }
    let stream = new_stream(&context, "broken");
    let mut pairs: Vec<_> = (0..PAIRS).map(|_| Pair::new(&device, &config())).collect();
    // At least one store each: more than one driver call takes.
    let mut batch = Vec::new();
    for _ in 0..64 {
        for pair in &mut pairs {
            for end in [&mut pair.a, &mut pair.b] {
                batch.push(end.prepare_send(&Work::nop()).unwrap());
            }
        }
    }
    let Some(fault) = Fault::new(test, &format!("{}:2,nth=2", queueing().1)) else {
        return;
    };
    device.set_faults(hangs);
    let start = Instant::now();
    let tickets = stream_post_all(&stream, &mut batch).unwrap();
    let took = start.elapsed();
    drop(fault);
    // A device may take two seconds.
    assert!(took < Duration::from_secs(7), "{took:?}");
    until("an end", || tickets.iter().all(Ticket::is_over));
    assert!(stream.synchronize(SOON).is_err());
    device.set_faults(Faults::default());
    let failed = |pair: &Pair| pair.a.failure().is_some() && pair.b.failure().is_some();
    assert!(pairs.iter().all(failed));
}

#[test]
fn deadline_ends_a_wait_and_restores_the_word() {
    let _alone = alone();
    let Some(context) = context("deadline_ends_a_wait_and_restores_the_word") else {
        return;
    };
    let stream = new_stream(&context, "late");
    let mut bench = Bench::new();
    let cases = [
        (7, Condition::GreaterOrEqual(8)),
        (u32::MAX, Condition::GreaterOrEqual(5)),
        (0b0101, Condition::And(0b1010)),
        (!0b0100, Condition::Nor(0b0100)),
    ];
    for (word, condition) in cases {
        bench.region.store_u32(64, word).unwrap();
        // Held until all is queued: a stream with an unreported failure accepts no more work.
        bench.region.store_u32(192, 0).unwrap();
        let gate = Condition::GreaterOrEqual(1);
        stream_wait_value32(&stream, &bench.region, 192, gate, SOON).unwrap();
        let ticket = stream_wait_value32(&stream, &bench.region, 64, condition, SHORT).unwrap();
        let behind = stream_write_value32(&stream, &bench.region, 128, 9).unwrap();
        bench.region.store_u32(192, 1).unwrap();
        assert!(matches!(
            stream.synchronize(SOON),
            Err(Error::Asynchronous { .. })
        ));
        let status = ticket.status();
        assert!(
            matches!(status, Status::Failed(e) if matches!(e.cause, Cause::Deadline(_))),
            "{status:?}"
        );
        assert_eq!(bench.region.load_u32(64), Ok(word), "{condition:?}");
        // The stream cannot skip a store.
        assert_eq!(behind.status(), Status::Complete);
        assert!(stream.take_fault().is_some());
    }
    bench.works(&stream, 5);
}

/// Another wait for the same word may see the value that the library stores in order to end a wait.
#[test]
fn wait_that_saw_a_substitute_value_is_unknown() {
    let _alone = alone();
    let Some(context) = context("wait_that_saw_a_substitute_value_is_unknown") else {
        return;
    };
    let streams = ["given up", "beside it"].map(|name| new_stream(&context, name));
    let bench = Bench::new();
    let condition = Condition::GreaterOrEqual(1);
    let mut unknown = 0;
    for _ in 0..20 {
        bench.region.store_u32(64, 0).unwrap();
        let beside = stream_wait_value32(&streams[1], &bench.region, 64, condition, None).unwrap();
        let given_up =
            stream_wait_value32(&streams[0], &bench.region, 64, condition, SHORT).unwrap();
        assert!(streams[0].synchronize(SOON).is_err());
        let failure = given_up.status();
        assert!(matches!(failure, Status::Failed(_)), "{failure:?}");
        assert!(streams[0].take_fault().is_some());
        let late = stream_wait_value32(&streams[0], &bench.region, 64, condition, SOON).unwrap();
        if let Status::Unknown(failure) = beside
            .wait(SHORT)
            .map_or_else(|_| beside.status(), |()| Status::Complete)
        {
            assert_eq!(failure.cause, Cause::Substitute);
            unknown += 1;
        } else {
            assert!(!beside.is_over(), "{:?}", beside.status());
        }
        bench.region.store_u32(64, 1).unwrap();
        let is_known = streams[1].synchronize(SOON).is_ok();
        assert_eq!(is_known, beside.status() == Status::Complete);
        assert_eq!(is_known, streams[1].take_fault().is_none());
        // The substitute value was no longer in the word when this wait was queued.
        streams[0].synchronize(SOON).unwrap();
        assert_eq!(late.status(), Status::Complete);
    }
    assert!(by_kernel() || unknown > 0, "none has seen what was stored");
}

/// A driver's stream has room for a number of calls; the next one blocks until one of them is done.
#[test]
fn a_call_blocked_on_a_full_stream_returns_when_the_wait_ends() {
    let _alone = alone();
    let test = "a_call_blocked_on_a_full_stream";
    let limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    for (ends_by_abort, timeout) in [(false, SOON.map(|soon| soon / 10)), (true, Some(BOUND))] {
        limit.step(ends_by_abort.into(), BOUND);
        let stream = new_stream(&context, test);
        let mut bench = Bench::new();
        let region = &bench.region;
        let into = [region.slice(0, 64).unwrap()];
        let b = &mut bench.pair.b;
        b.post_recv(1, &into).unwrap();
        let wait = b
            .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
            .unwrap();
        let queued = AtomicU32::new(0);
        let started = Instant::now();
        std::thread::scope(|scope| {
            let filling = scope.spawn(|| {
                // Not functions of the host: a driver was seen to take 3,000 of these.
                while queued.load(Ordering::Relaxed) < 3000
                    && stream_write_value32(&stream, region, 128, 1).is_ok()
                {
                    queued.fetch_add(1, Ordering::Relaxed);
                }
            });
            if ends_by_abort {
                until("the stream is full", || {
                    let before = queued.load(Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(100));
                    queued.load(Ordering::Relaxed) == before
                });
                assert!(!filling.is_finished(), "more than a driver's stream takes");
                // Neither waits for that thread.
                let short = Some(Duration::from_millis(50));
                let late = stream.synchronize(short);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                assert_eq!(stream.query(), Ok(false));
                b.abort_handle().abort();
            }
            until("the thread that fills the stream returns", || {
                filling.is_finished()
            });
        });
        until("the wait is over", || wait.is_over());
        let status = wait.status();
        assert!(matches!(status, Status::Failed(_)), "{status:?}");
        assert!(started.elapsed() < BOUND / 2, "{:?}", started.elapsed());
        let end = stream.synchronize(SOON);
        assert!(matches!(end, Err(Error::Asynchronous { .. })), "{end:?}");
        stream.take_fault();
        Bench::new().works(&stream, 5);
    }
}

/// Each call that waits for the stream queues a count, and the driver's call for it would block once the stream is full.
#[test]
fn synchronize_ends_in_time_however_often_it_is_called() {
    let _alone = alone();
    let test = "synchronize_ends_in_time_however_often";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, test);
    let bench = Bench::new();
    let open = Condition::GreaterOrEqual(1);
    stream_wait_value32(&stream, &bench.region, 256, open, None).unwrap();
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| {
            for _ in 0..1200 {
                let late = stream.synchronize(Some(Duration::from_millis(1)));
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
            }
            assert_eq!(stream.query(), Ok(false));
        });
        until("all calls are over", || calls.is_finished());
        bench.region.store_u32(256, 1).unwrap();
    });
    stream.synchronize(SOON).unwrap();
}

/// The driver frees memory when the GPU is idle, and lets no other thread copy meanwhile. The library does not know when work of the application waits.
#[test]
fn no_memory_is_freed_while_work_of_the_application_waits() {
    let _alone = alone();
    let test = "no_memory_is_freed_while_work_of_the_application_waits";
    let limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    for by_query in [false, true] {
        limit.step(by_query.into(), BOUND);
        nothing_is_freed_while_a_stream_waits(&context, by_query);
    }
}

/// Until the application asks whether its stream is idle, or waits for it.
fn nothing_is_freed_while_a_stream_waits(context: &CudaContext, by_query: bool) {
    let bench = Bench::new();
    let stream = new_stream(context, "works");
    let (kept, given_up) = (context.alloc(4096).unwrap(), context.alloc(4096).unwrap());
    let address = given_up.ptr();
    let is_allocated = || {
        let (mut start, mut len) = (0, 0);
        // SAFETY: writes two values.
        unsafe {
            sys::cuMemGetAddressRange_v2(&mut start, &mut len, address) == OK && start == address
        }
    };
    let geq = Condition::GreaterOrEqual(1);
    let wait = stream_wait_value32(&stream, &bench.region, 64, geq, None).unwrap();
    // A thread of the library drops what is left of it when its work is done.
    let dropped = new_stream(context, "dropped");
    let last = stream_wait_value32(&dropped, &bench.region, 64, geq, None).unwrap();
    drop(dropped);
    let (mut own, mut word, mut at) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    // SAFETY: each call writes one handle or address; the word is 0, and is freed behind the wait.
    let word = unsafe {
        assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
        assert_eq!(sys::cuStreamCreate(&mut own, 1), OK);
        assert_eq!(sys::cuMemAllocHost_v2(&mut word, 4096), OK);
        assert_eq!(sys::cuMemHostGetDevicePointer_v2(&mut at, word, 0), OK);
        let word = AtomicU32::from_ptr(word.cast());
        word.store(0, Ordering::Release);
        assert_eq!(sys::cuStreamWaitValue32_v2(own, at, 1, 0), OK);
        word
    };
    drop(given_up);
    assert!(is_allocated(), "freed while a stream has work");
    bench.region.store_u32(64, 1).unwrap();
    wait.wait(SOON).unwrap();
    last.wait(SOON).unwrap();
    // Long enough for any thread that would give it back now.
    std::thread::sleep(Duration::from_millis(100));
    let copied = std::thread::scope(|scope| {
        let copy = scope.spawn(|| kept.copy_from_host(0, &[1; 64]));
        let started = Instant::now();
        while !copy.is_finished() && started.elapsed() < BOUND / 4 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let copied = copy.is_finished();
        word.store(1, Ordering::Release);
        copy.join().unwrap().unwrap();
        copied
    });
    assert!(copied, "a copy waits for work of the application");
    // SAFETY: made above, and not used any more.
    unsafe { assert_eq!(sys::cuStreamSynchronize(own), OK) };
    // The first such call frees it, unless the library's thread has not dropped the other stream yet.
    until("a call that finds the streams idle frees", || {
        if by_query {
            until("the stream is idle", || stream.query().unwrap());
        } else {
            stream.synchronize(SOON).unwrap();
        }
        !is_allocated()
    });
    // SAFETY: as above.
    unsafe {
        assert_eq!(sys::cuStreamDestroy_v2(own), OK);
        assert_eq!(sys::cuMemFreeHost(word.as_ptr().cast()), OK);
    }
}

#[test]
fn deadline_does_not_run_behind_application_work() {
    let _alone = alone();
    let test = "deadline_behind_work";
    let limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    // Message and value arrive within the deadline of a wait that has just begun, unless this thread is not scheduled: then the test repeats it with
    // more time.
    let in_time = |work: Duration| {
        limit.step(work.as_secs(), BOUND);
        let stream = new_stream(&context, test);
        let Bench { mut pair, region } = Bench::new();
        let slices = [region.slice(0, 64).unwrap()];
        let timeout = Some(work * 7 / 10);
        let sleep = move || std::thread::sleep(work);
        pair.b.stream_queue_recv(&stream, 1, &slices).unwrap();
        // The library does not know of this work.
        stream.launch_host(sleep).unwrap();
        let received = pair
            .b
            .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
            .unwrap();
        stream.launch_host(sleep).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let stored = stream_wait_value32(&stream, &region, 4096, condition, timeout).unwrap();
        until("the wait has begun", || received.status() != Status::Queued);
        pair.a.post_send(&Work::send_inline(b"late")).unwrap();
        until("the wait has begun", || stored.status() != Status::Queued);
        region.store_u32(4096, 1).unwrap();
        stream.synchronize(SOON).is_ok()
            && [received, stored].map(|it| it.status()) == [Status::Complete; 2]
    };
    assert!([1, 4, 12].map(Duration::from_secs).into_iter().any(in_time));
}

#[test]
fn failed_driver_call_does_not_end_the_stream() {
    let _alone = alone();
    let test = "error_of_one_call";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = CudaStream::new(&context, test).unwrap();
    let mut bench = Bench::new();
    for error in [2, 100, 701, 999] {
        bench.region.store_u32(0, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let waited = stream_wait_value32(&stream, &bench.region, 0, condition, None).unwrap();
        let rule = format!("cuStreamBatchMemOp_v2:{error},nth=1;cuLaunchKernel:{error},nth=1");
        let Some(fault) = Fault::new(test, &rule) else {
            bench.region.store_u32(0, 1).unwrap();
            return;
        };
        let refused = stream_write_value32(&stream, &bench.region, 4, 1);
        assert!(
            matches!(refused, Err(Error::Cuda { code, .. }) if code == error),
            "{refused:?}"
        );
        drop(fault);
        // Work queued before is not reported as lost: it is executed.
        assert!(!waited.is_over());
        bench.region.store_u32(0, 1).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(waited.status(), Status::Complete);
        bench.works(&stream, 9);
    }
}

/// A driver that is short of memory repeatedly refuses to push the context on a thread: the stream continues, and later queries succeed.
#[test]
fn failed_context_push_does_not_end_the_stream() {
    let _alone = alone();
    let test = "failed_context_push_does_not_end_the_stream";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    let stream = CudaStream::new(&context, test).unwrap();
    let bench = Bench::new();
    let condition = Condition::GreaterOrEqual(1);
    let waited = stream_wait_value32(&stream, &bench.region, 0, condition, None).unwrap();
    let asked = stream.clone();
    let other = std::thread::spawn(move || {
        let _fault = Fault::here("cuCtxPushCurrent_v2:2");
        (0..3).map(|_| asked.query()).collect::<Vec<_>>()
    });
    for answer in other.join().unwrap() {
        let is_refusal = matches!(answer, Err(Error::Cuda { code, .. }) if code == OUT_OF_MEMORY);
        assert!(is_refusal, "{answer:?}");
    }
    assert!(!waited.is_over());
    bench.region.store_u32(0, 1).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
}

/// The table of docs/gpu.md: what a send and a wait cost a GPU.
#[test]
fn a_send_and_a_wait_take_as_many_memory_operations_as_documented() {
    let _alone = alone();
    let test = "a_send_and_a_wait_take_as_many_memory_operations_as_documented";
    let Some(context) = context(test) else {
        return;
    };
    if !is_standin() || by_kernel() {
        return waived(test, "only the stand-in counts memory operations");
    }
    let mut pair = Pair::new(&device(), &config());
    let [send, wait, both] = match pair.a.path().control {
        // With a barrier before the doorbell in a child of this test.
        Control::Direct if !with_setting(test, "DOORBELL_CUDA_BARRIER", "1") => [5, 4, 8],
        Control::Direct => [4, 4, 7],
        Control::Proxy => [2, 4, 5],
        _ => return waived(test, "the path `sync` queues none"),
    };
    let stream = CudaStream::new(&context, test).unwrap();
    let counted = |queue: &mut dyn FnMut()| {
        let before = memops_here();
        queue();
        memops_here() - before
    };
    for round in 0..4 {
        let queued = [
            counted(&mut || drop(pair.a.stream_queue_send(&stream, &Work::nop()).unwrap())),
            counted(&mut || drop(pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap())),
            counted(&mut || {
                let mut batch = vec![
                    pair.a.prepare_send(&Work::nop()).unwrap(),
                    pair.a.prepare_wait_cq(QueueKind::Send).unwrap(),
                ];
                stream_post_all(&stream, &mut batch).unwrap();
            }),
        ];
        // The first use registers memory.
        if round > 0 {
            assert_eq!(queued, [send, wait, both]);
        }
        stream.synchronize(SOON).unwrap();
    }
}

/// A card, opened without a requested path, and whether the stand-in maps its registers. `None`: the test is WAIVED.
fn standin_card(test: &str) -> Option<(Device, bool)> {
    let device = device();
    if device.name() != "mlx5_0" || !is_standin() {
        waived(test, "no card, or one and a driver that answer as they are");
        return None;
    }
    if std::env::var("DOORBELL_TEST_DEVICE").is_ok_and(|name| name.contains("path=")) {
        waived(test, "a path is asked for");
        return None;
    }
    let has = std::env::var("DOORBELL_CUDA_STANDIN_HAS").unwrap_or_default();
    let may = has.split(',').any(|word| word == "iomemory");
    Some((device, may))
}

/// The driver decides whether a GPU may store to a card's doorbell registers: without privilege it may not, and a proxy rings, unless the direct path
/// is requested.
#[test]
fn proxy_rings_if_registers_cannot_be_mapped() {
    let _alone = alone();
    let test = "proxy_rings_if_registers_cannot_be_mapped";
    let Some(context) = context(test) else {
        return;
    };
    let Some((device, may)) = standin_card(test) else {
        return;
    };
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let path = pair.a.path();
    let (control, reasons) = (path.control, path.to_string());
    assert_eq!(control == Control::Direct, may, "{reasons}");
    assert_eq!(reasons.contains("PeerMappingOverride"), !may, "{reasons}");
    assert_eq!(
        reasons.contains("a test doorbell from the GPU reached the card"),
        may,
        "{reasons}"
    );
    let stream = new_stream(&context, test);
    let works = |pair: &mut Pair| {
        let sent = pair.a.stream_queue_send(&stream, &Work::nop())?;
        pair.a.stream_wait_cq(&stream, QueueKind::Send)?;
        stream.synchronize(SOON)?;
        assert_eq!(sent.status(), Status::Complete);
        Ok::<(), Error>(())
    };
    works(&mut pair).unwrap();
    // An application that requests the path gets it, and the first stream that cannot use it returns an error.
    let config = EndpointConfig::default().control(Some(Control::Direct));
    let check = |result: Result<(), Error>| match result {
        Ok(()) => assert!(may),
        Err(Error::State { kind, reason, .. }) => {
            assert!(!may && kind == StateKind::Unsupported, "{reason}");
            for said in ["path=proxy", "PeerMappingOverride"] {
                assert!(reason.contains(said), "{reason}");
            }
        }
        Err(error) => panic!("{error}"),
    };
    let mut pair = Pair::new(&device, &config);
    check(works(&mut pair));
    let mut other = Pair::new(&device, &config);
    check(DeviceQueue::on_gpu(&context, &mut other.a).map(drop));
    // A host stream rings on this path.
    let host = HostStream::new("host").unwrap();
    pair.a.stream_queue_send(&host, &Work::nop()).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
}

/// Stores of a GPU to a card may be dropped on the way although the driver has mapped the registers. The first endpoint rings for a NOP to detect
/// that.
#[test]
fn proxy_rings_if_gpu_stores_do_not_reach_the_card() {
    let _alone = alone();
    let test = "proxy_rings_if_gpu_stores_do_not_reach_the_card";
    let Some((device, may)) = standin_card(test) else {
        return;
    };
    if !may {
        return waived(test, "the driver maps no registers");
    }
    if lacking(test, "peerstores") {
        return;
    }
    let Some(context) = context(test) else {
        return;
    };
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let path = pair.a.path();
    assert_eq!(path.control, Control::Proxy, "{path}");
    assert!(path.to_string().contains("ACS"), "{path}");
    let stream = new_stream(&context, test);
    let sent = pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(sent.status(), Status::Complete);
}

/// What is between a card and a GPU decides. A child of this test has two GPUs, and the second one does not reach the card.
#[test]
fn each_gpu_is_tried_with_a_card() {
    const DEVICES: &str = "DOORBELL_CUDA_STANDIN_DEVICES";
    let _alone = alone();
    let test = "each_gpu_is_tried_with_a_card";
    let Some((device, may)) = standin_card(test) else {
        return;
    };
    if !may {
        return waived(test, "the driver maps no registers");
    }
    if std::env::var(DEVICES).is_err() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(DEVICES, "2")
            .env(LACKS, "peerstores1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{said}");
        return;
    }
    for (gpu, control) in [(0, Control::Direct), (1, Control::Proxy)] {
        let _context = CudaContext::primary(gpu).unwrap();
        let pair = Pair::new(&device, &EndpointConfig::default());
        let path = pair.a.path();
        assert_eq!(path.control, control, "GPU {gpu}: {path}");
    }
}

/// The first endpoint on a card checks whether the GPU reaches the card's registers, without blocking this thread, for which the GPU may be waiting.
/// (In a process of its own, because the check runs once.)
#[test]
fn first_endpoint_on_a_card_does_not_block_on_the_gpu() {
    let _alone = alone();
    let test = "first_endpoint_on_a_card_does_not_block_on_the_gpu";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = CudaStream::new(&context, test).unwrap();
    let software = doorbell::Device::open("softcx")
        .unwrap()
        .protection_domain();
    let region = Region::alloc(&software, 64, Access::ALL).unwrap();
    let condition = Condition::GreaterOrEqual(1);
    let waited = stream_wait_value32(&stream, &region, 0, condition, None).unwrap();
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    assert!(!waited.is_over());
    region.store_u32(0, 1).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
    pair.a.post_send(&Work::nop()).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
}

/// If memory cannot be registered, the library also tries to register it as I/O memory. The error is that of the first attempt, not that mapping
/// registers needs privilege.
#[test]
fn failed_registration_keeps_the_error_of_the_memory() {
    let _alone = alone();
    let test = "failed_registration_keeps_the_error_of_the_memory";
    let Some(context) = context(test) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    let bench = Bench::new();
    let region = Region::alloc(&bench.pair.domain, 64, Access::ALL).unwrap();
    let refused = {
        let _fault = Fault::here("cuMemHostRegister_v2:1,nth=1");
        region.device_address(&context).unwrap_err()
    };
    let is_invalid_value = matches!(refused, Error::Cuda { code: 1, .. });
    assert!(is_invalid_value, "{refused}");
    region.device_address(&context).unwrap();
}

/// Memory of `cudaMallocHost`, such as pinned tensors: the driver has mapped it already and refuses to register it.
#[test]
fn memory_allocated_by_the_driver_is_not_registered_again() {
    let _alone = alone();
    let test = "memory_allocated_by_the_driver_is_not_registered_again";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, test);
    let mut bench = Bench::new();
    for (len_bytes, offset) in [(8192_usize, 0_usize), (100, 0), (3 << 20, 4096 + 64)] {
        let mut start = std::ptr::null_mut();
        {
            let _entered = Current::enter(&context);
            // SAFETY: writes one address.
            unsafe { sys::cuMemAllocHost_v2(&mut start, len_bytes) }
                .result()
                .unwrap();
        }
        let inside = NonNull::new(start.cast::<u8>().wrapping_add(offset)).unwrap();
        // SAFETY: memory that is freed after the region was dropped.
        let region =
            unsafe { Region::register(&bench.pair.domain, inside, 96, Access::ALL) }.unwrap();
        let condition = Condition::GreaterOrEqual(9);
        stream_write_value32(&stream, &region, 0, 9).unwrap();
        stream_wait_value32(&stream, &region, 0, condition, SHORT).unwrap();
        let slices = [region.slice(0, 4).unwrap()];
        let to = bench.region.remote().slice(64, 4).unwrap();
        let work = Work::write(&slices, to);
        let sent = bench.pair.a.stream_queue_send(&stream, &work).unwrap();
        bench
            .pair
            .a
            .stream_wait_cq(&stream, QueueKind::Send)
            .unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(sent.status(), Status::Complete);
        assert_eq!(bench.region.load_u32(64), Ok(9));
        bench.region.store_u32(64, 0).unwrap();
        drop(region);
        let _entered = Current::enter(&context);
        // SAFETY: allocated above; nobody uses it any more.
        unsafe { sys::cuMemFreeHost(start) }.result().unwrap();
    }
}

/// Memory operations of streams do not accept managed memory, and it migrates while a NIC accesses it.
#[test]
fn managed_memory_is_refused_by_name() {
    let _alone = alone();
    let test = "managed_memory_is_refused_by_name";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, test);
    let bench = Bench::new();
    let mut start = 0;
    {
        let _entered = Current::enter(&context);
        let attach = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: writes one address.
        unsafe { sys::cuMemAllocManaged(&mut start, 8192, attach) }
            .result()
            .unwrap();
    }
    let inside = NonNull::new((start as *mut u8).wrapping_add(64)).unwrap();
    // SAFETY: memory that is freed after the region was dropped.
    let region = unsafe { Region::register(&bench.pair.domain, inside, 64, Access::ALL) }.unwrap();
    let refused = stream_write_value32(&stream, &region, 0, 9).unwrap_err();
    assert!(refused.to_string().contains("managed memory"), "{refused}");
    drop(region);
    stream.synchronize(SOON).unwrap();
    let _entered = Current::enter(&context);
    // SAFETY: allocated above; nobody uses it any more.
    unsafe { sys::cuMemFree_v2(start) }.result().unwrap();
}

/// With confidential computing a GPU accesses no memory of the host, so nothing of this library works on its streams.
#[test]
fn confidential_computing_is_named_as_the_cause() {
    let _alone = alone();
    let test = "confidential_computing_is_named_as_the_cause";
    let _limit = Limit::new(test, BOUND);
    if !is_standin() {
        return waived(test, "a real device has the mode that it has");
    }
    if with_setting(test, "DOORBELL_CUDA_STANDIN_HAS", "confidential") {
        return;
    }
    let context = CudaContext::primary(0).unwrap();
    let has = context.capabilities();
    assert!(!has.memops && !has.kernels && !has.gpudirect, "{has:?}");
    let findings = context.findings().join("\n");
    let refused = CudaStream::new(&context, test).unwrap_err().to_string();
    for text in [findings, refused] {
        assert!(text.contains("confidential computing"), "{text}");
    }
    // Memory that the driver allocates does not help.
    let mut start = std::ptr::null_mut();
    {
        let _entered = Current::enter(&context);
        // SAFETY: writes one address.
        unsafe { sys::cuMemAllocHost_v2(&mut start, 4096) }
            .result()
            .unwrap();
    }
    let bench = Bench::new();
    let inside = NonNull::new(start.cast::<u8>()).unwrap();
    // SAFETY: memory that is freed after the region was dropped.
    let region = unsafe { Region::register(&bench.pair.domain, inside, 64, Access::ALL) }.unwrap();
    let refused = region.device_address(&context).unwrap_err();
    assert!(refused.to_string().contains("managed memory"), "{refused}");
    drop(region);
    let _entered = Current::enter(&context);
    // SAFETY: allocated above; nobody uses it any more.
    unsafe { sys::cuMemFreeHost(start) }.result().unwrap();
}

/// Pages that stay registered make the next registration of their addresses fail.
#[test]
fn pages_are_unregistered_after_a_refused_attempt() {
    let _alone = alone();
    let test = "pages_are_unregistered_after_a_refused_attempt";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    let stream = CudaStream::new(&context, test).unwrap();
    for call in ["cuCtxPushCurrent_v2", "cuMemHostUnregister"] {
        let bench = Bench::new();
        stream_write_value32(&stream, &bench.region, 0, 1).unwrap();
        stream.synchronize(SOON).unwrap();
        let start = bench.region.as_ptr().addr();
        let is_registered = || is_registered(&context, start);
        assert!(is_registered());
        let dropped = std::thread::spawn(move || {
            let _fault = Fault::here(&format!("{call}:2,nth=1"));
            drop(bench);
        });
        dropped.join().unwrap();
        // Another thread may have had the last handle, or the stream may not have been found idle in time: then the next call unregisters.
        until(call, || {
            stream.synchronize(SOON).unwrap();
            !is_registered()
        });
    }
}

/// A GPU may still access them.
#[test]
fn pages_that_cannot_be_unregistered_are_given_to_nobody() {
    let _alone = alone();
    let test = "pages_that_cannot_be_unregistered_are_given_to_nobody";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = CudaStream::new(&context, test).unwrap();
    let bench = Bench::new();
    stream_write_value32(&stream, &bench.region, 0, 1).unwrap();
    stream.synchronize(SOON).unwrap();
    let start = bench.region.as_ptr().addr();
    {
        // CUDA_ERROR_OPERATING_SYSTEM.
        let Some(_fault) = Fault::new(test, "cuMemHostUnregister:304") else {
            return;
        };
        drop(bench);
        // Another thread may have had the last handle; then a later call makes the attempt.
        for _ in 0..20 {
            stream.synchronize(SOON).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(is_registered(&context, start));
    // SAFETY: of an address where nothing is mapped it is an error.
    let is_mapped = unsafe { libc::msync(start as *mut _, 4096, libc::MS_ASYNC) } == 0;
    assert!(is_mapped);
    let others: Vec<Bench> = (0..64).map(|_| Bench::new()).collect();
    let reuses = |bench: &Bench| {
        let first = bench.region.as_ptr().addr();
        (first..first + bench.region.len_bytes() as usize).contains(&start)
    };
    assert!(!others.iter().any(reuses));
}

#[test]
fn capture_during_synchronize_does_not_end_it() {
    let _alone = alone();
    let test = "captured_meanwhile";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = CudaStream::new(&context, test).unwrap();
    let Bench { region, .. } = Bench::new();
    let condition = Condition::GreaterOrEqual(1);
    let waited = stream_wait_value32(&stream, &region, 0, condition, None).unwrap();
    let waiting = stream.clone();
    let before = stream.driver_calls();
    let synchronized = std::thread::spawn(move || waiting.synchronize(SOON));
    // Synchronizing queues work first, which the capture would refuse.
    until("it waits", || stream.driver_calls() > before);
    // Begun by the application, as a framework would.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let mut graph = std::ptr::null_mut();
    // SAFETY: a stream of the context.
    unsafe {
        assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
        assert_eq!(sys::cuStreamBeginCapture_v2(stream.raw(), mode), OK);
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(!synchronized.is_finished());
    // SAFETY: as above; nobody has the graph.
    unsafe {
        assert_eq!(sys::cuStreamEndCapture(stream.raw(), &mut graph), OK);
        assert_eq!(sys::cuGraphDestroy(graph), OK);
    }
    region.store_u32(0, 1).unwrap();
    synchronized.join().unwrap().unwrap();
    assert_eq!(waited.status(), Status::Complete);
}

#[test]
fn memory_dropped_in_a_host_function_is_unregistered_before_reuse() {
    let _alone = alone();
    let test = "dropped_in_a_host_function";
    let _limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    let stream = CudaStream::new(&context, test).unwrap();
    for round in 0..20 {
        let mut bench = Bench::new();
        bench.works(&stream, round + 1);
        // Other work is behind the function, which has the only handles of the endpoints.
        stream.launch_host(move || drop(bench)).unwrap();
        let mut next = Bench::new();
        next.works(&stream, round + 1);
    }
    let bench = Bench::new();
    stream_write_value32(&stream, &bench.region, 0, 1).unwrap();
    stream.synchronize(SOON).unwrap();
    let start = bench.region.as_ptr().addr();
    let is_registered = || is_registered(&context, start);
    assert!(is_registered());
    stream.launch_host(move || drop(bench)).unwrap();
    // By the calls of the application that wait: the library's threads, and functions of the host, give nothing back.
    until("it is unregistered", || {
        stream.synchronize(SOON).unwrap();
        !is_registered()
    });
    // A stream whose last handle is dropped with a function queued lives until the function has run.
    let ran = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&ran);
    let last = CudaStream::new(&context, "last").unwrap();
    last.launch_host(move || {
        std::thread::sleep(Duration::from_millis(100));
        set.store(true, Ordering::Release);
    })
    .unwrap();
    drop((last, stream, context));
    until("it has run", || ran.load(Ordering::Acquire));
}

/// A word, with an owner whose destructor is slow.
struct Slow {
    targets: Targets,
    target: Target,
    attachments: Attachments,
    word: Box<AtomicU32>,
    finished: AtomicBool,
    ends_in: Duration,
}

// SAFETY: the table never changes, and its one target is the word, which lives as long.
unsafe impl Owner for Slow {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, _: TargetId) -> Option<NonNull<u8>> {
        Some(NonNull::from(&*self.word).cast())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn finished(&self, _: u64, outcome: Outcome) {
        assert_eq!(outcome, Outcome::Done);
        self.finished.store(true, Ordering::Release);
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        std::thread::sleep(self.ends_in);
    }
}

impl Slow {
    /// A new one, to whose word the stream stores.
    fn on(stream: &CudaStream, ends_in: Duration) -> Arc<Slow> {
        let mut targets = Targets::new();
        let slow = Arc::new(Slow {
            target: targets.register("word", Role::Memory, 4),
            targets,
            attachments: Attachments::default(),
            word: Box::default(),
            finished: AtomicBool::new(false),
            ends_in,
        });
        let mut program = Program::new(&slow.targets);
        program
            .store_dword(slow.target.dword(0).unwrap(), 7)
            .unwrap();
        stream.submit_program(&program, slow.clone(), 0).unwrap();
        slow
    }
}

#[test]
fn finished_work_releases_application_objects() {
    let _alone = alone();
    let test = "finished_work_releases_application_objects";
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, test);
    for _ in 0..3 {
        // The last handle is the stream's, and the thread that drops it is busy.
        let last = Arc::downgrade(&Slow::on(&stream, Duration::from_millis(100)));
        until("it ends", || last.strong_count() == 0);
        let kept = Slow::on(&stream, Duration::ZERO);
        // The library's watcher thread has seen it: no other thread polls.
        until("it is finished", || kept.finished.load(Ordering::Acquire));
        stream.synchronize(SOON).unwrap();
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!(kept.word.load(Ordering::Acquire), 7);
    }
}

#[test]
fn endpoint_failure_ends_its_wait_and_the_stream_continues() {
    let _alone = alone();
    let Some(context) = context("endpoint_failure_ends_its_wait_and_the_stream_continues") else {
        return;
    };
    let limit = Limit::new("endpoint fails", BOUND);
    let stream = new_stream(&context, "let go");
    let mut bench = Bench::new();
    for round in 0..40 {
        limit.step(round, BOUND);
        let b = &mut bench.pair.b;
        let into = [bench.region.slice(0, 16).unwrap()];
        b.stream_queue_recv(&stream, 5, &into).unwrap();
        let timeout = if round % 2 == 0 { SHORT } else { SOON };
        let wait = b
            .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
            .unwrap();
        if round % 2 != 0 {
            b.abort();
        }
        let end = stream.synchronize(SOON).unwrap_err();
        assert_eq!(stream.take_fault(), Some(end));
        let failure = b.failure().unwrap();
        let cause = if round % 2 == 0 {
            Cause::Deadline(SHORT.unwrap())
        } else {
            Cause::Aborted
        };
        assert_eq!(failure.cause, cause);
        assert_eq!(wait.status(), Status::Failed(failure));
        bench.pair.reset();
        bench.works(&stream, round as u8);
    }
}

#[test]
fn events_order_cuda_and_host_streams() {
    let _alone = alone();
    let Some(context) = context("events_order_cuda_and_host_streams") else {
        return;
    };
    let here = new_stream(&context, "here");
    let there = new_stream(&context, "there");
    let host = HostStream::new("host").unwrap();
    let steps = Arc::new(AtomicU32::new(0));
    let step = |expected: u32| {
        let steps = Arc::clone(&steps);
        move || {
            std::thread::sleep(Duration::from_micros(200));
            assert_eq!(steps.fetch_add(1, Ordering::SeqCst), expected);
        }
    };
    for round in 0..50 {
        let [one, two, three] = [(); 3].map(|()| Event::blocking());
        here.launch_host(step(3 * round)).unwrap();
        here.record(&one).unwrap();
        host.wait_event(&one).unwrap();
        host.launch(step(3 * round + 1)).unwrap();
        host.record(&two).unwrap();
        there.wait_event(&two).unwrap();
        there.launch_host(step(3 * round + 2)).unwrap();
        there.record(&three).unwrap();
        here.wait_event(&three).unwrap();
        three.synchronize(SOON).unwrap();
        assert_eq!(three.query(), Ok(true));
    }
    here.synchronize(SOON).unwrap();
    host.synchronize(SOON).unwrap();
    assert_eq!(steps.load(Ordering::SeqCst), 150);
}

/// A host stream without a thread is executed by the threads that wait for its work. One that waits for a stream of a GPU behind its event is such a thread, though
/// another one has queued the work.
#[test]
fn waiting_for_a_cuda_stream_executes_the_streams_without_a_thread_before_it() {
    let test = "waiting_for_a_cuda_stream_executes_the_streams_without_a_thread_before_it";
    let _alone = alone();
    let Some(context) = context(test) else {
        return;
    };
    let _limit = Limit::new(test, 4 * BOUND);
    type Wait = fn(&CudaStream, &Event) -> doorbell::Result<()>;
    let waits: [Wait; 4] = [
        |cuda, _| cuda.synchronize(SOON),
        |_, event| event.synchronize(SOON),
        |cuda, _| polled(|| cuda.query()),
        |_, event| polled(|| event.query()),
    ];
    for (number, wait) in waits.into_iter().enumerate() {
        for (by_another, blocks) in [(true, false), (true, true), (false, false), (false, true)] {
            let host = HostStream::without_thread("host");
            let [first, second] = ["first", "second"].map(|name| new_stream(&context, name));
            let ran = Arc::new(AtomicBool::new(false));
            let marks = [(); 2].map(|()| Event::new());
            let end = if blocks {
                Event::blocking()
            } else {
                Event::new()
            };
            std::thread::scope(|scope| {
                let queue = || {
                    let runs = Arc::clone(&ran);
                    let run = move || runs.store(true, Ordering::SeqCst);
                    host.launch(run).unwrap();
                    host.record(&marks[0]).unwrap();
                };
                if by_another {
                    scope.spawn(queue).join().unwrap();
                } else {
                    queue();
                }
            });
            first.wait_event(&marks[0]).unwrap();
            first.record(&marks[1]).unwrap();
            // The one that is waited for is behind a stream that is behind the host stream.
            second.wait_event(&marks[1]).unwrap();
            second.record(&end).unwrap();
            assert!(!ran.load(Ordering::SeqCst));
            wait(&second, &end)
                .unwrap_or_else(|error| panic!("{number}, {by_another}, {blocks}: {error}"));
            assert!(
                ran.load(Ordering::SeqCst),
                "{number}, {by_another}, {blocks}"
            );
            first.synchronize(SOON).unwrap();
        }
    }
}

/// After an abort, a stream does not wait any more for events that never come; work that is queued later waits for its own events again.
#[test]
fn an_abort_ends_waits_for_events() {
    let _alone = alone();
    let Some(context) = context("an_abort_ends_waits_for_events") else {
        return;
    };
    let limit = Limit::new("an abort and events", BOUND);
    let stream = new_stream(&context, "aborted");
    let other = new_stream(&context, "other");
    let host = HostStream::new("host").unwrap();
    let bench = Bench::new();
    let region = bench.region.clone();
    let _ = stream.status_word();
    for round in 0..10 {
        limit.step(round, BOUND);
        let release = Arc::new(AtomicBool::new(false));
        let released = Arc::clone(&release);
        host.launch(move || {
            while !released.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        })
        .unwrap();
        let held = [Event::new(), Event::new()];
        for event in &held {
            host.record(event).unwrap();
            stream.wait_event(event).unwrap();
        }
        // Two waits, one behind the other. The stream passes both, and calls no function that was queued.
        let ran = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&ran);
        stream
            .launch_host(move || runs.store(true, Ordering::Release))
            .unwrap();
        let passed = Event::blocking();
        stream.record(&passed).unwrap();
        assert!(stream.synchronize(SHORT).is_err());
        assert_eq!(stream.status(), 0);
        stream.abort();
        stream.synchronize(SOON).unwrap();
        assert!(!ran.load(Ordering::Acquire));
        // The event fails, because the record it waited for was never reached; the abort is not a fault of the stream.
        assert!(matches!(passed.query(), Err(Error::Asynchronous { .. })));
        assert_eq!(stream.status(), -19);
        stream.clear_status();
        // The abort has no effect on later waits.
        stream.wait_event(&held[1]).unwrap();
        assert!(stream.synchronize(SHORT).is_err());
        release.store(true, Ordering::Release);
        stream.synchronize(SOON).unwrap();
        assert_eq!(stream.status(), 0);

        // A wait for another CUDA stream: a kernel ends it on the abort, a memory operation waits for that stream.
        region.store_u32(0, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let waited = stream_wait_value32(&other, &region, 0, condition, SOON).unwrap();
        let event = Event::new();
        other.record(&event).unwrap();
        stream.wait_event(&event).unwrap();
        assert!(stream.synchronize(SHORT).is_err());
        stream.abort();
        if by_kernel() {
            stream.synchronize(SOON).unwrap();
        } else {
            assert!(stream.synchronize(SHORT).is_err());
        }
        assert_eq!(stream.status(), -19);
        stream.clear_status();
        assert_eq!(event.query(), Ok(false));
        assert_eq!(other.query(), Ok(false));
        if round % 2 == 0 {
            region.store_u32(0, 1).unwrap();
        } else {
            other.abort();
        }
        // Behind a wait that the other stream's abort ended.
        let end = stream.synchronize(SOON);
        other.synchronize(SOON).unwrap();
        if let Err(end) = end {
            assert!(round % 2 != 0, "{end}");
            assert_eq!(stream.take_fault(), Some(end));
        }
        if round % 2 != 0 && !by_kernel() {
            assert_eq!(stream.status(), -19);
            stream.clear_status();
        }
        assert_eq!(waited.status() == Status::Complete, round % 2 == 0);
        assert_eq!(stream.status(), 0);
    }
}

#[test]
fn a_stream_from_raw_is_not_destroyed() {
    let _alone = alone();
    let Some(context) = context("a_stream_from_raw_is_not_destroyed") else {
        return;
    };
    let mut bench = Bench::new();
    let entered = Current::enter(&context);
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { sys::cuStreamCreate(&mut raw, 1) }
        .result()
        .unwrap();
    // SAFETY: a stream of the context, destroyed at the end.
    let stream = unsafe { CudaStream::from_raw(&context, raw, "theirs") }.unwrap();
    assert_eq!(stream.raw(), raw);
    bench.works(&stream, 9);
    // Dropped with work in its queue, which is executed later. The endpoints are dropped in another thread, which may have to wait for the stream, as
    // memory that is unregistered does.
    let region = bench.region.clone();
    region.store_u32(0, 0).unwrap();
    let wait = stream_wait_value32(&stream, &region, 0, Condition::GreaterOrEqual(1000), SOON);
    let write = stream_write_value32(&stream, &region, 64, 77).unwrap();
    drop(stream);
    let dropped = std::thread::spawn(move || drop(bench));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(write.status(), Status::Queued);
    region.store_u32(0, 1000).unwrap();
    dropped.join().unwrap();
    until("the work", || write.status() == Status::Complete);
    assert_eq!(region.load_u32(64), Ok(77));
    assert_eq!(wait.unwrap().status(), Status::Complete);
    // SAFETY: made above.
    unsafe { sys::cuStreamSynchronize(raw) }.result().unwrap();
    // SAFETY: as above.
    unsafe { sys::cuStreamDestroy_v2(raw) }.result().unwrap();
    drop(entered);
}

/// Makes the context current until it is dropped.
struct Current;

impl Current {
    fn enter(context: &CudaContext) -> Current {
        // SAFETY: a context that is kept.
        unsafe { sys::cuCtxPushCurrent_v2(context.raw()) }
            .result()
            .unwrap();
        Current
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: takes off what `enter` put there.
        unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }
            .result()
            .unwrap();
    }
}

/// Whether the driver has mapped the page at that address.
fn is_registered(context: &CudaContext, start: usize) -> bool {
    let _entered = Current::enter(context);
    let mut address = 0;
    // SAFETY: writes one address; asks about another, whatever is there.
    let asked = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start as *mut _, 0) };
    asked == OK
}

fn current() -> sys::CUcontext {
    let mut current = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { sys::cuCtxGetCurrent(&mut current) }
        .result()
        .unwrap();
    current
}

#[test]
fn calls_restore_the_current_context_of_the_thread() {
    let _alone = alone();
    let Some(context) = context("calls_restore_the_current_context_of_the_thread") else {
        return;
    };
    std::thread::spawn(move || {
        assert!(current().is_null());
        let stream = new_stream(&context, "anywhere");
        let mut bench = Bench::new();
        bench.works(&stream, 1);
        assert!(current().is_null());
        let error = CudaContext::current().unwrap_err();
        assert!(matches!(error, Error::State { .. }), "{error}");
        let entered = Current::enter(&context);
        bench.works(&stream, 2);
        assert_eq!(current(), context.raw());
        assert_eq!(CudaContext::current().unwrap().raw(), context.raw());
        drop((stream, bench));
        assert_eq!(current(), context.raw());
        drop(entered);
        assert!(current().is_null());
    })
    .join()
    .unwrap();
}

/// The page size in bytes.
fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Pages mapped by the application.
fn pages(count: usize) -> *mut libc::c_void {
    // SAFETY: a new mapping.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            count * page_bytes(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    start
}

fn register(start: *mut libc::c_void, len_bytes: usize) -> sys::CUresult {
    // SAFETY: mapped memory.
    unsafe { sys::cuMemHostRegister_v2(start, len_bytes, 3) }
}

fn unregister(start: *mut libc::c_void) -> sys::CUresult {
    // SAFETY: what it says of memory that is not registered is an error.
    unsafe { sys::cuMemHostUnregister(start) }
}

#[test]
fn memory_is_registered_while_needed_and_foreign_registrations_stay() {
    let _alone = alone();
    let Some(context) = context("memory_is_registered_while_needed_and_foreign_registrations_stay")
    else {
        return;
    };
    let entered = Current::enter(&context);
    let stream = new_stream(&context, "words");
    let pair = Pair::new(&device(), &config());
    let page = page_bytes();
    let start = pages(4);
    // The third page is the application's, and registered by it.
    let third = start.wrapping_byte_add(2 * page);
    register(third, page).result().unwrap();
    // SAFETY: mapped, and unmapped after the regions are gone.
    let region = unsafe {
        Region::register(
            &pair.domain,
            NonNull::new(start.cast()).unwrap(),
            4 * page as u64,
            Access::ALL,
        )
    }
    .unwrap();
    // SAFETY: as above.
    let part = unsafe {
        Region::register(
            &pair.domain,
            NonNull::new(start.cast()).unwrap(),
            page as u64,
            Access::ALL,
        )
    }
    .unwrap();
    for (at, which) in [
        (0, &region),
        (2 * page as u64, &region),
        (8, &part),
        (3 * page as u64 + 4092, &region),
    ] {
        stream_write_value32(&stream, which, at, at as u32 + 1).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(which.load_u32(at), Ok(at as u32 + 1));
    }
    let registered = sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    assert_eq!(register(start, page), registered);
    drop(region);
    // The first page has another region on it.
    assert_eq!(register(start, page), registered);
    let second = start.wrapping_byte_add(page);
    stream_write_value32(&stream, &part, 0, 5).unwrap();
    stream.synchronize(SOON).unwrap();
    drop(part);
    // On a loaded machine the thread that watches streams may not have seen yet that this one is idle: then a later call gives the pages back.
    until("the pages are given back", || {
        let answer = register(start, 2 * page);
        if answer == registered {
            stream.synchronize(SOON).unwrap();
        }
        answer == sys::CUresult::CUDA_SUCCESS
    });
    assert_eq!(unregister(start), sys::CUresult::CUDA_SUCCESS);
    let not_registered = sys::CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    assert_eq!(unregister(second), not_registered);
    assert_eq!(unregister(third), sys::CUresult::CUDA_SUCCESS);
    // SAFETY: nothing uses it any more.
    unsafe { libc::munmap(start, 4 * page) };
    drop(entered);
}

#[test]
fn failed_mapping_is_an_error_and_later_work_succeeds() {
    let _alone = alone();
    let test = "failed_mapping_is_an_error_and_later_work_succeeds";
    let Some(context) = context(test) else { return };
    let stream = new_stream(&context, "mapped");
    let mut bench = Bench::new();
    // Each target is registered when it is first named: a send names three.
    for nth in 1..=3 {
        let Some(fault) = Fault::new(
            test,
            &format!(
                "cuMemHostRegister_v2:2,nth={nth};cuMemHostRegister_v2:2,nth={}",
                nth + 1
            ),
        ) else {
            return;
        };
        let queued = bench.pair.a.stream_queue_send(&stream, &Work::nop());
        drop(fault);
        if let Err(error) = queued {
            assert!(
                matches!(
                    error,
                    Error::Cuda {
                        call: "cuMemHostRegister",
                        ..
                    }
                ),
                "{error}"
            );
        } else {
            bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
    }
    bench.works(&stream, 8);
}

#[test]
fn host_function_that_panics_or_fails_fails_only_its_stream() {
    let _alone = alone();
    let Some(context) = context("host_function_that_panics_or_fails_fails_only_its_stream") else {
        return;
    };
    let stream = new_stream(&context, "panics");
    let called = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&called);
    let inside = stream.clone();
    stream
        .launch_host(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            let error = inside.synchronize(SOON).unwrap_err();
            assert!(matches!(error, Error::State { .. }));
            // The last handle may be dropped here, too.
            drop(inside);
        })
        .unwrap();
    stream.synchronize(SOON).unwrap();
    stream
        .launch_host(|| std::panic::resume_unwind(Box::new("on purpose")))
        .unwrap();
    let error = stream.synchronize(SOON).unwrap_err();
    assert!(error.to_string().contains("on purpose"), "{error}");
    assert!(stream.launch_host(|| ()).is_err());
    assert_eq!(called.load(Ordering::SeqCst), 1);
    drop(stream);
    // An error does the same.
    let stream = new_stream(&context, "fails");
    let unknown = || doorbell::Device::open("no such device").map(drop);
    let expected = format!("a kernel failed: {}", unknown().unwrap_err());
    stream.try_launch_host(|| Ok(())).unwrap();
    stream.synchronize(SOON).unwrap();
    stream.try_launch_host(unknown).unwrap();
    let error = stream.synchronize(SOON).unwrap_err();
    assert!(error.to_string().ends_with(&expected), "{error}");
    assert!(stream.launch_host(|| ()).is_err());
    drop(stream);
    Bench::new().works(&new_stream(&context, "next"), 2);
}

/// As on a stream of the host.
#[test]
fn a_function_that_panics_during_an_abort_fails_its_stream() {
    let _alone = alone();
    let test = "a_function_that_panics_during_an_abort_fails_its_stream";
    let Some(context) = context(test) else {
        return;
    };
    type Step = Box<dyn FnOnce() + Send>;
    fn check(launch: impl Fn(Step), abort: impl Fn(), result: impl Fn() -> doorbell::Result<()>) {
        let (started, is_started) = std::sync::mpsc::channel();
        let (panic, told) = std::sync::mpsc::channel();
        launch(Box::new(move || {
            started.send(()).unwrap();
            told.recv().unwrap();
            std::panic::resume_unwind(Box::new("on purpose"));
        }));
        is_started.recv().unwrap();
        abort();
        panic.send(()).unwrap();
        let error = result().unwrap_err();
        assert!(error.to_string().contains("on purpose"), "{error}");
    }
    let stream = new_stream(&context, "aborted");
    check(
        |step| stream.launch_host(step).unwrap(),
        || stream.abort(),
        || stream.synchronize(SOON),
    );
    let stream = HostStream::new("aborted").unwrap();
    check(
        |step| stream.launch(step).unwrap(),
        || stream.abort(),
        || stream.synchronize(SOON),
    );
}

/// Behind a wait that failed, and on a stream that was aborted; also if the fault was taken before the stream came there.
#[test]
fn host_functions_behind_a_failure_are_not_called() {
    let _alone = alone();
    let test = "host_functions_behind_a_failure_are_not_called";
    let Some(context) = context(test) else {
        return;
    };
    for (aborts, takes_early) in [(false, false), (false, true), (true, false)] {
        let mut bench = Bench::new();
        let stream = new_stream(&context, "fails");
        let held = Arc::new(AtomicBool::new(true));
        let gate = Arc::clone(&held);
        let calls = Arc::new(AtomicU32::new(0));
        let call = |bit: u32| {
            let calls = Arc::clone(&calls);
            move || _ = calls.fetch_or(1 << bit, Ordering::SeqCst)
        };
        let before = call(0);
        let begun = Arc::new(AtomicBool::new(false));
        let begins = Arc::clone(&begun);
        stream
            .launch_host(move || {
                begins.store(true, Ordering::Release);
                while gate.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                before();
            })
            .unwrap();
        until("the first has begun", || begun.load(Ordering::Acquire));
        bench.pair.a.post_recv(1, &[]).unwrap();
        bench
            .pair
            .a
            .stream_wait_cq(&stream, QueueKind::Recv)
            .unwrap();
        stream.launch_host(call(1)).unwrap();
        if aborts {
            stream.abort();
        } else {
            bench.pair.a.abort();
        }
        if takes_early {
            until("the fault is there", || stream.take_fault().is_some());
            stream.launch_host(call(2)).unwrap();
        }
        held.store(false, Ordering::Release);
        let end = stream.synchronize(SOON);
        assert_eq!(end.is_err(), !aborts && !takes_early, "{end:?}");
        stream.take_fault();
        stream.launch_host(call(3)).unwrap();
        stream.synchronize(SOON).unwrap();
        let expected = if takes_early { 0b1101 } else { 0b1001 };
        assert_eq!(
            calls.load(Ordering::SeqCst),
            expected,
            "{aborts} {takes_early}"
        );
    }
}

/// Work queued behind a panicking function, on its stream or on one that waits for it, transmits nothing, even if a thread takes the fault at once.
#[test]
fn nothing_is_transmitted_behind_a_panicking_host_function() {
    let _alone = alone();
    let test = "nothing_is_transmitted_behind_a_panicking_host_function";
    let limit = Limit::new(test, BOUND);
    let Some(context) = context(test) else {
        return;
    };
    for round in 0..20 {
        limit.step(round, BOUND);
        let mut benches = [(); 2].map(|()| Bench::new());
        let producer = new_stream(&context, "producer");
        let sender = new_stream(&context, "sender");
        let held = Arc::new(AtomicBool::new(true));
        let gate = Arc::clone(&held);
        producer
            .launch_host(move || {
                while gate.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                std::panic::resume_unwind(Box::new("on purpose"));
            })
            .unwrap();
        let produced = Event::new();
        producer.record(&produced).unwrap();
        sender.wait_event(&produced).unwrap();
        let tickets: Vec<_> = (benches.iter_mut().zip([&producer, &sender]))
            .map(|(bench, stream)| {
                let to = bench.region.remote();
                let work = Work::write_inline(&[7; 4], to.slice(64, 4).unwrap());
                bench.pair.a.stream_queue_send(stream, &work).unwrap()
            })
            .collect();
        held.store(false, Ordering::Release);
        if round % 2 == 1 {
            until("the fault is there", || producer.take_fault().is_some());
        }
        let end = sender.synchronize(SOON);
        let reason = end.unwrap_err().to_string();
        assert!(reason.contains("on purpose"), "{reason}");
        assert_eq!(producer.synchronize(SOON).is_err(), round % 2 == 0);
        for (ticket, bench) in tickets.iter().zip(&benches) {
            until("it is over", || ticket.is_over());
            assert_eq!(bench.region.load_u32(64), Ok(0), "{:?}", ticket.status());
            assert_ne!(ticket.status(), Status::Complete);
        }
    }
}

/// An endpoint's failure ends the waits that were queued before a fault was taken and those queued after it. Work behind the later ones transmits
/// nothing.
#[test]
fn endpoint_failure_ends_waits_before_and_after_a_taken_fault() {
    let _alone = alone();
    let test = "endpoint_failure_ends_waits_before_and_after_a_taken_fault";
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, "taken");
    let (mut waiting, mut sending) = (Bench::new(), Bench::new());
    let b = &mut waiting.pair.b;
    let into = [waiting.region.slice(0, 16).unwrap()];
    let mut wait = || {
        b.stream_queue_recv(&stream, 5, &into).unwrap();
        b.stream_wait_cq_for(&stream, QueueKind::Recv, SOON)
            .unwrap()
    };
    let before = wait();
    let host = HostStream::new("panics").unwrap();
    let (panic, told) = std::sync::mpsc::channel();
    host.launch(move || {
        told.recv().unwrap();
        std::panic::resume_unwind(Box::new("on purpose"));
    })
    .unwrap();
    let produced = Event::new();
    host.record(&produced).unwrap();
    stream.wait_event(&produced).unwrap();
    panic.send(()).unwrap();
    until("the fault", || stream.take_fault().is_some());
    let after = wait();
    let to = sending.region.remote();
    let work = Work::write_inline(&[7; 4], to.slice(64, 4).unwrap());
    let sent = sending.pair.a.stream_queue_send(&stream, &work).unwrap();
    waiting.pair.b.abort();
    until("all is over", || {
        [&before, &after, &sent]
            .iter()
            .all(|ticket| ticket.is_over())
    });
    assert!(stream.synchronize(SOON).is_err());
    assert!(matches!(after.status(), Status::Failed(_)));
    assert_ne!(sent.status(), Status::Complete);
    assert_eq!(sending.region.load_u32(64), Ok(0));
}

/// A capture in GLOBAL mode: calls of this library do not invalidate it, and it does not change their results.
#[test]
fn contexts_and_timing_events_work_during_a_capture() {
    let _alone = alone();
    let Some(context) = context("contexts_and_timing_events_work_during_a_capture") else {
        return;
    };
    let captured = new_stream(&context, "captured");
    let beside = new_stream(&context, "beside");
    let (mut raw, mut graph) = (std::ptr::null_mut(), std::ptr::null_mut());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: writes a handle; a stream that lives, of a context that is current.
    unsafe {
        assert_eq!(sys::cuCtxCreate_v2(&mut raw, 0, 0), OK);
        assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
        assert_eq!(sys::cuStreamBeginCapture_v2(captured.raw(), mode), OK);
    }
    // SAFETY: made above, and destroyed after the last use.
    let other = unsafe { CudaContext::from_raw(raw) }.unwrap();
    assert_eq!(other.capabilities(), context.capabilities());
    let time = TimingEvent::new(&context).unwrap();
    time.record(&beside).unwrap();
    time.synchronize().unwrap();
    drop((time, other));
    // SAFETY: ends what was begun above; nobody uses the graph or the context any more.
    unsafe {
        assert_eq!(sys::cuStreamEndCapture(captured.raw(), &mut graph), OK);
        assert_eq!(sys::cuGraphDestroy(graph), OK);
        assert_eq!(sys::cuCtxDestroy_v2(raw), OK);
        assert_eq!(sys::cuCtxSetCurrent(std::ptr::null_mut()), OK);
    }
}

/// A context that is not the primary one, and a stream in it, both of the application. Afterwards it can destroy them: nothing of the library is left there.
#[test]
fn a_context_from_raw_is_used_and_not_destroyed() {
    let _alone = alone();
    if context("a_context_from_raw_is_used").is_none() {
        return;
    }
    let (mut raw, mut theirs) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: writes two handles; the new context is current.
    unsafe {
        assert_eq!(sys::cuCtxCreate_v2(&mut raw, 0, 0), OK);
        assert_eq!(sys::cuStreamCreate(&mut theirs, 1), OK);
    }
    let mut bench = Bench::new();
    {
        // SAFETY: made above, and destroyed after the last use.
        let context = unsafe { CudaContext::from_raw(raw) }.unwrap();
        assert_eq!(context.raw(), raw);
        // SAFETY: a stream of the context, destroyed at the end.
        let stream = unsafe { CudaStream::from_raw(&context, theirs, "theirs") }.unwrap();
        for value in 1..4 {
            bench.works(&stream, value);
        }
        stream.synchronize(SOON).unwrap();
    }
    drop(bench);
    // SAFETY: made above; nothing is queued any more.
    unsafe {
        assert_eq!(sys::cuStreamDestroy_v2(theirs), OK);
        assert_eq!(sys::cuCtxDestroy_v2(raw), OK);
        assert_eq!(sys::cuCtxSetCurrent(std::ptr::null_mut()), OK);
    }
}

/// Work on the legacy default stream continues while the application captures a stream that is ordered with it, and does not break that capture.
#[test]
fn capture_beside_the_legacy_default_stream_stays_valid() {
    let _alone = alone();
    let test = "capture_beside_the_legacy_default_stream_stays_valid";
    let Some(context) = context(test) else {
        return;
    };
    let bench = Bench::new();
    let per_thread = std::ptr::without_provenance_mut(2);
    // SAFETY: refused, and not used.
    let refused = unsafe { CudaStream::from_raw(&context, per_thread, "per thread") };
    assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
    let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    for (round, mode) in [global, relaxed].into_iter().enumerate() {
        // SAFETY: the default stream is as old as the context.
        let stream = unsafe { CudaStream::from_raw(&context, std::ptr::null_mut(), "legacy") };
        let stream = stream.unwrap();
        let place = 64 * round as u64;
        let equal = Condition::GreaterOrEqual(1);
        let wait = stream_wait_value32(&stream, &bench.region, place, equal, SOON).unwrap();
        let mut blocking = std::ptr::null_mut();
        let mut graph = std::ptr::null_mut();
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the context is current; a stream of it, which is captured for a while, and a graph without nodes.
        let [begun, asked, ended] = unsafe {
            assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
            assert_eq!(sys::cuStreamCreate(&mut blocking, 0), OK);
            let begun = sys::cuStreamBeginCapture_v2(blocking, mode);
            // Some hundred iterations of the library's watcher threads.
            std::thread::sleep(Duration::from_millis(500));
            let asked = sys::cuStreamIsCapturing(blocking, &mut status);
            [begun, asked, sys::cuStreamEndCapture(blocking, &mut graph)]
        };
        assert_eq!((begun, asked, ended), (OK, OK, OK), "{mode:?}");
        assert_eq!(
            status,
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        );
        assert!(!wait.is_over());
        bench.region.store_u32(place, 1).unwrap();
        assert_eq!(wait.wait(SOON), Ok(()));
        assert_eq!(stream.synchronize(SOON), Ok(()));
        // SAFETY: nothing is queued on it, and no one else has the graph.
        unsafe {
            assert_eq!(sys::cuGraphDestroy(graph), OK);
            assert_eq!(sys::cuStreamDestroy_v2(blocking), OK);
        }
    }
}

/// The driver retires the last operation a moment after it has stored the count for which `synchronize` waits.
#[test]
fn synchronized_stream_has_no_work_for_a_query() {
    let _alone = alone();
    let test = "synchronized_stream_has_no_work_for_a_query";
    let Some(context) = context(test) else {
        return;
    };
    let stream = new_stream(&context, "asked");
    let not_ready = sys::CUresult::CUDA_ERROR_NOT_READY as u32;
    stream.synchronize(SOON).unwrap();
    let late = is_standin().then(|| Fault::here(&format!("cuStreamQuery:{not_ready}")));
    assert_eq!(stream.query(), Ok(true));
    drop(late);
    let (end, told) = std::sync::mpsc::channel::<()>();
    stream.launch_host(move || _ = told.recv()).unwrap();
    assert_eq!(stream.query(), Ok(false));
    end.send(()).unwrap();
    stream.synchronize(SOON).unwrap();
}

/// A capture may begin between two calls of the library that are about the same stream.
#[test]
fn capture_of_a_stream_with_work_stays_valid() {
    let _alone = alone();
    let test = "capture_of_a_stream_with_work_stays_valid";
    let Some(context) = context(test) else {
        return;
    };
    let bench = Bench::new();
    let stream = CudaStream::new(&context, "captured").unwrap();
    let equal = Condition::GreaterOrEqual(1);
    let wait = stream_wait_value32(&stream, &bench.region, 0, equal, SOON).unwrap();
    // The call that invalidates a capture takes effect late, so that one begins just before. On a real driver the capture is only tried.
    let _late = is_standin().then(|| Fault::new(test, "cuStreamQuery:delay=200000"));
    for _ in 0..12 {
        let mut graph = std::ptr::null_mut();
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // Some turns of the threads that look after streams, in one of which the capture begins.
        std::thread::sleep(Duration::from_millis(90));
        // SAFETY: the context is current; the stream is captured for a while, and the graph has no nodes.
        let [begun, ended] = unsafe {
            assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
            let begun = sys::cuStreamBeginCapture_v2(stream.raw(), relaxed);
            std::thread::sleep(Duration::from_millis(220));
            [begun, sys::cuStreamEndCapture(stream.raw(), &mut graph)]
        };
        assert_eq!((begun, ended), (OK, OK));
        // SAFETY: no one else has the graph.
        assert_eq!(unsafe { sys::cuGraphDestroy(graph) }, OK);
    }
    assert!(!wait.is_over());
    bench.region.store_u32(0, 1).unwrap();
    assert_eq!(wait.wait(SOON), Ok(()));
    assert_eq!(stream.synchronize(SOON), Ok(()));
}

#[test]
fn context_destroyed_with_work_queued_fails_every_wait() {
    let _alone = alone();
    let test = "context_destroyed_with_work_queued_fails_every_wait";
    if context(test).is_none() {
        return;
    }
    if !is_standin() {
        return waived(
            test,
            "a real driver may crash on handles of a context that is gone",
        );
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { sys::cuCtxCreate_v2(&mut raw, 0, 0) }
        .result()
        .unwrap();
    let mut popped = std::ptr::null_mut();
    // SAFETY: creation made it current.
    unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }
        .result()
        .unwrap();
    // SAFETY: a context; it is destroyed early on purpose, and the stand-in checks handles.
    let context = unsafe { CudaContext::from_raw(raw) }.unwrap();
    let stream = new_stream(&context, "doomed");
    let mut bench = Bench::new();
    let region = bench.region.clone();
    let wait =
        stream_wait_value32(&stream, &region, 0, Condition::GreaterOrEqual(1), None).unwrap();
    let sent = bench
        .pair
        .a
        .stream_queue_send(&stream, &Work::nop())
        .unwrap();
    let event = Event::blocking();
    stream.record(&event).unwrap();
    let calls = stream.driver_calls();
    let synchronized = std::thread::spawn({
        let stream = stream.clone();
        let (wait, sent) = (wait.clone(), sent.clone());
        move || (stream.synchronize(SOON), wait.is_over() && sent.is_over())
    });
    until("a thread waits", || stream.driver_calls() > calls);
    // SAFETY: made above.
    unsafe { sys::cuCtxDestroy_v2(raw) }.result().unwrap();
    let (result, were_over) = synchronized.join().unwrap();
    assert!(
        matches!(result, Err(Error::Asynchronous { .. })),
        "{result:?}"
    );
    assert!(
        were_over,
        "synchronize returned before the tickets were final"
    );
    assert!(wait.is_over() && sent.is_over());
    assert!(matches!(
        event.synchronize(SOON),
        Err(Error::Asynchronous { .. })
    ));
    assert!(matches!(stream.query(), Err(Error::Asynchronous { .. })));
    assert_eq!(bench.pair.a.failure().unwrap().cause, Cause::Discarded);
    drop((stream, context));
    drop(bench);
}

/// The streams of a context that is gone discard operations whose devices do not answer. Streams of other contexts keep their deadlines.
#[test]
fn context_destroyed_before_sends_of_hung_devices_delays_no_other_deadline() {
    const HUNG: usize = 5;
    let test = "context_destroyed_before_sends_of_hung_devices_delays_no_other_deadline";
    let _alone = alone();
    let Some(sound) = context(test) else { return };
    if !is_standin() {
        return waived(
            test,
            "a real driver may crash on handles of a context that is gone",
        );
    }
    let device = device();
    let hangs = Faults {
        commands_ns: Duration::from_secs(4).as_nanos() as u64,
        ..Faults::default()
    };
    if !device.set_faults(Faults::default()) {
        return waived(test, "the device takes no faults from this process");
    }
    let (mut raw, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: writes one handle, of a context that is current then, and no longer.
    unsafe {
        sys::cuCtxCreate_v2(&mut raw, 0, 0).result().unwrap();
        sys::cuCtxPopCurrent_v2(&mut popped).result().unwrap();
    }
    // SAFETY: a context; it is destroyed early on purpose, and the stand-in checks handles.
    let context = unsafe { CudaContext::from_raw(raw) }.unwrap();
    let mut pairs: Vec<_> = (0..HUNG).map(|_| Pair::new(&device, &config())).collect();
    let [region, other_region] = [(); 2].map(|()| pairs[0].region(64));
    let streams: Vec<_> = (0..HUNG).map(|_| new_stream(&context, "doomed")).collect();
    let condition = Condition::GreaterOrEqual(1);
    let sends: Vec<_> = (pairs.iter_mut().zip(&streams))
        .map(|(pair, stream)| {
            stream_wait_value32(stream, &region, 0, condition, None).unwrap();
            pair.a.stream_queue_send(stream, &Work::nop()).unwrap()
        })
        .collect();
    let other = new_stream(&sound, "other");
    device.set_faults(hangs);
    // SAFETY: made above.
    unsafe { sys::cuCtxDestroy_v2(raw) }.result().unwrap();
    // A thread of the library finds that.
    until("the end", || {
        pairs.iter().any(|pair| pair.a.failure().is_some())
    });
    let timeout = Duration::from_millis(50);
    let start = Instant::now();
    let late = stream_wait_value32(&other, &other_region, 0, condition, Some(timeout)).unwrap();
    until("the deadline", || late.is_over());
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    until("the others", || sends.iter().all(Ticket::is_over));
    assert!(
        streams
            .iter()
            .all(|stream| stream.synchronize(SOON).is_err())
    );
    device.set_faults(Faults::default());
}

#[test]
fn stream_destroyed_with_work_queued_fails_later_calls() {
    let _alone = alone();
    let test = "stream_destroyed_with_work_queued_fails_later_calls";
    let Some(context) = context(test) else { return };
    if !is_standin() {
        return waived(
            test,
            "a real driver may crash on the handle of a stream that is gone",
        );
    }
    let limit = Limit::new("stream destroyed", BOUND);
    let mut round = 0;
    while round < 20 {
        limit.step(round, BOUND);
        let entered = Current::enter(&context);
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { sys::cuStreamCreate(&mut raw, 1) }
            .result()
            .unwrap();
        // SAFETY: destroyed early on purpose, and the stand-in checks handles.
        let stream = unsafe { CudaStream::from_raw(&context, raw, "theirs") }.unwrap();
        let mut bench = Bench::new();
        let wait = stream_wait_value32(
            &stream,
            &bench.region,
            0,
            Condition::GreaterOrEqual(1),
            SHORT,
        )
        .unwrap();
        let sent = bench.pair.a.stream_queue_send(&stream, &Work::nop());
        // SAFETY: made above.
        unsafe { sys::cuStreamDestroy_v2(raw) }.result().unwrap();
        drop(entered);
        // The wait had failed before the send, because this thread was not scheduled: the round is repeated.
        let sent = match sent {
            Err(Error::Asynchronous { .. }) => {
                until("the wait", || wait.is_over());
                continue;
            }
            sent => sent.unwrap(),
        };
        round += 1;
        // The driver finishes the queued work. How much of it was executed cannot be reported; the next call returns the reason.
        let refused = bench.pair.a.stream_queue_send(&stream, &Work::nop());
        let error = refused.expect_err("a stream that is gone");
        assert!(
            matches!(
                error,
                Error::Cuda { .. } | Error::Asynchronous { .. } | Error::Work(_)
            ),
            "round {round}: {error:?}"
        );
        until("tickets", || wait.is_over() && sent.is_over());
        assert!(stream.synchronize(SOON).is_err());
        drop(stream);
        drop(bench);
    }
    Bench::new().works(&CudaStream::new(&context, "next").unwrap(), 2);
}

/// Programs need memory operations that the device lacks: a child of this test has a driver without them.
#[test]
fn missing_memory_operations_are_named_and_the_proxy_path_works() {
    let _alone = alone();
    let test = "missing_memory_operations_are_named_and_the_proxy_path_works";
    let Some(context) = context(test) else { return };
    if !is_standin() {
        return waived(test, "a real device lacks what it lacks");
    }
    const POOR: &str = "nor,memops64,flush,kernels";
    if std::env::var(LACKS).as_deref() != Ok(POOR) {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(LACKS, POOR)
            .env("DOORBELL_TEST_DEVICE", "softcx")
            .env("DOORBELL_TEST_STREAM", "cuda")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}{}",
            String::from_utf8_lossy(&child.stdout),
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    let has = context.capabilities();
    assert_eq!((has.nor, has.qwords, has.flush), (false, false, false));
    assert!(has.memops && !has.kernels);
    let stream = new_stream(&context, "poor");
    let mut bench = Bench::new();
    let error = bench
        .pair
        .a
        .stream_queue_send(&stream, &Work::nop())
        .unwrap_err();
    assert!(error.to_string().contains("64-bit"), "{error}");
    bench.pair.a.post_send(&Work::nop()).unwrap();
    // A wait for a completion needs none of these.
    let waited = (bench.pair.a)
        .stream_wait_cq(&stream, QueueKind::Send)
        .unwrap();
    waited.wait(SOON).unwrap();
    let nor = Condition::Nor(1);
    let error = stream_wait_value32(&stream, &bench.region, 0, nor, SOON).unwrap_err();
    assert!(error.to_string().contains("NOR"), "{error}");
    let proxied = doorbell::Device::open("softcx,path=proxy").unwrap();
    let pair = Pair::new(&proxied, &config());
    let region = pair.region(8192);
    let mut bench = Bench { pair, region };
    for value in 0..200 {
        bench.works(&stream, value);
    }
}

/// The driver refuses one call in fifty, of every kind for a stream and its memory. Everything ends in time with a result or an error.
#[test]
fn ten_thousand_calls_under_random_refusals_end_in_time() {
    let _alone = alone();
    let test = "ten_thousand_calls_under_random_refusals";
    let Some(context) = context(test) else { return };
    let rounds = from_env("DOORBELL_FAULTS", 10_000) / 4;
    let seed = from_env("DOORBELL_SEED", 11);
    println!("DOORBELL_SEED={seed} DOORBELL_FAULTS={}", rounds * 4);
    let rules = [
        queueing().1,
        "cuMemHostRegister_v2",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
        "cuStreamCreate",
        "cuCtxPushCurrent_v2",
        "cuLaunchHostFunc",
    ]
    .map(|name| format!("{name}:2,ppm=20000"))
    .join(";");
    let limit = Limit::new("random refusals", BOUND);
    let mut random = Random(seed);
    let Some(_fault) = Fault::new(test, &rules) else {
        return;
    };
    let mut bench = Bench::new();
    let mut stream = None;
    let mut refused = 0;
    for round in 0..rounds {
        limit.step(round, BOUND);
        if stream.is_none() || random.below(20) == 0 {
            let made = CudaStream::new(&context, "tried");
            stream = made
                .and_then(|made| match by_kernel() {
                    true => made.with_execution(Execution::Kernel),
                    false => Ok(made),
                })
                .ok();
        }
        let Some(stream) = &stream else {
            refused += 1;
            continue;
        };
        let results = [
            bench
                .pair
                .a
                .stream_queue_send(stream, &Work::nop())
                .map(drop),
            bench
                .pair
                .a
                .stream_wait_cq(stream, QueueKind::Send)
                .map(drop),
            stream.launch_host(|| ()),
            stream.synchronize(SOON),
        ];
        for error in results.into_iter().filter_map(Result::err) {
            refused += 1;
            match error {
                Error::Cuda { code, .. } => assert_eq!(code, OUT_OF_MEMORY),
                // A wait for a send that was refused.
                Error::State { .. } => {}
                // A wait that was released, or a stream that was ended by an earlier refusal.
                Error::Asynchronous { .. } | Error::Work(_) => {}
                other => panic!("{other:?}"),
            }
        }
        if bench.pair.a.failure().is_some() || random.below(50) == 0 {
            bench = Bench::new();
        }
    }
    assert!(refused > rounds / 50, "{refused}");
    println!("{refused} calls of {} failed", rounds * 4);
}

/// The stand-in for the driver names itself in the device's name.
#[test]
fn stand_in_identifies_itself_in_the_device_name() {
    let _alone = alone();
    let Some(context) = context("stand_in_identifies_itself_in_the_device_name") else {
        return;
    };
    assert_eq!(context.device_name().contains("stand-in"), is_standin());
    let mut text = std::ptr::null();
    // SAFETY: writes a pointer to a constant string.
    unsafe { sys::cuGetErrorName(sys::CUresult::CUDA_ERROR_NOT_READY, &mut text) }
        .result()
        .unwrap();
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(text) };
    assert_eq!(name, c"CUDA_ERROR_NOT_READY");
}

/// An event of the application, recorded behind a wait for a word of `memory`.
struct ForeignEvent {
    event: sys::CUevent,
    stream: sys::CUstream,
}

impl ForeignEvent {
    fn new(context: &CudaContext) -> ForeignEvent {
        let (mut event, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the context lives; writes two handles, which `drop` destroys.
        unsafe {
            assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
            assert_eq!(sys::cuEventCreate(&mut event, 0), OK);
            assert_eq!(sys::cuStreamCreate(&mut stream, 1), OK);
        }
        ForeignEvent { event, stream }
    }

    /// Recorded behind a wait until the word is 1.
    fn record_behind(&self, word: &ForeignWord) {
        // SAFETY: stream, event and memory live; 0 is CU_STREAM_WAIT_VALUE_GEQ.
        unsafe {
            let waited = sys::cuStreamWaitValue32_v2(self.stream, word.device, 1, 0);
            assert_eq!(waited, OK);
            assert_eq!(sys::cuEventRecord(self.event, self.stream), OK);
        }
    }
}

impl Drop for ForeignEvent {
    fn drop(&mut self) {
        // SAFETY: made in `new`. The driver takes its time for the work.
        unsafe {
            sys::cuEventDestroy_v2(self.event);
            sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// A word of host memory that a stream of the application waits for.
struct ForeignWord {
    host: *const AtomicU32,
    device: sys::CUdeviceptr,
}

impl ForeignWord {
    fn new(context: &CudaContext) -> ForeignWord {
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the context lives; writes two addresses, of memory that `drop` frees.
        unsafe {
            assert_eq!(sys::cuCtxSetCurrent(context.raw()), OK);
            assert_eq!(sys::cuMemHostAlloc(&mut host, 4096, 2), OK);
            assert_eq!(sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0), OK);
        }
        let word = ForeignWord {
            host: host.cast_const().cast(),
            device,
        };
        word.set(0);
        word
    }

    fn set(&self, value: u32) {
        // SAFETY: it lives as long as this object.
        unsafe { &*self.host }.store(value, Ordering::SeqCst);
    }
}

impl Drop for ForeignWord {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // SAFETY: made in `new`, and nothing is queued that reads it.
        let freed = unsafe { sys::cuMemFreeHost(self.host.cast_mut().cast()) };
        assert_eq!(freed, OK);
    }
}

/// Streams of both kinds wait for an event that other code has recorded, and go on when its work is done. The event stays the application's.
#[test]
fn streams_wait_for_events_of_cuda() {
    let _alone = alone();
    let test = "streams_wait_for_events_of_cuda";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let word = ForeignWord::new(&context);
    let (cuda, host) = (
        new_stream(&context, "waits"),
        HostStream::new("waits").unwrap(),
    );
    for round in 0..20 {
        let foreign = ForeignEvent::new(&context);
        // Never recorded: nothing to wait for.
        // SAFETY: the event lives longer than the waits for it.
        unsafe {
            host.wait_cuda_event(&context, foreign.event, ()).unwrap();
            cuda.wait_cuda_event(foreign.event).unwrap();
        }
        cuda.synchronize(SOON).unwrap();
        host.synchronize(SOON).unwrap();
        word.set(0);
        foreign.record_behind(&word);
        let kept = Arc::new(());
        let ran = Arc::new(AtomicU32::new(0));
        // SAFETY: as above.
        unsafe {
            host.wait_cuda_event(&context, foreign.event, Arc::clone(&kept))
                .unwrap();
            cuda.wait_cuda_event(foreign.event).unwrap();
        }
        let count = || {
            let ran = Arc::clone(&ran);
            move || {
                ran.fetch_add(1, Ordering::SeqCst);
            }
        };
        host.launch(count()).unwrap();
        cuda.launch_host(count()).unwrap();
        std::thread::sleep(Duration::from_millis(if round == 0 { 50 } else { 1 }));
        assert_eq!(ran.load(Ordering::SeqCst), 0, "both wait");
        assert_eq!((host.query(), cuda.query()), (Ok(false), Ok(false)));
        assert_eq!(Arc::strong_count(&kept), 2);
        word.set(1);
        host.synchronize(SOON).unwrap();
        cuda.synchronize(SOON).unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 2);
        assert_eq!(Arc::strong_count(&kept), 1, "the owner is released");
        // SAFETY: it was not destroyed by anybody.
        assert_eq!(unsafe { sys::cuEventQuery(foreign.event) }, OK);
    }
}

/// A CUDA stream waits for the record of the call, and needs the event no longer.
#[test]
fn a_cuda_stream_does_not_need_the_event_after_the_call() {
    let _alone = alone();
    let test = "a_cuda_stream_does_not_need_the_event_after_the_call";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let word = ForeignWord::new(&context);
    let stream = new_stream(&context, "waits");
    let foreign = ForeignEvent::new(&context);
    foreign.record_behind(&word);
    // SAFETY: the event lives in the call.
    unsafe { stream.wait_cuda_event(foreign.event) }.unwrap();
    drop(foreign);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(stream.query(), Ok(false));
    word.set(1);
    stream.synchronize(SOON).unwrap();
}

#[test]
fn an_abort_ends_the_wait_of_a_host_stream_for_an_event_of_cuda() {
    let _alone = alone();
    let test = "an_abort_ends_the_wait_of_a_host_stream_for_an_event_of_cuda";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let word = ForeignWord::new(&context);
    let foreign = ForeignEvent::new(&context);
    foreign.record_behind(&word);
    let stream = HostStream::new("aborted").unwrap();
    let kept = Arc::new(());
    // SAFETY: the event lives longer than the wait.
    unsafe { stream.wait_cuda_event(&context, foreign.event, Arc::clone(&kept)) }.unwrap();
    std::thread::sleep(Duration::from_millis(20));
    stream.abort();
    until("the owner is released", || Arc::strong_count(&kept) == 1);
    stream.take_fault();
    stream.synchronize(SOON).unwrap();
    word.set(1);
    // SAFETY: a stream of this test.
    assert_eq!(unsafe { sys::cuStreamSynchronize(foreign.stream) }, OK);
}

/// What the driver refuses, at the call and later.
#[test]
fn errors_of_events_of_cuda_are_reported() {
    let _alone = alone();
    let test = "errors_of_events_of_cuda_are_reported";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let word = ForeignWord::new(&context);
    let (cuda, host) = (
        new_stream(&context, "fails"),
        HostStream::new("fails").unwrap(),
    );
    // SAFETY: null is refused.
    let refused = unsafe {
        [
            cuda.wait_cuda_event(std::ptr::null_mut()),
            host.wait_cuda_event(&context, std::ptr::null_mut(), ()),
        ]
    };
    for refused in refused {
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
    }
    let foreign = ForeignEvent::new(&context);
    // Under capture: the event cannot be queried.
    // SAFETY: stream and event live.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        assert_eq!(sys::cuStreamBeginCapture_v2(foreign.stream, mode), OK);
        assert_eq!(sys::cuEventRecord(foreign.event, foreign.stream), OK);
    }
    // SAFETY: the event lives.
    let refused = unsafe { host.wait_cuda_event(&context, foreign.event, ()) };
    assert!(
        matches!(
            refused,
            Err(Error::Cuda {
                call: "cuEventQuery",
                ..
            })
        ),
        "{refused:?}"
    );
    let mut graph = std::ptr::null_mut();
    // SAFETY: ends the capture of this stream, which has become invalid.
    unsafe { sys::cuStreamEndCapture(foreign.stream, &mut graph) };
    if !is_standin() {
        return;
    }
    let foreign = ForeignEvent::new(&context);
    foreign.record_behind(&word);
    // The call itself asks once; what the stream asks then fails.
    let Some(fault) = Fault::new(test, "cuEventQuery:700,nth=2") else {
        return;
    };
    let ran = Arc::new(AtomicBool::new(false));
    let runs = Arc::clone(&ran);
    // SAFETY: the event lives longer than the wait.
    unsafe { host.wait_cuda_event(&context, foreign.event, ()) }.unwrap();
    let launched = host.launch(move || runs.store(true, Ordering::SeqCst));
    let failed = launched.and_then(|()| host.synchronize(SOON)).unwrap_err();
    drop(fault);
    assert!(
        matches!(&failed, Error::Asynchronous { reason, .. } if reason.contains("CUDA event")),
        "{failed:?}"
    );
    assert!(!ran.load(Ordering::SeqCst), "it is behind the failure");
    word.set(1);
    // SAFETY: a stream of this test.
    assert_eq!(unsafe { sys::cuStreamSynchronize(foreign.stream) }, OK);
}

/// A stream of the library joins the capture that the event is of, as with the driver's own call, and the library does not queue on it unnoticed.
#[test]
fn a_stream_joins_the_capture_of_an_event_of_cuda() {
    let _alone = alone();
    let test = "a_stream_joins_the_capture_of_an_event_of_cuda";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let stream = new_stream(&context, "joins");
    stream.synchronize(SOON).unwrap();
    let foreign = ForeignEvent::new(&context);
    // SAFETY: stream and event live.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        assert_eq!(sys::cuStreamBeginCapture_v2(foreign.stream, mode), OK);
        assert_eq!(sys::cuEventRecord(foreign.event, foreign.stream), OK);
        stream.wait_cuda_event(foreign.event).unwrap();
    }
    let refused = stream.record(&Event::new());
    assert!(
        matches!(&refused, Err(Error::State { kind, .. }) if *kind == StateKind::Captured),
        "{refused:?}"
    );
    let mut graph = std::ptr::null_mut();
    let back = ForeignEvent::new(&context);
    // SAFETY: as above; the graph is destroyed once.
    unsafe {
        assert_eq!(sys::cuEventRecord(back.event, stream.raw()), OK);
        assert_eq!(sys::cuStreamWaitEvent(foreign.stream, back.event, 0), OK);
        assert_eq!(sys::cuStreamEndCapture(foreign.stream, &mut graph), OK);
        assert_eq!(sys::cuGraphDestroy(graph), OK);
    }
    stream.record(&Event::new()).unwrap();
    stream.synchronize(SOON).unwrap();
}
