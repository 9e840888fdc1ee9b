//! Datagrams: addresses, queue keys, the GRH in front of them, groups.

use crate::device::client::Transport;
use crate::device::fabric::gid_of;
use crate::device::tests::driver::{ALL, Driver, DriverCq, DriverQp, Process, Work, data};
use crate::device::tests::harness::{World, pattern};
use crate::device::{Faults, LinkLayer};
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Syndrome};

const SEND: u8 = 0x0a;
const SEND_IMM: u8 = 0x0b;
const QKEY: u32 = 0x1111;
const ROOM: usize = 1 << 16;
const GRH: usize = 40;

/// The datagram segment of a WQE, by LID alone.
pub(super) fn address(node: u16, qpn: u32, qkey: u32) -> [[u8; 16]; 3] {
    let mut segments = [[0; 16]; 3];
    segments[0][..4].copy_from_slice(&qkey.to_be_bytes());
    segments[0][8..12].copy_from_slice(&(qpn | 0x8000_0000).to_be_bytes());
    segments[0][14..].copy_from_slice(&node.to_be_bytes());
    segments
}

/// The same with a GRH: traffic class 0xa5, hop limit 9, flow label 0x12345.
fn global(link: LinkLayer, gid: [u8; 16], node: u16, qpn: u32, qkey: u32) -> [[u8; 16]; 3] {
    let mut segments = address(node, qpn, qkey);
    segments[1][10..12].copy_from_slice(&[0xa5, 9]);
    let flag = u32::from(link == LinkLayer::InfiniBand) << 30;
    segments[1][12..].copy_from_slice(&(flag | 0x1_2345).to_be_bytes());
    segments[2] = gid;
    segments
}

/// A queue pair on each device.
struct Ends {
    world: World,
    ends: Vec<End>,
}

struct End {
    driver: Driver,
    qp: DriverQp,
    cq: DriverCq,
    at: u64,
    key: u32,
}

impl Ends {
    fn new(devices: usize, link: LinkLayer, process: fn(usize) -> Process) -> Ends {
        let world = World::on_fabric(devices, link);
        let ends = world.devices.iter().map(|device| {
            let mut driver = Driver::new(device, process(1 << 20));
            let cq = driver.cq(64, 128);
            let qp = driver.qp(Transport::Ud, [&cq, &cq]);
            driver.connect(&qp, 0);
            let (at, key) = driver.region(ROOM, ALL);
            End {
                driver,
                qp,
                cq,
                at,
                key,
            }
        });
        let ends = ends.collect();
        Ends { world, ends }
    }

    fn polled(&mut self, end: usize) -> Vec<Cqe> {
        self.world.settle();
        let end = &mut self.ends[end];
        std::iter::from_fn(|| end.driver.poll(&mut end.cq)).collect()
    }
}

impl End {
    fn receive(&mut self, offset: usize, len: usize) {
        let segment = data(self.at + offset as u64, self.key, len as u32);
        self.driver.post_recv(&mut self.qp, &[segment]);
    }

    fn send(&mut self, opcode: u8, to: [[u8; 16]; 3], len: usize) {
        let mut segments = to.to_vec();
        segments.push(data(self.at, self.key, len as u32));
        let work = Work {
            imm: 0x0a0b_0c0d,
            ..Work::new(opcode, &segments)
        };
        self.driver.send(&mut self.qp, &work);
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.driver.process.read(self.at + offset as u64, len)
    }
}

#[test]
fn every_length_with_and_without_a_grh() {
    for process in [Process::local as fn(usize) -> Process, Process::other] {
        for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
            let mut ends = Ends::new(2, link, process);
            let mut counter = 0;
            for len in [0, 1, 64, 65, 1000, 4096] {
                for has_grh in [false, true] {
                    if !has_grh && link == LinkLayer::Ethernet {
                        continue;
                    }
                    let [a, b] = &mut ends.ends[..] else { panic!() };
                    let bytes = pattern(len as u64, len);
                    a.driver.process.write(a.at, &bytes);
                    b.driver.process.write(b.at, &[0xee; GRH]);
                    b.receive(0, 8192);
                    let gid = gid_of(link, 2);
                    let to = if has_grh {
                        let node = if link == LinkLayer::InfiniBand {
                            2
                        } else {
                            0xc000
                        };
                        global(link, gid, node, b.qp.qpn, QKEY)
                    } else {
                        address(2, b.qp.qpn, QKEY)
                    };
                    a.send(SEND_IMM, to, len);
                    let from = a.qp.qpn;
                    let sent = ends.polled(0);
                    assert_eq!((sent.len(), sent[0].opcode), (1, CqeOpcode::Req));
                    let got = ends.polled(1);
                    assert_eq!(got.len(), 1, "{link:?} {len}");
                    let cqe = got[0];
                    assert_eq!((cqe.opcode, cqe.imm), (CqeOpcode::RespSendImm, 0x0a0b_0c0d));
                    assert_eq!(cqe.byte_count as usize, GRH + len);
                    assert_eq!((cqe.wqe_counter, cqe.source_qpn), (counter, from));
                    assert_eq!(cqe.grh, u8::from(has_grh));
                    counter += 1;
                    let b = &ends.ends[1];
                    assert_eq!(b.read(GRH, len), bytes);
                    let head = b.read(0, GRH);
                    match (link, has_grh) {
                        (LinkLayer::InfiniBand, false) => assert_eq!(head, [0xee; GRH]),
                        (LinkLayer::InfiniBand, true) => {
                            assert_eq!(head[..4], [0x6a, 0x51, 0x23, 0x45]);
                            let len = (12 + 8 + 4 + len).next_multiple_of(4) + 4;
                            assert_eq!(head[4..6], (len as u16).to_be_bytes());
                            assert_eq!(head[6..8], [0x1b, 9]);
                            assert_eq!(head[8..24], gid_of(link, 1));
                            assert_eq!(head[24..], gid);
                            assert_eq!(cqe.source_lid, 1);
                        }
                        (LinkLayer::Ethernet, _) => {
                            assert_eq!(head[..20], [0; 20]);
                            assert_eq!(head[20..22], [0x45, 0xa5]);
                            assert_eq!(head[28..30], [9, 17]);
                            assert_eq!(head[32..], [127, 0, 0, 1, 127, 0, 0, 2]);
                            assert_eq!((cqe.source_lid, cqe.sl), (0, 2));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn datagram_with_wrong_queue_key_is_dropped() {
    let mut ends = Ends::new(1, LinkLayer::InfiniBand, Process::local);
    let qpn = ends.ends[0].qp.qpn;
    ends.ends[0].receive(1024, 1024);
    for (qkey, opens) in [(0x1112, false), (0, false), (0x8000_0000, true)] {
        // The highest bit stands for the sender's own.
        ends.ends[0].send(SEND, address(1, qpn, qkey), 8);
        let polled = ends.polled(0);
        assert_eq!(polled.len(), 1 + usize::from(opens), "{qkey:#x}");
        assert!(polled.iter().all(|cqe| cqe.syndrome == 0));
    }
    // No receive: lost as well. The same for a missing receiver, by number or by address.
    for (node, qpn) in [(1, qpn), (1, qpn ^ 1), (2, qpn), (0, qpn), (64, qpn)] {
        ends.ends[0].send(SEND, address(node, qpn, QKEY), 8);
        let polled = ends.polled(0);
        assert_eq!((polled.len(), polled[0].syndrome), (1, 0));
    }
}

#[test]
fn datagram_longer_than_packet_or_receive_fails() {
    let mut ends = Ends::new(1, LinkLayer::InfiniBand, Process::local);
    let qpn = ends.ends[0].qp.qpn;
    ends.ends[0].receive(8192, 8192);
    ends.ends[0].send(SEND, address(1, qpn, QKEY), 4097);
    let polled = ends.polled(0);
    assert_eq!(polled.len(), 1);
    assert_eq!(polled[0].syndrome, Syndrome::LocalLength as u8);
    let end = &ends.ends[0];
    assert_eq!(end.driver.state(&end.qp), 5);
    drop(ends);
    for room in [GRH + 99, GRH, 10] {
        let mut ends = Ends::new(2, LinkLayer::InfiniBand, Process::local);
        let qpn = ends.ends[1].qp.qpn;
        ends.ends[1].receive(0, room);
        ends.ends[0].send(SEND, address(2, qpn, QKEY), 100);
        assert_eq!(ends.polled(0)[0].syndrome, 0);
        let got = ends.polled(1);
        assert_eq!(
            (got.len(), got[0].syndrome),
            (1, Syndrome::LocalLength as u8)
        );
        let end = &ends.ends[1];
        assert_eq!(end.driver.state(&end.qp), 6);
    }
}

#[test]
fn multicast_reaches_members_on_all_devices() {
    for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
        let mut ends = Ends::new(4, link, Process::local);
        let mut gid = [0; 16];
        gid[0] = 0xff;
        gid[15] = 7;
        for member in [0, 1, 3] {
            let end = &ends.ends[member];
            let attached = end.driver.client.attach_multicast(end.qp.qpn, gid, 0xc001);
            attached.unwrap();
        }
        for round in 0..3 {
            for end in &mut ends.ends {
                end.receive(GRH, 1000);
            }
            if round == 2 {
                let end = &ends.ends[3];
                let detached = end.driver.client.detach_multicast(end.qp.qpn, gid, 0xc001);
                detached.unwrap();
            }
            let bytes = pattern(round, 200);
            let a = &mut ends.ends[0];
            a.driver.process.write(a.at, &bytes);
            a.send(SEND, global(link, gid, 0xc001, 0xff_ffff, QKEY), 200);
            for node in 0..4 {
                let polled = ends.polled(node);
                let got = polled.iter().filter(|cqe| cqe.opcode.is_receive()).count();
                let member = node < 2 || (node == 3 && round < 2);
                assert_eq!(
                    got,
                    usize::from(member),
                    "{link:?} node {node} round {round}"
                );
                if member && node > 0 {
                    assert_eq!(ends.ends[node].read(2 * GRH, 200), bytes);
                }
            }
        }
        // This group has no members.
        gid[15] = 8;
        ends.ends[0].send(SEND, global(link, gid, 0xc001, 0xff_ffff, QKEY), 8);
        assert_eq!(ends.polled(0).len(), 1);
        assert_eq!(ends.polled(1), []);
    }
}

#[test]
fn blocked_loopback_drops_only_own_multicast() {
    let mut ends = Ends::new(2, LinkLayer::InfiniBand, Process::local);
    let mut gid = [0; 16];
    gid[0] = 0xff;
    let end = &mut ends.ends[0];
    let mut parts = end.driver.qp_parts(Transport::Ud, [&end.cq, &end.cq]);
    parts.blocks_loopback = true;
    end.qp = end.driver.qp_of(parts);
    end.driver.connect(&end.qp, 0);
    for end in &mut ends.ends {
        let attached = end.driver.client.attach_multicast(end.qp.qpn, gid, 0xc000);
        attached.unwrap();
        end.receive(0, 1000);
    }
    for from in 0..2 {
        let to = global(LinkLayer::InfiniBand, gid, 0xc000, 0xff_ffff, QKEY);
        ends.ends[from].send(SEND, to, 8);
        let received = |cqes: Vec<Cqe>| cqes.iter().filter(|cqe| cqe.opcode.is_receive()).count();
        let counts = [received(ends.polled(0)), received(ends.polled(1))];
        // The second gets both, but has one receive; the first gets only the second's.
        assert_eq!(counts, if from == 0 { [0, 1] } else { [1, 0] });
    }
}

#[test]
fn datagrams_over_a_bad_wire_come_whole_or_not() {
    for seed in 0..20 {
        let mut ends = Ends::new(2, LinkLayer::Ethernet, Process::local);
        ends.world.set_faults(Faults {
            loss: 0.2,
            duplicate: 0.1,
            reorder: 0.2,
            delay_ns: 500,
            seed,
            ..Faults::default()
        });
        let mut came = 0;
        for number in 0..50u64 {
            let [a, b] = &mut ends.ends[..] else { panic!() };
            for _ in 0..2 {
                b.receive(0, 2048);
            }
            a.driver.process.write(a.at, &pattern(number, 777));
            let to = global(
                LinkLayer::Ethernet,
                gid_of(LinkLayer::Ethernet, 2),
                0,
                b.qp.qpn,
                QKEY,
            );
            a.send(SEND, to, 777);
            assert_eq!(ends.polled(0).len(), 1);
            for cqe in ends.polled(1) {
                assert_eq!(cqe.wqe_counter, came);
                assert_eq!(ends.ends[1].read(GRH, 777), pattern(number, 777));
                came += 1;
            }
            // Receives that were not needed pile up.
            if ends.ends[1].qp.received.wrapping_sub(came) > 60 {
                break;
            }
        }
        assert!(came > 10, "seed {seed}: {came}");
    }
}

/// As `is_valid_mcast_lid` of the kernel, and its list of memberships by LID and GID.
#[test]
fn multicast_lid_is_checked_and_names_the_membership() {
    for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
        let mut ends = Ends::new(2, link, Process::local);
        let mut gid = [0; 16];
        (gid[0], gid[15]) = (0xff, 9);
        let expected = match link {
            LinkLayer::InfiniBand => Err(libc::EINVAL),
            LinkLayer::Ethernet => Ok(()),
        };
        let (client, qpn) = (&ends.ends[1].driver.client, ends.ends[1].qp.qpn);
        for lid in [0, 1, 0xbfff, 0xffff] {
            assert_eq!(client.attach_multicast(qpn, gid, lid), expected, "{lid:#x}");
            assert_eq!(client.detach_multicast(qpn, gid, lid), expected, "{lid:#x}");
        }
        for lid in [0xc000, 0xc000, 0xfffe] {
            assert_eq!(client.attach_multicast(qpn, gid, lid), Ok(()));
        }
        assert_eq!(
            client.detach_multicast(qpn, gid, 0xc001),
            Err(libc::EINVAL),
            "it has not joined by this LID"
        );
        // One copy, though it has joined twice.
        for _ in 0..2 {
            ends.ends[1].receive(0, 1000);
        }
        ends.ends[0].send(SEND, global(link, gid, 0xc000, 0xff_ffff, QKEY), 8);
        assert_eq!(ends.polled(1).len(), 1, "{link:?}");
        let client = &ends.ends[1].driver.client;
        for (lid, expected) in [
            (0xc000, Ok(())),
            (0xc000, Err(libc::EINVAL)),
            (0xfffe, Ok(())),
            (0xfffe, Err(libc::EINVAL)),
        ] {
            assert_eq!(client.detach_multicast(qpn, gid, lid), expected, "{lid:#x}");
        }
    }
}
