//! The identifiers of connections (`rdma_cm_id`), and how far each is.

use std::time::{Duration, Instant};

use super::address::{IB, INET, SocketAddress};
use super::mad::CmMessage;
use crate::device::management::{MadBytes, MadPeer};

/// The file of an identifier, by its inode.
pub(super) type FileKey = (u64, u64);

/// `RDMA_PS_*`.
pub(super) mod port_space {
    pub(in crate::doors::rdma_cm) const IPOIB: u16 = 0x0002;
    pub(in crate::doors::rdma_cm) const TCP: u16 = 0x0106;
    pub(in crate::doors::rdma_cm) const UDP: u16 = 0x0111;
    pub(in crate::doors::rdma_cm) const IB: u16 = 0x013f;
}

/// `IBV_QPT_*`.
pub(super) mod qp_type {
    pub(in crate::doors::rdma_cm) const RC: u8 = 2;
    pub(in crate::doors::rdma_cm) const UC: u8 = 3;
    pub(in crate::doors::rdma_cm) const UD: u8 = 4;
}

/// How far the address and the route of an identifier are (`enum rdma_cm_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdState {
    Idle,
    AddressBound,
    AddressResolved,
    RouteResolved,
    Connect,
    Disconnect,
    Listen,
}

/// How far the exchange of messages is (`enum ib_cm_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExchangeState {
    Idle,
    RequestSent,
    /// The peer has said that its answer takes time.
    RequestReceivedThere,
    RequestReceived,
    ReplySent,
    /// As `RequestReceivedThere`, of the reply.
    ReplyReceivedThere,
    ReplyReceived,
    Established,
    DisconnectSent,
    DisconnectReceived,
    TimeWait,
    ServiceRequestSent,
    ServiceRequestReceived,
}

/// The exchange with the peer.
#[derive(Debug)]
pub(super) struct CmExchange {
    pub(super) state: ExchangeState,
    /// It was begun once (`id_priv->cm_id.ib`).
    pub(super) exists: bool,
    pub(super) peer: Option<MadPeer>,
    /// Of a device of the fabric: the port that had its number when the exchange began.
    pub(super) port: u64,
    /// Further devices that the address may stand for.
    pub(super) others: Vec<MadPeer>,
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) transaction: u64,
    /// The last message, which may have to be repeated.
    pub(super) sent: Option<Box<MadBytes>>,
    pub(super) repetitions: u8,
    /// How often the peer has asked for time.
    pub(super) delays: u8,
    pub(super) due: Option<Instant>,
    pub(super) local_qpn: u32,
    pub(super) remote_qpn: u32,
    /// Of the peer's device, from its request or its reply.
    pub(super) remote_guid: u64,
    /// What the peer begins to send with: this side chooses it, and its message says so (the kernel's `cm_format_req`: `rq_psn`).
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) ack_timeout: u8,
    pub(super) mtu: u8,
    pub(super) service: u64,
}

impl CmExchange {
    /// Whether the device at its peer's place is still the one that it began with, given the port that is there now. That of another host is not known.
    pub(super) fn is_with(&self, port: u64) -> bool {
        let is_far = matches!(self.peer, Some(MadPeer::Host(_))) && self.port == 0;
        is_far || self.port == port
    }
}

/// One identifier.
#[derive(Debug)]
pub(super) struct ConnectionId {
    /// `None` for one that its process has destroyed, and whose peer does not know that yet.
    pub(super) file: Option<FileKey>,
    /// Its process knows its number.
    pub(super) is_known: bool,
    /// What its process calls it; 0 as long as it does not know it.
    pub(super) user_handle: u64,
    pub(super) port_space: u16,
    pub(super) qp_type: u8,
    pub(super) state: IdState,
    pub(super) source: SocketAddress,
    pub(super) destination: SocketAddress,
    pub(super) has_device: bool,
    /// The key of its port, if it has one.
    pub(super) bound: Option<(u16, u16)>,
    pub(super) reuses_address: bool,
    pub(super) only_family: Option<bool>,
    pub(super) type_of_service: u8,
    pub(super) ack_timeout: Option<u8>,
    /// Requests that may still come before some are read.
    pub(super) backlog: u32,
    pub(super) events_read: u32,
    /// The request that it sends, for any of the devices that its address may stand for.
    pub(super) request: Option<CmMessage>,
    pub(super) exchange: CmExchange,
}

impl ConnectionId {
    pub(super) fn new(
        file: FileKey,
        port_space: u16,
        qp_type: u8,
        receive_psn: u32,
        mtu: u8,
    ) -> ConnectionId {
        ConnectionId {
            file: Some(file),
            is_known: true,
            user_handle: 0,
            port_space,
            qp_type,
            state: IdState::Idle,
            source: SocketAddress::NONE,
            destination: SocketAddress::NONE,
            has_device: false,
            bound: None,
            reuses_address: false,
            only_family: None,
            type_of_service: 0,
            ack_timeout: None,
            backlog: 0,
            events_read: 0,
            request: None,
            exchange: CmExchange {
                state: ExchangeState::Idle,
                exists: false,
                peer: None,
                port: 0,
                others: Vec::new(),
                local_id: 0,
                remote_id: 0,
                transaction: 0,
                sent: None,
                repetitions: 0,
                delays: 0,
                due: None,
                local_qpn: 0,
                remote_qpn: 0,
                remote_guid: 0,
                receive_psn,
                send_psn: 0,
                responder_resources: 0,
                initiator_depth: 0,
                retry_count: 0,
                rnr_retry_count: 0,
                ack_timeout: ACK_TIMEOUT,
                mtu,
                service: 0,
            },
        }
    }

    /// Whether it takes only requests of the family of its address, of those that a wildcard address may take. Its process has chosen that, or it is
    /// so for IPv4 and not for IPv6, as with `net.ipv6.bindv6only` at 0 (`rdma_bind_addr`).
    pub(super) fn keeps_to(&self, family: u16) -> bool {
        self.only_family.unwrap_or(family == INET)
    }

    /// Whether a request is for its address. `to` is the address in the request, which has none between GIDs (`cma_match_private_data`).
    pub(super) fn hears(&self, to: Option<&SocketAddress>) -> bool {
        let own = &self.source;
        let is_any = own.is_any();
        match own.family() {
            family if is_any && !self.keeps_to(family) => true,
            IB => true,
            family => {
                to.is_some_and(|to| to.family() == family && (is_any || to.is_same_host(own)))
            }
        }
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.qp_type == qp_type::UD
    }

    /// Whether the route is known: from the resolution, or from the request.
    pub(super) fn has_route(&self) -> bool {
        use IdState::*;
        matches!(self.state, RouteResolved | Connect | Disconnect)
    }

    /// The service that an address of this identifier stands for (`rdma_get_service_id`).
    pub(super) fn service_of(&self, address: &SocketAddress) -> u64 {
        match address.ip() {
            None if address.len_bytes() > 0 => address.service().0,
            _ => u64::from(self.port_space) << 16 | u64::from(address.port()),
        }
    }
}

/// The life time of a packet, in units of 4.096 us to the power of two (`CMA_IBOE_PACKET_LIFETIME`).
pub(super) const PACKET_LIFE_TIME: u8 = 16;
/// The timeout of an acknowledgement, from it.
pub(super) const ACK_TIMEOUT: u8 = PACKET_LIFE_TIME + 1;

/// A time of the protocol.
pub(super) fn time(exponent: u8) -> Duration {
    Duration::from_nanos(4096 << exponent.min(31))
}
