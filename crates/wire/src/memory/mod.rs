//! Memory that a library and its NIC share in one process.

mod cells;
mod number_set;
mod pages;
mod queue_pair;
mod span;

pub use cells::{RecordCell, RingCells};
pub use number_set::NumberSet;
pub use pages::{PAGE_BYTES, Pages};
pub use queue_pair::{QueuePairMemory, QueuePairSizes};
pub use span::Span;
