//! Writes that go without packets: when they do, when they must not, and that nobody can tell by the bytes.

use super::pair::{Pair, ROOM};
use crate::device::Faults;
use crate::device::client::{QpAttributes, Transport, mask};
use crate::device::driver::{ALL, Process, Work, data};
use crate::device::harness::{Shape, World, pattern};
use crate::device::keys::Access;
use crate::device::packet::{Header, Kind, flag};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

const WRITE: u8 = 0x08;
const SEND: u8 = 0x0a;
const READ: u8 = 0x10;
/// With a completion, and behind the reads before it.
const FENCED: u8 = 0x88;
const ERROR: u8 = 6;
const PROCESSES: [fn(usize) -> Process; 2] = [Process::local, Process::other];

fn pair(process: fn(usize) -> Process) -> Pair {
    Pair::new(Transport::Rc, 2, process)
}

fn write(pair: &mut Pair, offset: usize, bytes: &[u8]) {
    pair.a.process.write(pair.from.0 + offset as u64, bytes);
    let segments = [pair.there(offset), pair.here(offset, bytes.len())];
    pair.send(&Work::new(WRITE, &segments));
}

/// Messages without packets, and packets, of the first device.
fn counts(pair: &Pair) -> (u64, u64) {
    let counters = pair.world.devices[0].counters();
    (counters.placed, counters.packets_sent)
}

#[test]
fn a_write_needs_no_turn_of_its_peer() {
    for transport in [Transport::Rc, Transport::Uc] {
        for process in PROCESSES {
            let mut pair = Pair::new(transport, 2, process);
            for (round, len) in [1, 8, 64, 65, 4096, 100_001].into_iter().enumerate() {
                let bytes = pattern(len as u64, len);
                write(&mut pair, 16, &bytes);
                pair.world.now_ns += 1_000_000;
                pair.world.devices[0].turn_at(pair.world.now_ns);
                assert_eq!(pair.b.process.read(pair.into.0 + 16, len), bytes);
                let done = pair.a.poll(&mut pair.cqs[0]).unwrap();
                assert_eq!((done.syndrome, done.byte_count), (0, len as u32));
                assert_eq!(counts(&pair), (round as u64 + 1, 0), "{transport:?} {len}");
            }
        }
    }
}

#[test]
fn a_write_does_not_overtake_what_is_on_its_way() {
    for process in PROCESSES {
        let mut pair = pair(process);
        pair.receive(0, 64);
        let send = Work::new(SEND, &[pair.here(1000, 64)]);
        pair.send(&send);
        write(&mut pair, 0, &[7; 64]);
        for _ in 0..10 {
            pair.world.now_ns += 1000;
            pair.world.devices[0].turn_at(pair.world.now_ns);
        }
        assert_eq!(pair.b.process.read(pair.into.0, 64), [0; 64]);
        assert_eq!(pair.sent().len(), 2);
        assert_eq!(
            pair.b.process.read(pair.into.0, 64),
            [7; 64],
            "the later of the two"
        );
        assert_eq!(counts(&pair).0, 0);
        // All is carried out: the next one can go.
        write(&mut pair, 0, &[8; 64]);
        assert_eq!(pair.sent().len(), 1);
        assert_eq!(counts(&pair).0, 1);
    }
}

/// The first packet of a connection: a write of 8 bytes.
fn first_write(pair: &Pair) -> Header {
    let mut header = Header::new(Kind::Write, pair.qps[1].qpn, 0x1000, 0);
    header.flags = flag::FIRST | flag::LAST;
    header.source_lid = pair.world.devices[0].node();
    (header.addr, header.rkey) = pair.into;
    (header.total_bytes, header.payload_bytes) = (8, 8);
    header
}

#[test]
fn a_first_packet_is_carried_out_before_the_next_write_goes_without() {
    for process in PROCESSES {
        let mut pair = pair(process);
        // Its peer may not send yet: it lets this side write when it has heard of it.
        pair.b.to_state(&pair.qps[1], 0).unwrap();
        pair.b.init(&pair.qps[1]);
        pair.b.to_rtr(&pair.qps[1], pair.qps[0].qpn);
        write(&mut pair, 0, &[1; 8]);
        pair.world.devices[0].turn_at(1000);
        assert_eq!(counts(&pair), (0, 1));
        // That packet, in the midst of a turn of the peer.
        let header = first_write(&pair);
        pair.world.devices[1].lock().inject(&header, &[1; 8]);
        write(&mut pair, 0, &[2; 8]);
        pair.world.devices[0].turn_at(2000);
        assert_eq!(counts(&pair), (1, 1));
        assert_eq!(pair.sent().len(), 2);
        assert_eq!(pair.b.process.read(pair.into.0, 8), [2; 8]);
    }
}

#[test]
fn many_in_a_row_wait_for_the_peer_and_then_need_no_packets() {
    for process in PROCESSES {
        let mut pair = pair(process);
        pair.receive(9000, 64);
        let send = Work::new(SEND, &[pair.here(9000, 64)]);
        pair.send(&send);
        for at in 0..40 {
            write(&mut pair, at * 100, &[at as u8 + 1; 100]);
        }
        for _ in 0..10 {
            pair.world.now_ns += 1000;
            pair.world.devices[0].turn_at(pair.world.now_ns);
        }
        // The send, and the writes before the row was long enough.
        let sent = counts(&pair).1;
        assert!(sent <= 9, "{sent} packets");
        let done = pair.sent();
        assert_eq!(done.len(), 41);
        assert!(done.windows(2).all(|two| two[0].0 < two[1].0), "in order");
        assert!(done.iter().all(|(_, syndrome)| *syndrome == 0));
        let (placed, packets) = counts(&pair);
        assert_eq!((placed + sent, packets), (41, sent));
        for at in 0..40 {
            let there = pair.b.process.read(pair.into.0 + at * 100, 100);
            assert_eq!(there, [at as u8 + 1; 100]);
        }
    }
}

#[test]
fn a_waiting_write_is_flushed_or_goes_by_packets_when_its_peer_changes() {
    // The peer resets: nothing is acknowledged any more.
    let mut pair = pair(Process::local);
    pair.receive(9000, 64);
    let send = Work::new(SEND, &[pair.here(9000, 64)]);
    pair.send(&send);
    for at in 0..20 {
        write(&mut pair, at * 100, &[1; 100]);
    }
    pair.b.to_state(&pair.qps[1], 0).unwrap();
    let done = pair.sent();
    assert_eq!(done.len(), 21);
    assert_eq!(done[0].1, Syndrome::TransportRetryExc as u8);
    assert!(done[1..].iter().all(|(_, s)| *s == Syndrome::WrFlush as u8));
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [0; 2000]);
    // Its key goes away: what waits is refused by packet.
    let mut pair = super::placement::pair(Process::local);
    pair.receive(9000, 64);
    pair.into = pair.b.region(4096, ALL);
    let send = Work::new(SEND, &[pair.here(9000, 64)]);
    pair.send(&send);
    for at in 0..20 {
        write(&mut pair, at * 100, &[1; 100]);
    }
    pair.world.now_ns += 1000;
    pair.world.devices[0].turn_at(pair.world.now_ns);
    pair.b.client.dereg_mr(pair.into.1).unwrap();
    let done = pair.sent();
    assert_eq!(done.len(), 21);
    assert!(
        done.iter().any(|(_, s)| *s == Syndrome::RemoteAccess as u8),
        "{done:?}"
    );
    assert_eq!(pair.state(0), ERROR);
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [0; 2000]);
}

#[test]
fn keys_ranges_and_rights_are_the_peers_to_refuse() {
    for (access, len) in [(1u32, 8), (5, 8), (15, 0)] {
        let mut pair = pair(Process::local);
        let (at, key) = pair.b.region(4096, access);
        pair.into = (at, key);
        let len = if len == 0 { 4097 } else { len };
        write(&mut pair, 0, &vec![1; len]);
        assert_eq!(
            pair.sent()[0].1,
            Syndrome::RemoteAccess as u8,
            "{access} {len}"
        );
        assert_eq!(counts(&pair).0, 0);
        assert_eq!(pair.b.process.read(at, 8), [0; 8]);
    }
}

#[test]
fn memory_that_is_gone_is_told_of_by_packet_and_ends_it() {
    for process in PROCESSES {
        let mut pair = pair(process);
        write(&mut pair, 0, &[1; 8]);
        assert_eq!(pair.sent().len(), 1);
        // A page in the middle: nothing of the page behind it may be taken for done.
        if !pair.b.process.space.is_local() {
            pair.b
                .process
                .unmap(pair.into.0.next_multiple_of(4096) + 4096, 4096);
            write(&mut pair, 0, &[1; 16_000]);
            assert_eq!(pair.sent()[0].1, Syndrome::RemoteOp as u8);
            assert_eq!(counts(&pair).0, 1);
            assert_eq!(pair.state(1), ERROR);
        }
    }
}

#[test]
fn whoever_looks_at_packets_gets_them() {
    let faults = Faults {
        drop_nth: u64::MAX,
        ..Faults::default()
    };
    for end in 0..2 {
        let mut pair = pair(Process::local);
        pair.world.devices[end].set_faults(faults);
        write(&mut pair, 0, &[1; 8]);
        assert_eq!(pair.sent().len(), 1);
        assert_eq!(counts(&pair), (0, 1));
        pair.world.devices[end].set_faults(Faults::default());
        write(&mut pair, 0, &[2; 8]);
        assert_eq!(pair.sent().len(), 1);
        assert_eq!(counts(&pair), (1, 1));
    }
    // Also in the form of a trace.
    for end in 0..2 {
        let mut pair = pair(Process::local);
        let path = std::env::temp_dir().join(format!("doorbell-placement-{}", std::process::id()));
        pair.world.devices[end].lock().set_trace(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        write(&mut pair, 0, &[1; 8]);
        assert_eq!((pair.sent().len(), counts(&pair)), (1, (0, 1)));
    }
    // A device that does nothing lets nothing happen to its memory.
    let mut pair = pair(Process::local);
    pair.world.devices[1].set_frozen(true);
    write(&mut pair, 0, &[1; 8]);
    pair.world.devices[0].turn_at(1000);
    assert_eq!(pair.b.process.read(pair.into.0, 8), [0; 8]);
}

#[test]
fn packets_of_several_sequence_numbers_are_counted_as_that_many() {
    for process in PROCESSES {
        // The path's MTU is 1024.
        let mut pair = pair(process);
        for len in [1024usize, 1025, 4096, 4097, 70_000] {
            let bytes = pattern(len as u64, len);
            pair.a.process.write(pair.from.0, &bytes);
            pair.receive(0, len);
            let before = counts(&pair).1;
            let send = Work::new(SEND, &[pair.here(0, len)]);
            pair.send(&send);
            assert_eq!(pair.sent().len(), 1);
            assert_eq!(pair.received().len(), 1);
            assert_eq!(pair.b.process.read(pair.into.0, len), bytes);
            assert_eq!(counts(&pair).1 - before, len.div_ceil(4096) as u64);
        }
        assert_eq!(pair.world.devices[0].counters().retransmissions, 0);
        // One MTU a packet from here on, over the sequence numbers that went before.
        pair.world.set_faults(Faults {
            loss: 0.2,
            seed: 3,
            ..Faults::default()
        });
        for len in [5000usize, 70_000] {
            let bytes = pattern(len as u64 + 1, len);
            pair.a.process.write(pair.from.0, &bytes);
            pair.receive(0, len);
            let send = Work::new(SEND, &[pair.here(0, len)]);
            pair.send(&send);
            assert_eq!(pair.sent(), [(pair.qps[0].posted.wrapping_sub(1), 0)]);
            assert_eq!(pair.received().len(), 1);
            assert_eq!(pair.b.process.read(pair.into.0, len), bytes);
        }
    }
}

/// Turns of the first device alone.
fn alone(pair: &mut Pair) {
    for _ in 0..10 {
        pair.world.now_ns += 1000;
        pair.world.devices[0].turn_at(pair.world.now_ns);
    }
}

fn wait_behind_a_send(pair: &mut Pair, writes: usize) {
    pair.receive(9000, 64);
    let send = Work::new(SEND, &[pair.here(9000, 64)]);
    pair.send(&send);
    for at in 0..writes {
        write(pair, at * 100, &[1; 100]);
    }
    alone(pair);
}

#[test]
fn what_waited_and_goes_by_packets_has_their_sequence_numbers() {
    let mut pair = pair(Process::local);
    wait_behind_a_send(&mut pair, 20);
    let waits = counts(&pair).1;
    assert!(waits < 21);
    // From here on the peer wants packets.
    pair.world.devices[1].set_faults(Faults {
        drop_nth: u64::MAX,
        ..Faults::default()
    });
    let done = pair.sent();
    assert_eq!(done.len(), 21);
    assert!(done.iter().all(|(_, syndrome)| *syndrome == 0), "{done:?}");
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [1; 2000]);
    assert_eq!(counts(&pair), (0, 21));
    assert_eq!(pair.world.devices[0].counters().retransmissions, 0);
}

#[test]
fn a_source_that_goes_while_its_write_waits_is_told_of() {
    let mut pair = pair(Process::local);
    wait_behind_a_send(&mut pair, 20);
    let sent = counts(&pair).1 as usize;
    pair.a.client.dereg_mr(pair.from.1).unwrap();
    let done = pair.sent();
    assert_eq!(done.len(), 21);
    assert!(done[..sent].iter().all(|(_, syndrome)| *syndrome == 0));
    assert_eq!(done[sent].1, Syndrome::LocalProt as u8);
    assert_eq!(counts(&pair).0, 0);
}

#[test]
fn between_other_requests_nothing_waits() {
    let mut pair = pair(Process::local);
    wait_behind_a_send(&mut pair, 7);
    wait_behind_a_send(&mut pair, 7);
    assert_eq!(counts(&pair), (0, 16));
    assert_eq!(pair.sent().len(), 16);
}

#[test]
fn without_acknowledgements_nothing_waits() {
    let mut pair = Pair::new(Transport::Uc, 2, Process::local);
    wait_behind_a_send(&mut pair, 20);
    assert_eq!(counts(&pair), (0, 21));
    assert_eq!(pair.sent().len(), 21);
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [1; 2000]);
    // The peer has shown how far it is.
    write(&mut pair, 0, &[2; 100]);
    alone(&mut pair);
    assert_eq!(counts(&pair), (1, 21));
}

#[test]
fn what_is_collected_is_not_carried_out() {
    for process in PROCESSES {
        let mut pair = pair(process);
        pair.receive(9000, 64);
        let send = Work::new(SEND, &[pair.here(9000, 64)]);
        pair.send(&send);
        pair.world.devices[0].turn_at(1000);
        // Another packet in its place, in the midst of a turn of the peer.
        let header = first_write(&pair);
        pair.world.devices[1].lock().inject(&header, &[1; 8]);
        write(&mut pair, 0, &[2; 8]);
        alone(&mut pair);
        assert_eq!(pair.sent().len(), 2);
        assert_eq!(pair.b.process.read(pair.into.0, 8), [2; 8]);
    }
}

#[test]
fn keys_are_shut_and_shown_as_the_regions_change() {
    let mut pair = pair(Process::local);
    let (old, key) = pair.into;
    let (new, _) = pair.b.region(4096, ALL);
    let change = |pair: &Pair, addr: u64, access: Access| {
        let keys = &mut pair.world.devices[1].lock().keys;
        let mut region = keys.region(key).unwrap();
        (region.start.addr, region.access) = (addr, access);
        assert!(keys.change_region(key, &region));
    };
    change(&pair, new, Access::ALL);
    write(&mut pair, 0, &[1; 8]);
    alone(&mut pair);
    let bytes = |pair: &Pair, at| pair.b.process.read(at, 8);
    assert_eq!(
        (bytes(&pair, old), bytes(&pair, new)),
        (vec![0; 8], vec![1; 8])
    );
    assert_eq!(counts(&pair), (1, 0));
    change(&pair, new, Access::LOCAL_WRITE);
    write(&mut pair, 0, &[2; 8]);
    alone(&mut pair);
    assert_eq!((bytes(&pair, new), counts(&pair)), (vec![1; 8], (1, 1)));
    // And for good.
    let mut pair = super::placement::pair(Process::local);
    pair.b.client.dereg_mr(pair.into.1).unwrap();
    write(&mut pair, 0, &[1; 8]);
    alone(&mut pair);
    assert_eq!(
        (bytes(&pair, pair.into.0), counts(&pair)),
        (vec![0; 8], (0, 1))
    );
    assert_eq!(pair.sent()[0].1, Syndrome::RemoteAccess as u8);
}

#[test]
fn a_write_does_not_overtake_a_read_whose_answers_are_on_their_way() {
    let mut pair = pair(Process::local);
    let bytes = pattern(5, ROOM);
    pair.b.process.write(pair.into.0, &bytes);
    // More answers than fit into a lane.
    let read = Work::new(READ, &[pair.there(0), pair.here(0, ROOM)]);
    pair.send(&read);
    for device in [0, 1] {
        pair.world.devices[device].turn_at(1000);
    }
    let other = pair.a.region(4096, ALL);
    pair.a.process.write(other.0, &[9; 8]);
    let segments = [pair.there(ROOM - 8), data(other.0, other.1, 8)];
    pair.send(&Work {
        flags: FENCED,
        ..Work::new(WRITE, &segments)
    });
    alone(&mut pair);
    assert_eq!(counts(&pair).0, 0);
    assert_eq!(pair.sent().len(), 2);
    assert!(pair.a.process.read(pair.from.0, ROOM) == bytes);
    assert_eq!(
        pair.b.process.read(pair.into.0 + ROOM as u64 - 8, 8),
        [9; 8]
    );
}

#[test]
fn the_rights_of_the_connection_count() {
    let mut pair = pair(Process::local);
    let attributes = QpAttributes {
        state: 3,
        access: ALL & !2,
        ..QpAttributes::default()
    };
    let named = mask::STATE | mask::ACCESS_FLAGS;
    pair.b.modify(&pair.qps[1], &attributes, named).unwrap();
    write(&mut pair, 0, &[1; 8]);
    assert_eq!(pair.sent()[0].1, Syndrome::RemoteAccess as u8);
    assert_eq!(counts(&pair).0, 0);
    assert_eq!(pair.b.process.read(pair.into.0, 8), [0; 8]);
}

#[test]
fn a_peer_that_could_not_be_written_to_once_is_sent_packets() {
    let mut pair = pair(Process::other);
    let gone = pair.b.region(4096, ALL);
    pair.b.process.unmap(gone.0.next_multiple_of(4096), 4096);
    let good = std::mem::replace(&mut pair.into, gone);
    write(&mut pair, 0, &[1; 4096]);
    assert_eq!(pair.sent()[0].1, Syndrome::RemoteOp as u8);
    for (end, other) in [(0, 1), (1, 0)] {
        let driver = [&pair.a, &pair.b][end];
        driver.to_state(&pair.qps[end], 0).unwrap();
        driver.connect(&pair.qps[end], pair.qps[other].qpn);
        (pair.qps[end].posted, pair.qps[end].received) = (0, 0);
        let records = pair.qps[end].parts.record;
        driver.process.store(records, 0);
        driver.process.store(records + 4, 0);
    }
    pair.into = good;
    let before = counts(&pair).1;
    write(&mut pair, 0, &[2; 8]);
    assert_eq!(pair.sent().len(), 1);
    assert_eq!(counts(&pair), (0, before + 1));
}

#[test]
fn connections_that_both_ends_agreed_on_let_each_other_write() {
    let mut world = World::new(2);
    let (mut a, b) = world.pair(Shape::default());
    let request = SendRequest::write(b.at(0), b.key).inline(&[7; 8]);
    a.send(&request.signaled(true));
    world.devices[0].turn_at(1000);
    assert_eq!(world.devices[0].counters().placed, 1);
    assert_eq!(a.all_sent(), [(0, None)]);
}
