//! What a device costs and how it sleeps, counted in turns.

use std::time::{Duration, Instant};

use crate::device::tests::harness::{End, Shape, World};
use crate::device::tests::speed::cpu_ns;
use crate::device::{Attributes, State};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

/// Longer than anything takes that does not hang, on however busy a machine.
const HANG: Duration = Duration::from_secs(60);

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

/// A turn of another thread may begin a wait that is over before the engine's sleep: here that for an acknowledgement.
#[test]
fn an_engine_that_sleeps_hears_of_a_wait_that_another_thread_has_begun() {
    for until_ns in [u64::MAX, 0] {
        let mut world = World::new(2);
        let (mut a, b) = world.pair(Shape::default());
        let list = [a.segment(0, 8)];
        a.send(&SendRequest::write(b.at(0), b.key).segments(&list));
        let device = world.devices[0].clone();
        let nic = std::sync::Arc::clone(device.engine_core());
        nic.sleeps_until_ns
            .store(until_ns, std::sync::atomic::Ordering::Relaxed);
        let (told, asleep) = std::sync::mpsc::channel();
        let engine = std::thread::spawn(move || {
            let limit = Duration::from_secs(if until_ns > 0 { 60 } else { 1 });
            let last_look = || {
                told.send(()).unwrap();
                false
            };
            nic.wake_word.sleep(limit, last_look)
        });
        asleep.recv().unwrap();
        assert!(device.progress());
        assert!(device.lock().next_due_ns(0).is_some());
        // 0: it rests for a time that does not depend on what is due.
        assert_eq!(engine.join().unwrap(), until_ns > 0);
    }
}

#[test]
fn drops_in_any_order() {
    for (order, engines) in (0..24).map(|i| (i / 4, i % 2 == 1)) {
        let mut world = if engines {
            World::with_engines(2)
        } else {
            World::new(2)
        };
        let (mut a, mut b) = world.pair(Shape {
            memory_bytes: 1 << 20,
            ..Shape::default()
        });
        let list = [a.segment(0, 1 << 20)];
        b.receive(&[b.segment(0, 1 << 20)]);
        a.send(&SendRequest::send().segments(&list).signaled(true));
        a.send(&SendRequest::read(b.at(0), b.key).segments(&list));
        // In mid-transfer, by turns or by themselves.
        let go_on = |world: &mut World| {
            if engines {
                std::thread::sleep(Duration::from_micros(200));
            } else {
                world.turn();
            }
        };
        go_on(&mut world);
        match order {
            0 => drop((a, b, world)),
            1 => drop((b, a, world)),
            2 => drop((world, a, b)),
            3 => drop((world, b, a)),
            4 => {
                drop(b);
                go_on(&mut world);
                drop((world, a));
            }
            _ => {
                drop(a);
                go_on(&mut world);
                drop((b, world));
            }
        }
    }
}

#[test]
fn every_doorbell_wakes_a_sleeping_engine() {
    // No thread polls: the engine alone must wake, move the data between two devices, and write the completion.
    let mut world = World::with_engines(2);
    let (mut a, b) = world.pair(Shape::default());
    for round in 0..300u64 {
        // Awake, about to sleep, asleep, and long asleep.
        std::thread::sleep(Duration::from_micros(
            [0, 20, 100, 1500][round as usize % 4],
        ));
        let start = Instant::now();
        let word = round.to_ne_bytes();
        a.send(
            &SendRequest::write(b.at(0), b.key)
                .inline(&word)
                .signaled(true),
        );
        let cqe = loop {
            if let Some(cqe) = a.sent() {
                break cqe;
            }
            assert!(start.elapsed() < HANG, "round {round}");
            std::thread::yield_now();
        };
        assert_eq!(cqe.syndrome, 0);
        assert_eq!(b.word(0), round);
    }
}

#[test]
fn a_frozen_device_does_nothing_until_it_thaws() {
    let mut world = World::with_engines(1);
    let (mut a, b) = world.pair(Shape::default());
    let device = world.devices[0].clone();
    device.set_frozen(true);
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .inline(&[5; 8])
            .signaled(true),
    );
    std::thread::sleep(Duration::from_millis(5));
    device.progress();
    assert_eq!(a.all_sent(), []);
    // It can still be taken out of service: what was rung is flushed.
    b.qp.fail().unwrap();
    device.set_frozen(false);
    let start = Instant::now();
    let cqe = loop {
        if let Some(cqe) = a.sent() {
            break cqe;
        }
        assert!(start.elapsed() < HANG);
    };
    assert_eq!(
        Syndrome::from_raw(cqe.syndrome),
        Some(Syndrome::TransportRetryExc)
    );
}

/// A GPU rings, each time somewhat later than the engine waits for threads of this process. Only the first doorbells may be found after a sleep of 1 ms.
/// Which turn finds the first one is by chance, so there are several devices. A round in which this thread did not have its processor for the whole time
/// does not count, nor does the next one: meanwhile the engine may rest.
#[test]
fn engine_does_not_sleep_between_doorbells_of_a_gpu() {
    const ROUNDS: u64 = 100;
    const LOST: Duration = Duration::from_micros(50);
    for _ in 0..16 {
        let mut world = World::with_engines(1);
        let (mut a, _b) = world.pair(Shape::default());
        let (mut counted, mut slept) = (0, 0);
        let mut is_disturbed = false;
        for _ in 0..ROUNDS {
            let before = world.devices[0].long_sleeps();
            let (start, used_ns) = (Instant::now(), cpu_ns());
            while start.elapsed() < Duration::from_micros(40) {
                std::hint::spin_loop();
            }
            a.post(&SendRequest::nop().signaled(true));
            let program = a.commit();
            a.execute_unreported(&program);
            while a.sent().is_none() {
                assert!(start.elapsed() < HANG);
                std::hint::spin_loop();
            }
            let was_disturbed = is_disturbed;
            let used = Duration::from_nanos(cpu_ns() - used_ns);
            is_disturbed = start.elapsed() > used + LOST;
            if !is_disturbed && !was_disturbed {
                counted += 1;
                slept += world.devices[0].long_sleeps() - before;
            }
        }
        assert!(
            slept <= counted / 4 + 1,
            "slept {slept} times in {counted} rounds"
        );
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
    // A GPU's doorbell is not reported: it is found when the poll of idle registers reaches it.
    let mut turns_to_find = |reported: [bool; 2]| {
        for (end, is_reported) in [&mut last, &mut other].into_iter().zip(reported) {
            end.post(&SendRequest::nop().signaled(true));
            let program = end.commit();
            if is_reported {
                end.execute(&program);
            } else {
                end.execute_unreported(&program);
            }
        }
        let turns = (1..).find(|_| {
            world.turn();
            last.send_cq.cqe(0).is_some() && other.send_cq.cqe(0).is_some()
        });
        assert_eq!((last.all_sent().len(), other.all_sent().len()), (1, 1));
        // Long enough for the device to look at them seldom again.
        for end in [&mut last, &mut other] {
            end.reset();
            end.connect(&ends[0]);
        }
        for _ in 0..5000 {
            world.turn();
        }
        turns.unwrap()
    };
    assert!((2..=1000).contains(&turns_to_find([false, false])));
    assert_eq!(turns_to_find([true, true]), 1);
    assert!((2..=1000).contains(&turns_to_find([false, true])));
    assert_eq!(turns_to_find([true, true]), 1);
}

#[test]
fn doorbells_of_many_queue_pairs_are_found_at_once_and_few_are_watched() {
    let mut world = World::new(1);
    let mut pairs: Vec<_> = (0..50).map(|_| world.pair(Shape::default())).collect();
    for round in 0..3 {
        // Two at a time: one announcement does not replace another.
        for at in 0..25 {
            for (a, _) in &mut pairs[2 * at..2 * at + 2] {
                a.post(&SendRequest::nop().signaled(true));
                let program = a.commit();
                a.execute(&program);
            }
            world.turn();
            for (a, _) in &mut pairs[2 * at..2 * at + 2] {
                assert_eq!(a.all_sent().len(), 1, "round {round}, pairs at {at}");
            }
        }
    }
    let watched = pairs
        .iter()
        .filter(|(a, _)| a.qp.status().watched())
        .count();
    assert!((1..=4).contains(&watched), "{watched} are looked at");
}

#[test]
fn report_without_a_queue_pair_finds_the_doorbell() {
    // A report that names no queue pair, in a device with nothing else to do.
    let mut world = World::new(1);
    let mut pairs: Vec<_> = (0..50).map(|_| world.pair(Shape::default())).collect();
    let (a, _) = &mut pairs[30];
    a.post(&SendRequest::nop().signaled(true));
    let program = a.commit();
    a.execute_unreported(&program);
    world.devices[0].rung();
    world.turn();
    assert_eq!(a.all_sent(), [(0, None)]);
}

#[test]
fn unread_lane_costs_no_turns_and_times_out() {
    let mut world = World::new(2);
    let (mut a, b) = world.pair(Shape {
        memory_bytes: 4 << 20,
        ..Shape::default()
    });
    // The device over there does nothing any more: more packets than the lane holds.
    world.devices.pop();
    let list = [a.segment(0, 4 << 20)];
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    let mut turns = 0;
    let status = a.qp.status();
    while status.state() != State::Error {
        if !world.turn() {
            let due = world.devices[0].lock().next_due_ns(world.now_ns).unwrap();
            assert!(due > world.now_ns, "spins on a full lane");
            world.now_ns = due;
        }
        turns += 1;
        assert!(turns < 50_000);
    }
    // Patience, which ends with one of its time-outs, and then those that count.
    let timeout_ns = Attributes::default().ack_timeout_ns();
    let want = 5_000_000_000 + timeout_ns * 7;
    assert!((want..want + timeout_ns * 2).contains(&world.now_ns));
    assert_eq!(a.all_sent(), [(0, Some(Syndrome::TransportRetryExc))]);
    // And with a device that lives, the next connection over the same lane works, full as it was.
    world.devices.push(b.qp.device().clone());
    a.reset();
    let mut b = b;
    b.reset();
    a.connect(&b);
    b.connect(&a);
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .segments(&list)
            .signaled(true),
    );
    world.settle();
    assert_eq!(a.all_sent(), [(0, None)]);
}

#[test]
fn starved_device_loses_no_packets_before_the_time_out() {
    let shape = Shape {
        attributes: Attributes {
            ack_timeout: 14,
            ..Attributes::default()
        },
        ..Shape::default()
    };
    for starved_s in [4, 7] {
        let mut world = World::new(2);
        let (mut a, b) = world.pair(shape);
        b.qp.fail().unwrap();
        drop(b);
        world.settle();
        let (mut a2, mut b2) = world.pair(shape);
        b2.receive(&[b2.segment(0, 60)]);
        a2.send(&SendRequest::send().inline(&[5; 8]).signaled(true));
        let a_alone = world.devices[0].clone();
        for _ in 0..starved_s * 100 {
            world.now_ns += 10_000_000;
            a_alone.turn_at(world.now_ns);
        }
        let is_waited_for = starved_s < 5;
        assert_eq!(a_alone.counters().retransmissions == 0, is_waited_for);
        world.settle();
        let want = if is_waited_for {
            None
        } else {
            Some(Syndrome::TransportRetryExc)
        };
        assert_eq!(a2.all_sent(), [(0, want)]);
        if is_waited_for {
            // What it has answered since, it may be as late again with the next one.
            b2.receive(&[b2.segment(0, 60)]);
            a2.send(&SendRequest::send().inline(&[5; 8]).signaled(true));
            for _ in 0..starved_s * 100 {
                world.now_ns += 10_000_000;
                a_alone.turn_at(world.now_ns);
            }
            assert_eq!(a_alone.counters().retransmissions, 0);
            world.settle();
            assert_eq!(a2.all_sent(), [(1, None)]);
        }
        // A device that reads and does not answer is not waited for.
        let before = a_alone.counters().retransmissions;
        a.send(&SendRequest::send().inline(&[5; 8]).signaled(true));
        world.settle();
        assert_eq!(a.all_sent(), [(0, Some(Syndrome::TransportRetryExc))]);
        assert_eq!(a_alone.counters().retransmissions - before, 7);
    }
}
