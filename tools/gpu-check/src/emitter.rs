//! How fast kernels make work requests.

use anyhow::{Result, ensure};
use doorbell::{CudaContext, CudaStream, TimingEvent};
use serde_json::{Value, json};

use super::figures::figure;
use super::gpu::{Gpu, is_few, median};
use super::kernels::{BLOCKS, Kernels, WITHOUT};

/// `struct measured_emits`.
#[repr(C)]
struct Emits {
    ring: u64,
    count: u32,
    reserved: u32,
}

/// Work requests a second that kernels write when no NIC consumes them: the emitter alone, into memory that is no queue, and with all that a
/// queue is but the NIC.
pub fn emitter(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "emitter")?;
    let threads = 128;
    let count = if short { 2 } else { 4096 };
    let ring = gpu.context.alloc(64 * u64::from(BLOCKS * threads))?;
    let emits = Emits {
        ring: ring.ptr(),
        count,
        reserved: 0,
    };
    let (start, end) = (
        TimingEvent::new(&gpu.context)?,
        TimingEvent::new(&gpu.context)?,
    );
    let mut rates = Vec::new();
    for _ in 0..if short { 2 } else { 9 } {
        start.record(&stream)?;
        measured.launch(&stream, c"gpu_check_emit", (BLOCKS, threads), &emits)?;
        end.record(&stream)?;
        end.synchronize()?;
        let seconds = end.since(&start)?.as_secs_f64();
        rates.push(f64::from(BLOCKS * threads) * f64::from(count) / seconds / 1e6);
    }
    let mut first = [0; 4];
    ring.copy_to_host(0, &mut first)?;
    // The last one's index and opcode, RDMA write, in the order of the wire.
    let expected = (count - 1) << 8 | 8;
    ensure!(
        u32::from_be_bytes(first) == expected,
        "the ring has {first:x?}"
    );
    let alone = figure(
        "work requests that kernels emit into memory that is no queue, millions a second",
        median(rates)?,
        false,
        100.0,
        &json!({"blocks": BLOCKS, "threads of each": threads}),
    );
    let (of_each, of_one) = if is_few(short) { (2, 1) } else { (32, 16) };
    let by_warps = flood(&gpu.context, &measured, BLOCKS, of_each, true)?;
    let by_threads = flood(&gpu.context, &measured, BLOCKS, of_each, false)?;
    let in_one = flood(&gpu.context, &measured, 1, of_one, true)?;
    // Few enough that each gets a slot within a second, which is the bound of such.
    let in_one_by_threads = flood(&gpu.context, &measured, 1, 1, false)?;
    let more = json!({
        "the same by threads on their own": by_threads,
        "by warps in one queue": in_one,
        "by threads on their own in one queue": in_one_by_threads,
    });
    let queued = figure(
        "work requests that warps reserve, emit, submit and ring, a queue for each block, no NIC, millions a second",
        by_warps,
        false,
        100.0,
        &more,
    );
    Ok(json!([alone, queued]))
}

/// `struct measured_flood`.
#[repr(C)]
struct FloodArgs {
    queues: u64,
    codes: u64,
    queue_count: u32,
    count: u32,
    by_warps: u32,
    threads: u32,
}

/// Threads of a block here.
const THREADS: u32 = 256;

/// Millions a second, in queues that lie in the GPU's memory with their doorbells, and have room for all.
fn flood(
    context: &CudaContext,
    measured: &Kernels,
    queue_count: u32,
    count: u32,
    by_warps: bool,
) -> Result<f64> {
    let stream = CudaStream::new(context, "flood")?;
    let of_queue = BLOCKS / queue_count * THREADS * count;
    let slots = of_queue.next_power_of_two();
    let all = u64::from(queue_count) * u64::from(slots);
    let states = context.alloc(512 * u64::from(queue_count))?;
    // What the host and the NIC would have: control block, record, registers, a completion that is none.
    let beside = context.alloc(512 * u64::from(queue_count))?;
    let mut bytes = [0; 512];
    bytes[256..].fill(0xff);
    beside.copy_from_host(0, &bytes.repeat(queue_count as usize))?;
    let marks = context.alloc(4 * all)?;
    marks.copy_from_host(0, &vec![0; 4 * all as usize])?;
    let ring = context.alloc(64 * all)?;
    let mut views = Vec::new();
    for queue in 0..u64::from(queue_count) {
        let (near, first) = (beside.ptr() + 512 * queue, queue * u64::from(slots));
        let addresses = [
            states.ptr() + 512 * queue,
            near,
            marks.ptr() + 4 * first,
            // Doorbells are for a host that rings.
            0,
            ring.ptr() + 64 * first,
            near + 128,
            near + 192,
            near + 200,
            near + 256,
            near + 136,
        ];
        views.extend(addresses.iter().flat_map(|it| it.to_ne_bytes()));
        // Behind the number of the queue pair: no place for what additions find, and shared by threads.
        let numbers = [slots - 1, 0, slots, 7, 0, 0, 0, 0];
        views.extend(numbers.iter().flat_map(|it| it.to_ne_bytes()));
    }
    let queues = context.alloc(views.len() as u64)?;
    queues.copy_from_host(0, &views)?;
    let codes = context.alloc(4 * u64::from(BLOCKS * THREADS))?;
    let parameter = FloodArgs {
        queues: queues.ptr(),
        codes: codes.ptr(),
        queue_count,
        count,
        by_warps: by_warps.into(),
        threads: THREADS,
    };
    let (start, end) = (TimingEvent::new(context)?, TimingEvent::new(context)?);
    let mut rates = Vec::new();
    for lap in 0..3 {
        // As if the lap before were complete.
        let begin = lap * slots;
        let mut state = [0_u32; 128];
        for at in [0, 33, 64] {
            state[at] = begin;
        }
        let state: Vec<u8> = state.iter().flat_map(|word| word.to_ne_bytes()).collect();
        states.copy_from_host(0, &state.repeat(queue_count as usize))?;
        codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat((BLOCKS * THREADS) as usize))?;
        start.record(&stream)?;
        measured.launch(&stream, c"gpu_check_flood", (BLOCKS, THREADS), &parameter)?;
        end.record(&stream)?;
        end.synchronize()?;
        let seconds = end.since(&start)?.as_secs_f64();
        rates.push(f64::from(of_queue) * f64::from(queue_count) / seconds / 1e6);
        let mut found = vec![0; (4 * BLOCKS * THREADS) as usize];
        codes.copy_to_host(0, &mut found)?;
        ensure!(found.iter().all(|byte| *byte == 0), "a thread has a code");
        let mut found = vec![0; 512 * queue_count as usize];
        states.copy_to_host(0, &mut found)?;
        for (queue, state) in found.chunks(512).enumerate() {
            let (words, _) = state.as_chunks::<4>();
            let [reserved, rung] = [words[0], words[33]].map(u32::from_ne_bytes);
            ensure!(
                (reserved, rung) == (begin + of_queue, begin + of_queue),
                "queue {queue}, lap {lap}: {reserved} reserved and {rung} rung, not {}",
                begin + of_queue
            );
        }
    }
    median(rates)
}
