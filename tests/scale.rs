//! A thousand connected pairs in one process: they work, they are small, and idle ones cost nothing.
#![cfg(not(loom))]

mod rig;
mod waived;

use std::time::{Duration, Instant};

use doorbell::{EndpointConfig, Executor, HostStream, Side, Work};
use waived::waived;

use rig::{Limit, Pair, SOON, device, from_env};

/// Bytes of this process that are in memory.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let nanoseconds = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
        .map(|text| text.split(' ').next().unwrap().parse::<u64>().unwrap())
        .sum();
    Duration::from_nanos(nanoseconds)
}

/// The share of one core that the process takes for a second without work: the least of a few, for the machine has other users.
fn idle_share() -> f64 {
    (0..4)
        .map(|_| {
            let (cpu_before, started) = (cpu(), Instant::now());
            std::thread::sleep(Duration::from_secs(1));
            (cpu() - cpu_before).as_secs_f64() / started.elapsed().as_secs_f64()
        })
        .fold(f64::MAX, f64::min)
}

#[test]
fn a_thousand_pairs_work_are_small_and_cost_nothing_while_idle() {
    let count = from_env("DOORBELL_PAIRS", 1000);
    let limit = Limit::new("scale", Duration::from_secs(150));
    let device = device();
    let config = EndpointConfig::default();
    assert_eq!((config.send_depth, config.recv_depth), (128, 128));
    let stream = HostStream::new("scale").unwrap();
    let one = Pair::new(&device, &config);
    std::thread::sleep(Duration::from_millis(300));
    let idle_with_one = idle_share();
    drop(one);

    let before = resident_bytes();
    let started = Instant::now();
    let mut pairs: Vec<Pair> = (0..count).map(|_| Pair::new(&device, &config)).collect();
    println!(
        "{count} pairs made and connected in {:?}",
        started.elapsed()
    );
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();

    let started = Instant::now();
    for round in 1..=3u8 {
        limit.step(round.into(), Duration::from_secs(150));
        for (number, (pair, region)) in pairs.iter_mut().zip(&regions).enumerate() {
            let value = (number as u8).wrapping_mul(31).wrapping_add(round);
            region.fill(0, 64, value).unwrap();
            let into = [region.slice(1024, 64).unwrap()];
            pair.b.post_recv(1, &into).unwrap();
            let data = [region.slice(0, 64).unwrap()];
            pair.a
                .stream_queue_send(&stream, &Work::send(&data))
                .unwrap();
            pair.a.stream_wait_cq(&stream, Side::Send).unwrap();
            pair.b.stream_wait_cq(&stream, Side::Recv).unwrap();
        }
        stream.synchronize(SOON).unwrap();
        for (number, region) in regions.iter().enumerate() {
            let value = (number as u8).wrapping_mul(31).wrapping_add(round);
            assert!(region.is_filled_with(1024, 64, value).unwrap());
        }
    }
    println!("3 sends of each in {:?}", started.elapsed());
    // Every entry of every ring was touched when the queues were made; the regions are one page each.
    let each = (resident_bytes() - before) / (2 * count);
    println!(
        "an endpoint: {} bytes of queue memory, {each} bytes resident in all",
        pairs[0].a.memory_bytes()
    );
    assert!(pairs[0].a.memory_bytes() < 128 << 10);
    if std::env::var_os("DOORBELL_SANITIZER").is_some() {
        waived(
            "scale (resident bytes of an endpoint)",
            "a sanitizer's own memory is counted with it",
        );
    } else if count < 100 {
        waived(
            "scale (resident bytes of an endpoint)",
            "too few pairs to tell",
        );
    } else {
        assert!(each < 128 << 10, "{each} bytes resident an endpoint");
    }

    std::thread::sleep(Duration::from_millis(500));
    let idle = idle_share();
    println!(
        "idle: {:.2} % of a core with {count} pairs, {:.2} % with one",
        100.0 * idle,
        100.0 * idle_with_one
    );
    // Measured: 0.3 % with a thousand pairs and 0.5 % with one, which is noise both ways. One point of a core is what a busy
    // machine may add to either.
    assert!(
        idle < idle_with_one + 0.01,
        "{idle} of a core, {idle_with_one} with one pair"
    );
}
