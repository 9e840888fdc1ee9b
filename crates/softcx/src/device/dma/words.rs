//! Words that driver and device share: doorbell records, UAR registers, the clock.
#![allow(unsafe_code)] // words that a driver writes, or reads, at the same time

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::device::space::{AccessFault, Space, SpaceAddress};

/// Words of one system call.
const WORDS: usize = 512;

/// A 32-bit big-endian word of a doorbell record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordWord(SpaceAddress);

impl RecordWord {
    /// Whose memory it is.
    pub(crate) fn space(self) -> Space {
        self.0.space
    }

    /// # Safety
    /// As for [`DmaRing::new`](super::DmaRing::new): aligned, and valid until the device object that holds it is destroyed.
    pub(crate) unsafe fn new(at: *mut u32) -> RecordWord {
        RecordWord(SpaceAddress::local(at.cast()))
    }

    /// A word of a client's record.
    ///
    /// # Safety
    /// As for [`RecordWord::new`] if the place is one of this process.
    pub(crate) unsafe fn at(place: SpaceAddress) -> RecordWord {
        RecordWord(place)
    }

    #[cold]
    fn load_far(self) -> Result<u32, AccessFault> {
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
    pub(crate) fn load_all(words: &[RecordWord]) -> Result<Vec<u32>, AccessFault> {
        let far = words.first().filter(|first| first.is_far());
        let Some(space) = far.map(|first| first.0.space) else {
            return words.iter().map(|word| word.load()).collect();
        };
        let mut loaded = vec![[0u8; 4]; words.len()];
        for (words, loaded) in words.chunks(WORDS).zip(loaded.chunks_mut(WORDS)) {
            let theirs: Vec<_> = words.iter().map(|word| word.0.span(4)).collect();
            let own =
                SpaceAddress::local(loaded.as_mut_ptr().cast()).span(loaded.as_flattened().len());
            // SAFETY: `own` is what is borrowed here.
            unsafe { space.fetch(&[own], &theirs) }?;
        }
        Ok(loaded.into_iter().map(u32::from_be_bytes).collect())
    }

    /// The count that the driver wrote. Acquire: pairs with the release fence before the driver's store of the record, so
    /// that the WQEs it counts are visible. (A system call orders as much, and more.)
    ///
    /// # Errors
    /// [`AccessFault`] if the memory of another process cannot be read.
    #[inline]
    pub(crate) fn load(self) -> Result<u32, AccessFault> {
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
pub(crate) struct UarRegister(*mut u64);

// SAFETY: the creator promises (`UarRegister::new`) that the memory outlives the device object that holds it; the device only
// runs under its core's lock.
unsafe impl Send for UarRegister {}

impl UarRegister {
    /// # Safety
    /// As for [`DmaRing::new`](super::DmaRing::new): aligned, and valid until the device object that holds it is destroyed.
    pub(crate) unsafe fn new(at: *mut u64) -> UarRegister {
        UarRegister(at)
    }

    /// Whether there is a value to take.
    #[inline]
    pub(crate) fn is_rung(self) -> bool {
        // SAFETY: promised at construction.
        let register = unsafe { AtomicU64::from_ptr(self.0) };
        register.load(Ordering::Relaxed) != 0
    }

    /// The value stored since the last take, if any. Acquire: pairs with the release fence between the driver's doorbell
    /// record and its UAR store. A plain load first: an idle register must cost a read, not a bus lock.
    #[inline]
    pub(crate) fn take(self) -> Option<u64> {
        if !self.is_rung() {
            return None;
        }
        // SAFETY: promised at construction.
        let register = unsafe { AtomicU64::from_ptr(self.0) };
        Some(register.swap(0, Ordering::AcqRel)).filter(|&value| value != 0)
    }
}

/// The word in which a device publishes its clock to programs that map it: nanoseconds, big-endian. So the high half is at the lower
/// address, which programs load first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockWord(*mut u64);

// SAFETY: as for `UarRegister`.
unsafe impl Send for ClockWord {}

impl ClockWord {
    /// # Safety
    /// As for [`UarRegister::new`].
    pub(crate) unsafe fn new(at: *mut u64) -> ClockWord {
        ClockWord(at)
    }

    /// Sets the clock. Release: a program that has read a CQE with a time stamp never reads an earlier clock.
    #[inline]
    pub(crate) fn set(self, now_ns: u64) {
        // SAFETY: promised at construction.
        let word = unsafe { AtomicU64::from_ptr(self.0) };
        word.store(now_ns.to_be(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_is_taken_once() {
        let mut word = 0u64;
        // SAFETY: the word outlives the register.
        let register = unsafe { UarRegister::new(&raw mut word) };
        assert_eq!(register.take(), None);
        // SAFETY: no other code accesses it.
        unsafe { AtomicU64::from_ptr(&raw mut word) }.store(5, Ordering::Release);
        assert_eq!(register.take(), Some(5));
        assert_eq!(register.take(), None);
    }
}
