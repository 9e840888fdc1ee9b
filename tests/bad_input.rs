//! Bad input returns a typed error that names the argument and the limit. A refused call has no partial effect: the endpoint works afterwards, and its
//! queues have as much room as before.
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::ptr::NonNull;
use std::time::Duration;

use doorbell::{
    Access, Address, Channel, Condition, Device, Endpoint, EndpointConfig, Error, Executor,
    HostStream, Listener, QueueKind, Region, RemoteSlice, StateKind, Status, Work, stream_post,
    stream_post_all, stream_wait_value32, stream_write_value32, wait_value32,
};
use rig::{Pair, SOON, device, has_no_queue};

const DEPTH: u32 = 8;

fn config() -> EndpointConfig {
    EndpointConfig::default()
        .send_depth(DEPTH)
        .recv_depth(DEPTH)
        .max_segments(2)
        .max_inline_bytes(64)
        .ack_timeout(8)
        .retry_count(1)
        .wait_timeout(Some(Duration::from_secs(20)))
}

/// Fills both queues completely and checks every byte: the refused calls before took no entry of a queue.
fn works(pair: &mut Pair, stream: &HostStream) {
    let region = pair.region(8192);
    for round in 1..=2u8 {
        region.fill(0, 4096, round).unwrap();
        let mut receives = Vec::new();
        for place in 0..u64::from(DEPTH) {
            let into = [region.slice(4096 + place * 64, 64).unwrap()];
            receives.push(pair.b.post_recv(place, &into).unwrap());
        }
        for place in 0..u64::from(DEPTH) {
            let from = [region.slice(place * 64, 64).unwrap()];
            pair.a
                .stream_queue_send(stream, &Work::send(&from))
                .unwrap();
        }
        for _ in 0..DEPTH {
            pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
            pair.b.stream_wait_cq(stream, QueueKind::Recv).unwrap();
        }
        stream.synchronize(SOON).unwrap();
        assert!(receives.iter().all(|r| r.status() == Status::Complete));
        assert!(
            region
                .is_filled_with(4096, u64::from(DEPTH) * 64, round)
                .unwrap()
        );
        for side in [QueueKind::Send, QueueKind::Recv] {
            for endpoint in [&mut pair.a, &mut pair.b] {
                assert_eq!(endpoint.poll_cq(side), Ok(None), "a completion too many");
                let wait = endpoint.prepare_wait_cq(side);
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
            }
        }
    }
}

/// The three ways to post a send: each must refuse it with the same error.
fn each_way(endpoint: &mut Endpoint, stream: &HostStream, work: &Work<'_>) -> Error {
    let errors = [
        endpoint.prepare_send(work).map(drop).unwrap_err(),
        endpoint.stream_queue_send(stream, work).unwrap_err(),
        endpoint.post_send(work).unwrap_err(),
    ];
    assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
    let [error, ..] = errors;
    error
}

/// The argument in the error for too many slices.
const SLICES: &str = "slices.len() (limit: EndpointConfig::max_segments)";

/// Argument, value, minimum and maximum of a range error.
fn range(error: &Error) -> (&'static str, u64, u64, u64) {
    match error {
        Error::Range {
            argument,
            value,
            min,
            max,
        } => {
            let text = error.to_string();
            assert!(text.contains(argument) && text.contains(&max.to_string()));
            (argument, *value, *min, *max)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn out_of_range_lengths_and_slices_are_refused() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    for len in [0, doorbell_region_max() + 1, u64::MAX] {
        let error = Region::alloc(&pair.domain, len, Access::ALL).unwrap_err();
        assert_eq!(range(&error), ("len_bytes", len, 1, doorbell_region_max()));
    }
    let region = pair.region(4096);
    for (offset, len) in [
        (4097, 0),
        (4096, 1),
        (0, 4097),
        (u64::MAX, 2),
        (1, u64::MAX),
    ] {
        match region.slice(offset, len) {
            Err(Error::OutOfBounds {
                argument: "slice",
                limit_bytes: 4096,
                ..
            }) => {}
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            region.remote().slice(offset, len),
            Err(Error::OutOfBounds {
                limit_bytes: 4096,
                ..
            })
        ));
    }
    let slices = [region.slice(0, 64).unwrap()];
    let short = region.remote().slice(0, 63).unwrap();
    for work in [
        Work::write(&slices, short),
        Work::read(&slices, short),
        Work::write_inline(&[0; 64], short),
    ] {
        let refused = each_way(&mut pair.a, &stream, &work);
        assert!(
            matches!(
                refused,
                Error::OutOfBounds {
                    argument: "remote",
                    len_bytes: 64,
                    limit_bytes: 63,
                    ..
                }
            ),
            "{refused}"
        );
    }
    works(&mut pair, &stream);
    if !has_softcx(&pair) {
        // Other devices check that the memory exists, and pin it.
        works(&mut pair, &stream);
        return;
    }
    // Reserved addresses that are never accessed: the work requests are refused before that.
    let huge = named(&pair, 5 << 30);
    assert_eq!(
        range(&huge.slice(0, 1 << 31).unwrap_err()),
        ("len_bytes", 1 << 31, 0, (1 << 31) - 1)
    );
    let most = huge.slice(0, (1 << 31) - 1).unwrap();
    let rkey = region.remote().rkey;
    for work in [
        Work::send(&[most, most]),
        Work::write(&[most, most], RemoteSlice::at(0, rkey)),
        Work::read(&[most, most], RemoteSlice::at(0, rkey)),
    ] {
        let error = each_way(&mut pair.a, &stream, &work);
        assert_eq!(range(&error), (MESSAGE, (1 << 32) - 2, 0, 1 << 30));
    }
    // `max_msg_sz` of a port is 2^30, though a slice may be longer.
    let (first, rest) = (
        huge.slice(0, 1 << 29).unwrap(),
        huge.slice(0, (1 << 29) + 1).unwrap(),
    );
    let error = each_way(&mut pair.a, &stream, &Work::send(&[first, rest]));
    assert_eq!(range(&error), (MESSAGE, (1 << 30) + 1, 0, 1 << 30));
    let longest = pair.a.prepare_send(&Work::send(&[first, first])).unwrap();
    pair.a.rollback(longest);
    works(&mut pair, &stream);
}

/// The argument in the error for a message that is too long for its device.
const MESSAGE: &str = "bytes of the slices (limit: the longest message of the device's port)";

/// Whether the pair is on the software ConnectX of this process.
fn has_softcx(pair: &Pair) -> bool {
    pair.domain.device().name() == "softcx"
}

fn doorbell_region_max() -> u64 {
    doorbell::REGION_BYTES_MAX
}

/// A region longer than any memory. Its addresses are only reserved, until the process ends; no transfer may access them.
#[allow(unsafe_code)] // Reason: reserves addresses, and registers them
fn named(pair: &Pair, len_bytes: u64) -> Region {
    // SAFETY: a new mapping; no transfer and no call touches it: each of the test's work requests is refused before.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            len_bytes as usize,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        let start = NonNull::new(at.cast()).unwrap();
        Region::register(&pair.domain, start, len_bytes, Access::LOCAL_READ).unwrap()
    }
}

#[test]
fn excess_slices_excess_inline_and_misshapen_atomics_are_refused() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(4096);
    let remote = region.remote();
    let slices = [region.slice(0, 8).unwrap(); 17];
    for count in [3, 16, 17] {
        let error = each_way(&mut pair.a, &stream, &Work::send(&slices[..count]));
        assert_eq!(range(&error), (SLICES, count as u64, 0, 2));
        let error = pair.b.post_recv(1, &slices[..count]).unwrap_err();
        assert_eq!(range(&error), (SLICES, count as u64, 0, 2));
        let error = pair
            .b
            .stream_queue_recv(&stream, 1, &slices[..count])
            .unwrap_err();
        assert_eq!(range(&error), (SLICES, count as u64, 0, 2));
    }
    let bytes = vec![0; 1 << 17];
    for len in [65, 477, 1 << 17] {
        let error = each_way(&mut pair.a, &stream, &Work::send_inline(&bytes[..len]));
        let inline = "bytes.len() (limit: EndpointConfig::max_inline_bytes)";
        assert_eq!(range(&error), (inline, len as u64, 0, 64));
        let work = Work::write_inline(&bytes[..len], RemoteSlice::at(remote.addr, remote.rkey));
        range(&each_way(&mut pair.a, &stream, &work));
    }
    for wrong in [
        &slices[..0],
        &slices[..2],
        &[region.slice(0, 7).unwrap()],
        &[region.slice(0, 9).unwrap()],
    ] {
        for work in [
            Work::compare_swap(wrong, RemoteSlice::at(remote.addr, remote.rkey), 0, 0),
            Work::fetch_add(wrong, RemoteSlice::at(remote.addr, remote.rkey), 0),
        ] {
            range(&each_way(&mut pair.a, &stream, &work));
        }
    }
    works(&mut pair, &stream);
}

/// The post refuses work that a device would complete in error, which would put the queue pair into the error state.
#[test]
fn work_that_the_device_would_fail_is_refused_at_post() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(4096);
    let remote = region.remote();
    let result = [region.slice(0, 8).unwrap()];
    for off in 1..8 {
        let addr = remote.addr + 64 + off;
        let target = RemoteSlice::at(addr, remote.rkey);
        for work in [
            Work::compare_swap(&result, target, 0, 0),
            Work::fetch_add(&result, target, 0),
        ] {
            let error = each_way(&mut pair.a, &stream, &work);
            assert!(
                matches!(error, Error::Alignment { argument: "remote", value, align: 8 } if value == addr),
                "{error:?}"
            );
        }
    }
    let short = remote.slice(64, 7).unwrap();
    let error = each_way(&mut pair.a, &stream, &Work::fetch_add(&result, short, 0));
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error:?}");
    let target = remote.slice(64, 8).unwrap();
    for access in [Access::LOCAL_READ, Access::REMOTE_READ] {
        let constant = Region::alloc(&pair.domain, 64, access).unwrap();
        let slices = [region.slice(0, 0).unwrap(), constant.slice(0, 8).unwrap()];
        let refused = |error: Error, at: &str| {
            assert!(
                matches!(&error, Error::State { kind: StateKind::NoAccess, reason, .. } if reason.contains(at)),
                "{error:?}"
            );
        };
        let error = each_way(&mut pair.a, &stream, &Work::read(&slices, target));
        refused(error, "slice 1");
        for work in [
            Work::compare_swap(&slices[1..], target, 0, 0),
            Work::fetch_add(&slices[1..], target, 0),
        ] {
            refused(each_way(&mut pair.a, &stream, &work), "slice 0");
        }
        refused(pair.b.post_recv(1, &slices).unwrap_err(), "slice 1");
        let queued = pair.b.stream_queue_recv(&stream, 1, &slices[1..]);
        refused(queued.unwrap_err(), "slice 0");
        // Work that only reads the region is accepted.
        let ticket = pair.a.post_send(&Work::write(&slices, target)).unwrap();
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!(ticket.status(), Status::Complete);
    }
    for work in [
        Work::read(&result, target),
        Work::fetch_add(&result, target, 1),
        Work::nop(),
    ] {
        let error = each_way(&mut pair.a, &stream, &work.imm(0));
        assert!(
            matches!(&error, Error::State { kind: StateKind::WrongKind, reason, .. } if reason.contains("immediate")),
            "{error:?}"
        );
    }
    for work in [
        Work::read(&result, target),
        Work::fetch_add(&result, target, 1),
        Work::write(&result, target),
    ] {
        let error = each_way(&mut pair.a, &stream, &work.solicited(true));
        assert!(
            matches!(&error, Error::State { kind: StateKind::WrongKind, reason, .. } if reason.contains("solicited")),
            "{error:?}"
        );
    }
    assert_eq!(pair.a.failure(), None);
    works(&mut pair, &stream);
}

/// The messages of time-outs and of refused operations name usual causes.
#[test]
fn timeout_and_refusal_messages_name_usual_causes() {
    let device = device();
    let mut pair = Pair::new(&device, &config());
    let short = Some(Duration::from_millis(1));
    let late = |error: Error| {
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        error.to_string()
    };
    let text = late(pair.a.wait_cq(QueueKind::Recv, short).unwrap_err());
    assert!(
        text.contains("no posted operation can complete it"),
        "{text}"
    );
    let region = pair.region(64);
    let ticket = pair
        .a
        .post_recv(1, &[region.slice(0, 64).unwrap()])
        .unwrap();
    for error in [
        pair.a.wait_cq(QueueKind::Recv, short).unwrap_err(),
        ticket.wait(short).unwrap_err(),
    ] {
        let text = late(error);
        assert!(text.contains("the peer sent nothing"), "{text}");
    }
    let stream = HostStream::new("s").unwrap();
    let first = pair.a.prepare_send(&Work::nop()).unwrap();
    let second = pair.a.prepare_send(&Work::nop()).unwrap();
    let rejected = stream_post(&stream, second).unwrap_err();
    let (shown, said) = (format!("{rejected:?}"), rejected.to_string());
    assert!(said.contains("give or drop them first"), "{said}");
    assert!(shown.contains(&said) && shown.len() < 300, "{shown}");
    drop((first, rejected));
    let mut lone = Endpoint::new(&pair.domain, &config()).unwrap();
    let error = lone.post_send(&Work::nop()).unwrap_err().to_string();
    assert!(error.contains("call `connect`"), "{error}");
}

#[test]
fn foreign_and_deregistered_regions_are_refused() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let same_device =
        Region::alloc(&pair.domain.device().protection_domain(), 64, Access::ALL).unwrap();
    let other_device = Region::alloc(&device().protection_domain(), 64, Access::ALL).unwrap();
    for (region, word) in [
        (&same_device, "protection domain "),
        (&other_device, "another device, opened as `"),
    ] {
        let slices = [region.slice(0, 8).unwrap()];
        let recv = pair.b.post_recv(1, &slices).unwrap_err();
        let send = each_way(&mut pair.a, &stream, &Work::send(&slices));
        for error in [recv, send] {
            match &error {
                Error::Foreign {
                    argument: "slices",
                    found,
                    ..
                } => assert!(found.contains(word), "{error}"),
                other => panic!("{other:?}"),
            }
        }
    }
    let gone = pair.region(64);
    assert_eq!(gone.deregister(), Ok(true));
    let slices = [gone.slice(0, 8).unwrap()];
    let recv = pair.b.post_recv(1, &slices).unwrap_err();
    let send = each_way(&mut pair.a, &stream, &Work::send(&slices));
    for error in [recv, send] {
        assert!(
            matches!(&error, Error::State { kind: StateKind::Deregistered, reason, .. } if reason.contains("slice 0")),
            "{error:?}"
        );
    }
    works(&mut pair, &stream);
}

#[test]
fn full_queues_return_errors_and_accept_work_again() {
    let device = device();
    if has_no_queue(&device, "full_queues_return_errors_and_accept_work_again") {
        return;
    }
    let mut pair = Pair::new(&device, &config());
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(64);
    // The stream is held, so that no entry is freed.
    stream_wait_value32(&stream, &region, 0, Condition::GreaterOrEqual(1), SOON).unwrap();
    for _ in 0..DEPTH {
        pair.a.stream_queue_send(&stream, &Work::nop()).unwrap();
        pair.b
            .stream_queue_recv(&stream, 0, &[region.slice(8, 8).unwrap()])
            .unwrap();
    }
    let full = |error: Error, queue: &str| {
        assert!(
            matches!(&error, Error::QueueFull { queue: q, depth: DEPTH } if *q == queue),
            "{error:?}"
        );
    };
    for _ in 0..3 {
        full(
            pair.a.stream_queue_send(&stream, &Work::nop()).unwrap_err(),
            "send",
        );
        full(pair.a.prepare_send(&Work::nop()).unwrap_err(), "send");
        full(pair.a.post_send(&Work::nop()).unwrap_err(), "send");
        full(
            pair.b
                .stream_queue_recv(&stream, 0, &[region.slice(8, 8).unwrap()])
                .unwrap_err(),
            "receive",
        );
        full(pair.b.post_recv(0, &[]).unwrap_err(), "receive");
    }
    // More waits than there will be completions.
    for _ in 0..DEPTH {
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
    }
    for _ in 0..3 {
        for error in [
            pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap_err(),
            pair.a
                .prepare_wait_cq(QueueKind::Send)
                .map(drop)
                .unwrap_err(),
            pair.a.stream_wait_cq(&stream, QueueKind::Recv).unwrap_err(),
        ] {
            assert!(
                matches!(
                    &error,
                    Error::State {
                        kind: StateKind::NothingPosted,
                        ..
                    }
                ),
                "{error:?}"
            );
        }
    }
    region.store_u32(0, 1).unwrap();
    stream.synchronize(SOON).unwrap();
    for _ in 0..DEPTH {
        pair.a.post_send(&Work::send_inline(b"x")).unwrap();
        pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
        pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
    }
    works(&mut pair, &stream);
    // Completions that are not collected fill the completion queue, and the error says so.
    let error = (0..100)
        .find_map(|_| {
            let posted = pair.a.post_send(&Work::nop());
            while posted.as_ref().is_ok_and(|ticket| !ticket.is_over()) {}
            posted.err()
        })
        .unwrap();
    assert!(
        matches!(
            error,
            Error::QueueFull {
                queue: "send completion",
                depth: 16
            }
        ),
        "{error:?}"
    );
    while pair.a.poll_cq(QueueKind::Send).unwrap().is_some() {}
    works(&mut pair, &stream);
}

#[test]
fn wait_without_posted_work_names_the_missing_post() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    for (side, cure) in [
        (QueueKind::Recv, "no receive is posted; post one first"),
        (
            QueueKind::Send,
            "no signaled send is posted; post one first",
        ),
    ] {
        let refused = pair.b.stream_wait_cq(&stream, side).unwrap_err();
        assert!(refused.to_string().contains(cure), "{refused}");
    }
    works(&mut pair, &stream);
}

#[test]
fn send_before_connect_and_second_connect_are_refused() {
    let domain = device().protection_domain();
    let a = Endpoint::new(&domain, &config()).unwrap();
    let b = Endpoint::new(&domain, &config()).unwrap();
    let mut pair = Pair { domain, a, b };
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(64);
    let slices = [region.slice(0, 8).unwrap()];
    let error = each_way(&mut pair.a, &stream, &Work::send(&slices));
    assert!(matches!(
        &error,
        Error::State {
            kind: StateKind::NotConnected,
            ..
        }
    ));
    // A receive may be posted before the connect.
    let early = pair.b.post_recv(4, &slices).unwrap();
    assert!(!pair.a.is_connected());
    pair.connect();
    assert!(pair.a.is_connected());
    let peer = pair.b.address();
    let error = pair.a.connect(&peer).unwrap_err();
    assert!(matches!(
        &error,
        Error::State {
            kind: StateKind::AlreadyConnected,
            ..
        }
    ));
    pair.a.post_send(&Work::send_inline(b"x")).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    assert_eq!(pair.b.wait_cq(QueueKind::Recv, SOON).unwrap().wr_id, 4);
    assert_eq!(early.status(), Status::Complete);
    works(&mut pair, &stream);
}

#[test]
fn connecting_to_invalid_or_absent_peers_fails() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let good = pair.b.address().to_bytes();
    let malformed = |bytes: &[u8]| match Address::from_bytes(bytes) {
        Err(Error::Malformed {
            what: "address",
            reason,
        }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(malformed(&[]).contains("0 bytes"));
    assert!(malformed(&good[..47]).contains("47 bytes"));
    assert!(malformed(&[0; 48]).contains("magic number"));
    let mut changed = good;
    changed[4] = 9;
    assert!(malformed(&changed).contains("version 9"));
    for at in 0..good.len() {
        let mut changed = good;
        changed[at] ^= 0x40;
        assert!(Address::from_bytes(&changed).is_err(), "byte {at}");
    }
    for text in ["", "zz", "00", &"0".repeat(97), &"é".repeat(48)] {
        assert!(text.parse::<Address>().is_err(), "{text}");
    }
    assert_eq!(pair.b.address().to_string().parse(), Ok(pair.b.address()));

    // A device that was closed.
    let gone = {
        let domain = device().protection_domain();
        Endpoint::new(&domain, &config()).unwrap().address()
    };
    let mut lone = Endpoint::new(&pair.domain, &config()).unwrap();
    // A card does not look up the peer when it connects.
    if has_softcx(&pair) {
        let error = lone.connect(&gone).unwrap_err();
        assert!(
            matches!(
                error,
                Error::State {
                    kind: StateKind::Unreachable,
                    ..
                } | Error::System { .. }
            ),
            "{error:?}"
        );
    }
    assert!(!lone.is_connected());
    assert!(lone.failure().is_none());
    // An endpoint that was dropped, on a device that is open: detected by exceeded retries.
    let dropped = Endpoint::new(&pair.domain, &config()).unwrap().address();
    lone.connect(&dropped).unwrap();
    let sent = lone
        .post_send(&Work::send_inline(b"anybody?").wr_id(7))
        .unwrap();
    let error = lone.wait_cq(QueueKind::Send, SOON).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, Error::Work(work) if work.wr_id == Some(7)),
        "{text}"
    );
    assert!(text.contains("work request 7"), "{text}");
    assert!(matches!(sent.status(), Status::Failed(_)));
    lone.reset().unwrap();

    let soon = Duration::from_millis(20);
    assert!(matches!(
        Channel::connect("127.0.0.1:1", soon),
        Err(Error::Timeout { .. })
    ));
    assert!(matches!(
        Listener::bind("nonsense"),
        Err(Error::Malformed { .. })
    ));
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let again = Listener::bind(&listener.address().unwrap().to_string());
    assert!(matches!(again, Err(Error::Socket { .. })), "{again:?}");
    assert!(
        matches!(Device::open("mlx9_0"), Err(Error::State { kind: StateKind::NotFound, reason, .. }) if reason.contains("mlx9_0") && reason.contains("softcx"))
    );
    works(&mut pair, &stream);
}

#[test]
fn failed_endpoint_refuses_every_call_until_reset() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(64);
    let slices = [region.slice(0, 8).unwrap()];
    let held = pair.a.prepare_send(&Work::nop().wr_id(3)).unwrap();
    let ticket = held.ticket();
    pair.a.rollback(held);
    let bad = Work::write(
        &slices,
        RemoteSlice::at(region.remote().addr, region.remote().rkey ^ 1),
    )
    .wr_id(5);
    pair.a.post_send(&bad).unwrap();
    let first = pair.a.wait_cq(QueueKind::Send, SOON).unwrap_err();
    let Error::Work(first) = first else {
        panic!("{first:?}")
    };
    assert_eq!(first.wr_id, Some(5));
    for _ in 0..2 {
        let errors = [
            each_way(&mut pair.a, &stream, &Work::nop()),
            pair.a.post_recv(1, &slices).unwrap_err(),
            pair.a
                .prepare_wait_cq(QueueKind::Send)
                .map(drop)
                .unwrap_err(),
            pair.a.poll_cq(QueueKind::Send).map(drop).unwrap_err(),
            pair.a.wait_cq(QueueKind::Recv, SOON).map(drop).unwrap_err(),
            {
                let peer = pair.b.address();
                pair.a.connect(&peer).unwrap_err()
            },
        ];
        for error in errors {
            assert_eq!(error, Error::Work(first));
        }
        assert_eq!(pair.a.failure(), Some(first));
        assert!(!pair.a.is_connected());
    }
    assert_eq!(ticket.status(), Status::Cancelled);
    pair.reset();
    assert_eq!(pair.a.failure(), None);
    works(&mut pair, &stream);
}

#[test]
fn endpoint_configs_out_of_limits_are_refused() {
    let domain = device().protection_domain();
    let good = EndpointConfig::default();
    let bad = |change: fn(&mut EndpointConfig)| {
        let mut config = good;
        change(&mut config);
        Endpoint::new(&domain, &config).unwrap_err()
    };
    let limits: [(Error, &str, u64, u64); 13] = [
        (bad(|c| c.send_depth = 0), "send_depth", 1, 16384),
        (bad(|c| c.send_depth = 1 << 20), "send_depth", 1, 16384),
        (bad(|c| c.send_depth = u32::MAX), "send_depth", 1, 16384),
        (bad(|c| c.recv_depth = 0), "recv_depth", 1, 16384),
        (bad(|c| c.recv_depth = 1 << 20), "recv_depth", 1, 16384),
        (bad(|c| c.max_segments = 0), "max_segments", 1, 16),
        (bad(|c| c.max_segments = 17), "max_segments", 1, 16),
        (
            bad(|c| c.max_inline_bytes = 477),
            "max_inline_bytes",
            0,
            476,
        ),
        (bad(|c| c.ack_timeout = 32), "ack_timeout", 0, 31),
        (bad(|c| c.retry_count = 8), "retry_count", 0, 7),
        (bad(|c| c.rnr_retry = 8), "rnr_retry", 0, 7),
        (bad(|c| c.min_rnr_timer = 32), "min_rnr_timer", 0, 31),
        (bad(|c| c.max_reads = 0), "max_reads", 1, 16),
    ];
    for (error, argument, min, max) in limits {
        let found = range(&error);
        assert_eq!((found.0, found.2, found.3), (argument, min, max));
    }
    for mtu_bytes in [128, 768, 1000, 8192] {
        let mut config = good;
        config.mtu_bytes = mtu_bytes;
        let error = Endpoint::new(&domain, &config).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("`mtu_bytes` is {mtu_bytes}; it must be 256, 512, 1024, 2048 or 4096")
        );
    }
    assert_eq!(
        range(&bad(|c| c.wait_timeout = Some(Duration::ZERO))).0,
        "wait_timeout"
    );
    // The limits themselves are accepted.
    for (depth, segments, inline) in [
        (1, 1, 0),
        (16384, 1, 0),
        (10922, 9, 0),
        (8192, 16, 0),
        (1, 16, 476),
    ] {
        let config = good
            .send_depth(depth)
            .recv_depth(depth)
            .max_segments(segments)
            .max_inline_bytes(inline);
        match Endpoint::new(&domain, &config) {
            Ok(_) => {}
            // Long work requests fill the ring at a lower depth, which the error names.
            Err(error) => {
                let (argument, value, _, max) = range(&error);
                assert_eq!(argument, "send_depth");
                assert!(value > max && max >= 32768 / 8, "{error}");
            }
        }
    }
}

#[test]
fn out_of_order_and_stale_prepared_operations_are_refused() {
    let mut pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let first = pair.a.prepare_send(&Work::nop().wr_id(1)).unwrap();
    let second = pair.a.prepare_send(&Work::nop().wr_id(2)).unwrap();
    let rejected = stream_post(&stream, second).unwrap_err();
    assert!(
        matches!(
            &rejected.error,
            Error::State {
                kind: StateKind::OutOfOrder,
                ..
            }
        ),
        "{rejected}"
    );
    let error = pair.a.post_send(&Work::nop()).unwrap_err();
    assert!(matches!(
        error,
        Error::State {
            kind: StateKind::OutOfOrder,
            ..
        }
    ));
    let mut both = vec![first, rejected.prepared];
    let tickets = stream_post_all(&stream, &mut both).unwrap();
    assert_eq!(pair.a.wait_cq(QueueKind::Send, SOON).unwrap().wr_id, 1);
    assert_eq!(pair.a.wait_cq(QueueKind::Send, SOON).unwrap().wr_id, 2);
    assert!(tickets.iter().all(|t| t.status() == Status::Complete));

    // Receives behind a dropped one are refused; after they are dropped too, the queue works.
    let first = pair.b.prepare_recv(1, &[]).unwrap();
    let second = pair.b.prepare_recv(2, &[]).unwrap();
    drop(first);
    let rejected = stream_post(&stream, second).unwrap_err();
    assert!(
        matches!(&rejected.error, Error::State { kind: StateKind::OutOfOrder, reason, .. } if reason.contains("dropped")),
        "{rejected}"
    );
    drop(rejected);
    let wait = pair.b.prepare_wait_cq(QueueKind::Recv);
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
    works(&mut pair, &stream);

    // A failed stream accepts nothing; it returns the operation, which can be posted to another stream.
    let broken = HostStream::new("broken").unwrap();
    broken.launch(|| panic!("a kernel that fails")).unwrap();
    assert!(broken.synchronize(SOON).is_err());
    let prepared = pair.a.prepare_send(&Work::nop().wr_id(8)).unwrap();
    let ticket = prepared.ticket();
    let rejected = stream_post(&broken, prepared).unwrap_err();
    assert!(matches!(rejected.error, Error::Asynchronous { .. }));
    assert_eq!(ticket.status(), Status::Prepared);
    for error in [
        pair.b.stream_queue_send(&broken, &Work::nop()).unwrap_err(),
        pair.b.stream_queue_recv(&broken, 1, &[]).unwrap_err(),
        stream_post_all(&broken, &mut vec![]).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Asynchronous { .. }), "{error:?}");
    }
    stream_post(&stream, rejected.prepared).unwrap();
    assert_eq!(pair.a.wait_cq(QueueKind::Send, SOON).unwrap().wr_id, 8);
    // Prepared before a reset.
    let prepared = pair.a.prepare_wait_cq(QueueKind::Send);
    assert!(prepared.is_err());
    let prepared = pair.a.prepare_send(&Work::nop()).unwrap();
    pair.reset();
    let rejected = stream_post(&stream, prepared).unwrap_err();
    assert!(
        matches!(
            &rejected.error,
            Error::State {
                kind: StateKind::Stale,
                ..
            }
        ),
        "{rejected}"
    );
    // Given to the wrong endpoint, the operation is dropped there without effect on either endpoint.
    let prepared = pair.a.prepare_send(&Work::nop()).unwrap();
    pair.b.rollback(prepared);
    drop(rejected);
    works(&mut pair, &stream);
}

#[test]
fn words_out_of_bounds_or_misaligned_are_refused() {
    let pair = Pair::new(&device(), &config());
    let stream = HostStream::new("s").unwrap();
    let region = pair.region(64);
    let condition = Condition::And(1);
    let short = Some(Duration::from_millis(5));
    for (offset, misaligned) in [(64, false), (62, true), (2, true), (u64::MAX - 3, false)] {
        let errors = [
            stream_wait_value32(&stream, &region, offset, condition, SOON).unwrap_err(),
            stream_write_value32(&stream, &region, offset, 1).unwrap_err(),
            wait_value32(&region, offset, condition, short).unwrap_err(),
            region.store_u32(offset, 1).unwrap_err(),
        ];
        for error in errors {
            match error {
                Error::OutOfBounds { .. } => {}
                Error::Alignment { .. } if misaligned => {}
                other => panic!("{offset}: {other:?}"),
            }
        }
    }
    assert!(region.is_filled_with(0, 64, 0).unwrap());
    let error = wait_value32(&region, 0, condition, short).unwrap_err();
    assert!(matches!(error, Error::Timeout { timeout, .. } if Some(timeout) == short));
    let ticket = stream_wait_value32(&stream, &region, 0, condition, short).unwrap();
    let error = stream.synchronize(SOON).unwrap_err();
    assert!(matches!(error, Error::Asynchronous { .. }));
    let status = ticket.status();
    assert!(matches!(status, Status::Failed(_)), "{status:?}");
}
