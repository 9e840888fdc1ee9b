//! Contexts: which is current, which is destroyed, and the error that one keeps.

mod rig;

use std::ptr::null_mut;

use rig::*;

fn current() -> cu::CUcontext {
    let mut context = null_mut();
    good!(cuCtxGetCurrent(&mut context));
    context
}

#[test]
fn without_a_current_context_calls_fail() {
    let _gpu = Gpu::new();
    std::thread::spawn(|| {
        assert!(current().is_null());
        let (mut pointer, mut stream, mut device) = (0, null_mut(), 0);
        let mut context = null_mut();
        for result in [
            call!(cuMemAlloc_v2(&mut pointer, 64)),
            call!(cuStreamCreate(&mut stream, 0)),
            call!(cuStreamSynchronize(null_mut())),
            call!(cuStreamQuery(2 as cu::CUstream)),
            call!(cuCtxSynchronize()),
            call!(cuCtxGetDevice(&mut device)),
            call!(cuCtxPopCurrent_v2(&mut context)),
            call!(cuStreamWriteValue32_v2(null_mut(), 64, 0, 0)),
            call!(cuMemHostRegister_v2(0x1000 as *mut _, 4096, 0)),
        ] {
            assert_eq!(result, CUDA_ERROR_INVALID_CONTEXT);
        }
    })
    .join()
    .unwrap();
}

#[test]
fn push_pop_and_set_work_on_the_stack_of_a_thread() {
    let gpu = Gpu::new();
    let mut second = null_mut();
    good!(cuCtxCreate_v4(&mut second, null_mut(), 0, 0));
    assert_eq!(current(), second);
    let mut popped = null_mut();
    good!(cuCtxPopCurrent_v2(&mut popped));
    assert_eq!((popped, current()), (second, gpu.context));
    good!(cuCtxPushCurrent_v2(second); cuCtxSetCurrent(gpu.context));
    assert_eq!(current(), gpu.context);
    good!(cuCtxPopCurrent_v2(&mut popped));
    assert_eq!(current(), gpu.context, "set replaced the top alone");
    // Null pops.
    good!(cuCtxPushCurrent_v2(second); cuCtxSetCurrent(null_mut()));
    assert_eq!(current(), gpu.context);
    good!(cuCtxDestroy_v2(second));
    assert_eq!(
        call!(cuCtxPushCurrent_v2(second)),
        CUDA_ERROR_INVALID_CONTEXT
    );
    assert_eq!(call!(cuCtxDestroy_v2(second)), CUDA_ERROR_INVALID_CONTEXT);
    assert_eq!(
        call!(cuCtxPushCurrent_v2(64 as cu::CUcontext)),
        CUDA_ERROR_INVALID_CONTEXT
    );
}

#[test]
fn destroyed_context_stays_current_in_other_threads_and_fails_calls() {
    let gpu = Gpu::new();
    let context = gpu.context as usize;
    let (to_main, from_other) = std::sync::mpsc::channel();
    let (to_other, from_main) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext));
        to_main.send(()).unwrap();
        from_main.recv().unwrap();
        let mut pointer = 0;
        assert_eq!(
            call!(cuMemAlloc_v2(&mut pointer, 64)),
            CUDA_ERROR_CONTEXT_IS_DESTROYED
        );
        assert_eq!(call!(cuCtxSynchronize()), CUDA_ERROR_CONTEXT_IS_DESTROYED);
        assert_eq!(current(), context as cu::CUcontext);
        good!(cuCtxSetCurrent(null_mut()));
    });
    from_other.recv().unwrap();
    good!(cuCtxDestroy_v2(gpu.context));
    assert!(
        current().is_null(),
        "it was popped from the thread that destroyed it"
    );
    to_other.send(()).unwrap();
    other.join().unwrap();
}

#[test]
fn destroying_a_context_destroys_its_objects() {
    let gpu = Gpu::new();
    let (stream, event) = (gpu.stream(), gpu.event(0));
    let pointer = gpu.alloc(64);
    good!(cuCtxDestroy_v2(gpu.context));
    let _next = Gpu::new();
    assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(call!(cuEventQuery(event)), CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(call!(cuMemFree_v2(pointer)), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn destroying_a_context_ends_what_waits() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let (waits, behind) = (gpu.stream(), gpu.stream());
    let event = gpu.event(0);
    gpu.block(waits, words, 0);
    good!(cuEventRecord(event, waits); cuStreamWaitEvent(behind, event, 0));
    a_while();
    assert_eq!(call!(cuStreamQuery(behind)), CUDA_ERROR_NOT_READY);
    good!(cuCtxDestroy_v2(gpu.context));
}

#[test]
fn the_primary_context_counts_its_users() {
    // A process of its own: all tests share the primary context.
    if !is_child("the_primary_context_counts_its_users", &[]) {
        return;
    }
    load();
    good!(cuInit(0));
    let state = || {
        let (mut flags, mut active) = (9, 9);
        good!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
        active
    };
    assert_eq!(state(), 0);
    assert_eq!(
        call!(cuDevicePrimaryCtxRelease_v2(0)),
        CUDA_ERROR_INVALID_CONTEXT
    );
    let (mut first, mut second) = (null_mut(), null_mut());
    good!(cuDevicePrimaryCtxRetain(&mut first, 0); cuDevicePrimaryCtxRetain(&mut second, 0));
    assert_eq!((first, state()), (second, 1));
    assert!(current().is_null(), "retaining makes nothing current");
    good!(cuCtxSetCurrent(first));
    assert_eq!(call!(cuCtxDestroy_v2(first)), CUDA_ERROR_INVALID_CONTEXT);
    let mut pointer = 0;
    good!(cuMemAlloc_v2(&mut pointer, 64));
    good!(cuDevicePrimaryCtxRelease_v2(0));
    good!(cuMemFree_v2(pointer); cuMemAlloc_v2(&mut pointer, 64));
    // A reset takes what it had, and releases nothing; the context comes back with the next user.
    good!(cuDevicePrimaryCtxReset_v2(0));
    assert_eq!((state(), current()), (0, first));
    assert_eq!(
        call!(cuMemAlloc_v2(&mut pointer, 64)),
        CUDA_ERROR_CONTEXT_IS_DESTROYED
    );
    good!(cuDevicePrimaryCtxRetain(&mut second, 0));
    assert_eq!((state(), second), (1, first));
    assert_eq!(call!(cuMemFree_v2(pointer)), CUDA_ERROR_INVALID_VALUE);
    good!(cuMemAlloc_v2(&mut pointer, 64));
    good!(cuDevicePrimaryCtxRelease_v2(0); cuMemFree_v2(pointer); cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(
        call!(cuMemAlloc_v2(&mut pointer, 64)),
        CUDA_ERROR_CONTEXT_IS_DESTROYED
    );
    assert_eq!(
        call!(cuDevicePrimaryCtxRelease_v2(0)),
        CUDA_ERROR_INVALID_CONTEXT
    );
    assert_eq!(
        call!(cuDevicePrimaryCtxRetain(&mut first, 1)),
        CUDA_ERROR_INVALID_DEVICE
    );
}

#[test]
fn an_error_of_work_stays_with_its_context_alone() {
    let healthy = Gpu::new();
    let broken = Gpu::new();
    let (stream, other) = (broken.stream(), broken.stream());
    let words = broken.words();
    // Before a stream waits: to load a module waits for it.
    let function = broken.function(c"doorbell_standin_mark");
    broken.block(other, words, 0);
    // Memory that was freed: the kernel writes where nothing is.
    let pointer = broken.alloc(4096);
    let (address, value) = (pointer + 4096, 1u32);
    let mut arguments = [
        (&raw const address).cast_mut().cast(),
        (&raw const value).cast_mut().cast(),
    ];
    good!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        stream,
        arguments.as_mut_ptr(),
        null_mut()
    ));
    assert_eq!(
        call!(cuStreamSynchronize(stream)),
        CUDA_ERROR_ILLEGAL_ADDRESS
    );
    let (mut event, mut pointer) = (null_mut(), 0);
    for result in [
        call!(cuStreamQuery(stream)),
        call!(cuStreamSynchronize(other)),
        call!(cuMemAlloc_v2(&mut pointer, 64)),
        call!(cuEventCreate(&mut event, 0)),
        call!(cuStreamWriteValue32_v2(stream, words.at(0), 0, 0)),
        call!(cuCtxSynchronize()),
    ] {
        assert_eq!(result, CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    good!(cuCtxSetCurrent(healthy.context));
    drop(broken);
    let stream = healthy.stream();
    good!(cuStreamSynchronize(stream));
}
