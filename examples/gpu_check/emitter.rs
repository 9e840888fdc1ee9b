//! How fast kernels make work requests.

use anyhow::{Result, ensure};
use doorbell::{CudaStream, TimingEvent};
use serde_json::{Value, json};

use super::figures::figure;
use super::gpu::{Gpu, median};
use super::kernels::{BLOCKS, Kernels, WITHOUT};

/// `struct measured_emits`.
#[repr(C)]
struct Emits {
    ring: u64,
    count: u32,
    reserved: u32,
}

/// Work requests a second that kernels write when nobody consumes them.
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
    Ok(figure(
        "work requests that kernels write when nobody consumes them, millions a second",
        median(rates)?,
        false,
        100.0,
        &json!({"blocks": BLOCKS, "threads of each": threads}),
    ))
}
