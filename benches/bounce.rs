//! What pipelining gives a transfer through a bounce buffer: `cargo bench --bench bounce`. With one slot nothing overlaps; the ratio of the two
//! is what counts, on whatever machine.
#![allow(unsafe_code)] // a copy engine

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use doorbell::{
    Access, Bounce, BounceConfig, CopyEngine, CopyTicket, Device, Endpoint, EndpointConfig,
    MemcpyEngine, Region, Result,
};

const SOON: Duration = Duration::from_secs(60);
const LEN: usize = 8 << 20;
const CHUNK: u32 = 256 << 10;

/// Copies as a GPU's engine does it: some time after it was told, and without this processor's time. So the bytes do not count here.
#[derive(Default)]
struct Late {
    under_way: VecDeque<(CopyTicket, Instant)>,
    given: u64,
}

/// A chunk at 25 GB/s, and the launch of a copy.
const TAKES: Duration = Duration::from_micros(20);

impl Late {
    fn begin(&mut self) -> CopyTicket {
        self.given += 1;
        let ticket = CopyTicket(self.given);
        // One copy after the other.
        let free = self
            .under_way
            .back()
            .map_or_else(Instant::now, |(_, end)| *end);
        self.under_way
            .push_back((ticket, free.max(Instant::now()) + TAKES));
        ticket
    }
}

// SAFETY: it touches no memory.
unsafe impl CopyEngine for Late {
    unsafe fn copy_to_host(&mut self, _: u64, _: NonNull<u8>, _: usize) -> Result<CopyTicket> {
        Ok(self.begin())
    }

    unsafe fn copy_from_host(&mut self, _: NonNull<u8>, _: u64, _: usize) -> Result<CopyTicket> {
        Ok(self.begin())
    }

    fn is_copy_done(&mut self, _: CopyTicket) -> Result<bool> {
        let over = self
            .under_way
            .front()
            .is_some_and(|(_, end)| Instant::now() >= *end);
        if over {
            self.under_way.pop_front();
        }
        Ok(over)
    }
}

fn transfers<E: CopyEngine>(c: &mut Criterion, name: &str, engine: impl Fn() -> E) {
    let domain = Device::open("softcx").expect("softcx").protection_domain();
    let new = || Endpoint::new(&domain, &EndpointConfig::default()).expect("endpoint");
    let (mut a, mut b) = (new(), new());
    a.connect(&b.address()).expect("connect");
    b.connect(&a.address()).expect("connect");
    let target = Region::alloc(&domain, LEN as u64, Access::ALL).expect("region");
    let foreign = vec![3u8; LEN];
    let mut group = c.benchmark_group("bounce");
    group.throughput(Throughput::Bytes(LEN as u64));
    group.sample_size(20);
    for slots in [1, 2, 4] {
        let config = BounceConfig::default().chunk_bytes(CHUNK).slots(slots);
        let mut bounce = Bounce::new(&domain, engine(), config).expect("bounce");
        let id = BenchmarkId::new(format!("write of 8 MiB, {name}"), format!("{slots} slots"));
        group.bench_function(id, |bench| {
            bench.iter(|| {
                let (from, len) = (foreign.as_ptr() as u64, LEN as u64);
                // SAFETY: the memory stays.
                unsafe { bounce.write(&mut a, from, len, &target.remote(), 0, SOON) }
                    .expect("write");
            });
        });
    }
    group.finish();
}

fn bounce(c: &mut Criterion) {
    transfers(c, "copied by this processor", MemcpyEngine::default);
    transfers(c, "copied elsewhere", Late::default);
}

criterion_group!(benches, bounce);
criterion_main!(benches);
