//! The configuration of a matcher.

use crate::message::MessageConfig;
use crate::{Error, Result};

/// The configuration of a [`Matcher`](crate::Matcher). Start from `MatcherConfig::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MatcherConfig {
    /// Messages of each peer that may be here without a receive and not use a slot, 0 to 65536. Each has a block of
    /// [`MessageConfig::eager_bytes`]. Default 64.
    pub unexpected: u32,
    /// Receives on streams that are not over, 1 to 65536. Default 256.
    pub receives: u32,
    /// The configuration of the queues that the matcher opens: to this process itself, and by `Group::matcher` to the other ranks.
    /// [`EndpointConfig::wait_timeout`](crate::EndpointConfig::wait_timeout) is the deadline of a receive on a stream that gets no message, and
    /// [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout) how long a call waits where as many receives are not over as `receives` says.
    pub messages: MessageConfig,
}

setters!(MatcherConfig {
    unexpected: u32,
    receives: u32,
    messages: MessageConfig,
});

/// The most of `unexpected` and `receives`.
const COUNT_MAX: u32 = 1 << 16;

impl Default for MatcherConfig {
    fn default() -> MatcherConfig {
        MatcherConfig {
            unexpected: 64,
            receives: 256,
            messages: MessageConfig::default(),
        }
    }
}

impl MatcherConfig {
    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("unexpected", self.unexpected, 0),
            ("receives", self.receives, 1),
        ];
        for (argument, value, min) in counts {
            if !(min..=COUNT_MAX).contains(&value) {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min: min.into(),
                    max: COUNT_MAX.into(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named() {
        let bad = |config: MatcherConfig| match config.check() {
            Err(Error::Range { argument, min, .. }) => (argument, min),
            other => panic!("{other:?}"),
        };
        let good = MatcherConfig::default();
        assert_eq!(good.check(), Ok(()));
        assert_eq!(good.unexpected(0).check(), Ok(()));
        assert_eq!(bad(good.unexpected(65_537)), ("unexpected", 0));
        assert_eq!(bad(good.receives(0)), ("receives", 1));
        assert_eq!(bad(good.receives(65_537)), ("receives", 1));
    }
}
