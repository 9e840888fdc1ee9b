//! Creating and dropping all objects repeatedly does not increase the number of threads, descriptors, mappings and
//! blocks of queue memory.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::time::{Duration, Instant};

use doorbell::{EndpointConfig, Executor, HostStream, QueueKind, RemoteSlice};
use doorbell_wire::memory::Pages;
use rig::{Limit, Pair, SOON, device, from_env};

/// Resources of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    threads: usize,
    descriptors: usize,
    mappings: usize,
    /// Memory of the library.
    pages: usize,
}

impl Held {
    fn now() -> Held {
        let entries = |folder| std::fs::read_dir(folder).unwrap().count();
        Held {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            mappings: std::fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .count(),
            pages: Pages::count(),
        }
    }

    fn exceeds(self, other: Held, mappings: usize) -> bool {
        self.threads > other.threads
            || self.descriptors > other.descriptors
            || self.mappings > other.mappings + mappings
            || self.pages > other.pages
    }
}

/// The allocator splits and joins mappings of its own, and has up to eight arenas of two mappings for each core: so many more are not a leak. A leak of
/// mappings would be one in each of a thousand cycles.
fn mappings() -> usize {
    32 + 2 * 8 * std::thread::available_parallelism().map_or(1, usize::from)
}

fn cycle() {
    let device = device();
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(8192);
    let stream = HostStream::new("cycle").unwrap();
    let (data, remote) = ([region.slice(0, 64).unwrap()], region.remote());
    let into = RemoteSlice::at(remote.addr + 4096, remote.rkey);
    region.fill(0, 64, 7).unwrap();
    pair.a.stream_queue_write(&stream, &data, into).unwrap();
    pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    stream.synchronize(SOON).unwrap();
    let mut got = [0; 64];
    region.read(4096, &mut got).unwrap();
    assert_eq!(got, [7; 64]);
}

/// One test, because it counts the resources of the whole process.
#[test]
fn thousand_life_cycles_leak_nothing() {
    const WARM_UP: u64 = 20;
    let cycles = from_env("DOORBELL_CYCLES", 1000);
    let limit = Limit::new("life cycles", Duration::from_secs(60));
    for number in 0..WARM_UP {
        limit.step(number, Duration::from_secs(60));
        cycle();
    }
    // Behind a door a device is closed with a delay.
    let settled = |allowed: &mut dyn FnMut(Held) -> bool| {
        let started = Instant::now();
        while !allowed(Held::now()) && started.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(10));
        }
        Held::now()
    };
    let mut last = Held::now();
    let before = settled(&mut |_| {
        std::thread::sleep(Duration::from_millis(300));
        let seen = last;
        last = Held::now();
        last == seen
    });
    for number in 0..cycles {
        limit.step(WARM_UP + number, Duration::from_secs(60));
        cycle();
    }
    limit.step(cycles, Duration::from_secs(60));
    let after = settled(&mut |now| !now.exceeds(before, mappings()));
    assert!(
        !after.exceeds(before, mappings()),
        "before {before:?}, after {cycles} cycles {after:?}"
    );
    println!("{cycles} cycles: {before:?} before, {after:?} after");
}
