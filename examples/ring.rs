//! A ring of processes: each round, every rank's block of bytes goes once around, all of it queued on a stream, and every byte is
//! checked. A launcher starts it, such as `mpirun -n 4 target/debug/examples/ring`; or plain shells do:
//!
//! ```sh
//! cargo build --example ring
//! for rank in 0 1 2 3; do
//!     RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 target/debug/examples/ring 100 65536 &
//! done; wait
//! ```
//!
//! The arguments are the number of rounds, the bytes of a block, and the time limit of a round, and of each wait in it, in seconds (30). If a rank ends early, every other one
//! ends with an error that names it.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, ensure};
use doorbell::{
    Access, EndpointConfig, Executor, Group, GroupConfig, HostStream, QueueKind, Region, Work,
};

#[allow(dead_code)] // the tests start `ring` themselves
fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| match arguments.next() {
        Some(text) => text.parse().with_context(|| format!("`{text}`")),
        None => Ok(default),
    };
    let (rounds, len_bytes, limit_s) = (number(10)?, number(65536)?, number(30)?);
    ring(rounds, len_bytes, Duration::from_secs(limit_s), |_, _| {})
}

/// Joins the group, goes `rounds` times around, each within `limit`, and leaves; `after` gets each finished round and the rank of this process.
pub fn ring(
    rounds: u64,
    len_bytes: u64,
    limit: Duration,
    after: impl Fn(u32, u64),
) -> anyhow::Result<()> {
    let endpoint = EndpointConfig::default().wait_timeout(Some(limit));
    let mut group = Group::from_env_with(&GroupConfig::default().endpoint(endpoint))?;
    let (rank, size) = (group.rank(), group.size());
    ensure!(
        (2..=64).contains(&size),
        "a ring has 2 to 64 ranks, not {size}"
    );
    let blocks = Region::alloc(
        group.domain(),
        u64::from(size) * len_bytes,
        Access::LOCAL_WRITE,
    )?;
    let stream = HostStream::new("ring")?;
    for round in 0..rounds {
        if let Err(error) = around(&mut group, &stream, &blocks, len_bytes, round, limit) {
            // The endpoint only reports that it failed; the group has the cause.
            return Err(group.cause_of(error).into());
        }
        check(&blocks, len_bytes, size, round)?;
        after(rank, round);
    }
    // No rank leaves while another one may still wait for an acknowledgement.
    group.barrier()?;
    group.leave()?;
    let total = rounds * u64::from(size) * len_bytes;
    writeln!(
        std::io::stdout(),
        "rank {rank} of {size}: {total} bytes, all of them right"
    )?;
    Ok(())
}

/// One round: a kernel writes this rank's block, and in each step every rank hands on the block that it got last.
fn around(
    group: &mut Group,
    stream: &HostStream,
    blocks: &Region,
    len_bytes: u64,
    round: u64,
    limit: Duration,
) -> doorbell::Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    // The block that this rank has after so many steps.
    let block = |step: u32| {
        let origin = (rank + size - step) % size;
        blocks.slice(u64::from(origin) * len_bytes, len_bytes)
    };
    let kernel = blocks.clone();
    stream.launch(move || {
        let bytes: Vec<u8> = (0..len_bytes).map(|at| pattern(rank, round, at)).collect();
        let _ = kernel.write(u64::from(rank) * len_bytes, &bytes);
    })?;
    let mut tickets = Vec::new();
    for step in 1..size {
        group
            .endpoint(before)?
            .post_recv(step.into(), &[block(step)?])?;
    }
    for step in 1..size {
        let sent = group.endpoint(next)?;
        tickets.push(sent.stream_queue_send(stream, &Work::send(&[block(step - 1)?]))?);
        tickets.push(sent.stream_wait_cq(stream, QueueKind::Send)?);
        let received = group.endpoint(before)?;
        tickets.push(received.stream_wait_cq(stream, QueueKind::Recv)?);
    }
    stream.synchronize(Some(limit))?;
    tickets
        .iter()
        .try_for_each(|ticket| ticket.check().map(drop))
}

fn check(blocks: &Region, len_bytes: u64, size: u32, round: u64) -> anyhow::Result<()> {
    let mut got = vec![0; len_bytes as usize];
    for origin in 0..size {
        blocks.read(u64::from(origin) * len_bytes, &mut got)?;
        let wrong = (0..len_bytes).find(|&at| got[at as usize] != pattern(origin, round, at));
        ensure!(
            wrong.is_none(),
            "round {round}: byte {wrong:?} of rank {origin}'s block is wrong"
        );
    }
    Ok(())
}

/// Byte `at` of a rank's block in a round: different in each, so that a block of another rank or round is detected.
fn pattern(rank: u32, round: u64, at: u64) -> u8 {
    let mixed = (u64::from(rank) << 40 ^ round << 20 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}
