//! RDMA writes from one device to another: their order, and how they fail.

use super::pair::{Pair, ROOM};
use crate::device::Faults;
use crate::device::client::{DeviceEvent, QpAttributes, Transport, mask};
use crate::device::keys::Access;
use crate::device::packet::{Header, PacketKind, flag};
use crate::device::tests::driver::{ALL, Process, Work, data};
use crate::device::tests::harness::pattern;
use doorbell_wire::mlx5::Syndrome;

const WRITE: u8 = 0x08;
const WRITE_IMM: u8 = 0x09;
const SEND: u8 = 0x0a;
const READ: u8 = 0x10;
/// With a completion, and behind the reads before it.
const FENCED: u8 = 0x88;
const READY_TO_SEND: u8 = 3;
const ERROR: u8 = 6;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const PROCESSES: [fn(usize) -> Process; 2] = [Process::local, Process::other];

fn pair(process: fn(usize) -> Process) -> Pair {
    Pair::new(Transport::Rc, 2, process)
}

fn write(pair: &mut Pair, offset: usize, bytes: &[u8]) {
    pair.a.process.write(pair.from.0 + offset as u64, bytes);
    let segments = [pair.there(offset), pair.here(offset, bytes.len())];
    pair.send(&Work::new(WRITE, &segments));
}

fn packets_sent(pair: &Pair) -> u64 {
    pair.world.devices[0].counters().packets_sent
}

/// Turns of the first device alone.
fn alone(pair: &mut Pair) {
    for _ in 0..10 {
        pair.world.now_ns += 1000;
        pair.world.devices[0].turn_at(pair.world.now_ns);
    }
}

#[test]
fn peer_s_device_carries_out_the_write() {
    for transport in [Transport::Rc, Transport::Uc] {
        for process in PROCESSES {
            let mut pair = Pair::new(transport, 2, process);
            for len in [1, 8, 64, 65, 4096, 100_001] {
                let (bytes, before) = (pattern(len as u64, len), packets_sent(&pair));
                write(&mut pair, 16, &bytes);
                alone(&mut pair);
                assert_eq!(pair.b.process.read(pair.into.0 + 16, 1), [0]);
                pair.world.settle();
                assert_eq!(pair.b.process.read(pair.into.0 + 16, len), bytes);
                let done = pair.a.poll(&mut pair.cqs[0]).unwrap();
                assert_eq!((done.syndrome, done.transferred()), (0, None));
                assert!(packets_sent(&pair) > before, "{transport:?} {len}");
                pair.b.process.write(pair.into.0 + 16, &[0]);
            }
        }
    }
}

#[test]
fn a_write_does_not_overtake_a_send() {
    for process in PROCESSES {
        let mut pair = pair(process);
        pair.receive(0, 64);
        let send = Work::new(SEND, &[pair.here(1000, 64)]);
        pair.send(&send);
        write(&mut pair, 0, &[7; 64]);
        alone(&mut pair);
        assert_eq!(pair.b.process.read(pair.into.0, 64), [0; 64]);
        assert_eq!(pair.sent().len(), 2);
        assert_eq!(
            pair.b.process.read(pair.into.0, 64),
            [7; 64],
            "the later of the two"
        );
    }
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
    assert_eq!(pair.sent().len(), 2);
    assert!(pair.a.process.read(pair.from.0, ROOM) == bytes);
    assert_eq!(
        pair.b.process.read(pair.into.0 + ROOM as u64 - 8, 8),
        [9; 8]
    );
}

#[test]
fn many_writes_complete_in_their_order() {
    for process in PROCESSES {
        let mut pair = pair(process);
        for at in 0..40 {
            write(&mut pair, at * 100, &[at as u8 + 1; 100]);
        }
        let done = pair.sent();
        assert_eq!(done.len(), 40);
        assert!(done.windows(2).all(|two| two[0].0 < two[1].0), "in order");
        assert!(done.iter().all(|(_, syndrome)| *syndrome == 0));
        for at in 0..40 {
            let there = pair.b.process.read(pair.into.0 + at * 100, 100);
            assert_eq!(there, [at as u8 + 1; 100]);
        }
    }
}

#[test]
fn writes_on_their_way_are_refused_or_flushed_when_their_peer_changes() {
    // The peer resets: nothing is acknowledged any more.
    let mut pair = pair(Process::local);
    for at in 0..20 {
        write(&mut pair, at * 100, &[1; 100]);
    }
    alone(&mut pair);
    pair.b.to_state(&pair.qps[1], 0).unwrap();
    let done = pair.sent();
    assert_eq!(done.len(), 20);
    assert_eq!(done[0].1, Syndrome::TransportRetryExc as u8);
    assert!(done[1..].iter().all(|(_, s)| *s == Syndrome::WrFlush as u8));
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [0; 2000]);
    // Its key goes away.
    let mut pair = super::writes::pair(Process::local);
    for at in 0..20 {
        write(&mut pair, at * 100, &[1; 100]);
    }
    alone(&mut pair);
    pair.b.client.dereg_mr(pair.into.1).unwrap();
    let done = pair.sent();
    assert_eq!(done.len(), 20);
    assert_eq!(done[0].1, Syndrome::RemoteAccess as u8);
    assert!(done[1..].iter().all(|(_, s)| *s == Syndrome::WrFlush as u8));
    assert_eq!(pair.state(0), ERROR);
    assert_eq!(pair.b.process.read(pair.into.0, 2000), [0; 2000]);
}

#[test]
fn peer_refuses_bad_keys_ranges_and_rights() {
    for (access, len) in [(1u32, 8), (5, 8), (15, 4097)] {
        let mut pair = pair(Process::local);
        let (at, key) = pair.b.region(4096, access);
        pair.into = (at, key);
        write(&mut pair, 0, &vec![1; len]);
        assert_eq!(
            pair.sent()[0].1,
            Syndrome::RemoteAccess as u8,
            "{access} {len}"
        );
        assert_eq!(pair.b.process.read(at, 8), [0; 8]);
    }
}

/// Takes the rights in `denied` away from the second end's queue pair.
fn deny(pair: &Pair, denied: u32) {
    let attributes = QpAttributes {
        state: 3,
        access: ALL & !denied,
        ..QpAttributes::default()
    };
    let named = mask::STATE | mask::ACCESS_FLAGS;
    pair.b.modify(&pair.qps[1], &attributes, named).unwrap();
    pair.b.events.take();
}

/// The operation is refused before it takes a receive.
#[test]
fn queue_pair_access_rights_apply_to_writes() {
    for opcode in [WRITE, WRITE_IMM] {
        for len in [0, 8, 10_000] {
            let mut pair = pair(Process::local);
            deny(&pair, REMOTE_WRITE);
            pair.receive(20_000, 8);
            pair.a.process.write(pair.from.0, &pattern(1, 10_000));
            let mut segments = vec![pair.there(0)];
            segments.extend((len > 0).then(|| pair.here(0, len)));
            pair.send(&Work::new(opcode, &segments));
            let case = format!("{opcode:#x}, {len} bytes");
            assert_eq!(pair.sent()[0].1, Syndrome::RemoteInvalReq as u8, "{case}");
            assert!(pair.b.process.read(pair.into.0, 10_000) == [0; 10_000]);
            let received: Vec<_> = pair.received().iter().map(|cqe| cqe.syndrome).collect();
            assert_eq!(received, [Syndrome::WrFlush as u8], "{case}");
            let qpn = pair.qps[1].qpn;
            let events = pair.b.events.take();
            assert!(
                events.contains(&DeviceEvent::QpRequestError { qpn }),
                "{case}: {events:?}"
            );
        }
    }
}

#[test]
fn unreliable_write_without_the_right_of_the_queue_pair_is_dropped() {
    for len in [0, 8] {
        let mut pair = Pair::new(Transport::Uc, 2, Process::local);
        deny(&pair, REMOTE_WRITE);
        pair.receive(100, 8);
        pair.a.process.write(pair.from.0, &[1; 8]);
        let mut segments = vec![pair.there(0)];
        segments.extend((len > 0).then(|| pair.here(0, len)));
        pair.send(&Work::new(WRITE_IMM, &segments));
        assert_eq!(pair.sent(), [(0, 0)]);
        assert!(pair.received().is_empty(), "{len} bytes");
        assert_eq!(pair.b.process.read(pair.into.0, 8), [0; 8]);
    }
}

/// The request may be a late copy of one whose answer has long arrived, so the connection goes on.
#[test]
fn read_that_is_repeated_after_its_right_was_taken_away_gets_no_data() {
    let mut pair = pair(Process::local);
    let read = Work::new(READ, &[pair.there(0), pair.here(0, 8)]);
    pair.send(&read);
    assert_eq!(pair.sent(), [(0, 0)]);
    deny(&pair, REMOTE_READ);
    let path = std::env::temp_dir().join(format!("doorbell-repeated-{}", std::process::id()));
    pair.world.devices[1].lock().set_trace(&path).unwrap();
    let header = Header {
        flags: flag::FIRST | flag::LAST,
        addr: pair.into.0,
        rkey: pair.into.1,
        total_bytes: 8,
        source_lid: pair.world.devices[0].node(),
        ..Header::new(PacketKind::ReadRequest, pair.qps[1].qpn, 0x1000, 0)
    };
    pair.world.devices[1].lock().inject(&header, &[]);
    pair.world.settle();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let sent: Vec<_> = text.lines().filter(|line| line.contains(" TX ")).collect();
    assert!(
        matches!(sent[..], [line] if line.contains("NAK invalid request")),
        "{text}"
    );
    assert_eq!(pair.state(1), READY_TO_SEND);
}

#[test]
fn write_uses_the_key_as_it_is_on_arrival() {
    let mut pair = pair(Process::local);
    let (old, key) = pair.into;
    let (new, _) = pair.b.region(4096, ALL);
    let change = |pair: &Pair, addr: u64, access: Access| {
        let keys = &mut pair.world.devices[1].lock().parts.keys;
        let mut region = keys.region(key).unwrap();
        (region.start.addr, region.access) = (addr, access);
        assert!(keys.change_region(key, &region));
    };
    write(&mut pair, 0, &[1; 8]);
    alone(&mut pair);
    change(&pair, new, Access::ALL);
    assert_eq!(pair.sent()[0].1, 0);
    let bytes = |pair: &Pair, at| pair.b.process.read(at, 8);
    assert_eq!(
        (bytes(&pair, old), bytes(&pair, new)),
        (vec![0; 8], vec![1; 8])
    );
    write(&mut pair, 0, &[2; 8]);
    alone(&mut pair);
    change(&pair, new, Access::LOCAL_WRITE);
    assert_eq!(pair.sent()[0].1, Syndrome::RemoteAccess as u8);
    assert_eq!(bytes(&pair, new), [1; 8]);
}

#[test]
fn memory_that_is_gone_is_a_remote_operation_error() {
    let mut pair = pair(Process::other);
    write(&mut pair, 0, &[1; 8]);
    assert_eq!(pair.sent().len(), 1);
    // A page in the middle.
    pair.b
        .process
        .unmap(pair.into.0.next_multiple_of(4096) + 4096, 4096);
    write(&mut pair, 0, &[1; 16_000]);
    assert_eq!(pair.sent()[0].1, Syndrome::RemoteOp as u8);
    assert_eq!(pair.state(1), ERROR);
}

#[test]
fn nothing_is_written_to_the_memory_of_a_frozen_device() {
    let mut pair = pair(Process::local);
    pair.world.devices[1].set_frozen(true);
    write(&mut pair, 0, &[1; 8]);
    alone(&mut pair);
    assert_eq!(pair.b.process.read(pair.into.0, 8), [0; 8]);
    pair.world.devices[1].set_frozen(false);
    assert_eq!(pair.sent()[0].1, 0);
    assert_eq!(pair.b.process.read(pair.into.0, 8), [1; 8]);
}

#[test]
fn packets_of_several_sequence_numbers_are_counted_as_that_many() {
    for process in PROCESSES {
        // The path's MTU is 1024.
        let mut pair = pair(process);
        for len in [1024usize, 1025, 4096, 4097, 70_000] {
            let (bytes, before) = (pattern(len as u64, len), packets_sent(&pair));
            write(&mut pair, 0, &bytes);
            assert_eq!(pair.sent().len(), 1);
            assert_eq!(pair.b.process.read(pair.into.0, len), bytes);
            let packets = packets_sent(&pair) - before;
            assert_eq!(packets, len.div_ceil(4096) as u64);
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
            write(&mut pair, 0, &bytes);
            assert_eq!(pair.sent(), [(pair.qps[0].posted.wrapping_sub(1), 0)]);
            assert_eq!(pair.b.process.read(pair.into.0, len), bytes);
        }
    }
}
