//! Graphs of the library's own: operations that each launch repeats.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod built;

#[cfg(not(feature = "cuda"))]
pub use absent::{PyNoGraphBuilder as PyGraphBuilder, PyNoGraphExec as PyGraphExec};
#[cfg(feature = "cuda")]
pub use built::{PyGraphBuilder, PyGraphExec};
