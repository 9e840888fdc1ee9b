//! Faults by number, and the trace.

use crate::device::client::{DeviceEvent, Transport};
use crate::device::tests::driver::{ALL, Driver, DriverCq, DriverQp, Process, Work, data, remote};
use crate::device::tests::harness::World;
use crate::device::{Faults, LinkLayer};
use doorbell_wire::mlx5::{Cqe, Syndrome};

const WRITE: u8 = 0x08;
const SEND: u8 = 0x0a;
const READ: u8 = 0x10;

/// Two queue pairs of one device, the first of which sends.
struct Pair {
    world: World,
    driver: Driver,
    qps: [DriverQp; 2],
    cqs: [DriverCq; 2],
    memory: (u64, u32),
}

impl Pair {
    fn new(faults: Faults) -> Pair {
        let world = World::on_fabric(1, LinkLayer::InfiniBand);
        let mut driver = Driver::new(&world.devices[0], Process::local(1 << 20));
        driver.dlid = world.devices[0].node();
        let cqs = [driver.cq(64, 64), driver.cq(64, 64)];
        let qps = [
            driver.qp(Transport::Rc, [&cqs[0], &cqs[0]]),
            driver.qp(Transport::Rc, [&cqs[1], &cqs[1]]),
        ];
        driver.connect(&qps[0], qps[1].qpn);
        driver.connect(&qps[1], qps[0].qpn);
        let memory = driver.region(1 << 16, ALL);
        world.devices[0].set_faults(faults);
        Pair {
            world,
            driver,
            qps,
            cqs,
            memory,
        }
    }

    /// Three requests of this kind, with receives for them: the completions of both sides.
    fn run(&mut self, opcode: u8) -> [Vec<u8>; 2] {
        let (at, key) = self.memory;
        for _ in 0..3 {
            let segment = data(at + 8192, key, 4096);
            self.driver.post_recv(&mut self.qps[1], &[segment]);
            let mut segments = vec![data(at, key, 100)];
            if opcode != SEND {
                segments.insert(0, remote(at + 4096, key));
            }
            self.driver
                .send(&mut self.qps[0], &Work::new(opcode, &segments));
            self.world.settle();
        }
        [self.polled(0), self.polled(1)]
    }

    fn polled(&mut self, end: usize) -> Vec<u8> {
        let (driver, cq) = (&self.driver, &mut self.cqs[end]);
        let cqes = std::iter::from_fn(|| driver.poll(cq));
        cqes.map(|cqe: Cqe| cqe.syndrome).collect()
    }
}

const FLUSH: u8 = Syndrome::WrFlush as u8;

#[test]
fn any_request_can_be_made_to_fail_in_any_way() {
    for syndrome in Syndrome::ALL {
        let mut pair = Pair::new(Faults {
            fail_send: (2, syndrome as u8),
            ..Faults::default()
        });
        let [sent, _] = pair.run(WRITE);
        assert_eq!(sent, [0, syndrome as u8, FLUSH]);
    }
}

#[test]
fn any_receive_can_be_made_to_fail_in_any_way() {
    for syndrome in Syndrome::ALL {
        let mut pair = Pair::new(Faults {
            fail_recv: (2, syndrome as u8),
            ..Faults::default()
        });
        let [sent, received] = pair.run(SEND);
        assert_eq!(sent, [0, Syndrome::RemoteOp as u8, FLUSH]);
        assert_eq!(received, [0, syndrome as u8, FLUSH]);
    }
}

#[test]
fn injected_refusal_has_the_requested_status() {
    for (code, syndrome) in [
        (0x61, Syndrome::RemoteInvalReq),
        (0x62, Syndrome::RemoteAccess),
        (0x63, Syndrome::RemoteOp),
    ] {
        let mut pair = Pair::new(Faults {
            refuse: (2, code),
            ..Faults::default()
        });
        let [sent, received] = pair.run(SEND);
        assert_eq!(sent, [0, syndrome as u8, FLUSH]);
        assert_eq!(received, [0, FLUSH, FLUSH]);
        let qpn = pair.qps[1].qpn;
        let event = match code {
            0x61 => vec![DeviceEvent::QpRequestError { qpn }],
            0x62 => vec![DeviceEvent::QpAccessError { qpn }],
            _ => vec![],
        };
        assert_eq!(pair.driver.events.take(), event);
    }
    // Those that are overcome by trying again.
    for code in [0x20, 0x3f, 0x60] {
        let mut pair = Pair::new(Faults {
            refuse: (2, code),
            ..Faults::default()
        });
        assert_eq!(pair.run(SEND), [vec![0; 3], vec![0; 3]], "{code:#x}");
        assert_eq!(pair.world.devices[0].counters().retransmissions, 1);
    }
}

#[test]
fn a_garbled_response_is_bad_and_a_lost_packet_is_sent_again() {
    let mut pair = Pair::new(Faults {
        garble_nth: 2,
        ..Faults::default()
    });
    assert_eq!(pair.run(READ)[0], [0, Syndrome::BadResp as u8, FLUSH]);
    let mut pair = Pair::new(Faults {
        drop_nth: 3,
        ..Faults::default()
    });
    assert_eq!(pair.run(SEND), [vec![0; 3], vec![0; 3]]);
    assert_eq!(pair.world.devices[0].counters().retransmissions, 1);
}

#[test]
fn a_completion_without_room_fails_its_queue() {
    let mut pair = Pair::new(Faults {
        overrun_nth: 1,
        ..Faults::default()
    });
    let [sent, received] = pair.run(WRITE);
    assert_eq!((sent, received), (vec![], vec![]));
    let events = pair.driver.events.take();
    let cqn = pair.cqs[0].cqn;
    assert_eq!(events[0], DeviceEvent::CqError { cqn });
    assert!(events.contains(&DeviceEvent::QpFatal {
        qpn: pair.qps[0].qpn
    }));
}

#[test]
fn the_link_goes_down_and_comes_back() {
    let mut pair = Pair::new(Faults {
        down_ns: (1_000_000, 2_000_000),
        ..Faults::default()
    });
    let (at, key) = pair.memory;
    let write = Work::new(WRITE, &[remote(at + 4096, key), data(at, key, 100)]);
    let until = |pair: &mut Pair, ns: u64| {
        while pair.world.now_ns < ns {
            pair.world.turn();
        }
    };
    until(&mut pair, 500_000);
    assert_eq!(pair.driver.events.take(), []);
    until(&mut pair, 1_200_000);
    assert_eq!(
        pair.driver.events.take(),
        [DeviceEvent::Port { active: false }]
    );
    pair.driver.send(&mut pair.qps[0], &write);
    until(&mut pair, 2_500_000);
    assert_eq!(pair.polled(0), []);
    until(&mut pair, 9_000_000);
    assert_eq!(
        pair.driver.events.take(),
        [DeviceEvent::Port { active: true }]
    );
    assert_eq!(pair.polled(0), [0]);
}

#[test]
fn gid_change_is_reported_to_clients_once() {
    let mut pair = Pair::new(Faults {
        gid_ns: 1_000_000,
        ..Faults::default()
    });
    let until = |pair: &mut Pair, ns: u64| {
        while pair.world.now_ns < ns {
            pair.world.turn();
        }
    };
    until(&mut pair, 900_000);
    assert_eq!(pair.driver.events.take(), []);
    until(&mut pair, 5_000_000);
    assert_eq!(pair.driver.events.take(), [DeviceEvent::GidChange]);
    assert_eq!(pair.world.devices[0].gid_index(), Some(1));
    pair.world.devices[0].set_gid_index(None);
    assert_eq!(pair.driver.events.take(), [DeviceEvent::GidChange]);
}

#[test]
fn removed_device_stops_and_reports_it_once() {
    let mut pair = Pair::new(Faults {
        gone_ns: 1_000_000,
        ..Faults::default()
    });
    let (at, key) = pair.memory;
    let write = Work::new(WRITE, &[remote(at + 4096, key), data(at, key, 100)]);
    pair.driver.send(&mut pair.qps[0], &write);
    while pair.world.now_ns < 500_000 {
        pair.world.turn();
    }
    assert_eq!(pair.polled(0), [0]);
    pair.driver.events.take();
    while pair.world.now_ns < 1_200_000 {
        pair.world.turn();
    }
    assert_eq!(pair.driver.events.take(), [DeviceEvent::DeviceFatal]);
    pair.driver.send(&mut pair.qps[0], &write);
    while pair.world.now_ns < 9_000_000 {
        pair.world.turn();
    }
    // No completion, not even in error; and no second word.
    assert_eq!(pair.polled(0), []);
    assert_eq!(pair.driver.events.take(), []);
}

#[test]
fn the_trace_has_a_line_for_everything() {
    let path = std::env::temp_dir().join(format!("doorbell-trace-{}", std::process::id()));
    let mut pair = Pair::new(Faults::default());
    pair.world.devices[0].lock().set_trace(&path).unwrap();
    let node = pair.world.devices[0].node();
    let [from, to] = [pair.qps[0].qpn, pair.qps[1].qpn];
    let [sends, receives] = [pair.cqs[0].cqn, pair.cqs[1].cqn];
    pair.run(SEND);
    let (at, key) = pair.memory;
    let bad = Work::new(READ, &[remote(at, 0xbad), data(at, key, 8)]);
    pair.driver.send(&mut pair.qps[0], &bad);
    pair.world.settle();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    // The time is another one each time.
    let lines: Vec<_> = text.lines().map(|line| &line[16..]).collect();
    let expected = [
        format!("n{node} WQE qp {from:#08x} sq 0 SEND {at:#x}+100 lkey {key:#x} signaled"),
        format!("n{node} TX  -> self RC qp {from:#08x} -> {to:#08x} psn 0x001000 SEND only 100 B"),
        format!(
            "n{node} RX  <- n{node} RC qp {from:#08x} -> {to:#08x} psn 0x001000 SEND only 100 B"
        ),
        format!(
            "n{node} WQE qp {to:#08x} rq 0 RECV {:#x}+4096 lkey {key:#x}",
            at + 8192
        ),
        format!(
            "n{node} CQE cq {receives} qp {to:#08x} rq 0 RECV SUCCESS 100 B from qp {from:#08x} lid {node}"
        ),
        format!("n{node} TX  -> self RC qp {to:#08x} -> {from:#08x} psn 0x001000 ACK"),
        format!("n{node} RX  <- n{node} RC qp {to:#08x} -> {from:#08x} psn 0x001000 ACK"),
        format!("n{node} CQE cq {sends} qp {from:#08x} sq 0 SEND SUCCESS"),
    ];
    assert_eq!(lines[..8], expected, "\n{text}");
    for part in [
        "RDMA_READ remote",
        "rkey 0xbad",
        "RDMA_READ request",
        "NAK remote access error",
        "RDMA_READ ERROR IBV_WC_REM_ACCESS_ERR",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
}
