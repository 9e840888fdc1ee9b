//! The rings and doorbell records of a queue pair as their consumer reads and writes them.
#![allow(unsafe_code)] // memory that the producer writes, and reads, at the same time

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A ring of work queue entries or of CQEs.
#[derive(Debug)]
pub struct RingCells {
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: the creator promises (`RingCells::new`) that the memory outlives it; producer and consumer agree on which of them writes
// where.
unsafe impl Send for RingCells {}

impl RingCells {
    /// # Safety
    /// `start` is 64-byte aligned and valid for reads and writes of `len_bytes`, a power of two, for as long as this exists.
    pub unsafe fn new(start: *mut u8, len_bytes: usize) -> RingCells {
        debug_assert!(len_bytes.is_power_of_two() && start.addr().is_multiple_of(64));
        RingCells { start, len_bytes }
    }

    /// Copies bytes out, from `offset` on, going round at the end. `offset` is taken modulo the ring's length; no more than one round
    /// is copied.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let offset = offset & (self.len_bytes - 1);
        let total = out.len().min(self.len_bytes);
        let head = total.min(self.len_bytes - offset);
        // SAFETY: `offset + head` and `total - head` stay within the ring; `out` has room for `total`; a ring and a local buffer do
        // not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.add(offset), out.as_mut_ptr(), head);
            std::ptr::copy_nonoverlapping(self.start, out.as_mut_ptr().add(head), total - head);
        }
    }

    /// Writes a CQE at `offset`, a multiple of 64 that is taken modulo the ring's length: bytes 0 to 55, then the last 8 with release
    /// order. A reader that sees the owner bit sees the rest.
    pub fn write_cqe(&self, offset: usize, cqe: &[u8; 64]) {
        let offset = offset & (self.len_bytes - 1) & !63;
        let (body, last) = cqe.split_at(56);
        let last = u64::from_ne_bytes(last.try_into().expect("8 of 64 bytes"));
        // SAFETY: `offset` is a multiple of 64 within the ring, whose length is one as well; the last 8 bytes are aligned.
        unsafe {
            let at = self.start.add(offset);
            std::ptr::copy_nonoverlapping(body.as_ptr(), at, body.len());
            AtomicU64::from_ptr(at.add(56).cast()).store(last, Ordering::Release);
        }
    }
}

/// A 32-bit big-endian word of a doorbell record.
#[derive(Debug, Clone, Copy)]
pub struct RecordCell(*mut u32);

// SAFETY: as for `RingCells`; the word is only read, as an atomic.
unsafe impl Send for RecordCell {}

impl RecordCell {
    /// # Safety
    /// `at` is aligned and valid for as long as this and its copies are used.
    pub unsafe fn new(at: *mut u32) -> RecordCell {
        RecordCell(at)
    }

    /// The count that the producer wrote. Acquire: pairs with the release fence before the producer's store of the record, so that the
    /// WQEs it counts are visible.
    pub fn load(self) -> u32 {
        // SAFETY: promised at construction.
        let word = unsafe { AtomicU32::from_ptr(self.0) };
        u32::from_be(word.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Pages;

    #[test]
    fn a_ring_reads_round_its_end() {
        let pages = Pages::new(1).unwrap();
        for i in 0..256usize {
            // SAFETY: within the page.
            unsafe { *pages.at(i) = i as u8 };
        }
        // SAFETY: 256 bytes of a page that outlives the ring.
        let ring = unsafe { RingCells::new(pages.at(0), 256) };
        let mut out = [0; 8];
        ring.read(252 + 512, &mut out);
        assert_eq!(out, [252, 253, 254, 255, 0, 1, 2, 3]);
        let mut long = [0; 300];
        ring.read(0, &mut long);
        assert_eq!(long[255], 255);
        assert_eq!(long[256..], [0; 44]);
    }

    #[test]
    fn a_cqe_is_written_whole_and_a_record_is_big_endian() {
        let pages = Pages::new(1).unwrap();
        // SAFETY: 256 bytes of a page that outlives the ring.
        let ring = unsafe { RingCells::new(pages.at(0), 256) };
        let cqe: [u8; 64] = std::array::from_fn(|i| i as u8 + 1);
        ring.write_cqe(256 + 64, &cqe);
        let mut found = [0; 128];
        ring.read(64, &mut found);
        assert_eq!((&found[..64], &found[64..]), (&cqe[..], &[0; 64][..]));
        // SAFETY: a word of the page that outlives it.
        let record = unsafe { RecordCell::new(pages.at(64).cast()) };
        assert_eq!(record.load(), 0x0102_0304);
    }
}
