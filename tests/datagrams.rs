//! Endpoints of unreliable datagrams (UD).
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use doorbell::{
    Access, AddressHandle, Completion, Control, Device, Endpoint, EndpointConfig, Error, Executor,
    MessageConfig, MessageQueue, Operation, ProtectionDomain, QueueKind, Region, RemoteSlice,
    StateKind, Status, Transport, Work,
};
use rig::{Limit, Random, SOON, device, from_env};
use waived::waived;

const STEP: Duration = Duration::from_secs(120);
const QKEY: u32 = 0x1234_5678;
/// What is in front of a datagram.
const GRH: usize = 40;
const MTU: usize = 1024;
/// Bytes of a receive.
const PLACE: usize = GRH + MTU;
/// What the memory of receives has before.
const UNTOUCHED: u8 = 0xee;

fn config() -> EndpointConfig {
    EndpointConfig::default()
        .transport(Transport::Ud)
        .qkey(QKEY)
        .mtu_bytes(MTU as u32)
        .send_depth(16)
        .recv_depth(16)
        .max_inline_bytes(128)
}

/// An active endpoint with memory to send from and to receive into.
struct End {
    endpoint: Endpoint,
    source: Region,
    places: Region,
    handle: Option<AddressHandle>,
}

impl End {
    fn new(domain: &ProtectionDomain, config: &EndpointConfig) -> End {
        let mut endpoint = Endpoint::new(domain, config).unwrap();
        assert!(!endpoint.is_connected());
        endpoint.activate().unwrap();
        assert!(endpoint.is_connected());
        let places = Region::alloc(domain, 16 * PLACE as u64, Access::LOCAL_WRITE).unwrap();
        places.write(0, &vec![UNTOUCHED; 16 * PLACE]).unwrap();
        End {
            endpoint,
            source: Region::alloc(domain, 16 * PLACE as u64, Access::LOCAL_WRITE).unwrap(),
            places,
            handle: None,
        }
    }

    /// Posts a receive into the place of that number.
    fn receive(&mut self, number: u64) {
        let offset = number % 16 * PLACE as u64;
        let place = [self.places.slice(offset, PLACE as u64).unwrap()];
        self.endpoint.post_recv(number, &place).unwrap();
    }

    fn received(&self, number: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let offset = number % 16 * PLACE as u64;
        self.places.read(offset, &mut bytes).unwrap();
        bytes
    }
}

/// Two endpoints that know each other's ports.
fn ends(device: &Device) -> [End; 2] {
    let domain = device.protection_domain();
    let mut ends = [End::new(&domain, &config()), End::new(&domain, &config())];
    let addresses = ends.each_ref().map(|end| end.endpoint.address());
    for (end, peer) in ends.iter_mut().zip([addresses[1], addresses[0]]) {
        end.handle = Some(end.endpoint.address_handle(&peer).unwrap());
    }
    ends
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (seed as usize * 31 + at * 7 + 1) as u8)
        .collect()
}

fn state_kind<T>(result: Result<T, Error>) -> StateKind {
    match result {
        Err(Error::State { kind, .. }) => kind,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}

/// The bytes and the source of a datagram, on a stream.
#[test]
fn datagrams_of_every_length_arrive_behind_40_bytes() {
    let _limit = Limit::new("datagrams", STEP);
    let [mut a, mut b] = ends(&device());
    let stream = rig::stream("datagrams");
    let qpn = b.endpoint.qpn();
    assert_eq!(b.endpoint.address().qpn(), qpn);
    for (number, len) in [0, 1, 3, 64, 65, 120, 1000, MTU].into_iter().enumerate() {
        for form in ["slices", "two slices", "inline", "imm"] {
            if form == "inline" && len > 128 {
                continue;
            }
            let bytes = pattern(number as u64, len);
            a.source.write(0, &bytes).unwrap();
            let head = len as u64 / 3;
            let parts = [
                a.source.slice(0, head).unwrap(),
                a.source.slice(head, len as u64 - head).unwrap(),
            ];
            let whole = [a.source.slice(0, len as u64).unwrap()];
            let handle = a.handle.as_ref().unwrap();
            let work = match form {
                "inline" => Work::send_inline(&bytes),
                "two slices" => Work::send(&parts),
                "imm" => Work::send(&whole).imm(0x0102_0304),
                _ => Work::send(&whole),
            };
            let work = work.to(handle, qpn, QKEY).wr_id(7);
            b.places.write(0, &vec![UNTOUCHED; PLACE]).unwrap();
            b.receive(0);
            let sent = a.endpoint.stream_queue_send(&stream, &work).unwrap();
            a.endpoint.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            stream.synchronize(SOON).unwrap();
            sent.wait(SOON).unwrap();
            assert_eq!(sent.status(), Status::Complete);
            let got = b.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
            let expected = (0, Operation::Receive, (GRH + len) as u32);
            assert_eq!(
                (got.wr_id, got.operation, got.len_bytes),
                expected,
                "{form} {len}"
            );
            assert_eq!(got.imm, (form == "imm").then_some(0x0102_0304));
            let source = got.source.unwrap();
            assert_eq!(source.qpn, a.endpoint.qpn());
            let place = b.received(0, PLACE);
            assert!(place[GRH..GRH + len] == bytes, "{form} {len}");
            assert!(place[GRH + len..].iter().all(|byte| *byte == UNTOUCHED));
            if !source.has_grh {
                assert_eq!(place[..GRH], [UNTOUCHED; GRH]);
            }
        }
    }
}

/// A stream waits for a datagram, and sends the answer.
#[test]
fn streams_receive_and_answer_datagrams() {
    let _limit = Limit::new("answers", STEP);
    let device = device();
    if rig::has_no_queue(&device, "streams_receive_and_answer_datagrams") {
        return;
    }
    let [mut a, mut b] = ends(&device);
    let streams = [rig::stream("asks"), rig::stream("answers")];
    let numbers = [a.endpoint.qpn(), b.endpoint.qpn()];
    for round in 0..20u64 {
        a.source.write(0, &pattern(round, 100)).unwrap();
        for end in [&mut a, &mut b] {
            // Posted before the other side sends: a datagram does not wait for its receive.
            end.receive(round);
        }
        // The answer is what came, from where it is.
        let asked = [a.source.slice(0, 100).unwrap()];
        let answered = [(b.places)
            .slice(round % 16 * PLACE as u64 + GRH as u64, 100)
            .unwrap()];
        let to_a = Work::send(&answered).to(b.handle.as_ref().unwrap(), numbers[0], QKEY);
        let to_b = Work::send(&asked).to(a.handle.as_ref().unwrap(), numbers[1], QKEY);
        b.endpoint
            .stream_wait_cq(&streams[1], QueueKind::Recv)
            .unwrap();
        b.endpoint.stream_queue_send(&streams[1], &to_a).unwrap();
        b.endpoint
            .stream_wait_cq(&streams[1], QueueKind::Send)
            .unwrap();
        a.endpoint.stream_queue_send(&streams[0], &to_b).unwrap();
        a.endpoint
            .stream_wait_cq(&streams[0], QueueKind::Send)
            .unwrap();
        a.endpoint
            .stream_wait_cq(&streams[0], QueueKind::Recv)
            .unwrap();
        for stream in [&streams[1], &streams[0]] {
            stream.synchronize(SOON).unwrap();
        }
        let place = a.received(round, GRH + 100);
        assert!(place[GRH..] == pattern(round, 100), "round {round}");
    }
}

/// What UD has not is refused before anything is posted, and the endpoint goes on.
#[test]
fn what_datagrams_have_not_is_refused() {
    let _limit = Limit::new("refusals", STEP);
    let device = device();
    let [mut a, mut b] = ends(&device);
    let domain = a.endpoint.domain().clone();
    let mut reliable = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
    let mut other = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
    reliable.connect(&other.address()).unwrap();
    other.connect(&reliable.address()).unwrap();

    let region = Region::alloc(&domain, 8192, Access::ALL).unwrap();
    let [one, eight] = [1, 8].map(|len| [region.slice(0, len).unwrap()]);
    let long = [region.slice(0, MTU as u64 + 1).unwrap()];
    let remote = RemoteSlice::at(region.remote().addr, region.remote().rkey);
    let qpn = b.endpoint.qpn();
    let handle = a.handle.clone().unwrap();
    for work in [
        Work::write(&one, remote),
        Work::write(&one, remote).imm(1),
        Work::write_inline(&[1], remote),
        Work::read(&one, remote),
        Work::compare_swap(&eight, remote, 0, 1),
        Work::fetch_add(&eight, remote, 1),
    ] {
        for work in [work, work.to(&handle, qpn, QKEY)] {
            let kind = state_kind(a.endpoint.post_send(&work));
            // A device without atomics says so first.
            assert!(
                matches!(kind, StateKind::WrongKind | StateKind::Unsupported),
                "{kind:?}"
            );
        }
    }
    // Without a receiver, and with one where there is a peer.
    assert_eq!(
        state_kind(a.endpoint.post_send(&Work::send(&one))),
        StateKind::WrongKind
    );
    let addressed = Work::send(&one).to(&handle, qpn, QKEY);
    assert_eq!(
        state_kind(reliable.post_send(&addressed)),
        StateKind::WrongKind
    );
    // A payload above the MTU, and a number of 25 bits.
    let inline = config().mtu_bytes(256).max_inline_bytes(300);
    let mut small = End::new(&domain, &inline);
    let too_long = Work::send(&long).to(&handle, qpn, QKEY);
    let bytes = [0; 257];
    let too_long_inline = Work::send_inline(&bytes).to(&handle, qpn, QKEY);
    for (refused, value, max) in [
        (a.endpoint.post_send(&too_long), MTU + 1, MTU),
        (small.endpoint.post_send(&too_long_inline), 257, 256),
        (
            a.endpoint
                .post_send(&Work::send(&one).to(&handle, 1 << 24, QKEY)),
            1 << 24,
            0xff_ffff,
        ),
    ] {
        match refused {
            Err(Error::Range {
                value: found,
                max: limit,
                ..
            }) => {
                assert_eq!((found, limit), (value as u64, max as u64));
            }
            other => panic!("{other:?}"),
        }
    }
    // A handle of another protection domain.
    let foreign = End::new(&device.protection_domain(), &config());
    let theirs = foreign
        .endpoint
        .address_handle(&b.endpoint.address())
        .unwrap();
    let refused = a
        .endpoint
        .post_send(&Work::send(&one).to(&theirs, qpn, QKEY));
    assert!(matches!(refused, Err(Error::Foreign { .. })), "{refused:?}");
    // Connections, messages, kernels.
    assert_eq!(
        state_kind(a.endpoint.connect(&other.address())),
        StateKind::WrongKind
    );
    let mut fresh = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
    assert_eq!(state_kind(fresh.activate()), StateKind::WrongKind);
    assert_eq!(
        state_kind(a.endpoint.activate()),
        StateKind::AlreadyConnected
    );
    let messages = MessageConfig::default().endpoint(config());
    assert_eq!(
        state_kind(MessageQueue::new(&domain, &messages)),
        StateKind::WrongKind
    );
    assert_eq!(
        state_kind(doorbell::DeviceQueue::new(&mut a.endpoint)),
        StateKind::WrongKind
    );
    // A send before the endpoint is active.
    let mut idle = Endpoint::new(&domain, &config()).unwrap();
    assert_eq!(
        state_kind(idle.post_send(&addressed)),
        StateKind::NotConnected
    );

    // Nothing of it was posted.
    b.receive(0);
    a.endpoint
        .post_send(&Work::send(&one).to(&handle, qpn, QKEY))
        .unwrap();
    a.endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
    let got = b.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
    assert_eq!(got.len_bytes, GRH as u32 + 1);
    assert_eq!(a.endpoint.room(QueueKind::Send), 16);
}

/// A datagram that finds no receive, or whose key is another, is lost; its ticket says only that it has left.
#[test]
fn datagrams_without_a_receive_or_with_another_key_are_lost() {
    let _limit = Limit::new("losses", STEP);
    let [mut a, mut b] = ends(&device());
    let (handle, qpn) = (a.handle.clone().unwrap(), b.endpoint.qpn());
    let source = a.source.clone();
    let domain = a.endpoint.domain().clone();
    let payload = [source.slice(0, 8).unwrap()];
    let send = |a: &mut End, qpn, qkey| {
        let ticket = a
            .endpoint
            .post_send(&Work::send(&payload).to(&handle, qpn, qkey))
            .unwrap();
        a.endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
        assert_eq!(ticket.status(), Status::Complete);
    };
    // No receive. What follows it to another endpoint arrives behind it.
    let mut behind = End::new(&domain, &config());
    behind.receive(0);
    send(&mut a, qpn, QKEY);
    send(&mut a, behind.endpoint.qpn(), QKEY);
    behind.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
    b.receive(1);
    // Another key, and nobody.
    send(&mut a, qpn, QKEY + 1);
    send(&mut a, 0xff_fffe, QKEY);
    // The highest bit stands for the key of the endpoint that sends.
    source.write(0, b"the one!").unwrap();
    send(&mut a, qpn, 0x8000_0000);
    let got = b.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
    assert_eq!((got.wr_id, got.len_bytes), (1, GRH as u32 + 8));
    assert_eq!(b.received(1, GRH + 8)[GRH..], *b"the one!");
    assert_eq!(b.endpoint.poll_cq(QueueKind::Recv).unwrap(), None);
}

/// One endpoint sends to several, and a handle that the application has dropped serves the work in flight.
#[test]
fn one_endpoint_sends_to_several_and_work_holds_the_handles() {
    let _limit = Limit::new("several", STEP);
    let device = device();
    let domain = device.protection_domain();
    let mut from = End::new(&domain, &config());
    let mut ends: Vec<End> = (0..3).map(|_| End::new(&domain, &config())).collect();
    let stream = rig::stream("several");
    let is_sync = from.endpoint.path().control == Control::Sync;
    for round in 0..10u64 {
        for end in &mut ends {
            end.receive(round);
        }
        // The stream sends when all handles are dropped.
        let (go, wait) = rig::gate();
        if is_sync {
            go.store(true, Ordering::Release);
        }
        stream.launch(wait).unwrap();
        for (number, end) in ends.iter().enumerate() {
            let offset = 64 * number as u64;
            from.source
                .write(offset, &pattern(round + number as u64, 64))
                .unwrap();
            let payload = [from.source.slice(offset, 64).unwrap()];
            let handle = from
                .endpoint
                .address_handle(&end.endpoint.address())
                .unwrap();
            let work = Work::send(&payload)
                .to(&handle, end.endpoint.qpn(), QKEY)
                .signaled(number == 2);
            from.endpoint.stream_queue_send(&stream, &work).unwrap();
        }
        from.endpoint
            .stream_wait_cq(&stream, QueueKind::Send)
            .unwrap();
        go.store(true, Ordering::Release);
        stream.synchronize(SOON).unwrap();
        for (number, end) in ends.iter_mut().enumerate() {
            let got = end.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
            assert_eq!(
                (got.wr_id, got.source.unwrap().qpn),
                (round, from.endpoint.qpn())
            );
            assert_eq!(
                end.received(round, GRH + 64)[GRH..],
                pattern(round + number as u64, 64)
            );
        }
    }
}

/// An endpoint is dropped with work that a stream has: it is executed, with the address handles that it names.
#[test]
fn work_on_a_stream_outlives_its_endpoint() {
    let test = "work_on_a_stream_outlives_its_endpoint";
    let _limit = Limit::new(test, STEP);
    let device = device();
    let domain = device.protection_domain();
    let mut to = End::new(&domain, &config());
    if to.endpoint.path().control == Control::Sync {
        waived(test, "on the sync path no work waits in a stream");
        return;
    }
    let stream = rig::stream(test);
    for round in 0..4 {
        let mut from = End::new(&domain, &config());
        to.receive(round);
        let (go, wait) = rig::gate();
        stream.launch(wait).unwrap();
        from.source.write(0, &pattern(round, 64)).unwrap();
        let payload = [from.source.slice(0, 64).unwrap()];
        let address = to.endpoint.address();
        let handle = from.endpoint.address_handle(&address).unwrap();
        let work = Work::send(&payload).to(&handle, address.qpn(), QKEY);
        let sent = from.endpoint.stream_queue_send(&stream, &work).unwrap();
        // So that the stream has the endpoint until the datagram is on its way.
        let kind = QueueKind::Send;
        from.endpoint.stream_wait_cq(&stream, kind).unwrap();
        drop((from, handle));
        go.store(true, Ordering::Release);
        stream.synchronize(SOON).unwrap();
        assert_eq!(sent.status(), Status::Complete);
        let got = to.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert_eq!(got.wr_id, round);
        let received = to.received(round, GRH + 64);
        assert_eq!(received[GRH..], pattern(round, 64));
    }
}

/// A reset gives an endpoint that sends and receives again, and handles of its port stay valid.
#[test]
fn endpoint_works_after_a_reset() {
    let _limit = Limit::new("reset", STEP);
    let [mut a, mut b] = ends(&device());
    for round in 0..3u64 {
        b.receive(round);
        let work =
            Work::send_inline(b"again").to(a.handle.as_ref().unwrap(), b.endpoint.qpn(), QKEY);
        a.endpoint.post_send(&work).unwrap();
        a.endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
        let got = b.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert_eq!((got.wr_id, got.len_bytes), (round, GRH as u32 + 5));
        if round == 1 {
            b.endpoint.abort();
        }
        for end in [&mut a, &mut b] {
            end.endpoint.reset().unwrap();
            assert!(!end.endpoint.is_connected());
            end.endpoint.activate().unwrap();
        }
    }
}

/// A datagram that is longer than its receive fails the endpoint that receives, and not the one that sends.
#[test]
fn datagram_longer_than_its_receive_fails_the_receiver() {
    let _limit = Limit::new("too long", STEP);
    let [mut a, mut b] = ends(&device());
    let short = [b.places.slice(0, GRH as u64 + 10).unwrap()];
    b.endpoint.post_recv(3, &short).unwrap();
    let work = Work::send_inline(&[1; 11]).to(a.handle.as_ref().unwrap(), b.endpoint.qpn(), QKEY);
    a.endpoint.post_send(&work).unwrap();
    a.endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
    match b.endpoint.wait_cq(QueueKind::Recv, SOON) {
        Err(Error::Work(failure)) => assert_eq!(failure.wr_id, Some(3)),
        other => panic!("{other:?}"),
    }
    assert_eq!(a.endpoint.failure(), None);
}

/// In the column `+eth` the port's address moves to another index of its table 100 ms after a process has opened the device: between the look at the table
/// and `ibv_create_ah`, too. A process has one chance in three of that, so this is done by ten.
#[test]
fn address_handles_are_made_while_the_address_moves() {
    const CHILD: &str = "DOORBELL_TEST_MOVING_ADDRESS";
    let test = "address_handles_are_made_while_the_address_moves";
    let _limit = Limit::new("moving address", STEP);
    let device = device();
    if !device.name().starts_with("mlx5") && !device.name().starts_with("verbs:") {
        let reason = "the software ConnectX in the process has no table of GIDs";
        return waived(test, reason);
    }
    if std::env::var_os(CHILD).is_none() {
        for _ in 0..10 {
            let mut child = Command::new(std::env::current_exe().unwrap());
            let output = child.args(["--exact", test]).env(CHILD, "1").output();
            let output = output.unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
        }
        return;
    }
    let end = End::new(&device.protection_domain(), &config());
    let until = Instant::now() + Duration::from_millis(150);
    while Instant::now() < until {
        // Of its own port, which is found whatever its index.
        end.endpoint
            .address_handle(&end.endpoint.address())
            .unwrap();
    }
}

/// Random sequences of sends and receives between four endpoints, on streams and from this thread. Each datagram arrives once at most, at the endpoint
/// that it is for, with its bytes and its source; one that finds a receive arrives, on a device that loses nothing.
#[test]
fn random_sequences_deliver_each_datagram_once_at_most() {
    let _limit = Limit::new("sequences", STEP);
    let seed = from_env("DOORBELL_SEED", 0xda7a);
    for sequence in 0..from_env("DOORBELL_DATAGRAM_SEQUENCES", 6) {
        let mut random = Random(seed.wrapping_add(sequence));
        let device = device();
        let domain = device.protection_domain();
        let mut ends: Vec<End> = (0..4).map(|_| End::new(&domain, &config())).collect();
        let streams: Vec<rig::Stream> = (0..ends.len())
            .map(|at| rig::stream(&format!("s{at}")))
            .collect();
        let mut posted = vec![0u64; ends.len()];
        let mut taken = vec![0u64; ends.len()];
        // By number: the sender and the receiver of each datagram, and its bytes.
        let mut sent: HashMap<u32, (usize, usize, Vec<u8>)> = HashMap::new();
        let mut arrived = HashSet::new();
        let mut take = |end: &mut End,
                        at: usize,
                        taken: &mut u64,
                        sent: &HashMap<u32, (usize, usize, Vec<u8>)>,
                        numbers: &[u32],
                        got: Completion| {
            assert_eq!(got.wr_id, *taken, "receives are taken in order");
            let number = got.imm.unwrap();
            let (from, to, bytes) = &sent[&number];
            assert_eq!(*to, at, "datagram {number}");
            assert_eq!(got.source.unwrap().qpn, numbers[*from]);
            assert_eq!(got.len_bytes as usize, GRH + bytes.len());
            assert!(end.received(*taken, GRH + bytes.len())[GRH..] == bytes[..]);
            assert!(arrived.insert(number), "datagram {number} came twice");
            *taken += 1;
            (number, *from)
        };
        // Those that found no receive when they were sent, as far as this thread knows, and have not been overtaken by a later one of the same sender: they
        // may still be under way, and take a receive that is posted later.
        let mut doubtful: Vec<(usize, usize, u32)> = Vec::new();
        let numbers: Vec<u32> = ends.iter().map(|end| end.endpoint.qpn()).collect();
        let mut certain = HashSet::new();
        for number in 0..200u32 {
            let at = random.below(ends.len() as u64) as usize;
            // Receives first, sometimes.
            while random.below(3) > 0 && posted[at] - taken[at] < 15 {
                let end = &mut ends[at];
                end.receive(posted[at]);
                posted[at] += 1;
            }
            let from = random.below(ends.len() as u64) as usize;
            let len = random.below(MTU as u64 + 1) as usize;
            let bytes = pattern(number.into(), len);
            let address = ends[at].endpoint.address();
            let end = &mut ends[from];
            end.source.write(0, &bytes).unwrap();
            let payload = [end.source.slice(0, len as u64).unwrap()];
            let handle = end.endpoint.address_handle(&address).unwrap();
            let wrong_key = random.below(8) == 0;
            let qkey = if wrong_key { QKEY ^ 1 } else { QKEY };
            let work = if len <= 128 && random.below(2) == 0 {
                Work::send_inline(&bytes)
            } else {
                Work::send(&payload)
            };
            let work = work.imm(number).to(&handle, numbers[at], qkey);
            sent.insert(number, (from, at, bytes.clone()));
            let ticket = if random.below(2) == 0 {
                let ticket = end
                    .endpoint
                    .stream_queue_send(&streams[from], &work)
                    .unwrap();
                end.endpoint
                    .stream_wait_cq(&streams[from], QueueKind::Send)
                    .unwrap();
                streams[from].synchronize(SOON).unwrap();
                ticket
            } else {
                let ticket = end.endpoint.post_send(&work).unwrap();
                end.endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
                ticket
            };
            assert_eq!(ticket.status(), Status::Complete);
            if wrong_key {
                continue;
            }
            let before = doubtful.iter().filter(|(_, to, _)| *to == at).count() as u64;
            if posted[at] - taken[at] <= before {
                doubtful.push((from, at, number));
                continue;
            }
            certain.insert(number);
            loop {
                let end = &mut ends[at];
                let got = end.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
                let (came, sender) = take(end, at, &mut taken[at], &sent, &numbers, got);
                doubtful.retain(|&(from, to, doubt)| (from, to) != (sender, at) || doubt > came);
                if came == number {
                    break;
                }
            }
        }
        for (at, end) in ends.iter_mut().enumerate() {
            while let Some(got) = end.endpoint.poll_cq(QueueKind::Recv).unwrap() {
                take(end, at, &mut taken[at], &sent, &numbers, got);
            }
            assert_eq!(end.endpoint.failure(), None);
        }
        let missing: Vec<_> = certain.difference(&arrived).collect();
        assert!(
            missing.is_empty(),
            "seed {seed} sequence {sequence}: {missing:?}"
        );
        assert!((20..190).contains(&certain.len()), "{}", certain.len());
    }
}

/// On a wire that loses, repeats and reorders packets, no datagram comes twice or with other bytes.
#[test]
fn bad_wire_loses_datagrams_and_changes_none() {
    let test = "bad_wire_loses_datagrams_and_changes_none";
    let _limit = Limit::new("bad wire", STEP);
    let device = device();
    let lossy = doorbell::softcx::Faults {
        loss: 0.2,
        reorder: 0.2,
        late_packets_ns: 20_000,
        delay_ns: 500,
        seed: 5,
        ..Default::default()
    };
    if !device.set_faults(lossy) {
        return waived(
            test,
            "only the software ConnectX of this process loses packets",
        );
    }
    let [mut a, mut b] = ends(&device);
    let stream = rig::stream("bad wire");
    let (handle, qpn) = (a.handle.clone().unwrap(), b.endpoint.qpn());
    let (mut posted, mut arrived) = (0, HashSet::new());
    for number in 0..300u32 {
        while posted - (arrived.len() as u64) < 8 {
            b.receive(posted);
            posted += 1;
        }
        let bytes = pattern(number.into(), 300);
        a.source.write(0, &bytes).unwrap();
        let payload = [a.source.slice(0, 300).unwrap()];
        let work = Work::send(&payload).imm(number).to(&handle, qpn, QKEY);
        a.endpoint.stream_queue_send(&stream, &work).unwrap();
        a.endpoint.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        while let Some(got) = b.endpoint.poll_cq(QueueKind::Recv).unwrap() {
            let number = got.imm.unwrap();
            assert!(b.received(got.wr_id, GRH + 300)[GRH..] == pattern(number.into(), 300));
            assert!(arrived.insert(number), "{number} came twice");
        }
    }
    assert!((100..300).contains(&arrived.len()), "{}", arrived.len());
    assert_eq!((a.endpoint.failure(), b.endpoint.failure()), (None, None));
}

/// The handles of an endpoint are of the path that the device has, whatever rings.
#[test]
fn every_control_path_sends_datagrams() {
    let _limit = Limit::new("paths", STEP);
    let device = device();
    let domain = device.protection_domain();
    let mut b = End::new(&domain, &config());
    let best = b.endpoint.path().control;
    for control in [Control::Direct, Control::Proxy, Control::Sync] {
        if control < best {
            continue;
        }
        let mut a = End::new(&domain, &config().control(Some(control)));
        assert_eq!(a.endpoint.path().control, control);
        let handle = a.endpoint.address_handle(&b.endpoint.address()).unwrap();
        let stream = rig::stream("path");
        for round in 0..40u64 {
            b.receive(round);
            a.source.write(0, &pattern(round, 200)).unwrap();
            let payload = [a.source.slice(0, 200).unwrap()];
            let work = Work::send(&payload).to(&handle, b.endpoint.qpn(), QKEY);
            a.endpoint.stream_queue_send(&stream, &work).unwrap();
            a.endpoint.stream_wait_cq(&stream, QueueKind::Send).unwrap();
            stream.synchronize(SOON).unwrap();
            let got = b.endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
            assert_eq!((got.wr_id, got.len_bytes), (round, GRH as u32 + 200));
            assert!(b.received(round, GRH + 200)[GRH..] == pattern(round, 200));
        }
    }
}
