//! The software ConnectX: a simulated NIC that consumes the same queue memory and doorbells as a card.
//!
//! - [`device`] is the device. A library embeds it with [`device::Device`], and gives it rings, doorbell records and UAR registers.
//! - [`doors`] presents the device to unmodified verbs programs as `mlx5_0`, by a supervisor or by a preloaded library.
#![cfg_attr(not(test), warn(missing_docs))]

pub mod device;
pub mod doors;

pub use doorbell_wire::{Error, Result, StateKind};
