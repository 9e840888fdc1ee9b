//! System calls on UDP sockets.
#![allow(unsafe_code)] // system calls

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Buffers that the kernel is asked for; it gives what it allows.
const RECEIVE_BYTES: libc::c_int = 8 << 20;
const SEND_BYTES: libc::c_int = 2 << 20;
/// `UDP_SEGMENT`: one message holds datagrams of that length. `UDP_GRO`: one message may hold what has arrived of one flow.
pub(super) const UDP_SEGMENT: libc::c_int = 103;
pub(super) const UDP_GRO: libc::c_int = 104;
/// `UDP_NO_CHECK6_RX`: datagrams over IPv6 arrive whose checksum is 0.
const UDP_NO_CHECK6_RX: libc::c_int = 102;
/// "ECN-capable transport" in the type of service (RFC 3168).
const ECN_CAPABLE: libc::c_int = 2;

/// An address of either family, as the kernel has it.
#[derive(Clone, Copy)]
pub(super) union UdpSocketAddress {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl UdpSocketAddress {
    pub(super) fn zero() -> UdpSocketAddress {
        // SAFETY: all zeros is an address of no family.
        unsafe { zeroed() }
    }

    pub(super) fn new(address: IpAddr, port: u16) -> UdpSocketAddress {
        let mut it = UdpSocketAddress::zero();
        match address {
            IpAddr::V4(address) => {
                it.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: port.to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(address.octets()),
                    },
                    sin_zero: [0; 8],
                };
            }
            IpAddr::V6(address) => {
                it.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: port.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr {
                        s6_addr: address.octets(),
                    },
                    sin6_scope_id: 0,
                };
            }
        }
        it
    }

    /// The address of a GID.
    pub(super) fn of_gid(gid: &[u8; 16], port: u16) -> UdpSocketAddress {
        UdpSocketAddress::new(Ipv6Addr::from(*gid).to_canonical(), port)
    }

    pub(super) fn len(&self) -> libc::socklen_t {
        // SAFETY: the family begins every address.
        let is_v4 = unsafe { self.family } == libc::AF_INET as libc::sa_family_t;
        let bytes = if is_v4 {
            size_of::<libc::sockaddr_in>()
        } else {
            size_of::<libc::sockaddr_in6>()
        };
        bytes as libc::socklen_t
    }

    /// The address as a GID, and the port; `None` for another family.
    pub(super) fn gid_and_port(&self) -> Option<([u8; 16], u16)> {
        // SAFETY: the family begins every address and says which of the others it is; all bytes are valid for them.
        unsafe {
            match i32::from(self.family) {
                libc::AF_INET => {
                    let octets = self.v4.sin_addr.s_addr.to_ne_bytes();
                    let gid = std::net::Ipv4Addr::from(octets).to_ipv6_mapped().octets();
                    Some((gid, u16::from_be(self.v4.sin_port)))
                }
                libc::AF_INET6 => {
                    Some((self.v6.sin6_addr.s6_addr, u16::from_be(self.v6.sin6_port)))
                }
                _ => None,
            }
        }
    }
}

/// Sets a socket option of type int.
fn set(socket: &OwnedFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> bool {
    // SAFETY: the value is an int that outlives the call.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    rc == 0
}

/// Whether the kernel takes several datagrams in one message.
pub(super) fn takes_segments(socket: &OwnedFd) -> bool {
    set(socket, libc::SOL_UDP, UDP_SEGMENT, 0)
}

/// A socket to send from, at an address and a port; 0 for a free port. Nobody reads what arrives there, so the kernel is to keep next to nothing of it.
pub(super) fn bind_sender(address: IpAddr, port: u16) -> io::Result<OwnedFd> {
    let socket = bind(address, port)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
    set(&socket, libc::SOL_UDP, UDP_GRO, 0);
    Ok(socket)
}

/// A socket at an address and a port; 0 for a free port.
pub(super) fn bind(address: IpAddr, port: u16) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::socket(family, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let at = UdpSocketAddress::new(address, port);
    // SAFETY: an address of that length.
    if unsafe { libc::bind(fd, (&raw const at).cast(), at.len()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // What the kernel refuses here is not needed: buffers are then shorter, and marks are not seen.
    for (own, forced, bytes) in [
        (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, RECEIVE_BYTES),
        (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, SEND_BYTES),
    ] {
        if !set(&socket, libc::SOL_SOCKET, forced, bytes) {
            set(&socket, libc::SOL_SOCKET, own, bytes);
        }
    }
    set(&socket, libc::SOL_UDP, UDP_GRO, 1);
    if address.is_ipv4() {
        // Sets "do not fragment", with which the identification is 0.
        set(
            &socket,
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            libc::IP_PMTUDISC_PROBE,
        );
        set(&socket, libc::IPPROTO_IP, libc::IP_TOS, ECN_CAPABLE);
        set(&socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1);
        set(&socket, libc::IPPROTO_IP, libc::IP_RECVTTL, 1);
        // Datagrams in one message have to have checksums.
        if !takes_segments(&socket) {
            set(&socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1);
        }
    } else {
        set(
            &socket,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        );
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECN_CAPABLE);
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1);
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1);
        // SoftRoCE sends such datagrams, and the kernel loses them at any other socket. The CRC of the packet is checked in place of the checksum.
        set(&socket, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1);
    }
    Ok(socket)
}

/// The port that a socket is at.
pub(super) fn port_of(socket: &OwnedFd) -> io::Result<u16> {
    let mut at = UdpSocketAddress::zero();
    let mut len = size_of::<UdpSocketAddress>() as libc::socklen_t;
    // SAFETY: room for an address of that length.
    let rc = unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut at).cast(), &raw mut len) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    let found = at.gid_and_port();
    found
        .map(|(_, port)| port)
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

pub(super) fn duplicate(fd: &OwnedFd) -> io::Result<OwnedFd> {
    fd.try_clone()
}

#[cfg(test)]
pub(crate) fn mark_congested(socket: &OwnedFd) {
    assert!(set(socket, libc::IPPROTO_IP, libc::IP_TOS, 3));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;

    /// `UDP_NO_CHECK6_TX`: the kernel writes no checksum, as SoftRoCE does not.
    const UDP_NO_CHECK6_TX: libc::c_int = 101;

    #[test]
    fn datagrams_over_ipv6_arrive_with_a_checksum_and_without() {
        let loopback = IpAddr::from(Ipv6Addr::LOCALHOST);
        let socket = match bind(loopback, 0) {
            Ok(socket) => socket,
            Err(error) => return eprintln!("WAIVED: no IPv6 here: {error}"),
        };
        let to = (loopback, port_of(&socket).unwrap());
        let receiver = UdpSocket::from(socket);
        receiver.set_nonblocking(false).unwrap();
        receiver
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        for omits in [0, 1] {
            let sender = OwnedFd::from(UdpSocket::bind((loopback, 0)).unwrap());
            assert!(set(&sender, libc::SOL_UDP, UDP_NO_CHECK6_TX, omits));
            UdpSocket::from(sender).send_to(&[omits as u8], to).unwrap();
            let mut got = [9; 2];
            let received = receiver.recv(&mut got);
            assert_eq!((received.ok(), got[0]), (Some(1), omits as u8));
        }
    }
}
