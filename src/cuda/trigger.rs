//! Triggers: programs for kernels of the application.
#![allow(unsafe_code)] // says that a value may be a kernel's parameter

use cudarc::driver::sys::CUdeviceptr;

use super::kernel_words::TRIGGER_WORDS;

/// Programs of a [`TriggerStream`](super::TriggerStream), for a kernel of the application to execute: a plain value that is passed to the kernel as a
/// parameter, or in memory. `include/doorbell/trigger.h` has the functions that execute it, and the same layout (`struct doorbell_trigger`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Trigger {
    pub(super) control: CUdeviceptr,
    pub(super) turn: CUdeviceptr,
    pub(super) number: u64,
    pub(super) word_count: u32,
    pub(super) failures: u32,
    pub(super) words: [u64; TRIGGER_WORDS],
}

// The header asserts the same.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Trigger, turn) == 8);
    assert!(offset_of!(Trigger, number) == 16);
    assert!(offset_of!(Trigger, word_count) == 24);
    assert!(offset_of!(Trigger, failures) == 28);
    assert!(offset_of!(Trigger, words) == 32);
    assert!(size_of::<Trigger>() == 512);
};

// SAFETY: repr(C), integers only, without padding.
unsafe impl cudarc::driver::DeviceRepr for Trigger {}

impl Trigger {
    /// Its position in the order in which triggers of the stream are executed, from 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The bytes of the kernel's parameter, for launches by other means than `cudarc`'s.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 512] {
        let mut bytes = [0; 512];
        let counts = u64::from(self.word_count) | u64::from(self.failures) << 32;
        let head = [self.control, self.turn, self.number, counts];
        let (places, _) = bytes.as_chunks_mut::<8>();
        for (place, word) in places.iter_mut().zip(head.iter().chain(&self.words)) {
            *place = word.to_ne_bytes();
        }
        bytes
    }
}
