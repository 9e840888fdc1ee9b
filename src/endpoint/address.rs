//! What two endpoints must know of each other.

use std::fmt;
use std::str::FromStr;

use crate::nic::{PeerQueuePair, Unreadable};
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"DBEL";
/// Changes with every change of the layout.
const VERSION: u16 = 2;

/// The address of an endpoint: opaque bytes to be carried to the peer by any means ([`Address::to_bytes`], or as text), and
/// given to `connect` there. It is valid until the endpoint is reset or dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    pub(super) queue_pair: PeerQueuePair,
    pub(super) mtu_bytes: u32,
}

impl Address {
    /// Length of [`Address::to_bytes`].
    pub const BYTES: usize = 48;

    /// The number of the endpoint's queue pair.
    pub fn qpn(&self) -> u32 {
        self.queue_pair.qpn()
    }

    /// The GID of the endpoint's port: of RoCE v2 over IPv4, `::ffff:` and the address. `None` of a software device whose wire is memory of its host.
    pub fn gid(&self) -> Option<[u8; 16]> {
        self.queue_pair.gid()
    }

    /// The bytes: magic, version, kind and MTU, then what the kind needs. Little-endian.
    pub fn to_bytes(&self) -> [u8; Address::BYTES] {
        let mut bytes = [0; Address::BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.queue_pair.kind();
        // The MTU as its power of two.
        bytes[7] = self.mtu_bytes.trailing_zeros() as u8;
        bytes[8..44].copy_from_slice(&self.queue_pair.to_bytes());
        let sum = checksum(&bytes[..44]);
        bytes[44..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads what [`Address::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a wrong length, bytes that are no address, another version of the library, another kind of
    /// device, or a number out of its range.
    pub fn from_bytes(bytes: &[u8]) -> Result<Address> {
        let bad = |reason: String| Error::Malformed {
            what: "address",
            reason,
        };
        let head = bytes
            .first_chunk::<8>()
            .ok_or_else(|| bad(format!("{} bytes are too few", bytes.len())))?;
        if head[..4] != MAGIC {
            return Err(bad(
                "it does not begin with the magic number of an address".into()
            ));
        }
        let version = u16::from_le_bytes([head[4], head[5]]);
        if version != VERSION {
            return Err(bad(format!(
                "it has version {version}, this library supports version {VERSION}"
            )));
        }
        let bytes: &[u8; Address::BYTES] = bytes.try_into().map_err(|_| {
            bad(format!(
                "it has {} bytes instead of {}",
                bytes.len(),
                Address::BYTES
            ))
        })?;
        let kind = head[6];
        let unreadable = |why| {
            bad(match why {
                Unreadable::Kind => {
                    format!("it is of a device of kind {kind}, which this build does not know")
                }
                Unreadable::Range => "a number in it is out of range".into(),
            })
        };
        // The kind before the checksum: another build may have other ideas of all that is behind it.
        let body = bytes[8..].first_chunk();
        let read = body.map(|body| PeerQueuePair::from_bytes(kind, body));
        if read == Some(Err(Unreadable::Kind)) {
            return Err(unreadable(Unreadable::Kind));
        }
        let sum = bytes.last_chunk().map(|sum| u32::from_le_bytes(*sum));
        if sum != Some(checksum(&bytes[..44])) {
            return Err(bad("its checksum is wrong".into()));
        }
        if !(8..=12).contains(&head[7]) {
            return Err(unreadable(Unreadable::Range));
        }
        Ok(Address {
            queue_pair: read.unwrap_or(Err(Unreadable::Range)).map_err(unreadable)?,
            mtu_bytes: 1 << head[7],
        })
    }
}

/// FNV-1a: against slips in copying, not against intent.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

/// Hexadecimal digits.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address> {
        let bad = |reason: &str| Error::Malformed {
            what: "address",
            reason: reason.into(),
        };
        let text = text.trim().as_bytes();
        if text.len() != 2 * Address::BYTES {
            return Err(bad("as text it has 96 hexadecimal digits"));
        }
        let digit = |byte: u8| (byte as char).to_digit(16);
        let mut bytes = [0; Address::BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let value = digit(pair[0])
                .zip(digit(pair[1]))
                .ok_or_else(|| bad("a character is no hexadecimal digit"))?;
            *byte = (value.0 << 4 | value.1) as u8;
        }
        Address::from_bytes(&bytes)
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> Address {
        let mut queue_pair = std::array::from_fn(|i| i as u8);
        // The highest bytes of a number and of a PSN of 24 bits.
        (queue_pair[27], queue_pair[31]) = (0, 0);
        Address {
            queue_pair: PeerQueuePair::from_bytes(1, &queue_pair).unwrap(),
            mtu_bytes: 2048,
        }
    }

    fn reason(bytes: &[u8]) -> String {
        Address::from_bytes(bytes).unwrap_err().to_string()
    }

    #[test]
    fn bytes_and_text_come_back() {
        assert_eq!(Address::from_bytes(&address().to_bytes()), Ok(address()));
        assert_eq!(address().to_string().parse(), Ok(address()));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = address().to_bytes();
        assert!(reason(&[]).contains("too few"));
        assert!(reason(&good[..47]).contains("47 bytes"));
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            reason(&bytes)
        };
        assert!(with(0, 0).contains("magic number"));
        assert!(with(4, 9).contains("version 9"));
        assert!(with(6, 9).contains("kind 9"));
        assert!(with(20, 0xff).contains("checksum"));
        assert!("zz".parse::<Address>().is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Address::from_bytes(&bytes);
            let mut near = address().to_bytes();
            for (at, byte) in bytes.iter().take(3).enumerate() {
                near[(*byte as usize * (at + 1)) % Address::BYTES] ^= byte;
            }
            if let Ok(parsed) = Address::from_bytes(&near) {
                prop_assert_eq!(parsed.to_bytes(), near);
            }
        }
    }
}
