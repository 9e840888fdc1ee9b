//! Connections by rdma_cm, with peers that need not use this library. Without the feature `verbs` the calls say so.

#[cfg(not(feature = "verbs"))]
mod absent;
#[cfg(feature = "verbs")]
mod built;

#[cfg(not(feature = "verbs"))]
pub use absent::{
    PyNoCmConnection as PyCmConnection, PyNoCmListener as PyCmListener,
    PyNoCmRequest as PyCmRequest,
};
#[cfg(feature = "verbs")]
pub use built::{PyCmConnection, PyCmListener, PyCmRequest};
