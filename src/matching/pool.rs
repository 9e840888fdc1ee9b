//! Memory for the messages of a peer that no receive has taken.

use crate::Result;
use crate::region::{Access, ProtectionDomain, Region, Slice};

/// Blocks begin at multiples of this.
const BLOCK_ALIGN: u64 = 64;

/// Blocks for messages without a receive. A message that its sender keeps counts as one of them, and uses no memory.
pub(super) struct UnexpectedPool {
    pub(super) region: Region,
    stride: u64,
    /// Messages that may be here while the connection works.
    limit: u32,
    /// `limit`, and one for each slot: what had arrived before a failure has room.
    blocks: u32,
    count: u32,
    free: Vec<u32>,
    /// The block behind the others, for a message on its way out of its slot into memory that the CPU cannot access.
    is_passage_free: bool,
}

/// A block of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PoolBlock(u32);

impl UnexpectedPool {
    pub(super) fn new(
        domain: &ProtectionDomain,
        limit: u32,
        slots: u32,
        eager_bytes: u32,
    ) -> Result<UnexpectedPool> {
        let stride = u64::from(eager_bytes.max(1)).next_multiple_of(BLOCK_ALIGN);
        let blocks = limit + slots;
        let bytes = (u64::from(blocks) + 1) * stride;
        // Read by the NIC of this process.
        let region = Region::alloc(domain, bytes, Access::REMOTE_READ)?;
        Ok(UnexpectedPool {
            region,
            stride,
            limit,
            blocks,
            count: 0,
            free: (0..blocks).rev().collect(),
            is_passage_free: true,
        })
    }

    /// Counts a message without memory. Returns whether there was room.
    pub(super) fn enter(&mut self) -> bool {
        let has_room = self.count < self.limit;
        self.count += u32::from(has_room);
        has_room
    }

    /// The connection has failed: all messages that are in slots may leave them.
    pub(super) fn admit_slots(&mut self) {
        self.limit = self.blocks;
    }

    /// It is over.
    pub(super) fn leave(&mut self) {
        self.count -= 1;
    }

    /// A block for a message.
    pub(super) fn take(&mut self) -> Option<PoolBlock> {
        // There are at least as many blocks as messages are allowed.
        self.enter().then(|| self.free.pop().map(PoolBlock))?
    }

    /// The block for a message that does not stay.
    pub(super) fn take_passage(&mut self) -> Option<PoolBlock> {
        std::mem::take(&mut self.is_passage_free).then_some(PoolBlock(self.blocks))
    }

    pub(super) fn give_back(&mut self, PoolBlock(index): PoolBlock) {
        if index == self.blocks {
            self.is_passage_free = true;
        } else {
            self.free.push(index);
            self.leave();
        }
    }

    pub(super) fn offset(&self, PoolBlock(index): PoolBlock) -> u64 {
        u64::from(index) * self.stride
    }

    /// # Errors
    /// None that are known: a message of that length is eager, and a block is as long as those.
    pub(super) fn slice(&self, block: PoolBlock, len_bytes: u64) -> Result<Slice<'_>> {
        self.region.slice(self.offset(block), len_bytes)
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn messages_with_and_without_memory_are_counted_together() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let mut pool = UnexpectedPool::new(&domain, 2, 1, 100).unwrap();
        let first = pool.take().unwrap();
        assert!(pool.enter());
        assert!(!pool.enter() && pool.take().is_none());
        let passage = pool.take_passage().unwrap();
        assert!(pool.take_passage().is_none());
        let offsets = [first, passage].map(|block| pool.offset(block));
        assert_eq!(offsets, [0, 384]);
        assert_eq!(pool.slice(passage, 100).map(|it| it.len_bytes()), Ok(100));
        pool.give_back(passage);
        assert!(pool.take_passage().is_some());
        pool.leave();
        let second = pool.take().unwrap();
        assert_eq!(pool.offset(second), 128);
        pool.give_back(first);
        assert_eq!(pool.take(), Some(first));
        // The one in the slot.
        assert_eq!(pool.take(), None);
        pool.admit_slots();
        let third = pool.take().unwrap();
        assert_eq!(pool.offset(third), 256);
        assert_eq!(pool.take(), None);
        // Without room for any, one may still pass.
        let mut none = UnexpectedPool::new(&domain, 0, 1, 0).unwrap();
        assert!(!none.enter() && none.take_passage().is_some());
    }
}
