//! Listeners, requests and connections.

use std::sync::Mutex;
use std::time::Duration;

use doorbell::{CmConnection, CmListener, CmRequest, Error, StateKind};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::timeout;
use crate::detached::{Detached, call, lock, wait, wait_apart, wait_whole};
use crate::endpoint::PyEndpoint;
use crate::error::is_gone;

/// The time limit of a call that has one by all means.
fn limit(seconds: Option<f64>) -> PyResult<Duration> {
    Ok(timeout(seconds)?.unwrap_or(Duration::MAX))
}

fn is_over(operation: &'static str) -> Error {
    let reason = "it was accepted, rejected or disconnected before";
    Error::state(StateKind::Taken, operation, reason)
}

/// Waits for peers that connect by rdma_cm.
#[pyclass(frozen, module = "doorbell", name = "CmListener")]
pub struct PyCmListener(Detached<CmListener>);

#[pymethods]
impl PyCmListener {
    /// Listens at an address, such as "10.9.0.1:7174"; port 0 picks a free one.
    #[new]
    fn new(py: Python<'_>, address: &str) -> PyResult<PyCmListener> {
        let listener = call(py, || CmListener::bind(address))?;
        Ok(PyCmListener(Detached::new(listener)))
    }

    /// The address that it listens at.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        let listener = self.0.get().ok_or_else(is_gone)?;
        call(py, || Ok(listener.address()?.to_string()))
    }

    /// Waits for a request.
    #[pyo3(signature = (timeout = None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PyCmRequest> {
        let listener = self.0.get().ok_or_else(is_gone)?;
        let request = wait(py, self::timeout(timeout)?, |slice| {
            listener.accept(slice.unwrap_or(Duration::MAX))
        })?;
        Ok(PyCmRequest(Detached::new(Mutex::new(Some(request)))))
    }
}

/// A connection request of a peer. It is refused if it is dropped.
#[pyclass(frozen, module = "doorbell", name = "CmRequest")]
pub struct PyCmRequest(Detached<Mutex<Option<CmRequest>>>);

impl PyCmRequest {
    fn look<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&CmRequest) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let request = self.0.get().ok_or_else(is_gone)?;
        call(py, || {
            let request = lock(request);
            function(request.as_ref().ok_or_else(|| is_over("rdma_cm request"))?)
        })
    }
}

#[pymethods]
impl PyCmRequest {
    /// The private data of the request, padded with zeros.
    #[getter]
    fn private_data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let data = self.look(py, |request| Ok(request.private_data().to_vec()))?;
        Ok(PyBytes::new(py, &data))
    }

    /// The address of the peer.
    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |request| Ok(request.peer()?.to_string()))
    }

    /// The name of the device that it came in by: the endpoint must be on it.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.look(py, |request| Ok(request.device()))
    }

    /// Accepts the request: the endpoint is connected with the peer's.
    #[pyo3(signature = (endpoint, private_data = None, timeout = None))]
    fn accept(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        private_data: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<PyCmConnection> {
        let limit = limit(timeout)?;
        let request = self.0.get().ok_or_else(is_gone)?;
        connected(endpoint, |endpoint| {
            let taken = lock(request).take();
            let taken = taken.ok_or_else(|| is_over("rdma_cm accept"))?;
            taken.accept(endpoint, private_data.unwrap_or_default(), limit)
        })
    }

    /// Refuses the request.
    #[pyo3(signature = (private_data = None))]
    fn reject(&self, py: Python<'_>, private_data: Option<&[u8]>) -> PyResult<()> {
        let request = self.0.get().ok_or_else(is_gone)?;
        call(py, || {
            let taken = lock(request).take();
            let taken = taken.ok_or_else(|| is_over("rdma_cm reject"))?;
            taken.reject(private_data.unwrap_or_default())
        })
    }
}

/// Connects an endpoint in a thread of its own. After a signal, the call goes on until its end or its time limit: rdma_cm has begun to change the endpoint.
fn connected(
    endpoint: &Bound<'_, PyEndpoint>,
    connect: impl FnOnce(&mut doorbell::Endpoint) -> doorbell::Result<CmConnection> + Send,
) -> PyResult<PyCmConnection> {
    let shared = endpoint.get().shared()?;
    let abort = endpoint.get().abort_handle()?;
    let connection = wait_whole(
        endpoint.py(),
        || connect(&mut lock(shared)),
        || abort.abort(),
    )?;
    Ok(PyCmConnection {
        inner: Detached::new(Mutex::new(Some(connection))),
        _endpoint: endpoint.clone().unbind(),
    })
}

/// The connection of an endpoint with a peer. It is disconnected if it is dropped.
#[pyclass(frozen, module = "doorbell", name = "CmConnection")]
pub struct PyCmConnection {
    inner: Detached<Mutex<Option<CmConnection>>>,
    _endpoint: Py<PyEndpoint>,
}

impl PyCmConnection {
    fn look<T: Send>(
        &self,
        py: Python<'_>,
        function: impl FnOnce(&mut CmConnection) -> doorbell::Result<T> + Send,
    ) -> PyResult<T> {
        let connection = self.inner.get().ok_or_else(is_gone)?;
        call(py, || {
            let mut connection = lock(connection);
            function(
                connection
                    .as_mut()
                    .ok_or_else(|| is_over("rdma_cm connection"))?,
            )
        })
    }
}

#[pymethods]
impl PyCmConnection {
    /// Connects an endpoint to the process that listens at an address.
    #[staticmethod]
    #[pyo3(signature = (endpoint, address, private_data = None, timeout = None))]
    fn connect(
        endpoint: &Bound<'_, PyEndpoint>,
        address: &str,
        private_data: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<PyCmConnection> {
        let limit = limit(timeout)?;
        connected(endpoint, |endpoint| {
            CmConnection::connect(endpoint, address, private_data.unwrap_or_default(), limit)
        })
    }

    /// The address of the peer.
    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |connection| Ok(connection.peer().to_string()))
    }

    /// The private data of the peer's request or answer, padded with zeros.
    #[getter]
    fn private_data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let data = self.look(py, |connection| Ok(connection.private_data().to_vec()))?;
        Ok(PyBytes::new(py, &data))
    }

    /// Fails if the connection has ended.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.look(py, CmConnection::check)
    }

    /// Waits until the peer disconnects.
    #[pyo3(signature = (timeout = None))]
    fn wait_disconnected(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let connection = self.inner.get().ok_or_else(is_gone)?;
        wait(py, self::timeout(timeout)?, |slice| {
            let mut connection = lock(connection);
            let connection = connection.as_mut();
            let connection = connection.ok_or_else(|| is_over("rdma_cm connection"))?;
            connection.wait_disconnected(slice.unwrap_or(Duration::MAX))
        })
    }

    /// Disconnects, and waits until the peer agrees.
    #[pyo3(signature = (timeout = 10.0))]
    fn disconnect(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let limit = limit(Some(timeout))?;
        let connection = self.inner.get().ok_or_else(is_gone)?;
        let taken = call(py, || {
            let taken = lock(connection).take();
            taken.ok_or_else(|| is_over("rdma_cm disconnect"))
        })?;
        wait_apart(py, move || taken.disconnect(limit))
    }
}
