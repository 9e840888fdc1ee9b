//! The configuration of a message queue.

use crate::endpoint::{EndpointConfig, Transport};
use crate::region::Access;
use crate::{Error, Result, StateKind};

/// The configuration of a [`MessageQueue`](crate::MessageQueue). Start from `MessageConfig::default()`. Each side chooses its own; a sender goes by
/// the `slots` and `eager_bytes` of its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageConfig {
    /// Messages of the peer that may be here and not received yet, 1 to 1024; rounded up to a power of two. A sender's stream waits for a credit when
    /// as many are. Default 16.
    pub slots: u32,
    /// The longest message, in bytes, that is eager, 0 to 1 MiB. Longer messages are read by the receiver. Default 8192.
    pub eager_bytes: u32,
    /// Messages that can be queued on streams in each direction and are not done, 1 to 1024; as many can be sent behind a send whose wait is not queued. Default 64.
    pub ahead: u32,
    /// Slices of a message, 1 to 15. Default 3.
    pub max_slices: u32,
    /// The configuration of its two endpoints. The queue sets `send_depth`, `recv_depth`, `max_segments` and `max_inline_bytes` itself, and adds the access that it
    /// needs. `wait_timeout` is the deadline of each wait on a stream. With a proxy, which may send a credit before it posts the slot, `rnr_retry` must
    /// not be 0.
    pub endpoint: EndpointConfig,
}

setters!(MessageConfig {
    slots: u32,
    eager_bytes: u32,
    ahead: u32,
    max_slices: u32,
    endpoint: EndpointConfig,
});

/// The most slots.
pub(super) const SLOTS_MAX: u32 = 1024;
/// The longest eager message.
pub(super) const EAGER_BYTES_MAX: u32 = 1 << 20;
impl Default for MessageConfig {
    fn default() -> MessageConfig {
        MessageConfig {
            slots: 16,
            eager_bytes: 8192,
            ahead: 64,
            max_slices: 3,
            endpoint: EndpointConfig::default(),
        }
    }
}

impl MessageConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min: u32, max: u32| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(Error::Range {
                    argument,
                    value: value.into(),
                    min: min.into(),
                    max: max.into(),
                })
            }
        };
        if self.endpoint.transport != Transport::Rc {
            return Err(Error::state(
                StateKind::WrongKind,
                "message queue",
                "messages need reliable connections (RC); the configuration asks for unreliable datagrams (UD)",
            ));
        }
        range("slots", self.slots, 1, SLOTS_MAX)?;
        range("eager_bytes", self.eager_bytes, 0, EAGER_BYTES_MAX)?;
        range("ahead", self.ahead, 1, 1024)?;
        range("max_slices", self.max_slices, 1, 15)
    }

    pub(crate) fn slot_count(&self) -> u32 {
        self.slots.next_power_of_two()
    }

    /// Places for the results of receives by kernels: as many as the queue of receives has. Twice, because a stream may have executed a receive, so that another
    /// one has its place in the queue, before this process has looked.
    pub(super) fn result_count(&self) -> u32 {
        2 * (self.slot_count() + self.ahead).next_power_of_two()
    }

    /// The configuration of the endpoint that sends messages and receives into slots.
    pub(super) fn of_messages(&self) -> EndpointConfig {
        self.of_both()
            .send_depth(self.ahead)
            .recv_depth(self.slot_count() + self.ahead)
            .max_segments(self.max_slices + 1)
    }

    /// The configuration of the endpoint that reads messages and writes credits: two work requests for each receive that is queued, those of earlier
    /// ones without a completion, and of receives that are not queued yet, whose memory is ready. A late read is changed in the ring, and a BlueFlame doorbell would carry what it was.
    pub(super) fn of_returns(&self) -> EndpointConfig {
        self.of_both()
            .send_depth(2 * self.ahead + 3 * self.credits_per_signal())
            .recv_depth(1)
            .max_segments(1)
            .blueflame(false)
    }

    fn of_both(&self) -> EndpointConfig {
        let access = self.endpoint.access | Access::REMOTE_READ | Access::REMOTE_WRITE;
        self.endpoint.max_inline_bytes(16).access(access)
    }

    /// Of how many credits one is signaled, so that their places in the send queue are free again.
    pub(super) fn credits_per_signal(&self) -> u32 {
        (self.ahead / 2).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named() {
        let bad = |config: MessageConfig| match config.check() {
            Err(Error::Range { argument, max, .. }) => (argument, max),
            other => panic!("{other:?}"),
        };
        let good = MessageConfig::default();
        assert_eq!(good.check(), Ok(()));
        assert_eq!(bad(good.slots(0)), ("slots", 1024));
        assert_eq!(bad(good.slots(1025)), ("slots", 1024));
        assert_eq!(
            bad(good.eager_bytes((1 << 20) + 1)),
            ("eager_bytes", 1 << 20)
        );
        assert_eq!(bad(good.ahead(0)), ("ahead", 1024));
        assert_eq!(bad(good.ahead(1025)), ("ahead", 1024));
        assert_eq!(bad(good.max_slices(0)), ("max_slices", 15));
        assert_eq!(bad(good.max_slices(16)), ("max_slices", 15));
    }
}
