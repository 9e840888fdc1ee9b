//! Numbers of work requests in verbs: which one, and of which generation of the queue pair.

/// The running position of a work request in its queue, in the generation of that number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WorkId {
    pub(super) generation: u32,
    pub(super) position: u32,
}

impl WorkId {
    pub(super) fn to_wr_id(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.position)
    }

    pub(super) fn from_wr_id(wr_id: u64) -> WorkId {
        WorkId {
            generation: (wr_id >> 32) as u32,
            position: wr_id as u32,
        }
    }
}
