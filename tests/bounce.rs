//! Transfers through pinned memory, with a copy engine that uses all that its contract allows: it copies late and out of order, and it fails.
#![cfg(feature = "softcx")]
#![allow(unsafe_code)] // a copy engine, and addresses for it

mod rig;
mod waived;

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::{
    Bounce, BounceConfig, Cause, CopyEngine, CopyTicket, EndpointConfig, Error, MemcpyEngine,
    QueueKind, RemoteRegion, Result, StateKind, WcStatus, Work, WorkError,
};
use rig::{Limit, Pair, Random, device, from_env};

const SOON: Duration = Duration::from_secs(60);

/// Offset between a foreign address and the memory behind it: code that uses the address as a pointer crashes.
const FAR: u64 = 1 << 62;

struct Copy {
    ticket: CopyTicket,
    foreign: u64,
    host: usize,
    len: usize,
    to_host: bool,
}

/// What an engine is to do, and what it has recorded.
#[derive(Default)]
struct Plan {
    random: u64,
    /// The engine makes progress in one of this many queries; 0: in each, `u64::MAX`: never.
    patience: u64,
    begun: u64,
    ended: u64,
    fail_begin: Option<u64>,
    fail_end: Option<u64>,
    under_way: Vec<Copy>,
    done: Vec<CopyTicket>,
    most: usize,
}

#[derive(Clone, Default)]
struct Strange(Arc<Mutex<Plan>>);

fn failure(what: &str) -> Error {
    Error::state(StateKind::Unexpected, "engine", what)
}

impl Strange {
    fn with(change: impl FnOnce(&mut Plan)) -> Strange {
        let engine = Strange::default();
        change(&mut engine.plan());
        engine
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.0.lock().unwrap()
    }

    fn begin(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len: usize,
        to_host: bool,
    ) -> Result<CopyTicket> {
        let mut plan = self.plan();
        plan.begun += 1;
        if plan.fail_begin == Some(plan.begun) {
            return Err(failure("begin"));
        }
        let host = host.as_ptr() as usize;
        let apart = |copy: &Copy| copy.host + copy.len <= host || host + len <= copy.host;
        assert!(plan.under_way.iter().all(apart), "a slot is used twice");
        assert!(len > 0);
        let ticket = CopyTicket(plan.begun);
        plan.under_way.push(Copy {
            ticket,
            foreign: foreign - FAR,
            host,
            len,
            to_host,
        });
        plan.most = plan.most.max(plan.under_way.len());
        Ok(ticket)
    }
}

// SAFETY: copies are carried out inside `is_copy_done`, before it says so for their ticket.
unsafe impl CopyEngine for Strange {
    unsafe fn copy_to_host(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len: usize,
    ) -> Result<CopyTicket> {
        self.begin(foreign, host, len, true)
    }

    unsafe fn copy_from_host(
        &mut self,
        host: NonNull<u8>,
        foreign: u64,
        len: usize,
    ) -> Result<CopyTicket> {
        self.begin(foreign, host, len, false)
    }

    fn is_copy_done(&mut self, ticket: CopyTicket) -> Result<bool> {
        let mut plan = self.plan();
        let mut random = Random(plan.random);
        let acts = plan.patience != u64::MAX && random.below(plan.patience.max(1)) == 0;
        if acts && !plan.under_way.is_empty() {
            // Any copy may end, not only the one that was queried.
            let at = random.below(plan.under_way.len() as u64) as usize;
            let copy = plan.under_way.swap_remove(at);
            let (foreign, host) = (copy.foreign as *mut u8, copy.host as *mut u8);
            // SAFETY: the promise of the code that began the copy.
            unsafe {
                if copy.to_host {
                    foreign.copy_to(host, copy.len);
                } else {
                    host.copy_to(foreign, copy.len);
                }
            }
            plan.done.push(copy.ticket);
        }
        plan.random = random.next();
        let Some(at) = plan.done.iter().position(|done| *done == ticket) else {
            assert!(
                plan.under_way.iter().any(|copy| copy.ticket == ticket),
                "asked for what is over"
            );
            return Ok(false);
        };
        plan.done.swap_remove(at);
        plan.ended += 1;
        if plan.fail_end == Some(plan.ended) {
            return Err(failure("end"));
        }
        Ok(true)
    }
}

/// Foreign memory between two fences.
struct Foreign(Vec<u8>);

const FENCE: usize = 64;

impl Foreign {
    fn new(len: usize, seed: u64) -> Foreign {
        let mut random = Random(seed);
        Foreign((0..len + 2 * FENCE).map(|_| random.next() as u8).collect())
    }

    fn addr(&mut self) -> u64 {
        self.0[FENCE..].as_mut_ptr() as u64 + FAR
    }

    fn bytes(&self) -> &[u8] {
        &self.0[FENCE..self.0.len() - FENCE]
    }

    /// Asserts that the memory has these bytes and that the bytes around it are unchanged.
    fn check(&self, seed: u64, bytes: &[u8]) {
        let before = Foreign::new(bytes.len(), seed);
        assert!(self.bytes() == bytes, "the bytes that came are others");
        let fences = |it: &Foreign| [it.0[..FENCE].to_vec(), it.0[it.0.len() - FENCE..].to_vec()];
        assert_eq!(fences(self), fences(&before));
    }
}

fn bounce(pair: &Pair, engine: &Strange, chunk_bytes: u32, slots: u32) -> Bounce<Strange> {
    let config = BounceConfig::default()
        .chunk_bytes(chunk_bytes)
        .slots(slots);
    Bounce::new(&pair.domain, engine.clone(), config).unwrap()
}

fn is_idle(engine: &Strange) -> bool {
    let plan = engine.plan();
    plan.under_way.is_empty() && plan.done.is_empty()
}

/// Transfers the bytes by write, read, send and receive, between two ends with the same chunk size.
fn round(pair: &mut Pair, engine: &Strange, bounce: &mut Bounce<Strange>, len: usize, seed: u64) {
    let region = pair.region(len.max(1) as u64);
    let mut from = Foreign::new(len, seed);
    let mut into = Foreign::new(len, seed + 1);
    let (source, sink, len_bytes) = (from.addr(), into.addr(), len as u64);
    // SAFETY: both stay until the calls return.
    unsafe {
        bounce
            .write(&mut pair.a, source, len_bytes, &region.remote(), 0, SOON)
            .unwrap();
        let mut got = vec![0; len];
        region.read(0, &mut got).unwrap();
        assert!(got == from.bytes(), "written");
        bounce
            .read(&mut pair.a, &region.remote(), 0, sink, len_bytes, SOON)
            .unwrap();
    }
    into.check(seed + 1, from.bytes());

    let mut into = Foreign::new(len, seed + 2);
    let sink = into.addr();
    let config = *bounce.config();
    let mut other = Bounce::new(&pair.domain, engine.clone(), config).unwrap();
    let (a, b) = (&mut pair.a, &mut pair.b);
    thread::scope(|scope| {
        // SAFETY: both stay until the calls return.
        scope.spawn(|| unsafe { other.recv(b, sink, len_bytes, SOON) }.unwrap());
        // SAFETY: as above.
        unsafe { bounce.send(a, source, len_bytes, SOON) }.unwrap();
    });
    into.check(seed + 2, from.bytes());
    assert!(is_idle(engine));
}

/// These tests lose peers, so the retries are to end within half a second.
fn config() -> EndpointConfig {
    EndpointConfig::default().ack_timeout(14)
}

#[test]
fn every_byte_arrives_with_every_operation() {
    let seed = from_env("DOORBELL_SEED", 1);
    let limit = Limit::new("bounce", Duration::from_secs(100));
    let config = config().send_depth(4).recv_depth(4);
    let mut pair = Pair::new(&device(), &config);
    let mut random = Random(seed);
    for case in 0..from_env("DOORBELL_CASES", 40) {
        limit.step(case, Duration::from_secs(100));
        let chunk_bytes = *random.pick(&[1u32, 7, 64, 1000, 4096, 70_000]);
        // More slots than the queues hold, too.
        let slots = 1 + random.below(9) as u32;
        let chunk = u64::from(chunk_bytes);
        let lens = [
            0,
            1,
            chunk - 1,
            chunk,
            chunk + 1,
            chunk * u64::from(slots),
            random.below(30 * chunk),
        ];
        let len = *random.pick(&lens) as usize;
        let engine = Strange::with(|plan| {
            plan.random = random.next();
            plan.patience = random.below(4);
        });
        let mut bounce = bounce(&pair, &engine, chunk_bytes, slots);
        round(&mut pair, &engine, &mut bounce, len, case);
        assert!(engine.plan().most <= 2 * slots as usize);
    }
}

#[test]
fn copies_overlap() {
    let mut pair = Pair::new(&device(), &config());
    let engine = Strange::with(|plan| plan.patience = 8);
    let mut bounce = bounce(&pair, &engine, 64, 4);
    round(&mut pair, &engine, &mut bounce, 64 * 40, 3);
    assert!(engine.plan().most >= 4);
}

#[test]
fn failed_copy_ends_the_transfer_and_leaves_no_copy_pending() {
    let _limit = Limit::new("failed copy", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &config());
    let region = pair.region(6400);
    for nth in [1, 2, 5, 64, 100] {
        for at_end in [false, true] {
            for reads in [false, true] {
                let engine = Strange::with(|plan| {
                    plan.random = nth;
                    plan.patience = 2;
                    let which = if at_end {
                        &mut plan.fail_end
                    } else {
                        &mut plan.fail_begin
                    };
                    *which = Some(nth);
                });
                let mut bounce = bounce(&pair, &engine, 64, 5);
                let mut memory = Foreign::new(6400, nth);
                let (addr, remote) = (memory.addr(), region.remote());
                // SAFETY: it stays until the calls return.
                let error = unsafe {
                    if reads {
                        bounce.read(&mut pair.a, &remote, 0, addr, 6400, SOON)
                    } else {
                        bounce.write(&mut pair.a, addr, 6400, &remote, 0, SOON)
                    }
                }
                .unwrap_err();
                assert_eq!(error, failure(if at_end { "end" } else { "begin" }));
                assert!(is_idle(&engine));
                // No chunk was begun after the failure, apart from those in flight.
                let begun = engine.plan().begun;
                assert!(begun >= nth && begun <= nth + 5, "{begun} of {nth}");
                // The endpoint and the bounce buffer still work.
                assert_eq!(pair.a.failure(), None);
                round(&mut pair, &engine, &mut bounce, 1000, nth);
            }
        }
    }
}

/// Timeouts of the sides that are to give up, one attempt after the other: longer ones for the case that a thread is not scheduled in time.
const PATIENCES_MS: [u64; 3] = [300, 3_000, 30_000];

#[test]
fn a_failed_copy_of_a_message_ends_both_sides() {
    let _limit = Limit::new("failed message", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &config());
    for patience_ms in PATIENCES_MS {
        let engine = Strange::with(|plan| plan.fail_end = Some(7));
        let other = Strange::default();
        let mut sender = bounce(&pair, &engine, 64, 3);
        let mut receiver = bounce(&pair, &other, 64, 3);
        let (mut from, mut into) = (Foreign::new(6400, 1), Foreign::new(6400, 2));
        let (source, sink) = (from.addr(), into.addr());
        let (a, b) = (&mut pair.a, &mut pair.b);
        let patience = Duration::from_millis(patience_ms);
        let (sent, received) = thread::scope(|scope| {
            // SAFETY: both stay until the calls return.
            let received = scope.spawn(|| unsafe { receiver.recv(b, sink, 6400, patience) });
            // SAFETY: as above.
            let sent = unsafe { sender.send(a, source, 6400, SOON) };
            (sent, received.join().unwrap())
        });
        assert!(
            matches!(received, Err(Error::Timeout { .. } | Error::Work(_))),
            "{received:?}"
        );
        assert!(is_idle(&engine) && is_idle(&other));
        assert!(pair.a.failure().is_some() && pair.b.failure().is_some());
        pair.reset();
        if matches!(sent, Err(Error::Work(_))) && patience_ms < PATIENCES_MS[2] {
            // The receiver timed out before the sender reached the failed copy.
            continue;
        }
        assert_eq!(sent, Err(failure("end")));
        engine.plan().fail_end = None;
        return round(&mut pair, &engine, &mut sender, 3000, 4);
    }
}

#[test]
fn remote_access_error_ends_the_transfer() {
    let _limit = Limit::new("refused", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &config());
    let engine = Strange::with(|plan| plan.patience = 2);
    let mut bounce = bounce(&pair, &engine, 64, 4);
    let region = pair.region(6400);
    // A remote region with a length that is too large: the peer refuses the accesses beyond its end.
    let longer = RemoteRegion {
        len_bytes: 12800,
        ..region.remote()
    };
    let mut memory = Foreign::new(12800, 1);
    let addr = memory.addr();
    for reads in [false, true] {
        // SAFETY: it stays until the calls return.
        let error = unsafe {
            if reads {
                bounce.read(&mut pair.a, &longer, 0, addr, 12800, SOON)
            } else {
                bounce.write(&mut pair.a, addr, 12800, &longer, 0, SOON)
            }
        }
        .unwrap_err();
        let Error::Work(WorkError {
            cause: Cause::Completion { status, .. },
            ..
        }) = error
        else {
            panic!("{error:?}")
        };
        assert_eq!(status, WcStatus::RemAccessErr);
        assert!(is_idle(&engine));
        pair.reset();
        round(&mut pair, &engine, &mut bounce, 5000, 9);
    }
    // SAFETY: refused before anything is done.
    let outside = unsafe { bounce.write(&mut pair.a, addr, 6400, &region.remote(), 1, SOON) };
    assert!(
        matches!(outside, Err(Error::OutOfBounds { .. })),
        "{outside:?}"
    );
}

#[test]
fn mismatched_lengths_or_chunks_fail_on_both_ends() {
    let _limit = Limit::new("disagreement", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &config());
    for (sent, chunk_bytes) in [(6000, 64), (6401, 64), (6400, 63)] {
        let engine = Strange::default();
        let mut sender = bounce(&pair, &engine, chunk_bytes, 3);
        let mut receiver = bounce(&pair, &engine, 64, 3);
        let (mut from, mut into) = (Foreign::new(7000, 1), Foreign::new(7000, 2));
        let (source, sink) = (from.addr(), into.addr());
        let (a, b) = (&mut pair.a, &mut pair.b);
        thread::scope(|scope| {
            // SAFETY: both stay until the calls return.
            let received = scope.spawn(|| unsafe { receiver.recv(b, sink, 6400, SOON) });
            // SAFETY: as above.
            let sent = unsafe { sender.send(a, source, sent, Duration::from_secs(30)) };
            assert!(sent.is_err(), "{sent:?}");
            let received = received.join().unwrap();
            assert!(
                matches!(received, Err(Error::Malformed { .. })),
                "{received:?}"
            );
        });
        pair.reset();
    }
}

#[test]
fn stuck_copies_and_a_frozen_device_end_by_the_deadline() {
    let _limit = Limit::new("timeouts", Duration::from_secs(100));
    let device = device();
    let mut pair = Pair::new(&device, &config());
    let region = pair.region(6400);
    let mut memory = Foreign::new(6400, 1);
    let addr = memory.addr();
    let short = Duration::from_millis(50);
    // An engine that never ends a copy may still use the memory, and the error says so.
    let engine = Strange::with(|plan| plan.patience = u64::MAX);
    let mut stuck = bounce(&pair, &engine, 64, 4);
    let began = Instant::now();
    // SAFETY: it stays until the end of the test, and the engine's copies with it.
    let error =
        unsafe { stuck.write(&mut pair.a, addr, 6400, &region.remote(), 0, short) }.unwrap_err();
    assert!(began.elapsed() >= 2 * short);
    assert!(
        error
            .to_string()
            .contains("may still access the foreign memory"),
        "{error}"
    );
    // Fewer than there are slots if this thread was not scheduled before the deadline.
    let begun = engine.plan().under_way.len();
    assert!((1..=4).contains(&begun), "{begun}");
    assert_eq!(pair.a.failure(), None);
    // The engine may end them later: the pinned memory stays allocated, and a new transfer uses other memory.
    engine.plan().patience = 0;
    let other = Strange::default();
    let mut beside = bounce(&pair, &other, 64, 4);
    round(&mut pair, &other, &mut beside, 100, 5);
    let (late, host) = {
        let mut plan = engine.plan();
        let late = plan
            .under_way
            .drain(..)
            .map(|copy| copy.host)
            .collect::<Vec<_>>();
        (late.len(), late[0] as *mut u8)
    };
    // SAFETY: kept for the engine, which is this test.
    unsafe { host.write_bytes(1, late * 64) };
    drop(stuck);
    // SAFETY: as above.
    unsafe { host.write_bytes(2, late * 64) };

    // A frozen device.
    if !device.set_frozen(true) {
        return;
    }
    let engine = Strange::default();
    let mut bounce = bounce(&pair, &engine, 64, 4);
    // SAFETY: it stays until the call returns.
    let error =
        unsafe { bounce.write(&mut pair.a, addr, 6400, &region.remote(), 0, short) }.unwrap_err();
    assert!(
        matches!(error, Error::Timeout { .. } | Error::Work(_)),
        "{error:?}"
    );
    assert!(is_idle(&engine));
    if matches!(error, Error::Timeout { .. }) {
        let cause = pair.a.failure().map(|failure| failure.cause);
        assert_eq!(cause, Some(Cause::Deadline(short)));
    }
    device.set_frozen(false);
    pair.reset();
    round(&mut pair, &engine, &mut bounce, 5000, 6);
}

#[test]
fn endpoint_with_completions_that_are_not_collected_is_refused() {
    let _limit = Limit::new("not collected", Duration::from_secs(100));
    let device = device();
    let mut pair = Pair::new(&device, &config());
    let region = pair.region(64);
    let engine = Strange::default();
    let mut bounce = bounce(&pair, &engine, 64, 4);
    let (mut from, mut into) = (Foreign::new(64, 1), Foreign::new(64, 2));
    let (source, sink) = (from.addr(), into.addr());
    let short = Duration::from_millis(50);
    let is_refused = |result: &Result<()>| {
        matches!(
            result,
            Err(Error::State {
                kind: StateKind::WorkPending,
                ..
            })
        )
    };

    // Of the same number as the first chunk.
    let work = Work::write_inline(&[0; 8], region.remote().slice(0, 8).unwrap()).wr_id(0);
    let ticket = pair.a.post_send(&work).unwrap();
    ticket.wait(Some(SOON)).unwrap();
    device.set_frozen(true);
    // SAFETY: it stays until the call returns.
    let result = unsafe { bounce.write(&mut pair.a, source, 64, &region.remote(), 0, short) };
    assert!(is_refused(&result), "{result:?}");
    device.set_frozen(false);
    pair.a.poll_cq(QueueKind::Send).unwrap().unwrap();

    // The first message would be another receive's.
    let slices = [region.slice(0, 64).unwrap()];
    pair.a.post_recv(0, &slices).unwrap();
    // SAFETY: as above.
    let result = unsafe { bounce.recv(&mut pair.a, sink, 64, short) };
    assert!(is_refused(&result), "{result:?}");
    assert_eq!(engine.plan().begun, 0);
    assert_eq!(pair.a.failure(), None);
    pair.b.post_send(&Work::send_inline(&[0; 8])).unwrap();
    let completion = pair.a.wait_cq(QueueKind::Recv, Some(SOON)).unwrap();
    assert_eq!(completion.len_bytes, 8);
    pair.b.wait_cq(QueueKind::Send, Some(SOON)).unwrap();
    round(&mut pair, &engine, &mut bounce, 1000, 3);
}

#[test]
fn memcpy_engine_transfers_host_memory() {
    let mut pair = Pair::new(&device(), &config());
    let config = BounceConfig::default();
    let mut bounce = Bounce::new(&pair.domain, MemcpyEngine::default(), config).unwrap();
    let len = 3 * config.chunk_bytes as usize + 5;
    let region = pair.region(len as u64);
    let from: Vec<u8> = (0..len).map(|i| (i / 3) as u8).collect();
    let mut into = vec![0u8; len];
    // SAFETY: both stay until the calls return.
    unsafe {
        let (source, sink) = (from.as_ptr() as u64, into.as_mut_ptr() as u64);
        bounce
            .write(&mut pair.a, source, len as u64, &region.remote(), 0, SOON)
            .unwrap();
        bounce
            .read(&mut pair.a, &region.remote(), 0, sink, len as u64, SOON)
            .unwrap();
    }
    assert!(from == into);
    for (config, name) in [
        (
            BounceConfig::default().chunk_bytes(0).slots(1),
            "chunk_bytes",
        ),
        (
            BounceConfig::default().chunk_bytes(u32::MAX).slots(1),
            "chunk_bytes",
        ),
        (BounceConfig::default().chunk_bytes(1).slots(0), "slots"),
        (BounceConfig::default().chunk_bytes(1).slots(257), "slots"),
    ] {
        let error = Bounce::new(&pair.domain, MemcpyEngine::default(), config).err();
        assert!(
            matches!(error, Some(Error::Range { argument, .. }) if argument == name),
            "{error:?}"
        );
    }
}
