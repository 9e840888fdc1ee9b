//! Socket addresses as the connection manager's commands have them: `AF_INET`, `AF_INET6` and `AF_IB`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use crate::device::LinkLayer;
use crate::device::fabric::{NODES, gid_of, node_of};
use crate::device::roce::gid_of_address;
use crate::doors::port::route;

pub(super) const INET: u16 = libc::AF_INET as u16;
pub(super) const INET6: u16 = libc::AF_INET6 as u16;
/// `AF_IB`: a GID and a service.
pub(super) const IB: u16 = 27;

/// Length of a `struct sockaddr_ib`, the longest.
const MOST_BYTES: usize = 48;

/// One address, or none: all zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketAddress([u8; MOST_BYTES]);

/// The device or devices that an address stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressTarget {
    /// The device with this number.
    Node(u16),
    /// This host: any device of the fabric.
    Host,
    /// The port with this GID on the UDP wire.
    Port([u8; 16]),
    /// No device.
    Foreign,
}

impl SocketAddress {
    pub(super) const NONE: SocketAddress = SocketAddress([0; MOST_BYTES]);

    /// The address in a structure; what is behind its length is ignored.
    pub(super) fn read(bytes: &[u8]) -> SocketAddress {
        let mut address = SocketAddress::NONE;
        for (to, from) in address.0.iter_mut().zip(bytes) {
            *to = *from;
        }
        let len_bytes = usize::from(address.len_bytes());
        if let Some(rest) = address.0.get_mut(len_bytes..) {
            rest.fill(0);
        }
        address
    }

    /// An IPv4 or IPv6 address with a port.
    pub(super) fn of_ip(ip: IpAddr, port: u16) -> SocketAddress {
        let mut address = SocketAddress::NONE;
        match ip {
            IpAddr::V4(ip) => {
                address.put(0, &INET.to_ne_bytes());
                address.put(4, &ip.octets());
            }
            IpAddr::V6(ip) => {
                address.put(0, &INET6.to_ne_bytes());
                address.put(8, &ip.octets());
            }
        }
        address.put(2, &port.to_be_bytes());
        address
    }

    /// A GID with a service; the mask of the service is all ones.
    pub(super) fn of_gid(gid: &[u8; 16], service: u64) -> SocketAddress {
        let mut address = SocketAddress::NONE;
        address.put(0, &IB.to_ne_bytes());
        address.put(2, &0xffff_u16.to_be_bytes());
        address.put(8, gid);
        address.put(24, &service.to_be_bytes());
        address.put(32, &u64::MAX.to_be_bytes());
        address
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    fn at<const N: usize>(&self, at: usize) -> [u8; N] {
        let found = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        found.copied().unwrap_or([0; N])
    }

    pub(super) fn family(&self) -> u16 {
        u16::from_ne_bytes(self.at(0))
    }

    /// Its length; 0 for a family that is not known (`rdma_addr_size`).
    pub(super) fn len_bytes(&self) -> u16 {
        match self.family() {
            INET => 16,
            INET6 => 28,
            IB => 48,
            _ => 0,
        }
    }

    /// Its bytes, and zeros behind them.
    pub(super) fn bytes<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        for (to, from) in bytes.iter_mut().zip(&self.0) {
            *to = *from;
        }
        bytes
    }

    /// The IP address; `None` for a GID.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        match self.family() {
            INET => Some(Ipv4Addr::from(self.at::<4>(4)).into()),
            INET6 => Some(Ipv6Addr::from(self.at::<16>(8)).into()),
            _ => None,
        }
    }

    /// The GID of an `AF_IB` address.
    pub(super) fn gid(&self) -> [u8; 16] {
        self.at(8)
    }

    /// The service of an `AF_IB` address, and which of its bits matter.
    pub(super) fn service(&self) -> (u64, u64) {
        let [service, mask] = [24, 32].map(|at| u64::from_be_bytes(self.at(at)));
        (service, mask)
    }

    /// Sets the service of an `AF_IB` address.
    pub(super) fn set_service(&mut self, service: u64, mask: u64) {
        self.put(24, &service.to_be_bytes());
        self.put(32, &mask.to_be_bytes());
    }

    pub(super) fn port(&self) -> u16 {
        if self.family() == IB {
            let (service, mask) = self.service();
            return (service & mask) as u16;
        }
        u16::from_be_bytes(self.at(2))
    }

    pub(super) fn set_port(&mut self, port: u16) {
        if self.family() == IB {
            let (service, mask) = self.service();
            self.set_service(service & mask & !0xffff | u64::from(port), u64::MAX);
        } else {
            self.put(2, &port.to_be_bytes());
        }
    }

    /// Whether it is zero (`cma_zero_addr`).
    pub(super) fn is_zero(&self) -> bool {
        match self.ip() {
            Some(ip) => ip.is_unspecified(),
            None => self.gid() == [0; 16],
        }
    }

    /// Whether it names no host in particular: zero or a loopback address (`cma_any_addr`).
    pub(super) fn is_any(&self) -> bool {
        match self.ip() {
            Some(ip) => ip.is_unspecified() || ip.is_loopback(),
            None => {
                let ip = Ipv6Addr::from(self.gid());
                ip.is_unspecified() || ip.is_loopback()
            }
        }
    }

    /// Whether it is an IPv6 link-local address without the interface.
    pub(super) fn lacks_scope(&self) -> bool {
        let is_local = matches!(self.ip(), Some(IpAddr::V6(ip)) if ip.is_unicast_link_local());
        is_local && self.at::<4>(24) == [0; 4]
    }

    /// Whether both name the same host (`cma_addr_cmp`).
    pub(super) fn is_same_host(&self, other: &SocketAddress) -> bool {
        self.family() == other.family()
            && self.ip() == other.ip()
            && match self.family() {
                IB => self.gid() == other.gid(),
                _ => true,
            }
    }

    /// What it stands for. The GIDs of the devices stand for them, and so does 127.0.0.N for the device N, but 127.0.0.1 and all other
    /// addresses of this host for any device.
    pub(super) fn target(&self, link: LinkLayer) -> AddressTarget {
        let Some(ip) = self.ip() else {
            let node = node_of(link, &self.gid()).map(AddressTarget::Node);
            let or_host = || match self.is_any() {
                true => AddressTarget::Host,
                false => AddressTarget::Foreign,
            };
            return node.unwrap_or_else(or_host);
        };
        match ip {
            IpAddr::V4(ip) => v4_target(ip),
            IpAddr::V6(ip) => match (ip.to_ipv4_mapped(), node_of_v6(&ip)) {
                (Some(ip), _) => v4_target(ip),
                (None, Some(node)) => AddressTarget::Node(node),
                (None, None) if self.is_any() || self.is_of_this_host() => AddressTarget::Host,
                (None, None) => AddressTarget::Foreign,
            },
        }
    }

    /// What it stands for on the UDP wire, from the port with the GID `own`: every address is that of a port, if there is a route to it.
    pub(super) fn target_on_udp(&self, own: &[u8; 16]) -> AddressTarget {
        let gid = match self.ip() {
            _ if self.is_zero() => *own,
            Some(ip) => gid_of_address(ip),
            None => self.gid(),
        };
        let [from, to] = [own, &gid].map(|gid| Ipv6Addr::from(*gid).to_canonical());
        match route(from, to) {
            Ok(()) => AddressTarget::Port(gid),
            Err(_) => AddressTarget::Foreign,
        }
    }

    /// Whether an interface of this host has it.
    fn is_of_this_host(&self) -> bool {
        match self.ip() {
            Some(IpAddr::V4(ip)) => has_address(SocketAddr::from((ip, 0))),
            Some(IpAddr::V6(ip)) => {
                let scope = u32::from_ne_bytes(self.at(24));
                has_address(SocketAddrV6::new(ip, 0, 0, scope).into())
            }
            None => false,
        }
    }
}

fn has_address(address: SocketAddr) -> bool {
    UdpSocket::bind(address).is_ok()
}

fn v4_target(ip: Ipv4Addr) -> AddressTarget {
    match ip.octets() {
        [127, 0, 0, node] if (2..=NODES).contains(&u16::from(node)) => {
            AddressTarget::Node(node.into())
        }
        _ if ip.is_unspecified() || ip.is_loopback() => AddressTarget::Host,
        _ if has_address(SocketAddr::from((ip, 0))) => AddressTarget::Host,
        _ => AddressTarget::Foreign,
    }
}

/// The device whose InfiniBand GID is this address.
fn node_of_v6(ip: &Ipv6Addr) -> Option<u16> {
    let link = LinkLayer::InfiniBand;
    let node = u16::from_be_bytes([ip.octets()[14], ip.octets()[15]]);
    ((1..=NODES).contains(&node) && gid_of(link, node) == ip.octets()).then_some(node)
}

/// The address of a device of the fabric.
pub(super) fn ip_of_node(node: u16) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, node as u8).into()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn address(ip: &str) -> SocketAddress {
        SocketAddress::of_ip(ip.parse().unwrap(), 7174)
    }

    #[test]
    fn addresses_stand_for_a_device_for_the_host_or_for_nothing() {
        let link = LinkLayer::InfiniBand;
        for (ip, target) in [
            ("127.0.0.1", AddressTarget::Host),
            ("0.0.0.0", AddressTarget::Host),
            ("127.0.1.1", AddressTarget::Host),
            ("127.0.0.2", AddressTarget::Node(2)),
            ("127.0.0.63", AddressTarget::Node(63)),
            ("127.0.0.64", AddressTarget::Host),
            ("::1", AddressTarget::Host),
            ("::ffff:127.0.0.2", AddressTarget::Node(2)),
            ("fe80::5c0f:7c00:0:1", AddressTarget::Node(1)),
            ("192.0.2.1", AddressTarget::Foreign),
            ("2001:db8::1", AddressTarget::Foreign),
        ] {
            assert_eq!(address(ip).target(link), target, "{ip}");
        }
        for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
            let gid = |gid: &[u8; 16]| SocketAddress::of_gid(gid, 0).target(link);
            assert_eq!(gid(&gid_of(link, 1)), AddressTarget::Node(1));
            assert_eq!(gid(&[0; 16]), AddressTarget::Host);
            assert_eq!(gid(&[9; 16]), AddressTarget::Foreign);
        }
    }

    #[test]
    fn on_the_udp_wire_every_address_with_a_route_is_a_port() {
        let gid = |ip: &str| gid_of_address(ip.parse().unwrap());
        let own = gid("127.0.0.9");
        for (ip, target) in [
            ("127.0.0.1", AddressTarget::Port(gid("127.0.0.1"))),
            ("127.0.0.2", AddressTarget::Port(gid("127.0.0.2"))),
            ("::ffff:127.0.0.2", AddressTarget::Port(gid("127.0.0.2"))),
            ("0.0.0.0", AddressTarget::Port(own)),
            ("::", AddressTarget::Port(own)),
            ("::1", AddressTarget::Foreign),
            // Broadcasts are refused.
            ("255.255.255.255", AddressTarget::Foreign),
        ] {
            assert_eq!(address(ip).target_on_udp(&own), target, "{ip}");
        }
        let by_gid = |gid: &[u8; 16]| SocketAddress::of_gid(gid, 0).target_on_udp(&own);
        assert_eq!(by_gid(&own), AddressTarget::Port(own));
        assert_eq!(by_gid(&[0; 16]), AddressTarget::Port(own));
        assert_eq!(by_gid(&[9; 16]), AddressTarget::Foreign);
    }

    #[test]
    fn ports_are_part_of_every_family() {
        let mut gid = SocketAddress::of_gid(&[1; 16], 0x0106_0000);
        let mut four = address("127.0.0.1");
        assert_eq!((gid.port(), four.port()), (0, 7174));
        gid.set_port(5);
        four.set_port(5);
        assert_eq!((gid.port(), four.port()), (5, 5));
        assert_eq!(gid.service(), (0x0106_0005, u64::MAX));
        assert_eq!((four.len_bytes(), gid.len_bytes()), (16, 48));
        assert_eq!(SocketAddress::read(&four.bytes::<128>()), four);
        assert_eq!(SocketAddress::NONE.len_bytes(), 0);
        assert!(address("fe80::1").lacks_scope() && !address("::1").lacks_scope());
        assert!(four.is_same_host(&address("127.0.0.1")));
        assert!(!four.is_same_host(&address("::ffff:127.0.0.1")));
    }
}
