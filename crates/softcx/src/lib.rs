//! The software ConnectX: a NIC of software that consumes the very queue memory and doorbells that a card would.
//!
//! - [`device`] is the device. A library embeds it by [`device::Device`], and gives it rings, doorbell records and UAR registers.
//! - [`doors`] shows the device to unmodified verbs programs as `mlx5_0`, by a supervisor or by a preloaded library.
#![cfg_attr(not(test), warn(missing_docs))]

pub mod device;
pub mod doors;

pub use doorbell_wire::{Error, Result, StateKind};
