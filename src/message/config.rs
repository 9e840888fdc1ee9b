//! The configuration of a message queue.

use crate::endpoint::EndpointConfig;
use crate::{Error, Result};

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
    /// Messages that can be queued on streams in each direction and are not done, 1 to 4096. Default 64.
    pub ahead: u32,
    /// Slices of a message, 1 to 15. Default 3.
    pub max_slices: u32,
    /// The configuration of the endpoint. The queue sets `send_depth`, `recv_depth`, `max_segments` and `max_inline_bytes` itself; `wait_timeout` is the
    /// deadline of each wait on a stream.
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
/// Work requests of a message in the send queue, at most: of one that is received, a read and a credit; of one that is sent, one.
const SENDS_PER_MESSAGE: u32 = 3;

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
    pub(super) fn check(&self) -> Result<()> {
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
        range("slots", self.slots, 1, SLOTS_MAX)?;
        range("eager_bytes", self.eager_bytes, 0, EAGER_BYTES_MAX)?;
        range("ahead", self.ahead, 1, 4096)?;
        range("max_slices", self.max_slices, 1, 15)
    }

    pub(super) fn slot_count(&self) -> u32 {
        self.slots.next_power_of_two()
    }

    /// The configuration of the endpoint.
    pub(super) fn of_endpoint(&self) -> EndpointConfig {
        self.endpoint
            .send_depth(SENDS_PER_MESSAGE * self.ahead)
            .recv_depth(self.slot_count() + self.ahead)
            .max_segments(self.max_slices + 1)
            .max_inline_bytes(16)
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
        assert_eq!(bad(good.ahead(0)), ("ahead", 4096));
        assert_eq!(bad(good.ahead(4097)), ("ahead", 4096));
        assert_eq!(bad(good.max_slices(0)), ("max_slices", 15));
        assert_eq!(bad(good.max_slices(16)), ("max_slices", 15));
    }
}
