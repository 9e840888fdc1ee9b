//! Lanes, warps and blocks that post to shared queues, and the codes that a kernel gets without room or without a peer.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use doorbell::{
    Access, CudaContext, CudaStream, Device, DeviceQueue, Endpoint, EndpointConfig, Executor,
    ProtectionDomain, Region,
};
use serde_json::{Value, json};

use super::gpu::{Gpu, PORTABLE, Page, is_few};
use super::kernels::{Kernels, WITHOUT};
use super::puts::PutArgs;

const DEVICES: [&str; 2] = ["softcx", "softcx,path=proxy"];
/// More than the bound of the kernels.
const SOON: Duration = Duration::from_secs(30);
const EFULL: i32 = -15;
const EWORK: i32 = -19;

/// Queues of a GPU, with their peers.
struct PeeredQueues {
    // In the order in which they may go.
    queues: Vec<DeviceQueue>,
    ends: Vec<(Endpoint, Option<Endpoint>)>,
    views: doorbell::DeviceBuffer,
}

impl PeeredQueues {
    fn new(context: &CudaContext, domain: &ProtectionDomain, count: u32) -> Result<PeeredQueues> {
        let config = EndpointConfig::default().send_depth(256).ack_timeout(10);
        let (mut queues, mut ends, mut views) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let mut a = Endpoint::new(domain, &config)?;
            let mut b = Endpoint::new(domain, &config)?;
            a.connect(&b.address())?;
            b.connect(&a.address())?;
            let queue = DeviceQueue::on_gpu(context, &mut a)?;
            views.extend(queue.view().to_bytes());
            queues.push(queue);
            ends.push((a, Some(b)));
        }
        let memory = context.alloc(views.len() as u64)?;
        memory.copy_from_host(0, &views)?;
        Ok(PeeredQueues {
            queues,
            ends,
            views: memory,
        })
    }
}

/// `struct measured_posts`.
#[repr(C)]
struct PostArgs {
    queues: u64,
    codes: u64,
    data: u64,
    arrived: u64,
    local_addr: u64,
    remote_addr: u64,
    lkey: u32,
    rkey: u32,
    queue_count: u32,
    rounds: u32,
    how: u32,
    blocks: u32,
    threads: u32,
    reserved: u32,
}

/// Each lane for itself, warps and halves of warps, and blocks, in queues that they share and in one of each block: every word arrives in
/// every round, each addition is made once, and each signal comes.
pub fn posts_of_groups(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let (blocks, threads, rounds) = if is_few(short) {
        (2, 64, 4)
    } else {
        (8, 128, 50)
    };
    let mut found = Vec::new();
    for device in DEVICES {
        for queues in [1, blocks] {
            for (how, name) in (0..).zip(["lanes", "warps", "blocks"]) {
                let posts = PostArgs {
                    queues: 0,
                    codes: 0,
                    data: 0,
                    arrived: 0,
                    local_addr: 0,
                    remote_addr: 0,
                    lkey: 0,
                    rkey: 0,
                    queue_count: queues,
                    rounds,
                    how,
                    blocks,
                    threads,
                    reserved: 0,
                };
                let seconds = post(&gpu.context, &measured, device, posts)
                    .with_context(|| format!("{device}, {queues} queues, {name}"))?;
                found.push(
                    json!({"device": device, "queues": queues, "posted by": name, "us a round": seconds * 1e6 / f64::from(rounds)}),
                );
            }
        }
    }
    Ok(json!(found))
}

fn post(
    context: &CudaContext,
    measured: &Kernels,
    device: &str,
    mut posts: PostArgs,
) -> Result<f64> {
    const ARRIVED: u64 = 1 << 15;
    let stream = CudaStream::new(context, "posts")?;
    let domain = Device::open(device)?.protection_domain();
    let page = Page::new(PORTABLE, false)?;
    let start = NonNull::new(page.host).context("a page at 0")?;
    // SAFETY: mapped, and never freed; all references to it are to atomics.
    let region = unsafe { Region::register(&domain, start, 1 << 16, Access::ALL) }?;
    let PeeredQueues {
        queues,
        ends,
        views,
    } = PeeredQueues::new(context, &domain, posts.queue_count)?;
    let threads = posts.blocks * posts.threads;
    let codes = context.alloc(4 * u64::from(threads))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(threads as usize))?;
    for queue in &queues {
        (posts.local_addr, posts.lkey) = queue.local(&region.slice(0, 1 << 16)?)?;
    }
    (posts.queues, posts.codes) = (views.ptr(), codes.ptr());
    (posts.data, posts.arrived) = (page.gpu, page.gpu + ARRIVED);
    posts.remote_addr = region.remote().addr + ARRIVED;
    posts.rkey = region.remote().rkey;
    let start = Instant::now();
    let shape = (posts.blocks, posts.threads);
    measured.launch(&stream, c"gpu_check_post", shape, &posts)?;
    stream.synchronize(Some(SOON))?;
    let seconds = start.elapsed().as_secs_f64();
    let mut found = vec![0; 4 * threads as usize];
    codes.copy_to_host(0, &mut found)?;
    let (found, _) = found.as_chunks::<4>();
    for (thread, code) in found.iter().enumerate() {
        let code = i32::from_ne_bytes(*code);
        ensure!(code == 0, "thread {thread} came to the code {code}");
    }
    let arrived = |at: u32| {
        let word = page.long(ARRIVED as usize + 8 * at as usize);
        word.load(std::sync::atomic::Ordering::Acquire)
    };
    for thread in 0..threads {
        let expected = u64::from(posts.rounds) << 32 | u64::from(thread);
        let word = arrived(thread);
        ensure!(word == expected, "thread {thread}: {word:x} arrived");
    }
    let is_blocks = posts.how == 2;
    let expected = u64::from(if is_blocks { 0 } else { threads * posts.rounds });
    let counted = arrived(threads);
    ensure!(
        counted == expected,
        "{counted} additions of {expected} were made"
    );
    for block in 0..posts.blocks {
        let expected = u64::from(if is_blocks { posts.rounds } else { 0 });
        let signal = arrived(threads + 1 + block);
        ensure!(signal == expected, "block {block}: signal {signal}");
    }
    drop(queues);
    drop(ends);
    Ok(seconds)
}

/// `struct measured_full`.
#[repr(C)]
struct FullQueueArgs {
    queue: u64,
    codes: u64,
    took_ns: u64,
    bound_ns: u64,
}

/// A queue that no NIC empties and a peer that is gone each reach a kernel as a code within its bound.
pub fn failures() -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let mut found = Vec::new();
    for device in DEVICES {
        let late = full(&gpu.context, &measured, device).context(device)?;
        let dead = dead_peer(&gpu.context, &measured, device).context(device)?;
        found.push(json!({"device": device, "later than the bound us": late, "dead peer known after us": dead}));
    }
    Ok(json!(found))
}

fn full(context: &CudaContext, measured: &Kernels, device: &str) -> Result<f64> {
    let stream = CudaStream::new(context, "full")?;
    let domain = Device::open(device)?.protection_domain();
    let queues = PeeredQueues::new(context, &domain, 1)?;
    let bound = Duration::from_millis(2);
    // Codes, and behind them the time.
    let memory = context.alloc(32)?;
    memory.copy_from_host(0, &77_i32.to_ne_bytes().repeat(8))?;
    let full = FullQueueArgs {
        queue: queues.views.ptr(),
        codes: memory.ptr(),
        took_ns: memory.ptr() + 24,
        bound_ns: bound.as_nanos() as u64,
    };
    measured.launch(&stream, c"gpu_check_full", (1, 32), &full)?;
    stream.synchronize(Some(SOON))?;
    let mut bytes = [0; 32];
    memory.copy_to_host(0, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<4>();
    let codes: Vec<i32> = words[..6]
        .iter()
        .map(|it| i32::from_ne_bytes(*it))
        .collect();
    ensure!(
        codes == [0, EFULL, EFULL, EFULL, 0, 0],
        "a full queue: codes {codes:?}"
    );
    let (longs, _) = bytes.as_chunks::<8>();
    let took = Duration::from_nanos(u64::from_ne_bytes(longs[3]));
    // The clock of a GPU steps by up to a microsecond; processors that stand for one are busy.
    ensure!(
        took + Duration::from_micros(2) >= bound && took < Duration::from_secs(5),
        "a bound of {bound:?} took {took:?}"
    );
    Ok((took.as_secs_f64() - bound.as_secs_f64()) * 1e6)
}

fn dead_peer(context: &CudaContext, measured: &Kernels, device: &str) -> Result<f64> {
    const BLOCKS: u32 = 4;
    let stream = CudaStream::new(context, "dead peer")?;
    let domain = Device::open(device)?.protection_domain();
    let region = Region::alloc(&domain, 4096, Access::ALL)?;
    let mut queues = PeeredQueues::new(context, &domain, 1)?;
    let (local_addr, lkey) = queues.queues[0].local(&region.slice(0, 4096)?)?;
    let codes = context.alloc(4 * u64::from(BLOCKS))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(BLOCKS as usize))?;
    drop(queues.ends[0].1.take());
    let puts = PutArgs {
        queues: queues.views.ptr(),
        codes: codes.ptr(),
        local_addr,
        remote_addr: region.remote().addr,
        lkey,
        rkey: region.remote().rkey,
        queue_count: 1,
        puts: 1,
        adds: 1,
        reserved: 0,
    };
    let start = Instant::now();
    measured.launch(&stream, c"gpu_check_put", (BLOCKS, 1), &puts)?;
    stream.synchronize(Some(SOON))?;
    let took = start.elapsed();
    let mut found = [0; 4 * BLOCKS as usize];
    codes.copy_to_host(0, &mut found)?;
    let (found, _) = found.as_chunks::<4>();
    let codes: Vec<i32> = found.iter().map(|it| i32::from_ne_bytes(*it)).collect();
    ensure!(
        codes.iter().all(|code| *code == EWORK),
        "a dead peer: codes {codes:?}"
    );
    ensure!(
        queues.queues[0].failure().is_some(),
        "a dead peer: the host knows of no failure"
    );
    Ok(took.as_secs_f64() * 1e6)
}
