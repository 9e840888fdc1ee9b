//! Room in the queues: what a post takes of it, and waiting for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Endpoint;
use crate::endpoint::QueueKind;
use crate::endpoint::poll_until::poll_until;
use crate::{Error, Result};

impl Endpoint {
    /// How many further work requests can be posted to a queue now, each with a completion. Looks at new completions first. 0 for an endpoint that
    /// has failed.
    ///
    /// A work request takes a place in its queue until its completion, or that of a later signaled one, has arrived. Its completion then takes a
    /// place in the completion queue until a wait or a poll has taken it.
    pub fn room(&mut self, kind: QueueKind) -> u32 {
        let looked = self.roll_back_cancelled(kind).and_then(|()| self.reap());
        looked.map_or(0, |()| self.shared.queue(kind).free_places())
    }

    /// Waits in this thread until `count` further work requests can be posted to a queue; `None` waits for ever. Makes progress on a device that
    /// needs it, and does not keep the core busy. [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout) has every post do this.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which the endpoint is as it was; [`Error::Work`] if the endpoint fails; [`Error::Range`] for more than the queue
    /// holds; [`Error::QueueFull`], at once, if the room will not come: the places are those of completions that no wait was posted for, or of
    /// unsignaled work requests without a signaled one behind them.
    pub fn wait_room(
        &mut self,
        kind: QueueKind,
        count: u32,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let depth = self.shared.queue(kind).depth;
        if count > depth {
            return Err(Error::Range {
                argument: "count",
                value: count.into(),
                min: 0,
                max: depth.into(),
            });
        }
        let shared = Arc::clone(&self.shared);
        poll_until(
            "the wait for room in a queue",
            timeout,
            || shared.qp.progress(),
            || {
                self.roll_back_cancelled(kind)?;
                self.shared.look_for_failure();
                self.reap()?;
                let queue = self.shared.queue(kind);
                queue.check_host_owned("wait_room")?;
                if queue.free_places() >= count {
                    return self.check_room(kind).map(Some);
                }
                queue.check_room_to_come(count)?;
                Ok(None)
            },
        )
    }

    /// Whether there is room for that many further work requests, without a look at the device: a failure that nobody has seen goes unnoticed.
    ///
    /// # Errors
    /// [`Error::Work`] if the endpoint is known to have failed.
    pub(crate) fn has_room_now(&mut self, kind: QueueKind, count: u32) -> Result<bool> {
        self.shared.check_alive()?;
        self.roll_back_cancelled(kind)?;
        let queue = self.shared.queue(kind);
        if queue.is_device_owned() || queue.free_places() < count {
            return Ok(false);
        }
        self.check_room(kind).map(|()| true)
    }

    /// Sets how long a post waits for room: [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout).
    pub(crate) fn set_room_timeout(&mut self, timeout: Option<Duration>) {
        self.config.room_timeout = timeout;
    }

    /// Sees to room for a further work request and its completion.
    pub(super) fn make_room(&mut self, kind: QueueKind) -> Result<()> {
        if self.shared.queue(kind).take_known_room() {
            return Ok(());
        }
        self.release()?;
        if self.shared.queue(kind).has_room() {
            return self.check_room(kind);
        }
        self.reap()?;
        let queue = self.shared.queue(kind);
        if queue.has_room() {
            self.check_room(kind)
        } else {
            queue.check_host_owned("prepare_send")?;
            match self.config.room_timeout {
                None => Err(queue.full()),
                timeout => {
                    self.wait_room(kind, 1, timeout)?;
                    // Takes the place, and counts the others anew.
                    self.shared.queue(kind).has_room();
                    self.check_room(kind)
                }
            }
        }
    }

    /// Places of requests that have failed are not used again: their tickets tell of success when the place is another one's. The caller has
    /// found room, and the reaper records an error before it makes room.
    fn check_room(&self, kind: QueueKind) -> Result<()> {
        if !self.shared.queue(kind).has_error() {
            return Ok(());
        }
        self.shared.reap_fully();
        let epoch = self.shared.epoch.load(Ordering::Relaxed);
        Err(Error::Work(self.shared.flush_failure(epoch)))
    }

    /// Processes all completions that there are. Waits if the watchdog is processing some: the queue must not look full because of that.
    pub(super) fn reap(&mut self) -> Result<()> {
        // A software device produces completions in the threads that ask for them.
        self.shared.qp.progress();
        self.shared.reap_fully();
        self.shared.check_alive()?;
        self.release()
    }

    /// Gives the ring entries of completed work back to the queues.
    #[inline]
    fn release(&mut self) -> Result<()> {
        let consumed = |kind| self.shared.queue(kind).consumed.load(Ordering::Acquire);
        self.send.release(consumed(QueueKind::Send))?;
        self.recv.release(consumed(QueueKind::Recv))
    }
}
