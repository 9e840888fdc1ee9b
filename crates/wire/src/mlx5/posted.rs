//! Receipts of a send queue: where a request lies, and what a commit covers.

/// Where a request lies in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// The running WQEBB count at its start. A CQE's `wqe_counter` is the low 16 bits.
    pub index: u32,
    /// The WQEBBs it takes.
    pub wqebbs: u32,
}

impl Posted {
    /// The running WQEBB count behind it: what to [`super::SendQueue::release`] once it is done.
    #[inline]
    pub const fn end(&self) -> u32 {
        self.index.wrapping_add(self.wqebbs)
    }
}

/// What rings the doorbell for all requests of a commit and before it: first the record, then, behind a fence, the UAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoorbellStores {
    /// For the send word of the doorbell record, as it lies in memory.
    pub record: u32,
    /// For the doorbell register, as it lies in memory.
    pub uar: u64,
}

/// A commit that may still be rolled back. There is one of each, so it cannot be rolled back twice.
#[derive(Debug, PartialEq, Eq)]
pub struct Commit {
    /// Which queue: rings do not overlap.
    pub(super) ring: usize,
    /// Which commit.
    pub(super) serial: u64,
    pub(super) from: u32,
    pub(super) upto: u32,
}

impl Commit {
    /// The running WQEBB count at the first request it covers.
    pub const fn from(&self) -> u32 {
        self.from
    }

    /// The running WQEBB count behind the last request it covers.
    pub const fn upto(&self) -> u32 {
        self.upto
    }
}
