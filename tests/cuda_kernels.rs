//! The kernels of the library. `scripts/test cuda` runs this over the stand-in for the driver, which has functions of the same names; without a driver
//! its tests are WAIVED. With a GPU they use the kernels compiled by nvcc.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // launches a kernel of its own

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use doorbell::{
    Cause, Condition, CudaContext, CudaStream, Error, Event, Execution, Executor, QueueKind,
    RemoteSlice, Status, Ticket, Work, stream_post_all, stream_wait_value32, stream_write_value32,
};
use rig::SOON;
use rig::gpu::{Bench, alone, context};
use standin::{Fault, LACKS, is_standin, lacking, with_setting};
use waived::waived;

const SHORT: Option<Duration> = Some(Duration::from_millis(20));

fn by_kernel(context: &CudaContext, name: &str) -> CudaStream {
    let stream = CudaStream::new(context, name).unwrap();
    stream.with_execution(Execution::Kernel).unwrap()
}

/// Makes the stand-in fail until `act` returns. `None`, and the test is WAIVED, with a real driver.
fn with_fault<R>(test: &str, rule: &str, act: impl FnOnce() -> R) -> Option<R> {
    let _fault = Fault::new(test, rule)?;
    Some(act())
}

#[test]
fn spin_runs_in_stream_order_for_its_duration() {
    let _alone = alone();
    const TIME: Duration = Duration::from_millis(300);
    let Some(context) = context("spin_runs_in_stream_order_for_its_duration") else {
        return;
    };
    let stream = CudaStream::new(&context, "spin").unwrap();
    let (before, after) = (Event::new(), Event::new());
    stream.spin(Duration::ZERO).unwrap();
    stream.record(&before).unwrap();
    before.synchronize(SOON).unwrap();
    let start = Instant::now();
    stream.spin(TIME).unwrap();
    stream.record(&after).unwrap();
    after.synchronize(SOON).unwrap();
    // The GPU measures the time by another clock.
    assert!(start.elapsed() > TIME * 9 / 10, "{:?}", start.elapsed());
}

#[test]
fn queued_work_keeps_kernels_loaded_after_handles_are_dropped() {
    let _alone = alone();
    let Some(context) = context("queued_work_keeps_kernels_loaded_after_handles_are_dropped")
    else {
        return;
    };
    let stream = CudaStream::new(&context, "dropped").unwrap();
    let after = Event::new();
    stream.spin(Duration::from_millis(300)).unwrap();
    stream.spin(Duration::ZERO).unwrap();
    stream.record(&after).unwrap();
    drop((stream, context));
    after.synchronize(SOON).unwrap();
}

/// A driver of CUDA 12 refuses images made by nvcc 13, so the library has a second image for it.
#[test]
fn cuda_12_driver_loads_its_own_kernel_image() {
    let _alone = alone();
    let test = "cuda_12_driver_loads_its_own_kernel_image";
    if !is_standin() {
        return waived(test, "a real driver is of the version that it is");
    }
    if with_setting(test, "DOORBELL_CUDA_STANDIN_DRIVER", "12040") {
        return;
    }
    let Some(context) = context(test) else { return };
    assert_eq!(context.driver_version(), (12, 4));
    if !context.capabilities().kernels {
        let findings = context.findings().join("\n");
        let is_explained = findings.contains("580 series") && findings.contains("CUDA 12.4");
        assert!(is_explained, "{findings}");
        return waived(test, "this build has no kernels of an nvcc of CUDA 12");
    }
    Bench::new().works(&by_kernel(&context, test), 3);
}

/// Each case in a child process: devices that lack some memory operations, and one that has none.
#[test]
fn kernel_replaces_missing_memory_operations() {
    let _alone = alone();
    let test = "kernel_replaces_missing_memory_operations";
    let Some(context) = context(test) else { return };
    if !is_standin() {
        return waived(test, "a real device lacks what it lacks");
    }
    let cases = ["nor", "memops64", "nor,memops64,flush", "memops"];
    if std::env::var_os(LACKS).is_none() {
        assert!(cases.iter().all(|lacks| lacking(test, lacks)));
        return;
    }
    let lacks = std::env::var(LACKS).unwrap();
    let has = context.capabilities();
    assert_eq!(has.memops, lacks != "memops");
    assert_eq!(has.nor, !lacks.contains("nor") && lacks != "memops");
    assert_eq!(has.qwords, !lacks.contains("memops"));
    assert!(has.kernels);
    let findings = context.findings().join("\n");
    for (name, has) in [
        ("memops:", has.memops),
        ("nor:", has.nor),
        ("qwords:", has.qwords),
    ] {
        assert_eq!(findings.contains(name), !has, "{name} {findings}");
    }
    let stream = CudaStream::new(&context, "poor").unwrap();
    let other = CudaStream::new(&context, "other").unwrap();
    let mut bench = Bench::new();
    // More than one lap of the rings: both kinds of waits for completions.
    for round in 0..300 {
        bench.works(&stream, round as u8);
    }
    // Programs that the device can execute and those that it cannot, in one batch and in order.
    let mut batch = Vec::new();
    for _ in 0..32 {
        batch.push(bench.pair.a.prepare_send(&Work::nop()).unwrap());
        batch.push(bench.pair.a.prepare_wait_cq(QueueKind::Send).unwrap());
    }
    let tickets = stream_post_all(&stream, &mut batch).unwrap();
    stream_write_value32(&stream, &bench.region, 0, 7).unwrap();
    // A stream that waits for another one.
    let event = Event::new();
    stream.record(&event).unwrap();
    other.wait_event(&event).unwrap();
    let condition = Condition::GreaterOrEqual(7);
    let waited = stream_wait_value32(&other, &bench.region, 0, condition, SOON).unwrap();
    other.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
    stream.synchronize(SOON).unwrap();
    let complete = |ticket: &Ticket| ticket.status() == Status::Complete;
    assert!(tickets.iter().all(complete));
    // The same with a host stream.
    let host = doorbell::HostStream::new("host").unwrap();
    let held = Event::new();
    let start = Instant::now();
    host.launch(|| std::thread::sleep(Duration::from_millis(300)))
        .unwrap();
    host.record(&held).unwrap();
    other.wait_event(&held).unwrap();
    other.synchronize(SOON).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(300));
}

#[test]
fn deadline_ends_a_kernel_wait_and_leaves_the_word_unchanged() {
    let _alone = alone();
    let Some(context) = context("deadline_ends_a_kernel_wait_and_leaves_the_word_unchanged") else {
        return;
    };
    let stream = by_kernel(&context, "late");
    let mut bench = Bench::new();
    let region = bench.region.clone();
    let cases = [
        (7, Condition::GreaterOrEqual(8)),
        (0b0101, Condition::And(0b1010)),
        (!0b0100, Condition::Nor(0b0100)),
    ];
    for (word, condition) in cases {
        region.store_u32(64, word).unwrap();
        // Held until all is queued: a stream with an unreported failure accepts no more work.
        region.store_u32(256, 0).unwrap();
        let gate = Condition::GreaterOrEqual(1);
        stream_wait_value32(&stream, &region, 256, gate, SOON).unwrap();
        let late = stream_wait_value32(&stream, &region, 64, condition, SHORT).unwrap();
        // Behind it a wait whose condition holds, and one that would time out.
        let good = stream_wait_value32(&stream, &region, 192, Condition::Nor(1), SOON).unwrap();
        let again = stream_wait_value32(&stream, &region, 64, condition, SHORT).unwrap();
        let behind = stream_write_value32(&stream, &region, 128, word).unwrap();
        region.store_u32(256, 1).unwrap();
        let seen = std::thread::spawn({
            let (region, behind) = (region.clone(), behind.clone());
            move || {
                let mut seen = vec![];
                while !behind.is_over() {
                    seen.push(region.load_u32(64).unwrap());
                }
                seen
            }
        });
        let error = stream.synchronize(SOON).unwrap_err();
        assert!(matches!(error, Error::Asynchronous { .. }), "{error}");
        let status = late.status();
        assert!(
            matches!(status, Status::Failed(e) if matches!(e.cause, Cause::Deadline(_))),
            "{status:?}"
        );
        // Waits behind a failure are discarded, unless their condition holds.
        assert_eq!(good.status(), Status::Complete);
        assert_eq!(again.status(), Status::Discarded);
        assert!(stream.take_fault().is_some());
        assert_eq!(behind.status(), Status::Complete);
        assert_eq!(region.load_u32(128), Ok(word));
        // The wait is not ended by a store to the word, as is necessary for memory operations.
        assert!(seen.join().unwrap().iter().all(|seen| *seen == word));
    }
    bench.works(&stream, 5);
}

#[test]
fn large_batches_are_split_into_launches_in_order() {
    let _alone = alone();
    let Some(context) = context("large_batches_are_split_into_launches_in_order") else {
        return;
    };
    let stream = by_kernel(&context, "long");
    let mut bench = Bench::new();
    for round in 0..20 {
        let mut batch = Vec::new();
        for _ in 0..120 {
            for end in [&mut bench.pair.a, &mut bench.pair.b] {
                batch.push(end.prepare_send(&Work::nop()).unwrap());
            }
        }
        for _ in 0..120 {
            for end in [&mut bench.pair.a, &mut bench.pair.b] {
                batch.push(end.prepare_wait_cq(QueueKind::Send).unwrap());
            }
        }
        let tickets = stream_post_all(&stream, &mut batch).unwrap();
        stream.synchronize(SOON).unwrap();
        assert!(
            tickets
                .iter()
                .all(|ticket| ticket.status() == Status::Complete)
        );
        bench.works(&stream, round);
    }
}

#[test]
fn a_launch_that_is_refused_is_not_queued() {
    let _alone = alone();
    let test = "a_launch_that_is_refused_is_not_queued";
    let Some(context) = context(test) else { return };
    let stream = by_kernel(&context, "refused");
    let mut bench = Bench::new();
    bench.works(&stream, 1);
    for round in 0..10 {
        let refused = with_fault(test, "cuLaunchKernel:2,nth=1", || {
            bench.pair.a.stream_queue_send(&stream, &Work::nop())
        });
        let Some(refused) = refused else { return };
        let expected = Error::Cuda {
            call: "cuLaunchKernel",
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        };
        assert_eq!(refused.unwrap_err(), expected);
        let spun = with_fault(test, "cuLaunchKernel:2,nth=1", || {
            stream.spin(Duration::ZERO)
        });
        assert_eq!(spun, Some(Err(expected)));
        bench.works(&stream, round);
    }
}

/// A capability that the driver reports and whose probe fails counts as missing, and the reason is kept. Each case runs in a process of its own, whose
/// first calls fail.
#[test]
fn capability_whose_probe_fails_is_reported_missing() {
    const FAULTS: &str = "DOORBELL_CUDA_STANDIN_FAULTS";
    /// The exit status of a process whose probe could not begin in time.
    const NOT_TRIED: i32 = 77;
    let _alone = alone();
    let test = "capability_whose_probe_fails_is_reported_missing";
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    // Calls of the probe, in order, and the error that each reports.
    let cases = [
        (
            "cuStreamBatchMemOp_v2:801,nth=1",
            "memops: ",
            "CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            "cuStreamBatchMemOp_v2:801,nth=3",
            "nor: ",
            "CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            "cuStreamBatchMemOp_v2:1,nth=4",
            "qwords: ",
            "CUDA_ERROR_INVALID_VALUE",
        ),
        (
            "cuStreamBatchMemOp_v2:801,nth=5",
            "flush: ",
            "CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            "cuModuleLoadData:209,nth=1",
            "kernels: ",
            "kernels are for sm_75|no kernels",
        ),
        (
            "cuLaunchKernel:700,nth=1",
            "kernels: ",
            "CUDA_ERROR_ILLEGAL_ADDRESS",
        ),
        (
            "cuStreamCreate:2,nth=1",
            "memops: ",
            "CUDA_ERROR_OUT_OF_MEMORY",
        ),
    ];
    let Ok(faults) = std::env::var(FAULTS) else {
        for (faults, ..) in cases {
            let run = || {
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", test, "--nocapture"]);
                child.env(FAULTS, faults).output().unwrap()
            };
            let mut child = run();
            for _ in 0..4 {
                if child.status.code() == Some(NOT_TRIED) {
                    child = run();
                }
            }
            let (out, err) = (
                String::from_utf8_lossy(&child.stdout),
                String::from_utf8_lossy(&child.stderr),
            );
            assert!(child.status.success(), "{faults}: {out}{err}");
        }
        return;
    };
    let (_, name, reason) = cases.iter().find(|(of, ..)| *of == faults).unwrap();
    let context = CudaContext::primary(0).unwrap();
    let findings = context.findings();
    if findings
        .iter()
        .any(|line| line.contains("not tested. A new stream executed nothing"))
    {
        // The stand-in had no processor for the time that a probe may take.
        std::process::exit(NOT_TRIED);
    }
    let found = findings.iter().find(|line| line.starts_with(name));
    let found = found.unwrap_or_else(|| panic!("{findings:?}"));
    assert!(
        reason.split('|').any(|reason| found.contains(reason)),
        "{found}"
    );
    let has = context.capabilities();
    let absent = match *name {
        "memops: " => !has.memops && !has.nor && !has.qwords && !has.flush,
        "nor: " => !has.nor && has.memops,
        "qwords: " => !has.qwords && has.nor,
        "flush: " => !has.flush && has.qwords,
        _ => !has.kernels && has.flush,
    };
    assert!(absent, "{has:?}");
    let stream = CudaStream::new(&context, "tried").unwrap();
    if !has.kernels {
        let error = stream.with_execution(Execution::Kernel).unwrap_err();
        assert!(matches!(error, Error::State { .. }), "{error}");
    } else {
        Bench::new().works(&stream, 1);
    }
}

/// A kernel of the application that copies a word, and the destination. It is PTX, which drivers compile; the stand-in has a function of that name.
struct Copier {
    context: CudaContext,
    module: sys::CUmodule,
    function: sys::CUfunction,
    seen: *mut c_void,
}

const COPY: &std::ffi::CStr = c"
.version 7.0
.target sm_75
.address_size 64
.visible .entry doorbell_test_copy(.param .u64 to, .param .u64 from)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.volatile.global.u32 %r1, [%rd2];
    st.volatile.global.u32 [%rd1], %r1;
    ret;
}
";

impl Copier {
    fn new(context: &CudaContext) -> Copier {
        let (mut module, mut function, mut seen) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the context is kept; each call writes one handle, of which the first two are checked before they are used.
        unsafe {
            sys::cuCtxPushCurrent_v2(context.raw()).result().unwrap();
            sys::cuModuleLoadData(&mut module, COPY.as_ptr().cast())
                .result()
                .unwrap();
            sys::cuModuleGetFunction(&mut function, module, c"doorbell_test_copy".as_ptr())
                .result()
                .unwrap();
            sys::cuMemAllocHost_v2(&mut seen, 4).result().unwrap();
            sys::cuCtxPopCurrent_v2(&mut null_mut()).result().unwrap();
        }
        Copier {
            context: context.clone(),
            module,
            function,
            seen,
        }
    }

    /// Queues a kernel that reads the word.
    fn look(&self, stream: &CudaStream, word: sys::CUdeviceptr) {
        let mut to = 0;
        // SAFETY: a word of the driver's, and two parameters of the kernel, which are copied.
        unsafe {
            self.seen.cast::<i32>().write_volatile(77);
            sys::cuCtxPushCurrent_v2(self.context.raw())
                .result()
                .unwrap();
            sys::cuMemHostGetDevicePointer_v2(&mut to, self.seen, 0)
                .result()
                .unwrap();
            let (mut to, mut from) = (to, word);
            let mut parameters = [
                std::ptr::from_mut(&mut to).cast::<c_void>(),
                std::ptr::from_mut(&mut from).cast(),
            ];
            sys::cuLaunchKernel(
                self.function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
                null_mut(),
            )
            .result()
            .unwrap();
            sys::cuCtxPopCurrent_v2(&mut null_mut()).result().unwrap();
        }
    }

    /// The value that it read, once the stream is done.
    fn seen(&self) -> i32 {
        // SAFETY: of the driver's, until `self` is dropped.
        unsafe { self.seen.cast::<i32>().read_volatile() }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // SAFETY: made by `new`; nothing of it is queued any more.
        unsafe {
            let _ = sys::cuCtxPushCurrent_v2(self.context.raw());
            let _ = sys::cuModuleUnload(self.module);
            let _ = sys::cuMemFreeHost(self.seen);
            let _ = sys::cuCtxPopCurrent_v2(&mut null_mut());
        }
    }
}

#[test]
fn kernel_behind_a_failed_wait_sees_the_status_word() {
    const WORK: i32 = -19;
    let _alone = alone();
    let Some(context) = context("kernel_behind_a_failed_wait_sees_the_status_word") else {
        return;
    };
    let copier = Copier::new(&context);
    for execution in [Execution::MemoryOps, Execution::Kernel] {
        let stream = CudaStream::new(&context, "status").unwrap();
        let stream = stream.with_execution(execution).unwrap();
        let word = stream.status_word();
        let mut bench = Bench::new();
        let good = |bench: &mut Bench| {
            stream.clear_status();
            bench.works(&stream, 1);
            copier.look(&stream, word);
            stream.synchronize(SOON).unwrap();
            assert_eq!((copier.seen(), stream.status()), (0, 0), "{execution:?}");
        };
        let bad = |what: &str| {
            copier.look(&stream, word);
            let end = stream.synchronize(SOON).unwrap_err();
            assert_eq!(stream.take_fault(), Some(end));
            let seen = (copier.seen(), stream.status());
            assert_eq!(seen, (WORK, WORK), "{what} {execution:?}");
        };
        for round in 0..20 {
            good(&mut bench);
            let region = bench.region.clone();
            region.store_u32(64, 0).unwrap();
            let condition = Condition::GreaterOrEqual(1);
            stream_wait_value32(&stream, &region, 64, condition, SHORT).unwrap();
            bad("a value that does not come");

            good(&mut bench);
            let a = &mut bench.pair.a;
            let data = [region.slice(0, 64).unwrap()];
            let remote = region.remote();
            let nowhere = remote.rkey.wrapping_add(0x1000);
            // Held until all is queued: a failed endpoint accepts no more work.
            region.store_u32(256, 0).unwrap();
            stream_wait_value32(&stream, &region, 256, condition, SOON).unwrap();
            a.stream_queue_write(&stream, &data, RemoteSlice::at(remote.addr, nowhere))
                .unwrap();
            a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            region.store_u32(256, 1).unwrap();
            bad("a completion in error");
            bench.pair.reset();

            good(&mut bench);
            let b = &mut bench.pair.b;
            let into = [region.slice(0, 16).unwrap()];
            b.stream_queue_recv(&stream, 5, &into).unwrap();
            let timeout = if round % 2 == 0 { SHORT } else { SOON };
            b.stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
                .unwrap();
            if round % 2 != 0 {
                b.abort();
            }
            bad("a receive that does not come");
            bench.pair.reset();

            // The stream does not depend on an endpoint whose operations are all done.
            good(&mut bench);
            bench.pair.a.abort();
            assert!(bench.pair.a.failure().is_some());
            copier.look(&stream, word);
            stream.synchronize(SOON).unwrap();
            assert_eq!(copier.seen(), 0);
            bench.pair.reset();
        }
    }
}
