//! The generations of an endpoint: each reset ends one and starts the next.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::endpoint::clock::now_ns;
use crate::endpoint::shared::EndpointShared;
use crate::stream::look_at_own_streams;
use crate::{Error, Result, StateKind};

/// An operation that counts as one on a stream. The drop takes it off the count, unless [`Entered::stay`] was called.
pub(in crate::endpoint) struct Entered<'a>(&'a EndpointShared);

impl Entered<'_> {
    /// The stream has the operation. From now on [`EndpointShared`]'s `finished` takes it off the count.
    pub(in crate::endpoint) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.on_streams.leave();
    }
}

/// As long as this lives, nothing is given to streams.
pub(in crate::endpoint) struct Closing(Arc<EndpointShared>);

impl Drop for Closing {
    fn drop(&mut self) {
        // Release: a thread that sees it sees the new generation.
        self.0.closing.store(false, Ordering::SeqCst);
    }
}

impl EndpointShared {
    /// As long as this is held, no new generation begins.
    pub(in crate::endpoint) fn hold_generation(&self) -> MutexGuard<'_, ()> {
        self.generation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `what` if the generation `epoch` has not ended, though it may have failed, and returns whether it did. No generation begins meanwhile.
    pub(in crate::endpoint) fn if_current(&self, epoch: u32, what: impl FnOnce()) -> bool {
        let _generation = self.hold_generation();
        let is_current = self.epoch.load(Ordering::Relaxed) == epoch;
        if is_current {
            what();
        }
        is_current
    }

    /// [`EndpointShared::hold_generation`], if nobody holds it.
    pub(in crate::endpoint) fn try_hold_generation(&self) -> Option<MutexGuard<'_, ()>> {
        match self.generation.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Counts an operation that is about to be given to a stream.
    ///
    /// # Errors
    /// [`Error::State`] while the endpoint is being reset.
    pub(in crate::endpoint) fn enter_stream(&self) -> Result<Entered<'_>> {
        // SeqCst, as in `close`: either the reset sees this operation, or this sees the reset. The watchdog's look before it
        // stops watching pairs with it, too.
        self.on_streams.enter();
        let entered = Entered(self);
        if self.closing.load(Ordering::SeqCst) {
            return Err(Error::state(
                StateKind::Resetting,
                "stream_post",
                "the endpoint is being reset",
            ));
        }
        Ok(entered)
    }

    /// An operation that entered, and whose [`Entered`] was kept, is done.
    pub(in crate::endpoint) fn leave_stream(&self) {
        self.on_streams.leave();
    }

    /// Lets no more operations through to streams, and waits until they are done with those that they have.
    pub(in crate::endpoint) fn close(self: &Arc<Self>, timeout: Duration) -> Result<Closing> {
        self.closing.store(true, Ordering::SeqCst);
        let closing = Closing(Arc::clone(self));
        let deadline = now_ns().saturating_add(timeout.as_nanos() as u64);
        while self.on_streams.any() {
            if now_ns() > deadline {
                return Err(Error::Timeout {
                    operation: "reset: programs of the endpoint are still on a stream; this",
                    timeout,
                });
            }
            if !(look_at_own_streams() | self.look_at_stream()) {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(closing)
    }

    /// Whether that generation has not ended, so that nothing that was loaded before this call is of the next one.
    pub(in crate::endpoint) fn is_in(&self, epoch: u32) -> bool {
        fence(Ordering::Acquire);
        self.ended.load(Ordering::Relaxed) == epoch
    }
}
