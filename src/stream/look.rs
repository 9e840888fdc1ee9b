//! Streams without a thread: executed by the threads that wait for their work.
//!
//! A look executes what can be executed at once, and returns at the first wait that does not hold. The next look goes on there, in whatever thread. So no look waits, and a thread
//! can drive several streams that wait for each other.

use std::sync::atomic::{Ordering, fence};

use super::current::EnteredStream;
use super::front::{FrontPosition, Look};
use super::lock::Lock;
use super::own_streams::{LookedStream, is_own};
use super::stopping::deferring_waits;
use super::turns::StreamTurn;
use super::worker::StreamShared;

impl LookedStream for StreamShared {
    fn look(&self) -> bool {
        StreamShared::look(self)
    }

    fn is_idle(&self) -> bool {
        self.progress.reached(self.ring.claimed())
    }
}

impl StreamTurn for StreamShared {
    /// The caller also looks at the streams that its thread has queued work on.
    fn turn(&self) -> bool {
        self.look_unless_own()
    }
}

impl StreamShared {
    /// Executes what can be executed without a wait, if the stream has no thread and no other thread looks at it. True: something has changed.
    pub(super) fn look(&self) -> bool {
        let Some(look) = &self.look else {
            return false;
        };
        let mut has_changed = false;
        loop {
            let Some(mut look) = look.try_lock() else {
                return has_changed;
            };
            let entered = EnteredStream::new(self.id);
            has_changed |= deferring_waits(|| self.advance(&mut look));
            drop(entered);
            drop(look);
            // Between the release of the lock and the load of `aborted`. It pairs with the fence in `discard`: either this thread sees the position there, or the
            // thread in `discard` gets the lock.
            fence(Ordering::SeqCst);
            if !self.is_left_to_discard() {
                return has_changed;
            }
        }
    }

    /// [`StreamShared::look`], unless [`look_at_own_streams`](super::look_at_own_streams) does it.
    pub(super) fn look_unless_own(&self) -> bool {
        self.look.is_some() && !is_own(std::ptr::from_ref(self).cast()) && self.look()
    }

    /// Discards what is queued below the position `aborted`, in this thread or in the one that looks at the moment.
    pub(super) fn discard(&self) {
        if self.look.is_some() {
            fence(Ordering::SeqCst);
            self.look();
        }
    }

    fn is_left_to_discard(&self) -> bool {
        let aborted = self.aborted.load(Ordering::Acquire);
        aborted > 0 && !self.progress.reached(aborted) && self.front_is_ready()
    }

    fn front_is_ready(&self) -> bool {
        let look = self.look.as_ref().and_then(Lock::try_lock);
        look.is_some_and(|look| look.consumer.is_ready())
    }

    /// Executes what was queued before, up to the first entry that waits.
    fn advance(&self, look: &mut Look) -> bool {
        let end = self.ring.claimed();
        let mut has_changed = false;
        while look.consumer.position() < end && look.consumer.is_ready() {
            let Look { consumer, front } = look;
            let has_passed = self.step(consumer, Some(front));
            has_changed |= std::mem::take(&mut look.front.program.has_progressed) || has_passed;
            if !has_passed {
                break;
            }
            look.front = FrontPosition::default();
        }
        has_changed
    }
}
