//! The words by which streams and the library's threads tell each other how far they have come.
#![allow(unsafe_code)] // lays words out in pages of the kernel's

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::nic::{PAGE_BYTES, Pages};
use crate::proxy::TriggerCount;

/// Running counts of both queues, send and receive, that only grow until the endpoint is reset. Each pair on a cache line of its own, and apart
/// from its neighbour, which processors may fetch along: one is written by streams and the other by whoever reaps.
///
/// All bits 0 are valid words.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Words {
    /// Work requests whose programs were executed. On the proxy path this is the trigger.
    pub(super) rung: WordPair,
    /// Completions that were processed. On the proxy path this is what a stream waits for.
    pub(super) seen: WordPair,
}

/// The words of one endpoint, in pages that have nothing but such words.
///
/// A GPU reaches registered memory, and the driver registers whole pages. Memory of the application in such a page would be pinned memory to the
/// driver: a copy to it would not be waited for, and registering it would be refused. So these words do not come from the allocator. Their pages stay
/// for the words of later endpoints.
#[derive(Debug)]
pub(super) struct SharedWords(&'static Words);

/// Words that no endpoint has.
static FREE: Mutex<Vec<&'static Words>> = Mutex::new(Vec::new());

fn free() -> MutexGuard<'static, Vec<&'static Words>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedWords {
    /// Words that are 0.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System): no memory.
    pub(super) fn new() -> Result<SharedWords> {
        let mut free = free();
        if let Some(words) = free.pop() {
            return Ok(SharedWords(words));
        }
        let pages = Pages::new(PAGE_BYTES)?;
        let count = pages.len_bytes() / size_of::<Words>();
        // SAFETY: pages of zeros, which is what the words may be, aligned as these are. They are never unmapped.
        let words: &'static [Words] =
            unsafe { std::slice::from_raw_parts(pages.start().as_ptr().cast(), count) };
        std::mem::forget(pages);
        free.extend(words);
        free.pop().map(SharedWords).ok_or(crate::Error::System {
            operation: "allocation of words",
            errno: libc::ENOMEM,
        })
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        let pairs = [&self.0.rung, &self.0.seen];
        let words = pairs.into_iter().flat_map(|pair| pair.iter());
        words.for_each(|word| word.store(0, Ordering::Relaxed));
        free().push(self.0);
    }
}

impl Deref for SharedWords {
    type Target = Words;

    fn deref(&self) -> &Words {
        self.0
    }
}

impl TriggerCount for SharedWords {
    fn count(&self) -> u64 {
        let [send, recv] = &*self.rung;
        u64::from(send.load(Ordering::Relaxed)) << 32 | u64::from(recv.load(Ordering::Relaxed))
    }
}

/// Begins a cache line: what is declared before it and what after it, in a `repr(C)` struct, are written by different threads. Where two
/// share a line, each has to wait for it whenever the other has written, though neither wants to know.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct CacheLineStart;

/// Two words.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct WordPair([AtomicU32; 2]);

impl Deref for WordPair {
    type Target = [AtomicU32; 2];

    fn deref(&self) -> &[AtomicU32; 2] {
        &self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_and_share_their_pages_with_words_only() {
        let words: Vec<SharedWords> = (0..100).map(|_| SharedWords::new().unwrap()).collect();
        let address = |words: &Words| std::ptr::from_ref(words).addr();
        for (at, own) in words.iter().enumerate() {
            assert_eq!(own.count(), 0);
            assert_eq!(own.seen[1].swap(at as u32 + 1, Ordering::Relaxed), 0);
            assert_eq!(address(own) % size_of::<Words>(), 0);
        }
        let all: std::collections::BTreeSet<usize> = (words.iter().map(|words| address(words)))
            .chain(free().iter().copied().map(address))
            .collect();
        // Those that other tests have now are missing, so only pages that begin with one of ours are looked at.
        let pages: Vec<usize> = words.iter().map(|words| address(words)).collect();
        assert!(pages.iter().any(|start| {
            start % PAGE_BYTES == 0
                && (*start..start + PAGE_BYTES)
                    .step_by(size_of::<Words>())
                    .all(|at| all.contains(&at))
        }));
        drop(words);
        assert_eq!(
            SharedWords::new().unwrap().seen[1].load(Ordering::Relaxed),
            0
        );
    }
}
