//! Memory: what can be freed, registered, looked up, copied, filled.

mod rig;

use std::alloc::{Layout, alloc_zeroed};
use std::ffi::c_void;
use std::ptr::null_mut;

use cu::CUpointer_attribute as P;
use rig::*;

/// Whole pages of the program's own, which stay until the process ends.
fn pages(count: usize) -> *mut c_void {
    let layout = Layout::from_size_align(4096 * count, 4096).unwrap();
    // SAFETY: not of size 0.
    unsafe { alloc_zeroed(layout) }.cast()
}

fn register(pointer: *mut c_void, len: usize, flags: u32) -> CUresult {
    call!(cuMemHostRegister_v2(pointer, len, flags))
}

fn long(attribute: P, pointer: u64) -> Result<u64, CUresult> {
    let mut value = 0u64;
    match call!(cuPointerGetAttribute(
        (&raw mut value).cast(),
        attribute,
        pointer
    )) {
        CUDA_SUCCESS => Ok(value),
        error => Err(error),
    }
}

#[test]
fn memory_is_freed_once_and_as_it_was_given() {
    let gpu = Gpu::new();
    let pointer = gpu.alloc(100);
    assert_eq!(call!(cuMemFree_v2(pointer + 1)), CUDA_ERROR_INVALID_VALUE);
    good!(cuMemFree_v2(pointer));
    assert_eq!(call!(cuMemFree_v2(pointer)), CUDA_ERROR_INVALID_VALUE);
    let words = gpu.words();
    assert_eq!(call!(cuMemFree_v2(words.at(0))), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(call!(cuMemFreeHost(pages(1))), CUDA_ERROR_INVALID_VALUE);
    good!(cuMemFreeHost(words.0 as *mut c_void));
    assert_eq!(
        call!(cuMemFreeHost(words.0 as *mut c_void)),
        CUDA_ERROR_INVALID_VALUE
    );
    let mut none = 0;
    assert_eq!(call!(cuMemAlloc_v2(&mut none, 0)), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(
        call!(cuMemAlloc_v2(null_mut(), 64)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuMemAlloc_v2(&mut none, 1 << 40)),
        CUDA_ERROR_OUT_OF_MEMORY
    );
    let (mut free, mut total) = (0, 0);
    good!(cuMemGetInfo_v2(&mut free, &mut total));
    assert!(free <= total && total == 4 << 30);
}

#[test]
fn freeing_waits_for_the_work_of_the_context() {
    let gpu = Gpu::new();
    let (stream, words, pointer) = (gpu.stream(), gpu.words(), gpu.alloc(64));
    gpu.block(stream, words, 0);
    good!(cuMemsetD32Async(pointer, 5, 16, stream));
    let context = gpu.context as usize;
    let freeing = std::thread::spawn(move || {
        good!(cuCtxSetCurrent(context as cu::CUcontext); cuMemFree_v2(pointer));
    });
    a_while();
    assert!(!freeing.is_finished());
    words.set(0, 1);
    freeing.join().unwrap();
    good!(cuCtxSynchronize());
}

#[test]
fn free_behind_a_waiting_stream_blocks_other_driver_calls() {
    let gpu = Gpu::new();
    let (stream, words, pointer) = (gpu.stream(), gpu.words(), gpu.alloc(64));
    gpu.block(stream, words, 0);
    let context = gpu.context as usize;
    let in_context = |work: fn(u64), pointer| {
        std::thread::spawn(move || {
            good!(cuCtxSetCurrent(context as cu::CUcontext));
            work(pointer);
        })
    };
    let kept = gpu.alloc(64);
    let freeing = in_context(
        |pointer| {
            good!(cuMemFree_v2(pointer));
        },
        pointer,
    );
    a_while();
    let copying = in_context(
        |pointer| {
            let word = 5_u32;
            good!(cuMemcpyHtoD_v2(pointer, (&raw const word).cast(), 4));
        },
        kept,
    );
    a_while();
    // A query needs no lock.
    assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
    assert!(!freeing.is_finished() && !copying.is_finished());
    words.set(0, 1);
    freeing.join().unwrap();
    copying.join().unwrap();
    good!(cuCtxSynchronize());
}

#[test]
fn registering() {
    let gpu = Gpu::new();
    let memory = pages(4);
    let middle = memory.wrapping_byte_add(4096);
    assert_eq!(register(memory, 0, 0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(register(null_mut(), 4096, 0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(register(memory, 4096, 0x10), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(
        register(8192 as *mut c_void, 4096, 0),
        CUDA_ERROR_INVALID_VALUE,
        "nothing is mapped there"
    );
    assert_eq!(
        register(gpu.alloc(4096) as *mut c_void, 4096, 0),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        register(memory, 4096, 8),
        CUDA_ERROR_NOT_SUPPORTED,
        "READ_ONLY"
    );
    assert_eq!(register(memory, 8192, 3), CUDA_SUCCESS);
    let again = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    assert_eq!(register(memory, 8192, 3), again);
    assert_eq!(register(middle, 8192, 3), again);
    assert_eq!(register(middle.wrapping_byte_add(64), 8, 3), again);
    let mut device = 0;
    good!(cuMemHostGetDevicePointer_v2(&mut device, middle, 0));
    assert_eq!(device, middle as u64);
    assert_eq!(
        call!(cuMemHostGetDevicePointer_v2(
            &mut device,
            middle.wrapping_byte_add(4096),
            0
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    let not = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    assert_eq!(
        call!(cuMemHostUnregister(middle)),
        CUDA_ERROR_INVALID_VALUE,
        "within, not the start"
    );
    // A copy is of memory that is page-locked as a whole, or not at all.
    let device_memory = gpu.alloc(8192);
    let stream = gpu.stream();
    assert_eq!(
        call!(cuMemcpyHtoD_v2(device_memory, middle, 8192)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuMemcpyDtoHAsync_v2(
            middle.wrapping_byte_add(4096).wrapping_byte_sub(8),
            device_memory,
            16,
            stream
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    good!(cuMemcpyHtoD_v2(device_memory, memory, 8192));
    good!(cuMemHostUnregister(memory));
    assert_eq!(call!(cuMemHostUnregister(memory)), not);
    let words = gpu.words();
    let allocated = words.0 as *mut c_void;
    assert_eq!(
        call!(cuMemHostUnregister(allocated)),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(register(allocated, 64, 3), CUDA_ERROR_INVALID_VALUE);
    let mut flags = 9;
    good!(cuMemHostGetFlags(&mut flags, allocated));
    assert_eq!(flags, 2);
    // Half of a page is locked with all of it.
    assert_eq!(register(memory, 64, 0), CUDA_SUCCESS);
    assert_eq!(register(memory.wrapping_byte_add(128), 64, 0), again);
    assert_eq!(
        call!(cuMemHostGetDevicePointer_v2(&mut device, memory, 0)),
        CUDA_ERROR_INVALID_VALUE,
        "not registered with DEVICEMAP"
    );
    assert_eq!(
        register(middle, 4096, 2 | 4),
        CUDA_ERROR_NOT_PERMITTED,
        "IOMEMORY"
    );
}

#[test]
fn registers_of_a_card_are_io_memory_and_nothing_else_is() {
    let test = "registers_of_a_card_are_io_memory_and_nothing_else_is";
    let registers = || mapped_file(c"uverbs0", 8192);
    if is_child(test, &[("_HAS", "iomemory")]) {
        let _gpu = Gpu::new();
        for memory in [pages(1), mapped_file(c"anything", 8192)] {
            assert_eq!(register(memory, 4096, 2 | 4), CUDA_ERROR_INVALID_VALUE);
            assert_eq!(register(memory, 4096, 2), CUDA_SUCCESS);
        }
        let uar = registers();
        assert_eq!(register(uar, 4096, 2), CUDA_ERROR_INVALID_VALUE);
        // The last page of the span is ordinary memory.
        assert_eq!(register(uar, 3 * 4096, 2 | 4), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(register(uar, 8192, 2 | 4), CUDA_SUCCESS);
    }
}

#[test]
fn registers_of_a_card_are_for_administrators() {
    let test = "registers_of_a_card_are_for_administrators";
    if is_child(test, &[]) {
        let _gpu = Gpu::new();
        let uar = mapped_file(c"uverbs0", 4096);
        assert_eq!(register(uar, 4096, 2 | 4), CUDA_ERROR_NOT_PERMITTED);
        assert_eq!(register(uar, 4096, 2), CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn registered_memory_may_have_another_device_address() {
    let test = "registered_memory_may_have_another_device_address";
    if is_child(test, &[("_LACKS", "samepointer")]) {
        let gpu = Gpu::new();
        let memory = pages(1);
        assert_eq!(register(memory, 4096, 2), CUDA_SUCCESS);
        let mut device = 0;
        good!(cuMemHostGetDevicePointer_v2(
            &mut device,
            memory.wrapping_byte_add(8),
            0
        ));
        assert_ne!(device, memory as u64 + 8);
        let stream = gpu.stream();
        assert_eq!(
            call!(cuStreamWriteValue32_v2(stream, memory as u64 + 8, 5, 0)),
            CUDA_ERROR_INVALID_VALUE
        );
        good!(cuStreamWriteValue32_v2(stream, device, 5, 0); cuStreamSynchronize(stream));
        // SAFETY: memory of this test.
        assert_eq!(unsafe { memory.cast::<u32>().add(2).read_volatile() }, 5);
        assert_eq!(
            long(P::CU_POINTER_ATTRIBUTE_HOST_POINTER, device),
            Ok(memory as u64 + 8)
        );
    }
}

#[test]
fn pointer_attributes() {
    let gpu = Gpu::new();
    let device = gpu.alloc(8192);
    let host = gpu.words();
    let own = pages(1);
    assert_eq!(register(own, 4096, 2), CUDA_SUCCESS);
    let of = |attribute, pointer| long(attribute, pointer);
    assert_eq!(of(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 5), Ok(2));
    assert_eq!(of(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host.at(1)), Ok(1));
    assert_eq!(of(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, own as u64), Ok(1));
    for pointer in [device, host.at(0), own as u64] {
        assert_eq!(
            of(P::CU_POINTER_ATTRIBUTE_CONTEXT, pointer),
            Ok(gpu.context as u64)
        );
        assert_eq!(
            of(P::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer + 8),
            Ok(pointer + 8)
        );
        assert_eq!(
            of(P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer + 8),
            Ok(pointer)
        );
        assert_eq!(of(P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer), Ok(0));
    }
    assert_eq!(
        of(P::CU_POINTER_ATTRIBUTE_HOST_POINTER, device),
        Err(CUDA_ERROR_INVALID_VALUE)
    );
    assert_eq!(
        of(P::CU_POINTER_ATTRIBUTE_HOST_POINTER, host.at(3)),
        Ok(host.at(3))
    );
    assert_eq!(of(P::CU_POINTER_ATTRIBUTE_RANGE_SIZE, device + 1), Ok(8192));
    let second = gpu.alloc(8);
    assert_ne!(
        of(P::CU_POINTER_ATTRIBUTE_BUFFER_ID, device),
        of(P::CU_POINTER_ATTRIBUTE_BUFFER_ID, second)
    );
    let unknown = pages(1) as u64;
    assert_eq!(
        of(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, unknown),
        Err(CUDA_ERROR_INVALID_VALUE)
    );
    // In the plural it is no error.
    let (mut kind, mut start) = (9u32, 9u64);
    let mut attributes = [
        P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    ];
    let mut data: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut start).cast()];
    good!(cuPointerGetAttributes(
        2,
        attributes.as_mut_ptr(),
        data.as_mut_ptr(),
        unknown
    ));
    // SAFETY: variables of this test, which the call wrote behind the compiler's back.
    let seen = unsafe {
        (
            (&raw const kind).read_volatile(),
            (&raw const start).read_volatile(),
        )
    };
    assert_eq!(seen, (0, 0));
    let (mut base, mut size) = (0, 0);
    good!(cuMemGetAddressRange_v2(&mut base, &mut size, device + 8191));
    assert_eq!((base, size), (device, 8192));
    assert_eq!(
        call!(cuMemGetAddressRange_v2(&mut base, &mut size, device + 8192)),
        CUDA_ERROR_NOT_FOUND
    );
    assert_eq!(
        call!(cuMemGetAddressRange_v2(&mut base, &mut size, unknown)),
        CUDA_ERROR_NOT_FOUND
    );
    let on = 1u32;
    good!(cuPointerSetAttribute(
        (&raw const on).cast(),
        P::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
        device
    ));
    assert_eq!(of(P::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, device), Ok(1));
    assert_eq!(
        call!(cuPointerSetAttribute(
            (&raw const on).cast(),
            P::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            host.at(0)
        )),
        CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn copies_of_every_form() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let (one, two) = (gpu.alloc(4096), gpu.alloc(4096));
    let from: Vec<u8> = (0..4096).map(|index| (index * 7 % 251) as u8).collect();
    let source = from.as_ptr().cast::<c_void>();
    let check = |pointer| {
        let mut to = vec![0u8; 4096];
        good!(cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), pointer, 4096));
        assert!(to == from);
        // The next copy may be in a stream that knows nothing of the default one.
        good!(cuMemsetD8_v2(pointer, 0, 4096); cuCtxSynchronize());
    };
    good!(cuMemcpyHtoD_v2(one, source, 4096); cuMemcpyDtoD_v2(two, one, 4096));
    check(two);
    good!(cuMemcpy(two, one, 4096));
    check(two);
    check(one);
    // From pageable memory it may be on its way still.
    good!(cuMemcpy(one, source as u64, 4096); cuCtxSynchronize());
    good!(cuMemcpyDtoDAsync_v2(two, one, 4096, stream); cuStreamSynchronize(stream));
    check(two);
    good!(cuMemcpyHtoDAsync_v2(two, source, 4096, stream); cuMemcpyAsync(one, two, 4096, stream));
    good!(cuStreamSynchronize(stream));
    check(one);
    let mut to = vec![0u8; 100];
    // To pageable memory it is done when the call returns.
    good!(cuMemcpyDtoHAsync_v2(
        to.as_mut_ptr().cast(),
        two + 50,
        100,
        stream
    ));
    assert!(to == from[50..150]);
    good!(cuMemcpyHtoD_v2(one, source, 0));
}

#[test]
fn copies_are_checked_at_the_call() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let device = gpu.alloc(100);
    let freed = gpu.alloc(100);
    good!(cuMemFree_v2(freed));
    let mut own = [0u8; 256];
    let host: *mut c_void = own.as_mut_ptr().cast();
    for result in [
        call!(cuMemcpyHtoD_v2(device, host, 101)),
        call!(cuMemcpyHtoD_v2(device + 100, host, 1)),
        call!(cuMemcpyHtoD_v2(host as u64, host, 1)),
        call!(cuMemcpyHtoD_v2(device, null_mut(), 1)),
        call!(cuMemcpyHtoD_v2(device, freed as *const c_void, 1)),
        call!(cuMemcpyDtoH_v2(host, freed, 1)),
        call!(cuMemcpyDtoHAsync_v2(host, device + 1, 100, stream)),
        call!(cuMemcpyDtoD_v2(device, host as u64, 1)),
        call!(cuMemcpy(freed, device, 1)),
        call!(cuMemcpyAsync(device, freed, 1, stream)),
        call!(cuMemsetD8_v2(device, 1, 101)),
        call!(cuMemsetD32_v2(device + 2, 1, 1)),
        call!(cuMemsetD16_v2(device + 1, 1, 1)),
        call!(cuMemsetD8Async(freed, 1, 1, stream)),
        call!(cuMemsetD8_v2(host as u64, 1, 1)),
    ] {
        assert_eq!(result, CUDA_ERROR_INVALID_VALUE);
    }
    good!(cuCtxSynchronize());
}

#[test]
fn fills_of_every_width() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let device = gpu.alloc(12);
    let mut to = [0u8; 12];
    good!(cuMemsetD8_v2(device, 0x11, 12); cuMemsetD16_v2(device + 2, 0x2233, 1));
    good!(cuCtxSynchronize(); cuMemsetD32Async(device + 4, 0x4455_6677, 2, stream); cuStreamSynchronize(stream));
    good!(cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), device, 12));
    assert_eq!(
        to,
        [
            0x11, 0x11, 0x33, 0x22, 0x77, 0x66, 0x55, 0x44, 0x77, 0x66, 0x55, 0x44
        ]
    );
}

#[test]
fn pageable_memory_is_read_before_the_call_returns_and_written_later() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let device = gpu.alloc(8);
    let mut from = [1u8; 8];
    gpu.block(stream, words, 0);
    good!(cuMemcpyHtoDAsync_v2(
        device,
        from.as_ptr().cast(),
        8,
        stream
    ));
    from.fill(2);
    std::hint::black_box(&mut from);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    let mut to = [0u8; 8];
    good!(cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), device, 8));
    assert_eq!(to, [1; 8]);
    // Page-locked memory is read when its turn comes.
    words.set(0, 0);
    gpu.block(stream, words, 0);
    words.set(2, 3);
    good!(cuMemcpyHtoDAsync_v2(
        device,
        words.at(2) as *const c_void,
        4,
        stream
    ));
    words.set(2, 4);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream); cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), device, 4));
    assert_eq!(to[..4], [4, 0, 0, 0]);
}

#[test]
fn a_copy_from_pageable_memory_has_read_it_when_the_call_returns() {
    let test = "a_copy_from_pageable_memory_has_read_it_when_the_call_returns";
    if is_child(test, &[("_FAULTS", "task:delay=50000")]) {
        let gpu = Gpu::new();
        let device = gpu.alloc(8);
        let mut from = [1u8; 8];
        good!(cuMemcpyHtoD_v2(device, from.as_ptr().cast(), 8));
        from.fill(2);
        std::hint::black_box(&mut from);
        let mut to = [0u8; 8];
        good!(cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), device, 8));
        assert_eq!(to, [1; 8]);
    }
}

#[test]
fn handles_of_address_ranges() {
    let mut file = -1i32;
    let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let settings = [("_HAS", "dmabuf")];
    if std::env::var_os("DOORBELL_STANDIN_CHILD").is_none() {
        let gpu = Gpu::new();
        let pointer = gpu.alloc(4096);
        assert_eq!(
            call!(cuMemGetHandleForAddressRange(
                (&raw mut file).cast(),
                pointer,
                4096,
                kind,
                0
            )),
            CUDA_ERROR_NOT_SUPPORTED
        );
    }
    if is_child("handles_of_address_ranges", &settings) {
        let gpu = Gpu::new();
        let pointer = gpu.alloc(8192);
        for (address, len) in [(pointer + 8, 4096), (pointer, 100), (pointer, 0)] {
            assert_eq!(
                call!(cuMemGetHandleForAddressRange(
                    (&raw mut file).cast(),
                    address,
                    len,
                    kind,
                    0
                )),
                CUDA_ERROR_INVALID_VALUE
            );
        }
        good!(cuMemGetHandleForAddressRange(
            (&raw mut file).cast(),
            pointer,
            8192,
            kind,
            0
        ));
        good!(cuMemsetD8_v2(pointer, 0x5a, 8192); cuCtxSynchronize());
        use std::io::Read;
        // SAFETY: a new descriptor, which is the caller's.
        let mut file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(file) };
        let mut seen = Vec::new();
        file.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, [0x5a; 8192]);
    }
}
