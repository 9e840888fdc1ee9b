//! The words that a stream and this process share.
#![allow(unsafe_code)] // has memory registered that it keeps

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys::CUdeviceptr;
use doorbell_wire::memory::PageBox;

use super::context::CudaContext;
use super::host_registration::HostRegistration;
use crate::Result;

/// How long a waiting kernel tolerates that the watching thread does not run. The streams of a process that is stopped for longer fail.
const LEASE: Duration = Duration::from_secs(60);

/// An operation of the stream has failed, or its wait was ended: DOORBELL_EWORK of the C interface.
pub(super) const STATUS_WORK: i32 = -19;
/// A number has no meaning: DOORBELL_ERANGE.
pub(super) const STATUS_RANGE: i32 = -10;
/// A time limit has passed: DOORBELL_ETIMEOUT.
pub(super) const STATUS_TIMEOUT: i32 = -17;
/// A queue has no room: DOORBELL_EFULL.
pub(super) const STATUS_FULL: i32 = -15;
/// The stream itself has failed: DOORBELL_EASYNC.
pub(super) const STATUS_STREAM: i32 = -18;

/// Words in host memory that GPUs can access. The memory is this process's own: a destroyed context would free memory that the driver has
/// allocated, and the words are read after that.
pub(super) struct StreamWords {
    /// Dropped before the memory.
    pinned: HostRegistration,
    page: PageBox<WordsPage>,
}

/// It has a page of its own, so that nothing else is registered with it.
#[repr(C)]
#[derive(Default)]
struct WordsPage {
    control: StreamControl,
    gate: Gate,
    replay: ReplayFault,
}

/// `struct dbl_control` of `include/doorbell/detail/execute.h`. Parts with different writers are on different cache lines.
#[repr(C, align(128))]
#[derive(Default)]
struct StreamControl {
    host: HostWritten,
    stream: DeviceWritten,
    both: SharedStatus,
}

#[repr(C, align(128))]
#[derive(Default)]
struct HostWritten {
    release: AtomicU64,
    alive: AtomicU64,
    lease_ns: AtomicU64,
    failures: AtomicU32,
}

#[repr(C, align(128))]
#[derive(Default)]
struct DeviceWritten {
    released: AtomicU64,
    stopped: AtomicU64,
    stop: AtomicU32,
    done: AtomicU32,
}

#[repr(C, align(128))]
#[derive(Default)]
struct SharedStatus {
    status: AtomicI32,
}

#[repr(C, align(128))]
#[derive(Default)]
struct Gate(AtomicU32);

/// `struct dbl_replay_fault` of `include/doorbell/detail/replay.h`.
#[repr(C, align(128))]
#[derive(Default)]
struct ReplayFault {
    code: AtomicI32,
    aborts: AtomicU32,
    goes_on: AtomicU32,
}

// The header asserts the same.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(StreamControl, host.alive) == 8);
    assert!(offset_of!(StreamControl, host.lease_ns) == 16);
    assert!(offset_of!(StreamControl, host.failures) == 24);
    assert!(offset_of!(StreamControl, stream.released) == 128);
    assert!(offset_of!(StreamControl, stream.stopped) == 136);
    assert!(offset_of!(StreamControl, stream.stop) == 144);
    assert!(offset_of!(StreamControl, stream.done) == 148);
    assert!(offset_of!(StreamControl, both.status) == 256);
    assert!(size_of::<StreamControl>() == 384);
    assert!(offset_of!(ReplayFault, code) == 0);
    assert!(offset_of!(ReplayFault, aborts) == 4);
    assert!(offset_of!(ReplayFault, goes_on) == 8);
};

/// Why kernels have stopped executing, and from which program on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// This process has not looked at the stream for [`LEASE`].
    Abandoned { from: u64 },
    /// A kernel could not read its words.
    Malformed { from: u64 },
    /// A wait took longer than the application's kernel allows.
    TimedOut { from: u64 },
}

impl StreamWords {
    /// New words, all 0.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn new(context: &CudaContext) -> Result<StreamWords> {
        let page = PageBox::new(WordsPage::default)?;
        let lease_ns = LEASE.as_nanos() as u64;
        page.control
            .host
            .lease_ns
            .store(lease_ns, Ordering::Relaxed);
        let start = std::ptr::from_ref(&*page).addr();
        // SAFETY: the page lives as long as `pinned`, and is atomics to everyone.
        let pinned = unsafe { HostRegistration::new(context, start, page.len_bytes())? };
        Ok(StreamWords { pinned, page })
    }

    /// The stream's count.
    pub(super) fn done(&self) -> &AtomicU32 {
        &self.page.control.stream.done
    }

    /// The last open gate.
    pub(super) fn gate(&self) -> &AtomicU32 {
        &self.page.gate.0
    }

    /// Ends the waits of kernels up to the program with that number.
    pub(super) fn release(&self, number: u64) {
        // Release: the status comes first.
        let release = &self.page.control.host.release;
        release.fetch_max(number, Ordering::Release);
    }

    /// Whether a wait of the program with that number was ended. Known until the wait of a later program is ended.
    pub(super) fn was_released(&self, number: u64) -> bool {
        self.page.control.stream.released.load(Ordering::Acquire) == number
    }

    /// Shows kernels that this process looks at the stream.
    pub(super) fn stay_alive(&self) {
        let alive = &self.page.control.host.alive;
        alive.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stop(&self) -> Option<Stop> {
        let stream = &self.page.control.stream;
        let stop = stream.stop.load(Ordering::Acquire);
        let from = stream.stopped.load(Ordering::Acquire);
        match stop {
            0 => None,
            1 => Some(Stop::Abandoned { from }),
            3 => Some(Stop::TimedOut { from }),
            _ => Some(Stop::Malformed { from }),
        }
    }

    /// Notes a failure for kernels: counts it, and sets the status if that is 0.
    pub(super) fn note(&self, status: i32) {
        // Release: before any store that lets a wait of a kernel end.
        let failures = &self.page.control.host.failures;
        failures.fetch_add(1, Ordering::Release);
        // SeqCst: before any store that lets the stream continue.
        let word = self.status();
        let _ = word.compare_exchange(0, status, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// How many failures were noted, modulo 2^32.
    pub(super) fn failures(&self) -> u32 {
        let failures = &self.page.control.host.failures;
        failures.load(Ordering::Acquire)
    }

    /// The status: 0, or the first failure.
    pub(super) fn status(&self) -> &AtomicI32 {
        &self.page.control.both.status
    }

    /// The address of `struct dbl_control` on devices.
    pub(super) fn control_at(&self) -> CUdeviceptr {
        self.device_address(std::ptr::from_ref(&self.page.control).addr())
    }

    /// The address of [`StreamWords::done`] on devices.
    pub(super) fn done_at(&self) -> CUdeviceptr {
        self.device_address(std::ptr::from_ref(self.done()).addr())
    }

    /// The address of [`StreamWords::gate`] on devices.
    pub(super) fn gate_at(&self) -> CUdeviceptr {
        self.device_address(std::ptr::from_ref(self.gate()).addr())
    }

    /// The address of [`StreamWords::status`] on devices.
    pub(super) fn status_at(&self) -> CUdeviceptr {
        self.device_address(std::ptr::from_ref(self.status()).addr())
    }

    /// 0, or the code of the first operation that a kernel of a captured graph did not execute.
    pub(super) fn replay_fault(&self) -> &AtomicI32 {
        &self.page.replay.code
    }

    /// How often the stream was aborted. A kernel that waits for a word ends when it changes.
    pub(super) fn replay_aborts(&self) -> &AtomicU32 {
        &self.page.replay.aborts
    }

    /// Whether kernels execute operations behind one that has failed.
    pub(super) fn set_replay_goes_on(&self, goes_on: bool) {
        self.page
            .replay
            .goes_on
            .store(goes_on.into(), Ordering::Release);
    }

    /// The address of [`StreamWords::replay_fault`] on devices.
    pub(super) fn replay_fault_at(&self) -> CUdeviceptr {
        self.device_address(std::ptr::from_ref(self.replay_fault()).addr())
    }

    fn device_address(&self, address: usize) -> CUdeviceptr {
        self.pinned.device_address(address)
    }
}
