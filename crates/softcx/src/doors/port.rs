//! How the port of the device shows itself.

use std::net::{IpAddr, Ipv6Addr, UdpSocket};

use crate::device::client::Errno;
use crate::device::management::MadPeer;
use crate::device::roce::ROCE_PORT;
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
    /// Whether its packets go to other hosts, by UDP: GIDs are then addresses of hosts.
    pub(super) by_udp: bool,
}

/// Entries of the table of GIDs. One is the port's own.
pub(super) const GIDS: u32 = 4;

/// The identity of node 0; the low bits are the node's number.
const GUID: u64 = 0x5c0f_7c00_0000_0000;
/// The manufacturer in it: its upper 24 bits.
const MANUFACTURER: u64 = GUID >> 40 << 40;

/// The identity of a device whose wire is UDP, made of its address. Its number does not serve: each host numbers its own devices, and a kernel
/// takes two devices with one GUID for one. It then refuses connections of the second as stale.
fn guid_of_address(gid: &[u8; 16]) -> u64 {
    /// How the 40 bits under the manufacturer begin: for an IPv4 address, which follows; and for an IPv6 address, of which a hash follows.
    /// Neither is 0, as in the GUIDs of numbered devices.
    const IPV4: u64 = 1 << 32;
    const IPV6: u64 = 1 << 39;
    if let Some(ip) = Ipv6Addr::from(*gid).to_ipv4_mapped() {
        return MANUFACTURER | IPV4 | u64::from(u32::from(ip));
    }
    // FNV-1a: a GUID is the same in each process with this address.
    let hash = gid.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    MANUFACTURER | IPV6 | (hash ^ hash >> 39) & (IPV6 - 1)
}

impl PortIdentity {
    /// `IBV_PORT_DOWN` and `IBV_PORT_ACTIVE`, each with the physical state that the kernel's mlx5 driver reports beside it: without a link an InfiniBand port
    /// polls for one, and an Ethernet port counts as disabled (`mlx5_query_port_roce`).
    pub(super) fn link_state(&self, is_down: bool) -> (u8, u8) {
        match (is_down, self.is_ethernet()) {
            (false, _) => (4, 5),
            (true, false) => (1, 2),
            (true, true) => (1, 3),
        }
    }

    pub(super) fn of(device: &Device) -> PortIdentity {
        PortIdentity {
            link: device.link(),
            lid: device.lid(),
            gid: device.gid(),
            guid: match device.mad_port() {
                MadPeer::Node(node) => GUID | u64::from(node),
                MadPeer::Host(gid) => guid_of_address(&gid),
            },
            function: device.function(),
            interface: device.interface().unwrap_or(UdpInterface::LOOPBACK),
            by_udp: matches!(device.mad_port(), MadPeer::Host(_)),
        }
    }

    /// What the kernel finds of the way to a port before it sets a path or makes an address handle (`ib_resolve_eth_dmac` of core/verbs.c): EINVAL for an address
    /// of another family than the port's, and the error of a route that is not there. A station that does not answer is not asked for.
    pub(super) fn check_route(&self, gid: &[u8; 16]) -> Result<(), Errno> {
        let to = Ipv6Addr::from(*gid).to_canonical();
        if !self.by_udp || to.is_multicast() {
            return Ok(());
        }
        route(Ipv6Addr::from(self.gid).to_canonical(), to)
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

/// Whether the kernel has a route from one address to the other.
pub(super) fn route(from: IpAddr, to: IpAddr) -> Result<(), Errno> {
    if from.is_ipv4() != to.is_ipv4() {
        return Err(libc::EINVAL);
    }
    UdpSocket::bind((from, 0))
        .and_then(|socket| socket.connect((to, ROCE_PORT)))
        .map_err(|error| error.raw_os_error().unwrap_or(libc::ENETUNREACH))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::roce::gid_of_address;
    use crate::device::{DeviceOptions, WireKind};

    #[test]
    fn devices_of_different_hosts_have_different_guids() {
        // Each host has fabrics of its own, and the first device of each has the number 1.
        let device = |name: &str, wire| {
            Device::on_fabric(&DeviceOptions {
                fabric: format!("guid-{}-{name}", std::process::id()),
                link: LinkLayer::Ethernet,
                wire,
                ..DeviceOptions::default()
            })
            .unwrap()
        };
        let devices = ["a", "b"].map(|name| device(name, WireKind::Udp(None)));
        assert_eq!(devices.each_ref().map(Device::node), [1, 1]);
        let guids = devices.each_ref().map(|it| PortIdentity::of(it).guid);
        assert_ne!(guids[0], guids[1]);
        let numbered = device("c", WireKind::SharedMemory);
        assert_eq!(PortIdentity::of(&numbered).guid, GUID | 1);
    }

    #[test]
    fn addresses_of_hosts_need_a_route() {
        let device = |name: &str, link, wire| {
            Device::on_fabric(&DeviceOptions {
                fabric: format!("route-{}-{name}", std::process::id()),
                link,
                wire,
                ..DeviceOptions::default()
            })
            .unwrap()
        };
        let (here, other_family) = (gid_of_address("127.9.0.1".parse().unwrap()), [0xfd; 16]);
        // Without a route from the loopback interface.
        let elsewhere = gid_of_address("192.0.2.1".parse().unwrap());
        let far = device("a", LinkLayer::Ethernet, WireKind::Udp(None));
        let port = PortIdentity::of(&far);
        assert_eq!(port.check_route(&here), Ok(()));
        assert_eq!(port.check_route(&port.gid), Ok(()));
        assert_eq!(port.check_route(&other_family), Err(libc::EINVAL));
        assert!(port.check_route(&elsewhere).is_err());
        // Groups have no route, and GIDs of other wires are no addresses of hosts.
        let group = gid_of_address("224.0.0.9".parse().unwrap());
        assert_eq!(port.check_route(&group), Ok(()));
        for near in [
            device("b", LinkLayer::Ethernet, WireKind::SharedMemory),
            device("c", LinkLayer::InfiniBand, WireKind::SharedMemory),
        ] {
            let port = PortIdentity::of(&near);
            assert_eq!(port.check_route(&other_family), Ok(()));
        }
    }

    #[test]
    fn a_guid_is_made_of_the_address() {
        let guid = |ip: &str| guid_of_address(&ip.parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(guid("::ffff:10.0.0.1"), 0x5c0f_7c01_0a00_0001);
        let pair = [guid("fd00::1"), guid("fd00::2")];
        assert_ne!(pair[0], pair[1]);
        for guid in pair {
            assert_eq!(guid >> 39, 0x005c_0f7c << 1 | 1);
        }
    }
}
