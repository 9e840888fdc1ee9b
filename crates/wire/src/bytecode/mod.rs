//! Bytecode: what a queue prepares and a stream executes.
//!
//! A [`Program`] is a handful of stores, polls and fences on registered memory. Queues (see [`crate::mlx5`]) write programs, executors
//! (see `doorbell::stream`) run them; the two meet nowhere else. The bytes of a program are the same in Rust, C and CUDA: the layout
//! is in `include/doorbell/detail/bytecode.h`, and `tests/layout.rs` holds the two sides together.

mod disassembly;
mod fence;
mod ops;
mod program;
mod target;
mod unit;

pub use disassembly::Disassembly;
pub use fence::Fence;
pub use ops::{At, Ops, ProgramOp, Units};
pub use program::{Program, UNIT_LIMIT};
pub use target::{BLOCK_BYTES_MAX, Block, Dword, Qword, Role, Target, TargetId, Targets};
pub use unit::{Kind, UNIT_BYTES, Unit};

/// Units ready made, for the queues: they add several at once, all or none.
pub(crate) mod pack {
    pub(crate) use super::program::{PackedUnit, fence, poll, store_dword, store_qword};
}
