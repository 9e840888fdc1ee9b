//! Streams without a thread that the threads of this process execute: found by a wait that does not name them.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::lock::Lock;

/// A stream without a thread.
pub(super) trait LookedStream: Send + Sync {
    /// Executes what can be executed without a wait. True: something has changed.
    fn look(&self) -> bool;

    /// Whether all that was queued is done.
    fn is_idle(&self) -> bool;
}

/// Streams without a thread in this process.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// All of them, by number.
static ALL: Lock<Vec<(u64, Weak<dyn LookedStream>)>> = Lock::new(Vec::new());

thread_local! {
    /// The streams without a thread that this thread has queued work on, until that work is done.
    static OWN: RefCell<Vec<Weak<dyn LookedStream>>> = const { RefCell::new(Vec::new()) };
}

/// Looks at the streams without a thread that the calling thread has queued work on. For waits in this thread, whatever they are for: that may depend on this work. True:
/// something has changed.
///
/// Kernels of the application may run in here. The caller has no lock that they could need.
pub(crate) fn look_at_own_streams() -> bool {
    let nth = |index: usize| OWN.try_with(|own| own.borrow().get(index).cloned());
    let mut has_changed = false;
    let mut index = 0;
    // Not borrowed during a look, in which kernels may queue work on further streams.
    while let Ok(Some(weak)) = nth(index) {
        let is_done = match weak.upgrade() {
            Some(stream) => {
                has_changed |= stream.look();
                stream.is_idle()
            }
            None => true,
        };
        if is_done {
            let _ = OWN.try_with(|own| own.borrow_mut().retain(|it| !Weak::ptr_eq(it, &weak)));
        } else {
            index += 1;
        }
    }
    has_changed
}

/// Whether [`look_at_own_streams`] has something to look at.
pub(crate) fn has_own_streams() -> bool {
    OWN.try_with(|own| !own.borrow().is_empty())
        .unwrap_or(false)
}

/// Whether [`look_at_own_streams`] looks at that stream.
pub(super) fn is_own(stream: *const ()) -> bool {
    let is_it = |it: &Weak<dyn LookedStream>| it.as_ptr().cast::<()>() == stream;
    OWN.try_with(|own| own.borrow().iter().any(is_it))
        .unwrap_or(false)
}

/// Looks at the stream with that number, if it has no thread and [`look_at_own_streams`] does not look at it. True: something has changed.
pub(crate) fn look_at_stream(id: u64) -> bool {
    if !streams_without_thread() {
        return false;
    }
    let found = ALL.lock().iter().find(|it| it.0 == id).cloned();
    let found = found.filter(|(_, stream)| !is_own(stream.as_ptr().cast()));
    found.is_some_and(|(_, stream)| stream.upgrade().is_some_and(|stream| stream.look()))
}

/// Whether this process has streams without a thread.
pub(crate) fn streams_without_thread() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Makes a stream known.
pub(super) fn register(id: u64, stream: Weak<dyn LookedStream>) {
    ALL.lock().push((id, stream));
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// The last handle of a stream is gone.
pub(super) fn unregister(id: u64) {
    ALL.lock().retain(|it| it.0 != id);
    COUNT.fetch_sub(1, Ordering::Relaxed);
}

/// Notes that the calling thread has queued work on a stream.
pub(super) fn note_own<S: LookedStream + 'static>(stream: &Arc<S>) {
    if is_own(Arc::as_ptr(stream).cast()) {
        return;
    }
    let weak: Weak<S> = Arc::downgrade(stream);
    let _ = OWN.try_with(|own| own.borrow_mut().push(weak));
}
