//! Packets whose bytes are placed late.

use super::harness::{End, Shape, World, pattern};
use crate::device::{Access, Faults};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

/// What of a write is there when the request behind it has its effect at the peer, if the bytes of writes are placed late.
#[test]
fn only_an_ordered_request_sees_earlier_writes() {
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
                "{name}: placed before the completion"
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
fn refusal_places_the_packets_that_it_acknowledges() {
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

/// So does the answer of a receiver that is not ready.
#[test]
fn rnr_nak_places_the_packets_that_it_acknowledges() {
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
    // Of several packets, of which the last asks for a receive.
    let list = [a.segment(4096, 20_000)];
    a.post(&SendRequest::write_imm(b.at(4096), b.key, 7).segments(&list));
    a.ring();
    assert!(world.run(|| a.sent().is_some()));
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

/// Steps until the last byte of a message of `len_bytes` at `end` is there. Whether the first one is.
fn first_is_there_with_last(world: &mut World, end: &End, data: &[u8]) -> bool {
    let last = data.len() - 8;
    assert!(world.run(|| end.read(last, 8) == data[last..]));
    end.read(0, 8) == data[..8]
}

/// A program that polls the last bytes of a message instead of its completion takes it for complete too early.
#[test]
fn the_last_byte_of_a_message_may_be_there_before_the_first() {
    const LEN: usize = 20_000;
    type Request = fn(&End) -> SendRequest<'static>;
    let cases: [(&str, Request, bool); 4] = [
        ("a write", |b| SendRequest::write(b.at(0), b.key), false),
        (
            "a write with immediate data",
            |b| SendRequest::write_imm(b.at(0), b.key, 7),
            true,
        ),
        ("a send", |_| SendRequest::send(), true),
        ("a read", |b| SendRequest::read(b.at(0), b.key), false),
    ];
    for late_packets_ns in [0, 50_000] {
        for (name, request, has_receive) in cases {
            let mut world = World::new(1);
            let (mut a, mut b) = world.pair(Shape::default());
            world.set_faults(Faults {
                late_packets_ns,
                delay_ns: 1,
                ..Faults::default()
            });
            let data = pattern(5, LEN);
            b.receive(&[b.segment(0, LEN)]);
            let list = [a.segment(0, LEN)];
            let is_read = name == "a read";
            [&b, &a][usize::from(!is_read)].write(0, &data);
            a.send(&request(&b).segments(&list).signaled(true));
            let reader = [&b, &a][usize::from(is_read)];
            let in_order = first_is_there_with_last(&mut world, reader, &data);
            assert_eq!(in_order, late_packets_ns == 0, "{name}");
            // There is no completion before all of it is placed.
            assert!(world.run(|| a.send_cq.cqe(0).is_some() || b.recv_cq.cqe(0).is_some()));
            assert_eq!([&b, &a][usize::from(is_read)].read(0, LEN), data, "{name}");
            world.settle();
            assert_eq!(a.all_sent(), [(0, None)], "{name}");
            let receives = if has_receive { vec![(0, None)] } else { vec![] };
            assert_eq!(b.all_received(), receives, "{name}");
        }
    }
}

/// What comes behind a message, in order, finds all of it.
#[test]
fn ordered_request_sees_all_packets_before_it() {
    const LEN: usize = 20_000;
    let mut world = World::new(1);
    let (mut a, mut b) = world.pair(Shape::default());
    world.set_faults(Faults {
        late_packets_ns: 50_000,
        ..Faults::default()
    });
    let data = pattern(5, LEN);
    a.write(0, &data);
    let list = [a.segment(0, LEN)];
    for _ in 0..2 {
        b.receive(&[b.segment(32_768, 8)]);
    }
    // A send, an atomic, and a fenced write of what a read brings.
    a.post(&SendRequest::write_imm(b.at(0), b.key, 7).segments(&list));
    a.post(&SendRequest::send().inline(&[9; 8]));
    a.ring();
    assert!(world.run(|| b.recv_cq.cqe(1).is_some()));
    assert_eq!(b.read(0, LEN), data);
    assert_eq!(b.all_received(), [(0, None), (1, None)]);

    let other = pattern(6, LEN);
    a.write(0, &other);
    let word = [a.segment(40_000, 8)];
    a.post(&SendRequest::write(b.at(0), b.key).segments(&list));
    a.post(&SendRequest::fetch_add(b.at(40_000), b.key, 1).segments(&word));
    a.ring();
    assert!(world.run(|| b.word(40_000) == 1));
    assert_eq!(b.read(0, LEN), other);

    b.write(0, &data);
    let fenced = SendRequest::write(b.at(32_768), b.key).segments(&list);
    a.post(&SendRequest::read(b.at(0), b.key).segments(&list));
    a.post(&fenced.fence(true).signaled(true));
    a.ring();
    world.settle();
    assert_eq!(a.all_sent().pop(), Some((5, None)));
    assert_eq!(b.read(32_768, LEN), data);
}

/// The memory of a late write goes, after a request behind it was carried out: the refusal names the late write, and acknowledges neither of the two. So it
/// does if a third request, which is refused for its own sake, has the late write placed.
#[test]
fn the_refusal_of_a_late_write_does_not_acknowledge_it() {
    for third in [false, true] {
        let mut world = World::new(1);
        let (mut a, b) = world.pair(Shape::default());
        world.set_faults(Faults {
            late_writes_ns: 50_000,
            ..Faults::default()
        });
        let key = b.register_again(&b.qp.device().clone(), 0, 64, Access::ALL);
        for (at, key) in [(0, key), (512, b.key)] {
            let write = SendRequest::write(b.at(at), key).inline(&[7; 8]);
            a.post(&write.signaled(true));
        }
        a.ring();
        assert!(world.run(|| b.word(512) != 0));
        assert!(b.qp.device().deregister(key));
        if third {
            a.post(&SendRequest::fetch_add(b.at(8), key, 1).segments(&[a.segment(0, 8)]));
            a.ring();
        }
        world.settle();
        assert_eq!(b.word(0), 0);
        let want = [Syndrome::RemoteAccess, Syndrome::WrFlush].map(Some);
        assert_eq!(a.all_sent()[..2], [(0, want[0]), (1, want[1])]);
    }
}

/// A message that is not placed when its queue pair or its memory goes: its receive completes once, in error, and so does its sender's request.
#[test]
fn a_message_whose_packets_cannot_be_placed_completes_once_and_in_error() {
    for region_goes in [false, true] {
        for write in [false, true] {
            let mut world = World::new(1);
            let (mut a, mut b) = world.pair(Shape::default());
            world.set_faults(Faults {
                late_packets_ns: 50_000,
                ..Faults::default()
            });
            let key = b.register_again(&b.qp.device().clone(), 0, 32_768, Access::ALL);
            let mut segment = b.segment(0, 20_000);
            segment.lkey = key;
            b.receive(&[segment]);
            let list = [a.segment(0, 20_000)];
            let request = if write {
                SendRequest::write_imm(b.at(0), key, 7)
            } else {
                SendRequest::send()
            };
            a.write(0, &pattern(5, 20_000));
            a.send(&request.segments(&list).signaled(true));
            let last = &pattern(5, 20_000)[19_992..];
            assert!(world.run(|| b.read(19_992, 8) == last));
            if region_goes {
                assert!(b.qp.device().deregister(key));
            } else {
                b.qp.fail().unwrap();
            }
            world.settle();
            assert_eq!(b.read(0, 8), [0; 8]);
            let received = b.all_received();
            assert!(
                matches!(received[..], [(0, Some(_))]),
                "{region_goes} {write}: {received:?}"
            );
            let sent = a.all_sent();
            assert!(
                matches!(sent[..], [(0, Some(_))]),
                "{region_goes} {write}: {sent:?}"
            );
        }
    }
}
