//! Streams: order, the default stream, handles, what a stream leaves behind.

mod rig;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use rig::*;

const LEGACY: cu::CUstream = 1 as cu::CUstream;
const PER_THREAD: cu::CUstream = 2 as cu::CUstream;

#[test]
fn invalid_and_destroyed_handles_are_refused() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    good!(cuStreamDestroy_v2(stream));
    let (mut flags, mut id, words) = (0, 0, gpu.words());
    for wrong in [
        stream,
        8 as cu::CUstream,
        words.0 as cu::CUstream,
        gpu.context.cast(),
    ] {
        for result in [
            call!(cuStreamDestroy_v2(wrong)),
            call!(cuStreamSynchronize(wrong)),
            call!(cuStreamQuery(wrong)),
            call!(cuStreamGetFlags(wrong, &mut flags)),
            call!(cuStreamGetId(wrong, &mut id)),
            call!(cuStreamWriteValue32_v2(wrong, words.at(0), 1, 0)),
        ] {
            assert_eq!(result, CUDA_ERROR_INVALID_HANDLE);
        }
    }
    for default in [null_mut(), LEGACY, PER_THREAD] {
        assert_eq!(
            call!(cuStreamDestroy_v2(default)),
            CUDA_ERROR_INVALID_HANDLE
        );
        good!(cuStreamSynchronize(default));
    }
}

#[test]
fn stream_reports_its_creation_parameters() {
    let gpu = Gpu::new();
    let (mut stream, mut priority, mut flags) = (null_mut(), 9, 9);
    good!(cuStreamCreateWithPriority(&mut stream, 1, -100));
    good!(cuStreamGetPriority(stream, &mut priority); cuStreamGetFlags(stream, &mut flags));
    assert_eq!((priority, flags), (-5, 1));
    let (mut context, mut device) = (null_mut(), 9);
    good!(cuStreamGetCtx(stream, &mut context); cuCtxGetDevice(&mut device));
    assert_eq!((context, device), (gpu.context, 0));
    let (mut one, mut two) = (0, 0);
    good!(cuStreamGetId(stream, &mut one); cuStreamGetId(gpu.stream(), &mut two));
    assert_ne!(one, two);
    assert_eq!(
        call!(cuStreamCreate(&mut stream, 2)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuStreamCreate(null_mut(), 0)),
        CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn work_is_done_in_order_and_not_before() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    gpu.block(stream, words, 0);
    for value in 1..=300 {
        good!(cuStreamWriteValue32_v2(stream, words.at(1), value, 0));
    }
    a_while();
    assert_eq!(words.get(1), 0);
    assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream); cuStreamQuery(stream));
    assert_eq!(words.get(1), 300);
}

#[test]
fn queued_work_outlives_the_stream_handle() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    gpu.block(stream, words, 0);
    good!(cuStreamWriteValue32_v2(stream, words.at(1), 7, 0));
    // Does not wait.
    good!(cuStreamDestroy_v2(stream));
    assert_eq!(words.get(1), 0);
    words.set(0, 1);
    good!(cuCtxSynchronize());
    assert_eq!(words.get(1), 7);
}

#[test]
fn the_default_stream_is_in_order_with_blocking_streams_only() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let (blocking, free) = (gpu.stream_with(0), gpu.stream());
    for default in [null_mut(), LEGACY] {
        words.set(0, 0);
        words.set(1, 0);
        words.set(2, 0);
        gpu.block(blocking, words, 0);
        good!(cuStreamWriteValue32_v2(default, words.at(1), 1, 0));
        good!(cuStreamWriteValue32_v2(free, words.at(2), 1, 0); cuStreamSynchronize(free));
        a_while();
        assert_eq!((words.get(1), words.get(2)), (0, 1));
        words.set(0, 1);
        good!(cuStreamSynchronize(default));
        assert_eq!(words.get(1), 1);
        // The other way round.
        words.set(0, 0);
        gpu.block(default, words, 0);
        good!(cuStreamWriteValue32_v2(blocking, words.at(1), 2, 0));
        good!(cuStreamWriteValue32_v2(PER_THREAD, words.at(2), 2, 0));
        a_while();
        assert_eq!((words.get(1), words.get(2)), (1, 1));
        words.set(0, 1);
        good!(cuStreamSynchronize(blocking); cuStreamSynchronize(PER_THREAD));
        assert_eq!((words.get(1), words.get(2)), (2, 2));
    }
}

#[test]
fn per_thread_stream_belongs_to_its_thread() {
    let gpu = Gpu::new();
    let words = gpu.words();
    gpu.block(PER_THREAD, words, 0);
    let context = gpu.context as usize;
    std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext); cuStreamSynchronize(PER_THREAD));
    })
    .join()
    .unwrap();
    assert_eq!(call!(cuStreamQuery(PER_THREAD)), CUDA_ERROR_NOT_READY);
    words.set(0, 1);
    good!(cuStreamSynchronize(PER_THREAD));
}

unsafe extern "C" fn count(argument: *mut c_void) {
    // SAFETY: the counter of the test that queued it.
    let counter = unsafe { &*argument.cast::<AtomicU32>() };
    let mut flags = 0;
    let refused = call!(cuCtxGetFlags(&mut flags)) == CUDA_ERROR_NOT_PERMITTED;
    counter.fetch_add(if refused { 1 } else { 1000 }, Ordering::SeqCst);
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let counter = AtomicU32::new(0);
    let argument = (&raw const counter).cast_mut().cast();
    gpu.block(stream, words, 0);
    good!(cuLaunchHostFunc(stream, Some(count), argument); cuLaunchHostFunc(stream, Some(count), argument));
    assert_eq!(counter.load(Ordering::SeqCst), 0);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    assert_eq!(counter.load(Ordering::SeqCst), 2);
    assert_eq!(
        call!(cuLaunchHostFunc(stream, None, argument)),
        CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn work_for_a_stream_of_another_context_is_refused() {
    let other = Gpu::new();
    let stream = other.stream();
    let words = other.words();
    let gpu = Gpu::new();
    assert_eq!(
        call!(cuStreamWriteValue32_v2(stream, words.at(0), 1, 0)),
        CUDA_ERROR_INVALID_HANDLE
    );
    let event = gpu.event(0);
    assert_eq!(
        call!(cuEventRecord(event, stream)),
        CUDA_ERROR_INVALID_HANDLE
    );
    good!(cuStreamSynchronize(stream); cuStreamWaitEvent(stream, event, 0));
    drop(gpu);
    drop(other);
}

#[test]
fn full_stream_blocks_queueing_and_other_driver_calls() {
    let gpu = Gpu::new();
    let (stream, other, words) = (gpu.stream(), gpu.stream(), gpu.words());
    gpu.block(stream, words, 0);
    let (context, at) = (gpu.context as usize, words.at(1));
    let in_context = |stream: cu::CUstream, count: u32| {
        let stream = stream as usize;
        std::thread::spawn(move || {
            good!(cuCtxSetCurrent(context as cu::CUcontext));
            for _ in 0..count {
                good!(cuStreamWriteValue32_v2(stream as cu::CUstream, at, 1, 0));
            }
        })
    };
    let filling = in_context(stream, 1024);
    a_while();
    let queueing = in_context(other, 1);
    // A query of a stream that is not full needs no lock.
    assert_eq!(call!(cuStreamQuery(other)), CUDA_SUCCESS);
    let stream = stream as usize;
    let asking = std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext));
        call!(cuStreamQuery(stream as cu::CUstream))
    });
    a_while();
    assert!(!filling.is_finished() && !queueing.is_finished() && !asking.is_finished());
    words.set(0, 1);
    filling.join().unwrap();
    queueing.join().unwrap();
    let answer = asking.join().unwrap();
    assert!([CUDA_SUCCESS, CUDA_ERROR_NOT_READY].contains(&answer));
    good!(cuCtxSynchronize());
}
