//! Clients of the device: what a kernel driver's processes may do, and what they cannot do to others.

mod completions;
mod faults;
mod objects;
mod operations;

use crate::device::client::Transport;
use crate::device::tests::driver::{Driver, DriverCq, DriverQp, Process};
use crate::device::tests::harness::World;
use doorbell_wire::mlx5::CqeOpcode;

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
