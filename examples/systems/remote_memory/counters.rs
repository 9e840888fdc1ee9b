//! Counters that all ranks increment: a line that one rank writes back is what another one asks for at the same time.

use anyhow::{Result, ensure};

use crate::node::{LINE_BYTES, Node};
use crate::random::Random;

/// Lines of the counters: few, so that ranks meet at them.
pub const LINES: u64 = 5;

/// Increments counters, and gives their lines back to their homes. No rank reads before it writes, so an increment that a late write-back overwrites is missing at the end. Returns what
/// all counters together have, on rank 0.
pub fn count(node: &mut Node, first_line: u64, increments: u64, seed: u64) -> Result<u64> {
    let mut random = Random::new(seed ^ u64::from(node.rank()) << 40);
    node.barrier()?;
    for _ in 0..increments {
        let line = first_line + random.below(LINES);
        node.atomic(line * LINE_BYTES, |count| count + 1)?;
        node.write_back(line)?;
    }
    node.barrier()?;
    let mut found = 0;
    if node.rank() == 0 {
        for line in first_line..first_line + LINES {
            let mut bytes = [0; 8];
            node.read(line * LINE_BYTES, &mut bytes)?;
            found += u64::from_le_bytes(bytes);
        }
        let made = increments * u64::from(node.size());
        println!("counters: {found} of {made} increments");
        ensure!(
            found == made,
            "{made} increments were made, and {found} are there"
        );
    }
    node.barrier()?;
    Ok(found)
}
