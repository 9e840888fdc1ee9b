//! States, flushes, resets, and the counts that wrap.

use crate::Error;
use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::{Attributes, State};
use doorbell_wire::bytecode::Role;
use doorbell_wire::mlx5::{CqeOpcode, SendRequest, Syndrome};

const FLUSH: Option<Syndrome> = Some(Syndrome::WrFlush);

#[test]
fn transitions_to_ready_to_send() {
    let world = World::new(1);
    let shape = Shape::default();
    let a = End::new(&world.devices[0], shape);
    let b = End::new(&world.devices[0], shape);
    assert_eq!(a.state(), State::Reset);
    let early = a.qp.connect(&b.qp.local());
    assert!(matches!(early, Err(Error::State { .. })), "{early:?}");
    a.qp.init(shape.attributes).unwrap();
    assert_eq!(a.state(), State::Init);
    let bad = Attributes {
        mtu_bytes: 1,
        ..shape.attributes
    };
    assert!(a.qp.init(bad).is_err());
    assert_eq!(a.state(), State::Init);
    a.qp.connect(&b.qp.local()).unwrap();
    assert_eq!(a.state(), State::ReadyToSend);
    assert!(a.qp.connect(&b.qp.local()).is_err(), "connected already");
    a.qp.fail().unwrap();
    assert_eq!(a.state(), State::Error);
    assert!(a.qp.init(shape.attributes).is_err());
    assert!(a.qp.connect(&b.qp.local()).is_err());
    a.qp.reset().unwrap();
    assert_eq!(a.state(), State::Reset);
}

#[test]
fn failed_connect_keeps_the_state() {
    let mut world = World::new(2);
    let a = End::new(&world.devices[0], Shape::default());
    let b = End::new(&world.devices[1], Shape::default());
    a.qp.init(Attributes::default()).unwrap();
    let remote = b.qp.local();
    drop(b);
    world.devices.pop();
    let refused = a.qp.connect(&remote);
    assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
    assert_eq!(a.state(), State::Init);
}

#[test]
fn the_error_state_flushes_all_that_is_and_will_be_posted() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape::default());
    for i in 0..3 {
        b.receive(&[b.segment(i * 64, 64)]);
    }
    let list = [b.segment(0, 8)];
    let to_a = SendRequest::write(a.at(0), a.key).segments(&list);
    b.post(&to_a);
    b.post(&SendRequest::nop());
    b.post(&to_a.signaled(true));
    b.ring();
    // Rung and not yet seen by the device: as good as posted.
    b.qp.fail().unwrap();
    assert_eq!(b.all_sent(), [(0, FLUSH), (1, FLUSH), (2, FLUSH)]);
    assert_eq!(b.all_received(), [(0, FLUSH), (1, FLUSH), (2, FLUSH)]);
    for i in 3..6 {
        b.receive(&[b.segment(0, 64)]);
        b.send(&to_a);
        world.settle();
        assert_eq!(b.all_sent(), [(i, FLUSH)]);
        assert_eq!(b.all_received(), [(i, FLUSH)]);
    }
    assert_eq!(a.all_sent(), []);
    assert_eq!(a.state(), State::ReadyToSend);
    assert_eq!(a.word(0), 0);
}

/// Responses of a read that have not left do not leave any more, whoever failed the queue pair, and no refusal does if the region goes away.
#[test]
fn a_queue_pair_in_error_sends_no_responses_and_no_refusal() {
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Cause {
        Owner,
        OwnerAndDeregistration,
        SendQueue,
        Overrun,
    }
    for cause in [
        Cause::Owner,
        Cause::OwnerAndDeregistration,
        Cause::SendQueue,
        Cause::Overrun,
    ] {
        let mut world = World::new(2);
        let (mut a, mut b) = world.pair(Shape {
            memory_bytes: 8 << 20,
            send_cqes: 1,
            ..Shape::default()
        });
        let list = [a.segment(0, 8 << 20)];
        let read = SendRequest::read(b.at(0), b.key).segments(&list);
        a.send(&read.signaled(true));
        while world.devices[1].counters().packets_sent == 0 {
            world.turn();
        }
        match cause {
            Cause::Owner => b.qp.fail().unwrap(),
            Cause::OwnerAndDeregistration => {
                b.qp.fail().unwrap();
                assert!(world.devices[1].deregister(b.key));
            }
            Cause::SendQueue => {
                let list = [b.segment(8 << 20, 8)];
                b.send(&SendRequest::send().segments(&list));
            }
            Cause::Overrun => {
                b.post(&SendRequest::nop().signaled(true));
                b.send(&SendRequest::nop().signaled(true));
            }
        }
        if b.state() != State::Error {
            world.turn();
        }
        assert_eq!(b.state(), State::Error, "{cause:?}");
        let sent = world.devices[1].counters().packets_sent;
        world.settle();
        let late = world.devices[1].counters().packets_sent - sent;
        assert_eq!(late, 0, "packets of a queue pair in error: {cause:?}");
        let done = [(0, Some(Syndrome::TransportRetryExc))];
        assert_eq!(a.all_sent(), done, "{cause:?}");
    }
}

#[test]
fn a_receive_that_is_half_full_is_flushed_too() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape {
        memory_bytes: 4 << 20,
        ..Shape::default()
    });
    b.receive(&[b.segment(0, 4 << 20)]);
    b.receive(&[]);
    let list = [a.segment(0, 4 << 20)];
    a.send(&SendRequest::send().segments(&list));
    world.turn();
    world.turn();
    b.qp.fail().unwrap();
    assert_eq!(b.all_received(), [(0, FLUSH), (1, FLUSH)]);
    a.qp.fail().unwrap();
    assert_eq!(a.all_sent(), [(0, FLUSH)]);
}

#[test]
fn reset_and_connect_again() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape::default());
    for round in 0..5u64 {
        a.write(0, &pattern(round, 5000));
        let list = [a.segment(0, 5000)];
        b.receive(&[b.segment(0, 5000)]);
        b.receive(&[b.segment(0, 5000)]);
        let posted = a.send(&SendRequest::send().segments(&list).signaled(true));
        assert_eq!(posted.index, 0, "counts start over");
        world.settle();
        assert_eq!(a.all_sent(), [(0, None)]);
        assert_eq!(b.all_received(), [(0, None)]);
        assert_eq!(b.read(0, 5000), pattern(round, 5000));
        // In the middle of something, and with receives posted.
        a.send(&SendRequest::write(b.at(0), b.key).segments(&list));
        if round % 2 == 0 {
            a.qp.fail().unwrap();
        }
        let (old_a, old_b) = (a.qp.local(), b.qp.local());
        a.reset();
        b.reset();
        assert_ne!(a.qp.local().connection, old_a.connection);
        assert_ne!(b.qp.local().connection, old_b.connection);
        a.connect(&b);
        b.connect(&a);
        world.settle();
        assert_eq!(a.all_sent(), []);
        assert_eq!(b.all_received(), []);
    }
}

#[test]
fn packets_of_an_earlier_connection_are_dropped() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape::default());
    world.set_faults(crate::device::Faults {
        delay_ns: 1_000_000,
        ..Default::default()
    });
    a.write(0, &[7; 8]);
    let list = [a.segment(0, 8)];
    a.send(&SendRequest::write(b.at(0), b.key).segments(&list));
    world.turn();
    let psn = a.qp.local().psn;
    a.reset();
    b.reset();
    // The worst case: the same sequence numbers again.
    a.qp.start_at(psn);
    a.connect(&b);
    b.connect(&a);
    world.settle();
    assert_eq!(b.word(0), 0);
    assert_eq!(world.devices[0].counters().packets_dropped, 1);
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    world.settle();
    assert_eq!(a.all_sent(), [(0, None)]);
    assert_eq!(b.read(0, 8), [7; 8]);
}

#[test]
fn a_queue_pair_that_is_gone_gets_no_packets_and_its_number_is_not_used_again() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    let list = [a.segment(0, 8)];
    let request = SendRequest::write(b.at(0), b.key).segments(&list);
    let gone = b.qp.qpn();
    a.send(&request.signaled(true));
    drop(b);
    let c = End::new(&world.devices[0], Shape::default());
    assert_ne!(c.qp.qpn(), gone);
    world.settle();
    assert_eq!(a.all_sent(), [(0, Some(Syndrome::TransportRetryExc))]);
    assert!(world.devices[0].counters().packets_dropped > 0);
}

#[test]
fn full_completion_queue_fails_the_queue_pair_and_sets_overrun() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape {
        send_cqes: 4,
        ..Shape::default()
    });
    for _ in 0..6 {
        a.post(&SendRequest::nop().signaled(true));
    }
    a.ring();
    world.settle();
    assert!(a.qp.status().overrun());
    assert_eq!(a.state(), State::Error);
    assert_eq!(a.all_sent().len(), 4);
    assert_eq!(world.devices[0].counters().completions, 4);
    // Nothing is written over, also not later.
    a.send(&SendRequest::nop().signaled(true));
    world.settle();
    assert_eq!(a.all_sent(), []);
    a.reset();
    assert!(!a.qp.status().overrun());
    a.connect(&b);
    a.send(&SendRequest::nop().signaled(true));
    world.settle();
    assert_eq!(a.all_sent(), [(0, None)]);
}

/// A card keeps what the consumer's record said, and reads it again when the queue seems to be full.
#[test]
fn the_consumer_s_record_is_read_when_the_queue_seems_full_and_not_before() {
    let mut world = World::new(1);
    let (mut a, _b) = world.pair(Shape {
        send_cqes: 4,
        ..Shape::default()
    });
    for complete in 1..=5 {
        // A record that says that nothing was consumed, and 2^20 CQEs before that.
        a.send_cq.set_consumer_index(0xf0_0000);
        a.send(&SendRequest::nop().signaled(true));
        world.settle();
        assert_eq!(a.qp.status().overrun(), complete == 5, "{complete}");
        assert_eq!(a.sent().is_some(), complete < 5);
    }
}

#[test]
fn a_receive_queue_s_completions_overrun_as_well() {
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape {
        recv_cqes: 2,
        ..Shape::default()
    });
    for _ in 0..3 {
        b.receive(&[]);
        a.post(&SendRequest::send().signaled(true));
    }
    a.ring();
    world.settle();
    assert!(b.qp.status().overrun());
    assert_eq!(b.state(), State::Error);
    assert_eq!(b.all_received().len(), 2);
}

#[test]
fn a_doorbell_record_alone_triggers_nothing() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    a.write(0, &[1; 8]);
    let list = [a.segment(0, 8)];
    a.post(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    let _program = a.commit();
    a.store(Role::DoorbellRecord, 0, 4, u64::from(1u32.to_be()));
    world.settle();
    assert_eq!(b.word(0), 0);
    assert_eq!(world.devices[0].counters().doorbells, 0);
    // The next doorbell covers it.
    a.send(&SendRequest::nop().signaled(true));
    world.settle();
    assert_eq!(a.all_sent(), [(0, None), (1, None)]);
    assert_eq!(b.read(0, 8), [1; 8]);
    assert_eq!(world.devices[0].counters().doorbells, 1);
}

#[test]
fn a_doorbell_before_its_record_is_counted_and_waits_for_the_next() {
    let mut world = World::new(1);
    world.devices[0].take_doorbells_out_of_order(true);
    let (mut a, _b) = world.pair(Shape::default());
    let qpn = u64::from(a.qp.qpn());
    a.post(&SendRequest::nop().signaled(true));
    let _program = a.commit();
    let bytes = ((qpn << 8) | 1).to_be_bytes();
    a.store(Role::Uar, 1, 0, u64::from_ne_bytes(bytes));
    world.settle();
    assert_eq!(a.all_sent(), []);
    assert_eq!(world.devices[0].counters().doorbells_before_record, 1);
    a.send(&SendRequest::nop().signaled(true));
    world.settle();
    assert_eq!(a.all_sent(), [(0, None), (1, None)]);
    assert_eq!(world.devices[0].counters().doorbells_before_record, 1);
}

#[test]
fn doorbells_for_other_queue_pairs_and_old_doorbells_do_nothing() {
    let mut world = World::new(1);
    world.devices[0].take_doorbells_out_of_order(true);
    let (mut a, b) = world.pair(Shape::default());
    let ring = |end: &End, qpn: u32, index: u64| {
        let value = index << 40 | u64::from(qpn) << 8 | 1;
        end.store(Role::Uar, 1, 0, u64::from_ne_bytes(value.to_be_bytes()));
    };
    ring(&a, b.qp.qpn(), 0);
    world.settle();
    assert_eq!(world.devices[0].counters().doorbells, 0);
    for _ in 0..10 {
        a.post(&SendRequest::nop().signaled(true));
    }
    a.ring();
    world.settle();
    ring(&a, a.qp.qpn(), 3);
    world.settle();
    assert_eq!(a.all_sent().len(), 10);
    assert_eq!(world.devices[0].counters().wqes, 10);
    assert_eq!(world.devices[0].counters().doorbells_backwards, 1);
}

#[test]
fn a_doorbell_out_of_order_fails_its_queue_pair() {
    for is_early in [true, false] {
        let mut world = World::new(1);
        let (mut a, b) = world.pair(Shape::default());
        for _ in 0..4 {
            a.post(&SendRequest::nop().signaled(true));
        }
        let mut index = 5;
        if !is_early {
            a.ring();
            world.settle();
            assert_eq!(a.all_sent().len(), 4);
            index = 1;
        }
        // In the register of the first doorbell.
        let value = index << 40 | u64::from(a.qp.qpn()) << 8 | 1u64;
        a.store(Role::Uar, 1, 0, u64::from_ne_bytes(value.to_be_bytes()));
        world.settle();
        assert_eq!(a.qp.status().state(), State::Error, "early: {is_early}");
        assert_ne!(b.qp.status().state(), State::Error, "early: {is_early}");
        let counters = world.devices[0].counters();
        let counted = (
            counters.doorbells_before_record,
            counters.doorbells_backwards,
        );
        assert_eq!(counted, (u64::from(is_early), u64::from(!is_early)));
    }
}

#[test]
fn two_doorbells_between_two_polls_lose_nothing() {
    let mut world = World::new(1);
    let (mut a, _b) = world.pair(Shape::default());
    for round in 0..50u32 {
        let burst = 1 + round % 5;
        for _ in 0..burst {
            a.send(&SendRequest::nop().signaled(true));
        }
        world.settle();
        assert_eq!(a.all_sent().len(), burst as usize);
    }
}

#[test]
fn one_doorbell_can_fill_the_ring() {
    let mut world = World::new(1);
    for wqebbs in [1, 2, 64, 32768] {
        let (mut a, _b) = world.pair(Shape {
            send_wqebbs: wqebbs,
            ..Shape::default()
        });
        // Not at the start of the ring, and twice.
        for _ in 0..2 {
            for _ in 1..wqebbs {
                a.post(&SendRequest::nop());
            }
            a.post(&SendRequest::nop().signaled(true));
            a.ring();
            world.settle();
            assert_eq!(a.all_sent().len(), 1, "{wqebbs} blocks");
        }
    }
}

#[test]
fn one_record_update_can_fill_the_receive_ring() {
    let mut world = World::new(1);
    for wqes in [1, 2, 32768] {
        let (_a, mut b) = world.pair(Shape {
            recv_wqes: wqes,
            recv_cqes: 65536,
            ..Shape::default()
        });
        for _ in 0..wqes {
            b.receive(&[]);
        }
        b.qp.fail().unwrap();
        assert_eq!(b.all_received().len(), wqes as usize);
    }
}

#[test]
fn sequence_numbers_and_ring_counts_wrap() {
    let mut world = World::new(1);
    let shape = Shape {
        send_wqebbs: 128,
        recv_wqes: 64,
        attributes: Attributes {
            mtu_bytes: 256,
            ..Attributes::default()
        },
        ..Shape::default()
    };
    let mut a = End::new(&world.devices[0], shape);
    let mut b = End::new(&world.devices[0], shape);
    // The 24 bits wrap inside the first long message.
    a.qp.start_at(0xff_fffb);
    b.qp.start_at(0xff_ffff);
    a.connect(&b);
    b.connect(&a);
    a.write(0, &pattern(1, 9000));
    let long = [a.segment(0, 9000)];
    let here = [a.segment(16_384, 9000)];
    b.receive(&[b.segment(0, 9000)]);
    a.post(&SendRequest::send().segments(&long).signaled(true));
    a.post(
        &SendRequest::read(b.at(0), b.key)
            .segments(&here)
            .fence(true)
            .signaled(true),
    );
    a.ring();
    world.settle();
    assert_eq!(a.all_sent().len(), 2);
    assert_eq!(b.all_received(), [(0, None)]);
    assert_eq!(a.read(16_384, 9000), pattern(1, 9000));

    // And the 16 bits of WQE counters, on both queues.
    let word = [a.segment(0, 8)];
    for round in 1..=1100u32 {
        for i in 0..60u32 {
            b.recv.post(&[]).unwrap();
            a.post(
                &SendRequest::write_imm(b.at(0), b.key, i)
                    .segments(&word)
                    .signaled(i == 59),
            );
        }
        b.commit_receives();
        a.ring();
        world.run(|| false);
        assert_eq!(a.all_sent().len(), 1, "round {round}");
        for i in 0..60 {
            let cqe = b.received().unwrap();
            assert_eq!((cqe.opcode, cqe.imm), (CqeOpcode::RespWriteImm, i));
            assert_eq!(cqe.wqe_counter, (1 + (round - 1) * 60 + i) as u16);
        }
    }
}
