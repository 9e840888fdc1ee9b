//! Clients of the device: what a kernel driver's processes may do, and what they cannot do to others.

use crate::mlx5::{CqeOpcode, Syndrome};
use crate::soft::client::{
    CqParts, Event, MrChange, MrRange, QpAttributes, QpParts, SrqParts, Transport, mask,
};
use crate::soft::driver::{
    ALL, Driver, DriverCq, DriverQp, DriverSrq, Process, Work, data, remote,
};
use crate::soft::gather::Gather;
use crate::soft::harness::World;

const WRITE: u8 = 0x08;
const SEND: u8 = 0x0a;
const SEND_IMM: u8 = 0x0b;
const READ: u8 = 0x10;
const FETCH_ADD: u8 = 0x12;
const MEMORY: usize = 4 << 20;

fn each_kind(test: impl Fn(fn(usize) -> Process)) {
    test(Process::local);
    test(Process::other);
}

/// Two clients, each with a queue pair that is connected to the other's.
struct Pair {
    world: World,
    a: Driver,
    b: Driver,
    qps: [DriverQp; 2],
    cqs: [DriverCq; 2],
}

impl Pair {
    fn new(process: fn(usize) -> Process) -> Pair {
        Pair::sized(process, 64)
    }

    fn sized(process: fn(usize) -> Process, cqes: u32) -> Pair {
        let world = World::new(1);
        let mut a = Driver::new(&world.devices[0], process(MEMORY));
        let mut b = Driver::new(&world.devices[0], process(MEMORY));
        let cqs = [a.cq(cqes, 64), b.cq(cqes, 64)];
        let qp_a = a.qp(Transport::Rc, [&cqs[0], &cqs[0]]);
        let qp_b = b.qp(Transport::Rc, [&cqs[1], &cqs[1]]);
        a.connect(&qp_a, qp_b.qpn);
        b.connect(&qp_b, qp_a.qpn);
        Pair {
            world,
            a,
            b,
            qps: [qp_a, qp_b],
            cqs,
        }
    }

    /// Runs until nothing happens, and gives what the first one's queue got.
    fn sent(&mut self) -> Vec<(CqeOpcode, u8, u16)> {
        self.world.settle();
        std::iter::from_fn(|| self.a.poll(&mut self.cqs[0]))
            .map(|cqe| (cqe.opcode, cqe.syndrome, cqe.wqe_counter))
            .collect()
    }
}

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
        assert_eq!(pair.a.heard.take(), []);
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
fn a_page_rings_for_all_its_queue_pairs() {
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
fn arms_fire_once_and_never_late() {
    each_kind(|process| {
        let mut pair = Pair::new(process);
        let (from, lkey) = pair.a.region(64, ALL);
        let (into, rkey) = pair.b.region(64, ALL);
        let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
        pair.a.send(&mut pair.qps[0], &write);
        assert_eq!(pair.sent().len(), 1);
        assert_eq!(Driver::events(&mut pair.cqs[0]), 0, "not armed");

        // Nothing is there: the next completion fires, the one after it does not.
        pair.a.arm(&pair.cqs[0], false);
        pair.world.settle();
        assert_eq!(Driver::events(&mut pair.cqs[0]), 0);
        for _ in 0..2 {
            pair.a.send(&mut pair.qps[0], &write);
            pair.world.settle();
        }
        assert_eq!(Driver::events(&mut pair.cqs[0]), 1);

        // Two have come already: fires at once.
        pair.a.arm(&pair.cqs[0], false);
        pair.world.settle();
        assert_eq!(Driver::events(&mut pair.cqs[0]), 1);
        assert_eq!(pair.sent().len(), 2);

        // An arm and a completion in one look of the device, whichever comes first.
        for _ in 0..100 {
            pair.a.send(&mut pair.qps[0], &write);
            pair.a.arm(&pair.cqs[0], false);
            pair.world.settle();
            assert_eq!(Driver::events(&mut pair.cqs[0]), 1);
            assert_eq!(pair.sent().len(), 1);
        }
    });
}

#[test]
fn the_first_arm_of_a_fresh_queue_is_seen() {
    let mut pair = Pair::new(Process::other);
    let (from, lkey) = pair.a.region(64, ALL);
    let (into, rkey) = pair.b.region(64, ALL);
    assert_eq!(pair.a.process.word(pair.cqs[0].record + 4), u32::MAX);
    // Its word is 0, and so is the register's upper half.
    pair.a.arm(&pair.cqs[0], false);
    pair.world.settle();
    let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
    pair.a.send(&mut pair.qps[0], &write);
    pair.world.settle();
    assert_eq!(Driver::events(&mut pair.cqs[0]), 1);
}

#[test]
fn arms_of_several_queues_share_a_register() {
    let mut pair = Pair::new(Process::local);
    let mut cqs: Vec<_> = (0..5).map(|_| pair.b.cq(16, 64)).collect();
    let (from, lkey) = pair.a.region(64, ALL);
    let mut qps = Vec::new();
    for cq in &cqs {
        let own = pair.a.qp(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
        let mut peer = pair.b.qp(Transport::Rc, [cq, cq]);
        pair.a.connect(&own, peer.qpn);
        pair.b.connect(&peer, own.qpn);
        pair.b.post_recv(&mut peer, &[]);
        qps.push(own);
    }
    for cq in &cqs {
        pair.b.arm(cq, false);
    }
    for qp in &mut qps {
        pair.a.send(qp, &Work::new(SEND, &[data(from, lkey, 0)]));
    }
    pair.world.settle();
    for cq in &mut cqs {
        assert_eq!(Driver::events(cq), 1);
    }
}

#[test]
fn solicited_arms_wait_for_solicited_completions_and_errors() {
    let mut pair = Pair::new(Process::other);
    let (from, lkey) = pair.a.region(64, ALL);
    for _ in 0..8 {
        pair.b.post_recv(&mut pair.qps[1], &[]);
    }
    let plain = Work::new(SEND, &[data(from, lkey, 0)]);
    let solicited = Work {
        flags: 8 | 2,
        ..Work::new(SEND, &[data(from, lkey, 0)])
    };
    pair.b.arm(&pair.cqs[1], true);
    pair.a.send(&mut pair.qps[0], &plain);
    pair.world.settle();
    assert_eq!(Driver::events(&mut pair.cqs[1]), 0);
    pair.a.send(&mut pair.qps[0], &solicited);
    pair.world.settle();
    assert_eq!(Driver::events(&mut pair.cqs[1]), 1);
    // The solicited one is still there: at once.
    pair.b.arm(&pair.cqs[1], true);
    pair.world.settle();
    assert_eq!(Driver::events(&mut pair.cqs[1]), 1);
    while pair.b.poll(&mut pair.cqs[1]).is_some() {}
    pair.b.arm(&pair.cqs[1], true);
    pair.a.send(&mut pair.qps[0], &plain);
    pair.world.settle();
    assert_eq!(
        Driver::events(&mut pair.cqs[1]),
        0,
        "what was consumed is no reason"
    );
    pair.b.to_state(&pair.qps[1], 6).unwrap();
    pair.world.settle();
    assert_eq!(Driver::events(&mut pair.cqs[1]), 1, "flushed in error");
}

#[test]
fn a_full_queue_fails_everybody_who_completes_to_it() {
    each_kind(|process| {
        let mut pair = Pair::sized(process, 4);
        let bystander = pair.a.qp(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
        let peer = pair.b.qp(Transport::Rc, [&pair.cqs[1], &pair.cqs[1]]);
        pair.a.connect(&bystander, peer.qpn);
        pair.b.connect(&peer, bystander.qpn);
        let (from, lkey) = pair.a.region(64, ALL);
        let (into, rkey) = pair.b.region(64, ALL);
        let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
        for _ in 0..4 {
            pair.a.send(&mut pair.qps[0], &write);
        }
        pair.world.settle();
        assert_eq!(pair.a.state(&pair.qps[0]), 3);
        assert_eq!(pair.a.heard.take(), []);
        pair.a.send(&mut pair.qps[0], &write);
        pair.world.settle();
        assert_eq!(pair.a.state(&pair.qps[0]), 6);
        assert_eq!(pair.a.state(&bystander), 6);
        let events = pair.a.heard.take();
        let failed = |qpn| Event::QpFatal { qpn };
        assert!(events.contains(&Event::CqError {
            cqn: pair.cqs[0].cqn
        }));
        assert!(
            events.contains(&failed(pair.qps[0].qpn)) && events.contains(&failed(bystander.qpn))
        );
        assert_eq!(events.len(), 3, "{events:?}");
        // What had come before is there.
        assert_eq!(
            std::iter::from_fn(|| pair.a.poll(&mut pair.cqs[0])).count(),
            4
        );
    });
}

/// As libmlx5 does it: everything up to the mark moves one place on in the new ring.
fn resize(driver: &mut Driver, cq: &mut DriverCq, cqes: u32, cqe_bytes: u32) {
    let ring = driver.cq_ring(cqes, cqe_bytes);
    driver
        .client
        .resize_cq(cq.cqn, ring, cqes, cqe_bytes)
        .unwrap();
    let mut new = DriverCq {
        ring,
        cqes,
        cqe_bytes,
        heard: cq.heard.clone(),
        ..*cq
    };
    let mut at = cq.consumed;
    loop {
        let mut bytes = driver.process.read(driver.cqe_at(cq, at), 64);
        assert_eq!(
            bytes[63] & 1 != 0,
            at & cq.cqes != 0,
            "the device has written it"
        );
        if bytes[63] >> 4 == 5 {
            break;
        }
        at = at.wrapping_add(1);
        bytes[63] = bytes[63] & !1 | u8::from(at & cqes != 0);
        let into = driver.cqe_at(&new, at);
        driver.process.write(into, &bytes);
    }
    new.consumed = cq.consumed.wrapping_add(1);
    driver.process.store(new.record, new.consumed & 0xff_ffff);
    *cq = new;
}

#[test]
fn a_resized_queue_loses_nothing() {
    let mut pair = Pair::sized(Process::other, 16);
    let (from, lkey) = pair.a.region(64, ALL);
    let (into, rkey) = pair.b.region(64, ALL);
    let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
    let mut sent = 0u16;
    for (cqes, cqe_bytes) in [(64, 64), (32, 128), (16, 64), (128, 128), (16, 128)] {
        for _ in 0..11 {
            pair.a.send(&mut pair.qps[0], &write);
        }
        pair.world.settle();
        resize(&mut pair.a, &mut pair.cqs[0], cqes, cqe_bytes);
        for _ in 0..3 {
            pair.a.send(&mut pair.qps[0], &write);
        }
        let counters: Vec<_> = pair.sent().iter().map(|cqe| cqe.2).collect();
        assert_eq!(counters, (sent..sent + 14).collect::<Vec<_>>());
        sent += 14;
    }
    for _ in 0..9 {
        pair.a.send(&mut pair.qps[0], &write);
    }
    pair.world.settle();
    let ring = pair.a.cq_ring(8, 64);
    let cqn = pair.cqs[0].cqn;
    assert_eq!(pair.a.client.resize_cq(cqn, ring, 8, 64), Err(libc::EINVAL));
    assert_eq!(pair.sent().len(), 9);
}

#[test]
fn regions_of_every_kind() {
    each_kind(|process| {
        let mut pair = Pair::new(process);
        let (from, lkey) = pair.a.region(4096, ALL);
        let start = pair.b.process.place(8192, 4096);
        let client = &pair.b.client;
        let range = |start, len_bytes, iova| MrRange {
            start,
            len_bytes,
            iova,
        };
        let pd = pair.b.pd;
        let far = 0x7000_0000_0000;
        let rkey = client.reg_mr(pd, range(start, 4096, far), ALL).unwrap();
        let zero = client
            .reg_mr(pd, range(start + 3, 100, start + 3), ALL | 1 << 5)
            .unwrap();
        assert_eq!(
            client.reg_mr(pd, range(start, 0, start), 1),
            Err(libc::EINVAL)
        );
        assert_eq!(
            client.reg_mr(pd, range(start, 64, start), 2),
            Err(libc::EINVAL)
        );
        assert_eq!(
            client.reg_mr(pd, range(start, 64, start), 1 << 6),
            Err(libc::EOPNOTSUPP)
        );
        assert_eq!(
            client.reg_mr(pd, range(1 << 12, 64, 0), 1),
            Err(libc::EFAULT)
        );
        assert_eq!(
            client.reg_mr(pd, range(start, 1 << 40, 0), 1),
            Err(libc::EFAULT)
        );
        assert_eq!(
            client.reg_mr(pd, range(u64::MAX, 2, 0), 1),
            Err(libc::EINVAL)
        );
        assert_eq!(
            client.reg_mr(pd, range(start, 64, start + 8), 1),
            Err(libc::EINVAL)
        );
        assert_eq!(
            client.reg_mr(99_999, range(start, 64, start), 1),
            Err(libc::EINVAL)
        );
        assert!(client.reg_mr(pd, range(start, 64, start), 1 << 20).is_ok());

        pair.a.process.write(from, b"first second");
        let write = |pair: &mut Pair, addr, key, at, len| {
            let segments = [remote(addr, key), data(from + at, lkey, len)];
            pair.a.send(&mut pair.qps[0], &Work::new(WRITE, &segments));
            pair.sent().first().map(|cqe| cqe.1)
        };
        assert_eq!(write(&mut pair, far + 4091, rkey, 0, 5), Some(0));
        assert_eq!(pair.b.process.read(start + 4091, 5), b"first");
        assert_eq!(write(&mut pair, 94, zero, 6, 6), Some(0));
        assert_eq!(pair.b.process.read(start + 97, 6), b"second");

        let change = MrChange {
            range: Some(range(start + 4096, 64, 0x1000)),
            ..MrChange::default()
        };
        let rkey = pair.b.client.rereg_mr(rkey, change).unwrap();
        assert_eq!(write(&mut pair, 0x1000, rkey, 0, 5), Some(0));
        assert_eq!(pair.b.process.read(start + 4096, 5), b"first");
        let bad = MrChange {
            range: Some(range(1 << 12, 64, 0)),
            ..MrChange::default()
        };
        assert_eq!(pair.b.client.rereg_mr(rkey, bad), Err(libc::EFAULT));
        assert_eq!(write(&mut pair, 0x1000, rkey, 6, 6), Some(0), "as it was");
        let other = pair.b.client.alloc_pd().unwrap();
        let moved = MrChange {
            pd: Some(other),
            ..MrChange::default()
        };
        assert_eq!(pair.b.client.rereg_mr(rkey, moved), Ok(rkey));
        assert_eq!(pair.b.client.dealloc_pd(other), Err(libc::EBUSY));
        let back = MrChange {
            pd: Some(pd),
            access: Some(1),
            ..MrChange::default()
        };
        assert_eq!(pair.b.client.rereg_mr(rkey, back), Ok(rkey));
        assert_eq!(pair.b.client.dealloc_pd(other), Ok(()));
        let refused = write(&mut pair, 0x1000, rkey, 0, 5);
        assert_eq!(
            refused,
            Some(Syndrome::RemoteAccess as u8),
            "no remote rights"
        );
        assert_eq!(pair.b.client.dereg_mr(rkey), Ok(()));
        assert_eq!(pair.b.client.dereg_mr(rkey), Err(libc::EINVAL));
    });
}

#[test]
fn nothing_of_another_client_can_be_named() {
    let mut pair = Pair::new(Process::local);
    let (_, key) = pair.a.region(64, ALL);
    let thief = &pair.b.client;
    let (start, _) = pair.a.region(64, ALL);
    let range = MrRange {
        start,
        len_bytes: 64,
        iova: start,
    };
    assert_eq!(thief.reg_mr(pair.a.pd, range, 1), Err(libc::EINVAL));
    assert_eq!(thief.dereg_mr(key), Err(libc::EINVAL));
    assert_eq!(thief.rereg_mr(key, MrChange::default()), Err(libc::EINVAL));
    assert_eq!(thief.alloc_mw(pair.a.pd, 1), Err(libc::EINVAL));
    assert_eq!(thief.dealloc_mw(key), Err(libc::EINVAL));
    assert_eq!(thief.dealloc_pd(pair.a.pd), Err(libc::EINVAL));
    assert_eq!(thief.free_uar(pair.a.uar), Err(libc::EINVAL));
    assert_eq!(thief.destroy_cq(pair.cqs[0].cqn), Err(libc::EINVAL));
    assert_eq!(thief.modify_cq(pair.cqs[0].cqn, 1, 1), Err(libc::EINVAL));
    assert_eq!(thief.destroy_qp(pair.qps[0].qpn), Err(libc::EINVAL));
    assert_eq!(thief.query_qp(pair.qps[0].qpn), Err(libc::EINVAL));
    assert_eq!(pair.b.to_state(&pair.qps[0], 6), Err(libc::EINVAL));
    let srq = pair.a.srq(16, 0);
    let thief = &pair.b.client;
    assert_eq!(thief.destroy_srq(srq.srqn), Err(libc::EINVAL));
    assert_eq!(thief.srq_limit(srq.srqn), Err(libc::EINVAL));
    let mut parts = pair.b.qp_parts(Transport::Rc, [&pair.cqs[1], &pair.cqs[1]]);
    for change in 0..4 {
        let good = parts;
        match change {
            0 => parts.pd = pair.a.pd,
            1 => parts.send_cq = pair.cqs[0].cqn,
            2 => parts.uar = pair.a.uar,
            _ => (parts.srq, parts.recv_wqes) = (Some(srq.srqn), 0),
        }
        assert_eq!(
            pair.b.client.create_qp(&parts),
            Err(libc::EINVAL),
            "{change}"
        );
        parts = good;
    }
    let qp = pair.b.client.create_qp(&parts).unwrap();
    assert_eq!(pair.b.client.destroy_qp(qp), Ok(()));
}

#[test]
fn what_is_in_use_is_not_taken_away() {
    let mut pair = Pair::new(Process::local);
    let client = &pair.a.client;
    assert_eq!(client.destroy_cq(pair.cqs[0].cqn), Err(libc::EBUSY));
    assert_eq!(client.dealloc_pd(pair.a.pd), Err(libc::EBUSY));
    let srq = pair.a.srq(16, 0);
    let mut parts = pair.a.qp_parts(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
    (parts.srq, parts.recv_wqes) = (Some(srq.srqn), 0);
    let with_srq = pair.a.qp_of(parts);
    let client = &pair.a.client;
    assert_eq!(client.destroy_srq(srq.srqn), Err(libc::EBUSY));
    assert_eq!(client.destroy_qp(with_srq.qpn), Ok(()));
    assert_eq!(client.destroy_srq(srq.srqn), Ok(()));
    assert_eq!(client.destroy_qp(pair.qps[0].qpn), Ok(()));
    assert_eq!(client.destroy_cq(pair.cqs[0].cqn), Ok(()));
    assert_eq!(client.free_uar(pair.a.uar), Ok(()));
    assert_eq!(client.dealloc_pd(pair.a.pd), Ok(()));
    assert_eq!(client.dealloc_pd(pair.a.pd), Err(libc::EINVAL));
}

#[test]
fn hostile_parts_are_refused() {
    each_kind(|process| {
        let world = World::new(1);
        let mut driver = Driver::new(&world.devices[0], process(MEMORY));
        let cq = driver.cq(16, 64);
        let good = driver.qp_parts(Transport::Rc, [&cq, &cq]);
        let mut refused = Vec::new();
        for send_wqebbs in [3, 65536, 1 << 31, u32::MAX] {
            refused.push((
                libc::EINVAL,
                QpParts {
                    send_wqebbs,
                    ..good
                },
            ));
        }
        for recv_wqes in [3, 65536, 1 << 31, u32::MAX] {
            refused.push((libc::EINVAL, QpParts { recv_wqes, ..good }));
        }
        for recv_stride_bytes in [0, 1, 8, 48, 2048, 1 << 31, u32::MAX] {
            let parts = QpParts {
                recv_stride_bytes,
                ..good
            };
            refused.push((libc::EINVAL, parts));
        }
        for addr in [0, 64, 1 << 46, u64::MAX - 63, u64::MAX << 12] {
            let errno = libc::EFAULT;
            refused.push((
                errno,
                QpParts {
                    send_ring: addr,
                    ..good
                },
            ));
            refused.push((
                errno,
                QpParts {
                    recv_ring: addr,
                    ..good
                },
            ));
            refused.push((
                errno,
                QpParts {
                    record: addr,
                    ..good
                },
            ));
        }
        for addr in [1, good.send_ring + 4, u64::MAX] {
            refused.push((
                libc::EINVAL,
                QpParts {
                    send_ring: addr,
                    ..good
                },
            ));
        }
        for (errno, parts) in refused {
            assert_eq!(driver.client.create_qp(&parts), Err(errno), "{parts:?}");
        }
        let (good, _) = driver.cq_parts(16, 64);
        for (cqes, cqe_bytes) in [
            (0, 64),
            (3, 64),
            (1 << 23, 64),
            (u32::MAX, 128),
            (16, 32),
            (16, 0),
        ] {
            let parts = CqParts {
                cqes,
                cqe_bytes,
                ..good.clone()
            };
            assert_eq!(driver.client.create_cq(parts), Err(libc::EINVAL));
            let resized = driver.client.resize_cq(cq.cqn, good.ring, cqes, cqe_bytes);
            assert_eq!(resized, Err(libc::EINVAL));
        }
        for addr in [0, 1 << 46, !63] {
            let parts = CqParts {
                ring: addr,
                ..good.clone()
            };
            assert_eq!(driver.client.create_cq(parts), Err(libc::EFAULT));
            let parts = CqParts {
                record: addr,
                ..good.clone()
            };
            assert_eq!(driver.client.create_cq(parts), Err(libc::EFAULT));
        }
        let srq = driver.srq(16, 0);
        for (wqes, stride_bytes) in [(0, 64), (5, 64), (1 << 16, 64), (16, 16), (16, 4096)] {
            let parts = SrqParts {
                wqes,
                stride_bytes,
                ..srq.parts
            };
            assert_eq!(driver.client.create_srq(parts), Err(libc::EINVAL));
        }
        let parts = SrqParts {
            ring: 1 << 46,
            ..srq.parts
        };
        assert_eq!(driver.client.create_srq(parts), Err(libc::EFAULT));
    });
}

#[test]
fn garbage_in_rings_and_records_harms_its_owner_only() {
    each_kind(|process| {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u32
        };
        for _ in 0..40 {
            let mut pair = Pair::new(process);
            let (from, lkey) = pair.a.region(64, ALL);
            let (into, rkey) = pair.b.region(64, ALL);
            let mut noise = pair.a.qp(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
            let parts = noise.parts;
            pair.a.connect(&noise, pair.qps[1].qpn);
            for at in (0..64 * 64).step_by(4) {
                pair.a
                    .process
                    .write(parts.send_ring + at, &random().to_ne_bytes());
                pair.a
                    .process
                    .write(parts.recv_ring + at, &random().to_ne_bytes());
            }
            noise.posted = random() as u16;
            pair.a.send(
                &mut noise,
                &Work::new(random() as u8, &[data(from, lkey, 8)]),
            );
            pair.a.process.store(parts.record, random());
            pair.a.process.store(parts.record + 4, random() % 70);
            pair.world.settle();
            let _ = pair.a.to_state(&noise, 6);
            pair.world.settle();
            while pair.a.poll(&mut pair.cqs[0]).is_some() {}
            if pair
                .a
                .heard
                .take()
                .iter()
                .any(|event| matches!(event, Event::CqError { .. }))
            {
                continue;
            }
            let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 8)]);
            pair.a.send(&mut pair.qps[0], &write);
            assert_eq!(pair.sent().len(), 1);
        }
    });
}

#[test]
fn a_dead_process_hurts_nobody() {
    for when in 0..3 {
        let mut pair = Pair::new(Process::other);
        let (from, lkey) = pair.a.region(1 << 20, ALL);
        let (into, rkey) = pair.b.region(1 << 20, ALL);
        pair.b
            .post_recv(&mut pair.qps[1], &[data(into, rkey, 4096)]);
        let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 1 << 20)]);
        for _ in 0..4 {
            pair.a.send(&mut pair.qps[0], &write);
            pair.b.send(
                &mut pair.qps[1],
                &Work::new(WRITE, &[remote(from, lkey), data(into, rkey, 1 << 20)]),
            );
        }
        pair.a.send(
            &mut pair.qps[0],
            &Work::new(SEND, &[data(from, lkey, 4096)]),
        );
        for _ in 0..when * 3 {
            pair.world.turn();
        }
        pair.b.process.kill();
        let sent = pair.sent();
        let failed = sent.iter().filter(|cqe| cqe.0 == CqeOpcode::ReqErr).count();
        assert!(failed > 0, "{when}: {sent:?}");
        assert_eq!(pair.a.state(&pair.qps[0]), 6);
        // The living one goes on with others, and the dead one's things can be put away.
        pair.b.client.destroy_qp(pair.qps[1].qpn).unwrap();
        let (parts, _) = pair.b.cq_parts(16, 64);
        assert_eq!(pair.b.client.create_cq(parts), Err(libc::EFAULT));
        drop(pair.b);
        let peer = pair.a.qp(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
        pair.a.to_state(&pair.qps[0], 0).unwrap();
        (pair.qps[0].posted, pair.qps[0].received) = (0, 0);
        pair.a.process.store(pair.qps[0].parts.record + 4, 0);
        pair.a.connect(&pair.qps[0], peer.qpn);
        pair.a.connect(&peer, pair.qps[0].qpn);
        let write = Work::new(WRITE, &[remote(from + 100, lkey), data(from, lkey, 100)]);
        pair.a.send(&mut pair.qps[0], &write);
        pair.world.settle();
        let cqe = pair.a.poll(&mut pair.cqs[0]).unwrap();
        assert_eq!(cqe.opcode, CqeOpcode::Req);
    }
}

#[test]
fn clients_go_in_mid_flood() {
    each_kind(|process| {
        for turns in 0..12 {
            let mut pair = Pair::sized(process, 256);
            let (from, lkey) = pair.a.region(1 << 18, ALL);
            let (into, rkey) = pair.b.region(1 << 18, ALL);
            for _ in 0..16 {
                pair.a.send(
                    &mut pair.qps[0],
                    &Work::new(WRITE, &[remote(into, rkey), data(from, lkey, 1 << 18)]),
                );
                pair.a.send(
                    &mut pair.qps[0],
                    &Work::new(READ, &[remote(into, rkey), data(from, lkey, 1 << 18)]),
                );
            }
            for _ in 0..turns {
                pair.world.turn();
            }
            if turns % 2 == 0 {
                drop(pair.a);
                pair.world.settle();
                drop(pair.b);
            } else {
                drop(pair.b);
                pair.world.settle();
                drop(pair.a);
            }
            pair.world.settle();
        }
    });
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
fn a_doorbell_of_before_a_reset_rings_nothing_behind_it() {
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

#[test]
fn memory_that_is_unmapped_later_fails_its_user_only() {
    for unmapped in 0..2 {
        for len_bytes in [8u32, 200_000] {
            let mut pair = Pair::new(Process::other);
            let (from, lkey) = pair.a.region(1 << 18, ALL);
            let (into, rkey) = pair.b.region(1 << 18, ALL);
            // The other process gives its memory away, the mapping here stays.
            let (owner, at) = [(&pair.a, from), (&pair.b, into)][unmapped];
            owner.process.unmap(at, 1 << 18);
            let write = Work::new(WRITE, &[remote(into, rkey), data(from, lkey, len_bytes)]);
            pair.a.send(&mut pair.qps[0], &write);
            let sent = pair.sent();
            assert_eq!(sent.len(), 1, "{unmapped} {len_bytes}");
            assert_eq!(sent[0].0, CqeOpcode::ReqErr);
            assert_eq!(pair.a.state(&pair.qps[0]), 6);
            let qp = pair.a.qp(Transport::Rc, [&pair.cqs[0], &pair.cqs[0]]);
            assert_eq!(pair.a.state(&qp), 0);
        }
    }
}

#[test]
fn attributes_are_checked_kept_and_told() {
    let world = World::new(1);
    let mut driver = Driver::new(&world.devices[0], Process::local(MEMORY));
    let cq = driver.cq(16, 64);
    let qp = driver.qp(Transport::Rc, [&cq, &cq]);
    let init = QpAttributes {
        state: 1,
        port: 1,
        access: 6,
        ..QpAttributes::default()
    };
    let named = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
    let bad = [
        (QpAttributes { port: 2, ..init }, named),
        (
            QpAttributes {
                pkey_index: 1,
                ..init
            },
            named,
        ),
        (QpAttributes { state: 7, ..init }, named),
        (QpAttributes { state: 2, ..init }, named),
        (init, named & !mask::PORT),
        (init, named | mask::QKEY),
        (init, named | 1 << 31),
        (init, named & !mask::STATE),
    ];
    for (attributes, named) in bad {
        assert_eq!(driver.modify(&qp, &attributes, named), Err(libc::EINVAL));
        assert_eq!(driver.state(&qp), 0);
    }
    driver.modify(&qp, &init, named).unwrap();
    driver.to_rtr(&qp, 0x12_3456);
    driver.to_rts(&qp);
    let told = driver.client.query_qp(qp.qpn).unwrap();
    assert_eq!((told.state, told.current_state), (3, 3));
    assert_eq!(
        (told.access, told.dest_qpn, told.path_mtu),
        (6, 0x12_3456, 3)
    );
    assert_eq!(
        (told.rq_psn, told.sq_psn, told.timeout),
        (0x1000, 0x1000, 8)
    );
    assert_eq!((told.path.dlid, told.max_rd_atomic), (1, 4));
    let timer = QpAttributes {
        min_rnr_timer: 9,
        current_state: 3,
        ..QpAttributes::default()
    };
    let named = mask::MIN_RNR_TIMER | mask::CUR_STATE;
    driver.modify(&qp, &timer, named).unwrap();
    assert_eq!(driver.client.query_qp(qp.qpn).unwrap().min_rnr_timer, 9);
    let wrong = QpAttributes {
        current_state: 5,
        ..timer
    };
    assert_eq!(driver.modify(&qp, &wrong, named), Err(libc::EINVAL));
    driver.to_state(&qp, 4).unwrap();
    assert_eq!(driver.state(&qp), 4);
    driver.to_state(&qp, 3).unwrap();
    driver.to_state(&qp, 0).unwrap();
    assert_eq!(driver.client.query_qp(qp.qpn), Ok(QpAttributes::default()));
}

#[test]
fn multicast_is_for_datagrams() {
    let mut pair = Pair::new(Process::local);
    let datagrams = pair.a.qp(Transport::Ud, [&pair.cqs[0], &pair.cqs[0]]);
    let mut gid = [0; 16];
    let client = &pair.a.client;
    assert_eq!(
        client.attach_multicast(datagrams.qpn, gid, 0),
        Err(libc::EINVAL)
    );
    gid[0] = 0xff;
    assert_eq!(
        client.attach_multicast(pair.qps[0].qpn, gid, 0),
        Err(libc::EINVAL)
    );
    assert_eq!(client.attach_multicast(datagrams.qpn, gid, 0), Ok(()));
    assert_eq!(client.detach_multicast(datagrams.qpn, gid, 0), Ok(()));
    assert_eq!(
        client.detach_multicast(datagrams.qpn, gid, 0),
        Err(libc::EINVAL)
    );
    assert_eq!(client.attach_multicast(datagrams.qpn, gid, 0), Ok(()));
    assert_eq!(client.destroy_qp(datagrams.qpn), Ok(()));
}

#[test]
fn a_shared_receive_queue_is_a_chain() {
    each_kind(|process| {
        let world = World::new(1);
        let mut driver = Driver::new(&world.devices[0], process(MEMORY));
        let mut srq = driver.srq(8, 3);
        let (at, key) = driver.region(4096, ALL);
        let mut gather = Box::<Gather>::default();
        let take = |srq: &DriverSrq, gather: &mut Gather| {
            let mut core = world.devices[0].lock();
            core.srq_mut(srq.srqn as usize).unwrap().take(gather)
        };
        assert_eq!(take(&srq, &mut gather), None);
        assert_eq!(driver.heard.take(), [], "nothing was posted yet");
        let posted: Vec<_> = (0..5)
            .map(|_| driver.post_srq(&mut srq, &[data(at, key, 100)]))
            .collect();
        for &index in &posted[..3] {
            assert_eq!(take(&srq, &mut gather), Some((index, 100)));
        }
        let limit = Event::SrqLimitReached { srqn: srq.srqn };
        assert_eq!(driver.heard.take(), [limit]);
        assert_eq!(driver.client.srq_limit(srq.srqn), Ok(0));
        // Back in another order.
        for &at in &[2, 0, 1] {
            driver.free_srq(&mut srq, posted[at]);
        }
        let more: Vec<_> = (0..5).map(|_| driver.post_srq(&mut srq, &[])).collect();
        let expected = [&posted[3..], &more[..]].concat();
        for index in expected {
            let mut core = world.devices[0].lock();
            let queue = core.srq_mut(srq.srqn as usize).unwrap();
            let (taken, capacity) = queue.take(&mut gather).unwrap();
            queue.put_back(taken);
            assert_eq!(queue.take(&mut gather), Some((taken, capacity)));
            assert_eq!(taken, index);
        }
        assert_eq!(driver.client.set_srq_limit(srq.srqn, 8), Err(libc::EINVAL));
        assert_eq!(driver.client.set_srq_limit(srq.srqn, 1), Ok(()));
        assert_eq!(driver.heard.take(), [limit], "undercut already");
    });
}
