//! Flow control: the room of a queue, waits for room, and waits for one operation.
#![cfg(all(feature = "softcx", not(loom)))]

#[path = "../examples/flow_control.rs"]
mod example;
mod rig;
mod waived;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use doorbell::{
    Cause, Condition, EndpointConfig, Error, Executor, HostStream, QueueKind, Status, Work,
    stream_post, stream_wait_value32,
};
use rig::{Limit, Pair, SOON, device, has_no_queue};

const DEPTH: u32 = 8;
const SHORT: Option<Duration> = Some(Duration::from_millis(20));
const STEP: Duration = Duration::from_secs(120);

fn config(depth: u32) -> EndpointConfig {
    EndpointConfig::default()
        .send_depth(depth)
        .recv_depth(depth)
}

/// Holds the stream where it is, until the flag is set.
fn held(stream: &rig::Stream) -> Arc<AtomicBool> {
    let go = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&go);
    let hold = move || {
        while !flag.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
    };
    stream.launch(hold).unwrap();
    go
}

/// A call that queues more than there is room for blocks, at every depth, also if only some of the requests are signaled.
#[test]
fn queue_of_any_depth_accepts_any_number_of_operations() {
    let _limit = Limit::new("steps", STEP);
    for depth in [1, 2, 3, 32, 100] {
        let mut pair = Pair::new(&device(), &config(depth).room_timeout(SOON));
        let region = pair.region(4096);
        let stream = rig::stream("s");
        let slices = [region.slice(0, 64).unwrap()];
        let target = region.remote().slice(1024, 64).unwrap();
        for step in 0..u64::from(5 * depth + 50) {
            let signaled = depth == 1 || step % 2 == 1;
            let work = Work::write(&slices, target).signaled(signaled);
            pair.a.stream_queue_send(&stream, &work).unwrap();
            if signaled {
                pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            }
        }
        stream.synchronize(SOON).unwrap();
        // Also from this thread, which has to make progress itself.
        for _ in 0..3 * depth {
            pair.a.post_send(&Work::nop()).unwrap();
            pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
        assert_eq!(pair.a.room(QueueKind::Send), depth);
        assert_eq!(pair.a.room(QueueKind::Recv), depth);
    }
}

#[test]
fn flow_control_example_finishes() {
    let _limit = Limit::new("example", STEP);
    let device = std::env::var("DOORBELL_TEST_DEVICE");
    let device = device.as_deref().unwrap_or("softcx");
    example::flow(device, 1000).unwrap();
}

/// Completions that are not polled fill the completion queue; unsignaled work fills the send queue. No wait would make room.
#[test]
fn wait_room_returns_at_once_if_no_room_will_come() {
    let _limit = Limit::new("no room", STEP);
    let device = device();
    let mut pair = Pair::new(&device, &config(DEPTH));
    let full = |error: Error, queue: &str, cure: &str| {
        assert!(
            matches!(&error, Error::QueueFull { queue: q, .. } if *q == queue),
            "{error:?}"
        );
        assert!(error.to_string().contains(cure), "{error}");
    };
    assert_eq!(pair.a.room(QueueKind::Send), DEPTH);
    for round in 0..2 {
        pair.a.wait_room(QueueKind::Send, DEPTH, SOON).unwrap();
        device.set_frozen(round == 1);
        let posted = (0..DEPTH).map(|_| pair.a.post_send(&Work::nop()).unwrap());
        let last = posted.last().unwrap();
        if round == 1 {
            // Nor do the requests in flight make room when they complete.
            let error = pair.a.wait_room(QueueKind::Send, 1, None).unwrap_err();
            full(error, "send completion", "`poll_cq`");
        }
        device.set_frozen(false);
        last.wait(SOON).unwrap();
    }
    let error = pair.a.wait_room(QueueKind::Send, 1, None).unwrap_err();
    full(error, "send completion", "`poll_cq`");
    for taken in 1..=DEPTH {
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        pair.a.wait_room(QueueKind::Send, taken, None).unwrap();
        assert_eq!(pair.a.room(QueueKind::Send), taken);
    }
    let error = pair
        .a
        .wait_room(QueueKind::Send, DEPTH + 1, None)
        .unwrap_err();
    assert!(
        matches!(error, Error::Range { argument: "count", max, .. } if max == u64::from(DEPTH)),
        "{error:?}"
    );
    for _ in 0..DEPTH {
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    for _ in 0..DEPTH {
        pair.a.post_send(&Work::nop().signaled(false)).unwrap();
    }
    assert_eq!(pair.a.room(QueueKind::Send), 0);
    let error = pair.a.wait_room(QueueKind::Send, 1, None).unwrap_err();
    full(error, "send", "signaled");
    // Receives complete when a message arrives, which cannot be ruled out, so the call waits.
    for _ in 0..DEPTH {
        pair.b.post_recv(1, &[]).unwrap();
    }
    let error = pair.b.wait_room(QueueKind::Recv, 1, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    full(pair.b.post_recv(1, &[]).unwrap_err(), "receive", "message");
    pair.reset();
    assert_eq!(pair.a.room(QueueKind::Send), DEPTH);
}

#[test]
fn wait_for_room_ends_with_room_timeout_or_failure() {
    let device = device();
    if has_no_queue(&device, "wait_for_room_ends_with_room_timeout_or_failure") {
        return;
    }
    let _limit = Limit::new("waits", STEP);
    let mut pair = Pair::new(&device, &config(DEPTH).room_timeout(SHORT));
    let stream = rig::stream("s");
    for fails in [false, true] {
        let go = held(&stream);
        for _ in 0..DEPTH {
            pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
            pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        }
        assert_eq!(pair.a.room(QueueKind::Send), 0);
        for error in [
            pair.a.wait_room(QueueKind::Send, 1, SHORT).unwrap_err(),
            pair.a.stream_queue_send(&stream, &Work::nop()).unwrap_err(),
            pair.a.prepare_send(&Work::nop()).map(drop).unwrap_err(),
        ] {
            assert!(
                matches!(error, Error::Timeout { timeout, .. } if Some(timeout) == SHORT),
                "{error:?}"
            );
        }
        let abort = pair.a.abort_handle();
        let (flag, later) = (Arc::clone(&go), thread::spawn);
        let other = later(move || {
            thread::sleep(Duration::from_millis(30));
            if fails {
                abort.abort();
            } else {
                flag.store(true, Ordering::Release);
            }
        });
        let waited = pair.a.wait_room(QueueKind::Send, DEPTH, None);
        other.join().unwrap();
        if !fails {
            waited.unwrap();
            stream.synchronize(SOON).unwrap();
            continue;
        }
        let aborted =
            |error: &Error| matches!(error, Error::Work(error) if error.cause == Cause::Aborted);
        assert!(waited.as_ref().is_err_and(aborted), "{waited:?}");
        assert_eq!(pair.a.room(QueueKind::Send), 0);
        go.store(true, Ordering::Release);
        let _ = stream.synchronize(SOON);
    }
    pair.reset();
    assert_eq!(pair.a.room(QueueKind::Send), DEPTH);
}

#[test]
fn ticket_wait_ends_on_completion_timeout_or_abort() {
    let _limit = Limit::new("tickets", STEP);
    let mut pair = Pair::new(&device(), &config(DEPTH));
    let region = pair.region(4096);
    let slices = [region.slice(0, 64).unwrap()];
    for _ in 0..2 * DEPTH {
        let ticket = pair.a.post_send(&Work::nop()).unwrap();
        ticket.wait(SOON).unwrap();
        ticket.wait(Some(Duration::ZERO)).unwrap();
        // Waiting for a ticket does not consume the completion.
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    let received = pair.b.post_recv(1, &slices).unwrap();
    let error = received.wait(SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    pair.a.post_send(&Work::send(&slices)).unwrap();
    received.wait(SOON).unwrap();

    let stream = HostStream::new("s").unwrap();
    let word =
        stream_wait_value32(&stream, &region, 0, Condition::GreaterOrEqual(1), SOON).unwrap();
    let error = word.wait(SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    region.store_u32(0, 1).unwrap();
    word.wait(SOON).unwrap();

    let received = pair.b.post_recv(2, &slices).unwrap();
    let abort = pair.b.abort_handle();
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        abort.abort();
    });
    let error = received.wait(None).unwrap_err();
    assert!(
        matches!(error, Error::Work(error) if error.cause == Cause::Aborted),
        "{error:?}"
    );
    other.join().unwrap();
}

/// The failure names the oldest work request that was not done, and the usual cause.
/// A request that was dropped before a stream had it is cancelled, although its place in the queue is rung with later ones.
#[test]
fn deadline_failure_names_no_cancelled_request() {
    let test = "deadline_failure_names_no_cancelled_request";
    let _limit = Limit::new(test, STEP);
    let device = device();
    if !device.set_frozen(true) {
        waived::waived(test, "the device cannot be frozen");
        return;
    }
    let mut pair = Pair::new(&device, &config(DEPTH));
    let stream = rig::stream("s");
    let dropped = pair.a.prepare_send(&Work::nop().wr_id(76)).unwrap();
    let cancelled = dropped.ticket();
    let sent = pair.a.prepare_send(&Work::nop().wr_id(77)).unwrap();
    drop(dropped);
    stream_post(&stream, sent).map_err(|it| it.error).unwrap();
    pair.a
        .stream_wait_cq_for(&stream, QueueKind::Send, SHORT)
        .unwrap();
    let _ = stream.synchronize(SOON);
    let failure = pair.a.failure().unwrap();
    assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
    assert_eq!(failure.wr_id, Some(77), "{failure}");
    assert_eq!(cancelled.status(), Status::Cancelled);
    device.set_frozen(false);
}

#[test]
fn deadline_failure_names_the_oldest_unfinished_request() {
    let _limit = Limit::new("deadline", STEP);
    let mut pair = Pair::new(&device(), &config(DEPTH));
    let stream = rig::stream("s");
    for wr_id in [76, 77] {
        pair.b.post_recv(wr_id, &[]).unwrap();
    }
    pair.a.post_send(&Work::send(&[])).unwrap();
    pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
    pair.b
        .stream_wait_cq_for(&stream, QueueKind::Recv, SHORT)
        .unwrap();
    let _ = stream.synchronize(SOON);
    let failure = pair.b.failure().unwrap();
    assert!(matches!(failure.cause, Cause::Deadline(_)), "{failure}");
    assert_eq!(failure.wr_id, Some(77), "{failure}");
    assert!(
        failure.to_string().contains("the peer sent nothing"),
        "{failure}"
    );
}
