//! Commands that fail, a device that reports that it failed, and a flush that comes late.

use crate::device::tests::harness::{Shape, World};
use crate::device::{CommandKind, CommandKinds, Faults, State};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

#[test]
fn a_queue_pair_in_error_flushes_after_the_call() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape::default());
    world.set_faults(Faults {
        flush_ns: 5_000_000,
        ..Faults::default()
    });
    world.turn();
    b.receive(&[b.segment(0, 8)]);
    a.post(&SendRequest::nop().signaled(true));
    a.qp.fail().unwrap();
    b.qp.fail().unwrap();
    a.ring();
    let begin_ns = world.now_ns;
    world.turn();
    assert!(a.qp.status().state() == State::Error && a.sent().is_none());
    assert!(world.run(|| a.sent().is_some()));
    assert!(world.now_ns - begin_ns >= 4_900_000, "{}", world.now_ns);
    world.settle();
    assert_eq!(b.all_received().len(), 1);
}

#[test]
fn a_reset_forgets_a_flush_that_is_to_come() {
    let mut world = World::new(1);
    let (mut a, _b) = world.pair(Shape::default());
    world.set_faults(Faults {
        flush_ns: 5_000_000,
        ..Faults::default()
    });
    a.post(&SendRequest::nop().signaled(true));
    a.qp.fail().unwrap();
    a.ring();
    world.turn();
    a.qp.quiesce().unwrap();
    world.settle();
    assert_eq!(a.all_sent(), []);
}

/// The command fails, and does not reach the device.
#[test]
fn a_queue_pair_that_cannot_be_stopped_goes_on() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    world.set_faults(Faults {
        eio: CommandKinds::of(&[CommandKind::Error, CommandKind::Reset]),
        ..Faults::default()
    });
    assert!(a.qp.fail().is_err() && a.qp.quiesce().is_err());
    let write = SendRequest::write(b.at(0), b.key);
    a.send(&write.inline(&[7; 8]).signaled(true));
    world.settle();
    assert_eq!((a.all_sent(), b.read(0, 8)), (vec![(0, None)], vec![7; 8]));
    world.set_faults(Faults::default());
    a.qp.fail().unwrap();
    a.send(&write.inline(&[8; 8]).signaled(true));
    world.settle();
    assert_eq!(a.all_sent(), [(1, Some(Syndrome::WrFlush))]);
}

#[test]
fn a_device_that_has_failed_works_for_a_while() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    world.set_faults(Faults {
        fatal_ns: (1_000_000, 2_000_000),
        ..Faults::default()
    });
    // The times begin with the first look.
    world.now_ns += 100_000;
    world.turn();
    let write = SendRequest::write(b.at(0), b.key);
    world.now_ns += 1_500_000;
    world.turn();
    assert_eq!(a.qp.status().reported(), State::Error);
    // Success, which means nothing.
    a.qp.fail().unwrap();
    a.qp.quiesce().unwrap();
    a.send(&write.inline(&[7; 8]).signaled(true));
    world.settle();
    assert_eq!((a.all_sent(), b.read(0, 8)), (vec![(0, None)], vec![7; 8]));
    world.now_ns += 3_000_000;
    world.turn();
    a.send(&write.inline(&[8; 8]).signaled(true));
    world.settle();
    assert_eq!((a.all_sent(), b.read(0, 8)), (vec![], vec![7; 8]));
}
