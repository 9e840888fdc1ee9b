//! What the software ConnectX costs, in one process, below everything else: queue pairs, the queues of the mlx5 room, and
//! programs executed by the calling thread.
//!
//! `cargo bench --bench softcx`. The figures to reach: `latency` under 1.5 us, `rate` over 3 million elements a second,
//! `bandwidth` of a write at 60 % of that of memcpy or more, and the two `idle turn` rows alike.
#![allow(unsafe_code)] // queues over the memory of a queue pair

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use doorbell::mlx5::{CqRing, CqRingConfig, DataSegment, SendQueue, SendQueueConfig, SendRequest};
use doorbell::peer::{Program, Role, TargetId, Targets};
use doorbell::soft::{Access, Attributes, Device, Pages, QueuePair, QueuePairConfig};
use doorbell::stream::{Outcome, Owner, execute};

/// A queue pair as the owner of programs.
struct Pair {
    targets: Targets,
    qp: QueuePair,
}

// SAFETY: the table never changes, and the bases are memory of the queue pair, as long as the targets say.
unsafe impl Owner for Pair {
    fn targets(&self) -> &Targets {
        &self.targets
    }
    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let memory = self.qp.memory();
        NonNull::new(match target.index() {
            0 => memory.record.cast(),
            1 => memory.uar[0],
            2 => memory.send_cq,
            _ => memory.send_marks.cast(),
        })
    }
    fn progress(&self) -> bool {
        self.qp.device().progress()
    }
    fn rung(&self) {
        self.qp.rung();
    }
}

struct End {
    send: SendQueue,
    cq: CqRing,
    consumer: u32,
    program: Program,
    pair: Pair,
    key: u32,
    memory: &'static Pages,
}

const CQES: u32 = 256;

impl End {
    fn new(device: &Device, memory_bytes: usize) -> End {
        let pd = device.create_pd();
        let config = QueuePairConfig {
            pd,
            send_wqebbs: 256,
            recv_wqes: 16,
            recv_stride_bytes: 16,
            send_cqes: CQES,
            recv_cqes: 16,
        };
        let qp = QueuePair::new(device, &config).unwrap();
        let at = *qp.memory();
        let mut targets = Targets::new();
        let record = targets.register("record", Role::DoorbellRecord, 8);
        let uar = targets.register("uar", Role::Uar, 512);
        let ring = u64::from(CQES) * 64;
        let completions = targets.register("completions", Role::Completions, ring);
        let marks = targets.register("marks", Role::Marks, u64::from(CQES) * 4);
        // SAFETY: memory of the queue pair, as long as these say, which outlives the queues in the same struct.
        let (send, cq) = unsafe {
            let send = SendQueue::new(SendQueueConfig {
                ring: at.send_ring,
                wqebb_count: config.send_wqebbs,
                qpn: qp.qpn(),
                max_segments: 4,
                max_inline_bytes: 64,
                record: record.dword(4).unwrap(),
                uar: [uar.block(0, 256).unwrap(), uar.block(256, 256).unwrap()],
            });
            let cq = CqRing::new(CqRingConfig {
                ring: at.send_cq,
                cqe_count: CQES,
                record: at.send_cq_record,
                marks: at.send_marks,
                completions,
                marks_target: marks,
            });
            (send.unwrap(), cq.unwrap())
        };
        cq.reset();
        // Never freed: the device may use it as long as it lives.
        let memory: &'static Pages = Box::leak(Box::new(Pages::new(memory_bytes)));
        let (start, len_bytes) = (memory.start().as_ptr(), memory.len_bytes() as u64);
        // SAFETY: it was just leaked.
        let key = unsafe { device.register_raw(pd, start, len_bytes, Access::ALL) };
        End {
            send,
            cq,
            consumer: 0,
            program: Program::new(&targets),
            pair: Pair { targets, qp },
            key: key.unwrap(),
            memory,
        }
    }

    fn pair(device: &Device, memory_bytes: usize) -> (End, End) {
        let ends = (
            End::new(device, memory_bytes),
            End::new(device, memory_bytes),
        );
        for (end, other) in [(&ends.0, &ends.1), (&ends.1, &ends.0)] {
            end.pair.qp.init(Attributes::default()).unwrap();
            end.pair.qp.connect(&other.pair.qp.local()).unwrap();
        }
        ends
    }

    fn segment(&self, offset: usize, len_bytes: usize) -> DataSegment {
        DataSegment {
            len_bytes: len_bytes as u32,
            lkey: self.key,
            addr: self.at(offset),
        }
    }

    fn at(&self, offset: usize) -> u64 {
        self.memory.at(offset) as u64
    }

    /// Posts one request with a doorbell of its own.
    #[inline]
    fn ring(&mut self, request: &SendRequest<'_>) {
        self.send.post(request).unwrap();
        self.program.clear();
        self.send.commit(&mut self.program).unwrap();
        assert_eq!(execute(&self.program, &self.pair, 0), Outcome::Done);
    }

    /// Waits for the next completion.
    #[inline]
    fn wait(&mut self) {
        loop {
            if let Some(cqe) = self.cq.cqe(self.consumer) {
                assert_eq!(cqe.syndrome, 0);
                self.consumer = self.consumer.wrapping_add(1);
                self.cq.set_consumer_index(self.consumer);
                // Each request takes one block here.
                let from = self.send.consumer_index();
                let done = cqe.wqe_counter.wrapping_sub(from as u16);
                let upto = from.wrapping_add(u32::from(done) + 1);
                self.send.release(upto).unwrap();
                return;
            }
            self.pair.progress();
        }
    }
}

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
