//! What one end of a connection must know of the other, and its bytes.

#[cfg(feature = "verbs")]
use crate::verbs::{self, Link, PortAddress};
use crate::{Error, Result};

/// The kinds of device, with their numbers in the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum PeerKind {
    Softcx = 1,
    Verbs = 2,
}

impl PeerKind {
    /// The kind of that number, if this build has devices that reach such ones.
    fn read(number: u8) -> Option<PeerKind> {
        match number {
            1 if cfg!(feature = "softcx") => Some(PeerKind::Softcx),
            // A software ConnectX whose wire is UDP reaches those of RoCE, and is one.
            2 if cfg!(any(feature = "verbs", feature = "softcx")) => Some(PeerKind::Verbs),
            _ => None,
        }
    }

    /// As text for messages.
    fn name(self) -> &'static str {
        match self {
            PeerKind::Softcx => "the embedded software NIC",
            PeerKind::Verbs => "a verbs device",
        }
    }
}

/// A queue pair that RoCE reaches, besides its numbers.
#[cfg(feature = "softcx")]
pub(super) struct RocePeer {
    pub(super) gid: [u8; 16],
    /// The reads and atomics that it serves at a time.
    pub(super) reads: u8,
}

/// `IBV_LINK_LAYER_INFINIBAND` and `IBV_LINK_LAYER_ETHERNET`.
const LINKS: [u8; 2] = [1, 2];

/// Where a queue pair is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerQueuePair {
    pub(super) kind: PeerKind,
    /// Where its port is. Software ConnectX: its `PortId`. Verbs, and a software ConnectX whose wire is UDP: GID 16, LID 2, link 1, reads 1, nothing 4.
    pub(super) port: [u8; 24],
    /// Its number, 24 bits.
    pub(super) qpn: u32,
    /// The PSN that it starts with, 24 bits.
    pub(super) psn: u32,
    /// Software ConnectX: the number of the connection. Verbs: 0.
    pub(super) connection: u32,
}

/// Why bytes are no queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Of a device of a kind that this build does not know.
    Kind,
    /// A number is outside its range.
    Range,
}

impl PeerQueuePair {
    /// Length of [`PeerQueuePair::to_bytes`].
    pub(crate) const BYTES: usize = 36;

    /// Its number.
    pub(crate) fn qpn(&self) -> u32 {
        self.qpn
    }

    /// The GID of its port.
    pub(crate) fn gid(&self) -> Option<[u8; 16]> {
        let gid = self.port.first_chunk().copied();
        gid.filter(|_| self.kind == PeerKind::Verbs)
    }

    /// A queue pair of a software ConnectX with that GID, as one of verbs.
    #[cfg(feature = "softcx")]
    pub(super) fn by_roce(gid: [u8; 16], qpn: u32, psn: u32, reads: u8) -> PeerQueuePair {
        let mut port = [0; 24];
        port[..16].copy_from_slice(&gid);
        port[18..20].copy_from_slice(&[LINKS[1], reads]);
        PeerQueuePair {
            kind: PeerKind::Verbs,
            port,
            qpn,
            psn,
            connection: 0,
        }
    }

    /// Where RoCE reaches it, if it does.
    #[cfg(feature = "softcx")]
    pub(super) fn roce(&self) -> Option<RocePeer> {
        let [link, reads] = *self.port[18..].first_chunk()?;
        let gid = self.gid().filter(|_| link == LINKS[1])?;
        Some(RocePeer { gid, reads })
    }

    /// Whether the bytes of a queue pair of verbs are such ones.
    fn is_of_verbs(&self) -> bool {
        LINKS.contains(&self.port[18]) && self.port[20..] == [0; 4] && self.connection == 0
    }

    /// The number of the kind of device.
    pub(crate) fn kind(&self) -> u8 {
        self.kind as u8
    }

    /// Port, qpn, psn, connection. Little-endian, but for a GID.
    pub(crate) fn to_bytes(self) -> [u8; PeerQueuePair::BYTES] {
        let mut bytes = [0; PeerQueuePair::BYTES];
        bytes[..24].copy_from_slice(&self.port);
        for (at, word) in [(24, self.qpn), (28, self.psn), (32, self.connection)] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`PeerQueuePair::to_bytes`] wrote.
    pub(crate) fn from_bytes(
        kind: u8,
        bytes: &[u8; PeerQueuePair::BYTES],
    ) -> Result<PeerQueuePair, Unreadable> {
        let kind = PeerKind::read(kind).ok_or(Unreadable::Kind)?;
        let word = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        let peer = PeerQueuePair {
            kind,
            port: *bytes.first_chunk().ok_or(Unreadable::Range)?,
            qpn: word(24),
            psn: word(28),
            connection: word(32),
        };
        if kind == PeerKind::Verbs && !peer.is_of_verbs() {
            return Err(Unreadable::Range);
        }
        if peer.qpn >> 24 == 0 && peer.psn >> 24 == 0 {
            Ok(peer)
        } else {
            Err(Unreadable::Range)
        }
    }

    /// Itself, if it is on a device of that kind.
    pub(super) fn of(&self, expected: PeerKind) -> Result<&PeerQueuePair> {
        if self.kind == expected {
            return Ok(self);
        }
        Err(Error::Foreign {
            argument: "peer",
            found: self.kind.name().into(),
            expected: expected.name().into(),
        })
    }
}

#[cfg(feature = "verbs")]
impl From<verbs::VerbsRemote> for PeerQueuePair {
    fn from(pair: verbs::VerbsRemote) -> PeerQueuePair {
        let mut port = [0; 24];
        port[..16].copy_from_slice(&pair.port.gid);
        port[16..18].copy_from_slice(&pair.port.lid.to_le_bytes());
        port[18] = pair.port.link as u8;
        port[19] = pair.reads;
        PeerQueuePair {
            kind: PeerKind::Verbs,
            port,
            qpn: pair.qpn,
            psn: pair.psn,
            connection: 0,
        }
    }
}

#[cfg(feature = "verbs")]
impl PeerQueuePair {
    /// It as the verbs calls need it.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is on a device of another kind.
    pub(super) fn verbs(&self) -> Result<verbs::VerbsRemote> {
        self.of(PeerKind::Verbs)?
            .read_verbs()
            .ok_or_else(|| Error::Malformed {
                what: "address",
                reason: "a number in it is out of range".into(),
            })
    }

    fn read_verbs(&self) -> Option<verbs::VerbsRemote> {
        let [low, high, link, reads, ..] = *self.port.last_chunk::<8>()?;
        if !self.is_of_verbs() {
            return None;
        }
        let port = PortAddress {
            link: Link::from_raw(link.into())?,
            lid: u16::from_le_bytes([low, high]),
            gid: *self.port.first_chunk()?,
        };
        Some(verbs::VerbsRemote {
            port,
            qpn: self.qpn,
            psn: self.psn,
            reads,
        })
    }
}

#[cfg(all(test, feature = "verbs"))]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "softcx")]
    fn a_software_connectx_with_udp_is_a_queue_pair_of_verbs_by_ethernet() {
        let gid = std::array::from_fn(|i| i as u8 + 1);
        let pair = PeerQueuePair::by_roce(gid, 7, 8, 16);
        let bytes = pair.to_bytes();
        assert_eq!(PeerQueuePair::from_bytes(2, &bytes), Ok(pair));
        let port = PortAddress {
            link: Link::Ethernet,
            lid: 0,
            gid,
        };
        let verbs = verbs::VerbsRemote {
            port,
            qpn: 7,
            psn: 8,
            reads: 16,
        };
        assert_eq!(pair.verbs(), Ok(verbs));
        let roce = pair.roce().unwrap();
        assert_eq!((pair.gid(), roce.gid, roce.reads), (Some(gid), gid, 16));
        let infiniband = verbs::VerbsRemote {
            port: PortAddress {
                link: Link::InfiniBand,
                ..port
            },
            ..verbs
        };
        assert!(PeerQueuePair::from(infiniband).roce().is_none());
    }

    #[test]
    fn a_verbs_queue_pair_comes_back_and_what_is_out_of_range_does_not() {
        let pair = verbs::VerbsRemote {
            port: PortAddress {
                link: Link::Ethernet,
                lid: 0x1234,
                gid: std::array::from_fn(|i| i as u8),
            },
            qpn: 0x01_0203,
            psn: 0x04_0506,
            reads: 16,
        };
        let good = PeerQueuePair::from(pair).to_bytes();
        let read = PeerQueuePair::from_bytes(2, &good).unwrap();
        assert_eq!(read.verbs().unwrap(), pair);
        assert_eq!(PeerQueuePair::from_bytes(9, &good), Err(Unreadable::Kind));
        for (at, value) in [(18, 0), (18, 3), (20, 1), (27, 1), (31, 1), (32, 1)] {
            let mut bad = good;
            bad[at] = value;
            let read = PeerQueuePair::from_bytes(2, &bad);
            assert_eq!(read, Err(Unreadable::Range), "byte {at}");
        }
    }
}
