//! When memory is given back to the driver: in calls of the application, while no stream of this library has work.
//!
//! The driver unregisters and frees memory when the GPUs are idle, and holds a lock of its own until then (seen on an H100 with driver 580.159;
//! lupinemachines/lupine pull request 679, NVIDIA/nccl issue 48): a thread that copies, launches or allocates meanwhile blocks as well. If a stream waits
//! for such a thread, or for a software NIC that copies by the driver, that is a deadlock. So memory is given back only when no stream has work that
//! this library has queued. A stream that gets its first work while a thread gives back waits for that thread: the driver would have it wait, too.
//!
//! Kernels of the application may wait for a NIC as well, and the library does not know when they run. The application does. So its own calls alone give
//! memory back: those that end the last use of it, and those that wait for a stream. A thread of the library's would do so at a time that the application
//! does not know, and did: it freed the memory of a trigger stream while a kernel waited for the software NIC.
#![allow(unsafe_code)] // calls the driver

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr};

use super::context::CudaContext;
use super::host_call::in_host_function;
use super::host_registration;
use crate::proxy::await_dropped;
use crate::stream::is_library_thread;

/// How many streams are watched because they have work, or had it a moment ago. Sequentially consistent with `GIVING`: of a stream that gets work and
/// a thread that gives back, one sees the other.
static BUSY: AtomicUsize = AtomicUsize::new(0);
static STREAMS: Mutex<Vec<Weak<dyn StreamWork>>> = Mutex::new(Vec::new());
/// How long a thread that gives something back waits until streams that have no work are found to have none: the next turn of the thread that watches
/// them, which may wait for a processor.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a call that has waited for a stream waits for the threads that drop what the stream's work has kept. An application's destructor may take longer.
const SETTLED: Duration = Duration::from_millis(100);
static GIVING: AtomicBool = AtomicBool::new(false);
/// Held by the thread that gives back.
static GIVER: Mutex<()> = Mutex::new(());
/// What waits to be given back. Sequentially consistent with `BUSY`.
static PARKED: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: Mutex<Vec<Allocated>> = Mutex::new(Vec::new());

/// A stream's work.
pub(super) trait StreamWork: Send + Sync {
    /// Whether there is work left. May still say so for a short time after the last work is done.
    fn is_left(&self) -> bool;
}

/// Memory of a GPU that was allocated by this library, and has no handle any more.
struct Allocated {
    context: CudaContext,
    start: CUdeviceptr,
}

impl Allocated {
    fn free(self) {
        // A context that was destroyed has freed its memory.
        if let Some(_entered) = self.context.enter_to_give_back() {
            // SAFETY: allocated by `CudaContext::alloc`, and its last handle was dropped.
            let _ = unsafe { sys::cuMemFree_v2(self.start) };
        }
    }
}

/// A stream gets its first work, or a function of the host. Before the driver is called for it.
pub(super) fn stream_gets_work(stream: &Arc<impl StreamWork + 'static>) {
    BUSY.fetch_add(1, Ordering::SeqCst);
    let stream: Weak<dyn StreamWork> = Arc::downgrade(stream) as _;
    lock(&STREAMS).push(stream);
    if GIVING.load(Ordering::SeqCst) {
        drop(lock(&GIVER));
    }
}

/// A stream has no work any more, or the function has returned.
pub(super) fn stream_is_idle(stream: &Arc<impl StreamWork + 'static>) {
    {
        let mut streams = lock(&STREAMS);
        let found = streams
            .iter()
            .position(|other| other.as_ptr().addr() == Arc::as_ptr(stream).addr());
        found.map(|found| streams.swap_remove(found));
    }
    BUSY.fetch_sub(1, Ordering::SeqCst);
}

/// Counts something that waits to be given back. [`free_parked`] follows.
pub(super) fn count_parked() {
    PARKED.fetch_add(1, Ordering::SeqCst);
}

/// Counts something that is given back, or in use again.
pub(super) fn count_unparked() {
    PARKED.fetch_sub(1, Ordering::SeqCst);
}

/// Gives back what waits for that, unless a stream has work. For calls of the application: other threads leave it to the next of these.
pub(super) fn free_parked() {
    // A host function must not call the driver.
    if PARKED.load(Ordering::SeqCst) == 0 || is_library_thread() || in_host_function() {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    while BUSY.load(Ordering::SeqCst) > 0 && !has_work() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(100));
    }
    give_all();
}

/// For a call of the application that has waited for a stream: gives back what the stream's work has kept, and what waited for the stream to be idle. Work
/// that is done is dropped by threads of the library, which soon have done so.
pub(super) fn free_after_wait() {
    if in_host_function() {
        return;
    }
    await_dropped(SETTLED);
    free_parked();
}

/// Whether a stream has work.
fn has_work() -> bool {
    let streams = lock(&STREAMS).clone();
    (streams.iter().filter_map(Weak::upgrade)).any(|stream| stream.is_left())
}

/// Frees memory of a GPU, now or when no stream has work.
pub(super) fn free(context: &CudaContext, start: CUdeviceptr) {
    let context = context.clone();
    lock(&ALLOCATIONS).push(Allocated { context, start });
    count_parked();
    free_parked();
}

/// Whether memory waits to be freed.
pub(super) fn has_allocations() -> bool {
    !lock(&ALLOCATIONS).is_empty()
}

fn give_all() {
    while PARKED.load(Ordering::SeqCst) > 0 && unless_busy(give_one) == Some(true) {}
}

/// Gives one thing back. Returns false if there is nothing to give back.
fn give_one() -> bool {
    if host_registration::give_one_back() {
        return true;
    }
    let Some(allocated) = lock(&ALLOCATIONS).pop() else {
        return false;
    };
    count_unparked();
    allocated.free();
    true
}

/// Makes a call that gives something back to the driver, unless a stream has work: then the result is `None`.
fn unless_busy<R>(call: impl FnOnce() -> R) -> Option<R> {
    let _giver = lock(&GIVER);
    GIVING.store(true, Ordering::SeqCst);
    let result = (BUSY.load(Ordering::SeqCst) == 0).then(call);
    GIVING.store(false, Ordering::SeqCst);
    result
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
