//! What the tests at the public API share: pairs of endpoints, random numbers with a seed, and a limit on every test's time.
#![allow(dead_code)] // Reason: each test uses a part.

mod eventfd;
pub mod frozen;
#[cfg(feature = "cuda")]
pub mod gpu;
mod stream;

use std::io::Write;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::waived::waived;
#[allow(unused_imports)] // Reason: each test uses a part.
pub use eventfd::{count, eventfd};
#[allow(unused_imports)] // Reason: each test uses a part.
pub use stream::{
    Stream, Streams, by_kernel, by_trigger, has_no_thread, is_cuda, queueing, stream,
};

use doorbell::softcx::Faults;
use doorbell::{
    Access, Control, Device, Endpoint, EndpointConfig, Error, ProtectionDomain, Region, StateKind,
    Work,
};

/// Longer than any successful operation takes, even under emulation.
pub const SOON: Option<Duration> = Some(Duration::from_secs(60));

/// Two connected endpoints of one protection domain.
pub struct Pair {
    pub domain: ProtectionDomain,
    pub a: Endpoint,
    pub b: Endpoint,
}

impl Pair {
    pub fn new(device: &Device, config: &EndpointConfig) -> Pair {
        let domain = device.protection_domain();
        let a = Endpoint::new(&domain, config).unwrap();
        let b = Endpoint::new(&domain, config).unwrap();
        let mut pair = Pair { domain, a, b };
        pair.connect();
        pair
    }

    pub fn connect(&mut self) {
        self.a.connect(&self.b.address()).unwrap();
        self.b.connect(&self.a.address()).unwrap();
    }

    /// Resets and reconnects both endpoints after any failure.
    pub fn reset(&mut self) {
        self.a.reset().unwrap();
        self.b.reset().unwrap();
        self.connect();
    }

    pub fn region(&self, len_bytes: u64) -> Region {
        Region::alloc(&self.domain, len_bytes, Access::ALL).unwrap()
    }
}

/// Opens the device that `DOORBELL_TEST_DEVICE` names, or else a new software ConnectX.
pub fn device() -> Device {
    #[cfg(feature = "cuda")]
    if is_cuda() {
        // The GPU's context first, as in an application: endpoints then take a path that the GPU can use.
        static CONTEXT: OnceLock<doorbell::CudaContext> = OnceLock::new();
        CONTEXT.get_or_init(|| doorbell::CudaContext::primary(0).unwrap());
    }
    let name = std::env::var("DOORBELL_TEST_DEVICE");
    let name = name.as_deref().unwrap_or("softcx");
    Device::open(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Behaviour that is allowed for a card and rare, on the software NIC of this process: bytes of a write, and of a packet within a message, are placed
/// late; requests are read at their doorbell; commands and flushes take time. None of it with `DOORBELL_TEST_KIND=1`.
pub fn strict() -> Faults {
    if from_env("DOORBELL_TEST_KIND", 0) != 0 {
        return Faults::default();
    }
    Faults {
        late_writes_ns: 20_000,
        late_packets_ns: 20_000,
        fetch_ns: Some(0),
        commands_ns: 100_000,
        flush_ns: 100_000,
        ..Faults::default()
    }
}

/// [`device`], which is [`strict`] if it is the software NIC of this process. The columns `+vf` and `+eth` have the same for other devices.
pub fn strict_device() -> Device {
    let device = device();
    device.set_faults(strict());
    device
}

/// Whether operations are executed in the call that queues them (sync path). `test` needs an operation that stays in a stream's queue while its caller
/// continues, and is WAIVED then.
pub fn has_no_queue(device: &Device, test: &str) -> bool {
    let is_sync = control(device) == Control::Sync;
    if is_sync {
        waived(
            test,
            "on the sync path no operation waits in a stream's queue",
        );
    }
    is_sync
}

/// The control path of the device's endpoints.
pub fn control(device: &Device) -> Control {
    let domain = device.protection_domain();
    let endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
    endpoint.path().control
}

/// Whether the device has atomics. If not, checks that a post of one is refused, and reports the part of `test` that needs them as WAIVED.
pub fn has_atomics(device: &Device, test: &str) -> bool {
    let mut pair = Pair::new(device, &EndpointConfig::default());
    let region = pair.region(64);
    let into = [region.slice(0, 8).unwrap()];
    let remote = region.remote().slice(8, 8).unwrap();
    let works = [
        Work::fetch_add(&into, remote, 1),
        Work::compare_swap(&into, remote, 0, 1),
    ];
    let refused = works.map(|work| match pair.a.prepare_send(&work) {
        Ok(prepared) => {
            pair.a.rollback(prepared);
            false
        }
        Err(Error::State { kind, .. }) => kind == StateKind::Unsupported,
        Err(error) => panic!("{error}"),
    });
    assert_eq!(refused[0], refused[1]);
    if refused[0] {
        waived(test, "the device has no atomics");
    }
    !refused[0]
}

/// A closure for a stream to launch, which blocks the stream until the flag is set.
pub fn gate() -> (Arc<AtomicBool>, impl FnOnce() + Send + 'static) {
    let go = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&go);
    let wait = move || {
        while !flag.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    (go, wait)
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            list.swap(end, self.below(end as u64 + 1) as usize);
        }
    }
}

/// The number in the environment variable, or this one: to repeat a run, or to make a longer one.
pub fn from_env(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|error| panic!("{variable}={text}: {error}"))
    })
}

/// Ends the process when a step of a test takes too long: a hang is a finding, not something to wait for.
pub struct Limit {
    shared: Arc<LimitShared>,
}

struct LimitShared {
    started: Instant,
    /// When the step must be over, in milliseconds from the start.
    due_ms: AtomicU64,
    /// What to print: the seed, or the number of the step.
    label: AtomicU64,
    over: AtomicBool,
}

impl Limit {
    pub fn new(test: &'static str, step: Duration) -> Limit {
        let shared = Arc::new(LimitShared {
            started: Instant::now(),
            due_ms: AtomicU64::new(step.as_millis() as u64),
            label: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        std::thread::spawn(move || {
            while !watched.over.load(Ordering::Acquire) {
                let due_ms = watched.due_ms.load(Ordering::Acquire);
                if watched.started.elapsed().as_millis() as u64 > due_ms {
                    let label = watched.label.load(Ordering::Acquire);
                    // Bypasses the test harness, which holds output back until the test ends.
                    let hang = format!("HANG: {test}: step or seed {label} did not end in time\n");
                    let _ = std::io::stderr().write_all(hang.as_bytes());
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Limit { shared }
    }

    /// A new step begins.
    pub fn step(&self, label: u64, step: Duration) {
        self.shared.label.store(label, Ordering::Release);
        let due = self.shared.started.elapsed() + step;
        self.shared
            .due_ms
            .store(due.as_millis() as u64, Ordering::Release);
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}
