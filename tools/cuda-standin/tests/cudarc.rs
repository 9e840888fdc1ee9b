//! A user of the driver that is not ours: cudarc's safe interface, which has its own idea of what the driver does.

mod rig;

use std::sync::{Mutex, MutexGuard};

use cudarc::driver::{CudaContext, DriverError};
use rig::*;

/// All tests have the primary context in common, and one that captures in it forbids the others to wait for it.
fn alone() -> (MutexGuard<'static, ()>, Limit) {
    static ONE: Mutex<()> = Mutex::new(());
    load();
    let guard = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    (guard, Limit::new(60))
}

#[test]
fn slices_go_there_and_back() {
    let _alone = alone();
    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.name().unwrap(), "doorbell's CUDA stand-in, no GPU");
    assert_eq!(context.compute_capability().unwrap(), (9, 0));
    let stream = context.new_stream().unwrap();
    let numbers: Vec<u64> = (0..10_000).map(|number| number * number).collect();
    let there = stream.clone_htod(&numbers).unwrap();
    let mut copy = stream.alloc_zeros::<u64>(10_000).unwrap();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), vec![0; 10_000]);
    stream
        .memcpy_dtod(&there.slice(0..5000), &mut copy.slice_mut(5000..))
        .unwrap();
    let back = stream.clone_dtoh(&copy).unwrap();
    stream.synchronize().unwrap();
    assert!(back[..5000].iter().all(|number| *number == 0));
    assert_eq!(back[5000..], numbers[..5000]);
    drop((there, copy));
    context.check_err().unwrap();
}

#[test]
fn streams_fork_and_join_by_events() {
    let _alone = alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let before = stream
        .record_event(Some(cu::CUevent_flags::CU_EVENT_DEFAULT))
        .unwrap();
    let forked = stream.fork().unwrap();
    let numbers = vec![7u32; 4096];
    let there = forked.clone_htod(&numbers).unwrap();
    stream.join(&forked).unwrap();
    assert_eq!(stream.clone_dtoh(&there).unwrap(), numbers);
    let after = stream
        .record_event(Some(cu::CUevent_flags::CU_EVENT_DEFAULT))
        .unwrap();
    after.synchronize().unwrap();
    assert!(before.is_complete() && before.elapsed_ms(&after).unwrap() >= 0.0);
}

#[test]
fn a_graph_is_captured_and_launched() {
    let _alone = alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    // Else cudarc has the stream wait for an event from before the capture, which no driver allows.
    // SAFETY: this test uses the memory in one stream only.
    unsafe { context.disable_event_tracking() };
    let mut numbers = stream.clone_htod(&[5u32; 64]).unwrap();
    stream.synchronize().unwrap();
    stream
        .begin_capture(cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    stream.memset_zeros(&mut numbers).unwrap();
    let flags = cu::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&numbers).unwrap(), [5; 64]);
    graph.upload().unwrap();
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&numbers).unwrap(), [0; 64]);
}

#[test]
fn errors_are_those_of_the_driver() {
    let _alone = alone();
    let error = CudaContext::new(1).err();
    assert_eq!(error, Some(DriverError(CUDA_ERROR_INVALID_DEVICE)));
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let error = stream.alloc_zeros::<u8>(1 << 40).err();
    assert_eq!(error, Some(DriverError(CUDA_ERROR_OUT_OF_MEMORY)));
}
