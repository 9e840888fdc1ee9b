//! The endpoints of a group: each made by whichever side comes first, and connected without the other application's help.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::endpoint::{AbortHandle, Address, Deadline, Endpoint, EndpointConfig};
use crate::group::client::{StoreClient, Watcher};
use crate::region::ProtectionDomain;
use crate::{Error, Result, StateKind};

/// How long the answer to a peer may take to be written.
const ANSWER: Duration = Duration::from_secs(10);

/// How many handles of endpoints are kept before any of them is looked at.
const ABORTS_MIN: usize = 64;

/// The state of the link with a peer.
#[derive(Debug)]
enum PeerState {
    /// Its address is not known yet; the peer knows ours.
    Offered(Endpoint),
    /// Connected on this side; of the other one it is not known.
    Connected(Endpoint),
    /// Connected on both sides, and not asked for yet.
    Ready(Endpoint),
    /// The endpoint was given to the application.
    Taken,
    /// It could not be connected.
    Failed(Error),
}

/// What ranks write to each other. On the wire: a byte for the kind, and the rest.
enum PeerMessage<'a> {
    /// Where the sender's endpoint is. The first of two lets the other side make its endpoint and answer.
    Address(Address),
    /// That endpoint is connected with the receiver's: it takes what comes.
    Connected,
    /// It could not be, and why.
    Refused(Cow<'a, str>),
}

impl<'a> PeerMessage<'a> {
    fn to_bytes(&self) -> Vec<u8> {
        match self {
            PeerMessage::Address(address) => [&[0], &address.to_bytes()[..]].concat(),
            PeerMessage::Connected => vec![1],
            PeerMessage::Refused(reason) => [&[2], reason.as_bytes()].concat(),
        }
    }

    fn from_bytes(bytes: &'a [u8]) -> Result<PeerMessage<'a>> {
        match bytes {
            [0, address @ ..] => Address::from_bytes(address).map(PeerMessage::Address),
            [1] => Ok(PeerMessage::Connected),
            [2, reason @ ..] => Ok(PeerMessage::Refused(String::from_utf8_lossy(reason))),
            _ => Err(Error::Malformed {
                what: "message between ranks",
                reason: format!("{} bytes are not a message of a rank", bytes.len()),
            }),
        }
    }
}

/// The endpoints to all peers. The application gets an endpoint when both sides are connected: a message to a queue pair that is not connected is
/// repeated only as often as the endpoint's configuration says, which may be never.
#[derive(Debug)]
pub(super) struct Mesh {
    domain: ProtectionDomain,
    config: EndpointConfig,
    state: Mutex<MeshState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MeshState {
    links: BTreeMap<u32, PeerState>,
    /// Of every endpoint, also of those that the application has. Some of them may be gone.
    aborts: Vec<AbortHandle>,
    /// With how many of them those that are gone are dropped: each keeps the memory of its endpoint.
    aborts_max: usize,
    /// The links that were opened: kind, peer and tag.
    tags: BTreeSet<(&'static str, u32, u64)>,
    /// The rank that has failed.
    failed: Option<u32>,
}

impl MeshState {
    fn abort_with_group(&mut self, abort: AbortHandle) {
        if let Some(rank) = self.failed {
            abort.abort_for_rank(rank);
        }
        if self.aborts.len() >= self.aborts_max {
            self.aborts.retain(AbortHandle::is_alive);
            // Twice as many, so that the cost for each endpoint does not grow with their number.
            self.aborts_max = (2 * self.aborts.len()).max(ABORTS_MIN);
        }
        self.aborts.push(abort);
    }
}

impl Mesh {
    pub(super) fn new(domain: &ProtectionDomain, config: &EndpointConfig) -> Mesh {
        Mesh {
            domain: domain.clone(),
            config: *config,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// One of the same domain and configuration.
    pub(super) fn emptied(&self) -> Mesh {
        Mesh::new(&self.domain, &self.config)
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    fn state(&self) -> MutexGuard<'_, MeshState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoint that is connected with `peer`, once.
    ///
    /// # Errors
    /// Those of making and connecting it on this side; [`Error::Timeout`] if the peer does not come; [`Error::Rank`].
    pub(super) fn take(
        &self,
        client: &StoreClient,
        peer: u32,
        timeout: Duration,
    ) -> Result<Endpoint> {
        let deadline = Deadline::new("connection with a rank of the group", timeout);
        let mut state = self.state();
        if !state.links.contains_key(&peer) {
            let endpoint = self.make(&mut state)?;
            let message = PeerMessage::Address(endpoint.address());
            // With the lock: the peer must have the address before it hears that this side is connected.
            client.send_to_rank(peer, &message.to_bytes(), &deadline)?;
            state.links.insert(peer, PeerState::Offered(endpoint));
        }
        loop {
            if let Some(failure) = client.failure() {
                return Err(failure);
            }
            match state.links.get_mut(&peer) {
                Some(link @ PeerState::Ready(_)) => {
                    if let PeerState::Ready(endpoint) = std::mem::replace(link, PeerState::Taken) {
                        return Ok(endpoint);
                    }
                }
                Some(PeerState::Failed(error)) => return Err(error.clone()),
                Some(PeerState::Taken) => {
                    return Err(Error::state(
                        StateKind::Taken,
                        "endpoint of the group",
                        format!("the endpoint to rank {peer} was taken before"),
                    ));
                }
                _ => {}
            }
            (state, _) = self
                .changed
                .wait_timeout(state, deadline.left()?)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes an endpoint that ends with the group.
    fn make(&self, state: &mut MeshState) -> Result<Endpoint> {
        let endpoint = Endpoint::new(&self.domain, &self.config)?;
        state.abort_with_group(endpoint.abort_handle());
        Ok(endpoint)
    }

    /// Has the failure of the group abort an endpoint.
    pub(super) fn abort_with_group(&self, abort: AbortHandle) {
        self.state().abort_with_group(abort);
    }

    /// Notes that a link of that kind is opened. Returns whether it was not before.
    pub(super) fn open_tag(&self, kind: &'static str, peer: u32, tag: u64) -> bool {
        self.state().tags.insert((kind, peer, tag))
    }

    /// Connects with the endpoint at an address, and says so there.
    fn connect(
        &self,
        state: &mut MeshState,
        client: &StoreClient,
        peer: u32,
        address: &Address,
    ) -> Result<Endpoint> {
        let (mut endpoint, is_known) = match state.links.remove(&peer) {
            Some(PeerState::Offered(endpoint)) => (endpoint, true),
            _ => (self.make(state)?, false),
        };
        endpoint.connect(address)?;
        if !is_known {
            answer(client, peer, &PeerMessage::Address(endpoint.address()))?;
        }
        answer(client, peer, &PeerMessage::Connected)?;
        Ok(endpoint)
    }

    /// What becomes of the link with a rank by its message; `None` if that says nothing new.
    fn read(
        &self,
        state: &mut MeshState,
        client: &StoreClient,
        peer: u32,
        message: Result<PeerMessage<'_>>,
    ) -> Option<PeerState> {
        let failed = |error: Error| {
            // It waits for an answer.
            let _ = answer(
                client,
                peer,
                &PeerMessage::Refused(error.to_string().into()),
            );
            PeerState::Failed(error)
        };
        match (message, state.links.get(&peer)) {
            (Ok(PeerMessage::Address(address)), None | Some(PeerState::Offered(_))) => {
                let connected = self.connect(state, client, peer, &address);
                Some(connected.map_or_else(failed, PeerState::Connected))
            }
            (Ok(PeerMessage::Connected), Some(PeerState::Connected(_))) => {
                match state.links.remove(&peer) {
                    Some(PeerState::Connected(endpoint)) => Some(PeerState::Ready(endpoint)),
                    other => other,
                }
            }
            (
                Ok(PeerMessage::Refused(reason)),
                None | Some(PeerState::Offered(_) | PeerState::Connected(_)),
            ) => Some(PeerState::Failed(Error::state(
                StateKind::Unreachable,
                "endpoint of the group",
                format!("rank {peer} could not connect: {reason}"),
            ))),
            (Err(error), None | Some(PeerState::Offered(_) | PeerState::Connected(_))) => {
                Some(failed(error))
            }
            // Each side says each once. More is of no use, and the endpoint that is there stays as it is.
            _ => None,
        }
    }
}

fn answer(client: &StoreClient, peer: u32, message: &PeerMessage<'_>) -> Result<()> {
    let deadline = Deadline::new("answer to a rank of the group", ANSWER);
    client.answer_rank(peer, &message.to_bytes(), &deadline)
}

/// The mesh as the store's reader sees it.
pub(super) struct MeshWatcher(pub(super) Arc<Mesh>);

impl Watcher for MeshWatcher {
    fn message(&self, client: &StoreClient, from: u32, bytes: &[u8]) {
        let mesh = &self.0;
        let mut state = mesh.state();
        if from == client.rank() {
            return;
        }
        let message = PeerMessage::from_bytes(bytes);
        if let Some(link) = mesh.read(&mut state, client, from, message) {
            state.links.insert(from, link);
        }
        drop(state);
        mesh.changed.notify_all();
    }

    fn failing(&self, _: &StoreClient, rank: u32) {
        let mut state = self.0.state();
        state.failed = Some(rank);
        for abort in &state.aborts {
            abort.abort_for_rank(rank);
        }
    }

    fn failed(&self, _: &StoreClient) {
        // A thread that holds the lock may have checked for the failure before it was recorded, and may not wait yet. So the lock is taken once
        // before the notification.
        drop(self.0.state());
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::message::Message;
    use crate::{Cause, Device};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn handles_of_dropped_endpoints_are_dropped_and_the_others_still_aborted() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let mut state = MeshState::default();
        let make = || Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let kept: Vec<_> = (0..3).map(|_| make()).collect();
        for endpoint in &kept {
            state.abort_with_group(endpoint.abort_handle());
        }
        for _ in 0..4 * ABORTS_MIN {
            state.abort_with_group(make().abort_handle());
        }
        assert!(state.aborts.len() <= ABORTS_MIN, "{}", state.aborts.len());
        for abort in &state.aborts {
            abort.abort_for_rank(2);
        }
        for endpoint in &kept {
            let failure = endpoint.failure().unwrap();
            assert_eq!(failure.cause, Cause::Rank(2));
        }
    }

    /// Twenty ranks offer endpoints, and then the store ends. Their messages are read before the end is, and none of them can be answered.
    #[test]
    fn the_end_of_the_store_is_noted_at_once_behind_messages_that_cannot_be_answered() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let config = EndpointConfig::default();
        let theirs = Endpoint::new(&domain, &config).unwrap();
        let offer = PeerMessage::Address(theirs.address()).to_bytes();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut store, _) = listener.accept().unwrap();
        for from in 2..22 {
            let delivery = Message::Delivery {
                from,
                bytes: &offer,
            };
            store.write_all(&delivery.to_bytes().unwrap()).unwrap();
        }
        drop(store);
        let client = StoreClient::new(1, 32, stream.try_clone().unwrap());
        let mesh = Arc::new(Mesh::new(&domain, &config));
        let begun = Instant::now();
        client.read(stream, &MeshWatcher(mesh));
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
        assert!(matches!(
            client.failure(),
            Some(Error::Rank { rank: 0, .. })
        ));
    }
}
