//! The Python package `doorbell`: the public Rust interface as Python classes. `doorbell/_doorbell.pyi` declares them; docs/python.md is the guide.
//!
//! - Calls that may wait let other Python threads run meanwhile ([`detached`]).
//! - A region keeps the Python object whose memory it registers. What may be dropped by a thread of the library is only noted, and dropped by the next
//!   call of a Python thread.
//! - Functions of streams take the interpreter's lock. At the end of the interpreter no more of them begin ([`exit`]).

mod arguments;
mod array;
mod bounce;
mod cache;
mod collective;
mod connection_manager;
mod detached;
mod device;
mod endpoint;
mod error;
mod exit;
mod graph;
mod group;
mod matcher;
mod memory;
mod message;
mod notice;
mod operations;
mod parts;
mod region;
mod stream;
mod ticket;

use pyo3::prelude::*;

/// The features that this package was built with.
#[pyfunction]
fn features() -> Vec<&'static str> {
    let all = [
        ("softcx", true),
        ("group", true),
        ("verbs", cfg!(feature = "verbs")),
        ("cuda", cfg!(feature = "cuda")),
    ];
    let built = all.into_iter().filter(|(_, is_built)| *is_built);
    built.map(|(name, _)| name).collect()
}

#[pymodule]
fn _doorbell(module: &Bound<'_, PyModule>) -> PyResult<()> {
    exit::install(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(features, module)?)?;
    module.add_class::<device::PyDevice>()?;
    module.add_class::<device::PyDomain>()?;
    module.add_class::<region::PyRegion>()?;
    module.add_class::<region::PySlice>()?;
    module.add_class::<region::PyRemoteRegion>()?;
    module.add_class::<region::PyRemoteSlice>()?;
    module.add_class::<endpoint::PyEndpoint>()?;
    module.add_class::<ticket::PyCompletion>()?;
    module.add_class::<ticket::PyTicket>()?;
    module.add_class::<stream::PyStream>()?;
    module.add_class::<stream::PyHostStream>()?;
    module.add_class::<stream::PyCudaStream>()?;
    module.add_class::<stream::PyEvent>()?;
    module.add_class::<group::PyGroup>()?;
    module.add_class::<message::PyMessageQueue>()?;
    module.add_class::<message::PyMessageTicket>()?;
    module.add_class::<message::PyPendingSend>()?;
    module.add_class::<message::PyPostedSend>()?;
    module.add_class::<collective::PyCommunicator>()?;
    module.add_class::<collective::PyCollective>()?;
    module.add_class::<collective::PyCollectiveTicket>()?;
    module.add_class::<matcher::PyMatcher>()?;
    module.add_class::<matcher::PyMatchTicket>()?;
    module.add_class::<matcher::PyEnvelope>()?;
    module.add_class::<bounce::PyBounceBuffer>()?;
    module.add_class::<cache::PyRegionCache>()?;
    module.add_class::<connection_manager::PyCmListener>()?;
    module.add_class::<connection_manager::PyCmRequest>()?;
    module.add_class::<connection_manager::PyCmConnection>()?;
    module.add_class::<graph::PyGraphBuilder>()?;
    module.add_class::<graph::PyGraphExec>()?;
    module.add_class::<notice::PyNotices>()?;
    module.add_class::<notice::PyWatch>()?;
    Ok(())
}
