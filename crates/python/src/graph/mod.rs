//! Graphs of the library's own: operations that each launch repeats.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod built;

#[cfg(not(feature = "cuda"))]
pub use absent::{PyGraphBuilder, PyGraphExec};
#[cfg(feature = "cuda")]
pub use built::{PyGraphBuilder, PyGraphExec};
