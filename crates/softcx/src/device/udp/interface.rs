//! The network interface of an address.
#![allow(unsafe_code)] // a list of the C library, and an ioctl

use std::ffi::CStr;
use std::mem::zeroed;
use std::net::IpAddr;

use super::socket::UdpSocketAddress;
use crate::device::roce::gid_of_address;

/// What a RoCE packet of RC has beside its payload at most: IP, UDP, BTH and AtomicETH or RETH with an immediate, and the CRC.
const HEADER_BYTES: u32 = 40 + 8 + 12 + 28 + 4;
/// Of the loopback interface.
const LOOPBACK_MTU_BYTES: u32 = 65536;

/// The interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UdpInterface {
    /// Its number in its network namespace.
    pub(crate) index: u32,
    /// The code of the largest MTU of InfiniBand whose packets it takes: 1 is 256, 5 is 4096 bytes.
    pub(crate) mtu: u8,
}

impl UdpInterface {
    /// The loopback interface, which the packets of a device would go over that has no sockets.
    pub(crate) const LOOPBACK: UdpInterface = UdpInterface { index: 1, mtu: 5 };

    /// Its name, or that of the loopback interface if it is gone.
    pub(crate) fn name(self) -> String {
        let mut name = [0; libc::IF_NAMESIZE];
        // SAFETY: a place for the longest name.
        let found = unsafe { libc::if_indextoname(self.index, name.as_mut_ptr()) };
        if found.is_null() {
            return "lo".into();
        }
        // SAFETY: the call has written a name with an end mark.
        let name = unsafe { CStr::from_ptr(found) };
        name.to_string_lossy().into_owned()
    }

    /// The interface of an address; the loopback interface for those of 127.0.0.0/8 that none has.
    pub(super) fn of(address: IpAddr) -> UdpInterface {
        let found = name_of(address).unwrap_or_else(|| c"lo".into());
        // SAFETY: a terminated name.
        let index = unsafe { libc::if_nametoindex(found.as_ptr()) };
        let mtu_bytes = mtu_of(&found).unwrap_or(LOOPBACK_MTU_BYTES);
        let fits = |code: &u8| (128 << *code) + HEADER_BYTES <= mtu_bytes;
        UdpInterface {
            index,
            mtu: (1..=5).rev().find(fits).unwrap_or(1),
        }
    }
}

fn name_of(address: IpAddr) -> Option<Box<CStr>> {
    let wanted = gid_of_address(address);
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: room for a pointer.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut found = None;
    let mut entry = list;
    while !entry.is_null() && found.is_none() {
        // SAFETY: an entry of the list, which is not freed yet.
        let it = unsafe { &*entry };
        if !it.ifa_addr.is_null() {
            // SAFETY: the address has a family, and as much as that family needs.
            let family = i32::from(unsafe { (*it.ifa_addr).sa_family });
            let mut at = UdpSocketAddress::zero();
            let bytes = match family {
                libc::AF_INET => size_of::<libc::sockaddr_in>(),
                libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
                _ => 0,
            };
            // SAFETY: both are as long as the family says.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    it.ifa_addr.cast::<u8>(),
                    (&raw mut at).cast::<u8>(),
                    bytes,
                );
            }
            if at.gid_and_port().is_some_and(|(gid, _)| gid == wanted) {
                // SAFETY: a terminated name of the entry.
                found = Some(unsafe { CStr::from_ptr(it.ifa_name) }.into());
            }
        }
        entry = it.ifa_next;
    }
    // SAFETY: the list of above, and no reference into it is left.
    unsafe { libc::freeifaddrs(list) };
    found
}

fn mtu_of(name: &CStr) -> Option<u32> {
    // SAFETY: all zeros is a request without a name.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return None;
    }
    for (into, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *into = *byte as libc::c_char;
    }
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a socket, and a request with a name.
    let rc = unsafe { libc::ioctl(fd, libc::SIOCGIFMTU as _, &raw mut request) };
    // SAFETY: opened above.
    unsafe { libc::close(fd) };
    if rc != 0 {
        return None;
    }
    // SAFETY: the kernel has set this field.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}
