//! One connection between two clients, on one device or on two.

use crate::device::LinkLayer;
use crate::device::client::Transport;
use crate::device::tests::driver::{ALL, Driver, DriverCq, DriverQp, Process, Work, data, remote};
use crate::device::tests::harness::World;
use doorbell_wire::mlx5::Cqe;

pub(super) const ROOM: usize = 1 << 20;

/// A queue pair of one client that sends to one of another.
pub(super) struct Pair {
    pub(super) world: World,
    pub(super) a: Driver,
    pub(super) b: Driver,
    pub(super) qps: [DriverQp; 2],
    pub(super) cqs: [DriverCq; 2],
    pub(super) from: (u64, u32),
    pub(super) into: (u64, u32),
}

impl Pair {
    pub(super) fn new(transport: Transport, devices: usize, process: fn(usize) -> Process) -> Pair {
        Pair::with(transport, devices, process, |_, _| ())
    }

    /// As [`Pair::new`], with the code of each end's path MTU.
    pub(super) fn with_mtus(
        transport: Transport,
        devices: usize,
        process: fn(usize) -> Process,
        [first, second]: [u8; 2],
    ) -> Pair {
        Pair::with(transport, devices, process, |a, b| {
            (a.mtu, b.mtu) = (first, second);
        })
    }

    /// As [`Pair::new`], with the number of reads and atomics that the first end has on their way, and the number that the second one serves.
    pub(super) fn with_depths(
        transport: Transport,
        devices: usize,
        process: fn(usize) -> Process,
        [out, served]: [u8; 2],
    ) -> Pair {
        Pair::with(transport, devices, process, |a, b| {
            (a.depths[0], b.depths[1]) = (out, served);
        })
    }

    fn with(
        transport: Transport,
        devices: usize,
        process: fn(usize) -> Process,
        change: impl FnOnce(&mut Driver, &mut Driver),
    ) -> Pair {
        let world = World::on_fabric(devices, LinkLayer::InfiniBand);
        let [first, last] = [&world.devices[0], &world.devices[devices - 1]];
        let mut a = Driver::new(first, process(4 << 20));
        let mut b = Driver::new(last, process(4 << 20));
        let cqs = [a.cq(256, 64), b.cq(256, 64)];
        let qps = [
            a.qp(transport, [&cqs[0], &cqs[0]]),
            b.qp(transport, [&cqs[1], &cqs[1]]),
        ];
        (a.dlid, b.dlid) = (last.node(), first.node());
        change(&mut a, &mut b);
        a.connect(&qps[0], qps[1].qpn);
        b.connect(&qps[1], qps[0].qpn);
        let (from, into) = (a.region(ROOM, ALL), b.region(ROOM, ALL));
        Pair {
            world,
            a,
            b,
            qps,
            cqs,
            from,
            into,
        }
    }

    pub(super) fn receive(&mut self, offset: usize, len: usize) {
        let (at, key) = self.into;
        let segment = data(at + offset as u64, key, len as u32);
        self.b.post_recv(&mut self.qps[1], &[segment]);
    }

    pub(super) fn send(&mut self, work: &Work) {
        self.a.send(&mut self.qps[0], work);
    }

    pub(super) fn here(&self, offset: usize, len: usize) -> [u8; 16] {
        data(self.from.0 + offset as u64, self.from.1, len as u32)
    }

    pub(super) fn there(&self, offset: usize) -> [u8; 16] {
        remote(self.into.0 + offset as u64, self.into.1)
    }

    pub(super) fn sent(&mut self) -> Vec<(u16, u8)> {
        self.world.settle();
        std::iter::from_fn(|| self.a.poll(&mut self.cqs[0]))
            .map(|cqe| (cqe.wqe_counter, cqe.syndrome))
            .collect()
    }

    pub(super) fn received(&mut self) -> Vec<Cqe> {
        self.world.settle();
        std::iter::from_fn(|| self.b.poll(&mut self.cqs[1])).collect()
    }

    pub(super) fn state(&self, end: usize) -> u8 {
        [&self.a, &self.b][end].state(&self.qps[end])
    }
}
