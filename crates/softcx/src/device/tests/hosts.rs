//! Devices that reach each other by UDP. The transport's own tests run by UDP, too, with `DOORBELL_SOFTCX_WIRE=udp`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use crate::device::capture::FrameCapture;
use crate::device::client::Transport;
use crate::device::management::{MAD_BYTES, QP1, QP1_QKEY};
use crate::device::packet::{Header, PacketKind, Service, flag, psn_add};
use crate::device::roce::{
    MAX_FRAME_BYTES, ROCE_PORT, UdpFlow, gid_of_address, notice_bytes, seal_frame, write_headers,
};
use crate::device::tests::datagrams::address as address_of_datagram;
use crate::device::tests::driver::{ALL, Driver, Process, Work, data};
use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::udp::mark_congested;
use crate::device::{Attributes, Device, DeviceOptions, Faults, LinkLayer, WireKind};
use crate::{Error, StateKind};
use doorbell_wire::mlx5::{Datagram, SendRequest, Syndrome};

const SEND: u8 = 0x0a;
const ROOM: usize = 1 << 20;
const HALF: usize = ROOM / 2;

fn pair(world: &mut World) -> (End, End) {
    world.pair(Shape {
        memory_bytes: ROOM,
        ..Shape::default()
    })
}

fn address(device: &Device) -> Ipv4Addr {
    let [.., a, b, c, d] = device.gid();
    Ipv4Addr::new(a, b, c, d)
}

/// Writes half of the memory, from `a` to `b`.
fn write_half(world: &mut World, (a, b): (&mut End, &End), seed: u64) {
    a.write(0, &pattern(seed, HALF));
    let list = [a.segment(0, HALF)];
    let request = SendRequest::write(b.at(0), b.key).segments(&list);
    a.send(&request.signaled(true));
    world.settle();
}

fn is_written(a: &mut End, b: &End, seed: u64) {
    let done = a.all_sent();
    assert!(matches!(done[..], [(_, None)]), "{done:?}");
    assert!(b.read(0, HALF) == pattern(seed, HALF), "seed {seed}");
}

#[test]
fn every_device_has_an_address_of_its_own_and_a_wrong_one_is_refused() {
    let world = World::by_udp(3);
    let mut gids: Vec<_> = world.devices.iter().map(Device::gid).collect();
    gids.sort_unstable();
    gids.dedup();
    assert_eq!(gids.len(), 3);
    let refused = |address: &str| {
        let wire = WireKind::Udp(address.parse().ok());
        match Device::without_engine_on(wire) {
            Err(Error::State { kind, .. }) => kind,
            other => panic!("{address}: {other:?}"),
        }
    };
    let taken = address(&world.devices[0]).to_string();
    assert_eq!(refused(&taken), StateKind::Exhausted);
    // An address for documentation (RFC 5737), which no host has.
    assert_eq!(refused("192.0.2.1"), StateKind::NotFound);
    assert_eq!(refused("0.0.0.0"), StateKind::Unsupported);
    assert_eq!(refused("fe80::1"), StateKind::Unsupported);
}

#[test]
fn wires_are_read_by_name() {
    assert_eq!(WireKind::parse("shm"), Ok(WireKind::SharedMemory));
    assert_eq!(WireKind::parse("udp"), Ok(WireKind::Udp(None)));
    let v6 = "fd00::7".parse().ok();
    assert_eq!(WireKind::parse("udp:fd00::7"), Ok(WireKind::Udp(v6)));
    assert_eq!(WireKind::parse("udp+shm"), Ok(WireKind::UdpAndMemory(None)));
    assert_eq!(
        WireKind::parse("udp+shm:fd00::7"),
        Ok(WireKind::UdpAndMemory(v6))
    );
    for bad in ["", "tcp", "udp:", "udp:host", "shm:1.2.3.4"] {
        assert!(WireKind::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn devices_of_different_wires_do_not_connect() {
    let near = Device::without_engine_on(WireKind::SharedMemory).unwrap();
    let far = Device::without_engine_on(WireKind::Udp(None)).unwrap();
    let ends = [near, far].map(|device| End::new(&device, Shape::default()));
    for (end, other) in [(0, 1), (1, 0)] {
        let local = ends[other].qp.local();
        ends[end].qp.init(Shape::default().attributes).unwrap();
        let refused = ends[end].qp.connect(&local);
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
    }
}

/// One acknowledgement answers many packets.
#[test]
fn a_long_write_is_acknowledged_by_few_packets() {
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    write_half(&mut world, (&mut a, &b), 1);
    is_written(&mut a, &b, 1);
    let [sent, answered] = [0, 1].map(|at: usize| world.devices[at].counters().packets_sent);
    let packets = (HALF as u64).div_ceil(4096);
    assert!(sent >= packets, "{sent}");
    assert!(
        (1..=packets / 4).contains(&answered),
        "{answered} of {sent}"
    );
}

/// By the refusal of what comes behind it, long before the time of the requester is over.
#[test]
fn a_lost_packet_is_sent_again_because_of_a_nak() {
    let mut world = World::by_udp(2);
    let attributes = Attributes {
        // 17 s.
        ack_timeout: 22,
        ..Attributes::default()
    };
    let (mut a, b) = world.pair(Shape {
        attributes,
        memory_bytes: ROOM,
        ..Shape::default()
    });
    world.devices[0].set_faults(Faults {
        drop_nth: 3,
        ..Faults::default()
    });
    write_half(&mut world, (&mut a, &b), 1);
    is_written(&mut a, &b, 1);
    assert_eq!(world.devices[0].counters().retransmissions, 1);
    assert!(world.now_ns < 1_000_000_000, "{}", world.now_ns);
}

#[test]
fn long_writes_and_reads_survive_losses() {
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    for (seed, loss) in [(1, 0.0), (2, 0.01), (3, 0.03)] {
        world.set_faults(Faults {
            loss,
            seed,
            ..Faults::default()
        });
        write_half(&mut world, (&mut a, &b), seed);
        is_written(&mut a, &b, seed);
        let list = [a.segment(HALF, HALF)];
        let request = SendRequest::read(b.at(0), b.key).segments(&list);
        a.send(&request.signaled(true));
        world.settle();
        assert!(matches!(a.all_sent()[..], [(_, None)]));
        assert!(a.read(HALF, HALF) == pattern(seed, HALF));
    }
    let counters = world.devices[0].counters();
    assert!(counters.retransmissions > 0, "{counters:?}");
}

/// A peer without faults, such as a kernel's, loses no packet that it sends. Responses and acknowledgements are lost here.
#[test]
fn long_writes_and_reads_survive_the_loss_of_what_arrives() {
    for mut world in [World::new(2), World::by_udp(2)] {
        let (mut a, b) = pair(&mut world);
        for (seed, arrival_loss) in [(1, 0.01), (2, 0.03)] {
            world.devices[0].set_faults(Faults {
                arrival_loss,
                seed,
                ..Faults::default()
            });
            write_half(&mut world, (&mut a, &b), seed);
            is_written(&mut a, &b, seed);
            let list = [a.segment(HALF, HALF)];
            let request = SendRequest::read(b.at(0), b.key).segments(&list);
            a.send(&request.signaled(true));
            world.settle();
            assert!(matches!(a.all_sent()[..], [(_, None)]));
            assert!(a.read(HALF, HALF) == pattern(seed, HALF));
        }
        let [one, other] = [0, 1].map(|at: usize| world.devices[at].counters());
        assert!(one.packets_dropped > 0, "{one:?}");
        assert!(one.retransmissions > 0, "{one:?}");
        assert_eq!(other.packets_dropped, 0, "{other:?}");
    }
    // All of them: a peer that is silent.
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    world.devices[0].set_faults(Faults {
        arrival_loss: 1.0,
        ..Faults::default()
    });
    write_half(&mut world, (&mut a, &b), 3);
    let done = a.all_sent();
    assert!(
        matches!(done[..], [(_, Some(Syndrome::TransportRetryExc))]),
        "{done:?}"
    );
}

/// The packets of a write that leave before the other host answers.
fn burst(world: &mut World, (a, b): (&mut End, &End), seed: u64) -> u64 {
    a.write(0, &pattern(seed, HALF));
    let list = [a.segment(0, HALF)];
    let request = SendRequest::write(b.at(0), b.key).segments(&list);
    a.send(&request.signaled(true));
    let before = world.devices[0].counters().packets_sent;
    for _ in 0..50 {
        world.now_ns += 2_000;
        world.devices[0].turn_at(world.now_ns);
    }
    let sent = world.devices[0].counters().packets_sent - before;
    world.settle();
    is_written(a, b, seed);
    sent
}

#[test]
fn congestion_is_told_to_the_sender_which_slows_down() {
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    let fast = burst(&mut world, (&mut a, &b), 1);
    assert_eq!(world.devices[0].counters().congestion_notices, 0);
    let core = world.devices[0].lock();
    core.parts.udp.as_ref().unwrap().departures.mark_congested();
    drop(core);
    burst(&mut world, (&mut a, &b), 2);
    assert!(world.devices[0].counters().congestion_notices > 0);
    let slow = burst(&mut world, (&mut a, &b), 3);
    // Half, and what the window has grown by meanwhile.
    assert!(slow <= fast / 2 + 4, "{slow} packets after {fast}");
    assert_eq!(world.devices[1].counters().congestion_notices, 0);
}

/// On an interface that takes packets of 1024 bytes: what the kernel would refuse as too long is refused before.
#[test]
fn datagram_longer_than_the_mtu_of_the_port_is_a_local_length_error() {
    let mut world = World::by_udp(1);
    world.devices[0]
        .lock()
        .parts
        .udp
        .as_mut()
        .unwrap()
        .interface
        .mtu = 3;
    let mut driver = Driver::new(&world.devices[0], Process::local(1 << 20));
    let mut cq = driver.cq(16, 64);
    let mut qp = driver.qp(Transport::Ud, [&cq, &cq]);
    driver.connect(&qp, 0);
    let (at, key) = driver.region(4096, ALL);
    for (len, syndrome) in [(1024, 0), (1025, Syndrome::LocalLength as u8)] {
        let mut segments = address_of_datagram(1, qp.qpn, 0x1111).to_vec();
        segments.push(data(at, key, len));
        driver.send(&mut qp, &Work::new(SEND, &segments));
        world.settle();
        let cqe = driver.poll(&mut cq).unwrap();
        assert_eq!(cqe.syndrome, syndrome, "{len} bytes");
    }
    // The send queue is in error, as after any local error of a UD queue pair.
    assert_eq!(driver.state(&qp), 5);
}

#[test]
fn multicast_is_refused() {
    let wire = WireKind::Udp(None);
    let options = DeviceOptions {
        fabric: format!("multicast-{}", std::process::id()),
        link: LinkLayer::Ethernet,
        wire,
        ..DeviceOptions::default()
    };
    let device = Device::on_fabric_without_engine(&options).unwrap();
    assert!(device.gid().starts_with(&[0; 10]));
    let mut driver = Driver::new(&device, Process::local(1 << 20));
    let cq = driver.cq(16, 64);
    let qp = driver.qp(Transport::Ud, [&cq, &cq]);
    let mut gid = [0; 16];
    gid[0] = 0xff;
    let refused = driver.client.attach_multicast(qp.qpn, gid, 0);
    assert_eq!(refused, Err(libc::EOPNOTSUPP));
    let no_ethernet = DeviceOptions {
        link: LinkLayer::InfiniBand,
        ..options
    };
    let refused = Device::on_fabric_without_engine(&no_ethernet);
    assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
}

/// Bits that are the same in each run.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) as usize
    }
}

/// A frame that the peer could have sent, but for its address.
fn frame(from: Ipv4Addr, to: Ipv4Addr, source_port: u16, header: &Header, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; MAX_FRAME_BYTES];
    let header = Header {
        payload_bytes: len as u16,
        total_bytes: len as u32,
        ..*header
    };
    let at = write_headers(&header, bytes.first_chunk_mut().unwrap()).unwrap();
    bytes[at..at + len].fill(0xee);
    let gid = |address| gid_of_address(IpAddr::V4(address));
    let flow = UdpFlow {
        from: gid(from),
        to: gid(to),
        source_port,
        identification: 0,
    };
    let end = seal_frame(&flow, &mut bytes, at + len);
    bytes.truncate(end);
    bytes
}

#[test]
fn datagrams_of_a_stranger_have_no_effect_and_are_counted() {
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    let local = b.qp.local();
    let target = address(&world.devices[1]);
    let peer = address(&world.devices[0]);
    // One at an address of its own, with right checksums; and one at the address of the peer, with wrong ones.
    let own = Ipv4Addr::new(127, 9, 9, 9);
    let stranger = UdpSocket::bind((own, 0)).unwrap();
    let liar = UdpSocket::bind((peer, 0)).unwrap();
    let port = |socket: &UdpSocket| socket.local_addr().unwrap().port();
    let mut bits = Bits(7);
    for round in 1..=40 {
        a.write(0, &pattern(round, HALF));
        let list = [a.segment(0, HALF)];
        let request = SendRequest::write(b.at(0), b.key).segments(&list);
        a.send(&request.signaled(true));
        let dropped = world.devices[1].counters().packets_dropped;
        let mut thrown = 0;
        for _ in 0..25 {
            let kind = [
                PacketKind::Write,
                PacketKind::Send,
                PacketKind::ReadRequest,
                PacketKind::Ack,
                PacketKind::ReadResponse,
                PacketKind::FetchAdd,
            ][bits.next() % 6];
            // Around the packets that are on their way.
            let psn = psn_add(a.qp.local().psn, (bits.next() % 20_000) as u32);
            let mut header = Header::new(kind, local.qpn, psn, 0);
            header.flags = flag::FIRST | flag::LAST;
            (header.addr, header.rkey) = (b.at(0), b.key);
            let has_payload = !matches!(
                kind,
                PacketKind::ReadRequest | PacketKind::Ack | PacketKind::FetchAdd
            );
            let len = if has_payload { bits.next() % 1024 } else { 0 };
            let whole = frame(own, target, port(&stranger), &header, len);
            stranger.send_to(&whole, (target, ROCE_PORT)).unwrap();
            let mut spoiled = frame(peer, target, port(&liar), &header, len);
            // Three bits, of which none is in the byte that the checksum does not cover.
            for _ in 0..3 {
                let at = 5 + bits.next() % (spoiled.len() - 5);
                spoiled[at] ^= 1 << (bits.next() % 8);
            }
            if bits.next().is_multiple_of(4) {
                spoiled.truncate(bits.next() % spoiled.len());
            }
            if bits.next().is_multiple_of(4) {
                spoiled = (0..bits.next() % 6000).map(|_| bits.0 as u8).collect();
            }
            liar.send_to(&spoiled, (target, ROCE_PORT)).unwrap();
            let mut notice = vec![0; 64];
            let unpadded = notice_bytes(local.qpn, 0xffff);
            notice[..unpadded.len()].copy_from_slice(&unpadded);
            // With a right checksum, so that the address alone shows that it is a stranger's.
            let gid = |address| gid_of_address(IpAddr::V4(address));
            let flow = UdpFlow {
                from: gid(own),
                to: gid(target),
                source_port: port(&stranger),
                identification: 0,
            };
            let end = seal_frame(&flow, &mut notice, unpadded.len());
            stranger
                .send_to(&notice[..end], (target, ROCE_PORT))
                .unwrap();
            // Datagrams: for the connected queue pair, for a group, and for the connection manager, with a message that it has and without.
            let header = Header {
                flags: flag::FIRST | flag::LAST,
                service: Service::Datagram,
                dst_qpn: [local.qpn, Datagram::MULTICAST_QPN, QP1][bits.next() % 3],
                qkey: [QP1_QKEY, 0x1111][bits.next() % 2],
                source_qpn: bits.next() as u32 & 0xff_ffff,
                ..Header::new(PacketKind::Send, 0, psn, 0)
            };
            let len = [MAD_BYTES, bits.next() % 1024][bits.next() % 2];
            let datagram = frame(own, target, port(&stranger), &header, len);
            stranger.send_to(&datagram, (target, ROCE_PORT)).unwrap();
            // Frames that are right for the addresses of IPv6, which the socket does not have.
            let flow = UdpFlow {
                from: [0xfd; 16],
                to: [0xfe; 16],
                source_port: port(&stranger),
                identification: 0,
            };
            let mut v6 = datagram;
            let unpadded = v6.len() - 4;
            seal_frame(&flow, &mut v6, unpadded);
            stranger.send_to(&v6, (target, ROCE_PORT)).unwrap();
            thrown += 5;
            world.turn();
        }
        world.settle();
        is_written(&mut a, &b, round);
        let counters = world.devices[1].counters();
        assert_eq!(counters.packets_dropped - dropped, thrown, "round {round}");
        assert_eq!(counters.congestion_notices, 0);
    }
    assert_eq!(world.devices[0].counters().retransmissions, 0);
}

/// Of each kind one with a right checksum and one with a wrong one: for no queue pair, for a group, and for the connection manager.
#[test]
fn datagrams_of_a_stranger_by_ipv6_are_counted() {
    let own = Ipv6Addr::LOCALHOST;
    let Ok(device) = Device::without_engine_on(WireKind::Udp(Some(own.into()))) else {
        eprintln!("WAIVED: no IPv6 here, or the port is in use");
        return;
    };
    let mut world = World::new(0);
    world.devices.push(device);
    let stranger = UdpSocket::bind((own, 0)).unwrap();
    let flow = UdpFlow {
        from: own.octets(),
        to: own.octets(),
        source_port: stranger.local_addr().unwrap().port(),
        identification: 0,
    };
    let mut thrown = 0;
    for qpn in [0x4711, Datagram::MULTICAST_QPN, QP1] {
        for service in [Service::Reliable, Service::Unreliable, Service::Datagram] {
            for spoiled in [false, true] {
                let header = Header {
                    flags: flag::FIRST | flag::LAST,
                    service,
                    qkey: QP1_QKEY,
                    ..Header::new(PacketKind::Send, qpn, 0, 0)
                };
                let mut bytes = vec![0; MAX_FRAME_BYTES];
                let at = write_headers(&header, bytes.first_chunk_mut().unwrap()).unwrap();
                let end = seal_frame(&flow, &mut bytes, at);
                bytes[end - 1] ^= u8::from(spoiled);
                stranger.send_to(&bytes[..end], (own, ROCE_PORT)).unwrap();
                thrown += 1;
            }
        }
    }
    world.settle();
    let counters = world.devices[0].counters();
    assert_eq!(
        (counters.packets_dropped, counters.packets_received),
        (thrown, 0)
    );
}

/// Queue pair 1 has an agent for one class. What is of another, or is no management datagram, is dropped, and the counters say so.
#[test]
fn management_datagrams_of_other_classes_are_dropped_and_counted() {
    let options = DeviceOptions {
        fabric: format!("classes-{}", std::process::id()),
        link: LinkLayer::Ethernet,
        wire: WireKind::Udp(None),
        ..DeviceOptions::default()
    };
    let device = Device::on_fabric_without_engine(&options).unwrap();
    device.mads().open();
    let target = address(&device);
    let mut world = World::new(0);
    world.devices.push(device);
    let own = Ipv4Addr::new(127, 9, 9, 8);
    let stranger = UdpSocket::bind((own, 0)).unwrap();
    let port = stranger.local_addr().unwrap().port();
    let header = Header {
        flags: flag::FIRST | flag::LAST,
        service: Service::Datagram,
        qkey: QP1_QKEY,
        ..Header::new(PacketKind::Send, QP1, 0, 0)
    };
    for (head, attribute, is_taken) in [
        ([1, 7, 2, 3], 0x10, true),
        ([1, 7, 2, 3], 0x19, false),
        ([1, 7, 1, 3], 0x10, false),
        ([1, 3, 2, 1], 0x10, false),
    ] {
        let before = world.devices[0].counters();
        let mut bytes = frame(own, target, port, &header, MAD_BYTES);
        let start = bytes.len() - 4 - MAD_BYTES;
        bytes[start..start + 4].copy_from_slice(&head);
        bytes[start + 16..start + 18].copy_from_slice(&[0, attribute]);
        let gid = |address| gid_of_address(IpAddr::V4(address));
        let flow = UdpFlow {
            from: gid(own),
            to: gid(target),
            source_port: port,
            identification: 0,
        };
        seal_frame(&flow, &mut bytes, start + MAD_BYTES);
        stranger.send_to(&bytes, (target, ROCE_PORT)).unwrap();
        world.settle();
        let counters = world.devices[0].counters();
        let news = (
            counters.packets_received - before.packets_received,
            counters.packets_dropped - before.packets_dropped,
        );
        assert_eq!(news, if is_taken { (1, 0) } else { (0, 1) }, "{head:?}");
    }
    let kept = world.devices[0].mads().wait(Some(Duration::ZERO));
    assert_eq!(kept.len(), 1);
}

/// The sockets that frames leave by have ports, too, and nobody reads there: the kernel keeps a few datagrams, and not the megabytes of a buffer.
#[test]
fn what_a_stranger_sends_to_the_ports_of_flows_is_dropped_by_the_kernel() {
    const MOST_BYTES: u64 = 16 << 10;
    let world = World::by_udp(1);
    let own = address(&world.devices[0]);
    let at = format!("{:08X}", u32::from_ne_bytes(own.octets()));
    // Port, bytes that wait, datagrams dropped, of each socket at the address.
    let sockets = || {
        let text = std::fs::read_to_string("/proc/net/udp").unwrap();
        let of_line = |line: &str| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let port = fields.get(1)?.strip_prefix(&at)?.strip_prefix(':')?;
            let port = u16::from_str_radix(port, 16).ok()?;
            let waiting = u64::from_str_radix(fields[4].split_once(':')?.1, 16).ok()?;
            let dropped = fields.last()?.parse::<u64>().ok()?;
            (port != ROCE_PORT).then_some((port, waiting, dropped))
        };
        text.lines().filter_map(of_line).collect::<Vec<_>>()
    };
    let ports = sockets();
    assert_eq!(ports.len(), 4, "{ports:?}");
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    for (port, ..) in &ports {
        for _ in 0..1000 {
            stranger.send_to(&[0; 1024], (own, *port)).unwrap();
        }
    }
    let of_flows = |port: u16| ports.iter().any(|(flow, ..)| *flow == port);
    // The stranger's own socket may have the same address.
    let after = sockets();
    for (port, waiting, dropped) in after.into_iter().filter(|(port, ..)| of_flows(*port)) {
        assert!(waiting <= MOST_BYTES, "{waiting} bytes at port {port}");
        assert!(dropped > 900, "{dropped} datagrams at port {port}");
    }
}

/// Until then the frames of a full socket buffer waited for the end of whatever sleep the engine had begun.
#[test]
fn frames_that_the_kernel_has_not_taken_are_due_soon() {
    let world = World::by_udp(1);
    let mut core = world.devices[0].lock();
    assert_eq!(core.next_due_ns(0), None);
    let departures = &mut core.parts.udp.as_mut().unwrap().departures;
    departures.push(0, [0; 16], 0, 64);
    departures.use_slots(1);
    let due = core.next_due_ns(1_000).unwrap();
    assert!((1_001..=101_000).contains(&due), "{due}");
}

/// The frames of a capture, from the Ethernet header on.
fn captured(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let mut rest = &bytes[24..];
    let mut frames = Vec::new();
    while let Some((head, behind)) = rest.split_at_checked(16) {
        let len = u32::from_le_bytes(head[8..12].try_into().unwrap()) as usize;
        frames.push(behind[..len].to_vec());
        rest = &behind[len..];
    }
    frames
}

/// A packet of the peer with the mark of a congested router, from a stack that numbers its packets and has another partition key: the capture has it as it
/// was on the wire, and the notice that answers it.
#[test]
fn capture_has_the_numbers_and_marks_of_frames_that_arrive_and_the_notices_that_leave() {
    const NUMBER: u16 = 0x7a31;
    let path = std::env::temp_dir().join(format!("notices-{}.pcap", std::process::id()));
    let mut world = World::by_udp(2);
    let (a, b) = pair(&mut world);
    let capture = FrameCapture::open(&path).unwrap();
    world.devices[1].lock().parts.capture = Some(Box::new(capture));
    let (peer, target) = (address(&world.devices[0]), address(&world.devices[1]));
    let socket = UdpSocket::bind((peer, 0)).unwrap();
    socket.set_ttl(33).unwrap();
    mark_congested(&socket.try_clone().unwrap().into());
    let header = Header {
        flags: flag::FIRST | flag::LAST,
        ..Header::new(PacketKind::Send, b.qp.local().qpn, a.qp.local().psn, 0)
    };
    let port = socket.local_addr().unwrap().port();
    let mut bytes = frame(peer, target, port, &header, 0);
    bytes[2] = 0x7f;
    let gid = |address| gid_of_address(IpAddr::V4(address));
    let flow = UdpFlow {
        from: gid(peer),
        to: gid(target),
        source_port: port,
        identification: NUMBER,
    };
    let unpadded = bytes.len() - 4;
    seal_frame(&flow, &mut bytes, unpadded);
    socket.send_to(&bytes, (target, ROCE_PORT)).unwrap();
    world.settle();
    assert_eq!(world.devices[0].counters().congestion_notices, 1);
    let frames = captured(&path);
    std::fs::remove_file(&path).unwrap();
    let ip = &frames[0][14..];
    assert_eq!((ip[1], ip[8]), (3, 33), "type of service, time to live");
    assert_eq!(ip[4..6], NUMBER.to_be_bytes());
    assert_eq!(ip[28..], bytes, "so the CRC is right for these headers");
    let sent: Vec<_> = frames[1..].iter().map(|frame| &frame[14..]).collect();
    let notice = sent.iter().find(|ip| ip[28] == 0x81).expect("a notice");
    assert_eq!(notice[28..33], [0x81, 0, 0x7f, 0xff, 0x40]);
    assert_eq!(notice[12..20], [target.octets(), peer.octets()].concat());
}
