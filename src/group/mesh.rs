//! The endpoints of a group: each made by whichever side comes first, and connected without the other application's help.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::endpoint::{AbortHandle, Address, Deadline, Endpoint, EndpointConfig};
use crate::group::client::{Client, Watcher};
use crate::region::ProtectionDomain;
use crate::{Error, Result};

/// How long the answer to a peer may take to be written.
const ANSWER: Duration = Duration::from_secs(10);

/// What there is for a peer.
#[derive(Debug)]
enum Link {
    /// Its address is not known yet; the peer knows ours.
    Offered(Endpoint),
    /// Connected, and not asked for yet.
    Connected(Endpoint),
    /// The application has it.
    Taken,
    /// It could not be.
    Failed(Error),
}

/// All of them. The address of an endpoint is mail to its peer; the first mail of two lets the other side make its endpoint and answer.
#[derive(Debug)]
pub(super) struct Mesh {
    domain: ProtectionDomain,
    config: EndpointConfig,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    links: BTreeMap<u32, Link>,
    /// Of every endpoint, also of those that the application has.
    aborts: Vec<AbortHandle>,
    has_failed: bool,
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

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoint that is connected with `peer`, once.
    ///
    /// # Errors
    /// Those of making and connecting it on this side; [`Error::Timeout`] if the peer does not come; [`Error::Rank`].
    pub(super) fn take(&self, client: &Client, peer: u32, timeout: Duration) -> Result<Endpoint> {
        let deadline = Deadline::new("connection with a rank of the group", timeout);
        let mut state = self.state();
        if !state.links.contains_key(&peer) {
            let endpoint = self.offer(&mut state, client, peer, &deadline)?;
            state.links.insert(peer, Link::Offered(endpoint));
        }
        loop {
            if let Some(failure) = client.failure() {
                return Err(failure);
            }
            match state.links.get_mut(&peer) {
                Some(link @ Link::Connected(_)) => {
                    if let Link::Connected(endpoint) = std::mem::replace(link, Link::Taken) {
                        return Ok(endpoint);
                    }
                }
                Some(Link::Failed(error)) => return Err(error.clone()),
                Some(Link::Taken) => {
                    return Err(Error::State {
                        operation: "endpoint of the group",
                        reason: format!("that of rank {peer} was given away"),
                    });
                }
                _ => {}
            }
            (state, _) = self
                .changed
                .wait_timeout(state, deadline.left()?)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes an endpoint and tells the peer its address.
    fn offer(
        &self,
        state: &mut State,
        client: &Client,
        peer: u32,
        deadline: &Deadline,
    ) -> Result<Endpoint> {
        let endpoint = Endpoint::new(&self.domain, &self.config)?;
        let abort = endpoint.abort_handle();
        if state.has_failed {
            abort.abort();
        }
        state.aborts.push(abort);
        client.send_mail(peer, &endpoint.address().to_bytes(), deadline)?;
        Ok(endpoint)
    }

    fn connect(
        &self,
        state: &mut State,
        client: &Client,
        peer: u32,
        mail: &[u8],
    ) -> Result<Endpoint> {
        let address = Address::from_bytes(mail)?;
        let mut endpoint = match state.links.remove(&peer) {
            Some(Link::Offered(endpoint)) => endpoint,
            _ => {
                let deadline = Deadline::new("answer to a rank of the group", ANSWER);
                self.offer(state, client, peer, &deadline)?
            }
        };
        endpoint.connect(&address)?;
        Ok(endpoint)
    }
}

/// The mesh as the store's reader sees it.
pub(super) struct Watch(pub(super) Arc<Mesh>);

impl Watcher for Watch {
    fn mail(&self, client: &Client, from: u32, bytes: &[u8]) {
        let mesh = &self.0;
        let mut state = mesh.state();
        // Each side sends its address once. More is of no use, and the endpoint that is there stays as it is.
        if from == client.rank() || !matches!(state.links.get(&from), None | Some(Link::Offered(_)))
        {
            return;
        }
        let link = match mesh.connect(&mut state, client, from, bytes) {
            Ok(endpoint) => Link::Connected(endpoint),
            Err(error) => Link::Failed(error),
        };
        state.links.insert(from, link);
        drop(state);
        mesh.changed.notify_all();
    }

    fn failed(&self, _: &Client) {
        let mut state = self.0.state();
        state.has_failed = true;
        state.aborts.iter().for_each(AbortHandle::abort);
        drop(state);
        self.0.changed.notify_all();
    }
}
