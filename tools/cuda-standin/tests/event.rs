//! Events: what a record means, and when.

mod rig;

use std::ptr::null_mut;

use rig::*;

const DISABLE_TIMING: u32 = 2;

#[test]
fn an_event_that_never_recorded_is_done() {
    let gpu = Gpu::new();
    let event = gpu.event(0);
    let stream = gpu.stream();
    good!(cuEventQuery(event); cuEventSynchronize(event); cuStreamWaitEvent(stream, event, 0); cuStreamSynchronize(stream));
}

#[test]
fn event_wait_refers_to_the_last_record() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let (first, second) = (gpu.stream(), gpu.stream());
    let event = gpu.event(DISABLE_TIMING);
    gpu.block(first, words, 0);
    good!(cuEventRecord(event, first));
    good!(cuStreamWaitEvent(second, event, 0); cuStreamWriteValue32_v2(second, words.at(2), 1, 0));
    // A later record behind another wait is not what the second stream waits for.
    gpu.block(first, words, 1);
    good!(cuEventRecord(event, first));
    a_while();
    assert_eq!(
        (words.get(2), call!(cuEventQuery(event))),
        (0, CUDA_ERROR_NOT_READY)
    );
    words.set(0, 1);
    good!(cuStreamSynchronize(second));
    assert_eq!(
        (words.get(2), call!(cuEventQuery(event))),
        (1, CUDA_ERROR_NOT_READY)
    );
    words.set(1, 1);
    // A stream whose last event is done is done.
    good!(cuEventSynchronize(event); cuEventQuery(event); cuStreamQuery(first));
}

/// Neither is done without the other: a program may query one and then use the other.
#[test]
fn a_stream_and_its_last_event_are_done_together() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let (start, end) = (gpu.event(0), gpu.event(0));
    let mut time_ms = 0f32;
    for _ in 0..2000 {
        good!(cuEventRecord(start, stream); cuEventRecord(end, stream));
        while call!(cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY {}
        good!(cuEventElapsedTime(&mut time_ms, start, end));
        good!(cuEventRecord(end, stream));
        while call!(cuEventQuery(end)) == CUDA_ERROR_NOT_READY {}
        good!(cuStreamQuery(stream));
    }
}

#[test]
fn an_event_may_be_destroyed_before_it_is_done() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let (first, second) = (gpu.stream(), gpu.stream());
    let event = gpu.event(0);
    gpu.block(first, words, 0);
    good!(cuEventRecord(event, first); cuStreamWaitEvent(second, event, 0));
    good!(cuEventDestroy_v2(event));
    assert_eq!(call!(cuStreamQuery(second)), CUDA_ERROR_NOT_READY);
    words.set(0, 1);
    good!(cuStreamSynchronize(second));
    for wrong in [event, 8 as cu::CUevent] {
        assert_eq!(call!(cuEventDestroy_v2(wrong)), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(call!(cuEventQuery(wrong)), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(
            call!(cuEventRecord(wrong, first)),
            CUDA_ERROR_INVALID_HANDLE
        );
        assert_eq!(
            call!(cuStreamWaitEvent(first, wrong, 0)),
            CUDA_ERROR_INVALID_HANDLE
        );
    }
}

#[test]
fn elapsed_time_and_its_errors() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let stream = gpu.stream();
    let (start, end, untimed) = (gpu.event(0), gpu.event(0), gpu.event(DISABLE_TIMING));
    let mut time_ms = -1f32;
    let mut elapsed = |from, to| (call!(cuEventElapsedTime(&mut time_ms, from, to)), time_ms);
    assert_eq!(elapsed(start, end).0, CUDA_ERROR_INVALID_HANDLE);
    good!(cuEventRecord(start, stream));
    let function = gpu.function(c"doorbell_spin");
    let ns = 50_000_000u64;
    let mut arguments = [(&raw const ns).cast_mut().cast()];
    good!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        32,
        1,
        1,
        0,
        stream,
        arguments.as_mut_ptr(),
        null_mut()
    ));
    gpu.block(stream, words, 0);
    good!(cuEventRecord(end, stream); cuEventRecord(untimed, stream));
    assert_eq!(elapsed(start, end).0, CUDA_ERROR_NOT_READY);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    let (result, time_ms) = elapsed(start, end);
    assert_eq!(result, CUDA_SUCCESS);
    assert!(time_ms >= 49.0, "{time_ms}");
    assert_eq!(elapsed(start, untimed).0, CUDA_ERROR_INVALID_HANDLE);
    assert!(elapsed(end, start).1 <= -49.0);
}
