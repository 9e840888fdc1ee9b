//! Memory that a library and its NIC share in one process.

mod cells;
mod in_pages;
mod number_set;
mod pages;
mod queue_pair;
mod span;

pub use cells::{RecordCell, RingCells};
pub use in_pages::{InPage, InPages};
pub use number_set::NumberSet;
pub use pages::{Pages, page_bytes};
pub use queue_pair::{QueuePairMemory, QueuePairSizes};
pub use span::Span;
