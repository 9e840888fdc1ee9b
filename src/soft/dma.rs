//! The device's access to memory: the one place of this room where registered memory and rings are read and written.
//!
//! From the language's point of view this is the outside world, as a card's DMA engine is: an application that touches a
//! buffer while a transfer is using it sees torn bytes, here as there. Words by which two sides hand memory over (doorbell
//! records, UAR registers, the last word of a CQE) are atomics.
#![allow(unsafe_code)] // shared memory is what this file is about

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::soft::space::{Fault, Place, Space};
use crate::{Error, Result};

/// Zeroed, page-aligned memory that a device may access. Its address never changes.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

/// Alignment and granularity of [`Pages`].
pub const PAGE_BYTES: usize = 4096;

// SAFETY: `Pages` owns plain memory and gives out addresses only; who writes where is agreed between driver and device.
unsafe impl Send for Pages {}
// SAFETY: as above; there is no interior state besides the memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len_bytes` of memory, rounded up to whole pages.
    ///
    /// # Errors
    /// [`Error::System`] with ENOMEM if there is not so much.
    pub fn new(len_bytes: usize) -> Result<Pages> {
        let none = Error::System {
            operation: "allocation of device memory",
            errno: libc::ENOMEM,
        };
        let Some(len_bytes) = len_bytes.max(1).checked_next_multiple_of(PAGE_BYTES) else {
            return Err(none);
        };
        let Ok(layout) = Layout::from_size_align(len_bytes, PAGE_BYTES) else {
            return Err(none);
        };
        // SAFETY: the layout has a size of at least one page.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(none)?;
        Ok(Pages { start, layout })
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length, a multiple of [`PAGE_BYTES`].
    pub fn len_bytes(&self) -> usize {
        self.layout.size()
    }

    /// The byte at `offset`.
    ///
    /// # Panics
    /// If `offset` is past the end: the layout of driver memory is computed, never given from outside.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len_bytes());
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// A ring of 64-byte blocks or strides in driver memory, read by the device.
#[derive(Debug)]
pub(crate) struct Ring {
    start: Place,
    len_bytes: usize,
    /// What was read ahead of a ring in another process.
    window: RefCell<Window>,
}

/// Bytes of a ring from a running offset on, which does not go round.
#[derive(Debug, Default)]
struct Window {
    start: usize,
    bytes: Vec<u8>,
}

/// Words of one system call.
const WORDS: usize = 512;
/// Bytes that are read ahead at once.
const WINDOW_BYTES: usize = 1024;

impl Ring {
    /// # Safety
    /// In the space of this process, `start` is 64-byte aligned and valid for reads and writes of `len_bytes`, a power of two,
    /// until the device object that holds the ring is destroyed.
    pub(crate) unsafe fn new(start: *mut u8, len_bytes: usize) -> Ring {
        Ring {
            start: Place::local(start),
            len_bytes,
            window: RefCell::default(),
        }
    }

    /// A ring of a client. Nothing is asked of one in another process: what is not mapped is a fault when it is used.
    ///
    /// # Safety
    /// As for [`Ring::new`] if the place is one of this process.
    pub(crate) unsafe fn at(start: Place, len_bytes: usize) -> Ring {
        Ring {
            start,
            len_bytes,
            window: RefCell::default(),
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
    /// [`Fault`] if the memory of another process cannot be read, or there is none.
    #[inline]
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> std::result::Result<(), Fault> {
        if self.len_bytes == 0 {
            return Err(Fault);
        }
        let offset = offset & (self.len_bytes - 1);
        let total = out.len().min(self.len_bytes);
        let head = total.min(self.len_bytes - offset);
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
    fn read_far(
        &self,
        offset: usize,
        out: &mut [u8],
        head: usize,
    ) -> std::result::Result<(), Fault> {
        let (first, rest) = out.split_at_mut(head);
        let at = self.start.behind(offset as u64);
        at.space
            .gather(&mut [(at.addr, first), (self.start.addr, rest)])
    }

    /// [`Ring::read`] of something that does not change any more, as the `valid` bytes from its start on do not: those are read
    /// ahead, if it takes a system call. `offset` is a running one.
    ///
    /// # Errors
    /// As of [`Ring::read`].
    #[inline]
    pub(crate) fn read_ahead(
        &self,
        offset: usize,
        out: &mut [u8],
        valid: usize,
    ) -> std::result::Result<(), Fault> {
        if self.start.space.is_local() {
            return self.read(offset, out);
        }
        self.read_window(offset, out, valid)
    }

    #[cold]
    fn read_window(
        &self,
        offset: usize,
        out: &mut [u8],
        valid: usize,
    ) -> std::result::Result<(), Fault> {
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

    /// Forgets what was read ahead: the ring begins anew.
    pub(crate) fn forget(&mut self) {
        self.window.get_mut().bytes.clear();
    }

    /// Writes a CQE at `offset`, a multiple of 64: bytes 0 to 55, then the last 8 with release order, so that who sees the
    /// owner bit sees the rest.
    ///
    /// # Errors
    /// [`Fault`] if the memory of another process cannot be written, or there is none.
    #[inline]
    pub(crate) fn write_cqe(
        &self,
        offset: usize,
        cqe: &[u8; 64],
    ) -> std::result::Result<(), Fault> {
        if self.len_bytes < 64 {
            return Err(Fault);
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

impl Ring {
    /// The kernel copies one piece after the other; inside of a piece the order is anybody's. So the byte with the owner bit is
    /// a piece of its own.
    #[cold]
    fn write_cqe_far(&self, offset: usize, cqe: &[u8; 64]) -> std::result::Result<(), Fault> {
        let at = self.start.behind(offset as u64);
        let (body, owner) = cqe.split_at(63);
        at.space
            .scatter(&[(at.addr, body), (at.addr.wrapping_add(63), owner)])
    }
}

/// A 32-bit big-endian word of a doorbell record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordWord(Place);

impl RecordWord {
    /// Whose memory it is.
    pub(crate) fn space(self) -> Space {
        self.0.space
    }

    /// # Safety
    /// As for [`Ring::new`]: aligned, and valid until the device object that holds it is destroyed.
    pub(crate) unsafe fn new(at: *mut u32) -> RecordWord {
        RecordWord(Place::local(at.cast()))
    }

    /// A word of a client's record.
    ///
    /// # Safety
    /// As for [`RecordWord::new`] if the place is one of this process.
    pub(crate) unsafe fn at(place: Place) -> RecordWord {
        RecordWord(place)
    }

    #[cold]
    fn load_far(self) -> std::result::Result<u32, Fault> {
        let mut bytes = [0; 4];
        self.0.space.read(self.0.addr, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Whether it is in another process.
    pub(crate) fn is_far(self) -> bool {
        !self.0.space.is_local()
    }

    /// Loads words of one space, in another process with one system call for many.
    ///
    /// # Errors
    /// As of [`RecordWord::load`], for any of them.
    pub(crate) fn load_all(words: &[RecordWord]) -> std::result::Result<Vec<u32>, Fault> {
        let far = words.first().filter(|first| first.is_far());
        let Some(space) = far.map(|first| first.0.space) else {
            return words.iter().map(|word| word.load()).collect();
        };
        let mut loaded = vec![[0u8; 4]; words.len()];
        for (words, loaded) in words.chunks(WORDS).zip(loaded.chunks_mut(WORDS)) {
            let theirs: Vec<_> = words.iter().map(|word| word.0.span(4)).collect();
            let own = Place::local(loaded.as_mut_ptr().cast()).span(loaded.as_flattened().len());
            // SAFETY: `own` is what is borrowed here.
            unsafe { space.fetch(&[own], &theirs) }?;
        }
        Ok(loaded.into_iter().map(u32::from_be_bytes).collect())
    }

    /// The count that the driver wrote. Acquire: pairs with the release fence before the driver's store of the record, so
    /// that the WQEs it counts are visible. (A system call orders as much, and more.)
    ///
    /// # Errors
    /// [`Fault`] if the memory of another process cannot be read.
    #[inline]
    pub(crate) fn load(self) -> std::result::Result<u32, Fault> {
        let Some(word) = self.0.pointer() else {
            return self.load_far();
        };
        // SAFETY: promised at construction.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        Ok(u32::from_be(word.load(Ordering::Acquire)))
    }
}

/// A UAR register of 8 bytes: the driver stores into it, the device takes the value out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Register(*mut u64);

// SAFETY: the creator promises (`Register::new`) that the memory outlives the device object that holds it; the device only
// runs under its core's lock.
unsafe impl Send for Register {}

impl Register {
    /// # Safety
    /// As for [`Ring::new`]: aligned, and valid until the device object that holds it is destroyed.
    pub(crate) unsafe fn new(at: *mut u64) -> Register {
        Register(at)
    }

    /// The value stored since the last take, if any. Acquire: pairs with the release fence between the driver's doorbell
    /// record and its UAR store. A plain load first: an idle register must cost a read, not a bus lock.
    #[inline]
    pub(crate) fn take(self) -> Option<u64> {
        // SAFETY: promised at construction.
        let register = unsafe { AtomicU64::from_ptr(self.0) };
        if register.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(register.swap(0, Ordering::AcqRel)).filter(|&value| value != 0)
    }
}

/// A word where a device shows its clock to those who map it: nanoseconds, big-endian, so that two loads of half a word find the high
/// one first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockWord(*mut u64);

// SAFETY: as for `Register`.
unsafe impl Send for ClockWord {}

impl ClockWord {
    /// # Safety
    /// As for [`Register::new`].
    pub(crate) unsafe fn new(at: *mut u64) -> ClockWord {
        ClockWord(at)
    }

    /// Sets it. Release: who finds a CQE with a time stamp finds the clock not behind it.
    #[inline]
    pub(crate) fn set(self, now_ns: u64) {
        // SAFETY: promised at construction.
        let word = unsafe { AtomicU64::from_ptr(self.0) };
        word.store(now_ns.to_be(), Ordering::Release);
    }
}

/// Copies from registered memory into a local buffer.
///
/// # Safety
/// `from` was resolved by the key table for `into.len()` bytes, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_out(from: *const u8, into: &mut [u8]) {
    if !into.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }
}

/// Copies a local buffer into registered memory.
///
/// # Safety
/// `into` was resolved by the key table for `from.len()` bytes, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_in(into: *mut u8, from: &[u8]) {
    match from.len() {
        0 => {}
        // Words that a peer may be polling arrive whole, as they do from a card.
        // SAFETY: the caller's promise, and the alignment was looked at.
        4 if into as usize & 3 == 0 => unsafe {
            AtomicU32::from_ptr(into.cast()).store(
                u32::from_ne_bytes([from[0], from[1], from[2], from[3]]),
                Ordering::Release,
            );
        },
        // SAFETY: as above.
        8 if into as usize & 7 == 0 => unsafe {
            let value = u64::from_ne_bytes([
                from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7],
            ]);
            AtomicU64::from_ptr(into.cast()).store(value, Ordering::Release);
        },
        // SAFETY: the caller's promise.
        len => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, len) },
    }
}

/// Copies between two places of registered memory, which may overlap.
///
/// # Safety
/// Both were resolved by the key table for `len_bytes`, under the lock that deregistration takes.
#[inline]
pub(crate) unsafe fn copy_across(from: *const u8, into: *mut u8, len_bytes: usize) {
    if len_bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, into, len_bytes) }
    }
}

/// The atomics of the wire, carried out so that the host's own atomics on the same word are honoured.
///
/// # Safety
/// `at` is 8-byte aligned and was resolved by the key table for 8 bytes, under the lock that deregistration takes.
pub(crate) unsafe fn fetch_add(at: *mut u8, add: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at.cast()) }.fetch_add(add, Ordering::AcqRel)
}

/// # Safety
/// As [`fetch_add`].
pub(crate) unsafe fn compare_swap(at: *mut u8, compare: u64, swap: u64) -> u64 {
    // SAFETY: the caller's promise.
    match unsafe { AtomicU64::from_ptr(at.cast()) }.compare_exchange(
        compare,
        swap,
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        Ok(old) | Err(old) => old,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_reads_round_its_end() {
        let pages = Pages::new(1).unwrap();
        for i in 0..256usize {
            // SAFETY: within the page.
            unsafe { *pages.at(i) = i as u8 };
        }
        // SAFETY: 256 bytes of a page that outlives the ring.
        let ring = unsafe { Ring::new(pages.at(0), 256) };
        let mut out = [0; 8];
        ring.read(252 + 512, &mut out).unwrap();
        assert_eq!(out, [252, 253, 254, 255, 0, 1, 2, 3]);
        let mut long = [0; 300];
        ring.read(0, &mut long).unwrap();
        assert_eq!(long[255], 255);
        assert_eq!(long[256..], [0; 44]);
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        for len_bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let refused = Pages::new(len_bytes);
            assert!(
                matches!(
                    refused,
                    Err(Error::System {
                        errno: libc::ENOMEM,
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn a_register_is_taken_once() {
        let mut word = 0u64;
        // SAFETY: the word outlives the register.
        let register = unsafe { Register::new(&raw mut word) };
        assert_eq!(register.take(), None);
        // SAFETY: nobody else is there.
        unsafe { AtomicU64::from_ptr(&raw mut word) }.store(5, Ordering::Release);
        assert_eq!(register.take(), Some(5));
        assert_eq!(register.take(), None);
    }
}
