//! Completion queues of clients: arms, overruns, other sizes.

use super::{Pair, SEND, WRITE, each_kind};
use crate::device::client::{DeviceEvent, Transport};
use crate::device::tests::driver::{ALL, Driver, DriverCq, Process, Work, data, remote};

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
fn full_completion_queue_fails_all_its_queue_pairs() {
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
        assert_eq!(pair.a.events.take(), []);
        pair.a.send(&mut pair.qps[0], &write);
        pair.world.settle();
        assert_eq!(pair.a.state(&pair.qps[0]), 6);
        assert_eq!(pair.a.state(&bystander), 6);
        let events = pair.a.events.take();
        let failed = |qpn| DeviceEvent::QpFatal { qpn };
        assert!(events.contains(&DeviceEvent::CqError {
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
        events: cq.events.clone(),
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
