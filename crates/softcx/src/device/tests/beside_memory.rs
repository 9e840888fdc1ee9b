//! Devices with the wire `udp+shm`: by memory to each other, by UDP to all others.

use std::net::Ipv4Addr;

use crate::device::client::Transport;
use crate::device::tests::datagrams::address as address_of_datagram;
use crate::device::tests::driver::{ALL, Driver, Process, Work, data};
use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::wire::Destination;
use crate::device::{Device, DeviceOptions, Faults, LinkLayer, WireKind};
use doorbell_wire::mlx5::SendRequest;

const BYTES: usize = 30_000;
const UDP: WireKind = WireKind::Udp(None);

/// A wire with an address that no device has by its number, for the `number`th device of the `test`th test here.
fn both(test: u8, number: u8) -> WireKind {
    let pid = std::process::id();
    let address = Ipv4Addr::new(
        127,
        64 + (pid >> 8 & 127) as u8,
        pid as u8,
        test * 10 + number,
    );
    WireKind::UdpAndMemory(Some(address.into()))
}

/// A world of devices with these wires on a fabric of its own.
fn world(test: &str, wires: &[WireKind]) -> World {
    let node = |wire: &WireKind| {
        let options = DeviceOptions {
            fabric: format!("beside-{test}-{}", std::process::id()),
            link: LinkLayer::Ethernet,
            wire: *wire,
            ..DeviceOptions::default()
        };
        Device::on_fabric_without_engine(&options).unwrap()
    };
    let mut world = World::new(0);
    world.devices = wires.iter().map(node).collect();
    world
}

fn route(from: &Device, to: &Device) -> Destination {
    let gid = to.gid();
    from.lock().parts.route_to_host(&gid)
}

/// Without its sockets a device has only the memory.
fn close_sockets(device: &Device) {
    device.lock().parts.udp = None;
}

fn write_and_read(world: &mut World, a: &mut End, b: &End, seed: u64) {
    a.write(0, &pattern(seed, BYTES));
    let list = [a.segment(0, BYTES)];
    let write = SendRequest::write(b.at(0), b.key).segments(&list);
    a.send(&write.signaled(true));
    let list = [a.segment(BYTES, BYTES)];
    let read = SendRequest::read(b.at(0), b.key).segments(&list);
    a.send(&read.signaled(true));
    world.settle();
    let done = a.all_sent();
    assert!(matches!(done[..], [(_, None), (_, None)]), "{done:?}");
    assert!(b.read(0, BYTES) == pattern(seed, BYTES));
    assert!(a.read(BYTES, BYTES) == pattern(seed, BYTES));
}

fn pair(a: &Device, b: &Device) -> (End, End) {
    let (a, b) = (End::new(a, Shape::default()), End::new(b, Shape::default()));
    a.connect(&b);
    b.connect(&a);
    (a, b)
}

#[test]
fn devices_with_both_wires_use_memory_and_reach_the_others_by_udp() {
    let mut world = world("mixed", &[both(1, 1), both(1, 2), UDP]);
    let devices = world.devices.clone();
    let [a, b, far] = &devices[..] else { panic!() };
    assert_eq!(route(a, b), Destination::Lane(2));
    assert_eq!(route(b, a), Destination::Lane(1));
    assert_eq!(route(a, a), Destination::Local);
    assert_eq!(route(a, far), Destination::Host(far.gid()));
    assert_eq!(route(far, a), Destination::Host(a.gid()));
    assert_eq!(route(far, far), Destination::Host(far.gid()));
    for (seed, loss) in [(1, 0.0), (2, 0.1)] {
        // In front of either wire.
        world.set_faults(Faults {
            loss,
            seed,
            ..Faults::default()
        });
        for (one, other) in [(a, far), (b, far), (a, b), (a, a)] {
            let (mut x, mut y) = pair(one, other);
            write_and_read(&mut world, &mut x, &y, seed);
            write_and_read(&mut world, &mut y, &x, seed + 10);
        }
    }
    // The first one by UDP alone.
    for device in [far, a, b] {
        let counters = device.counters();
        assert!(counters.retransmissions > 0, "{counters:?}");
    }
    world.set_faults(Faults::default());
    [a, b].into_iter().for_each(close_sockets);
    for (one, other) in [(a, b), (b, a), (a, a)] {
        let (mut x, y) = pair(one, other);
        write_and_read(&mut world, &mut x, &y, 5);
    }
}

/// The first end was connected before the other device had told its address, so the two directions go different ways.
#[test]
fn packets_of_one_connection_may_come_either_way() {
    let mut world = world("either", &[both(2, 1), UDP]);
    let devices = world.devices.clone();
    let [a, b] = &devices[..] else { panic!() };
    let (mut x, mut y) = (End::new(a, Shape::default()), End::new(b, Shape::default()));
    assert_eq!(route(a, b), Destination::Host(b.gid()));
    x.connect(&y);
    let gid = b.gid();
    let told = (b.lock().parts.fabric.as_mut()).map(|fabric| fabric.tell_host(gid));
    assert_eq!(told, Some(Ok(())));
    assert_eq!(route(b, a), Destination::Lane(1));
    y.connect(&x);
    write_and_read(&mut world, &mut x, &y, 1);
    write_and_read(&mut world, &mut y, &x, 2);
    // What goes one way only is lost now, so this was not by memory alone.
    close_sockets(a);
    let list = [x.segment(0, 8)];
    x.send(&SendRequest::send().segments(&list));
    for _ in 0..20 {
        world.turn();
    }
    assert_eq!(y.received().map(|_| ()), None);
}

#[test]
fn datagrams_have_the_addresses_of_their_devices() {
    let world = &mut world("datagrams", &[both(3, 1), both(3, 2)]);
    let devices = world.devices.clone();
    devices.iter().for_each(close_sockets);
    let mut ends: Vec<_> = (devices.iter())
        .map(|device| {
            let mut driver = Driver::new(device, Process::local(1 << 20));
            let cq = driver.cq(16, 64);
            let qp = driver.qp(Transport::Ud, [&cq, &cq]);
            driver.connect(&qp, 0);
            let region = driver.region(8192, ALL);
            (driver, cq, qp, region)
        })
        .collect();
    let (at, key) = ends[1].3;
    let receive = data(at, key, 4096);
    let (driver, _, qp, _) = &mut ends[1];
    driver.post_recv(qp, &[receive]);
    let mut segments = address_of_datagram(0, qp.qpn, 0x1111).to_vec();
    segments[2] = devices[1].gid();
    let (driver, cq, qp, (from, key)) = &mut ends[0];
    driver.process.write(*from, &pattern(7, 500));
    segments.push(data(*from, *key, 500));
    driver.send(qp, &Work::new(0x0a, &segments));
    while world.now_ns < 100_000 {
        world.now_ns += 1_000;
        devices[0].turn_at(world.now_ns);
    }
    assert_eq!(driver.poll(cq).unwrap().syndrome, 0);
    // The program of the sender ends, and the receiver has not had its turn.
    let releaser = devices[0].lock().fabric().unwrap().node_releaser();
    releaser.release();
    world.settle();
    let (driver, cq, ..) = &mut ends[1];
    assert_eq!(driver.poll(cq).unwrap().byte_count, 540);
    assert_eq!(driver.process.read(at + 40, 500), pattern(7, 500));
    // The IPv4 header in the last 20 bytes of the room for a GRH.
    let addresses = driver.process.read(at + 32, 8);
    assert_eq!(addresses[..4], devices[0].gid()[12..]);
    assert_eq!(addresses[4..], devices[1].gid()[12..]);
}

/// It is no peer of a device with an address, which knows its peers by their addresses.
#[test]
fn packets_of_a_device_without_an_address_are_dropped() {
    let mut world = world("numbered", &[both(5, 1), WireKind::SharedMemory]);
    let devices = world.devices.clone();
    let (mut x, mut y) = (
        End::new(&devices[0], Shape::default()),
        End::new(&devices[1], Shape::default()),
    );
    x.connect(&x);
    y.aim(1, x.qp.qpn());
    let list = [x.segment(0, 64)];
    x.receive(&list);
    let list = [y.segment(0, 64)];
    y.send(&SendRequest::send().segments(&list));
    for _ in 0..50 {
        world.turn();
    }
    assert_eq!(x.received().map(|_| ()), None);
    assert!(devices[0].counters().packets_dropped > 0);
}

#[test]
fn the_address_of_a_killed_device_is_reached_by_udp() {
    let world = world("killed", &[both(6, 1), both(6, 2), both(6, 3)]);
    let [a, b, c] = &world.devices[..] else {
        panic!()
    };
    b.lock().fabric().unwrap().mark_dead();
    assert_eq!(route(a, b), Destination::Host(b.gid()));
    assert_eq!(route(a, c), Destination::Lane(3));
    // Addresses of the other family are no peers, as by UDP alone.
    let v6 = [0xfd; 16];
    c.lock()
        .parts
        .fabric
        .as_mut()
        .unwrap()
        .tell_host(v6)
        .unwrap();
    assert_eq!(a.lock().parts.route_to_host(&v6), Destination::Nowhere);
}

/// As a device of the library has none, without a door.
#[test]
fn a_device_without_a_fabric_has_udp_alone() {
    let open = |number| Device::open_on(both(4, number)).unwrap();
    let devices = [1, 2].map(open);
    let [a, b] = &devices;
    assert_eq!(route(a, b), Destination::Host(b.gid()));
    assert_eq!(route(a, a), Destination::Host(a.gid()));
}
