//! Copies of memory that others may read or write at the same time.
#![allow(unsafe_code)] // raw memory

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What is copied at a time.
const BLOCK_BYTES: usize = 64;

/// Copies into memory that others may read or write at the same time.
///
/// # Safety
/// `at` is valid for writes of `bytes.len()` bytes.
pub(super) unsafe fn copy_to(at: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller's promise; the slice is only read.
    unsafe {
        let done = copy_blocks(bytes.as_ptr().cast_mut(), at, bytes.len());
        store_words(at.add(done), bytes.get(done..).unwrap_or_default());
    }
}

/// Copies out of memory that others may write at the same time.
///
/// # Safety
/// `at` is valid for reads of `bytes.len()` bytes.
pub(super) unsafe fn copy_from(at: *mut u8, bytes: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe {
        let done = copy_blocks(at, bytes.as_mut_ptr(), bytes.len());
        load_words(at.add(done), bytes.get_mut(done..).unwrap_or_default());
    }
}

/// Stores by relaxed atomics, words where they are aligned.
///
/// # Safety
/// As [`copy_to`].
unsafe fn store_words(at: *mut u8, bytes: &[u8]) {
    let head = at.align_offset(8).min(bytes.len());
    let (head, rest) = bytes.split_at(head);
    let (words, tail) = rest.as_chunks::<8>();
    // SAFETY: the caller's promise; the words begin behind the head, where `at` is aligned, and the tail behind them.
    unsafe {
        let middle = at.add(head.len());
        let end = middle.add(words.len() * 8);
        for (i, byte) in head.iter().enumerate() {
            AtomicU8::from_ptr(at.add(i)).store(*byte, Ordering::Relaxed);
        }
        for (i, word) in words.iter().enumerate() {
            AtomicU64::from_ptr(middle.add(i * 8).cast())
                .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (i, byte) in tail.iter().enumerate() {
            AtomicU8::from_ptr(end.add(i)).store(*byte, Ordering::Relaxed);
        }
    }
}

/// Loads as [`store_words`] stores.
///
/// # Safety
/// As [`copy_from`].
unsafe fn load_words(at: *mut u8, bytes: &mut [u8]) {
    let head = at.align_offset(8).min(bytes.len());
    let (head, rest) = bytes.split_at_mut(head);
    let (words, tail) = rest.as_chunks_mut::<8>();
    // SAFETY: as in `store_words`.
    unsafe {
        let middle = at.add(head.len());
        let end = middle.add(words.len() * 8);
        for (i, byte) in head.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(at.add(i)).load(Ordering::Relaxed);
        }
        for (i, word) in words.iter_mut().enumerate() {
            *word = AtomicU64::from_ptr(middle.add(i * 8).cast())
                .load(Ordering::Relaxed)
                .to_ne_bytes();
        }
        for (i, byte) in tail.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(end.add(i)).load(Ordering::Relaxed);
        }
    }
}

/// Copies from one such memory into another.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `len_bytes` bytes.
pub(super) unsafe fn copy_between(from: *mut u8, to: *mut u8, len_bytes: usize) {
    // SAFETY: the caller's promise; what is done is no longer than all of it.
    let mut done = unsafe { copy_blocks(from, to, len_bytes) };
    let mut block = [0; BLOCK_BYTES];
    while done < len_bytes {
        let part = &mut block[..BLOCK_BYTES.min(len_bytes - done)];
        // SAFETY: as above.
        unsafe {
            load_words(from.add(done), part);
            store_words(to.add(done), part);
        }
        done += part.len();
    }
}

/// Copies whole blocks. Returns how many bytes it has copied. Not by atomics, which compilers do not turn into wider accesses: the accesses of an assembly block
/// may race, as those of a device may, and what a race leaves is some mixture of bytes.
///
/// # Safety
/// As [`copy_between`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_blocks(from: *mut u8, to: *mut u8, len_bytes: usize) -> usize {
    let copied = len_bytes - len_bytes % BLOCK_BYTES;
    if copied == 0 {
        return 0;
    }
    // SAFETY: loads from and stores to what the caller has promised, up to the end of the last whole block. It uses no stack.
    unsafe {
        std::arch::asm!(
            "2:",
            "movdqu {a}, xmmword ptr [{from}]",
            "movdqu {b}, xmmword ptr [{from} + 16]",
            "movdqu {c}, xmmword ptr [{from} + 32]",
            "movdqu {d}, xmmword ptr [{from} + 48]",
            "movdqu xmmword ptr [{to}], {a}",
            "movdqu xmmword ptr [{to} + 16], {b}",
            "movdqu xmmword ptr [{to} + 32], {c}",
            "movdqu xmmword ptr [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "sub {left}, 64",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) copied => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
    copied
}

/// Elsewhere all is copied by atomics.
///
/// # Safety
/// As [`copy_between`].
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn copy_blocks(_from: *mut u8, _to: *mut u8, _len_bytes: usize) -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of every length and alignment around those of words and blocks, with what is before and behind.
    #[test]
    fn exactly_the_bytes_that_are_named_are_copied() {
        let from: Vec<u8> = (0..400u32).map(|at| at as u8 | 1).collect();
        let mut source = from.clone();
        for len_bytes in (0..70).chain([127, 128, 129, 192, 300]) {
            for (start, at) in [(0, 0), (1, 0), (0, 1), (3, 5), (8, 16), (9, 7)] {
                let mut to = vec![0; 400];
                let mut into = vec![0; 400];
                let mut out = vec![0; 400];
                // SAFETY: all are longer than what is copied from these places on.
                unsafe {
                    let place = source.as_mut_ptr().add(start);
                    copy_between(place, to.as_mut_ptr().add(at), len_bytes);
                    copy_to(into.as_mut_ptr().add(at), &from[start..start + len_bytes]);
                    copy_from(place, &mut out[at..at + len_bytes]);
                }
                let mut expected = vec![0; 400];
                expected[at..at + len_bytes].copy_from_slice(&from[start..start + len_bytes]);
                for copied in [to, into, out] {
                    assert_eq!(copied, expected, "{len_bytes} bytes from {start} to {at}");
                }
            }
        }
    }
}
