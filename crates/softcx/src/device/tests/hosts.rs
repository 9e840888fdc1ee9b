//! Devices that reach each other by UDP. The transport's own tests run by UDP, too, with `DOORBELL_SOFTCX_WIRE=udp`.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use crate::device::client::Transport;
use crate::device::packet::{Header, PacketKind, flag, psn_add};
use crate::device::roce::{
    MAX_FRAME_BYTES, ROCE_PORT, UdpFlow, gid_of_address, notice_bytes, seal_frame, write_headers,
};
use crate::device::tests::driver::{Driver, Process};
use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::{Device, DeviceOptions, Faults, LinkLayer, WireKind};
use crate::{Error, StateKind};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

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

#[test]
fn congestion_is_told_to_the_sender_which_slows_down() {
    let mut world = World::by_udp(2);
    let (mut a, b) = pair(&mut world);
    write_half(&mut world, (&mut a, &b), 1);
    is_written(&mut a, &b, 1);
    assert_eq!(world.devices[0].counters().congestion_notices, 0);
    let core = world.devices[0].lock();
    core.parts.udp.as_ref().unwrap().departures.mark_congested();
    drop(core);
    write_half(&mut world, (&mut a, &b), 2);
    is_written(&mut a, &b, 2);
    assert!(world.devices[0].counters().congestion_notices > 0);
    assert_eq!(world.devices[1].counters().congestion_notices, 0);
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
            let unpadded = notice_bytes(local.qpn);
            notice[..unpadded.len()].copy_from_slice(&unpadded);
            stranger.send_to(&notice, (target, ROCE_PORT)).unwrap();
            thrown += 3;
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
