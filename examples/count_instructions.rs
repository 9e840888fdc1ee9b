//! The hot paths in a loop, for valgrind to count their instructions: see `scripts/count-instructions`.
#![allow(unsafe_code)] // Reason: it gives the queues their memory.

use std::hint::black_box;

use doorbell_wire::bytecode::{Program, Role, Targets};
use doorbell_wire::mlx5::{
    CqRing, CqRingConfig, DataSegment, SendQueue, SendQueueConfig, SendRequest,
};

const DEPTH: u32 = 1024;

#[repr(align(64))]
struct Memory<const BYTES: usize>([u8; BYTES]);

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let case = arguments.next().unwrap_or_default();
    let rounds: u32 = arguments.next().unwrap_or_default().parse()?;
    match case.as_str() {
        "post" => post(rounds)?,
        "peek" => peek(rounds)?,
        _ => anyhow::bail!("usage: count_instructions post|peek ROUNDS"),
    }
    Ok(())
}

/// One signaled RDMA_WRITE of 64 bytes from one piece of memory: request, post, commit, and the release that makes room again.
fn post(rounds: u32) -> anyhow::Result<()> {
    let mut ring = Box::new(Memory([0; DEPTH as usize * 64]));
    let mut targets = Targets::new();
    let record = targets
        .register("record", Role::DoorbellRecord, 8)
        .dword(4)?;
    let page = targets.register("uar", Role::Uar, 4096);
    // SAFETY: the ring is that long and outlives the queue.
    let mut queue = unsafe {
        SendQueue::new(SendQueueConfig {
            ring: ring.0.as_mut_ptr(),
            wqebb_count: DEPTH,
            qpn: 0x12,
            max_segments: 4,
            max_inline_bytes: 64,
            record,
            uar: [page.block(0x800, 256)?, page.block(0x900, 256)?],
        })?
    };
    let mut program = Program::new(&targets);
    for round in 0..rounds {
        let end = one_post(&mut queue, &mut program, black_box(round));
        queue.release(end)?;
        program.clear();
    }
    Ok(())
}

/// The measured function. Not inlined: callgrind counts while it runs, prologue included.
#[inline(never)]
fn one_post(queue: &mut SendQueue, program: &mut Program, round: u32) -> u32 {
    let local = [DataSegment {
        len_bytes: 64,
        lkey: 0x1234,
        addr: 0x7f00_0000_0000 + u64::from(round),
    }];
    let request = SendRequest::write(0x7e00_0000_0000, 0x5678)
        .segments(&local)
        .signaled(true);
    let posted = queue.post(&request).expect("the queue has room");
    queue.commit(program).expect("the program has room");
    posted.end()
}

/// One wait, and the clearing of its mark, which the stream would do.
fn peek(rounds: u32) -> anyhow::Result<()> {
    let mut ring = Box::new(Memory([0; DEPTH as usize * 64]));
    let mut marks = Box::new([0u32; DEPTH as usize]);
    let mut record = Box::new(0u32);
    let mut targets = Targets::new();
    let completions = targets.register("cq", Role::Completions, u64::from(DEPTH) * 64);
    let marks_target = targets.register("marks", Role::Marks, u64::from(DEPTH) * 4);
    // SAFETY: the three are that long and outlive the queue.
    let queue = unsafe {
        CqRing::new(CqRingConfig {
            ring: ring.0.as_mut_ptr(),
            cqe_count: DEPTH,
            record: &raw mut *record,
            marks: marks.as_mut_ptr(),
            completions,
            marks_target,
        })?
    };
    let mut program = Program::new(&targets);
    for round in 0..rounds {
        one_peek(&queue, &mut program, black_box(round));
        queue.abort_peek(round);
        program.clear();
    }
    Ok(())
}

#[inline(never)]
fn one_peek(queue: &CqRing, program: &mut Program, round: u32) {
    queue.peek(round, program).expect("the program has room");
}
