//! The group from the side of one rank.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::endpoint::{Endpoint, EndpointConfig};
use crate::group::mesh::{Mesh, MeshWatcher};
use crate::group::{LaunchEnvironment, Store};
use crate::region::{Device, ProtectionDomain};
use crate::{Cause, Error, Result, StateKind, WcStatus};

/// How much later than an endpoint the store may report the same event.
const GRACE: Duration = Duration::from_secs(2);

/// Whether the device reports a fault of this side's work request, or of what both sides agreed on, which a peer that is gone cannot cause.
fn is_own_fault(error: &Error) -> bool {
    use WcStatus::{
        BadRespErr, LocAccessErr, LocLenErr, LocProtErr, LocQpOpErr, MwBindErr, RemInvReqErr,
    };
    let Error::Work(failed) = error else {
        return false;
    };
    let Cause::Completion { status, .. } = failed.cause else {
        return false;
    };
    matches!(
        status,
        LocLenErr | LocQpOpErr | LocProtErr | MwBindErr | BadRespErr | LocAccessErr | RemInvReqErr
    )
}

/// How a group is joined. Start from `GroupConfig::default()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupConfig {
    /// The configuration of its endpoints. It should be the same on both sides.
    pub endpoint: EndpointConfig,
    /// How long joining, connecting, and each exchange with the store may take. Default 60 s. If processes of a job may start more than a minute
    /// apart, set a larger value.
    pub timeout: Duration,
}

setters!(GroupConfig {
    endpoint: EndpointConfig,
    timeout: Duration,
});

impl Default for GroupConfig {
    fn default() -> GroupConfig {
        GroupConfig {
            endpoint: EndpointConfig::default(),
            timeout: Duration::from_secs(60),
        }
    }
}

/// The processes of a job, including this one. Each has a connected endpoint to each other process that it communicates with.
///
/// An endpoint is made when the first of its two sides asks for it; the other application need not do anything for that. If a rank ends without
/// having left, the group has failed: all endpoints are aborted, so that every wait ends, and every call here returns an error that names that
/// rank.
///
/// # When a rank ends
/// A group fails as a whole, once: when the connection between a rank and the store ends before that rank has [left](Group::leave), the store
/// reports that rank to every other one. Their calls return [`Error::Rank`](crate::Error::Rank) from then on, and their endpoints are aborted, so
/// that no stream goes on waiting. A killed process is noticed at once, a host that loses its power after about 20 seconds. A process that is
/// stopped, or hangs, keeps its connection: then waits end only by the deadlines of the calls.
///
/// # What the token protects against
/// Each side proves that it has the token without sending it, and the store tells a process nothing before that. So a process that can reach the
/// port, and does not know the token, can neither join nor read nor pose as the store. At most it can hold places in the queue of connections for a
/// few seconds. The traffic after the handshake is neither encrypted nor signed. An attacker who can read the network can read it, and one who can
/// change the network's traffic can take over a connection. An attacker who sees a handshake can try out tokens offline, so a token should be long
/// and random. [`LaunchEnvironment::from_env`] says where the token comes from; without `DOORBELL_TOKEN` it may not be secret.
#[derive(Debug)]
pub struct Group {
    /// Never locked: calls that use the endpoints take `&mut self`. The mutex lets other threads share the rest of the group.
    endpoints: Mutex<BTreeMap<u32, Endpoint>>,
    mesh: Arc<Mesh>,
    pub(super) store: Store,
    timeout: Duration,
}

impl Group {
    /// Joins the group that the launcher has started this process for ([`LaunchEnvironment::from_env`]), with the device `DOORBELL_DEVICE`, or `softcx`
    /// if that is not set.
    ///
    /// # Errors
    /// Those of [`LaunchEnvironment::from_env`], [`Device::open`] and [`Group::join`].
    pub fn from_env() -> Result<Group> {
        Group::from_env_with(&GroupConfig::default())
    }

    /// [`Group::from_env`] with this configuration.
    ///
    /// # Errors
    /// As [`Group::from_env`].
    pub fn from_env_with(config: &GroupConfig) -> Result<Group> {
        let name = std::env::var("DOORBELL_DEVICE").ok();
        let name = name.filter(|name| !name.is_empty());
        let device = Device::open(name.as_deref().unwrap_or("softcx"))?;
        let environment = LaunchEnvironment::from_env()?;
        Group::join(&environment, &device.protection_domain(), config)
    }

    /// Joins a group; its endpoints are of `domain`.
    ///
    /// # Errors
    /// As [`Store::join`].
    pub fn join(
        environment: &LaunchEnvironment,
        domain: &ProtectionDomain,
        config: &GroupConfig,
    ) -> Result<Group> {
        let mesh = Arc::new(Mesh::new(domain, &config.endpoint));
        let watch = MeshWatcher(Arc::clone(&mesh));
        let store = Store::join_with(environment, config.timeout, Box::new(watch))?;
        Ok(Group {
            endpoints: Mutex::default(),
            mesh,
            store,
            timeout: config.timeout,
        })
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.store.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.store.size()
    }

    /// The domain of its endpoints, in which regions for them are registered.
    pub fn domain(&self) -> &ProtectionDomain {
        self.mesh.domain()
    }

    pub(super) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The store of the group, for data that the application exchanges itself.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The endpoint that is connected with the rank `peer`. The first call for a rank waits until it is connected.
    ///
    /// # Errors
    /// [`Error::Range`] if `peer` is not a rank of the group; [`Error::State`] if it is this rank; [`Error::Timeout`] if the other
    /// rank has not come; [`Error::Rank`] if the group has failed; those of [`Endpoint::new`] and [`Endpoint::connect`].
    pub fn endpoint(&mut self, peer: u32) -> Result<&mut Endpoint> {
        self.check_peer(peer)?;
        let endpoints = self.endpoints.get_mut();
        match endpoints
            .unwrap_or_else(PoisonError::into_inner)
            .entry(peer)
        {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let endpoint = self.mesh.take(self.store.client(), peer, self.timeout)?;
                Ok(entry.insert(endpoint))
            }
        }
    }

    /// Gives the endpoint that is connected with another rank to the caller, and waits until it is connected. It is aborted with the others if
    /// the group fails, and if this rank drops the group without leaving it. After this rank has left, it is an endpoint like any other. Calls may come
    /// from several threads.
    ///
    /// # Errors
    /// As [`Group::endpoint`]; [`Error::State`] if either call has taken it before.
    pub fn take_endpoint(&self, peer: u32) -> Result<Endpoint> {
        self.check_peer(peer)?;
        self.mesh.take(self.store.client(), peer, self.timeout)
    }

    pub(super) fn check_peer(&self, peer: u32) -> Result<()> {
        if peer >= self.size() {
            return Err(Error::Range {
                argument: "peer",
                value: peer.into(),
                min: 0,
                max: u64::from(self.size()) - 1,
            });
        }
        if peer == self.rank() {
            return Err(Error::state(
                StateKind::WrongKind,
                "endpoint of the group",
                format!("rank {peer} is this process"),
            ));
        }
        self.check()
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// As [`Store::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.store.barrier(self.timeout)
    }

    /// Fails if a rank has failed.
    ///
    /// # Errors
    /// [`Error::Rank`], naming the first rank that failed.
    pub fn check(&self) -> Result<()> {
        self.store.failure().map_or(Ok(()), Err)
    }

    /// A group of the ranks that are still here, once all of them have called this, for instance after another one has ended; and the ranks that they have in
    /// this group, by their new ones, in the same order. Ranks that have left or have ended have no part in it, nor has one that ends while others call. A rank that has not come yet is waited for.
    ///
    /// The new group has the domain, the configuration and the time limit of this one, and nothing else of it: endpoints, message queues and communicators are made
    /// again. This group stays as it is; drop it when the new one is there. After an error of this call the survivors can call it again.
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0 has ended, because rank 0 hosts the store. [`Error::Timeout`] if a rank that is here does not call, or if a rank ends before it has
    /// come to the new group. [`Error::State`] if another thread of this rank is in this call.
    pub fn shrink(&self) -> Result<(Group, Vec<u32>)> {
        let mut mesh = Arc::new(self.mesh.emptied());
        let (store, ranks) = self.store.shrink_with(self.timeout, || {
            mesh = Arc::new(self.mesh.emptied());
            MeshWatcher(Arc::clone(&mesh))
        })?;
        let group = Group {
            endpoints: Mutex::default(),
            mesh,
            store,
            timeout: self.timeout,
        };
        Ok((group, ranks))
    }

    /// The cause of an error: if an operation failed or took too long because a rank has ended, this returns the error that names the rank. An
    /// endpoint may notice that before the store does, so this waits up to two seconds for the store. A completion in error that the end of a peer
    /// cannot cause, as for memory that is not registered here, is returned as it is: the other ranks may have ended because of it.
    pub fn cause_of(&self, error: Error) -> Error {
        if is_own_fault(&error) {
            return error;
        }
        self.store.client().wait_for_failure(GRACE).unwrap_or(error)
    }

    /// Leaves the group. After that, the end of this process is not a failure of the group. Operations that are under way with other ranks are
    /// dropped with the endpoints of the group; those that were [taken](Group::take_endpoint) go on. A [`Group::barrier`] before this makes sure that none are under way.
    ///
    /// # Errors
    /// As [`Store::leave`].
    pub fn leave(self) -> Result<()> {
        let Group { store, timeout, .. } = self;
        store.leave(timeout)
    }

    /// Ends this rank's part as a drop does, while other threads are in calls of the group or have it: their waits end with an error, and the other ranks learn of the end.
    pub fn abandon(&self) {
        self.store.abandon();
    }
}
