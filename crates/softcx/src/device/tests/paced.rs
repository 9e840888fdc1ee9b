//! Packets to another host that nothing acknowledges: they leave at a rate, which falls with notices of congestion.

use std::net::{Ipv4Addr, UdpSocket};

use crate::device::Device;
use crate::device::client::Transport;
use crate::device::packet::{Header, PacketKind, flag, psn_add};
use crate::device::roce::{ROCE_PORT, UdpFlow, notice_bytes, seal_frame};
use crate::device::tests::driver::{ALL, Driver, DriverCq, DriverQp, Process, Work, data, remote};
use crate::device::tests::harness::World;

const WRITE: u8 = 0x08;
const ROOM: usize = 1 << 20;
/// Of packets with an MTU of 4096.
const PACKETS: u64 = 256;
const FIRST_PSN: u32 = 0x1000;

/// Two clients on devices of two addresses.
struct Hosts {
    world: World,
    drivers: [Driver; 2],
    cqs: [DriverCq; 2],
    qps: [DriverQp; 2],
    memory: [(u64, u32); 2],
    /// At the address of the first.
    socket: UdpSocket,
}

fn address(device: &Device) -> Ipv4Addr {
    let [.., a, b, c, d] = device.gid();
    Ipv4Addr::new(a, b, c, d)
}

impl Hosts {
    fn new(transport: Transport) -> Hosts {
        let world = World::by_udp(2);
        let open = |device| Driver::new(device, Process::local(4 << 20));
        let mut drivers = [0, 1].map(|end| open(&world.devices[end]));
        let cqs = drivers.each_mut().map(|driver| driver.cq(16, 64));
        let mut qps = Vec::new();
        for (end, driver) in drivers.iter_mut().enumerate() {
            driver.dgid = world.devices[1 - end].gid();
            driver.mtu = 5;
            qps.push(driver.qp(transport, [&cqs[end], &cqs[end]]));
        }
        let qps: [DriverQp; 2] = qps.try_into().unwrap_or_else(|_| panic!());
        for end in [0, 1] {
            drivers[end].connect(&qps[end], qps[1 - end].qpn);
        }
        let memory = drivers.each_mut().map(|driver| driver.region(ROOM, ALL));
        let socket = UdpSocket::bind((address(&world.devices[0]), 0)).unwrap();
        Hosts {
            world,
            drivers,
            cqs,
            qps,
            memory,
            socket,
        }
    }

    /// Notices of congestion from the first to the second, until that sends as slowly as it does.
    fn congest(&mut self) {
        let gids = [0, 1].map(|end| self.world.devices[end].gid());
        let flow = UdpFlow {
            from: gids[0],
            to: gids[1],
            source_port: self.socket.local_addr().unwrap().port(),
            identification: 0,
        };
        let mut frame = [0; 64];
        let notice = notice_bytes(self.qps[1].qpn, 0xffff);
        frame[..notice.len()].copy_from_slice(&notice);
        let len = seal_frame(&flow, &mut frame, notice.len());
        for _ in 0..10 {
            let target = (address(&self.world.devices[1]), ROCE_PORT);
            self.socket.send_to(&frame[..len], target).unwrap();
            self.world.now_ns += 2_000_000;
            self.world.turn();
        }
        let counters = self.world.devices[1].counters();
        assert_eq!(counters.congestion_notices, 10);
    }

    /// A request that the first has not sent: the whole of the memory of the second, from a packet of the response on.
    fn ask(&self, from: u32) {
        let done = from * 4096;
        let header = Header {
            flags: flag::FIRST | flag::LAST | flag::WANTS_ACK,
            addr: self.memory[1].0 + u64::from(done),
            rkey: self.memory[1].1,
            total_bytes: ROOM as u32 - done,
            ..Header::new(
                PacketKind::ReadRequest,
                self.qps[1].qpn,
                psn_add(FIRST_PSN, from),
                0,
            )
        };
        let mut core = self.world.devices[1].lock();
        core.parts.sender = Some(self.world.devices[0].gid());
        core.inject(&header, &[]);
        core.parts.sender = None;
    }

    fn sent(&self) -> u64 {
        self.world.devices[1].counters().packets_sent
    }

    /// Turns until the second has sent so many packets. Returns how long that took.
    fn until_sent(&mut self, packets: u64) -> u64 {
        let (start, device) = (self.world.now_ns, self.world.devices[1].clone());
        let is_sent = self.world.run(|| device.counters().packets_sent >= packets);
        assert!(is_sent, "{} of {packets} packets", self.sent());
        self.world.now_ns - start
    }
}

#[test]
fn responses_of_a_long_read_leave_at_a_rate_that_falls_with_congestion() {
    let mut hosts = Hosts::new(Transport::Rc);
    hosts.ask(0);
    let fast_ns = hosts.until_sent(PACKETS);
    hosts.congest();
    hosts.ask(0);
    let slow_ns = hosts.until_sent(2 * PACKETS);
    // 1 MiB at 16 MiB a second, which rises meanwhile.
    assert!((15_000_000..60_000_000).contains(&slow_ns), "{slow_ns}");
    assert!(fast_ns < slow_ns / 10, "{fast_ns}");
}

/// A long read that is asked for once more has lost a response.
#[test]
fn responses_of_a_long_read_leave_at_a_rate_that_falls_with_losses() {
    let mut hosts = Hosts::new(Transport::Rc);
    hosts.ask(0);
    hosts.until_sent(PACKETS);
    for _ in 0..10 {
        hosts.ask(200);
        hosts.world.settle();
        hosts.world.now_ns += 2_000_000;
    }
    let before = hosts.sent();
    hosts.ask(0);
    let slow_ns = hosts.until_sent(before + PACKETS);
    assert!((15_000_000..60_000_000).contains(&slow_ns), "{slow_ns}");
}

/// The peer takes none behind a gap, so the rest of the first answer would be sent for nothing.
#[test]
fn read_that_is_asked_again_in_the_middle_of_its_answer_begins_there() {
    let mut hosts = Hosts::new(Transport::Rc);
    hosts.congest();
    hosts.ask(0);
    hosts.until_sent(PACKETS / 2);
    let before = hosts.sent();
    assert!(before < PACKETS, "{before}");
    hosts.ask(2);
    hosts.world.settle();
    assert_eq!(hosts.sent() - before, PACKETS - 2);
}

/// A pause of paced responses ends with the queue pair's transition to the error state: nothing goes on after it.
#[test]
fn responses_that_are_paced_do_not_leave_in_the_error_state() {
    let mut hosts = Hosts::new(Transport::Rc);
    hosts.congest();
    hosts.ask(0);
    hosts.until_sent(PACKETS / 4);
    hosts.drivers[1].to_state(&hosts.qps[1], 6).unwrap();
    let before = hosts.sent();
    hosts.world.settle();
    assert_eq!(hosts.sent(), before);
}

#[test]
fn packets_of_uc_leave_at_a_rate_that_falls_with_congestion() {
    let mut hosts = Hosts::new(Transport::Uc);
    hosts.congest();
    let (into, rkey) = hosts.memory[0];
    let (from, lkey) = hosts.memory[1];
    let segments = [remote(into, rkey), data(from, lkey, ROOM as u32)];
    let driver = &hosts.drivers[1];
    driver.send(&mut hosts.qps[1], &Work::new(WRITE, &segments));
    let ns = hosts.until_sent(PACKETS);
    assert!((15_000_000..60_000_000).contains(&ns), "{ns}");
    hosts.world.settle();
    let cqe = hosts.drivers[1].poll(&mut hosts.cqs[1]).unwrap();
    assert_eq!(cqe.syndrome, 0);
}
