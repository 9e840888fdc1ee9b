//! A connection that rdma_cm made.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_sys::rdma_cm_event_type as Kind;

use super::event::CmEvent;
use super::id::{Id, Offer};
use crate::endpoint::{ConnectedGeneration, Deadline, Endpoint, resolve};
use crate::{Cause, Error, Result, StateKind};

/// Bytes of private data that a request, an answer and a refusal carry: the size in InfiniBand's messages, and for the request,
/// what the IP addresses leave of it (rdma_connect(3), rdma_accept(3), rdma_reject(3)).
const REQUEST_BYTES: usize = 56;
const ANSWER_BYTES: usize = 196;
pub(super) const REFUSAL_BYTES: usize = 148;

/// The connection of an endpoint with a peer that rdma_cm found at an address. It and the endpoint belong together: dropping it
/// disconnects, and fails the endpoint, which can be reset and connected anew.
///
/// The path's MTU, the PSNs, and the repetitions that the peer asks for are those that rdma_cm agrees on; the rest of the endpoint's
/// configuration holds as it does for [`Endpoint::connect`].
#[derive(Debug)]
#[must_use = "dropping a connection disconnects"]
pub struct CmConnection {
    id: Id,
    generation: ConnectedGeneration,
    peer: SocketAddr,
    private_data: Vec<u8>,
    ended: Option<&'static str>,
}

impl CmConnection {
    /// Connects `endpoint` to the process that listens at `address`, such as `10.9.0.1:7174`. If none listens yet, tries again until
    /// `timeout`. Up to 56 bytes of private data go with the request.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the way to that address begins at another device or port than the endpoint's; [`Error::Refused`] with the
    /// peer's private data if the peer refuses, or if no process listened within `timeout`; [`Error::Timeout`] if nothing answers;
    /// [`Error::State`] if the endpoint is connected or has failed, or if no RDMA device has a route to the address; [`Error::Range`]
    /// for longer private data; [`Error::Work`] if the endpoint is aborted meanwhile; [`Error::Malformed`] if `address` is not an address; [`Error::System`], also where the system has no
    /// rdma_cm. If the endpoint's steps had begun, it has failed then.
    pub fn connect(
        endpoint: &mut Endpoint,
        address: &str,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<CmConnection> {
        check_len(private_data, REQUEST_BYTES)?;
        endpoint.check_unconnected()?;
        let deadline = Deadline::new("rdma_cm connect", timeout);
        let peer = resolve(address)?;
        let mut refused = None;
        loop {
            endpoint.check_alive()?;
            match request(endpoint, peer, private_data, &deadline) {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(event)) if event.is_passing() && deadline.nap().is_ok() => {
                    refused = Some(not_connected(&event, peer));
                }
                Ok(Err(event)) => return Err(not_connected(&event, peer)),
                // One more try that came to no end says less than those before it.
                Err(passed @ Error::Timeout { .. }) => return Err(refused.unwrap_or(passed)),
                Err(error) => return Err(error),
            }
        }
    }

    /// The side that accepts: steps first, because the peer may send as soon as it has the answer.
    pub(super) fn accept(
        id: Id,
        endpoint: &mut Endpoint,
        request: &CmEvent,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<CmConnection> {
        check_len(private_data, ANSWER_BYTES)?;
        endpoint.check_unconnected()?;
        check_place(&id, endpoint)?;
        let deadline = Deadline::new("rdma_cm accept", timeout);
        let peer = peer_of(&id)?;
        let config = *endpoint.config();
        // No more than the peer has for it, on either side.
        let (serves, has) = endpoint.reads();
        let (serves, has) = (
            request.responder_resources.min(serves),
            request.initiator_depth.min(has),
        );
        let generation = endpoint.connect_by(&|state| {
            let mut step = id.step(state)?;
            step.attr.max_dest_rd_atomic = serves;
            step.attr.max_rd_atomic = has;
            Ok(step)
        })?;
        // From here on a failure ends the generation of the endpoint, by its drop.
        let mut connection = CmConnection {
            id,
            generation,
            peer,
            private_data: request.private_data.clone(),
            ended: None,
        };
        connection.id.accept(&Offer {
            qpn: endpoint.qpn(),
            private_data,
            responder_resources: serves,
            initiator_depth: has,
            retry_count: config.retry_count,
            rnr_retry: config.rnr_retry,
        })?;
        let (event, _) = connection.id.next_for(&deadline, Some(endpoint))?;
        if event.kind == Kind::RDMA_CM_EVENT_ESTABLISHED {
            return Ok(connection);
        }
        connection.ended = event.ends();
        Err(not_connected(&event, peer))
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The private data of the peer's request or answer. The messages have a fixed length, so the data is padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Checks, without waiting, whether the connection still exists.
    ///
    /// # Errors
    /// [`Error::State`] once the peer has disconnected or has died, or this side's device is gone. The endpoint has failed then, as by
    /// an error of its queue pair, and every wait for it ends.
    pub fn check(&mut self) -> Result<()> {
        while self.ended.is_none() {
            match self.id.poll()? {
                Some((event, _)) => self.take(&event),
                None => return Ok(()),
            }
        }
        Err(self.over())
    }

    /// Disconnects, and waits until the peer agrees. A drop sends the message only once and does not wait; this sends it again if it gets
    /// lost. When both sides have called this, nothing is in flight any more. The endpoint fails.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the peer does not answer; [`Error::System`].
    pub fn disconnect(mut self, timeout: Duration) -> Result<()> {
        self.generation.end(Cause::Aborted);
        if self.ended.is_none() {
            self.id.disconnect()?;
        }
        self.wait_disconnected(timeout)
    }

    /// Waits until the peer disconnects.
    ///
    /// # Errors
    /// [`Error::Timeout`] if it does not.
    pub fn wait_disconnected(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::new("wait for a disconnect", timeout);
        while self.ended.is_none() {
            let (event, _) = self.id.next(&deadline)?;
            self.take(&event);
        }
        Ok(())
    }

    fn take(&mut self, event: &CmEvent) {
        if let Some(how) = event.ends() {
            self.ended = Some(how);
            self.generation.end(Cause::QueuePair);
            // The answer that the peer waits for, if it was the one to begin.
            let _ = self.id.disconnect();
        }
    }

    fn over(&self) -> Error {
        Error::state(
            StateKind::Disconnected,
            "rdma_cm",
            format!(
                "{} {}",
                self.peer,
                self.ended.unwrap_or("is still connected")
            ),
        )
    }
}

impl Drop for CmConnection {
    fn drop(&mut self) {
        self.generation.end(Cause::Aborted);
        if self.ended.is_none() {
            // Destroying the rdma_cm_id, which follows, also disconnects.
            let _ = self.id.disconnect();
        }
    }
}

/// Asks the peer once. Whether there is a connection, or what came instead of one.
fn request(
    endpoint: &mut Endpoint,
    peer: SocketAddr,
    private_data: &[u8],
    deadline: &Deadline,
) -> Result<Result<CmConnection, CmEvent>> {
    let id = Id::new()?;
    way(&id, peer, deadline, endpoint)?;
    check_place(&id, endpoint)?;
    let config = *endpoint.config();
    let (serves, has) = endpoint.reads();
    id.connect(&Offer {
        qpn: endpoint.qpn(),
        private_data,
        responder_resources: serves,
        initiator_depth: has,
        retry_count: config.retry_count,
        rnr_retry: config.rnr_retry,
    })?;
    let (event, _) = id.next_for(deadline, Some(endpoint))?;
    if event.kind != Kind::RDMA_CM_EVENT_CONNECT_RESPONSE {
        return Ok(Err(event));
    }
    let generation = endpoint.connect_by(&|state| id.step(state))?;
    let connection = CmConnection {
        id,
        generation,
        peer,
        private_data: event.private_data,
        ended: None,
    };
    connection.id.establish()?;
    Ok(Ok(connection))
}

/// Finds the route to the peer.
fn way(id: &Id, peer: SocketAddr, deadline: &Deadline, endpoint: &Endpoint) -> Result<()> {
    let no_way = |operation: &'static str, errno: i32| {
        Error::state(
            StateKind::Unreachable,
            operation,
            format!(
                "no RDMA device has a route to {peer}: {}",
                std::io::Error::from_raw_os_error(errno)
            ),
        )
    };
    let resolved = |operation: &'static str, asked: Result<()>, expected: Kind::Type| {
        match asked {
            Err(Error::System { errno, .. }) => return Err(no_way(operation, errno)),
            asked => asked?,
        }
        match id.next_for(deadline, Some(endpoint))? {
            (event, _) if event.kind == expected => Ok(()),
            (event, _) if event.status == -libc::ETIMEDOUT => Err(deadline.passed()),
            (event, _) => Err(no_way(operation, event.status.saturating_neg())),
        }
    };
    resolved(
        "rdma_resolve_addr",
        id.resolve_address(peer, deadline.left()?),
        Kind::RDMA_CM_EVENT_ADDR_RESOLVED,
    )?;
    resolved(
        "rdma_resolve_route",
        id.resolve_route(deadline.left()?),
        Kind::RDMA_CM_EVENT_ROUTE_RESOLVED,
    )
}

/// Fails unless the endpoint is on the device and port that the connection would go through.
fn check_place(id: &Id, endpoint: &Endpoint) -> Result<()> {
    let name = |place: Option<(String, u8)>| match place {
        Some((device, port)) => format!("port {port} of {device}"),
        None => "no device of the system".into(),
    };
    let needed = id.place();
    let own = endpoint.place();
    if own.is_some() && own == needed {
        return Ok(());
    }
    let local = id.local().map_or_else(String::new, |address| {
        format!(", which {} is on", address.ip())
    });
    Err(Error::Foreign {
        argument: "endpoint",
        found: name(own),
        expected: name(needed) + &local,
    })
}

pub(super) fn peer_of(id: &Id) -> Result<SocketAddr> {
    id.peer().ok_or_else(|| {
        Error::state(
            StateKind::Unexpected,
            "rdma_cm",
            "the peer has no IP address",
        )
    })
}

pub(super) fn check_len(private_data: &[u8], max: usize) -> Result<()> {
    if private_data.len() <= max {
        return Ok(());
    }
    Err(Error::Range {
        argument: "private_data",
        value: private_data.len() as u64,
        min: 0,
        max: max as u64,
    })
}

/// The meaning of an event that is not the awaited one.
fn not_connected(event: &CmEvent, peer: SocketAddr) -> Error {
    match event.kind {
        Kind::RDMA_CM_EVENT_REJECTED => Error::Refused {
            peer: peer.to_string(),
            reason: event.refusal(),
            private_data: event.private_data.clone(),
        },
        _ => Error::state(
            StateKind::Unreachable,
            "rdma_cm",
            format!("no connection with {peer}: {}", event.name()),
        ),
    }
}
