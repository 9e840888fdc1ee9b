//! Delays writes of NICs to GPU memory. If GPU_DIRECT_RDMA_WRITES_ORDERING is NONE, a GPU may see the completion of a write before the bytes of the
//! write (cuda.h; the CUDA guide to GPUDirect RDMA, on memory consistency). A flush, work that is queued later, or time makes the bytes visible. A GPU
//! without that order (`DOORBELL_CUDA_STANDIN_LACKS=ordering`) behaves so, and any other one between two calls of `doorbell_cuda_standin_hold`.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::settings::settings;

/// Long beside what a stream needs to go on, and short beside any deadline.
const LONGEST: Duration = Duration::from_millis(5);

struct HeldWrite {
    since: Instant,
    write: Box<dyn FnOnce() + Send>,
}

static HELD: Mutex<VecDeque<HeldWrite>> = Mutex::new(VecDeque::new());

static HOLDS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static AS_NIC: Cell<bool> = const { Cell::new(false) };
}

/// Whether writes of NICs are held from now on.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_hold(holds: bool) {
    HOLDS.store(holds, Ordering::SeqCst);
    release();
}

/// What the calling thread copies to a device from now on stands for writes of a NIC, or stands for them no more.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_as_nic(is: bool) {
    AS_NIC.set(is);
}

/// Whether what this thread copies is to be held.
pub fn is_nic() -> bool {
    AS_NIC.get() && (HOLDS.load(Ordering::SeqCst) || settings().lacks("ordering"))
}

/// Holds a write back, behind those that are held.
pub fn hold(write: impl FnOnce() + Send + 'static) {
    static RELEASER: Once = Once::new();
    let since = Instant::now();
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let write = Box::new(write);
    held.push_back(HeldWrite { since, write });
    RELEASER.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(LONGEST / 4);
                release_older(LONGEST);
            }
        });
    });
}

/// Everything that is held is seen from now on.
pub fn release() {
    release_older(Duration::ZERO);
}

fn release_older(age: Duration) {
    // Locked to the end, so that all see the writes in their order.
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    while held
        .front()
        .is_some_and(|write| write.since.elapsed() >= age)
    {
        let Some(next) = held.pop_front() else {
            return;
        };
        (next.write)();
    }
}
