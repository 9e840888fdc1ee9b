//! What a request of the registration cache costs: `cargo bench --bench region_cache`. The figure to reach: a hit in under 50 ns. It is reached
//! where the cache need not ask the kernel whether the memory is still the same; how long that takes, the machine's system calls say.
#![allow(unsafe_code)] // registers foreign memory

use std::hint::black_box;
use std::ptr::NonNull;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use doorbell::{Access, CacheConfig, Device, Invalidation, ProtectionDomain, Region, RegionCache};

const PAGE: usize = 4096;
const ENTRIES: [usize; 3] = [1, 64, 1024];

/// Every other page is registered, and the next request is for the entry that was not asked for longest.
struct Buffer {
    start: NonNull<u8>,
    pages: usize,
    next: usize,
}

impl Buffer {
    fn new(pages: usize) -> Buffer {
        let bytes = Box::leak(vec![1u8; 2 * pages * PAGE].into_boxed_slice());
        Buffer {
            start: NonNull::from(bytes).cast(),
            pages,
            next: 0,
        }
    }

    #[inline]
    fn page(&mut self) -> NonNull<u8> {
        self.next = (self.next + 7) % self.pages;
        // SAFETY: inside of the buffer.
        unsafe { self.start.add(2 * self.next * PAGE) }
    }
}

fn hits(c: &mut Criterion, name: &str, cache: &RegionCache, hold: bool) {
    let mut group = c.benchmark_group("region_cache");
    for entries in ENTRIES {
        let mut buffer = Buffer::new(entries);
        let mut held = Vec::new();
        for _ in 0..entries {
            let at = buffer.page();
            // SAFETY: the buffer is never freed.
            unsafe {
                if hold {
                    held.push(cache.hold(at, PAGE as u64, Access::ALL).expect("hold"));
                } else {
                    cache.get(at, PAGE as u64, Access::ALL).expect("get");
                }
            }
        }
        let misses = cache.counters().misses;
        group.bench_function(BenchmarkId::new(name, entries), |bench| {
            bench.iter(|| {
                let at = buffer.page();
                // SAFETY: as above.
                unsafe { cache.get(black_box(at), 64, Access::ALL) }
                    .expect("get")
                    .offset
            });
        });
        assert_eq!(cache.counters().misses, misses, "not all were hits");
        drop(held);
        cache.invalidate(buffer.start.as_ptr(), (2 * entries * PAGE) as u64);
    }
    group.finish();
}

fn misses(c: &mut Criterion, domain: &ProtectionDomain) {
    let mut buffer = Buffer::new(64);
    c.bench_function("region_cache/registration without a cache", |bench| {
        bench.iter(|| {
            let at = buffer.page();
            // SAFETY: the buffer is never freed.
            unsafe { Region::register(domain, at, PAGE as u64, Access::ALL) }.expect("register")
        });
    });
}

fn cache(c: &mut Criterion) {
    let device = Device::open("softcx").expect("softcx");
    let domain = device.protection_domain();
    let config = CacheConfig::default();
    // SAFETY: what is registered here is never freed.
    let explicit = unsafe { RegionCache::explicit(&domain, &config) }.expect("cache");
    hits(c, "hit, invalidation by the caller", &explicit, false);
    let kernel = RegionCache::new(&domain, &config).expect("cache");
    match kernel.invalidation() {
        Invalidation::Kernel => {
            hits(c, "hit, invalidation by the kernel, held", &kernel, true);
            hits(c, "hit, invalidation by the kernel", &kernel, false);
        }
        other => println!("not taken: {other:?}"),
    }
    misses(c, &domain);
}

criterion_group!(benches, cache);
criterion_main!(benches);
