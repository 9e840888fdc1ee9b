//! The control paths: which one is taken and why, and failures of endpoints that depend on a proxy.
#![allow(unsafe_code)] // Reason: an executor of its own
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
#[path = "rig/store_only.rs"]
mod store_only;
mod waived;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell::__private::{StreamFailure, Submission};
use doorbell::softcx::Faults;
use doorbell::{
    Cause, Control, Device, EndpointConfig, Error, Event, Executor, HostStream, Prepared,
    QueueKind, RemoteSlice, Status, Ticket, Work, stream_post, stream_post_all,
};
use doorbell_wire::bytecode::{At, Fence, Program, ProgramOp, Role};
use rig::{Limit, Pair, Random, SOON, from_env};
use store_only::StoreOnlyStream;

const STEP: Duration = Duration::from_secs(120);

fn proxied() -> Device {
    Device::open("softcx,path=proxy").unwrap()
}

fn with(control: Control) -> EndpointConfig {
    EndpointConfig::default().control(Some(control))
}

#[test]
fn best_path_is_chosen_unless_one_is_requested() {
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
    // The device's name sets the path of all endpoints; an endpoint's configuration overrides it.
    let device = Device::open("softcx,path=sync").unwrap();
    let domain = device.protection_domain();
    let path = |config| doorbell::Endpoint::new(&domain, &config).unwrap().path();
    assert_eq!(path(EndpointConfig::default()).control, Control::Sync);
    assert_eq!(path(with(Control::Direct)).control, Control::Direct);
}

#[test]
fn malformed_device_names_are_refused() {
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

/// On the proxy path a stream's programs access words of memory and no registers or queues of the device.
#[test]
fn proxy_path_programs_access_only_words() {
    let mut pair = Pair::new(&proxied(), &EndpointConfig::default());
    let region = pair.region(4096);
    let remote = region.remote();
    let bytes = [1; 8];
    let send = pair
        .a
        .prepare_send(&Work::write_inline(
            &bytes,
            RemoteSlice::at(remote.addr, remote.rkey),
        ))
        .unwrap();
    let ops: Vec<_> = send.program().ops().collect();
    assert!(
        matches!(
            ops[..],
            [ProgramOp::Fence(_), ProgramOp::StoreDword { value: 1, .. }]
        ),
        "{}",
        send.disassemble()
    );
    let receive = pair.a.prepare_recv(1, &[]).unwrap();
    assert_eq!(receive.program().len(), 2);
    let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
    let ops: Vec<_> = wait.program().ops().collect();
    assert!(
        matches!(
            ops[..],
            [
                ProgramOp::PollGeq { value: 1, .. },
                ProgramOp::StoreDword { value: 0, .. }
            ]
        ),
        "{}",
        wait.disassemble()
    );
}

/// The proxy reads the ring when it sees the trigger, so everything written before, by any component, must be visible by then. In the program of every
/// operation the trigger is the only store and the last operation, and directly before it is a fence for reads and writes.
#[test]
fn every_trigger_store_follows_a_full_fence() {
    let seed = from_env("DOORBELL_SEED", 0xd00b_0f3c);
    println!("DOORBELL_SEED={seed}");
    let mut random = Random(seed);
    for blueflame in [false, true] {
        let config = EndpointConfig::default()
            .control(Some(Control::Proxy))
            .recv_depth(256)
            .blueflame(blueflame);
        let mut pair = Pair::new(&Device::open("softcx").unwrap(), &config);
        let stream = HostStream::new("triggers").unwrap();
        let region = pair.region(4096);
        let remote = region.remote();
        let bytes = [7; 48];
        let mut counts = [0u32; 2];
        let mut kinds = [0u32; 10];
        for _ in 0..from_env("DOORBELL_ROUNDS", 400) {
            let len_bytes = 1 + random.below(64);
            let slices = [
                region.slice(random.below(1024), len_bytes).unwrap(),
                region.slice(1024 + random.below(1024), len_bytes).unwrap(),
            ];
            let some = &slices[..random.below(3) as usize];
            let word = [region.slice(8 * random.below(8), 8).unwrap()];
            let (addr, key, imm) = (remote.addr + 2048, remote.rkey, random.next() as u32);
            let kind = random.below(10) as usize;
            kinds[kind] += 1;
            let work = match kind {
                0 => Work::write(some, RemoteSlice::at(addr, key)),
                1 => Work::write(some, RemoteSlice::at(addr, key)).imm(imm),
                2 => Work::write_inline(
                    &bytes[..len_bytes as usize % 48],
                    RemoteSlice::at(addr, key),
                ),
                3 => Work::read(some, RemoteSlice::at(addr, key)),
                4 => Work::send(some),
                5 => Work::send(some).imm(imm),
                6 => Work::send_inline(&bytes[..len_bytes as usize % 48]),
                7 => Work::compare_swap(&word, RemoteSlice::at(addr, key), 1, 2),
                8 => Work::fetch_add(&word, RemoteSlice::at(addr, key), 1),
                _ => Work::nop(),
            };
            let work = work
                .signaled(random.below(2) == 0)
                .fence(random.below(2) == 0)
                .solicited(random.below(2) == 0 && [1, 4, 5, 6].contains(&kind));
            let receives = random.below(4) == 0 || [1, 4, 5, 6].contains(&kind);
            if receives {
                let prepared = pair.b.prepare_recv(1, some).unwrap();
                triggers(&prepared, &mut counts[1]);
                stream_post(&stream, prepared).unwrap();
            }
            let prepared = pair.a.prepare_send(&work).unwrap();
            triggers(&prepared, &mut counts[0]);
            // Never posted: the next operation reuses its entry.
            counts[0] -= 1;
            pair.a.rollback(prepared);
            if counts[1] == 200 {
                pair.reset();
                counts = [0; 2];
            }
        }
        assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
    }
}

/// Checks the program of a work request, and counts it.
fn triggers(prepared: &Prepared, count: &mut u32) {
    *count += 1;
    let text = prepared.disassemble();
    let ops: Vec<_> = prepared.program().ops().collect();
    let [before @ .., ProgramOp::StoreDword { value, .. }] = &ops[..] else {
        panic!("no trigger at the end:\n{text}");
    };
    assert_eq!(value, count, "{text}");
    let Some((ProgramOp::Fence(fence), rest)) = before.split_last() else {
        panic!("no fence before the trigger:\n{text}");
    };
    // The fence covers the work request, which the CPU wrote, and stores of the stream's kernels to memory that the device reads.
    for needed in [Fence::READ, Fence::WRITE, Fence::FROM_CPU, Fence::SYSTEM] {
        assert!(fence.contains(needed), "{fence}:\n{text}");
    }
    assert_eq!(rest, [], "another store than the trigger's:\n{text}");
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    let [.., fence, trigger] = &lines[..] else {
        panic!("{text}");
    };
    assert!(
        fence.contains("FENCE") && trigger.contains("STORE_DWORD"),
        "{text}"
    );
}

/// A batch with an endpoint on the sync path is executed by the calling thread. Another endpoint in it, which streams ring for, waits for earlier work
/// that is queued on another stream: the doorbell record is a count, so an early doorbell would ring for both.
#[test]
fn sync_batch_waits_for_earlier_work_of_another_stream() {
    let _limit = Limit::new("turn", STEP);
    let device = Device::open("softcx").unwrap();
    for control in [Control::Direct, Control::Proxy] {
        let mut queued = Pair::new(&device, &with(control));
        let mut called = Pair::new(&device, &with(Control::Sync));
        let (theirs, ours) = (queued.region(64), called.region(64));
        let held = HostStream::new("held").unwrap();
        let other = HostStream::new("other").unwrap();
        let gate = Arc::new(AtomicU32::new(0));
        let closed = Arc::clone(&gate);
        held.launch(move || {
            while closed.load(Ordering::Acquire) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        })
        .unwrap();
        let write = |bytes: &'static [u8; 4], region: &doorbell::Region| {
            let remote = region.remote();
            Work::write_inline(bytes, RemoteSlice::at(remote.addr, remote.rkey))
        };
        let first = write(&[1; 4], &theirs);
        let first = queued.a.stream_queue_send(&held, &first).unwrap();
        let mut batch = vec![
            queued.a.prepare_send(&write(&[2; 4], &theirs)).unwrap(),
            called.a.prepare_send(&write(&[3; 4], &ours)).unwrap(),
        ];
        let second = batch[0].ticket();
        let caller = std::thread::spawn(move || stream_post_all(&other, &mut batch).map(drop));
        // Longer than a doorbell takes, even on a busy machine. If it is too short, the test can only miss the fault.
        std::thread::sleep(Duration::from_millis(300));
        assert!(!caller.is_finished(), "{control:?}: the batch did not wait");
        assert_eq!((theirs.load_u32(0), ours.load_u32(0)), (Ok(0), Ok(0)));
        assert_eq!(first.status(), Status::Queued, "{control:?}");
        gate.store(1, Ordering::Release);
        caller.join().unwrap().unwrap();
        for pair in [&mut queued, &mut called] {
            pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
        queued.a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!(
            (first.status(), second.status()),
            (Status::Complete, Status::Complete)
        );
        let after = (theirs.load_u32(0), ours.load_u32(0));
        assert_eq!(after, (Ok(0x0202_0202), Ok(0x0303_0303)), "{control:?}");
    }
}

/// In a batch that the calling thread executes, operations behind a failed one are not executed, as on a stream.
#[test]
fn a_batch_in_the_calling_thread_ends_at_a_failure() {
    let _limit = Limit::new("failure", STEP);
    for continues in [false, true] {
        let device = Device::open("softcx").unwrap();
        let mut failing = Pair::new(&device, &with(Control::Sync));
        let mut behind = Pair::new(&device, &with(Control::Direct));
        let region = behind.region(64);
        let remote = region.remote();
        let stream = HostStream::new("batch").unwrap();
        stream.continue_on_error(continues);
        let nowhere = Work::write_inline(&[1; 4], RemoteSlice::at(remote.addr, !remote.rkey));
        let write = Work::write_inline(&[2; 4], RemoteSlice::at(remote.addr, remote.rkey));
        // All is prepared before the endpoint fails: calls are refused after that.
        let mut batch = vec![
            failing.a.prepare_send(&nowhere).unwrap(),
            failing.a.prepare_wait_cq(QueueKind::Send).unwrap(),
            behind.a.prepare_send(&write).unwrap(),
            behind.a.prepare_wait_cq(QueueKind::Send).unwrap(),
        ];
        let tickets = stream_post_all(&stream, &mut batch).unwrap();
        let [sent, wait, write, over] = &tickets[..] else {
            panic!("{tickets:?}")
        };
        for failed in [sent, wait] {
            assert!(matches!(failed.status(), Status::Failed(_)), "{failed:?}");
        }
        let executed = [write, over].map(|ticket| ticket.status() == Status::Complete);
        assert_eq!(executed, [continues; 2], "{tickets:?}");
        let written = if continues { 0x0202_0202 } else { 0 };
        assert_eq!(region.load_u32(0), Ok(written));
        let error = stream.synchronize(SOON).unwrap_err();
        assert!(matches!(error, Error::Asynchronous { .. }), "{error}");
    }
}

/// Work queued on the stream of a batch while the calling thread executes the batch does not overtake it.
#[test]
fn a_stream_does_not_overtake_a_batch_in_the_calling_thread() {
    let _limit = Limit::new("overtake", STEP);
    let device = Device::open("softcx").unwrap();
    for control in [Control::Direct, Control::Proxy] {
        let mut called = Pair::new(&device, &with(Control::Sync));
        let mut queued = Pair::new(&device, &with(control));
        let region = queued.region(64);
        let remote = region.remote();
        let remote = RemoteSlice::at(remote.addr, remote.rkey);
        let stream = HostStream::new("batch").unwrap();
        let receive = called.a.prepare_recv(1, &[]).unwrap();
        stream_post(&stream, receive).unwrap();
        let mut batch = vec![
            called.a.prepare_wait_cq(QueueKind::Recv).unwrap(),
            queued
                .a
                .prepare_send(&Work::write_inline(&[1; 4], remote))
                .unwrap(),
        ];
        let next = queued
            .a
            .prepare_send(&Work::write_inline(&[2; 4], remote))
            .unwrap();
        let [first, second] = [batch[1].ticket(), next.ticket()];
        let caller = {
            let stream = stream.clone();
            std::thread::spawn(move || stream_post_all(&stream, &mut batch).map(drop))
        };
        while first.status() == Status::Prepared {
            std::thread::yield_now();
        }
        let mut next = Some(next);
        while let Some(prepared) = next.take() {
            match stream_post(&stream, prepared) {
                Ok(_) => {}
                // The other thread is still about to hand over the batch.
                Err(rejected) if matches!(rejected.error, Error::State { .. }) => {
                    next = Some(rejected.prepared);
                }
                Err(rejected) => panic!("{rejected}"),
            }
        }
        // Longer than a doorbell takes, even on a busy machine. If it is too short, the test can only miss the fault.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(region.load_u32(0), Ok(0), "{control:?}");
        assert_eq!([&first, &second].map(Ticket::status), [Status::Queued; 2]);
        let other = HostStream::new("other").unwrap();
        called
            .b
            .stream_queue_send(&other, &Work::send(&[]))
            .unwrap();
        caller.join().unwrap().unwrap();
        stream.synchronize(SOON).unwrap();
        for _ in 0..2 {
            queued.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
        assert_eq!([&first, &second].map(Ticket::status), [Status::Complete; 2]);
        assert_eq!(region.load_u32(0), Ok(0x0202_0202), "{control:?}");
    }
}

/// A wait by count is released only when the completions before its own are counted, for which there are no waits. None of them arrives, because their
/// receives were never rung.
#[test]
fn wait_by_count_is_released_with_earlier_unwaited_completions() {
    let _limit = Limit::new("counted", STEP);
    let device = Device::open("softcx").unwrap();
    for control in [Control::Direct, Control::Proxy] {
        for unwaited in [0, 1, 3] {
            let mut pair = Pair::new(&device, &with(control));
            // This stream accesses only memory: only the polled word can release it.
            let stream = StoreOnlyStream(HostStream::new("counted").unwrap());
            let receives: Vec<_> = (0..=unwaited)
                .map(|number| pair.b.prepare_recv(number, &[]).unwrap())
                .collect();
            for _ in 0..unwaited {
                drop(pair.b.prepare_wait_cq(QueueKind::Recv).unwrap());
            }
            let short = Some(Duration::from_millis(50));
            let wait = pair
                .b
                .stream_wait_cq_for(&stream, QueueKind::Recv, short)
                .unwrap();
            let ended = stream.synchronize(SOON);
            assert_eq!(ended, Ok(()), "{control:?}, {unwaited}");
            let failure = pair.b.failure().unwrap();
            assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
            assert_eq!(wait.status(), Status::Failed(failure));
            drop(receives);
            // The endpoint and the stream work after a reset.
            pair.reset();
            pair.b.stream_queue_recv(&stream, 1, &[]).unwrap();
            pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
            pair.a.post_send(&Work::send(&[])).unwrap();
            assert_eq!(stream.synchronize(SOON), Ok(()));
            assert_eq!(pair.b.failure(), None);
        }
    }
}

/// A stalled proxy affects all tests of this process that use the same proxy thread.
static STALLED: Mutex<()> = Mutex::new(());

/// A proxy thread that is not scheduled causes delay, but no loss.
#[test]
fn a_proxy_that_stalls_for_two_seconds_loses_nothing() {
    let _alone = STALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let _limit = Limit::new("stall", STEP);
    let stall = Duration::from_millis(from_env("DOORBELL_STALL_MS", 2000));
    // With a separate proxy thread: endpoints of other tests are served by another one.
    let device = Device::open("softcx,path=proxy,cpu=0").unwrap_or_else(|_| proxied());
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(1 << 16);
    let remote = region.remote();
    let stream = HostStream::new("stalled").unwrap();
    let queue = |pair: &mut Pair, from: u32| {
        for number in from..from + 20 {
            let bytes = number.to_ne_bytes();
            let to = remote.slice(u64::from(number) * 4, 4).unwrap();
            let work = Work::write_inline(&bytes, to);
            pair.a.stream_queue_send(&stream, &work).unwrap();
            pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        }
    };
    queue(&mut pair, 1);
    stream.synchronize(SOON).unwrap();
    device.set_proxy_stalled(true).unwrap();
    queue(&mut pair, 21);
    let started = Instant::now();
    std::thread::sleep(stall / 2);
    assert!(!stream.query().unwrap(), "another thread rang");
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
    let sent = pair
        .a
        .stream_queue_send(&stream, &Work::nop().wr_id(77))
        .unwrap();
    let short = Some(Duration::from_millis(100));
    let wait = pair
        .a
        .stream_wait_cq_for(&stream, QueueKind::Send, short)
        .unwrap();
    let started = Instant::now();
    // Released by the watchdog's completion, or told to end the wait: the stream may see either first.
    let ended = stream.synchronize(SOON);
    assert!(
        matches!(ended, Err(Error::Asynchronous { .. })),
        "{ended:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(30));
    let failure = pair.a.failure().unwrap();
    assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
    assert_eq!(failure.wr_id, Some(77), "{failure}");
    // The proxy did not ring, so nothing was sent.
    for ticket in [sent, wait] {
        assert_eq!(ticket.status(), Status::Failed(failure));
    }
    device.set_proxy_stalled(false).unwrap();
    pair.reset();
    assert!(stream.take_fault().is_some());
    pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
}

/// A hundred endpoints on one proxy thread; one of them fails during transfers, for each possible reason.
#[test]
fn failed_endpoint_does_not_affect_others_on_its_proxy() {
    const PAIRS: usize = 50;
    let _limit = Limit::new("hundred", STEP);
    let device = proxied();
    let mut pairs: Vec<Pair> = (0..PAIRS)
        .map(|_| Pair::new(&device, &EndpointConfig::default()))
        .collect();
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();
    let streams: Vec<_> = (0..2).map(|_| HostStream::new("many").unwrap()).collect();
    // A failure of one endpoint must not discard work of others on the same stream.
    streams
        .iter()
        .for_each(|stream| stream.continue_on_error(true));
    let corrupting = Corrupting {
        stream: HostStream::new("corrupting").unwrap(),
        value: 0x8000_0000,
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
                let to = remote.slice(at * 4, 4).unwrap();
                let work = Work::write_inline(&data, RemoteSlice::at(to.addr(), key));
                let sent = retry_past_stream_faults(|| pair.a.stream_queue_send(stream, &work));
                let waited = sent.and_then(|_| {
                    retry_past_stream_faults(|| pair.a.stream_wait_cq(stream, QueueKind::Send))
                });
                // The one that fails may have failed by its next operation.
                assert!(number == bad || waited.is_ok(), "{waited:?}");
            }
            if number == bad && round % 3 == 2 {
                pair.a.abort();
            }
        }
        for stream in streams.iter().chain([&corrupting.stream]) {
            while let Err(error) = stream.synchronize(SOON) {
                assert!(matches!(error, Error::Asynchronous { .. }), "{error}");
                stream.take_fault();
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

/// Repeats the call while it returns an earlier failure of the stream and queues nothing; there are few of these.
fn retry_past_stream_faults(
    queue: impl FnMut() -> doorbell::Result<Ticket>,
) -> doorbell::Result<Ticket> {
    let mut calls = std::iter::repeat_with(queue).take(10);
    let told = |called: &doorbell::Result<_>| matches!(called, Err(Error::Asynchronous { .. }));
    calls.find(|called| !told(called)).unwrap()
}

/// A stream that stores another value than the program of a work request, as a stray pointer of a kernel would.
struct Corrupting {
    stream: HostStream,
    value: u32,
}

impl Corrupting {
    fn corrupt(&self, submission: &mut Submission) {
        let targets = submission.owner.targets();
        let mut program = Program::new(targets);
        for op in submission.program.ops() {
            let dword = |at: At| targets.get(at.target).unwrap().dword(at.offset).unwrap();
            let added = match op {
                ProgramOp::StoreDword { at, .. } if at.role == Role::Memory => {
                    program.store_dword(dword(at), self.value)
                }
                ProgramOp::StoreDword { at, value } => program.store_dword(dword(at), value),
                ProgramOp::PollGeq { at, value } => program.poll_geq(dword(at), value),
                ProgramOp::Fence(fence) => program.fence(fence),
                other => panic!("not of a program of the proxy path: {other:?}"),
            };
            added.unwrap();
        }
        submission.program = program;
    }
}

impl doorbell::__private::SealedExecutor for Corrupting {}

// SAFETY: what is submitted is passed on to a stream that keeps the contract, but for the values that it stores, which are this test.
unsafe impl Executor for Corrupting {
    fn id(&self) -> u64 {
        self.stream.id()
    }

    fn name(&self) -> &str {
        "corrupting"
    }

    fn executes_on_host(&self) -> bool {
        self.stream.executes_on_host()
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> doorbell::Result<()> {
        batch
            .iter_mut()
            .for_each(|submission| self.corrupt(submission));
        self.stream.submit(batch)
    }

    fn submit_one(&self, mut submission: Submission) -> Result<(), (Submission, Error)> {
        self.corrupt(&mut submission);
        self.stream.submit_one(submission)
    }

    fn record(&self, event: &Event) -> doorbell::Result<()> {
        self.stream.record(event)
    }

    fn wait_event(&self, event: &Event) -> doorbell::Result<()> {
        self.stream.wait_event(event)
    }

    fn take_fault(&self) -> Option<Error> {
        self.stream.take_fault()
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.stream.fail(failure)
    }

    fn query(&self) -> doorbell::Result<bool> {
        self.stream.query()
    }

    fn synchronize(&self, timeout: Option<Duration>) -> doorbell::Result<()> {
        self.stream.synchronize(timeout)
    }
}

/// A short link failure must not fail an endpoint: retries cover it.
#[test]
fn link_flaps_delay_but_fail_nothing() {
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
            let work = Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey));
            pair.a.stream_queue_send(&stream, &work).unwrap();
            pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            stream.synchronize(SOON).unwrap();
            assert_eq!(region.load_u32(0), Ok(number), "{path}");
        }
        assert_eq!(pair.a.failure(), None, "{path}");
    }
}

/// A NIC that is pulled out: every wait ends, every ticket fails, and new endpoints are refused.
#[test]
fn surprise_removal_fails_endpoints_in_bounded_time() {
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
        let work = Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey));
        let error = loop {
            let queued = pair.a.stream_queue_send(&stream, &work);
            let waited = queued.and_then(|_| pair.a.stream_wait_cq(&stream, QueueKind::Send));
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
            assert!(started.elapsed() < STEP / 2, "{path}");
        };
        assert!(
            matches!(&error, Error::Work(failure) if failure.cause == Cause::QueuePair),
            "{path}: {error}"
        );
        let refused = doorbell::Endpoint::new(&pair.domain, &EndpointConfig::default());
        let text = refused.map(drop).unwrap_err().to_string();
        assert!(text.contains("gone"), "{path}: {text}");
    }
}

/// Many endpoints, many streams, in random order: each stream sees its own order, whichever component rings.
#[test]
fn proxy_keeps_random_stream_orders() {
    let limit = Limit::new("random", STEP);
    let seed = from_env("DOORBELL_SEED", 0xd00b_0004);
    println!("DOORBELL_SEED={seed}");
    let mut random = Random(seed);
    let device = proxied();
    let config = EndpointConfig::default().send_depth(8).recv_depth(8);
    let mut pairs: Vec<Pair> = (0..8).map(|_| Pair::new(&device, &config)).collect();
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();
    let streams: Vec<_> = (0..3).map(|_| HostStream::new("order").unwrap()).collect();
    let mut counts = [0u32; 8];
    for round in 0..from_env("DOORBELL_ROUNDS", 20_000) {
        limit.step(round, STEP);
        let at = random.below(8) as usize;
        let (pair, region) = (&mut pairs[at], &regions[at]);
        let stream = &streams[random.below(3) as usize];
        let remote = region.remote();
        let count = counts[at] + 1;
        let bytes = count.to_ne_bytes();
        // Unsignaled work is retired by a later signaled request: a queue full of it stays full.
        let signaled = count % 4 == 0 || random.below(2) == 0;
        let work = Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey))
            .signaled(signaled);
        match pair.a.stream_queue_send(stream, &work) {
            Ok(_) => counts[at] = count,
            Err(Error::QueueFull { .. }) => {
                for stream in &streams {
                    stream.synchronize(SOON).unwrap();
                }
                while pair.a.poll_cq(QueueKind::Send).unwrap().is_some() {}
                continue;
            }
            Err(other) => panic!("{other}"),
        }
        if signaled {
            pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    }
    for stream in &streams {
        stream.synchronize(SOON).unwrap();
    }
    for ((pair, region), count) in pairs.iter_mut().zip(&regions).zip(counts) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while region.load_u32(0) != Ok(count) {
            assert!(Instant::now() < deadline, "the last write did not arrive");
            pair.a.poll_cq(QueueKind::Send).unwrap();
        }
        assert_eq!(pair.a.failure(), None);
    }
}

/// A caller that only retries refused posts gets room.
#[test]
fn retried_posts_find_room() {
    let _limit = Limit::new("room", STEP);
    for path in ["direct", "proxy", "sync"] {
        let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
        let name = name.split(',').next().unwrap_or_default();
        if path == "direct" && name.starts_with("verbs:") {
            continue;
        }
        let device = Device::open(&format!("{name},path={path}")).unwrap();
        let config = EndpointConfig::default().send_depth(4);
        let mut pair = Pair::new(&device, &config);
        let region = pair.region(64);
        let remote = region.remote();
        for number in 1..=200u32 {
            let bytes = number.to_ne_bytes();
            let work = Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey))
                .signaled(number.is_multiple_of(4));
            loop {
                match pair.a.post_send(&work) {
                    Ok(_) => break,
                    // The completions are not waited for here; one in four is signaled, and each occupies a place until it is taken.
                    Err(Error::QueueFull { queue, .. }) if queue.contains("completion") => {
                        while pair.a.poll_cq(QueueKind::Send).unwrap().is_some() {}
                    }
                    Err(Error::QueueFull { .. }) => std::thread::yield_now(),
                    Err(other) => panic!("{path}: {other}"),
                }
            }
        }
        let started = Instant::now();
        while region.load_u32(0) != Ok(200) {
            assert!(started.elapsed() < Duration::from_secs(20), "{path}");
            pair.a.poll_cq(QueueKind::Send).unwrap();
        }
    }
}
