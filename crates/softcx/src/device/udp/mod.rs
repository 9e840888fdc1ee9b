//! The wire between hosts: RoCE v2 on UDP sockets, without privileges.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the sockets of a device: one for what arrives, some for what leaves |
//! | `socket.rs` | system calls on sockets |
//! | `inbound.rs`, `outbound.rs` | datagrams that have arrived and that are to leave, many with one system call |
//! | `backlog.rs` | what a device of this host has not read |
//! | `interface.rs` | the network interface of the address |
//! | `watcher.rs` | the thread that waits for datagrams |

mod backlog;
mod inbound;
mod interface;
mod outbound;
mod socket;
pub(super) mod watcher;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use self::backlog::PeerBacklog;
pub(crate) use self::inbound::{Arrivals, UdpArrival};
pub(crate) use self::interface::UdpInterface;
pub(crate) use self::outbound::Departures;
#[cfg(test)]
pub(crate) use self::socket::mark_congested;
use self::socket::{bind, bind_sender, duplicate};
use crate::device::roce::{ROCE_PORT, gid_of_address};
use crate::{Error, Result, StateKind};

/// Sockets that frames leave by. Each has a port of its own, so that switches can tell the flows of queue pairs apart.
const FLOWS: u16 = 4;
/// The ports that RoCE v2 sends from begin here.
const FIRST_FLOW_PORT: u16 = 0xc000;
/// Ports that are tried for each of them, before the kernel chooses one.
const FLOW_PORTS: u16 = 64;

/// The sockets of a device.
#[derive(Debug)]
pub(crate) struct UdpWire {
    /// At port [`ROCE_PORT`].
    socket: OwnedFd,
    pub(crate) gid: [u8; 16],
    pub(crate) interface: UdpInterface,
    pub(crate) arrivals: Arrivals,
    pub(crate) departures: Departures,
    pub(crate) backlog: PeerBacklog,
}

/// The loopback addresses of a device with this number, the one of its number first.
fn own_addresses(node: u16) -> impl Iterator<Item = IpAddr> {
    (0..=255).map(move |net| Ipv4Addr::new(127, 0, net, node.clamp(1, 254) as u8).into())
}

impl UdpWire {
    /// Binds the sockets of a device to an address; without one, to a free one of 127.0.0.0/16 that has the number of the device.
    ///
    /// # Errors
    /// [`Error::State`] if the address is in use, is not an address of this host, or is one that RoCE cannot use; [`Error::System`] if the kernel
    /// refuses a socket.
    pub(crate) fn bind(address: Option<IpAddr>, node: u16) -> Result<UdpWire> {
        let (socket, address) = match address {
            Some(address) => (bind_at(address)?, address),
            None => bind_to_any(own_addresses(node))?,
        };
        let flows = (0..FLOWS).map(|flow| flow_socket(address, flow));
        Ok(UdpWire {
            socket,
            gid: gid_of_address(address),
            interface: UdpInterface::of(address),
            arrivals: Arrivals::new(),
            departures: Departures::new(flows.collect::<Result<_>>()?),
            backlog: PeerBacklog::default(),
        })
    }

    /// Another descriptor of the socket that frames arrive at.
    pub(crate) fn watched(&self) -> Result<OwnedFd> {
        duplicate(&self.socket).map_err(|error| system("duplicate of a socket", &error))
    }

    /// Takes what has arrived, up to a batch. Returns the number of frames, and whether there may be more.
    pub(crate) fn receive(&mut self) -> (usize, bool) {
        self.arrivals.receive(&self.socket)
    }
}

fn system(operation: &'static str, error: &io::Error) -> Error {
    Error::System {
        operation,
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}

fn bind_at(address: IpAddr) -> Result<OwnedFd> {
    let refuse = |kind, reason: String| Err(Error::state(kind, "open of the UDP wire", reason));
    if address.is_unspecified() || address.is_multicast() || is_link_local(&address) {
        return refuse(
            StateKind::Unsupported,
            format!("{address} cannot be the address of a port: it does not name one interface"),
        );
    }
    match bind(address, ROCE_PORT) {
        Ok(socket) => Ok(socket),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => refuse(
            StateKind::Exhausted,
            format!(
                "UDP port {ROCE_PORT} of {address} is in use; every device needs an address of its own, and the kernel's SoftRoCE takes the port of all addresses"
            ),
        ),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => refuse(
            StateKind::NotFound,
            format!("{address} is not an address of this host"),
        ),
        Err(error) => Err(system("bind of the UDP wire", &error)),
    }
}

/// IPv6 addresses that need an interface beside them.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn bind_to_any(addresses: impl Iterator<Item = IpAddr>) -> Result<(OwnedFd, IpAddr)> {
    let mut last = None;
    for address in addresses {
        match bind_at(address) {
            Ok(socket) => return Ok((socket, address)),
            Err(
                error @ Error::State {
                    kind: StateKind::Exhausted,
                    ..
                },
            ) => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| {
        Error::state(
            StateKind::Exhausted,
            "open of the UDP wire",
            "there is no address left",
        )
    }))
}

/// A socket to send from, and its port.
fn flow_socket(address: IpAddr, flow: u16) -> Result<(OwnedFd, u16)> {
    let first = FIRST_FLOW_PORT + flow * FLOW_PORTS;
    for port in first..first + FLOW_PORTS {
        if let Ok(socket) = bind_sender(address, port) {
            return Ok((socket, port));
        }
    }
    let any = bind_sender(address, 0).and_then(|socket| Ok((socket::port_of(&socket)?, socket)));
    match any {
        Ok((port, socket)) => Ok((socket, port)),
        Err(error) => Err(system("bind of the UDP wire", &error)),
    }
}
