//! What the connection manager of a device knows: identifiers, their files, and the exchanges with peers.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::address::SocketAddress;
use super::event_file::{EventFile, QueuedCmEvent};
use super::id::{ConnectionId, ExchangeState, FileKey, IdState};
use super::joined_groups::JoinedGroups;
use super::mad::CmMessage;
use super::ports::Ports;
use crate::device::Device;
use crate::device::client::Errno;
use crate::device::fabric::gid_of;
use crate::device::management::MadPeer;
use crate::doors::abi::{CmConnParam, CmEventResp, CmUdParam, Layout};
use crate::doors::port::PortIdentity;

/// `RDMA_CM_EVENT_*`.
pub(super) mod event {
    pub(in crate::doors::rdma_cm) const ADDR_RESOLVED: u32 = 0;
    pub(in crate::doors::rdma_cm) const ADDR_ERROR: u32 = 1;
    pub(in crate::doors::rdma_cm) const ROUTE_RESOLVED: u32 = 2;
    pub(in crate::doors::rdma_cm) const CONNECT_REQUEST: u32 = 4;
    pub(in crate::doors::rdma_cm) const CONNECT_RESPONSE: u32 = 5;
    pub(in crate::doors::rdma_cm) const UNREACHABLE: u32 = 7;
    pub(in crate::doors::rdma_cm) const REJECTED: u32 = 8;
    pub(in crate::doors::rdma_cm) const ESTABLISHED: u32 = 9;
    pub(in crate::doors::rdma_cm) const DISCONNECTED: u32 = 10;
    pub(in crate::doors::rdma_cm) const MULTICAST_JOIN: u32 = 12;
    pub(in crate::doors::rdma_cm) const TIMEWAIT_EXIT: u32 = 15;
}

/// What an event says beside its kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum EventParam {
    None,
    Connection(CmConnParam),
    Datagram(CmUdParam),
}

impl EventParam {
    pub(super) fn bytes(self) -> [u8; 304] {
        let from = match self {
            EventParam::None => Vec::new(),
            EventParam::Connection(param) => param.to_bytes(),
            EventParam::Datagram(param) => param.to_bytes(),
        };
        let mut bytes = [0; 304];
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = from;
        }
        bytes
    }
}

/// Identifiers of a device. The C library's manager has a table of so many.
const MOST_IDS: u32 = 1 << 16;
/// The first message is repeated after this time, each later one after twice the time of the one before, up to the kernel's.
const FIRST_REPETITION: Duration = Duration::from_millis(128);
const LAST_REPETITION: Duration = Duration::from_millis(4096);

/// The table.
#[derive(Debug)]
pub(super) struct CmTable {
    pub(super) device: Device,
    pub(super) port: PortIdentity,
    /// The number of the device on its fabric.
    node: u16,
    /// Its own port.
    pub(super) own: MadPeer,
    /// The MTU of every path from here, as `IBV_MTU_*`.
    pub(super) path_mtu: u8,
    pub(super) ids: HashMap<u32, ConnectionId>,
    pub(super) files: HashMap<FileKey, EventFile>,
    pub(super) groups: JoinedGroups,
    pub(super) ports: Ports,
    /// Identifiers by the number of their exchange.
    pub(super) exchanges: HashMap<u32, u32>,
    /// Identifiers of requests from peers: by the peer, its number, and whether it is a request for a service.
    pub(super) requests: HashMap<(MadPeer, u32, bool), u32>,
    /// Identifiers by the peer, the GUID that it gives for its device, and the number of its queue pair. Some of their connections are over:
    /// [`CmTable::connection_with`].
    connections: HashMap<(MadPeer, u64, u32), u32>,
    pub(super) timers: BTreeSet<(Instant, u32)>,
    free: BTreeSet<u32>,
    handles: u32,
    last_exchange: u32,
    random: u64,
}

impl CmTable {
    pub(super) fn new(device: Device, seed: u64) -> CmTable {
        CmTable {
            port: PortIdentity::of(&device),
            node: device.node(),
            own: device.mad_port(),
            path_mtu: (device.mtu_bytes() / 128).ilog2() as u8,
            device,
            ids: HashMap::new(),
            files: HashMap::new(),
            groups: JoinedGroups::default(),
            ports: Ports::after(32768 + (seed % 28000) as u16),
            exchanges: HashMap::new(),
            requests: HashMap::new(),
            connections: HashMap::new(),
            timers: BTreeSet::new(),
            free: BTreeSet::new(),
            handles: 0,
            last_exchange: (seed >> 32) as u32,
            random: seed,
        }
    }

    /// A number that a peer does not expect: 24 bits.
    fn psn(&mut self) -> u32 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 40) as u32
    }

    /// Adds an identifier. The lowest number that is free is its own, as in the kernel.
    ///
    /// # Errors
    /// ENOMEM if there are too many.
    pub(super) fn add(
        &mut self,
        file: FileKey,
        port_space: u16,
        qp_type: u8,
    ) -> Result<u32, Errno> {
        let handle = match self.free.pop_first() {
            Some(handle) => handle,
            None if self.handles == MOST_IDS => return Err(libc::ENOMEM),
            None => {
                self.handles += 1;
                self.handles - 1
            }
        };
        let psn = self.psn();
        let id = ConnectionId::new(file, port_space, qp_type, psn, self.path_mtu);
        self.ids.insert(handle, id);
        Ok(handle)
    }

    /// The identifier of that number, which its process knows by this file.
    ///
    /// # Errors
    /// ENOENT if there is none, EINVAL if it is of another file.
    pub(super) fn id_of(&self, file: FileKey, handle: u32) -> Result<&ConnectionId, Errno> {
        let id = self.ids.get(&handle).filter(|id| id.is_known);
        let id = id.filter(|id| id.file.is_some()).ok_or(libc::ENOENT)?;
        if id.file == Some(file) {
            Ok(id)
        } else {
            Err(libc::EINVAL)
        }
    }

    /// As [`CmTable::id_of`].
    pub(super) fn id_mut(
        &mut self,
        file: FileKey,
        handle: u32,
    ) -> Result<&mut ConnectionId, Errno> {
        self.id_of(file, handle)?;
        self.ids.get_mut(&handle).ok_or(libc::ENOENT)
    }

    /// Gives an exchange a number, and a transaction.
    pub(super) fn begin_exchange(&mut self, handle: u32, peer: MadPeer) {
        self.last_exchange = self.last_exchange.wrapping_add(1);
        let number = self.last_exchange;
        let port = self.port_of(peer);
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        id.exchange.exists = true;
        id.exchange.peer = Some(peer);
        id.exchange.port = port;
        id.exchange.local_id = number;
        id.exchange.transaction = u64::from(number) << 16 | u64::from(self.node);
        self.exchanges.insert(number, handle);
    }

    /// Sets the queue pair of the peer of an identifier.
    pub(super) fn set_remote(&mut self, handle: u32, guid: u64, qpn: u32) {
        if let Some(id) = self.ids.get_mut(&handle) {
            (id.exchange.remote_guid, id.exchange.remote_qpn) = (guid, qpn);
            if let Some(peer) = id.exchange.peer {
                self.connections.insert((peer, guid, qpn), handle);
            }
        }
    }

    /// The identifier of the connection with a queue pair of a peer, unless that connection is over (`cm_insert_remote_qpn`). The kernel compares
    /// only the GUID and the number, which any host can write into a message: with those of another one it could end the other's connection.
    pub(super) fn connection_with(&self, peer: MadPeer, guid: u64, qpn: u32) -> Option<u32> {
        use ExchangeState::{Idle, TimeWait};
        let handle = *self.connections.get(&(peer, guid, qpn))?;
        let exchange = &self.ids.get(&handle)?.exchange;
        // A connection with the device that had the peer's number before ends when its device is found to be gone.
        let is_same = exchange.is_with(self.port_of(peer));
        (is_same && !matches!(exchange.state, Idle | TimeWait)).then_some(handle)
    }

    /// The port of the device that is at the peer's place on the fabric now. It is 0 if no device is there, or if the peer may be on another host.
    pub(super) fn port_of(&self, peer: MadPeer) -> u64 {
        let core = self.device.lock();
        let node = match peer {
            MadPeer::Node(node) => Some(node),
            MadPeer::Host(gid) => core.fabric().and_then(|fabric| fabric.node_of_host(&gid)),
        };
        node.map_or(0, |node| core.port_of(node))
    }

    pub(super) fn gid(&self, peer: MadPeer) -> [u8; 16] {
        match peer {
            MadPeer::Node(node) => gid_of(self.port.link, node),
            MadPeer::Host(gid) => gid,
        }
    }

    /// Sends a message about no identifier.
    pub(super) fn send_to(&self, peer: MadPeer, transaction: u64, message: &CmMessage) {
        self.device.send_mad(peer, &message.encode(transaction));
    }

    /// Sends a message to the peer of an identifier. It is kept, to be sent again if it is lost, and repeated if `repeats`.
    pub(super) fn send(&mut self, handle: u32, message: &CmMessage, repeats: bool) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let mad = message.encode(id.exchange.transaction);
        id.exchange.sent = Some(Box::new(mad));
        id.exchange.repetitions = 0;
        if let Some(peer) = id.exchange.peer {
            self.device.send_mad(peer, &mad);
        }
        self.set_timer(handle, repeats.then_some(FIRST_REPETITION));
    }

    /// Sends the last message again.
    pub(super) fn send_again(&self, handle: u32) {
        if let Some(id) = self.ids.get(&handle)
            && let Some(mad) = &id.exchange.sent
            && let Some(peer) = id.exchange.peer
        {
            self.device.send_mad(peer, mad);
        }
    }

    /// Sends the last message again, and sets the time until the next time.
    pub(super) fn repeat(&mut self, handle: u32) {
        self.send_again(handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.exchange.repetitions += 1;
            let times = 1 << id.exchange.repetitions.min(8);
            let wait = (FIRST_REPETITION * times).min(LAST_REPETITION);
            self.set_timer(handle, Some(wait));
        }
    }

    /// Sets when [`CmTable::on_timer`](super::timers) is called for an identifier, or that it is not.
    pub(super) fn set_timer(&mut self, handle: u32, after: Option<Duration>) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let Some(before) = id.exchange.due.take() {
            self.timers.remove(&(before, handle));
        }
        id.exchange.due = after.map(|after| Instant::now() + after);
        if let Some(due) = id.exchange.due {
            self.timers.insert((due, handle));
        }
    }

    /// Sets how far the exchange is.
    pub(super) fn set_exchange(&mut self, handle: u32, state: ExchangeState) {
        if let Some(id) = self.ids.get_mut(&handle) {
            id.exchange.state = state;
        }
    }

    /// Sets how far an identifier is.
    pub(super) fn set_state(&mut self, handle: u32, state: IdState) {
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = state;
        }
    }

    /// Adds an event of an identifier. Events of one that its process has not named yet are lost, as in the kernel.
    pub(super) fn post(&mut self, handle: u32, kind: u32, status: i32, param: EventParam) {
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let Some(file) = id.file.filter(|_| id.user_handle != 0) else {
            return;
        };
        let response = CmEventResp {
            uid: id.user_handle,
            id: handle,
            event: kind,
            status: status as u32,
            param: param.bytes(),
            ..CmEventResp::default()
        };
        let event = QueuedCmEvent {
            owner: handle,
            request: None,
            group: None,
            response,
        };
        self.deliver(file, event);
    }

    /// Adds the event of a request, of the identifier `request`, to those of the one that listens. Whether there was room for it.
    pub(super) fn post_request(&mut self, listener: u32, request: u32, param: EventParam) -> bool {
        let Some(id) = self.ids.get_mut(&listener) else {
            return false;
        };
        let Some(file) = id.file.filter(|_| id.backlog > 0) else {
            return false;
        };
        id.backlog -= 1;
        let response = CmEventResp {
            uid: id.user_handle,
            id: request,
            event: event::CONNECT_REQUEST,
            param: param.bytes(),
            ..CmEventResp::default()
        };
        let event = QueuedCmEvent {
            owner: listener,
            request: Some(request),
            group: None,
            response,
        };
        self.deliver(file, event);
        true
    }

    pub(super) fn deliver(&mut self, key: FileKey, event: QueuedCmEvent) {
        if let Some(file) = self.files.get_mut(&key) {
            file.events.push_back(event);
        }
        self.serve_waiters(key);
    }

    /// Gives the events of a file to the calls that wait for them.
    pub(super) fn serve_waiters(&mut self, key: FileKey) {
        while let Some(file) = self.files.get_mut(&key)
            && let Some(first) = file.events.front()
            && let Some(waiter) = file.waiters.pop_front()
        {
            if !waiter.is_waiting() {
                continue;
            }
            if waiter.write(&first.response.to_bytes()) {
                self.take_event(key);
                waiter.finish(Ok(()));
            } else {
                waiter.finish(Err(libc::EFAULT));
            }
        }
        if let Some(file) = self.files.get_mut(&key) {
            file.settle();
        }
    }

    /// Takes the first event of a file, which its process has read.
    pub(super) fn take_event(&mut self, key: FileKey) {
        let Some(file) = self.files.get_mut(&key) else {
            return;
        };
        let event = file.events.pop_front();
        file.settle();
        let Some(event) = event else {
            return;
        };
        if let Some(request) = event.request.and_then(|it| self.ids.get_mut(&it)) {
            request.is_known = true;
        }
        if let Some(group) = event.group {
            self.groups.event_is_read(group);
        }
        if let Some(owner) = self.ids.get_mut(&event.owner) {
            owner.events_read += 1;
            owner.backlog += u32::from(event.request.is_some());
        }
    }

    /// Removes an identifier: how many of its events its process has read. What the peer has to know is sent before.
    pub(super) fn forget(&mut self, handle: u32) -> u32 {
        self.set_timer(handle, None);
        let Some(id) = self.ids.remove(&handle) else {
            return 0;
        };
        self.exchanges.remove(&id.exchange.local_id);
        self.groups.forget_id(handle);
        if let Some(peer) = id.exchange.peer {
            let remote = (peer, id.exchange.remote_guid, id.exchange.remote_qpn);
            if self.connections.get(&remote) == Some(&handle) {
                self.connections.remove(&remote);
            }
            for is_service in [false, true] {
                let key = (peer, id.exchange.remote_id, is_service);
                if self.requests.get(&key) == Some(&handle) {
                    self.requests.remove(&key);
                }
            }
        }
        if let Some(key) = id.bound {
            self.ports.release(key, handle);
        }
        self.free.insert(handle);
        id.events_read
    }

    /// The identifier that listens for a service at an address.
    pub(super) fn listener(&self, service: u64, at: Option<&SocketAddress>) -> Option<u32> {
        let space = u16::try_from(service >> 16).ok()?;
        let owners = self.ports.owners((space, service as u16)).iter();
        let hears = |handle: &&u32| {
            let id = self.ids.get(handle);
            id.is_some_and(|id| {
                id.state == IdState::Listen && id.service_of(&id.source) == service && id.hears(at)
            })
        };
        owners
            .copied()
            .collect::<Vec<_>>()
            .iter()
            .find(hears)
            .copied()
    }
}
