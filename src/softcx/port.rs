//! How the port of the device shows itself.

use crate::soft::{Device, Link};

/// The identity and the link of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) link: Link,
    /// 0 on Ethernet.
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// Of the device, also its system image's.
    pub(super) guid: u64,
}

/// Entries of the table of GIDs; the second one is empty.
pub(super) const GIDS: u32 = 2;

impl Port {
    pub(super) fn of(_device: &Device) -> Port {
        let node = 1u16;
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
        let guid = 0x5c0f_7c00_0000_0000 | u64::from(node);
        gid[8..].copy_from_slice(&guid.to_be_bytes());
        Port {
            link: Link::InfiniBand,
            lid: node,
            gid,
            guid,
        }
    }

    pub(super) fn is_ethernet(&self) -> bool {
        self.link == Link::Ethernet
    }

    /// A station address for a GID: locally administered, the last bytes of the GID.
    pub(super) fn mac_of(gid: &[u8; 16]) -> [u8; 6] {
        [2, 0, gid[12], gid[13], gid[14], gid[15]]
    }
}
