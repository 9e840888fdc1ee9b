//! Memory of a GPU in transfers: registered, copied by the software NIC, and bounced. `scripts/test cuda` runs this over the stand-in for
//! the driver, whose device memory no processor reaches: code that follows such an address crashes. Without a driver its tests are WAIVED.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

mod rig;
mod waived;

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use doorbell::{
    Access, Bounce, BounceConfig, CacheConfig, Cause, Completion, Condition, Control, CudaContext,
    CudaEngine, CudaStream, Device, DeviceBuffer, DeviceCache, EndpointConfig, Error, Executor,
    QueueKind, Region, RegionKind, RegistrationReport, RemoteSlice, StateKind, Status, WcStatus,
    Work, WorkError, stream_wait_value32, stream_write_value32,
};
use rig::{Limit, Pair, Random, SOON, device, from_env};
use waived::waived;

const BOUND: Duration = Duration::from_secs(60);

/// One test at a time: faults of the stand-in apply to all threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_standin() -> bool {
    std::env::var_os("DOORBELL_CUDA_STANDIN").is_some()
}

/// The context of the first device; `None`, and the test is WAIVED, without a driver.
fn context(test: &str) -> Option<CudaContext> {
    match CudaContext::primary(0) {
        Ok(context) => Some(context),
        Err(error) if is_standin() => panic!("{error}"),
        Err(error) => {
            waived(test, &format!("{error}"));
            None
        }
    }
}

/// The software NIC, which accesses GPU memory by copies; `None`, and the test is WAIVED, if another device is tested.
fn copying(test: &str) -> Option<Device> {
    let device = device();
    if device.name() == "softcx" {
        return Some(device);
    }
    waived(test, "only softcx has a GPU's memory copied by its driver");
    None
}

/// Makes the stand-in fail by the rules of `tools/cuda-standin/src/fault.rs`, until it is dropped.
struct Fault(unsafe extern "C" fn(*const std::ffi::c_char) -> u32);

impl Fault {
    /// `None`, and the test is WAIVED, with a real driver.
    fn new(test: &str, rules: &str) -> Option<Fault> {
        if !is_standin() {
            waived(test, "a real driver does not fail on request");
            return None;
        }
        // SAFETY: the library is loaded; the symbol is a function of that type.
        let function = unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null());
            let symbol = libc::dlsym(library, c"doorbell_cuda_standin_fault".as_ptr());
            assert!(!symbol.is_null());
            std::mem::transmute::<
                *mut libc::c_void,
                unsafe extern "C" fn(*const std::ffi::c_char) -> u32,
            >(symbol)
        };
        let fault = Fault(function);
        for rule in rules.split(';') {
            let rule = CString::new(rule).unwrap();
            // SAFETY: takes a string.
            assert_eq!(unsafe { function(rule.as_ptr()) }, 0);
        }
        Some(fault)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // SAFETY: null takes the rules away.
        unsafe { (self.0)(std::ptr::null()) };
    }
}

/// Until it is dropped, the stand-in's GPU sees writes of NICs only when they are flushed, or late.
struct HeldWrites(extern "C" fn(bool));

impl HeldWrites {
    fn begin() -> HeldWrites {
        // SAFETY: the library is loaded; the symbol is a function of that type.
        let hold = unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            let symbol = libc::dlsym(library, c"doorbell_cuda_standin_hold".as_ptr());
            std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn(bool)>>(symbol)
        };
        let hold = hold.unwrap();
        hold(true);
        HeldWrites(hold)
    }
}

impl Drop for HeldWrites {
    fn drop(&mut self) {
        (self.0)(false);
    }
}

/// Whether a context may be destroyed while others use it; else the rest of the test is WAIVED.
fn may_destroy(test: &str) -> bool {
    if !is_standin() {
        waived(
            test,
            "cuda.h forbids calls while their context is being destroyed",
        );
    }
    is_standin()
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < BOUND, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Free bytes on the context's device.
fn free_bytes(context: &CudaContext) -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: a context; writes two numbers.
    unsafe {
        assert_eq!(
            sys::cuCtxSetCurrent(context.raw()),
            sys::CUresult::CUDA_SUCCESS
        );
        let asked = sys::cuMemGetInfo_v2(&mut free, &mut total);
        assert_eq!(asked, sys::CUresult::CUDA_SUCCESS);
    }
    free
}

/// Waits until so much is free. Memory whose last handle a thread of the library had is freed with the application's next buffer.
fn is_given_back(context: &CudaContext, bytes: usize) {
    until("the memory is freed", || {
        drop(context.alloc(64).unwrap());
        free_bytes(context) >= bytes
    });
}

/// A buffer and its region.
struct Gpu {
    buffer: DeviceBuffer,
    region: Region,
}

impl Gpu {
    fn new(pair: &Pair, context: &CudaContext, len_bytes: u64) -> Gpu {
        let buffer = context.alloc(len_bytes).unwrap();
        let region = Region::register_device(&pair.domain, &buffer, Access::ALL).unwrap();
        assert_eq!(region.kind(), RegionKind::Copied);
        Gpu { buffer, region }
    }

    fn fill(&self, bytes: &[u8]) {
        self.buffer.copy_from_host(0, bytes).unwrap();
    }

    fn bytes(&self, len_bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes as usize];
        self.buffer.copy_to_host(0, &mut bytes).unwrap();
        bytes
    }
}

fn random_bytes(random: &mut Random, len_bytes: u64) -> Vec<u8> {
    let words = (0..len_bytes.div_ceil(8)).flat_map(|_| random.next().to_ne_bytes());
    words.take(len_bytes as usize).collect()
}

/// Posts work and waits for it.
fn done(pair: &mut Pair, work: &Work<'_>) -> Completion {
    pair.a.post_send(work).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap()
}

/// Lengths around the sizes of packets, pieces and the staging memory.
const LENGTHS: [u64; 21] = [
    1,
    3,
    4,
    7,
    8,
    9,
    63,
    64,
    65,
    4095,
    4096,
    4097,
    8192,
    65_535,
    65_537,
    (256 << 10) - 1,
    (256 << 10) + 1,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 9,
    (3 << 20) + 5,
];

#[test]
fn a_buffer_is_written_and_read_at_every_offset() {
    let _alone = alone();
    let test = "a_buffer_is_written_and_read_at_every_offset";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    let mut random = Random(from_env("DOORBELL_TEST_SEED", 1));
    let len = *LENGTHS.last().unwrap();
    let buffer = context.alloc(len + 100).unwrap();
    let mut expected = vec![0; (len + 100) as usize];
    buffer.copy_from_host(0, &expected).unwrap();
    for len in LENGTHS {
        let offset = random.below(100);
        let bytes = random_bytes(&mut random, len);
        buffer.copy_from_host(offset, &bytes).unwrap();
        expected[offset as usize..][..len as usize].copy_from_slice(&bytes);
        let mut got = vec![0; len as usize];
        buffer.copy_to_host(offset, &mut got).unwrap();
        assert!(got == bytes, "{len} bytes at {offset}");
    }
    let mut got = vec![0; expected.len()];
    buffer.copy_to_host(0, &mut got).unwrap();
    assert!(got == expected);
    let part = buffer.part(64, 8).unwrap();
    part.copy_from_host(1, b"part").unwrap();
    let mut got = [0; 4];
    buffer.copy_to_host(65, &mut got).unwrap();
    assert_eq!((&got, part.ptr() - buffer.ptr()), (b"part", 64));
    for refused in [
        part.copy_to_host(5, &mut got),
        part.copy_from_host(9, &[]),
        part.copy_from_host(u64::MAX, &got),
        part.part(1, 8).map(drop),
        buffer.part(buffer.len_bytes(), 1).map(drop),
    ] {
        assert!(
            matches!(refused, Err(Error::OutOfBounds { .. })),
            "{refused:?}"
        );
    }
    for refused in [context.alloc(0), buffer.part(0, 0)] {
        assert!(matches!(refused, Err(Error::Range { .. })), "{refused:?}");
    }
    let refused = context.alloc(1 << 60).unwrap_err();
    assert!(matches!(refused, Error::Cuda { code: 2, .. }), "{refused}");
}

#[test]
fn transfers_between_gpu_and_gpu_and_host_arrive_at_every_length() {
    let _alone = alone();
    let test = "transfers_between_gpu_and_gpu_and_host";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut random = Random(from_env("DOORBELL_TEST_SEED", 2));
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let room = *LENGTHS.last().unwrap() + 64;
    let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, room));
    let hosts = [(); 2].map(|()| pair.region(room));
    let read = |region: &Region, len: u64| {
        let mut bytes = vec![0; len as usize];
        match gpus.iter().find(|gpu| gpu.region.id() == region.id()) {
            Some(gpu) => bytes = gpu.bytes(len),
            None => region.read(0, &mut bytes).unwrap(),
        }
        bytes
    };
    let ways = [
        (&gpus[0].region, &gpus[1].region),
        (&hosts[0], &gpus[1].region),
        (&gpus[0].region, &hosts[1]),
    ];
    for (index, len) in LENGTHS.into_iter().enumerate() {
        for (way, (from, to)) in ways.into_iter().enumerate() {
            limit.step((index * 10 + way) as u64, BOUND);
            for kind in ["write", "read", "send"] {
                let bytes = random_bytes(&mut random, len + 64);
                gpus[0].fill(&bytes);
                hosts[0].write(0, &bytes).unwrap();
                // Also checks the bytes around it.
                gpus[1].fill(&random_bytes(&mut random, len + 64));
                let mut expected = read(to, len + 64);
                let (at, into) = (random.below(64), random.below(64));
                let (source, target) = (
                    [from.slice(at, len).unwrap()],
                    [to.slice(into, len).unwrap()],
                );
                let (there, here) = (to.remote(), from.remote());
                match kind {
                    "write" => done(
                        &mut pair,
                        &Work::write(&source, RemoteSlice::at(there.addr + into, there.rkey)),
                    ),
                    "read" => done(
                        &mut pair,
                        &Work::read(&target, RemoteSlice::at(here.addr + at, here.rkey)),
                    ),
                    _ => {
                        pair.b.post_recv(1, &target).unwrap();
                        pair.a.post_send(&Work::send(&source)).unwrap();
                        let received = pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
                        assert_eq!(u64::from(received.len_bytes), len);
                        pair.a.wait_cq(QueueKind::Send, SOON).unwrap()
                    }
                };
                expected[into as usize..][..len as usize]
                    .copy_from_slice(&bytes[at as usize..][..len as usize]);
                assert!(
                    read(to, len + 64) == expected,
                    "{kind}, way {way}, {len} bytes"
                );
            }
        }
    }
}

/// The devices communicate by lanes in shared memory, as between processes.
#[test]
fn transfers_between_two_devices_copy_gpu_memory() {
    let _alone = alone();
    let test = "transfers_between_two_devices_copy_gpu_memory";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut random = Random(from_env("DOORBELL_TEST_SEED", 4));
    let config = EndpointConfig::default().ack_timeout(0);
    let mut here = Pair::new(&device, &config);
    let there = Pair::new(&Device::open("softcx").unwrap(), &config);
    let mut end = there.b;
    here.b.reset().unwrap();
    here.a.reset().unwrap();
    end.reset().unwrap();
    here.a.connect(&end.address()).unwrap();
    end.connect(&here.a.address()).unwrap();
    const ROOM: u64 = 1 << 20;
    let near = Gpu::new(&here, &context, ROOM);
    let buffer = context.alloc(ROOM).unwrap();
    let region = Region::register_device(&there.domain, &buffer, Access::ALL).unwrap();
    let remote = region.remote();
    for round in 0..24 {
        limit.step(round, BOUND);
        let len = *random.pick(&[1, 8, 64, 65, 4096, 4097, 100_000, ROOM]);
        let bytes = random_bytes(&mut random, len);
        let slice = [near.region.slice(0, len).unwrap()];
        let (from, to) = match round % 3 {
            1 => (&buffer, &near.buffer),
            _ => (&near.buffer, &buffer),
        };
        from.copy_from_host(0, &bytes).unwrap();
        match round % 3 {
            0 => drop(done(
                &mut here,
                &Work::write(&slice, RemoteSlice::at(remote.addr, remote.rkey)),
            )),
            1 => drop(done(
                &mut here,
                &Work::read(&slice, RemoteSlice::at(remote.addr, remote.rkey)),
            )),
            _ => {
                end.post_recv(1, &[region.slice(0, len).unwrap()]).unwrap();
                here.a.post_send(&Work::send(&slice)).unwrap();
                end.wait_cq(QueueKind::Recv, SOON).unwrap();
                here.a.wait_cq(QueueKind::Send, SOON).unwrap();
            }
        }
        let mut got = vec![0; len as usize];
        to.copy_to_host(0, &mut got).unwrap();
        assert!(got == bytes, "round {round}, {len} bytes");
    }
    for call in ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"] {
        for kind in ["write", "read"] {
            let Some(fault) = Fault::new(test, &format!("{call}:999")) else {
                return;
            };
            let slice = [near.region.slice(0, 100_000).unwrap()];
            let work = match kind {
                "write" => Work::write(&slice, RemoteSlice::at(remote.addr, remote.rkey)),
                _ => Work::read(&slice, RemoteSlice::at(remote.addr, remote.rkey)),
            };
            here.a.post_send(&work).unwrap();
            let refused = here.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
            assert!(status(&refused).is_some(), "{call}, {kind}: {refused}");
            drop(fault);
            here.a.reset().unwrap();
            end.reset().unwrap();
            here.a.connect(&end.address()).unwrap();
            end.connect(&here.a.address()).unwrap();
            done(&mut here, &work);
        }
    }
}

#[test]
fn lists_of_host_and_gpu_memory_arrive_in_their_order() {
    let _alone = alone();
    let test = "lists_of_host_and_gpu_memory";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut random = Random(from_env("DOORBELL_TEST_SEED", 3));
    let config = EndpointConfig::default().max_segments(8);
    let mut pair = Pair::new(&device, &config);
    const ROOM: u64 = 64 << 10;
    let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, ROOM));
    let hosts = [(); 2].map(|()| pair.region(ROOM));
    for round in 0..60 {
        limit.step(round, BOUND);
        let image = random_bytes(&mut random, ROOM);
        gpus[0].fill(&image);
        hosts[0].write(0, &image).unwrap();
        // Consecutive slices at both ends, of the same total length and of different lengths each.
        let total = *random.pick(&[1_u64, 8, 63, 64, 65, 4096, 4097, 20_001, ROOM]);
        let mut pieces = |count: u64| {
            let mut cuts: Vec<u64> = (1..count).map(|_| random.below(total + 1)).collect();
            cuts.extend([0, total]);
            cuts.sort_unstable();
            let spans: Vec<(u64, u64, bool)> = cuts
                .windows(2)
                .map(|pair| (pair[0], pair[1] - pair[0], random.below(2) == 0))
                .collect();
            spans
        };
        let (from, into) = (pieces(1 + round % 8), pieces(1 + round / 8 % 8));
        let slices = |spans: &[(u64, u64, bool)], end: usize| {
            let slice = |&(at, len, on_gpu): &(u64, u64, bool)| {
                let region = if on_gpu {
                    &gpus[end].region
                } else {
                    &hosts[end]
                };
                region.slice(at, len).unwrap()
            };
            spans.iter().map(slice).collect::<Vec<_>>()
        };
        pair.b.post_recv(1, &slices(&into, 1)).unwrap();
        pair.a.post_send(&Work::send(&slices(&from, 0))).unwrap();
        pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        let on_gpu = gpus[1].bytes(total);
        for (at, len, is_on_gpu) in into {
            let (at, len) = (at as usize, len as usize);
            let mut got = vec![0; len];
            match is_on_gpu {
                true => got.copy_from_slice(&on_gpu[at..at + len]),
                false => hosts[1].read(at as u64, &mut got).unwrap(),
            }
            assert!(
                got == image[at..at + len],
                "round {round}, {len} bytes at {at}"
            );
        }
    }
}

#[test]
fn atomics_work_on_gpu_memory_with_results_in_gpu_memory() {
    let _alone = alone();
    let test = "atomics_work_on_gpu_memory_with_results_in_gpu_memory";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let _limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let gpu = Gpu::new(&pair, &context, 64);
    gpu.fill(&[0; 64]);
    let remote = gpu.region.remote();
    let result = [gpu.region.slice(32, 8).unwrap()];
    let words = |gpu: &Gpu| {
        let bytes = gpu.bytes(40);
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        (word(8), word(32))
    };
    for count in 0..20 {
        done(
            &mut pair,
            &Work::fetch_add(&result, RemoteSlice::at(remote.addr + 8, remote.rkey), 3),
        );
        assert_eq!(words(&gpu), (count * 3 + 3, count * 3));
    }
    let swap = Work::compare_swap(
        &result,
        RemoteSlice::at(remote.addr + 8, remote.rkey),
        60,
        7,
    );
    done(&mut pair, &swap);
    assert_eq!(words(&gpu), (7, 60));
    done(&mut pair, &swap);
    assert_eq!(words(&gpu), (7, 7));
}

#[test]
fn gpu_memory_region_refuses_cpu_access_and_bad_keys() {
    let _alone = alone();
    let test = "gpu_memory_region_refuses_cpu_access_and_bad_keys";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let _limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let gpu = Gpu::new(&pair, &context, 4096);
    for refused in [
        gpu.region.read(0, &mut [0]),
        gpu.region.write(0, &[0]),
        gpu.region.fill(0, 8, 1),
        gpu.region.load_u32(0).map(drop),
        gpu.region.store_u32(0, 1),
        gpu.region.is_filled_with(0, 8, 1).map(drop),
    ] {
        assert!(
            matches!(&refused, Err(Error::State { reason, .. }) if reason.contains("copies")),
            "{refused:?}"
        );
    }
    assert!(matches!(
        gpu.region.slice(4090, 7),
        Err(Error::OutOfBounds { .. })
    ));
    // Keys and bounds are checked as for any region, at both ends.
    let host = pair.region(4096);
    let source = [host.slice(0, 64).unwrap()];
    let remote = gpu.region.remote();
    let reads = Region::register_device(&pair.domain, &gpu.buffer, Access::REMOTE_READ).unwrap();
    for (addr, rkey) in [
        (remote.addr + 4096 - 63, remote.rkey),
        (remote.addr - 1, remote.rkey),
        (remote.addr, remote.rkey ^ 1),
        (remote.addr, reads.remote().rkey),
        (remote.addr, host.remote().rkey),
    ] {
        pair.a
            .post_send(&Work::write(&source, RemoteSlice::at(addr, rkey)))
            .unwrap();
        let refused = pair.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
        assert_eq!(status(&refused), Some(WcStatus::RemAccessErr), "{refused}");
        pair.reset();
    }
    let source = [reads.slice(0, 64).unwrap()];
    let read = Work::read(&source, RemoteSlice::at(remote.addr, remote.rkey));
    let refused = pair.a.post_send(&read).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::State {
                kind: StateKind::NoAccess,
                ..
            }
        ),
        "{refused}"
    );
    assert_eq!(gpu.region.deregister(), Ok(true));
    assert_eq!(gpu.region.deregister(), Ok(false));
    let source = [host.slice(0, 64).unwrap()];
    pair.a
        .post_send(&Work::write(
            &source,
            RemoteSlice::at(remote.addr, remote.rkey),
        ))
        .unwrap();
    let refused = pair.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
    assert_eq!(status(&refused), Some(WcStatus::RemAccessErr), "{refused}");
}

fn status(error: &Error) -> Option<WcStatus> {
    match error {
        Error::Work(WorkError {
            cause: Cause::Completion { status, .. },
            ..
        }) => Some(*status),
        _ => None,
    }
}

#[test]
fn foreign_device_memory_is_validated_before_use() {
    let _alone = alone();
    let test = "foreign_device_memory_is_validated_before_use";
    let Some(context) = context(test) else { return };
    let owner = context.alloc(8192).unwrap();
    let ptr = owner.ptr();
    let take = |ptr, len_bytes| {
        // SAFETY: the owner lives as long as the test, and what is refused is not used.
        unsafe { DeviceBuffer::from_raw(&context, ptr, len_bytes) }
    };
    let buffer = take(ptr + 100, 8092).unwrap();
    buffer.copy_from_host(8090, b"it").unwrap();
    let mut got = [0; 2];
    owner.copy_to_host(8190, &mut got).unwrap();
    assert_eq!((&got, buffer.ptr()), (b"it", ptr + 100));
    let host = vec![0_u8; 4096];
    let mut pinned = std::ptr::null_mut();
    // SAFETY: a context is current (`alloc` has it so only for itself), and one address is written.
    unsafe {
        assert_eq!(
            sys::cuCtxSetCurrent(context.raw()),
            sys::CUresult::CUDA_SUCCESS
        );
        let allocated = sys::cuMemAllocHost_v2(&mut pinned, 4096);
        assert_eq!(allocated, sys::CUresult::CUDA_SUCCESS);
    }
    let too_long = take(ptr + 100, 8093);
    assert!(
        matches!(&too_long, Err(Error::State { reason, .. }) if reason.contains("8192")),
        "{too_long:?}"
    );
    let of_the_host = take(pinned as u64, 64);
    assert!(
        matches!(&of_the_host, Err(Error::State { reason, .. }) if reason.contains("host")),
        "{of_the_host:?}"
    );
    assert!(matches!(
        take(host.as_ptr() as u64, 64),
        Err(Error::State { .. })
    ));
    assert!(matches!(take(ptr, 0), Err(Error::Range { .. })));
    let mut raw = std::ptr::null_mut();
    // SAFETY: a new context, which is destroyed below, after what is made with it.
    let other = unsafe {
        assert_eq!(sys::cuMemFreeHost(pinned), sys::CUresult::CUDA_SUCCESS);
        let made = sys::cuCtxCreate_v2(&mut raw, 0, 0);
        assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
        CudaContext::from_raw(raw).unwrap()
    };
    // SAFETY: as above.
    let elsewhere = unsafe { DeviceBuffer::from_raw(&other, ptr, 64) };
    assert!(
        matches!(&elsewhere, Err(Error::State { reason, .. }) if reason.contains("context")),
        "{elsewhere:?}"
    );
    drop(other);
    // SAFETY: made above, and nothing else was made with it.
    unsafe { sys::cuCtxDestroy_v2(raw) };
}

#[test]
fn failed_copy_fails_only_its_work_request() {
    let _alone = alone();
    let test = "failed_copy_fails_only_its_work_request";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    // Retries are immediate.
    let config = EndpointConfig::default().ack_timeout(0);
    let mut pair = Pair::new(&device, &config);
    let mut bystander = Pair::new(&device, &EndpointConfig::default());
    let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, 1 << 20));
    let host = pair.region(1 << 20);
    let elsewhere = bystander.region(64);
    let bytes = random_bytes(&mut Random(7), 1 << 20);
    gpus[0].fill(&bytes);
    host.write(0, &bytes).unwrap();
    let ways = [
        (&host, &gpus[1].region),
        (&gpus[0].region, &host),
        (&gpus[0].region, &gpus[1].region),
    ];
    let calls = [
        ("cuMemcpyHtoDAsync_v2", 0),
        ("cuMemcpyDtoHAsync_v2", 1),
        ("cuMemcpyDtoDAsync_v2", 2),
        ("cuStreamQuery", 0),
        ("cuStreamQuery", 1),
        ("cuStreamQuery", 2),
        ("cuCtxGetCurrent", 0),
        ("cuCtxGetCurrent", 1),
    ];
    const LEN: u64 = 300_000;
    for (index, (call, way)) in calls.into_iter().enumerate() {
        let (from, to) = ways[way];
        let source = [from.slice(0, LEN).unwrap()];
        let remote = to.remote();
        // Every call fails, or some.
        for rule in ["", ",nth=1", ",nth=3", ",ppm=300000"] {
            for kind in ["write", "send", "read"] {
                limit.step(index as u64, BOUND);
                let Some(fault) = Fault::new(test, &format!("{call}:999{rule}")) else {
                    return;
                };
                let began = Instant::now();
                let outcome = match kind {
                    "write" => {
                        let work = Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey));
                        pair.a.post_send(&work).unwrap();
                        pair.a.wait_cq(QueueKind::Send, SOON)
                    }
                    "read" => {
                        let into = [to.slice(0, LEN).unwrap()];
                        let there = from.remote();
                        let work = Work::read(&into, RemoteSlice::at(there.addr, there.rkey));
                        pair.a.post_send(&work).unwrap();
                        pair.a.wait_cq(QueueKind::Send, SOON)
                    }
                    _ => {
                        let into = [to.slice(0, LEN).unwrap()];
                        pair.b.post_recv(1, &into).unwrap();
                        pair.a.post_send(&Work::send(&source)).unwrap();
                        pair.a.wait_cq(QueueKind::Send, SOON)
                    }
                };
                let own = [elsewhere.slice(0, 32).unwrap()];
                let other = elsewhere.remote();
                done(
                    &mut bystander,
                    &Work::write(&own, RemoteSlice::at(other.addr + 32, other.rkey)),
                );
                drop(fault);
                match outcome {
                    Ok(_) => assert!(!rule.is_empty(), "{call} for a {kind}"),
                    Err(error) => {
                        // Reported by a completion at once, not by exceeded retries.
                        let status = status(&error);
                        let expected = [
                            WcStatus::LocProtErr,
                            WcStatus::RemAccessErr,
                            WcStatus::RemOpErr,
                        ];
                        assert!(status.is_some_and(|it| expected.contains(&it)), "{error}");
                        assert!(began.elapsed() < BOUND / 2, "{:?}", began.elapsed());
                        let why = gpus[0].buffer.copy_failure();
                        assert!(
                            matches!(why, Some(Error::Cuda { code: 999, .. })),
                            "{why:?}"
                        );
                    }
                }
                pair.reset();
                // The failure has no later effect.
                done(
                    &mut pair,
                    &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
                );
                let mut got = vec![0; LEN as usize];
                match way {
                    1 => host.read(0, &mut got).unwrap(),
                    _ => got = gpus[1].bytes(LEN),
                }
                assert!(got == bytes[..LEN as usize], "{call}{rule} for a {kind}");
            }
        }
    }
}

#[test]
fn completion_follows_delayed_copies() {
    let _alone = alone();
    let test = "completion_follows_delayed_copies";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, 64 << 10));
    let Some(_late) = Fault::new(test, "task:delay=3000") else {
        return;
    };
    for round in 0..8_u64 {
        limit.step(round, BOUND);
        let len = [8, 64, 4097, 64 << 10][round as usize % 4];
        let bytes = random_bytes(&mut Random(round), len);
        gpus[0].fill(&bytes);
        pair.b
            .post_recv(1, &[gpus[1].region.slice(0, len).unwrap()])
            .unwrap();
        let source = [gpus[0].region.slice(0, len).unwrap()];
        pair.a.post_send(&Work::send(&source)).unwrap();
        pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert!(gpus[1].bytes(len) == bytes, "round {round}");
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
}

#[test]
fn stream_work_and_transfers_of_gpu_memory_are_ordered() {
    let _alone = alone();
    let test = "stream_work_and_transfers_of_gpu_memory_are_ordered";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    const LEN: usize = 10_000;
    const ROUNDS: usize = 40;
    for (control, ordered) in [
        (Control::Direct, true),
        (Control::Proxy, true),
        (Control::Direct, false),
        (Control::Proxy, false),
    ] {
        let _held = (!ordered && is_standin()).then(HeldWrites::begin);
        let config = EndpointConfig::default().control(Some(control));
        let mut pair = Pair::new(&device, &config);
        let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, LEN as u64));
        let seen = context.alloc((LEN * ROUNDS) as u64).unwrap();
        let stream = CudaStream::new(&context, "order").unwrap();
        let remote = gpus[1].region.remote();
        let mut tickets = Vec::new();
        limit.step(control as u64, BOUND);
        for round in 0..ROUNDS {
            let source = [gpus[0].region.slice(0, LEN as u64).unwrap()];
            // SAFETY: memory that lives until the stream is done.
            unsafe {
                assert_eq!(
                    sys::cuCtxSetCurrent(context.raw()),
                    sys::CUresult::CUDA_SUCCESS
                );
                let set =
                    sys::cuMemsetD8Async(gpus[0].buffer.ptr(), round as u8 + 1, LEN, stream.raw());
                assert_eq!(set, sys::CUresult::CUDA_SUCCESS);
            }
            let sent = pair.a.stream_queue_write(
                &stream,
                &source,
                RemoteSlice::at(remote.addr, remote.rkey),
            );
            tickets.push(sent.unwrap());
            tickets.push(pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap());
            // SAFETY: as above.
            unsafe {
                let into = seen.ptr() + (round * LEN) as u64;
                let copied =
                    sys::cuMemcpyDtoDAsync_v2(into, gpus[1].buffer.ptr(), LEN, stream.raw());
                assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
            }
        }
        stream.synchronize(SOON).unwrap();
        assert!(
            tickets
                .iter()
                .all(|ticket| ticket.status() == Status::Complete)
        );
        let mut bytes = vec![0; LEN * ROUNDS];
        seen.copy_to_host(0, &mut bytes).unwrap();
        for (round, bytes) in bytes.chunks(LEN).enumerate() {
            assert!(
                bytes.iter().all(|byte| *byte == round as u8 + 1),
                "{control:?}, ordered {ordered}, round {round}"
            );
        }
    }
}

#[test]
fn gpu_copies_proceed_during_host_functions_and_captures() {
    let _alone = alone();
    let test = "a_function_of_the_host_and_a_capture";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let _limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let gpus = [(); 2].map(|()| Gpu::new(&pair, &context, 100_000));
    let stream = CudaStream::new(&context, "host").unwrap();
    let transfer = |pair: &mut Pair, gpus: &[Gpu; 2], seed| {
        let bytes = random_bytes(&mut Random(seed), 100_000);
        gpus[0].fill(&bytes);
        let remote = gpus[1].region.remote();
        let source = [gpus[0].region.slice(0, 100_000).unwrap()];
        done(
            pair,
            &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
        );
        assert!(gpus[1].bytes(100_000) == bytes);
    };
    // SAFETY: a stream of ours; a capture in the mode that forbids the most, to every thread.
    unsafe {
        assert_eq!(
            sys::cuCtxSetCurrent(context.raw()),
            sys::CUresult::CUDA_SUCCESS
        );
        let begun = sys::cuStreamBeginCapture_v2(
            stream.raw(),
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        );
        assert_eq!(begun, sys::CUresult::CUDA_SUCCESS);
    }
    transfer(&mut pair, &gpus, 1);
    let more = context.alloc(4096).unwrap();
    drop(more);
    // Creating a stream, mapping its memory and querying it do not block either, from any thread.
    let beside = CudaStream::new(&context, "beside").unwrap();
    let word = pair.region(64);
    stream_write_value32(&beside, &word, 0, 5).unwrap();
    beside.synchronize(SOON).unwrap();
    assert_eq!((word.load_u32(0), beside.query()), (Ok(5), Ok(true)));
    drop((word, beside));
    let mut graph = std::ptr::null_mut();
    // SAFETY: ends what was begun above.
    unsafe {
        let ended = sys::cuStreamEndCapture(stream.raw(), &mut graph);
        assert_eq!(ended, sys::CUresult::CUDA_SUCCESS);
        sys::cuGraphDestroy(graph);
    }
    // A host function must not call the driver; the device still makes progress in it.
    let back = Arc::new(Mutex::new(None));
    let given = Arc::clone(&back);
    stream
        .launch_host(move || {
            transfer(&mut pair, &gpus, 2);
            *given.lock().unwrap() = Some((pair, gpus));
        })
        .unwrap();
    stream.synchronize(SOON).unwrap();
    let (mut pair, gpus) = back
        .lock()
        .unwrap()
        .take()
        .expect("the function has panicked");
    transfer(&mut pair, &gpus, 3);
}

#[test]
fn queued_work_keeps_a_buffer_until_it_completes() {
    let _alone = alone();
    let test = "queued_work_keeps_a_buffer_until_it_completes";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let _limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    const LEN: u64 = 8 << 20;
    let target = pair.region(LEN);
    let gate = pair.region(64);
    // Allocates the staging memory and the like first: only what this test drops is freed afterwards.
    let small = Gpu::new(&pair, &context, 64);
    let buffer = context.alloc(LEN).unwrap();
    let with_it = free_bytes(&context);
    drop(buffer);
    until("it is freed", || {
        free_bytes(&context) >= with_it + LEN as usize
    });
    let before = free_bytes(&context);
    let gpu = Gpu::new(&pair, &context, LEN);
    let bytes = random_bytes(&mut Random(9), LEN);
    gpu.fill(&bytes);
    let stream = CudaStream::new(&context, "kept").unwrap();
    let wait = Condition::GreaterOrEqual(1);
    stream_wait_value32(&stream, &gate, 0, wait, SOON).unwrap();
    let remote = target.remote();
    let source = [gpu.region.slice(0, LEN).unwrap()];
    let ticket = pair
        .a
        .stream_queue_write(&stream, &source, RemoteSlice::at(remote.addr, remote.rkey))
        .unwrap();
    drop(gpu);
    assert!(before - free_bytes(&context) >= LEN as usize);
    gate.store_u32(0, 1).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(ticket.status(), Status::Complete);
    let mut got = vec![0; LEN as usize];
    target.read(0, &mut got).unwrap();
    assert!(got == bytes);
    drop(ticket);
    is_given_back(&context, before);
    drop(small);
}

#[test]
fn memory_of_a_region_is_freed_with_the_region() {
    let _alone = alone();
    let test = "memory_of_a_region_is_freed_with_the_region";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let _limit = Limit::new(test, BOUND);
    const LEN: u64 = 8 << 20;
    let pair = Pair::new(&device, &EndpointConfig::default());
    // Allocates the staging memory and the like first.
    drop(Gpu::new(&pair, &context, LEN));
    let before = free_bytes(&context);
    for _ in 0..20 {
        let Gpu { buffer, region } = Gpu::new(&pair, &context, LEN);
        drop(buffer);
        assert!(free_bytes(&context) < before);
        drop(region);
        assert_eq!(free_bytes(&context), before);
    }
}

#[test]
fn destroyed_context_fails_only_its_own_transfers() {
    let _alone = alone();
    let test = "destroyed_context_fails_only_its_own_transfers";
    let (Some(_), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    if !may_destroy(test) {
        return;
    }
    let limit = Limit::new(test, BOUND);
    for round in 0..10 {
        limit.step(round, BOUND);
        let mut raw = std::ptr::null_mut();
        // SAFETY: a new context, which this thread does not keep as its current one.
        let own = unsafe {
            let made = sys::cuCtxCreate_v2(&mut raw, 0, 0);
            assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
            let mut popped = std::ptr::null_mut();
            sys::cuCtxPopCurrent_v2(&mut popped);
            CudaContext::from_raw(raw).unwrap()
        };
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let gpus = [(); 2].map(|()| Gpu::new(&pair, &own, 1 << 20));
        let host = pair.region(1 << 20);
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let context = raw as usize;
        let destroyer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(round * 3));
            // SAFETY: made above. That buffers are still used is what this is about: the driver refuses handles that it does not know.
            let destroyed = unsafe { sys::cuCtxDestroy_v2(context as sys::CUcontext) };
            told.store(true, Ordering::Release);
            destroyed
        });
        let mut failures = 0;
        while failures < 3 || !over.load(Ordering::Acquire) {
            for (from, to) in [
                (&host, &gpus[1].region),
                (&gpus[0].region, &host),
                (&gpus[0].region, &gpus[1].region),
            ] {
                let source = [from.slice(0, 100_000).unwrap()];
                let remote = to.remote();
                pair.a
                    .post_send(&Work::write(
                        &source,
                        RemoteSlice::at(remote.addr, remote.rkey),
                    ))
                    .unwrap();
                if let Err(error) = pair.a.wait_cq(QueueKind::Send, SOON) {
                    assert!(matches!(error, Error::Work(_)), "{error}");
                    failures += 1;
                    pair.reset();
                }
            }
        }
        assert_eq!(destroyer.join().unwrap(), sys::CUresult::CUDA_SUCCESS);
        let refused = [
            gpus[0].buffer.copy_from_host(0, &[1]),
            own.alloc(64).map(drop),
            Region::register_device(&pair.domain, &gpus[0].buffer, Access::ALL).map(drop),
        ];
        assert!(matches!(refused[0], Err(Error::Cuda { .. })), "{refused:?}");
        assert!(matches!(refused[1], Err(Error::Cuda { .. })), "{refused:?}");
        let remote = host.remote();
        let source = [host.slice(0, 64).unwrap()];
        done(
            &mut pair,
            &Work::write(&source, RemoteSlice::at(remote.addr + 64, remote.rkey)),
        );
    }
}

/// Through pinned memory, so on any NIC.
#[test]
fn bounce_buffer_transfers_gpu_memory_with_every_operation() {
    let _alone = alone();
    let test = "bounce_buffer_transfers_gpu_memory_with_every_operation";
    let Some(context) = context(test) else { return };
    let limit = Limit::new(test, BOUND);
    let mut random = Random(from_env("DOORBELL_TEST_SEED", 5));
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    const ROOM: u64 = 1 << 20;
    let gpus = [(); 2].map(|()| context.alloc(ROOM).unwrap());
    let remote = pair.region(ROOM);
    for (round, (chunk_bytes, slots)) in
        [(1 << 16, 4), (4096, 1), (5000, 3)].into_iter().enumerate()
    {
        let config = BounceConfig::default()
            .chunk_bytes(chunk_bytes)
            .slots(slots);
        let mut ends = [(); 2].map(|()| {
            let engine = CudaEngine::new(&context).unwrap();
            Bounce::new(&pair.domain, engine, config).unwrap()
        });
        for len in [1, 4095, 4096, 4097, 100_000, ROOM - 64] {
            limit.step(round as u64, BOUND);
            let at = random.below(64);
            let bytes = random_bytes(&mut random, len);
            let at_remote = remote.remote();
            let mut got = vec![0; len as usize];
            gpus[0].copy_from_host(at, &bytes).unwrap();
            // SAFETY: memory of the buffers, which nobody else uses meanwhile.
            unsafe {
                ends[0]
                    .write(&mut pair.a, gpus[0].ptr() + at, len, &at_remote, 64, BOUND)
                    .unwrap();
                remote.read(64, &mut got).unwrap();
                assert!(got == bytes, "write of {len} bytes");
                ends[0]
                    .read(&mut pair.a, &at_remote, 64, gpus[1].ptr() + at, len, BOUND)
                    .unwrap();
            }
            gpus[1].copy_to_host(at, &mut got).unwrap();
            assert!(got == bytes, "read of {len} bytes");
            gpus[1].copy_from_host(at, &vec![0; len as usize]).unwrap();
            let [sender, receiver] = &mut ends;
            let (from, into) = (gpus[0].ptr() + at, gpus[1].ptr() + at);
            let (a, b) = (&mut pair.a, &mut pair.b);
            std::thread::scope(|scope| {
                // SAFETY: as above.
                let receives = scope.spawn(move || unsafe { receiver.recv(b, into, len, BOUND) });
                // SAFETY: as above.
                unsafe { sender.send(a, from, len, BOUND) }.unwrap();
                receives.join().unwrap().unwrap();
            });
            gpus[1].copy_to_host(at, &mut got).unwrap();
            assert!(got == bytes, "send of {len} bytes");
        }
    }
}

#[test]
fn bounce_buffer_stops_at_a_failure_and_works_again() {
    let _alone = alone();
    let test = "bounce_buffer_stops_at_a_failure_and_works_again";
    let Some(context) = context(test) else { return };
    let limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    const LEN: u64 = 500_000;
    let gpu = context.alloc(LEN).unwrap();
    let target = pair.region(LEN);
    let remote = target.remote();
    let bytes = random_bytes(&mut Random(11), LEN);
    let config = BounceConfig::default().chunk_bytes(16 << 10).slots(4);
    // The pinned memory has to be registered with the driver, or copies would block their caller.
    let Some(fault) = Fault::new(test, "cuMemHostRegister_v2:999") else {
        return;
    };
    let engine = CudaEngine::new(&context).unwrap();
    let refused = Bounce::new(&pair.domain, engine, config).err();
    assert!(
        matches!(refused, Some(Error::Cuda { code: 999, .. })),
        "{refused:?}"
    );
    drop(fault);
    let engine = CudaEngine::new(&context).unwrap();
    let mut bounce = Bounce::new(&pair.domain, engine, config).unwrap();
    let mut failed = 0;
    for call in [
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuEventQuery",
        "cuCtxPushCurrent_v2",
    ] {
        for nth in [1, 2, 9, 30] {
            limit.step(nth, BOUND);
            gpu.copy_from_host(0, &bytes).unwrap();
            target.write(0, &bytes).unwrap();
            let Some(fault) = Fault::new(test, &format!("{call}:999,nth={nth}")) else {
                return;
            };
            // SAFETY: memory of the buffer, which nobody else uses meanwhile.
            let outcome = unsafe {
                match call {
                    "cuMemcpyHtoDAsync_v2" => {
                        bounce.read(&mut pair.a, &remote, 0, gpu.ptr(), LEN, BOUND)
                    }
                    _ => bounce.write(&mut pair.a, gpu.ptr(), LEN, &remote, 0, BOUND),
                }
            };
            drop(fault);
            if let Err(error) = outcome {
                failed += 1;
                assert!(
                    matches!(error, Error::Cuda { code: 999, .. }),
                    "{call}: {error}"
                );
            }
            // The endpoint is unchanged, and the next transfer is complete.
            target.fill(0, LEN, 0).unwrap();
            // SAFETY: as above.
            unsafe { bounce.write(&mut pair.a, gpu.ptr(), LEN, &remote, 0, BOUND) }.unwrap();
            let mut got = vec![0; LEN as usize];
            target.read(0, &mut got).unwrap();
            assert!(got == bytes, "after {call}, {nth}");
        }
    }
    assert!(failed >= 10, "{failed}");
    // A context destroyed during a transfer: an error, and no call blocks.
    if !may_destroy(test) {
        return;
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: a new context, which this thread does not keep as its current one.
    let own = unsafe {
        let made = sys::cuCtxCreate_v2(&mut raw, 0, 0);
        assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
        let mut popped = std::ptr::null_mut();
        sys::cuCtxPopCurrent_v2(&mut popped);
        CudaContext::from_raw(raw).unwrap()
    };
    let gpu = own.alloc(LEN).unwrap();
    let engine = CudaEngine::new(&own).unwrap();
    let mut bounce = Bounce::new(&pair.domain, engine, config).unwrap();
    let context = raw as usize;
    let destroyer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        // SAFETY: made above. That it is still used is what this is about.
        unsafe { sys::cuCtxDestroy_v2(context as sys::CUcontext) }
    });
    let error = loop {
        // SAFETY: memory of the buffer, which nobody else uses meanwhile; the driver refuses what it does not know.
        let outcome = unsafe { bounce.write(&mut pair.a, gpu.ptr(), LEN, &remote, 0, BOUND) };
        if let Err(error) = outcome {
            break error;
        }
    };
    assert!(matches!(error, Error::Cuda { .. }), "{error}");
    assert_eq!(destroyer.join().unwrap(), sys::CUresult::CUDA_SUCCESS);
    let host = pair.region(64);
    let source = [host.slice(0, 64).unwrap()];
    done(
        &mut pair,
        &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
    );
}

/// Registration of GPU memory with a NIC other than softcx. A child of this test has a driver that exports dmabufs, or that lacks a capability.
#[test]
fn nic_reaches_gpu_memory_or_every_way_reports_a_reason() {
    let _alone = alone();
    let test = "nic_reaches_gpu_memory_or_every_way_reports_a_reason";
    let Some(context) = context(test) else { return };
    let device = device();
    if device.name() == "softcx" {
        return waived(
            test,
            "softcx has a GPU's memory copied and takes no other way",
        );
    }
    let _limit = Limit::new(test, BOUND);
    const CHILD: &str = "DOORBELL_TEST_CHILD";
    let child = std::env::var(CHILD).unwrap_or_default();
    let pair = Pair::new(&device, &EndpointConfig::default());
    let buffer = context.alloc(1 << 20).unwrap();
    let reads = Access::REMOTE_READ;
    match child.as_str() {
        "ordering,flush" | "gdr" => {
            let refused = Region::register_device(&pair.domain, &buffer, Access::ALL);
            let reason = refused.unwrap_err().to_string();
            let expected = if child == "gdr" { "no NIC" } else { "overtake" };
            assert!(
                reason.contains(expected) && reason.contains("bounce"),
                "{reason}"
            );
            // Memory that is only read needs no ordering; it can still lack a way.
            let reach = Region::register_device_with_report(&pair.domain, &buffer, reads);
            assert_eq!(reach.is_err(), child == "gdr", "{reach:?}");
            return;
        }
        _ => {}
    }
    let RegistrationReport {
        region, refused, ..
    } = Region::register_device_with_report(&pair.domain, &buffer, Access::ALL).unwrap();
    let Some(region) = region else {
        let nic = "ibv_reg_dmabuf_mr";
        let by: &[&str] = match child.as_str() {
            // As the driver maps it, and through PCIe.
            "dmabuf" => &[nic, nic],
            "dmabuf-pcie" => &["cuMemGetHandleForAddressRange", nic],
            _ if context.capabilities().dmabuf => &[nic],
            _ => &["open kernel modules"],
        };
        let [dmabuf @ .., (RegionKind::Peermem, peermem)] = &refused[..] else {
            panic!("{refused:?}")
        };
        assert!(dmabuf.len() >= by.len(), "{refused:?}");
        for ((kind, error), by) in dmabuf.iter().zip(by) {
            assert_eq!(*kind, RegionKind::Dmabuf);
            assert!(error.to_string().contains(by), "{refused:?}");
        }
        assert!(peermem.to_string().contains("nvidia_peermem"), "{peermem}");
        let error = Region::register_device(&pair.domain, &buffer, reads).unwrap_err();
        let reason = error.to_string();
        for part in ["dmabuf: ", "peermem: ", "bounce"] {
            assert!(reason.contains(part), "{reason}");
        }
        if child.is_empty() && is_standin() {
            for (name, variable) in [
                ("dmabuf", "DOORBELL_CUDA_STANDIN_HAS"),
                ("dmabuf-pcie", "DOORBELL_CUDA_STANDIN_HAS"),
                ("ordering,flush", "DOORBELL_CUDA_STANDIN_LACKS"),
                ("gdr", "DOORBELL_CUDA_STANDIN_LACKS"),
            ] {
                let child = std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", test, "--nocapture"])
                    .env(variable, name)
                    .env(CHILD, name)
                    .output()
                    .unwrap();
                assert!(
                    child.status.success(),
                    "{}{}",
                    String::from_utf8_lossy(&child.stdout),
                    String::from_utf8_lossy(&child.stderr)
                );
            }
        }
        if child.is_empty() {
            waived(
                test,
                "no NIC here reaches memory of a GPU; the refusals were seen",
            );
        }
        if is_standin() {
            assert_eq!(context.capabilities().dmabuf, child.contains("dmabuf"));
        }
        return;
    };
    // A NIC that reaches GPU memory: a transfer within the buffer.
    assert_ne!(region.kind(), RegionKind::Host);
    let (mut pair, bytes) = (pair, random_bytes(&mut Random(12), 1 << 19));
    buffer.copy_from_host(0, &bytes).unwrap();
    let (remote, source) = (region.remote(), [region.slice(0, 1 << 19).unwrap()]);
    done(
        &mut pair,
        &Work::write(
            &source,
            RemoteSlice::at(remote.addr + (1 << 19), remote.rkey),
        ),
    );
    let mut got = vec![0; 1 << 19];
    buffer.copy_to_host(1 << 19, &mut got).unwrap();
    assert!(got == bytes);
}

#[test]
fn cudarc_contexts_streams_and_memory_convert_both_ways() {
    let _alone = alone();
    let test = "cudarc_contexts_streams_and_memory_convert_both_ways";
    let Some(context) = context(test) else { return };
    let _limit = Limit::new(test, BOUND);
    use cudarc::driver::{CudaContext as TheirContext, CudaSlice};
    let theirs = TheirContext::new(0).unwrap();
    let same = CudaContext::from_cudarc(&theirs).unwrap();
    assert_eq!(same.raw(), context.raw());
    assert_eq!(context.to_cudarc().unwrap().cu_ctx(), context.raw());
    // A buffer of cudarc, converted, and converted back.
    let stream = theirs.new_stream().unwrap();
    let slice = stream.clone_htod(&[1_u32, 2, 3, 4, 5]).unwrap();
    let buffer = DeviceBuffer::from_cudarc(slice).unwrap();
    assert_eq!(buffer.len_bytes(), 20);
    let mut word = [0; 4];
    buffer.copy_to_host(8, &mut word).unwrap();
    assert_eq!(u32::from_ne_bytes(word), 3);
    buffer.copy_from_host(12, &9_u32.to_ne_bytes()).unwrap();
    let other = buffer.clone();
    let buffer = buffer.into_cudarc::<u32>().unwrap_err();
    drop(other);
    let buffer = buffer.into_cudarc::<u64>().unwrap_err();
    let buffer = buffer.into_cudarc_on(&stream).unwrap_err();
    let mut slice: CudaSlice<u32> = buffer.into_cudarc().unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 3, 9, 5]);
    {
        let view = slice.slice_mut(1..3);
        // SAFETY: the slice lives longer.
        let part = unsafe { DeviceBuffer::from_cudarc_view(&view) }.unwrap();
        part.copy_from_host(4, &7_u32.to_ne_bytes()).unwrap();
        assert_eq!(part.len_bytes(), 8);
    }
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 7, 9, 5]);
    // A buffer of this library, converted to cudarc: it is freed once.
    drop(slice);
    // cudarc frees it in stream order.
    stream.synchronize().unwrap();
    let before = free_bytes(&context);
    let buffer = context.alloc(1 << 20).unwrap();
    buffer.copy_from_host(0, &[6; 1 << 20]).unwrap();
    let part = buffer.part(0, 64).unwrap();
    let buffer = buffer.into_cudarc_on(&stream).unwrap_err();
    let part = part.into_cudarc_on(&stream).unwrap_err();
    drop(part);
    let slice = buffer.into_cudarc_on(&stream).unwrap();
    let bytes: Vec<u8> = stream.clone_dtoh(&slice).unwrap();
    assert!(bytes.len() == 1 << 20 && bytes.iter().all(|byte| *byte == 6));
    // Not freed twice. Threads of the library may meanwhile free what earlier tests have dropped, so the count is not exact. A real driver allocates
    // in blocks and keeps some.
    if is_standin() {
        assert!(before.saturating_sub(free_bytes(&context)) <= 1 << 20);
    }
    drop(slice);
    stream.synchronize().unwrap();
    if is_standin() {
        until("the memory is freed", || free_bytes(&context) >= before);
    }
    // A stream of cudarc executes programs after cudarc has dropped it; a stream of this library accepts work of cudarc.
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    let host = pair.region(256);
    host.fill(0, 64, 3).unwrap();
    let remote = host.remote();
    let lent = CudaStream::from_cudarc(&stream, "lent").unwrap();
    assert_eq!(
        (lent.raw(), std::sync::Arc::strong_count(&stream)),
        (stream.cu_stream(), 2)
    );
    drop((stream, theirs));
    let source = [host.slice(0, 64).unwrap()];
    let to = remote.addr + 64;
    pair.a
        .stream_queue_write(&lent, &source, RemoteSlice::at(to, remote.rkey))
        .unwrap();
    let waited = pair.a.stream_wait_cq(&lent, QueueKind::Send).unwrap();
    lent.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
    assert!(host.is_filled_with(64, 64, 3).unwrap());
    let own = CudaStream::new(&context, "own").unwrap();
    // SAFETY: `own` lives longer.
    let theirs = unsafe { own.to_cudarc() }.unwrap();
    let slice = theirs.clone_htod(&[8_u8; 100]).unwrap();
    assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [8; 100]);
    drop((slice, theirs));
    // A context that is neither primary nor from cudarc cannot be converted; one from cudarc is kept.
    let mut raw = std::ptr::null_mut();
    // SAFETY: a new context, which is destroyed when nothing is made with it any more.
    unsafe {
        let made = sys::cuCtxCreate_v2(&mut raw, 0, 0);
        assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
        let foreign = CudaContext::from_raw(raw).unwrap();
        let refused = foreign.to_cudarc();
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
        drop(foreign);
        let theirs = TheirContext::from_raw_context(0, 0, raw).unwrap();
        let kept = CudaContext::from_cudarc(&theirs).unwrap();
        assert_eq!(kept.raw(), raw);
        drop(theirs);
        kept.alloc(64).unwrap().copy_from_host(0, &[1]).unwrap();
        assert_eq!(kept.to_cudarc().unwrap().cu_ctx(), raw);
    }
}

/// A child of this test has a driver that reuses addresses.
#[test]
fn cache_registers_each_allocation_once() {
    let _alone = alone();
    let test = "cache_registers_each_allocation_once";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let config = CacheConfig::default().max_entries(4).max_bytes(1 << 20);
    let cache = DeviceCache::new(&pair.domain, &config).unwrap();
    let get = |ptr, len_bytes, access| {
        // SAFETY: no region is used after its memory.
        unsafe { cache.get(&context, ptr, len_bytes, access) }
    };
    let buffers: Vec<_> = (0..6).map(|_| context.alloc(100_000).unwrap()).collect();
    let first = get(buffers[0].ptr() + 7, 100, Access::ALL).unwrap();
    assert_eq!((first.offset, first.region.len_bytes()), (7, 100_000));
    let again = get(buffers[0].ptr() + 99_999, 1, Access::ALL).unwrap();
    assert_eq!(
        (again.offset, again.region.id()),
        (99_999, first.region.id())
    );
    let reads = get(buffers[0].ptr(), 1, Access::REMOTE_READ).unwrap();
    assert_ne!(reads.region.id(), first.region.id());
    let beyond = get(buffers[0].ptr() + 7, 99_994, Access::ALL);
    assert!(matches!(beyond, Err(Error::State { .. })), "{beyond:?}");
    let counters = cache.counters();
    assert_eq!((counters.hits, counters.misses), (1, 2));
    // The cached region works like any other.
    buffers[0].copy_from_host(7, &[4; 100]).unwrap();
    let host = pair.region(100);
    let remote = host.remote();
    let source = [first.region.slice(first.offset, 100).unwrap()];
    done(
        &mut pair,
        &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
    );
    assert!(host.is_filled_with(0, 100, 4).unwrap());
    // Entries in use stay; of the others the least recently used is evicted.
    drop(reads);
    for buffer in &buffers[1..] {
        get(buffer.ptr(), 1, Access::ALL).unwrap();
    }
    assert_eq!(
        (cache.size(), cache.counters().evictions),
        ((4, 400_000), 3)
    );
    assert_eq!(
        get(buffers[0].ptr(), 1, Access::ALL).unwrap().region.id(),
        first.region.id()
    );
    let large = context.alloc(2 << 20).unwrap();
    get(large.ptr(), 1, Access::ALL).unwrap();
    assert_eq!((cache.size().0, cache.counters().uncached), (4, 1));
    assert_eq!(cache.invalidate(buffers[5].ptr() + 99_999, 1), 1);
    assert_eq!(cache.invalidate(buffers[5].ptr(), 100_000), 0);
    assert_eq!(cache.size(), (3, 300_000));
    for (max_entries, max_bytes) in [(0, 1), (1, 0), (u32::MAX, 1)] {
        let config = CacheConfig::default()
            .max_entries(max_entries)
            .max_bytes(max_bytes);
        let refused = DeviceCache::new(&pair.domain, &config);
        assert!(matches!(refused, Err(Error::Range { .. })), "{refused:?}");
    }
    if !is_standin() {
        return waived(test, "which address a real driver gives is its own affair");
    }
    const HAS: &str = "DOORBELL_CUDA_STANDIN_HAS";
    if std::env::var_os(HAS).is_none() {
        limit.step(1, BOUND);
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(HAS, "reuse")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}{}",
            String::from_utf8_lossy(&child.stdout),
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    // Memory of the application, freed and allocated without a call into the cache.
    let allocate = || {
        let mut ptr = 0;
        // SAFETY: writes one address.
        unsafe {
            assert_eq!(
                sys::cuCtxSetCurrent(context.raw()),
                sys::CUresult::CUDA_SUCCESS
            );
            assert_eq!(
                sys::cuMemAlloc_v2(&mut ptr, 77_777),
                sys::CUresult::CUDA_SUCCESS
            );
        }
        ptr
    };
    let ptr = allocate();
    let old = get(ptr, 8, Access::ALL).unwrap().region.id();
    assert_eq!(get(ptr, 8, Access::ALL).unwrap().region.id(), old);
    let invalidations = cache.counters().invalidations;
    // SAFETY: allocated above, and not used.
    let freed = unsafe { sys::cuMemFree_v2(ptr) };
    assert_eq!(freed, sys::CUresult::CUDA_SUCCESS);
    assert!(get(ptr, 8, Access::ALL).is_err());
    assert_eq!(allocate(), ptr);
    let new = get(ptr, 8, Access::ALL).unwrap();
    assert_ne!(new.region.id(), old);
    assert_eq!(cache.counters().invalidations, invalidations + 1);
    let source = [new.region.slice(0, 8).unwrap()];
    done(
        &mut pair,
        &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
    );
    drop(new);
    // SAFETY: as above; the region in the cache is not used any more.
    let freed = unsafe { sys::cuMemFree_v2(ptr) };
    assert_eq!(freed, sys::CUresult::CUDA_SUCCESS);
}

/// Takes ten seconds, the time limit of a copy.
#[test]
fn hanging_copy_fails_its_transfer_and_later_memory_works() {
    let _alone = alone();
    let test = "hanging_copy_fails_its_transfer_and_later_memory_works";
    let (Some(context), Some(device)) = (context(test), copying(test)) else {
        return;
    };
    let limit = Limit::new(test, BOUND);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let before = free_bytes(&context);
    let gpu = Gpu::new(&pair, &context, 100_000);
    let host = pair.region(100_000);
    host.fill(0, 100_000, 8).unwrap();
    let Some(fault) = Fault::new(test, "task:delay=17000000,nth=1") else {
        return;
    };
    let source = [host.slice(0, 100_000).unwrap()];
    let remote = gpu.region.remote();
    let work = Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey));
    pair.a.post_send(&work).unwrap();
    let refused = pair.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
    assert!(status(&refused).is_some(), "{refused}");
    drop(fault);
    // The later calls do not wait for ten seconds again.
    let mut took = || {
        let began = Instant::now();
        for refused in [
            gpu.buffer.copy_to_host(0, &mut [0]).err(),
            gpu.buffer.copy_failure(),
        ] {
            assert!(
                matches!(&refused, Some(Error::State { reason, .. }) if reason.contains("ended")),
                "{refused:?}"
            );
        }
        pair.reset();
        pair.a.post_send(&work).unwrap();
        assert!(pair.a.wait_cq(QueueKind::Send, SOON).is_err());
        began.elapsed()
    };
    let took = [took(), took(), took()];
    assert!(
        took.iter().min() < Some(&Duration::from_secs(5)),
        "{took:?}"
    );
    pair.reset();
    limit.step(1, BOUND);
    let other = Gpu::new(&pair, &context, 100_000);
    let remote = other.region.remote();
    done(
        &mut pair,
        &Work::write(&source, RemoteSlice::at(remote.addr, remote.rkey)),
    );
    assert!(other.bytes(100_000).iter().all(|byte| *byte == 8));
    // The late copy ends in memory that is still allocated and is freed after it.
    drop((gpu, other));
    is_given_back(&context, before);
}
