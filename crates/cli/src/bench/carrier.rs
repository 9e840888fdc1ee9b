//! What carries the messages of a peer: an endpoint, with one operation for each, or a message queue.

use std::time::Duration;

use doorbell::{
    Address, Endpoint, EndpointConfig, Error, MessageAddress, MessageConfig, MessageQueue,
    PathReport, ProtectionDomain, Region, RemoteRegion, Result, StateKind, WorkError,
};

use super::options::{MessageOp, Plan};

/// The carrier of one peer.
pub enum Carrier {
    /// Writes to the peer's memory, or sends to receives that the peer has posted.
    Endpoint(Box<Endpoint>),
    /// Sends messages that the peer receives.
    Queue(Box<MessageQueue>),
}

impl Carrier {
    /// A carrier that is not connected, for the messages of a plan. Its waits on streams end after `timeout`.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(domain: &ProtectionDomain, plan: &Plan, timeout: Duration) -> Result<Carrier> {
        // The plan's limits keep this below the limit of endpoints and queues.
        let depth = (plan.in_flight() + 2 * plan.steps) as u32;
        let config = EndpointConfig::default().wait_timeout(Some(timeout));
        if plan.op == MessageOp::Message {
            let config = MessageConfig::default()
                .eager_bytes(plan.eager_bytes())
                .ahead(depth)
                .endpoint(config);
            return MessageQueue::new(domain, &config).map(|queue| Carrier::Queue(Box::new(queue)));
        }
        let config = config
            .send_depth(depth)
            .recv_depth(depth)
            .max_segments(1)
            .max_inline_bytes(0);
        Endpoint::new(domain, &config).map(|endpoint| Carrier::Endpoint(Box::new(endpoint)))
    }

    /// What the other peer needs to connect. `region` is where its messages arrive.
    pub fn contact(&self, region: &Region) -> Vec<u8> {
        match self {
            Carrier::Endpoint(endpoint) => {
                let (address, region) = (endpoint.address(), region.remote());
                [&address.to_bytes()[..], &region.to_bytes()].concat()
            }
            Carrier::Queue(queue) => queue.address().to_bytes().to_vec(),
        }
    }

    /// Connects to the peer of that contact. Returns where this peer's messages arrive, if the carrier needs to know.
    ///
    /// # Errors
    /// [`Error::Malformed`] for other bytes, and those of the library.
    pub fn connect(&mut self, contact: &[u8]) -> Result<Option<RemoteRegion>> {
        match self {
            Carrier::Endpoint(endpoint) => {
                let malformed = || Error::Malformed {
                    what: "the contact of the other peer",
                    reason: format!("{} bytes", contact.len()),
                };
                let (address, region) = contact
                    .split_at_checked(Address::BYTES)
                    .ok_or_else(malformed)?;
                let region = region.try_into().map_err(|_| malformed())?;
                endpoint.connect(&Address::from_bytes(address)?)?;
                Ok(Some(RemoteRegion::from_bytes(region)))
            }
            Carrier::Queue(queue) => {
                queue.connect(&MessageAddress::from_bytes(contact)?)?;
                Ok(None)
            }
        }
    }

    /// Which component rings the NIC, and why no better one.
    pub fn path(&self) -> PathReport {
        match self {
            Carrier::Endpoint(endpoint) => endpoint.path(),
            Carrier::Queue(queue) => queue.path(),
        }
    }

    /// Name of the device.
    pub fn device_name(&self) -> &str {
        match self {
            Carrier::Endpoint(endpoint) => endpoint.domain().device().name(),
            Carrier::Queue(queue) => queue.domain().device().name(),
        }
    }

    /// Why the connection has failed, if it has.
    pub fn failure(&self) -> Option<WorkError> {
        match self {
            Carrier::Endpoint(endpoint) => endpoint.failure(),
            Carrier::Queue(queue) => queue.failure(),
        }
    }

    /// Ends all waits.
    pub fn abort(&self) {
        match self {
            Carrier::Endpoint(endpoint) => endpoint.abort(),
            Carrier::Queue(queue) => queue.abort_handle().abort(),
        }
    }

    /// The endpoint, for operations that a message queue does not have. The plan has refused them for messages.
    ///
    /// # Errors
    /// [`Error::State`] for a message queue.
    pub fn endpoint(&mut self) -> Result<&mut Endpoint> {
        match self {
            Carrier::Endpoint(endpoint) => Ok(endpoint),
            Carrier::Queue(_) => Err(Error::state(
                StateKind::Unsupported,
                "bench",
                "a message queue has neither writes nor plain sends",
            )),
        }
    }
}
