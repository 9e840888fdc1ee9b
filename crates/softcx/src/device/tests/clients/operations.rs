//! Work requests of clients: rings, doorbells and what they move.

use super::{FETCH_ADD, Pair, READ, SEND, SEND_IMM, WRITE, each_kind};
use crate::device::client::Transport;
use crate::device::tests::driver::{ALL, Process, Work, data, remote};
use doorbell_wire::mlx5::{CqeOpcode, Syndrome};

#[test]
fn every_operation_between_processes() {
    each_kind(|process| {
        let mut pair = Pair::new(process);
        let (from, lkey) = pair.a.region(1 << 20, ALL);
        let (into, rkey) = pair.b.region(1 << 20, ALL);
        let bytes: Vec<u8> = (0..1 << 18)
            .map(|i: u32| (i * 7 + (i >> 8)) as u8)
            .collect();
        pair.a.process.write(from, &bytes);
        let long = bytes.len() as u32;
        let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, long)]);
        pair.a.send(&mut pair.qps[0], &write);
        assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 0)]);
        assert_eq!(pair.b.process.read(into, bytes.len()), bytes);

        let back = from + (1 << 19);
        let read = Work::new(READ, &[remote(into + 5, rkey), data(back, lkey, 70_000)]);
        pair.a.send(&mut pair.qps[0], &read);
        assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 1)]);
        assert_eq!(pair.a.process.read(back, 70_000), bytes[5..70_005]);

        let counter = into + (1 << 19);
        pair.b.process.write(counter, &41u64.to_ne_bytes());
        let mut operands = [0; 16];
        operands[..8].copy_from_slice(&1u64.to_be_bytes());
        let add = [remote(counter, rkey), operands, data(back, lkey, 8)];
        pair.a.send(&mut pair.qps[0], &Work::new(FETCH_ADD, &add));
        assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 2)]);
        assert_eq!(pair.a.process.read(back, 8), 41u64.to_ne_bytes());
        assert_eq!(pair.b.process.read(counter, 8), 42u64.to_ne_bytes());

        pair.b.post_recv(
            &mut pair.qps[1],
            &[data(into, rkey, 9), data(into + 100, rkey, 9000)],
        );
        let send = Work {
            imm: 0x0102_0304,
            ..Work::new(SEND_IMM, &[data(from + 3, lkey, 5000)])
        };
        pair.a.send(&mut pair.qps[0], &send);
        assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 3)]);
        let cqe = pair.b.poll(&mut pair.cqs[1]).unwrap();
        assert_eq!((cqe.opcode, cqe.imm), (CqeOpcode::RespSendImm, 0x0102_0304));
        assert_eq!((cqe.byte_count, cqe.wqe_counter), (5000, 0));
        assert_eq!(cqe.srqn_uidx, pair.qps[1].parts.user_index);
        assert_eq!(pair.b.process.read(into, 9), bytes[3..12]);
        assert_eq!(pair.b.process.read(into + 100, 4991), bytes[12..5003]);
        assert_eq!(pair.a.events.take(), []);
    });
}

#[test]
fn rings_and_counts_wrap() {
    each_kind(|process| {
        let mut pair = Pair::sized(process, 16);
        let (from, lkey) = pair.a.region(64, ALL);
        let (into, rkey) = pair.b.region(64, ALL);
        for round in 0..2000u32 {
            let bytes = round.to_ne_bytes();
            pair.a.process.write(from, &bytes);
            // Three segments are two blocks now and then.
            let mut segments = vec![remote(into, rkey), data(from, lkey, 4)];
            segments.resize(2 + round as usize % 3, data(from, lkey, 0));
            pair.a.send(&mut pair.qps[0], &Work::new(WRITE, &segments));
            let sent = pair.sent();
            assert_eq!(sent.len(), 1, "round {round}");
            assert_eq!(sent[0].0, CqeOpcode::Req);
            assert_eq!(pair.b.process.read(into, 4), bytes);
        }
        for round in 0..200u32 {
            pair.b.post_recv(&mut pair.qps[1], &[data(into, rkey, 8)]);
            pair.a
                .send(&mut pair.qps[0], &Work::new(SEND, &[data(from, lkey, 8)]));
            assert_eq!(pair.sent().len(), 1);
            let cqe = pair.b.poll(&mut pair.cqs[1]).unwrap();
            assert_eq!(u32::from(cqe.wqe_counter), round);
        }
    });
}

#[test]
fn one_page_takes_doorbells_of_all_its_queue_pairs() {
    let mut pair = Pair::new(Process::other);
    let (from, lkey) = pair.a.region(64, ALL);
    let (into, rkey) = pair.b.region(1024, ALL);
    let cq = pair.a.cq(64, 128);
    let others: Vec<_> = (0..10)
        .map(|_| {
            let qp = pair.a.qp(Transport::Rc, [&cq, &cq]);
            let peer = pair.b.qp(Transport::Rc, [&pair.cqs[1], &pair.cqs[1]]);
            pair.a.connect(&qp, peer.qpn);
            pair.b.connect(&peer, qp.qpn);
            qp
        })
        .collect();
    let mut others = others;
    pair.a.process.write(from, &[7; 8]);
    // Each overwrites the doorbell of the one before.
    for (at, qp) in others.iter_mut().enumerate() {
        let segments = [remote(into + at as u64 * 8, rkey), data(from, lkey, 8)];
        qp.register = 0x800 + 0x100 * (at as u64 % 2);
        pair.a.send(qp, &Work::new(WRITE, &segments));
    }
    pair.world.settle();
    let mut cq = cq;
    let mut seen: Vec<_> = std::iter::from_fn(|| pair.a.poll(&mut cq))
        .map(|cqe| cqe.srqn_uidx)
        .collect();
    seen.sort_unstable();
    let expected: Vec<_> = others.iter().map(|qp| qp.parts.user_index).collect();
    assert_eq!(seen, expected);
    assert_eq!(pair.b.process.read(into, 80), [7; 80]);
    assert_eq!(pair.a.client.free_uar(pair.a.uar), Err(libc::EBUSY));
}

#[test]
fn a_blueflame_copy_is_one_doorbell() {
    let mut pair = Pair::new(Process::local);
    let (from, lkey) = pair.a.region(64, ALL);
    let (into, rkey) = pair.b.region(64, ALL);
    pair.a.process.write(from, &[9; 8]);
    let work = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
    let doorbell = pair.a.post(&mut pair.qps[0], &work);
    let wqe = pair.a.process.read(pair.qps[0].parts.send_ring, 64);
    let before = pair.world.devices[0].counters();
    pair.a.process.write(pair.a.page + 0x908, &wqe[8..]);
    pair.a.process.ring(pair.a.page + 0x900, doorbell);
    assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 0)]);
    let after = pair.world.devices[0].counters();
    assert_eq!(after.doorbells - before.doorbells, 1);
    assert_eq!(after.wqes - before.wqes, 1);
}

#[test]
fn a_reset_queue_pair_starts_again() {
    each_kind(|process| {
        let mut pair = Pair::new(process);
        let (from, lkey) = pair.a.region(64, ALL);
        let (into, rkey) = pair.b.region(64, ALL);
        let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
        for round in 0..5 {
            for _ in 0..=round {
                pair.a.send(&mut pair.qps[0], &write);
            }
            assert_eq!(pair.sent().len(), round + 1);
            // From the error state, too, which flushes what is posted then.
            if round % 2 == 1 {
                pair.a.to_state(&pair.qps[0], 6).unwrap();
                pair.a.send(&mut pair.qps[0], &write);
                let flushed = pair.sent();
                assert_eq!(flushed.len(), 1);
                assert_eq!(flushed[0].1, Syndrome::WrFlush as u8);
            }
            pair.a.to_state(&pair.qps[0], 0).unwrap();
            pair.b.to_state(&pair.qps[1], 0).unwrap();
            assert_eq!(pair.a.state(&pair.qps[0]), 0);
            let qp = &mut pair.qps[0];
            (qp.posted, qp.received) = (0, 0);
            pair.a.process.store(qp.parts.record, 0);
            pair.a.process.store(qp.parts.record + 4, 0);
            pair.a.connect(&pair.qps[0], pair.qps[1].qpn);
            pair.b.connect(&pair.qps[1], pair.qps[0].qpn);
        }
    });
}

#[test]
fn doorbell_before_reset_has_no_effect_after_it() {
    let mut pair = Pair::new(Process::other);
    let (from, lkey) = pair.a.region(64, ALL);
    let (into, rkey) = pair.b.region(64, ALL);
    let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
    for _ in 0..3 {
        pair.a.send(&mut pair.qps[0], &write);
    }
    // No turn comes between.
    pair.a.to_state(&pair.qps[0], 0).unwrap();
    pair.qps[0].posted = 0;
    pair.a.process.store(pair.qps[0].parts.record + 4, 0);
    pair.a.connect(&pair.qps[0], pair.qps[1].qpn);
    assert_eq!(pair.sent(), []);
    assert_eq!(pair.a.state(&pair.qps[0]), 3);
    pair.a.send(&mut pair.qps[0], &write);
    assert_eq!(pair.sent(), [(CqeOpcode::Req, 0, 0)]);
}
