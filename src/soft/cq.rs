//! The device's side of a completion queue.

use crate::mlx5::Cqe;
use crate::soft::dma::{RecordWord, Ring};

/// Where a completion queue lives.
#[derive(Debug)]
pub(crate) struct Cq {
    ring: Ring,
    cqe_count: u32,
    record: RecordWord,
    producer: u32,
    overrun: bool,
}

impl Cq {
    pub(crate) fn new(ring: Ring, cqe_count: u32, record: RecordWord) -> Cq {
        Cq {
            ring,
            cqe_count,
            record,
            producer: 0,
            overrun: false,
        }
    }

    /// Writes a CQE. `false` if there is no room: the queue is then broken until it is reset, as on a card.
    #[inline]
    pub(crate) fn push(&mut self, cqe: &Cqe) -> bool {
        // The record holds 24 bits of the consumer's count.
        let room = self.record.load().is_ok_and(|consumer| {
            self.producer.wrapping_sub(consumer) & 0xff_ffff < self.cqe_count
        });
        let owner = self.producer & self.cqe_count != 0;
        let at = (self.producer & (self.cqe_count - 1)) as usize * 64;
        if self.overrun || !room || self.ring.write_cqe(at, &cqe.encode(owner)).is_err() {
            self.overrun = true;
            return false;
        }
        self.producer = self.producer.wrapping_add(1);
        true
    }

    /// Back to the first lap; the driver has made the ring fresh.
    pub(crate) fn reset(&mut self) {
        self.producer = 0;
        self.overrun = false;
    }
}
