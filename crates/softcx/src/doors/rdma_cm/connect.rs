//! Connecting, accepting, refusing, and the end of connections.

use super::address::IB;
use super::id::{ConnectionId, ExchangeState, FileKey, IdState, qp_type};
use super::mad::{
    CmMessage, ConnectionReply, ConnectionRequest, REJ_PRIVATE, REP_PRIVATE, REQ_PRIVATE,
    Rejection, SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, ServiceReply, ServiceRequest, about, reason,
};
use super::messages::{fits_request, lids, service_status, write_ip_header};
use super::table::CmTable;
use crate::device::client::Errno;
use crate::doors::abi::CmConnParam;

/// `RDMA_UDP_QKEY`.
pub(super) const UDP_QKEY: u32 = 0x0123_4567;

/// The private data that a process gives, in a message's field.
fn field<const N: usize>(private_data: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, from) in bytes.iter_mut().zip(private_data) {
        *to = *from;
    }
    bytes
}

fn given(param: &CmConnParam) -> &[u8] {
    let len_bytes = usize::from(param.private_data_len);
    param.private_data.get(..len_bytes).unwrap_or_default()
}

impl CmTable {
    /// `rdma_connect`. The result is an event.
    pub(super) fn connect(
        &mut self,
        file: FileKey,
        handle: u32,
        param: &CmConnParam,
    ) -> Result<(), Errno> {
        let id = self.id_mut(file, handle)?;
        if id.state != IdState::RouteResolved {
            return Err(libc::EINVAL);
        }
        let header = match id.source.family() {
            IB => Vec::new(),
            _ => {
                let header = write_ip_header(&id.source, &id.destination);
                header.ok_or(libc::EINVAL)?.to_vec()
            }
        };
        let private_data = [header.as_slice(), given(param)].concat();
        let is_datagram = id.is_datagram();
        if !fits_request(is_datagram, private_data.len()) {
            return Err(libc::EINVAL);
        }
        id.state = IdState::Connect;
        id.exchange.local_qpn = param.qp_num & 0xff_ffff;
        id.exchange.responder_resources = param.responder_resources;
        id.exchange.initiator_depth = param.initiator_depth;
        id.exchange.retry_count = param.retry_count.min(7);
        id.exchange.rnr_retry_count = param.rnr_retry_count.min(7);
        id.exchange.service = id.service_of(&id.destination);
        let peer = id.exchange.peer.ok_or(libc::EINVAL)?;
        let first = self.request_of(handle, param, &private_data);
        self.begin_exchange(handle, peer);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.request = first;
        }
        self.send_request(handle);
        Ok(())
    }

    /// The request of an identifier, without the fields that depend on the device that is asked.
    fn request_of(
        &self,
        handle: u32,
        param: &CmConnParam,
        private_data: &[u8],
    ) -> Option<CmMessage> {
        let id = self.ids.get(&handle)?;
        let exchange = &id.exchange;
        if id.is_datagram() {
            return Some(CmMessage::ServiceRequest(ServiceRequest {
                request_id: 0,
                pkey: 0xffff,
                service: exchange.service,
                private_data: field::<SIDR_REQ_PRIVATE>(private_data),
            }));
        }
        Some(CmMessage::Request(ConnectionRequest {
            local_id: 0,
            service: exchange.service,
            guid: self.port.guid,
            qpn: exchange.local_qpn,
            responder_resources: exchange.responder_resources,
            initiator_depth: exchange.initiator_depth,
            transport: u8::from(id.qp_type == qp_type::UC),
            flow_control: param.flow_control != 0,
            psn: exchange.receive_psn,
            retry_count: exchange.retry_count,
            rnr_retry_count: exchange.rnr_retry_count,
            pkey: 0xffff,
            mtu: exchange.mtu,
            srq: param.srq != 0,
            lids: [0; 2],
            gids: [[0; 16]; 2],
            traffic_class: id.type_of_service,
            hop_limit: 64,
            sl: 0,
            ack_timeout: id.ack_timeout.unwrap_or(exchange.ack_timeout),
            private_data: field::<REQ_PRIVATE>(private_data),
        }))
    }

    /// Sends the request to the device whose turn it is.
    pub(super) fn send_request(&mut self, handle: u32) {
        let peer = self.ids.get(&handle).and_then(|id| id.exchange.peer);
        let Some(ends) = peer.map(|peer| [self.own, peer]) else {
            return;
        };
        let (lids, gids) = (lids(self.port.link, ends), ends.map(|end| self.gid(end)));
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let (request, state) = match id.request {
            Some(CmMessage::ServiceRequest(request)) => {
                let request_id = id.exchange.local_id;
                let request = ServiceRequest {
                    request_id,
                    ..request
                };
                (
                    CmMessage::ServiceRequest(request),
                    ExchangeState::ServiceRequestSent,
                )
            }
            Some(CmMessage::Request(request)) => {
                let request = ConnectionRequest {
                    local_id: id.exchange.local_id,
                    lids,
                    gids,
                    ..request
                };
                (CmMessage::Request(request), ExchangeState::RequestSent)
            }
            _ => return,
        };
        id.exchange.state = state;
        self.send(handle, &request, true);
    }

    /// `rdma_accept`: of a request, with parameters; of a reply, without. If it fails, the peer is refused.
    pub(super) fn accept(
        &mut self,
        file: FileKey,
        handle: u32,
        user_handle: u64,
        param: Option<&CmConnParam>,
    ) -> Result<(), Errno> {
        if self.id_of(file, handle)?.state != IdState::Connect {
            return Err(libc::EINVAL);
        }
        let accepted = match (self.id_of(file, handle)?.is_datagram(), param) {
            (true, param) => {
                let param = param.copied().unwrap_or_default();
                let success = service_status::SUCCESS;
                self.answer_service(file, handle, success, &param, given(&param))
            }
            (false, Some(param)) => self.reply(file, handle, param),
            (false, None) => self.take_reply(file, handle),
        };
        if accepted.is_err() {
            // As the kernel's manager: it refuses what it cannot accept, also what has been accepted before.
            let _ = self.reject(file, handle, 0, &[]);
        } else if param.is_some() {
            self.id_mut(file, handle)?.user_handle = user_handle;
        }
        accepted
    }

    /// `ib_send_cm_rep`.
    fn reply(&mut self, file: FileKey, handle: u32, param: &CmConnParam) -> Result<(), Errno> {
        let guid = self.port.guid;
        let id = self.id_mut(file, handle)?;
        let is_waiting = id.exchange.state == ExchangeState::RequestReceived;
        if !is_waiting || given(param).len() > REP_PRIVATE {
            return Err(libc::EINVAL);
        }
        let exchange = &mut id.exchange;
        exchange.state = ExchangeState::ReplySent;
        exchange.local_qpn = param.qp_num & 0xff_ffff;
        exchange.responder_resources = param.responder_resources;
        exchange.initiator_depth = param.initiator_depth;
        let reply = ConnectionReply {
            local_id: exchange.local_id,
            remote_id: exchange.remote_id,
            qpn: exchange.local_qpn,
            psn: exchange.receive_psn,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control != 0,
            rnr_retry_count: param.rnr_retry_count.min(7),
            srq: param.srq != 0,
            guid,
            private_data: field::<REP_PRIVATE>(given(param)),
        };
        self.send(handle, &CmMessage::Reply(reply), true);
        Ok(())
    }

    /// `ib_send_cm_rtu`.
    fn take_reply(&mut self, file: FileKey, handle: u32) -> Result<(), Errno> {
        let id = self.id_mut(file, handle)?;
        if id.exchange.state != ExchangeState::ReplyReceived {
            return Err(libc::EINVAL);
        }
        id.exchange.state = ExchangeState::Established;
        let ready = CmMessage::ReadyToUse {
            local_id: id.exchange.local_id,
            remote_id: id.exchange.remote_id,
        };
        self.send(handle, &ready, false);
        Ok(())
    }

    /// `ib_send_cm_sidr_rep`.
    fn answer_service(
        &mut self,
        file: FileKey,
        handle: u32,
        status: u8,
        param: &CmConnParam,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let id = self.id_mut(file, handle)?;
        let is_waiting = id.exchange.state == ExchangeState::ServiceRequestReceived;
        if !is_waiting || private_data.len() > SIDR_REP_PRIVATE {
            return Err(libc::EINVAL);
        }
        // Processes choose the key only for addresses of the family `AF_IB`.
        let asked = if id.source.family() == IB {
            param.qkey
        } else {
            0
        };
        let is_success = status == service_status::SUCCESS;
        let reply = ServiceReply {
            request_id: id.exchange.remote_id,
            status,
            qpn: if is_success {
                param.qp_num & 0xff_ffff
            } else {
                0
            },
            service: id.exchange.service,
            qkey: match (is_success, asked) {
                (false, _) => 0,
                (true, 0) => UDP_QKEY,
                (true, asked) => asked,
            },
            private_data: field::<SIDR_REP_PRIVATE>(private_data),
        };
        id.exchange.state = ExchangeState::Idle;
        self.send(handle, &CmMessage::ServiceReply(reply), false);
        Ok(())
    }

    /// `rdma_reject`.
    pub(super) fn reject(
        &mut self,
        file: FileKey,
        handle: u32,
        asked: u8,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let reason = match u16::from(asked) {
            0 | reason::CONSUMER_DEFINED => reason::CONSUMER_DEFINED,
            reason::VENDOR_OPTION_NOT_SUPPORTED => reason::VENDOR_OPTION_NOT_SUPPORTED,
            _ => return Err(libc::EINVAL),
        };
        let id = self.id_of(file, handle)?;
        if !id.exchange.exists {
            return Err(libc::EINVAL);
        }
        if id.is_datagram() {
            let rejected = service_status::REJECTED;
            let none = CmConnParam::default();
            return self.answer_service(file, handle, rejected, &none, private_data);
        }
        self.send_rejection(handle, reason, private_data)
    }

    /// `ib_send_cm_rej`.
    fn send_rejection(
        &mut self,
        handle: u32,
        reason: u16,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        use ExchangeState::*;
        let id = self.ids.get(&handle).ok_or(libc::ENOENT)?;
        let exchange = &id.exchange;
        let message = match exchange.state {
            RequestReceived => about::REQ,
            ReplyReceived => about::REP,
            RequestSent | RequestReceivedThere | ReplySent | ReplyReceivedThere => about::OTHER,
            _ => return Err(libc::EINVAL),
        };
        if private_data.len() > REJ_PRIVATE {
            return Err(libc::EINVAL);
        }
        let rejection = Rejection {
            local_id: exchange.local_id,
            remote_id: exchange.remote_id,
            about: message,
            reason,
            // A kernel finds the request of a peer that gives it up by the GUID and the number of the peer.
            guid: (reason == reason::TIMEOUT).then_some(self.port.guid),
            private_data: field::<REJ_PRIVATE>(private_data),
        };
        let waits = matches!(exchange.state, ReplySent | ReplyReceivedThere);
        self.send(handle, &CmMessage::Reject(rejection), false);
        if waits {
            self.wait(handle);
        } else {
            self.set_exchange(handle, Idle);
        }
        Ok(())
    }

    /// `rdma_disconnect`: begins the end of a connection, or answers the peer that has begun it.
    pub(super) fn disconnect(&mut self, file: FileKey, handle: u32) -> Result<(), Errno> {
        let id = self.id_of(file, handle)?;
        if !id.exchange.exists {
            return Err(libc::EINVAL);
        }
        match id.exchange.state {
            ExchangeState::Established => self.send_disconnect(handle),
            ExchangeState::DisconnectReceived => {
                self.answer_disconnect(handle);
                self.wait(handle);
            }
            _ => {}
        }
        Ok(())
    }

    /// `ib_send_cm_dreq`.
    pub(super) fn send_disconnect(&mut self, handle: u32) {
        self.set_exchange(handle, ExchangeState::DisconnectSent);
        if let Some(id) = self.ids.get(&handle) {
            let request = CmMessage::DisconnectRequest {
                local_id: id.exchange.local_id,
                remote_id: id.exchange.remote_id,
                qpn: id.exchange.remote_qpn,
            };
            self.send(handle, &request, true);
        }
    }

    fn answer_disconnect(&mut self, handle: u32) {
        if let Some(id) = self.ids.get(&handle) {
            let reply = CmMessage::DisconnectReply {
                local_id: id.exchange.local_id,
                remote_id: id.exchange.remote_id,
            };
            self.send(handle, &reply, false);
        }
    }

    /// Destroys an identifier, as `rdma_destroy_id` and the end of its file do. The peer is told. Returns how many of its events its process has
    /// read.
    pub(super) fn destroy(&mut self, handle: u32) -> u32 {
        use ExchangeState::*;
        let Some(id) = self.ids.get_mut(&handle) else {
            return 0;
        };
        let file = id.file.take();
        id.is_known = false;
        let (state, is_listening) = (id.exchange.state, id.state == IdState::Listen);
        if let Some(key) = id.bound.take() {
            self.ports.release(key, handle);
        }
        let requests = file.map_or(Vec::new(), |file| self.take_events(file, handle));
        for request in requests {
            self.destroy(request);
        }
        debug_assert!(!is_listening || state == Idle);
        match state {
            RequestSent | RequestReceivedThere => {
                let _ = self.send_rejection(handle, reason::TIMEOUT, &[]);
            }
            RequestReceived | ReplySent | ReplyReceivedThere | ReplyReceived => {
                let _ = self.send_rejection(handle, reason::CONSUMER_DEFINED, &[]);
            }
            // The request for the end may be lost: it is repeated after its process has forgotten the identifier.
            Established => {
                let read = self.ids.get(&handle).map_or(0, |id| id.events_read);
                self.send_disconnect(handle);
                return read;
            }
            DisconnectSent => return self.ids.get(&handle).map_or(0, |id| id.events_read),
            DisconnectReceived => self.answer_disconnect(handle),
            ServiceRequestReceived => self.refuse_service(handle),
            Idle | TimeWait | ServiceRequestSent => {}
        }
        self.forget(handle)
    }

    fn refuse_service(&mut self, handle: u32) {
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let reply = ServiceReply {
            request_id: id.exchange.remote_id,
            status: service_status::REJECTED,
            qpn: 0,
            service: id.exchange.service,
            qkey: 0,
            private_data: [0; SIDR_REP_PRIVATE],
        };
        self.send(handle, &CmMessage::ServiceReply(reply), false);
    }

    /// Takes the unread events of an identifier: the requests among them.
    fn take_events(&mut self, file: FileKey, handle: u32) -> Vec<u32> {
        let Some(file) = self.files.get_mut(&file) else {
            return Vec::new();
        };
        let (gone, kept) = std::mem::take(&mut file.events)
            .into_iter()
            .partition(|event| event.owner == handle);
        file.events = kept;
        file.settle();
        let gone: std::collections::VecDeque<super::event_file::QueuedCmEvent> = gone;
        gone.iter().filter_map(|event| event.request).collect()
    }

    /// Gives an identifier and its events to another file: how many of them its process has read.
    pub(super) fn migrate(
        &mut self,
        from: FileKey,
        to: FileKey,
        handle: u32,
    ) -> Result<u32, Errno> {
        let id = self.id_mut(from, handle)?;
        let read = id.events_read;
        if from == to {
            return Ok(read);
        }
        id.file = Some(to);
        let Some(file) = self.files.get_mut(&from) else {
            return Ok(read);
        };
        let (moved, kept): (std::collections::VecDeque<_>, _) = std::mem::take(&mut file.events)
            .into_iter()
            .partition(|event| event.owner == handle);
        file.events = kept;
        file.settle();
        for request in moved.iter().filter_map(|event| event.request) {
            if let Some(id) = self.ids.get_mut(&request) {
                id.file = Some(to);
            }
        }
        if let Some(file) = self.files.get_mut(&to) {
            file.events.extend(moved);
        }
        self.serve_waiters(to);
        Ok(read)
    }

    /// Ends everything that was made through a file.
    pub(super) fn close(&mut self, file: FileKey) {
        let is_of = |id: &ConnectionId| id.file == Some(file) && id.is_known;
        let ids = self.ids.iter().filter(|(_, id)| is_of(id));
        let mut handles: Vec<u32> = ids.map(|(&handle, _)| handle).collect();
        handles.sort_unstable();
        for handle in handles {
            self.destroy(handle);
        }
        self.files.remove(&file);
    }
}
