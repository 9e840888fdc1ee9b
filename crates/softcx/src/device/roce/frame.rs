//! The headers below the transport: Ethernet, IP version 4 or 6, and UDP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ROCE_PORT;

pub(crate) const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const UDP: u8 = 17;
/// "Do not fragment", as the annex has it.
const DO_NOT_FRAGMENT: u16 = 0x4000;
/// The longest headers of IP and UDP.
pub(super) const MAX_PSEUDO_BYTES: usize = IPV6_BYTES + UDP_BYTES;
/// The headers of IPv4 and UDP.
pub(super) const IPV4_HEADERS_BYTES: usize = IPV4_BYTES + UDP_BYTES;
/// Where the identification stands in an IPv4 header.
pub(super) const IDENTIFICATION_AT: usize = 4;

/// Where a frame comes from and where it goes. Both addresses are of one family: GIDs, with IPv4 addresses mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UdpFlow {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The UDP port of the sender, which differs by queue pair, so that switches spread the traffic.
    pub(crate) source_port: u16,
    /// The identification of the IPv4 header. The CRC covers it. 0 in the first datagram of a system call, and one more in each further one.
    pub(crate) identification: u16,
}

/// The IPv4 address that a GID maps, if it does.
pub(super) fn mapped(gid: &[u8; 16]) -> Option<Ipv4Addr> {
    Ipv6Addr::from(*gid).to_ipv4_mapped()
}

/// Whether a GID stands for an IPv4 address.
pub(crate) fn is_ipv4(gid: &[u8; 16]) -> bool {
    mapped(gid).is_some()
}

impl UdpFlow {
    pub(super) fn is_ipv4(&self) -> bool {
        is_ipv4(&self.to)
    }

    /// The headers of IP and UDP in front of so many bytes, with what the invariant CRC does not cover set to ones. Returns their length.
    pub(super) fn pseudo_header(
        &self,
        transport_bytes: usize,
        into: &mut [u8; MAX_PSEUDO_BYTES],
    ) -> usize {
        let at = self.write(transport_bytes, into);
        if self.is_ipv4() {
            // Type of service, time to live, checksum.
            into[1] = 0xff;
            into[8] = 0xff;
            into[10..12].fill(0xff);
        } else {
            // Traffic class and flow label; hop limit.
            into[0] |= 0xf;
            into[1..4].fill(0xff);
            into[7] = 0xff;
        }
        into[at - 2..at].fill(0xff);
        at
    }

    /// The headers without checksums.
    fn write(&self, transport_bytes: usize, into: &mut [u8; MAX_PSEUDO_BYTES]) -> usize {
        let udp_bytes = (UDP_BYTES + transport_bytes) as u16;
        let at = match (mapped(&self.from), mapped(&self.to)) {
            (Some(from), Some(to)) => {
                into[..4].copy_from_slice(&[0x45, 0, 0, 0]);
                let total = IPV4_BYTES as u16 + udp_bytes;
                into[2..4].copy_from_slice(&total.to_be_bytes());
                into[4..6].copy_from_slice(&self.identification.to_be_bytes());
                into[6..8].copy_from_slice(&DO_NOT_FRAGMENT.to_be_bytes());
                into[8..12].copy_from_slice(&[HOPS, UDP, 0, 0]);
                into[12..16].copy_from_slice(&from.octets());
                into[16..20].copy_from_slice(&to.octets());
                IPV4_BYTES
            }
            _ => {
                into[..4].copy_from_slice(&[0x60, 0, 0, 0]);
                into[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
                into[6..8].copy_from_slice(&[UDP, HOPS]);
                into[8..24].copy_from_slice(&self.from);
                into[24..40].copy_from_slice(&self.to);
                IPV6_BYTES
            }
        };
        let ports = [self.source_port, ROCE_PORT, udp_bytes, 0];
        for (field, number) in into[at..at + UDP_BYTES].chunks_exact_mut(2).zip(ports) {
            field.copy_from_slice(&number.to_be_bytes());
        }
        at + UDP_BYTES
    }
}

/// The hop limit of a frame that leaves.
const HOPS: u8 = 64;

/// Fields of the IP header that routers may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoutedFields {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
}

impl RoutedFields {
    /// Of a frame that leaves: "ECN-capable transport" (RFC 3168).
    pub(crate) const SENT: RoutedFields = RoutedFields {
        traffic_class: 2,
        hop_limit: HOPS,
    };
}

/// A station address for a GID: locally administered, the last bytes of the GID.
fn station(gid: &[u8; 16]) -> [u8; 6] {
    [2, 0, gid[12], gid[13], gid[14], gid[15]]
}

/// The headers of Ethernet, IP and UDP in front of a packet of the transport, as a capture has them. UDP's checksum is 0 over IPv4, as RoCE
/// cards have it; IPv6 requires one.
pub(crate) fn frame_header(flow: &UdpFlow, routed: RoutedFields, transport: &[u8]) -> Vec<u8> {
    let RoutedFields {
        traffic_class,
        hop_limit,
    } = routed;
    let mut headers = [0; MAX_PSEUDO_BYTES];
    let len = flow.write(transport.len(), &mut headers);
    let ethertype: u16 = if flow.is_ipv4() { 0x0800 } else { 0x86dd };
    if flow.is_ipv4() {
        headers[1] = traffic_class;
        headers[8] = hop_limit;
        let sum = checksum(0, &headers[..IPV4_BYTES]);
        headers[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        headers[0] |= traffic_class >> 4;
        headers[1] = traffic_class << 4;
        headers[7] = hop_limit;
        // The pseudo header of RFC 8200, 8.1.
        let above = (UDP_BYTES + transport.len()) as u32 + u32::from(UDP);
        let addresses = sum_of(above, &headers[8..IPV6_BYTES]);
        let sum = checksum(sum_of(addresses, &headers[IPV6_BYTES..len]), transport);
        let sum = if sum == 0 { 0xffff } else { sum };
        headers[len - 2..len].copy_from_slice(&sum.to_be_bytes());
    }
    let mut bytes = Vec::with_capacity(ETHERNET_BYTES + len);
    bytes.extend_from_slice(&station(&flow.to));
    bytes.extend_from_slice(&station(&flow.from));
    bytes.extend_from_slice(&ethertype.to_be_bytes());
    bytes.extend_from_slice(&headers[..len]);
    bytes
}

fn sum_of(sum: u32, bytes: &[u8]) -> u32 {
    bytes.chunks(2).fold(sum, |sum, pair| {
        let high = u32::from(pair[0]) << 8;
        let sum = sum + high + u32::from(pair.get(1).copied().unwrap_or(0));
        (sum & 0xffff) + (sum >> 16)
    })
}

/// The internet checksum (RFC 1071).
fn checksum(sum: u32, bytes: &[u8]) -> u16 {
    !(sum_of(sum, bytes) as u16)
}

/// The address as a GID.
pub(crate) fn gid_of_address(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}
