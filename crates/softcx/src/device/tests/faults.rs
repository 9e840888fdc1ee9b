//! A wire that loses, doubles, delays and reorders, and every byte checked.

use proptest::prelude::*;

use crate::device::tests::harness::{End, Shape, World, pattern};
use crate::device::{Attributes, Faults};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

const MTU: u32 = 256;
const ROOM: usize = 1 << 16;

fn shape() -> Shape {
    Shape {
        attributes: Attributes {
            mtu_bytes: MTU,
            ack_timeout: 6,
            min_rnr_timer: 1,
            ..Attributes::default()
        },
        memory_bytes: 4 * ROOM,
        ..Shape::default()
    }
}

/// One operation of a run; the place of its data in each memory is its number times 1/64 of the room.
#[derive(Debug, Clone, Copy)]
struct Step {
    operation: u8,
    len: usize,
}

const SHARE: usize = ROOM / 16;
const COUNTER: usize = ROOM;

fn post(a: &mut End, b: &mut End, number: usize, step: Step, late: &mut Vec<usize>) {
    let at = number % 16 * SHARE;
    let list = [a.segment(at, step.len)];
    let word = [a.segment(2 * ROOM + number * 8, 8)];
    let (to, key) = (b.at(at), b.key);
    let request = match step.operation {
        0 => SendRequest::send().segments(&list),
        1 => SendRequest::write(to, key).segments(&list),
        2 => SendRequest::write_imm(to, key, number as u32).segments(&list),
        3 => SendRequest::read(to, key).segments(&list),
        4 => SendRequest::nop(),
        _ => SendRequest::fetch_add(b.at(COUNTER), key, 1).segments(&word),
    };
    match step.operation {
        3 => b.write(at, &pattern(number as u64, step.len)),
        0..=2 => a.write(at, &pattern(number as u64, step.len)),
        _ => {}
    }
    if matches!(step.operation, 0 | 2) {
        late.push(at);
    }
    a.post(&request.signaled(true));
}

/// Runs the steps in groups of up to 16, the receives coming late when asked. What the first failure was, if any.
fn run(steps: &[Step], faults: Faults, devices: usize, receives_late: bool) -> Option<Syndrome> {
    let mut world = World::new(devices);
    let (mut a, mut b) = world.pair(shape());
    world.set_faults(faults);
    let mut atomics = 0;
    let mut received = 0u32;
    for (group, steps) in steps.chunks(16).enumerate() {
        let mut receives = Vec::new();
        for (i, &step) in steps.iter().enumerate() {
            post(&mut a, &mut b, i, step, &mut receives);
        }
        let give = |b: &mut End| {
            for &at in &receives {
                b.receive(&[b.segment(at, SHARE)]);
            }
        };
        if !receives_late {
            give(&mut b);
        }
        a.ring();
        if receives_late {
            let end = world.now_ns + 100_000;
            while world.now_ns < end {
                world.turn();
            }
            give(&mut b);
        }
        world.settle();
        let done = a.all_sent();
        assert_eq!(done.len(), steps.len(), "group {group}: {done:?}");
        if let Some(bad) = done.iter().find_map(|(_, syndrome)| *syndrome) {
            return Some(bad);
        }
        for (i, step) in steps.iter().enumerate() {
            let at = i * SHARE;
            let want = pattern(i as u64, step.len);
            match step.operation {
                0..=2 => assert!(b.read(at, step.len) == want, "{step:?}, number {i}"),
                3 => assert!(a.read(at, step.len) == want, "{step:?}, number {i}"),
                4 => {}
                _ => {
                    // Each took effect once, in order.
                    assert_eq!(a.word(2 * ROOM + i * 8), atomics);
                    atomics += 1;
                }
            }
        }
        assert_eq!(b.word(COUNTER), atomics);
        let got: Vec<_> = std::iter::from_fn(|| b.received()).collect();
        assert_eq!(got.len(), receives.len());
        let takers = steps.iter().enumerate();
        let takers = takers.filter(|(_, step)| matches!(step.operation, 0 | 2));
        for (cqe, (i, step)) in got.iter().zip(takers) {
            assert_eq!(cqe.wqe_counter, received as u16, "receives go in order");
            assert_eq!(cqe.byte_count, step.len as u32);
            assert_eq!(cqe.syndrome, 0);
            if step.operation == 2 {
                assert_eq!(cqe.imm, i as u32);
            }
            received += 1;
        }
    }
    None
}

fn steps(count: usize) -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![
        Just(0),
        Just(1),
        1..2 * MTU as usize,
        Just(MTU as usize),
        0..SHARE,
    ];
    let step = (0..6u8, len).prop_map(|(operation, len)| Step { operation, len });
    proptest::collection::vec(step, 1..count)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_once_over_a_bad_wire(
        steps in steps(48),
        loss in 0.0..0.2f64,
        duplicate in 0.0..0.2f64,
        reorder in 0.0..0.2f64,
        delay_ns in 0..20_000u64,
        seed: u64,
        devices in 1..3usize,
        receives_late: bool,
    ) {
        let faults = Faults { loss, duplicate, reorder, delay_ns, seed: seed >> 1, ..Faults::default() };
        let failed = run(&steps, faults, devices, receives_late);
        // Eight losses in a row of the same packet end a connection: rightly so, and seldom.
        prop_assert!(matches!(failed, None | Some(Syndrome::TransportRetryExc)), "{:?}", failed);
    }
}

#[test]
fn most_connections_survive_20_percent_packet_loss() {
    let mut died = 0;
    for seed in 0..40 {
        let faults = Faults {
            loss: 0.2,
            duplicate: 0.1,
            reorder: 0.1,
            delay_ns: 1000,
            seed: seed * 2,
            ..Faults::default()
        };
        let steps: Vec<_> = (0..32)
            .map(|i| Step {
                operation: (i + seed as usize) as u8 % 6,
                len: (i * 131) % SHARE,
            })
            .collect();
        died += usize::from(run(&steps, faults, 1 + seed as usize % 2, false).is_some());
    }
    assert!(died <= 2, "{died} of 40 connections died");
}

#[test]
fn reordering_alone_ends_no_connection() {
    for seed in 0..40 {
        let faults = Faults {
            reorder: 0.3,
            duplicate: 0.3,
            delay_ns: 10_000,
            seed: seed * 2,
            ..Faults::default()
        };
        let steps: Vec<_> = (0..48)
            .map(|i| Step {
                operation: (i * 5 + seed as usize) as u8 % 6,
                len: (i * 97) % SHARE,
            })
            .collect();
        let failed = run(&steps, faults, 1, seed % 2 == 0);
        assert_eq!(failed, None, "seed {seed}");
    }
}

#[test]
fn late_acknowledgement_cancels_the_retransmission() {
    // The answer comes after the timer has run out and before the packet has left once more.
    let mut world = World::new(1);
    let mut shape = shape();
    shape.attributes.ack_timeout = 3;
    let (mut a, b) = world.pair(shape);
    for delay_ns in (14_000..60_000).step_by(500) {
        world.set_faults(Faults {
            delay_ns,
            ..Faults::default()
        });
        let list = [a.segment(0, 2000)];
        let write = SendRequest::write(b.at(0), b.key).segments(&list);
        a.post(&write.signaled(true));
        a.post(&SendRequest::read(b.at(0), b.key).segments(&list));
        a.post(&write.signaled(true));
        a.post(&SendRequest::nop().signaled(true));
        a.ring();
        world.settle();
        let done = a.all_sent();
        assert!(
            done.len() == 3 && done.iter().all(|(_, syndrome)| syndrome.is_none()),
            "delay {delay_ns}: {done:?}"
        );
    }
}
