//! The processes of a job.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use doorbell::{Device, EndpointConfig, Group, GroupConfig, LaunchEnvironment, StateKind};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{Configuration, MatcherConfiguration, MessageConfiguration, timeout};
use crate::collective::PyCommunicator;
use crate::detached::{Detached, Room, call, lock, wait_apart};
use crate::device::PyDomain;
use crate::endpoint::PyEndpoint;
use crate::error::{is_gone, state_exception};
use crate::matcher::PyMatcher;
use crate::message::PyMessageQueue;

/// The endpoint to another rank.
enum PeerEndpointState {
    /// The group has it.
    InGroup,
    /// A thread of the package has taken it out of the group, and no caller has it yet.
    Taken(PyEndpoint),
    Handed(Py<PyEndpoint>),
}

/// Where the endpoint to another rank goes. A thread of the package waits for it; a caller that is interrupted does not wait for that thread, and the next one finds the
/// endpoint here.
struct PeerEndpoint {
    /// Locked while a thread takes the endpoint out of the group, without the interpreter's lock: the group gives it only once.
    taking: Mutex<()>,
    /// Locked for a moment, by threads with and without the interpreter's lock.
    state: Mutex<PeerEndpointState>,
}

impl Default for PeerEndpoint {
    fn default() -> PeerEndpoint {
        PeerEndpoint {
            taking: Mutex::default(),
            state: Mutex::new(PeerEndpointState::InGroup),
        }
    }
}

impl PeerEndpoint {
    /// Takes the endpoint out of the group, unless another thread has done so.
    fn take(&self, group: &Group, peer: u32, room: Room) -> doorbell::Result<()> {
        let _taking = lock(&self.taking);
        if matches!(*lock(&self.state), PeerEndpointState::InGroup) {
            let endpoint = PyEndpoint::new(group.take_endpoint(peer)?, room);
            *lock(&self.state) = PeerEndpointState::Taken(endpoint);
        }
        Ok(())
    }

    /// The endpoint, once it was taken out of the group.
    fn handed(&self, py: Python<'_>) -> PyResult<Option<Py<PyEndpoint>>> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, PeerEndpointState::InGroup) {
            PeerEndpointState::InGroup => Ok(None),
            PeerEndpointState::Taken(endpoint) => {
                let endpoint = Py::new(py, endpoint)?;
                *state = PeerEndpointState::Handed(endpoint.clone_ref(py));
                Ok(Some(endpoint))
            }
            PeerEndpointState::Handed(endpoint) => {
                *state = PeerEndpointState::Handed(endpoint.clone_ref(py));
                Ok(Some(endpoint))
            }
        }
    }
}

/// What is there until the rank leaves.
type Member = Mutex<Option<Arc<Group>>>;

/// The processes of a job, including this one.
#[pyclass(frozen, module = "doorbell", name = "Group")]
pub struct PyGroup {
    inner: Detached<Member>,
    endpoints: Mutex<BTreeMap<u32, Arc<PeerEndpoint>>>,
    rank: u32,
    size: u32,
    timeout: Duration,
    /// Of its endpoints.
    room: Room,
}

impl PyGroup {
    /// The group, unless this rank has left it. The lock is not held for longer than this.
    fn group(&self, py: Python<'_>) -> PyResult<Arc<Group>> {
        let group = lock(self.inner.get().ok_or_else(is_gone)?).clone();
        group.ok_or_else(|| {
            state_exception(
                py,
                StateKind::Disconnected,
                "use of the group",
                "this rank has left it",
            )
        })
    }

    /// Calls without the interpreter's lock. The last handle is not dropped with it either.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&Group) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let group = self.group(py)?;
        call(py, move || function(&group))
    }

    /// The same of a call that waits for other ranks. If a signal comes, the wait goes on without this thread.
    fn wait<T: Send + 'static>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&Group) -> doorbell::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let group = self.group(py)?;
        wait_apart(py, move || function(&group))
    }
}

#[pymethods]
impl PyGroup {
    /// Joins the group that the launcher has started this process for.
    #[staticmethod]
    #[pyo3(signature = (device = None, *, config = None, timeout = 60.0))]
    fn from_environment(
        py: Python<'_>,
        device: Option<&str>,
        config: Option<Configuration>,
        timeout: f64,
    ) -> PyResult<PyGroup> {
        let timeout = self::timeout(Some(timeout))?.unwrap_or(Duration::MAX);
        let mut config = config.map_or_else(EndpointConfig::default, |config| config.0);
        let room = Room::of(&mut config);
        let config = GroupConfig::default().endpoint(config).timeout(timeout);
        let device = device.map(str::to_owned);
        let group = wait_apart(py, move || {
            let named = std::env::var("DOORBELL_DEVICE")
                .ok()
                .filter(|name| !name.is_empty());
            let device = Device::open(device.as_deref().or(named.as_deref()).unwrap_or("softcx"))?;
            Group::join(
                &LaunchEnvironment::from_env()?,
                &device.protection_domain(),
                &config,
            )
        })?;
        Ok(PyGroup {
            rank: group.rank(),
            size: group.size(),
            timeout,
            room,
            inner: Detached::new(Mutex::new(Some(Arc::new(group)))),
            endpoints: Mutex::default(),
        })
    }

    /// The rank of this process.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of processes.
    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    /// The domain in which regions for the group's endpoints are registered.
    #[getter]
    fn domain(&self, py: Python<'_>) -> PyResult<PyDomain> {
        Ok(PyDomain::new(self.group(py)?.domain().clone()))
    }

    /// The endpoint that is connected with another rank. The first call for a rank waits until it is connected. An interrupted call can be repeated.
    fn endpoint(&self, py: Python<'_>, peer: u32) -> PyResult<Py<PyEndpoint>> {
        let place = Arc::clone(lock(&self.endpoints).entry(peer).or_default());
        if let Some(endpoint) = place.handed(py)? {
            return Ok(endpoint);
        }
        let (apart, room) = (Arc::clone(&place), self.room);
        self.wait(py, move |group| apart.take(group, peer, room))?;
        place.handed(py)?.ok_or_else(is_gone)
    }

    /// Further endpoints between ranks, by peer and tag, each of which makes its side with the same tag. One to this rank itself receives what it sends. Waits until they
    /// are connected. An interrupted call has used the tags: the endpoints are made, if the peers make theirs, and dropped.
    #[pyo3(signature = (peers, config = None))]
    fn endpoints(
        &self,
        py: Python<'_>,
        peers: Vec<(u32, u64)>,
        config: Option<Configuration>,
    ) -> PyResult<Vec<PyEndpoint>> {
        let mut config = config.map_or_else(EndpointConfig::default, |config| config.0);
        let room = Room::of(&mut config);
        let endpoints = self.wait(py, move |group| group.endpoints(&peers, &config))?;
        let all = endpoints.into_iter();
        Ok(all
            .map(|endpoint| PyEndpoint::new(endpoint, room))
            .collect())
    }

    /// Waits until every rank has called this.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, Group::barrier)
    }

    /// Stores a value for all ranks.
    fn set(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        let (key, value, timeout) = (key.to_owned(), value.to_owned(), self.timeout);
        self.wait(py, move |group| {
            group.store().set(key.as_bytes(), &value, timeout)
        })
    }

    /// The value of a key, once a rank has stored it.
    fn get<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyBytes>> {
        let (key, timeout) = (key.to_owned(), self.timeout);
        let value = self.wait(py, move |group| group.store().get(key.as_bytes(), timeout))?;
        Ok(PyBytes::new(py, &value))
    }

    /// The values of all ranks, once each has called this.
    fn gather<'py>(&self, py: Python<'py>, value: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (value, timeout) = (value.to_owned(), self.timeout);
        let values = self.wait(py, move |group| group.store().gather(&value, timeout))?;
        Ok(values.iter().map(|value| PyBytes::new(py, value)).collect())
    }

    /// A queue for messages with another rank, which opens its side with the same tag. Waits until it is connected.
    #[pyo3(signature = (peer, tag = 0, config = None))]
    fn message_queue(
        &self,
        py: Python<'_>,
        peer: u32,
        tag: u64,
        config: Option<MessageConfiguration>,
    ) -> PyResult<PyMessageQueue> {
        let mut queues = self.message_queues(py, vec![(peer, tag)], config)?;
        queues.pop().ok_or_else(is_gone)
    }

    /// Several of them, by peer and tag.
    #[pyo3(signature = (peers, config = None))]
    fn message_queues(
        &self,
        py: Python<'_>,
        peers: Vec<(u32, u64)>,
        config: Option<MessageConfiguration>,
    ) -> PyResult<Vec<PyMessageQueue>> {
        let mut config = config.unwrap_or_default().0;
        let room = Room::of(&mut config.endpoint);
        let queues = self.wait(py, move |group| group.message_queues(&peers, &config))?;
        let all = queues.into_iter();
        Ok(all.map(|queue| PyMessageQueue::new(queue, room)).collect())
    }

    /// A communicator of these ranks, or of all. Each of them makes it, with the same arguments.
    #[pyo3(signature = (ranks = None, tag = 0, config = None))]
    fn communicator(
        &self,
        py: Python<'_>,
        ranks: Option<Vec<u32>>,
        tag: u64,
        config: Option<MessageConfiguration>,
    ) -> PyResult<PyCommunicator> {
        let mut config = config.unwrap_or_default().0;
        let room = Room::of(&mut config.endpoint);
        let made = self.wait(py, move |group| {
            group.communicator(ranks.as_deref(), tag, &config)
        })?;
        Ok(PyCommunicator::of(made, room))
    }

    /// A matcher for messages between these ranks, or all. Each of them makes it, with the same ranks and tag.
    #[pyo3(signature = (ranks = None, tag = 0, config = None))]
    fn matcher(
        &self,
        py: Python<'_>,
        ranks: Option<Vec<u32>>,
        tag: u64,
        config: Option<MatcherConfiguration>,
    ) -> PyResult<PyMatcher> {
        let mut config = config.unwrap_or_default().0;
        let room = Room::of(&mut config.messages.endpoint);
        let made = self.wait(py, move |group| {
            group.matcher(ranks.as_deref(), tag, &config)
        })?;
        let peers = made.peer_count();
        Ok(PyMatcher::of(made, vec![room; peers], room))
    }

    /// Fails if a rank has ended.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Group::check)
    }

    /// Leaves the group: the end of this process is no failure of the group then. The endpoints stay.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.inner.get().ok_or_else(is_gone)?;
        let taken = lock(member).take();
        let group = taken.ok_or_else(|| {
            state_exception(
                py,
                StateKind::Disconnected,
                "leave of the group",
                "this rank has left it",
            )
        })?;
        match Arc::try_unwrap(group) {
            Ok(group) => wait_apart(py, move || group.leave()),
            Err(group) => {
                *lock(member) = Some(group);
                Err(state_exception(
                    py,
                    StateKind::Busy,
                    "leave of the group",
                    "another thread is in a call of the group",
                ))
            }
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Leaves the group. After an exception it drops it instead, so that the other ranks learn of the failure at once.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (error, traceback);
        let member = self.inner.get().ok_or_else(is_gone)?;
        let is_member = lock(member).is_some();
        if !is_member {
            return Ok(());
        }
        if kind.is_none() {
            return self.leave(py);
        }
        let group = lock(member).take();
        py.detach(|| {
            // A thread of an interrupted call may have the group still.
            if let Some(group) = &group {
                group.abandon();
            }
            drop(group);
        });
        Ok(())
    }
}
