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
    #[new]
    fn new(py: Python<'_>, address: &str) -> PyResult<PyNoCmListener> {
        let _ = address;
        absent(py)
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

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
    #[getter]
    fn private_data(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        absent(py)
    }

    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<Option<String>> {
        absent(py)
    }

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

    #[getter]
    fn peer(&self, py: Python<'_>) -> PyResult<String> {
        absent(py)
    }

    #[getter]
    fn private_data(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        absent(py)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        absent(py)
    }

    #[pyo3(signature = (timeout = None))]
    fn wait_disconnected(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _ = timeout;
        absent(py)
    }

    #[pyo3(signature = (timeout = 10.0))]
    fn disconnect(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let _ = timeout;
        absent(py)
    }
}
