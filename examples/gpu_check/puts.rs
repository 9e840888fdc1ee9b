//! Blocks whose threads post on their own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell::{
    Access, CudaContext, CudaStream, Device, DeviceBuffer, Endpoint, EndpointConfig, Executor,
    KernelQueue, Region,
};
use serde_json::{Value, json};

use super::gpu::Gpu;
use super::kernels::{BLOCKS, Kernels, WITHOUT};

/// `struct measured_puts`.
#[repr(C)]
pub struct Puts {
    pub queues: u64,
    pub codes: u64,
    pub local_addr: u64,
    pub remote_addr: u64,
    pub lkey: u32,
    pub rkey: u32,
    pub queue_count: u32,
    pub puts: u32,
}

/// Blocks that post to one queue, and to one each, over the software NIC directly and by the proxy: nothing is lost, doubled or torn.
pub fn puts_of_blocks(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let mut found = Vec::new();
    for device in ["softcx", "softcx,path=proxy"] {
        for queues in [1, BLOCKS] {
            let puts = if short { 4 } else { 200 };
            let seconds = put(&gpu.context, &measured, device, queues, puts)
                .with_context(|| format!("{device}, {queues} queues"))?;
            let count = 2.0 * f64::from(BLOCKS * puts);
            found.push(json!({"device": device, "queues": queues, "operations": count, "operations a second": count / seconds}));
        }
    }
    Ok(json!(found))
}

fn put(
    context: &CudaContext,
    measured: &Kernels,
    device: &str,
    queue_count: u32,
    puts: u32,
) -> Result<f64> {
    let stream = CudaStream::new(context, "puts")?;
    let domain = Device::open(device)?.protection_domain();
    let config = EndpointConfig {
        send_depth: 256,
        ..EndpointConfig::default()
    };
    let bytes = 4096 * 2;
    let local = Region::alloc(&domain, bytes, Access::ALL)?;
    let remote = Region::alloc(&domain, bytes, Access::ALL)?;
    for thread in 0..BLOCKS {
        let value = u64::from(thread) | 0x5a5a_0000_0000_0000;
        local.write(8 + 8 * u64::from(thread), &value.to_ne_bytes())?;
    }
    let mut ends: Vec<(Endpoint, Endpoint)> = Vec::new();
    let mut queues: Vec<KernelQueue> = Vec::new();
    let mut views: Vec<u8> = Vec::new();
    for _ in 0..queue_count {
        let mut a = Endpoint::new(&domain, &config)?;
        let mut b = Endpoint::new(&domain, &config)?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let queue = KernelQueue::on_gpu(context, &mut a)?;
        views.extend(queue.view().to_bytes());
        queues.push(queue);
        ends.push((a, b));
    }
    let (local_addr, lkey) = queues[0].local(&local.slice(0, bytes)?)?;
    let memory: DeviceBuffer = context.alloc(views.len() as u64)?;
    memory.copy_from_host(0, &views)?;
    let codes = context.alloc(4 * u64::from(BLOCKS))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(BLOCKS as usize))?;
    let parameter = Puts {
        queues: memory.ptr(),
        codes: codes.ptr(),
        local_addr,
        remote_addr: remote.remote().addr,
        lkey,
        rkey: remote.remote().rkey,
        queue_count,
        puts,
    };
    let start = Instant::now();
    measured.launch(&stream, c"gpu_check_put", (BLOCKS, 1), &parameter)?;
    stream.synchronize(Some(Duration::from_secs(40)))?;
    let seconds = start.elapsed().as_secs_f64();
    let mut found = vec![0; 4 * BLOCKS as usize];
    codes.copy_to_host(0, &mut found)?;
    let (found, _) = found.as_chunks::<4>();
    if let Some(at) = found.iter().position(|code| *code != [0; 4]) {
        bail!(
            "block {at} came to the code {}",
            i32::from_ne_bytes(found[at])
        );
    }
    let mut arrived = vec![0; 8 * (1 + BLOCKS as usize)];
    remote.read(0, &mut arrived)?;
    let (arrived, _) = arrived.as_chunks::<8>();
    let counted = u64::from_ne_bytes(arrived[0]);
    ensure!(
        counted == u64::from(BLOCKS * puts),
        "{counted} additions of {} were made",
        BLOCKS * puts
    );
    for (thread, bytes) in arrived[1..].iter().enumerate() {
        let value = u64::from_ne_bytes(*bytes);
        ensure!(
            value == thread as u64 | 0x5a5a_0000_0000_0000,
            "block {thread}: {value:x} arrived"
        );
    }
    // Before what they name.
    drop(queues);
    drop(ends);
    Ok(seconds)
}
