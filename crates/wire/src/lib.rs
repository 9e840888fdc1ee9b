//! What an RDMA library and its NIC must agree on.
//!
//! - [`bytecode`]: programs, what a queue prepares and a stream executes.
//! - [`mlx5`]: the queues of an mlx5 device over memory, and the reader of their formats.
//! - [`verbs`]: words of verbs that both sides use: rights, states, attributes, statuses.
//! - [`mmio`]: barriers between a CPU and a device, and stores to registers.
//! - [`memory`]: memory that both sides use: pages, the memory of a queue pair, its rings and doorbell records.
//!
//! The crate `doorbell` writes these formats, and the software ConnectX (`doorbell-softcx`) reads them.

pub mod bytecode;
mod error;
pub mod memory;
pub mod mlx5;
pub mod mmio;
mod status;
pub mod verbs;

pub use error::{Cause, Error, Result, StateKind, WorkError};
