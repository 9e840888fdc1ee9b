//! The control paths: which one is taken and why, and what befalls those that depend on a proxy.
#![allow(unsafe_code)] // Reason: an executor that writes over trigger words
#![cfg(not(loom))]

mod rig;
mod waived;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell::peer::PeerOp;
use doorbell::stream::Submission;
use doorbell::{
    Cause, Control, Device, EndpointConfig, Error, Event, Executor, Faults, HostStream, Side,
    Status, Work,
};
use rig::{Limit, Pair, Random, SOON, from_env};

const STEP: Duration = Duration::from_secs(120);

fn proxied() -> Device {
    Device::open("softcx,path=proxy").unwrap()
}

fn with(control: Control) -> EndpointConfig {
    EndpointConfig {
        control: Some(control),
        ..EndpointConfig::default()
    }
}

#[test]
fn the_best_path_is_taken_unless_one_is_asked_for() {
    let device = Device::open("softcx").unwrap();
    let domain = device.protection_domain();
    let path = |config| doorbell::Endpoint::new(&domain, &config).unwrap().path();
    let best = path(EndpointConfig::default());
    assert_eq!((best.control, best.better.len()), (Control::Direct, 0));
    let proxy = path(with(Control::Proxy));
    assert_eq!(proxy.control, Control::Proxy);
    assert_eq!(
        proxy.better,
        [(Control::Direct, "proxy was asked for".into())]
    );
    let sync = path(with(Control::Sync));
    let better: Vec<Control> = sync.better.iter().map(|(control, _)| *control).collect();
    assert_eq!(better, [Control::Direct, Control::Proxy]);
    // The device's name says it for all, and an endpoint's own configuration goes before it.
    let device = Device::open("softcx,path=sync").unwrap();
    let domain = device.protection_domain();
    let path = |config| doorbell::Endpoint::new(&domain, &config).unwrap().path();
    assert_eq!(path(EndpointConfig::default()).control, Control::Sync);
    assert_eq!(path(with(Control::Direct)).control, Control::Direct);
}

#[test]
fn names_that_ask_for_nonsense_are_refused() {
    for name in [
        "softcx,path=gpu",
        "softcx,path=",
        "softcx,cpu=x",
        "softcx,cpu=100000",
        "softcx,cpu=4294967296",
    ] {
        let error = Device::open(name).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{name}: {error}");
    }
    let error = Device::open("softcx,port=1").unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error}");
    let near = Device::open("softcx,path=proxy,cpu=0");
    // A machine may forbid its first CPU to this process.
    if let Ok(device) = near {
        let pair = Pair::new(&device, &EndpointConfig::default());
        assert!(pair.a.path().reason.contains("CPU 0"), "{}", pair.a.path());
    }
}

/// What a stream gets on the proxy path are words, and nothing of the device's.
#[test]
fn programs_of_the_proxy_path_touch_words_only() {
    let mut pair = Pair::new(&proxied(), &EndpointConfig::default());
    let region = pair.region(4096);
    let remote = region.remote();
    let bytes = [1; 8];
    let send = pair
        .a
        .prepare_send(&Work::write_inline(&bytes, remote.addr, remote.rkey))
        .unwrap();
    let ops: Vec<_> = send.program().ops().collect();
    assert!(
        matches!(
            ops[..],
            [PeerOp::Fence(_), PeerOp::StoreDword { value: 1, .. }]
        ),
        "{}",
        send.disassemble()
    );
    let receive = pair.a.prepare_recv(1, &[]).unwrap();
    assert_eq!(receive.program().len(), 2);
    let wait = pair.a.prepare_wait_cq(Side::Send).unwrap();
    let ops: Vec<_> = wait.program().ops().collect();
    assert!(
        matches!(
            ops[..],
            [
                PeerOp::PollGeq { value: 1, .. },
                PeerOp::StoreDword { value: 0, .. }
            ]
        ),
        "{}",
        wait.disassemble()
    );
}

/// A stalled proxy is one for all tests of this process that are at that place.
static STALLED: Mutex<()> = Mutex::new(());

/// A thread that does not get to run delays, and loses nothing.
#[test]
fn a_proxy_that_stalls_for_two_seconds_loses_nothing() {
    let _alone = STALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let _limit = Limit::new("stall", STEP);
    let stall = Duration::from_millis(from_env("DOORBELL_STALL_MS", 2000));
    // At a place of its own: other tests' endpoints are served by another thread.
    let device = Device::open("softcx,path=proxy,cpu=0").unwrap_or_else(|_| proxied());
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(1 << 16);
    let remote = region.remote();
    let stream = HostStream::new("stalled").unwrap();
    let queue = |pair: &mut Pair, from: u32| {
        for number in from..from + 20 {
            let bytes = number.to_ne_bytes();
            let to = remote.at(u64::from(number) * 4, 4).unwrap();
            let work = Work::write_inline(&bytes, to, remote.rkey);
            pair.a.stream_queue_send(&stream, &work).unwrap();
            pair.a.stream_wait_cq(&stream, Side::Send).unwrap();
        }
    };
    queue(&mut pair, 1);
    stream.synchronize(SOON).unwrap();
    device.set_proxy_stalled(true).unwrap();
    // A round that has begun ends.
    std::thread::sleep(Duration::from_millis(20));
    queue(&mut pair, 21);
    let started = Instant::now();
    std::thread::sleep(stall / 2);
    assert!(!stream.query().unwrap(), "somebody else rang");
    assert_eq!(region.load_u32(21 * 4), Ok(0));
    std::thread::sleep(stall / 2);
    device.set_proxy_stalled(false).unwrap();
    stream.synchronize(SOON).unwrap();
    assert!(started.elapsed() >= stall);
    for number in 1..=40 {
        assert_eq!(region.load_u32(u64::from(number) * 4), Ok(number));
    }
}

#[test]
fn a_wait_behind_a_stalled_proxy_ends_at_its_deadline() {
    let _alone = STALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let _limit = Limit::new("deadline", STEP);
    let device = Device::open("softcx,path=proxy,cpu=0").unwrap_or_else(|_| proxied());
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let stream = HostStream::new("stalled").unwrap();
    device.set_proxy_stalled(true).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let sent = pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    let short = Some(Duration::from_millis(100));
    let wait = pair
        .a
        .stream_wait_cq_for(&stream, Side::Send, short)
        .unwrap();
    let started = Instant::now();
    // Let go by a completion of the watchdog's, or told to give up: the stream may see either first.
    let ended = stream.synchronize(SOON);
    assert!(
        matches!(ended, Ok(()) | Err(Error::Asynchronous { .. })),
        "{ended:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(10));
    let failure = pair.a.failure().unwrap();
    assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
    for ticket in [sent, wait] {
        assert_eq!(ticket.status(), Status::Failed(failure));
    }
    device.set_proxy_stalled(false).unwrap();
    pair.reset();
    pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    pair.a.wait_cq(Side::Send, SOON).unwrap();
}

/// A hundred endpoints on one thread; one of them fails in the midst of it, for each reason that it can have.
#[test]
fn one_of_a_hundred_that_fails_harms_no_other() {
    const PAIRS: usize = 50;
    let _limit = Limit::new("hundred", STEP);
    let device = proxied();
    let mut pairs: Vec<Pair> = (0..PAIRS)
        .map(|_| Pair::new(&device, &EndpointConfig::default()))
        .collect();
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();
    let streams: Vec<_> = (0..2).map(|_| HostStream::new("many").unwrap()).collect();
    let corrupting = Corrupting {
        stream: HostStream::new("corrupting").unwrap(),
        value: AtomicU32::new(0x8000_0000),
    };
    for round in 1..=6u32 {
        let bad = round as usize * 7;
        for (number, (pair, region)) in pairs.iter_mut().zip(&regions).enumerate() {
            let remote = region.remote();
            let data = (round << 16 | number as u32).to_ne_bytes();
            let key = if number == bad && round % 3 == 0 {
                remote.rkey ^ 0xff00
            } else {
                remote.rkey
            };
            let stream: &dyn Executor = if number == bad && round % 3 == 1 {
                &corrupting
            } else {
                &streams[number % 2]
            };
            for at in 0..4 {
                let to = remote.at(at * 4, 4).unwrap();
                let work = Work::write_inline(&data, to, key);
                // The one that fails may have failed by its next operation.
                let queued = pair.a.stream_queue_send(stream, &work);
                let waited = queued.and_then(|_| pair.a.stream_wait_cq(stream, Side::Send));
                assert!(number == bad || waited.is_ok(), "{waited:?}");
            }
            if number == bad && round % 3 == 2 {
                pair.a.abort();
            }
        }
        for stream in streams.iter().chain([&corrupting.stream]) {
            while let Err(error) = stream.synchronize(SOON) {
                assert!(matches!(error, Error::Asynchronous { .. }), "{error}");
            }
        }
        for (number, (pair, region)) in pairs.iter_mut().zip(&regions).enumerate() {
            if number == bad {
                let failure = pair.a.failure().unwrap();
                let expected = match round % 3 {
                    0 => matches!(failure.cause, Cause::Completion { .. }),
                    1 => failure.cause == Cause::Trigger(0x8000_0000),
                    _ => failure.cause == Cause::Aborted,
                };
                assert!(expected, "round {round}: {failure}");
                pair.reset();
                continue;
            }
            assert_eq!(pair.a.failure(), None);
            for at in 0..4 {
                assert_eq!(
                    region.load_u32(at * 4),
                    Ok(round << 16 | number as u32),
                    "round {round}, endpoint {number}"
                );
            }
        }
    }
}

/// A stream that stores something else than the program says, where it says so: what a stray pointer of a kernel does.
struct Corrupting {
    stream: HostStream,
    value: AtomicU32,
}

impl Corrupting {
    fn corrupt(&self, submission: &Submission) {
        for op in submission.program.ops() {
            if let PeerOp::StoreDword { at, .. } = op {
                let base = submission.owner.base(at.target).unwrap();
                // SAFETY: within the target, as addresses of its table are; the words are accessed atomically by everybody.
                unsafe { AtomicU32::from_ptr(base.as_ptr().add(at.offset as usize).cast()) }
                    .store(self.value.load(Ordering::Relaxed), Ordering::Release);
            }
        }
    }
}

// SAFETY: what is submitted is passed on to a stream that keeps the contract, but for the first stores, which are this test.
unsafe impl Executor for Corrupting {
    fn id(&self) -> u64 {
        self.stream.id()
    }

    fn name(&self) -> &str {
        "corrupting"
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> doorbell::Result<()> {
        batch.iter().for_each(|submission| self.corrupt(submission));
        self.stream.submit(batch)
    }

    fn submit_one(&self, submission: Submission) -> Result<(), (Submission, Error)> {
        self.corrupt(&submission);
        // The stream itself does not set it right again.
        std::thread::sleep(Duration::from_millis(5));
        self.stream.submit_one(submission)
    }

    fn record(&self, event: &Event) -> doorbell::Result<()> {
        self.stream.record(event)
    }

    fn wait_event(&self, event: &Event) -> doorbell::Result<()> {
        self.stream.wait_event(event)
    }

    fn query(&self) -> doorbell::Result<bool> {
        self.stream.query()
    }

    fn synchronize(&self, timeout: Option<Duration>) -> doorbell::Result<()> {
        self.stream.synchronize(timeout)
    }
}

/// The link of a moment ago is no reason to fail: retries are for that.
#[test]
fn a_link_that_goes_down_and_comes_back_delays() {
    let _limit = Limit::new("link", STEP);
    for path in ["direct", "proxy", "sync"] {
        let device = Device::open(&format!("softcx,path={path}")).unwrap();
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let region = pair.region(4096);
        let remote = region.remote();
        let stream = HostStream::new("link").unwrap();
        device.set_faults(Faults {
            down_ns: (2_000_000, 60_000_000),
            ..Faults::default()
        });
        let started = Instant::now();
        let mut number = 0u32;
        while started.elapsed() < Duration::from_millis(150) {
            number += 1;
            let bytes = number.to_ne_bytes();
            let work = Work::write_inline(&bytes, remote.addr, remote.rkey);
            pair.a.stream_queue_send(&stream, &work).unwrap();
            pair.a.stream_wait_cq(&stream, Side::Send).unwrap();
            stream.synchronize(SOON).unwrap();
            assert_eq!(region.load_u32(0), Ok(number), "{path}");
        }
        assert_eq!(pair.a.failure(), None, "{path}");
    }
}

/// A NIC that is pulled out: every wait ends, every ticket fails, and new endpoints are refused.
#[test]
fn a_device_that_is_pulled_out_fails_its_endpoints_in_time() {
    let _limit = Limit::new("gone", STEP);
    for path in ["direct", "proxy", "sync"] {
        let device = Device::open(&format!("softcx,path={path}")).unwrap();
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let region = pair.region(4096);
        let remote = region.remote();
        let stream = HostStream::new("gone").unwrap();
        device.set_faults(Faults {
            gone_ns: 5_000_000,
            ..Faults::default()
        });
        let started = Instant::now();
        let bytes = [7; 8];
        let work = Work::write_inline(&bytes, remote.addr, remote.rkey);
        let error = loop {
            let queued = pair.a.stream_queue_send(&stream, &work);
            let waited = queued.and_then(|_| pair.a.stream_wait_cq(&stream, Side::Send));
            let done = waited.and_then(|ticket| {
                let ended = stream.synchronize(SOON);
                match ticket.status() {
                    Status::Failed(failure) => Err(Error::Work(failure)),
                    _ => ended,
                }
            });
            if let Err(error) = done {
                break error;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "{path}");
        };
        assert!(
            matches!(&error, Error::Work(failure) if failure.cause == Cause::QueuePair),
            "{path}: {error}"
        );
        assert!(started.elapsed() < Duration::from_secs(20), "{path}");
        let refused = doorbell::Endpoint::new(&pair.domain, &EndpointConfig::default());
        let text = refused.map(drop).unwrap_err().to_string();
        assert!(text.contains("gone"), "{path}: {text}");
    }
}

/// Many endpoints, many streams, in random order: each stream sees its own order, whoever rings.
#[test]
fn random_orders_over_one_proxy_are_kept() {
    let _limit = Limit::new("random", STEP);
    let seed = from_env("DOORBELL_SEED", 0xd00b_0004);
    println!("DOORBELL_SEED={seed}");
    let mut random = Random(seed);
    let device = proxied();
    let config = EndpointConfig {
        send_depth: 8,
        recv_depth: 8,
        ..EndpointConfig::default()
    };
    let mut pairs: Vec<Pair> = (0..8).map(|_| Pair::new(&device, &config)).collect();
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();
    let streams: Vec<_> = (0..3).map(|_| HostStream::new("order").unwrap()).collect();
    let mut counts = [0u32; 8];
    for _ in 0..from_env("DOORBELL_ROUNDS", 20_000) {
        let at = random.below(8) as usize;
        let (pair, region) = (&mut pairs[at], &regions[at]);
        let stream = &streams[random.below(3) as usize];
        let remote = region.remote();
        let count = counts[at] + 1;
        let bytes = count.to_ne_bytes();
        // What is unsignaled is done when a later one is: a queue full of it stays full.
        let signaled = count % 4 == 0 || random.below(2) == 0;
        let work = Work::write_inline(&bytes, remote.addr, remote.rkey).signaled(signaled);
        match pair.a.stream_queue_send(stream, &work) {
            Ok(_) => counts[at] = count,
            Err(Error::QueueFull { .. }) => {
                for stream in &streams {
                    stream.synchronize(SOON).unwrap();
                }
                while pair.a.poll_cq(Side::Send).unwrap().is_some() {}
                continue;
            }
            Err(other) => panic!("{other}"),
        }
        if signaled {
            pair.a.stream_wait_cq(stream, Side::Send).unwrap();
        }
    }
    for stream in &streams {
        stream.synchronize(SOON).unwrap();
    }
    for ((pair, region), count) in pairs.iter_mut().zip(&regions).zip(counts) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while region.load_u32(0) != Ok(count) {
            assert!(Instant::now() < deadline, "the last write never came");
            pair.a.poll_cq(Side::Send).unwrap();
        }
        assert_eq!(pair.a.failure(), None);
    }
}

/// Who posts and looks at nothing but whether there is room gets room.
#[test]
fn posts_that_are_tried_again_find_room() {
    let _limit = Limit::new("room", STEP);
    for path in ["direct", "proxy", "sync"] {
        let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
        let name = name.split(',').next().unwrap_or_default();
        if path == "direct" && name.starts_with("verbs:") {
            continue;
        }
        let device = Device::open(&format!("{name},path={path}")).unwrap();
        let config = EndpointConfig {
            send_depth: 4,
            ..EndpointConfig::default()
        };
        let mut pair = Pair::new(&device, &config);
        let region = pair.region(64);
        let remote = region.remote();
        for number in 1..=200u32 {
            let bytes = number.to_ne_bytes();
            let work = Work::write_inline(&bytes, remote.addr, remote.rkey)
                .signaled(number.is_multiple_of(4));
            loop {
                match pair.a.post_send(&work) {
                    Ok(_) => break,
                    // The completions are nobody's here; one in four is signaled, and each takes a place until it is taken.
                    Err(Error::QueueFull { queue, .. }) if queue.contains("completion") => {
                        while pair.a.poll_cq(Side::Send).unwrap().is_some() {}
                    }
                    Err(Error::QueueFull { .. }) => std::thread::yield_now(),
                    Err(other) => panic!("{path}: {other}"),
                }
            }
        }
        let started = Instant::now();
        while region.load_u32(0) != Ok(200) {
            assert!(started.elapsed() < Duration::from_secs(20), "{path}");
            pair.a.poll_cq(Side::Send).unwrap();
        }
    }
}
