//! Memory operations: conditions, checks at the call, the limit of a batch, what a device may lack.

mod rig;

use std::ptr::null_mut;

use cu::CUstreamBatchMemOpParams as Params;
use cu::CUstreamBatchMemOpType as Op;
use rig::*;

const GEQ: u32 = 0;
const EQ: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;
const FLUSH: u32 = 1 << 30;

fn write32(address: u64, value: u32) -> Params {
    // SAFETY: all zeros are a value of it but for the operation, which is written next.
    let mut params = Params { pad: [0; 6] };
    params.writeValue.operation = Op::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    params.writeValue.address = address;
    params.writeValue.__bindgen_anon_1.value = value;
    params
}

fn write64(address: u64, value: u64) -> Params {
    let mut params = write32(address, 0);
    params.writeValue.operation = Op::CU_STREAM_MEM_OP_WRITE_VALUE_64;
    params.writeValue.__bindgen_anon_1.value64 = value;
    params
}

fn wait32(address: u64, value: u32, flags: u32) -> Params {
    let mut params = Params { pad: [0; 6] };
    params.waitValue.operation = Op::CU_STREAM_MEM_OP_WAIT_VALUE_32;
    params.waitValue.address = address;
    params.waitValue.__bindgen_anon_1.value = value;
    params.waitValue.flags = flags;
    params
}

fn batch(stream: cu::CUstream, params: &mut [Params]) -> CUresult {
    call!(cuStreamBatchMemOp_v2(
        stream,
        params.len() as u32,
        params.as_mut_ptr(),
        0
    ))
}

/// Whether a wait for this is over with each of the values, one after the other.
#[test]
fn conditions() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    // Condition, operand, a value that does not satisfy it, one that does.
    for (flags, value, before, after) in [
        (GEQ, 5, 4, 5),
        (GEQ, 5, 0x8000_0005, 0x8000_0004),
        (GEQ, 0xffff_fffe, 0xffff_fffd, 3),
        (GEQ | FLUSH, 5, 4, 6),
        (EQ, 5, 6, 5),
        (AND, 1 << 24, !(1 << 24), 1 << 24),
        (AND, 3, 4, 2),
        (NOR, !(1 << 24), 0xf100_0000, 0),
        (NOR, 0, u32::MAX, u32::MAX - 1),
    ] {
        words.set(0, before);
        good!(cuStreamWaitValue32_v2(stream, words.at(0), value, flags));
        a_while();
        assert_eq!(
            call!(cuStreamQuery(stream)),
            CUDA_ERROR_NOT_READY,
            "{flags} {value:#x} {before:#x}"
        );
        words.set(0, after);
        assert!(
            eventually(|| call!(cuStreamQuery(stream)) == CUDA_SUCCESS),
            "{flags} {value:#x} {after:#x}"
        );
    }
    use std::sync::atomic::Ordering::SeqCst;
    for (flags, value, before, after) in [
        (GEQ, 1 << 40, (1 << 40) - 1, 1 << 40),
        (GEQ, u64::MAX, u64::MAX - 1, 0),
        (EQ, 1 << 40, 0, 1 << 40),
        (AND, 1 << 40, 1 << 41, 3 << 40),
        (NOR, !(1 << 63), u64::MAX, 0),
    ] {
        words.long(2).store(before, SeqCst);
        good!(cuStreamWaitValue64_v2(stream, words.at(2), value, flags));
        a_while();
        assert_eq!(
            call!(cuStreamQuery(stream)),
            CUDA_ERROR_NOT_READY,
            "64 {flags} {value:#x}"
        );
        words.long(2).store(after, SeqCst);
        assert!(
            eventually(|| call!(cuStreamQuery(stream)) == CUDA_SUCCESS),
            "64 {flags} {value:#x}"
        );
    }
}

#[test]
fn writes_touch_no_more_than_they_are_wide() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    for index in 0..8 {
        words.set(index, 0xaaaa_aaaa);
    }
    let mut params = [
        write32(words.at(1), 0x1234_5678),
        write64(words.at(4), 0x1122_3344_5566_7788),
    ];
    assert_eq!(batch(stream, &mut params), CUDA_SUCCESS);
    good!(cuStreamSynchronize(stream));
    let seen: Vec<u32> = (0..8).map(|index| words.get(index)).collect();
    let a = 0xaaaa_aaaa;
    assert_eq!(seen, [a, 0x1234_5678, a, a, 0x5566_7788, 0x1122_3344, a, a]);
}

#[test]
fn fewer_than_256_a_call() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    for (count, expected) in [
        (0, CUDA_ERROR_INVALID_VALUE),
        (1, CUDA_SUCCESS),
        (255, CUDA_SUCCESS),
        (256, CUDA_ERROR_INVALID_VALUE),
        (1000, CUDA_ERROR_INVALID_VALUE),
    ] {
        words.set(0, 0);
        let mut params: Vec<Params> = (1..=count)
            .map(|value| write32(words.at(0), value))
            .collect();
        assert_eq!(batch(stream, &mut params), expected, "{count}");
        good!(cuStreamSynchronize(stream));
        assert_eq!(
            words.get(0),
            if expected == CUDA_SUCCESS { count } else { 0 }
        );
    }
}

#[test]
fn wrong_arguments_are_refused_at_the_call_and_nothing_is_queued() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let own = vec![0u32; 1024];
    let device = gpu.alloc(64);
    let freed = gpu.alloc(64);
    good!(cuMemFree_v2(freed));
    let wrong = [
        write32(words.at(0) + 2, 1),
        write64(words.at(1), 1),
        wait32(words.at(0) + 1, 1, GEQ),
        wait32(words.at(0), 1, 4),
        wait32(words.at(0), 1, FLUSH | 8),
        write32(0, 1),
        write32(own.as_ptr() as u64, 1),
        write32(freed, 1),
        write32(device + 64, 1),
        write32(words.at(1024), 1),
    ];
    for (index, params) in wrong.into_iter().enumerate() {
        let mut batched = [write32(words.at(0), 9), params];
        assert_eq!(
            batch(stream, &mut batched),
            CUDA_ERROR_INVALID_VALUE,
            "{index}"
        );
    }
    let mut unbarred = write32(words.at(0), 9);
    unbarred.writeValue.flags = 1;
    assert_eq!(
        batch(stream, &mut [unbarred]),
        CUDA_ERROR_INVALID_VALUE,
        "NO_MEMORY_BARRIER"
    );
    let unknown = Params {
        pad: [77, 0, 0, 0, 0, 0],
    };
    assert_eq!(batch(stream, &mut [unknown]), CUDA_ERROR_INVALID_VALUE);
    let mut one = [write32(words.at(0), 9)];
    assert_eq!(
        call!(cuStreamBatchMemOp_v2(stream, 1, one.as_mut_ptr(), 1)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuStreamBatchMemOp_v2(stream, 1, null_mut(), 0)),
        CUDA_ERROR_INVALID_VALUE
    );
    good!(cuStreamSynchronize(stream));
    assert_eq!(words.get(0), 0);
    good!(cuStreamWriteValue32_v2(stream, device + 60, 1, 0); cuStreamSynchronize(stream));
}

#[test]
fn barriers_and_flushes() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let mut flush = Params { pad: [0; 6] };
    flush.flushRemoteWrites.operation = Op::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
    let mut barrier = Params { pad: [0; 6] };
    barrier.memoryBarrier.operation = Op::CU_STREAM_MEM_OP_BARRIER;
    for (flags, expected) in [
        (0, CUDA_SUCCESS),
        (1, CUDA_SUCCESS),
        (2, CUDA_ERROR_INVALID_VALUE),
    ] {
        barrier.memoryBarrier.flags = flags;
        assert_eq!(batch(stream, &mut [flush, barrier]), expected);
    }
    flush.flushRemoteWrites.flags = 1;
    assert_eq!(batch(stream, &mut [flush]), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn the_ring_of_a_doorbell_is_in_order() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let cpu = std::thread::spawn(move || {
        let mut last = 0;
        while last < 2000 {
            let doorbell = words.long(2).load(std::sync::atomic::Ordering::Acquire);
            assert_eq!(doorbell >> 32, doorbell & 0xffff_ffff, "torn");
            last = doorbell as u32;
            assert!(words.get(0) >= last, "the doorbell before its record");
            std::thread::yield_now();
        }
    });
    for value in 1..=2000u32 {
        let mut params = [
            write32(words.at(0), value),
            write64(words.at(2), u64::from(value) << 32 | u64::from(value)),
        ];
        assert_eq!(batch(stream, &mut params), CUDA_SUCCESS);
    }
    cpu.join().unwrap();
}

#[test]
fn two_streams_and_the_cpu_take_turns() {
    let gpu = Gpu::new();
    let words = gpu.words();
    let (ping, pong) = (gpu.stream(), gpu.stream());
    for value in 1..=200 {
        assert_eq!(
            batch(
                ping,
                &mut [write32(words.at(0), value), wait32(words.at(1), value, GEQ)]
            ),
            CUDA_SUCCESS
        );
        assert_eq!(
            batch(
                pong,
                &mut [wait32(words.at(0), value, GEQ), write32(words.at(1), value)]
            ),
            CUDA_SUCCESS
        );
    }
    good!(cuStreamSynchronize(ping); cuStreamSynchronize(pong));
    assert_eq!((words.get(0), words.get(1)), (200, 200));
}

#[test]
fn missing_capabilities_are_not_supported() {
    let settings = [("_LACKS", "nor,memops64,flush")];
    if is_child("missing_capabilities_are_not_supported", &settings) {
        let gpu = Gpu::new();
        let (stream, words) = (gpu.stream(), gpu.words());
        let mut flush = Params { pad: [0; 6] };
        flush.flushRemoteWrites.operation = Op::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
        for params in [
            write64(words.at(2), 1),
            wait32(words.at(0), 1, NOR),
            wait32(words.at(0), 1, GEQ | FLUSH),
            flush,
        ] {
            assert_eq!(batch(stream, &mut [params]), CUDA_ERROR_NOT_SUPPORTED);
        }
        assert_eq!(batch(stream, &mut [write32(words.at(0), 1)]), CUDA_SUCCESS);
        good!(cuStreamSynchronize(stream));
    }
}

#[test]
fn without_memops_none_is_supported() {
    if is_child("without_memops_none_is_supported", &[("_LACKS", "memops")]) {
        let gpu = Gpu::new();
        let (stream, words) = (gpu.stream(), gpu.words());
        assert_eq!(
            batch(stream, &mut [write32(words.at(0), 1)]),
            CUDA_ERROR_NOT_SUPPORTED
        );
    }
}

#[test]
fn registered_io_memory_may_refuse_memops() {
    if is_child(
        "registered_io_memory_may_refuse_memops",
        &[("_LACKS", "iomemops"), ("_HAS", "iomemory")],
    ) {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        let page = mapped_file(c"uverbs0", 4096);
        good!(cuMemHostRegister_v2(page, 4096, 2 | 4));
        assert_eq!(
            batch(stream, &mut [write32(page as u64, 1)]),
            CUDA_ERROR_INVALID_VALUE
        );
    }
}
