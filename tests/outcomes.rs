//! Reported statuses are correct: no ticket is Complete for a write that did not arrive, and nothing is executed behind a failure.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell::{
    Cause, EndpointConfig, Error, Event, Executor, QueueKind, RemoteRegion, RemoteSlice, Status,
    Ticket, Work, stream_post,
};
use rig::{Pair, SOON, has_no_queue, strict_device as device};

/// Polls until the ticket has its final status. The rig's time limit ends the test if it gets none.
fn settled(ticket: &Ticket) -> Status {
    let started = Instant::now();
    while !ticket.is_over() {
        assert!(
            started.elapsed() < SOON.unwrap(),
            "never over: {:?}",
            ticket.status()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    ticket.status()
}

/// These tests lose peers, so the retries are to end within half a second.
fn config() -> EndpointConfig {
    EndpointConfig::default().ack_timeout(14)
}

/// The endpoint fails before its stream has reached the doorbells, so the writes were never transmitted.
#[test]
fn write_never_transmitted_is_not_reported_complete() {
    let device = device();
    if has_no_queue(&device, "write_never_transmitted_is_not_reported_complete") {
        return;
    }
    let mut unknown = 0;
    for round in 0..40u64 {
        let mut pair = Pair::new(&device, &config());
        let (from, to) = (pair.region(4096), pair.region(4096));
        from.fill(0, 4096, 7).unwrap();
        let stream = rig::stream("s");
        stream
            .launch(|| std::thread::sleep(Duration::from_millis(10)))
            .unwrap();
        let remote = to.remote();
        let mut tickets = Vec::new();
        for at in 0..3u64 {
            let slices = [from.slice(at * 64, 64).unwrap()];
            let work = Work::write(&slices, remote.slice(at * 64, 64).unwrap()).wr_id(at);
            tickets.push(pair.a.stream_queue_send(&stream, &work).unwrap());
            if at == 0 {
                pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            }
        }
        if round % 2 == 0 {
            pair.a.abort();
        } else {
            // Through a handle, as another thread would.
            pair.a.abort_handle().abort();
        }
        let _ = stream.synchronize(SOON);
        let unknown_before = unknown;
        for (at, ticket) in tickets.iter().enumerate() {
            let status = settled(ticket);
            let arrived = to.is_filled_with(at as u64 * 64, 64, 7).unwrap();
            assert!(
                status != Status::Complete || arrived,
                "round {round}: write {at} never arrived"
            );
            if matches!(status, Status::Unknown(_)) && !arrived {
                unknown += 1;
                continue;
            }
            assert!(
                matches!(status, Status::Failed(_) | Status::Discarded) || arrived,
                "round {round}, write {at}: {status:?} of a write that never left"
            );
        }
        // A stream executes one doorbell at a time.
        assert!(unknown - unknown_before <= 1, "round {round}: {tickets:?}");
    }
    // It is not known whether a GPU has begun the next doorbell. A host thread is seldom interrupted between recording that it begins a doorbell and
    // ringing it.
    assert!(rig::is_cuda() || unknown <= 2, "{unknown} are unknown");
}

/// A queue of depth 1: the next request takes the entry of a failed one before the failure is reported.
#[test]
fn failed_request_is_not_reported_complete() {
    let config = config().send_depth(1);
    let mut pair = Pair::new(&device(), &config);
    let region = pair.region(4096);
    let remote = region.remote();
    for round in 0..rig::from_env("DOORBELL_ROUNDS", 3000) {
        let slices = [region.slice(0, 64).unwrap()];
        let wrong = RemoteSlice::at(remote.addr, remote.rkey ^ 0x100);
        let bad = pair
            .a
            .post_send(&Work::write(&slices, wrong).wr_id(7))
            .unwrap();
        loop {
            match pair.a.post_send(&Work::nop().wr_id(8)) {
                Ok(_) | Err(Error::Work(_)) => break,
                Err(Error::QueueFull { .. }) => std::hint::spin_loop(),
                Err(error) => panic!("{error}"),
            }
        }
        while pair.a.failure().is_none() {
            std::thread::yield_now();
        }
        let status = bad.status();
        assert!(
            matches!(status, Status::Failed(_)),
            "round {round}: {status:?}, and the endpoint: {:?}",
            pair.a.failure()
        );
        pair.reset();
    }
}

/// A wait that was never queued and has no ticket leaves its completion to the next poll, even if the endpoint has failed meanwhile.
#[test]
fn wait_rolled_back_after_a_failure_leaves_its_completion() {
    let mut pair = Pair::new(&device(), &config());
    for round in 0..20 {
        let sent = pair.a.post_send(&Work::nop().wr_id(round)).unwrap();
        while !sent.is_over() {
            std::thread::yield_now();
        }
        let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
        pair.a.abort();
        if round % 2 == 1 {
            // Also after the endpoint's requests were ended.
            assert!(pair.a.prepare_wait_cq(QueueKind::Send).is_err());
            while sent.status() != Status::Complete {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        pair.a.rollback(wait);
        let polled = pair.a.poll_cq(QueueKind::Send).unwrap().unwrap();
        assert_eq!(polled.wr_id, round);
        assert!(matches!(
            pair.a.poll_cq(QueueKind::Send),
            Err(Error::Work(failure)) if failure.cause == Cause::Aborted
        ));
        pair.reset();
    }
}

/// A reset flushes rung work requests that are in flight first; their tickets have the resulting status.
#[test]
fn reset_flushes_rung_work_requests() {
    let device = device();
    let config = config().rnr_retry(7);
    let mut pair = Pair::new(&device, &config);
    let region = pair.region(64);
    for _ in 0..20 {
        // Retried without end: there is no receive.
        let slices = [region.slice(0, 8).unwrap()];
        let sent = pair.a.post_send(&Work::send(&slices)).unwrap();
        pair.a.reset().unwrap();
        let status = sent.status();
        // A device that hangs, or is not scheduled, has not flushed it in time.
        let may_be_late = device.name() != "softcx";
        assert!(
            matches!(status, Status::Failed(_))
                || may_be_late && matches!(status, Status::Unknown(_)),
            "{status:?}"
        );
        pair.reset();
    }
}

/// The ticket of a dropped operation stays Cancelled when its entry in the queue is reused.
#[test]
fn a_dropped_operation_stays_cancelled() {
    let mut pair = Pair::new(&device(), &config().send_depth(4).recv_depth(4));
    let stream = rig::stream("s");
    let dropped = pair.a.prepare_send(&Work::nop()).unwrap();
    let kept = pair.a.prepare_send(&Work::nop()).unwrap();
    let rolled_back = pair.a.prepare_send(&Work::nop()).unwrap();
    let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
    let tickets = [&dropped, &rolled_back, &wait].map(doorbell::Prepared::ticket);
    pair.a.rollback(rolled_back);
    drop((dropped, wait));
    stream_post(&stream, kept).unwrap();
    stream.synchronize(SOON).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    for _ in 0..20 {
        pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        let statuses = tickets.each_ref().map(Ticket::status);
        assert_eq!(statuses, [Status::Cancelled; 3]);
    }
}

/// A dropped endpoint takes no more messages, and each of its tickets ends.
#[test]
fn a_dropped_endpoint_receives_nothing_and_its_tickets_end() {
    let mut pair = Pair::new(&device(), &config().rnr_retry(1));
    let (from, to) = (pair.region(4096), pair.region(4096));
    from.fill(0, 64, 9).unwrap();
    let slice = |at| [to.slice(at, 64).unwrap()];
    let tickets = [0, 64].map(|at| pair.b.post_recv(at, &slice(at)).unwrap());
    drop(pair.b);
    let sent = [from.slice(0, 64).unwrap()];
    pair.a.post_send(&Work::send(&sent)).unwrap();
    let end = pair.a.wait_cq(QueueKind::Send, SOON);
    assert!(matches!(end, Err(Error::Work(_))), "{end:?}");
    for ticket in tickets {
        let status = settled(&ticket);
        assert!(!matches!(status, Status::Complete), "{status:?}");
    }
    assert!(to.is_filled_with(0, 4096, 0).unwrap());
}

/// The first cause that a call on the stream reports.
fn cause(reported: Result<(), Error>) -> Option<Cause> {
    match reported {
        Err(Error::Asynchronous { work, .. }) => work.map(|work| work.cause),
        other => panic!("{other:?}"),
    }
}

/// A wait that fails, in each of four ways: nothing behind it runs, every call returns the cause, and the stream works again after its fault was
/// taken.
#[test]
fn nothing_runs_behind_a_failed_wait() {
    let device = device();
    if has_no_queue(&device, "nothing_runs_behind_a_failed_wait") {
        return;
    }
    for way in ["length", "key", "abort", "deadline"] {
        let mut pair = Pair::new(&device, &config());
        let mut other = Pair::new(&device, &config());
        let region = pair.region(4096);
        let target = other.region(4096);
        region.fill(0, 4096, 7).unwrap();
        let stream = host_stream("s");
        let wait_on = if way == "key" {
            QueueKind::Send
        } else {
            QueueKind::Recv
        };
        let slices = [region.slice(0, 64).unwrap()];
        let timeout = (way == "deadline").then_some(Duration::from_millis(5));
        let gate = held(&stream);
        let waited = if way == "key" {
            let RemoteRegion { addr, rkey, .. } = region.remote();
            let bad = Work::write(&slices, RemoteSlice::at(addr, rkey ^ 0xff00));
            pair.a.stream_queue_send(&stream, &bad).unwrap();
            pair.a.stream_wait_cq(&stream, wait_on).unwrap()
        } else {
            pair.b.post_recv(1, &slices).unwrap();
            pair.b
                .stream_wait_cq_for(&stream, wait_on, timeout)
                .unwrap()
        };
        let ran = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ran);
        stream
            .launch(move || seen.store(true, Ordering::SeqCst))
            .unwrap();
        let source = other.region(64);
        source.fill(0, 64, 7).unwrap();
        let from = [source.slice(0, 64).unwrap()];
        let write = Work::write(&from, target.remote().slice(0, 64).unwrap()).wr_id(3);
        let behind = other.a.stream_queue_send(&stream, &write).unwrap();
        let event = Event::new();
        stream.record(&event).unwrap();
        gate.store(true, Ordering::Release);
        match way {
            "length" => {
                let long = [region.slice(0, 128).unwrap()];
                pair.a.post_send(&Work::send(&long)).unwrap();
            }
            "abort" => pair.b.abort(),
            _ => {}
        }
        let end = cause(stream.synchronize(SOON));
        match way {
            "abort" => assert_eq!(end, Some(Cause::Aborted)),
            "deadline" => assert!(matches!(end, Some(Cause::Deadline(_))), "{end:?}"),
            _ => assert!(
                matches!(end, Some(Cause::Completion { .. })),
                "{way}: {end:?}"
            ),
        }
        assert_eq!(cause(stream.query().map(drop)), end, "{way}");
        assert_eq!(cause(event.query().map(drop)), end, "{way}");
        assert!(!ran.load(Ordering::SeqCst), "{way}: a kernel behind it ran");
        assert!(matches!(waited.status(), Status::Failed(_)), "{way}");
        assert_eq!(settled(&behind), Status::Discarded, "{way}");
        assert!(
            target.is_filled_with(0, 4096, 0).unwrap(),
            "{way}: a write behind it was sent"
        );
        let refused = stream.launch(|| {});
        assert!(matches!(refused, Err(Error::Asynchronous { .. })), "{way}");
        let taken = stream.take_fault();
        assert_eq!(cause(taken.map_or(Ok(()), Err)), end, "{way}");
        assert_eq!(stream.take_fault(), None);
        let seen = Arc::clone(&ran);
        stream
            .launch(move || seen.store(true, Ordering::SeqCst))
            .unwrap();
        stream.synchronize(SOON).unwrap();
        assert!(ran.load(Ordering::SeqCst), "{way}");
    }
}

/// An event recorded behind a failure stands for work that was not done: a stream that waits for it fails too, whether it waits before or after the
/// event has passed.
#[test]
fn a_failed_producer_transmits_nothing() {
    let device = device();
    if has_no_queue(&device, "a_failed_producer_transmits_nothing") {
        return;
    }
    for late in [false, true] {
        let mut pair = Pair::new(&device, &config());
        let (from, to) = (pair.region(4096), pair.region(4096));
        from.fill(0, 64, 9).unwrap();
        pair.b.post_recv(1, &[to.slice(0, 64).unwrap()]).unwrap();
        let (producer, sender, third) = (
            host_stream("producer"),
            host_stream("sender"),
            host_stream("third"),
        );
        let gate = held(&producer);
        producer
            .launch(|| std::panic::resume_unwind(Box::new("a kernel that fails")))
            .unwrap();
        let (produced, sent) = (Event::new(), Event::new());
        producer.record(&produced).unwrap();
        if late {
            gate.store(true, Ordering::Release);
            let end = producer.synchronize(SOON);
            assert!(matches!(end, Err(Error::Asynchronous { .. })), "{end:?}");
            // The stream itself continues; its event keeps its failure.
            assert!(producer.take_fault().is_some());
            producer.launch(|| {}).unwrap();
            producer.synchronize(SOON).unwrap();
        }
        sender.wait_event(&produced).unwrap();
        let slices = [from.slice(0, 64).unwrap()];
        let queued = pair.a.stream_queue_send(&sender, &Work::send(&slices));
        // Late, the failure may be known before all is queued.
        let recorded = sender.record(&sent);
        gate.store(true, Ordering::Release);
        for stream in [&sender, &producer] {
            let end = stream.synchronize(SOON);
            let is_well = late && stream.id() == producer.id();
            assert_eq!(end.is_ok(), is_well, "{}: {end:?}", stream.name());
        }
        if recorded.is_ok() {
            let _ = third.wait_event(&sent);
            let end = third.synchronize(SOON);
            assert!(matches!(end, Err(Error::Asynchronous { .. })), "{end:?}");
        }
        if let Ok(ticket) = queued {
            assert!(!matches!(settled(&ticket), Status::Complete));
        }
        assert!(
            to.is_filled_with(0, 64, 0).unwrap(),
            "stale bytes were sent"
        );
    }
}

/// With `continue_on_error` a stream continues behind a failure and reports it once.
#[test]
fn stream_with_continue_on_error_continues() {
    let device = device();
    if has_no_queue(&device, "stream_with_continue_on_error_continues") {
        return;
    }
    let mut pair = Pair::new(&device, &config());
    let region = pair.region(4096);
    let stream = host_stream("s");
    stream.continue_on_error(true);
    pair.b
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    let gate = held(&stream);
    let wait = pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    let ran = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ran);
    stream
        .launch(move || seen.store(true, Ordering::SeqCst))
        .unwrap();
    gate.store(true, Ordering::Release);
    pair.b.abort();
    assert_eq!(cause(stream.synchronize(SOON)), Some(Cause::Aborted));
    assert!(ran.load(Ordering::SeqCst));
    assert!(matches!(wait.status(), Status::Failed(_)));
    stream.synchronize(SOON).unwrap();
}

/// A failure behind which the stream continues is taken by the first call that asks for it, [`doorbell::Executor::take_fault`] too.
#[test]
fn failure_behind_which_the_stream_continues_is_taken_once() {
    let device = device();
    if has_no_queue(
        &device,
        "failure_behind_which_the_stream_continues_is_taken_once",
    ) {
        return;
    }
    let mut pair = Pair::new(&device, &config());
    let region = pair.region(4096);
    let stream = rig::stream("s");
    if stream.host().is_some_and(|stream| !stream.has_thread()) {
        // The calls that execute its work are those that report failures.
        return;
    }
    stream.continue_on_error(true);
    pair.b
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    let wait = pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    pair.b.abort();
    let until = Instant::now() + Duration::from_secs(20);
    let taken = loop {
        if let Some(taken) = stream.take_fault() {
            break taken;
        }
        let text = format!("{:?}, and there is no fault", wait.status());
        assert!(Instant::now() < until, "{text}");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(cause(Err(taken)), Some(Cause::Aborted));
    assert!(stream.take_fault().is_none());
    stream.synchronize(SOON).unwrap();
}

fn host_stream(name: &str) -> doorbell::HostStream {
    doorbell::HostStream::new(name).unwrap()
}

/// Holds the stream where it is, until the flag is set.
fn held(stream: &doorbell::HostStream) -> Arc<AtomicBool> {
    let (go, gate) = rig::gate();
    stream.launch(gate).unwrap();
    go
}

/// An abort that comes while the endpoint is reset counts for the old generation or for the new one. It does not come between the steps of the
/// reset, or of the connection: those would find a queue pair in error.
#[test]
fn abort_during_a_reset_is_reported_as_abort() {
    // Long queues, so that the reset takes longer than from one look of the watchdog to the next.
    let config = config().send_depth(8192).recv_depth(8192);
    let mut pair = Pair::new(&device(), &config);
    let peer = pair.b.address();
    let abort = pair.a.abort_handle();
    let over = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                abort.abort();
                std::thread::yield_now();
            }
        });
        let rounds = rig::from_env("DOORBELL_ROUNDS", 3000) / 10;
        let failed = (0..rounds).find_map(|round| {
            let result = pair.a.reset().and_then(|()| match pair.a.connect(&peer) {
                Err(Error::Work(error)) if error.cause == Cause::Aborted => Ok(()),
                result => result,
            });
            result.err().map(|error| (round, error))
        });
        over.store(true, Ordering::Release);
        failed
    });
    assert_eq!(failed, None);
    pair.reset();
    pair.a.post_send(&Work::nop()).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
}

/// Releases a held stream when dropped.
struct Release(Arc<AtomicBool>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// On a stream of any kind, a send behind another endpoint's wait that fails is not transmitted: neither that of its own stream, nor that of a
/// stream that waits for its event.
#[test]
fn no_endpoint_transmits_behind_a_failed_wait_of_another() {
    let device = device();
    if has_no_queue(&device, "no_endpoint_transmits_behind") {
        return;
    }
    for round in 0..rig::from_env("DOORBELL_ROUNDS", 5) {
        for way in ["length", "key", "abort", "deadline", "turn"] {
            if way == "turn" && rig::has_no_thread() {
                // The kernel that holds the stream would hold this thread.
                continue;
            }
            let mut waits = Pair::new(&device, &config());
            let [mut sends, mut follows] = [(); 2].map(|()| Pair::new(&device, &config()));
            let region = waits.region(4096);
            let [target, other] = [sends.region(4096), follows.region(4096)];
            let [stream, second] = ["first", "second"].map(rig::stream);
            let gate = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&gate);
            stream
                .launch(move || {
                    while !flag.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
                .unwrap();
            // A stream that has not reached an earlier send of the endpoint.
            let held = (way == "turn").then(|| rig::stream("held"));
            let holds = Arc::new(AtomicBool::new(true));
            // Also if the test fails: a held stream cannot be dropped.
            let release = Release(Arc::clone(&holds));
            let slices = [region.slice(0, 64).unwrap()];
            if let Some(held) = &held {
                let holding = Arc::clone(&holds);
                held.launch(move || {
                    while holding.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
                .unwrap();
                let work = Work::write(&slices, region.remote().slice(64, 64).unwrap());
                waits.a.stream_queue_send(held, &work).unwrap();
                // Waits for its turn.
                waits.a.stream_queue_send(&stream, &work).unwrap();
            } else if way == "key" {
                let RemoteRegion { addr, rkey, .. } = region.remote();
                let bad = Work::write(&slices, RemoteSlice::at(addr, rkey ^ 0xff00));
                waits.a.stream_queue_send(&stream, &bad).unwrap();
                waits.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            } else {
                let timeout = (way == "deadline").then_some(Duration::from_millis(5));
                waits.b.post_recv(1, &slices).unwrap();
                waits
                    .b
                    .stream_wait_cq_for(&stream, QueueKind::Recv, timeout)
                    .unwrap();
            }
            let mut behind = Vec::new();
            let event = Event::new();
            for (pair, target, stream) in [
                (&mut sends, &target, &stream),
                (&mut follows, &other, &second),
            ] {
                let source = pair.region(64);
                source.fill(0, 64, 7).unwrap();
                let from = [source.slice(0, 64).unwrap()];
                let write = Work::write(&from, target.remote().slice(0, 64).unwrap());
                behind.push(pair.a.stream_queue_send(stream, &write).unwrap());
                if behind.len() == 1 {
                    stream.record(&event).unwrap();
                    second.wait_event(&event).unwrap();
                }
            }
            gate.store(true, Ordering::Release);
            match way {
                "length" => {
                    let long = [region.slice(0, 128).unwrap()];
                    waits.a.post_send(&Work::send(&long)).unwrap();
                }
                "abort" => waits.b.abort(),
                "turn" => {
                    std::thread::sleep(Duration::from_millis(10));
                    waits.a.abort();
                }
                _ => {}
            }
            let what = format!("{way}, round {round}");
            let end = cause(stream.synchronize(SOON));
            match way {
                "abort" | "turn" => assert_eq!(end, Some(Cause::Aborted), "{what}"),
                "deadline" => assert!(matches!(end, Some(Cause::Deadline(_))), "{what}: {end:?}"),
                _ => {
                    let is_completion = matches!(end, Some(Cause::Completion { .. }));
                    assert!(is_completion, "{what}: {end:?}");
                }
            }
            assert_eq!(cause(second.synchronize(SOON)), end, "{what}");
            assert_eq!(cause(event.query().map(drop)), end, "{what}");
            for ticket in &behind {
                let status = settled(ticket);
                // It is not known whether a GPU has begun the next doorbell.
                let is_lost = matches!(status, Status::Discarded | Status::Failed(_))
                    || rig::is_cuda() && matches!(status, Status::Unknown(_));
                assert!(is_lost, "{what}: {status:?}");
            }
            for target in [&target, &other] {
                let is_empty = target.is_filled_with(0, 4096, 0).unwrap();
                assert!(is_empty, "{what}: a write behind the wait was sent");
            }
            for (stream, pair, target) in [
                (&stream, &mut sends, &target),
                (&second, &mut follows, &other),
            ] {
                assert_eq!(cause(stream.take_fault().map_or(Ok(()), Err)), end);
                assert!(stream.take_fault().is_none());
                pair.reset();
                let source = pair.region(64);
                source.fill(0, 64, 9).unwrap();
                let from = [source.slice(0, 64).unwrap()];
                let write = Work::write(&from, target.remote().slice(0, 64).unwrap());
                let sent = pair.a.stream_queue_send(stream, &write).unwrap();
                pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
                stream.synchronize(SOON).unwrap();
                assert_eq!(sent.status(), Status::Complete, "{what}");
                assert!(target.is_filled_with(0, 64, 9).unwrap(), "{what}");
            }
            drop(release);
        }
    }
}
