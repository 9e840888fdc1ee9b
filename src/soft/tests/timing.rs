//! What a device costs and how it sleeps, counted in turns.

use crate::mlx5::SendRequest;
use crate::soft::harness::{End, Shape, World};

#[test]
fn a_quiet_device_needs_no_turn() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    let list = [a.segment(0, 5000)];
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    world.settle();
    assert_eq!(a.all_sent().len(), 1);
    assert!(!world.turn());
    let due = world.devices[0].lock().next_due_ns(world.now_ns);
    assert_eq!(due, None, "nothing is outstanding, so no timer runs");
}

#[test]
fn drops_in_any_order() {
    // Orders of the parts of an end: queue pair, memory, device handles.
    for order in 0..6 {
        let mut world = World::new(2);
        let (mut a, mut b) = world.pair(Shape::default());
        let list = [a.segment(0, 5000)];
        b.receive(&[b.segment(0, 5000)]);
        a.send(&SendRequest::send().segments(&list).signaled(true));
        world.turn();
        match order {
            0 => drop((a, b, world)),
            1 => drop((b, a, world)),
            2 => drop((world, a, b)),
            3 => drop((world, b, a)),
            4 => {
                drop(b);
                world.settle();
                drop((world, a));
            }
            _ => {
                drop(a);
                world.settle();
                assert!(!world.turn());
                drop((b, world));
            }
        }
    }
}

#[test]
fn an_idle_queue_pair_s_doorbell_is_found_among_a_thousand() {
    let mut world = World::new(1);
    let shape = Shape {
        memory_bytes: 4096,
        send_wqebbs: 8,
        recv_wqes: 1,
        send_cqes: 8,
        recv_cqes: 1,
        ..Shape::default()
    };
    let mut ends: Vec<End> = (0..500)
        .flat_map(|_| <[End; 2]>::from(world.pair(shape)))
        .collect();
    let (mut last, mut other) = (ends.swap_remove(700), ends.swap_remove(3));
    for end in [&mut last, &mut other] {
        end.send(&SendRequest::nop().signaled(true));
    }
    let turns = (1..).find(|_| {
        world.turn();
        last.send_cq.cqe(0).is_some() && other.send_cq.cqe(0).is_some()
    });
    assert!(turns.unwrap() <= 260, "{turns:?} turns");
}
