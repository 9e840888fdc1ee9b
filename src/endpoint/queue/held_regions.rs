//! What a work request holds while it is in flight.

use crate::region::Region;

/// What a work request in flight holds and what its completion will need.
#[derive(Debug)]
pub(in crate::endpoint) struct WorkInFlight {
    pub(in crate::endpoint) wr_id: u64,
    /// Running count of ring entries behind it.
    pub(in crate::endpoint) end: u32,
    #[expect(
        dead_code,
        reason = "held for as long as the work is in flight, and then dropped"
    )]
    pub(in crate::endpoint) held: HeldRegions,
}

/// Regions that must live until the device is done with a work request: four of them without an allocation.
#[derive(Debug, Default)]
pub(in crate::endpoint) struct HeldRegions {
    few: [Option<Region>; 4],
    /// Rare, and every place of a queue has one: so not in here.
    more: Option<Box<HeldRegions>>,
}

impl Drop for HeldRegions {
    #[inline]
    fn drop(&mut self) {
        // The thread that reaps holds a lock that threads need to end waits, and dropping the last handle of memory that a GPU has mapped may have to
        // wait for the GPU.
        for region in self.few.iter_mut().filter_map(Option::take) {
            region.drop_deferred();
        }
    }
}

impl HeldRegions {
    #[inline]
    pub(in crate::endpoint) fn hold(&mut self, region: &Region) {
        for place in &mut self.few {
            match place {
                Some(held) if held.is(region) => return,
                Some(_) => {}
                None => {
                    *place = Some(region.clone());
                    return;
                }
            }
        }
        self.more.get_or_insert_default().hold(region);
    }
}
