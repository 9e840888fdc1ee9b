//! What the documentation leaves open, found out on the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use cudarc::driver::sys::{self, CUstreamWaitValue_flags as Flags};
use doorbell::DeviceBuffer;
use serde_json::{Value, json};

use super::gpu::{
    Gpu, IOMEMORY, PORTABLE, Page, SOON, check, drained, new_stream, queue, wait32, write32,
    write64,
};

/// What the device is.
pub fn device() -> Result<Value> {
    let gpu = Gpu::new()?;
    let (major, minor) = gpu.context.driver_version();
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Ok(json!({
        "name": gpu.context.device_name(),
        "cuda": format!("{major}.{minor}"),
        "module": module.lines().next().unwrap_or(""),
        "capabilities": format!("{:?}", gpu.context.capabilities()),
    }))
}

/// Memory operations on registered memory, of each kind of mapping.
pub fn mappings() -> Result<Value> {
    let gpu = Gpu::new()?;
    let mut found = serde_json::Map::new();
    for (name, flags, memfd) in [
        ("anonymous", PORTABLE, false),
        ("memfd", PORTABLE, true),
        ("memfd as IOMEMORY", PORTABLE | IOMEMORY, true),
        ("anonymous as IOMEMORY", PORTABLE | IOMEMORY, false),
    ] {
        let tried = Page::new(flags, memfd).and_then(|page| {
            gpu.queue(&mut [write32(page.gpu + 64, 7), write64(page.gpu + 128, 9 << 40)])?;
            ensure!(drained(gpu.stream, SOON), "the stream did not end");
            ensure!(
                page.word(64).load(Ordering::Acquire) == 7,
                "32 bits are not there"
            );
            ensure!(
                page.long(128).load(Ordering::Acquire) == 9 << 40,
                "64 bits are not there"
            );
            Ok(page.gpu == page.host as u64)
        });
        let said = match tried {
            Ok(same) => json!({"memops": "work", "same address": same}),
            // Ordinary memory is what everything lies in; the rest is good to know.
            Err(error) if name == "anonymous" => return Err(error),
            Err(error) => json!({"memops": format!("{error:#}")}),
        };
        found.insert(name.into(), said);
    }
    Ok(found.into())
}

/// Each condition holds the stream, and a store of the host lets it go.
pub fn conditions() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let owner = 1_u32 << 24;
    let cases = [
        ("GEQ", Flags::CU_STREAM_WAIT_VALUE_GEQ, 4, 5, 5),
        (
            "GEQ over the wrap",
            Flags::CU_STREAM_WAIT_VALUE_GEQ,
            u32::MAX,
            1,
            2,
        ),
        ("EQ", Flags::CU_STREAM_WAIT_VALUE_EQ, 4, 5, 5),
        ("AND", Flags::CU_STREAM_WAIT_VALUE_AND, 0, owner, owner),
        (
            "NOR",
            Flags::CU_STREAM_WAIT_VALUE_NOR,
            0xf100_0000,
            !owner,
            0,
        ),
    ];
    let mut found = serde_json::Map::new();
    for (name, condition, before, operand, after) in cases {
        let word = page.word(0);
        word.store(before, Ordering::SeqCst);
        if name == "NOR" && !gpu.context.capabilities().nor {
            found.insert(name.into(), json!("the device has none"));
            continue;
        }
        gpu.queue(&mut [wait32(page.gpu, operand, condition)])?;
        std::thread::sleep(Duration::from_millis(5));
        ensure!(!drained(gpu.stream, Duration::ZERO), "{name}: did not wait");
        let start = Instant::now();
        word.store(after, Ordering::SeqCst);
        ensure!(drained(gpu.stream, SOON), "{name}: was not let go");
        found.insert(
            name.into(),
            json!({"let go after us": start.elapsed().as_secs_f64() * 1e6}),
        );
    }
    Ok(found.into())
}

/// A 32-bit store and then a 64-bit one: a CPU that sees the second never misses the first, and never sees half of it.
pub fn order(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let pairs = if short { 2000 } else { 200_000_u32 };
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let watcher = std::thread::spawn(move || {
        let (record, register) = (page.word(128), page.long(2048));
        let (mut last, mut late, mut torn, mut seen) = (0_u64, 0_u64, 0_u64, 0_u64);
        while last as u32 != pairs && !stop.load(Ordering::Relaxed) {
            let now = register.load(Ordering::Acquire);
            if now == last {
                continue;
            }
            let recorded = record.load(Ordering::Acquire);
            torn += u64::from((now >> 32) as u32 != now as u32);
            late += u64::from((recorded.wrapping_sub(now as u32) as i32) < 0);
            seen += 1;
            last = now;
        }
        (seen, late, torn)
    });
    let mut queued = Ok(());
    for first in (1..=pairs).step_by(100) {
        let mut ops: Vec<_> = (first..first + 100)
            .flat_map(|i| {
                let both = u64::from(i) << 32 | u64::from(i);
                [write32(page.gpu + 128, i), write64(page.gpu + 2048, both)]
            })
            .collect();
        queued = gpu.queue(&mut ops);
        if queued.is_err() {
            break;
        }
    }
    let ended = drained(gpu.stream, SOON);
    std::thread::sleep(Duration::from_millis(10));
    over.store(true, Ordering::Relaxed);
    let Ok((seen, late, torn)) = watcher.join() else {
        bail!("the watcher panicked");
    };
    queued?;
    ensure!(ended, "the stream did not end");
    ensure!(
        late == 0,
        "{late} of {seen} seen before what was stored first"
    );
    ensure!(torn == 0, "{torn} of {seen} seen torn");
    Ok(json!({"pairs": pairs, "seen by the CPU": seen, "second before first": late, "torn": torn}))
}

/// Whether calls wait for a stream that stands in a wait, and whether other streams go on meanwhile.
pub fn blocked() -> Result<Value> {
    let gpu = Gpu::new()?;
    let gate = Page::new(PORTABLE, false)?;
    let mut found = serde_json::Map::new();
    let other = new_stream()?;
    let mut closed = 0;
    let mut close = || -> Result<u32> {
        closed += 1;
        gpu.queue(&mut [wait32(gate.gpu, closed, Flags::CU_STREAM_WAIT_VALUE_GEQ)])?;
        Ok(closed)
    };
    let open = |number: u32| gate.word(0).store(number, Ordering::Release);

    let number = close()?;
    queue(other, &mut [write32(gate.gpu + 256, 3)])?;
    let goes_on = drained(other, Duration::from_secs(2));
    open(number);
    ensure!(
        drained(gpu.stream, SOON) && drained(other, SOON),
        "the streams did not end"
    );
    found.insert(
        "another stream goes on while one waits".into(),
        goes_on.into(),
    );

    let spare = Page::new(PORTABLE, false)?;
    let (host, context) = (spare.host as usize, gpu.context.clone());
    let buffer = gpu.context.alloc(1 << 20)?;
    type Call = Box<dyn FnOnce() -> Result<()> + Send>;
    let calls: [(&str, Call); 3] = [
        ("cuMemHostUnregister waits for a stream that waits", {
            Box::new(move || {
                // SAFETY: registered above, and not used after this.
                let result = unsafe { sys::cuMemHostUnregister(host as *mut _) };
                check("cuMemHostUnregister", result)
            })
        }),
        ("cuMemFree waits for a stream that waits", {
            let buffer: DeviceBuffer = buffer;
            Box::new(move || {
                drop(buffer);
                Ok(())
            })
        }),
        (
            "cuMemHostRegister waits for a stream that waits",
            Box::new(|| Page::new(PORTABLE, false).map(drop)),
        ),
    ];
    for (name, call) in calls {
        let number = close()?;
        let context = context.clone();
        let thread = std::thread::spawn(move || -> Result<Duration> {
            // SAFETY: a context that lives as long as the process.
            check("cuCtxSetCurrent", unsafe {
                sys::cuCtxSetCurrent(context.raw())
            })?;
            let start = Instant::now();
            call()?;
            Ok(start.elapsed())
        });
        let start = Instant::now();
        while !thread.is_finished() && start.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waited = !thread.is_finished();
        open(number);
        let Ok(took) = thread.join() else {
            bail!("{name}: panicked");
        };
        let took = took?.as_secs_f64() * 1e6;
        ensure!(drained(gpu.stream, SOON), "the stream did not end");
        found.insert(name.into(), json!({"waits": waited, "us": took}));
    }
    Ok(found.into())
}

/// How many operations a call takes.
pub fn batches() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let mut found = serde_json::Map::new();
    for count in [1, 64, 128, 193, 255, 256, 257, 512] {
        let mut ops: Vec<_> = (0..count).map(|i| write32(page.gpu + 64, i)).collect();
        let mut samples = Vec::new();
        let mut refused = None;
        for _ in 0..21 {
            let start = Instant::now();
            if let Err(error) = gpu.queue(&mut ops) {
                refused = Some(format!("{error:#}"));
                break;
            }
            samples.push(start.elapsed().as_secs_f64() * 1e6);
            ensure!(drained(gpu.stream, SOON), "the stream did not end");
        }
        let said = match refused {
            Some(error) if count <= 255 => bail!("{count} operations: {error}"),
            Some(error) => json!(error),
            None => json!({"call us": super::gpu::median(samples)?}),
        };
        found.insert(count.to_string(), said);
    }
    Ok(found.into())
}

/// A node of memory operations is patched before each launch, and each launch stores its own value.
pub fn graphs() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let mut op = write32(page.gpu + 1024, 1);
    let mut params = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: gpu.context.raw(),
        count: 1,
        paramArray: &mut op,
        flags: 0,
    };
    let (mut graph, mut node, mut exec) = (
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    );
    // SAFETY: each call writes one handle; the parameters are copied.
    unsafe {
        check("cuGraphCreate", sys::cuGraphCreate(&mut graph, 0))?;
        check(
            "cuGraphAddBatchMemOpNode",
            sys::cuGraphAddBatchMemOpNode(&mut node, graph, std::ptr::null(), 0, &params),
        )?;
        check(
            "cuGraphInstantiateWithFlags",
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0),
        )?;
    }
    let (mut patches, mut launches) = (Vec::new(), Vec::new());
    for value in 1..=200 {
        let mut op = write32(page.gpu + 1024, value);
        params.paramArray = &mut op;
        let start = Instant::now();
        // SAFETY: handles made above; the parameters are copied.
        check("cuGraphExecBatchMemOpNodeSetParams", unsafe {
            sys::cuGraphExecBatchMemOpNodeSetParams(exec, node, &params)
        })?;
        patches.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        // SAFETY: as above.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(exec, gpu.stream)
        })?;
        launches.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(drained(gpu.stream, SOON), "the launch did not end");
        let stored = page.word(1024).load(Ordering::Acquire);
        ensure!(stored == value, "launch {value} stored {stored}");
    }
    Ok(
        json!({"patched launches": 200, "patch us": super::gpu::median(patches)?, "launch us": super::gpu::median(launches)?}),
    )
}
