//! How long a large group takes to meet on one host: `cargo bench --bench group`. The figure to reach: 1,000 ranks have joined the store and
//! have the addresses of all within 5 s.
//!
//! Every rank is a thread of this process with a connection of its own, and so is the store: that takes three file descriptors a rank, so
//! that `ulimit -n 4096` may have to come first.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use doorbell::{Address, LaunchEnvironment, Store, Token};

const SOON: Duration = Duration::from_secs(60);
const SIZE: u32 = 1000;

/// Until the last rank had the addresses of all.
fn meet() -> Duration {
    let free = TcpListener::bind("127.0.0.1:0").expect("bind");
    let at = free.local_addr().expect("getsockname").to_string();
    drop(free);
    let began = Instant::now();
    let rank = move |environment: LaunchEnvironment| {
        let store = Store::join(&environment, SOON).expect("join");
        let address = [environment.rank() as u8; Address::BYTES];
        let list = store.gather(&address, SOON).expect("gather");
        let took = began.elapsed();
        for (rank, bytes) in list.iter().enumerate() {
            assert_eq!(bytes, &[rank as u8; Address::BYTES]);
        }
        store.leave(SOON).expect("leave");
        took
    };
    let start = |number| {
        let environment = LaunchEnvironment::new(number, SIZE, &at, Token::new("bench"))
            .expect("launch environment");
        let builder = thread::Builder::new().stack_size(256 << 10);
        builder
            .spawn(move || rank(environment))
            .expect("start of a thread")
    };
    let threads: Vec<_> = (0..SIZE).map(start).collect();
    let times = threads.into_iter().map(|t| t.join().expect("a rank"));
    times.max().unwrap_or_default()
}

fn ranks(c: &mut Criterion) {
    let mut group = c.benchmark_group("group");
    group.sample_size(10);
    group.bench_function("1,000 ranks join and have the addresses of all", |bench| {
        bench.iter_custom(|rounds| (0..rounds).map(|_| meet()).sum());
    });
    group.finish();
}

criterion_group!(benches, ranks);
criterion_main!(benches);
