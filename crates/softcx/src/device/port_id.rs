//! Where a device can be reached, as bytes for a peer.

use crate::device::inbox::{InboxAddress, WireAddress};

/// Where a device can be reached by other devices. Opaque; [`PortId::BYTES`] long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortId(pub(crate) WireAddress);

/// Stands where a port of this host has the number of the host's boot.
const BY_UDP: u64 = u64::from_le_bytes(*b"roce-udp");

impl PortId {
    /// Length of [`PortId::to_bytes`].
    pub const BYTES: usize = 24;

    /// The port of a device whose wire is UDP, or of any other RoCE v2 device: its GID.
    pub fn of_host(gid: [u8; 16]) -> PortId {
        PortId(WireAddress::Host(gid))
    }

    /// The GID, if packets go to the port by UDP.
    pub fn host_gid(&self) -> Option<[u8; 16]> {
        match self.0 {
            WireAddress::Host(gid) => Some(gid),
            WireAddress::Inbox(_) => None,
        }
    }

    /// The bytes to give to a peer, little-endian.
    pub fn to_bytes(&self) -> [u8; PortId::BYTES] {
        let mut bytes = [0; PortId::BYTES];
        match &self.0 {
            WireAddress::Host(gid) => {
                bytes[..8].copy_from_slice(&BY_UDP.to_le_bytes());
                bytes[8..].copy_from_slice(gid);
            }
            WireAddress::Inbox(inbox) => {
                bytes[..8].copy_from_slice(&inbox.host.to_le_bytes());
                bytes[8..12].copy_from_slice(&inbox.pid.to_le_bytes());
                bytes[12..16].copy_from_slice(&inbox.fd.to_le_bytes());
                bytes[16..].copy_from_slice(&inbox.port.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads what [`PortId::to_bytes`] wrote. Any bytes are accepted. Connecting fails if no such port exists.
    pub fn from_bytes(bytes: &[u8; PortId::BYTES]) -> PortId {
        let long = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u64::from_le_bytes(*b))
        };
        let word = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map_or(0, |b| u32::from_le_bytes(*b))
        };
        if long(0) == BY_UDP {
            let gid = bytes.last_chunk().copied().unwrap_or_default();
            return PortId(WireAddress::Host(gid));
        }
        PortId(WireAddress::Inbox(InboxAddress {
            host: long(0),
            pid: word(8),
            fd: word(12),
            port: long(16),
        }))
    }
}
