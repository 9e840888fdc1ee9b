//! Devices that find each other by number.

use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::{Attributes, Device, LinkLayer, State};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

fn write_all_over(world: &mut World, a: &mut End, b: &End) {
    a.write(0, &pattern(1, 20_000));
    let list = [a.segment(0, 20_000)];
    let write = SendRequest::write(b.at(32_000), b.key).segments(&list);
    a.send(&write.signaled(true));
    world.settle();
    let (_, syndrome) = a.all_sent()[0];
    assert_eq!(syndrome, None);
    assert_eq!(b.read(32_000, 20_000), pattern(1, 20_000));
}

/// Every device of the world is written to from the first one, and the first one from each.
fn write_between_all(world: &mut World) {
    let devices: Vec<Device> = world.devices.clone();
    for device in &devices {
        let mut a = End::new(&devices[0], Shape::default());
        let mut b = End::new(device, Shape::default());
        a.aim(device.node(), b.qp.qpn());
        b.aim(devices[0].node(), a.qp.qpn());
        write_all_over(world, &mut a, &b);
        write_all_over(world, &mut b, &a);
    }
}

#[test]
fn nodes_reach_each_other_and_themselves() {
    for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
        let mut world = World::on_fabric(3, link);
        let nodes: Vec<_> = world.devices.iter().map(Device::node).collect();
        assert_eq!(nodes, [1, 2, 3]);
        assert_eq!(world.devices[1].link(), link);
        assert_eq!(
            world.devices[1].lid(),
            if link == LinkLayer::InfiniBand { 2 } else { 0 }
        );
        write_between_all(&mut world);
    }
}

#[test]
fn all_nodes_of_a_full_fabric_are_reachable() {
    let mut world = World::on_fabric(63, LinkLayer::InfiniBand);
    write_between_all(&mut world);
}

#[test]
fn numbers_of_queue_pairs_name_their_node() {
    let world = World::on_fabric(2, LinkLayer::InfiniBand);
    let mut seen = Vec::new();
    for device in &world.devices {
        for _ in 0..3 {
            let end = End::new(device, Shape::default());
            assert_eq!(end.qp.qpn() >> 18, u32::from(device.node()));
            assert!(!seen.contains(&end.qp.qpn()));
            seen.push(end.qp.qpn());
        }
    }
}

fn retrying_shape() -> Shape {
    Shape {
        attributes: Attributes {
            ack_timeout: 10,
            retry_count: 7,
            ..Attributes::default()
        },
        ..Shape::default()
    }
}

#[test]
fn missing_peer_exhausts_retries() {
    for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
        let mut world = World::on_fabric(1, link);
        // A node that never was, and numbers that no node can have.
        for node in [2, 63, 64, 0] {
            let mut a = End::new(&world.devices[0], retrying_shape());
            a.aim(node, 5);
            let list = [a.segment(0, 8)];
            a.send(&SendRequest::send().segments(&list));
            world.settle();
            assert_eq!(a.all_sent(), [(0, Some(Syndrome::TransportRetryExc))]);
            assert_eq!(a.state(), State::Error);
        }
    }
}

#[test]
fn late_peer_is_found() {
    let mut world = World::on_fabric(1, LinkLayer::Ethernet);
    let mut a = End::new(&world.devices[0], retrying_shape());
    // The number that the first queue pair of the second node will have.
    let probe = World::node(LinkLayer::Ethernet);
    let node = probe.node();
    drop(probe);
    a.write(0, &pattern(3, 64));
    let device = loop {
        // Generations begin at random.
        let device = World::node(LinkLayer::Ethernet);
        let b = End::new(&device, retrying_shape());
        if b.qp.qpn() >> 14 & 0xf == 9 {
            break device;
        }
    };
    assert_eq!(device.node(), node);
    let mut b = End::new(&device, retrying_shape());
    let list = [a.segment(0, 64)];
    a.aim(node, b.qp.qpn());
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    // It is there, and its device does nothing yet: the packets of this time are lost, or wait.
    for _ in 0..20 {
        world.turn();
    }
    assert_eq!(a.all_sent(), []);
    b.aim(1, a.qp.qpn());
    world.devices.push(device);
    world.settle();
    assert_eq!(a.all_sent(), [(0, None)]);
    assert_eq!(b.read(0, 64), pattern(3, 64));
    assert_eq!(b.received().map(|_| ()), None);
}

#[test]
fn the_lane_to_a_node_follows_its_number() {
    let mut world = World::on_fabric(2, LinkLayer::InfiniBand);
    write_between_all(&mut world);
    for _ in 0..3 {
        world.devices.pop();
        let device = World::node(LinkLayer::InfiniBand);
        assert_eq!(device.node(), 2);
        world.devices.push(device);
        write_between_all(&mut world);
    }
}

#[test]
fn dead_node_does_not_delay_other_nodes() {
    let mut world = World::on_fabric(3, LinkLayer::InfiniBand);
    write_between_all(&mut world);
    // Its inbox is not read any more, and its entry stays.
    let dead = world.devices.remove(1);
    dead.lock().fabric().unwrap().mark_dead();
    let mut to_dead = End::new(&world.devices[0], retrying_shape());
    to_dead.aim(2, 2 << 18);
    let list = [to_dead.segment(0, 1 << 15)];
    for _ in 0..16 {
        to_dead.post(&SendRequest::send().segments(&list));
    }
    to_dead.ring();
    write_between_all(&mut world);
    world.settle();
    assert_eq!(to_dead.all_sent()[0].1, Some(Syndrome::TransportRetryExc));
    drop(dead);
}
