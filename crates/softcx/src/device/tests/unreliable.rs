//! Unreliable connections: all of a message or nothing of it, and no word about which.

use super::pair::{Pair, ROOM};
use crate::device::Faults;
use crate::device::client::{DeviceEvent, QpAttributes, Transport, mask};
use crate::device::tests::driver::{Process, Work, data, remote};
use crate::device::tests::harness::pattern;
use doorbell_wire::mlx5::{CqeOpcode, Syndrome};

const WRITE: u8 = 0x08;
const WRITE_IMM: u8 = 0x09;
const SEND: u8 = 0x0a;
const SEND_IMM: u8 = 0x0b;
const READ: u8 = 0x10;
const ERROR: u8 = 6;
const SEND_QUEUE_ERROR: u8 = 5;
const READY_TO_SEND: u8 = 3;
const DRAINED: u8 = 4;

#[test]
fn every_operation_of_every_length() {
    for (devices, process) in [
        (1, Process::local as fn(usize) -> Process),
        (2, Process::local),
        (2, Process::other),
    ] {
        let mut pair = Pair::new(Transport::Uc, devices, process);
        for len in [0, 1, 64, 65, 1023, 1024, 1025, 5000, 70_000] {
            for opcode in [SEND, SEND_IMM, WRITE, WRITE_IMM] {
                let bytes = pattern(len as u64 + u64::from(opcode), len);
                pair.a.process.write(pair.from.0, &bytes);
                let takes = opcode != WRITE;
                if takes {
                    pair.receive(0, len);
                }
                let mut segments = vec![pair.here(0, len)];
                if matches!(opcode, WRITE | WRITE_IMM) {
                    segments.insert(0, pair.there(0));
                }
                let imm = u32::from(opcode) << 8;
                pair.send(&Work {
                    imm,
                    ..Work::new(opcode, &segments)
                });
                let sent = pair.sent();
                assert_eq!((sent.len(), sent[0].1), (1, 0), "{opcode:#x} {len}");
                assert_eq!(pair.b.process.read(pair.into.0, len), bytes);
                let received = pair.received();
                assert_eq!(received.len(), usize::from(takes), "{opcode:#x} {len}");
                let Some(cqe) = received.first() else {
                    continue;
                };
                let want = match opcode {
                    SEND => CqeOpcode::RespSend,
                    SEND_IMM => CqeOpcode::RespSendImm,
                    _ => CqeOpcode::RespWriteImm,
                };
                assert_eq!((cqe.opcode, cqe.byte_count), (want, len as u32));
                assert_eq!(cqe.imm, if opcode == SEND { 0 } else { imm });
            }
        }
        assert_eq!(pair.world.devices[0].counters().retransmissions, 0);
    }
}

#[test]
fn the_memory_is_free_when_the_completion_is_there() {
    let mut pair = Pair::new(Transport::Uc, 1, Process::local);
    let delay_ns = 1_000_000;
    pair.world.set_faults(Faults {
        delay_ns,
        ..Faults::default()
    });
    let bytes = pattern(1, 3000);
    pair.a.process.write(pair.from.0, &bytes);
    pair.send(&Work::new(WRITE, &[pair.there(0), pair.here(0, 3000)]));
    pair.world.turn();
    assert!(pair.a.poll(&mut pair.cqs[0]).is_some());
    pair.a.process.write(pair.from.0, &[0xff; 3000]);
    pair.world.settle();
    assert_eq!(pair.b.process.read(pair.into.0, 3000), bytes);
}

#[test]
fn messages_come_whole_or_not_at_all_and_no_receive_is_lost() {
    for seed in 0..30 {
        let mut pair = Pair::new(Transport::Uc, 1 + seed as usize % 2, Process::local);
        pair.world.set_faults(Faults {
            loss: 0.1,
            duplicate: 0.1 * f64::from(u8::from(seed % 3 == 0)),
            reorder: 0.1,
            delay_ns: 1000,
            seed,
            ..Faults::default()
        });
        const LEN: usize = 2500;
        let (mut came, mut posted) = (0, 0);
        for number in 0..60u64 {
            while posted < came + 8 {
                pair.receive(posted % 8 * 4096, 4096);
                posted += 1;
            }
            pair.a.process.write(pair.from.0, &pattern(number, LEN));
            let send = Work {
                imm: number as u32,
                ..Work::new(SEND_IMM, &[pair.here(0, LEN)])
            };
            pair.send(&send);
            assert_eq!(pair.sent().len(), 1);
            for cqe in pair.received() {
                // Receives are used in order, each once.
                assert_eq!(cqe.wqe_counter, came as u16, "seed {seed}");
                assert_eq!((cqe.opcode, cqe.syndrome), (CqeOpcode::RespSendImm, 0));
                let at = pair.into.0 + (came % 8 * 4096) as u64;
                let want = pattern(u64::from(cqe.imm), LEN);
                assert!(pair.b.process.read(at, LEN) == want, "seed {seed}, {came}");
                came += 1;
            }
        }
        assert!((10..60).contains(&came) || seed % 3 == 0, "{came} came");
        assert_eq!(
            (pair.state(0), pair.state(1)),
            (READY_TO_SEND, READY_TO_SEND)
        );
    }
}

#[test]
fn message_without_a_receive_is_dropped() {
    let mut pair = Pair::new(Transport::Uc, 2, Process::local);
    for (opcode, segments) in [
        (SEND, vec![pair.here(0, 3000)]),
        (WRITE_IMM, vec![pair.there(0), pair.here(0, 3000)]),
    ] {
        pair.send(&Work::new(opcode, &segments));
        let sent = pair.sent();
        assert_eq!((sent.len(), sent[0].1), (1, 0));
        assert_eq!(pair.received(), []);
    }
    pair.receive(0, 100);
    pair.send(&Work::new(SEND, &[pair.here(0, 8)]));
    let received = pair.received();
    assert_eq!((received.len(), received[0].byte_count), (1, 8));
    assert_eq!(pair.world.devices[1].counters().rnr_naks, 0);
}

#[test]
fn refused_write_writes_nothing_and_reports_nothing() {
    let mut pair = Pair::new(Transport::Uc, 1, Process::local);
    let outside = remote(pair.into.0 + ROOM as u64 - 100, pair.into.1);
    pair.a.process.write(pair.from.0, &[7; 3000]);
    pair.send(&Work::new(WRITE, &[outside, pair.here(0, 3000)]));
    assert_eq!(pair.sent(), [(0, 0)]);
    let end = pair.into.0 + ROOM as u64 - 100;
    assert_eq!(pair.b.process.read(end, 100), [0; 100]);
    assert_eq!(pair.state(1), READY_TO_SEND);
    assert_eq!(pair.b.events.take(), []);
}

#[test]
fn a_receive_that_is_too_short_fails_its_queue_pair() {
    let mut pair = Pair::new(Transport::Uc, 1, Process::local);
    pair.receive(0, 100);
    pair.receive(0, 100);
    pair.send(&Work::new(SEND, &[pair.here(0, 101)]));
    assert_eq!(pair.sent(), [(0, 0)]);
    let syndromes: Vec<_> = pair.received().iter().map(|cqe| cqe.syndrome).collect();
    assert_eq!(
        syndromes,
        [Syndrome::LocalLength as u8, Syndrome::WrFlush as u8]
    );
    assert_eq!((pair.state(0), pair.state(1)), (READY_TO_SEND, ERROR));
}

#[test]
fn failed_send_queue_flushes_keeps_receiving_and_can_be_restarted() {
    for transport in [Transport::Uc, Transport::Ud] {
        for bad in ["key", "opcode"] {
            let mut pair = Pair::new(transport, 1, Process::local);
            let ud = transport == Transport::Ud;
            let good = |pair: &Pair| {
                let mut segments = vec![pair.here(0, 8)];
                if ud {
                    let to = super::datagrams::address(1, pair.qps[1].qpn, 0x1111);
                    segments.splice(0..0, to);
                }
                Work::new(SEND, &segments)
            };
            let mut wrong = good(&pair);
            match bad {
                "key" => *wrong.segments.last_mut().unwrap() = data(pair.from.0, 0xbad, 8),
                _ => wrong = Work::new(READ, &[pair.there(0), pair.here(0, 8)]),
            }
            let fine = good(&pair);
            pair.a.post(&mut pair.qps[0], &wrong);
            let next = pair.qps[0].posted;
            pair.send(&fine);
            let want = if bad == "key" {
                Syndrome::LocalProt
            } else {
                Syndrome::LocalQpOp
            };
            assert_eq!(
                pair.sent(),
                [(0, want as u8), (next, Syndrome::WrFlush as u8)]
            );
            assert_eq!(pair.state(0), SEND_QUEUE_ERROR);
            // What is posted meanwhile is flushed, too.
            let next = pair.qps[0].posted;
            pair.send(&fine);
            assert_eq!(pair.sent(), [(next, Syndrome::WrFlush as u8)]);
            // Its receives go on.
            let (at, key) = pair.from;
            let segment = data(at + 4096, key, 100);
            pair.a.post_recv(&mut pair.qps[0], &[segment]);
            let mut back = vec![data(pair.into.0, pair.into.1, 8)];
            if ud {
                back.splice(0..0, super::datagrams::address(1, pair.qps[0].qpn, 0x1111));
            }
            pair.b.send(&mut pair.qps[1], &Work::new(SEND, &back));
            pair.world.settle();
            let cqe = pair.a.poll(&mut pair.cqs[0]).unwrap();
            assert_eq!((cqe.opcode, cqe.syndrome), (CqeOpcode::RespSend, 0));
            let _ = pair.received();

            pair.a.to_state(&pair.qps[0], READY_TO_SEND).unwrap();
            pair.receive(0, 100);
            let next = pair.qps[0].posted;
            pair.send(&good(&pair));
            assert_eq!(pair.sent(), [(next, 0)]);
            assert_eq!(pair.received().len(), 1, "{transport:?} {bad}");
        }
    }
}

/// The kernel's driver has no command for it (`optab` of `__mlx5_ib_modify_qp`), though the core's table has the transition.
#[test]
fn send_queue_cannot_be_drained() {
    const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        let mut pair = Pair::new(transport, 1, Process::local);
        for named in [0, EN_SQD_ASYNC_NOTIFY] {
            let attributes = QpAttributes {
                state: DRAINED,
                ..QpAttributes::default()
            };
            let refused = pair
                .a
                .modify(&pair.qps[0], &attributes, mask::STATE | named);
            assert_eq!(refused, Err(libc::EINVAL), "{transport:?}");
        }
        assert_eq!(pair.state(0), READY_TO_SEND);
        if transport != Transport::Ud {
            pair.send(&Work::new(WRITE, &[pair.there(0), pair.here(0, 8)]));
            assert_eq!(pair.sent(), [(0, 0)]);
        }
    }
}

#[test]
fn first_packet_before_ready_to_send_is_reported() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut pair = Pair::new(transport, 1, Process::local);
        let qp = pair.b.qp(transport, [&pair.cqs[1], &pair.cqs[1]]);
        pair.b.init(&qp);
        pair.b.to_rtr(&qp, pair.qps[0].qpn);
        let mut other = pair.a.qp(transport, [&pair.cqs[0], &pair.cqs[0]]);
        pair.a.connect(&other, qp.qpn);
        for _ in 0..2 {
            let write = Work::new(WRITE, &[pair.there(0), pair.here(0, 8)]);
            pair.a.send(&mut other, &write);
            assert_eq!(pair.sent().len(), 1);
        }
        let qpn = qp.qpn;
        assert_eq!(
            pair.b.events.take(),
            [DeviceEvent::CommunicationEstablished { qpn }]
        );
    }
}
