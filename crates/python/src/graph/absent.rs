//! What stands for graphs in a package without the feature `cuda`.

use doorbell::StateKind;
use pyo3::prelude::*;

use crate::error::state_exception;

/// Records operations. Nothing can be captured without the feature `cuda`.
#[pyclass(frozen, module = "doorbell", name = "GraphBuilder")]
pub struct PyNoGraphBuilder;

#[pymethods]
impl PyNoGraphBuilder {
    #[staticmethod]
    fn capture(stream: &Bound<'_, PyAny>) -> PyResult<PyNoGraphBuilder> {
        let reason = "this package was built without the feature `cuda`";
        let (py, kind) = (stream.py(), StateKind::Unsupported);
        Err(state_exception(py, kind, "GraphBuilder", reason))
    }
}

/// A graph that can be launched.
#[pyclass(frozen, module = "doorbell", name = "GraphExec")]
pub struct PyNoGraphExec;
