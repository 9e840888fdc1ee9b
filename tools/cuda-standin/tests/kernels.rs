//! Modules, functions, launches.

mod rig;

use std::ffi::c_void;
use std::ptr::null_mut;

use rig::*;

struct Mark {
    address: u64,
    value: u32,
}

impl Mark {
    fn launch(
        &self,
        function: cu::CUfunction,
        grid: u32,
        block: u32,
        stream: cu::CUstream,
    ) -> CUresult {
        let mut arguments: [*mut c_void; 2] = [
            (&raw const self.address).cast_mut().cast(),
            (&raw const self.value).cast_mut().cast(),
        ];
        call!(cuLaunchKernel(
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            0,
            stream,
            arguments.as_mut_ptr(),
            null_mut()
        ))
    }
}

#[test]
fn every_thread_of_a_grid_runs_in_stream_order() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let function = gpu.function(c"doorbell_standin_mark");
    gpu.block(stream, words, 0);
    let mut mark = Mark {
        address: words.at(8),
        value: 3,
    };
    assert_eq!(mark.launch(function, 5, 4, stream), CUDA_SUCCESS);
    a_while();
    assert_eq!(words.get(8), 0);
    // Arguments are those of the call.
    mark.value = 4;
    std::hint::black_box(&mut mark);
    words.set(0, 1);
    good!(cuStreamSynchronize(stream));
    assert!((8..28).all(|index| words.get(index) == 3));
    assert_eq!((words.get(7), words.get(28)), (0, 0));
}

#[test]
fn wrong_launches_are_refused() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let function = gpu.function(c"doorbell_standin_mark");
    let mark = Mark {
        address: words.at(1),
        value: 3,
    };
    assert_eq!(
        mark.launch(function, 0, 1, stream),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        mark.launch(function, 1, 0, stream),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        mark.launch(function, 1, 1025, stream),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        mark.launch(16 as cu::CUfunction, 1, 1, stream),
        CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        mark.launch(function, 1, 1, 16 as cu::CUstream),
        CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        call!(cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            null_mut(),
            null_mut()
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    good!(cuStreamSynchronize(stream));
    assert_eq!(words.get(1), 0);
}

#[test]
fn modules_and_their_functions() {
    let gpu = Gpu::new();
    let (mut module, mut function) = (null_mut(), null_mut());
    assert_eq!(
        call!(cuModuleLoadData(&mut module, null_mut())),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuModuleLoad(&mut module, c"/no/such/file".as_ptr())),
        CUDA_ERROR_FILE_NOT_FOUND
    );
    good!(cuModuleLoad(&mut module, c"/proc/self/exe".as_ptr()));
    let (mut address, mut len) = (0, 0);
    assert_eq!(
        call!(cuModuleGetGlobal_v2(
            &mut address,
            &mut len,
            module,
            c"variable".as_ptr()
        )),
        CUDA_ERROR_NOT_FOUND
    );
    good!(cuModuleLoadFatBinary(&mut module, c"image".as_ptr().cast()));
    assert_eq!(
        call!(cuModuleGetFunction(
            &mut function,
            module,
            c"no_such_kernel".as_ptr()
        )),
        CUDA_ERROR_NOT_FOUND
    );
    good!(cuModuleGetFunction(
        &mut function,
        module,
        c"doorbell_spin".as_ptr()
    ));
    let mut value = 0;
    good!(cuFuncGetAttribute(
        &mut value,
        cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION,
        function
    ));
    assert_eq!(value, 90);
    good!(cuModuleUnload(module));
    assert_eq!(call!(cuModuleUnload(module)), CUDA_ERROR_INVALID_HANDLE);
    let ns = 0u64;
    let mut arguments = [(&raw const ns).cast_mut().cast()];
    assert_eq!(
        call!(cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            gpu.stream(),
            arguments.as_mut_ptr(),
            null_mut()
        )),
        CUDA_ERROR_INVALID_HANDLE
    );
}

#[test]
fn a_kernel_that_is_not_aligned_breaks_its_context() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let mark = Mark {
        address: words.at(1) + 1,
        value: 3,
    };
    let function = gpu.function(c"doorbell_standin_mark");
    assert_eq!(mark.launch(function, 1, 1, stream), CUDA_SUCCESS);
    assert_eq!(call!(cuCtxSynchronize()), CUDA_ERROR_MISALIGNED_ADDRESS);
    assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_MISALIGNED_ADDRESS);
}

#[test]
fn a_kernel_in_c_waits_and_ends_with_its_context() {
    let gpu = Gpu::new();
    let (stream, words) = (gpu.stream(), gpu.words());
    let function = gpu.function(c"doorbell_standin_wait");
    let wait = Mark {
        address: words.at(1),
        value: 3,
    };
    assert_eq!(wait.launch(function, 1, 1, stream), CUDA_SUCCESS);
    good!(cuStreamWriteValue32_v2(stream, words.at(2), 1, 0));
    a_while();
    assert_eq!(words.get(2), 0);
    words.set(1, 3);
    good!(cuStreamSynchronize(stream));
    assert_eq!(words.get(2), 1);
    words.set(1, 0);
    assert_eq!(wait.launch(function, 1, 1, stream), CUDA_SUCCESS);
    a_while();
    // Nothing satisfies it.
    good!(cuCtxDestroy_v2(gpu.context));
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let nowhere = Mark {
        address: 64,
        value: 3,
    };
    let function = gpu.function(c"doorbell_standin_wait");
    assert_eq!(nowhere.launch(function, 1, 1, stream), CUDA_SUCCESS);
    assert_eq!(
        call!(cuStreamSynchronize(stream)),
        CUDA_ERROR_ILLEGAL_ADDRESS
    );
}

/// `struct dbl_reduce` of cuda/reduce.h.
#[repr(C)]
struct Reduce {
    into: u64,
    first: u64,
    second: u64,
    len_bytes: u64,
    data: u32,
    op: u32,
    count: u32,
    reserved: u32,
}

/// Memory whose pages were registered one by one is one memory for a kernel, also for elements of which a part is in either page.
#[test]
fn numbers_over_the_end_of_a_page_are_reduced() {
    const PAGE: usize = 4096;
    const F32: u32 = 2;
    const SUM: u32 = 0;
    const COPY: u32 = 4;
    let gpu = Gpu::new();
    let layout = std::alloc::Layout::from_size_align(2 * PAGE, PAGE).unwrap();
    // SAFETY: not of size 0. It stays until the process ends.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    for page in [0, PAGE] {
        // SAFETY: within the memory.
        let at = unsafe { memory.add(page) }.cast();
        good!(cuMemHostRegister_v2(at, PAGE, 2));
    }
    // SAFETY: as long as it is, and used by the kernel only while nothing else is.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory, 2 * PAGE) };
    let address = memory as u64;
    // Numbers that begin at any byte, as many as fill three pieces of 16 bytes and a part of one.
    for shift in 0..16 {
        for (op, expected) in [(SUM, 3.0_f32), (COPY, 1.0)] {
            let (first, second, into) = (PAGE - 20 + shift, 100 + shift, PAGE - 1200 - shift);
            for at in (0..52).step_by(4) {
                bytes[first + at..][..4].copy_from_slice(&1.0_f32.to_le_bytes());
                bytes[second + at..][..4].copy_from_slice(&2.0_f32.to_le_bytes());
            }
            bytes[into..into + 56].fill(0);
            let has_second = op == SUM;
            let reduce = Reduce {
                into: address + into as u64,
                first: address + first as u64,
                second: if has_second {
                    address + second as u64
                } else {
                    0
                },
                len_bytes: 52,
                data: F32,
                op,
                count: 1,
                reserved: 0,
            };
            let stream = gpu.stream();
            let function = gpu.function(c"doorbell_reduce");
            let mut arguments = [(&raw const reduce).cast_mut().cast()];
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
            good!(cuStreamSynchronize(stream));
            for at in (0..52).step_by(4) {
                let found = f32::from_le_bytes(bytes[into + at..][..4].try_into().unwrap());
                assert_eq!(found, expected, "operation {op}, shift {shift}, byte {at}");
            }
            assert_eq!(bytes[into + 52..into + 56], [0; 4]);
        }
    }
}
