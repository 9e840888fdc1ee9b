//! A port: its link, and the address by which peers reach it.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;

use doorbell_dv_sys::{doorbell_dv_gid, doorbell_dv_port};

use super::call::status;
use crate::{Error, Result, StateKind};

/// The link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Link {
    InfiniBand = 1,
    /// RoCE.
    Ethernet = 2,
}

impl Link {
    /// With the numbers of verbs.h (`IBV_LINK_LAYER_*`); a port that does not say is InfiniBand, as there.
    pub(crate) fn from_raw(raw: u32) -> Option<Link> {
        match raw {
            0 | 1 => Some(Link::InfiniBand),
            2 => Some(Link::Ethernet),
            _ => None,
        }
    }
}

/// Where a port is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortAddress {
    pub(crate) link: Link,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
}

/// A port that queue pairs can use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) gid_index: u8,
    pub(super) address: PortAddress,
    pub(super) mtu_bytes: u32,
    /// The longest message.
    pub(super) message_bytes: u32,
    /// Every path needs a global route, as the subnet manager wants it (`IBV_QPF_GRH_REQUIRED`).
    pub(super) needs_global_route: bool,
    pub(super) is_active: bool,
}

/// `IBV_PORT_ACTIVE`.
const ACTIVE: u32 = 4;
/// `IBV_QPF_GRH_REQUIRED`.
const GRH_REQUIRED: u8 = 1;
/// `IBV_GID_TYPE_ROCE_V2` of `ibv_query_gid_ex`.
const ROCE_V2: u32 = 2;

impl Port {
    /// Reads a port, and chooses its address: on InfiniBand the first, on Ethernet the first RoCE v2 address of IPv4, or else the
    /// first of RoCE v2; or the one of the index given.
    ///
    /// # Errors
    /// [`Error::System`] of the verbs call; [`Error::State`] if an Ethernet port has no RoCE v2 address.
    pub(super) fn read(
        context: NonNull<rdma_sys::ibv_context>,
        number: u8,
        gid_index: Option<u8>,
    ) -> Result<Port> {
        let mut found = doorbell_dv_port::default();
        // SAFETY: an open context, and a place for the result.
        status("ibv_query_port", || unsafe {
            doorbell_dv_sys::doorbell_dv_query_port(context.as_ptr(), number, &raw mut found)
        })?;
        let link = Link::from_raw(found.link_layer).ok_or_else(|| {
            Error::state(
                StateKind::Unsupported,
                "ibv_query_port",
                format!(
                    "port {number} has the unknown link layer {}",
                    found.link_layer
                ),
            )
        })?;
        let read = |index: u8| read_gid(context, number, index);
        let (gid_index, gid) = match (gid_index, link) {
            (Some(index), _) => (index, read(index)?),
            (None, Link::InfiniBand) => (0, read(0)?),
            (None, Link::Ethernet) => {
                let mut all = Vec::new();
                let mut refusal = None;
                for index in 0..found.gid_count.min(256) {
                    match read(index as u8) {
                        Ok(gid) => all.push((index as u8, gid)),
                        Err(Error::System { errno, .. }) if errno == libc::ENODATA => {}
                        Err(error) => refusal = refusal.or(Some(error)),
                    }
                }
                let none = || {
                    Error::state(
                        StateKind::NotFound,
                        "open",
                        format!(
                            "port {number} has no RoCE v2 address: its network interface needs an IP address"
                        ),
                    )
                };
                choose_roce(&all).ok_or_else(|| refusal.unwrap_or_else(none))?
            }
        };
        Ok(Port {
            number,
            gid_index,
            address: PortAddress {
                link,
                lid: found.lid,
                gid: gid.raw,
            },
            // `enum ibv_mtu`: 1 is 256, 5 is 4096.
            mtu_bytes: 128 << found.active_mtu.clamp(1, 5),
            message_bytes: found.message_bytes,
            needs_global_route: found.flags & GRH_REQUIRED != 0,
            is_active: found.state == ACTIVE,
        })
    }
}

fn read_gid(
    context: NonNull<rdma_sys::ibv_context>,
    port: u8,
    index: u8,
) -> Result<doorbell_dv_gid> {
    let mut gid = doorbell_dv_gid::default();
    // SAFETY: an open context, and a place for the result.
    status("ibv_query_gid_ex", || unsafe {
        doorbell_dv_sys::doorbell_dv_query_gid(context.as_ptr(), port, index.into(), &raw mut gid)
    })?;
    Ok(gid)
}

fn choose_roce(all: &[(u8, doorbell_dv_gid)]) -> Option<(u8, doorbell_dv_gid)> {
    let routable = || all.iter().filter(|(_, gid)| gid.type_ == ROCE_V2);
    let is_ipv4 = |gid: &doorbell_dv_gid| {
        gid.raw
            .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
    };
    routable()
        .find(|(_, gid)| is_ipv4(gid))
        .or_else(|| routable().next())
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, type_: u32, raw: [u8; 16]) -> (u8, doorbell_dv_gid) {
        (index, doorbell_dv_gid { raw, type_ })
    }

    #[test]
    fn an_ethernet_port_is_reached_by_roce_v2_and_ipv4_if_it_has_it() {
        let mut ipv4 = [0; 16];
        ipv4[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
        let mut local = [0; 16];
        local[0] = 0xfe;
        let of = |all: &[(u8, doorbell_dv_gid)]| choose_roce(all).map(|(index, _)| index);
        let all = [
            gid(0, 1, local),
            gid(1, ROCE_V2, local),
            gid(2, 1, ipv4),
            gid(3, ROCE_V2, ipv4),
        ];
        assert_eq!(of(&all), Some(3));
        assert_eq!(of(&all[..3]), Some(1));
        assert_eq!(of(&all[..1]), None);
    }
}
