//! Socket addresses in the form that librdmacm uses.
#![allow(unsafe_code)] // reads and makes `struct sockaddr`

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// A `struct sockaddr` with room for any family.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Socket(libc::sockaddr_storage);

impl Socket {
    pub(super) fn as_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }

    /// # Safety
    /// There is a `struct sockaddr_storage` at `from`.
    pub(super) unsafe fn read(from: *const Socket) -> Socket {
        // SAFETY: the caller's promise; unaligned, because librdmacm's unions are of smaller ones as well.
        unsafe { from.read_unaligned() }
    }

    /// None for a family other than IPv4 and IPv6.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        let storage = &raw const self.0;
        match i32::from(self.0.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says so, and the storage is large enough for each.
                let found = unsafe { &*storage.cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
                Some(SocketAddr::new(
                    IpAddr::V4(ip),
                    u16::from_be(found.sin_port),
                ))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let found = unsafe { &*storage.cast::<libc::sockaddr_in6>() };
                Some(SocketAddr::V6(SocketAddrV6::new(
                    Ipv6Addr::from(found.sin6_addr.s6_addr),
                    u16::from_be(found.sin6_port),
                    found.sin6_flowinfo,
                    found.sin6_scope_id,
                )))
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for Socket {
    fn from(address: SocketAddr) -> Socket {
        // SAFETY: plain numbers, for which zero is a value.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let place = &raw mut storage;
        match address {
            SocketAddr::V4(address) => {
                let filled = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(*address.ip()).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                // SAFETY: the storage is large enough, and aligned, for each family.
                unsafe { place.cast::<libc::sockaddr_in>().write(filled) };
            }
            SocketAddr::V6(address) => {
                let filled = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: address.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: address.ip().octets(),
                    },
                    sin6_scope_id: address.scope_id(),
                };
                // SAFETY: as above.
                unsafe { place.cast::<libc::sockaddr_in6>().write(filled) };
            }
        }
        Socket(storage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_and_other_families_are_none() {
        for text in ["10.9.0.1:7174", "[fe80::1%3]:1", "[::1]:65535", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(Socket::from(address).address(), Some(address), "{text}");
        }
        let mut other = Socket::from(SocketAddr::from(([1, 2, 3, 4], 5)));
        other.0.ss_family = libc::AF_UNIX as libc::sa_family_t;
        assert_eq!(other.address(), None);
    }

    /// The bytes of `struct sockaddr_in` on the wire of this machine's kernel: family, then port and address in network order.
    #[test]
    fn an_ipv4_address_has_the_bytes_that_the_kernel_reads() {
        let mut socket = Socket::from(SocketAddr::from(([10, 9, 0, 1], 0x1234)));
        // SAFETY: the storage is longer than eight bytes.
        let bytes = unsafe { *socket.as_ptr().cast::<[u8; 8]>() };
        assert_eq!(bytes[..2], (libc::AF_INET as u16).to_ne_bytes());
        assert_eq!(bytes[2..], [0x12, 0x34, 10, 9, 0, 1]);
    }
}
