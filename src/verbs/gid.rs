//! The table of GIDs of a port: which of its entries is the port's address, and where that stands now. Entries come, go and move while a
//! program runs (`IBV_EVENT_GID_CHANGE`): with each address that an interface of the port gets or loses.
#![allow(unsafe_code)] // calls libibverbs

use std::ffi::CStr;
use std::ptr::NonNull;

use doorbell_dv_sys::doorbell_dv_gid;

use super::call::status;
use super::port::Link;
use crate::{Error, Result, StateKind};

/// `IBV_GID_TYPE_ROCE_V2` of `ibv_query_gid_ex`.
const ROCE_V2: u32 = 2;

/// An entry: the address, and its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) index: u8,
    pub(super) raw: [u8; 16],
}

/// Where the interface of an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GidInterface {
    /// In the network namespace of this process, or the entry has none.
    Here,
    /// The same, and it is one of a VLAN: its packets reach that VLAN only.
    Vlan,
    /// In another namespace: nothing is routed from there.
    Elsewhere,
}

/// The table of one port.
#[derive(Debug, Clone, Copy)]
pub(super) struct GidTable {
    pub(super) port: u8,
    pub(super) link: Link,
    pub(super) len: u32,
    /// The index that the application asked for.
    pub(super) asked: Option<u8>,
}

impl GidTable {
    /// The address to use: on InfiniBand the first, on Ethernet the best RoCE v2 address of this network namespace, or the one that was
    /// asked for.
    ///
    /// # Errors
    /// [`Error::System`] of the verbs call; [`Error::State`] if an Ethernet port has no such address.
    pub(super) fn choose(&self, context: NonNull<rdma_sys::ibv_context>) -> Result<Gid> {
        let at = |index: u8| {
            self.read(context, index).map(|gid| Gid {
                index,
                raw: gid.raw,
            })
        };
        match (self.asked, self.link) {
            (Some(index), _) => return at(index),
            (None, Link::InfiniBand) => return at(0),
            (None, Link::Ethernet) => {}
        }
        let (entries, refusal) = self.entries(context);
        let none = || {
            Error::state(
                StateKind::NotFound,
                "open",
                format!(
                    "port {} has no RoCE v2 address of this network namespace: its network interface needs an IP address",
                    self.port
                ),
            )
        };
        choose_roce(&entries).ok_or_else(|| refusal.unwrap_or_else(none))
    }

    /// Where an address stands now that was at `known`.
    ///
    /// # Errors
    /// [`Error::State`] if it is in the table no more.
    pub(super) fn find(&self, context: NonNull<rdma_sys::ibv_context>, known: Gid) -> Result<Gid> {
        let stands = self.read(context, known.index);
        if stands.is_ok_and(|gid| gid.raw == known.raw) {
            return Ok(known);
        }
        let (entries, _) = self.entries(context);
        let mut same = entries.iter().filter(|(_, gid, interface)| {
            let fits = self.link == Link::InfiniBand
                || (gid.type_ == ROCE_V2 && *interface != GidInterface::Elsewhere);
            gid.raw == known.raw && fits
        });
        let found = same.next().map(|&(index, gid, _)| Gid {
            index,
            raw: gid.raw,
        });
        found.ok_or_else(|| {
            Error::state(
                StateKind::NotFound,
                "connect",
                format!(
                    "the GID {} of port {}, which the peer was given, is no longer in the port's table; exchange addresses again",
                    std::net::Ipv6Addr::from(known.raw),
                    self.port
                ),
            )
        })
    }

    /// All entries that can be read, and why others cannot.
    fn entries(&self, context: NonNull<rdma_sys::ibv_context>) -> (Vec<GidEntry>, Option<Error>) {
        let mut entries = Vec::new();
        let mut refusal = None;
        for index in (0..=u8::MAX).take(self.len as usize) {
            match self.read(context, index) {
                Ok(gid) => entries.push((index, gid, self.interface(context, index, &gid))),
                // Nothing is there.
                Err(Error::System { errno, .. }) if errno == libc::ENODATA => {}
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        (entries, refusal)
    }

    fn read(&self, context: NonNull<rdma_sys::ibv_context>, index: u8) -> Result<doorbell_dv_gid> {
        let mut gid = doorbell_dv_gid::default();
        // SAFETY: an open context, and a place for the result.
        status("ibv_query_gid_ex", || unsafe {
            let (context, index) = (context.as_ptr(), index.into());
            doorbell_dv_sys::doorbell_dv_query_gid(context, self.port, index, &raw mut gid)
        })?;
        Ok(gid)
    }

    /// The numbers of interfaces begin anew in each namespace, so the name must fit as well: the kernel shows that of any namespace.
    fn interface(
        &self,
        context: NonNull<rdma_sys::ibv_context>,
        index: u8,
        gid: &doorbell_dv_gid,
    ) -> GidInterface {
        if gid.interface == 0 {
            return GidInterface::Here;
        }
        let mut name = [0; libc::IF_NAMESIZE];
        // SAFETY: a place for the longest name.
        let found = unsafe { libc::if_indextoname(gid.interface, name.as_mut_ptr()) };
        if found.is_null() {
            return GidInterface::Elsewhere;
        }
        // SAFETY: the call above has written a name with an end mark; the device of an open context stays, and its path has an end mark.
        let (name, device) = unsafe {
            let device = &raw const (*(*context.as_ptr()).device).ibdev_path;
            (
                CStr::from_ptr(name.as_ptr()).to_string_lossy(),
                CStr::from_ptr(device.cast()).to_string_lossy(),
            )
        };
        let shown = format!("{device}/ports/{}/gid_attrs/ndevs/{index}", self.port);
        let shown = std::fs::read_to_string(shown).unwrap_or_default();
        if !shown.trim().is_empty() && shown.trim() != name {
            return GidInterface::Elsewhere;
        }
        // The kernel's 8021q module has a file for each interface of a VLAN in the namespace.
        match std::path::Path::new("/proc/net/vlan").join(&*name).exists() {
            true => GidInterface::Vlan,
            false => GidInterface::Here,
        }
    }
}

type GidEntry = (u8, doorbell_dv_gid, GidInterface);

/// Whether no router forwards it: fe80::/10, or 169.254/16 as an IPv4 address. The kernel has entries of the former on every port, with addresses or without
/// (`ib_cache_gid_set_default_gid`).
fn is_link_local(raw: &[u8; 16]) -> bool {
    let ipv4 = &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 169, 254];
    (raw[0] == 0xfe && raw[1] & 0xc0 == 0x80) || raw.starts_with(ipv4)
}

/// An address that routers forward before one that they do not; of these one without a VLAN before one with it, and IPv4 before IPv6. As NCCL's
/// `validGid` and `linkLocalGid`.
fn choose_roce(entries: &[GidEntry]) -> Option<Gid> {
    let is_ipv4 = |gid: &doorbell_dv_gid| {
        gid.raw
            .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
    };
    let fits = |entry: &&GidEntry| entry.1.type_ == ROCE_V2 && entry.2 != GidInterface::Elsewhere;
    let best = entries
        .iter()
        .filter(fits)
        .min_by_key(|(_, gid, interface)| {
            let is_vlan = *interface == GidInterface::Vlan;
            (is_link_local(&gid.raw), is_vlan, !is_ipv4(gid))
        });
    best.map(|&(index, gid, _)| Gid {
        index,
        raw: gid.raw,
    })
}

#[cfg(test)]
mod tests {
    use super::GidInterface::{Elsewhere, Here, Vlan};
    use super::*;

    #[test]
    fn an_ethernet_port_is_reached_by_roce_v2_here_without_a_vlan_and_by_ipv4_if_it_has_it() {
        let mut ipv4 = [0; 16];
        ipv4[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        let mut global = [0; 16];
        global[..2].copy_from_slice(&[0x20, 0x01]);
        let entry = |index, type_, raw, interface| {
            let gid = doorbell_dv_gid {
                raw,
                type_,
                interface: 1,
            };
            (index, gid, interface)
        };
        let of = |entries: &[GidEntry]| choose_roce(entries).map(|gid| gid.index);
        let entries = [
            entry(0, ROCE_V2, ipv4, Elsewhere),
            entry(1, 1, ipv4, Here),
            entry(2, ROCE_V2, local, Vlan),
            entry(3, ROCE_V2, ipv4, Vlan),
            entry(4, ROCE_V2, local, Here),
            entry(5, ROCE_V2, global, Here),
            entry(6, ROCE_V2, ipv4, Here),
        ];
        for (len, expected) in [
            (7, Some(6)),
            (6, Some(5)),
            // An address of the link alone is of no use across a router, so one of a VLAN comes before it.
            (5, Some(3)),
            (4, Some(3)),
            (3, Some(2)),
            (2, None),
            (1, None),
        ] {
            assert_eq!(of(&entries[..len]), expected, "{len}");
        }
    }
}
