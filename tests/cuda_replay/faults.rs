//! Failures at any launch.

use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use doorbell::softcx::Faults;
use doorbell::{
    Cause, Condition64, Error, Executor, QueueKind, Status, Ticket, WcStatus, Work,
    stream_wait_value64, stream_write_value64,
};

use crate::rig::gpu::alone;
use crate::rig::{Pair, Random, SOON, device, from_env, strict};
use crate::{Bench, config, is_failed};

/// What happens at a random launch of a graph.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    AbortSender,
    AbortReceiver,
    /// The region that the peer writes to is deregistered.
    Deregister,
    /// The network loses everything.
    Cut,
    /// A work request of the device ends in an error.
    FailSend,
    FailRecv,
}

const EVENTS: [Event; 7] = [
    Event::Nothing,
    Event::AbortSender,
    Event::AbortReceiver,
    Event::Deregister,
    Event::Cut,
    Event::FailSend,
    Event::FailRecv,
];

/// Whether that event can be why an endpoint failed: side 0 is the sender. A wait may always take too long: its limit is short.
fn is_explained(event: Event, side: usize, cause: Cause) -> bool {
    let status = match cause {
        Cause::Deadline(_) | Cause::Discarded => return true,
        Cause::Aborted => None,
        Cause::Completion { status, .. } => Some(status),
        _ => return false,
    };
    let explained: &[Option<WcStatus>] = match (event, side) {
        (Event::AbortSender, 0) | (Event::AbortReceiver, 1) => &[None],
        (Event::AbortReceiver | Event::Cut, 0) => &[Some(WcStatus::RetryExcErr)],
        // A WRITE, and a SEND into the region.
        (Event::Deregister, 0) => &[Some(WcStatus::RemAccessErr), Some(WcStatus::RemOpErr)],
        // A WRITE that is refused takes no receive: those that a launch posts afterwards are flushed, and nothing else says why.
        (Event::Deregister, 1) => &[
            Some(WcStatus::LocAccessErr),
            Some(WcStatus::LocProtErr),
            Some(WcStatus::WrFlushErr),
        ],
        (Event::FailSend, 0) | (Event::FailRecv, 1) => &[Some(WcStatus::LocProtErr)],
        (Event::FailRecv, 0) => &[Some(WcStatus::RemOpErr)],
        _ => &[],
    };
    explained.contains(&status)
}

/// Whatever fails, at whatever launch: what a count says has arrived is there, the rest has a typed error, nothing hangs, and after a reset all works.
#[test]
fn replays_under_random_faults_are_right_or_have_a_typed_error() {
    let test = "replays_under_random_faults";
    let _alone = alone();
    let config = config().wait_timeout(Some(Duration::from_millis(300)));
    let Some(mut bench) = Bench::new(test, &config) else {
        return;
    };
    let device = device();
    let has_faults = device.set_faults(strict());
    let seed = from_env("DOORBELL_SEED", 1);
    let mut random = Random(seed);
    let total = from_env("DOORBELL_REPLAYS", 1_000);
    let mut launched = 0;
    let mut round = 0;
    while launched < total {
        round += 1;
        let label = format!("seed {seed}, round {round}");
        let event = *random.pick(&EVENTS);
        let event = match event {
            Event::Cut | Event::FailSend | Event::FailRecv if !has_faults => Event::Nothing,
            event => event,
        };
        if has_faults {
            device.set_faults(Faults {
                loss: random.below(5) as f64 / 100.0,
                duplicate: random.below(3) as f64 / 100.0,
                reorder: random.below(3) as f64 / 100.0,
                seed: random.next(),
                ..strict()
            });
        }
        let writes = random.below(2) == 0;
        let (from, to) = (bench.from.clone(), bench.pair.region(4096));
        let len = 8 * (1 + random.below(64));
        let slices = [from.slice(0, len).unwrap()];
        let into = [to.slice(0, len).unwrap()];
        let mut tickets = Vec::new();
        let Pair { a, b, .. } = &mut bench.pair;
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let sender = bench.a.capture(mode, |stream| {
            let work = match writes {
                true => Work::write(&slices, to.remote().slice(0, len).unwrap()).imm(5),
                false => Work::send(&slices),
            };
            tickets.push(a.stream_queue_send(stream, &work).unwrap());
            tickets.push(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
        let receiver = bench.b.capture(mode, |stream| {
            let into: &[_] = if writes { &[] } else { &into };
            tickets.push(b.stream_queue_recv(stream, 0, into).unwrap());
            tickets.push(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        let launches = 1 + random.below(60);
        let at = random.below(launches);
        // In some rounds several are launched before a wait.
        let most = *random.pick(&[1, 1, 8]);
        let (mut failed, mut sender_failed) = (false, false);
        // Whether nothing is under way any more when the sender is known to have failed. After a wait that took too long, and after an abort in the middle of several
        // launches, the device may send what it has once more, with new bytes, until it has stopped.
        let fails_at_rest = match event {
            Event::Nothing => false,
            Event::AbortSender => most == 1,
            _ => true,
        };
        let mut done = 0;
        while done < launches {
            let before = done;
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            let inverse: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
            from.write(0, &bytes).unwrap();
            to.write(0, &inverse).unwrap();
            done = launches.min(done + 1 + random.below(most));
            for launch in before..done {
                if launch == at {
                    let fault = |faults| assert!(device.set_faults(faults));
                    match event {
                        Event::Nothing => {}
                        Event::AbortSender => a.abort(),
                        Event::AbortReceiver => b.abort(),
                        Event::Deregister => assert_eq!(to.deregister(), Ok(true)),
                        Event::Cut => fault(Faults {
                            loss: 1.0,
                            ..strict()
                        }),
                        Event::FailSend => fault(Faults {
                            fail_send: (1, 0x04),
                            ..strict()
                        }),
                        Event::FailRecv => fault(Faults {
                            fail_recv: (1, 0x04),
                            ..strict()
                        }),
                    }
                }
                bench.b.launch(&receiver);
                bench.a.launch(&sender);
            }
            bench.a.wait();
            bench.b.wait();
            launched += done - before;
            let counts: Vec<u64> = tickets.iter().filter_map(Ticket::launches).collect();
            let label =
                format!("{label}, {event:?} at {at}, launches {before} to {done}, {counts:?}");
            // A count says no more than what was done.
            assert!(counts[1] <= counts[0] && counts[3] <= counts[2], "{label}");
            let mut found = vec![0; len as usize];
            to.read(0, &mut found).unwrap();
            // What a wait of the receiver counts has arrived, and so has what a wait of the sender for a WRITE counts.
            if counts[3] > before || writes && counts[1] > before {
                assert_eq!(found, bytes, "{label}");
            }
            // Nothing is sent behind a failure of the sender. A late packet of the launch that has failed may have written what it had.
            if sender_failed && fails_at_rest {
                let (found, sent) = (found.chunks(8), bytes.chunks(8));
                assert!(
                    found.zip(sent).all(|(found, sent)| found != sent),
                    "{label}"
                );
            }
            sender_failed |= counts[1] < done;
            if counts.iter().all(|count| *count == done) {
                assert!(!failed, "{label}");
                continue;
            }
            // At least one of the two has failed, and says why; what it has not done says so.
            failed = true;
            for (at, (side, application)) in [(&mut *a, &bench.a), (&mut *b, &bench.b)]
                .into_iter()
                .enumerate()
            {
                if counts[2 * at + 1] == done {
                    continue;
                }
                let until = std::time::Instant::now() + Duration::from_secs(20);
                let cause = loop {
                    if let Some(failure) = side.failure() {
                        break failure.cause;
                    }
                    assert!(std::time::Instant::now() < until, "{label}, side {at}");
                    std::thread::sleep(Duration::from_micros(100));
                };
                assert!(
                    is_explained(event, at, cause),
                    "{label}, side {at}: {cause:?}"
                );
                assert!(is_failed(&tickets[2 * at + 1]), "{label}");
                let fault = application.stream.synchronize(SOON).unwrap_err();
                assert!(
                    matches!(fault, Error::Asynchronous { .. }),
                    "{label}: {fault}"
                );
            }
        }
        drop((sender, receiver));
        if has_faults {
            device.set_faults(strict());
        }
        for application in [&bench.a, &bench.b] {
            let _ = application.stream.take_fault();
        }
        bench.pair.reset();
    }
    device.set_faults(strict());
}

/// One endpoint fails; operations of another are in the same graph, behind it. These are not executed, so that endpoint fails, too: a later launch must not go on in
/// the middle.
#[test]
fn an_endpoint_whose_operations_are_skipped_fails() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("an_endpoint_whose_operations", &config()) else {
        return;
    };
    let mut other = Pair::new(&device(), &config());
    let words = other.region(4096);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mut tickets = Vec::new();
    let (first, second) = (&mut bench.pair.a, &mut other.a);
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let slices = [from.slice(0, 8).unwrap()];
            let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
            tickets.push(first.stream_queue_send(stream, &work).unwrap());
            tickets.push(first.stream_wait_cq(stream, QueueKind::Send).unwrap());
            let slices = [words.slice(64, 8).unwrap()];
            let work = Work::write(&slices, words.remote().slice(128, 8).unwrap());
            tickets.push(second.stream_queue_send(stream, &work).unwrap());
            tickets.push(second.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
    bench.a.launch(&graph);
    bench.a.wait();
    assert!(tickets.iter().all(|ticket| ticket.launches() == Some(1)));
    bench.pair.a.abort();
    // A launch may still be executed before the watchdog has stopped the endpoint.
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while other.a.failure().is_none() {
        assert!(std::time::Instant::now() < until);
        bench.a.launch(&graph);
        bench.a.wait();
        std::thread::sleep(Duration::from_millis(1));
    }
    let failure = other.a.failure().unwrap();
    assert_eq!(failure.cause, doorbell::Cause::Discarded);
    assert!(tickets.iter().all(is_failed), "{tickets:?}");
}

/// The fault is taken while the launch that has failed is still on its way: the rest of the launch stays given up. What is queued later is executed.
#[test]
fn a_fault_is_taken_in_the_order_of_the_stream() {
    let _alone = alone();
    let Some(bench) = Bench::new("a_fault_is_taken_in_order", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let short = Some(Duration::from_millis(20));
            let equal = Condition64::Equal(1);
            tickets.push(stream_wait_value64(stream, &words, 0, equal, short).unwrap());
            stream.spin(Duration::from_millis(100)).unwrap();
            tickets.push(stream_write_value64(stream, &words, 64, 12).unwrap());
        });
    for _ in 0..3 {
        words.fill(0, 4096, 0).unwrap();
        let before = tickets[1].launches();
        bench.a.launch(&graph);
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while bench.a.stream.take_fault().is_none() {
            assert!(std::time::Instant::now() < until);
        }
        // It is taken once.
        assert!(bench.a.stream.take_fault().is_none());
        bench.a.wait();
        assert_eq!((words.load_u64(64), tickets[1].launches()), (Ok(0), before));
        words.store_u64(0, 1).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        assert_eq!(words.load_u64(64), Ok(12));
        bench.a.stream.synchronize(SOON).unwrap();
    }
}

/// Behind a wait of a kernel that takes longer than its time limit, an endpoint whose queues are not those of graphs transmits nothing.
#[test]
fn what_is_behind_a_late_wait_of_a_kernel_is_not_transmitted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_is_behind_a_late_wait", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let stream = &bench.a.stream;
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    for round in 0..6 {
        words.fill(0, 4096, 0).unwrap();
        from.fill(0, 8, 7).unwrap();
        to.fill(0, 8, 0).unwrap();
        let ends = round % 2 == 1;
        let short = Some(Duration::from_millis(if ends { 20_000 } else { 500 }));
        let reached = Condition64::GreaterOrEqual(1);
        let waited = stream_wait_value64(stream, &words, 0, reached, short).unwrap();
        let sent = bench.pair.a.stream_queue_send(stream, &work).unwrap();
        bench
            .pair
            .a
            .stream_wait_cq(stream, QueueKind::Send)
            .unwrap();
        if ends {
            std::thread::sleep(Duration::from_millis(5));
            assert!(to.is_filled_with(0, 8, 0).unwrap());
            words.store_u64(0, 1).unwrap();
            stream.synchronize(SOON).unwrap();
            assert!(to.is_filled_with(0, 8, 7).unwrap());
            assert_eq!(
                (waited.status(), sent.status()),
                (Status::Complete, Status::Complete)
            );
            continue;
        }
        let fault = stream.synchronize(SOON).unwrap_err();
        assert!(fault.to_string().contains("time limit"), "{fault}");
        std::thread::sleep(Duration::from_millis(20));
        assert!(to.is_filled_with(0, 8, 0).unwrap());
        assert!(is_failed(&waited));
        assert_ne!(sent.status(), Status::Complete);
        stream.take_fault().unwrap();
        bench.pair.reset();
    }
}

/// A failure is reported by one call, and what is behind it is executed.
#[test]
fn a_stream_that_continues_executes_what_is_behind_a_failure() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_stream_that_continues", &config()) else {
        return;
    };
    drop(crate::exchange(
        &mut bench,
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    ));
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let stream = &bench.a.stream;
    let a = &mut bench.pair.a;
    stream.continue_on_error(true);
    for value in 1..4 {
        from.fill(0, 8, value).unwrap();
        let reached = Condition64::GreaterOrEqual(1);
        let short = Some(Duration::from_millis(20));
        let late = stream_wait_value64(stream, &words, 0, reached, short).unwrap();
        a.stream_queue_send(stream, &work).unwrap();
        let sent = a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        let reported = stream.synchronize(SOON).unwrap_err();
        assert!(reported.to_string().contains("time limit"), "{reported}");
        stream.synchronize(SOON).unwrap();
        assert!(is_failed(&late));
        assert_eq!(sent.status(), Status::Complete);
        assert!(to.is_filled_with(0, 8, value).unwrap());
    }
    stream.continue_on_error(false);
    stream.synchronize(SOON).unwrap();
}
