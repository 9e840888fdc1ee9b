//! Blocks whose threads post on their own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell::{
    Access, CudaContext, CudaStream, Device, DeviceBuffer, DeviceQueue, Endpoint, EndpointConfig,
    Error, Executor, QueueKind, Region, RemoteSlice, Work,
};
use serde_json::{Value, json};

use super::figures::figure;
use super::gpu::{Gpu, is_few, median};
use super::kernels::{BLOCKS, Kernels, WITHOUT};

/// `struct measured_puts`.
#[repr(C)]
pub struct PutArgs {
    pub queues: u64,
    pub codes: u64,
    pub local_addr: u64,
    pub remote_addr: u64,
    pub lkey: u32,
    pub rkey: u32,
    pub queue_count: u32,
    pub puts: u32,
    pub adds: u32,
    pub reserved: u32,
}

/// So much of what the NIC does for the host is what its own speed limits.
const LIMITED: f64 = 0.8;

/// Blocks that post to one queue, and to one each, over the software NIC directly and by the proxy: nothing is lost, doubled or torn.
pub fn puts_of_blocks(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let mut found = Vec::new();
    for device in ["softcx", "softcx,path=proxy"] {
        for queues in [1, BLOCKS] {
            let puts = if is_few(short) { 4 } else { 200 };
            let seconds = put(&gpu.context, &measured, device, queues, (puts, true))
                .with_context(|| format!("{device}, {queues} queues"))?;
            let count = 2.0 * f64::from(BLOCKS * puts);
            found.push(json!({"device": device, "queues": queues, "operations": count, "operations a second": count / seconds}));
        }
    }
    Ok(json!(found))
}

/// How fast kernels put 8 bytes each, against how fast the same NIC does the same when the host posts it.
pub fn rate_of_blocks(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let (puts, turns) = if is_few(short) { (4, 1) } else { (500, 3) };
    let count = f64::from(BLOCKS * puts);
    let mut found = Vec::new();
    for queues in [1, BLOCKS] {
        let (mut by_kernel, mut by_host) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            let seconds = put(&gpu.context, &measured, "softcx", queues, (puts, false))?;
            by_kernel.push(count / seconds);
            by_host.push(count / put_by_host("softcx", queues, puts)?);
        }
        let (by_kernel, by_host) = (median(by_kernel)?, median(by_host)?);
        let more = json!({"puts a second": by_kernel, "posted by the host, a second": by_host});
        let name = format!(
            "puts of 8 B that {BLOCKS} blocks make in {queues} queue(s) over softcx, of those that the NIC does when the host posts them"
        );
        found.push(figure(&name, by_kernel / by_host, false, LIMITED, &more));
    }
    Ok(json!(found))
}

fn config() -> EndpointConfig {
    EndpointConfig::default().send_depth(256)
}

/// The same puts, each signaled as theirs are, posted by one thread that takes completions when a queue is full.
fn put_by_host(device: &str, queue_count: u32, puts: u32) -> Result<f64> {
    let domain = Device::open(device)?.protection_domain();
    let bytes = 4096 * 2;
    let local = Region::alloc(&domain, bytes, Access::ALL)?;
    let remote = Region::alloc(&domain, bytes, Access::ALL)?;
    let (to, rkey) = (remote.remote().addr, remote.remote().rkey);
    let mut ends: Vec<(Endpoint, Endpoint)> = Vec::new();
    for _ in 0..queue_count {
        let mut a = Endpoint::new(&domain, &config())?;
        let mut b = Endpoint::new(&domain, &config())?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        ends.push((a, b));
    }
    let start = Instant::now();
    let mut left = BLOCKS * puts;
    for _ in 0..puts {
        for block in 0..BLOCKS {
            let a = &mut ends[(block % queue_count) as usize].0;
            let place = 8 + 8 * u64::from(block);
            let data = [local.slice(place, 8)?];
            let work = Work::write(&data, RemoteSlice::at(to + place, rkey));
            loop {
                match a.post_send(&work) {
                    Ok(_) => break,
                    Err(Error::QueueFull { .. }) => {
                        while a.poll_cq(QueueKind::Send)?.is_some() {
                            left -= 1;
                        }
                    }
                    Err(error) => return Err(error.into()),
                }
                ensure!(start.elapsed() < SLOW, "the host's puts take too long");
            }
        }
    }
    while left > 0 {
        for (a, _) in &mut ends {
            while a.poll_cq(QueueKind::Send)?.is_some() {
                left -= 1;
            }
        }
        ensure!(
            start.elapsed() < SLOW,
            "{left} of the host's puts do not end"
        );
    }
    Ok(start.elapsed().as_secs_f64())
}

const SLOW: Duration = Duration::from_secs(40);

fn put(
    context: &CudaContext,
    measured: &Kernels,
    device: &str,
    queue_count: u32,
    (puts, adds): (u32, bool),
) -> Result<f64> {
    let stream = CudaStream::new(context, "puts")?;
    let domain = Device::open(device)?.protection_domain();
    let bytes = 4096 * 2;
    let local = Region::alloc(&domain, bytes, Access::ALL)?;
    let remote = Region::alloc(&domain, bytes, Access::ALL)?;
    for thread in 0..BLOCKS {
        let value = u64::from(thread) | 0x5a5a_0000_0000_0000;
        local.write(8 + 8 * u64::from(thread), &value.to_ne_bytes())?;
    }
    let mut ends: Vec<(Endpoint, Endpoint)> = Vec::new();
    let mut queues: Vec<DeviceQueue> = Vec::new();
    let mut views: Vec<u8> = Vec::new();
    for _ in 0..queue_count {
        let mut a = Endpoint::new(&domain, &config())?;
        let mut b = Endpoint::new(&domain, &config())?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let queue = DeviceQueue::on_gpu(context, &mut a)?;
        views.extend(queue.view().to_bytes());
        queues.push(queue);
        ends.push((a, b));
    }
    let (local_addr, lkey) = queues[0].local(&local.slice(0, bytes)?)?;
    let memory: DeviceBuffer = context.alloc(views.len() as u64)?;
    memory.copy_from_host(0, &views)?;
    let codes = context.alloc(4 * u64::from(BLOCKS))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(BLOCKS as usize))?;
    let parameter = PutArgs {
        queues: memory.ptr(),
        codes: codes.ptr(),
        local_addr,
        remote_addr: remote.remote().addr,
        lkey,
        rkey: remote.remote().rkey,
        queue_count,
        // None, at first: kernels are loaded by their first launch.
        puts: 0,
        adds: adds.into(),
        reserved: 0,
    };
    measured.launch(&stream, c"gpu_check_put", (BLOCKS, 1), &parameter)?;
    stream.synchronize(Some(SLOW))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(BLOCKS as usize))?;
    let parameter = PutArgs { puts, ..parameter };
    let start = Instant::now();
    measured.launch(&stream, c"gpu_check_put", (BLOCKS, 1), &parameter)?;
    stream.synchronize(Some(SLOW))?;
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
    let expected = if adds { BLOCKS * puts } else { 0 };
    ensure!(
        counted == u64::from(expected),
        "{counted} additions of {expected} were made"
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
