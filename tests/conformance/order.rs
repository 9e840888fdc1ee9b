//! Order of operations: many endpoints in a batch, several streams, words as signals, events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use doorbell::softcx::Faults;
use doorbell::{
    Cause, Condition, Control, EndpointConfig, Event, Executor, HostStream, Prepared, QueueKind,
    Region, Status, Work, stream_post, stream_post_all, stream_wait_value32, stream_write_value32,
    wait_value32,
};

use crate::rig::{
    Limit, Pair, Random, SOON, control, from_env, has_no_queue, strict_device as device,
};
use crate::{STEP, rigs};

/// The streams to run on: every kind.
fn streams(count: usize) -> Vec<Box<dyn Executor>> {
    (0..count)
        .map(|_| Box::new(crate::rig::stream("order")) as Box<dyn Executor>)
        .collect()
}

#[test]
fn batch_over_many_endpoints_is_executed_completely() {
    const PAIRS: usize = 24;
    let _limit = Limit::new("batch", STEP);
    let device = device();
    let stream = &streams(1)[0];
    let mut pairs: Vec<Pair> = (0..PAIRS)
        .map(|_| Pair::new(&device, &EndpointConfig::default()))
        .collect();
    let regions: Vec<Region> = pairs.iter().map(|pair| pair.region(4096)).collect();
    for round in 0..40u8 {
        let mut list: Vec<Prepared> = Vec::new();
        let mut receives = Vec::new();
        for (pair, region) in pairs.iter_mut().zip(&regions) {
            region.fill(0, 128, round).unwrap();
            region.fill(1024, 256, 0xff).unwrap();
            let remote = region.remote();
            let receive = pair
                .b
                .prepare_recv(1, &[region.slice(1024, 64).unwrap()])
                .unwrap();
            receives.push(receive.ticket());
            list.push(receive);
            let data = [region.slice(0, 64).unwrap()];
            let write = Work::write(&data, remote.slice(1152, 64).unwrap());
            list.push(pair.a.prepare_send(&write.signaled(false)).unwrap());
            list.push(pair.a.prepare_send(&Work::send(&data)).unwrap());
            list.push(pair.a.prepare_wait_cq(QueueKind::Send).unwrap());
            list.push(pair.b.prepare_wait_cq(QueueKind::Recv).unwrap());
        }
        let tickets = stream_post_all(&**stream, &mut list).unwrap();
        assert_eq!((tickets.len(), list.len()), (PAIRS * 5, 0));
        stream.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(|t| t.status() == Status::Complete));
        for (region, receive) in regions.iter().zip(receives) {
            assert_eq!(receive.details(), Some((64, None)));
            for (at, value) in [(1024, round), (1088, 0xff), (1152, round), (1216, 0xff)] {
                assert!(region.is_filled_with(at, 64, value).unwrap());
            }
        }
    }
}

#[test]
fn refused_batch_changes_nothing() {
    let device = device();
    if has_no_queue(&device, "refused_batch_changes_nothing") {
        return;
    }
    let short = HostStream::with_capacity("short", 4).unwrap();
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64);
    let remote = region.remote();
    let data = [region.slice(0, 8).unwrap()];
    let work = Work::write(&data, remote.slice(32, 8).unwrap());
    for _ in 0..3 {
        let mut list: Vec<_> = (0..6)
            .map(|_| pair.a.prepare_send(&work).unwrap())
            .collect();
        let tickets: Vec<_> = list.iter().map(Prepared::ticket).collect();
        let error = stream_post_all(&short, &mut list).unwrap_err();
        assert!(matches!(
            error,
            doorbell::Error::Range {
                argument: "batch.len()",
                value: 6,
                max: 4,
                ..
            }
        ));
        assert_eq!(list.len(), 6);
        assert!(tickets.iter().all(|t| t.status() == Status::Prepared));
        // Out of order: nothing of the batch is posted either.
        list.swap(1, 2);
        let refused = stream_post_all(&short, &mut list);
        assert!(matches!(
            refused,
            Err(doorbell::Error::State { .. }) | Err(doorbell::Error::Range { .. })
        ));
        list.swap(1, 2);
        // In two parts it fits.
        let mut second = list.split_off(3);
        for part in [&mut list, &mut second] {
            stream_post_all(&short, part).unwrap();
        }
        for _ in 0..6 {
            pair.a.stream_wait_cq(&short, QueueKind::Send).unwrap();
        }
        short.synchronize(SOON).unwrap();
        assert!(tickets.iter().all(|t| t.status() == Status::Complete));
    }
}

/// Posts of one endpoint on several streams go out in the order of the posts, however the streams run.
#[test]
fn several_streams_on_one_endpoint_keep_the_order_of_the_posts() {
    const ROUNDS: u64 = 60;
    let limit = Limit::new("streams", STEP);
    let device = device();
    let mut random = Random(3);
    for count in [2, 3, 5] {
        limit.step(count as u64, STEP);
        let streams = streams(count);
        let config = EndpointConfig::default().send_depth(32).recv_depth(32);
        let mut pair = Pair::new(&device, &config);
        let region = pair.region(4096);
        for round in 0..ROUNDS {
            let mut receives = Vec::new();
            for place in 0..16u64 {
                let into = [region.slice(place * 4, 4).unwrap()];
                receives.push(pair.b.post_recv(place, &into).unwrap());
            }
            for place in 0..16u32 {
                let stream = random.pick(&streams);
                let number = round as u32 * 16 + place;
                let bytes = number.to_le_bytes();
                let work = Work::send_inline(&bytes).wr_id(place.into());
                pair.a.stream_queue_send(&**stream, &work).unwrap();
                // The wait may be on another stream than the send.
                let waiter = random.pick(&streams);
                pair.a.stream_wait_cq(&**waiter, QueueKind::Send).unwrap();
            }
            for stream in &streams {
                stream.synchronize(SOON).unwrap();
            }
            for place in 0..16u64 {
                let completion = pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
                assert_eq!(completion.wr_id, place);
                let number = round as u32 * 16 + place as u32;
                assert_eq!(region.load_u32(place * 4), Ok(number.to_le()));
                assert_eq!(receives[place as usize].status(), Status::Complete);
            }
        }
    }
}

/// A blocked stream blocks later posts of the same endpoint on other streams; no post overtakes.
#[test]
fn post_behind_a_blocked_stream_waits() {
    let _limit = Limit::new("behind", STEP);
    let device = device();
    if has_no_queue(&device, "post_behind_a_blocked_stream_waits") {
        return;
    }
    let streams = streams(2);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(4096);
    let remote = region.remote();
    for round in 1..=50u32 {
        let target = remote.slice(1024, 4).unwrap();
        stream_wait_value32(
            &*streams[0],
            &region,
            0,
            Condition::GreaterOrEqual(round),
            SOON,
        )
        .unwrap();
        let (first, second) = ((round * 2).to_ne_bytes(), (round * 2 + 1).to_ne_bytes());
        let one = pair
            .a
            .stream_queue_send(&*streams[0], &Work::write_inline(&first, target))
            .unwrap();
        let two = pair
            .a
            // Ordered, because both write to the same place.
            .stream_queue_send(
                &*streams[1],
                &Work::write_inline(&second, target).ordered(true),
            )
            .unwrap();
        pair.a
            .stream_wait_cq(&*streams[0], QueueKind::Send)
            .unwrap();
        pair.a
            .stream_wait_cq(&*streams[1], QueueKind::Send)
            .unwrap();
        // The calling thread may not overtake them either.
        let error = pair.a.post_send(&Work::nop()).unwrap_err();
        assert!(
            matches!(
                error,
                doorbell::Error::State {
                    kind: doorbell::StateKind::OutOfOrder,
                    ..
                }
            ),
            "{error}"
        );
        if round % 8 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(
            (one.status(), two.status()),
            (Status::Queued, Status::Queued)
        );
        region.store_u32(0, round).unwrap();
        for stream in &streams {
            stream.synchronize(SOON).unwrap();
        }
        assert_eq!(region.load_u32(1024), Ok(round * 2 + 1));
        assert_eq!(
            (one.status(), two.status()),
            (Status::Complete, Status::Complete)
        );
    }
}

/// A program has room for both a copy of a long work request to the doorbell register and the wait for another stream.
#[test]
fn work_requests_of_every_length_wait_for_another_stream() {
    let _limit = Limit::new("lengths behind a turn", STEP);
    let device = device();
    if has_no_queue(
        &device,
        "work_requests_of_every_length_wait_for_another_stream",
    ) {
        return;
    }
    let streams = streams(2);
    let config = EndpointConfig::default()
        .blueflame(true)
        .max_inline_bytes(476);
    let mut pair = Pair::new(&device, &config);
    let region = pair.region(4096);
    let bytes: Vec<u8> = (0..476).map(|at| at as u8 | 1).collect();
    for (round, len) in [(1, 20), (2, 84), (3, 148), (4, 212), (5, 276), (6, 476)] {
        let held = Condition::GreaterOrEqual(round);
        stream_wait_value32(&*streams[0], &region, 0, held, SOON).unwrap();
        let nop = Work::nop();
        pair.a.stream_queue_send(&*streams[0], &nop).unwrap();
        let to = region.remote().slice(64, len as u64).unwrap();
        let write = Work::write_inline(&bytes[..len], to);
        pair.a.stream_queue_send(&*streams[1], &write).unwrap();
        region.store_u32(0, round).unwrap();
        for _ in 0..2 {
            pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        }
        let mut found = vec![0; len];
        region.read(64, &mut found).unwrap();
        assert_eq!(found, bytes[..len]);
        for stream in &streams {
            stream.synchronize(SOON).unwrap();
        }
    }
}

/// Two streams wait for their turn at one endpoint. When one of them gets its turn, the deadline of the other keeps running.
#[test]
fn turn_wait_times_out_even_if_another_stream_gets_its_turn() {
    let _limit = Limit::new("turns", STEP);
    let device = device();
    let test = "turn_wait_times_out_even_if_another_stream_gets_its_turn";
    if has_no_queue(&device, test) {
        return;
    }
    let streams = streams(4);
    let timeout = Duration::from_millis(600);
    let config = EndpointConfig::default().wait_timeout(Some(timeout));
    let mut pair = Pair::new(&device, &config);
    let region = pair.region(4096);
    // The first and the third stream are blocked until the test stores to their words.
    for (stream, at) in [(0, 0), (2, 64)] {
        let long = Condition::GreaterOrEqual(1);
        stream_wait_value32(&*streams[stream], &region, at, long, SOON).unwrap();
        for stream in [stream, stream + 1] {
            let nop = Work::nop();
            pair.a.stream_queue_send(&*streams[stream], &nop).unwrap();
        }
    }
    // Both have reached their waits, unless the machine is very busy.
    std::thread::sleep(timeout / 10);
    region.store_u32(0, 1).unwrap();
    streams[1].synchronize(SOON).unwrap();
    let began = Instant::now();
    while pair.a.failure().is_none() {
        assert!(began.elapsed() < STEP / 2, "the turn is waited for");
        std::thread::sleep(Duration::from_millis(1));
    }
    let cause = pair.a.failure().map(|failure| failure.cause);
    assert_eq!(cause, Some(Cause::Deadline(timeout)));
    region.store_u32(64, 1).unwrap();
    for stream in &streams {
        // The wait of the fourth stream failed.
        let _ = stream.synchronize(SOON);
    }
}

#[test]
fn words_signal_between_streams_peers_and_cpu() {
    let _limit = Limit::new("words", STEP);
    let device = device();
    let streams = streams(2);
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(4096);
    let remote = region.remote();
    for round in 1..200u32 {
        // Stream 0 writes to the peer's word, on which stream 1 waits, and answers the CPU.
        let data = round.to_ne_bytes();
        pair.a
            .stream_queue_send(
                &*streams[0],
                &Work::write_inline(&data, remote.slice(64, 4).unwrap()),
            )
            .unwrap();
        pair.a
            .stream_wait_cq(&*streams[0], QueueKind::Send)
            .unwrap();
        let wait = stream_wait_value32(
            &*streams[1],
            &region,
            64,
            Condition::GreaterOrEqual(round),
            SOON,
        )
        .unwrap();
        let write = stream_write_value32(&*streams[1], &region, 128, round).unwrap();
        wait_value32(&region, 128, Condition::GreaterOrEqual(round), SOON).unwrap();
        assert_eq!(region.load_u32(64), Ok(round));
        streams[1].synchronize(SOON).unwrap();
        assert_eq!(
            (wait.status(), write.status()),
            (Status::Complete, Status::Complete)
        );
    }
    // Each condition, met and not met.
    region.store_u32(256, 0b1010).unwrap();
    let met =
        |condition| wait_value32(&region, 256, condition, Some(Duration::from_millis(3))).is_ok();
    assert!(met(Condition::GreaterOrEqual(10)) && !met(Condition::GreaterOrEqual(11)));
    assert!(met(Condition::GreaterOrEqual(
        10u32.wrapping_sub(1 << 31).wrapping_add(1)
    )));
    assert!(met(Condition::And(0b0010)) && !met(Condition::And(0b0101)));
    assert!(met(Condition::Nor(0)) && !met(Condition::Nor(!0b1010 | 0b1010)));
    for condition in [
        Condition::GreaterOrEqual(10),
        Condition::And(2),
        Condition::Nor(0),
    ] {
        let ticket = stream_wait_value32(&*streams[0], &region, 256, condition, SOON).unwrap();
        streams[0].synchronize(SOON).unwrap();
        assert_eq!(ticket.status(), Status::Complete);
    }
}

/// A write of a few bytes announces a write before it. A reader that finds the announcement also finds the other, in whatever order the
/// network places them.
#[test]
fn ordered_write_becomes_visible_after_earlier_writes() {
    let _limit = Limit::new("signal", STEP);
    let device = device();
    // Sets the faults of a device of this process; for others the environment sets them.
    let faults = Faults {
        late_writes_ns: 100_000,
        ..Faults::default()
    };
    device.set_faults(faults);
    let stream = &streams(1)[0];
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64 << 10);
    let remote = region.remote();
    for round in 1..=50u32 {
        let len_bytes = [8, 1000, 16 << 10][round as usize % 3];
        region.fill(0, 16 << 10, round as u8).unwrap();
        let data = [region.slice(0, len_bytes).unwrap()];
        let write = Work::write(&data, remote.slice(16 << 10, len_bytes).unwrap());
        pair.a
            .stream_queue_send(&**stream, &write.signaled(false))
            .unwrap();
        let value = round.to_ne_bytes();
        let signal = Work::write_inline(&value, remote.slice(32 << 10, 4).unwrap());
        pair.a
            .stream_queue_send(&**stream, &signal.ordered(true))
            .unwrap();
        wait_value32(&region, 32 << 10, Condition::GreaterOrEqual(round), SOON).unwrap();
        assert!(
            region
                .is_filled_with(16 << 10, len_bytes, round as u8)
                .unwrap(),
            "round {round}: the signal of {len_bytes} bytes came before them"
        );
        pair.a.stream_wait_cq(&**stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
    }
}

/// The write and its signal are transmitted without a further call into the library.
#[test]
fn posted_ordered_write_needs_no_further_call() {
    let _limit = Limit::new("ordered post", STEP);
    let device = device();
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(4 << 20);
    let remote = region.remote();
    for round in 1..=20u32 {
        let data = [region.slice(0, 1 << 20).unwrap()];
        let write = Work::write(&data, remote.slice(1 << 20, 1 << 20).unwrap());
        pair.a.post_send(&write.signaled(false)).unwrap();
        let value = round.to_ne_bytes();
        let signal = Work::write_inline(&value, remote.slice(3 << 20, 4).unwrap());
        pair.a.post_send(&signal.ordered(true)).unwrap();
        let begin = Instant::now();
        while region.load_u32(3 << 20) != Ok(round) {
            assert!(begin.elapsed() < STEP / 2, "round {round}");
            std::thread::sleep(Duration::from_micros(100));
        }
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
}

/// kernel, send, wait, kernel on one stream: the kernel before is seen by the peer, the kernel after sees the transfer.
#[test]
fn kernels_and_transfers_of_a_stream_run_in_order() {
    let _limit = Limit::new("kernels", STEP);
    let device = device();
    if has_no_queue(&device, "kernels_and_transfers_of_a_stream_run_in_order") {
        return;
    }
    let (here, there) = (crate::rig::stream("here"), crate::rig::stream("there"));
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(64 << 10);
    let checked = Arc::new(AtomicU32::new(0));
    for round in 0..300u32 {
        let (kernel, value) = (region.clone(), round as u8);
        pair.b
            .stream_queue_recv(&there, 0, &[region.slice(32 << 10, 20_000).unwrap()])
            .unwrap();
        pair.b.stream_wait_cq(&there, QueueKind::Recv).unwrap();
        here.launch(move || kernel.fill(0, 20_000, value).unwrap())
            .unwrap();
        pair.a
            .stream_queue_send(&here, &Work::send(&[region.slice(0, 20_000).unwrap()]))
            .unwrap();
        pair.a.stream_wait_cq(&here, QueueKind::Send).unwrap();
        let (kernel, count) = (region.clone(), Arc::clone(&checked));
        there
            .launch(move || {
                if kernel.is_filled_with(32 << 10, 20_000, value).unwrap() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
            .unwrap();
        // The next round must not begin to fill before this one is checked.
        let done = Event::new();
        there.record(&done).unwrap();
        here.wait_event(&done).unwrap();
        if round % 64 == 63 {
            // As many as the queues hold.
            there.synchronize(SOON).unwrap();
        }
    }
    here.synchronize(SOON).unwrap();
    there.synchronize(SOON).unwrap();
    assert_eq!(checked.load(Ordering::Relaxed), 300);
}

/// An event stands for a transfer: host threads and other streams that wait for it find the bytes.
#[test]
fn events_order_transfers_across_streams() {
    let limit = Limit::new("events", STEP);
    let device = device();
    let mut random = Random(11);
    let streams: Vec<crate::rig::Stream> = (0..4).map(|_| crate::rig::stream("event")).collect();
    let mut pair = Pair::new(&device, &EndpointConfig::default());
    let region = pair.region(4096);
    let remote = region.remote();
    for round in 1..=150u32 {
        limit.step(round.into(), STEP);
        // A chain over the streams in random order, each link a write that the next link's stream sees and adds to.
        let mut order: Vec<usize> = (0..streams.len()).collect();
        random.shuffle(&mut order);
        region.store_u32(0, round * 100).unwrap();
        let mut event: Option<Event> = None;
        for (link, stream) in order.iter().map(|at| &streams[*at]).enumerate() {
            if let Some(event) = &event {
                stream.wait_event(event).unwrap();
            }
            let (kernel, link) = (region.clone(), link as u64 * 4);
            stream
                .launch(move || {
                    let word = kernel.load_u32(link).unwrap();
                    kernel.store_u32(2048 + link, word + 1).unwrap();
                })
                .unwrap();
            let data = [region.slice(2048 + link, 4).unwrap()];
            let target = remote.slice(link + 4, 4).unwrap();
            let prepared = pair.a.prepare_send(&Work::write(&data, target)).unwrap();
            stream_post(stream, prepared).unwrap();
            pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
            let next = if random.below(2) == 0 {
                Event::new()
            } else {
                Event::blocking()
            };
            stream.record(&next).unwrap();
            event = Some(next);
        }
        event.unwrap().synchronize(SOON).unwrap();
        assert_eq!(region.load_u32(16), Ok(round * 100 + 4));
    }
}

/// A receive is available to the device when the call that posts it returns, whatever else its endpoint does: the peer sends at once, and without RNR
/// retries.
#[test]
fn posted_receive_is_ready_for_the_first_attempt() {
    let limit = Limit::new("posted receives", STEP);
    let config = EndpointConfig::default().rnr_retry(0);
    for rig in rigs() {
        let device = (rig.open)();
        let is_sync = control(&device) == Control::Sync;
        let mut pair = Pair::new(&device, &config);
        let mut driver = (rig.driver)();
        let region = pair.region(8);
        for round in 0..from_env("DOORBELL_RECEIVES", 3_000) {
            limit.step(round, STEP);
            // On some paths a thread serves the endpoint while it has work. The rounds are to coincide with every step of that thread.
            if round % 8 == 0 {
                driver.send(&mut pair.b, &Work::nop());
                driver.wait(&mut pair.b, QueueKind::Send);
            }
            let into = [region.slice(0, 8).unwrap()];
            // On the sync path queueing a receive also posts it within the call.
            let receive = if is_sync && round % 2 == 0 {
                driver.recv(&mut pair.b, round, &into)
            } else {
                pair.b.post_recv(round, &into).unwrap()
            };
            pair.a
                .post_send(&Work::send_inline(&round.to_le_bytes()))
                .unwrap();
            pair.a
                .wait_cq(QueueKind::Send, SOON)
                .unwrap_or_else(|error| panic!("{}, {round}: {error}", rig.name));
            assert_eq!(pair.b.wait_cq(QueueKind::Recv, SOON).unwrap().wr_id, round);
            assert_eq!(receive.status(), Status::Complete);
            if round % 8 == 7 {
                driver.settle();
            }
        }
    }
}
