//! Memory of a GPU in transfers: registered, copied by the software NIC, and bounced. `scripts/test cuda` runs this over the stand-in for
//! the driver, whose device memory no processor reaches: whoever follows such an address dies of it. Without a driver its tests are WAIVED.
#![cfg(all(feature = "cuda", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

mod rig;
mod waived;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use doorbell::region::Kind;
use doorbell::{
    Access, Completion, CudaContext, Device, DeviceBuffer, EndpointConfig, Error, Region, Side,
    Work,
};
use rig::{Limit, Pair, Random, SOON, device, from_env};
use waived::waived;

const BOUND: Duration = Duration::from_secs(60);

/// One test at a time: what the driver is told to fail at, it does for all.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_standin() -> bool {
    std::env::var_os("DOORBELL_CUDA_STANDIN").is_some()
}

/// The context of the first device; none, and the test is WAIVED, where there is no driver.
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

/// The software NIC, which has the memory copied; none, and the test is WAIVED, if another one is to be tested.
fn copying(test: &str) -> Option<Device> {
    let device = device();
    if device.name() == "softcx" {
        return Some(device);
    }
    waived(test, "only softcx has a GPU's memory copied by its driver");
    None
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
        assert_eq!(region.kind(), Kind::Copied);
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
    pair.a.wait_cq(Side::Send, SOON).unwrap()
}

/// Lengths around what packets, pieces and the staging memory end at.
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
                // With what lies around it.
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
                        &Work::write(&source, there.addr + into, there.rkey),
                    ),
                    "read" => done(&mut pair, &Work::read(&target, here.addr + at, here.rkey)),
                    _ => {
                        pair.b.post_recv(1, &target).unwrap();
                        pair.a.post_send(&Work::send(&source)).unwrap();
                        let received = pair.b.wait_cq(Side::Recv, SOON).unwrap();
                        assert_eq!(u64::from(received.len_bytes), len);
                        pair.a.wait_cq(Side::Send, SOON).unwrap()
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
