//! Devices, domains, regions, endpoints, streams, prepared operations, tickets and events are dropped in every order, with work in flight: no use
//! after free, no leak, and every stream ends.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::any::Any;
use std::time::{Duration, Instant};

use doorbell::{
    Condition, EndpointConfig, Event, Executor, HostStream, QueueKind, RemoteSlice, Work,
    stream_wait_value32,
};
use rig::{Limit, Pair, Random, device, from_env};

type Things = Vec<Box<dyn Any>>;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// One object of each kind, with work in flight that completes, that ends by a deadline, and that ends with the drop.
fn everything(random: &mut Random) -> Things {
    let device = device();
    let config = EndpointConfig::default()
        .send_depth(8)
        .recv_depth(8)
        .ack_timeout(6)
        .retry_count(1)
        .wait_timeout(Some(Duration::from_millis(5)));
    let mut pair = Pair::new(&device, &config);
    let (one, two) = (
        HostStream::new("one").unwrap(),
        HostStream::new("two").unwrap(),
    );
    let regions = [pair.region(8192), pair.region(8192)];
    let data = [regions[0].slice(0, 4096).unwrap()];
    let into = [regions[1].slice(0, 4096).unwrap()];
    let remote = regions[1].remote();
    let mut things: Things = Vec::new();
    if random.below(2) == 0 {
        let word = pair.region(4);
        let short = Some(Duration::from_millis(3));
        let held =
            stream_wait_value32(&one, &word, 0, Condition::GreaterOrEqual(1), short).unwrap();
        things.push(Box::new(held));
        things.push(Box::new(word));
    }
    for round in 0..3u64 {
        let stream = *random.pick(&[&one, &two]);
        things.push(Box::new(pair.b.post_recv(round, &into)));
        let kernel = regions[0].clone();
        // On a slow machine the deadlines of queued work may have passed by now, which is allowed.
        let _ = stream.launch(move || kernel.fill(0, 4096, round as u8).unwrap());
        let sent = pair.a.stream_queue_send(stream, &Work::send(&data));
        things.push(Box::new(sent));
        let waited = pair.a.stream_wait_cq(stream, QueueKind::Send);
        things.push(Box::new(waited));
        let other = *random.pick(&[&one, &two]);
        things.push(Box::new(pair.b.stream_wait_cq(other, QueueKind::Recv)));
        let written =
            pair.a
                .stream_queue_write(other, &data, RemoteSlice::at(remote.addr, remote.rkey));
        things.push(Box::new(written));
        let event = Event::new();
        let _ = stream.record(&event);
        let _ = other.wait_event(&event);
        things.push(Box::new(event));
    }
    // A receive without a message, and a wait for it.
    let _ = pair.b.stream_queue_recv(&two, 9, &into);
    things.push(Box::new(pair.b.stream_wait_cq(&two, QueueKind::Recv)));
    for _ in 0..2 {
        let prepared = pair.a.prepare_send(&Work::send(&data));
        things.push(Box::new(
            prepared.as_ref().ok().map(doorbell::Prepared::ticket),
        ));
        things.push(Box::new(prepared));
    }
    things.push(Box::new(pair.b.prepare_recv(1, &into)));
    things.push(Box::new(pair.a.prepare_wait_cq(QueueKind::Send)));
    let Pair { domain, a, b } = pair;
    let [first, second] = regions;
    for thing in [
        Box::new(device) as Box<dyn Any>,
        Box::new(domain),
        Box::new(a),
        Box::new(b),
        Box::new(first),
        Box::new(second),
        Box::new(one),
        Box::new(two),
    ] {
        things.push(thing);
    }
    things
}

/// Threads of streams and engines end after their work.
fn wait_for_threads(before: usize) {
    let started = Instant::now();
    while threads() > before {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{} threads instead of {before}: something keeps a stream or a device",
            threads()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One test, because it counts the threads of the process.
#[test]
fn everything_can_be_dropped_in_any_order() {
    let seed = from_env("DOORBELL_SEED", 5);
    let rounds = from_env("DOORBELL_DROPS", 300);
    println!("DOORBELL_SEED={seed} DOORBELL_DROPS={rounds}");
    let limit = Limit::new("drop order", Duration::from_secs(120));
    let mut random = Random(seed);
    // The watchdog's thread keeps running.
    drop(everything(&mut random));
    std::thread::sleep(Duration::from_millis(500));
    let before = {
        let started = Instant::now();
        let mut least = threads();
        while started.elapsed() < Duration::from_millis(500) {
            least = least.min(threads());
            std::thread::sleep(Duration::from_millis(5));
        }
        least
    };
    for round in 0..rounds {
        limit.step(round, Duration::from_secs(120));
        let mut things = everything(&mut random);
        random.shuffle(&mut things);
        for thing in things {
            if random.below(4) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(400)));
            }
            drop(thing);
        }
        if round % 8 == 7 {
            wait_for_threads(before);
        }
    }
    // Every order of the objects that own others.
    let mut orders = vec![vec![]];
    for _ in 0..5 {
        orders = orders
            .into_iter()
            .flat_map(|order: Vec<usize>| {
                let rest: Vec<usize> = (0..5).filter(|at| !order.contains(at)).collect();
                rest.into_iter().map(move |at| {
                    let mut longer = order.clone();
                    longer.push(at);
                    longer
                })
            })
            .collect();
    }
    assert_eq!(orders.len(), 120);
    for (number, order) in orders.into_iter().take(rounds as usize).enumerate() {
        limit.step(number as u64, Duration::from_secs(120));
        let device = device();
        let mut pair = Pair::new(
            &device,
            &EndpointConfig::default().wait_timeout(Some(Duration::from_millis(5))),
        );
        let region = pair.region(64);
        let stream = HostStream::new("s").unwrap();
        pair.b.post_recv(0, &[region.slice(0, 8).unwrap()]).unwrap();
        pair.a
            .stream_queue_send(&stream, &Work::send(&[region.slice(8, 8).unwrap()]))
            .unwrap();
        // On a slow machine the deadline may pass meanwhile, which is allowed.
        let waits = (
            pair.a.stream_wait_cq(&stream, QueueKind::Send),
            pair.b.stream_wait_cq(&stream, QueueKind::Recv),
        );
        let prepared = (pair.a.prepare_send(&Work::nop()), waits);
        let Pair { domain, a, b } = pair;
        let mut things: Vec<Option<Box<dyn Any>>> = vec![
            Some(Box::new((device, domain))),
            Some(Box::new(a)),
            Some(Box::new((b, region))),
            Some(Box::new(stream)),
            Some(Box::new(prepared)),
        ];
        for at in order {
            things[at] = None;
        }
    }
    wait_for_threads(before);
}
