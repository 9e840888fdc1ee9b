//! The state of a queue pair, for its owner.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::device::qp::State;

/// The part of a queue pair that its owner reads without the device's lock. A card reports these states by asynchronous events.
#[derive(Debug, Default)]
pub struct QpStatus {
    state: AtomicU8,
    overrun: AtomicU8,
    /// Whether the device polls the registers in every turn. The device clears this flag before its last poll. A thread that rings reads the
    /// flag after its store. So either the device sees the store, or the thread sees the cleared flag.
    watched: AtomicBool,
    device_failed: AtomicBool,
}

impl QpStatus {
    pub(crate) fn set_watched(&self, watched: bool) {
        self.watched.store(watched, Ordering::Relaxed);
    }

    pub(crate) fn watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// The state as the device last set it.
    pub fn state(&self) -> State {
        State::parse(self.state.load(Ordering::Acquire)).unwrap_or(State::Reset)
    }

    /// The state for the owner: the error state if the device has reported that it failed, otherwise the state of the queue pair.
    pub fn reported(&self) -> State {
        if self.device_failed() {
            return State::Error;
        }
        self.state()
    }

    /// Whether the device has reported that it failed. It then executes no commands, but may still work.
    pub fn device_failed(&self) -> bool {
        self.device_failed.load(Ordering::Acquire)
    }

    pub(crate) fn set_device_failed(&self) {
        self.device_failed.store(true, Ordering::Release);
    }

    /// Whether a completion queue overran: completions were lost.
    pub fn overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire) != 0
    }

    pub(super) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub(super) fn set_overrun(&self, overrun: bool) {
        self.overrun.store(overrun.into(), Ordering::Release);
    }
}
