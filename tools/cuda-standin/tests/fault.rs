//! Faults on purpose: they come when and where they were asked for, and take nothing else with them.

mod rig;

use std::ffi::{CStr, c_char};
use std::time::{Duration, Instant};

use rig::*;

/// Adds a rule, or with none takes all away.
fn fault(rule: Option<&CStr>) -> CUresult {
    // SAFETY: the type of the function in the library; the string lives through the call.
    unsafe {
        let function = cu::culib()
            .get::<unsafe extern "C" fn(*const c_char) -> CUresult>(b"doorbell_cuda_standin_fault")
            .unwrap();
        function(rule.map_or(std::ptr::null(), CStr::as_ptr))
    }
}

#[test]
fn the_nth_call_of_a_name() {
    if is_child("the_nth_call_of_a_name", &[]) {
        let gpu = Gpu::new();
        assert_eq!(fault(Some(c"cuMemAlloc_v2:2,nth=3")), CUDA_SUCCESS);
        let mut pointer = 0;
        let results: Vec<CUresult> = (0..5)
            .map(|_| call!(cuMemAlloc_v2(&mut pointer, 64)))
            .collect();
        let (good, bad) = (CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(results, [good, good, bad, good, good]);
        assert_eq!(fault(Some(c"cuStreamQuery:700")), CUDA_SUCCESS);
        let stream = gpu.stream();
        assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(fault(None), CUDA_SUCCESS);
        // The context is well: it was the call that failed.
        good!(cuStreamQuery(stream));
        for wrong in [
            c"",
            c"x",
            c"x:12345",
            c"x:2,nth",
            c"x:2,nth=-1",
            c"x:delay=a",
        ] {
            assert_eq!(fault(Some(wrong)), CUDA_ERROR_INVALID_VALUE, "{wrong:?}");
        }
    }
}

#[test]
fn thread_rules_apply_to_the_calling_thread_only() {
    if is_child("thread_rules_apply_to_the_calling_thread_only", &[]) {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        // SAFETY: the type of the function in the library.
        let here = |rule: Option<&CStr>| unsafe {
            let function = cu::culib()
                .get::<unsafe extern "C" fn(*const c_char) -> CUresult>(
                    b"doorbell_cuda_standin_fault_here",
                )
                .unwrap();
            function(rule.map_or(std::ptr::null(), CStr::as_ptr))
        };
        assert_eq!(here(Some(c"cuStreamQuery:2")), CUDA_SUCCESS);
        assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_OUT_OF_MEMORY);
        let (context, address) = (gpu.context as usize, stream as usize);
        let other = std::thread::spawn(move || {
            good!(cuCtxSetCurrent(context as _));
            call!(cuStreamQuery(address as _))
        });
        assert_eq!(other.join().unwrap(), CUDA_SUCCESS);
        assert_eq!(here(None), CUDA_SUCCESS);
        assert_eq!(call!(cuStreamQuery(stream)), CUDA_SUCCESS);
    }
}

#[test]
fn seed_determines_failing_calls() {
    let test = "seed_determines_failing_calls";
    let settings = [
        ("_FAULTS", "cuMemGetInfo_v2:999,ppm=100000"),
        ("_SEED", "5"),
    ];
    let draw = || {
        let _gpu = Gpu::new();
        let (mut free, mut total) = (0, 0);
        (0..2000)
            .map(|_| call!(cuMemGetInfo_v2(&mut free, &mut total)) == CUDA_ERROR_UNKNOWN)
            .collect::<Vec<bool>>()
    };
    let Some(first) = in_child(test, &settings) else {
        let drawn = draw();
        println!(
            "drawn {:?}",
            drawn.iter().map(|hit| u8::from(*hit)).collect::<Vec<u8>>()
        );
        return;
    };
    let line = |output: &std::process::Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text
            .lines()
            .find(|line| line.contains("drawn"))
            .map(str::to_owned);
        line.unwrap_or_else(|| panic!("{output:?}"))
    };
    let first = line(&first);
    let hits = first.matches('1').count();
    assert!((100..320).contains(&hits), "{hits}");
    assert_eq!(first, line(&in_child(test, &settings).unwrap()));
    let other = [settings[0], ("_SEED", "6")];
    assert_ne!(first, line(&in_child(test, &other).unwrap()));
}

#[test]
fn work_that_fails_breaks_its_context() {
    let settings = [("_FAULTS", "task:719,nth=2")];
    if is_child("work_that_fails_breaks_its_context", &settings) {
        let gpu = Gpu::new();
        let (stream, words) = (gpu.stream(), gpu.words());
        let event = gpu.event(0);
        good!(cuStreamWriteValue32_v2(stream, words.at(0), 1, 0));
        good!(cuStreamSynchronize(stream));
        good!(cuStreamWriteValue32_v2(stream, words.at(1), 1, 0));
        assert_eq!(call!(cuStreamSynchronize(stream)), CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!((words.get(0), words.get(1)), (1, 0));
        assert_eq!(
            call!(cuEventRecord(event, stream)),
            CUDA_ERROR_LAUNCH_FAILED
        );
        good!(cuCtxDestroy_v2(gpu.context));
        let gpu = Gpu::new();
        good!(cuStreamSynchronize(gpu.stream()));
    }
}

#[test]
fn delayed_work_runs_later() {
    if is_child(
        "delayed_work_runs_later",
        &[("_FAULTS", "task:delay=200000")],
    ) {
        let gpu = Gpu::new();
        let (stream, words) = (gpu.stream(), gpu.words());
        let start = Instant::now();
        good!(cuStreamWriteValue32_v2(stream, words.at(0), 1, 0));
        good!(cuStreamSynchronize(stream));
        assert!(start.elapsed() >= Duration::from_millis(200));
        assert_eq!(words.get(0), 1);
    }
}
