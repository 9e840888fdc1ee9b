//! Barriers between a CPU and a device, and stores to the device's registers. As rdma-core's `util/udma_barrier.h`.
//!
//! A UAR page is mapped write-combining. The processor may keep a store to it in a buffer of its own, for as long as it likes, and later
//! stores to other memory overtake it. A thread that informs another one of a doorbell calls [`flush`] between the two:
//! otherwise the other thread's next doorbell may reach the device first, and the device sees its doorbells go backwards.
//!
//! Builds with debug assertions keep a store back until its thread calls [`flush`]. So a forgotten flush shows on every machine: the
//! device is never rung.
#![allow(unsafe_code)] // stores to registers, and barrier instructions

#[cfg(debug_assertions)]
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What this CPU has stored before is seen by a device that sees a later store, to a doorbell record for one
/// (`udma_to_device_barrier`).
#[inline]
pub fn to_device() {
    fence(Ordering::Release);
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier, which accesses nothing. The fence above reaches the processors only; a device is in the outer domain.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// What a device has stored before the word that was loaded last is seen by later loads (`udma_from_device_barrier`).
#[inline]
pub fn from_device() {
    fence(Ordering::Acquire);
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as in `to_device`.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
}

/// Stores to a register of a device. It is rung at [`flush`], at the latest.
///
/// # Safety
/// `register` is valid for a store of 8 bytes, and aligned, until this thread has called [`flush`]. Others access it atomically, or not
/// from this process.
#[inline]
pub unsafe fn store(register: *mut u64, value: u64) {
    #[cfg(debug_assertions)]
    if HELD
        .try_with(|held| held.borrow_mut().push((register, value)))
        .is_ok()
    {
        return;
    }
    // SAFETY: the caller's contract.
    unsafe {
        store_now(register, value);
    }
}

/// Stores to memory and to registers before it leave this processor before any later store does (`mmio_flush_writes`, and
/// `mmio_wc_start` ahead of the first store to a register).
#[inline]
pub fn flush() {
    // A thread that ends, and has no list any more, keeps nothing back.
    #[cfg(debug_assertions)]
    let _ = HELD.try_with(|held| {
        for (register, value) in held.borrow_mut().drain(..) {
            // SAFETY: the contract of `store`, which put it there.
            unsafe { store_now(register, value) };
        }
    });
    fence(Ordering::Release);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SFENCE is part of SSE, which every x86-64 has, and orders stores only.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier, which accesses nothing.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fence(Ordering::SeqCst);
}

#[cfg(debug_assertions)]
thread_local! {
    /// What this thread has stored and not flushed.
    static HELD: RefCell<Vec<(*mut u64, u64)>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// As [`store`], for the time of the call.
#[inline]
unsafe fn store_now(register: *mut u64, value: u64) {
    // SAFETY: the caller's contract.
    unsafe { AtomicU64::from_ptr(register) }.store(value, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_rings_in_the_order_of_the_stores() {
        let register = AtomicU64::new(0);
        // SAFETY: the word lives until the flush below, and is accessed atomically.
        unsafe {
            store(register.as_ptr(), 1);
            store(register.as_ptr(), 2);
        }
        if cfg!(debug_assertions) {
            assert_eq!(register.load(Ordering::Relaxed), 0, "nothing was flushed");
        }
        flush();
        assert_eq!(register.swap(0, Ordering::Relaxed), 2);
        flush();
        assert_eq!(register.load(Ordering::Relaxed), 0, "nothing is rung twice");
    }
}
