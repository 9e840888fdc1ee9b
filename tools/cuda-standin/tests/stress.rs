//! Everything at once: threads that queue, wait, capture, allocate and free, over contexts that are destroyed under them, while calls
//! and work fail at random. Nothing hangs, nothing crashes, and every error is one that the driver has for it.

mod rig;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rig::*;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Calls that succeeded, and those that did not.
static SEEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// What a call may say while contexts come and go and faults are injected.
fn check(result: CUresult) -> bool {
    let known = [
        CUDA_SUCCESS,
        CUDA_ERROR_NOT_READY,
        CUDA_ERROR_INVALID_CONTEXT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED,
        // Of a stream, an event, memory that went with its context.
        CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_INVALID_VALUE,
        // Kept by a context, injected.
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_UNKNOWN,
        // Of captures that were broken.
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        CUDA_ERROR_ILLEGAL_STATE,
    ];
    assert!(known.contains(&result), "{result:?}");
    SEEN[usize::from(result != CUDA_SUCCESS)].fetch_add(1, Ordering::Relaxed);
    result == CUDA_SUCCESS
}

/// One context after another, with everything in it, until the time is over.
fn user(seed: u64, turns: &AtomicU64, over: &AtomicBool) {
    let mut random = Random(seed);
    while !over.load(Ordering::Relaxed) {
        let mut context = null_mut();
        if !check(call!(cuCtxCreate_v2(&mut context, 0, 0))) {
            continue;
        }
        let (mut page, mut device) = (null_mut(), 0);
        let mut streams = [null_mut(); 3];
        let mut event = null_mut();
        let made = check(call!(cuMemAllocHost_v2(&mut page, 4096)))
            && check(call!(cuMemAlloc_v2(&mut device, 4096)))
            && check(call!(cuEventCreate(&mut event, 2)))
            && streams
                .iter_mut()
                .all(|stream| check(call!(cuStreamCreate(stream, random.below(2) as u32))));
        let words = Words(page as usize);
        // Streams wait for 1; in the end it is set or the context destroyed under them.
        let rounds = if made { random.below(40) } else { 0 };
        let mut waits = false;
        for _ in 0..rounds {
            let stream = streams[random.below(3) as usize];
            check(match random.below(12) {
                0 => {
                    waits = true;
                    call!(cuStreamWaitValue32_v2(stream, words.at(0), 1, 0))
                }
                1 | 2 => call!(cuStreamWriteValue32_v2(stream, words.at(1), 7, 0)),
                3 => call!(cuMemsetD32Async(device, 5, 16, stream)),
                4 => call!(cuEventRecord(event, stream)),
                5 => call!(cuStreamWaitEvent(stream, event, 0)),
                6 => call!(cuStreamQuery(stream)),
                7 => call!(cuStreamWriteValue32_v2(null_mut(), words.at(2), 7, 0)),
                8 => call!(cuStreamDestroy_v2(stream)),
                9 => call!(cuEventQuery(event)),
                // A graph is instantiated when no stream waits.
                _ if waits => call!(cuEventQuery(event)),
                _ => capture(stream, words),
            });
        }
        turns.fetch_add(rounds, Ordering::Relaxed);
        if made && random.below(2) == 0 {
            words.set(0, 1);
            check(call!(cuCtxSynchronize()));
            check(call!(cuMemFree_v2(device)));
        }
        // Else with work queued, and waits that nothing satisfies. A fault was injected if it fails: the next try counts.
        while call!(cuCtxDestroy_v2(context)) == CUDA_ERROR_UNKNOWN {}
    }
}

/// A graph of what the stream would have done, launched twice.
fn capture(stream: cu::CUstream, words: Words) -> CUresult {
    let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let (mut graph, mut exec) = (null_mut(), null_mut());
    let begun = call!(cuStreamBeginCapture_v2(stream, mode));
    if begun != CUDA_SUCCESS {
        return begun;
    }
    check(call!(cuStreamWriteValue32_v2(stream, words.at(3), 7, 0)));
    check(call!(cuStreamWriteValue32_v2(stream, words.at(4), 7, 0)));
    let mut ended = call!(cuStreamEndCapture(stream, &mut graph));
    while ended == CUDA_ERROR_UNKNOWN {
        ended = call!(cuStreamEndCapture(stream, &mut graph));
    }
    if ended != CUDA_SUCCESS {
        return ended;
    }
    let mut node = null_mut();
    check(call!(cuGraphAddEmptyNode(&mut node, graph, null(), 0)));
    if check(call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))) {
        check(call!(cuGraphLaunch(exec, stream)));
        check(call!(cuGraphLaunch(exec, stream)));
        check(call!(cuGraphExecDestroy(exec)));
    }
    call!(cuGraphDestroy(graph))
}

#[test]
fn faults_and_destroyed_contexts_end_in_errors() {
    let faults = "*:999,ppm=5000;task:719,ppm=2000;task:delay=300,ppm=20000";
    if !is_child(
        "faults_and_destroyed_contexts_end_in_errors",
        &[("_FAULTS", faults)],
    ) {
        return;
    }
    load();
    let _limit = Limit::new(400);
    while call!(cuInit(0)) != CUDA_SUCCESS {}
    let (turns, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let wanted =
        std::env::var("DOORBELL_STANDIN_TURNS").map_or(10_000, |turns| turns.parse().unwrap());
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let (turns, over) = (&turns, &over);
            scope.spawn(move || user(seed * 0x9e37_79b9, turns, over));
        }
        let start = Instant::now();
        while turns.load(Ordering::Relaxed) < wanted && start.elapsed() < Duration::from_secs(300) {
            std::thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::Relaxed);
    });
    let turns = turns.load(Ordering::Relaxed);
    let [good, bad] = [0, 1].map(|index| SEEN[index].load(Ordering::Relaxed));
    println!("{turns} operations; of all calls {good} succeeded, {bad} failed");
    assert!(turns >= 1000, "{turns} operations in five minutes");
    assert!(good > bad && bad > 100, "{good} {bad}");
}
