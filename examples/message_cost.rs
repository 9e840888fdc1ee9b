//! What a message and its answer cost the CPU, if threads send and receive them: both ends of a connection are called by one thread in turn, so no wait is long and
//! other load of the machine changes no count. For `scripts/message-cost`.
//!
//!     message_cost DEVICE BYTES ROUNDS

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use doorbell::{Access, Device, MessageConfig, MessageQueue, Region, Slice};

/// Round trips between two looks at the clock.
const BATCH: u32 = 100;
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(10));

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| arguments.next().context(what);
    let device = next("DEVICE")?;
    let (len_bytes, rounds): (u64, u32) = (next("BYTES")?.parse()?, next("ROUNDS")?.parse()?);
    let domain = Device::open(&device)?.protection_domain();
    let mut left = MessageQueue::new(&domain, &MessageConfig::default())?;
    let mut right = MessageQueue::new(&domain, &MessageConfig::default())?;
    left.connect(&right.address())?;
    right.connect(&left.address())?;
    let region = Region::alloc(&domain, 2 * len_bytes.max(1), Access::ALL)?;
    let out = [region.slice(0, len_bytes)?];
    let into = [region.slice(len_bytes, len_bytes)?];
    let mut best = Duration::MAX;
    for _ in 0..rounds.div_ceil(BATCH) {
        let start = Instant::now();
        for _ in 0..BATCH {
            round_trip(&mut left, &mut right, &out, &into)?;
        }
        best = best.min(start.elapsed() / BATCH);
    }
    println!("{} ns", best.as_nanos());
    Ok(())
}

/// Counted by callgrind, which finds it by its name.
#[inline(never)]
fn round_trip(
    left: &mut MessageQueue,
    right: &mut MessageQueue,
    out: &[Slice<'_>],
    into: &[Slice<'_>],
) -> doorbell::Result<()> {
    let message = left.start_send_now(out, TIMEOUT)?;
    right.recv_now(into, TIMEOUT)?;
    let answer = right.start_send_now(out, TIMEOUT)?;
    left.recv_now(into, TIMEOUT)?;
    left.wait_send_now(&message, TIMEOUT)?;
    right.wait_send_now(&answer, TIMEOUT)
}
