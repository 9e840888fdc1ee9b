//! Objects of clients: what can be made, changed and named.

use super::{MEMORY, Pair, WRITE, each_kind};
use crate::device::client::{DeviceEvent, MrChange, MrRange, QpAttributes, Transport, mask};
use crate::device::gather::Gather;
use crate::device::tests::driver::{ALL, Driver, DriverSrq, Process, Work, data, remote};
use crate::device::tests::harness::World;
use doorbell_wire::mlx5::Syndrome;

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
fn objects_of_another_client_are_refused() {
    let mut pair = Pair::new(Process::local);
    let (_, key) = pair.a.region(64, ALL);
    let other = &pair.b.client;
    let (start, _) = pair.a.region(64, ALL);
    let range = MrRange {
        start,
        len_bytes: 64,
        iova: start,
    };
    assert_eq!(other.reg_mr(pair.a.pd, range, 1), Err(libc::EINVAL));
    assert_eq!(other.dereg_mr(key), Err(libc::EINVAL));
    assert_eq!(other.rereg_mr(key, MrChange::default()), Err(libc::EINVAL));
    assert_eq!(other.alloc_mw(pair.a.pd, 1), Err(libc::EINVAL));
    assert_eq!(other.dealloc_mw(key), Err(libc::EINVAL));
    assert_eq!(other.dealloc_pd(pair.a.pd), Err(libc::EINVAL));
    assert_eq!(other.free_uar(pair.a.uar), Err(libc::EINVAL));
    assert_eq!(other.destroy_cq(pair.cqs[0].cqn), Err(libc::EINVAL));
    assert_eq!(other.modify_cq(pair.cqs[0].cqn, 1, 1), Err(libc::EINVAL));
    assert_eq!(other.destroy_qp(pair.qps[0].qpn), Err(libc::EINVAL));
    assert_eq!(other.query_qp(pair.qps[0].qpn), Err(libc::EINVAL));
    assert_eq!(pair.b.to_state(&pair.qps[0], 6), Err(libc::EINVAL));
    let srq = pair.a.srq(16);
    let other = &pair.b.client;
    assert_eq!(other.destroy_srq(srq.srqn), Err(libc::EINVAL));
    assert_eq!(other.srq_limit(srq.srqn), Err(libc::EINVAL));
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
fn objects_in_use_are_not_destroyed() {
    let mut pair = Pair::new(Process::local);
    let client = &pair.a.client;
    assert_eq!(client.destroy_cq(pair.cqs[0].cqn), Err(libc::EBUSY));
    assert_eq!(client.dealloc_pd(pair.a.pd), Err(libc::EBUSY));
    let srq = pair.a.srq(16);
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
fn attributes_are_checked_kept_and_queried() {
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
    let queried = driver.client.query_qp(qp.qpn).unwrap();
    assert_eq!((queried.state, queried.current_state), (3, 3));
    assert_eq!(
        (queried.access, queried.dest_qpn, queried.path_mtu),
        (6, 0x12_3456, 3)
    );
    assert_eq!(
        (queried.rq_psn, queried.sq_psn, queried.timeout),
        (0x1000, 0x1000, 8)
    );
    assert_eq!((queried.path.dlid, queried.max_rd_atomic), (1, 4));
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
    assert_eq!(driver.to_state(&qp, 4), Err(libc::EINVAL));
    assert_eq!(driver.state(&qp), 3);
    driver.to_state(&qp, 0).unwrap();
    // The logarithms of the depths are 0.
    let fresh = QpAttributes {
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        ..QpAttributes::default()
    };
    assert_eq!(driver.client.query_qp(qp.qpn), Ok(fresh));
}

#[test]
fn multicast_is_for_datagrams() {
    let mut pair = Pair::new(Process::local);
    let datagrams = pair.a.qp(Transport::Ud, [&pair.cqs[0], &pair.cqs[0]]);
    let mut gid = [0; 16];
    let client = &pair.a.client;
    assert_eq!(
        client.attach_multicast(datagrams.qpn, gid, 0xc001),
        Err(libc::EINVAL)
    );
    gid[0] = 0xff;
    assert_eq!(
        client.attach_multicast(pair.qps[0].qpn, gid, 0xc001),
        Err(libc::EINVAL)
    );
    assert_eq!(client.attach_multicast(datagrams.qpn, gid, 0xc001), Ok(()));
    assert_eq!(client.detach_multicast(datagrams.qpn, gid, 0xc001), Ok(()));
    assert_eq!(
        client.detach_multicast(datagrams.qpn, gid, 0xc001),
        Err(libc::EINVAL)
    );
    assert_eq!(client.attach_multicast(datagrams.qpn, gid, 0xc001), Ok(()));
    assert_eq!(client.destroy_qp(datagrams.qpn), Ok(()));
}

#[test]
fn a_shared_receive_queue_is_a_chain() {
    each_kind(|process| {
        let world = World::new(1);
        let mut driver = Driver::new(&world.devices[0], process(MEMORY));
        let mut srq = driver.srq(8);
        let (at, key) = driver.region(4096, ALL);
        let mut gather = Box::<Gather>::default();
        let take = |srq: &DriverSrq, gather: &mut Gather| {
            let mut core = world.devices[0].lock();
            core.srq_mut(srq.srqn as usize).unwrap().take(gather)
        };
        assert_eq!(take(&srq, &mut gather), None);
        assert_eq!(driver.events.take(), [], "nothing was posted yet");
        let posted: Vec<_> = (0..5)
            .map(|_| driver.post_srq(&mut srq, &[data(at, key, 100)]))
            .collect();
        assert_eq!(driver.client.set_srq_limit(srq.srqn, 3), Ok(()));
        assert_eq!(driver.events.take(), []);
        for &index in &posted[..3] {
            assert_eq!(take(&srq, &mut gather), Some((index, 100)));
        }
        let limit = DeviceEvent::SrqLimitReached { srqn: srq.srqn };
        assert_eq!(driver.events.take(), [limit]);
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
            assert_eq!(queue.load(&mut gather, taken).unwrap().0, capacity);
            assert_eq!(taken, index);
        }
        assert_eq!(driver.client.set_srq_limit(srq.srqn, 8), Err(libc::EINVAL));
        assert_eq!(driver.client.set_srq_limit(srq.srqn, 1), Ok(()));
        assert_eq!(driver.events.take(), [limit], "undercut already");
    });
}
