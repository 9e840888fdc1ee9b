//! Statuses of tickets of operations that are final, rolled back, or from before a reset; and the effects of dropped operations.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell::{
    Cause, EndpointConfig, Error, Executor, QueueKind, RemoteSlice, StateKind, Status, Ticket,
    WcStatus, Work, stream_post,
};
use rig::{Pair, SOON, has_no_queue, strict_device as device};

fn small() -> EndpointConfig {
    EndpointConfig::default().send_depth(4).recv_depth(4)
}

/// Holds the stream where it is, until the flag is set.
fn held(stream: &rig::Stream) -> Arc<AtomicBool> {
    let (go, gate) = rig::gate();
    stream.launch(gate).unwrap();
    go
}

#[test]
fn tickets_keep_their_status_after_reset() {
    let device = device();
    // Work behind a failure is not queued there.
    if has_no_queue(&device, "tickets_keep_their_status_after_reset") {
        return;
    }
    let mut pair = Pair::new(&device, &small());
    let region = pair.region(4096);
    let stream = rig::stream("s");
    let slice = [region.slice(0, 64).unwrap()];
    let remote = region.remote();
    // The stream is held until all is queued: calls are refused after a failure.
    let queued = held(&stream);
    let good = pair
        .a
        .stream_queue_write(&stream, &slice, remote.slice(512, 64).unwrap())
        .unwrap();
    let good_wait = pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    let bad = pair
        .a
        .stream_queue_write(
            &stream,
            &slice,
            RemoteSlice::at(remote.addr, remote.rkey ^ 0xff00),
        )
        .unwrap();
    let bad_wait = pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    let behind = pair
        .a
        .stream_queue_write(&stream, &slice, RemoteSlice::at(remote.addr, remote.rkey))
        .unwrap();
    queued.store(true, Ordering::Release);
    while !bad_wait.is_over() || !behind.is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = stream.synchronize(SOON);
    let prepared = pair.a.prepare_wait_cq(QueueKind::Send);
    assert!(matches!(prepared, Err(Error::Work(_))), "{prepared:?}");
    let before = [&good, &good_wait, &bad, &bad_wait, &behind].map(|ticket| ticket.status());
    assert_eq!(before[..2], [Status::Complete; 2]);
    assert!(
        before[2..4]
            .iter()
            .all(|status| matches!(status, Status::Failed(_))),
        "{before:?}"
    );
    // A host stream discards it; a GPU rings a queue pair in the error state.
    assert!(
        matches!(
            before[4],
            Status::Discarded | Status::Failed(_) | Status::Unknown(_)
        ),
        "{before:?}"
    );
    for _ in 0..100 {
        pair.reset();
        let after = [&good, &good_wait, &bad, &bad_wait, &behind].map(|ticket| ticket.status());
        assert_eq!(after, before);
    }
}

#[test]
fn operation_prepared_before_a_reset_is_stale_after_it() {
    let mut pair = Pair::new(&device(), &small());
    let region = pair.region(4096);
    let slices = [region.slice(0, 8).unwrap()];
    let prepared = pair
        .a
        .prepare_send(&Work::write(
            &slices,
            RemoteSlice::at(region.remote().addr, region.remote().rkey),
        ))
        .unwrap();
    pair.reset();
    let stream = rig::stream("s");
    pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    let late = prepared.ticket().status();
    assert!(
        matches!(late, Status::Failed(error) if error.cause == Cause::Aborted),
        "{late:?}"
    );
    let rejected = stream_post(&stream, prepared).unwrap_err();
    assert!(matches!(
        rejected.error,
        Error::State {
            kind: StateKind::Stale,
            ..
        }
    ));
}

#[test]
fn dropped_sends_free_their_slots_and_leave_no_completion() {
    for blueflame in [false, true] {
        let mut pair = Pair::new(&device(), &small().blueflame(blueflame));
        for _ in 0..20 {
            let prepared = pair.a.prepare_send(&Work::nop()).unwrap();
            let ticket = prepared.ticket();
            drop(prepared);
            assert_eq!(ticket.status(), Status::Cancelled);
            let wait = pair.a.prepare_wait_cq(QueueKind::Send);
            assert!(
                matches!(
                    wait,
                    Err(Error::State {
                        kind: StateKind::NothingPosted,
                        ..
                    })
                ),
                "{wait:?}"
            );
            let next = pair.a.prepare_send(&Work::nop()).unwrap();
            assert_eq!(ticket.status(), Status::Cancelled, "not that of the next");
            assert_eq!(next.ticket().status(), Status::Prepared);
            pair.a.rollback(next);
        }
        // A dropped send in the middle becomes a no-operation; the one behind it is transmitted.
        let stream = rig::stream("s");
        let region = pair.region(4096);
        for round in 0..20u8 {
            region.fill(0, 64, round + 1).unwrap();
            let remote = region.remote();
            let slices = [region.slice(0, 64).unwrap()];
            let work = Work::write(&slices, remote.slice(1024, 64).unwrap());
            let wrong = Work::write(&slices, remote.slice(2048, 64).unwrap()).wr_id(1);
            let dropped = pair.a.prepare_send(&wrong).unwrap();
            let kept = pair.a.prepare_send(&work.wr_id(2)).unwrap();
            let ticket = dropped.ticket();
            drop(dropped);
            let kept = stream_post(&stream, kept).unwrap();
            pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
            assert_eq!(pair.a.wait_cq(QueueKind::Send, SOON).unwrap().wr_id, 2);
            assert_eq!(
                (ticket.status(), kept.status()),
                (Status::Cancelled, Status::Complete)
            );
            assert!(region.is_filled_with(1024, 64, round + 1).unwrap());
            assert!(region.is_filled_with(2048, 64, 0).unwrap());
        }
    }
}

#[test]
fn rolled_back_send_leaves_its_wait_to_the_next_send() {
    let mut pair = Pair::new(&device(), &small());
    let send = pair.a.prepare_send(&Work::nop()).unwrap();
    let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
    pair.a.rollback(send);
    let second = pair.a.prepare_wait_cq(QueueKind::Send);
    assert!(
        matches!(
            second,
            Err(Error::State {
                kind: StateKind::NothingPosted,
                ..
            })
        ),
        "{second:?}"
    );
    let stream = rig::stream("s");
    pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
    let waited = stream_post(&stream, wait).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
    // A wait that is rolled back leaves its completion, even if that has arrived already.
    for _ in 0..200 {
        pair.a.post_send(&Work::nop().wr_id(9)).unwrap();
        let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
        let ticket = wait.ticket();
        pair.a.rollback(wait);
        assert_eq!(pair.a.wait_cq(QueueKind::Send, SOON).unwrap().wr_id, 9);
        assert_eq!(ticket.status(), Status::Cancelled);
    }
}

#[test]
fn dropped_send_and_wait_leave_nothing_to_wait_for() {
    let mut pair = Pair::new(&device(), &small());
    let stream = rig::stream("s");
    for round in 0..20u64 {
        // In the order in which a list drops them, and in reverse order.
        let mut dropped = Vec::new();
        for _ in 0..2 {
            dropped.push(pair.a.prepare_send(&Work::nop()).unwrap());
            dropped.push(pair.a.prepare_wait_cq(QueueKind::Send).unwrap());
        }
        if round % 2 == 0 {
            dropped.reverse();
        }
        drop(dropped);
        let sent = pair
            .a
            .stream_queue_send(&stream, &Work::nop().wr_id(round))
            .unwrap();
        let waited = pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(
            (sent.status(), waited.status()),
            (Status::Complete, Status::Complete)
        );
    }
}

#[test]
fn polls_behind_a_stream_wait_return_their_own_wr_id() {
    let mut pair = Pair::new(&device(), &small().send_depth(64));
    let stream = rig::stream("s");
    for round in 0..3000u64 {
        pair.a.post_send(&Work::nop().wr_id(round * 2 + 1)).unwrap();
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        pair.a.post_send(&Work::nop().wr_id(round * 2 + 2)).unwrap();
        let polled = pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!(polled.wr_id, round * 2 + 2);
        if round % 16 == 0 {
            stream.synchronize(SOON).unwrap();
        }
    }
}

#[test]
fn words_of_a_deregistered_region_are_refused() {
    let domain = doorbell::Device::open("softcx")
        .unwrap()
        .protection_domain();
    let region = doorbell::Region::alloc(&domain, 64, doorbell::Access::ALL).unwrap();
    let stream = rig::stream("words");
    let condition = doorbell::Condition::GreaterOrEqual(1);
    region.deregister().unwrap();
    let wait = doorbell::stream_wait_value32(&stream, &region, 0, condition, None);
    let write = doorbell::stream_write_value32(&stream, &region, 0, 1);
    for refused in [wait, write] {
        assert!(
            matches!(
                refused,
                Err(Error::State {
                    kind: StateKind::Deregistered,
                    ..
                })
            ),
            "{refused:?}"
        );
    }
}

/// An operation that another thread posts belongs to the generation that it was prepared in, or is refused.
#[test]
fn reset_and_concurrent_post_exclude_each_other() {
    use doorbell::{Access, Device, Endpoint, EndpointConfig, Executor, QueueKind, Region};
    use doorbell::{Work, stream_post};
    let domain = Device::open("softcx").unwrap().protection_domain();
    let config = EndpointConfig::default();
    let mut a = Endpoint::new(&domain, &config).unwrap();
    let mut b = Endpoint::new(&domain, &config).unwrap();
    let region = Region::alloc(&domain, 4096, Access::ALL).unwrap();
    let stream = rig::stream("posts");
    let remote = region.remote();
    for _ in 0..2000 {
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        let slices = [region.slice(0, 8).unwrap()];
        let write = Work::write(&slices, RemoteSlice::at(remote.addr + 64, remote.rkey));
        let prepared = a.prepare_send(&write).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(stream_post(&stream, prepared)));
            a.reset().unwrap();
        });
        b.reset().unwrap();
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        a.stream_queue_send(&stream, &write).unwrap();
        a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(a.failure(), None);
        a.reset().unwrap();
        b.reset().unwrap();
    }
}

/// A reset before any thread has polled the completions: the completions of the ended generation determine its statuses.
#[test]
fn completions_before_a_reset_set_the_statuses_after_it() {
    let mut pair = Pair::new(&device(), &small());
    let region = pair.region(4096);
    let remote = region.remote();
    let slice = [region.slice(0, 64).unwrap()];
    let stream = rig::stream("s");
    for round in 0..50 {
        let is_good = round % 2 == 0;
        let rkey = if is_good {
            remote.rkey
        } else {
            remote.rkey ^ 0xff00
        };
        let addr = remote.slice(512, 64).unwrap();
        let sent = pair
            .a
            .stream_queue_write(&stream, &slice, RemoteSlice::at(addr.addr(), rkey))
            .unwrap();
        // The send may have failed before the wait could be queued.
        let wait = pair.a.stream_wait_cq(&stream, QueueKind::Send);
        let synchronized = stream.synchronize(SOON);
        pair.reset();
        stream.take_fault();
        if is_good {
            synchronized.unwrap();
            assert_eq!(sent.status(), Status::Complete);
            assert_eq!(wait.unwrap().status(), Status::Complete);
            continue;
        }
        for ticket in [Ok(sent), wait].into_iter().flatten() {
            let status = ticket.status();
            assert!(
                matches!(status, Status::Failed(e) if matches!(
                    e.cause,
                    Cause::Completion { status: WcStatus::RemAccessErr, .. }
                )),
                "{round}: {status:?}"
            );
        }
    }
}

/// A wait whose completion has arrived when its endpoint fails, on a stream that has not reached the wait: it becomes final only when the stream has
/// executed it, and is then complete.
#[test]
fn wait_is_not_final_before_its_stream_passes_it() {
    let device = device();
    if has_no_queue(&device, "wait_is_not_final_before_its_stream_passes_it") {
        return;
    }
    let mut pair = Pair::new(&device, &small());
    let stream = rig::stream("s");
    let sent = pair.a.post_send(&Work::nop()).unwrap();
    while !sent.is_over() {
        std::thread::sleep(Duration::from_micros(50));
    }
    let go = held(&stream);
    let wait = pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    pair.a.abort();
    assert_eq!(pair.a.failure().unwrap().cause, Cause::Aborted);
    // Longer than the watchdog takes to process the failure.
    for _ in 0..20 {
        assert_eq!(wait.status(), Status::Queued);
        std::thread::sleep(Duration::from_millis(1));
    }
    go.store(true, Ordering::Release);
    let _ = stream.synchronize(SOON);
    assert_eq!(
        (sent.status(), wait.status()),
        (Status::Complete, Status::Complete)
    );
}

/// What completed before a failure is polled before the failure is reported, whichever thread has found the two.
#[test]
fn completions_are_polled_before_the_failure() {
    let mut pair = Pair::new(&device(), &small());
    let region = pair.region(4096);
    let remote = region.remote();
    let slice = [region.slice(0, 64).unwrap()];
    for round in 0..1000 {
        for wr_id in 0..2 {
            let work = Work::write(&slice, RemoteSlice::at(remote.addr, remote.rkey)).wr_id(wr_id);
            pair.a.post_send(&work).unwrap();
        }
        let bad = Work::write(&slice, RemoteSlice::at(remote.addr, remote.rkey ^ 0xff00)).wr_id(2);
        pair.a.post_send(&bad).unwrap();
        for wr_id in 0..2 {
            let completion = pair
                .a
                .wait_cq(QueueKind::Send, SOON)
                .unwrap_or_else(|error| panic!("{round}, {wr_id}: {error}"));
            assert_eq!(completion.wr_id, wr_id);
        }
        let failure = pair.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
        assert!(
            matches!(failure, Error::Work(e) if e.wr_id == Some(2)),
            "{failure}"
        );
        pair.reset();
    }
}

/// A final status stays as it was reported: the device no longer works on the request.
#[test]
fn final_statuses_after_an_abort_do_not_change() {
    const LEN: u64 = 64 << 10;
    const WRITES: u64 = 8;
    let config = EndpointConfig::default().send_depth(WRITES as u32);
    let mut pair = Pair::new(&device(), &config);
    let region = pair.region((1 + WRITES) * LEN);
    let remote = region.remote();
    let data = [region.slice(0, LEN).unwrap()];
    for round in 0..60u8 {
        region.fill(0, LEN, round + 1).unwrap();
        let tickets: Vec<_> = (1..=WRITES)
            .map(|number| {
                let addr = remote.slice(number * LEN, LEN).unwrap();
                pair.a.post_send(&Work::write(&data, addr)).unwrap()
            })
            .collect();
        pair.a.abort();
        let look = || tickets.iter().map(Ticket::status).collect::<Vec<_>>();
        // A look waits half a second for the device to stop. On a machine with other work that may take longer.
        let started = Instant::now();
        let mut before = look();
        while before.contains(&Status::Rung) && started.elapsed() < Duration::from_secs(20) {
            before = look();
        }
        for (number, status) in (1..).zip(&before) {
            match status {
                Status::Complete => {
                    assert!(region.is_filled_with(number * LEN, LEN, round + 1).unwrap())
                }
                status => assert!(
                    matches!(status, Status::Failed(_) | Status::Unknown(_)),
                    "{status:?}"
                ),
            }
        }
        std::thread::sleep(Duration::from_millis(3));
        assert_eq!(look(), before, "{round}");
        pair.reset();
        assert_eq!(look(), before, "{round}");
    }
}

/// A device counts bytes for receives and reads only. A ticket never has the details of an earlier work request of its slot.
#[test]
fn completions_report_bytes_only_where_the_device_counts_them() {
    let mut pair = Pair::new(&device(), &small().send_depth(2));
    let region = pair.region(4096);
    let remote = region.remote();
    let there = |len_bytes| remote.slice(1024, len_bytes).unwrap();
    let (long, short) = (
        [region.slice(0, 64).unwrap()],
        [region.slice(0, 16).unwrap()],
    );
    for _ in 0..4 {
        let read = pair.a.post_send(&Work::read(&long, there(64))).unwrap();
        let completion = pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!((completion.len_bytes, completion.imm), (64, None));
        assert_eq!(read.details(), Some((64, None)));
        let unsignaled = Work::read(&short, there(16)).signaled(false);
        let unsignaled = pair.a.post_send(&unsignaled).unwrap();
        let write = pair.a.post_send(&Work::write(&short, there(16))).unwrap();
        let completion = pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!((completion.len_bytes, completion.imm), (0, None));
        assert_eq!(
            (unsignaled.status(), write.status()),
            (Status::Complete, Status::Complete)
        );
        assert_eq!((unsignaled.details(), write.details()), (None, None));
    }
}
