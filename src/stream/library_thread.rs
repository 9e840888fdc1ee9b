//! Which threads are this library's own. They never make a call of the driver that waits for a GPU.

use std::cell::Cell;

thread_local! {
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is the library's from now on.
pub(crate) fn begin_library_thread() {
    IS_OURS.set(true);
}

/// Whether the calling thread is the library's: also in functions of the application's that it calls.
#[cfg(feature = "cuda")]
pub(crate) fn is_library_thread() -> bool {
    IS_OURS.get()
}
