//! A UAR page: its registers, and the queues that use it.

use crate::device::dma::UarRegister;

/// Where the doorbell registers of a page lie: two of libmlx5's, each with the other half of its BlueFlame buffer
/// (`MLX5_BF_OFFSET` and on, 256 bytes each). What is copied into a buffer begins with the same 8 bytes as a doorbell, and
/// ends before the next.
pub(crate) const DOORBELLS: [usize; 4] = [0x800, 0x900, 0xa00, 0xb00];
/// Where completion queues are armed (`MLX5_CQ_DOORBELL`).
pub(crate) const ARM: usize = 0x20;

/// A page.
#[derive(Debug)]
pub(super) struct UarPage {
    pub(super) doorbells: [UarRegister; 4],
    pub(super) arm: UarRegister,
    pub(super) qps: Vec<usize>,
    pub(super) cqs: Vec<usize>,
    pub(super) quiet: u32,
}

/// The stores to a page's registers since the last read.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageStores {
    pub(super) doorbells: [Option<u64>; 4],
    pub(super) armed: bool,
}

impl UarPage {
    #[inline]
    pub(super) fn look(&mut self) -> PageStores {
        let rung = PageStores {
            doorbells: self.doorbells.map(UarRegister::take),
            armed: self.arm.take().is_some(),
        };
        self.quiet = if rung.armed || rung.doorbells != [None; 4] {
            0
        } else {
            self.quiet.saturating_add(1)
        };
        rung
    }
}
