//! The device's side of a completion queue in memory of the library.

use crate::mlx5::Cqe;
use doorbell_wire::memory::{RecordCell, RingCells};

/// Where CQEs are written, and how far the owner has read them.
#[derive(Debug)]
pub(super) struct CompletionRing {
    ring: RingCells,
    cqes: u32,
    record: RecordCell,
    /// The running index of the next CQE.
    next: u32,
}

impl CompletionRing {
    /// A ring of that many entries, a power of two.
    pub(super) fn new(ring: RingCells, cqes: u32, record: RecordCell) -> CompletionRing {
        CompletionRing {
            ring,
            cqes,
            record,
            next: 0,
        }
    }

    /// Whether an entry is free: an unread one is never written over.
    pub(super) fn has_room(&self) -> bool {
        let read = self.record.load();
        // The record holds 24 bits of the count.
        (self.next.wrapping_sub(read) & 0xff_ffff) < self.cqes
    }

    /// Writes the next CQE. Whether there was room.
    #[must_use]
    pub(super) fn push(&mut self, cqe: &Cqe) -> bool {
        if !self.has_room() {
            return false;
        }
        let owner = self.next & self.cqes != 0;
        let slot = self.next & (self.cqes - 1);
        self.ring.write_cqe(slot as usize * 64, &cqe.encode(owner));
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Back to the first entry of the first lap, which the owner makes fresh.
    pub(super) fn reset(&mut self) {
        self.next = 0;
    }
}
