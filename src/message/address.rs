//! What the two ends of a message queue exchange.

use super::config::{EAGER_BYTES_MAX, SLOTS_MAX};
use crate::endpoint::Address;
use crate::region::RemoteRegion;
use crate::{Error, Result};

/// The version of the messages' format, header and address.
const VERSION: u32 = 1;
/// The address of a [`MessageQueue`](crate::MessageQueue), for its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageAddress {
    pub(super) messages: Address,
    pub(super) returns: Address,
    /// Where the peer writes which messages of this side it has received.
    pub(super) credits: RemoteRegion,
    pub(super) slots: u32,
    pub(super) eager_bytes: u32,
}

impl MessageAddress {
    /// Length of [`MessageAddress::to_bytes`].
    pub const BYTES: usize = 2 * Address::BYTES + RemoteRegion::BYTES + 12;

    /// The bytes to give to the peer: those of the two endpoints' addresses and of the region for credits, then version, slots and longest eager message,
    /// 4 bytes each, little-endian.
    pub fn to_bytes(&self) -> [u8; MessageAddress::BYTES] {
        let mut bytes = [0; MessageAddress::BYTES];
        let (messages, rest) = bytes.split_at_mut(Address::BYTES);
        let (returns, rest) = rest.split_at_mut(Address::BYTES);
        let (credits, rest) = rest.split_at_mut(RemoteRegion::BYTES);
        messages.copy_from_slice(&self.messages.to_bytes());
        returns.copy_from_slice(&self.returns.to_bytes());
        credits.copy_from_slice(&self.credits.to_bytes());
        rest[..4].copy_from_slice(&VERSION.to_le_bytes());
        rest[4..8].copy_from_slice(&self.slots.to_le_bytes());
        rest[8..].copy_from_slice(&self.eager_bytes.to_le_bytes());
        bytes
    }

    /// Reads what [`MessageAddress::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Error::Malformed`] for other bytes, and for those of another version of this library whose messages have another format.
    pub fn from_bytes(bytes: &[u8]) -> Result<MessageAddress> {
        let malformed = |reason: String| Error::Malformed {
            what: "address of a message queue",
            reason,
        };
        let Some(bytes) = bytes
            .first_chunk::<{ MessageAddress::BYTES }>()
            .filter(|_| bytes.len() == MessageAddress::BYTES)
        else {
            let reason = format!("{} bytes, not {}", bytes.len(), MessageAddress::BYTES);
            return Err(malformed(reason));
        };
        let (messages, rest) = bytes.split_at(Address::BYTES);
        let (returns, rest) = rest.split_at(Address::BYTES);
        let (credits, rest) = rest.split_at(RemoteRegion::BYTES);
        let word = |at: usize| {
            rest[at..]
                .first_chunk()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        if word(0) != VERSION {
            return Err(malformed(format!("version {}, not {VERSION}", word(0))));
        }
        let (slots, eager_bytes) = (word(4), word(8));
        if !slots.is_power_of_two() || slots > SLOTS_MAX || eager_bytes > EAGER_BYTES_MAX {
            let reason = format!("{slots} slots for {eager_bytes} bytes");
            return Err(malformed(reason));
        }
        let credits = credits.first_chunk().map(RemoteRegion::from_bytes);
        Ok(MessageAddress {
            messages: Address::from_bytes(messages)?,
            returns: Address::from_bytes(returns)?,
            credits: credits.ok_or_else(|| malformed("too short".into()))?,
            slots,
            eager_bytes,
        })
    }
}
