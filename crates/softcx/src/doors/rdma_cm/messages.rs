//! Messages that arrive from peers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::address::{IB, SocketAddress};
use super::id::{ExchangeState as Exchange, IdState, qp_type, time};
use super::mad::{
    CmMessage, ConnectionReply, ConnectionRequest, REJ_PRIVATE, REQ_PRIVATE, Rejection,
    SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, ServiceReply, ServiceRequest, about, reason,
};
use super::table::{CmTable, EventParam, event};
use crate::device::LinkLayer;
use crate::device::management::MadPeer;
use crate::doors::abi::{CmConnParam, CmUdParam};

/// Length of the header in the private data of requests between IP addresses (`struct cma_hdr`).
pub(super) const IP_HEADER_BYTES: usize = 36;
/// How long a peer's repetitions are stopped while a process thinks about its answer: 69 s, as the kernel's manager.
const SERVICE_TIMEOUT: u8 = 24;

/// After this time a reply is repeated whose receipt the peer has acknowledged.
const REPLY_WAIT: Duration = Duration::from_secs(1);

/// The status of an answer to a request for a service.
pub(super) mod service_status {
    pub(in crate::doors::rdma_cm) const SUCCESS: u8 = 0;
    pub(in crate::doors::rdma_cm) const UNSUPPORTED: u8 = 1;
    pub(in crate::doors::rdma_cm) const REJECTED: u8 = 2;
}

/// The addresses in a request: that of the sender, and the one that it is for.
pub(super) fn ip_header(private_data: &[u8], port: u16) -> Option<[SocketAddress; 2]> {
    let (&[version, ip_version], rest) = private_data.split_first_chunk()?;
    let (&from_port, rest) = rest.split_first_chunk()?;
    let (source, rest) = rest.split_first_chunk::<16>()?;
    let destination = rest.first_chunk::<16>()?;
    let ip = |bytes: &[u8; 16]| -> Option<IpAddr> {
        match ip_version >> 4 {
            4 => Some(Ipv4Addr::from(*bytes.last_chunk::<4>()?).into()),
            6 => Some(Ipv6Addr::from(*bytes).into()),
            _ => None,
        }
    };
    (version == 0).then_some(())?;
    Some([
        SocketAddress::of_ip(ip(source)?, u16::from_be_bytes(from_port)),
        SocketAddress::of_ip(ip(destination)?, port),
    ])
}

/// The number of the peer that this side knows when a message about another one arrives. An answer to the request comes before it knows any.
fn number_in(about: u8, local_id: u32) -> u32 {
    if about == about::REQ { 0 } else { local_id }
}

/// The private data of a message in an event.
fn private_data(from: &[u8]) -> ([u8; 256], u8) {
    let mut bytes = [0; 256];
    for (to, from) in bytes.iter_mut().zip(from) {
        *to = *from;
    }
    (bytes, from.len() as u8)
}

impl CmTable {
    /// Handles a message of a peer.
    pub(super) fn on_message(&mut self, from: MadPeer, transaction: u64, message: &CmMessage) {
        match message {
            CmMessage::Request(request) => self.on_request(from, transaction, request),
            CmMessage::Reply(reply) => self.on_reply(from, transaction, reply),
            CmMessage::Reject(rejection) => self.on_rejection(from, rejection),
            CmMessage::Received {
                local_id,
                remote_id,
                about,
                service_timeout,
            } => {
                let numbers = [*remote_id, number_in(*about, *local_id)];
                self.on_received(from, numbers, *about, *service_timeout);
            }
            CmMessage::ReadyToUse {
                local_id,
                remote_id,
            } => {
                if let Some(handle) = self.exchange_with(from, [*remote_id, *local_id]) {
                    self.establish(handle);
                }
            }
            CmMessage::DisconnectRequest {
                local_id,
                remote_id,
                qpn,
            } => self.on_disconnect(from, transaction, [*remote_id, *local_id], *qpn),
            CmMessage::DisconnectReply {
                local_id,
                remote_id,
            } => self.on_disconnect_reply(from, [*remote_id, *local_id]),
            CmMessage::ServiceRequest(request) => {
                self.on_service_request(from, transaction, request);
            }
            CmMessage::ServiceReply(reply) => self.on_service_reply(from, reply),
        }
    }

    /// The identifier whose exchange with that peer has these numbers: that of this side, and the peer's, which is 0 as long as this side does not
    /// know it. A late message of an earlier exchange has another one (`cm_acquire_id`).
    fn exchange_with(&self, from: MadPeer, [own, remote]: [u32; 2]) -> Option<u32> {
        let handle = *self.exchanges.get(&own)?;
        let exchange = &self.ids.get(&handle)?.exchange;
        (exchange.peer == Some(from) && exchange.remote_id == remote).then_some(handle)
    }

    fn state_of(&self, handle: u32) -> Exchange {
        let id = self.ids.get(&handle);
        id.map_or(Exchange::Idle, |id| id.exchange.state)
    }

    fn on_request(&mut self, from: MadPeer, transaction: u64, request: &ConnectionRequest) {
        let refuse = |table: &CmTable, local_id, reason| {
            let rejection = Rejection {
                local_id,
                remote_id: request.local_id,
                about: about::REQ,
                reason,
                guid: None,
                private_data: [0; REJ_PRIVATE],
            };
            table.send_to(from, transaction, &CmMessage::Reject(rejection));
        };
        if let Some(&handle) = self.requests.get(&(from, request.local_id, false)) {
            // It is there already, and the peer does not know that.
            match self.state_of(handle) {
                Exchange::RequestReceived => self.acknowledge(handle, about::REQ),
                Exchange::ReplySent | Exchange::ReplyReceivedThere => self.send_again(handle),
                Exchange::TimeWait => {
                    let number = self.ids.get(&handle).map_or(0, |id| id.exchange.local_id);
                    refuse(self, number, reason::STALE_CONNECTION);
                }
                _ => {}
            }
            return;
        }
        // A peer that connects a queue pair knows of no connection that it has: it was killed, or its message that ended the connection was lost.
        // It asks again after this connection is over (`cm_match_req`).
        if let Some(stale) = self.connection_with(from, request.guid, request.qpn) {
            refuse(self, 0, reason::STALE_CONNECTION);
            return self.end_stale(stale);
        }
        let refuse = |table: &CmTable, reason| refuse(table, 0, reason);
        let addresses = ip_header(&request.private_data, request.service as u16);
        let at = addresses.as_ref().map(|[_, at]| at);
        let Some(listener) = self.listener(request.service, at) else {
            return refuse(self, reason::INVALID_SERVICE_ID);
        };
        let Some(id) = self.ids.get(&listener) else {
            return;
        };
        let transport = match request.transport {
            0 => qp_type::RC,
            _ => qp_type::UC,
        };
        let (space, family) = (id.port_space, id.source.family());
        let is_gid = family == IB;
        let addresses = if is_gid {
            let [from, to] = request.gids.map(|gid| SocketAddress::of_gid(&gid, 0));
            let mut to = to;
            to.set_service(request.service, u64::MAX);
            Some([from, to])
        } else {
            addresses
        };
        let fits = id.qp_type == transport && request.transport <= 1;
        let (Some([source, destination]), Some(file)) = (addresses.filter(|_| fits), id.file)
        else {
            return refuse(self, reason::CONSUMER_DEFINED);
        };
        let Ok(handle) = self.add(file, space, transport) else {
            return refuse(self, reason::CONSUMER_DEFINED);
        };
        self.begin_exchange(handle, from);
        self.requests
            .insert((from, request.local_id, false), handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.is_known = false;
            id.state = IdState::Connect;
            id.has_device = true;
            // The addresses as this side sees them.
            (id.source, id.destination) = (destination, source);
            let exchange = &mut id.exchange;
            exchange.state = Exchange::RequestReceived;
            exchange.remote_id = request.local_id;
            exchange.transaction = transaction;
            exchange.send_psn = request.psn;
            exchange.responder_resources = request.initiator_depth;
            exchange.initiator_depth = request.responder_resources;
            exchange.retry_count = request.retry_count;
            exchange.rnr_retry_count = request.rnr_retry_count;
            exchange.ack_timeout = request.ack_timeout;
            exchange.mtu = request.mtu;
            exchange.service = request.service;
        }
        self.set_remote(handle, request.guid, request.qpn);
        let skipped = if is_gid { 0 } else { IP_HEADER_BYTES };
        let (private_data, private_data_len) =
            private_data(request.private_data.get(skipped..).unwrap_or_default());
        let param = CmConnParam {
            qp_num: request.qpn,
            private_data,
            private_data_len,
            srq: request.srq.into(),
            responder_resources: request.initiator_depth,
            initiator_depth: request.responder_resources,
            flow_control: request.flow_control.into(),
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
            ..CmConnParam::default()
        };
        if self.post_request(listener, handle, EventParam::Connection(param)) {
            self.acknowledge(handle, about::REQ);
        } else {
            self.destroy(handle);
        }
    }

    /// Ends a connection that the peer does not know any more.
    fn end_stale(&mut self, handle: u32) {
        if self.state_of(handle) == Exchange::Established {
            self.send_disconnect(handle);
        }
    }

    /// Tells the peer that its message has come, and that the answer takes time.
    fn acknowledge(&self, handle: u32, about: u8) {
        if let Some(id) = self.ids.get(&handle)
            && let Some(peer) = id.exchange.peer
        {
            let message = CmMessage::Received {
                local_id: id.exchange.local_id,
                remote_id: id.exchange.remote_id,
                about,
                service_timeout: SERVICE_TIMEOUT,
            };
            self.send_to(peer, id.exchange.transaction, &message);
        }
    }

    fn on_received(&mut self, from: MadPeer, numbers: [u32; 2], message: u8, service_timeout: u8) {
        let Some(handle) = self.exchange_with(from, numbers) else {
            return;
        };
        let next = match (self.state_of(handle), message) {
            (Exchange::RequestSent, about::REQ) => Exchange::RequestReceivedThere,
            (Exchange::ReplySent, about::REP) => Exchange::ReplyReceivedThere,
            _ => return,
        };
        self.set_exchange(handle, next);
        let wait = match (next, self.ids.get_mut(&handle)) {
            // The message that ends this wait is sent only once. If it is lost, the reply has to be repeated for it.
            (Exchange::ReplyReceivedThere, Some(id)) => {
                id.exchange.repetitions = 0;
                id.exchange.delays = id.exchange.delays.saturating_add(1);
                REPLY_WAIT
            }
            _ => time(service_timeout),
        };
        self.set_timer(handle, Some(wait));
    }

    fn on_reply(&mut self, from: MadPeer, transaction: u64, reply: &ConnectionReply) {
        let refuse = |table: &CmTable, reason| {
            let rejection = Rejection {
                local_id: reply.remote_id,
                remote_id: reply.local_id,
                about: about::REP,
                reason,
                guid: None,
                private_data: [0; REJ_PRIVATE],
            };
            table.send_to(from, transaction, &CmMessage::Reject(rejection));
        };
        let first = self.exchange_with(from, [reply.remote_id, 0]);
        let again = || self.exchange_with(from, [reply.remote_id, reply.local_id]);
        let Some(handle) = first.or_else(again) else {
            return refuse(self, reason::CONSUMER_DEFINED);
        };
        match self.state_of(handle) {
            Exchange::RequestSent | Exchange::RequestReceivedThere => {}
            Exchange::ReplyReceived => return self.acknowledge(handle, about::REP),
            Exchange::Established => return self.send_again(handle),
            _ => return,
        }
        if let Some(stale) = self.connection_with(from, reply.guid, reply.qpn) {
            refuse(self, reason::STALE_CONNECTION);
            return self.end_stale(stale);
        }
        self.set_timer(handle, None);
        self.set_remote(handle, reply.guid, reply.qpn);
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let exchange = &mut id.exchange;
        exchange.state = Exchange::ReplyReceived;
        exchange.others.clear();
        exchange.remote_id = reply.local_id;
        exchange.send_psn = reply.psn;
        exchange.responder_resources = reply.initiator_depth;
        exchange.initiator_depth = reply.responder_resources;
        exchange.rnr_retry_count = reply.rnr_retry_count;
        if id.state != IdState::Connect {
            return;
        }
        let (private_data, private_data_len) = private_data(&reply.private_data);
        let param = CmConnParam {
            qp_num: reply.qpn,
            private_data,
            private_data_len,
            srq: reply.srq.into(),
            responder_resources: reply.initiator_depth,
            initiator_depth: reply.responder_resources,
            flow_control: reply.flow_control.into(),
            rnr_retry_count: reply.rnr_retry_count,
            ..CmConnParam::default()
        };
        self.acknowledge(handle, about::REP);
        self.post(
            handle,
            event::CONNECT_RESPONSE,
            0,
            EventParam::Connection(param),
        );
    }

    /// The identifier that a rejection is about (`cm_acquire_rejected_id`).
    fn rejected(&self, from: MadPeer, rejection: &Rejection) -> Option<u32> {
        let by_request = || {
            let key = (from, rejection.local_id, false);
            self.requests.get(&key).copied()
        };
        if rejection.reason == reason::TIMEOUT {
            // The sender has seen no answer to its request, so it knows no number of this side.
            let handle = by_request()?;
            let id = self.ids.get(&handle)?;
            return (rejection.guid == Some(id.exchange.remote_guid)).then_some(handle);
        }
        if rejection.remote_id == 0 {
            return by_request();
        }
        let remote = number_in(rejection.about, rejection.local_id);
        self.exchange_with(from, [rejection.remote_id, remote])
    }

    fn on_rejection(&mut self, from: MadPeer, rejection: &Rejection) {
        let Some(handle) = self.rejected(from, rejection) else {
            return;
        };
        match self.state_of(handle) {
            Exchange::RequestSent
                if rejection.reason == reason::INVALID_SERVICE_ID && self.try_next(handle) =>
            {
                return;
            }
            Exchange::RequestSent
            | Exchange::RequestReceivedThere
            | Exchange::RequestReceived
            | Exchange::ReplySent
            | Exchange::ReplyReceivedThere
                if rejection.reason != reason::STALE_CONNECTION =>
            {
                self.set_timer(handle, None);
                self.set_exchange(handle, Exchange::Idle);
            }
            Exchange::RequestSent
            | Exchange::RequestReceivedThere
            | Exchange::RequestReceived
            | Exchange::ReplySent
            | Exchange::ReplyReceivedThere
            | Exchange::ReplyReceived
            | Exchange::Established
            | Exchange::DisconnectSent => self.wait(handle),
            _ => return,
        }
        let (private_data, private_data_len) = private_data(&rejection.private_data);
        let param = CmConnParam {
            private_data,
            private_data_len,
            ..CmConnParam::default()
        };
        if self.ids.get(&handle).map(|id| id.state) == Some(IdState::Connect) {
            self.post(
                handle,
                event::REJECTED,
                rejection.reason.into(),
                EventParam::Connection(param),
            );
        }
        self.forget_orphan(handle);
    }

    /// Sends the request to the next device that its address may stand for. Whether there is one.
    pub(super) fn try_next(&mut self, handle: u32) -> bool {
        let Some(id) = self.ids.get_mut(&handle) else {
            return false;
        };
        if id.exchange.others.is_empty() {
            return false;
        }
        let peer = id.exchange.others.remove(0);
        self.exchanges.remove(&id.exchange.local_id);
        self.begin_exchange(handle, peer);
        self.send_request(handle);
        true
    }

    /// The peer uses the connection.
    pub(super) fn establish(&mut self, handle: u32) -> bool {
        let waits = matches!(
            self.state_of(handle),
            Exchange::ReplySent | Exchange::ReplyReceivedThere
        );
        if waits {
            self.set_timer(handle, None);
            self.set_exchange(handle, Exchange::Established);
            if self.ids.get(&handle).map(|id| id.state) == Some(IdState::Connect) {
                self.post(
                    handle,
                    event::ESTABLISHED,
                    0,
                    EventParam::Connection(CmConnParam::default()),
                );
            }
        }
        waits
    }

    fn on_disconnect(&mut self, from: MadPeer, transaction: u64, numbers: [u32; 2], qpn: u32) {
        let answer = |table: &CmTable| {
            let [local_id, remote_id] = numbers;
            let reply = CmMessage::DisconnectReply {
                local_id,
                remote_id,
            };
            table.send_to(from, transaction, &reply);
        };
        let Some(handle) = self.exchange_with(from, numbers) else {
            return answer(self);
        };
        if self.ids.get(&handle).map(|id| id.exchange.local_qpn) != Some(qpn) {
            return;
        }
        match self.state_of(handle) {
            Exchange::ReplySent
            | Exchange::ReplyReceivedThere
            | Exchange::Established
            | Exchange::DisconnectSent => {}
            // Over on this side, and the answer was lost.
            Exchange::TimeWait | Exchange::Idle => return answer(self),
            _ => return,
        }
        self.set_timer(handle, None);
        self.set_exchange(handle, Exchange::DisconnectReceived);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.exchange.transaction = transaction;
        }
        self.disconnected(handle, 0);
        if self.ids.get(&handle).is_some_and(|id| id.file.is_none()) {
            answer(self);
            self.forget(handle);
        }
    }

    /// The connection is over for its process.
    pub(super) fn disconnected(&mut self, handle: u32, status: i32) {
        if self.ids.get(&handle).map(|id| id.state) == Some(IdState::Connect) {
            self.set_state(handle, IdState::Disconnect);
            let param = EventParam::Connection(CmConnParam::default());
            self.post(handle, event::DISCONNECTED, status, param);
        }
    }

    fn on_disconnect_reply(&mut self, from: MadPeer, numbers: [u32; 2]) {
        let Some(handle) = self.exchange_with(from, numbers) else {
            return;
        };
        if matches!(
            self.state_of(handle),
            Exchange::DisconnectSent | Exchange::DisconnectReceived
        ) {
            self.wait(handle);
            self.disconnected(handle, 0);
            self.forget_orphan(handle);
        }
    }

    /// Late packets may still be on their way.
    pub(super) fn wait(&mut self, handle: u32) {
        let timeout = self.ids.get(&handle).map(|id| id.exchange.ack_timeout);
        self.set_exchange(handle, Exchange::TimeWait);
        self.set_timer(handle, timeout.map(time));
    }

    /// Removes an identifier that its process does not have any more.
    pub(super) fn forget_orphan(&mut self, handle: u32) {
        if self.ids.get(&handle).is_some_and(|id| id.file.is_none()) {
            self.forget(handle);
        }
    }

    fn on_service_request(&mut self, from: MadPeer, transaction: u64, request: &ServiceRequest) {
        if let Some(&handle) = self.requests.get(&(from, request.request_id, true)) {
            // The answer was lost, or there is none yet.
            return self.send_again(handle);
        }
        let refuse = |table: &CmTable, status| {
            let reply = ServiceReply {
                request_id: request.request_id,
                status,
                qpn: 0,
                service: request.service,
                qkey: 0,
                private_data: [0; SIDR_REP_PRIVATE],
            };
            table.send_to(from, transaction, &CmMessage::ServiceReply(reply));
        };
        let addresses = ip_header(&request.private_data, request.service as u16);
        let at = addresses.as_ref().map(|[_, at]| at);
        let Some(listener) = self.listener(request.service, at) else {
            return refuse(self, service_status::UNSUPPORTED);
        };
        let Some(id) = self.ids.get(&listener) else {
            return;
        };
        let (space, is_gid) = (id.port_space, id.source.family() == IB);
        let addresses = if is_gid {
            let gids = [from, self.own].map(|peer| self.gid(peer));
            Some(gids.map(|gid| SocketAddress::of_gid(&gid, request.service)))
        } else {
            addresses
        };
        let fits = id.is_datagram();
        let (Some([source, destination]), Some(file)) = (addresses.filter(|_| fits), id.file)
        else {
            return refuse(self, service_status::REJECTED);
        };
        let Ok(handle) = self.add(file, space, qp_type::UD) else {
            return refuse(self, service_status::REJECTED);
        };
        self.begin_exchange(handle, from);
        self.requests
            .insert((from, request.request_id, true), handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.is_known = false;
            id.state = IdState::Connect;
            id.has_device = true;
            (id.source, id.destination) = (destination, source);
            id.exchange.state = Exchange::ServiceRequestReceived;
            id.exchange.remote_id = request.request_id;
            id.exchange.transaction = transaction;
            id.exchange.service = request.service;
        }
        let skipped = if is_gid { 0 } else { IP_HEADER_BYTES };
        let (private_data, private_data_len) =
            private_data(request.private_data.get(skipped..).unwrap_or_default());
        let param = CmUdParam {
            private_data,
            private_data_len,
            ..CmUdParam::default()
        };
        if !self.post_request(listener, handle, EventParam::Datagram(param)) {
            self.destroy(handle);
        }
    }

    fn on_service_reply(&mut self, from: MadPeer, reply: &ServiceReply) {
        let Some(handle) = self.exchange_with(from, [reply.request_id, 0]) else {
            return;
        };
        if self.state_of(handle) != Exchange::ServiceRequestSent {
            return;
        }
        if reply.status == service_status::UNSUPPORTED && self.try_next(handle) {
            return;
        }
        self.set_timer(handle, None);
        self.set_exchange(handle, Exchange::Idle);
        let (private_data, private_data_len) = private_data(&reply.private_data);
        let mut param = CmUdParam {
            private_data,
            private_data_len,
            ..CmUdParam::default()
        };
        if reply.status != service_status::SUCCESS {
            let status = reply.status.into();
            return self.post(
                handle,
                event::UNREACHABLE,
                status,
                EventParam::Datagram(param),
            );
        }
        param.qp_num = reply.qpn;
        param.qkey = reply.qkey;
        param.ah_attr = self.path_attributes(from);
        self.post(handle, event::ESTABLISHED, 0, EventParam::Datagram(param));
    }
}

/// The header that says which addresses a request is between.
pub(super) fn write_ip_header(
    source: &SocketAddress,
    destination: &SocketAddress,
) -> Option<[u8; IP_HEADER_BYTES]> {
    let mut header = [0; IP_HEADER_BYTES];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in header.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(2, &source.port().to_be_bytes());
    for (at, address) in [(4, source), (20, destination)] {
        match address.ip()? {
            IpAddr::V4(ip) => {
                put(1, &[4 << 4]);
                put(at + 12, &ip.octets());
            }
            IpAddr::V6(ip) => {
                put(1, &[6 << 4]);
                put(at, &ip.octets());
            }
        }
    }
    Some(header)
}

/// Whether private data of a process fits into a request behind what is there already.
pub(super) fn fits_request(is_datagram: bool, len_bytes: usize) -> bool {
    let room = match is_datagram {
        true => SIDR_REQ_PRIVATE,
        false => REQ_PRIVATE,
    };
    len_bytes <= room
}

/// LIDs of a path between two ports; Ethernet has none.
pub(super) fn lids(link: LinkLayer, ends: [MadPeer; 2]) -> [u16; 2] {
    ends.map(|end| match (link, end) {
        (LinkLayer::InfiniBand, MadPeer::Node(node)) => node,
        _ => 0,
    })
}
