//! What clients do wrong, and how they end.

use super::{MEMORY, Pair, READ, SEND, WRITE, each_kind};
use crate::device::client::{CqParts, DeviceEvent, QpParts, SrqParts, Transport};
use crate::device::tests::driver::{ALL, Driver, Process, Work, data, remote};
use crate::device::tests::harness::World;
use doorbell_wire::mlx5::{CqeOpcode, Syndrome};

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
        let srq = driver.srq(16);
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
                .events
                .take()
                .iter()
                .any(|event| matches!(event, DeviceEvent::CqError { .. }))
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
fn dead_process_does_not_affect_other_clients() {
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

/// The bytes of a read are copied after the response was looked at. If the process that had them has died by then, nothing has answered: the memory
/// of the reader is not at fault.
#[test]
fn read_from_a_process_that_dies_is_not_an_error_of_the_reader_s_memory() {
    let mut failed = 0;
    for when in 0..12 {
        for len_bytes in [8u32, 4096, 200_000] {
            let mut pair = Pair::new(Process::other);
            let (into, lkey) = pair.a.region(1 << 18, ALL);
            let (from, rkey) = pair.b.region(1 << 18, ALL);
            let read = Work::new(READ, &[remote(from, rkey), data(into, lkey, len_bytes)]);
            pair.a.send(&mut pair.qps[0], &read);
            for _ in 0..when {
                pair.world.turn();
            }
            pair.b.process.kill();
            let sent = pair.sent();
            assert_eq!(sent.len(), 1, "{when} {len_bytes}: {sent:?}");
            if sent[0].0 == CqeOpcode::ReqErr {
                assert_eq!(
                    sent[0].1,
                    Syndrome::TransportRetryExc as u8,
                    "{when} {len_bytes}"
                );
                failed += 1;
            }
        }
    }
    assert!(failed > 0);
}

#[test]
fn clients_may_close_during_traffic() {
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

/// Bytes are copied into another process after several packets were looked at. What is answered to a later request acknowledges the earlier ones, so nothing
/// is answered if the bytes of an earlier one could not be copied.
#[test]
fn answers_acknowledge_no_request_whose_bytes_were_not_copied() {
    const FETCH_ADD: u8 = 0x12;
    const WRITE_IMM: u8 = 0x09;
    for behind in 0..5 {
        let mut pair = Pair::new(Process::other);
        let (from, lkey) = pair.a.region(4096, ALL);
        let (gone, gone_rkey) = pair.b.region(8192, ALL);
        let (into, rkey) = pair.b.region(4096, ALL);
        let page = gone.next_multiple_of(4096);
        pair.b.process.unmap(page, 4096);
        let lost = Work::new(WRITE, &[remote(page, gone_rkey), data(from, lkey, 8)]);
        let list = [remote(into, rkey), data(from, lkey, 8)];
        let next = match behind {
            // Acknowledged; refused because of its key; refused because no receive is there; answered with a value; refused, and its receive fails with it.
            0 => Work::new(WRITE, &list),
            1 => Work::new(WRITE, &[remote(into, rkey ^ 0x5500), data(from, lkey, 8)]),
            2 => Work::new(SEND, &[data(from, lkey, 8)]),
            3 => Work::new(
                FETCH_ADD,
                &[remote(into, rkey), [0; 16], data(from, lkey, 8)],
            ),
            _ => {
                pair.b.post_recv(&mut pair.qps[1], &[data(into, rkey, 8)]);
                let list = [remote(into, rkey ^ 0x5500), data(from, lkey, 8)];
                Work::new(WRITE_IMM, &list)
            }
        };
        pair.a.send(&mut pair.qps[0], &lost);
        pair.a.send(&mut pair.qps[0], &next);
        let sent = pair.sent();
        let first = (sent[0].0, sent[0].2);
        assert_eq!(first, (CqeOpcode::ReqErr, 0), "{behind}: {sent:?}");
        assert_eq!(pair.b.state(&pair.qps[1]), 6, "{behind}");
    }
}
