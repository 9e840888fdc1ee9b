//! One step of a loop, and the times at which kernels ended.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// One step. It moves to the thread that runs its kernel.
#[derive(Clone, Debug)]
pub struct BenchStep {
    /// Number of the step since the pass began, warm-up included.
    pub index: u64,
    /// Bytes to exchange.
    pub size_bytes: u64,
    /// Length of the kernel.
    pub(super) kernel: Duration,
    /// Where its end is noted, if it is timed.
    pub(super) stamp: Option<usize>,
    /// The stamps of the whole pass, carried by its first step.
    pub(super) stamps: Option<Arc<Stamps>>,
}

thread_local! {
    /// The stamps of the pass whose kernels this thread runs. Not in every step: a handle that one thread clones and another drops
    /// moves a cache line between them, and the application's share of that would count as the loop's.
    static STAMPS: RefCell<Option<Arc<Stamps>>> = const { RefCell::new(None) };
}

impl BenchStep {
    /// Length of the kernel.
    #[cfg(feature = "cuda")]
    pub fn kernel(&self) -> Duration {
        self.kernel
    }

    /// The same step for the other side of a pingpong, whose kernels are not timed.
    pub fn untimed(&self) -> Self {
        Self {
            stamp: None,
            stamps: None,
            ..*self
        }
    }

    /// The kernel: spins for the length of the case, as a kernel occupies a GPU, and notes its end.
    pub fn run_kernel(&self) {
        if !self.kernel.is_zero() {
            let start = Instant::now();
            while start.elapsed() < self.kernel {
                std::hint::spin_loop();
            }
        }
        if let Some(stamps) = &self.stamps {
            STAMPS.set(Some(Arc::clone(stamps)));
        }
        if let Some(slot) = self.stamp {
            STAMPS.with_borrow(|stamps| {
                if let Some(stamps) = stamps {
                    stamps.note(slot);
                }
            });
        }
    }
}

/// When each kernel ended, in nanoseconds since the pass began. Written on the stream, read after a drain.
#[derive(Debug)]
pub(super) struct Stamps {
    start: Instant,
    ends_ns: Box<[AtomicU64]>,
}

impl Stamps {
    const MISSING: u64 = u64::MAX;

    pub(super) fn new(count: usize) -> Self {
        Self {
            start: Instant::now(),
            ends_ns: (0..count).map(|_| AtomicU64::new(Self::MISSING)).collect(),
        }
    }

    fn note(&self, slot: usize) {
        // Release: pairs with the Acquire in `periods`. The drain in between orders them too, but that is up to the workload.
        self.ends_ns[slot].store(self.start.elapsed().as_nanos() as u64, Ordering::Release);
    }

    /// From the end of each kernel to the end of the next: whole iterations.
    pub(super) fn periods(&self) -> Result<Vec<u64>> {
        let ends: Vec<u64> = self
            .ends_ns
            .iter()
            .map(|end| end.load(Ordering::Acquire))
            .collect();
        ends.windows(2)
            .map(|pair| {
                anyhow::ensure!(
                    !pair.contains(&Self::MISSING),
                    "a kernel of this row never ran"
                );
                pair[1]
                    .checked_sub(pair[0])
                    .context("kernels of one stream ran out of order")
            })
            .collect()
    }
}
