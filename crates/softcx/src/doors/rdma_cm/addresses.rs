//! What leads to a connection: addresses are bound and resolved, routes found, services offered.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::address::{AddressTarget, IB, INET, INET6, SocketAddress, ip_of_node};
use super::id::{FileKey, IdState, port_space, qp_type};
use super::table::{CmTable, EventParam, event};
use crate::device::client::Errno;
use crate::device::management::MadPeer;

/// `net.rdma_ucm.max_backlog`.
const MOST_REQUESTS: u32 = 1024;
const NOTHING: EventParam = EventParam::None;

impl CmTable {
    /// Makes an identifier for the process of a file.
    pub(super) fn create(
        &mut self,
        file: FileKey,
        user_handle: u64,
        space: u16,
        kind: u8,
    ) -> Result<u32, Errno> {
        let kind = match space {
            port_space::TCP => qp_type::RC,
            port_space::UDP | port_space::IPOIB => qp_type::UD,
            port_space::IB => kind,
            _ => return Err(libc::EINVAL),
        };
        let handle = self.add(file, space, kind)?;
        if let Some(id) = self.ids.get_mut(&handle) {
            id.user_handle = user_handle;
        }
        Ok(handle)
    }

    /// `rdma_bind_addr`.
    pub(super) fn bind(
        &mut self,
        file: FileKey,
        handle: u32,
        address: &SocketAddress,
    ) -> Result<(), Errno> {
        let id = self.id_of(file, handle)?;
        if ![INET, INET6, IB].contains(&address.family()) {
            return Err(libc::EAFNOSUPPORT);
        }
        if id.state != IdState::Idle || address.lacks_scope() {
            return Err(libc::EINVAL);
        }
        let is_own = match (self.own, self.target(address)) {
            (MadPeer::Host(own), AddressTarget::Port(gid)) => gid == own,
            (MadPeer::Host(_), _) => false,
            _ if address.is_any() => true,
            (_, AddressTarget::Host) => true,
            (own, AddressTarget::Node(node)) => own == MadPeer::Node(node),
            _ => false,
        };
        if !is_own {
            return Err(match address.family() {
                IB => libc::ENODEV,
                _ => libc::EADDRNOTAVAIL,
            });
        }
        let mut source = *address;
        let bound = self.ports.bind(&self.ids, handle, &mut source)?;
        let id = self.id_mut(file, handle)?;
        id.source = source;
        id.bound = Some(bound);
        // For the kernel, a loopback address is of no device. Here there is only one that it can be of.
        id.has_device = !address.is_zero();
        id.state = IdState::AddressBound;
        Ok(())
    }

    /// `rdma_resolve_addr`. The result is an event.
    pub(super) fn resolve_address(
        &mut self,
        file: FileKey,
        handle: u32,
        source: &SocketAddress,
        destination: &SocketAddress,
    ) -> Result<(), Errno> {
        if self.id_of(file, handle)?.state == IdState::Idle {
            let mut source = *source;
            if source.family() == 0 {
                source = self.unspecified(destination);
            }
            self.bind(file, handle, &source)?;
        }
        let own = self.own;
        let id = self.id_mut(file, handle)?;
        let is_wrong = id.source.family() != destination.family();
        if is_wrong || id.state != IdState::AddressBound {
            return Err(libc::EINVAL);
        }
        id.destination = *destination;
        let target = self.target(destination);
        let peers = self.peers_of(target);
        let Some((&first, others)) = peers.split_first() else {
            let status = match target {
                AddressTarget::Foreign => -libc::ENODEV,
                _ => -libc::EHOSTUNREACH,
            };
            self.post(handle, event::ADDR_ERROR, status, NOTHING);
            return Ok(());
        };
        let own_gid = self.gid(own);
        let id = self.id_mut(file, handle)?;
        id.exchange.peer = Some(first);
        id.exchange.others = others.to_vec();
        id.has_device = true;
        id.state = IdState::AddressResolved;
        if id.source.ip().is_none_or(|ip| ip.is_unspecified()) {
            let port = id.source.port();
            let (service, mask) = id.source.service();
            id.source = match (destination.family(), target) {
                (IB, _) => {
                    let mut own = SocketAddress::of_gid(&own_gid, 0);
                    own.set_service(service, mask);
                    own
                }
                (family, AddressTarget::Node(_) | AddressTarget::Port(_)) => {
                    let ip = match own {
                        MadPeer::Node(node) => ip_of_node(node),
                        MadPeer::Host(gid) => Ipv6Addr::from(gid).to_canonical(),
                    };
                    let ip = match (ip, family) {
                        (IpAddr::V4(ip), INET6) => ip.to_ipv6_mapped().into(),
                        (ip, _) => ip,
                    };
                    SocketAddress::of_ip(ip, port)
                }
                // The kernel's routes from this host to itself begin at the address where they end.
                _ => {
                    let mut same = *destination;
                    same.set_port(port);
                    same
                }
            };
        }
        self.post(handle, event::ADDR_RESOLVED, 0, NOTHING);
        Ok(())
    }

    /// No address in particular, of the family of another one.
    fn unspecified(&self, other: &SocketAddress) -> SocketAddress {
        let mut source = SocketAddress::NONE;
        match other.family() {
            INET => source = SocketAddress::of_ip(Ipv4Addr::UNSPECIFIED.into(), 0),
            INET6 => source = SocketAddress::of_ip(Ipv6Addr::UNSPECIFIED.into(), 0),
            IB => {
                source = SocketAddress::of_gid(&[0; 16], 0);
                let (service, mask) = other.service();
                source.set_service(service & !0xffff, mask & !0xffff);
            }
            _ => {}
        }
        source
    }

    fn target(&self, address: &SocketAddress) -> AddressTarget {
        match self.own {
            MadPeer::Node(_) => address.target(self.port.link),
            MadPeer::Host(own) => address.target_on_udp(&own),
        }
    }

    /// The devices that a target may be, in the order in which they are asked: those of this host are asked one after the other for one that offers
    /// the service, this device first.
    fn peers_of(&self, target: AddressTarget) -> Vec<MadPeer> {
        let mut nodes = self.device.lock().nodes();
        match target {
            AddressTarget::Node(node) => nodes.retain(|&it| it == node),
            AddressTarget::Host => {
                nodes.sort_by_key(|&node| (MadPeer::Node(node) != self.own, node));
            }
            AddressTarget::Port(gid) => return vec![MadPeer::Host(gid)],
            AddressTarget::Foreign => nodes.clear(),
        }
        nodes.into_iter().map(MadPeer::Node).collect()
    }

    /// `rdma_resolve_route`. The result is an event.
    pub(super) fn resolve_route(&mut self, file: FileKey, handle: u32) -> Result<(), Errno> {
        let id = self.id_mut(file, handle)?;
        if id.state != IdState::AddressResolved {
            return Err(libc::EINVAL);
        }
        id.state = IdState::RouteResolved;
        self.post(handle, event::ROUTE_RESOLVED, 0, NOTHING);
        Ok(())
    }

    /// `rdma_listen`.
    pub(super) fn listen(&mut self, file: FileKey, handle: u32, backlog: u32) -> Result<(), Errno> {
        if self.id_of(file, handle)?.state == IdState::Idle {
            let any = SocketAddress::of_ip(Ipv4Addr::UNSPECIFIED.into(), 0);
            self.bind(file, handle, &any)?;
        }
        if self.id_of(file, handle)?.state != IdState::AddressBound {
            return Err(libc::EINVAL);
        }
        self.ports.check_listen(&self.ids, handle)?;
        let id = self.id_mut(file, handle)?;
        let has_limit = backlog > 0 && backlog < MOST_REQUESTS;
        id.backlog = if has_limit { backlog } else { MOST_REQUESTS };
        id.state = IdState::Listen;
        Ok(())
    }

    /// `ib_cm_notify`: the queue pair has received something, though the peer's last message has not arrived.
    pub(super) fn notify(&mut self, file: FileKey, handle: u32, kind: u32) -> Result<(), Errno> {
        /// `IB_EVENT_COMM_EST` and `IB_EVENT_PATH_MIG`.
        const ESTABLISHED: u32 = 4;
        const MIGRATED: u32 = 6;
        use super::id::ExchangeState;
        let id = self.id_of(file, handle)?;
        let is_connected = id.exchange.state == ExchangeState::Established;
        match kind {
            _ if !id.exchange.exists => Err(libc::EINVAL),
            ESTABLISHED if is_connected => Err(libc::EISCONN),
            ESTABLISHED if self.establish(handle) => Ok(()),
            MIGRATED if is_connected => Ok(()),
            _ => Err(libc::EINVAL),
        }
    }
}
