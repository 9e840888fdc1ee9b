//! Memory windows: opened, used, closed from both sides.

use crate::device::client::{DeviceEvent, MrRange, Transport};
use crate::device::tests::driver::{Driver, DriverCq, DriverQp, Process, Work, data, remote};
use crate::device::tests::harness::World;
use doorbell_wire::mlx5::{CqeOpcode, Syndrome};

const SEND_INVAL: u8 = 0x01;
const WRITE: u8 = 0x08;
const READ: u8 = 0x10;
const UMR: u8 = 0x25;
const OK: u8 = 0;
const ERROR: u8 = 6;
const LOCAL: u32 = 1;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const WINDOWS: u32 = 16;

/// What a window is to open.
#[derive(Clone, Copy)]
struct Opening {
    region: u32,
    addr: u64,
    len: u64,
    access: u32,
    zero_based: bool,
}

/// The segments by which libmlx5 binds a window of type 1 or 2.
fn bind(kind: u8, new_key: u32, qpn: u32, opening: Opening) -> Vec<[u8; 16]> {
    let mut segments = vec![[0; 16]; 11];
    let mut mask = 0x2000_2000 | 0x3c_0041u64;
    if kind == 2 {
        mask |= 1 << 14;
    }
    segments[0][0] = 0x90;
    segments[0][8..].copy_from_slice(&mask.to_be_bytes());
    let bits = [(1, 1 << 3), (2, 1 << 5), (4, 1 << 4), (8, 1 << 6)];
    for (verbs, bit) in bits {
        if opening.access & verbs != 0 {
            segments[3][2] |= bit;
        }
    }
    let owner = if kind == 2 { qpn << 8 } else { 0xffff_ff00 };
    segments[3][4..8].copy_from_slice(&(owner | new_key & 0xff).to_be_bytes());
    let start = if opening.zero_based { 0 } else { opening.addr };
    segments[4][..8].copy_from_slice(&start.to_be_bytes());
    segments[4][8..].copy_from_slice(&opening.len.to_be_bytes());
    segments[7] = data(opening.addr, opening.region, opening.len as u32);
    segments
}

/// The segments by which it closes one.
fn close(kind: u8, new_key: u32) -> Vec<[u8; 16]> {
    let mut segments = vec![[0; 16]; 7];
    let mask = 0x2000_2000u64 | u64::from(kind == 2) << 14;
    segments[0][0] = 0x90;
    segments[0][8..].copy_from_slice(&mask.to_be_bytes());
    segments[3][0] = 0x40;
    segments[3][4..8].copy_from_slice(&(0xffff_ff00 | new_key & 0xff).to_be_bytes());
    segments
}

/// The second client has the window, the first one uses it.
struct Pair {
    world: World,
    a: Driver,
    b: Driver,
    qps: [DriverQp; 2],
    cqs: [DriverCq; 2],
    from: (u64, u32),
    region: (u64, u32),
}

impl Pair {
    fn new() -> Pair {
        let world = World::new(1);
        let mut a = Driver::new(&world.devices[0], Process::local(1 << 20));
        let mut b = Driver::new(&world.devices[0], Process::local(1 << 20));
        let cqs = [a.cq(64, 64), b.cq(64, 64)];
        let qps = [
            a.qp(Transport::Rc, [&cqs[0], &cqs[0]]),
            b.qp(Transport::Rc, [&cqs[1], &cqs[1]]),
        ];
        a.connect(&qps[0], qps[1].qpn);
        b.connect(&qps[1], qps[0].qpn);
        let from = a.region(4096, LOCAL);
        let start = b.process.place(8192, 4096);
        let range = MrRange {
            start,
            len_bytes: 8192,
            iova: start,
        };
        let key = b.client.reg_mr(b.pd, range, LOCAL | WINDOWS).unwrap();
        Pair {
            world,
            a,
            b,
            qps,
            cqs,
            from,
            region: (start, key),
        }
    }

    fn opening(&self) -> Opening {
        Opening {
            region: self.region.1,
            addr: self.region.0 + 100,
            len: 1000,
            access: REMOTE_WRITE,
            zero_based: false,
        }
    }

    /// The owner's request on a window: the syndrome of its completion.
    fn update(&mut self, key: u32, segments: &[[u8; 16]]) -> u8 {
        let work = Work {
            imm: key,
            ..Work::new(UMR, segments)
        };
        self.b.send(&mut self.qps[1], &work);
        self.world.settle();
        let cqe = self.b.poll(&mut self.cqs[1]).unwrap();
        assert_eq!(cqe.send_opcode, UMR);
        cqe.syndrome
    }

    /// What becomes of the peer's access.
    fn access(&mut self, opcode: u8, key: u32, addr: u64, len: u32) -> u8 {
        let segments = [remote(addr, key), data(self.from.0, self.from.1, len)];
        self.a.send(&mut self.qps[0], &Work::new(opcode, &segments));
        self.world.settle();
        self.a.poll(&mut self.cqs[0]).unwrap().syndrome
    }
}

const DENIED: u8 = Syndrome::RemoteAccess as u8;
const UNBOUND: u8 = Syndrome::MwBind as u8;

#[test]
fn window_allows_access_to_its_bound_range_only() {
    for kind in [1, 2] {
        for zero_based in [false, true] {
            let opens = |pair: &mut Pair| {
                let key = pair.b.client.alloc_mw(pair.b.pd, kind).unwrap();
                let opening = Opening {
                    zero_based,
                    ..pair.opening()
                };
                let new = key & !0xff | (key + 1) & 0xff;
                let segments = bind(kind, new, pair.qps[1].qpn, opening);
                assert_eq!(pair.update(key, &segments), OK);
                (key, new)
            };
            let start = |pair: &Pair| if zero_based { 0 } else { pair.region.0 + 100 };
            let mut pair = Pair::new();
            let (_, new) = opens(&mut pair);
            pair.a.process.write(pair.from.0, &[9; 1000]);
            let at = start(&pair);
            assert_eq!(pair.access(WRITE, new, at, 1000), OK, "type {kind}");
            let written = pair.b.process.read(pair.region.0, 1200);
            assert_eq!(written[..100], [0; 100]);
            assert_eq!(written[100..1100], [9; 1000]);
            assert_eq!(written[1100..], [0; 100]);
            type Bad = fn(u64, u32, u32) -> (u8, u32, u64, u32);
            let denied: [Bad; 4] = [
                |at, new, _| (WRITE, new, at.wrapping_sub(1), 2),
                |at, new, _| (WRITE, new, at, 1001),
                |at, new, _| (READ, new, at, 8),
                |at, _, old| (WRITE, old, at, 8),
            ];
            for case in denied {
                let mut pair = Pair::new();
                let (old, new) = opens(&mut pair);
                let (opcode, key, addr, len) = case(start(&pair), new, old);
                assert_eq!(pair.access(opcode, key, addr, len), DENIED);
                let qpn = pair.qps[1].qpn;
                assert_eq!(pair.b.events.take(), [DeviceEvent::QpAccessError { qpn }]);
            }
        }
    }
}

#[test]
fn closed_window_allows_no_access() {
    for kind in [1, 2] {
        let mut pair = Pair::new();
        let key = pair.b.client.alloc_mw(pair.b.pd, kind).unwrap();
        let segments = bind(kind, key, pair.qps[1].qpn, pair.opening());
        assert_eq!(pair.update(key, &segments), OK);
        assert_eq!(pair.b.client.dereg_mr(pair.region.1), Err(libc::EBUSY));
        assert_eq!(pair.update(key, &close(kind, key)), OK);
        // It may be bound once more, and closed once more.
        assert_eq!(pair.update(key, &segments), OK);
        let at = pair.region.0 + 100;
        assert_eq!(pair.access(WRITE, key, at, 8), OK);
        assert_eq!(pair.update(key, &close(kind, key)), OK);
        assert_eq!(pair.access(WRITE, key, at, 8), DENIED, "type {kind}");
        assert_eq!(pair.b.client.dereg_mr(pair.region.1), Ok(()));
    }
}

#[test]
fn send_with_invalidate_closes_the_peer_s_window() {
    let mut pair = Pair::new();
    let key = pair.b.client.alloc_mw(pair.b.pd, 2).unwrap();
    let segments = bind(2, key, pair.qps[1].qpn, pair.opening());
    assert_eq!(pair.update(key, &segments), OK);
    let receive = [data(pair.region.0, pair.region.1, 64)];
    for _ in 0..2 {
        pair.b.post_recv(&mut pair.qps[1], &receive);
    }
    let send = Work {
        imm: key,
        ..Work::new(SEND_INVAL, &[data(pair.from.0, pair.from.1, 16)])
    };
    pair.a.send(&mut pair.qps[0], &send);
    pair.world.settle();
    assert_eq!(pair.a.poll(&mut pair.cqs[0]).unwrap().syndrome, OK);
    let cqe = pair.b.poll(&mut pair.cqs[1]).unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (CqeOpcode::RespSendInv, key));
    assert_eq!(cqe.byte_count, 16);
    // Closed already: the sender gets an access error, and the receiver an event that its queue pair has failed.
    pair.a.send(&mut pair.qps[0], &send);
    pair.world.settle();
    assert_eq!(pair.a.poll(&mut pair.cqs[0]).unwrap().syndrome, DENIED);
    let cqe = pair.b.poll(&mut pair.cqs[1]).unwrap();
    assert_eq!(cqe.syndrome, Syndrome::LocalAccess as u8);
    assert_eq!(
        (pair.a.state(&pair.qps[0]), pair.b.state(&pair.qps[1])),
        (ERROR, ERROR)
    );
}

#[test]
fn invalid_bind_completes_in_error() {
    type Bad = fn(&mut Pair, u32) -> (u32, Vec<[u8; 16]>);
    let bad: [Bad; 6] = [
        // No window; one that is closed; a region that is none; a range outside; without the right; bound twice.
        |pair, key| {
            (
                key ^ 0x10_0000,
                bind(2, key, pair.qps[1].qpn, pair.opening()),
            )
        },
        |_, key| (key, close(2, 0)),
        |pair, key| {
            let opening = Opening {
                region: 0xbad,
                ..pair.opening()
            };
            (key, bind(2, key, pair.qps[1].qpn, opening))
        },
        |pair, key| {
            let opening = Opening {
                len: 9000,
                ..pair.opening()
            };
            (key, bind(2, key, pair.qps[1].qpn, opening))
        },
        |pair, key| {
            let (region, start) = {
                let start = pair.b.process.place(4096, 4096);
                let range = MrRange {
                    start,
                    len_bytes: 4096,
                    iova: start,
                };
                (
                    pair.b.client.reg_mr(pair.b.pd, range, WINDOWS).unwrap(),
                    start,
                )
            };
            let opening = Opening {
                region,
                addr: start,
                access: REMOTE_WRITE | REMOTE_READ,
                ..pair.opening()
            };
            (key, bind(2, key, pair.qps[1].qpn, opening))
        },
        |pair, key| {
            let segments = bind(2, key, pair.qps[1].qpn, pair.opening());
            assert_eq!(pair.update(key, &segments), OK);
            (key, segments)
        },
    ];
    for (number, bad) in bad.into_iter().enumerate() {
        let mut pair = Pair::new();
        let key = pair.b.client.alloc_mw(pair.b.pd, 2).unwrap();
        let (key, segments) = bad(&mut pair, key);
        assert_eq!(pair.update(key, &segments), UNBOUND, "case {number}");
        assert_eq!(pair.b.state(&pair.qps[1]), ERROR);
    }
}
