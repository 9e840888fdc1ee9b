//! Commands as processes write them, between devices of one fabric.

mod connections;
mod exchanges;
mod groups;
mod hostile;
mod refusals;

use std::cell::Cell;
use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::address::SocketAddress;
use super::commands::{CmAnswer, CmCaller};
use super::event_file::EventWaiter;
use super::mad::CmMessage;
use super::{ConnectionManager, OpenedFile};
use crate::device::client::Errno;
use crate::device::management::MadPeer;
use crate::device::space::Space;
use crate::device::{Device, DeviceOptions, Faults, LinkLayer, WireKind};
use crate::doors::abi::*;

/// Commands by their numbers in `rdma_user_cm.h`.
const CREATE_ID: u32 = 0;
const DESTROY_ID: u32 = 1;
const RESOLVE_ROUTE: u32 = 4;
const CONNECT: u32 = 6;
const LISTEN: u32 = 7;
const ACCEPT: u32 = 8;
const REJECT: u32 = 9;
const DISCONNECT: u32 = 10;
const INIT_QP_ATTR: u32 = 11;
const GET_EVENT: u32 = 12;
const SET_OPTION: u32 = 14;
const NOTIFY: u32 = 15;
const MIGRATE_ID: u32 = 18;
const BIND: u32 = 20;
const RESOLVE_ADDR: u32 = 21;
const JOIN_MCAST: u32 = 22;
const JOIN_IP_MCAST: u32 = 16;
const LEAVE_MCAST: u32 = 17;

/// Events.
const ADDR_RESOLVED: u32 = 0;
const ADDR_ERROR: u32 = 1;
const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const MULTICAST_JOIN: u32 = 12;
const TIMEWAIT_EXIT: u32 = 15;

const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;
const SOON: Duration = Duration::from_secs(20);

/// A fabric of its own for each test.
fn fabric() -> DeviceOptions {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    DeviceOptions {
        fabric: format!("cm-{}-{count}", std::process::id()),
        ..DeviceOptions::default()
    }
}

/// A fabric of each link, one whose devices are connected by UDP, and one whose devices have addresses and memory.
fn fabrics() -> [DeviceOptions; 4] {
    let of = |link, wire| DeviceOptions {
        link,
        wire,
        ..fabric()
    };
    [
        of(LinkLayer::InfiniBand, WireKind::SharedMemory),
        of(LinkLayer::Ethernet, WireKind::SharedMemory),
        of(LinkLayer::Ethernet, WireKind::Udp(None)),
        of(LinkLayer::Ethernet, WireKind::UdpAndMemory(None)),
    ]
}

/// A process with an open file, on a device of its own.
struct Host {
    manager: ConnectionManager,
    device: Device,
    opened: OpenedFile,
    next_uid: Cell<u64>,
}

impl CmCaller for Host {
    fn space(&self) -> Space {
        Space::LOCAL
    }

    fn is_nonblocking(&self) -> bool {
        true
    }

    fn inode(&self, _: i32) -> Option<(u64, u64)> {
        Some(self.opened.inode)
    }

    fn waiter(&self, _: u64, _: usize) -> Option<Box<dyn EventWaiter>> {
        None
    }
}

impl Host {
    fn on(options: &DeviceOptions) -> Host {
        let device = Device::on_fabric(options).unwrap();
        let manager = ConnectionManager::start(&device).unwrap();
        let opened = manager.open().unwrap();
        Host {
            manager,
            device,
            opened,
            next_uid: Cell::new(100),
        }
    }

    fn with_loss(options: &DeviceOptions, loss: f64, seed: u64) -> Host {
        let faults = Faults {
            loss,
            seed,
            ..options.faults
        };
        Host::on(&DeviceOptions {
            faults,
            ..options.clone()
        })
    }

    fn write(&self, bytes: &[u8]) -> Result<CmAnswer, Errno> {
        let at = bytes.as_ptr().expose_provenance() as u64;
        let inode = self.opened.inode;
        self.manager.write(inode, self, at, bytes.len() as u64)
    }

    fn command<T: Layout>(&self, number: u32, request: T, room: usize) -> Result<(), Errno> {
        let request = request.to_bytes();
        let header = CmHeader {
            cmd: number,
            r#in: request.len() as u16,
            out: room as u16,
        };
        let bytes = [header.to_bytes(), request].concat();
        self.write(&bytes)
            .map(|answer| assert_eq!(answer, CmAnswer::Done))
    }

    /// A command with an answer: `request` gets the address of the place for it.
    fn ask<T: Layout, A: Layout>(
        &self,
        number: u32,
        request: impl FnOnce(u64) -> T,
    ) -> Result<A, Errno> {
        let mut answer = vec![0_u8; A::BYTES];
        let at = answer.as_mut_ptr().expose_provenance() as u64;
        self.command(number, request(at), A::BYTES)?;
        Ok(A::read(&answer))
    }

    fn create(&self, ps: u16) -> u32 {
        let uid = self.next_uid.get();
        self.next_uid.set(uid + 1);
        let made: CmCreateIdResp = self
            .ask(CREATE_ID, |response| CmCreateId {
                uid,
                response,
                ps,
                ..CmCreateId::default()
            })
            .unwrap();
        made.id
    }

    /// How many events of it were read.
    fn destroy(&self, id: u32) -> Result<u32, Errno> {
        let request = |response| CmDestroyId {
            response,
            id,
            reserved: 0,
        };
        let destroyed: CmDestroyIdResp = self.ask(DESTROY_ID, request)?;
        Ok(destroyed.events_reported)
    }

    fn bind(&self, id: u32, ip: &str, port: u16) -> Result<(), Errno> {
        let address = SocketAddress::of_ip(ip.parse().unwrap(), port);
        let request = CmBind {
            id,
            addr_size: address.len_bytes(),
            reserved: 0,
            addr: address.bytes(),
        };
        self.command(BIND, request, 0)
    }

    /// `RDMA_OPTION_ID_AFONLY`.
    fn keep_to_family(&self, id: u32, only: u32) {
        let request = CmSetOption {
            optval: (&raw const only).expose_provenance() as u64,
            id,
            level: 0,
            optname: 2,
            optlen: 4,
        };
        self.command(SET_OPTION, request, 0).unwrap();
    }

    fn listen(&self, ps: u16, port: u16, backlog: u32) -> u32 {
        let id = self.create(ps);
        self.bind(id, "0.0.0.0", port).unwrap();
        self.command(LISTEN, CmListen { id, backlog }, 0).unwrap();
        id
    }

    fn resolve(&self, id: u32, ip: &str, port: u16) -> Result<(), Errno> {
        let address = SocketAddress::of_ip(ip.parse().unwrap(), port);
        let request = CmResolveAddr {
            id,
            timeout_ms: 1000,
            dst_size: address.len_bytes(),
            dst_addr: address.bytes(),
            ..CmResolveAddr::default()
        };
        self.command(RESOLVE_ADDR, request, 0)
    }

    /// An identifier whose route is known.
    fn routed(&self, ps: u16, ip: &str, port: u16) -> u32 {
        let id = self.create(ps);
        self.resolve(id, ip, port).unwrap();
        self.expect(ADDR_RESOLVED, id);
        let request = CmResolveRoute { id, timeout_ms: 0 };
        self.command(RESOLVE_ROUTE, request, 0).unwrap();
        self.expect(ROUTE_RESOLVED, id);
        id
    }

    fn connect(&self, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        let request = CmConnect {
            conn_param: param(asking_qpn(id), private_data),
            id,
            ..CmConnect::default()
        };
        self.command(CONNECT, request, 0)
    }

    fn accept(&self, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        let uid = self.next_uid.get();
        self.next_uid.set(uid + 1);
        let request = CmAccept {
            uid,
            conn_param: param(accepting_qpn(id), private_data),
            id,
            ..CmAccept::default()
        };
        self.command(ACCEPT, request, 0)
    }

    /// What librdmacm does with a reply.
    fn take_reply(&self, id: u32) -> Result<(), Errno> {
        let request = CmAccept {
            id,
            ..CmAccept::default()
        };
        self.command(ACCEPT, request, 0)
    }

    fn reject(&self, id: u32, reason: u8, private_data: &[u8]) -> Result<(), Errno> {
        let mut request = CmReject {
            id,
            reason,
            private_data_len: private_data.len() as u8,
            ..CmReject::default()
        };
        request.private_data[..private_data.len()].copy_from_slice(private_data);
        self.command(REJECT, request, 0)
    }

    fn disconnect(&self, id: u32) -> Result<(), Errno> {
        self.command(DISCONNECT, CmDisconnect { id }, 0)
    }

    fn try_event(&self) -> Result<CmEventResp, Errno> {
        self.ask(GET_EVENT, |response| CmGetEvent { response })
    }

    fn event(&self) -> CmEventResp {
        let started = Instant::now();
        loop {
            match self.try_event() {
                Ok(event) => return event,
                Err(libc::EAGAIN) if started.elapsed() < SOON => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(errno) => panic!("no event: {errno}"),
            }
        }
    }

    /// The next event, which is of that kind and about that identifier.
    fn expect(&self, kind: u32, id: u32) -> CmEventResp {
        let event = self.event();
        assert_eq!(
            (event.event, event.id),
            (kind, id),
            "{}",
            event.status as i32
        );
        event
    }

    /// The next event, a request: its identifier, and the event.
    fn request(&self) -> (u32, CmEventResp) {
        let event = self.event();
        assert_eq!(event.event, CONNECT_REQUEST);
        (event.id, event)
    }

    fn attributes(&self, id: u32, qp_state: u32) -> Result<CmQpAttr, Errno> {
        self.ask(INIT_QP_ATTR, |response| CmInitQpAttr {
            response,
            id,
            qp_state,
        })
    }

    /// The starting PSN of the request that an identifier has sent.
    fn sent_psn(&self, id: u32) -> u32 {
        let table = self.manager.shared.lock();
        let sent = table.ids[&id].exchange.sent.as_deref();
        match sent.and_then(CmMessage::parse) {
            Some((_, CmMessage::Request(request))) => request.psn,
            other => panic!("{other:?}"),
        }
    }

    /// The address of its device.
    fn ip(&self) -> String {
        ip_of(&self.device)
    }
}

fn ip_of(device: &Device) -> String {
    match device.mad_port() {
        MadPeer::Node(node) => format!("127.0.0.{node}"),
        MadPeer::Host(gid) => Ipv6Addr::from(gid).to_canonical().to_string(),
    }
}

/// The queue pairs that identifiers ask and accept with. No two of a process have the same number.
fn asking_qpn(id: u32) -> u32 {
    0x1200 + id
}

fn accepting_qpn(id: u32) -> u32 {
    0x4300 + id
}

fn param(qp_num: u32, private_data: &[u8]) -> CmConnParam {
    let mut param = CmConnParam {
        qp_num,
        private_data_len: private_data.len() as u8,
        responder_resources: 3,
        initiator_depth: 5,
        retry_count: 7,
        rnr_retry_count: 6,
        valid: 1,
        ..CmConnParam::default()
    };
    param.private_data[..private_data.len()].copy_from_slice(private_data);
    param
}

fn connection_of(event: &CmEventResp) -> CmConnParam {
    CmConnParam::read(&event.param)
}

fn datagram_of(event: &CmEventResp) -> CmUdParam {
    CmUdParam::read(&event.param)
}

/// A connection: its identifiers at the client and at the server.
fn connected(client: &Host, server: &Host, ip: &str, port: u16) -> (u32, u32) {
    let id = client.routed(TCP, ip, port);
    client.connect(id, b"").unwrap();
    let (accepted, _) = server.request();
    server.accept(accepted, b"").unwrap();
    client.expect(CONNECT_RESPONSE, id);
    client.take_reply(id).unwrap();
    server.expect(ESTABLISHED, accepted);
    (id, accepted)
}
