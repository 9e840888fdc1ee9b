//! What a connection is made with.

use crate::verbs::Access;
use crate::{Error, Result};

/// Attributes of a connection, the same on both sides where it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// The code of the time without an acknowledgement before packets are sent again: 4.096 us * 2^`ack_timeout`, 0 to 31; 0 waits for ever
    /// (Local Ack Timeout, IBTA 9.7.6.1.3).
    pub ack_timeout: u8,
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
    /// Traffic class of packets with a global route, which RoCE sends as the TOS byte of IP: DSCP in the upper six bits.
    pub traffic_class: u8,
    /// Service level of packets, 0 to 15.
    pub service_level: u8,
    /// Index into the port's table of partition keys.
    pub pkey_index: u16,
    /// Of a UD queue pair: the queue key that datagrams to it must have.
    pub qkey: u32,
}

impl Default for Attributes {
    fn default() -> Attributes {
        Attributes {
            mtu_bytes: 4096,
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_reads: 16,
            access: Access::ALL,
            traffic_class: 0,
            service_level: 0,
            pkey_index: 0,
            qkey: 0,
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
        range("ack_timeout", self.ack_timeout.into(), 0, 31)?;
        range("retry_count", self.retry_count.into(), 0, 7)?;
        range("rnr_retry", self.rnr_retry.into(), 0, 7)?;
        range("min_rnr_timer", self.min_rnr_timer.into(), 0, 31)?;
        range("max_reads", self.max_reads.into(), 1, 16)?;
        range("service_level", self.service_level.into(), 0, 15)
    }

    /// The time of [`Attributes::ack_timeout`] in nanoseconds; `u64::MAX` for 0.
    pub fn ack_timeout_ns(&self) -> u64 {
        if self.ack_timeout == 0 {
            u64::MAX
        } else {
            4096u64 << self.ack_timeout
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
                ack_timeout: 32,
                ..good
            }),
            "ack_timeout"
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
        assert_eq!(
            bad(Attributes {
                service_level: 16,
                ..good
            }),
            "service_level"
        );
    }
}
