//! The words by which streams and the thread of the matcher tell each other how far a receive is.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::bytecode::{Fence, Program};
use crate::region::{Access, ProtectionDomain, Region};

/// Bytes of a place: no two share a cache line, because streams poll them.
const PLACE_BYTES: u64 = 64;
/// Offsets in a place: the stream has reached the receive; the message is in its memory.
const REACHED: u64 = 0;
const DONE: u64 = 4;

/// Places for the words of receives, which are used again.
pub(super) struct WordPlaces {
    region: Region,
    count: u32,
    free: Mutex<Vec<FreePlace>>,
}

/// A place that is not in use.
#[derive(Clone, Copy)]
struct FreePlace {
    index: u32,
    /// How often it was used.
    number: u32,
}

/// A place that is in use. Its two words are set to the number of the use.
pub(super) struct WordPlace {
    places: Arc<WordPlaces>,
    index: u32,
    number: u32,
}

impl WordPlaces {
    pub(super) fn new(domain: &ProtectionDomain, count: u32) -> Result<Arc<WordPlaces>> {
        let bytes = u64::from(count) * PLACE_BYTES;
        let region = Region::alloc(domain, bytes, Access::LOCAL_WRITE)?;
        let free = (0..count).rev().map(|index| FreePlace { index, number: 0 });
        Ok(Arc::new(WordPlaces {
            region,
            count,
            free: Mutex::new(free.collect()),
        }))
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// A place, if one is free.
    pub(super) fn take(self: &Arc<Self>) -> Option<Arc<WordPlace>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let FreePlace { index, number } = free.pop()?;
        Some(Arc::new(WordPlace {
            places: Arc::clone(self),
            index,
            number: number.wrapping_add(1),
        }))
    }
}

impl WordPlace {
    pub(super) fn region(&self) -> &Region {
        &self.places.region
    }

    fn offset(&self, word: u64) -> u64 {
        u64::from(self.index) * PLACE_BYTES + word
    }

    /// What the stream executes: it tells that it is here, behind everything before, and waits.
    ///
    /// # Errors
    /// None that are known: the words are within the region.
    pub(super) fn program(&self) -> Result<Program> {
        let region = self.region();
        let mut program = Program::new(region.targets());
        program.fence(Fence::WORK_BEFORE_FLAG)?;
        let reached = region.target().dword(self.offset(REACHED))?;
        program.store_dword(reached, self.number)?;
        let done = region.target().dword(self.offset(DONE))?;
        program.poll_geq(done, self.number)?;
        Ok(program)
    }

    /// Whether the stream has told that it is here.
    pub(super) fn is_reached(&self) -> bool {
        let found = self.region().load_u32(self.offset(REACHED));
        found.is_ok_and(|found| found == self.number)
    }

    /// Lets the stream go on.
    pub(super) fn set_done(&self) {
        // Within the region, so it does not fail.
        let _ = self.region().store_u32(self.offset(DONE), self.number);
    }
}

impl Drop for WordPlace {
    fn drop(&mut self) {
        let mut free = (self.places.free.lock()).unwrap_or_else(PoisonError::into_inner);
        free.push(FreePlace {
            index: self.index,
            number: self.number,
        });
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn places_come_back_with_another_number() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let places = WordPlaces::new(&domain, 2).unwrap();
        let [first, second] = [(); 2].map(|()| places.take().unwrap());
        assert!(places.take().is_none());
        assert_eq!((first.index, second.index), (0, 1));
        let word = first.offset(REACHED);
        places.region.store_u32(word, first.number).unwrap();
        assert!(first.is_reached() && !second.is_reached());
        drop(first);
        // What the use before has left means nothing.
        let again = places.take().unwrap();
        assert_eq!((again.index, again.number), (0, 2));
        assert!(!again.is_reached());
    }
}
