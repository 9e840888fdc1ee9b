//! The header in front of each message, in the first bytes of its slot.

use crate::{Error, Result};

/// Length of a header in bytes.
pub(super) const HEADER_BYTES: u32 = 32;

const EAGER: u32 = 1;
const RENDEZVOUS: u32 = 2;

/// A header. On the wire, little-endian: number (4 bytes), kind (4), length (8), address (8), key (4), tag (4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageHeader {
    /// Running number of the message in its direction.
    pub(super) number: u32,
    /// What a matcher on the other side matches with its receives; 0 of a queue without one, which does not look at it.
    pub(super) tag: u32,
    pub(super) len_bytes: u64,
    pub(super) place: MessagePlace,
}

/// Where the bytes of a message are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessagePlace {
    /// In the slot, behind the header.
    Slot,
    /// In the sender's memory, for the receiver to read.
    Sender { addr: u64, rkey: u32 },
}

impl MessageHeader {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let (kind, addr, rkey) = match self.place {
            MessagePlace::Slot => (EAGER, 0, 0),
            MessagePlace::Sender { addr, rkey } => (RENDEZVOUS, addr, rkey),
        };
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..4].copy_from_slice(&self.number.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&addr.to_le_bytes());
        bytes[24..28].copy_from_slice(&rkey.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }

    /// The header of the message with that number, in a slot for `eager_bytes`.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub(super) fn from_bytes(
        bytes: &[u8; HEADER_BYTES as usize],
        number: u32,
        eager_bytes: u32,
    ) -> Result<MessageHeader> {
        let word = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        let long = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u64::from_le_bytes(*b))
        };
        let malformed = |reason: String| Error::Malformed {
            what: "message header",
            reason,
        };
        if word(0) != number {
            let reason = format!("it is that of message {}, not {number}", word(0));
            return Err(malformed(reason));
        }
        let (kind, len_bytes) = (word(4), long(8));
        let place = match kind {
            EAGER if len_bytes <= u64::from(eager_bytes) => MessagePlace::Slot,
            RENDEZVOUS if len_bytes > u64::from(eager_bytes) => MessagePlace::Sender {
                addr: long(16),
                rkey: word(24),
            },
            _ => {
                let reason =
                    format!("kind {kind} with {len_bytes} bytes, in a slot for {eager_bytes}");
                return Err(malformed(reason));
            }
        };
        Ok(MessageHeader {
            number,
            tag: word(28),
            len_bytes,
            place,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_as_documented() {
        let header = MessageHeader {
            number: 0x0102_0304,
            tag: 0x5152_5354,
            len_bytes: 0x1_0000_0005,
            place: MessagePlace::Sender {
                addr: 0x1122_3344_5566_7788,
                rkey: 0xa1b2_c3d4,
            },
        };
        let bytes = header.to_bytes();
        let expected = [
            4, 3, 2, 1, 2, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33,
            0x22, 0x11, 0xd4, 0xc3, 0xb2, 0xa1, 0x54, 0x53, 0x52, 0x51,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(
            MessageHeader::from_bytes(&bytes, 0x0102_0304, 64),
            Ok(header)
        );
    }

    proptest! {
        /// Bytes of a peer are read as what they say, or refused; and nothing is longer than its place.
        #[test]
        fn any_bytes_are_read_or_refused(bytes: [u8; 32], kind in 0_u32..4, len in 0_u64..200, number: u32) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            bytes[4..8].copy_from_slice(&kind.to_le_bytes());
            bytes[8..16].copy_from_slice(&len.to_le_bytes());
            prop_assert!(MessageHeader::from_bytes(&bytes, number.wrapping_add(1), 100).is_err());
            match MessageHeader::from_bytes(&bytes, number, 100) {
                Ok(header) => {
                    prop_assert_eq!(header.len_bytes, len);
                    prop_assert_eq!(&header.tag.to_le_bytes()[..], &bytes[28..]);
                    let is_eager = header.place == MessagePlace::Slot;
                    prop_assert_eq!(kind, if is_eager { 1 } else { 2 });
                    prop_assert_eq!(is_eager, len <= 100);
                    if !is_eager {
                        prop_assert_eq!(header.to_bytes(), bytes);
                    }
                }
                Err(_) => prop_assert!(kind == 0 || kind == 3 || (kind == 1) == (len > 100)),
            }
        }
    }
}
