//! What one end of a connection must know of the other, on each kind of device, and its bytes.

#[cfg(feature = "verbs")]
use crate::verbs::{self, Link, PortAddress};
use doorbell_softcx::device::{self as soft, PortId};

/// The kinds of device, as in the bytes.
const SOFT: u8 = 1;
#[cfg(feature = "verbs")]
const VERBS: u8 = 2;

/// Where a queue pair is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemoteQueuePair {
    Soft(soft::RemoteQueuePair),
    #[cfg(feature = "verbs")]
    Verbs(verbs::RemoteQueuePair),
}

/// Why bytes are no queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Of a device of a kind that this build does not know.
    Kind,
    /// A number is outside its range.
    Range,
}

impl RemoteQueuePair {
    /// Length of [`RemoteQueuePair::to_bytes`].
    pub(crate) const BYTES: usize = 36;

    /// The kind of device, which says what the bytes are.
    pub(crate) fn kind(&self) -> u8 {
        match self {
            RemoteQueuePair::Soft(_) => SOFT,
            #[cfg(feature = "verbs")]
            RemoteQueuePair::Verbs(_) => VERBS,
        }
    }

    /// For people.
    #[cfg(feature = "verbs")]
    pub(crate) fn kind_name(&self) -> &'static str {
        match self {
            RemoteQueuePair::Soft(_) => "the embedded software NIC",
            #[cfg(feature = "verbs")]
            RemoteQueuePair::Verbs(_) => "a verbs device",
        }
    }

    /// Little-endian, but for a GID. Software NIC: port 24, qpn, psn, connection. Verbs: GID 16, LID 2, link 1, reads 1, nothing 4, qpn, psn,
    /// nothing 4.
    pub(crate) fn to_bytes(self) -> [u8; RemoteQueuePair::BYTES] {
        let mut bytes = [0; RemoteQueuePair::BYTES];
        let (qpn, psn, last) = match self {
            RemoteQueuePair::Soft(pair) => {
                bytes[..24].copy_from_slice(&pair.port.to_bytes());
                (pair.qpn, pair.psn, pair.connection)
            }
            #[cfg(feature = "verbs")]
            RemoteQueuePair::Verbs(pair) => {
                bytes[..16].copy_from_slice(&pair.port.gid);
                bytes[16..18].copy_from_slice(&pair.port.lid.to_le_bytes());
                bytes[18] = pair.port.link as u8;
                bytes[19] = pair.reads;
                (pair.qpn, pair.psn, 0)
            }
        };
        for (at, word) in [(24, qpn), (28, psn), (32, last)] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`RemoteQueuePair::to_bytes`] wrote.
    pub(crate) fn from_bytes(
        kind: u8,
        bytes: &[u8; RemoteQueuePair::BYTES],
    ) -> Result<RemoteQueuePair, Unreadable> {
        let word = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        let (qpn, psn, last) = (word(24), word(28), word(32));
        let in_range = qpn >> 24 == 0 && psn >> 24 == 0;
        match kind {
            SOFT if in_range => Ok(RemoteQueuePair::Soft(soft::RemoteQueuePair {
                port: bytes
                    .first_chunk()
                    .map(PortId::from_bytes)
                    .ok_or(Unreadable::Range)?,
                qpn,
                psn,
                connection: last,
            })),
            #[cfg(feature = "verbs")]
            VERBS if in_range && last == 0 && bytes[20..24] == [0; 4] => {
                let [low, high, link, reads] = [bytes[16], bytes[17], bytes[18], bytes[19]];
                let port = PortAddress {
                    link: Link::from_raw(link.into())
                        .filter(|known| *known as u8 == link)
                        .ok_or(Unreadable::Range)?,
                    lid: u16::from_le_bytes([low, high]),
                    gid: *bytes.first_chunk().ok_or(Unreadable::Range)?,
                };
                Ok(RemoteQueuePair::Verbs(verbs::RemoteQueuePair {
                    port,
                    qpn,
                    psn,
                    reads,
                }))
            }
            SOFT => Err(Unreadable::Range),
            #[cfg(feature = "verbs")]
            VERBS => Err(Unreadable::Range),
            _ => Err(Unreadable::Kind),
        }
    }
}

#[cfg(all(test, feature = "verbs"))]
mod tests {
    use super::*;

    #[test]
    fn a_verbs_queue_pair_comes_back_and_what_is_out_of_range_does_not() {
        let pair = RemoteQueuePair::Verbs(verbs::RemoteQueuePair {
            port: PortAddress {
                link: Link::Ethernet,
                lid: 0x1234,
                gid: std::array::from_fn(|i| i as u8),
            },
            qpn: 0x01_0203,
            psn: 0x04_0506,
            reads: 16,
        });
        let good = pair.to_bytes();
        assert_eq!(RemoteQueuePair::from_bytes(VERBS, &good), Ok(pair));
        assert_eq!(RemoteQueuePair::from_bytes(9, &good), Err(Unreadable::Kind));
        for (at, value) in [(18, 0), (18, 3), (20, 1), (27, 1), (31, 1), (32, 1)] {
            let mut bad = good;
            bad[at] = value;
            let read = RemoteQueuePair::from_bytes(VERBS, &bad);
            assert_eq!(read, Err(Unreadable::Range), "byte {at}");
        }
    }
}
