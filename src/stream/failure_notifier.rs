//! The streams that are told of an owner's failure before any wait for the owner is released.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

use super::lock::Lock;

/// A stream that has programs of an owner.
pub(crate) trait FailureListener: Send + Sync {
    /// The owner has failed. Called in the thread that has found the failure, under its locks: it must not wait.
    fn owner_failed(&self);

    /// The waits of that generation of the owner, which is known by its address, are about to end without success: gives up the owners of all that is
    /// queued behind the first of them. Called within [`stopping`](super::stopping).
    fn fail_queued_after(&self, owner: usize, generation: u32) {
        let _ = (owner, generation);
    }
}

type FailureCallback = Arc<dyn FailureListener>;

/// The streams that are to be told of an owner's failure, each as long as it has programs of the owner.
#[derive(Default)]
pub(crate) struct FailureNotifier {
    /// By the number of the stream, with the number of its programs.
    streams: Lock<Vec<(u64, u32, FailureCallback)>>,
    has_failed: AtomicBool,
}

impl FailureNotifier {
    fn streams(&self) -> MutexGuard<'_, Vec<(u64, u32, FailureCallback)>> {
        self.streams.lock()
    }

    /// A program of the owner is about to be queued on that stream. Where the owner has failed already, it is told at once.
    pub(crate) fn enter(&self, stream: u64, listener: impl FnOnce() -> FailureCallback) {
        let mut streams = self.streams();
        let at = match streams.iter().position(|(of, ..)| *of == stream) {
            Some(at) => at,
            None => {
                streams.push((stream, 0, listener()));
                streams.len() - 1
            }
        };
        let Some((_, count, listener)) = streams.get_mut(at) else {
            return;
        };
        *count += 1;
        if self.has_failed.load(Ordering::Relaxed) {
            listener.owner_failed();
        }
    }

    /// It is over, or was not queued.
    pub(crate) fn leave(&self, stream: u64) {
        let mut streams = self.streams();
        let Some(at) = streams.iter().position(|(of, ..)| *of == stream) else {
            return;
        };
        let Some((_, count, _)) = streams.get_mut(at) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            let gone = streams.swap_remove(at);
            // Not under the lock: what it holds may have to wait for a GPU.
            drop(streams);
            drop(gone);
        }
    }

    /// The owner has failed, and nothing that waits for it knows yet.
    pub(crate) fn notify(&self) {
        let streams = self.streams();
        // Under the lock, which orders it against streams that enter. SeqCst: orders it before the
        // looks of `fail_queued_after` at what streams have entered.
        self.has_failed.store(true, Ordering::SeqCst);
        streams
            .iter()
            .for_each(|(_, _, listener)| listener.owner_failed());
    }

    /// Whether the owner has failed. A stream asks after it has entered what waits for the owner.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// The waits of that generation of the owner at that address are about to end without success. Returns handles that the caller must not drop if it
    /// must not wait for a GPU.
    pub(crate) fn fail_queued_after(&self, owner: usize, generation: u32) -> Vec<FailureCallback> {
        let streams: Vec<FailureCallback> = (self.streams().iter())
            .map(|(_, _, listener)| Arc::clone(listener))
            .collect();
        streams
            .iter()
            .for_each(|stream| stream.fail_queued_after(owner, generation));
        streams
    }

    /// Whether any stream is to hear of the owner.
    pub(crate) fn has_listeners(&self) -> bool {
        !self.streams().is_empty()
    }

    /// The owner starts over.
    pub(crate) fn reset(&self) {
        let _streams = self.streams();
        self.has_failed.store(false, Ordering::Relaxed);
    }
}

impl fmt::Debug for FailureNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureNotifier").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    struct Counts(Arc<AtomicU32>);

    impl FailureListener for Counts {
        fn owner_failed(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn fail_queued_after(&self, owner: usize, _generation: u32) {
            self.0.fetch_add(owner as u32, Ordering::SeqCst);
        }
    }

    #[test]
    fn streams_are_notified_of_a_failure_while_they_have_programs() {
        let failure_notifier = FailureNotifier::default();
        let notified = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        let enter = |stream: usize| {
            let notified = Arc::clone(&notified[stream]);
            failure_notifier.enter(stream as u64, || Arc::new(Counts(notified)));
        };
        let counts = || [0, 1].map(|at: usize| notified[at].load(Ordering::SeqCst));
        enter(0);
        enter(0);
        enter(1);
        failure_notifier.leave(1);
        failure_notifier.leave(0);
        assert_eq!(counts(), [0, 0]);
        failure_notifier.notify();
        assert_eq!(counts(), [1, 0]);
        failure_notifier.fail_queued_after(0, 0);
        // A stream that enters late is told at once; after a reset none is.
        enter(1);
        assert_eq!(counts(), [1, 1]);
        failure_notifier.reset();
        failure_notifier.leave(0);
        enter(0);
        assert_eq!(counts(), [1, 1]);
        assert_eq!(Arc::strong_count(&notified[0]), 2);
        failure_notifier.leave(0);
        failure_notifier.leave(1);
        assert_eq!(notified.each_ref().map(Arc::strong_count), [1, 1]);
    }
}
