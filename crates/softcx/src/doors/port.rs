//! How the port of the device shows itself.

use crate::device::{Device, Function, LinkLayer, UdpInterface};

/// The identity and the link of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PortIdentity {
    pub(super) link: LinkLayer,
    /// 0 on Ethernet.
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// Of the device, also its system image's.
    pub(super) guid: u64,
    pub(super) function: Function,
    /// The network interface that its packets go over.
    pub(super) interface: UdpInterface,
}

/// Entries of the table of GIDs. One is the port's own.
pub(super) const GIDS: u32 = 4;

/// The identity of node 0; the low bits are the node's number.
const GUID: u64 = 0x5c0f_7c00_0000_0000;

impl PortIdentity {
    pub(super) fn of(device: &Device) -> PortIdentity {
        PortIdentity {
            link: device.link(),
            lid: device.lid(),
            gid: device.gid(),
            guid: GUID | u64::from(device.node()),
            function: device.function(),
            interface: device.interface().unwrap_or(UdpInterface::LOOPBACK),
        }
    }

    pub(super) fn is_ethernet(&self) -> bool {
        self.link == LinkLayer::Ethernet
    }

    /// Whether a path needs a global route (`rdma_is_grh_required`).
    pub(super) fn needs_grh(&self) -> bool {
        self.is_ethernet() || self.function.needs_grh
    }

    /// Whether that entry of the table of GIDs is one of another network namespace: the address 10.9.8.7 of an interface that is not here.
    pub(super) fn is_foreign_gid(&self, index: u32) -> bool {
        self.function.foreign_gid && self.is_ethernet() && index == 0
    }

    /// A station address for a GID: locally administered, the last bytes of the GID.
    pub(super) fn mac_of(gid: &[u8; 16]) -> [u8; 6] {
        [2, 0, gid[12], gid[13], gid[14], gid[15]]
    }
}
