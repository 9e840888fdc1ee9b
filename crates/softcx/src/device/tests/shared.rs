//! Receives that queue pairs share.

use crate::device::client::{DeviceEvent, QpParts, Transport};
use crate::device::tests::driver::{
    ALL, Driver, DriverCq, DriverQp, DriverSrq, Process, Work, data, remote,
};
use crate::device::tests::harness::{World, pattern};
use crate::device::{Faults, LinkLayer};
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Syndrome};

const WRITE_IMM: u8 = 0x09;
const SEND: u8 = 0x0a;
const SEND_IMM: u8 = 0x0b;
const ERROR: u8 = 6;
const STRIDE: u64 = 4096;
const COUNT: usize = 3;

/// Several senders, whose peers take from one queue.
struct Shared {
    world: World,
    a: Driver,
    b: Driver,
    from: Vec<DriverQp>,
    into: Vec<DriverQp>,
    srq: DriverSrq,
    cqs: [DriverCq; 2],
    source: (u64, u32),
    room: (u64, u32),
}

impl Shared {
    fn new(transport: Transport, wqes: u32, process: fn(usize) -> Process) -> Shared {
        Shared::on(2, transport, wqes, process)
    }

    /// All of them on one device, or the senders on one and their peers on another.
    fn on(
        devices: usize,
        transport: Transport,
        wqes: u32,
        process: fn(usize) -> Process,
    ) -> Shared {
        let world = World::on_fabric(devices, LinkLayer::InfiniBand);
        let [first, last] = [&world.devices[0], &world.devices[devices - 1]];
        let mut a = Driver::new(first, process(1 << 20));
        let mut b = Driver::new(last, process(1 << 20));
        (a.dlid, b.dlid) = (last.node(), first.node());
        (a.mtu, b.mtu) = (3, 3);
        let cqs = [a.cq(128, 64), b.cq(128, 64)];
        let srq = b.srq(wqes);
        let mut pairs = (Vec::new(), Vec::new());
        for _ in 0..COUNT {
            let from = a.qp(transport, [&cqs[0], &cqs[0]]);
            let parts = b.qp_parts(transport, [&cqs[1], &cqs[1]]);
            let into = b.qp_of(QpParts {
                srq: Some(srq.srqn),
                recv_wqes: 0,
                ..parts
            });
            a.connect(&from, into.qpn);
            b.connect(&into, from.qpn);
            pairs.0.push(from);
            pairs.1.push(into);
        }
        let (source, room) = (a.region(1 << 16, ALL), b.region(1 << 18, ALL));
        let (from, into) = pairs;
        Shared {
            world,
            a,
            b,
            from,
            into,
            srq,
            cqs,
            source,
            room,
        }
    }

    /// Posts a receive; its place goes by its index.
    fn receive(&mut self) -> u16 {
        // The index is known only when it is posted, and the next one is the last that is free.
        let index = self.b.post_srq(&mut self.srq, &[[0; 16]]);
        let at = self.srq.parts.ring + u64::from(index) * u64::from(self.srq.parts.stride_bytes);
        let place = self.room.0 + u64::from(index) * STRIDE;
        let segment = data(place, self.room.1, STRIDE as u32);
        self.b.process.write(at + 16, &segment);
        index
    }

    fn work(&self, from: usize, len: usize, opcode: u8) -> Work {
        let mut segments = vec![data(self.source.0, self.source.1, len as u32)];
        if self.from[from].parts.transport == Transport::Ud {
            segments.splice(
                0..0,
                super::datagrams::address(self.a.dlid, self.into[from].qpn, 0x1111),
            );
        }
        if opcode == WRITE_IMM {
            segments.insert(0, remote(self.room.0 + (1 << 17), self.room.1));
        }
        Work {
            imm: from as u32,
            ..Work::new(opcode, &segments)
        }
    }

    fn send(&mut self, from: usize, len: usize, opcode: u8) {
        let work = self.work(from, len, opcode);
        self.a.send(&mut self.from[from], &work);
    }

    fn polled(&mut self, end: usize) -> Vec<Cqe> {
        self.world.settle();
        let driver = [&self.a, &self.b][end];
        let cq = &mut self.cqs[end];
        std::iter::from_fn(|| driver.poll(cq)).collect()
    }
}

#[test]
fn every_transport_takes_receives_from_srq() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        for process in [Process::local as fn(usize) -> Process, Process::other] {
            let mut shared = Shared::new(transport, 16, process);
            let head = if transport == Transport::Ud { 40 } else { 0 };
            for _ in 0..8 {
                shared.receive();
            }
            let mut opcodes = vec![SEND, SEND_IMM];
            if transport != Transport::Ud {
                opcodes.push(WRITE_IMM);
            }
            for round in 0..60u64 {
                let from = round as usize * 7 % COUNT;
                let opcode = opcodes[round as usize % opcodes.len()];
                let len = round as usize * 61 % 3000;
                let bytes = pattern(round, len);
                shared.a.process.write(shared.source.0, &bytes);
                shared.send(from, len, opcode);
                let sent = shared.polled(0);
                assert_eq!((sent.len(), sent[0].syndrome), (1, 0));
                let got = shared.polled(1);
                assert_eq!(got.len(), 1, "{transport:?} {round}");
                let cqe = got[0];
                // The driver finds the queue pair by its own index, and the receive by that of the shared queue.
                assert_eq!(cqe.srqn_uidx, shared.into[from].parts.user_index);
                let at = if opcode == WRITE_IMM {
                    shared.room.0 + (1 << 17)
                } else {
                    shared.room.0 + u64::from(cqe.wqe_counter) * STRIDE + head
                };
                assert_eq!(shared.b.process.read(at, len), bytes);
                shared.b.free_srq(&mut shared.srq, cqe.wqe_counter);
                shared.receive();
            }
        }
    }
}

#[test]
fn empty_srq_delays_reliable_senders_and_drops_others() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        let mut shared = Shared::new(transport, 16, Process::local);
        if transport == Transport::Rc {
            for from in 0..COUNT {
                shared.send(from, 100, SEND);
            }
            for _ in 0..5 {
                shared.world.turn();
            }
            assert!(shared.world.devices[1].counters().rnr_naks >= COUNT as u64);
            for _ in 0..COUNT {
                shared.receive();
            }
            assert_eq!(shared.polled(1).len(), COUNT);
            assert!(shared.polled(0).iter().all(|cqe| cqe.syndrome == 0));
            continue;
        }
        shared.send(0, 100, SEND);
        assert_eq!(shared.polled(0).len(), 1);
        assert_eq!(shared.polled(1), []);
        shared.receive();
        shared.send(1, 100, SEND);
        assert_eq!(shared.polled(1).len(), 1, "{transport:?}");
    }
}

#[test]
fn queue_that_stays_empty_exhausts_rnr_retries() {
    let mut shared = Shared::new(Transport::Rc, 16, Process::local);
    shared.send(0, 100, SEND);
    let sent = shared.polled(0);
    assert_eq!(sent[0].syndrome, Syndrome::RnrRetryExc as u8);
    assert_eq!(shared.a.state(&shared.from[0]), ERROR);
}

#[test]
fn broken_messages_of_several_queue_pairs_keep_their_receives() {
    for seed in 0..10 {
        let mut shared = Shared::new(Transport::Uc, 32, Process::local);
        shared.world.set_faults(Faults {
            loss: 0.15,
            seed,
            ..Faults::default()
        });
        let mut posted: Vec<_> = (0..16).map(|_| shared.receive()).collect();
        let mut came = 0;
        for round in 0..90u64 {
            let bytes = pattern(round, 3500);
            shared.a.process.write(shared.source.0, &bytes);
            shared.send(round as usize % COUNT, 3500, SEND);
            assert_eq!(shared.polled(0).len(), 1);
            for cqe in shared.polled(1) {
                assert_eq!((cqe.opcode, cqe.syndrome), (CqeOpcode::RespSend, 0));
                let at = posted.iter().position(|&index| index == cqe.wqe_counter);
                posted.swap_remove(at.expect("each receive completes once"));
                let place = shared.room.0 + u64::from(cqe.wqe_counter) * STRIDE;
                assert_eq!(shared.b.process.read(place, 3500), bytes);
                shared.b.free_srq(&mut shared.srq, cqe.wqe_counter);
                posted.push(shared.receive());
                came += 1;
            }
        }
        assert!((20..90).contains(&came), "{came}");
        // Those that are kept for the next message come back when their queue pairs end.
        shared.world.set_faults(Faults::default());
        for end in 0..COUNT {
            shared.b.to_state(&shared.into[end], ERROR).unwrap();
        }
        for cqe in shared.polled(1) {
            assert_eq!(cqe.syndrome, Syndrome::WrFlush as u8);
            assert!(posted.contains(&cqe.wqe_counter));
        }
    }
}

#[test]
fn failed_queue_pair_flushes_taken_receives_and_reports_last_wqe() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        let mut shared = Shared::new(transport, 16, Process::local);
        for _ in 0..4 {
            shared.receive();
        }
        shared.b.to_state(&shared.into[0], ERROR).unwrap();
        let qpn = shared.into[0].qpn;
        assert_eq!(
            shared.b.events.take(),
            [DeviceEvent::LastWqeReached { qpn }]
        );
        assert_eq!(shared.polled(1), []);
        // The others go on.
        shared.send(1, 8, SEND);
        assert_eq!(shared.polled(1).len(), 1);
        assert_eq!(shared.b.events.take(), []);
    }
    // In the middle of a message.
    let mut shared = Shared::new(Transport::Rc, 16, Process::local);
    shared.receive();
    shared.receive();
    shared.world.devices[0].set_faults(Faults {
        drop_nth: 3,
        ..Faults::default()
    });
    shared.world.devices[1].set_faults(Faults {
        loss: 1.0,
        ..Faults::default()
    });
    shared.send(0, 3500, SEND);
    for _ in 0..10 {
        shared.world.turn();
    }
    shared.b.to_state(&shared.into[0], ERROR).unwrap();
    let got = shared.polled(1);
    assert_eq!((got.len(), got[0].syndrome), (1, Syndrome::WrFlush as u8));
}

#[test]
fn srq_limit_event_is_reported_once() {
    let mut shared = Shared::new(Transport::Rc, 16, Process::other);
    for _ in 0..4 {
        shared.receive();
    }
    shared.b.client.set_srq_limit(shared.srq.srqn, 3).unwrap();
    let srqn = shared.srq.srqn;
    for (sent, expected) in [
        (1, vec![]),
        (2, vec![DeviceEvent::SrqLimitReached { srqn }]),
        (3, vec![]),
    ] {
        shared.send(0, 8, SEND);
        assert_eq!(shared.polled(1).len(), 1);
        assert_eq!(shared.b.events.take(), expected, "after {sent}");
    }
}

/// A sender dies between the packets of its message, and others have taken receives meanwhile. The receive of the message stays with its queue pair: the
/// shared queue goes on behind those that the others took.
#[test]
fn receive_of_a_sender_that_died_is_not_given_to_others() {
    const POSTED: usize = 8;
    let mut flushed = 0;
    for when in 0..8 {
        // On one device packets refer to the memory of their sender until they are placed.
        let mut shared = Shared::on(1, Transport::Rc, 16, Process::other);
        let mut dying = Driver::new(&shared.world.devices[0], Process::other(1 << 20));
        (dying.dlid, dying.mtu) = (shared.a.dlid, shared.a.mtu);
        let cq = dying.cq(16, 64);
        let mut from = dying.qp(Transport::Rc, [&cq, &cq]);
        let cqs = [&shared.cqs[1], &shared.cqs[1]];
        let parts = QpParts {
            srq: Some(shared.srq.srqn),
            recv_wqes: 0,
            ..shared.b.qp_parts(Transport::Rc, cqs)
        };
        let into = shared.b.qp_of(parts);
        dying.connect(&from, into.qpn);
        shared.b.connect(&into, from.qpn);
        let mut posted: Vec<_> = (0..POSTED).map(|_| shared.receive()).collect();
        // The message has four packets. The third is lost first, and others send meanwhile.
        shared.world.devices[0].set_faults(Faults {
            drop_nth: 3,
            ..Faults::default()
        });
        let (at, key) = dying.region(4096, ALL);
        dying.send(&mut from, &Work::new(SEND, &[data(at, key, 3500)]));
        shared.send(1, 100, SEND);
        shared.world.turn();
        shared.send(2, 100, SEND);
        for _ in 0..when {
            shared.world.turn();
        }
        dying.process.kill();
        let mut got = shared.polled(1);
        for _ in 0..POSTED - 3 {
            shared.send(1, 100, SEND);
            got.extend(shared.polled(1));
        }
        shared.b.to_state(&into, ERROR).unwrap();
        got.extend(shared.polled(1));
        let mut indices: Vec<_> = got.iter().map(|cqe| cqe.wqe_counter).collect();
        indices.sort_unstable();
        posted.sort_unstable();
        assert_eq!(indices, posted, "{when}: each receive completes once");
        let last = got.last().unwrap();
        flushed += usize::from(last.syndrome == Syndrome::WrFlush as u8);
    }
    assert!(flushed > 0);
}
