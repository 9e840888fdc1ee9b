//! When work requests are read out of their rings.
#![allow(unsafe_code)] // changes a work request that was posted

use super::harness::{Shape, World, pattern};
use crate::device::Faults;
use doorbell_wire::mlx5::SendRequest;

/// Where the inline bytes of an RDMA WRITE lie in its WQE: behind the control and the address segment, and their length.
const INLINE_AT: usize = 16 + 16 + 4;

/// A card may read a work request at its doorbell or when its turn has come: a program that changes one in between may rely on neither.
#[test]
fn a_request_that_is_changed_behind_its_doorbell_is_executed_as_it_was_or_as_it_is() {
    for (fetch_ns, executed) in [(0, 7), (50_000, 9)] {
        let mut world = World::new(1);
        let (mut a, b) = world.pair(Shape::default());
        world.set_faults(Faults {
            fetch_ns: Some(fetch_ns),
            ..Faults::default()
        });
        let list = [a.segment(0, 8)];
        a.post(&SendRequest::read(b.at(64), b.key).segments(&list));
        // It waits for the read.
        let write = SendRequest::write(b.at(0), b.key).inline(&[7; 8]);
        a.post(&write.fence(true).signaled(true));
        a.ring();
        world.turn();
        // SAFETY: within the second WQE of the ring, which nothing else writes.
        unsafe {
            let inline = a.qp.memory().send_ring.add(64 + INLINE_AT);
            inline.cast::<[u8; 8]>().write_unaligned([9; 8]);
        }
        world.settle();
        assert_eq!(b.read(0, 8), [executed; 8], "{fetch_ns}");
        assert_eq!(a.all_sent(), [(1, None)]);
    }
}

/// Many laps of both rings, with requests and receives of several blocks.
#[test]
fn requests_that_are_read_early_or_late_are_the_ones_that_were_posted() {
    for fetch_ns in [0, 7_000, 50_000] {
        let mut world = World::new(2);
        let (mut a, mut b) = world.pair(Shape {
            send_wqebbs: 16,
            recv_wqes: 4,
            ..Shape::default()
        });
        world.set_faults(Faults {
            fetch_ns: Some(fetch_ns),
            ..Faults::default()
        });
        for round in 0..100u64 {
            let start = world.now_ns;
            let data = pattern(round, 150);
            b.receive(&[b.segment(0, 100), b.segment(200, 100)]);
            a.post(&SendRequest::nop());
            a.post(&SendRequest::send().inline(&data).signaled(true));
            a.ring();
            assert!(
                world.run(|| a.send_cq.cqe(round as u32).is_some()),
                "{round}"
            );
            assert!(world.now_ns - start >= fetch_ns);
            assert_eq!(a.sent().map(|cqe| cqe.syndrome), Some(0));
            assert_eq!(b.received().map(|cqe| cqe.byte_count), Some(150));
            assert_eq!(b.read(0, 100), data[..100]);
            assert_eq!(b.read(200, 50), data[100..]);
        }
    }
}
