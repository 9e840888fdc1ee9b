//! The classes of a package without the feature `verbs`.

use doorbell::StateKind;
use pyo3::prelude::*;

use crate::endpoint::PyEndpoint;
use crate::error::state_exception;

fn absent<T>(py: Python<'_>) -> PyResult<T> {
    let reason = "this package was built without the feature `verbs`";
    let kind = StateKind::Unsupported;
    Err(state_exception(py, kind, "rdma_cm", reason))
}

/// A listener, which nobody has.
#[pyclass(frozen, module = "doorbell", name = "CmListener")]
pub struct PyNoCmListener;

#[pymethods]
impl PyNoCmListener {
    /// Not in this build: listens at an address.
    #[new]
    fn new(py: Python<'_>, address: &str) -> PyResult<PyNoCmListener> {
        let _ = address;
        absent(py)
    }

    /// Not in this build: the address that it listens at.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

    /// Not in this build: waits for a request.
    #[pyo3(signature = (timeout = None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PyNoCmRequest> {
        let _ = timeout;
        absent(py)
    }
}

/// A request, which nobody has.
#[pyclass(frozen, module = "doorbell", name = "CmRequest")]
pub struct PyNoCmRequest;

#[pymethods]
impl PyNoCmRequest {
    /// Not in this build: the private data of the peer.
    #[getter]
    fn private_data(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        absent(py)
    }

    /// Not in this build: the address of the peer.
    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

    /// Not in this build: the name of the device that the request came in by.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<Option<String>> {
        absent(py)
    }

    /// Not in this build: accepts the request.
    #[pyo3(signature = (endpoint, private_data = None, timeout = None))]
    fn accept(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        private_data: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<PyNoCmConnection> {
        let _ = (private_data, timeout);
        absent(endpoint.py())
    }

    /// Not in this build: refuses the request.
    #[pyo3(signature = (private_data = None))]
    fn reject(&self, py: Python<'_>, private_data: Option<&[u8]>) -> PyResult<()> {
        let _ = private_data;
        absent(py)
    }
}

/// A connection, which nobody has.
#[pyclass(frozen, module = "doorbell", name = "CmConnection")]
pub struct PyNoCmConnection;

#[pymethods]
impl PyNoCmConnection {
    /// Not in this build: connects an endpoint to the process that listens at an address.
    #[staticmethod]
    #[pyo3(signature = (endpoint, address, private_data = None, timeout = None))]
    fn connect(
        endpoint: &Bound<'_, PyEndpoint>,
        address: &str,
        private_data: Option<&[u8]>,
        timeout: Option<f64>,
    ) -> PyResult<PyNoCmConnection> {
        let _ = (address, private_data, timeout);
        absent(endpoint.py())
    }

    /// Not in this build: the address of the peer.
    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

    /// Not in this build: the private data of the peer.
    #[getter]
    fn private_data(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        absent(py)
    }

    /// Not in this build: fails if the connection has ended.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        absent(py)
    }

    /// Not in this build: waits until the peer disconnects.
    #[pyo3(signature = (timeout = None))]
    fn wait_disconnected(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _ = timeout;
        absent(py)
    }

    /// Not in this build: disconnects.
    #[pyo3(signature = (timeout = 10.0))]
    fn disconnect(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let _ = timeout;
        absent(py)
    }
}
