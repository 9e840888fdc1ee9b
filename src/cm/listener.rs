//! Waiting for peers at an address.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_sys::rdma_cm_event_type as Kind;

use super::connection::{CmConnection, REFUSAL_BYTES, check_len, peer_of};
use super::event::CmEvent;
use super::id::Id;
use crate::endpoint::{Deadline, Endpoint, resolve};
use crate::{Error, Result, StateKind};

/// Requests that wait to be taken.
const BACKLOG: i32 = 128;

/// Waits for peers that connect by rdma_cm: [`CmConnection::connect`], `rping`, or any other program.
#[derive(Debug)]
pub struct CmListener {
    id: Id,
}

impl CmListener {
    /// Listens at `address`, such as `10.9.0.1:7174`, or `0.0.0.0:7174` for all devices; port 0 picks a free one.
    ///
    /// # Errors
    /// [`Error::Malformed`] if `address` is not an address; [`Error::System`] naming the call: `rdma_bind_addr` with ENODEV for an
    /// address that no RDMA device has, `rdma_create_event_channel` where the system has no rdma_cm.
    pub fn bind(address: &str) -> Result<CmListener> {
        let address = resolve(address)?;
        let id = Id::new()?;
        id.listen(address, BACKLOG)?;
        Ok(CmListener { id })
    }

    /// The address that it listens at.
    ///
    /// # Errors
    /// [`Error::State`] if that is no IP address.
    pub fn address(&self) -> Result<SocketAddr> {
        self.id.local().ok_or_else(|| {
            Error::state(
                StateKind::Unexpected,
                "rdma_cm",
                "the listener has no IP address",
            )
        })
    }

    /// Waits for a request.
    ///
    /// # Errors
    /// [`Error::Timeout`] if none comes; [`Error::State`] if the device is gone; [`Error::System`].
    pub fn accept(&self, timeout: Duration) -> Result<CmRequest> {
        let deadline = Deadline::new("rdma_cm accept", timeout);
        loop {
            match self.id.next(&deadline)? {
                (event, Some(id)) => return Ok(CmRequest { id, event }),
                (event, None) if event.kind == Kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    return Err(Error::state(
                        StateKind::DeviceGone,
                        "rdma_cm accept",
                        "the device was removed",
                    ));
                }
                // Of a request whose peer went away before it was taken.
                _ => {}
            }
        }
    }
}

/// A connection request of a peer. Dropping it refuses the request.
#[derive(Debug)]
pub struct CmRequest {
    id: Id,
    event: CmEvent,
}

impl CmRequest {
    /// The private data of the request. The messages have a fixed length, so the data is padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.event.private_data
    }

    /// The peer's address.
    ///
    /// # Errors
    /// [`Error::State`] if that is no IP address.
    pub fn peer(&self) -> Result<SocketAddr> {
        peer_of(&self.id)
    }

    /// The name of the device that it came in by: the endpoint must be on it.
    pub fn device(&self) -> Option<String> {
        self.id.place().map(|(device, _)| device)
    }

    /// Accepts the request: the endpoint is connected with the peer's, and up to 196 bytes of private data go with the answer. The
    /// peer's first messages may come before this returns, so post receives before the call.
    ///
    /// # Errors
    /// [`Error::Foreign`] if the endpoint is on another device or port than the request came in by, and [`Error::Range`],
    /// [`Error::State`] if the private data is longer or the endpoint is connected or has failed: the request is refused then.
    /// [`Error::Timeout`], [`Error::Refused`] or [`Error::State`] if the peer has ended the connection meanwhile, and [`Error::System`]:
    /// the endpoint has failed then.
    pub fn accept(
        self,
        endpoint: &mut Endpoint,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<CmConnection> {
        CmConnection::accept(self.id, endpoint, &self.event, private_data, timeout)
    }

    /// Refuses it, with up to 148 bytes of private data.
    ///
    /// # Errors
    /// [`Error::Range`] for longer private data; [`Error::System`].
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        check_len(private_data, REFUSAL_BYTES)?;
        self.id.reject(private_data)
    }
}
