//! Streams that share one work queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`, as Megatron-LM sets it): a stream that waits stops the others. The stand-in models
//! this. Each test runs in a process of its own, because the driver reads the variable once.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use doorbell::cudarc::driver::sys::{self, CUresult};
use doorbell::{
    Access, Capabilities, Cause, Condition, CudaContext, CudaStream, Device, Executor, Region,
    Status, stream_wait_value32, stream_write_value32,
};
use rig::gpu::{Bench, alone, context};
use rig::{Limit, SOON};
use standin::{is_standin, with_setting};
use waived::waived;

const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const BOUND: Duration = Duration::from_secs(60);
/// Far longer than a store takes whose work queue is free.
const WHILE: Duration = Duration::from_millis(100);

/// False: this is a process whose streams share one work queue.
fn runs_elsewhere(test: &str) -> bool {
    if context_is_missing(test) {
        return true;
    }
    if !is_standin() {
        waived(
            test,
            "which streams share a work queue is the driver's choice",
        );
        return true;
    }
    with_setting(test, CONNECTIONS, "1")
}

/// Without a driver. Does not make a context: a test of the first one must not.
fn context_is_missing(test: &str) -> bool {
    !is_standin() && context(test).is_none()
}

fn words() -> Region {
    let domain = Device::open("softcx").unwrap().protection_domain();
    Region::alloc(&domain, 64, Access::ALL).unwrap()
}

/// A stream that is to wait, and one that is to store.
fn streams(test: &str) -> [CudaStream; 2] {
    let context = context(test).unwrap();
    ["waits", "stores"].map(|name| CudaStream::new(&context, name).unwrap())
}

/// A stream of the application that waits, without this library, for a word that is 0.
struct Waiting {
    word: *mut AtomicU32,
}

impl Waiting {
    fn new() -> Waiting {
        let ok = |result| assert_eq!(result, CUresult::CUDA_SUCCESS);
        let (mut primary, mut stream, mut word) = (null_mut(), null_mut(), null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let geq = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: handles that these calls make. The word and the stream stay as long as the process.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDevicePrimaryCtxRetain(&mut primary, 0));
            ok(sys::cuCtxPushCurrent_v2(primary));
            ok(sys::cuMemHostAlloc(&mut word, 4, 0));
            word.cast::<u32>().write(0);
            ok(sys::cuStreamCreate(&mut stream, flags));
            ok(sys::cuStreamWaitValue32_v2(stream, word as u64, 1, geq));
        }
        Waiting { word: word.cast() }
    }

    fn end(&self) {
        // SAFETY: see `new`.
        unsafe { &*self.word }.store(1, Ordering::Release);
    }
}

#[test]
fn deadline_of_a_wait_frees_the_streams_of_its_work_queue() {
    let _alone = alone();
    let test = "deadline_of_a_wait_frees_the_streams_of_its_work_queue";
    let _limit = Limit::new(test, BOUND);
    if runs_elsewhere(test) {
        return;
    }
    let [waits, stores] = streams(test);
    let words = words();
    let timeout = 20 * WHILE;
    let condition = Condition::GreaterOrEqual(1);
    let waited = stream_wait_value32(&waits, &words, 0, condition, Some(timeout)).unwrap();
    let stored = stream_write_value32(&stores, &words, 4, 7).unwrap();
    sleep(WHILE);
    assert_eq!(words.load_u32(4), Ok(0), "the stand-in does not model it");
    stores.synchronize(SOON).unwrap();
    assert_eq!(words.load_u32(4), Ok(7));
    assert_eq!(stored.status(), Status::Complete);
    assert!(waits.synchronize(SOON).is_err());
    let status = waited.status();
    assert!(
        matches!(status, Status::Failed(failure) if failure.cause == Cause::Deadline(timeout)),
        "{status:?}"
    );
    waits.take_fault();
    Bench::new().works(&waits, 1);
}

/// The order in which a program with one work queue has to queue its work.
#[test]
fn work_that_was_queued_before_a_wait_is_not_delayed_by_it() {
    let _alone = alone();
    let test = "work_that_was_queued_before_a_wait_is_not_delayed_by_it";
    let _limit = Limit::new(test, BOUND);
    if runs_elsewhere(test) {
        return;
    }
    let [waits, stores] = streams(test);
    let words = words();
    let condition = Condition::GreaterOrEqual(1);
    let stored = stream_write_value32(&stores, &words, 0, 1).unwrap();
    let waited = stream_wait_value32(&waits, &words, 0, condition, SOON).unwrap();
    waits.synchronize(SOON).unwrap();
    stores.synchronize(SOON).unwrap();
    assert_eq!(
        (stored.status(), waited.status()),
        (Status::Complete, Status::Complete)
    );
}

/// The library tries the features of a device on a stream of its own. If that stream executes nothing, nothing is known of them.
#[test]
fn features_are_taken_as_promised_if_the_work_queue_is_held() {
    let _alone = alone();
    let test = "features_are_taken_as_promised_if_the_work_queue_is_held";
    let _limit = Limit::new(test, BOUND);
    if runs_elsewhere(test) {
        return;
    }
    let waiting = Waiting::new();
    let context = CudaContext::primary(0).unwrap();
    let Capabilities {
        memops,
        kernels,
        nor,
        qwords,
        flush,
        ..
    } = *context.capabilities();
    let findings = context.findings().join("\n");
    assert_eq!(
        (memops, kernels, nor, qwords, flush),
        (true, true, true, true, true),
        "{findings}"
    );
    assert!(
        findings.contains("not tested") && findings.contains(CONNECTIONS),
        "{findings}"
    );
    waiting.end();
    Bench::new().works(&CudaStream::new(&context, test).unwrap(), 2);
}
