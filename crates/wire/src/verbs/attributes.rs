//! What a connection is made with.

use crate::verbs::Access;
use crate::{Error, Result};

/// Attributes of a connection, the same on both sides where it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// Time without an acknowledgement before packets are sent again: 4.096 us * 2^timeout; 0 waits for ever (IBTA 9.7.6.1.3).
    pub timeout: u8,
    /// How often packets are sent again, without any progress, before the queue pair fails: 0 to 7.
    pub retry_count: u8,
    /// The same for a peer with no receive posted: 0 to 6, and 7 for without end.
    pub rnr_retry: u8,
    /// What this side asks a sender to wait when no receive is posted: a code of IBTA table 45, 0 to 31.
    pub min_rnr_timer: u8,
    /// Reads and atomics on their way at once, 1 to 16.
    pub max_reads: u8,
    /// What the peer may do to this side's regions, where their keys allow it too.
    pub access: Access,
}

impl Default for Attributes {
    fn default() -> Attributes {
        Attributes {
            mtu_bytes: 4096,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_reads: 16,
            access: Access::ALL,
        }
    }
}

impl Attributes {
    /// # Errors
    /// [`Error::Range`] or [`Error::Choice`] naming the attribute.
    pub fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min, max| {
            if (min..=max).contains(&u64::from(value)) {
                Ok(())
            } else {
                Err(Error::Range {
                    argument,
                    value: u64::from(value),
                    min,
                    max,
                })
            }
        };
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu_bytes) {
            return Err(Error::Choice {
                argument: "mtu_bytes",
                value: self.mtu_bytes.into(),
                allowed: "256, 512, 1024, 2048 or 4096",
            });
        }
        range("timeout", self.timeout.into(), 0, 31)?;
        range("retry_count", self.retry_count.into(), 0, 7)?;
        range("rnr_retry", self.rnr_retry.into(), 0, 7)?;
        range("min_rnr_timer", self.min_rnr_timer.into(), 0, 31)?;
        range("max_reads", self.max_reads.into(), 1, 16)
    }

    /// The time of [`Attributes::timeout`] in nanoseconds; `u64::MAX` for 0.
    pub fn timeout_ns(&self) -> u64 {
        if self.timeout == 0 {
            u64::MAX
        } else {
            4096u64 << self.timeout
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_out_of_range_are_named() {
        let bad = |attributes: Attributes| match attributes.check() {
            Err(Error::Range { argument, .. } | Error::Choice { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        let good = Attributes::default();
        assert_eq!(good.check(), Ok(()));
        assert_eq!(
            bad(Attributes {
                mtu_bytes: 128,
                ..good
            }),
            "mtu_bytes"
        );
        assert_eq!(
            bad(Attributes {
                mtu_bytes: 1500,
                ..good
            }),
            "mtu_bytes"
        );
        assert_eq!(
            bad(Attributes {
                timeout: 32,
                ..good
            }),
            "timeout"
        );
        assert_eq!(
            bad(Attributes {
                retry_count: 8,
                ..good
            }),
            "retry_count"
        );
        assert_eq!(
            bad(Attributes {
                rnr_retry: 8,
                ..good
            }),
            "rnr_retry"
        );
        assert_eq!(
            bad(Attributes {
                max_reads: 0,
                ..good
            }),
            "max_reads"
        );
    }
}
