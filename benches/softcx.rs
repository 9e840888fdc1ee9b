//! What the software ConnectX costs, in one process, below everything else: queue pairs, the queues of `wire::mlx5`, and
//! programs executed by the calling thread.
//!
//! `cargo bench --bench softcx`. The figures to reach: `latency` under 1.5 us, `rate` over 3 million elements a second,
//! `bandwidth` of a write at 60 % of that of memcpy or more, and the two `idle turn` rows alike.
#![allow(unsafe_code)] // the memcpy to compare with

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use doorbell_softcx::device::Device;
use doorbell_wire::mlx5::SendRequest;

#[path = "../tests/soft_end/mod.rs"]
mod soft_end;
use soft_end::End;

fn latency(c: &mut Criterion) {
    let device = Device::open().unwrap();
    let (mut a, b) = End::pair(&device, 4096);
    let (at, key) = (b.at(0), b.key);
    let list = [a.segment(0, 8)];
    c.bench_function("latency: write of 8 bytes, depth 1", |bench| {
        bench.iter(|| {
            a.ring(&SendRequest::write(at, key).segments(&list).signaled(true));
            a.wait();
        });
    });
}

fn rate(c: &mut Criterion) {
    const DEPTH: u32 = 64;
    let mut group = c.benchmark_group("rate");
    group.throughput(Throughput::Elements(DEPTH.into()));
    let device = Device::open().unwrap();
    let (mut a, b) = End::pair(&device, 4096);
    let (at, key) = (b.at(0), b.key);
    let list = [a.segment(0, 8)];
    let write = SendRequest::write(at, key).segments(&list);
    for signal_every in [1, 16] {
        let id = BenchmarkId::new("write of 8 bytes, depth 64, signaled every", signal_every);
        group.bench_function(id, |bench| {
            bench.iter(|| {
                for i in 1..=DEPTH {
                    a.ring(&write.signaled(i % signal_every == 0));
                }
                for _ in 0..DEPTH / signal_every {
                    a.wait();
                }
            });
        });
    }
}

fn bandwidth(c: &mut Criterion) {
    const LEN: usize = 64 << 10;
    const BUFFERS: usize = 16;
    let mut group = c.benchmark_group("bandwidth");
    group.throughput(Throughput::Bytes(LEN as u64));
    let device = Device::open().unwrap();
    let (mut a, b) = End::pair(&device, LEN * BUFFERS);
    let mut turn = 0;
    group.bench_function("memcpy of 64 KiB", |bench| {
        bench.iter(|| {
            turn = (turn + 1) % BUFFERS;
            // SAFETY: within both memories, which do not overlap; no transfer is on its way.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    black_box(a.memory.at(turn * LEN)),
                    black_box(b.memory.at(turn * LEN)),
                    LEN,
                )
            };
        });
    });
    for depth in [1, 4] {
        let mut on_the_way = 0;
        group.bench_function(BenchmarkId::new("write of 64 KiB, depth", depth), |bench| {
            bench.iter(|| {
                turn = (turn + 1) % BUFFERS;
                let list = [a.segment(turn * LEN, LEN)];
                let write = SendRequest::write(b.at(turn * LEN), b.key).segments(&list);
                a.ring(&write.signaled(true));
                on_the_way += 1;
                if on_the_way == depth {
                    a.wait();
                    on_the_way -= 1;
                }
            });
        });
        for _ in 0..on_the_way {
            a.wait();
        }
    }
}

fn idle(c: &mut Criterion) {
    let mut group = c.benchmark_group("idle turn");
    for pairs in [1, 1000] {
        let device = Device::open().unwrap();
        let ends: Vec<_> = (0..pairs).map(|_| End::pair(&device, 4096)).collect();
        let id = BenchmarkId::new("connected queue pairs", 2 * pairs);
        group.bench_function(id, |bench| bench.iter(|| black_box(device.progress())));
        drop(ends);
    }
}

criterion_group! {
    name = softcx;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50);
    targets = latency, rate, bandwidth, idle
}
criterion_main!(softcx);
