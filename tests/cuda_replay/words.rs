//! Words of memory that launches store and wait for.

use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use doorbell::{
    Condition, Condition64, CudaStream, Error, Executor, stream_wait_count64, stream_wait_value32,
    stream_wait_value64, stream_write_value32, stream_write_value64,
};

use crate::rig::SOON;
use crate::rig::gpu::alone;
use crate::{Bench, config, gpu_region, is_failed};

/// Words: the same values with each launch.
#[test]
fn words_are_stored_and_awaited_by_each_launch() {
    let _alone = alone();
    let Some(bench) = Bench::new("words_are_stored", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let condition = Condition::GreaterOrEqual(5);
            tickets.push(stream_wait_value32(stream, &words, 0, condition, SOON).unwrap());
            tickets.push(stream_write_value32(stream, &words, 8, 11).unwrap());
        });
    for launch in 1..20 {
        words.store_u32(0, 0).unwrap();
        words.store_u32(8, 0).unwrap();
        bench.a.launch(&graph);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(words.load_u32(8), Ok(0));
        words.store_u32(0, 5 + launch).unwrap();
        bench.a.wait();
        assert_eq!(words.load_u32(8), Ok(11));
        for ticket in &tickets {
            assert_eq!(ticket.launches(), Some(launch.into()));
        }
    }
    // A launch whose wait does not end in its time: nothing behind it is executed, until the fault is taken.
    let short = Some(Duration::from_millis(20));
    let late = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let condition = Condition::GreaterOrEqual(1000);
            tickets.push(stream_wait_value32(stream, &words, 0, condition, short).unwrap());
            tickets.push(stream_write_value32(stream, &words, 8, 12).unwrap());
        });
    bench.a.launch(&late);
    bench.a.launch(&graph);
    bench.a.wait();
    assert_eq!(words.load_u32(8), Ok(11));
    assert!(is_failed(&tickets[2]) && is_failed(&tickets[3]));
    let fault = bench.a.stream.synchronize(SOON).unwrap_err();
    assert!(fault.to_string().contains("time limit"), "{fault}");
    assert!(bench.a.stream.take_fault().is_some());
    bench.a.stream.synchronize(SOON).unwrap();
    words.store_u32(0, 1000).unwrap();
    bench.a.launch(&late);
    bench.a.wait();
    assert_eq!(words.load_u32(8), Ok(12));
}

/// Words in memory of the GPU, and a count that grows with each launch.
#[test]
fn words_of_a_gpu_and_counts_are_awaited() {
    let _alone = alone();
    let Some(bench) = Bench::new("words_of_a_gpu", &config()) else {
        return;
    };
    let context = bench.a.stream.context().clone();
    let buffer = context.alloc(4096).unwrap();
    let domain = bench.from.domain().clone();
    let Some(region) = gpu_region("words_of_a_gpu", &domain, &buffer) else {
        return;
    };
    let write = |value: u64| buffer.copy_from_host(64, &value.to_ne_bytes()).unwrap();
    let read = |offset| {
        let mut bytes = [0; 8];
        buffer.copy_to_host(offset, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    buffer.copy_from_host(0, &[0; 4096]).unwrap();
    let stream = &bench.a.stream;
    // Outside of a capture.
    let narrow = Condition::Equal(3);
    write(3);
    stream_wait_value32(stream, &region, 64, narrow, SOON).unwrap();
    let wide = Condition64::Equal(3);
    let waited = stream_wait_value64(stream, &region, 64, wide, SOON).unwrap();
    stream_write_value64(stream, &region, 128, 1 << 50).unwrap();
    stream_write_value32(stream, &region, 136, 5).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!((read(128), read(136)), (1 << 50, 5));
    assert_eq!(waited.launches(), Some(1));
    // Each launch waits for 10 more.
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            tickets.push(stream_wait_count64(stream, &region, 64, (100, 10), SOON).unwrap());
        });
    for launch in 0..20 {
        write(100 + 10 * launch - 1);
        bench.a.launch(&graph);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(tickets[0].launches(), Some(launch));
        write(100 + 10 * launch);
        bench.a.wait();
        assert_eq!(tickets[0].launches(), Some(launch + 1));
    }
}

/// A receiver whose peer sends nothing: the count does not come, and what is behind its wait is not executed.
#[test]
fn a_count_that_does_not_come_in_time_ends_its_launch() {
    let _alone = alone();
    let Some(bench) = Bench::new("a_count_that_does_not_come", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let short = Some(Duration::from_millis(500));
            tickets.push(stream_wait_count64(stream, &words, 0, (1, 1), short).unwrap());
            tickets.push(stream_write_value64(stream, &words, 64, 12).unwrap());
        });
    words.store_u64(0, 1).unwrap();
    bench.a.launch(&graph);
    bench.a.wait();
    assert_eq!(words.load_u64(64), Ok(12));
    words.store_u64(64, 0).unwrap();
    // This launch waits for 2.
    bench.a.launch(&graph);
    bench.a.wait();
    let fault = bench.a.stream.synchronize(SOON).unwrap_err();
    assert!(fault.to_string().contains("time limit"), "{fault}");
    assert_eq!(words.load_u64(64), Ok(0));
    assert!(tickets.iter().all(is_failed), "{tickets:?}");
    assert!(tickets.iter().all(|ticket| ticket.launches() == Some(1)));
    assert!(bench.a.stream.take_fault().is_some());
    bench.a.wait();
}

/// A wait that the GPU executes ends with an abort of the stream, as a fault: what is behind it is not executed.
#[test]
fn an_abort_ends_a_wait_for_a_word() {
    let _alone = alone();
    let Some(bench) = Bench::new("an_abort_ends_a_wait", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let mut tickets = Vec::new();
    let record = |stream: &CudaStream| {
        let condition = Condition64::Equal(1);
        tickets.push(stream_wait_value64(stream, &words, 0, condition, None).unwrap());
        tickets.push(stream_write_value64(stream, &words, 8, 7).unwrap());
    };
    let graph = bench.a.capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, record);
    let stream = &bench.a.stream;
    let short = Some(Duration::from_millis(5));
    for round in 0..3 {
        words.fill(0, 16, 0).unwrap();
        bench.a.launch(&graph);
        // An abort before the kernel begins has no effect on it.
        let ended = loop {
            match stream.synchronize(short) {
                Err(Error::Timeout { .. }) => stream.abort(),
                ended => break ended,
            }
        };
        let fault = ended.unwrap_err().to_string();
        assert!(fault.contains("aborted"), "{fault}");
        assert!(is_failed(&tickets[0]) || round > 0);
        assert_eq!(words.load_u32(8), Ok(0));
        assert!(stream.take_fault().is_some());
        bench.a.wait();
        words.store_u32(0, 1).unwrap();
        bench.a.launch(&graph);
        stream.synchronize(SOON).unwrap();
        assert_eq!(words.load_u32(8), Ok(7));
    }
}
