//! Rings as the device sees them: work requests are read out of them, and CQEs written into them.
#![allow(unsafe_code)] // memory that a driver writes, and reads, at the same time

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::space::{AccessFault, SpaceAddress};

/// A ring of 64-byte blocks or strides in driver memory, read by the device.
#[derive(Debug)]
pub(crate) struct DmaRing {
    start: SpaceAddress,
    len_bytes: usize,
    /// What was read ahead of a ring in another process.
    window: RefCell<Window>,
    /// The device's own copy, from which it reads if it has one.
    copy: Option<Box<[u8]>>,
}

/// Bytes of a ring from a running offset on, which does not go round.
#[derive(Debug, Default)]
struct Window {
    start: usize,
    bytes: Vec<u8>,
}

/// Bytes that are read ahead at once.
const WINDOW_BYTES: usize = 1024;

impl DmaRing {
    /// # Safety
    /// In the space of this process, `start` is 64-byte aligned and valid for reads and writes of `len_bytes`, a power of two,
    /// until the device object that holds the ring is destroyed.
    pub(crate) unsafe fn new(start: *mut u8, len_bytes: usize) -> DmaRing {
        DmaRing {
            start: SpaceAddress::local(start),
            len_bytes,
            window: RefCell::default(),
            copy: None,
        }
    }

    /// A ring of a client. A ring in another process is not checked here: an access to unmapped memory fails later.
    ///
    /// # Safety
    /// As for [`DmaRing::new`] if the place is one of this process.
    pub(crate) unsafe fn at(start: SpaceAddress, len_bytes: usize) -> DmaRing {
        DmaRing {
            start,
            len_bytes,
            window: RefCell::default(),
            copy: None,
        }
    }

    /// Its length, a power of two, or 0.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Copies bytes out, from `offset` on, going round at the end. `offset` is taken modulo the ring's length; no more
    /// than one round is copied.
    ///
    /// # Errors
    /// [`AccessFault`] if the memory of another process cannot be read, or if the ring has no memory.
    #[inline]
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessFault> {
        if self.len_bytes == 0 {
            return Err(AccessFault);
        }
        let offset = offset & (self.len_bytes - 1);
        let total = out.len().min(self.len_bytes);
        let head = total.min(self.len_bytes - offset);
        if let Some(copy) = &self.copy {
            out[..head].copy_from_slice(&copy[offset..offset + head]);
            out[head..total].copy_from_slice(&copy[..total - head]);
            return Ok(());
        }
        let Some(start) = self.start.pointer() else {
            return self.read_far(offset, &mut out[..total], head);
        };
        // SAFETY: `offset + head` and `total - head` stay within the ring; `out` has room for `total`; a ring and a local
        // buffer do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(start.add(offset), out.as_mut_ptr(), head);
            std::ptr::copy_nonoverlapping(start, out.as_mut_ptr().add(head), total - head);
        }
        Ok(())
    }

    #[cold]
    fn read_far(&self, offset: usize, out: &mut [u8], head: usize) -> Result<(), AccessFault> {
        let (first, rest) = out.split_at_mut(head);
        let at = self.start.behind(offset as u64);
        at.space
            .gather(&mut [(at.addr, first), (self.start.addr, rest)])
    }

    /// [`DmaRing::read`] of something that does not change any more, as the `valid` bytes from its start on do not: those are read
    /// ahead, if it takes a system call. `offset` is a running one.
    ///
    /// # Errors
    /// As of [`DmaRing::read`].
    #[inline]
    pub(crate) fn read_ahead(
        &self,
        offset: usize,
        out: &mut [u8],
        valid: usize,
    ) -> Result<(), AccessFault> {
        if self.start.space.is_local() || self.copy.is_some() {
            return self.read(offset, out);
        }
        self.read_window(offset, out, valid)
    }

    #[cold]
    fn read_window(&self, offset: usize, out: &mut [u8], valid: usize) -> Result<(), AccessFault> {
        let Ok(mut window) = self.window.try_borrow_mut() else {
            return self.read(offset, out);
        };
        let at = offset.wrapping_sub(window.start);
        if let Some(known) = window.bytes.get(at..at.saturating_add(out.len())) {
            out.copy_from_slice(known);
            return Ok(());
        }
        let ahead = valid.min(WINDOW_BYTES).min(self.len_bytes);
        if ahead < out.len() {
            return self.read(offset, out);
        }
        window.bytes.resize(ahead, 0);
        let read = self.read(offset, &mut window.bytes);
        if read.is_ok() {
            window.start = offset;
            out.copy_from_slice(&window.bytes[..out.len()]);
        } else {
            window.bytes.clear();
        }
        read
    }

    /// Copies what was announced, `len_bytes` from `offset` on, for all later reads: what is written there after this is not seen.
    ///
    /// # Errors
    /// As of [`DmaRing::read`].
    #[cold]
    pub(crate) fn snapshot(&mut self, offset: usize, len_bytes: usize) -> Result<(), AccessFault> {
        // What was announced before the first copy is part of it.
        let (offset, len_bytes, mut copy) = match self.copy.take() {
            Some(copy) => (offset, len_bytes.min(self.len_bytes), copy),
            None => (0, self.len_bytes, vec![0; self.len_bytes].into()),
        };
        let mut bytes = vec![0; len_bytes];
        self.read(offset, &mut bytes)?;
        for (at, byte) in (offset..).zip(bytes) {
            copy[at & (self.len_bytes - 1)] = byte;
        }
        self.copy = Some(copy);
        Ok(())
    }

    /// Forgets what was read ahead: the ring begins anew.
    pub(crate) fn forget(&mut self) {
        self.window.get_mut().bytes.clear();
        self.copy = None;
    }

    /// Writes a CQE at `offset`, a multiple of 64: bytes 0 to 55, then the last 8 with release order, so that a reader
    /// that sees the owner bit sees the rest.
    ///
    /// # Errors
    /// [`AccessFault`] if the memory of another process cannot be written, or if the ring has no memory.
    #[inline]
    pub(crate) fn write_cqe(&self, offset: usize, cqe: &[u8; 64]) -> Result<(), AccessFault> {
        if self.len_bytes < 64 {
            return Err(AccessFault);
        }
        let offset = offset & (self.len_bytes - 1) & !63;
        let Some(start) = self.start.pointer() else {
            return self.write_cqe_far(offset, cqe);
        };
        let last = u64::from_ne_bytes([
            cqe[56], cqe[57], cqe[58], cqe[59], cqe[60], cqe[61], cqe[62], cqe[63],
        ]);
        // SAFETY: `offset` is a multiple of 64 within the ring, whose length is one as well; the last 8 bytes are aligned.
        unsafe {
            let at = start.add(offset);
            std::ptr::copy_nonoverlapping(cqe.as_ptr(), at, 56);
            AtomicU64::from_ptr(at.add(56).cast()).store(last, Ordering::Release);
        }
        Ok(())
    }
}

impl DmaRing {
    /// Writes a CQE into the memory of another process. The kernel copies one piece after the other, and the bytes of a piece in any order. So
    /// the byte with the owner bit is a piece of its own.
    #[cold]
    fn write_cqe_far(&self, offset: usize, cqe: &[u8; 64]) -> Result<(), AccessFault> {
        let at = self.start.behind(offset as u64);
        let (body, owner) = cqe.split_at(63);
        at.space
            .scatter(&[(at.addr, body), (at.addr.wrapping_add(63), owner)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::dma::Pages;

    #[test]
    fn a_ring_reads_round_its_end() {
        let pages = Pages::new(1).unwrap();
        for i in 0..256usize {
            // SAFETY: within the page.
            unsafe { *pages.at(i) = i as u8 };
        }
        // SAFETY: 256 bytes of a page that outlives the ring.
        let ring = unsafe { DmaRing::new(pages.at(0), 256) };
        let mut out = [0; 8];
        ring.read(252 + 512, &mut out).unwrap();
        assert_eq!(out, [252, 253, 254, 255, 0, 1, 2, 3]);
        let mut long = [0; 300];
        ring.read(0, &mut long).unwrap();
        assert_eq!(long[255], 255);
        assert_eq!(long[256..], [0; 44]);
    }
}
