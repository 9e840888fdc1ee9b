//! The bytes of the messages: written before they are sent, and checked where they arrive.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use doorbell::{Region, Slice};

use super::pattern::Pattern;

/// Bytes that are written or checked at a time.
const PIECE_BYTES: usize = 4096;
/// Least length of a receive, so that an acknowledgement fits however short the messages are.
const ROOM_BYTES_MIN: u64 = 64;

/// The memory of one peer: the message to send, and behind it the place where the other peer's arrives.
#[derive(Debug)]
pub struct Messages {
    region: Region,
    room_bytes: u64,
    /// Seeds of the messages that are sent and of those that should arrive.
    seeds: [u64; 2],
    wrong: Mutex<Option<String>>,
}

impl Messages {
    /// Bytes of the region for messages of up to `max_bytes`.
    pub fn region_bytes(max_bytes: u64) -> u64 {
        2 * room_bytes(max_bytes)
    }

    /// Messages of up to `max_bytes` in a region of [`Messages::region_bytes`]. The two peers have the seeds in opposite order, so that
    /// neither takes its own message for the other's.
    pub fn new(region: Region, max_bytes: u64, seeds: [u64; 2]) -> Self {
        Self {
            region,
            room_bytes: room_bytes(max_bytes),
            seeds,
            wrong: Mutex::default(),
        }
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where the other peer's message arrives, from the start of the region.
    pub fn arrival_offset(&self) -> u64 {
        self.room_bytes
    }

    /// The message to send.
    pub fn leaving(&self, size_bytes: u64) -> doorbell::Result<Slice<'_>> {
        self.region.slice(0, size_bytes)
    }

    /// The place where messages arrive.
    pub fn arriving(&self) -> doorbell::Result<Slice<'_>> {
        self.region.slice(self.room_bytes, self.room_bytes)
    }

    /// Writes the message of a step. Runs on a stream: errors are kept for [`Messages::verdict`].
    pub fn fill(&self, step: u64, size_bytes: u64) {
        let pattern = Pattern::new(self.seeds[0], step);
        let mut piece = [0; PIECE_BYTES];
        for (offset, len_bytes) in pieces(size_bytes) {
            let bytes = &mut piece[..len_bytes];
            pattern.skip(offset).fill(bytes);
            if let Err(error) = self.region.write(offset, bytes) {
                return self.note(error.to_string());
            }
        }
    }

    /// Checks every byte of the message that has arrived. Runs on a stream too.
    pub fn inspect(&self, step: u64, size_bytes: u64) {
        let pattern = Pattern::new(self.seeds[1], step);
        let mut piece = [0; PIECE_BYTES];
        for (offset, len_bytes) in pieces(size_bytes) {
            let bytes = &mut piece[..len_bytes];
            if let Err(error) = self.region.read(self.room_bytes + offset, bytes) {
                return self.note(error.to_string());
            }
            if let Some((at, found, expected)) = pattern.skip(offset).mismatch(bytes) {
                let at = offset + at as u64;
                return self.note(format!(
                    "step {step}: byte {at} of {size_bytes} arrived as {found:#04x} instead of {expected:#04x}"
                ));
            }
        }
    }

    fn note(&self, what: String) {
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        wrong.get_or_insert(what);
    }

    /// Whether all was right so far.
    ///
    /// # Errors
    /// The first thing that was wrong.
    pub fn verdict(&self) -> Result<()> {
        let wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        match &*wrong {
            Some(what) => bail!("{what}"),
            None => Ok(()),
        }
    }
}

/// Length of each of the two parts: whole cache lines.
fn room_bytes(max_bytes: u64) -> u64 {
    max_bytes.max(ROOM_BYTES_MIN).next_multiple_of(64)
}

fn pieces(size_bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..size_bytes).step_by(PIECE_BYTES).map(move |offset| {
        (
            offset,
            (size_bytes - offset).min(PIECE_BYTES as u64) as usize,
        )
    })
}

#[cfg(test)]
mod tests {
    use doorbell::{Access, Device};

    use super::*;

    #[test]
    fn a_wrong_byte_anywhere_is_found_and_the_first_is_kept() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        for size in [1, 8, 4096, 9001] {
            let region = Region::alloc(&domain, Messages::region_bytes(size), Access::ALL).unwrap();
            let messages = Messages::new(region.clone(), size, [5, 5]);
            let mut bytes = vec![0; size as usize];
            messages.fill(3, size);
            region.read(0, &mut bytes).unwrap();
            region.write(messages.arrival_offset(), &bytes).unwrap();
            messages.inspect(3, size);
            messages.verdict().unwrap();
            let last = messages.arrival_offset() + size - 1;
            let right = bytes[size as usize - 1];
            region.write(last, &[right ^ 1]).unwrap();
            messages.inspect(3, size);
            messages.inspect(4, size);
            let error = messages.verdict().unwrap_err().to_string();
            let expected = format!("step 3: byte {} of {size} arrived as", size - 1);
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
