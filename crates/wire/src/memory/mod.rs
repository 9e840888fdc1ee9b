//! Memory that a library and its NIC share in one process.

mod cells;
mod pages;
mod queue_pair;
mod span;

pub use cells::{RecordCell, RingCells};
pub use pages::{PAGE_BYTES, Pages};
pub use queue_pair::{QueuePairMemory, QueuePairSizes};
pub use span::Span;
