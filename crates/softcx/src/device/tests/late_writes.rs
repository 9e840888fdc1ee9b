//! Writes whose bytes are placed late.

use super::harness::{End, Shape, World, pattern};
use crate::device::Faults;
use doorbell_wire::mlx5::{SendRequest, Syndrome};

/// What of a write is there when the request behind it has its effect at the peer, if the bytes of writes are placed late.
#[test]
fn only_a_request_that_is_in_order_finds_what_was_written_before_it() {
    type Behind = fn(&End) -> SendRequest<'static>;
    let cases: [(&str, Behind, bool); 5] = [
        (
            "a write",
            |b| SendRequest::write(b.at(512), b.key).inline(&[9; 8]),
            false,
        ),
        (
            "an ordered write",
            |b| {
                SendRequest::write(b.at(512), b.key)
                    .inline(&[9; 8])
                    .ordered(true)
            },
            true,
        ),
        (
            "a write with immediate data",
            |b| SendRequest::write_imm(b.at(512), b.key, 7).inline(&[9; 8]),
            true,
        ),
        ("a send", |_| SendRequest::send().inline(&[9; 8]), true),
        (
            "a fetch-and-add",
            |b| SendRequest::fetch_add(b.at(512), b.key, 9),
            true,
        ),
    ];
    for (name, behind, in_order) in cases {
        for len_bytes in [8, 4000] {
            let mut world = World::new(1);
            let (mut a, mut b) = world.pair(Shape::default());
            world.set_faults(Faults {
                late_writes_ns: 50_000,
                ..Default::default()
            });
            let data = pattern(3, len_bytes);
            a.write(4096, &data);
            let list = [a.segment(4096, len_bytes)];
            let result = [a.segment(0, 8)];
            b.receive(&[b.segment(512, 8)]);
            a.post(&SendRequest::write(b.at(4096), b.key).segments(&list));
            let mut request = behind(&b).signaled(true);
            if request.opcode.is_atomic() {
                request = request.segments(&result);
            }
            a.post(&request);
            a.ring();
            assert!(world.run(|| b.word(512) != 0), "{name}");
            let is_there = b.read(4096, len_bytes) == data;
            assert_eq!(is_there, in_order, "{name} behind {len_bytes} bytes");
            world.settle();
            assert_eq!(a.all_sent(), [(1, None)], "{name}");
            assert_eq!(
                b.read(4096, len_bytes),
                data,
                "{name}: who is told finds it"
            );
            b.all_received();
        }
    }
}

#[test]
fn a_completion_proves_that_a_late_write_is_placed() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    world.set_faults(Faults {
        late_writes_ns: 50_000,
        ..Default::default()
    });
    for round in 1..=20u64 {
        let start = world.now_ns;
        a.send(
            &SendRequest::write(b.at(0), b.key)
                .inline(&round.to_ne_bytes())
                .signaled(true),
        );
        assert!(world.run(|| a.sent().is_some()));
        assert!(world.now_ns - start >= 50_000);
        assert_eq!(b.word(0), round);
    }
}

/// A refusal acknowledges what came before it.
#[test]
fn what_a_refusal_acknowledges_is_placed() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    world.set_faults(Faults {
        late_writes_ns: 50_000,
        ..Faults::default()
    });
    a.post(
        &SendRequest::write(b.at(0), b.key)
            .inline(&[7; 8])
            .signaled(true),
    );
    a.post(&SendRequest::write(b.at(0), b.key ^ 0xff00).inline(&[8; 8]));
    a.ring();
    world.settle();
    assert_eq!(a.all_sent(), [(0, None), (1, Some(Syndrome::RemoteAccess))]);
    assert_eq!(b.read(0, 8), [7; 8]);
}

/// What is not placed is not acknowledged.
#[test]
fn a_queue_pair_that_fails_acknowledges_nothing_that_was_late() {
    let mut world = World::new(1);
    let (mut a, b) = world.pair(Shape::default());
    world.set_faults(Faults {
        late_writes_ns: 50_000,
        ..Faults::default()
    });
    a.send(
        &SendRequest::write(b.at(0), b.key)
            .inline(&[7; 8])
            .signaled(true),
    );
    for _ in 0..3 {
        world.turn();
    }
    b.qp.fail().unwrap();
    world.settle();
    let sent = a.all_sent();
    assert_eq!(b.read(0, 8), [0; 8]);
    assert!(
        sent.iter().all(|(_, syndrome)| syndrome.is_some()),
        "{sent:?}"
    );
}
