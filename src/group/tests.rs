//! The store over real sockets: ranks in threads, strangers, and processes that only pretend to be stores.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::endpoint::Deadline;
use crate::group::client::{StoreClient, Watcher};
use crate::group::handshake::{self, Handshake, HandshakeResult};
use crate::group::store::IgnoreEvents;
use crate::group::{Group, GroupConfig, LaunchEnvironment, Store, Token};
use crate::region::{Access, Device, Region};
use crate::{
    Cause, Communicator, DataType, EndpointConfig, Error, HostStream, MatcherConfig, MessageConfig,
    QueueKind, ReduceOp, Reduction, Source, StateKind, WcStatus, Work, WorkError,
};

pub(super) const SOON: Duration = Duration::from_secs(60);
pub(super) const SHORT: Duration = Duration::from_millis(300);

/// An address that nobody listens at, of this process and this call alone. None that was bound to find out: a child that another test forks
/// just then would listen there for as long as it lives.
fn free() -> SocketAddr {
    // Below the ports that the kernel gives away.
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    // No process has a number of more than 22 bits.
    let [_, b, c, d] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, b, c, d], NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn environment(rank: u32, size: u32, address: SocketAddr) -> LaunchEnvironment {
    LaunchEnvironment::new(rank, size, &address.to_string(), Token::new("secret")).unwrap()
}

fn join(rank: u32, size: u32, address: SocketAddr) -> Store {
    Store::join(&environment(rank, size, address), SOON).unwrap()
}

/// Runs every rank in a thread of its own; what each gives, by rank.
pub(super) fn ranks<T: Send + 'static>(
    size: u32,
    run: impl Fn(Store) -> T + Send + Copy + 'static,
) -> Vec<T> {
    let address = free();
    let threads: Vec<_> = (0..size)
        .map(|rank| thread::spawn(move || run(join(rank, size, address))))
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn ranks_exchange_and_leave() {
    ranks(5, |store| {
        let (rank, size) = (store.rank(), store.size());
        let key = |rank: u32| format!("key {rank}").into_bytes();
        // Each waits for the one after it, which may come later.
        let next = (rank + 1) % size;
        store.set(&key(rank), &[rank as u8; 3000], SOON).unwrap();
        assert_eq!(store.get(&key(next), SOON).unwrap(), [next as u8; 3000]);
        for round in 0..20 {
            let value = vec![round; rank as usize];
            let expected: Vec<_> = (0..size).map(|rank| vec![round; rank as usize]).collect();
            assert_eq!(store.gather(&value, SOON).unwrap(), expected);
            store.barrier(SOON).unwrap();
        }
        store.leave(SOON).unwrap();
    });
}

/// Those of some ranks need one exchange, of others two or more.
#[test]
fn values_of_any_length_are_gathered() {
    ranks(3, |store| {
        let piece = 64 << 10;
        for lens in [
            [0, piece - 8, 1],
            [piece - 7, 0, piece],
            [10 * piece, 2 * piece - 8, 2 * piece - 7],
        ] {
            let value = |rank: usize| -> Vec<u8> {
                let byte = |at: usize| ((at * (2 * rank + 3)) >> 8) as u8;
                (0..lens[rank]).map(byte).collect()
            };
            let gathered = store.gather(&value(store.rank() as usize), SOON).unwrap();
            assert_eq!(gathered.len(), 3);
            for (rank, found) in gathered.iter().enumerate() {
                assert!(*found == value(rank), "rank {rank} of {lens:?}");
            }
        }
        store.leave(SOON).unwrap();
    });
}

#[test]
fn second_thread_in_a_barrier_or_a_gathering_is_refused_and_the_group_goes_on() {
    ranks(2, |store| {
        if store.rank() == 0 {
            thread::scope(|scope| {
                let [barrier, gather] = [true, false].map(|is_barrier| {
                    let store = &store;
                    scope.spawn(move || match is_barrier {
                        true => store.barrier(SOON).map(drop),
                        false => store.gather(b"once", SOON).map(drop),
                    })
                });
                thread::sleep(SHORT);
                let second = [store.barrier(SOON), store.gather(b"twice", SOON).map(drop)];
                for refused in second {
                    let kind = StateKind::Busy;
                    assert!(
                        matches!(refused, Err(Error::State { kind: found, .. }) if found == kind),
                        "{refused:?}"
                    );
                }
                store.set(b"tried", b"", SOON).unwrap();
                barrier.join().unwrap().unwrap();
                gather.join().unwrap().unwrap();
            });
        } else {
            store.get(b"tried", SOON).unwrap();
            store.barrier(SOON).unwrap();
            assert_eq!(store.gather(b"", SOON).unwrap()[0], b"once");
        }
        store.leave(SOON).unwrap();
    });
}

/// As if its process were stopped.
#[test]
fn a_store_that_does_not_read_delays_no_call_beyond_its_own_deadline() {
    let listener = TcpListener::bind(free()).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (_silent, _) = listener.accept().unwrap();
    let client = Arc::new(StoreClient::new(1, 2, stream));
    let sent = Arc::new(AtomicU64::new(0));
    let writer = thread::spawn({
        let (client, sent) = (Arc::clone(&client), Arc::clone(&sent));
        move || {
            let patient = Deadline::new("message", SOON);
            while client.send_to_rank(0, &[0; 1 << 16], &patient).is_ok() {
                sent.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    // Until it waits for room.
    let mut before = u64::MAX;
    while before != sent.load(Ordering::Relaxed) {
        before = sent.load(Ordering::Relaxed);
        thread::sleep(SHORT);
    }
    let begun = Instant::now();
    let late = client.send_to_rank(0, b"short", &Deadline::new("short message", SHORT));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    client.hang_up();
    writer.join().unwrap();
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
}

#[test]
fn a_value_that_does_not_come_is_a_timeout_and_harms_nothing() {
    ranks(2, |store| {
        let passed = store.get(b"never", SHORT);
        assert!(matches!(passed, Err(Error::Timeout { .. })), "{passed:?}");
        let long = store.set(&[0; 257], b"", SOON);
        assert!(matches!(
            long,
            Err(Error::Range {
                argument: "key",
                ..
            })
        ));
        if store.rank() == 1 {
            let alone = store.barrier(SHORT);
            assert!(matches!(alone, Err(Error::Timeout { .. })), "{alone:?}");
            store.set(b"ready", b"", SOON).unwrap();
        }
        store.get(b"ready", SOON).unwrap();
        store.barrier(SOON).unwrap();
        store.leave(SOON).unwrap();
    });
}

#[test]
fn the_end_of_a_rank_reaches_every_wait() {
    let gone = |store: &Store, error: Error| {
        let Error::Rank { rank, .. } = error else {
            panic!("{error}");
        };
        let failure = store.failure().unwrap();
        assert!(matches!(failure, Error::Rank { rank: r, .. } if r == rank));
        rank
    };
    for ending in [0, 2] {
        let address = free();
        let (came, all) = mpsc::channel();
        let threads: Vec<_> = (0..4)
            .map(|rank| {
                let came = came.clone();
                thread::spawn(move || {
                    let store = join(rank, 4, address);
                    store.barrier(SOON).unwrap();
                    if rank == ending {
                        // Dropped, as by a process that ends.
                        came.send(Instant::now()).unwrap();
                        return;
                    }
                    let error = match rank {
                        1 => store.get(b"never", SOON).unwrap_err(),
                        3 => store.gather(b"", SOON).unwrap_err(),
                        _ => store.barrier(SOON).unwrap_err(),
                    };
                    assert_eq!(gone(&store, error), ending);
                    // And from then on.
                    let error = store.set(b"", b"", SOON).unwrap_err();
                    assert_eq!(gone(&store, error), ending);
                })
            })
            .collect();
        let ended = all.recv().unwrap();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(ended.elapsed() < SOON / 2, "it is noticed, not timed out");
    }
}

#[test]
fn an_error_names_the_rank_that_has_left() {
    ranks(3, |store| {
        store.barrier(SOON).unwrap();
        if store.rank() != 2 {
            let error = store.barrier(SOON).unwrap_err();
            // Rank 1 may have left as well by then.
            assert!(matches!(error, Error::Rank { rank: 1 | 2, .. }), "{error}");
            assert_eq!(store.failure(), None);
        }
        store.leave(SOON).unwrap();
    });
}

#[test]
fn joins_with_wrong_token_size_or_rank_are_refused() {
    let address = free();
    let store = join(0, 2, address);
    let refused = |environment: &LaunchEnvironment| Store::join(environment, SOON).unwrap_err();
    let reason = |error: Error| match error {
        Error::State { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let other = Token::new("guess");
    let other = LaunchEnvironment::new(1, 2, &address.to_string(), other).unwrap();
    assert!(reason(refused(&other)).contains("another token"));
    assert!(reason(refused(&environment(1, 3, address))).contains("has 2 ranks, this process's 3"));
    let second = join(1, 2, address);
    assert!(reason(refused(&environment(1, 2, address))).contains("rank 1 has come already"));
    // A second store at the same address.
    assert!(matches!(
        refused(&environment(0, 2, address)),
        Error::System { errno, .. } if errno == libc::EADDRINUSE
    ));
    // None of that was a failure of the group.
    second.leave(SOON).unwrap();
    // A rank that has left waits for the next group at this address.
    let brief = Store::join(&environment(1, 2, address), Duration::from_millis(50));
    assert!(reason(brief.unwrap_err()).contains("rank 1 has left that group"));
    let again = thread::spawn(move || join(1, 2, address));
    thread::sleep(Duration::from_millis(20));
    store.leave(SOON).unwrap();
    let store = join(0, 2, address);
    again.join().unwrap().leave(SOON).unwrap();
    store.leave(SOON).unwrap();
}

#[test]
fn strangers_learn_nothing_and_block_no_rank() {
    let address = free();
    let store = join(0, 2, address);
    let said = |bytes: &[u8]| {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.set_read_timeout(Some(SOON)).unwrap();
        stranger.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // The end may come as a reset, for what was not read.
        let _ = stranger.read_to_end(&mut answer);
        answer
    };
    // A process of another version gets our version and nothing more, and so does one that speaks another protocol.
    assert_eq!(said(b"DBGS\x09\0\0\0"), handshake::head());
    assert_eq!(said(b"GET / HTTP/1.1\r\n\r\n"), handshake::head());
    let handshake = Handshake {
        size: 2,
        rank: 1,
        nonce: [1; 32],
    };
    let mut guess = handshake.to_bytes().to_vec();
    guess.extend([0; 32]);
    let answer = said(&guess);
    assert_eq!(
        answer.len(),
        handshake::CHALLENGE_BYTES + HandshakeResult::BYTES
    );
    assert_eq!(answer[40], 1, "the verdict is that the token is wrong");
    assert_eq!(answer[48..], [0; 32]);
    // More of them than there is room for, silent or in the middle of a handshake.
    let crowd: Vec<_> = (0..200)
        .map(|number| {
            let mut stranger = TcpStream::connect(address).unwrap();
            let bytes = handshake.to_bytes();
            let _ = stranger.write_all(&bytes[..number % 49]);
            stranger
        })
        .collect();
    let second = join(1, 2, address);
    drop(crowd);
    second.set(b"k", b"v", SOON).unwrap();
    assert_eq!(store.get(b"k", SOON).unwrap(), b"v");
    second.leave(SOON).unwrap();
    store.leave(SOON).unwrap();
}

#[test]
fn a_malformed_message_loses_only_its_rank() {
    let address = free();
    let store = join(0, 3, address);
    let third = join(2, 3, address);
    let token = Token::new("secret");
    let handshake = Handshake {
        size: 3,
        rank: 1,
        nonce: [1; 32],
    };
    let mut rogue = TcpStream::connect(address).unwrap();
    rogue.write_all(&handshake.to_bytes()).unwrap();
    let mut challenge = [0; handshake::CHALLENGE_BYTES];
    rogue.read_exact(&mut challenge).unwrap();
    let number = challenge[8..].try_into().unwrap();
    rogue.write_all(&handshake.proof(&token, &number)).unwrap();
    // A length of 4 GiB.
    rogue.write_all(b"\xff\xff\xff\xff\x01").unwrap();
    for store in [&store, &third] {
        let error = store.barrier(SOON).unwrap_err();
        assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
    }
}

#[test]
fn a_store_that_does_not_answer_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [listener.local_addr().unwrap(), free()] {
        let began = Instant::now();
        let error = Store::join(&environment(1, 2, address), SHORT).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(began.elapsed() >= SHORT && began.elapsed() < SOON);
    }
}

#[test]
fn servers_that_are_no_store_are_detected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let joined = |answer: fn(&mut TcpStream)| {
        let joining = thread::spawn(move || Store::join(&environment(1, 2, address), SOON));
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; Handshake::BYTES]).unwrap();
        answer(&mut stream);
        let error = joining.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
        error.to_string()
    };
    let version = joined(|stream| stream.write_all(b"DBGS\x09\0\0\0").unwrap());
    assert!(version.contains("version 9"), "{version}");
    let other = joined(|stream| stream.write_all(b"SSH-2.0-").unwrap());
    assert!(other.contains("not a store"), "{other}");
    // One that takes every proof and has none.
    let impostor = joined(|stream| {
        stream.write_all(&handshake::challenge(&[3; 32])).unwrap();
        stream.read_exact(&mut [0; handshake::PROOF_BYTES]).unwrap();
        stream.write_all(&[0; HandshakeResult::BYTES]).unwrap();
    });
    assert!(impostor.contains("does not know the token"), "{impostor}");
}

/// A group of threads, each with its own device.
pub(super) fn groups<T: Send + 'static>(size: u32, run: fn(Group) -> T) -> Vec<T> {
    let address = free();
    let one = move |rank| {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let config = GroupConfig {
            timeout: SOON,
            ..GroupConfig::default()
        };
        run(Group::join(&environment(rank, size, address), &domain, &config).unwrap())
    };
    let threads: Vec<_> = (0..size)
        .map(|rank| thread::spawn(move || one(rank)))
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn every_pair_is_connected_whoever_asks_first() {
    groups(4, |mut group| {
        let (rank, size) = (group.rank(), group.size());
        let region = Region::alloc(group.domain(), 4096, Access::LOCAL_WRITE).unwrap();
        // Only the lower rank of a pair asks before the barrier; the other finds an endpoint that is ready.
        for peer in rank + 1..size {
            assert!(group.endpoint(peer).unwrap().is_connected());
        }
        group.barrier().unwrap();
        for peer in (0..size).filter(|&peer| peer != rank) {
            let target = region.slice(u64::from(peer) * 64, 4).unwrap();
            let endpoint = group.endpoint(peer).unwrap();
            endpoint.post_recv(1, &[target]).unwrap();
        }
        for peer in (0..size).filter(|&peer| peer != rank) {
            let bytes = [rank as u8 + 1; 4];
            let endpoint = group.endpoint(peer).unwrap();
            endpoint.post_send(&Work::send_inline(&bytes)).unwrap();
            endpoint.wait_cq(QueueKind::Send, Some(SOON)).unwrap();
            endpoint.wait_cq(QueueKind::Recv, Some(SOON)).unwrap();
        }
        for peer in (0..size).filter(|&peer| peer != rank) {
            let at = u64::from(peer) * 64;
            assert!(region.is_filled_with(at, 4, peer as u8 + 1).unwrap());
        }
        assert!(matches!(group.endpoint(size), Err(Error::Range { .. })));
        assert!(matches!(group.endpoint(rank), Err(Error::State { .. })));
        group.barrier().unwrap();
        group.leave().unwrap();
    });
}

/// The other side is connected as well: nothing is sent twice.
#[test]
fn an_endpoint_of_the_group_needs_no_repetition() {
    for _ in 0..20 {
        let address = free();
        let one = move |rank| {
            let domain = Device::open("softcx").unwrap().protection_domain();
            let endpoint = EndpointConfig::default().retry_count(0).ack_timeout(20);
            let config = GroupConfig {
                timeout: SOON,
                endpoint,
            };
            let region = Region::alloc(&domain, 7, Access::LOCAL_WRITE).unwrap();
            let mut group = Group::join(&environment(rank, 3, address), &domain, &config).unwrap();
            for peer in (0..3).filter(|&peer| peer != rank) {
                let endpoint = group.endpoint(peer).unwrap();
                endpoint.post_send(&Work::send_inline(b"at once")).unwrap();
                let into = region.slice(0, 7).unwrap();
                endpoint.post_recv(1, &[into]).unwrap();
                endpoint.wait_cq(QueueKind::Send, Some(SOON)).unwrap();
                endpoint.wait_cq(QueueKind::Recv, Some(SOON)).unwrap();
            }
            group.barrier().unwrap();
            group.leave().unwrap();
        };
        let threads = [0, 1, 2].map(|rank| thread::spawn(move || one(rank)));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}

const TAGS: [u64; 2] = [7, u64::MAX];

/// Each other rank with each tag, in an order of this rank's own.
fn peers_and_tags(group: &Group) -> Vec<(u32, u64)> {
    let mut with: Vec<_> = (0..group.size())
        .filter(|peer| *peer != group.rank())
        .flat_map(|peer| TAGS.map(|tag| (peer, tag)))
        .collect();
    with.rotate_left(group.rank() as usize);
    with
}

/// Each rank opens its queues in its own order. Messages of different tags do not meet, and long ones come from every rank to every rank at once.
#[test]
fn message_queues_connect_in_any_order() {
    groups(3, |group| {
        let (rank, size) = (group.rank(), group.size());
        let with = peers_and_tags(&group);
        let config = MessageConfig::default().eager_bytes(64);
        let mut queues = group.message_queues(&with, &config).unwrap();
        let memory = Region::alloc(group.domain(), 1 << 16, Access::ALL).unwrap();
        let byte = |from: u32, to: u32, tag| (from * 9 + to * 3) as u8 + u8::from(tag == TAGS[0]);
        let stream = HostStream::new("messages").unwrap();
        let mut pending = Vec::new();
        for (number, (queue, (peer, tag))) in queues.iter_mut().zip(&with).enumerate() {
            for (message, len_bytes) in [0, 8, 5000].into_iter().enumerate() {
                let at = 10_000 * number as u64 + 2500 * message as u64;
                memory.fill(at, len_bytes, byte(rank, *peer, *tag)).unwrap();
                let slice = memory.slice(at, len_bytes).unwrap();
                pending.push((number, queue.start_send(&stream, &[slice]).unwrap()));
            }
        }
        let into = Region::alloc(group.domain(), 1 << 16, Access::ALL).unwrap();
        for (number, queue) in queues.iter_mut().enumerate() {
            for (message, len_bytes) in [0, 8, 5000].into_iter().enumerate() {
                let at = 10_000 * number as u64 + 2500 * message as u64;
                let slice = into.slice(at, 5000).unwrap();
                let ticket = queue.recv(&stream, &[slice]).unwrap();
                assert_eq!(ticket.wait(Some(SOON)), Ok(len_bytes));
                let (peer, tag) = with[number];
                let filled = into.is_filled_with(at, len_bytes, byte(peer, rank, tag));
                assert_eq!(filled, Ok(true));
            }
        }
        for (number, pending) in pending {
            let ticket = queues[number].wait_send(&stream, pending).unwrap();
            ticket.wait(Some(SOON)).unwrap();
        }
        let kind = |with: &[(u32, u64)]| match group.message_queues(with, &config) {
            Err(Error::State { kind, .. }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&with[..1]), StateKind::Taken);
        assert_eq!(kind(&[(rank, 1)]), StateKind::WrongKind);
        let stranger = group.message_queues(&[(size, 1)], &config);
        assert!(matches!(stranger, Err(Error::Range { .. })));
        queues
            .iter_mut()
            .for_each(|it| it.finish(Some(SOON)).unwrap());
        group.barrier().unwrap();
        drop(queues);
        group.leave().unwrap();
    });
}

/// Of all ranks, and of some in another order. A rank that ends is named by an operation of the others.
#[test]
fn communicators_reduce_and_name_a_rank_that_has_ended() {
    groups(3, |group| {
        let rank = group.rank();
        let config = MessageConfig::default();
        let stream = HostStream::new("collective").unwrap();
        let region = Region::alloc(group.domain(), 64, Access::ALL).unwrap();
        let slice = region.slice(0, 8).unwrap();
        let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
        let reduced = |communicator: &mut Communicator| {
            region.write_values(0, &[10_i64.pow(rank)]).unwrap();
            let reduce = communicator.all_reduce(&slice, &slice, sum, None)?;
            communicator
                .launch(&stream, &reduce)?
                .wait(Some(SOON))
                .map(|()| {
                    let mut result = [0_i64];
                    region.read_values(0, &mut result).unwrap();
                    result[0]
                })
        };
        let mut all = group.communicator(None, 1, &config).unwrap();
        assert_eq!((all.rank(), all.size()), (rank, 3));
        assert_eq!(reduced(&mut all), Ok(111));
        let refused = |ranks: &[u32]| match group.communicator(Some(ranks), 2, &config) {
            Err(Error::State { kind, .. }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[(rank + 1) % 3]), StateKind::WrongKind);
        assert_eq!(refused(&[rank, rank]), StateKind::WrongKind);
        let mut alone = group.communicator(Some(&[rank]), 2, &config).unwrap();
        assert_eq!(reduced(&mut alone), Ok(10_i64.pow(rank)));
        if rank != 1 {
            let mut some = group.communicator(Some(&[2, 0]), 2, &config).unwrap();
            assert_eq!((some.rank(), some.size()), (u32::from(rank == 0), 2));
            assert_eq!(reduced(&mut some), Ok(101));
            some.finish(Some(SOON)).unwrap();
        }
        group.barrier().unwrap();
        if rank == 2 {
            // Without having left.
            return;
        }
        let ended = reduced(&mut all);
        assert!(
            matches!(&ended, Err(Error::Work(error)) if error.cause == Cause::Rank(2)),
            "rank {rank}: {ended:?}"
        );
        assert!(matches!(all.failure(), Some((_, error)) if error.cause == Cause::Rank(2)));
    });
}

/// Of all ranks, in another order, and of one. The failure of a peer names the rank that has ended.
#[test]
fn matchers_receive_from_any_rank_and_name_one_that_has_ended() {
    groups(3, |group| {
        let rank = group.rank();
        let config = MatcherConfig::default();
        let region = Region::alloc(group.domain(), 64, Access::ALL).unwrap();
        let own = [region.slice(0, 4).unwrap()];
        let into = [region.slice(8, 4).unwrap()];
        region.write_values(0, &[rank]).unwrap();
        let matcher = group.matcher(Some(&[2, 0, 1]), 1, &config).unwrap();
        assert_eq!(matcher.peer_count(), 3);
        for peer in 0..3 {
            matcher.send_now(peer, 7, &own, Some(SOON)).unwrap();
        }
        let mut seen = [false; 3];
        for _ in 0..3 {
            let received = matcher.recv_now(Source::Any, 7.into(), &into, Some(SOON));
            let message = received.unwrap();
            let mut from = [0_u32];
            region.read_values(8, &mut from).unwrap();
            assert_eq!([2, 0, 1][message.peer], from[0]);
            seen[message.peer] = true;
        }
        assert_eq!(seen, [true; 3]);
        let alone = group.matcher(Some(&[rank]), 2, &config).unwrap();
        alone.send_now(0, 1, &own, Some(SOON)).unwrap();
        let received = alone.recv_now(Source::Peer(0), 1.into(), &into, Some(SOON));
        assert_eq!(received.map(|it| it.len_bytes), Ok(4));
        let refused = |ranks: &[u32]| match group.matcher(Some(ranks), 3, &config) {
            Err(Error::State { kind, .. }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[(rank + 1) % 3]), StateKind::WrongKind);
        assert_eq!(refused(&[rank, rank]), StateKind::WrongKind);
        matcher.finish(Some(SOON)).unwrap();
        group.barrier().unwrap();
        if rank == 2 {
            // Without having left.
            return;
        }
        let ended = matcher.recv_now(Source::Peer(0), 7.into(), &into, Some(SOON));
        assert!(
            matches!(&ended, Err(Error::Peer { peer: 0, failure }) if failure.cause == Cause::Rank(2)),
            "rank {rank}: {ended:?}"
        );
    });
}

/// The sum of 2 to the power of each rank, by a collective operation of all ranks.
fn sum_of_powers(group: &Group, power: u32) -> i64 {
    let stream = HostStream::new("collective").unwrap();
    let region = Region::alloc(group.domain(), 8, Access::ALL).unwrap();
    region.write_values(0, &[1_i64 << power]).unwrap();
    let slice = region.slice(0, 8).unwrap();
    let config = MessageConfig::default();
    let mut communicator = group.communicator(None, 1, &config).unwrap();
    let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
    let reduce = communicator.all_reduce(&slice, &slice, sum, None).unwrap();
    let launched = communicator.launch(&stream, &reduce).unwrap();
    launched.wait(Some(SOON)).unwrap();
    communicator.finish(Some(SOON)).unwrap();
    group.barrier().unwrap();
    let mut result = [0_i64];
    region.read_values(0, &mut result).unwrap();
    result[0]
}

/// Twice, and the second time out of a group that was made so.
#[test]
fn survivors_shrink_and_their_next_collective_works() {
    groups(5, |group| {
        let first = group.rank();
        assert_eq!(sum_of_powers(&group, first), 0b11111);
        if first == 3 {
            // Without having left.
            return;
        }
        let named = group.cause_of(group.barrier().unwrap_err());
        assert!(matches!(named, Error::Rank { rank: 3, .. }), "{named}");
        let (smaller, ranks) = group.shrink().unwrap();
        assert_eq!(ranks, [0, 1, 2, 4]);
        assert_eq!(ranks[smaller.rank() as usize], first);
        assert_eq!((smaller.size(), smaller.check()), (4, Ok(())));
        assert_eq!(sum_of_powers(&smaller, first), 0b10111);
        // What is left of the old group does no harm.
        drop(group);
        if first == 1 {
            return;
        }
        // Some ask before they have heard of the end.
        let (smallest, ranks) = smaller.shrink().unwrap();
        assert_eq!(ranks, [0, 2, 3]);
        assert_eq!(sum_of_powers(&smallest, first), 0b10101);
        smallest.barrier().unwrap();
        smallest.leave().unwrap();
    });
}

#[test]
fn without_the_rank_of_the_store_there_is_no_shrinking() {
    groups(3, |group| {
        group.barrier().unwrap();
        if group.rank() == 0 {
            return;
        }
        let refused = group.shrink().map(|(_, ranks)| ranks);
        assert!(
            matches!(refused, Err(Error::Rank { rank: 0, .. })),
            "{refused:?}"
        );
    });
}

/// The one that called gets a timeout, and nothing is lost: the next time all call.
#[test]
fn a_rank_that_does_not_call_ends_a_shrinking_by_its_time_limit() {
    ranks(3, |store| {
        let ignore = || IgnoreEvents;
        if store.rank() != 1 {
            let late = store.shrink_with(SHORT, ignore).map(|(_, ranks)| ranks);
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        }
        store.barrier(SOON).unwrap();
        if store.rank() == 2 {
            store.leave(SOON).unwrap();
            return;
        }
        let (smaller, ranks) = store.shrink_with(SOON, ignore).unwrap();
        assert_eq!((ranks, smaller.size()), (vec![0, 1], 2));
        smaller.barrier(SOON).unwrap();
        // Of the old store, which is no longer needed.
        drop(store);
        smaller.leave(SOON).unwrap();
    });
}

/// One that had come to the new store: the others have no part in its end.
#[test]
fn survivors_go_on_without_a_rank_that_ends_while_they_shrink() {
    ranks(4, |store| {
        if store.rank() == 2 {
            let deadline = Deadline::new("test", SOON);
            let (half, survivors) = store
                .meet_survivors(&deadline, Box::new(IgnoreEvents))
                .unwrap();
            assert_eq!((half.rank(), survivors), (2, vec![0, 1, 2, 3]));
            return;
        }
        let (smaller, ranks) = store.shrink_with(SOON, || IgnoreEvents).unwrap();
        assert_eq!((ranks, smaller.size()), (vec![0, 1, 3], 3));
        smaller.barrier(SOON).unwrap();
        drop(store);
        smaller.leave(SOON).unwrap();
    });
}

/// The store has room for the keys of one pair of links, and not for those of two.
#[test]
fn store_has_room_for_links_again_once_earlier_ones_are_connected() {
    const ROOM: usize = 1000;
    groups(2, |group| {
        let (rank, store) = (group.rank(), &group.store);
        if rank == 0 {
            store.set(b"room", &[0; ROOM], SOON).unwrap();
            let mut number = 0_u32;
            for len in (0..=16).rev().map(|power| 1 << power) {
                loop {
                    match store.set(&number.to_le_bytes(), &vec![0; len], SOON) {
                        Ok(()) => number += 1,
                        Err(Error::State { kind, .. }) => {
                            assert_eq!(kind, StateKind::Exhausted);
                            break;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            store.set(b"room", &[], SOON).unwrap();
        }
        for tag in 0..8 {
            group.barrier().unwrap();
            let (peer, config) = (1 - rank, MessageConfig::default());
            drop(group.communicator(None, tag, &config).unwrap());
            let with = [(peer, tag), (rank, tag)];
            drop(group.endpoints(&with, &EndpointConfig::default()).unwrap());
        }
        group.barrier().unwrap();
        if rank == 0 {
            // As much as there was.
            store.set(b"room", &[0; ROOM], SOON).unwrap();
        }
        group.leave().unwrap();
    });
}

/// Two further endpoints to each peer, whose tags are those of message queues as well, and two to the rank itself. Each word comes by the endpoint that it was
/// sent on.
#[test]
fn further_endpoints_connect_in_any_order() {
    groups(3, |group| {
        let (rank, size) = (group.rank(), group.size());
        let mut with = peers_and_tags(&group);
        let queues = group
            .message_queues(&with, &MessageConfig::default())
            .unwrap();
        with.splice(1..1, TAGS.map(|tag| (rank, tag)));
        let config = EndpointConfig::default().send_depth(8);
        let mut endpoints = group.endpoints(&with, &config).unwrap();
        let memory = Region::alloc(group.domain(), 64, Access::ALL).unwrap();
        for (at, endpoint) in (0..).zip(&mut endpoints) {
            assert_eq!(endpoint.room(QueueKind::Send), 8);
            endpoint
                .post_recv(at, &[memory.slice(8 * at, 8).unwrap()])
                .unwrap();
        }
        group.barrier().unwrap();
        for (endpoint, (_, tag)) in endpoints.iter_mut().zip(&with) {
            let word = tag.wrapping_add(rank.into()).to_ne_bytes();
            endpoint.post_send(&Work::send_inline(&word)).unwrap();
        }
        let mut missing = with.len();
        while missing > 0 {
            let (at, from) = crate::wait_until(Some(SOON), || -> crate::Result<_> {
                for (at, endpoint) in endpoints.iter_mut().enumerate() {
                    if let Some(come) = endpoint.poll_cq(QueueKind::Recv)? {
                        return Ok(Some((come.wr_id, with[at])));
                    }
                }
                Ok(None)
            })
            .unwrap();
            let (peer, tag) = from;
            assert_eq!(memory.load_u64(8 * at), Ok(tag.wrapping_add(peer.into())));
            missing -= 1;
        }
        let kind = |with: &[(u32, u64)]| match group.endpoints(with, &config) {
            Err(Error::State { kind, .. }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&with[..1]), StateKind::Taken);
        assert_eq!(kind(&[(rank, TAGS[0])]), StateKind::Taken);
        let stranger = group.endpoints(&[(size, 1)], &config);
        assert!(matches!(stranger, Err(Error::Range { .. })));
        group.barrier().unwrap();
        drop(queues);
        if rank == 2 {
            // Without having left.
            return;
        }
        for (endpoint, _) in endpoints.iter_mut().zip(&with) {
            let ended = endpoint.wait_cq(QueueKind::Recv, Some(SOON)).unwrap_err();
            let Error::Work(failure) = ended else {
                panic!("{ended:?}");
            };
            assert_eq!(failure.cause, Cause::Rank(2), "rank {rank}");
        }
    });
}

/// Streams that wait for a message of a rank that has ended, or for a credit of it, are released, and name it.
#[test]
fn messages_of_a_rank_that_has_ended_name_it() {
    groups(3, |group| {
        let rank = group.rank();
        let config = MessageConfig::default().eager_bytes(64).slots(1);
        let with: Vec<_> = (0..3)
            .filter(|peer| *peer != rank)
            .map(|peer| (peer, 1))
            .collect();
        let mut queues = group.message_queues(&with, &config).unwrap();
        group.barrier().unwrap();
        if rank == 2 {
            // Without having left.
            return;
        }
        let memory = Region::alloc(group.domain(), 4096, Access::ALL).unwrap();
        let slice = memory.slice(0, 4096).unwrap();
        let mut tickets = Vec::new();
        for queue in &mut queues {
            for is_send in [true, false] {
                let stream = HostStream::new("messages").unwrap();
                // A send may be refused, because the group has failed by then.
                let queued = match is_send {
                    true => queue.send(&stream, &[slice]),
                    false => queue.recv(&stream, &[slice]),
                };
                tickets.push(queued.and_then(|ticket| ticket.wait(Some(SOON))));
            }
        }
        for ended in tickets {
            assert!(
                matches!(&ended, Err(Error::Work(error)) if error.cause == Cause::Rank(2)),
                "rank {rank}: {ended:?}"
            );
        }
    });
}

#[test]
fn a_rank_that_cannot_connect_reports_it_to_the_waiting_rank() {
    let address = free();
    let one = move |rank| {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let mut config = GroupConfig {
            timeout: SOON,
            ..GroupConfig::default()
        };
        if rank == 1 {
            config.endpoint.send_depth = 0;
        }
        let mut group = Group::join(&environment(rank, 2, address), &domain, &config).unwrap();
        if rank == 0 {
            let error = group.endpoint(1).unwrap_err().to_string();
            assert!(error.contains("rank 1 could not connect: "), "{error}");
            assert!(error.contains("send_depth"), "{error}");
        }
        group.barrier().unwrap();
        group.leave().unwrap();
    };
    let threads = [0, 1].map(|rank| thread::spawn(move || one(rank)));
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// A thread that hears of the failure may reset its endpoint, and no abort of the old generation may reach the new one.
#[test]
fn endpoints_are_aborted_before_the_failure_is_reported() {
    struct Order(mpsc::Sender<(&'static str, Option<Error>)>);
    impl Watcher for Order {
        fn message(&self, _: &StoreClient, _: u32, _: &[u8]) {}

        fn failing(&self, client: &StoreClient, rank: u32) {
            assert_eq!(rank, 1);
            self.0.send(("failing", client.failure())).unwrap();
        }

        fn failed(&self, client: &StoreClient) {
            self.0.send(("failed", client.failure())).unwrap();
        }
    }
    let address = free();
    let (order, events) = mpsc::channel();
    let watched = Store::join_with(&environment(0, 2, address), SOON, Box::new(Order(order)));
    drop(join(1, 2, address));
    assert_eq!(events.recv_timeout(SOON).unwrap(), ("failing", None));
    let (last, failure) = events.recv_timeout(SOON).unwrap();
    assert!(
        matches!(failure, Some(Error::Rank { rank: 1, .. })),
        "{failure:?}"
    );
    assert_eq!(last, "failed");
    // Only the first failure counts.
    drop(watched.unwrap());
    assert!(events.recv_timeout(SOON).is_err());
}

#[test]
fn the_end_of_a_rank_ends_the_waits_of_all_endpoints() {
    groups(3, |mut group| {
        let rank = group.rank();
        group.endpoint((rank + 1) % 3).unwrap();
        group.endpoint((rank + 2) % 3).unwrap();
        group.barrier().unwrap();
        if rank == 1 {
            return;
        }
        let began = Instant::now();
        // It waits for the one that is still there, unless it knows better already.
        let endpoint = group.endpoint(2 - rank);
        let waited = endpoint.and_then(|endpoint| endpoint.wait_cq(QueueKind::Recv, None));
        let waited = waited.unwrap_err();
        assert!(
            matches!(waited, Error::Work(error) if error.cause == Cause::Rank(1))
                || matches!(waited, Error::Rank { rank: 1, .. }),
            "{waited}"
        );
        assert!(
            waited.to_string().contains("rank 1 of the group"),
            "{waited}"
        );
        let error = group.cause_of(waited);
        assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
        for (status, is_explained) in [
            (WcStatus::LocProtErr, false),
            (WcStatus::RemInvReqErr, false),
            (WcStatus::RemAccessErr, true),
            (WcStatus::RetryExcErr, true),
            (WcStatus::WrFlushErr, true),
        ] {
            let cause = Cause::Completion {
                status,
                syndrome: 0,
                vendor_syndrome: 0,
            };
            let found = Error::Work(WorkError::new(1, None, cause));
            let named = group.cause_of(found.clone());
            let by_rank = matches!(named, Error::Rank { rank: 1, .. });
            assert_eq!(by_rank, is_explained, "{named}");
            assert!(by_rank || named == found, "{named}");
        }
        assert!(matches!(group.check(), Err(Error::Rank { rank: 1, .. })));
        assert!(group.endpoint(2 - rank).is_err());
        assert!(began.elapsed() < SOON / 2);
        assert!(group.leave().is_err());
    });
}
