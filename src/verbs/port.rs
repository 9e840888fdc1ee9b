//! A port: its link, and the address by which peers reach it.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;

use doorbell_dv_sys::doorbell_dv_port;

use super::call::status;
use super::gid::{Gid, GidTable};
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
    pub(super) gids: GidTable,
    /// Its own address, as it stood when the port was read.
    pub(super) gid: Gid,
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

impl Port {
    /// Its address with that GID.
    pub(super) fn address_at(&self, gid: Gid) -> PortAddress {
        PortAddress {
            gid: gid.raw,
            ..self.address
        }
    }

    /// Reads a port, and chooses its address as [`GidTable::choose`] does, or takes the one of the index given.
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
        let gids = GidTable {
            port: number,
            link,
            len: found.gid_count,
            asked: gid_index,
        };
        let gid = gids.choose(context)?;
        Ok(Port {
            number,
            gids,
            gid,
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
