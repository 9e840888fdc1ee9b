//! Memory that a library and its NIC share in one process.

mod cells;
mod number_set;
mod page_box;
mod pages;
mod queue_pair;
mod span;

pub use cells::{RecordCell, RingCells};
pub use number_set::NumberSet;
pub use page_box::{PageBox, PageSlice};
pub use pages::{Pages, page_bytes};
pub use queue_pair::{QueuePairMemory, QueuePairSizes};
pub use span::Span;
