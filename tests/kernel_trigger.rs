//! Triggers: operations that kernels of the application ring, in addition to the suites of the public interface with
//! `DOORBELL_TEST_STREAM=cuda-trigger`. Over the stand-in for the driver the kernel is a function of the CPU, made of the same header; with a GPU it
//! is the library's own, `doorbell_step`.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // launches kernels that execute triggers

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell::softcx::Faults;
use doorbell::{
    Cause, Condition, Control, CudaContext, CudaStream, DeviceBuffer, Error, Event, Executor,
    QueueKind, RemoteSlice, Status, Ticket, Trigger, TriggerStream, Work, stream_post_all,
    stream_wait_value32, stream_write_value32,
};
use rig::gpu::{Bench, alone, config, context};
use rig::{Pair, Random, SOON, control, device, from_env};
use standin::Fault;
use waived::waived;

const OK: i32 = 0;
const ESTATE: i32 = -16;
const ETIMEOUT: i32 = -17;
const EWORK: i32 = -19;
const NOT_RUN: i32 = 77;

const BOUND: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(30);

/// An application: a stream whose kernels execute triggers, and memory for their return codes.
struct Application {
    context: CudaContext,
    stream: CudaStream,
    codes: DeviceBuffer,
}

impl Application {
    fn new(context: &CudaContext) -> Application {
        let application = Application {
            context: context.clone(),
            stream: CudaStream::new(context, "application").unwrap(),
            codes: context.alloc(4 * 64).unwrap(),
        };
        application.forget_codes();
        application
    }

    /// `None`, and the test is WAIVED, where kernels cannot ring.
    fn of(test: &str) -> Option<Application> {
        let context = context(test)?;
        if is_sync(test) {
            return None;
        }
        Some(Application::new(&context))
    }

    fn kernels(&self) -> TriggerStream {
        TriggerStream::new(&self.context, "kernels").unwrap()
    }

    fn launch(&self, trigger: &Trigger, bound: Duration, place: u64) {
        let code = self.codes.ptr() + 4 * place;
        // SAFETY: of a stream of this context; the tests keep it, or what it has queued, until the kernel is done, and the codes are kept here.
        unsafe { self.stream.step(Duration::ZERO, trigger, bound, code) }.unwrap();
    }

    fn code(&self, place: u64) -> i32 {
        let mut bytes = [0; 4];
        self.codes.copy_to_host(4 * place, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    }

    fn forget_codes(&self) {
        let bytes = NOT_RUN.to_ne_bytes().repeat(64);
        self.codes.copy_from_host(0, &bytes).unwrap();
    }

    /// Executes all that is queued by kernels, one after the other; returns their codes and the time it took.
    fn execute_within(&self, kernels: &TriggerStream, bound: Duration) -> (Vec<i32>, Duration) {
        let triggers = take_all(kernels);
        self.forget_codes();
        let start = Instant::now();
        for (place, trigger) in triggers.iter().enumerate() {
            self.launch(trigger, bound, place as u64);
        }
        self.stream.synchronize(SOON).unwrap();
        let codes = (0..triggers.len()).map(|place| self.code(place as u64));
        (codes.collect(), start.elapsed())
    }

    fn execute(&self, kernels: &TriggerStream) -> Vec<i32> {
        self.execute_within(kernels, BOUND).0
    }
}

fn take_all(kernels: &TriggerStream) -> Vec<Trigger> {
    std::iter::from_fn(|| kernels.take().unwrap()).collect()
}

fn is_sync(test: &str) -> bool {
    let is_sync = control(&device()) == Control::Sync;
    if is_sync {
        waived(test, "on the sync path no kernel rings");
    }
    is_sync
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < BOUND, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(bench: &mut Bench, stream: &dyn Executor, value: u8) -> [Ticket; 2] {
    let Bench { pair, region } = bench;
    region.fill(0, 512, value).unwrap();
    region.fill(4096, 512, !value).unwrap();
    let data = [region.slice(0, 512).unwrap()];
    let remote = region.remote();
    let to = remote.addr + 4096;
    let sent = pair
        .a
        .stream_queue_write(stream, &data, RemoteSlice::at(to, remote.rkey));
    let waited = pair.a.stream_wait_cq(stream, QueueKind::Send);
    [sent.unwrap(), waited.unwrap()]
}

fn is_complete(ticket: &Ticket) -> bool {
    ticket.status() == Status::Complete
}

fn cause(ticket: &Ticket) -> Option<Cause> {
    match ticket.status() {
        Status::Failed(error) => Some(error.cause),
        _ => None,
    }
}

fn is_discarded(ticket: &Ticket) -> bool {
    ticket.status() == Status::Discarded || cause(ticket) == Some(Cause::Discarded)
}

/// On such a GPU a kernel could see a completion before the data. A child of this test has such a GPU.
#[test]
fn kernel_stream_refuses_waits_on_a_gpu_with_unordered_nic_writes() {
    let _alone = alone();
    let test = "kernel_stream_refuses_waits_on_a_gpu_with_unordered_nic_writes";
    if !standin::is_standin() {
        return waived(test, "a real device has the order that it has");
    }
    if is_sync(test) || standin::lacking(test, "ordering") {
        return;
    }
    let Some(application) = Application::of(test) else {
        return;
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    let sent = (bench.pair.a).stream_queue_send(&kernels, &Work::nop());
    let refused = (bench.pair.a)
        .stream_wait_cq(&kernels, QueueKind::Send)
        .unwrap_err();
    assert!(refused.to_string().contains("WRITES_ORDERING"), "{refused}");
    let condition = Condition::GreaterOrEqual(1);
    let refused = stream_wait_value32(&kernels, &bench.region, 0, condition, None).unwrap_err();
    assert!(refused.to_string().contains("WRITES_ORDERING"), "{refused}");
    // Sends are executed as before.
    assert_eq!(application.execute(&kernels), [OK]);
    assert_eq!(sent.unwrap().wait(SOON), Ok(()));
}

#[test]
fn kernel_rings_prepared_operations_and_waits_for_them() {
    let _alone = alone();
    let Some(application) = Application::of("kernel_rings_prepared_operations_and_waits_for_them")
    else {
        return;
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    assert!(kernels.take().unwrap().is_none());
    for round in 0..50 {
        let tickets = write(&mut bench, &kernels, round);
        // All are in one trigger, and nothing is rung before a kernel executes it.
        let trigger = kernels.take().unwrap().unwrap();
        assert!(kernels.take().unwrap().is_none());
        assert_eq!(trigger.number(), u64::from(round));
        assert_eq!(kernels.query(), Ok(false));
        std::thread::sleep(Duration::from_millis(2));
        assert!(
            tickets
                .iter()
                .all(|ticket| ticket.status() == Status::Queued)
        );
        assert!(bench.region.is_filled_with(4096, 512, !round).unwrap());
        application.forget_codes();
        application.launch(&trigger, BOUND, 0);
        application.stream.synchronize(SOON).unwrap();
        assert_eq!(application.code(0), OK);
        assert!(bench.region.is_filled_with(4096, 512, round).unwrap());
        kernels.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete));
        assert_eq!(kernels.query(), Ok(true));
    }
}

/// The rings wrap, and there are more operations than fit into one trigger.
#[test]
fn thousands_of_operations_execute_once_and_in_order() {
    let _alone = alone();
    let Some(application) = Application::of("thousands_of_operations_execute_once_and_in_order")
    else {
        return;
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    let mut random = Random(from_env("DOORBELL_SEED", 6));
    let (mut posted, mut triggers) = (0_u64, 0);
    while posted < 2000 {
        let count = 1 + random.below(24);
        let mut tickets = vec![];
        let a = &mut bench.pair.a;
        for _ in 0..count {
            tickets.push(a.stream_queue_send(&kernels, &Work::nop()).unwrap());
        }
        for _ in 0..count {
            tickets.push(a.stream_wait_cq(&kernels, QueueKind::Send).unwrap());
        }
        let codes = application.execute(&kernels);
        assert!(codes.iter().all(|code| *code == OK), "{codes:?}");
        triggers += codes.len();
        kernels.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete), "{posted}");
        posted += count;
        write(&mut bench, &kernels, posted as u8);
        assert_eq!(application.execute(&kernels), [OK]);
        assert!(
            bench
                .region
                .is_filled_with(4096, 512, posted as u8)
                .unwrap()
        );
        triggers += 1;
    }
    assert!(triggers > 300, "{triggers}");
}

#[test]
fn triggers_of_many_endpoints_are_executed_as_they_were_queued() {
    let _alone = alone();
    let Some(application) = Application::of("triggers_of_many_endpoints") else {
        return;
    };
    let kernels = application.kernels();
    let device = device();
    let mut pairs: Vec<Pair> = (0..12).map(|_| Pair::new(&device, &config())).collect();
    let regions: Vec<_> = pairs.iter().map(|pair| pair.region(4096)).collect();
    for round in 1..=40_u32 {
        let mut batch = vec![];
        for (pair, region) in pairs.iter_mut().zip(&regions) {
            region.store_u32(0, round).unwrap();
            let data = [region.slice(0, 4).unwrap()];
            let remote = region.remote();
            let work = Work::write(&data, RemoteSlice::at(remote.addr + 64, remote.rkey));
            batch.push(pair.a.prepare_send(&work).unwrap());
        }
        for pair in &mut pairs {
            batch.push(pair.a.prepare_wait_cq(QueueKind::Send).unwrap());
        }
        let tickets = stream_post_all(&kernels, &mut batch).unwrap();
        let codes = application.execute(&kernels);
        // More than a trigger takes.
        assert!(
            codes.len() > 1 && codes.iter().all(|code| *code == OK),
            "{codes:?}"
        );
        kernels.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete));
        assert!(
            regions
                .iter()
                .all(|region| region.load_u32(64) == Ok(round))
        );
    }
}

#[test]
fn two_kernel_streams_and_a_stream_take_turns_at_one_endpoint() {
    let _alone = alone();
    let test = "two_kernel_streams_and_a_stream";
    let Some(context) = context(test) else { return };
    if is_sync(test) {
        return;
    }
    let applications = [(); 2].map(|()| Application::new(&context));
    let kernels = applications.each_ref().map(Application::kernels);
    let stream = CudaStream::new(&context, "stream").unwrap();
    let mut bench = Bench::new();
    let mut random = Random(from_env("DOORBELL_SEED", 7));
    let region = bench.region.clone();
    let remote = region.remote();
    for round in 0..60_u32 {
        let count = 12;
        let mut tickets = vec![];
        let mut triggers = [vec![], vec![]];
        for step in 0..count {
            let value = round * count + step + 1;
            region.store_u32(8 * u64::from(step), value).unwrap();
            let data = [region.slice(8 * u64::from(step), 4).unwrap()];
            // All write to one word: the last value stays.
            let to = remote.addr + 4096;
            let which = random.below(3) as usize;
            let on: &dyn Executor = if which < 2 { &kernels[which] } else { &stream };
            tickets.push(
                bench
                    .pair
                    .a
                    .stream_queue_write(on, &data, RemoteSlice::at(to, remote.rkey))
                    .unwrap(),
            );
            if which < 2 {
                triggers[which].extend(take_all(&kernels[which]));
            }
        }
        for _ in 0..count {
            tickets.push(
                bench
                    .pair
                    .a
                    .stream_wait_cq(&stream, QueueKind::Send)
                    .unwrap(),
            );
        }
        // The kernel that is launched last may have the first turn.
        for at in [round as usize % 2, 1 - round as usize % 2] {
            applications[at].forget_codes();
            for (place, trigger) in triggers[at].iter().enumerate() {
                applications[at].launch(trigger, BOUND, place as u64);
            }
        }
        for (application, triggers) in applications.iter().zip(&triggers) {
            application.stream.synchronize(SOON).unwrap();
            let codes = (0..triggers.len()).map(|place| application.code(place as u64));
            assert!(codes.into_iter().all(|code| code == OK));
        }
        stream.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete), "{round}");
        assert_eq!(region.load_u32(4096), Ok((round + 1) * count));
    }
}

/// Each failure is returned to the waiting kernel as a code, long before its timeout, and to the owner as on every stream.
#[test]
fn every_failure_is_returned_to_the_waiting_kernel() {
    let _alone = alone();
    let Some(application) = Application::of("every_failure_is_returned_to_the_waiting_kernel")
    else {
        return;
    };
    let fails = |kernels: &TriggerStream, what: &str| {
        let (codes, took) = application.execute_within(kernels, BOUND);
        assert_eq!(codes.last(), Some(&EWORK), "{what}: {codes:?}");
        assert!(took < BOUND / 2, "{what} took {took:?}");
        // The failure is reported to the owners, and then the stream works again.
        let end = kernels.synchronize(SOON).unwrap_err();
        assert_eq!(kernels.take_fault(), Some(end), "{what}");
        until(what, || kernels.query() == Ok(true));
        assert_eq!(kernels.status(), EWORK, "{what}");
        kernels.clear_status();
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    for round in 0..8 {
        let works = |bench: &mut Bench| {
            write(bench, &kernels, round);
            assert_eq!(application.execute(&kernels), [OK]);
            assert!(bench.region.is_filled_with(4096, 512, round).unwrap());
        };
        works(&mut bench);

        let region = bench.region.clone();
        let data = [region.slice(0, 64).unwrap()];
        let remote = region.remote();
        let nowhere = remote.rkey.wrapping_add(0x1000);
        let a = &mut bench.pair.a;
        a.stream_queue_write(&kernels, &data, RemoteSlice::at(remote.addr, nowhere))
            .unwrap();
        let waited = a.stream_wait_cq(&kernels, QueueKind::Send).unwrap();
        fails(&kernels, "a completion in error");
        assert!(matches!(cause(&waited), Some(Cause::Completion { .. })));
        bench.pair.reset();
        works(&mut bench);

        let b = &mut bench.pair.b;
        let into = [region.slice(0, 16).unwrap()];
        b.stream_queue_recv(&kernels, 5, &into).unwrap();
        let late = b.stream_wait_cq_for(&kernels, QueueKind::Recv, Some(SHORT));
        fails(&kernels, "a deadline");
        assert!(matches!(cause(&late.unwrap()), Some(Cause::Deadline(_))));
        bench.pair.reset();
        works(&mut bench);

        let b = &mut bench.pair.b;
        b.stream_queue_recv(&kernels, 5, &into).unwrap();
        let aborted = b
            .stream_wait_cq_for(&kernels, QueueKind::Recv, SOON)
            .unwrap();
        let handle = b.abort_handle();
        let aborting = std::thread::spawn(move || {
            std::thread::sleep(SHORT);
            handle.abort();
        });
        fails(&kernels, "an abort");
        aborting.join().unwrap();
        assert!(cause(&aborted).is_some());
        bench.pair.reset();
        works(&mut bench);

        region.store_u32(1024, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let never = stream_wait_value32(&kernels, &region, 1024, condition, Some(SHORT)).unwrap();
        fails(&kernels, "a value that does not come");
        assert!(matches!(cause(&never), Some(Cause::Deadline(_))));
        works(&mut bench);
    }
}

/// The deadline of a trigger starts with its execution, not when it is taken.
#[test]
fn deadline_starts_when_the_kernel_starts() {
    let _alone = alone();
    let test = "deadline_starts_when_the_kernel_starts";
    let Some(context) = context(test) else { return };
    let application = Application::new(&context);
    let bench = Bench::new();
    let region = bench.region.clone();
    // The value arrives within the deadline of a kernel that has just begun, unless this thread is not scheduled: then the test repeats it with more
    // time.
    let in_time = |deadline: Duration| {
        let kernels = application.kernels();
        region.store_u32(64, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        // Two waits, so that the second is not the first operation of its trigger.
        let waits = [(); 2].map(|()| {
            stream_wait_value32(&kernels, &region, 64, condition, Some(deadline)).unwrap()
        });
        let triggers = take_all(&kernels);
        std::thread::sleep(deadline + SHORT);
        assert!(waits.iter().all(|wait| wait.status() == Status::Queued));
        application.forget_codes();
        for (place, trigger) in triggers.iter().enumerate() {
            application.launch(trigger, BOUND, place as u64);
        }
        until("the kernel begins", || waits[0].status() != Status::Queued);
        region.store_u32(64, 1).unwrap();
        application.stream.synchronize(SOON).unwrap();
        let is_done = kernels.synchronize(SOON).is_ok();
        let mut codes = (0..triggers.len()).map(|place| application.code(place as u64));
        is_done && codes.all(|code| code == OK) && waits.iter().all(is_complete)
    };
    for _ in 0..2 {
        assert!([2, 6, 18].map(Duration::from_secs).into_iter().any(in_time));
    }
}

#[test]
fn dead_peer_error_is_returned_to_the_waiting_kernel() {
    let _alone = alone();
    let Some(application) = Application::of("dead_peer_error_is_returned_to_the_waiting_kernel")
    else {
        return;
    };
    let hasty = config().ack_timeout(8).retry_count(1);
    for _ in 0..3 {
        let kernels = application.kernels();
        let Pair { mut a, b, domain } = Pair::new(&device(), &hasty);
        let region = doorbell::Region::alloc(&domain, 8192, doorbell::Access::ALL).unwrap();
        let data = [region.slice(0, 64).unwrap()];
        let remote = region.remote();
        drop(b);
        a.stream_queue_write(
            &kernels,
            &data,
            RemoteSlice::at(remote.addr + 4096, remote.rkey),
        )
        .unwrap();
        let waited = a.stream_wait_cq(&kernels, QueueKind::Send).unwrap();
        let (codes, took) = application.execute_within(&kernels, BOUND);
        assert_eq!(codes, [EWORK]);
        assert!(took < BOUND / 2, "{took:?}");
        until("the owner", || waited.is_over());
        assert!(cause(&waited).is_some());
    }
}

#[test]
fn full_queue_is_reported_at_post() {
    let _alone = alone();
    let Some(application) = Application::of("full_queue_is_reported_at_post") else {
        return;
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    let mut sent = 0;
    let error = loop {
        match bench.pair.a.stream_queue_send(&kernels, &Work::nop()) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 10_000);
    };
    assert!(matches!(error, Error::QueueFull { .. }), "{error}");
    for _ in 0..sent {
        bench
            .pair
            .a
            .stream_wait_cq(&kernels, QueueKind::Send)
            .unwrap();
    }
    let mut codes = vec![];
    while let Some(trigger) = kernels.take().unwrap() {
        application.launch(&trigger, BOUND, 0);
        application.stream.synchronize(SOON).unwrap();
        codes.push(application.code(0));
    }
    assert!(codes.iter().all(|code| *code == OK), "{codes:?}");
    kernels.synchronize(SOON).unwrap();
    write(&mut bench, &kernels, 9);
    assert_eq!(application.execute(&kernels), [OK]);
}

/// A kernel whose wait times out: nothing behind it is executed, and every later call and ticket reports it.
#[test]
fn kernel_timeout_ends_the_stream_and_discards_the_rest() {
    let _alone = alone();
    let Some(application) = Application::of("kernel_timeout_ends_the_stream_and_discards_the_rest")
    else {
        return;
    };
    let mut bench = Bench::new();
    let region = bench.region.clone();
    for _ in 0..5 {
        let kernels = application.kernels();
        region.store_u32(1024, 0).unwrap();
        region.store_u32(1088, 0).unwrap();
        let condition = Condition::GreaterOrEqual(1);
        let wait = stream_wait_value32(&kernels, &region, 1024, condition, SOON).unwrap();
        let behind = stream_write_value32(&kernels, &region, 1088, 1).unwrap();
        let first = kernels.take().unwrap().unwrap();
        let [sent, waited] = write(&mut bench, &kernels, 3);
        let second = kernels.take().unwrap().unwrap();
        application.forget_codes();
        let start = Instant::now();
        application.launch(&first, SHORT, 0);
        application.launch(&second, SHORT, 1);
        application.launch(&first, SHORT, 2);
        application.stream.synchronize(SOON).unwrap();
        let took = start.elapsed();
        assert!(took > SHORT && took < BOUND / 2, "{took:?}");
        let codes = [0, 1, 2].map(|place| application.code(place));
        assert_eq!(codes, [ETIMEOUT, EWORK, ESTATE]);
        let error = kernels.synchronize(SOON).unwrap_err();
        assert!(
            matches!(&error, Error::Asynchronous { reason, .. } if reason.contains("gave up")),
            "{error}"
        );
        until("the owners", || {
            [&wait, &behind, &sent, &waited]
                .iter()
                .all(|ticket| ticket.is_over())
        });
        for ticket in [&wait, &behind, &sent, &waited] {
            assert!(is_discarded(ticket), "{ticket:?}");
        }
        assert_eq!(region.load_u32(1088), Ok(0));
        assert!(region.is_filled_with(4096, 512, !3).unwrap());
        // The stream has ended; a new one works.
        assert!(kernels.take().is_err());
        assert!(stream_write_value32(&kernels, &region, 1088, 1).is_err());
        bench.pair.reset();
        let kernels = application.kernels();
        write(&mut bench, &kernels, 4);
        assert_eq!(application.execute(&kernels), [OK]);
    }
}

/// A kernel stops in front of sends of many endpoints whose devices do not answer. The thread that learns of it also keeps the deadlines of other streams, and waits
/// for none of these devices.
#[test]
fn kernel_timeout_before_sends_of_hung_devices_delays_no_other_deadline() {
    const HUNG: usize = 6;
    let test = "kernel_timeout_before_sends_of_hung_devices_delays_no_other_deadline";
    let _alone = alone();
    let Some(application) = Application::of(test) else {
        return;
    };
    let device = device();
    // As long as the library waits for a device, and longer.
    let hangs = Faults {
        commands_ns: Duration::from_secs(4).as_nanos() as u64,
        ..Faults::default()
    };
    if !device.set_faults(Faults::default()) {
        return waived(test, "the device takes no faults from this process");
    }
    let mut pairs: Vec<_> = (0..HUNG).map(|_| Pair::new(&device, &config())).collect();
    let region = pairs[0].region(64);
    let condition = Condition::GreaterOrEqual(1);
    let kernels = application.kernels();
    let wait = stream_wait_value32(&kernels, &region, 0, condition, SOON).unwrap();
    let sends: Vec<_> = (pairs.iter_mut())
        .map(|pair| pair.a.stream_queue_send(&kernels, &Work::nop()).unwrap())
        .collect();
    let triggers = take_all(&kernels);
    let other = CudaStream::new(&application.context, "other").unwrap();
    device.set_faults(hangs);
    for (place, trigger) in triggers.iter().enumerate() {
        application.launch(trigger, SHORT, place as u64);
    }
    // Not by a call that settles the work of the triggers in this thread.
    until("the kernel", || application.code(0) == ETIMEOUT);
    std::thread::sleep(SHORT);
    let timeout = Duration::from_millis(50);
    let start = Instant::now();
    let late = stream_wait_value32(&other, &region, 4, condition, Some(timeout)).unwrap();
    until("the deadline", || late.is_over());
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(5),
        "a deadline of {timeout:?} after {took:?}"
    );
    assert!(matches!(late.status(), Status::Failed(_)), "{late:?}");
    until("the owners", || {
        sends.iter().chain([&wait]).all(|ticket| ticket.is_over())
    });
    assert!(sends.iter().all(|ticket| !is_complete(ticket)));
    device.set_faults(Faults::default());
    application.stream.synchronize(SOON).unwrap();
}

#[test]
fn trigger_is_executed_once_and_in_order() {
    let _alone = alone();
    let Some(application) = Application::of("trigger_is_executed_once_and_in_order") else {
        return;
    };
    let kernels = application.kernels();
    let mut bench = Bench::new();
    let first_tickets = write(&mut bench, &kernels, 1);
    let first = kernels.take().unwrap().unwrap();
    let second_tickets = write(&mut bench, &kernels, 2);
    let second = kernels.take().unwrap().unwrap();
    let start = Instant::now();
    application.launch(&second, SHORT, 0);
    application.stream.synchronize(SOON).unwrap();
    assert!(start.elapsed() > SHORT);
    // Nothing was executed.
    assert_eq!(application.code(0), ETIMEOUT);
    assert!(
        second_tickets
            .iter()
            .all(|ticket| ticket.status() == Status::Queued)
    );
    for (place, trigger) in [&first, &first, &second, &first, &second]
        .into_iter()
        .enumerate()
    {
        application.launch(trigger, BOUND, place as u64);
    }
    application.stream.synchronize(SOON).unwrap();
    let codes = [0, 1, 2, 3, 4].map(|place| application.code(place));
    assert_eq!(codes, [OK, ESTATE, OK, ESTATE, ESTATE]);
    kernels.synchronize(SOON).unwrap();
    assert!(first_tickets.iter().chain(&second_tickets).all(is_complete));

    // Kernels of two streams: the second waits for the first.
    let other = Application::new(&application.context);
    for round in 0..50 {
        write(&mut bench, &kernels, round);
        let first = kernels.take().unwrap().unwrap();
        write(&mut bench, &kernels, round);
        let second = kernels.take().unwrap().unwrap();
        other.launch(&second, BOUND, 0);
        application.launch(&first, BOUND, 0);
        application.stream.synchronize(SOON).unwrap();
        other.stream.synchronize(SOON).unwrap();
        assert_eq!((application.code(0), other.code(0)), (OK, OK));
    }
}

#[test]
fn discard_taken_ends_work_that_no_kernel_will_execute() {
    let _alone = alone();
    let Some(application) = Application::of("discard_taken_ends_work_that_no_kernel_will_execute")
    else {
        return;
    };
    let mut bench = Bench::new();
    for round in 0..4 {
        let kernels = application.kernels();
        write(&mut bench, &kernels, round);
        assert_eq!(application.execute(&kernels), [OK]);
        let taken = write(&mut bench, &kernels, round);
        let trigger = kernels.take().unwrap().unwrap();
        let queued = write(&mut bench, &kernels, round);
        let event = Event::new();
        kernels.record(&event).unwrap();
        // It is not known yet that it will not be executed.
        let error = kernels.synchronize(Some(SHORT)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::State {
                    kind: doorbell::StateKind::Deadlock,
                    ..
                }
            ),
            "{error}"
        );
        std::thread::sleep(SHORT);
        assert!(
            taken
                .iter()
                .chain(&queued)
                .all(|ticket| ticket.status() == Status::Queued)
        );
        // SAFETY: none is launched but the one below, which is told.
        unsafe { kernels.discard_taken() }.unwrap();
        let tickets = || taken.iter().chain(&queued);
        until("all is over", || tickets().all(Ticket::is_over));
        assert!(tickets().all(is_discarded));
        assert!(event.synchronize(SOON).is_err());
        application.launch(&trigger, SHORT, 0);
        application.stream.synchronize(SOON).unwrap();
        assert_eq!(application.code(0), ESTATE);
        assert!(kernels.synchronize(SOON).is_err());
        bench.pair.reset();
    }
}

#[test]
fn abort_ends_waits_of_taken_triggers_and_discards_the_rest() {
    let _alone = alone();
    let Some(application) =
        Application::of("abort_ends_waits_of_taken_triggers_and_discards_the_rest")
    else {
        return;
    };
    let bench = Bench::new();
    let region = bench.region.clone();
    for _ in 0..5 {
        let kernels = application.kernels();
        let wait = |offset| {
            region.store_u32(offset, 0).unwrap();
            let condition = Condition::GreaterOrEqual(1);
            stream_wait_value32(&kernels, &region, offset, condition, SOON).unwrap()
        };
        let taken: Vec<Ticket> = (0..8).map(|at| wait(64 * at)).collect();
        application.forget_codes();
        let triggers = take_all(&kernels);
        for (place, trigger) in triggers.iter().enumerate() {
            application.launch(trigger, BOUND, place as u64);
        }
        let queued = wait(1024);
        let start = Instant::now();
        std::thread::sleep(SHORT);
        kernels.abort();
        application.stream.synchronize(SOON).unwrap();
        assert!(start.elapsed() < BOUND / 2);
        for place in 0..triggers.len() {
            assert_eq!(application.code(place as u64), EWORK);
        }
        until("all is over", || {
            taken.iter().all(Ticket::is_over) && queued.is_over()
        });
        assert!(taken.iter().chain([&queued]).all(is_discarded));
        assert!(kernels.take().is_err());
    }
}

#[test]
fn an_abort_ends_waits_for_events_of_other_streams() {
    let _alone = alone();
    let Some(application) = Application::of("an_abort_ends_waits_for_events") else {
        return;
    };
    let bench = Bench::new();
    let region = bench.region.clone();
    for _ in 0..3 {
        for of_host in [true, false] {
            let kernels = application.kernels();
            let event = Event::new();
            let release = Arc::new(AtomicBool::new(false));
            let (host, stream);
            region.store_u32(0, 0).unwrap();
            if of_host {
                host = doorbell::HostStream::new("host").unwrap();
                let released = Arc::clone(&release);
                host.launch(move || {
                    while !released.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
                .unwrap();
                host.record(&event).unwrap();
            } else {
                stream = CudaStream::new(&application.context, "held").unwrap();
                let condition = Condition::GreaterOrEqual(1);
                stream_wait_value32(&stream, &region, 0, condition, SOON).unwrap();
                stream.record(&event).unwrap();
            }
            kernels.wait_event(&event).unwrap();
            let last = stream_write_value32(&kernels, &region, 64, 1).unwrap();
            let trigger = kernels.take().unwrap().unwrap();
            application.forget_codes();
            let start = Instant::now();
            application.launch(&trigger, BOUND, 0);
            std::thread::sleep(SHORT);
            assert!(!last.is_over());
            kernels.abort();
            application.stream.synchronize(SOON).unwrap();
            assert!(start.elapsed() < BOUND / 2);
            assert_eq!(application.code(0), EWORK);
            assert_eq!(event.query(), Ok(false));
            release.store(true, Ordering::Release);
            region.store_u32(0, 1).unwrap();
            event.synchronize(SOON).unwrap();
        }
    }
}

/// The end of a stream does not fail records that it passed before.
#[test]
fn event_record_passed_before_an_abort_succeeds() {
    let _alone = alone();
    let Some(application) = Application::of("event_record_passed_before_an_abort_succeeds") else {
        return;
    };
    let bench = Bench::new();
    for _ in 0..100 {
        let kernels = application.kernels();
        let [passed, behind] = [Event::new(), Event::new()];
        stream_write_value32(&kernels, &bench.region, 0, 1).unwrap();
        kernels.record(&passed).unwrap();
        let trigger = kernels.take().unwrap().unwrap();
        stream_write_value32(&kernels, &bench.region, 64, 1).unwrap();
        kernels.record(&behind).unwrap();
        application.launch(&trigger, BOUND, 0);
        application.stream.synchronize(SOON).unwrap();
        kernels.abort();
        assert_eq!(passed.synchronize(SOON), Ok(()));
        assert!(behind.synchronize(SOON).is_err());
        assert_eq!(bench.region.load_u32(64), Ok(0));
    }
}

#[test]
fn handles_drop_in_any_order_and_taken_triggers_execute() {
    let _alone = alone();
    let Some(application) = Application::of("handles_drop_in_any_order_and_taken_triggers_execute")
    else {
        return;
    };
    for round in 0..12_u8 {
        let mut bench = Bench::new();
        let kernels = application.kernels();
        let region = bench.region.clone();
        let taken = write(&mut bench, &kernels, round);
        let trigger = kernels.take().unwrap().unwrap();
        let queued = (round % 2 == 0).then(|| write(&mut bench, &kernels, round));
        region.fill(4096, 512, !round).unwrap();
        match round % 3 {
            0 => drop(kernels),
            1 => drop((bench, kernels)),
            _ => drop((kernels, bench)),
        }
        application.forget_codes();
        application.launch(&trigger, BOUND, 0);
        application.stream.synchronize(SOON).unwrap();
        // An endpoint that is dropped fails what it has in flight.
        if round % 3 == 0 {
            // Work that was not taken fails as soon as the host sees that the taken trigger is done; the kernel may see that failure.
            let code = application.code(0);
            assert!(code == OK || (queued.is_some() && code == EWORK), "{code}");
            assert!(region.is_filled_with(4096, 512, round).unwrap());
        } else {
            assert_ne!(application.code(0), NOT_RUN);
        }
        until("what was taken is over", || {
            taken.iter().all(Ticket::is_over)
        });
        if let Some(queued) = queued {
            until("what was not taken is over", || {
                queued.iter().all(Ticket::is_over)
            });
            assert!(!queued.iter().any(is_complete));
        }
    }
}

#[test]
fn kernels_and_streams_wait_for_each_other_by_events_and_values() {
    let _alone = alone();
    let Some(application) = Application::of("kernels_and_streams_wait_for_each_other") else {
        return;
    };
    let kernels = application.kernels();
    let stream = CudaStream::new(&application.context, "stream").unwrap();
    let host = doorbell::HostStream::new("host").unwrap();
    let mut bench = Bench::new();
    let region = bench.region.clone();
    for round in 1..=40_u32 {
        // A value from the stream, then the kernel's write, then the stream again.
        let condition = Condition::GreaterOrEqual(round);
        stream_wait_value32(&kernels, &region, 1024, condition, SOON).unwrap();
        write(&mut bench, &kernels, round as u8);
        stream_write_value32(&kernels, &region, 1088, round).unwrap();
        let after = Event::new();
        kernels.record(&after).unwrap();
        stream.wait_event(&after).unwrap();
        let seen = stream_wait_value32(&stream, &region, 1088, condition, SOON).unwrap();
        let done = Event::new();
        stream.record(&done).unwrap();
        // A host stream, whose records a GPU cannot read, and a CUDA stream.
        let gate = Event::new();
        host.launch(|| std::thread::sleep(Duration::from_millis(3)))
            .unwrap();
        host.record(&gate).unwrap();
        kernels.wait_event(&gate).unwrap();
        kernels.wait_event(&done).unwrap();
        let last = stream_write_value32(&kernels, &region, 1152, round).unwrap();
        let triggers = take_all(&kernels);
        for (place, trigger) in triggers.iter().enumerate() {
            application.launch(trigger, BOUND, place as u64);
        }
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(region.load_u32(1088), Ok(round - 1));
        region.store_u32(1024, round).unwrap();
        application.stream.synchronize(SOON).unwrap();
        for place in 0..triggers.len() {
            assert_eq!(application.code(place as u64), OK);
        }
        stream.synchronize(SOON).unwrap();
        kernels.synchronize(SOON).unwrap();
        assert!(is_complete(&seen) && is_complete(&last));
        assert_eq!(region.load_u32(1152), Ok(round));
        assert!(region.is_filled_with(4096, 512, round as u8).unwrap());
    }
}

/// A refused call does not change operations that were queued before.
#[test]
fn refused_operations_are_not_in_the_trigger() {
    let _alone = alone();
    let test = "refused_operations_are_not_in_the_trigger";
    let Some(context) = context(test) else { return };
    if is_sync(test) {
        return;
    }
    let application = Application::new(&context);
    let kernels = application.kernels();
    let mut bench = Bench::new();
    let other = Bench::new();
    for round in 0..10 {
        let tickets = write(&mut bench, &kernels, round);
        // Offsets beyond the region or misaligned.
        let region = &other.region;
        assert!(stream_write_value32(&kernels, region, 8192, 1).is_err());
        assert!(stream_write_value32(&kernels, region, 2, 1).is_err());
        let a = &mut bench.pair.a;
        let data = [region.slice(0, 64).unwrap()];
        assert!(
            a.stream_queue_write(&kernels, &data, RemoteSlice::at(0, 0))
                .is_err()
        );
        assert_eq!(application.execute(&kernels), [OK]);
        kernels.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete));
    }
}

/// If a later part of a batch is refused, its first part is not in the trigger either.
#[test]
fn batch_refused_in_the_middle_is_not_in_the_trigger() {
    let _alone = alone();
    let test = "batch_refused_in_the_middle_is_not_in_the_trigger";
    let Some(context) = context(test) else { return };
    if is_sync(test) {
        return;
    }
    let application = Application::new(&context);
    let kernels = application.kernels();
    let mut bench = Bench::new();
    write(&mut bench, &kernels, 1);
    assert_eq!(application.execute(&kernels), [OK]);
    for queued_before in [false, true] {
        // Its memory is not registered with the GPU yet.
        let mut fresh = Bench::new();
        let mut expected = vec![];
        if queued_before {
            write(&mut bench, &kernels, 2);
            expected.push(OK);
        }
        // More than fit into one trigger precede the refused operation.
        let mut batch: Vec<_> = (0..16)
            .map(|_| bench.pair.a.prepare_send(&Work::nop()).unwrap())
            .collect();
        batch.push(fresh.pair.a.prepare_send(&Work::nop()).unwrap());
        let Some(fault) = Fault::new(
            test,
            "cuMemHostRegister_v2:2,nth=1;cuMemHostRegister_v2:2,nth=2",
        ) else {
            return;
        };
        let error = stream_post_all(&kernels, &mut batch).unwrap_err();
        drop(fault);
        assert!(matches!(error, Error::Cuda { .. }), "{error}");
        assert_eq!(batch.len(), 17);
        assert_eq!(application.execute(&kernels), expected);
        kernels.synchronize(SOON).unwrap();
        assert!(
            batch
                .iter()
                .all(|op| op.ticket().status() == Status::Prepared)
        );
        let mut tickets = stream_post_all(&kernels, &mut batch).unwrap();
        for _ in 0..16 {
            tickets.push(
                bench
                    .pair
                    .a
                    .stream_wait_cq(&kernels, QueueKind::Send)
                    .unwrap(),
            );
        }
        tickets.push(
            fresh
                .pair
                .a
                .stream_wait_cq(&kernels, QueueKind::Send)
                .unwrap(),
        );
        let codes = application.execute(&kernels);
        assert!(
            codes.len() > 2 && codes.iter().all(|code| *code == OK),
            "{codes:?}"
        );
        kernels.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(is_complete));
    }
}

/// On the sync path an operation is executed in the call that queues it, after the taken triggers were executed.
#[test]
fn sync_path_executes_at_post_and_leaves_no_trigger() {
    let _alone = alone();
    let test = "sync_path_executes_at_post_and_leaves_no_trigger";
    let Some(context) = context(test) else { return };
    let application = Application::new(&context);
    let kernels = application.kernels();
    let config = config().control(Some(Control::Sync));
    let pair = Pair::new(&device(), &config);
    let region = pair.region(8192);
    let mut bench = Bench { pair, region };
    stream_write_value32(&kernels, &bench.region, 1024, 7).unwrap();
    // The write is not taken, so this call would block for ever.
    let error = bench.pair.a.stream_queue_send(&kernels, &Work::nop());
    assert!(matches!(error, Err(Error::State { .. })), "{error:?}");
    assert_eq!(application.execute(&kernels), [OK]);
    let tickets = write(&mut bench, &kernels, 5);
    assert!(kernels.take().unwrap().is_none());
    assert!(tickets.iter().all(is_complete));
    assert!(bench.region.is_filled_with(4096, 512, 5).unwrap());
    assert_eq!(bench.region.load_u32(1024), Ok(7));
}
