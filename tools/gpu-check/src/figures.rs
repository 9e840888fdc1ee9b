//! The figures, each with its limit measured in the same process.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use cudarc::driver::sys::CUstreamWaitValue_flags as Flags;
use doorbell::{
    Access, Condition, CudaStream, Device, Endpoint, EndpointConfig, Executor, GraphBuilder,
    ProtectionDomain, QueueKind, Region, RemoteSlice, TimingEvent, Work, stream_post_all,
    stream_wait_value32,
};
use serde_json::{Value, json};

use super::gpu::{Gpu, PORTABLE, Page, SOON, drained, echo, median, wait32, write32, write64};

/// What `check` judges: a value, how it is to compare, and with what.
pub fn figure(name: &str, value: f64, at_most: bool, limit: f64, more: &Value) -> Value {
    let met = if at_most {
        value <= limit
    } else {
        value >= limit
    };
    json!({"figure": name, "value": value, "is to be": if at_most { "at most" } else { "at least" }, "limit": limit, "met": met, "measured": more})
}

/// Endpoints of one device, connected, with memory.
struct EndpointPair {
    a: Endpoint,
    b: Endpoint,
    region: Region,
    _domain: ProtectionDomain,
}

const DEPTH: u32 = 512;

impl EndpointPair {
    fn new() -> Result<EndpointPair> {
        let domain = Device::open("softcx")?.protection_domain();
        let config = EndpointConfig::default()
            .send_depth(DEPTH)
            .recv_depth(DEPTH);
        let mut a = Endpoint::new(&domain, &config)?;
        let mut b = Endpoint::new(&domain, &config)?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let region = Region::alloc(&domain, 8192, Access::ALL)?;
        let _domain = domain;
        Ok(EndpointPair {
            a,
            b,
            region,
            _domain,
        })
    }
}

/// A queued 8-byte send and its wait, against the bare round trip: store of the GPU, thread of the host, store of the host, wait of the GPU.
pub fn round_trip(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let stream = CudaStream::new(&gpu.context, "round trip")?;
    let (start, end) = (
        TimingEvent::new(&gpu.context)?,
        TimingEvent::new(&gpu.context)?,
    );
    let (pairs, rounds) = (64_u32, if short { 3 } else { 31 });
    let gate = Condition::GreaterOrEqual;
    let mut pair = EndpointPair::new()?;
    pair.region.store_u32(4096, 0)?;
    let (mut bare, mut queued) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        // The stream stands while it is filled, so that the cost of queueing is no part of this.
        stream_wait_value32(&stream, &pair.region, 4096, gate(2 * round - 1), Some(SOON))?;
        start.record(&stream)?;
        let first = (round - 1) * pairs + 1;
        let mut ops: Vec<_> = (first..first + pairs)
            .flat_map(|number| {
                let flag = Flags::CU_STREAM_WAIT_VALUE_GEQ;
                [
                    write32(page.gpu + 256, number),
                    wait32(page.gpu + 512, number, flag),
                ]
            })
            .collect();
        super::gpu::queue(stream.raw(), &mut ops)?;
        end.record(&stream)?;
        // What it finds first is the last value of the round before, whose answer is there already.
        let answers = echo(page, 256, 512, first + pairs - 1);
        pair.region.store_u32(4096, 2 * round - 1)?;
        end.synchronize()?;
        ensure!(answers.join().unwrap_or(false), "the echo ended early");
        bare.push(end.since(&start)?.as_secs_f64() * 1e6 / f64::from(pairs));

        for _ in 0..pairs {
            let into = [pair.region.slice(1024, 8)?];
            pair.b.post_recv(0, &into)?;
        }
        stream_wait_value32(&stream, &pair.region, 4096, gate(2 * round), Some(SOON))?;
        start.record(&stream)?;
        for _ in 0..pairs {
            let data = [pair.region.slice(0, 8)?];
            pair.a.stream_queue_send(&stream, &Work::send(&data))?;
            pair.a.stream_wait_cq(&stream, QueueKind::Send)?;
        }
        end.record(&stream)?;
        pair.region.store_u32(4096, 2 * round)?;
        stream.synchronize(Some(SOON))?;
        queued.push(end.since(&start)?.as_secs_f64() * 1e6 / f64::from(pairs));
        while pair.b.poll_cq(QueueKind::Recv)?.is_some() {}
    }
    let (bare, queued) = (median(bare)?, median(queued)?);
    let more = json!({"bare round trip us": bare, "queued send and wait us": queued});
    Ok(figure(
        "queued 8-byte send and wait over softcx, times the bare round trip",
        queued / bare,
        true,
        1.5,
        &more,
    ))
}

/// Queueing 64 sends, against the driver's call with the same operations.
pub fn queue_cost(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let stream = CudaStream::new(&gpu.context, "queue")?;
    let mut pair = EndpointPair::new()?;
    let rounds = if short { 5 } else { 201 };
    let (mut bare, mut post, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        // Record, register, count: of 64 sends, and the stream's own count.
        let mut ops: Vec<_> = (0..64)
            .flat_map(|i| {
                [
                    write32(page.gpu + 64, i),
                    write64(page.gpu + 2048, u64::from(i)),
                    write32(page.gpu + 128, i),
                ]
            })
            .chain([write32(page.gpu + 192, round)])
            .collect();
        let start = Instant::now();
        super::gpu::queue(stream.raw(), &mut ops)?;
        bare.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(drained(stream.raw(), SOON), "the stream did not end");
        let start = Instant::now();
        let mut batch = Vec::with_capacity(64);
        for at in 0..64 {
            let work = Work::nop().signaled(at == 63);
            batch.push(pair.a.prepare_send(&work)?);
        }
        let prepared = Instant::now();
        let tickets = stream_post_all(&stream, &mut batch)?;
        post.push(prepared.elapsed().as_secs_f64() * 1e6);
        whole.push(start.elapsed().as_secs_f64() * 1e6);
        pair.a.wait_cq(QueueKind::Send, Some(SOON))?;
        stream.synchronize(Some(SOON))?;
        drop(tickets);
    }
    let (bare, post, whole) = (median(bare)?, median(post)?, median(whole)?);
    let more = json!({"bare call of 193 operations us": bare, "stream_post_all of 64 us": post, "with preparing them us": whole});
    Ok(figure(
        "queueing 64 prepared sends, times the bare driver call of the same operations",
        post / bare,
        true,
        1.2,
        &more,
    ))
}

/// How many calls of the driver 64 sends take.
pub fn driver_calls() -> Result<Value> {
    let gpu = Gpu::new()?;
    let stream = CudaStream::new(&gpu.context, "calls")?;
    let mut pair = EndpointPair::new()?;
    let mut batch = Vec::new();
    for _ in 0..64 {
        batch.push(pair.a.prepare_send(&Work::nop())?);
    }
    let before = stream.driver_calls();
    drop(stream_post_all(&stream, &mut batch)?);
    let calls = stream.driver_calls() - before;
    for _ in 0..64 {
        pair.a.wait_cq(QueueKind::Send, Some(SOON))?;
    }
    Ok(figure(
        "driver calls of 64 sends",
        calls as f64,
        true,
        2.0,
        &json!({}),
    ))
}

/// Replay of a graph of 64 sends, against queueing them one by one: CPU time an operation.
pub fn graph_replay(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let stream = CudaStream::new(&gpu.context, "graph")?;
    let mut pair = EndpointPair::new()?;
    let rounds = if short { 3 } else { 101 };
    let remote = pair.region.remote();
    let data_at = |at: u64| (at * 8, remote.addr + 4096 + at * 8);
    let mut graph = GraphBuilder::capture(&stream)?;
    for at in 0..64 {
        let (from, to) = data_at(at);
        let data = [pair.region.slice(from, 8)?];
        let work = Work::write(&data, RemoteSlice::at(to, remote.rkey)).signaled(at == 63);
        graph.send(&mut pair.a, &work)?;
    }
    graph.wait_cq(&mut pair.a, QueueKind::Send)?;
    let mut graph = graph.instantiate()?;
    let (mut replay, mut single) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let start = Instant::now();
        graph.launch(&stream, &mut [&mut pair.a, &mut pair.b])?;
        replay.push(start.elapsed().as_secs_f64() * 1e6 / 64.0);
        stream.synchronize(Some(SOON))?;
        let start = Instant::now();
        for at in 0..64 {
            let (from, to) = data_at(at);
            let data = [pair.region.slice(from, 8)?];
            let work = Work::write(&data, RemoteSlice::at(to, remote.rkey)).signaled(at == 63);
            pair.a.stream_queue_send(&stream, &work)?;
        }
        pair.a.stream_wait_cq(&stream, QueueKind::Send)?;
        single.push(start.elapsed().as_secs_f64() * 1e6 / 64.0);
        stream.synchronize(Some(SOON))?;
    }
    let (replay, single) = (median(replay)?, median(single)?);
    let more = json!({"replay us an operation": replay, "one by one us an operation": single});
    Ok(figure(
        "graph replay of 64 sends, times queueing them one by one",
        replay / single,
        true,
        0.2,
        &more,
    ))
}

/// The two loops at a kernel of 10 us, by `doorbell bench`.
pub fn loops(command: &Path, short: bool) -> Result<Value> {
    let iterations = if short { "400" } else { "20000" };
    let output = Command::new(command)
        .args([
            "bench",
            "loop",
            "--stream",
            "cuda",
            "--sizes",
            "8",
            "--kernel-us",
            "10",
        ])
        .args(["--iterations", iterations, "--json"])
        .output()
        .with_context(|| command.display().to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let row = |which: &str| {
        rows.iter()
            .find(|row| row["loop"] == which)
            .context("no such row")
    };
    let (sync, async_) = (row("sync")?, row("async")?);
    let us = |row: &Value| row["time_p50_us"].as_f64().context("time_p50_us");
    let cpu = |row: &Value| row["app_cpu_us"].as_f64().context("app_cpu_us");
    let time = figure(
        "sync loop, times the async loop, at a kernel of 10 us",
        us(sync)? / us(async_)?,
        false,
        1.3,
        &json!({}),
    );
    let share = figure(
        "CPU of the application in the sync loop, times the async loop",
        cpu(sync)? / cpu(async_)?,
        false,
        20.0,
        &json!({"rows": rows}),
    );
    Ok(json!([time, share]))
}

/// Waits that would never end are released, and the context and its streams keep working.
pub fn watchdog() -> Result<Value> {
    let gpu = Gpu::new()?;
    let stream = CudaStream::new(&gpu.context, "watchdog")?;
    let pair = EndpointPair::new()?;
    pair.region.store_u32(0, 0)?;
    let deadline = std::time::Duration::from_millis(50);
    let mut late = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        let condition = Condition::GreaterOrEqual(1);
        let ticket = stream_wait_value32(&stream, &pair.region, 0, condition, Some(deadline))?;
        ensure!(
            stream.synchronize(Some(SOON)).is_err(),
            "the deadline was not reported"
        );
        late.push((start.elapsed() - deadline).as_secs_f64() * 1e6);
        ensure!(
            stream.take_fault().is_some(),
            "the stream has no fault to be taken"
        );
        ensure!(ticket.check().is_err(), "the ticket knows of no deadline");
        ensure!(
            pair.region.load_u32(0)? == 0,
            "the word did not get its value back"
        );
    }
    let page = Page::new(PORTABLE, false)?;
    super::gpu::queue(stream.raw(), &mut [write32(page.gpu, 5)])?;
    ensure!(drained(stream.raw(), SOON), "the stream did not go on");
    ensure!(
        page.word(0).load(Ordering::Acquire) == 5,
        "the stream did not go on"
    );
    Ok(json!({"waits let go": 20, "later than the deadline us": median(late)?}))
}
