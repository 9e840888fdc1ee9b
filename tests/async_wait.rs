//! Events and tickets in asynchronous programs: as futures and as eventfds, under the runtime that most programs use.
#![allow(unsafe_code)] // gives descriptors to the runtime
#![cfg(all(feature = "softcx", not(loom)))]

#[path = "../examples/tokio.rs"]
mod example;
mod rig;
mod waived;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use doorbell::{EndpointConfig, Error, Event, Executor, QueueKind, Result, Work};
use rig::{Limit, Pair, SOON, count, device, eventfd};
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

const STEP: Duration = Duration::from_secs(120);

/// A runtime with one thread: a call that blocks it shows.
fn run<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap().block_on(future)
}

/// Fails the test instead of waiting for ever.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(SOON.unwrap(), future)
        .await
        .expect("it is ready soon")
}

fn record(stream: &dyn Executor) -> Event {
    let event = Event::blocking();
    stream.record(&event).unwrap();
    event
}

/// Holds the stream where it is, until the flag is set.
fn held(stream: &rig::Stream) -> Arc<AtomicBool> {
    let (go, hold) = rig::gate();
    stream.launch(hold).unwrap();
    go
}

/// Two tasks of one thread, each with a stream and a pair of endpoints, take turns: a task that waits does not hinder the other.
#[test]
fn tasks_of_one_thread_transfer_on_streams_of_their_own() {
    let _limit = Limit::new("tasks", STEP);
    let device = device();
    let transfers = async |value: u8| -> Result<()> {
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let stream = rig::stream("task");
        let region = pair.region(4096);
        for step in 0..50_u8 {
            let byte = value.wrapping_add(step);
            region.fill(0, 64, byte)?;
            let slices = [region.slice(0, 64)?];
            let work = Work::write(&slices, region.remote().slice(1024, 64)?);
            pair.a.stream_queue_send(&stream, &work)?;
            pair.a.stream_wait_cq(&stream, QueueKind::Send)?;
            soon(record(&stream).reached()?).await?;
            assert!(region.is_filled_with(1024, 64, byte)?);
        }
        Ok(())
    };
    let (one, other) = run(async { tokio::join!(transfers(1), transfers(100)) });
    one.unwrap();
    other.unwrap();
}

/// Each await races with the stream that passes the record.
#[test]
fn no_wake_up_is_lost() {
    let _limit = Limit::new("wakes", STEP);
    let stream = rig::stream("races");
    let rounds = if rig::is_cuda() { 300 } else { 20_000 };
    run(async {
        let event = Event::blocking();
        for _ in 0..rounds {
            stream.record(&event).unwrap();
            soon(event.reached().unwrap()).await.unwrap();
        }
    });
}

#[test]
fn a_future_that_timed_out_leaves_the_stream_as_it_is() {
    let _limit = Limit::new("timeout", STEP);
    let stream = rig::stream("held");
    let go = held(&stream);
    let event = record(&stream);
    run(async {
        let reached = event.reached().unwrap();
        assert!(timeout(Duration::from_millis(20), reached).await.is_err());
        let again = event.reached().unwrap();
        go.store(true, Ordering::Release);
        soon(again).await.unwrap();
    });
    stream.synchronize(SOON).unwrap();
}

/// The work of a wait that fails, and of one that is given up.
#[test]
fn failures_are_the_output() {
    let _limit = Limit::new("failures", STEP);
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    let stream = rig::stream("fails");
    let region = pair.region(64);
    pair.b
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
    let event = record(&stream);
    let fd = eventfd();
    event.notify(fd.as_fd()).unwrap();
    let aborted = run(async {
        let reached = event.reached().unwrap();
        tokio::join!(soon(reached), async { pair.b.abort() }).0
    });
    assert!(
        matches!(aborted, Err(Error::Asynchronous { .. })),
        "{aborted:?}"
    );
    stream.synchronize(SOON).unwrap_err();
    assert!(stream.take_fault().is_some());
    assert_eq!((count(&fd), event.query().is_err()), (1, true));

    let go = held(&stream);
    let event = record(&stream);
    let given_up = event.reached().unwrap();
    stream.abort();
    go.store(true, Ordering::Release);
    let given_up = run(soon(given_up));
    assert!(
        matches!(given_up, Err(Error::Asynchronous { .. })),
        "{given_up:?}"
    );
}

#[test]
fn eventfd_is_readable_once_for_each_call() {
    let _limit = Limit::new("eventfd", STEP);
    let stream = rig::stream("eventfd");
    let fd = eventfd();
    // Never recorded, so passed.
    Event::blocking().notify(fd.as_fd()).unwrap();
    assert_eq!(count(&fd), 1);
    let go = held(&stream);
    let event = record(&stream);
    for _ in 0..3 {
        event.notify(fd.as_fd()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((count(&fd), event.query()), (0, Ok(false)));
    run(async {
        // SAFETY: the descriptor is the object's own, which drops both.
        let fd = unsafe { AsyncFd::register(fd) }.unwrap();
        go.store(true, Ordering::Release);
        let mut counted = 0;
        while counted < 3 {
            let mut ready = soon(fd.readable()).await.unwrap();
            counted += count(fd.get_ref());
            ready.clear_ready();
        }
        assert_eq!((counted, event.query()), (3, Ok(true)));
        // Recorded again, it tells nobody who waited before.
        stream.record(&event).unwrap();
        soon(event.reached().unwrap()).await.unwrap();
        assert_eq!(count(fd.get_ref()), 0);
    });
}

#[test]
fn the_example_transfers_in_tasks_of_one_thread() {
    let _limit = Limit::new("example", STEP);
    let device = std::env::var("DOORBELL_TEST_DEVICE");
    let device = device.as_deref().unwrap_or("softcx");
    assert_eq!(example::transfers(device, 4).unwrap(), 4 * 64);
}

/// Work requests that are posted and work requests and waits of a stream; each await races with the completion.
#[test]
fn tickets_are_futures() {
    let _limit = Limit::new("tickets", STEP);
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    let stream = rig::stream("tickets");
    let region = pair.region(256);
    let slice = || [region.slice(0, 64).unwrap()];
    let target = [region.slice(128, 64).unwrap()];
    run(async {
        for step in 0..200_u8 {
            region.fill(0, 64, step).unwrap();
            let received = pair.b.post_recv(1, &target).unwrap();
            let sent = pair.a.post_send(&Work::send(&slice())).unwrap();
            soon(received.into_future()).await.unwrap();
            assert!(region.is_filled_with(128, 64, step).unwrap());
            // It is over already, and stays so.
            soon((&sent).into_future()).await.unwrap();
            soon(sent.into_future()).await.unwrap();
            pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
            pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();

            let received = pair.b.post_recv(2, &target).unwrap();
            let sent = pair.a.stream_queue_send(&stream, &Work::send(&slice()));
            let waited = pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            soon(waited.into_future()).await.unwrap();
            soon(sent.unwrap().into_future()).await.unwrap();
            soon(received.into_future()).await.unwrap();
            pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
        }
    });
    stream.synchronize(SOON).unwrap();
}

/// A future and a descriptor say how an operation of an endpoint that was aborted ended, and a future that was dropped keeps nothing.
#[test]
fn failures_and_drops_of_tickets() {
    let _limit = Limit::new("ticket failures", STEP);
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    let region = pair.region(64);
    let ticket = pair
        .b
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    let fd = eventfd();
    ticket.notify(fd.as_fd()).unwrap();
    ticket.notify(fd.as_fd()).unwrap();
    run(async {
        let short = timeout(Duration::from_millis(20), ticket.clone().into_future());
        assert!(short.await.is_err());
        assert_eq!(count(&fd), 0);
        // SAFETY: the descriptor is the object's own, which drops both.
        let fd = unsafe { AsyncFd::register(fd) }.unwrap();
        let (failed, ()) = tokio::join!(soon((&ticket).into_future()), async { pair.b.abort() });
        assert!(matches!(failed, Err(Error::Work(_))), "{failed:?}");
        let mut counted = 0;
        while counted < 2 {
            let mut ready = soon(fd.readable()).await.unwrap();
            counted += count(fd.get_ref());
            ready.clear_ready();
        }
        assert_eq!(counted, 2);
        // It is over: within the call.
        ticket.notify(fd.get_ref().as_fd()).unwrap();
        assert_eq!(count(fd.get_ref()), 1);
    });
}
