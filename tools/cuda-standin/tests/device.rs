//! Initialisation, devices, and what they say that they can do.

mod rig;

use std::ffi::{CStr, c_char};
use std::os::unix::process::ExitStatusExt;
use std::ptr::null_mut;

use cu::CUdevice_attribute as A;
use rig::*;

fn attribute(attribute: A) -> i32 {
    let mut value = -1;
    good!(cuDeviceGetAttribute(&mut value, attribute, 0));
    value
}

#[test]
fn no_device_without_the_environment_variable() {
    if is_child("no_device_without_the_environment_variable", &[("", "0")]) {
        load();
        assert_eq!(call!(cuInit(0)), CUDA_ERROR_NO_DEVICE);
        let mut count = -1;
        assert_eq!(
            call!(cuDeviceGetCount(&mut count)),
            CUDA_ERROR_NOT_INITIALIZED
        );
    }
}

#[test]
fn calls_before_init_fail() {
    if is_child("calls_before_init_fail", &[]) {
        load();
        let (mut count, mut version, mut context) = (-1, -1, null_mut());
        assert_eq!(
            call!(cuDeviceGetCount(&mut count)),
            CUDA_ERROR_NOT_INITIALIZED
        );
        assert_eq!(
            call!(cuCtxGetCurrent(&mut context)),
            CUDA_ERROR_NOT_INITIALIZED
        );
        good!(cuDriverGetVersion(&mut version));
        assert_eq!(version, 13000);
        assert_eq!(call!(cuInit(1)), CUDA_ERROR_INVALID_VALUE);
        good!(cuInit(0); cuDeviceGetCount(&mut count));
        assert_eq!(count, 1);
    }
}

#[test]
fn device_name_and_symbol_identify_the_standin() {
    let _gpu = Gpu::new();
    let mut name = [0 as c_char; 64];
    good!(cuDeviceGetName(name.as_mut_ptr(), 64, 0));
    // SAFETY: the call ended it with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    assert_eq!(name, c"doorbell's CUDA stand-in, no GPU");
    // SAFETY: a variable of type `const char *`, which points to a constant.
    let text = unsafe {
        let symbol = cu::culib()
            .get::<*const *const c_char>(b"doorbell_cuda_standin")
            .unwrap();
        CStr::from_ptr(**symbol)
    };
    assert!(text.to_str().unwrap().contains("stand-in"), "{text:?}");
    let mut short = [1 as c_char; 4];
    good!(cuDeviceGetName(short.as_mut_ptr(), 4, 0));
    assert_eq!(short.map(|byte| byte as u8), *b"doo\0");
}

#[test]
fn attributes() {
    let _gpu = Gpu::new();
    assert_eq!(
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        9
    );
    assert_eq!(
        attribute(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
        1
    );
    assert_eq!(
        attribute(A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR),
        1
    );
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES), 1);
    assert_eq!(
        attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
        3
    );
    assert_eq!(
        attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        200
    );
    assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED), 0);
    let mut value = 7;
    assert_eq!(
        call!(cuDeviceGetAttribute(
            &mut value,
            A::CU_DEVICE_ATTRIBUTE_MAX,
            0
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call!(cuDeviceGetAttribute(
            &mut value,
            A::CU_DEVICE_ATTRIBUTE_WARP_SIZE,
            1
        )),
        CUDA_ERROR_INVALID_DEVICE
    );
    assert_eq!(
        call!(cuDeviceGetAttribute(
            null_mut(),
            A::CU_DEVICE_ATTRIBUTE_WARP_SIZE,
            0
        )),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(value, 7);
}

#[test]
fn capabilities_can_be_taken_away() {
    let settings = [("_LACKS", "nor,memops64,flush,gdr")];
    if is_child("capabilities_can_be_taken_away", &settings) {
        let _gpu = Gpu::new();
        for of in [
            A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
            A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        ] {
            assert_eq!(attribute(of), 0, "{of:?}");
        }
    }
}

#[test]
fn several_devices_are_distinct() {
    if is_child("several_devices_are_distinct", &[("_DEVICES", "2")]) {
        let _gpu = Gpu::new();
        let mut count = 0;
        good!(cuDeviceGetCount(&mut count));
        assert_eq!(count, 2);
        let mut ids = [[0 as c_char; 32]; 2];
        let mut uuids = [cu::CUuuid { bytes: [0; 16] }; 2];
        for device in 0..2 {
            good!(cuDeviceGetPCIBusId(ids[device].as_mut_ptr(), 32, device as i32);
                cuDeviceGetUuid_v2(&mut uuids[device], device as i32));
            let mut found = -1;
            good!(cuDeviceGetByPCIBusId(&mut found, ids[device].as_ptr()));
            assert_eq!(found, device as i32);
        }
        assert!(ids[0] != ids[1] && uuids[0] != uuids[1]);
        let mut found = -1;
        assert_eq!(call!(cuDeviceGet(&mut found, 2)), CUDA_ERROR_INVALID_DEVICE);
    }
}

#[test]
fn results_have_names() {
    load();
    let mut name = std::ptr::null();
    for (result, expected) in [
        (CUDA_SUCCESS, c"CUDA_SUCCESS"),
        (
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        ),
        (CUDA_ERROR_UNKNOWN, c"CUDA_ERROR_UNKNOWN"),
    ] {
        good!(cuGetErrorName(result, &mut name));
        // SAFETY: a string that lives as long as the process.
        assert_eq!(unsafe { CStr::from_ptr(name) }, expected);
        good!(cuGetErrorString(result, &mut name));
        assert!(!name.is_null());
    }
}

#[test]
fn the_cpu_cannot_touch_device_memory() {
    let test = "the_cpu_cannot_touch_device_memory";
    if let Some(output) = in_child(test, &[]) {
        assert_eq!(output.status.signal(), Some(libc_sigsegv()), "{output:?}");
        return;
    }
    let gpu = Gpu::new();
    let pointer = gpu.alloc(4096);
    // SAFETY: none; that is the test.
    let value = unsafe { (pointer as *const u32).read_volatile() };
    println!("read {value}");
}

fn libc_sigsegv() -> i32 {
    11
}
