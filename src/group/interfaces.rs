//! The addresses of this host.
#![allow(unsafe_code)] // reads the system's list

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::null_mut;

/// How many are given to others at most.
const ADDRESSES_MAX: usize = 16;

/// Addresses of this host by which others may reach it: those of interfaces that are up, without those that mean something on one link only; loopback last, for ranks on the
/// same host.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    let mut list = null_mut();
    // SAFETY: a place for the list.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    }
    let mut addresses = Vec::new();
    let mut at: *const libc::ifaddrs = list;
    while !at.is_null() {
        // SAFETY: an entry of the list, which ends with a null pointer.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: an address as long as its family says.
        let address = unsafe {
            match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
                }
                libc::AF_INET6 => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr))
                }
                _ => continue,
            }
        };
        let is_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        if !is_local && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    // SAFETY: the list, which is not used any more.
    unsafe { libc::freeifaddrs(list) };
    addresses.sort_by_key(|address| (address.is_loopback(), address.is_ipv6()));
    addresses.truncate(ADDRESSES_MAX - 1);
    if !addresses.iter().any(IpAddr::is_loopback) {
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_last() {
        let addresses = own_addresses();
        assert!(addresses.len() <= ADDRESSES_MAX);
        let (last, before) = addresses.split_last().unwrap();
        assert!(last.is_loopback());
        let first_loopback = before.iter().position(IpAddr::is_loopback);
        assert!(first_loopback.is_none_or(|at| before[at..].iter().all(IpAddr::is_loopback)));
    }
}
